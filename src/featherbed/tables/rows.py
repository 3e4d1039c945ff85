"""Modules with one row per id: row-sparse gradients, settled copies and state dicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.optim.lazy import LazyRows, settle_parameter, track
from featherbed.optim.lazy.operators import gather_rows
from featherbed.optim.lazy.rows import SparseGradient, settle_numbered
from featherbed.packed.matrix import Matrix
from featherbed.tables.computed import is_transformed


class RowModule(nn.Module):
    """A module over ``num_embeddings`` ids whose row parameters may be updated lazily.

    ``add_rows`` registers a parameter with one row per id, ``row_values`` looks rows up. Pending
    updates of rows are applied before the rows are copied, moved or saved.
    """

    num_embeddings: int
    sparse: bool  # whether parameters with one row per id have row-sparse gradients
    # names of parameters in earlier state dicts -> today's
    old_names: ClassVar[dict[str, str]] = {}

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.sparse = bool(sparse)
        self._row_numbers: dict[str, int] = {}  # row parameter -> its number in compiled graphs
        self._lazy: dict[str, LazyRows] = {}  # row parameter -> its record
        self._fixed: list[str] = []  # buffers that `to_empty` leaves as they are

    def add_rows(
        self,
        name: str,
        width: int,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        rows: int | None = None,
    ) -> None:
        """Register an uninitialized parameter [V, width]; gradients are sparse if ``sparse``."""
        parameter = empty_parameter((rows or self.num_embeddings, width), dtype, device)
        if self.sparse:
            self._row_numbers[name] = 0
        self.register_parameter(name, parameter)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter and track it if it is row-sparse."""
        super().register_parameter(name, param)
        if name in self.__dict__.get("_row_numbers", ()):
            self._track(name)

    def _track(self, name: str) -> None:
        parameter = self._parameters.get(name)
        if parameter is not None:
            self._lazy[name] = track(parameter)
            self._row_numbers[name] = self._lazy[name].number

    def register_fixed(self, name: str, buffer: Tensor) -> None:
        """Register a buffer that assigns ids: never empty, also where parameters are on meta."""
        self._fixed.append(name)
        self.register_buffer(name, buffer if self.device.type == "meta" else buffer.to(self.device))

    def row_values(self, name: str, ids: Tensor) -> Tensor:  # int64 [...] -> [..., width]
        """Return settled rows of the parameter ``name``; gradients are row-sparse if the table is.

        A tensor in the parameter's place (``functional_call``, pruning, parametrizations) is
        gathered with dense gradients, and so is the settled parameter when it is exported or
        vmapped.
        """
        stored = self._parameters.get(name)
        if stored is None:
            return F.embedding(ids, getattr(self, name))
        number = self._row_numbers.get(name)
        if number is None or not isinstance(stored, nn.Parameter):
            return F.embedding(ids, stored)
        if is_transformed(ids):
            settle_numbered(number)
            return F.embedding(ids, stored)
        rows: Tensor = gather_rows(stored, ids, number)
        return rows

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the parameters."""
        return next(self.parameters()).dtype

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the table and its children; in a process group, first modules for DDP."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for name in self._row_numbers:
                parameter = self._parameters.get(name)
                if parameter is not None:
                    yield prefix, SparseGradient(name, parameter)
        yield from super().named_modules(memo, prefix, remove_duplicate)

    def settle(self) -> None:
        """Apply the pending updates of all rows in place."""
        for parameter in self.parameters():
            settle_parameter(parameter)

    def _apply(self, *given: Any, **settings: Any) -> Self:
        """Settle rows before their data type or device changes."""
        self.settle()
        fixed = {name: self._buffers[name] for name in self._fixed}
        super()._apply(*given, **settings)  # type: ignore[no-untyped-call]
        for name, buffer in fixed.items():
            if buffer is not None and self.device.type != "meta":
                self._buffers[name] = buffer.to(self.device)
        for name in self._row_numbers:
            self._track(name)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.settle()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a state; translate old parameter names and add absent buffers (anchor ids)."""
        self.settle()
        for name, buffer in self._buffers.items():
            given = state_dict.get(prefix + name)
            if buffer is None and isinstance(given, Tensor):
                self._buffers[name] = torch.empty_like(given, device=self.device)
        names = {f"{name}.weight": name for name in self._parameters} | self.old_names
        for old, name in names.items():
            if prefix + old in state_dict and prefix + name not in state_dict:
                state_dict[prefix + name] = state_dict.pop(prefix + old)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        """Return a state with settled rows and without the optimizer's records."""
        self.settle()
        return {**self.__dict__, "_lazy": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a copy."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name in self._row_numbers:
            self._track(name)


def empty_parameter(
    shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device | str | None
) -> nn.Parameter:
    """Return an uninitialized parameter."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def to_numpy(tensor: Tensor) -> NDArray[np.floating]:
    """Return a tensor's values as a float32 array."""
    return tensor.detach().to(device="cpu", dtype=torch.float32).numpy()


def encode(tensor: Tensor, kind: str, scales: str = "row") -> Matrix:  # [n, m]
    """Return a matrix in a storage type (float32, float16, int8 ...), for the bands of a table."""
    return Matrix.encode(to_numpy(tensor), kind, scales)
