"""Optimizers around others: a prox after every step, several as one, averaged parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featherbed.checks import check_integer
from featherbed.errors import ArgumentError
from featherbed.optim.lazy import lazy_rows, settle_parameter
from featherbed.optim.penalties import Penalties, check_penalties
from featherbed.optim.row_optimizer import penalties_of

NEVER = 1 << 62  # steps between two scans of the atoms that rows lack


class Wrapper(Optimizer):
    """Steps ``optimizers``, which share no parameters; groups, states and gradients are theirs."""

    carried: ClassVar[tuple[str, ...]] = ("optimizers",)  # attributes of a copy

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
            raise ArgumentError(
                f"{type(self).__name__} got {optimizers!r}: give an optimizer, at least one, such "
                "as fb.SGD(model.parameters(), lr=0.1)"
            )
        self.optimizers = optimizers
        held = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        if len({id(p) for p in held}) < len(held):
            raise ArgumentError("a parameter is held by two optimizers: give each parameter to one")
        super().__init__(held, {})
        self._share()

    @property
    def optimizer(self) -> Optimizer:
        """The first optimizer, for most wrappers the only one."""
        return self.optimizers[0]

    def _share(self) -> None:
        groups = [one.param_groups for one in self.optimizers]
        self.param_groups = groups[0] if len(groups) == 1 else [*chain(*groups)]
        self.defaults = self.optimizer.defaults if len(groups) == 1 else {}

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The states of all parameters."""
        if len(self.optimizers) == 1:
            return self.optimizer.state
        found: defaultdict[Tensor, Any] = defaultdict(dict)
        for one in self.optimizers:
            found.update(one.state)
        return found

    @state.setter
    def state(self, _given: Any) -> None:
        """Nothing: the states are those of the optimizers."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every optimizer."""
        loss: float | None = self.optimizer.step(closure)
        for one in self.optimizers[1:]:
            one.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        self.optimizer.load_state_dict(state_dict)
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        """Return a state that contains the optimizers."""
        return {name: getattr(self, name) for name in self.carried}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a copy."""
        super().__setstate__({**state, "defaults": {}, "param_groups": []})
        self._share()


class Several(Wrapper):
    """Steps all ``optimizers``, which share no parameters; groups, gradients and checkpoints are
    combined.

    >>> import torch, featherbed as fb
    >>> table = fb.KDTable(100, 8, choices=4, parts=4, sparse=True)
    >>> codes, others = fb.split_codes(table)
    >>> optimizer = Several(torch.optim.SGD(others, lr=1.0), torch.optim.SparseAdam(codes, lr=0.01))
    >>> table(torch.tensor([1, 2])).sum().backward(); optimizer.step()
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers, in order."""
        return {"several": [one.state_dict() for one in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of all optimizers."""
        states = state_dict.get("several", [])
        if len(states) != len(self.optimizers):
            raise ArgumentError(
                f"the state is of {len(states)} optimizers, here are {len(self.optimizers)}"
            )
        for one, state in zip(self.optimizers, states, strict=True):
            one.load_state_dict(state)
        self._share()


class Proximal(Wrapper):
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

    carried = ("optimizers", "penalties")

    def __init__(self, optimizer: Optimizer, penalties: Penalties) -> None:
        super().__init__(optimizer)
        self.penalties = check_penalties(penalties, self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step, then apply the prox."""
        loss: float | None = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                penalty = self.penalties.get(parameter)
                if penalty is not None:
                    parameter.copy_(penalty.prox(parameter, float(group["lr"])))
        return loss

    def __repr__(self) -> str:
        return f"Proximal({self.optimizer!r}, {list(self.penalties.values())})"


class Averaged(Wrapper):
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

    carried = ("optimizers", "patience", "means", "last", "count", "observed")

    def __init__(self, optimizer: Optimizer, *, patience: int = 5) -> None:
        super().__init__(optimizer)
        self.patience = check_integer("patience", patience, 0)
        self.means: list[Tensor] | None = None
        # the parameters, while they are replaced by their means
        self.last: list[Tensor] | None = None
        self.count = 0
        self.observed: list[float] = []

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
        loss: float | None = super().step(closure)
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
        penalized, parameters = penalties_of(self.optimizer), self._parameters()
        self.last = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, mean in zip(parameters, self.means, strict=True):
                zero = (parameter == 0) & (parameter in penalized)
                parameter.copy_(torch.where(zero, 0.0, mean))
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

    def state_dict(self) -> dict[str, Any]:
        """Return inner state, means and losses; within ``swapped`` also the replaced parameters."""
        own = {name: getattr(self, name) for name in ("means", "last", "count", "observed")}
        return {"optimizer": self.optimizer.state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state after the model's; replaced parameters are restored."""
        super().load_state_dict(state_dict["optimizer"])
        self.count, self.observed = int(state_dict["count"]), list(state_dict["observed"])
        self.means, self.last = state_dict["means"], state_dict["last"]
        self._put_back()
        if self.started:
            self._rest_slots()

    def __repr__(self) -> str:
        return f"Averaged({self.optimizer!r}, patience={self.patience})"
