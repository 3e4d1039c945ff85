"""RowOptimizer: what the optimizers here share. Dense and row-sparse gradients, penalties, rows that catch up."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import featherbed.rows.fast as fast
from featherbed.errors import ArgumentError
from featherbed.optim.checks import check_state
from featherbed.optim.penalties import Penalty, check_penalties
from featherbed.rows import lazy_rows
from featherbed.rows.ledger import Account, Ledger
from featherbed.rows.slots import Proposal

Group = dict[str, Any]


@dataclass(frozen=True)
class Coefficients:
    """The numbers of one step: p ← decay p - rate m / s, with m ← keep m + add g; ``prox`` is the step of the penalty."""

    rate: float
    prox: float
    decay: float = 1.0
    keep: float = 0.0
    add: float = 1.0
    second: float = 0.0
    eps: float = 0.0
    correction: float = 1.0


class RowOptimizer(Optimizer):
    """Steps parameters by dense and by row-sparse gradients, then takes the prox of the penalised ones.

    A rule says what a step does (``coefficients``, ``advance``). A row-sparse gradient changes its own rows only; what the rule
    would have done to the others is kept in a ledger and done when they are next looked up, stepped, copied or saved, so
    that every row is what it would be with dense gradients. NaN or infinity in any gradient is refused before anything changes.
    """

    rule: ClassVar[str]
    holds: ClassVar[tuple[str, ...]] = ()  # the tensors kept for a parameter
    preconditioned: ClassVar[bool] = (
        False  # whether rows without a gradient move by m / (sqrt(v) + eps)
    )
    coupled: ClassVar[bool] = False  # whether weight decay is added to the gradient

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        penalties: Mapping[nn.Parameter, Penalty] | None,
        metric: bool = False,
    ) -> None:
        super().__init__(params, defaults)
        held = {id(p) for group in self.param_groups for p in group["params"]}
        self.penalties = check_penalties(penalties or {}, held)
        self.metric = metric
        self._ledgers: dict[nn.Parameter, Ledger] = {}

    @abstractmethod
    def coefficients(self, group: Group, step: int) -> Coefficients:
        """Return the numbers of the step of this number, from 1."""

    @abstractmethod
    def advance(
        self, p: Tensor, grad: Tensor, state: dict[str, Tensor], c: Coefficients
    ) -> Tensor | float:
        """Step values by their gradients, with the tensors kept for them, all in place; return the preconditioner."""

    def first(self, name: str, group: Group) -> float:  # noqa: ARG002 - some rules start elsewhere
        """Return what a kept tensor is filled with before the first step."""
        return 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient, then take the prox of the penalised ones."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [
            (p, group) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        for parameter, group in work:
            self._check(parameter, group)
        proposals = {p: self._propose(p) for p, _ in work if p.grad.is_sparse}
        for parameter, group in work:
            state = self._state_of(parameter, group)
            state["step"] += 1
            c = self.coefficients(group, state["step"])
            if parameter.grad.is_sparse:
                self._step_rows(parameter, group, state, c)
                self._let_in(parameter, group, state, c, proposals[parameter])
            else:
                self._step_dense(parameter, group, state, c)
        return loss

    def _check(self, parameter: nn.Parameter, group: Group) -> None:
        grad = parameter.grad
        assert grad is not None
        values = grad._values() if grad.is_sparse else grad
        if not fast.finite(values):
            raise ArgumentError(
                f"the gradient of the parameter of shape {tuple(parameter.shape)} holds NaN or infinity; nothing was changed: "
                "lower the learning rate, or look for what made the loss so large"
            )
        if self.coefficients(group, 1).decay <= 0:
            raise ArgumentError(
                f"lr={group['lr']} times weight_decay={group['weight_decay']} takes all of a parameter: lower one"
            )
        penalty = self.penalties.get(parameter)
        if grad.is_sparse and penalty is not None and self.metric and not penalty.separable:
            raise ArgumentError(
                f"{penalty!r} joins the elements of a row, which a row-sparse parameter cannot catch up in the metric of its "
                "optimizer: use prox='scalar'"
            )
        lags = penalty is not None or self._lags(group)
        if grad.is_sparse and lags and lazy_rows(parameter) is None:
            raise ArgumentError(
                f"the parameter of shape {tuple(parameter.shape)} has row-sparse gradients, but is no table of featherbed, "
                "whose rows could catch up with the steps they miss: use fb.DenseTable(..., sparse=True) in place of "
                "nn.Embedding(..., sparse=True)"
            )

    def _lags(self, group: Group) -> bool:
        """Whether rows without a gradient move."""
        c = self.coefficients(group, 1)
        return c.decay != 1.0 or self._beta(group) > 0

    def _beta(self, group: Group) -> float:  # noqa: ARG002 - some rules have one
        """Return how much of its momentum a row without a gradient keeps at each step, 0 if it does not move."""
        return 0.0

    def _state_of(self, parameter: nn.Parameter, group: Group) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            state.update(self._fresh(parameter, group))
        elif any(name not in state or not _fit(state[name], parameter) for name in self.holds):
            fresh = self._fresh(
                parameter, group
            )  # a momentum that was not there, a parameter of another type or shape
            for name, tensor in fresh.items():
                old = state.get(name)
                state[name] = (
                    tensor.copy_(old) if old is not None and old.shape == tensor.shape else tensor
                )
        return state

    def _fresh(self, like: Tensor, group: Group) -> dict[str, Tensor]:
        """Return the kept tensors as they are before the first step; those of a row lie side by side, on few cache lines."""
        names = self.holds
        if like.dim() != 2:
            return {name: torch.full_like(like, self.first(name, group)) for name in names}
        rows, width = like.shape
        together = like.new_empty(rows, len(names) * width)
        kept = {name: together[:, at * width : (at + 1) * width] for at, name in enumerate(names)}
        for name, tensor in kept.items():
            tensor.fill_(self.first(name, group))
        return kept

    def _tensors(self, state: dict[str, Any]) -> dict[str, Tensor]:
        return {name: state[name] for name in self.holds}

    def _step_dense(
        self, parameter: nn.Parameter, group: Group, state: dict[str, Any], c: Coefficients
    ) -> None:
        ledger, grad = self._ledgers.get(parameter), parameter.grad
        assert grad is not None
        lazy = lazy_rows(parameter)
        if lazy is not None:
            lazy.settle()
            if lazy.slots is not None:
                lazy.slots.clear()
        if ledger is not None:
            ledger.steps = state["step"]
        if self.coupled and group["weight_decay"]:
            grad = grad + group["weight_decay"] * parameter
        scale = self.advance(parameter, grad, self._tensors(state), c)
        penalty = self.penalties.get(parameter)
        if penalty is not None:
            parameter.copy_(penalty.prox(parameter, c.prox / scale if self.metric else c.prox))

    def _step_rows(
        self, parameter: nn.Parameter, group: Group, state: dict[str, Any], c: Coefficients
    ) -> None:
        ledger, penalty = self._ledger_of(parameter, group, state), self.penalties.get(parameter)
        assert parameter.grad is not None
        ids, grad = fast.summed(parameter.grad._indices()[0], parameter.grad._values())
        if self.coupled and group["weight_decay"]:
            grad = grad + group["weight_decay"] * ledger.settled(ids)
        threshold = penalty.lam * c.prox if penalty is not None else 0.0
        idle = c.decay == 1.0 and threshold == 0.0 and ledger.beta == 0.0 and penalty is None
        stamp = ledger.now + (not idle)
        if ledger.account.kind is not None and fast.in_kernels(parameter, grad, wide=True):
            numbers = [c.decay, c.rate, c.keep, c.add, c.second, c.eps, c.correction, threshold]
            fast.update_rows(
                ledger, self.rule, ids, grad, numbers, state.get("m"), state.get("v"), stamp
            )
        else:
            ledger.settle(ids)
            kept = {name: tensor[ids] for name, tensor in self._tensors(state).items()}
            rows = parameter.detach()[ids]
            scale = self.advance(rows, grad, kept, c)
            if penalty is not None:
                rows = penalty.prox(rows, c.prox / scale if self.metric else c.prox, ids)
            parameter[ids] = rows
            for name, tensor in kept.items():
                state[name][ids] = tensor
            ledger.stamps[ids] = stamp
        ledger.steps = state["step"]
        if not idle:
            ledger.history.push(c.decay, c.rate if ledger.beta else 0.0, threshold)
            if ledger.history.full:
                ledger.settle()

    def _ledger_of(self, parameter: nn.Parameter, group: Group, state: dict[str, Any]) -> Ledger:
        ledger, penalty, beta = (
            self._ledgers.get(parameter),
            self.penalties.get(parameter),
            self._beta(group),
        )
        lazy, eps = lazy_rows(parameter), float(group.get("eps", 0.0))
        if lazy is not None and lazy.ledger is not ledger:
            lazy.settle()  # the updates another optimizer has recorded
            lazy.ledger = ledger
        if ledger is not None and self._fits(ledger, state, beta, eps, penalty):
            return ledger
        if ledger is not None:
            ledger.settle()
        kind = "none" if penalty is None else penalty.kind
        moving = state["m"] if beta > 0 else None
        second = state["v"] if self.preconditioned else None
        account = Account(moving, second, eps, self.metric, penalty, kind)
        self._ledgers[parameter] = ledger = Ledger(parameter, account, beta, state["step"])
        if lazy is not None:
            lazy.ledger = ledger
        return ledger

    def _fits(
        self,
        ledger: Ledger,
        state: dict[str, Any],
        beta: float,
        eps: float,
        penalty: Penalty | None,
    ) -> bool:
        """Whether a ledger still tells how rows move."""
        account = ledger.account
        tensors = all(
            held is None or held is state[name]
            for name, held in (("m", account.momentum), ("v", account.second))
        )
        kind = "none" if penalty is None else penalty.kind
        return (
            tensors
            and ledger.beta == beta
            and account.eps == eps
            and account.penalty is penalty
            and account.kind == kind
        )

    def _propose(self, parameter: nn.Parameter) -> Proposal | None:
        lazy, ledger = lazy_rows(parameter), self._ledgers.get(parameter)
        slots = None if lazy is None else lazy.slots
        if slots is None or ledger is None or not slots.due(ledger.steps):
            return None
        assert parameter.grad is not None
        return slots.propose(parameter.grad)

    def _let_in(
        self,
        parameter: nn.Parameter,
        group: Group,
        state: dict[str, Any],
        c: Coefficients,
        proposal: Proposal | None,
    ) -> None:
        """Let an atom into a row for the weakest that is there, if its first step makes more of it."""
        lazy = lazy_rows(parameter)
        slots = None if lazy is None else lazy.slots
        if proposal is None or slots is None:
            return
        penalty, ids = self.penalties.get(parameter), proposal.ids
        support = slots.table.support
        weak = parameter.detach()[ids].abs().min(dim=1)
        grad = proposal.gradients
        first, kept = torch.zeros_like(grad), self._fresh(grad, group)
        scale = self.advance(first, grad, kept, c)
        if penalty is not None:
            first = penalty.first(
                first, c.prox / scale if self.metric else c.prox, ids, proposal.atoms
            )
        elif slots.table.nonnegative:
            first = first.clamp(min=0)
        better = (first.abs() > weak.values) & (grad != 0)
        at = ids[better], weak.indices[better]
        parameter[at] = first[better]
        support[at] = proposal.atoms[better].to(support.dtype)
        for name, tensor in kept.items():
            state[name][at] = tensor[better]

    def settle(self) -> None:
        """Bring every row of every parameter up to date where it is stored."""
        for ledger in self._ledgers.values():
            ledger.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, every row up to date: save the model's state with it."""
        self.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take in a state; one of other shapes is refused before anything changes."""
        check_state(self, state_dict)
        self._drop_ledgers()
        super().load_state_dict(state_dict)
        self._open_ledgers()

    def _open_ledgers(self) -> None:
        """Begin ledgers where a state goes on: a backward pass before the next step may ask how many steps there were."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if lazy_rows(parameter) is not None and self.state.get(parameter):
                    self._ledger_of(parameter, group, self.state[parameter])

    def _drop_ledgers(self) -> None:
        for parameter in [*self._ledgers]:
            self.forget(parameter)

    def forget(self, parameter: nn.Parameter) -> None:
        """Bring the rows of a parameter up to date and close its books: its shape or its state is about to change."""
        ledger = self._ledgers.pop(parameter, None)
        if ledger is not None:
            ledger.settle()
            lazy = lazy_rows(parameter)
            if lazy is not None:
                lazy.ledger = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles keep the penalties, on the copied parameters."""
        self.settle()
        return {
            **super().__getstate__(),
            "penalties": list(self.penalties.items()),
            "metric": self.metric,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take in a copy's state, or a checkpoint's, which has no penalties of its own."""
        if "penalties" in state:
            state = {**state, "penalties": dict(state["penalties"]), "_ledgers": {}}
        super().__setstate__(state)
        if "penalties" in state:
            self._open_ledgers()


def _fit(kept: Tensor, parameter: Tensor) -> bool:
    return kept.dtype == parameter.dtype and kept.shape == parameter.shape
