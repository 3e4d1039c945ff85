"""Packed tables with gradients: codes are fixed; dictionaries, bases, norms and scales are trained.

Packing stores the parameters in their original formats, so that the size does not change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.interop.embedding import PackedEmbedding
from featherbed.ops import check_ids
from featherbed.packed.band import Affine, Band
from featherbed.packed.codes import Every, Identity
from featherbed.packed.graded import Graded
from featherbed.packed.matrix import Matrix, level_bits, unpack_levels
from featherbed.packed.table import PackedTable


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Return a copy of an array as a tensor."""
    return torch.from_numpy(np.array(array))


class TrainableMatrix(nn.Module):
    """A stored matrix whose elements are all trained."""

    def __init__(self, stored: Matrix) -> None:
        super().__init__()
        self.stored = stored
        self.elements = nn.Parameter(as_tensor(stored.dense()))

    def rows(self, positions: Tensor) -> Tensor:  # [n] -> [n, m]
        """Return rows."""
        return nn.functional.embedding(positions, self.elements)

    def dense(self) -> Tensor:
        """Return the matrix."""
        return self.elements

    def pack(self) -> Matrix:
        """Return the matrix in its original format."""
        scale = self.stored.scale
        half = scale is not None and scale.dtype == np.float16
        return Matrix.encode(
            self.elements.detach().cpu().numpy(),
            self.stored.kind,
            "column" if self.stored.axis else "row",
            "float16" if half else "float32",
        )


class TrainableScales(nn.Module):
    """A quantized matrix whose scales are trained: x = scale (level - (2^bits - 1) / 2)."""

    levels: Tensor  # uint8 [n, m]

    def __init__(self, stored: Matrix) -> None:
        super().__init__()
        assert stored.scale is not None
        self.stored, bits = stored, level_bits(stored.kind)
        self.middle = (2**bits - 1) / 2
        data = np.ascontiguousarray(stored.data).astype(np.uint8, copy=False)
        levels = as_tensor(unpack_levels(data, bits, stored.shape[1]))
        self.register_buffer("levels", levels, persistent=False)
        self.scale = nn.Parameter(as_tensor(stored.scale.astype(np.float32)))

    def rows(self, positions: Tensor) -> Tensor:  # [n] -> [n, m]
        """Return rows."""
        scale = self.scale if self.stored.axis else self.scale[positions][:, None]
        rows: Tensor = (self.levels[positions].to(scale.dtype) - self.middle) * scale
        return rows

    def dense(self) -> Tensor:
        """Return the matrix."""
        return self.rows(torch.arange(len(self.levels), device=self.levels.device))

    def pack(self) -> Matrix:
        """Return the matrix with the new scales and the original levels."""
        assert self.stored.scale is not None
        scale = self.scale.detach().cpu().numpy().astype(self.stored.scale.dtype)
        return replace(self.stored, scale=scale)


def trainable_rows(stored: Any) -> TrainableMatrix | TrainableScales:
    """Return the trainable form of rows that are stored one by one."""
    return TrainableMatrix(stored) if stored.scale is None else TrainableScales(stored)


