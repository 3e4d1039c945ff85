"""Progress of long work on stderr: a bar on a terminal, elsewhere a line every 15 seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

INTERVAL = 15.0  # seconds between two lines of a log
POLL = 1.0  # polling interval of the timer thread, in seconds

Clock = Callable[[], float]
ReportShare = Callable[[str, float], None]  # description, share of the work that is done


class Progress:
    """Progress of one task.

    Args:
        description: the work, in a word or two.
        total: number of steps; None while it is not known.
        completed: steps done before, by the run that is resumed: they do not enter the time left.
        percent: show percentages only, where steps mean nothing to a reader (bytes, shares).
        clock: returns seconds.

    >>> now = iter([0.0, 20.0]).__next__
    >>> progress = Progress("training", 10, clock=now)
    >>> progress.update(advance=2, note="validation 0.71")
    >>> progress.line(progress.clock())
    'training: 2 of 10 (20 %), validation 0.71, 0:01:20 left'
    """

    def __init__(
        self,
        description: str,
        total: float | None = None,
        *,
        completed: float = 0.0,
        percent: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self.description, self.total, self.completed = description, total, completed
        self.percent, self.clock, self.note = percent, clock, ""
        self.initial, self.started = completed, clock()
        self.expected_end: float | None = None
        self.changed: Callable[[], None] = lambda: None

    def update(
        self,
        completed: float | None = None,
        *,
        advance: float = 0.0,
        total: float | None = None,
        description: str | None = None,
        note: str | None = None,
        seconds_left: float | None = None,
    ) -> None:
        """Update the progress; arguments that are None leave their values unchanged.

        ``seconds_left`` replaces the estimate from the average speed by the caller's own estimate.
        """
        self.completed = (self.completed if completed is None else completed) + advance
        self.total = self.total if total is None else total
        self.description = self.description if description is None else description
        self.note = self.note if note is None else note
        self.expected_end = None if seconds_left is None else self.clock() + seconds_left
        self.changed()

    @property
    def share(self) -> float | None:
        """The share of the work that is done, None while it is not known."""
        return min(1.0, self.completed / self.total) if self.total else None

    def time_left(self, now: float) -> float | None:
        """Return the estimated seconds left (caller's estimate or average speed); None if
        unknown."""
        if self.expected_end is not None:
            return max(0.0, self.expected_end - now)
        done = self.completed - self.initial
        if self.total is None or done <= 0:
            return None
        return max(0.0, (now - self.started) * (self.total - self.completed) / done)

    def amount(self) -> str:
        """Return how much is done: ``2 of 10 (20 %)``, ``20 %``, or nothing if unknown."""
        if self.share is None:
            return ""
        percent = f"{100 * self.share:.0f} %"
        return (
            percent
            if self.percent or self.total is None
            else f"{self.completed:,.0f} of {self.total:,.0f} ({percent})"
        )

    def line(self, now: float) -> str:
        """Return one log line: description, completed steps, estimated time left."""
        left = self.time_left(now)
        time_text = (
            f"{_duration(now - self.started)} so far" if left is None else f"{_duration(left)} left"
        )
        parts = [part for part in (self.amount(), self.note, time_text) if part]
        return f"{self.description}: {', '.join(parts)}"


class ProgressLog:
    """Writes one line about the current work every ``interval`` seconds.

    The interval runs on from one piece of work to the next: a hundred short ones give lines, too.

    >>> now = [0.0]
    >>> log = ProgressLog(sys.stdout, clock=lambda: now[0])
    >>> progress = Progress("reading", 100, percent=True, clock=lambda: now[0])
    >>> log.start(progress)
    >>> for now[0] in (10.0, 16.0, 20.0, 31.5):
    ...     progress.update(now[0])
    reading: 16 %, 0:01:24 left
    reading: 32 %, 0:01:08 left
    >>> log.stop()
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        interval: float = INTERVAL,
        clock: Clock = time.monotonic,
    ) -> None:
        self.stream, self.interval, self.clock = stream, interval, clock
        self.progress: Progress | None = None
        self._written = self._active = clock()
        self._lock = threading.Lock()

    def start(self, progress: Progress) -> None:
        """Report this piece of work from now on."""
        now = self.clock()
        if now - self._active > self.interval:  # nothing was running: the interval begins anew
            self._written = now
        self._active, self.progress = now, progress
        progress.changed = self.poll

    def poll(self) -> None:
        """Write a line if one is due."""
        with self._lock:
            now = self._active = self.clock()
            if self.progress is not None and now - self._written >= self.interval:
                self._written = now
                print(self.progress.line(now), file=self.stream or sys.stderr, flush=True)

    def stop(self) -> None:
        """Report no work any more."""
        with self._lock:
            self.progress, self._active = None, self.clock()


