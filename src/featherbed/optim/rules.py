"""The optimizers: SGD, Adagrad, AdamW and Yogi, each a rule for ``RowOptimizer``.

A rule is written twice: here for torch tensors, and in ``kernels.arithmetic.step`` for compiled
loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from featherbed.checks import check_choice, check_number
from featherbed.errors import ArgumentError
from featherbed.optim.penalties import Penalties
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
        penalties: Penalties | None = None,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ArgumentError(f"momentum={momentum!r}: give a number in [0, 1)")
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, settings, penalties)

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
        penalties: Penalties | None = None,
    ) -> None:
        settings = {"lr": lr, "lr_decay": lr_decay, "eps": eps}
        super().__init__(params, settings | {"initial_accumulator": initial_accumulator}, penalties)

    def coefficients(self, group: Group, step: int) -> Coefficients:
        """Return the coefficients of a step, with decaying learning rate."""
        rate = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        return Coefficients(rate, rate, eps=float(group["eps"]))

    def advance(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], c: Coefficients) -> Tensor:
        """Update values and state in place."""
        state["v"].addcmul_(grad, grad)
        scale = state["v"].sqrt().add_(c.eps)
        p.addcdiv_(grad, scale, value=-c.rate)
        return scale


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
        penalties: Penalties | None = None,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings, penalties)

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
        penalties: Penalties | None = None,
        prox: str = "preconditioned",
    ) -> None:
        check_choice("prox", prox, ("preconditioned", "scalar"))
        settings = {"lr": lr, "betas": betas, "eps": check_number("eps", eps, above=0)}
        settings |= {"initial_accumulator": initial_accumulator, "weight_decay": weight_decay}
        super().__init__(params, settings, penalties, metric=prox == "preconditioned")

    def coefficients(self, group: Group, step: int) -> Coefficients:
        """Return the coefficients of a step, with bias correction as in Adam."""
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        return Coefficients(
            rate,
            rate if self.metric else lr,
            keep=beta1,
            add=1 - beta1,
            second=1 - beta2,
            eps=float(group["eps"]),
            beta=beta1,
            coupled=float(group["weight_decay"]),
        )

    def advance(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], c: Coefficients) -> Tensor:
        """Update values and state in place."""
        m, v, squared = state["m"], state["v"], grad * grad
        m.lerp_(grad, c.add)
        v.sub_(torch.sign(v - squared).mul_(squared), alpha=c.second)
        scale = v.sqrt().add_(c.eps)
        p.addcdiv_(m, scale, value=-c.rate)
        return scale
