"""Mixed dimensions: popular ids have wide rows, rare ids narrow rows and a projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from featherbed.checks import check_integer
from featherbed.errors import ArgumentError
from featherbed.packed.band import Band, Every, Identity, Members
from featherbed.tables.dense import DenseTable
from featherbed.tables.lowrank import LowRankTable
from featherbed.tables.parted import PartedTable, most_popular
from featherbed.tables.rows import encode
from featherbed.tables.table import Table

MOST_BLOCKS = 32


class MixedTable(PartedTable):
    """row(i) = B_b[place of i in b] P_b for the block b of i, with B_b [n_b, d_b], P_b [d_b, d].

    A block is an ``fb.LowRankTable`` of rank d_b, or an ``fb.DenseTable`` if d_b = d. Ids are
    assigned to blocks by popularity. Ginart et al. 2019, "Mixed dimension embeddings with
    application to memory-efficient recommendation systems", section 3.

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
        order, popularity = most_popular(self.num_embeddings, counts)
        self.blocks = checked_blocks(blocks, popularity, len(self.dims))
        where: dict[str, Any] = {"sparse": sparse, "generator": generator}
        where |= {"dtype": dtype, "device": device}
        self.tables = nn.ModuleList(
            DenseTable(size, self.embedding_dim, **where)
            if width == self.embedding_dim
            else LowRankTable(size, self.embedding_dim, rank=width, **where)
            for size, width in zip(self.blocks, self.dims, strict=True)
        )
        block = torch.empty(self.num_embeddings, dtype=torch.int64, device="cpu")
        sizes = torch.tensor(self.blocks, device="cpu")
        block[order] = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)
        self.divide(block)

    @property
    def parts(self) -> list[Table]:
        """The tables of the blocks."""
        return list(self.tables)  # type: ignore[arg-type]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a state, also one with the earlier names of the parameters of blocks."""
        for number, part in enumerate(self.parts):
            rows = "weight" if part.is_dense else "coefficients"
            for old, name in ((f"rows{number}", rows), (f"projection{number}", "atoms")):
                if prefix + old in state_dict:
                    state_dict[f"{prefix}tables.{number}.{name}"] = state_dict.pop(prefix + old)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """One band per block: dense rows, or rows times projection; low bits have column scales."""
        block, found = self.block.cpu().numpy(), []
        for number, (size, part) in enumerate(zip(self.blocks, self.parts, strict=True)):
            last = number == len(self.dims) - 1
            members = None if last else Members.of(np.flatnonzero(block == number), len(block))
            block = block[block != number]
            if isinstance(part, LowRankTable):
                rows, atoms = encode(part.coefficients, values, "column"), part.atoms
                stored = encode(atoms, dictionary)
                found.append(Band(size, Every(), rows, stored, members=members))
            else:
                stored = encode(part.weight, dictionary, "column")
                found.append(Band(size, Identity(), dictionary=stored, members=members))
        return found

    @torch.no_grad()
    def scale_initial_rows(self, std: float) -> None:
        """Scale the projection of every block, or its rows if there is none."""
        for part in self.parts:
            scaled = part.atoms if isinstance(part, LowRankTable) else part.weight
            scaled.mul_(std / float(part.weight.std()))


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
        ends = torch.arange(1, count, dtype=torch.float64, device="cpu") / count
        edges = [0]
        for number, cut in enumerate(torch.searchsorted(share, ends).tolist(), 1):
            edges.append(min(max(cut + 1, edges[-1] + 1), rows - count + number))
        return tuple(int(size) for size in np.diff([*edges, rows]))
    listed = () if isinstance(given, int | str) else given
    sizes = tuple(check_integer("blocks", size) for size in listed)
    if len(sizes) != count or sum(sizes) != rows:
        raise ArgumentError(
            f"blocks={given!r}: give the ids of each of the {count} blocks, {rows} together"
        )
    return sizes
