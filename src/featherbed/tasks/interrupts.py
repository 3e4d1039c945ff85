"""Ctrl-C as a request to stop after the current round, instead of an exception in its midst."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed; the second Ctrl-C interrupts at once.

    >>> with deferred_interrupt() as interrupted:
    ...     interrupted()
    False
    """
    request = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield request.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: Any) -> None:
        if request.is_set() and callable(before):
            before(number, frame)
        request.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield request.is_set
    finally:
        signal.signal(signal.SIGINT, before)
