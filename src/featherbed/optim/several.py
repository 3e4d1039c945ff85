"""Several optimizers as one, for example a separate one for code logits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from featherbed.errors import ArgumentError


class Several(Optimizer):
    """Steps all ``optimizers``, which share no parameters; groups, gradients and checkpoints are
    combined.

    >>> import torch, featherbed as fb
    >>> table = fb.KDTable(100, 8, choices=4, parts=4, sparse=True)
    >>> codes, others = fb.split_codes(table)
    >>> optimizer = Several(torch.optim.SGD(others, lr=1.0), torch.optim.SparseAdam(codes, lr=0.01))
    >>> table(torch.tensor([1, 2])).sum().backward(); optimizer.step()
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise ArgumentError("Several takes at least one optimizer")
        self.optimizers = optimizers
        held = [
            p
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        if len({id(p) for p in held}) < len(held):
            raise ArgumentError("a parameter is held by two optimizers: give each parameter to one")
        super().__init__(held, {})
        self._share()

    def _share(self) -> None:
        self.param_groups = [
            group for optimizer in self.optimizers for group in optimizer.param_groups
        ]

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The states of all parameters."""
        found: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for optimizer in self.optimizers:
            found.update(optimizer.state)
        return found

    @state.setter
    def state(self, _given: Any) -> None:
        """Nothing: the states are those of the optimizers."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers, in order."""
        return {"several": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of all optimizers."""
        states = state_dict.get("several", [])
        if len(states) != len(self.optimizers):
            raise ArgumentError(
                f"the state is of {len(states)} optimizers, here are {len(self.optimizers)}"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        """Return a state that contains the optimizers."""
        return {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a copy."""
        self.optimizers = state["optimizers"]
        super().__setstate__({"defaults": {}, "state": {}, "param_groups": []})
        self._share()
