"""Yogi, with a prox in the metric of its preconditioner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from featherbed.checks import check_choice, check_number
from featherbed.errors import ArgumentError
from featherbed.optim.checks import check_betas
from featherbed.optim.penalties import Penalty
from featherbed.optim.row_optimizer import Coefficients, Group, RowOptimizer


class Yogi(RowOptimizer):
    """Yogi (Zaheer et al. 2018) as released: constant v_0 and Adam's bias correction.

        m ← b1 m + (1 - b1) g
        v ← v - (1 - b2) sign(v - g²) g²
        p ← p - s m / (sqrt(v) + eps),   s = lr sqrt(1 - b2^t) / (1 - b1^t)

    ``penalties={parameter: penalty}`` adds a prox after the step: ``prox="preconditioned"`` in
    Yogi's metric (step s / (sqrt(v) + eps) per element, to which the published lambdas of ANT
    belong), ``prox="scalar"`` with step lr (ANT's equation 3 as printed). Initially the first is
    about 500 times the second. ``weight_decay`` adds weight_decay * p to the gradient. Every row is
    updated as if at every step; with row-sparse gradients (``sparse=True`` tables) only the rows of
    the batch cost time, and only they are decayed.

    >>> import torch, featherbed as fb
    >>> table = fb.AnchorTable(100, 8, anchors=4, sparse=True)
    >>> penalties = {table.transform: fb.NonNegativeL1(1e-4)}
    >>> optimizer = fb.Yogi(table.parameters(), lr=0.01, penalties=penalties)
    >>> table(torch.tensor([1, 2])).sum().backward(); optimizer.step()
    """

    rule = "yogi"
    holds = ("m", "v")
    preconditioned = True
    coupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-3,
        initial_accumulator: float = 1e-6,
        weight_decay: float = 0.0,
        penalties: Mapping[nn.Parameter, Penalty] | None = None,
        prox: str = "preconditioned",
    ) -> None:
        for name, value in (
            ("lr", lr),
            ("weight_decay", weight_decay),
            ("initial_accumulator", initial_accumulator),
        ):
            check_number(name, value, minimum=0)
        if not eps > 0:
            raise ArgumentError(f"eps={eps!r}: it must be above 0")
        check_choice("prox", prox, ("preconditioned", "scalar"))
        defaults = {
            "lr": lr,
            "betas": check_betas(betas),
            "eps": eps,
            "initial_accumulator": initial_accumulator,
        }
        super().__init__(
            params,
            {**defaults, "weight_decay": weight_decay},
            penalties,
            metric=prox == "preconditioned",
        )

    def coefficients(self, group: Group, step: int) -> Coefficients:
        """Return the coefficients of a step, with bias correction as in Adam."""
        beta1, beta2 = group["betas"]
        lr = float(group["lr"])
        rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        return Coefficients(
            rate,
            rate if self.metric else lr,
            keep=beta1,
            add=1 - beta1,
            second=1 - beta2,
            eps=float(group["eps"]),
            beta=beta1,
        )

    def first(self, name: str, group: Group) -> float:
        """Return the initial value: v starts at a small constant."""
        return float(group["initial_accumulator"]) if name == "v" else 0.0

    def advance(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], c: Coefficients) -> Tensor:
        """Update values and state in place."""
        m, v, squared = state["m"], state["v"], grad * grad
        m.lerp_(grad, c.add)
        v.sub_(torch.sign(v - squared).mul_(squared), alpha=c.second)
        scale = v.sqrt().add_(c.eps)
        p.addcdiv_(m, scale, value=-c.rate)
        return scale
