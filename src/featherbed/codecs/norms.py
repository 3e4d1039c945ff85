"""Directions by another codec, and the length of every row in eight bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from featherbed.codecs.codec import Codec, CodecJob, Fit, Settings, matrix_size
from featherbed.codecs.rows import Floats, Rows
from featherbed.packed.band import Band
from featherbed.packed.matrix import Matrix


class UnitRows:
    """The rows of a matrix divided by their lengths, when asked for."""

    dtype = np.dtype(np.float32)

    def __init__(self, rows: Rows, lengths: Floats) -> None:
        self.rows, self.lengths, self.shape = (
            rows,
            np.where(lengths > 0, lengths, 1),
            (rows.count, rows.dim),
        )

    def __getitem__(self, index: Any) -> Floats:
        found: Floats = (
            np.asarray(self.rows.matrix[index], dtype=np.float32) / self.lengths[index][:, None]
        )
        return found


class NormsCodec(Codec):
    """Another method on rows of length one, and every row's length in eight bits: row = length * direction."""

    def __init__(self, inner: Codec) -> None:
        self.inner, self.name = inner, f"{inner.name}+norms"

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays these settings make."""
        return self.inner.size(rows, dim, **settings) + matrix_size("int8", rows, 1, "column", 4)

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:
        """Return what the inner method can do with the bytes the lengths leave."""
        return self.inner.settings(
            rows, dim, budget - matrix_size("int8", rows, 1, "column", 4), rank
        )

    def work(self, dim: int, **settings: Any) -> float:
        """Return how long a fit takes for each row."""
        return self.inner.work(dim, **settings)

    def defaults(self) -> Settings:
        """Return the defaults of the inner codec."""
        return self.inner.defaults()

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:
        """Return settings completed by the inner codec."""
        return self.inner.complete(settings, dim, rank)

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the directions, then keep the lengths."""
        lengths = job.rows.lengths()
        rows = Rows(UnitRows(job.rows, lengths), job.rows.weights if job.rows.weighted else None)
        inner = self.inner.fit(
            replace(job, rows=rows, importance=job.importance * lengths**2), **settings
        )
        return NormsFit(inner, Matrix.encode(lengths[:, None], "int8", "column"))


@dataclass
class NormsFit(Fit):
    """Fitted directions, and lengths."""

    inner: Fit
    lengths: Matrix

    def __post_init__(self) -> None:
        self.refinable = self.inner.refinable

    def bands(self) -> list[Band]:
        """Return the packed form."""
        (band,) = self.inner.bands()
        return [replace(band, norms=self.lengths)]

    def refine(self, rounds: int) -> None:
        """Refine the directions."""
        self.inner.refine(rounds)
