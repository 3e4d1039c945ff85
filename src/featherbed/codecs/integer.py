"""Integer rows: every number as one of a few levels, with a scale for each row or column."""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.codecs.codec import Codec, CodecJob, FinalFit, Fit, Settings, matrix_size
from featherbed.codecs.rows import Floats, Rows
from featherbed.packed.band import Band
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


class IntegerCodec(Codec):
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

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the matrix."""
        values = level_rows(job, job.rows, self.kind, settings["scales"])
        return FinalFit([Band(job.rows.count, Every(), values=values)])


def level_rows(job: CodecJob, rows: Rows, kind: str, scales: str) -> Matrix:
    """Store all rows as levels, block by block."""
    if scales == "column":
        bits = level_bits(kind)
        chosen = choose_scales(rows.take(rows.draw(SAMPLE, job.generator)), bits, scales)
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


def choose_scales(
    rows: Floats, bits: int, scales: str, weights: Any = None
) -> Floats:  # [V, d], [V] -> [V] or [d]
    """Return the scale of each row or column by the squared error it leaves.

    The scale of a column weighs its rows by ``weights``; that of a row has one row alone.

    >>> choose_scales(np.array([[3.0, -3.0], [1.5, 1.5]], np.float32), 2, "row").tolist()
    [2.0, 1.0]
    """
    if scales == "row":
        return best_scales(rows, bits, 0)
    return best_scales(rows, bits, 1, weights)
