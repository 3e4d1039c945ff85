"""Parameters that change shape, together with their optimizer state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featherbed.optim.lazy import settle_parameter
from featherbed.optim.row_optimizer import RowOptimizer, initial_value

# a tensor and what new entries hold -> the tensor in its new shape
Change = Callable[[Tensor, float], Tensor]


def owners(optimizer: Optimizer | None) -> list[Optimizer]:
    """Return an optimizer and the optimizers it wraps.

    >>> import featherbed as fb
    >>> adam = torch.optim.Adam([nn.Parameter(torch.zeros(2))])
    >>> len(owners(fb.Proximal(adam, {})))
    2
    """
    if optimizer is None:
        return []
    inner = getattr(optimizer, "optimizers", None) or [getattr(optimizer, "optimizer", None)]
    return [optimizer, *(owner for one in inner for owner in owners(one))]


def kept_for(parameter: nn.Parameter, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return the optimizer's state tensors with the shape of a parameter, by name."""
    found: dict[str, Tensor] = {}
    for owner in owners(optimizer):
        state = owner.state.get(parameter, {})
        found |= {name: value for name, value in state.items() if _alike(value, parameter)}
    return found


def _alike(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


@torch.no_grad()
def resize(parameter: nn.Parameter, change: Change, optimizer: Optimizer | None = None) -> None:
    """Apply ``change`` to a parameter and to all optimizer state tensors of its shape.

    The parameter remains the same object, so optimizers, penalties and models keep it. New entries
    are zero, those of state tensors have their initial value.
    """
    settle_parameter(parameter)
    for owner in reversed(owners(optimizer)):  # first the innermost: it knows initial values
        penalty = getattr(owner, "penalties", {}).get(parameter)
        if penalty is not None and penalty.kept is not None:
            penalty.kept = change(penalty.kept, True)
        groups = owner.param_groups
        group = next((g for g in groups if any(p is parameter for p in g["params"])), {})
        ours, state = isinstance(owner, RowOptimizer), owner.state.get(parameter, {})
        for name, value in [*state.items()]:
            if _alike(value, parameter):
                state[name] = change(value, initial_value(name, group) if ours else 0.0)
        if isinstance(owner, RowOptimizer):
            owner.forget(parameter)
    parameter.grad = None
    changed = change(parameter.data, 0.0)
    # autograd remembers the shape while a graph lives (a loop's last loss): another type makes it
    # forget
    other = torch.float16 if changed.dtype != torch.float16 else torch.float32
    parameter.data = changed.new_empty(0, dtype=other)
    parameter.data = changed
