"""Checks of settings and states of optimizers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from featherbed.errors import ArgumentError


def check_betas(betas: tuple[float, float]) -> tuple[float, float]:
    """Return decay rates in [0, 1), or raise an error."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ArgumentError(f"betas={betas!r}: give two numbers in [0, 1)")
    return betas


def check_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise an error if a state has other groups or shapes than the optimizer."""
    groups = state_dict["param_groups"]
    mine = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group["params"]) for group in groups] != mine:
        raise ArgumentError(
            f"the state is of groups of {[len(g['params']) for g in groups]} parameters, this "
            f"optimizer has {mine}"
        )
    names = [number for group in groups for number in group["params"]]
    for number, parameter in zip(
        names, (p for g in optimizer.param_groups for p in g["params"]), strict=True
    ):
        for name, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                raise ArgumentError(
                    f"the state's {name} has shape {tuple(value.shape)}, the parameter "
                    f"{tuple(parameter.shape)}: it was "
                    "saved by a model of another size"
                )
