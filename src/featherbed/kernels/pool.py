"""Running jobs: alone, or shared with a crew of threads that is made when first needed and made anew after a fork."""

from __future__ import annotations

import contextlib
import ctypes
import os
from functools import cache
from threading import Lock, Semaphore, Thread, get_native_id
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError
from featherbed.kernels import crew

VARIABLE = "FEATHERBED_THREADS"
TURNS = 12_000  # how long a worker stays awake after a job, about half a millisecond: waking a thread costs 20 to 100 µs
_threads: int | None = None
_crew: Crew | None = None
_making = Lock()


class Crew:
    """A desk and the threads around it."""

    def __init__(self, workers: int) -> None:
        self.desk: NDArray[np.int64] = np.zeros(crew.WORDS, dtype=np.int64)
        self.wake = Semaphore(0)
        self.leading = Lock()
        self.cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self.leader_core = -1
        self.size, self.workers = workers, list[int]()  # their numbers, as the system has them
        self.held: object = None
        for number in range(workers):
            Thread(target=self._work, name=f"featherbed-{number}", daemon=True).start()

    def _work(self) -> None:
        self.workers.append(get_native_id())
        heard = 0
        while heard >= 0:
            heard = crew.serve(self.desk, heard, TURNS)
            if heard >= 0 and crew.may_sleep(self.desk, heard):
                self.wake.acquire()

    def _clear_the_leaders_core(self) -> None:
        """Keep workers off the core the leader runs on: schedulers like to wake a thread where its waker runs, and leave it."""
        core = _this_core()
        others = self.cores - {core}
        if core != self.leader_core and others:
            self.leader_core = core if len(self.workers) == self.size else -1
            for worker in self.workers:
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(worker, others)

    def run(self, job: int, block: NDArray[np.int64], count: int, grain: int, held: object) -> bool:
        """Run a job with everyone's help; alone if another thread is leading the crew already."""
        address = block.ctypes.data
        if not self.leading.acquire(blocking=False):
            return bool(crew.alone(job, address, count) == 1)
        try:
            if self.desk[
                crew.OPEN
            ]:  # an interrupt got in between once: nobody may still lean over that job
                crew.finish(self.desk)
            self.held = (
                block,
                held,
            )  # what the workers read lives at least as long as the desk is open
            self._clear_the_leaders_core()
            sleepers = crew.open_desk(self.desk, job, address, count, grain)
            try:
                if sleepers:
                    self.wake.release(sleepers)
            finally:
                good = crew.finish(self.desk)
            return bool(good == 1)
        finally:
            self.leading.release()

    def retire(self, workers: int) -> None:
        """Let the threads go."""
        with self.leading:
            crew.dismiss(self.desk)
            self.wake.release(workers)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def _this_core() -> int:
    try:
        return int(_libc().sched_getcpu())
    except (AttributeError, OSError):  # not Linux
        return -1


def threads() -> int:
    """Return how many threads look-ups use: ``$FEATHERBED_THREADS``, else every core this process may run on."""
    global _threads
    if _threads is None:
        given = os.environ.get(VARIABLE, "")
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        if given and (not given.isdecimal() or int(given) < 1):
            raise ArgumentError(f"{VARIABLE}={given!r}: give a number of threads, at least 1")
        _threads = int(given) if given else cores
    return _threads


def set_threads(count: int | None) -> None:
    """Use ``count`` threads from now on; None returns to the default."""
    global _threads, _crew
    old, workers = _crew, threads() - 1
    _threads, _crew = count, None
    if old is not None:
        old.retire(workers)


def _forget() -> None:
    """In a forked child the threads do not exist: start without a crew."""
    global _crew, _making
    _crew, _making = None, Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def run(job: int, block: NDArray[np.int64], count: int, grain: int, held: object = None) -> bool:
    """Run a compiled job over ``count`` rows, in pieces of ``grain`` rows; return whether every piece went well.

    ``block`` holds the job's arguments (see ``featherbed.kernels.lookup``), ``held`` keeps alive what they point to.
    """
    global _crew
    if count < 2 * grain or threads() == 1:
        return bool(crew.alone(job, block.ctypes.data, count) == 1)
    crew_ = _crew
    if crew_ is None:
        with _making:
            crew_ = _crew = _crew or Crew(threads() - 1)
    return crew_.run(job, block, count, grain, held)
