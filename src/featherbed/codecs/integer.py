"""Integer rows: every number as one of 2^b levels, with a scale for each row or column."""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.codecs.codec import Codec, CodecJob, FinalFit, Fit, Settings, matrix_size
from featherbed.codecs.rows import Floats, WeightedRows
from featherbed.packed.band import Band, Every
from featherbed.packed.matrix import (
    FULL_HALF,
    Matrix,
    best_scales,
    level_bits,
    pack_levels,
    to_levels,
)

SAMPLE = 1 << 16  # rows to which column scales are fitted


class IntegerCodec(Codec):
    """Every number as one of 2^b levels, with scales by row or column; outliers are clipped."""

    def __init__(self, kind: str) -> None:
        self.name = self.kind = kind

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays with these settings."""
        scales = settings["scales"]
        return matrix_size(self.kind, rows, dim, scales, 2 if scales == "row" else 4)

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:  # noqa: ARG002
        """Return scales by row and by column, if they fit."""
        kinds: list[Settings] = [{"scales": "row"}, {"scales": "column"}]
        return [settings for settings in kinds if self.size(rows, dim, **settings) <= budget]

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the matrix."""
        values = level_rows(job, job.rows, self.kind, settings["scales"])
        return FinalFit([Band(job.rows.count, Every(), values=values)])


def level_rows(job: CodecJob, rows: WeightedRows, kind: str, scales: str) -> Matrix:
    """Quantize all rows, block by block."""
    if scales == "column":
        bits = level_bits(kind)
        scale = choose_scales(rows.take(rows.draw(SAMPLE, job.generator)), bits, scales)
        levels = (to_levels(block, scale[None, :], bits) for _, block in rows.blocks())
        data = np.concatenate([pack_levels(block, bits) for block in levels])
        return Matrix(kind, (rows.count, rows.dim), data, scale, 1)
    for scale_kind in ("float16", "float32"):  # float32 for all if one is too small for float16
        parts = []
        for start, block in rows.blocks():
            job.progress(f"{kind} rows", start / rows.count)
            parts.append(Matrix.encode(block, kind, "row", scale_kind))
            found = parts[-1].scale
            if found is None or found.dtype != scale_kind or _too_small(block, found):
                break
        else:
            break
    row_scales = np.concatenate([part.scale for part in parts if part.scale is not None])
    data = np.concatenate([part.data for part in parts])
    return Matrix(kind, (rows.count, rows.dim), data, row_scales, 0)


def _too_small(block: Floats, scale: Any) -> bool:
    """Return whether most nonzero rows have scales that float16 holds with few bits."""
    nonzero = block.any(axis=1)
    few = scale[nonzero] < FULL_HALF
    return scale.dtype == np.float16 and bool(2 * np.count_nonzero(few) > np.count_nonzero(nonzero))


def choose_scales(rows: Floats, bits: int, scales: str, weights: Any = None) -> Floats:
    """Return the scale of each row [V] or column [d] with the smallest squared error.

    ``weights`` [V] of rows count for scales of columns only.

    >>> choose_scales(np.array([[3.0, -3.0], [1.5, 1.5]], np.float32), 2, "row").tolist()
    [2.0, 1.0]
    """
    if scales == "row":
        return best_scales(rows, bits, 0)
    return best_scales(rows, bits, 1, weights)
