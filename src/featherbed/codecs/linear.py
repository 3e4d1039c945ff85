"""Low rank: every row is a mixture of a few principal components."""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.codecs.codec import Codec, CodecJob, FinalFit, Fit, Settings, matrix_size
from featherbed.codecs.integer import level_rows
from featherbed.codecs.principal import principal
from featherbed.codecs.rows import Floats, Rows
from featherbed.errors import ArgumentError
from featherbed.packed.band import Affine, Band
from featherbed.packed.codes import Every
from featherbed.packed.matrix import Matrix


class LowRankCodec(Codec):
    """Principal components: row ≈ values @ components + mean, the values as integers or half floats."""

    name = "lowrank"

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays these settings make."""
        rank = settings["rank"]
        return (
            matrix_size(settings["kind"], rows, rank, "column", 4)
            + matrix_size("float16", rank, dim)
            + 4 * dim
        )

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:
        """Return the highest rank that fits, for each kind of values."""
        found = []
        for kind in ("int8", "int4", "float16"):
            fitting = [
                r
                for r in range(1, min(rank, dim) + 1)
                if self.size(rows, dim, rank=r, kind=kind) <= budget
            ]
            found += [{"rank": fitting[-1], "kind": kind}] if fitting else []
        return found

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:  # noqa: ARG002 - columns that say little count
        """Refuse a rank there are no columns for."""
        if settings["rank"] > dim:
            raise ArgumentError(
                f"lowrank: rank={settings['rank']}: a matrix of {dim} columns has at most that rank"
            )
        return settings

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the matrix."""
        mean, components = principal(job, settings["rank"])
        atoms = Matrix.encode(components, "float16")
        inside = Projected(job.rows, mean, atoms.dense())
        values = Rows(inside, job.rows.weights if job.rows.weighted else None)
        kind = settings["kind"]
        stored = (
            Matrix(
                kind,
                (values.count, values.dim),
                np.concatenate([block.astype(np.float16) for _, block in values.blocks()]),
            )
            if kind == "float16"
            else level_rows(job, values, kind, "column")
        )
        return FinalFit(
            [
                Band(
                    job.rows.count,
                    Every(),
                    values=stored,
                    dictionary=atoms,
                    affine=Affine(None, mean),
                )
            ]
        )


class Projected:
    """Rows of a matrix in another basis, computed when asked for."""

    dtype = np.dtype(np.float32)

    def __init__(self, rows: Rows, mean: Floats, components: Floats) -> None:
        self.rows, self.mean, self.components = rows, mean, components
        self.shape = (rows.count, len(components))

    def __getitem__(self, index: Any) -> Floats:
        rows: Floats = np.asarray(self.rows.matrix[index], dtype=np.float32)
        found: Floats = np.dot(rows - self.mean, self.components.T)
        return found
