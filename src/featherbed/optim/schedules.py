"""Schedules of a penalty's weight, or of how often ids are shared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from featherbed.errors import ArgumentError
from featherbed.optim.penalties import Penalty
from featherbed.sharing import SSE


class Schedule:
    """lam(t) of penalties, or p(t) of ``fb.SSE``, linear between the given points {step: value} and constant outside them.

    Optimizers read ``penalty.lam`` at every step, so the schedule reaches them: call ``step`` after each of theirs. With n
    steps an epoch, ``{0: 0, 5 * n: 0, 50 * n: 2e-6}`` is constant for 5 epochs and then rises to the end.

    >>> import featherbed as fb
    >>> penalty = fb.NonNegativeL1(0.0)
    >>> schedule = Schedule(penalty, {2: 0.0, 4: 1.0})
    >>> [(schedule.step(), penalty.lam)[1] for _ in range(5)]
    [0.0, 0.0, 0.5, 1.0, 1.0]
    """

    def __init__(
        self, penalties: Penalty | SSE | Iterable[Penalty | SSE], points: Mapping[int, float]
    ) -> None:
        given = [penalties] if isinstance(penalties, Penalty | SSE) else penalties
        self.penalties = list(given) if isinstance(given, Iterable) else []
        if not self.penalties or not all(
            isinstance(penalty, Penalty | SSE) for penalty in self.penalties
        ):
            raise ArgumentError(
                f"{penalties!r}: give a penalty, such as fb.NonNegativeL1(0.0), an fb.SSE, or several"
            )
        if not isinstance(points, Mapping) or not points:
            raise ArgumentError(
                f"points={points!r}: give {{step: value, ...}} with at least one point"
            )
        good = all(
            isinstance(t, int | np.integer) and not isinstance(t, bool) and t >= 0 for t in points
        )
        if not good or not all(
            isinstance(w, Real) and not isinstance(w, bool) and 0 <= w < np.inf
            for w in points.values()
        ):
            raise ArgumentError(
                f"points={dict(points)!r}: steps are whole numbers from 0, weights finite numbers from 0"
            )
        if any(isinstance(penalty, SSE) for penalty in self.penalties) and max(points.values()) > 1:
            raise ArgumentError(
                f"points={dict(points)!r}: the p of fb.SSE is a probability, from 0 to 1"
            )
        self.points = sorted(points), [points[t] for t in sorted(points)]
        self.steps = 0
        self._set()

    def _set(self) -> None:
        value = float(np.interp(self.steps, *self.points))
        for penalty in self.penalties:
            if isinstance(penalty, SSE):
                penalty.p = value
            else:
                penalty.lam = value

    def step(self) -> None:
        """Set the values for the next step of the optimizer."""
        self.steps += 1
        self._set()

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule stands."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.steps = int(state["steps"])
        self._set()
