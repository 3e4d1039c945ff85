"""Rows of a packed table replaced and added in its own format; all other rows keep their bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from featherbed.errors import ArgumentError
from featherbed.packed.band import Band, Every, Identity, Ids, Members
from featherbed.packed.matrix import (
    MOST_GRADES,
    Floats,
    Graded,
    Matrix,
    graded_levels,
    level_bits,
    pack_levels,
    to_levels,
)
from featherbed.packed.table import PackedTable

ADDED = "int8"  # storage of rows added to a table of codes


def edit_rows(
    table: PackedTable, ids: Ids, rows: Floats, added: Floats
) -> PackedTable:  # [n], [n, d], [m, d]
    """Return a table in which ``rows`` replace those of ``ids``, and ``added`` come last.

    Keys are dropped if rows are added. Rows are rounded to the bits and scales of the stored ones;
    added rows get those of the grade with the most bits. Where rows are codes of atoms, added rows
    are stored as int8, and none can be replaced.

    >>> from featherbed.packed.band import Every
    >>> stored = Matrix.encode(np.eye(2, dtype=np.float32), "float32")
    >>> table = PackedTable([Band(2, Every(), values=stored)], 2)
    >>> edit_rows(table, np.array([1]), np.full((1, 2), 3.0), np.full((1, 2), 5.0))[:].tolist()
    [[1.0, 0.0], [3.0, 3.0], [5.0, 5.0]]
    """
    ids, rows, added = np.asarray(ids), np.atleast_2d(rows), np.atleast_2d(added)
    rows, added = (part.reshape(-1, table.dim).astype(np.float32) for part in (rows, added))
    keys = None if len(added) else table.keys
    band = table.bands[0]
    if len(table.bands) == 1 and _holds_rows(band):
        return table.replace(bands=[_edit_band(band, ids, rows, added)], keys=keys)
    first = table.rows - band.rows  # first id of rows added before, if the band holds such
    holds_added = (
        band.members is not None
        and _holds_rows(band)
        and not np.any(band.members.split(np.arange(first))[0])
    )
    if not holds_added:
        first = table.rows
    if len(ids) and ids.min() < first:
        raise ArgumentError(
            "these rows are codes of shared atoms, so that none can be replaced alone: train "
            "again, or leave out the users that are known already"
        )
    total = table.rows + len(added)
    start = (
        _edit_band(band, ids - first, rows, added)
        if holds_added
        else Band(len(added), Every(), values=Matrix.encode(added, ADDED))
    )
    start = replace(start, members=Members.of(np.arange(first, total), total))
    rest = table.bands[1:] if holds_added else table.bands
    if not len(added) and not holds_added:
        return table
    return table.replace(bands=[start, *rest], keys=keys)


def _holds_rows(band: Band) -> bool:
    """Whether the band stores rows as they are, not codes."""
    plain = band.cell is None and band.plus is None and band.affine is None
    if isinstance(band.codes, Identity):
        return plain and band.values is None and band.dictionary is not None
    return plain and isinstance(band.codes, Every) and band.dictionary is None


def _edit_band(band: Band, ids: Ids, rows: Floats, added: Floats) -> Band:
    name = "values" if band.dictionary is None else "dictionary"
    stored: Any = getattr(band, name)
    edit = _edit_graded if isinstance(stored, Graded) else _edit_matrix
    changes: dict[str, Any] = {name: edit(stored, ids, rows, added)}
    return replace(band, rows=band.rows + len(added), **changes)


def _edit_matrix(stored: Matrix, ids: Ids, rows: Floats, added: Floats) -> Matrix:
    bits, both = level_bits(stored.kind), np.concatenate([rows, added])
    scale = stored.scale
    if bits >= 16 or scale is None or stored.axis == 0:
        kind = "float32" if scale is None else str(scale.dtype)
        new = Matrix.encode(both, stored.kind, "row", kind)
        data, scales = new.data, new.scale
    else:
        wide = scale.astype(np.float32)[None]
        data, scales = pack_levels(to_levels(both, wide, bits), bits), None
    whole = np.concatenate([stored.data, data[len(rows) :].astype(stored.data.dtype)])
    whole[ids] = data[: len(rows)]
    if scales is not None and scale is not None:
        scale = np.concatenate([scale, scales[len(rows) :].astype(scale.dtype)])
        scale[ids] = scales[: len(rows)]
    return Matrix(stored.kind, (len(whole), stored.shape[1]), whole, scale, stored.axis)


def _edit_graded(stored: Graded, ids: Ids, rows: Floats, added: Floats) -> Graded:
    bits, counts = stored.bits.astype(np.int64), [count for count, _ in stored.grades]
    scales = np.ones(bits.shape, np.float32)
    scales[bits > 0] = stored.scale.astype(np.float32)
    best = int(bits.sum(axis=1).argmax())
    if len(added):
        same = np.array_equal(bits[-1], bits[best]) and np.array_equal(scales[-1], scales[best])
        if same or len(counts) == MOST_GRADES:
            counts[-1] += len(added)
        else:
            bits, scales = (np.append(part, part[best][None], axis=0) for part in (bits, scales))
            counts.append(len(added))
    dense = np.concatenate([stored.dense(), added])
    dense[ids] = rows
    levels = graded_levels(dense, bits, counts, scales)
    return Graded.encode(levels, bits.astype(np.uint8), counts, scales, str(stored.scale.dtype))
