"""Worker processes with limits: run one function on many cases, survive crashes and hangs.

    for outcome in run_cases(range(1000), exercise, jobs=2, seconds=10, memory=2 << 30):
        if outcome.kind != "done":
            print(outcome.case, outcome.kind, outcome.detail)

``exercise`` is a function of one case at the top level of an importable module (or a
``functools.partial`` of one); cases and results are anything that can be pickled. A worker that
crashes or takes too long is replaced, and the other cases go on.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

WAITING = 4.0  # seconds of wall-clock time for each second of processor time a case may take
STARTING = 300.0  # seconds a worker may take to start and to import the module of ``exercise``


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case.

    ``kind`` is "done" (``result`` holds the value that ``exercise`` returned), "error" (it raised an
    exception), "crash" (the process died) or "hang" (it took too long and was killed). ``detail`` says
    more about the last three.
    """

    case: Any
    kind: str
    result: Any = None
    detail: str = ""


def run_cases(
    cases: Iterable[Any],
    exercise: Callable[[Any], Any],
    jobs: int = 2,
    seconds: float = 10.0,
    memory: int = 2 << 30,
) -> Iterator[Outcome]:
    """Yield the outcome of ``exercise(case)`` for every case, in the order in which they end.

    ``jobs`` worker processes take one case at a time. A case may take ``seconds`` of processor time
    (or ``WAITING`` times that of wall-clock time: others may need the cores); a worker may map
    ``memory`` bytes beyond those it maps when ``exercise`` has been imported.
    """
    left = iter(cases)
    team: list[_Worker] = []
    try:
        for case in _first(left, jobs):
            team.append(_Worker(exercise, memory))
            team[-1].give(case, seconds)
        while team:
            for number, worker in enumerate(team):
                outcome = worker.outcome()
                if outcome is None:
                    continue
                case = next(left, _NONE)
                broken = outcome.kind in ("crash", "hang")
                if broken or case is _NONE:
                    worker.stop()
                if case is not _NONE:
                    worker = team[number] = _Worker(exercise, memory) if broken else worker
                    worker.give(case, seconds)
                yield outcome
            team = [worker for worker in team if worker.busy]
            soonest = min((worker.deadline for worker in team), default=0.0)
            wait([worker.pipe for worker in team], max(0.0, soonest - time.monotonic()))
    finally:
        for worker in team:
            worker.stop()


_NONE = object()


def _first(left: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        case = next(left, _NONE)
        if case is _NONE:
            return
        yield case


class _Worker:
    """A process, the pipe to it, and the case it is busy with."""

    def __init__(self, exercise: Callable[[Any], Any], memory: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        handle, name = tempfile.mkstemp(prefix="fuzz-", suffix=".log")
        os.close(handle)
        self.log = Path(name)
        self.process = context.Process(
            target=_serve, args=(theirs, exercise, memory, name), daemon=True
        )
        self.process.start()
        theirs.close()
        self.case, self.busy, self.seconds = None, False, 0.0
        self.deadline = self.last = (
            0.0  # when to look at the processor time, when to wait no longer
        )
        if not self.pipe.poll(STARTING) or self.pipe.recv() != "ready":
            self.stop()
            raise RuntimeError(f"a worker did not start within {STARTING:.0f} seconds")

    def give(self, case: Any, seconds: float) -> None:
        self.case, self.busy, self.seconds = case, True, seconds
        self.used, now = self._processor_time(), time.monotonic()
        self.deadline, self.last = now + seconds, now + WAITING * seconds
        self.log.write_text("")
        with contextlib.suppress(OSError):  # a dead worker shows when its outcome is asked for
            self.pipe.send(case)

    def outcome(self) -> Outcome | None:
        """Return the outcome of the case, or None while the worker is still within its time."""
        if self.pipe.poll():
            self.busy = False
            try:
                kind, result, detail = self.pipe.recv()
            except (EOFError, ConnectionError):
                self.process.join(5)
                return Outcome(self.case, "crash", detail=self._cause())
            return Outcome(self.case, kind, result, detail)
        now, left = time.monotonic(), self.seconds - (self._processor_time() - self.used)
        if now < self.deadline:
            return None
        if now < self.last and left > 0:  # it waits for a core
            self.deadline = min(self.last, now + max(left, 0.1))
            return None
        self.busy = False
        return Outcome(self.case, "hang", detail="no outcome within the time limit")

    def _processor_time(self) -> float:
        """Return the processor time of the process in seconds; the clock where it is not known."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return time.monotonic()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _cause(self) -> str:
        code = self.process.exitcode
        name = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        trace = self.log.read_text().rpartition("Current thread")[2]
        lines = [line.strip() for line in trace.splitlines() if "File" in line]
        return f"{name} at {lines[0]}" if lines else name

    def stop(self) -> None:
        self.busy = False
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.log.unlink(missing_ok=True)


def _serve(pipe: Connection, exercise: Callable[[Any], Any], memory: int, log: str) -> None:
    """Run in the worker: take cases until the pipe is closed."""
    file = Path(log).open("a")  # noqa: SIM115 - it stays open as long as the process lives
    faulthandler.enable(file)
    _limit(memory)
    pipe.send("ready")
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("done", exercise(case), "")
        except Exception as error:
            answer = ("error", None, describe(error))
        pipe.send(answer)


def describe(error: BaseException) -> str:
    """Return an exception in one line, with the place that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" at {Path(frame.filename).name}:{frame.lineno}" for frame in place)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"


def _limit(memory: int) -> None:
    """Limit the address space of this process to its current size and ``memory`` bytes more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
