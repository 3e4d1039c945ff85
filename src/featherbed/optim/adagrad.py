"""Adagrad for dense and row-sparse gradients, with penalties."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from featherbed.checks import check_number
from featherbed.optim.penalties import Penalty
from featherbed.optim.row_optimizer import Coefficients, Group, RowOptimizer


class Adagrad(RowOptimizer):
    """Adagrad (Duchi, Hazan and Singer 2011), like torch.optim.Adagrad.

        v ← v + g²,   p ← p - lr_t g / (sqrt(v) + eps),   lr_t = lr / (1 + (t - 1) lr_decay)

    followed by the prox with step lr_t. Rows without a gradient change by the prox only, which
    applies to every row at every step.

    >>> import torch, featherbed as fb
    >>> table = fb.DenseTable(100, 8, sparse=True)
    >>> optimizer = fb.Adagrad(table.parameters(), lr=0.1)
    >>> table(torch.tensor([1, 2])).sum().backward(); optimizer.step()
    """

    rule = "adagrad"
    holds = ("v",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        lr_decay: float = 0.0,
        eps: float = 1e-10,
        initial_accumulator: float = 0.0,
        penalties: Mapping[nn.Parameter, Penalty] | None = None,
    ) -> None:
        settings = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "initial_accumulator": initial_accumulator,
        }
        super().__init__(
            params,
            {name: check_number(name, value, minimum=0) for name, value in settings.items()},
            penalties,
        )

    def coefficients(self, group: Group, step: int) -> Coefficients:
        """Return the coefficients of a step, with decaying learning rate."""
        rate = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        return Coefficients(rate, rate, eps=float(group["eps"]))

    def first(self, name: str, group: Group) -> float:  # noqa: ARG002 - there is only v
        """Return the initial accumulator."""
        return float(group["initial_accumulator"])

    def advance(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], c: Coefficients) -> Tensor:
        """Update values and state in place."""
        state["v"].addcmul_(grad, grad)
        scale = state["v"].sqrt().add_(c.eps)
        p.addcdiv_(grad, scale, value=-c.rate)
        return scale
