"""Schedules of a penalty's weight or of the replacement probability of ``fb.SSE``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

from featherbed.checks import is_integer, is_number
from featherbed.errors import ArgumentError


class Scheduled(Protocol):
    """An object with an attribute, named by ``scheduled``, that may change between steps."""

    scheduled: ClassVar[str]


class Schedule:
    """lam(t) of penalties or p(t) of ``fb.SSE``: piecewise linear between points {step: value}.

    Constant outside of the points. Optimizers read ``penalty.lam`` at every step; call ``step``
    after each of theirs. With n steps per epoch, ``{0: 0, 5 * n: 0, 50 * n: 2e-6}`` is constant for
    5 epochs and then increases to the end.

    >>> import featherbed as fb
    >>> penalty = fb.NonNegativeL1(0.0)
    >>> schedule = Schedule(penalty, {2: 0.0, 4: 1.0})
    >>> [(schedule.step(), penalty.lam)[1] for _ in range(5)]
    [0.0, 0.0, 0.5, 1.0, 1.0]
    """

    def __init__(
        self, targets: Scheduled | Iterable[Scheduled], points: Mapping[int, float]
    ) -> None:
        given: Any = [targets] if hasattr(targets, "scheduled") else targets
        self.targets = list(given) if isinstance(given, Iterable) else []
        if not self.targets or not all(hasattr(target, "scheduled") for target in self.targets):
            raise ArgumentError(
                f"{targets!r}: give a penalty, such as fb.NonNegativeL1(0.0), an fb.SSE, or several"
            )
        if not isinstance(points, Mapping) or not points:
            raise ArgumentError(
                f"points={points!r}: give {{step: value, ...}} with at least one point"
            )
        weights = points.values()
        if not all(is_integer(t, 0) for t in points) or not all(is_number(w, 0) for w in weights):
            raise ArgumentError(
                f"points={dict(points)!r}: steps are whole numbers from 0, weights finite numbers "
                "from 0"
            )
        if any(target.scheduled == "p" for target in self.targets) and max(points.values()) > 1:
            raise ArgumentError(
                f"points={dict(points)!r}: the p of fb.SSE is a probability, from 0 to 1"
            )
        self.points = sorted(points), [points[t] for t in sorted(points)]
        self.steps = 0
        self._set()

    def _set(self) -> None:
        value = float(np.interp(self.steps, *self.points))
        for target in self.targets:
            setattr(target, target.scheduled, value)

    @property
    def reached(self) -> bool:
        """Whether the values no longer change."""
        return self.steps >= self.points[0][-1]

    def step(self) -> None:
        """Set the values for the next step of the optimizer."""
        self.steps += 1
        self._set()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.steps = int(state["steps"])
        self._set()
