"""Methods without codes: integer rows, and low rank (principal components)."""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.coding import leading
from featherbed.compression.method import Fit, Fixed, Job, Method, Settings, matrix_size
from featherbed.compression.rows import Floats, Rows
from featherbed.errors import ArgumentError
from featherbed.packed.band import Affine, Band
from featherbed.packed.codes import Every
from featherbed.packed.matrix import (
    FULL_HALF,
    Matrix,
    best_scales,
    level_bits,
    pack_levels,
    to_levels,
)

SAMPLE = 1 << 16  # rows that column scales are chosen on


class IntegerRows(Method):
    """Every number of a row as one of 2^b levels, with a scale for each row or column, clipped where that lowers the error."""

    def __init__(self, kind: str) -> None:
        self.name = self.kind = kind

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays these settings make."""
        return matrix_size(
            self.kind, rows, dim, settings["scales"], 2 if settings["scales"] == "row" else 4
        )

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:  # noqa: ARG002 - one signature
        """Return scales by row or by column, as they fit."""
        return [
            s
            for s in ({"scales": "row"}, {"scales": "column"})
            if self.size(rows, dim, **s) <= budget
        ]

    def fit(self, job: Job, **settings: Any) -> Fit:
        """Compress the matrix."""
        values = level_rows(job, job.rows, self.kind, settings["scales"])
        return Fixed([Band(job.rows.count, Every(), values=values)])


def level_rows(job: Job, rows: Rows, kind: str, scales: str) -> Matrix:
    """Store all rows as levels, block by block."""
    if scales == "column":
        chosen = best_scales(rows.take(rows.draw(SAMPLE, job.generator)), level_bits(kind), 1)
        bits = level_bits(kind)
        data = [
            pack_levels(to_levels(block, chosen[None, :], bits), bits) for _, block in rows.blocks()
        ]
        return Matrix(kind, (rows.count, rows.dim), np.concatenate(data), chosen, 1)
    for scale_kind in (
        "float16",
        "float32",
    ):  # one kind for all rows: float32 where a scale is too small for float16
        parts = []
        for start, block in rows.blocks():
            job.tell(f"{kind} rows", start / rows.count)
            parts.append(Matrix.encode(block, kind, "row", scale_kind))
            found = parts[-1].scale
            if found is None or found.dtype != scale_kind or _too_small(block, found):
                break
        else:
            break
    scale = np.concatenate([part.scale for part in parts if part.scale is not None])
    return Matrix(
        kind, (rows.count, rows.dim), np.concatenate([part.data for part in parts]), scale, 0
    )


def _too_small(block: Floats, scale: Any) -> bool:
    """Whether most rows that are not zero have scales that float16 holds with few bits."""
    there = block.any(axis=1)
    few = scale[there] < FULL_HALF
    return scale.dtype == np.float16 and bool(2 * np.count_nonzero(few) > np.count_nonzero(there))


class LowRank(Method):
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

    def fit(self, job: Job, **settings: Any) -> Fit:
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
        return Fixed(
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


def moments(job: Job) -> tuple[Any, Any]:  # -> mean [d], covariance [d, d]
    """Return the mean and the covariance of the rows, by importance, read once."""
    dim = job.rows.dim
    total, first, second = 0.0, np.zeros(dim), np.zeros((dim, dim))
    for start, block in job.rows.blocks():
        weights = job.importance[start : start + len(block)]
        total += float(weights.sum(dtype=np.float64))
        first += weights @ block
        second += (block * weights[:, None]).T @ block
    mean = first / total
    return mean, second / total - np.outer(mean, mean)


def principal(job: Job, rank: int) -> tuple[Floats, Floats]:  # -> mean [d], components [r, d]
    """Return the mean and the first principal components."""
    mean, covariance = moments(job)
    return mean.astype(np.float32), leading(covariance, rank)


def effective_rank(job: Job) -> int:
    """Return how many columns carry all but two thousandths of the variance."""
    _, covariance = moments(job)
    sizes = np.clip(np.linalg.eigvalsh(covariance)[::-1], 0, None)
    if sizes.sum() <= 0:
        return 1
    return min(job.rows.dim, int(np.searchsorted(np.cumsum(sizes) / sizes.sum(), 0.998)) + 1)
