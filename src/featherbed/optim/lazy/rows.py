"""Lazily updated parameters: look-ups and steps settle the rows that they read or change.

A parameter with row-sparse gradients is an ordinary ``nn.Parameter`` of its table. An optimizer of
this library steps only the rows of the batch; the updates that the other rows miss (momentum,
decay, the prox of a penalty) are recorded in a ``History`` and applied when a row is next read or
written. ``LazyRows`` is that record; ``RowParameter`` makes ``table.transform`` return settled
rows.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

import featherbed.optim.lazy.native as native
from featherbed.optim.lazy.history import History

if TYPE_CHECKING:
    from featherbed.optim.lazy.slots import Slots
    from featherbed.optim.penalties import Penalty

BLOCK = 1 << 18  # rows settled at once
_numbers = itertools.count(1)
RECORDS: weakref.WeakValueDictionary[int, LazyRows] = weakref.WeakValueDictionary()  # by number
_number_of = WeakIdKeyDictionary()  # parameter -> number


@dataclass(frozen=True)
class UpdateState:
    """An optimizer's state for the rows of a parameter, and its update of rows without a gradient.

    ``tensors``: "m", multiplied by ``beta`` at every step (0: rows without a gradient do not move),
    and "v", second moments; both [V, s]. ``preconditioned``: rows move by m / s, s = sqrt(v) + eps;
    ``metric``: thresholds are divided by s.
    """

    rule: str = "plain"
    tensors: dict[str, Tensor] = field(default_factory=dict, compare=False)
    beta: float = 0.0
    eps: float = 0.0
    preconditioned: bool = False
    metric: bool = False
    penalty: Penalty | None = None
    kind: str | None = "none"  # of the penalty in compiled loops, None if they do not know it


UNBOUND = UpdateState()  # of a parameter that no optimizer of ours has stepped


class LazyRows:
    """The missed updates of the rows of one parameter [V, s]; tied tables share the record.

    An optimizer calls ``bind`` before its first update and ``settle`` before it changes rows, and
    records each step in ``history``. ``stamps`` [V] are the last steps applied to each row.
    ``number`` identifies the record in compiled graphs, which cannot hold Python objects. ``slots``
    is set for tables with slots, ``steps`` counts the optimizer's steps.
    """

    def __init__(self, parameter: nn.Parameter, settled_by_lookup: bool = True) -> None:
        self.weight = parameter
        self._owner: weakref.ref[object] | None = None
        self.settled_by_lookup = settled_by_lookup  # False: a module of torch reads the parameter
        self.state, self.history = UNBOUND, History(0.0)
        self.slots: Slots | None = None
        self.distinct: Tensor | None = None  # ids of the last gradient, if no id is there twice
        self.steps = 0
        self.number = next(_numbers)
        RECORDS[self.number] = self
        _number_of[parameter] = self.number

    def bound_to(self, owner: object) -> bool:
        """Return whether ``owner`` is the optimizer that stepped the parameter last."""
        return self._owner is not None and self._owner() is owner

    def bind(self, owner: object, state: UpdateState, steps: int) -> None:
        """Record the updates of ``owner``, after settling those of another optimizer."""
        if self.bound_to(owner) and self.state == state and self.state.tensors is state.tensors:
            return
        self.release()
        self._owner, self.state, self.steps = weakref.ref(owner), state, steps
        self.history = History(state.beta)
        self.stamps = torch.zeros(len(self.weight), dtype=torch.int32, device=self.weight.device)
        support = () if self.slots is None else (self.slots.table.support,)
        for tensor in (self.weight, self.stamps, *state.tensors.values(), *support):
            if isinstance(tensor, Tensor):
                native.use_huge_pages(tensor)

    def release(self) -> None:
        """Settle all rows and detach the optimizer."""
        self.settle()
        self._owner, self.state = None, UNBOUND

    @property
    def behind(self) -> bool:
        """Whether any row may have missed updates."""
        return self.history.now > self.history.begin

    def compiled(self, *others: Tensor) -> bool:
        """Return whether compiled loops update this parameter, with ``others`` of its type."""
        return self.state.kind is not None and native.serves(self.weight, *others, wide=True)

    def lags(self, weight: Tensor) -> bool:
        """Return whether ``weight`` is the parameter and its rows may have missed updates."""
        missed = self.history.now > self.history.begin
        return missed and self.weight.data_ptr() == weight.data_ptr()

    def read(self, ids: Tensor) -> Tensor:  # [n] -> [n, s]
        """Return settled rows without writing."""
        if not self.behind:
            return self.weight.detach()[ids]
        return native.settle_rows(self, ids) if self.compiled() else self.replay(ids)[0]

    def settle(self, ids: Tensor | None = None) -> None:  # [n], distinct
        """Apply the missed updates of rows (all by default) in place."""
        if not self.behind:
            return
        if ids is None:
            everyone = torch.arange(len(self.weight), device=self.weight.device)
            for some in torch.split(everyone, BLOCK):
                self.settle(some)
            self.history.clear()
        elif self.compiled():
            native.settle_rows(self, ids, write=True)
        else:
            rows, momentum = self.replay(ids)
            self.weight.data[ids] = rows
            if momentum is not None:
                self.state.tensors["m"][ids] = momentum
            self.stamps[ids] = self.history.now

    def replay(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return rows and momentum after their missed updates: stepwise while momentum matters,
        then at once.

        The reference implementation of ``native.settle_rows``.
        """
        history, state = self.history, self.state
        rows = self.weight.detach()[ids]
        at = (self.stamps[ids].long() - history.begin).cpu()  # the last step each row has seen
        missed = len(history) - at
        scale = state.tensors["v"][ids].sqrt() + state.eps if state.preconditioned else 1.0
        momentum = state.tensors["m"][ids] if state.beta > 0 else None
        names = ("decay", "move", "threshold", "debt", "fall")
        table = {name: torch.from_numpy(history.column(name)) for name in names}

        def column(name: str, place: Tensor) -> Tensor:
            return table[name][place][:, None].to(rows)

        def shrink(values: Tensor, threshold: Tensor) -> Tensor:
            if state.penalty is None:
                return values
            each = threshold / scale if state.metric else threshold
            return state.penalty.shrink(values, each, ids)

        steps = min(int(missed.max()) if len(missed) else 0, history.reach)
        for k in range(1, steps + 1):
            late = (missed >= k).to(rows.device)[:, None]
            place = (at + k).clamp(max=len(history))
            moved = column("decay", place) * rows
            if momentum is not None:
                moved = moved - column("move", place) * (history.powers[k] * momentum) / scale
            rows = torch.where(late, shrink(moved, column("threshold", place)), rows)
        rest = (at + history.reach).clamp(max=len(history))  # the step each row has come to
        end = torch.full_like(rest, len(history))
        fallen = (table["fall"][end] - table["fall"][rest]).exp()
        owed = table["debt"][end] - table["debt"][rest] * fallen
        late = (rest < end).to(rows.device)[:, None]
        shrunk = shrink(rows * fallen[:, None].to(rows), owed[:, None].to(rows))
        rows = torch.where(late, shrunk, rows)
        if momentum is not None:
            momentum = momentum * (history.beta ** missed.double())[:, None].to(rows)
        return rows, momentum


