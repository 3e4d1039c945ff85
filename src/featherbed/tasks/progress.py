"""Progress bars of training loops: what is done, at what loss, how long it still takes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def training_bar(shown: bool = True) -> Progress:
    """Return a progress display for epochs; on stderr, so that results can be piped."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not shown,
    )


def reading_bar(shown: bool = True) -> Progress:
    """Return a progress display for a file that is read; it goes away when that is done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not shown,
        transient=True,
    )


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Take the first Ctrl-C as a wish to end soon: the function given tells whether there was one; the second one interrupts.

    >>> with stoppable() as stopped:
    ...     stopped()
    False
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: Any) -> None:
        if asked.is_set() and callable(before):
            before(number, frame)
        asked.set()

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