LOG = ProgressLog()  # the one of this process


@contextmanager
def show_progress(
    description: str,
    total: float | None = None,
    *,
    completed: float = 0.0,
    percent: bool = False,
    shown: bool = True,
    transient: bool = False,
) -> Iterator[Progress]:
    """Yield a ``Progress`` that is shown while the block runs, as a bar or as lines of a log.

    ``shown=False`` shows nothing; a ``transient`` bar disappears at the end of the block.

    >>> with show_progress("epochs", 3) as progress:
    ...     progress.update(advance=1, note="loss 0.5")
    >>> progress.amount()
    '1 of 3 (33 %)'
    """
    progress = Progress(description, total, completed=completed, percent=percent)
    console = Console(stderr=True)
    terminal = (console.is_terminal and not console.is_dumb_terminal) or console.is_jupyter
    display = _bar(progress, console, transient) if terminal else _log(progress)
    with display if shown else nullcontext():
        yield progress


@contextmanager
def show_share(description: str, *, shown: bool = True) -> Iterator[ReportShare]:
    """Yield a function of a description and the share that is done, by the time it should take.

    The bar only moves forward; the time left follows the share that was reported last.

    >>> with show_share("reading") as report:
    ...     report("comparing methods", 0.25)
    """
    with show_progress(description, 1.0, percent=True, shown=shown) as progress:

        def report(description: str, share: float) -> None:
            gone = progress.clock() - progress.started
            progress.update(
                max(progress.completed, share),
                description=description,
                seconds_left=gone * (1 - share) / share if share > 0 else None,
            )

        yield report


@contextmanager
def _log(progress: Progress) -> Iterator[None]:
    """Write log lines; a timer thread covers long steps that report no progress."""
    before, stopped = LOG.progress, threading.Event()

    def watch() -> None:
        while not stopped.wait(POLL):
            LOG.poll()

    thread = threading.Thread(target=watch, name="featherbed-progress", daemon=True)
    LOG.start(progress)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        LOG.stop()
        if before is not None:
            LOG.start(before)


@contextmanager
def _bar(progress: Progress, console: Console, transient: bool) -> Iterator[None]:
    bar = RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        _Column(lambda: progress.amount()),
        _Column(lambda: progress.note),
        TimeElapsedColumn(),
        _Column(lambda: _left(progress), "progress.remaining"),
        console=console,
        transient=transient,
    )
    with bar:
        task = bar.add_task(progress.description, total=progress.total)

        def changed() -> None:
            bar.update(
                task,
                total=progress.total,
                completed=progress.completed,
                description=progress.description,
            )

        changed()
        progress.changed = changed
        yield


class _Column(ProgressColumn):
    """A column whose text a function returns."""

    def __init__(self, text: Callable[[], str], style: str = "") -> None:
        super().__init__()
        self.text, self.style = text, style

    def render(self, task: Task) -> Text:  # noqa: ARG002 - the signature of rich
        """Return the text."""
        return Text(self.text(), style=self.style)


def _left(progress: Progress) -> str:
    left = progress.time_left(progress.clock())
    return "" if left is None else f"{_duration(left)} left"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