def track(parameter: nn.Parameter) -> LazyRows:
    """Return the record of a parameter, created if necessary.

    >>> weight = nn.Parameter(torch.zeros(10, 2))
    >>> lazy = track(weight)
    >>> lazy is track(weight), lazy_rows(weight) is lazy
    (True, True)
    """
    return lazy_rows(parameter) or LazyRows(parameter)


def lazy_rows(parameter: Tensor) -> LazyRows | None:
    """Return the record of a parameter, None if its rows are not updated lazily."""
    return RECORDS.get(_number_of.get(parameter, 0))  # type: ignore[no-untyped-call]


def settle_parameter(parameter: Tensor) -> None:
    """Apply the missed updates of a parameter."""
    lazy = lazy_rows(parameter)
    if lazy is not None:
        lazy.settle()


def settle(model: nn.Module) -> None:
    """Apply all missed updates of a model, for code that reads ``model.parameters()`` directly.

    >>> import featherbed as fb
    >>> fb.settle(fb.AnchorTable(10, 4, anchors=2, sparse=True))
    """
    for parameter in model.parameters():
        settle_parameter(parameter)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # runs while a graph is traced
def settle_numbered(number: int) -> bool:
    """Apply the missed updates of record ``number`` before its parameter is exported."""
    lazy = RECORDS.get(number)
    if lazy is not None:
        with _disable_current_modes():  # export traces with fake tensors, these are real ones
            lazy.settle()
    return True


class RowParameter:
    """Declares ``table.<name>``, a parameter with one row per id that is settled when read.

    It is not a data descriptor, so that ``torch.nn.utils.prune`` and ``weight_norm`` can replace
    the parameter by a computed tensor.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, table: None, owner: Any = None) -> RowParameter: ...
    @overload
    def __get__(self, table: nn.Module, owner: Any = None) -> nn.Parameter: ...
    def __get__(self, table: nn.Module | None, owner: Any = None) -> RowParameter | nn.Parameter:
        if table is None:
            return self
        parameter = table.__dict__.get("_parameters", {}).get(self.name)
        if parameter is None:
            raise AttributeError(f"{type(table).__name__} has no attribute {self.name!r}")
        if not torch.compiler.is_compiling():
            settle_parameter(parameter)
        elif table.__dict__["_row_numbers"].get(self.name) is not None:  # a graph must not write
            return table.row_values(self.name, torch.arange(len(parameter)))  # type: ignore[operator,no-any-return]
        held: nn.Parameter = parameter
        return held


class SparseGradient(nn.Embedding):
    """Tells DistributedDataParallel that a parameter has row-sparse gradients.

    DDP checks ``nn.Embedding`` modules only and assumes the same for all of their parameters, but
    a table also has dense ones. This module lists a single parameter and owns none.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        nn.Module.__init__(self)
        self.sparse, self.name = True, name
        self.__dict__["listed"] = parameter

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: ARG002
        remove_duplicate: bool = True,  # noqa: ARG002
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameter under its name in the table."""
        yield (f"{prefix}.{self.name}" if prefix else self.name), self.__dict__["listed"]

    def extra_repr(self) -> str:
        """Show the parameter's name."""
        return self.name
