"""AdamW for dense and row-sparse gradients, with decoupled decay and penalties."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from featherbed.checks import check_number
from featherbed.errors import ArgumentError
from featherbed.optim.checks import check_betas
from featherbed.optim.penalties import Penalty
from featherbed.optim.row_optimizer import Coefficients, Group, RowOptimizer


class AdamW(RowOptimizer):
    """AdamW (Loshchilov and Hutter 2019), also for row-sparse gradients.

        p ← (1 - lr weight_decay) p
        m ← b1 m + (1 - b1) g,   v ← b2 v + (1 - b2) g²
        p ← p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps),   then the prox with step lr

    With dense gradients it equals torch.optim.AdamW. With row-sparse gradients the moments of rows
    outside the batch do not change, as in torch.optim.SparseAdam; decay and prox, which SparseAdam
    lacks, apply to every row at every step. The prox is never preconditioned: with eps = 1e-8 the
    threshold would explode for parameters that never had a gradient.

    >>> import torch, featherbed as fb
    >>> table = fb.DenseTable(100, 8, sparse=True)
    >>> optimizer = fb.AdamW(table.parameters(), lr=0.01, weight_decay=0.1)
    >>> table(torch.tensor([1, 2])).sum().backward(); optimizer.step()
    """

    rule = "adam"
    holds = ("m", "v")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        penalties: Mapping[nn.Parameter, Penalty] | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
            check_number(name, value, minimum=0)
        if lr * weight_decay >= 1:
            raise ArgumentError(
                f"lr={lr!r} times weight_decay={weight_decay!r} is the share of a parameter lost: "
                "keep it below 1"
            )
        super().__init__(
            params,
            {"lr": lr, "betas": check_betas(betas), "eps": eps, "weight_decay": weight_decay},
            penalties,
        )

    def coefficients(self, group: Group, step: int) -> Coefficients:
        """Return the coefficients of a step, with bias-corrected moments."""
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        return Coefficients(
            lr / (1 - beta1**step),
            lr,
            decay=1 - lr * group["weight_decay"],
            keep=beta1,
            add=1 - beta1,
            second=1 - beta2,
            eps=float(group["eps"]),
            correction=math.sqrt(1 - beta2**step),
        )

    def advance(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], c: Coefficients) -> Tensor:
        """Update values and state in place."""
        m, v = state["m"], state["v"]
        p.mul_(c.decay)
        m.lerp_(grad, c.add)
        v.mul_(1 - c.second).addcmul_(grad, grad, value=c.second)
        scale = v.sqrt().div_(c.correction).add_(c.eps)
        p.addcdiv_(m, scale, value=-c.rate)
        return scale
