"""Penalties: objects with a value and a prox.

    prox_h(x; s) = argmin_z  Σ_i (z_i - x_i)² / (2 s_i) + h(z)

with a step s that is a number or, in the metric of a preconditioner, a number per element. A
penalty may leave entries alone (``exempt``) and keep others at zero (``freeze``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.optim.exempt import Exempt
from featherbed.optim.lazy import settle_parameter

Step = float | Tensor
Penalties = Mapping[nn.Parameter, "Penalty"]


class Penalty(ABC):
    """h(x) with the weight ``lam``, which may change between steps.

    The prox depends on the product of lam and step only, and two successive ones combine:
    shrink(shrink(x, a), b) = shrink(x, a + b), at least for scalars a and b. ``separable``: this
    holds element by element.
    """

    lam: float  # the weight of the penalty
    separable: ClassVar[bool] = True
    scheduled: ClassVar[str] = "lam"  # the attribute that fb.Schedule sets
    kind: ClassVar[str | None] = None  # its name in compiled loops, None: they do not know it
    exempt: Exempt | None = None  # entries that are not penalized
    kept: Tensor | None = None  # bool, as the parameter: entries that may be nonzero (None: all)
    shared: bool = False  # whether an optimizer has it on several parameters

    def __init__(self, lam: float) -> None:
        self.lam = lam

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; check ``lam``."""
        if name == "lam":
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not number or not (math.isfinite(value) and value >= 0):
                raise ArgumentError(
                    f"lam={value!r}: a penalty's weight is a finite number of at least 0"
                )
            value = float(value)
        super().__setattr__(name, value)

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """Return h(x), a scalar."""

    @abstractmethod
    def point(self, x: Tensor, threshold: Step) -> Tensor:
        """Return the proximal point of x for threshold = lam * step, without exempt entries."""

    def shrink(self, x: Tensor, threshold: Step, ids: Tensor | None = None) -> Tensor:
        """Return the proximal point for threshold = lam * step, of rows ``ids`` or the whole
        parameter.
        """
        if self.kept is not None:  # first: a row may be shrunk as a whole
            x = torch.where(self.kept if ids is None else self.kept[ids], x, 0.0)
        found = self.point(x, threshold)
        if self.exempt is not None:
            spared = self.exempt.places(ids)
            found[spared] = self.point(x[spared], 0.0)
        return found

    def prox(self, x: Tensor, step: Step, ids: Tensor | None = None) -> Tensor:
        """Return the proximal point of x."""
        return self.shrink(x, self.lam * step, ids)

    def first(
        self, x: Tensor, step: Step, ids: Tensor, atoms: Tensor
    ) -> Tensor:  # [n], step, [n], [n] -> [n]
        """Return the proximal point of new entries for ``atoms`` in rows ``ids`` of a table with
        slots.
        """
        if self.kept is not None:
            return torch.zeros_like(x)
        found = self.point(x, self.lam * step)
        if self.exempt is None:
            return found
        return torch.where(self.exempt.holds(ids, atoms), self.point(x, 0.0), found)

    def freeze(self, parameter: nn.Parameter) -> None:
        """Keep the zeros of ``parameter`` at zero and set ``lam`` to 0, for a refit after
        selection.

        >>> weights, penalty = nn.Parameter(torch.tensor([[0.0, 2.0]])), NonNegativeL1(1.0)
        >>> penalty.freeze(weights); penalty.prox(torch.tensor([[5.0, 5.0]]), 1.0)
        tensor([[0., 5.]])
        """
        settle_parameter(parameter)
        self.keep(parameter, parameter.detach() != 0)
        self.lam = 0.0

    def keep(self, parameter: nn.Parameter, kept: Tensor | None) -> None:  # bool, as the parameter
        """Keep all entries except ``kept`` at zero from now on (None: no restriction)."""
        settle_parameter(parameter)  # missed updates belong to the old rule
        if kept is not None and self.shared:
            raise ArgumentError(
                f"{self!r} is on several parameters, each with its own zeros: give every parameter "
                "a penalty"
            )
        if kept is not None and kept.shape != parameter.shape:
            raise ArgumentError(
                f"kept entries have shape {tuple(kept.shape)}, the parameter "
                f"{tuple(parameter.shape)}"
            )
        self.kept = kept
        if kept is not None:
            with torch.no_grad():
                parameter.mul_(kept)

    def __repr__(self) -> str:
        spared = "" if self.exempt is None else f", exempt={self.exempt!r}"
        return f"{type(self).__name__}(lam={self.lam:g}{spared})"


