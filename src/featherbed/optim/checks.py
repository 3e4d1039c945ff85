"""What optimizers check before anything changes: settings, and states they are to go on from."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from featherbed.errors import ArgumentError


def check_number(name: str, value: float) -> float:
    """Refuse a setting that is no finite number of at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ArgumentError(f"{name}={value!r}: give a finite number of at least 0")
    return value


def check_betas(betas: tuple[float, float]) -> tuple[float, float]:
    """Refuse decay rates outside [0, 1)."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ArgumentError(f"betas={betas!r}: give two numbers in [0, 1)")
    return betas


def check_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Refuse a state of other groups or shapes than the optimizer's parameters have."""
    groups = state_dict["param_groups"]
    mine = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group["params"]) for group in groups] != mine:
        raise ArgumentError(
            f"the state is of groups of {[len(g['params']) for g in groups]} parameters, this optimizer has {mine}"
        )
    names = [number for group in groups for number in group["params"]]
    for number, parameter in zip(
        names, (p for g in optimizer.param_groups for p in g["params"]), strict=True
    ):
        for name, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                raise ArgumentError(
                    f"the state's {name} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}: it was "
                    "saved by a model of another size"
                )
