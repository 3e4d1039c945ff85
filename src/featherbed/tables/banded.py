"""Hot rows and a coded tail: one table for popular ids and one for the others, packed together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featherbed.errors import ArgumentError, NotPackable
from featherbed.packed.band import Band, Members
from featherbed.packed.matrix import Matrix
from featherbed.tables.codes import Codes
from featherbed.tables.computed import is_transformed
from featherbed.tables.fitting import row_weights
from featherbed.tables.hashed import HashedTable
from featherbed.tables.mixed import most_popular, places_within
from featherbed.tables.remainder import RemainderTable
from featherbed.tables.selected import SelectedTable
from featherbed.tables.table import Table

Ask = Callable[[Table, Tensor], Tensor]  # a part, places in it [n] -> rows [n, d]
BY_ID = (HashedTable, RemainderTable)


class BandedTable(Table):
    """row(i) = head(place of i) for hot ids, tail(place of i) for the others.

    Frequently read rows get more bytes than rare ones: the head may be dense or low-bit rows, the
    tail any smaller table. Zhang et al. 2020, "Model size reduction using frequency based double
    hashing for recommender systems", separate hot ids in this way. Penalties apply to the
    parameters of ``head_table`` and ``tail_table``.

    Args:
        hot: the hot ids, or their number: the most frequent by ``counts``, by default the first
            ids.
        head: spec of the table of hot ids.
        tail: spec of the table of the other ids; hashed and remainder tables hash the id itself.
        counts: [V] number of occurrences of each id.

    >>> import torch
    >>> table = BandedTable(1000, 16, hot=100, tail="anchor:anchors=8")
    >>> table(torch.tensor([3, 700])).shape
    torch.Size([2, 16])
    >>> table.head_table.num_embeddings, table.tail_table.num_embeddings
    (100, 900)
    """

    example: ClassVar[dict[str, Any]] = {"hot": 7, "tail": "lowrank:rank=3"}
    cold: Tensor
    place: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        hot: Any,
        head: str = "dense",
        tail: str = "anchor:anchors=16",
        counts: Tensor | None = None,
        padding_idx: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.hot_ids = hot_ids(hot, self.num_embeddings, counts)
        self.hot, self.head, self.tail = len(self.hot_ids), head, tail
        where = {"generator": generator, "dtype": dtype, "device": device}
        self.head_table = self._part(head, self.hot, where)
        self.tail_table = self._part(tail, self.num_embeddings - self.hot, where)
        cold = torch.empty(self.num_embeddings, dtype=torch.bool, device=device)
        self.register_buffer("cold", cold)  # [V]
        place = torch.empty(self.num_embeddings, dtype=torch.int64, device=device)
        self.register_buffer("place", place)  # [V]: in its part; where that hashes ids, the id
        if not cold.is_meta:
            self._divide()

    def _divide(self) -> None:
        """Assign every id to head or tail, and its place there."""
        cold = torch.ones(self.num_embeddings, dtype=torch.int64)
        cold[self.hot_ids] = 0
        place, ids = places_within(cold), torch.arange(self.num_embeddings)
        for number, part in enumerate((self.head_table, self.tail_table)):
            place = torch.where(cold == number, ids, place) if by_id(part) else place
        self.cold.copy_(cold.bool())
        self.place.copy_(place)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialize head and tail."""
        self.head_table.reset_parameters(generator)
        self.tail_table.reset_parameters(generator)
        self._divide()

    def _part(self, spec: str, rows: int, where: dict[str, Any]) -> Table:
        from featherbed.tables.spec import make_table, parse_spec

        method = parse_spec(spec)[0]
        if issubclass(method, SelectedTable | BandedTable):
            raise ArgumentError(
                f"{spec!r} has hot rows of its own: use a table that treats all of its ids alike"
            )
        return make_table(
            spec,
            self.num_embeddings if issubclass(method, BY_ID) else rows,
            self.embedding_dim,
            **where,
        )

    def codes(self, ids: Tensor) -> Codes:
        """The values are the row of the head or the tail."""
        return Codes(
            None, self._everywhere(ids, lambda part, places: part.codes(places).rows()), None
        )

    def lookup(self, ids: Tensor) -> Tensor:  # int64 [...], checked -> [..., d]
        """Compose the rows of checked ids."""
        return self.mask_padding(ids, self._of_parts(ids, lambda part, places: part.lookup(places)))

    def training_rows(self, ids: Tensor) -> Tensor:  # int64 [...], checked -> [..., d]
        """Return the training rows of both parts."""
        return self.mask_padding(
            ids, self._of_parts(ids, lambda part, places: part.training_rows(places))
        )

    def _everywhere(self, ids: Tensor, ask: Ask) -> Tensor:  # [...] -> [..., d]
        """Look all ids up in both parts and select."""
        cold, place = self.cold[ids], self.place[ids]
        head, tail = (
            ask(self.head_table, torch.where(cold, 0, place)),
            ask(self.tail_table, torch.where(cold, place, 0)),
        )
        return torch.where(cold[..., None], tail, head)

    def _of_parts(self, ids: Tensor, ask: Ask) -> Tensor:  # [...] -> [..., d]
        """Look up in each part its own ids only, so that its loss term covers only these."""
        if torch.compiler.is_compiling() or is_transformed(ids):
            return self._everywhere(ids, ask)
        cold, place = self.cold[ids].reshape(-1), self.place[ids].reshape(-1)
        rows = torch.zeros(len(cold), self.embedding_dim, dtype=self.dtype, device=self.device)
        for part, inside in ((self.head_table, ~cold), (self.tail_table, cold)):
            index = inside.nonzero()[:, 0]
            if len(index):
                rows = rows.index_copy(0, index, ask(part, place[index]).to(rows.dtype))
        return rows.reshape(*ids.shape, self.embedding_dim)

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """The band of the head with a bitmap of hot ids, then the bands of the tail."""
        cold = self.cold.cpu().numpy()
        hot, others = np.flatnonzero(~cold), np.flatnonzero(cold)
        head = own_rows(self.head_table, self.head_table.bands(values, dictionary, layout), hot)
        tail = own_rows(self.tail_table, self.tail_table.bands(values, dictionary, layout), others)
        if len(head) > 1:
            raise NotPackable(
                f"head={self.head!r} packs into {len(head)} bands: use a table of one, such as "
                "dense or quantized"
            )
        return [replace(head[0], members=Members.of(hot, len(cold))), *tail]

    def parameter_count(self) -> int:
        """Count the parameters of head and tail."""
        return self.head_table.parameter_count() + self.tail_table.parameter_count()

    def code_bits(self) -> float | None:
        """Return the bits of learned codes of both parts, None without any."""
        parts = [
            bits
            for bits in (self.head_table.code_bits(), self.tail_table.code_bits())
            if bits is not None
        ]
        return sum(parts) if parts else None

    def scale_initial_rows(self, std: float) -> None:
        """Scale the rows of both parts."""
        self.head_table.scale_initial_rows(std)
        self.tail_table.scale_initial_rows(std)

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Fit each part to its own rows."""
        checked = row_weights(weights, matrix)
        given = None if checked is None else torch.from_numpy(checked).to(matrix.device)
        for part, inside in ((self.head_table, ~self.cold), (self.tail_table, self.cold)):
            every = by_id(part)
            share = given if every or given is None else given[inside]
            part.fit_dense(matrix if every else matrix[inside], share)


def by_id(part: Table) -> bool:
    """Return whether a table's codes depend on the id itself, not on the place in its band."""
    return isinstance(part, BY_ID)


