"""Optimizers: RowOptimizer (penalties, row-sparse gradients, lazy updates), its rules, resizing.

A rule (SGD, Adagrad, AdamW, Yogi) is written twice: here for torch tensors, and in
``kernels.arithmetic.step`` for compiled loops.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import featherbed.optim.lazy.native as native
from featherbed.checks import check_choice, check_number
from featherbed.errors import ArgumentError, FeatherbedError, IdError
from featherbed.optim.lazy import settle_parameter
from featherbed.optim.lazy.rows import LazyRows, UpdateState, lazy_rows
from featherbed.optim.lazy.slots import Proposal
from featherbed.optim.penalties import Penalties, Penalty, check_penalties
from featherbed.optim.processes import group_of, raise_together

Group = dict[str, Any]

ALONE = 1 << 20  # numbers that numpy takes in the calling thread


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of one step: p ← decay p - rate m / s, with m ← keep m + add g.

    ``prox`` is the step size of the penalty, ``beta`` the share of its momentum that a row without
    a gradient keeps (0: it does not move).
    """

    rate: float
    prox: float
    decay: float = 1.0
    keep: float = 0.0
    add: float = 1.0
    second: float = 0.0
    eps: float = 0.0
    correction: float = 1.0
    beta: float = 0.0
    coupled: float = 0.0  # weight decay that is added to the gradient


def initial_value(name: str, group: Group) -> float:
    """Return the initial value of the state tensor ``name`` of a parameter.

    >>> initial_value("v", {"initial_accumulator": 1e-6}), initial_value("m", {})
    (1e-06, 0.0)
    """
    return float(group.get("initial_accumulator", 0.0)) if name == "v" else 0.0


def small_array(values: Tensor) -> Any:
    """Return a small tensor as an array of numpy, else itself.

    Threads of torch that take part in an operation spin on the cores of our threads afterwards.
    """
    on_cpu = values.device.type == "cpu" and values.dtype in (torch.int64, torch.float32)
    return values.detach().numpy() if on_cpu and values.numel() < ALONE else values


def usable(gradient: Tensor) -> bool:
    """Check the row ids of a gradient; return whether all its values are finite."""
    values = gradient
    if gradient.is_sparse:
        ids, rows, values = gradient._indices()[0], len(gradient), gradient._values()
        known = small_array(ids)
        low, high = (int(known.min()), int(known.max())) if len(ids) else (0, 0)
        if low < 0 or high >= rows:
            raise IdError(f"ids go from 0 to {rows - 1}: got {low} to {high}")
    with np.errstate(all="ignore"):
        total = float(small_array(values).sum())
    return math.isfinite(total) or bool(values.isfinite().all())


