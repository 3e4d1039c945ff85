"""PartedTable, the base of tables that divide their ids among tables of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from featherbed.errors import ArgumentError
from featherbed.tables.codes import Codes
from featherbed.tables.computed import is_transformed
from featherbed.tables.fitting import row_weights
from featherbed.tables.hashed import HashedTable
from featherbed.tables.remainder import RemainderTable
from featherbed.tables.table import Table

RowsOf = Callable[[Table, Tensor], Tensor]  # a part, places in it [n] -> rows [n, d]
BY_ID = (HashedTable, RemainderTable)  # codes depend on the id itself, not on its place in a part


class PartedTable(Table):
    """row(i) = part(place of i) for the part that i belongs to; a method defines the parts."""

    rows_alike: ClassVar[bool] = False
    block: Tensor  # int64 [V]: the part of each id
    place: Tensor  # int64 [V]: its place in the part, the id itself where the part hashes ids

    @property
    @abstractmethod
    def parts(self) -> list[Table]:
        """The tables of the parts."""

    def divide(self, block: Tensor) -> None:  # int64 [V]
        """Assign every id to a part, and its place there."""
        place, ids = places_within(block), torch.arange(len(block), device="cpu")
        for number, part in enumerate(self.parts):
            place = torch.where(block == number, ids, place) if isinstance(part, BY_ID) else place
        self.register_fixed("block", block)
        self.register_fixed("place", place)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialize every part."""
        for part in self.parts:
            part.reset_parameters(generator)

    def codes(self, ids: Tensor) -> Codes:
        """The values are the row of the id's part."""
        return Codes(None, self._everywhere(ids, lambda part, at: part.codes(at).rows()), None)

    def lookup(self, ids: Tensor) -> Tensor:  # int64 [...], checked -> [..., d]
        """Compose the rows of checked ids."""
        return self.mask_padding(ids, self._of_parts(ids, lambda part, at: part.lookup(at)))

    def training_rows(self, ids: Tensor) -> Tensor:  # int64 [...], checked -> [..., d]
        """Return the training rows of all parts."""
        return self.mask_padding(ids, self._of_parts(ids, lambda part, at: part.training_rows(at)))

    def _everywhere(self, ids: Tensor, rows_of: RowsOf) -> Tensor:  # [...] -> [..., d]
        """Look all ids up in all parts and select."""
        block, place = self.block[ids], self.place[ids]
        rows = rows_of(self.parts[0], torch.where(block == 0, place, 0))
        for number, part in enumerate(self.parts[1:], 1):
            inside = block == number
            rows = torch.where(
                inside[..., None], rows_of(part, torch.where(inside, place, 0)), rows
            )
        return rows

    def _of_parts(self, ids: Tensor, rows_of: RowsOf) -> Tensor:  # [...] -> [..., d]
        """Look up in each part its own ids only, so that its loss term covers only these."""
        if torch.compiler.is_compiling() or is_transformed(ids):
            return self._everywhere(ids, rows_of)
        block, place = self.block[ids].reshape(-1), self.place[ids].reshape(-1)
        rows = torch.zeros(len(block), self.embedding_dim, dtype=self.dtype, device=self.device)
        for number, part in enumerate(self.parts):
            index = (block == number).nonzero()[:, 0]
            if len(index):
                rows = rows.index_copy(0, index, rows_of(part, place[index]).to(rows.dtype))
        return rows.reshape(*ids.shape, self.embedding_dim)

    def parameter_count(self) -> int:
        """Count the parameters of all parts."""
        return sum(part.parameter_count() for part in self.parts)

    def code_bits(self) -> float | None:
        """Return the bits of learned codes of all parts, None without any."""
        bits = [bits for bits in (part.code_bits() for part in self.parts) if bits is not None]
        return sum(bits) if bits else None

    def scale_initial_rows(self, std: float) -> None:
        """Scale the rows of all parts."""
        for part in self.parts:
            part.scale_initial_rows(std)

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Fit each part to its own rows."""
        checked = row_weights(weights, matrix)
        given = None if checked is None else torch.from_numpy(checked).to(matrix.device)
        for number, part in enumerate(self.parts):
            own = slice(None) if isinstance(part, BY_ID) else self.block == number
            part.fit_dense(matrix[own], None if given is None else given[own])


def places_within(block: Tensor) -> Tensor:  # int64 [V] -> int64 [V]
    """Return the number of earlier ids in the same block, for each id.

    >>> places_within(torch.tensor([1, 0, 1, 1, 0])).tolist()
    [0, 0, 1, 2, 1]
    """
    order = torch.sort(block, stable=True).indices
    starts = torch.cumsum(torch.bincount(block), 0) - torch.bincount(block)
    place = torch.empty_like(block)
    place[order] = torch.arange(len(block), device="cpu") - starts[block[order]]
    return place


def most_popular(rows: int, counts: Any) -> tuple[Tensor, Tensor]:  # -> ids [V], counts [V]
    """Return the ids by decreasing counts, and the sorted counts (ones by default)."""
    if counts is None:
        return torch.arange(rows, device="cpu"), torch.ones(rows, dtype=torch.float64, device="cpu")
    counts = torch.as_tensor(counts, device="cpu")
    if counts.shape != (rows,):
        raise ArgumentError(
            f"counts have shape {tuple(counts.shape)}; give one for each of the {rows} ids"
        )
    if counts.is_floating_point() and not bool(torch.isfinite(counts).all()):
        raise ArgumentError("counts hold NaN or infinity: give how often each id occurs")
    order = torch.argsort(counts, descending=True, stable=True)
    return order, counts[order].double()