class TrainableBand(nn.Module):
    """A band with gradients: norms * affine(combine(dictionary[indices], values) + plus)."""

    indices: Tensor | None  # int64 [rows, s]
    values: Tensor | None  # [rows, s]
    stored: TrainableMatrix | TrainableScales | None
    dictionary: TrainableMatrix | TrainableScales | None

    def __init__(self, band: Band, ids: NDArray[np.int64]) -> None:  # ids [rows] of the band
        super().__init__()
        if band.cell is not None or isinstance(band.values, Graded):
            raise ArgumentError(
                "graded rows and rows of a composer with a cell cannot be tuned: "
                "compress by another method"
            )
        self.band = band
        dense = isinstance(band.codes, Every)
        codes = (None, None) if dense else band.fetch(ids, np.arange(band.rows, dtype=np.int64))
        for name, array in zip(("indices", "values"), codes, strict=True):
            tensor = None if array is None else as_tensor(array)
            self.register_buffer(name, tensor, persistent=False)
        self.stored = trainable_rows(band.values) if dense and band.values is not None else None
        self.dictionary = None
        if band.dictionary is not None:
            own_rows = isinstance(band.codes, Identity)
            self.dictionary = (trainable_rows if own_rows else TrainableMatrix)(band.dictionary)
        self.norms = None if band.norms is None else TrainableMatrix(band.norms)
        self.plus = None if band.plus is None else TrainableBand(band.plus, ids)
        affine = band.affine or Affine()
        self.basis = None if affine.weight is None else TrainableMatrix(affine.weight)
        self.bias = None if affine.bias is None else nn.Parameter(as_tensor(affine.bias))

    def forward(self, positions: Tensor) -> Tensor:  # [n] -> [n, d]
        """Return rows."""
        rows: Tensor = self.combine(positions)
        rows = rows if self.plus is None else rows + self.plus(positions)
        rows = rows if self.basis is None else rows @ self.basis.dense()
        rows = rows if self.bias is None else rows + self.bias
        return rows if self.norms is None else rows * self.norms.rows(positions)

    def combine(self, positions: Tensor) -> Tensor:  # [n] -> [n, d']
        """Combine atoms."""
        if self.stored is not None:
            rows = self.stored.rows(positions)
            return rows if self.dictionary is None else rows @ self.dictionary.dense()
        assert self.indices is not None
        assert self.dictionary is not None
        indices = self.indices[positions]
        weights = None if self.values is None else self.values[positions]
        if self.band.combine == "sum" and isinstance(self.dictionary, TrainableMatrix):
            return nn.functional.embedding_bag(
                indices, self.dictionary.dense(), mode="sum", per_sample_weights=weights
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
        """Return the band with the trained parameters and the original codes."""
        weight = None if self.basis is None else self.basis.pack()
        bias = None if self.bias is None else self.bias.detach().cpu().numpy()
        norms = None if self.norms is None else self.norms.pack()
        return replace(
            self.band,
            values=self.band.values if self.stored is None else self.stored.pack(),
            dictionary=None if self.dictionary is None else self.dictionary.pack(),
            plus=None if self.plus is None else self.plus.pack(),
            affine=None if self.band.affine is None else Affine(weight, bias, norms),
        )


class TrainableEmbedding(nn.Module):
    """A packed embedding while it is tuned: the same rows and logits, with gradients.

    >>> import featherbed as fb
    >>> matrix = np.random.default_rng(0).standard_normal((600, 16))
    >>> packed = PackedEmbedding(fb.compress(matrix, ratio=3, method="int4"))
    >>> trainable = TrainableEmbedding(packed)
    >>> ids = torch.tensor([3, 17])
    >>> torch.allclose(trainable(ids), packed(ids), atol=1e-6), trainable(ids).requires_grad
    (True, True)
    """

    like: Tensor  # empty, with the dtype of rows

    def __init__(self, packed: PackedEmbedding) -> None:
        super().__init__()
        self.packed_table = table = packed.table
        self.num_embeddings, self.embedding_dim = packed.num_embeddings, packed.embedding_dim
        self.padding_idx, self.scale = packed.padding_idx, packed.scale
        self.register_buffer("like", packed.like.clone(), persistent=False)
        ids = np.arange(len(table), dtype=np.int64)
        self.bands = nn.ModuleList(
            TrainableBand(band, ids[batch]) for band, batch, _ in table.places(ids)
        )

    def forward(self, ids: Tensor) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids."""
        return self.rows(ids, self.scale)

    def rows(self, ids: Tensor, scale: float) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids times ``scale``."""
        unique, inverse = torch.unique(check_ids(ids, self.num_embeddings), return_inverse=True)
        rows = self.compose(unique)[inverse]
        return (rows if scale == 1 else rows * scale).to(self.like.dtype)

    def compose(self, ids: Tensor) -> Tensor:  # int64 [n] -> float32 [n, d]
        """Compute the rows of ids."""
        places = list(self.packed_table.places(ids.cpu().numpy()))
        parts = [
            band(torch.from_numpy(positions).to(ids.device))
            for band, (_, _, positions) in zip(self.bands, places, strict=False)
            if len(positions)
        ]
        order = torch.from_numpy(np.concatenate([batch for _, batch, _ in places])).to(ids.device)
        rows = torch.cat(parts)
        rows = rows if len(parts) == 1 else torch.empty_like(rows).index_copy(0, order, rows)
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((ids == self.padding_idx)[:, None], 0.0)

    @property
    def weight(self) -> Tensor:  # [V, d]
        """The dense rows, computed on each access."""
        ids = torch.arange(self.num_embeddings, device=self.like.device)
        return self.compose(ids).to(self.like.dtype)

    def logits(self, hidden: Tensor) -> Tensor:  # [..., d] -> [..., V]
        """Return the logits of hidden states."""
        return hidden @ self.weight.T

    def pack(self) -> PackedTable:
        """Return the trained table."""
        table = self.packed_table
        bands = [band.pack() for band in self.bands]  # type: ignore[operator]
        return PackedTable(
            bands, table.dim, padding_idx=table.padding_idx, keys=table.keys, made_by=table.made_by
        )