class RowOptimizer(Optimizer):
    """Steps parameters by dense and row-sparse gradients, then applies the prox of penalized ones.

    Subclasses define the update (``coefficients``, ``advance``). A row-sparse gradient changes its
    own rows only; the updates of other rows are recorded and applied when these are next looked up,
    stepped, copied or saved, so that every row equals its value with dense gradients. NaN or
    infinity in a gradient raises an error before anything changes.
    """

    rule: ClassVar[str]
    holds: ClassVar[tuple[str, ...]] = ()  # the tensors kept for a parameter
    preconditioned: ClassVar[bool] = False  # rows without a gradient move by m / (sqrt(v) + eps)
    coupled: ClassVar[bool] = False  # whether weight decay is added to the gradient

    def __init__(
        self,
        params: Iterable[Any],
        settings: dict[str, Any],
        penalties: Penalties | None,
        metric: bool = False,
    ) -> None:
        for name, value in settings.items():
            if name != "betas":
                check_number(name, value, minimum=0)
            elif len(value) != 2 or not all(0 <= beta < 1 for beta in value):
                raise ArgumentError(f"betas={value!r}: give two numbers in [0, 1)")
        if not self.coupled and settings["lr"] * settings.get("weight_decay", 0.0) >= 1:
            raise ArgumentError(
                f"lr={settings['lr']!r} times weight_decay={settings['weight_decay']!r} is the "
                "share of a parameter lost: keep it below 1"
            )
        super().__init__(params, settings)
        self.penalties = check_penalties(penalties or {}, self.param_groups)
        self.metric = metric
        self._untracked: dict[nn.Parameter, LazyRows] = {}  # of modules that are no tables

    @abstractmethod
    def coefficients(self, group: Group, step: int) -> Coefficients:
        """Return the coefficients of a step, numbered from 1."""

    @abstractmethod
    def advance(
        self, p: Tensor, grad: Tensor, state: dict[str, Tensor], c: Coefficients
    ) -> Tensor | float:
        """Update values and their state in place; return the preconditioner."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter with a gradient, then apply the prox of penalized ones."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self._check_all(work)
        proposals: dict[nn.Parameter, Proposal | None] = {}
        # all scans before any step, so that they score gradients at one point
        for parameter, _ in work:
            lazy, grad = lazy_rows(parameter), parameter.grad
            if grad is None or not grad.is_sparse or lazy is None or lazy.slots is None:
                continue
            if lazy.bound_to(self):
                proposals[parameter] = lazy.slots.propose(grad, lazy.steps)
        for parameter, group in work:
            state = self._state_of(parameter, group)
            state["step"] += 1
            c = self.coefficients(group, state["step"])
            if parameter.grad is not None and parameter.grad.is_sparse:
                self._step_rows(parameter, parameter.grad, group, state, c)
                proposal = proposals.get(parameter)
                if proposal is not None:
                    self._replace_weakest(parameter, group, state, c, proposal)
            else:
                self._step_dense(parameter, state, c)
        return loss

    def _check_all(self, work: list[tuple[nn.Parameter, Group]]) -> None:
        """Raise the first error of any process in all of them, before anything changes."""
        error = None
        try:
            for parameter, group in work:
                assert parameter.grad is not None
                self._check(parameter, parameter.grad, group)
        except FeatherbedError as found:
            error = found
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            parameters = [p for group in self.param_groups for p in group["params"]]
            raise_together(error, group_of(parameters))
        elif error is not None:
            raise error

    def _check(self, parameter: nn.Parameter, grad: Tensor, group: Group) -> None:
        """Raise an error for unusable gradients and settings, before anything changes."""
        shape = tuple(parameter.shape)
        if not usable(grad):
            raise ArgumentError(
                f"the gradient of the parameter of shape {shape} holds NaN or infinity; nothing "
                "was changed: lower the learning rate, or look for the cause of so large a loss"
            )
        c = self.coefficients(group, 1)
        if c.decay <= 0:
            raise ArgumentError(
                f"lr={group['lr']} times weight_decay={group['weight_decay']} takes all of a "
                "parameter: lower one"
            )
        if not grad.is_sparse:
            return
        penalty, lazy = self.penalties.get(parameter), lazy_rows(parameter)
        if penalty is not None and self.metric and not penalty.separable:
            raise ArgumentError(
                f"{penalty!r} joins the elements of a row, which a row-sparse parameter cannot "
                "catch up in the metric of its optimizer: use prox='scalar'"
            )
        moves = penalty is not None or c.decay != 1.0 or c.beta > 0
        if moves and (lazy is None or not lazy.settled_by_lookup):
            raise ArgumentError(
                f"the parameter of shape {shape} has row-sparse gradients, but is no table of "
                "featherbed, whose rows could catch up with the steps they miss: use "
                "fb.DenseTable(..., sparse=True) in place of nn.Embedding(..., sparse=True)"
            )

    def _state_of(self, parameter: nn.Parameter, group: Group) -> dict[str, Any]:
        """Return the state of a parameter, created or converted to its dtype and shape."""
        state: dict[str, Any] = self.state[parameter]
        state.setdefault("step", 0)
        for name in self.holds:
            m = state.get(name)
            if m is None or (m.dtype, m.shape) != (parameter.dtype, parameter.shape):
                for other, fresh in self._fresh(parameter, group).items():
                    old = state.get(other)
                    fits = old is not None and old.shape == fresh.shape
                    state[other] = fresh.copy_(old) if fits else fresh  # type: ignore[arg-type]
        return state

    def _fresh(self, like: Tensor, group: Group) -> dict[str, Tensor]:
        """Return initial state tensors; those of a row are adjacent, on few cache lines."""
        if like.dim() == 2:
            width = like.shape[1]
            tensors = torch.split(like.new_empty(len(like), len(self.holds) * width), width or 1, 1)
        else:
            tensors = tuple(torch.empty_like(like) for _ in self.holds)
        kept = dict(zip(self.holds, tensors, strict=True))
        return {name: tensor.fill_(initial_value(name, group)) for name, tensor in kept.items()}

    def _proximal(
        self, parameter: Tensor, x: Tensor, scale: Tensor | float, c: Coefficients, ids: Any = None
    ) -> Tensor:
        """Return rows ``ids`` (None: all) of a parameter after its prox."""
        penalty = self.penalties.get(parameter)  # type: ignore[call-overload]
        step = c.prox / scale if self.metric else c.prox
        return x if penalty is None else penalty.prox(x, step, ids)

    def _step_dense(self, parameter: nn.Parameter, state: dict[str, Any], c: Coefficients) -> None:
        lazy, grad = lazy_rows(parameter), parameter.grad
        assert grad is not None
        if lazy is not None:
            lazy.settle()
            if lazy.bound_to(self):
                lazy.steps = state["step"]
            if lazy.slots is not None:
                lazy.slots.collected.clear()
        if c.coupled:
            grad = grad + c.coupled * parameter
        scale = self.advance(parameter, grad, state, c)
        if parameter in self.penalties:
            parameter.copy_(self._proximal(parameter, parameter, scale, c))

    def _step_rows(
        self,
        parameter: nn.Parameter,
        grad: Tensor,
        group: Group,
        state: dict[str, Any],
        c: Coefficients,
    ) -> None:
        """Settle, step and stamp the rows of a gradient; record the step for the others."""
        lazy, penalty = self._bind(parameter, group, state, c.beta), self.penalties.get(parameter)
        ids, rows = native.summed(grad._indices()[0], grad._values(), lazy.distinct)
        threshold = 0.0 if penalty is None else penalty.lam * c.prox
        idle = c.decay == 1.0 and c.beta == 0.0 and penalty is None  # other rows miss nothing
        stamp = lazy.history.now + (not idle)
        if lazy.compiled(rows):
            native.update_rows(lazy, ids, rows, c, threshold, stamp)
        else:
            self._update_rows(lazy, ids, rows, c, state, stamp)
        lazy.steps = state["step"]
        if not idle and lazy.history.push(c.decay, c.rate if c.beta else 0.0, threshold):
            lazy.settle()

    def _update_rows(
        self,
        lazy: LazyRows,
        ids: Tensor,
        grad: Tensor,
        c: Coefficients,
        state: dict[str, Any],
        stamp: int,
    ) -> None:
        """Settle, step and stamp rows: the reference of ``native.update_rows``."""
        lazy.settle(ids)
        kept, rows = {name: state[name][ids] for name in self.holds}, lazy.weight.detach()[ids]
        scale = self.advance(rows, grad + c.coupled * rows if c.coupled else grad, kept, c)
        lazy.weight.data[ids] = self._proximal(lazy.weight, rows, scale, c, ids)
        for name, tensor in kept.items():
            state[name][ids] = tensor
        lazy.stamps[ids] = stamp

    def _bind(
        self, parameter: nn.Parameter, group: Group, state: dict[str, Any], beta: float
    ) -> LazyRows:
        """Return the record of a parameter, bound to this optimizer and its state."""
        lazy = lazy_rows(parameter)
        if lazy is None:
            lazy = self._untracked[parameter] = LazyRows(parameter, settled_by_lookup=False)
        eps, penalty = float(group.get("eps", 0.0)), self.penalties.get(parameter)
        kind, how = "none" if penalty is None else penalty.kind, (self.preconditioned, self.metric)
        update = UpdateState(self.rule, state, beta, eps, *how, penalty, kind)
        lazy.bind(self, update, state["step"])
        return lazy

    def _replace_weakest(
        self,
        parameter: nn.Parameter,
        group: Group,
        state: dict[str, Any],
        c: Coefficients,
        proposal: Proposal,
    ) -> None:
        """Replace the weakest anchor of a row by a better one whose first step gives it a larger
        weight.
        """
        table, penalty, ids = proposal.table, self.penalties.get(parameter), proposal.ids
        weak = parameter.detach()[ids].abs().min(dim=1)
        grad = proposal.gradients
        first, kept = torch.zeros_like(grad), self._fresh(grad, group)
        scale = self.advance(first, grad, kept, c)
        if penalty is not None:
            step = c.prox / scale if self.metric else c.prox
            first = penalty.first(first, step, ids, proposal.atoms)
        elif table.nonnegative:
            first = first.clamp(min=0)
        better = (first.abs() > weak.values) & (grad != 0)
        at = ids[better], weak.indices[better]
        parameter[at] = first[better]
        table.support[at] = proposal.atoms[better].to(table.support.dtype)
        for name, tensor in kept.items():
            state[name][at] = tensor[better]

    def _records(self) -> list[LazyRows]:
        """Return the records bound to this optimizer."""
        found = (lazy_rows(p) for group in self.param_groups for p in group["params"])
        return [lazy for lazy in found if lazy is not None and lazy.bound_to(self)]

    def settle(self) -> None:
        """Apply all missed updates of all parameters in place."""
        for lazy in self._records():
            lazy.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return the state with settled rows; save the model's state with it."""
        self.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; raise an error for other shapes before anything changes."""
        self._check_state(state_dict)
        for lazy in self._records():
            lazy.release()
        super().load_state_dict(state_dict)
        self._bind_all()

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        """Raise an error if a state has other groups or shapes than the optimizer."""
        given, own = (
            [group["params"] for group in groups]
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        if [*map(len, given)] != [*map(len, own)]:
            raise ArgumentError(
                f"the state is of groups of {[*map(len, given)]} parameters, this optimizer has "
                f"{[*map(len, own)]}"
            )
        for number, parameter in zip(chain(*given), chain(*own), strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                    raise ArgumentError(
                        f"the state's {name} has shape {tuple(value.shape)}, the parameter "
                        f"{tuple(parameter.shape)}: it was saved by a model of another size"
                    )

    def _bind_all(self) -> None:
        """Bind parameters with a state: a backward pass before the next step may need its step
        count.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if lazy_rows(parameter) is not None and self.state.get(parameter):
                    beta = self.coefficients(group, 1).beta
                    self._bind(parameter, group, self.state[parameter], beta)

    def forget(self, parameter: nn.Parameter) -> None:
        """Settle a parameter whose shape or state is about to change, and release its record."""
        lazy = lazy_rows(parameter)
        if lazy is not None and lazy.bound_to(self):
            lazy.release()

    def __getstate__(self) -> dict[str, Any]:
        """Return a state that contains the penalties, on the copied parameters."""
        self.settle()
        return {**super().__getstate__(), "penalties": self.penalties, "metric": self.metric}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a copy, or of a checkpoint (without penalties)."""
        super().__setstate__({**state, "_untracked": {}} if "penalties" in state else state)
        if "penalties" in state:
            self._bind_all()


class SGD(RowOptimizer):
    """Stochastic gradient descent, with the prox of ANT's equation 3 for penalized parameters.

        m ← momentum m + g,   p ← (1 - lr weight_decay) p - lr m,   then the prox with step lr

    Like torch.optim.SGD, but with decoupled decay (equal without momentum). With row-sparse
    gradients every row equals its value with dense gradients, including momentum.

    >>> import torch, featherbed as fb
    >>> table = fb.AnchorTable(100, 8, anchors=4, sparse=True)
    >>> penalties = {table.transform: fb.NonNegativeL1(1e-3)}
    >>> optimizer = fb.SGD(table.parameters(), lr=0.1, penalties=penalties)
    >>> table(torch.tensor([1, 2])).sum().backward(); optimizer.step()
    """

    rule = "sgd"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        penalties: Penalties | None = None,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ArgumentError(f"momentum={momentum!r}: give a number in [0, 1)")
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, settings, penalties)

    @property
    def holds(self) -> tuple[str, ...]:  # type: ignore[override]
        """The momentum buffer, if any group has momentum."""
        return ("m",) if any(group["momentum"] for group in self.param_groups) else ()

    def coefficients(self, group: Group, step: int) -> Coefficients:  # noqa: ARG002 - the same at every step
        """Return learning rate, decay and momentum."""
        lr, momentum = float(group["lr"]), float(group["momentum"])
        decay = 1 - lr * group["weight_decay"]
        return Coefficients(lr, lr, decay=decay, keep=momentum, beta=momentum)

    def advance(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], c: Coefficients) -> float:
        """Update values and state in place."""
        if c.decay != 1.0:
            p.mul_(c.decay)
        moved = grad if c.keep == 0.0 else state["m"].mul_(c.keep).add_(grad)
        p.add_(moved, alpha=-c.rate)
        return 1.0


class Adagrad(RowOptimizer):
    """Adagrad (Duchi, Hazan and Singer 2011), like torch.optim.Adagrad.

        v ← v + g²,   p ← p - lr_t g / (sqrt(v) + eps),   lr_t = lr / (1 + (t - 1) lr_decay)

    followed by the prox with step lr_t. Rows without a gradient change by the prox only, which
    applies to every row at every step.

    >>> import torch, featherbed as fb
    >>> table = fb.DenseTable(100, 8, sparse=True)
    >>> optimizer = fb.Adagrad(table.parameters(), lr=0.1)
    >>> table(torch.tensor([1, 2])).sum().backward(); optimizer.step()
    """

    rule = "adagrad"
    holds = ("v",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        lr_decay: float = 0.0,
        eps: float = 1e-10,
        initial_accumulator: float = 0.0,
        penalties: Penalties | None = None,
    ) -> None:
        settings = {"lr": lr, "lr_decay": lr_decay, "eps": eps}
        super().__init__(params, settings | {"initial_accumulator": initial_accumulator}, penalties)

    def coefficients(self, group: Group, step: int) -> Coefficients:
        """Return the coefficients of a step, with decaying learning rate."""
        rate = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        return Coefficients(rate, rate, eps=float(group["eps"]))

    def advance(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], c: Coefficients) -> Tensor:
        """Update values and state in place."""
        state["v"].addcmul_(grad, grad)
        scale = torch.as_tensor(small_array(state["v"]) ** 0.5).add_(c.eps)
        p.addcdiv_(grad, scale, value=-c.rate)
        return scale


class AdamW(RowOptimizer):
    """AdamW (Loshchilov and Hutter 2019), also for row-sparse gradients.

        p ← (1 - lr weight_decay) p
        m ← b1 m + (1 - b1) g,   v ← b2 v + (1 - b2) g²
        p ← p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps),   then the prox with step lr

    With dense gradients it equals torch.optim.AdamW. With row-sparse gradients the moments of rows
    outside the batch do not change, as in torch.optim.SparseAdam; decay and prox, which SparseAdam
    lacks, apply to every row at every step. The prox is never preconditioned: with eps = 1e-8 the
    threshold would explode for parameters that never had a gradient.

    >>> import torch, featherbed as fb
    >>> table = fb.DenseTable(100, 8, sparse=True)
    >>> optimizer = fb.AdamW(table.parameters(), lr=0.01, weight_decay=0.1)
    >>> table(torch.tensor([1, 2])).sum().backward(); optimizer.step()
    """

    rule = "adam"
    holds = ("m", "v")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        penalties: Penalties | None = None,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings, penalties)

    def coefficients(self, group: Group, step: int) -> Coefficients:
        """Return the coefficients of a step, with bias-corrected moments."""
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        return Coefficients(
            lr / (1 - beta1**step),
            lr,
            decay=1 - lr * group["weight_decay"],
            keep=beta1,
            add=1 - beta1,
            second=1 - beta2,
            eps=float(group["eps"]),
            correction=math.sqrt(1 - beta2**step),
        )

    def advance(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], c: Coefficients) -> Tensor:
        """Update values and state in place."""
        m, v = state["m"], state["v"]
        p.mul_(c.decay)
        m.lerp_(grad, c.add)
        v.mul_(1 - c.second).addcmul_(grad, grad, value=c.second)
        scale = torch.as_tensor(small_array(v) ** 0.5).div_(c.correction).add_(c.eps)
        p.addcdiv_(m, scale, value=-c.rate)
        return scale


class Yogi(RowOptimizer):
    """Yogi (Zaheer et al. 2018) as released: constant v_0 and Adam's bias correction.

        m ← b1 m + (1 - b1) g
        v ← v - (1 - b2) sign(v - g²) g²
        p ← p - s m / (sqrt(v) + eps),   s = lr sqrt(1 - b2^t) / (1 - b1^t)

    ``penalties={parameter: penalty}`` adds a prox after the step: ``prox="preconditioned"`` in
    Yogi's metric (step s / (sqrt(v) + eps) per element, to which the published lambdas of ANT
    belong), ``prox="scalar"`` with step lr (ANT's equation 3 as printed). Initially the first is
    about 500 times the second. ``weight_decay`` adds weight_decay * p to the gradient. Every row is
    updated as if at every step; with row-sparse gradients (``sparse=True`` tables) only the rows of
    the batch cost time, and only they are decayed.

    >>> import torch, featherbed as fb
    >>> table = fb.AnchorTable(100, 8, anchors=4, sparse=True)
    >>> penalties = {table.transform: fb.NonNegativeL1(1e-4)}
    >>> optimizer = fb.Yogi(table.parameters(), lr=0.01, penalties=penalties)
    >>> table(torch.tensor([1, 2])).sum().backward(); optimizer.step()
    """

    rule = "yogi"
    holds = ("m", "v")
    preconditioned = True
    coupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-3,
        initial_accumulator: float = 1e-6,
        weight_decay: float = 0.0,
        penalties: Penalties | None = None,
        prox: str = "preconditioned",
    ) -> None:
        check_choice("prox", prox, ("preconditioned", "scalar"))
        settings = {"lr": lr, "betas": betas, "eps": check_number("eps", eps, above=0)}
        settings |= {"initial_accumulator": initial_accumulator, "weight_decay": weight_decay}
        super().__init__(params, settings, penalties, metric=prox == "preconditioned")

    def coefficients(self, group: Group, step: int) -> Coefficients:
        """Return the coefficients of a step, with bias correction as in Adam."""
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        return Coefficients(
            rate,
            rate if self.metric else lr,
            keep=beta1,
            add=1 - beta1,
            second=1 - beta2,
            eps=float(group["eps"]),
            beta=beta1,
            coupled=float(group["weight_decay"]),
        )

    def advance(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], c: Coefficients) -> Tensor:
        """Update values and state in place."""
        m, v, squared = state["m"], state["v"], grad * grad
        m.lerp_(grad, c.add)
        v.sub_(torch.sign(v - squared).mul_(squared), alpha=c.second)
        scale = torch.as_tensor(small_array(v) ** 0.5).add_(c.eps)
        p.addcdiv_(m, scale, value=-c.rate)
        return scale


# a tensor and the value of new entries -> the tensor in its new shape
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


def penalties_of(optimizer: Optimizer) -> dict[nn.Parameter, Penalty]:
    """Return the penalties of an optimizer and of those it wraps.

    >>> penalties_of(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    {}
    """
    found: dict[nn.Parameter, Penalty] = {}
    for owner in owners(optimizer):
        found |= getattr(owner, "penalties", {})
    return found
