"""Columns with data: in graded rows, a column with zero bits is 0 in every row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError
from featherbed.packed.codes import Every
from featherbed.packed.engine import WORTH
from featherbed.packed.graded import Graded

if TYPE_CHECKING:
    from featherbed.packed.table import PackedTable

Flags = NDArray[np.bool_]


def columns_with_bits(table: PackedTable) -> Flags | None:  # -> [d]
    """Return whether each column has bits in some row of a table of graded rows, without reading it.

    None for other tables.
    """
    found = np.zeros(table.dim, dtype=bool)
    for band in table.bands:
        composed = (band.dictionary, band.cell, band.affine, band.plus)
        if not isinstance(band.codes, Every) or any(part is not None for part in composed):
            return None
        if not isinstance(band.values, Graded):
            return None
        for rows, digits in band.values.grades:
            if rows:
                found |= np.array([digit != "0" for digit in digits])
    return found


def nonzero_columns(table: PackedTable) -> Flags:  # -> [d]
    """Return whether each column is nonzero in some row; rows are read until all columns are.

    >>> import featherbed as fb
    >>> table = fb.DenseTable.from_dense(np.array([[0.0, 2.0], [0.0, 0.0]]))
    >>> nonzero_columns(table.pack()).tolist()
    [False, True]
    """
    known = columns_with_bits(table)
    if known is not None:
        return known
    found = np.zeros(table.dim, dtype=bool)
    for start in range(0, table.rows, WORTH - 1):
        found |= table.block(start, min(start + WORTH - 1, table.rows)).any(axis=0)
        if found.all():
            break
    return found


def check_direction(table: PackedTable) -> None:
    """Refuse the cosine of rows with one stored column: it is always 1, -1 or 0."""
    known = columns_with_bits(table)
    if known is not None and table.dim > 1 and np.count_nonzero(known) < 2:
        raise ArgumentError(
            f"cosine cannot tell these rows apart: {np.count_nonzero(known)} of {table.dim} "
            "columns are stored, the others have zero bits (a recommender without factors stores "
            "biases only): train with more ratings or a larger budget, or search by metric='dot'"
        )
