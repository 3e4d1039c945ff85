"""SGD for dense and row-sparse gradients, with momentum, decay and penalties."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from featherbed.checks import check_number
from featherbed.errors import ArgumentError
from featherbed.optim.penalties import Penalty
from featherbed.optim.row_optimizer import Coefficients, Group, RowOptimizer


class SGD(RowOptimizer):
    """Stochastic gradient descent, with the prox of ANT's equation 3 for penalized parameters.

        m ← momentum m + g,   p ← (1 - lr weight_decay) p - lr m,   then the prox with step lr

    Like torch.optim.SGD, but with decoupled decay (equal without momentum). With row-sparse
    gradients every row equals its value with dense gradients, including momentum.

    >>> import torch, featherbed as fb
    >>> table = fb.AnchorTable(100, 8, anchors=4, sparse=True)
    >>> penalties = {table.transform: fb.NonNegativeL1(1e-3)}
    >>> optimizer = fb.SGD(table.parameters(), lr=0.1, penalties=penalties)
    >>> table(torch.tensor([1, 2])).sum().backward(); optimizer.step()
    """

    rule = "sgd"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        penalties: Mapping[nn.Parameter, Penalty] | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            check_number(name, value, minimum=0)
        if not 0 <= momentum < 1:
            raise ArgumentError(f"momentum={momentum!r}: give a number in [0, 1)")
        if lr * weight_decay >= 1:
            raise ArgumentError(
                f"lr={lr!r} times weight_decay={weight_decay!r} is the share of a parameter lost: "
                "keep it below 1"
            )
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, penalties
        )

    @property
    def holds(self) -> tuple[str, ...]:  # type: ignore[override]
        """The momentum buffer, if any group has momentum."""
        return ("m",) if any(group["momentum"] for group in self.param_groups) else ()

    def coefficients(self, group: Group, step: int) -> Coefficients:  # noqa: ARG002 - the same at every step
        """Return learning rate, decay and momentum."""
        lr, momentum = float(group["lr"]), float(group["momentum"])
        decay = 1 - lr * group["weight_decay"]
        return Coefficients(lr, lr, decay=decay, keep=momentum, beta=momentum)

    def advance(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], c: Coefficients) -> float:
        """Update values and state in place."""
        if c.decay != 1.0:
            p.mul_(c.decay)
        moved = grad if c.keep == 0.0 else state["m"].mul_(c.keep).add_(grad)
        p.add_(moved, alpha=-c.rate)
        return 1.0
