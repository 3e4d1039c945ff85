"""Bins of popularity, and the storage cost of each row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.packed import bits
from featherbed.packed.anchor_weights import NOTHING
from featherbed.packed.band import Band
from featherbed.packed.codes import Every, Fixed, Identity, Ids, Ragged
from featherbed.packed.graded import Graded
from featherbed.packed.matrix import Matrix, level_bits
from featherbed.packed.table import PackedTable

COARSE, FINE = (1, 3), (1, 2, 5)  # bins per decade
Counts = NDArray[np.int64]


def bin_edges(highest: int, steps: tuple[int, ...] = COARSE) -> list[int]:
    """Return the starts of bins of counts: 0, then ``steps`` of every decade up to ``highest``.

    >>> bin_edges(120)
    [0, 1, 3, 10, 30, 100]
    """
    decades = (10**power for power in range(19))
    return [0, *(step * ten for ten in decades for step in steps if step * ten <= highest)]


def bin_name(low: int, high: int | None) -> str:
    """Return the name of the bin from ``low`` to below ``high``.

    >>> bin_name(3, 10), bin_name(100, None)
    ('3 to 9', '100 and more')
    """
    if high is None:
        return f"{low:,} and more"
    return f"{low:,}" if high == low + 1 else f"{low:,} to {high - 1:,}"


def has_weighted_atoms(band: Band) -> bool:
    """Whether rows are sums of stored atoms with weights of their own."""
    dense = isinstance(band.codes, Every) and band.dictionary is not None
    fixed = isinstance(band.codes, Fixed) and band.codes.levels is not None
    return dense or fixed or isinstance(band.codes, Ragged)


def row_cost(table: PackedTable, ids: Ids, coded: bool) -> Counts:  # [B] -> [B]
    """Return the nonzero codes (``coded``) or the bits of each row, without shared parts.

    >>> rows = Matrix.encode(np.ones((3, 8), np.float32), "float16")
    >>> table = PackedTable([Band(3, Every(), values=rows)], 8)
    >>> row_cost(table, np.array([0, 2]), coded=False).tolist()
    [128, 128]
    """
    out = np.zeros(len(ids), dtype=np.int64)
    for band, batch, positions in table.places(ids):
        for layer in band.layers:
            out[batch] += _count_codes(layer, positions) if coded else _count_bits(layer, positions)
    return out


def _count_codes(band: Band, positions: Ids) -> Any:
    codes = band.codes
    if isinstance(codes, Ragged):
        counts = bits.unpack(codes.counts, positions * codes.count_bits, codes.count_bits)
        return counts.astype(np.int64)
    if isinstance(codes, Fixed):
        values = codes.fetch(positions, band.atoms)[1]
        return codes.count if values is None else np.count_nonzero(values, axis=1)
    if band.values is None:
        return 1
    return np.count_nonzero(np.abs(band.values.rows(positions)) >= NOTHING, axis=1)


def _count_bits(band: Band, positions: Ids) -> Any:
    codes = band.codes
    own: Any = 0
    if isinstance(codes, Ragged):
        own = _count_codes(band, positions) * (codes.index_bits + codes.levels.bits)
        own += codes.count_bits
    elif isinstance(codes, Fixed):
        own = codes.record_bits
    rows = band.dictionary if isinstance(codes, Identity) else None
    matrices = [matrix for matrix in (band.values, band.norms, rows) if matrix is not None]
    return own + sum(_matrix_bits(matrix, positions) for matrix in matrices)


def _matrix_bits(matrix: Matrix | Graded, positions: Ids) -> Any:
    """Return the bits of rows of a stored matrix, with a scale per row if there is one."""
    if isinstance(matrix, Graded):
        ends = np.cumsum([rows for rows, _ in matrix.grades])
        record = np.array([sum(map(int, text)) for _, text in matrix.grades], dtype=np.int64)
        return record[np.searchsorted(ends, positions, side="right")]
    scale = 8 * matrix.scale.itemsize if matrix.scale is not None and matrix.axis == 0 else 0
    return level_bits(matrix.kind) * matrix.shape[1] + scale
