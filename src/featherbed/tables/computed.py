"""Computed rows: a tensor that refuses in-place operations."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from featherbed.errors import ArgumentError


class ComputedRows(Tensor):
    """A tensor computed from a table's parameters, on which in-place operations raise an error.

    Results of operations are ordinary tensors, like those of an nn.Parameter.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    table: str

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The detached rows, read-only too."""
        return computed(self.detach(), self.table)

    def __setitem__(self, *_: Any) -> NoReturn:
        _refuse(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.detach().clone()


def _refuse(rows: ComputedRows, *_: Any, **__: Any) -> NoReturn:
    raise ArgumentError(
        f"the weight of a {rows.table} is computed from its parameters and cannot be written to: "
        "set those, or fit the table to rows with fit_dense(matrix)"
    )


for _name in dir(Tensor):
    if _name.endswith("_") and not _name.endswith("__") and _name != "requires_grad_":
        setattr(ComputedRows, _name, _refuse)
for _name in [
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "iand",
    "ior",
    "ixor",
]:
    setattr(ComputedRows, f"__{_name}__", _refuse)


def is_transformed(tensor: Tensor) -> bool:
    """Return whether row-sparse operators fail: in torch.export and torch.func transforms."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def computed(rows: Tensor, table: str) -> Tensor:
    """Return rows as ``ComputedRows``, unchanged in compiled graphs and torch.func transforms.

    >>> computed(torch.zeros(2, 3), "AnchorTable").sum()
    tensor(0.)
    """
    if torch.compiler.is_compiling() or is_transformed(rows) or isinstance(rows, ComputedRows):
        return rows
    marked = rows.as_subclass(ComputedRows)
    marked.table = table
    return marked
