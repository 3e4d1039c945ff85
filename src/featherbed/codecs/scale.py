"""Matrices of very small or very large numbers: compressed at scale 1, then scaled back.

Dictionaries, scales and sums of squares are float16 and float32, which are most precise near 1. A
matrix whose longest row is far from that is divided by a power of two, which is exact, and the
finished bands are multiplied by it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from featherbed.codecs.rows import Floats, WeightedRows
from featherbed.packed.band import Affine, Band
from featherbed.packed.matrix import FULL_HALF, Matrix

LEAST, MOST = 2.0**-12, 2.0**11  # root mean squares of longest rows that are not scaled
LARGEST_HALF = 6.5e4


class ScaledMatrix:
    """A matrix divided by a number, block by block."""

    def __init__(self, matrix: Any, factor: float) -> None:
        self.matrix, self.factor = matrix, np.float32(factor)
        self.shape, self.dtype = matrix.shape, np.dtype(matrix.dtype)

    def __getitem__(self, index: Any) -> Floats:
        rows: Floats = np.asarray(self.matrix[index], dtype=np.float32) / self.factor
        return rows


def factor_of(lengths: Floats, dim: int) -> float:  # [V]
    """Return the power of two that brings the numbers of the longest row near 1, or 1 if they are.

    >>> factor_of(np.array([1, 9], dtype=np.float32), 4), factor_of(np.array([4e-20]), 4) <= 2e-20
    (1.0, True)
    """
    size = float(lengths.max(initial=0)) / math.sqrt(dim)
    if size == 0 or LEAST <= size <= MOST:
        return 1.0
    return float(2.0 ** max(-126, math.frexp(size)[1] - 1))


def scale_rows(rows: WeightedRows, factor: float) -> WeightedRows:
    """Return rows divided by ``factor``, with the same weights."""
    if factor == 1:
        return rows
    return WeightedRows(ScaledMatrix(rows.matrix, factor), rows.weights if rows.weighted else None)


def scale_bands(bands: list[Band], factor: float) -> list[Band]:
    """Return bands whose rows are ``factor`` times those of the given ones.

    >>> from featherbed.packed.band import Every
    >>> band = Band(1, Every(), values=Matrix.encode(np.ones((1, 2)), "float16"))
    >>> scaled = scale_bands([band], 2.0**-60)[0].lookup(np.array([0]), np.array([0]))
    >>> scaled.tolist() == [[2.0**-60] * 2]
    True
    """
    return bands if factor == 1 else [_scaled_band(band, factor) for band in bands]


def _scaled_band(band: Band, factor: float) -> Band:
    """Return a band with rows multiplied by ``factor`` at the stage that takes the fewest bytes."""
    if band.affine is not None and band.affine.norms is not None:
        norms = _scaled(band.affine.norms, factor)
        return replace(band, affine=replace(band.affine, norms=norms))
    weight, bias = (None, None) if band.affine is None else (band.affine.weight, band.affine.bias)
    bias = None if bias is None else bias * np.float32(factor)
    late = None
    if weight is not None:
        late = replace(band, affine=Affine(_scaled(weight, factor), bias))
        if band.cell is not None:  # a cell is not linear
            return late
    plus = None if band.plus is None else _scaled_band(band.plus, factor)
    name = "values" if band.dictionary is None else "dictionary"
    changes: dict[str, Any] = {name: _scaled(getattr(band, name), factor), "plus": plus}
    affine = None if band.affine is None else Affine(weight, bias)
    early = replace(band, affine=affine, **changes)
    return early if late is None or _bytes(early) <= _bytes(late) else late


def _bytes(band: Band) -> int:
    weight = None if band.affine is None else band.affine.weight
    parts = sum(part.nbytes for part in (band.values, band.dictionary, weight) if part is not None)
    return parts + (0 if band.plus is None else _bytes(band.plus))


def _scaled(matrix: Matrix | None, factor: float) -> Any:
    """Return a matrix times ``factor``; float16 becomes float32 where it could not hold the
    numbers."""
    if matrix is None:
        return None
    if matrix.scale is not None:
        return replace(matrix, scale=_product(matrix.scale, factor), _decoded=None)
    data = _product(matrix.data, factor)
    kind = "float16" if data.dtype == np.float16 else "float32"
    return replace(matrix, kind=kind, data=data, _decoded=None)


def _product(numbers: Any, factor: float) -> Any:
    product = numbers.astype(np.float32) * np.float32(factor)
    sizes = np.abs(product[product != 0])
    fits = not len(sizes) or (np.median(sizes) > 8 * FULL_HALF and sizes.max() < LARGEST_HALF)
    return product.astype(np.float16) if numbers.dtype == np.float16 and fits else product
