"""A packed table that learns: codes stay as they are, dictionaries, bases, lengths and scales are parameters.

Packing stores them again in the kinds they had, so that a tuned table takes the bytes it took before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.models.embedding import PackedEmbedding
from featherbed.ops import check_ids
from featherbed.packed.band import Affine, Band
from featherbed.packed.codes import Every, Identity
from featherbed.packed.graded import Graded
from featherbed.packed.matrix import Matrix, level_bits, unpack_levels
from featherbed.packed.table import PackedTable


def tensor(array: NDArray[Any]) -> Tensor:
    """Return a copy of an array as a tensor."""
    return torch.from_numpy(np.array(array))


class Free(nn.Module):
    """A matrix whose every number learns."""

    def __init__(self, stored: Matrix) -> None:
        super().__init__()
        self.stored = stored
        self.numbers = nn.Parameter(tensor(stored.dense()))

    def rows(self, positions: Tensor) -> Tensor:  # [n] -> [n, m]
        """Return rows."""
        return nn.functional.embedding(positions, self.numbers)

    def whole(self) -> Tensor:
        """Return the matrix."""
        return self.numbers

    def pack(self) -> Matrix:
        """Store it in the kind it had."""
        scales = "column" if self.stored.axis else "row"
        kind = (
            "float16"
            if self.stored.scale is not None and self.stored.scale.dtype == np.float16
            else "float32"
        )
        return Matrix.encode(self.numbers.detach().cpu().numpy(), self.stored.kind, scales, kind)


class Scaled(nn.Module):
    """A matrix of levels whose scales learn: x = scale (level - (2^bits - 1) / 2)."""

    levels: Tensor  # uint8 [n, m]

    def __init__(self, stored: Matrix) -> None:
        super().__init__()
        assert stored.scale is not None
        self.stored, bits = stored, level_bits(stored.kind)
        self.middle = (2**bits - 1) / 2
        levels = unpack_levels(
            np.ascontiguousarray(stored.data).astype(np.uint8, copy=False), bits, stored.shape[1]
        )
        self.register_buffer("levels", tensor(levels), persistent=False)
        self.scale = nn.Parameter(tensor(stored.scale.astype(np.float32)))

    def rows(self, positions: Tensor) -> Tensor:  # [n] -> [n, m]
        """Return rows."""
        scale = self.scale if self.stored.axis else self.scale[positions][:, None]
        rows: Tensor = (self.levels[positions].to(scale.dtype) - self.middle) * scale
        return rows

    def whole(self) -> Tensor:
        """Return the matrix."""
        return self.rows(torch.arange(len(self.levels), device=self.levels.device))

    def pack(self) -> Matrix:
        """Store the new scales beside the same levels."""
        assert self.stored.scale is not None
        scale = self.scale.detach().cpu().numpy().astype(self.stored.scale.dtype)
        return Matrix(
            self.stored.kind, self.stored.shape, self.stored.data, scale, self.stored.axis
        )


class LearntBand(nn.Module):
    """A band whose numbers learn: row = norms * affine(combine(dictionary[indices], values) + plus)."""

    indices: Tensor | None  # int64 [rows, s]
    values: Tensor | None  # [rows, s]
    stored: Free | Scaled | None
    dictionary: Free | Scaled | None

    def __init__(self, band: Band, ids: NDArray[np.int64]) -> None:  # ids [rows] of the band's rows
        super().__init__()
        if band.cell is not None or isinstance(band.values, Graded):
            raise ArgumentError(
                "rows behind a composer's cell, and graded rows, cannot be tuned: compress by another method"
            )
        self.band = band
        plain = isinstance(band.codes, Every)
        indices, values = (
            (None, None) if plain else band.fetch(ids, np.arange(band.rows, dtype=np.int64))
        )
        self.register_buffer(
            "indices", None if indices is None else tensor(indices), persistent=False
        )
        self.register_buffer("values", None if values is None else tensor(values), persistent=False)
        self.stored = None if not plain or band.values is None else learnt(band.values)
        own = isinstance(band.codes, Identity) and band.dictionary is not None
        self.dictionary = (
            None
            if band.dictionary is None
            else learnt(band.dictionary)
            if own
            else Free(band.dictionary)
        )
        self.norms = None if band.norms is None else Free(band.norms)
        self.plus = None if band.plus is None else LearntBand(band.plus, ids)
        affine = band.affine or Affine()
        self.basis = None if affine.weight is None else Free(affine.weight)
        self.bias = None if affine.bias is None else nn.Parameter(tensor(affine.bias))

    def forward(self, positions: Tensor) -> Tensor:  # [n] -> [n, d]
        """Compose rows."""
        rows: Tensor = self.combined(positions)
        rows = rows if self.plus is None else rows + self.plus(positions)
        rows = rows if self.basis is None else rows @ self.basis.whole()
        rows = rows if self.bias is None else rows + self.bias
        return rows if self.norms is None else rows * self.norms.rows(positions)

    def combined(self, positions: Tensor) -> Tensor:  # [n] -> [n, d']
        """Combine atoms, before anything is added."""
        if self.stored is not None:
            rows = self.stored.rows(positions)
            return rows if self.dictionary is None else rows @ self.dictionary.whole()
        assert self.indices is not None
        assert self.dictionary is not None
        indices = self.indices[positions]
        weights = None if self.values is None else self.values[positions]
        if self.band.combine == "sum" and isinstance(self.dictionary, Free):
            return nn.functional.embedding_bag(
                indices, self.dictionary.whole(), mode="sum", per_sample_weights=weights
            )
        atoms = self.dictionary.rows(indices.reshape(-1)).reshape(*indices.shape, -1)
        atoms = atoms if weights is None else atoms * weights[..., None]
        if self.band.combine == "sum":
            return atoms.sum(1)
        if self.band.combine != "concat":
            raise ArgumentError(
                f"rows combined by {self.band.combine} cannot be tuned: compress by another method"
            )
        return atoms.flatten(1)

    def pack(self) -> Band:
        """Store what was learnt beside the same codes."""
        weight = None if self.basis is None else self.basis.pack()
        bias = None if self.bias is None else self.bias.detach().cpu().numpy()
        return replace(
            self.band,
            values=self.band.values if self.stored is None else self.stored.pack(),
            dictionary=None if self.dictionary is None else self.dictionary.pack(),
            norms=None if self.norms is None else self.norms.pack(),
            plus=None if self.plus is None else self.plus.pack(),
            affine=None if self.band.affine is None else Affine(weight, bias),
        )


def learnt(stored: Any) -> Free | Scaled:
    """Return what learns of rows that are stored one by one: scales of levels, or all numbers."""
    return Free(stored) if stored.scale is None else Scaled(stored)


class LearntEmbedding(nn.Module):
    """A packed embedding while it is tuned: the same rows and scores, with gradients.

    >>> import featherbed as fb
    >>> packed = PackedEmbedding(fb.compress(np.random.default_rng(0).standard_normal((600, 16)), ratio=3, method="int4"))
    >>> learnt = LearntEmbedding(packed)
    >>> ids = torch.tensor([3, 17])
    >>> torch.allclose(learnt(ids), packed(ids), atol=1e-6), learnt(ids).requires_grad
    (True, True)
    """

    like: Tensor  # empty, of the dtype that rows have

    def __init__(self, packed: PackedEmbedding) -> None:
        super().__init__()
        self.packed_table = table = packed.table
        self.num_embeddings, self.embedding_dim = packed.num_embeddings, packed.embedding_dim
        self.padding_idx, self.scale = packed.padding_idx, packed.scale
        self.register_buffer("like", packed.like.clone(), persistent=False)
        every = np.arange(len(table), dtype=np.int64)
        self.bands = nn.ModuleList(
            LearntBand(band, every[batch]) for band, batch, _ in table.places(every)
        )

    def forward(self, ids: Tensor) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids."""
        return self.rows(ids, self.scale)

    def rows(self, ids: Tensor, scale: float) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids times ``scale``."""
        wanted, inverse = torch.unique(check_ids(ids, self.num_embeddings), return_inverse=True)
        rows = self.composed(wanted)[inverse]
        return (rows if scale == 1 else rows * scale).to(self.like.dtype)

    def composed(self, ids: Tensor) -> Tensor:  # int64 [n] -> float32 [n, d]
        """Compose the rows of ids."""
        places = list(self.packed_table.places(ids.cpu().numpy()))
        parts = [
            band(torch.from_numpy(at).to(ids.device))
            for band, (_, _, at) in zip(self.bands, places, strict=False)
            if len(at)
        ]
        order = torch.from_numpy(np.concatenate([batch for _, batch, _ in places])).to(ids.device)
        rows = torch.cat(parts)
        rows = rows if len(parts) == 1 else torch.empty_like(rows).index_copy(0, order, rows)
        return (
            rows
            if self.padding_idx is None
            else rows.masked_fill((ids == self.padding_idx)[:, None], 0.0)
        )

    @property
    def weight(self) -> Tensor:  # [V, d]
        """The dense rows, computed each time."""
        return self.composed(torch.arange(self.num_embeddings, device=self.like.device)).to(
            self.like.dtype
        )

    def logits(self, hidden: Tensor) -> Tensor:  # [..., d] -> [..., V]
        """Score hidden states by all rows."""
        return hidden @ self.weight.T

    def pack(self) -> PackedTable:
        """Return the table as it has become."""
        table = self.packed_table
        bands = [band.pack() for band in self.bands]  # type: ignore[operator]
        return PackedTable(
            bands, table.dim, padding_idx=table.padding_idx, keys=table.keys, made_by=table.made_by
        )
