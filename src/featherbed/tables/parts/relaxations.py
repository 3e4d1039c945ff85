"""Relaxations of one-hot codes, and temperature schedules."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from featherbed.checks import is_number
from featherbed.errors import ArgumentError

SCHEDULES = ("constant", "inverse", "exponential")


def short_repr(settings: Any) -> str:
    """Return the call that creates a settings object, without default values."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)[1:]}
    given = {field.name for field in fields(settings) if values.get(field.name) != field.default}
    shown = [repr(settings.kind), *(f"{k}={v!r}" for k, v in values.items() if k in given)]
    return f"{type(settings).__name__}({', '.join(shown)})"


@dataclass(frozen=True)
class Temperature:
    """A temperature that decreases in steps, to at least ``floor``.

    With n = floor(steps / every), ``inverse``: τ = start / (1 + rate * n), ``exponential``: τ =
    start * rate^n.

    >>> Temperature(1.0, kind="inverse", rate=1.0, every=1000)(torch.tensor(2500))
    tensor(0.3333)
    """

    start: float = 1.0
    kind: str = "inverse"
    rate: float = 1.0
    every: int = 1000
    floor: float = 0.01

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ArgumentError(f"kind={self.kind!r}: a temperature is {', '.join(SCHEDULES)}")
        for name in ("start", "floor"):
            value = getattr(self, name)
            if not is_number(value) or value <= 0:
                raise ArgumentError(
                    f"temperature {name}={value!r}: give a number above 0 (at 0 the softmax is not "
                    "defined)"
                )
        if self.floor > self.start:
            raise ArgumentError(
                f"a temperature falls from start={self.start} to floor={self.floor}: the floor is "
                "above"
            )
        if (
            not is_number(self.every, 1)
            or not is_number(self.rate, 0)
            or (self.kind == "exponential" and not 0 < self.rate <= 1)
        ):
            raise ArgumentError(
                f"every={self.every!r}, rate={self.rate!r}: every >= 1, rate >= 0 (exponential: "
                "above 0, at most 1)"
            )

    @property
    def falls(self) -> bool:
        """Whether the temperature changes."""
        return self.kind != "constant"

    def __call__(self, steps: Tensor) -> Tensor:
        """Return the temperature after a number of steps."""
        if not self.falls:
            return torch.full((), self.start, device=steps.device)
        stairs = torch.div(steps, self.every, rounding_mode="floor").float()
        fallen = (
            self.start / (1 + self.rate * stairs)
            if self.kind == "inverse"
            else self.start * self.rate**stairs
        )
        return fallen.clamp(self.floor, self.start)


@dataclass(frozen=True)
class Softmax:
    """Continuous relaxation: o = softmax(π / τ) instead of the one-hot code (Chen et al. 2018,
    "CR").

    Args:
        temperature: a number above 0, or a ``Temperature`` schedule.
        entropy: weight of the mean entropy of o in the loss, which pushes o towards one-hot.
        noise: add Gumbel noise to π (Jang et al. 2017), from torch's default generator like
            dropout.
        logit_norm: batch normalization of π over k, with scale and shift only if the temperature is
            constant.

    >>> Softmax(temperature=0.5).temperature
    0.5
    """

    temperature: float | Temperature = 1.0
    entropy: float = 0.0
    noise: bool = False
    logit_norm: bool = True
    straight = False

    def __post_init__(self) -> None:
        if isinstance(self.temperature, bool) or not isinstance(
            self.temperature, int | float | Temperature
        ):
            raise ArgumentError(
                f"temperature={self.temperature!r}: give a number above 0 or a fb.Temperature"
            )
        _ = self.schedule  # refuses an invalid temperature
        if not is_number(self.entropy, 0):
            raise ArgumentError(
                f"entropy={self.entropy!r}: the weight of the entropy is a number of at least 0"
            )

    @property
    def schedule(self) -> Temperature:
        """The temperature as a ``Temperature``."""
        if isinstance(self.temperature, Temperature):
            return self.temperature
        return Temperature(
            start=float(self.temperature), kind="constant", floor=min(0.01, self.temperature)
        )

    def __call__(
        self, logits: Tensor, steps: Tensor
    ) -> tuple[Tensor, Tensor]:  # [..., K] -> weights [..., K], mean entropy
        """Return the weights of the choices and the mean entropy of the relaxed code."""
        cooled = logits / self.schedule(steps).to(logits.dtype)
        logs = cooled.log_softmax(-1)
        entropy = -(logs.exp() * logs).sum(-1).mean()
        if self.noise:
            uniform = torch.rand_like(logits).clamp_(1e-20, 1 - 1e-7)
            cooled = (logits - (-uniform.log()).log()) / self.schedule(steps).to(logits.dtype)
        soft = cooled.softmax(-1)
        return (harden(soft) if self.straight else soft), entropy


class StraightThrough(Softmax):
    """Straight-through estimator: one-hot codes forward, the softmax's gradient backward ("STE").

    >>> weights, _ = StraightThrough()(torch.tensor([[1.0, 3.0]]), torch.tensor(0))
    >>> weights.tolist()
    [[0.0, 1.0]]
    """

    straight = True


def harden(soft: Tensor) -> Tensor:  # [..., K]
    """Return the one-hot code of the largest weight, with the gradient of the weights."""
    hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
    return hard + (soft - soft.detach())
