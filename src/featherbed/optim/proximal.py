"""Proximal: a prox after every step of any torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from featherbed.optim.penalties import Penalty, check_penalties


class Proximal(Optimizer):
    """Steps ``optimizer``, then x = prox(x; lr) for every penalized parameter.

    The threshold is lam * lr of the parameter's group, independent of the optimizer's
    preconditioner: with Adam's eps of 1e-8 a preconditioned threshold explodes for parameters
    without gradients. Every row is shrunk at every step. Groups, state and defaults are the wrapped
    optimizer's, so schedulers, gradient scalers and checkpoints work as usual.

    >>> import torch, featherbed as fb
    >>> table = fb.AnchorTable(100, 8, anchors=4)
    >>> adam = torch.optim.Adam(table.parameters(), lr=0.01)
    >>> optimizer = fb.Proximal(adam, {table.transform: fb.NonNegativeL1(1e-3)})
    >>> table(torch.tensor([1, 2])).sum().backward(); optimizer.step()
    """

    def __init__(self, optimizer: Optimizer, penalties: Mapping[nn.Parameter, Penalty]) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.penalties = check_penalties(penalties, held)
        self.optimizer = optimizer
        super().__init__(
            [p for group in optimizer.param_groups for p in group["params"]], optimizer.defaults
        )
        self._share()

    def _share(self) -> None:
        self.param_groups, self.state, self.defaults = (
            self.optimizer.param_groups,
            self.optimizer.state,
            self.optimizer.defaults,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return a state with the wrapped optimizer and the penalties on the copied parameters."""
        return {"optimizer": self.optimizer, "penalties": list(self.penalties.items())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a copy."""
        self.optimizer, self.penalties = state["optimizer"], dict(state["penalties"])
        shared = {"defaults": self.optimizer.defaults, "state": self.optimizer.state}
        super().__setstate__({**shared, "param_groups": self.optimizer.param_groups})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step, then apply the prox."""
        loss: float | None = self.optimizer.step(closure)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                penalty = self.penalties.get(parameter)
                if penalty is not None:
                    parameter.copy_(penalty.prox(parameter, float(group["lr"])))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        self.optimizer.load_state_dict(state_dict)
        self._share()

    def __repr__(self) -> str:
        return f"Proximal({self.optimizer!r}, {list(self.penalties.values())})"
