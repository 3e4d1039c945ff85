"""Penalties: objects with a value and a prox.

    prox_h(x; s) = argmin_z  Σ_i (z_i - x_i)² / (2 s_i) + h(z)

with a step s that is one number or, in the metric of a preconditioner, one number for each element.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor, nn

from featherbed.errors import ArgumentError

Step = float | Tensor


class Penalty(ABC):
    """h(x) = lam * something; ``lam`` may be changed between steps.

    The prox depends on lam and the step by their product alone, and two after each other are one: shrink(shrink(x, a), b) =
    shrink(x, a + b), at least where a and b are single numbers. ``separable``: that holds element by element.
    """

    _lam: float
    separable: ClassVar[bool] = True
    kind: ClassVar[str | None] = None  # by which compiled loops know it

    def __init__(self, lam: float) -> None:
        self.lam = lam

    @property
    def lam(self) -> float:
        """The weight of the penalty."""
        return self._lam

    @lam.setter
    def lam(self, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, Real) or not (math.isfinite(value) and value >= 0):
            raise ArgumentError(f"lam={value!r}: a penalty's weight is a finite number of at least 0")
        self._lam = float(value)

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """Return h(x), a scalar."""

    @abstractmethod
    def shrink(self, x: Tensor, threshold: Step) -> Tensor:
        """Return the proximal point of x for threshold = lam * step."""

    def prox(self, x: Tensor, step: Step) -> Tensor:
        """Return the proximal point of x."""
        return self.shrink(x, self.lam * step)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(lam={self.lam:g})"


class L1(Penalty):
    """h(x) = lam Σ|x_i|; prox: shrink towards zero by lam s, stop at zero.

    >>> L1(1.0).prox(torch.tensor([-3.0, 0.5, 2.0]), 1.0)
    tensor([-2., 0., 1.])
    """

    kind = "l1"

    def value(self, x: Tensor) -> Tensor:
        """lam Σ|x|."""
        return self.lam * x.abs().sum()

    def shrink(self, x: Tensor, threshold: Step) -> Tensor:
        """sign(x) max(|x| - threshold, 0)."""
        return torch.sign(x) * (x.abs() - threshold).clamp(min=0)


class NonNegativeL1(Penalty):
    """h(x) = lam Σ x_i for x >= 0, infinite elsewhere; prox: max(x - lam s, 0). Non-negativity holds also at lam = 0.

    ANT's penalty on the transform (Liang et al. 2021, equation 3).

    >>> NonNegativeL1(1.0).prox(torch.tensor([-3.0, 0.5, 2.0]), 1.0)
    tensor([0., 0., 1.])
    """

    kind = "nonnegative"

    def value(self, x: Tensor) -> Tensor:
        """lam Σ x, or infinity."""
        return torch.where((x < 0).any(), torch.full((), math.inf, dtype=x.dtype, device=x.device), self.lam * x.sum())

    def shrink(self, x: Tensor, threshold: Step) -> Tensor:
        """max(x - threshold, 0)."""
        return (x - threshold).clamp(min=0)


class GroupL1(Penalty):
    """h(x) = lam Σ_r ||x_r||_2 over rows r: whole rows go to zero together (group lasso, Yuan and Lin 2006).

    With one step: x_r max(1 - lam s / ||x_r||, 0). With a step for each element the point is z_i = x_i t / (t + lam s_i),
    where t = ||z|| solves Σ (x_i / (t + lam s_i))² = 1, found by bisection; zero where no t > 0 does.

    >>> GroupL1(1.0).prox(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[2.4000, 3.2000],
            [0.0000, 0.0000]])
    """

    separable = False

    def value(self, x: Tensor) -> Tensor:
        """lam Σ_r ||x_r||."""
        total: Tensor = self.lam * x.reshape(len(x), -1).norm(dim=1).sum()
        return total

    def shrink(self, x: Tensor, threshold: Step) -> Tensor:
        """Shrink every row's length; thresholds are one number, one for each row [V, 1], or one for each element."""
        rows = x.reshape(len(x), -1)
        if not isinstance(threshold, Tensor) or threshold.dim() == 0 or threshold.shape == (len(x), 1):
            length = rows.norm(dim=1, keepdim=True)
            share = (1 - threshold / length.clamp(min=torch.finfo(x.dtype).tiny)).clamp(min=0)
            shrunk: Tensor = rows * share
            return shrunk.reshape(x.shape)
        weight: Tensor = threshold.expand_as(x).reshape(rows.shape)
        if not bool(weight.any()):
            return x.clone()
        low, high = torch.zeros_like(rows[:, :1]), rows.norm(dim=1, keepdim=True)
        for _ in range(60):
            middle = (low + high) / 2
            outside = (rows / (middle + weight)).square().sum(1, keepdim=True) > 1
            low, high = torch.where(outside, middle, low), torch.where(outside, high, middle)
        length = (low + high) / 2
        alive = (rows / weight).square().sum(1, keepdim=True) > 1
        point: Tensor = torch.where(alive, rows * length / (length + weight), torch.zeros_like(rows))
        return point.reshape(x.shape)


def check_penalties(penalties: Mapping[nn.Parameter, Penalty], held: set[int]) -> dict[nn.Parameter, Penalty]:
    """Return the mapping as a dict; refuse penalties on parameters the optimizer does not hold."""
    if not isinstance(penalties, Mapping):
        raise ArgumentError(f"penalties is a dict {{parameter: penalty}}, got {type(penalties).__name__}")
    for parameter, penalty in penalties.items():
        if not isinstance(parameter, Tensor):
            raise ArgumentError(f"penalties are given for parameters, such as table.transform; got {str(parameter)[:60]!r}")
        if not isinstance(penalty, Penalty):
            raise ArgumentError(f"penalties map parameters to penalties, got {penalty!r}: for example fb.NonNegativeL1(2e-6)")
        if id(parameter) not in held:
            shape = tuple(getattr(parameter, "shape", ()))
            raise ArgumentError(
                f"{penalty!r} is on a parameter of shape {shape} that this optimizer does not hold: pass it too"
            )
    return dict(penalties)