class L1(Penalty):
    """h(x) = lam Σ|x_i|; prox: shrink towards zero by lam s, stop at zero.

    >>> L1(1.0).prox(torch.tensor([-3.0, 0.5, 2.0]), 1.0)
    tensor([-2., 0., 1.])
    """

    kind = "l1"

    def value(self, x: Tensor) -> Tensor:
        """lam Σ|x|."""
        return self.lam * x.abs().sum()

    def point(self, x: Tensor, threshold: Step) -> Tensor:
        """sign(x) max(|x| - threshold, 0)."""
        return torch.sign(x) * (x.abs() - threshold).clamp(min=0)


class NonNegativeL1(Penalty):
    """h(x) = lam Σ x_i for x >= 0, infinite elsewhere; prox: max(x - lam s, 0), also for lam = 0.

    ANT's penalty on the transform (Liang et al. 2021, equation 3). ``exempt=table.related(graph)``
    exempts related objects and anchors: T = max((T - lam s) S(G) + T (1 - S(G)), 0), with S(G) = 0
    for related pairs.

    >>> NonNegativeL1(1.0).prox(torch.tensor([-3.0, 0.5, 2.0]), 1.0)
    tensor([0., 0., 1.])
    """

    kind = "nonnegative"

    def __init__(self, lam: float, exempt: Exempt | None = None) -> None:
        super().__init__(lam)
        if exempt is not None and not isinstance(exempt, Exempt):
            raise ArgumentError(
                f"exempt={exempt!r}: give table.related(graph), the entries that are not penalized"
            )
        self.exempt = exempt

    def value(self, x: Tensor) -> Tensor:
        """lam Σ x over the penalized entries, or infinity."""
        total = x.sum() if self.exempt is None else x.sum() - x[self.exempt.places(None)].sum()
        return (self.lam * total).masked_fill((x < 0).any(), math.inf)

    def point(self, x: Tensor, threshold: Step) -> Tensor:
        """max(x - threshold, 0)."""
        return (x - threshold).clamp(min=0)


class GroupL1(Penalty):
    """h(x) = lam Σ_r ||x_r||_2 over rows r: whole rows become zero (group lasso, Yuan and Lin
    2006).

    With a scalar step: x_r max(1 - lam s / ||x_r||, 0). With a step per element the point is z_i =
    x_i t / (t + lam s_i), where t = ||z|| solves Σ (x_i / (t + lam s_i))² = 1, found by bisection;
    zero if there is no t > 0.

    >>> GroupL1(1.0).prox(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[2.4000, 3.2000],
            [0.0000, 0.0000]])
    """

    separable = False

    def value(self, x: Tensor) -> Tensor:
        """lam Σ_r ||x_r||."""
        total: Tensor = self.lam * x.reshape(len(x), -1).norm(dim=1).sum()
        return total

    def point(self, x: Tensor, threshold: Step) -> Tensor:
        """Shrink the length of every row; thresholds are a scalar, [V, 1], or one per element."""
        rows = x.reshape(len(x), -1)
        each = isinstance(threshold, Tensor) and threshold.shape not in ((), (len(x), 1))
        if not each or not isinstance(threshold, Tensor):
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
        point: Tensor = torch.where(alive, rows * length / (length + weight), 0.0)
        return point.reshape(x.shape)


def check_penalties(
    penalties: Penalties, groups: list[dict[str, Any]]
) -> dict[nn.Parameter, Penalty]:
    """Return the mapping as a dict; raise an error for parameters that no group holds."""
    if not isinstance(penalties, Mapping):
        kind = type(penalties).__name__
        raise ArgumentError(f"penalties is a dict {{parameter: penalty}}, got {kind}")
    held = {id(p) for group in groups for p in group["params"]}
    for parameter, penalty in penalties.items():
        if not isinstance(parameter, Tensor):
            raise ArgumentError(
                "penalties are given for parameters, such as table.transform; got "
                f"{str(parameter)[:60]!r}"
            )
        if not isinstance(penalty, Penalty):
            raise ArgumentError(
                f"penalties map parameters to penalties, got {penalty!r}: for example "
                "fb.NonNegativeL1(2e-6)"
            )
        if penalty.exempt is not None:
            penalty.exempt.check(parameter)
        if id(parameter) not in held:
            raise ArgumentError(
                f"{penalty!r} is on a parameter of shape {tuple(parameter.shape)} that this "
                "optimizer does not hold: pass it too"
            )
    counts = Counter(map(id, penalties.values()))
    for penalty in penalties.values():
        penalty.shared = counts[id(penalty)] > 1
    return dict(penalties)
