"""Tables that grow by a row for every new key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featherbed.errors import ArgumentError
from featherbed.optim.row_optimizer import owners, resize
from featherbed.tables.anchor import AnchorTable

SPARE = 1.25  # storage is made so much larger than it has to be, so that rows seldom move
# the row of unseen keys is the mean of the others again when there are so many times more
REFRESH = 1.05


class Arrivals:
    """Assigns rows to keys as they first occur, and adds rows to tables and parameters.

    Row 0 represents all unknown keys: it is the mean of the other rows, and new rows are copies of
    it. Use ``admit`` in training, ``ids`` in evaluation and serving.

    Args:
        holders: fb.AnchorTable, fb.GrowingAnchorTable or parameters, with row 0 and one row for
            each of ``keys``.
        optimizer: the optimizer that trains them, or None.
        keys: the keys of the existing rows, from row 1 on.

    >>> import featherbed as fb
    >>> table = fb.GrowingAnchorTable(1, 8, anchors=4, init=fb.HalfNormal(0.1))
    >>> arrivals = Arrivals([table])
    >>> arrivals.admit(["anna", "ben", "anna"]), table.num_embeddings
    (tensor([1, 2, 1]), 3)
    >>> arrivals.ids(["ben", "chris"])
    tensor([2, 0])
    """

    def __init__(
        self,
        holders: Sequence[AnchorTable | nn.Parameter],
        optimizer: Optimizer | None = None,
        keys: Iterable[Any] = (),
    ) -> None:
        self.holders, self.optimizer, self.keys = list(holders), optimizer, list(keys)
        for holder in self.holders:
            if not isinstance(holder, AnchorTable | nn.Parameter):
                growing = "fb.AnchorTable, fb.GrowingAnchorTable or parameters"
                raise ArgumentError(f"{holder!r} cannot grow: give {growing}")
            rows = holder.num_embeddings if isinstance(holder, AnchorTable) else len(holder)
            if rows != len(self.keys) + 1:
                raise ArgumentError(
                    f"a holder has {rows} rows for {len(self.keys)} keys: it needs one for each, "
                    "and row 0 for unseen ones"
                )
        self._row_of = {key: row for row, key in enumerate(self.keys, 1)}
        if len(self._row_of) < len(self.keys):
            raise ArgumentError("the keys hold one of them twice")
        self._fresh = 0  # rows there were when row 0 was last made the mean

    def __len__(self) -> int:
        return len(self.keys)

    def ids(self, keys: Iterable[Any]) -> Tensor:  # -> int64 [n]
        """Return the rows of keys, 0 for unknown keys."""
        return torch.tensor([self._row_of.get(key, 0) for key in _plain(keys)], dtype=torch.int64)

    def admit(self, keys: Iterable[Any]) -> Tensor:  # -> int64 [n]
        """Return the rows of keys; add rows for unknown keys."""
        wanted = _plain(keys)
        new = [key for key in dict.fromkeys(wanted) if key not in self._row_of]
        if new:
            self._row_of.update({key: row for row, key in enumerate(new, len(self.keys) + 1)})
            self.keys += new
            for holder in self.holders:
                self._make_room(holder, len(new))
        return self.ids(wanted)

    @torch.no_grad()
    def _make_room(self, holder: AnchorTable | nn.Parameter, count: int) -> None:
        if not isinstance(holder, AnchorTable):
            resize(holder, lambda tensor, fill: _longer(tensor, count, fill), self.optimizer)
            return
        for owner in owners(self.optimizer):
            penalty = getattr(owner, "penalties", {}).get(holder.transform)
            if penalty is not None and penalty.exempt is not None:
                exempt = "the penalty of a table exempts entries of the objects it has"
                raise ArgumentError(f"{exempt}: it cannot take in others")
        rows = holder.num_embeddings
        resize(holder.transform, lambda tensor, fill: _longer(tensor, count, fill), self.optimizer)
        if holder.support is not None:
            holder.support = _longer(holder.support, count, 0)
            holder.support[rows:] = holder.support[0]
        holder.num_embeddings = rows + count
        if rows > 1 and rows >= REFRESH * self._fresh:
            self._fresh = rows
            self.refresh()
        holder.transform[rows:] = holder.transform[0]

    @torch.no_grad()
    def refresh(self) -> None:
        """Set row 0 to the mean of the other rows (unchanged with slots)."""
        for holder in self.holders:
            if isinstance(holder, AnchorTable) and holder.support is None and len(self.keys):
                holder.transform[0] = holder.transform[1:].mean(0)


def _plain(keys: Iterable[Any]) -> list[Any]:
    return keys.tolist() if isinstance(keys, Tensor | np.ndarray) else list(keys)


def _longer(tensor: Tensor, count: int, fill: float) -> Tensor:
    """Return the tensor with ``count`` more rows, in place if its storage has room."""
    rows, width = len(tensor) + count, tensor[:1].numel()
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.is_contiguous() and tensor.storage_offset() == 0 and room >= rows * width:
        out = tensor.as_strided((rows, *tensor.shape[1:]), tensor.stride())
    else:
        out = tensor.new_empty(int(rows * SPARE) + 1, *tensor.shape[1:])[:rows]
        out[: len(tensor)] = tensor
    out[len(tensor) :] = fill
    return out
