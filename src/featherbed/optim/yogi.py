"""Yogi, with a prox in the metric of its preconditioner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featherbed.errors import ArgumentError
from featherbed.optim.penalties import Penalty, check_penalties


class Yogi(Optimizer):
    """Yogi (Zaheer et al. 2018), as released: constant v_0 and Adam's bias correction.

        m ← b1 m + (1 - b1) g
        v ← v - (1 - b2) sign(v - g²) g²
        p ← p - s m / (sqrt(v) + eps),   s = lr sqrt(1 - b2^t) / (1 - b1^t)

    ``penalties={parameter: penalty}`` adds a prox after the step. ``prox="preconditioned"`` takes it in Yogi's own metric
    (step s / (sqrt(v) + eps) for each element; the published lambdas of ANT belong to it), ``prox="scalar"`` with step lr
    (ANT's equation 3 as printed). At the start the first is about 500 times the second. ``weight_decay`` adds
    weight_decay * p to the gradient. Penalised or not, every row is updated at every step.

    >>> import torch, featherbed as fb
    >>> table = fb.AnchorTable(100, 8, anchors=4)
    >>> optimizer = fb.Yogi(table.parameters(), lr=0.01, penalties={table.transform: fb.NonNegativeL1(1e-4)})
    >>> table(torch.tensor([1, 2])).sum().backward(); optimizer.step()
    """

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
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("initial_accumulator", initial_accumulator)):
            if not (math.isfinite(value) and value >= 0):
                raise ArgumentError(f"{name}={value!r}: give a finite number of at least 0")
        if not eps > 0:
            raise ArgumentError(f"eps={eps!r}: it must be above 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ArgumentError(f"betas={betas!r}: both must be in [0, 1)")
        if prox not in ("preconditioned", "scalar"):
            raise ArgumentError(f"prox={prox!r}: use preconditioned or scalar")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "initial_accumulator": initial_accumulator}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.prox = prox
        held = {id(p) for group in self.param_groups for p in group["params"]}
        self.penalties = check_penalties(penalties or {}, held)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles keep the penalties, on the copied parameters."""
        return {**super().__getstate__(), "penalties": list(self.penalties.items()), "prox": self.prox}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take in a copy's state, or a checkpoint's, which has no penalties of its own."""
        if "penalties" in state:
            state = {**state, "penalties": dict(state["penalties"])}
        super().__setstate__(state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient, then take the prox of the penalised ones."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.is_sparse:
            raise ArgumentError("Yogi takes dense gradients: make the embedding with sparse=False")
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["m"] = torch.zeros_like(parameter)
            state["v"] = torch.full_like(parameter, group["initial_accumulator"])
        state["step"] += 1
        beta1, beta2 = group["betas"]
        if group["weight_decay"]:
            grad = grad + group["weight_decay"] * parameter
        squared = grad * grad
        state["m"].lerp_(grad, 1 - beta1)
        v = state["v"]
        v.sub_(torch.sign(v - squared).mul_(squared), alpha=1 - beta2)
        rate = group["lr"] * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        scale = v.sqrt().add_(group["eps"])
        parameter.addcdiv_(state["m"], scale, value=-rate)
        penalty = self.penalties.get(parameter)
        if penalty is not None:
            step = rate / scale if self.prox == "preconditioned" else float(group["lr"])
            parameter.copy_(penalty.prox(parameter, step))
