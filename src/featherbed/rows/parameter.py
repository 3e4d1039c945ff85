"""RowParameter: one row for every id, with gradients of the rows that were looked up and nothing more."""

from __future__ import annotations

from typing import Any, overload

from torch import Tensor, nn

import featherbed.rows.registry as registry
from featherbed.rows.ledger import Ledger
from featherbed.rows.operators import gather_rows
from featherbed.rows.slots import Slots


class RowParameter(nn.Embedding):
    """``weight`` [V, s], one row for each id; with ``sparse`` its gradient holds the rows looked up, as a sparse tensor.

    An optimizer of this library then steps only those rows. What the others miss (momentum still to come, decay, the prox) is
    kept in a ``ledger``: a look-up sees every row as if it had been there at every step, only an optimizer's step, ``settle``
    and ``state_dict`` write. It is an nn.Embedding because DistributedDataParallel takes sparse gradients from no other module.

    >>> import torch
    >>> rows = RowParameter(torch.zeros(10, 2), sparse=True)
    >>> rows(torch.tensor([3, 3])).sum().backward()
    >>> rows.weight.grad.coalesce().indices()
    tensor([[3]])
    """

    def __init__(self, data: Tensor, sparse: bool = False) -> None:  # [V, s]
        super().__init__(data.shape[0], data.shape[1], sparse=bool(sparse), _weight=data)
        self.slots: Slots | None = None
        self._enter()

    def _enter(self) -> None:
        self.ledger: Ledger | None = None
        self.number = registry.enter(self)

    def forward(self, ids: Tensor) -> Tensor:  # int64 [...] -> [..., s]
        """Return the rows of ids as they are now."""
        if not self.sparse:
            return nn.functional.embedding(ids, self.weight)
        rows: Tensor = gather_rows(self.weight, ids, self.number)
        return rows

    def settle(self) -> None:
        """Bring every row up to date where it is stored."""
        if self.ledger is not None:
            self.ledger.settle()

    @property
    def parameter(self) -> nn.Parameter:
        """The weight, every row up to date."""
        self.settle()
        held: nn.Parameter = self.weight  # type: ignore[assignment]
        return held

    def _apply(self, *given: Any, **settings: Any) -> RowParameter:
        """Rows are brought up to date before they change their type or device."""
        self.settle()
        super()._apply(*given, **settings)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.settle()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *given: Any) -> None:
        self.settle()
        super()._load_from_state_dict(*given)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold rows that are up to date, and no ledger: that is the optimizer's."""
        self.settle()
        return {
            name: value for name, value in self.__dict__.items() if name not in ("ledger", "number")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take in a copy's state."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enter()


class HeldRows:
    """``table.<name>``: the parameter that the RowParameter of this name holds, every row up to date."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, table: None, owner: Any = None) -> HeldRows: ...
    @overload
    def __get__(self, table: nn.Module, owner: Any = None) -> nn.Parameter: ...
    def __get__(self, table: nn.Module | None, owner: Any = None) -> HeldRows | nn.Parameter:
        if table is None:
            return self
        return row_parameter(table, self.name).parameter


def new_rows(data: Tensor, sparse: bool) -> Any:  # [V, s]
    """Return a row parameter for an attribute that is ``HeldRows``: assigned as a module, read as the parameter it holds."""
    return RowParameter(data.detach(), sparse)


def row_parameter(table: nn.Module, name: str) -> RowParameter:
    """Return the row parameter of a table by its name."""
    held = table._modules.get(name)
    if not isinstance(held, RowParameter):
        raise AttributeError(f"{type(table).__name__} has no {name}")
    return held


def settle(model: nn.Module) -> None:
    """Bring every row of every table of a model up to date where it is stored: for code that reads ``model.parameters()``.

    >>> import featherbed as fb
    >>> fb.settle(fb.AnchorTable(10, 4, anchors=2, sparse=True))
    """
    for module in model.modules():
        if isinstance(module, RowParameter):
            module.settle()
