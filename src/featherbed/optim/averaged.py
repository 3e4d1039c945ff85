"""Averaged: the mean of the parameters over steps, once it helps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featherbed.checks import check_integer
from featherbed.errors import ArgumentError
from featherbed.optim.lazy import lazy_rows, settle_parameter
from featherbed.optim.penalties import Penalty

NEVER = 1 << 62  # steps between two scans of the atoms that rows lack


class Averaged(Optimizer):
    """Steps ``optimizer``; from ``start()`` on, averages every parameter (Polyak and Juditsky
    1992).

        p̄_t = p̄_(t-1) + (p_t - p̄_(t-1)) / t

    ``observe`` takes the validation loss of every epoch and starts averaging when the latest is
    above the lowest of those more than ``patience`` epochs old: NT-ASGD (Merity et al. 2017,
    algorithm 1) with ``fb.SGD`` inside. Within ``with averaged.swapped():`` parameters are their
    means, for validation and storage. Penalties work as usual: the mean is zero where a penalized
    parameter is, so it is as sparse. Tables with slots no longer replace anchors, since a mean over
    different anchors has no meaning.

    >>> import torch, featherbed as fb
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> averaged = Averaged(fb.SGD([weight], lr=1.0))
    >>> averaged.start()
    >>> for gradient in (-1.0, -2.0):
    ...     weight.grad = torch.full((1,), gradient); averaged.step()
    >>> with averaged.swapped():
    ...     float(weight.detach())
    2.0
    """

    def __init__(self, optimizer: Optimizer, *, patience: int = 5) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(
                f"{optimizer!r}: give an optimizer, such as fb.SGD(model.parameters(), lr=30)"
            )
        self.optimizer, self.patience = optimizer, check_integer("patience", patience, 0)
        super().__init__(
            [p for group in optimizer.param_groups for p in group["params"]], optimizer.defaults
        )
        self.means: list[Tensor] | None = None
        self.last: list[Tensor] | None = (
            None  # the parameters, while their means stand in their places
        )
        self.count = 0
        self.observed: list[float] = []
        self._share()

    def _share(self) -> None:
        self.param_groups, self.defaults = self.optimizer.param_groups, self.optimizer.defaults

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of the inner optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, _given: Any) -> None:
        """Nothing: the state is the inner optimizer's."""

    @property
    def started(self) -> bool:
        """Whether averaging has started."""
        return self.means is not None

    def _parameters(self) -> list[nn.Parameter]:
        """Return the parameters, settled."""
        found = [p for group in self.param_groups for p in group["params"]]
        for parameter in found:
            settle_parameter(parameter)
        return found

    def start(self) -> None:
        """Start averaging at the next step."""
        if self.started:
            return
        self.means = [torch.zeros_like(p, requires_grad=False) for p in self._parameters()]
        self._rest_slots()

    def _rest_slots(self) -> None:
        for parameter in self._parameters():
            lazy = lazy_rows(parameter)
            if lazy is not None and lazy.slots is not None:
                lazy.slots.every = NEVER

    def observe(self, value: float) -> bool:
        """Record a validation loss; start averaging if losses stagnate. Return whether it has
        started.
        """
        self.observed.append(float(value))
        older = self.observed[: -self.patience - 1]
        if older and not value <= min(older):
            self.start()
        return self.started

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step, then update the means."""
        if self.last is not None:
            raise ArgumentError(
                "the parameters are their means here: leave the block `with averaged.swapped()` to "
                "train on"
            )
        loss: float | None = self.optimizer.step(closure)
        if self.means is not None:
            self.count += 1
            for mean, parameter in zip(self.means, self._parameters(), strict=True):
                mean.lerp_(parameter, 1 / self.count)
        return loss

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Replace the parameters by their means within a block."""
        if self.means is None or not self.count:
            yield
            return
        penalised, parameters = penalties_of(self.optimizer), self._parameters()
        self.last = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, mean in zip(parameters, self.means, strict=True):
                parameter.copy_(
                    torch.where(parameter == 0, 0.0, mean) if parameter in penalised else mean
                )
        try:
            yield
        finally:
            self._put_back()

    @torch.no_grad()
    def _put_back(self) -> None:
        if self.last is not None:
            for parameter, own in zip(self._parameters(), self.last, strict=True):
                parameter.copy_(own)
        self.last = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return inner state, means and losses; within ``swapped`` also the replaced parameters."""
        own = {
            "means": self.means,
            "last": self.last,
            "count": self.count,
            "observed": self.observed,
        }
        return {"optimizer": self.optimizer.state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state after the model's; replaced parameters are restored."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self._share()
        self.count, self.observed = int(state_dict["count"]), list(state_dict["observed"])
        self.means, self.last = state_dict["means"], state_dict["last"]
        self._put_back()
        if self.started:
            self._rest_slots()

    def __getstate__(self) -> dict[str, Any]:
        """Return the complete state."""
        names = ("optimizer", "patience", "means", "last", "count", "observed")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a copy."""
        self.__dict__.update(state)
        super().__setstate__({"defaults": self.optimizer.defaults, "state": {}, "param_groups": []})
        self._share()

    def __repr__(self) -> str:
        return f"Averaged({self.optimizer!r}, patience={self.patience})"


def penalties_of(optimizer: Any) -> dict[nn.Parameter, Penalty]:
    """Return the penalties of an optimizer and of those it wraps.

    >>> penalties_of(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    {}
    """
    found = dict(getattr(optimizer, "penalties", {}))
    for inner in getattr(optimizer, "optimizers", [getattr(optimizer, "optimizer", None)]):
        if inner is not None:
            found |= penalties_of(inner)
    return found
