"""Mixed dimensions: popular ids have wide rows, rare ids narrow rows and a projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from featherbed.checks import check_integer
from featherbed.errors import ArgumentError
from featherbed.optim.lazy import RowParameter
from featherbed.packed.band import Band, Members
from featherbed.packed.codes import Every, Identity
from featherbed.packed.matrix import Matrix
from featherbed.tables.codes import Codes
from featherbed.tables.fitting import low_rank, row_weights, share_of_unit_rows
from featherbed.tables.rows import empty_parameter
from featherbed.tables.table import Table, to_numpy

MOST_BLOCKS = 32


class MixedTable(Table):
    """row(i) = B_b[place of i in b] P_b for the block b of i, with B_b [n_b, d_b], P_b [d_b, d].

    There is no projection P_b if d_b = d. Ids are assigned to blocks by popularity, and block b has
    rows of width d_b. Ginart et al. 2019, "Mixed dimension embeddings with application to
    memory-efficient recommendation systems", section 3.

    Args:
        dims: width of the rows of each block, starting with the most popular ids.
        blocks: number of ids in each block; by default blocks have equal shares of ``counts``, or
            equal numbers of ids.
        counts: [V] number of occurrences of each id; by default the first ids are the most popular.
        sparse: gradients contain the rows of the batch only, for optimizers of this library.

    >>> import torch
    >>> table = MixedTable(1000, 16, dims=[16, 4], blocks=[100, 900])
    >>> table(torch.tensor([3, 700])).shape, table.parameter_count()
    (torch.Size([2, 16]), 5264)
    """

    example: ClassVar[dict[str, Any]] = {"dims": (8, 3), "blocks": (20, 30)}
    block: Tensor
    place: Tensor
    for _number in range(MOST_BLOCKS):
        locals()[f"rows{_number}"] = RowParameter()
    del _number

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        dims: Sequence[int],
        blocks: Sequence[int] | None = None,
        counts: Tensor | None = None,
        sparse: bool = False,
        padding_idx: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, sparse)
        self.dims = checked_dims(dims, self.embedding_dim)
        self.counts = counts
        self.blocks = checked_blocks(blocks, self._most_popular()[1], len(self.dims))
        for number, (size, width) in enumerate(zip(self.blocks, self.dims, strict=True)):
            self.add_rows(f"rows{number}", width, dtype, device, size)  # [n_b, d_b]
            wide = width == self.embedding_dim
            projection = None if wide else empty_parameter((width, embedding_dim), dtype, device)
            self.register_parameter(f"projection{number}", projection)  # [d_b, d]
        for name in ("block", "place"):
            index = torch.empty(self.num_embeddings, dtype=torch.int64, device=device)
            self.register_buffer(name, index)  # [V]
        self.initialize(generator)

    def _most_popular(self) -> tuple[Tensor, Tensor]:
        return most_popular(self.num_embeddings, self.counts)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw rows from N(0, 1), and projections for unit variance; assign ids to blocks."""
        for number, width in enumerate(self.dims):
            getattr(self, f"rows{number}").normal_(0.0, 1.0, generator=generator)
            projection = getattr(self, f"projection{number}")
            if projection is not None:
                projection.normal_(0.0, share_of_unit_rows(width), generator=generator)
        block = torch.empty(self.num_embeddings, dtype=torch.int64)
        sizes = torch.tensor(self.blocks)
        block[self._most_popular()[0]] = torch.arange(len(self.dims)).repeat_interleave(sizes)
        self.block.copy_(block)
        self.place.copy_(places_within(block))

    def _projected(self, number: int, rows: Tensor) -> Tensor:  # [..., d_b] -> [..., d]
        projection: Tensor | None = getattr(self, f"projection{number}")
        return rows if projection is None else rows @ projection

    def codes(self, ids: Tensor) -> Codes:
        """The values are the row of the block, projected."""
        block, place = self.block[ids], self.place[ids]
        total: Tensor | None = None
        for number in range(len(self.dims)):
            inside = block == number
            rows = self._projected(
                number, self.row_values(f"rows{number}", torch.where(inside, place, 0))
            )
            total = rows if total is None else torch.where(inside[..., None], rows, total)
        return Codes(None, total, None)

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """One band per block: dense rows, or rows times projection; low bits have column scales."""
        block, found = self.block.cpu().numpy(), []
        for number, size in enumerate(self.blocks):
            rows = to_numpy(getattr(self, f"rows{number}"))
            last = number == len(self.dims) - 1
            members = None if last else Members.of(np.flatnonzero(block == number), len(block))
            block = block[block != number]
            projection = getattr(self, f"projection{number}")
            if projection is None:
                found.append(
                    Band(
                        size,
                        Identity(),
                        dictionary=Matrix.encode(rows, dictionary, "column"),
                        members=members,
                    )
                )
                continue
            atoms = Matrix.encode(to_numpy(projection), dictionary)
            found.append(
                Band(size, Every(), Matrix.encode(rows, values, "column"), atoms, members=members)
            )
        return found

    def parameter_count(self) -> int:
        """Σ_b n_b d_b + d_b d (no second term where d_b = d)."""
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def scale_initial_rows(self, std: float) -> None:
        """Scale the projection of every block, or its rows if there is none."""
        for number in range(len(self.dims)):
            rows, projection = getattr(self, f"rows{number}"), getattr(self, f"projection{number}")
            scaled = rows if projection is None else projection
            scaled.mul_(std / float(self._projected(number, rows).std()))

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Truncated SVD of the weighted rows of each block."""
        checked = row_weights(weights, matrix)
        given = None if checked is None else torch.from_numpy(checked).to(matrix.device)
        for number, width in enumerate(self.dims):
            inside = self.block == number
            part = matrix[inside]  # in the order of ids, which is that of places
            projection = getattr(self, f"projection{number}")
            rows = getattr(self, f"rows{number}")
            if projection is None:
                rows.copy_(part)
                continue
            values, atoms = low_rank(part, width, None if given is None else given[inside])
            rows.copy_(values)
            projection.copy_(atoms)


def places_within(block: Tensor) -> Tensor:  # int64 [V] -> int64 [V]
    """Return the number of earlier ids in the same block, for each id.

    >>> places_within(torch.tensor([1, 0, 1, 1, 0])).tolist()
    [0, 0, 1, 2, 1]
    """
    order = torch.sort(block, stable=True).indices
    starts = torch.cumsum(torch.bincount(block), 0) - torch.bincount(block)
    place = torch.empty_like(block)
    place[order] = torch.arange(len(block)) - starts[block[order]]
    return place


def most_popular(
    rows: int, counts: Any
) -> tuple[Tensor, Tensor]:  # -> ids [V], counts [V], both by falling counts
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


def checked_dims(dims: Any, dim: int) -> tuple[int, ...]:
    """Return the widths of the blocks, or raise an error."""
    if isinstance(dims, int | str) or not len(dims):
        raise ArgumentError(
            f"dims={dims!r}: give the width of each block, for example dims=[{dim}, "
            f"{max(1, dim // 4)}]"
        )
    widths = tuple(check_integer("dims", width) for width in dims)
    if len(widths) > MOST_BLOCKS:
        raise ArgumentError(f"dims has {len(widths)} blocks: {MOST_BLOCKS} is the most")
    if max(widths) > dim:
        raise ArgumentError(f"dims={list(widths)}: a block is at most as wide as the rows, {dim}")
    return widths


def checked_blocks(given: Any, popularity: Tensor, count: int) -> tuple[int, ...]:
    """Return the number of ids of each block: as given, or by equal shares of the counts.

    >>> checked_blocks(None, torch.tensor([6.0, 3.0, 2.0, 1.0]), 2)
    (1, 3)
    """
    rows = len(popularity)
    if count > rows:
        raise ArgumentError(f"{count} blocks need at least as many ids: the table has {rows}")
    if given is None:
        share = torch.cumsum(popularity.double(), 0) / popularity.sum().clamp(min=1e-300)
        cuts = (
            torch.searchsorted(
                share, torch.arange(1, count, dtype=torch.float64, device="cpu") / count
            )
            + 1
        )
        edges = [0]
        for number, cut in enumerate(cuts.tolist(), 1):
            edges.append(min(max(cut, edges[-1] + 1), rows - count + number))
        return tuple(int(size) for size in np.diff([*edges, rows]))
    sizes = (
        ()
        if isinstance(given, int | str)
        else tuple(check_integer("blocks", size) for size in given)
    )
    if len(sizes) != count or sum(sizes) != rows:
        raise ArgumentError(
            f"blocks={given!r}: give the ids of each of the {count} blocks, {rows} together"
        )
    return sizes
