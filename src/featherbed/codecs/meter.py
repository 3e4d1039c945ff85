"""The progress of a compression: elapsed time against the estimated time of the remaining work."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from featherbed.codecs.codec import ProgressCallback

# initial estimates of the pace: seconds, and the work done in them (two busy cores)
FITTING, MEASURING = (1.0, 1e9), (0.5, 1e7)
ROUND = 1 / 25  # work of one round of refinement, relative to a fit
CODING = 1 / 20  # work of coding rows, relative to a fit of as many rows


class WorkMeter:
    """Reports the completed share of the time, which falls if work is slower than estimated.

    Work has several kinds, each with a pace of its own: fits by the name of their codec (in units
    of ``Codec.work``), and "measuring" (queries times rows).

    >>> clock = iter([0.0, 4.0, 4.0, 4.0]).__next__
    >>> meter = WorkMeter(lambda step, share: print(step, round(share, 2)), 0.0, clock)
    >>> meter.plan({"pq": 8e9})
    >>> with meter.step("one", "pq", 4e9):
    ...     pass
    one 0.0
    >>> with meter.step("two", "pq", 4e9):
    ...     pass
    two 0.5
    """

    def __init__(
        self,
        progress: ProgressCallback,
        started: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.progress, self.started, self.clock = progress, started, clock
        self.done = defaultdict(lambda: FITTING, measuring=MEASURING)
        self.left: dict[str, float] = {}
        self.description, self.reports = "", False

    def plan(self, left: dict[str, float]) -> None:
        """Set the remaining work of each kind."""
        self.left = left

    @contextmanager
    def step(
        self, description: str, kind: str, work: float, reports: bool = False
    ) -> Iterator[None]:
        """Measure a step of ``work``; with ``reports`` the step reports its own share."""
        self.step_started = started = self.clock()
        self.kind, self.work = kind, work
        self.description, self.reports = description, reports
        self._report(0.0, started)
        yield
        self.reports = False
        seconds, known = self.done[kind]
        self.done[kind] = (seconds + self.clock() - started, known + work)
        self.left[kind] = max(0.0, self.left.get(kind, 0.0) - work)

    def report_share(self, _description: str, share: float) -> None:
        """Take the completed share of the current step."""
        if self.reports:
            self._report(share, self.clock())

    def _report(self, share: float, now: float) -> None:
        left = 0.0
        for kind, work in self.left.items():
            seconds, known = self.done[kind]
            if kind == self.kind:
                seconds, known = seconds + now - self.step_started, known + share * self.work
                work -= share * self.work
            left += max(0.0, work) * seconds / known
        elapsed = now - self.started
        share = elapsed / (elapsed + left) if self.left and elapsed > 0 else 0.0
        self.progress(self.description, share)  # 0 without a plan
