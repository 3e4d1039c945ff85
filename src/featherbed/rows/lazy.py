"""Parameters whose rows are updated lazily: a look-up settles the rows it reads, a step the rows it changes.

A parameter with row-sparse gradients is an ordinary ``nn.Parameter`` of its table. An optimizer of this
library steps only the rows of the batch; the updates that the other rows miss (momentum, decay, the
prox of a penalty) are recorded in a ``Ledger`` and applied when a row is next read or written. This
module finds the record of a parameter, and makes ``table.transform`` read settled rows.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from featherbed.rows.ledger import Ledger
    from featherbed.rows.slots import Slots

_numbers = itertools.count(1)
_open: weakref.WeakValueDictionary[int, LazyRows] = weakref.WeakValueDictionary()
_number_of = WeakIdKeyDictionary()  # parameter -> number


class LazyRows:
    """The record of one parameter [V, s] with row-sparse gradients; tied tables share it.

    ``number`` stands for the record in compiled graphs, which cannot hold Python objects. ``ledger``
    belongs to the optimizer that stepped the parameter last; ``slots`` is set for tables with slots.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = weakref.ref(parameter)
        self.ledger: Ledger | None = None
        self.slots: Slots | None = None
        self.number = next(_numbers)
        _open[self.number] = self
        _number_of[parameter] = self.number

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter, while it is alive."""
        return self._parameter()

    def settle(self) -> None:
        """Apply every missed update, to all rows, in place."""
        if self.ledger is not None:
            self.ledger.settle()

    def lagging(self, weight: Tensor) -> Ledger | None:
        """Return the ledger if rows of ``weight`` may have missed updates; None for any other tensor."""
        ledger = self.ledger
        if ledger is None or not ledger.behind:
            return None
        return ledger if ledger.weight.data_ptr() == weight.data_ptr() else None


def track(parameter: nn.Parameter) -> LazyRows:
    """Return the record of a parameter, a new one if it has none.

    >>> weight = nn.Parameter(torch.zeros(10, 2))
    >>> lazy = track(weight)
    >>> lazy is track(weight), lazy_rows(weight) is lazy
    (True, True)
    """
    return lazy_rows(parameter) or LazyRows(parameter)


def lazy_rows(parameter: Tensor) -> LazyRows | None:
    """Return the record of a parameter, None if its rows are not updated lazily."""
    return _open.get(_number_of.get(parameter, 0))  # type: ignore[no-untyped-call]


def numbered(number: int) -> LazyRows | None:
    """Return the record of a number, if its parameter is still in use."""
    return _open.get(number)


def settle_parameter(parameter: Tensor) -> None:
    """Apply the missed updates of a parameter, if there are any."""
    lazy = lazy_rows(parameter)
    if lazy is not None:
        lazy.settle()


def settle(model: nn.Module) -> None:
    """Apply all missed updates of a model in place, for code that reads ``model.parameters()``.

    >>> import featherbed as fb
    >>> fb.settle(fb.AnchorTable(10, 4, anchors=2, sparse=True))
    """
    for parameter in model.parameters():
        settle_parameter(parameter)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # runs while a graph is traced
def settle_numbered(number: int) -> bool:
    """Apply the missed updates of record ``number`` before its parameter is exported."""
    lazy = numbered(number)
    if lazy is not None:
        with torch.utils._python_dispatch._disable_current_modes():
            lazy.settle()
    return True


class RowParameter:
    """Declares ``table.<name>``, a parameter with one row per id, read with every row settled.

    It is no data descriptor, so that ``torch.nn.utils.prune`` and ``weight_norm`` can put a computed
    tensor in the parameter's place.
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

    DDP asks ``nn.Embedding`` modules alone, and takes their word for all of their parameters; a table
    has dense parameters beside the sparse one. This module lists the one parameter and owns none.
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
        """Yield the parameter under the name it has in its table."""
        yield (f"{prefix}.{self.name}" if prefix else self.name), self.__dict__["listed"]

    def extra_repr(self) -> str:
        """Show the parameter's name."""
        return self.name
