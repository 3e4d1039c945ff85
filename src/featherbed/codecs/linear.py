"""Low rank: every row is a linear combination of a few principal components."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.codecs.codec import Codec, CodecJob, FinalFit, Fit, Settings, matrix_size
from featherbed.codecs.integer import level_rows
from featherbed.codecs.principal import principal, row_directions
from featherbed.codecs.rows import Floats, WeightedRows
from featherbed.errors import ArgumentError
from featherbed.packed.band import Affine, Band, Every
from featherbed.packed.matrix import Matrix

NEGLIGIBLE = 1e-12  # of the largest singular value: smaller ones are rounding errors


class LowRankCodec(Codec):
    """Principal components: row ≈ values @ components + mean, with integer or float16 values."""

    name = "lowrank"

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays with these settings."""
        rank = settings["rank"]
        values = matrix_size(settings["kind"], rows, rank, "column", 4)
        return values + matrix_size("float16", rank, dim) + 4 * dim

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:
        """Return the highest rank that fits, for each kind of values."""
        found = []
        for kind in ("int8", "int4", "float16"):
            ranks = range(1, min(rank, dim) + 1)
            fitting = [r for r in ranks if self.size(rows, dim, rank=r, kind=kind) <= budget]
            found += [{"rank": fitting[-1], "kind": kind}] if fitting else []
        return found

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:  # noqa: ARG002
        """Refuse a rank above the number of columns."""
        if settings["rank"] > dim:
            raise ArgumentError(
                f"lowrank: rank={settings['rank']}: a matrix of {dim} columns has at most that rank"
            )
        return settings

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the matrix."""
        mean, components = principal(job, settings["rank"])
        atoms = Matrix.encode(components, "float16")
        projected = ProjectedRows(job.rows, mean, atoms.dense())
        values = WeightedRows(projected, job.rows.weights if job.rows.weighted else None)
        if settings["kind"] == "float16":
            data = np.concatenate([block.astype(np.float16) for _, block in values.blocks()])
            stored = Matrix("float16", (values.count, values.dim), data)
        else:
            stored = level_rows(job, values, settings["kind"], "column")
        return FinalFit([Band(job.rows.count, Every(), stored, atoms, affine=Affine(None, mean))])


class ProjectedRows:
    """The rows of a matrix in another basis, computed on access."""

    dtype = np.dtype(np.float32)

    def __init__(self, rows: WeightedRows, mean: Floats, components: Floats) -> None:
        self.rows, self.mean, self.components = rows, mean, components
        self.shape = (rows.count, len(components))

    def __getitem__(self, index: Any) -> Floats:
        rows: Floats = np.asarray(self.rows.matrix[index], dtype=np.float32)
        found: Floats = np.dot(rows - self.mean, self.components.T)
        return found


def factorize(
    rows: NDArray[Any],  # [V, d]
    rank: int,
    weights: NDArray[Any] | None = None,  # [V]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return values [V, r] and atoms [r, d] of the best approximation of a rank, with weights.

        min Σ_i w_i ||x_i - b_i A||²    (Eckart and Young 1936)

    Both factors share the singular values; directions beyond the rank of the rows are zero.

    >>> values, atoms = factorize(np.ones((4, 3)), 2)
    >>> np.allclose(values @ atoms, 1), atoms.shape
    (True, (2, 3))
    """
    wide = np.asarray(rows, dtype=np.float64)
    root = np.ones((len(wide), 1)) if weights is None else np.sqrt(weights)[:, None]
    found = row_directions(wide * root, rank)
    values, atoms = np.zeros((len(wide), rank)), np.zeros((rank, wide.shape[1]))
    inside = wide @ found.T
    sizes = np.sqrt(np.square(inside * root).sum(axis=0))
    kept = np.flatnonzero(sizes > NEGLIGIBLE * sizes.max(initial=0))
    values[:, kept] = inside[:, kept] / np.sqrt(sizes[kept])
    atoms[kept] = found[kept] * np.sqrt(sizes[kept])[:, None]
    return values, atoms
