"""Full validation of a packed table: every stored index, count, scale and key."""

from __future__ import annotations

import numpy as np

from featherbed.errors import FormatError
from featherbed.packed import bits
from featherbed.packed.band import (
    BLOCK_BITS,
    DIRECTORY_STEP,
    Band,
    Fixed,
    Members,
    Ragged,
    check_indices,
)
from featherbed.packed.matrix import Graded
from featherbed.packed.table import PackedTable

STEP = 1 << 18


def validate(table: PackedTable) -> None:
    """Read every stored index, count, scale and key; raise FormatError at the first wrong one."""
    left = table.rows
    for band in table.bands:
        if band.members is not None:
            _check_members(band.members, band.rows, left)
        left -= band.rows
        for layer in band.layers:
            _check_codes(layer)
            if isinstance(layer.values, Graded):
                layer.values.check()
    if table.keys is not None:
        table.keys.check()


def _check_members(members: Members, rows: int, left: int) -> None:
    counts = np.bitwise_count(members.bitmap).reshape(-1, BLOCK_BITS // 32).sum(1, dtype=np.int64)
    if int(counts.sum()) != rows:
        raise FormatError(f"a member bitmap has {int(counts.sum())} members, its band {rows} rows")
    if not np.array_equal(np.cumsum(counts) - counts, members.totals.astype(np.int64)):
        raise FormatError("the running totals of a member bitmap do not match it")
    tail = np.unpackbits(members.bitmap.view(np.uint8), bitorder="little")[left:]
    if tail.any():
        raise FormatError("a member bitmap names ids beyond the table")


def _check_codes(band: Band) -> None:
    levels = band.codes.levels if isinstance(band.codes, Fixed | Ragged) else None
    if levels is not None and levels.table is not None and levels.table[0] != 0:
        raise FormatError("level 0 must be 0")
    if isinstance(band.codes, Fixed) and band.codes.index_bits:  # no bits choose the only atom
        step = max(1, STEP // band.codes.count)
        for start in range(0, band.rows, step):
            band.codes.fetch(np.arange(start, min(start + step, band.rows)), band.atoms)
    elif isinstance(band.codes, Ragged):
        _check_ragged(band.codes, band.atoms)


def _check_ragged(codes: Ragged, atoms: int) -> None:
    total = 0
    for start in range(0, codes.rows, STEP):
        rows = np.arange(start, min(start + STEP, codes.rows))
        counts = codes.read_counts(rows)
        firsts = total + np.cumsum(counts) - counts
        last = -(-(start + len(rows)) // DIRECTORY_STEP)
        stored = codes.directory[start // DIRECTORY_STEP : last]
        if not np.array_equal(firsts[::DIRECTORY_STEP], stored.astype(np.int64)):
            raise FormatError("the directory of ragged codes does not match its counts")
        total += int(counts.sum())
    if total != codes.entries:
        raise FormatError(f"ragged codes count {total} entries, {codes.entries} are stored")
    width = codes.index_bits + codes.levels.bits
    for start in range(0, codes.entries, STEP):
        entries = np.arange(start, min(start + STEP, codes.entries))
        indices = bits.unpack(codes.stream, entries * width, codes.index_bits)
        check_indices(indices.astype(np.int64), atoms)
