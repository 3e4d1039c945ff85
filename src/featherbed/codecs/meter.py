"""How far a compression is: the seconds it took so far, against those the work left takes at the pace measured so far."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from featherbed.codecs.codec import Tell

# what is thought before anything is measured: seconds, and the work done in them (two busy cores)
FITTING, MEASURING = (1.0, 1e9), (0.5, 1e7)
ROUND = 1 / 25  # of the work of a fit: what one round of refinement takes
CODING = 1 / 20  # of the work of a fit of so many rows: what coding them takes


class Meter:
    """Tells the share of the whole that is done, gone / (gone + left): it may fall where work goes slower than thought.

    Work is of several kinds, each with a pace of its own: fits by the name of their method (as ``Codec.work`` counts), and
    "measuring" (queries times rows).

    >>> clock = iter([0.0, 4.0, 4.0, 4.0]).__next__
    >>> meter = Meter(lambda what, share: print(what, round(share, 2)), 0.0, clock)
    >>> meter.plan({"pq": 8e9})
    >>> with meter.step("one", "pq", 4e9):
    ...     pass
    one 0.0
    >>> with meter.step("two", "pq", 4e9):
    ...     pass
    two 0.5
    """

    def __init__(
        self, tell: Tell, began: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.tell, self.began, self.clock = tell, began, clock
        self.done = defaultdict(lambda: FITTING, measuring=MEASURING)
        self.left: dict[str, float] = {}
        self.what, self.listens = "", False

    def plan(self, left: dict[str, float]) -> None:
        """Say how much work of each kind is still to be done."""
        self.left = left

    @contextmanager
    def step(self, what: str, kind: str, work: float, listens: bool = False) -> Iterator[None]:
        """Do a piece of work; with ``listens`` it tells itself how far it is."""
        started = self.clock()
        self.kind, self.work, self.started = kind, work, started
        self.what, self.listens = what, listens
        self._tell(0.0, started)
        yield
        self.listens = False
        seconds, known = self.done[kind]
        self.done[kind] = (seconds + self.clock() - started, known + work)
        self.left[kind] = max(0.0, self.left.get(kind, 0.0) - work)

    def inside(self, _what: str, share: float) -> None:
        """Hear from a piece of work how far it is."""
        if self.listens:
            self._tell(share, self.clock())

    def _tell(self, share: float, now: float) -> None:
        left = 0.0
        for kind, work in self.left.items():
            seconds, known = self.done[kind]
            if kind == self.kind:
                seconds, known, work = (
                    seconds + now - self.started,
                    known + share * self.work,
                    work - share * self.work,
                )
            left += max(0.0, work) * seconds / known
        gone = now - self.began
        self.tell(
            self.what, gone / (gone + left) if self.left and gone > 0 else 0.0
        )  # without a plan nothing is known