def own_rows(part: Table, bands: list[Band], ids: NDArray[np.int64]) -> list[Band]:
    """Return a part's bands restricted to ``ids``; tables that hash ids have rows for all ids."""
    if not by_id(part):
        return bands
    (band,) = bands
    values = band.values
    if isinstance(values, Matrix):
        scale = values.scale[ids] if values.scale is not None and values.axis == 0 else values.scale
        values = Matrix(
            values.kind, (len(ids), values.shape[1]), values.data[ids], scale, values.axis
        )
    return [replace(band, rows=len(ids), values=values)]


def hot_ids(hot: Any, rows: int, counts: Any) -> Tensor:  # -> int64 [H]
    """Return the hot ids: the given ones, or a number of the most frequent.

    >>> hot_ids(2, 4, torch.tensor([1, 5, 2, 9])).tolist()
    [3, 1]
    """
    if isinstance(hot, int | np.integer) and not isinstance(hot, bool):
        if not 1 <= hot < rows:
            raise ArgumentError(
                f"hot={hot}: give from 1 to {rows - 1} ids, so that head and tail have rows"
            )
        return most_popular(rows, counts)[0][: int(hot)]
    if isinstance(hot, str | bool | None):
        raise ArgumentError(f"hot={hot!r}: give the hot ids, or how many of the most frequent")
    ids = torch.as_tensor(hot, device="cpu").reshape(-1)
    if ids.is_floating_point() or not 1 <= len(ids) < rows or len(torch.unique(ids)) < len(ids):
        raise ArgumentError(
            f"hot holds {len(ids)} ids: give from 1 to {rows - 1} different whole numbers"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= rows:
        raise ArgumentError(f"hot holds id {int(ids.max())}: ids go from 0 to {rows - 1}")
    return ids.long()
