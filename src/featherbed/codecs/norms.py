"""Directions by another codec, and the norm of every row in eight bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from featherbed.codecs.codec import (
    Codec,
    CodecJob,
    Fit,
    Settings,
    WrappedFit,
    WrappingCodec,
    matrix_size,
)
from featherbed.codecs.rows import Floats, WeightedRows
from featherbed.packed.band import Affine, Band
from featherbed.packed.matrix import Matrix


class UnitRows:
    """The rows of a matrix divided by their norms, computed on access."""

    dtype = np.dtype(np.float32)

    def __init__(self, rows: WeightedRows, norms: Floats) -> None:
        self.rows, self.norms = rows, np.where(norms > 0, norms, 1)
        self.shape = (rows.count, rows.dim)

    def __getitem__(self, index: Any) -> Floats:
        rows = np.asarray(self.rows.matrix[index], dtype=np.float32)
        unit: Floats = rows / self.norms[index][:, None]
        return unit


class NormsCodec(WrappingCodec):
    """Another codec on rows of norm 1, and the norm of every row in eight bits."""

    def __init__(self, inner: Codec) -> None:
        super().__init__(inner)
        self.name = f"{inner.name}+norms"

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays with these settings."""
        return self.inner.size(rows, dim, **settings) + matrix_size("int8", rows, 1, "column", 4)

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:
        """Return the settings of the inner codec within the bytes the norms leave."""
        left = budget - matrix_size("int8", rows, 1, "column", 4)
        return self.inner.settings(rows, dim, left, rank)

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the directions, then store the norms."""
        norms = job.rows.lengths()
        weights = job.rows.weights if job.rows.weighted else None
        rows = WeightedRows(UnitRows(job.rows, norms), weights)
        unit_job = replace(job, rows=rows, importance=job.importance * norms**2)
        unit_job.training = job.training
        inner = self.inner.fit(unit_job, **settings)
        return NormsFit(inner, Matrix.encode(norms[:, None], "int8", "column"))


@dataclass
class NormsFit(WrappedFit):
    """Fitted directions, and the norms of the rows."""

    norms: Matrix

    def bands(self) -> list[Band]:
        """Return the packed form."""
        (band,) = self.inner.bands()
        return [replace(band, affine=replace(band.affine or Affine(), norms=self.norms))]
