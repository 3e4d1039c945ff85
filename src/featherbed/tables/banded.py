"""Hot rows and a coded tail: one table for popular ids and one for the others, packed together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featherbed.errors import ArgumentError, NotPackable
from featherbed.packed.band import Band, Members
from featherbed.packed.matrix import Matrix
from featherbed.tables.parted import BY_ID, PartedTable, most_popular
from featherbed.tables.selected import SelectedTable
from featherbed.tables.table import Table


class BandedTable(PartedTable):
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
    old_names: ClassVar[dict[str, str]] = {"cold": "block"}

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
        ids = hot_ids(hot, self.num_embeddings, counts)
        self.hot, self.head, self.tail = len(ids), head, tail
        where = {"generator": generator, "dtype": dtype, "device": device}
        self.head_table = self._part(head, self.hot, where)
        self.tail_table = self._part(tail, self.num_embeddings - self.hot, where)
        cold = torch.ones(self.num_embeddings, dtype=torch.int64, device="cpu")
        cold[ids] = 0
        self.divide(cold)

    @property
    def parts(self) -> list[Table]:
        """Head and tail."""
        return [self.head_table, self.tail_table]

    @property
    def cold(self) -> Tensor:  # bool [V]
        """Whether each id belongs to the tail."""
        return self.block.bool()

    def _part(self, spec: str, rows: int, where: dict[str, Any]) -> Table:
        from featherbed.tables.spec import make_table, parse_spec

        method = parse_spec(spec)[0]
        if issubclass(method, SelectedTable | BandedTable):
            raise ArgumentError(
                f"{spec!r} has hot rows of its own: use a table that treats all of its ids alike"
            )
        rows = self.num_embeddings if issubclass(method, BY_ID) else rows
        return make_table(spec, rows, self.embedding_dim, **where)

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


def own_rows(part: Table, bands: list[Band], ids: NDArray[np.int64]) -> list[Band]:
    """Return a part's bands restricted to ``ids``; tables that hash ids have rows for all ids."""
    if not isinstance(part, BY_ID):
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
