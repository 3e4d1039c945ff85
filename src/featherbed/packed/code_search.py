"""Search by codes: the codes of rows, the rows with given codes, the nearest rows by Hamming
distance.

Codes are those of the first layer of fixed codes (s in every row). Where each code has its own part
of the dictionary, a code is the choice within its part; values of codes are ignored. The padding
row is never a neighbor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.errors import ArgumentError
from featherbed.packed import engine, search
from featherbed.packed.band import Band, Fixed, Ids, check_indices
from featherbed.packed.matrix import Floats

if TYPE_CHECKING:
    from featherbed.packed.table import PackedTable

BATCH = 64  # rows whose neighbors are searched at once


def fixed_codes(table: PackedTable) -> list[tuple[Band, Fixed]]:
    """Return the bands with their codes; refuse tables without fixed codes."""
    found = [(band, band.codes) for band in table.bands if isinstance(band.codes, Fixed)]
    layouts = {type(band.codes).__name__.lower() for band in table.bands} - {"fixed"}
    if layouts:
        raise ArgumentError(
            f"this table stores rows as {', '.join(sorted(layouts))}: only the layout 'fixed' has "
            "codes. Trained tables of codes have it, tables compressed by a codec of codes (pq, "
            "layered, kd, clusters ...), and tables packed with layout='fixed'"
        )
    counts = sorted({codes.count for _, codes in found})
    if len(counts) > 1:
        raise ArgumentError(
            f"the bands of this table have {' and '.join(map(str, counts))} codes a row: "
            "they cannot be compared"
        )
    return found


def check_codes(table: PackedTable, codes: ArrayLike) -> Ids:  # [..., j]
    """Return codes as int64; refuse codes that no row of this table can have."""
    found = fixed_codes(table)
    count, choices = found[0][1].count, max(fixed.choices(band.atoms) for band, fixed in found)
    array = np.asarray(codes)
    if array.dtype.kind not in "iu" and array.size:
        raise ArgumentError(
            f"codes have dtype {array.dtype}: they are integers from 0 to {choices - 1}"
        )
    if array.ndim == 0 or array.shape[-1] > count:
        raise ArgumentError(f"codes have shape {array.shape}; a row of this table has {count}")
    if array.size and (int(array.min()) < 0 or int(array.max()) >= choices):
        wrong = int(array.min()) if int(array.min()) < 0 else int(array.max())
        raise ArgumentError(
            f"code {wrong} is not in this table: its codes go from 0 to {choices - 1}"
        )
    return array.astype(np.int64)


def codes_of(table: PackedTable, ids: Ids) -> Ids:  # [...] -> [..., s]
    """Return the codes of rows."""
    count, flat = fixed_codes(table)[0][1].count, ids.reshape(-1)
    out = np.empty((len(flat), count), dtype=np.int64)
    for start in range(0, len(flat), table._chunk):
        part = out[start : start + table._chunk]
        for band, batch, positions in table.places(flat[start : start + table._chunk]):
            assert isinstance(band.codes, Fixed)
            part[batch] = band.codes.field(positions, 0, count)
            check_indices(part[batch], band.codes.choices(band.atoms))
    return out.reshape(*ids.shape, count)


def rows_with(table: PackedTable, code: ArrayLike) -> Ids:
    """Return the ids of the rows whose codes start with ``code``, filtered code by code."""
    prefix = check_codes(table, code)
    if prefix.ndim != 1:
        raise ArgumentError(f"code has shape {prefix.shape}: give the first codes of a row, [j]")
    found = [np.empty(0, dtype=np.int64)]
    for start in range(0, table.rows, table._chunk):
        ids = np.arange(start, min(start + table._chunk, table.rows))
        for band, batch, positions in table.places(ids):
            assert isinstance(band.codes, Fixed)
            left = ids[batch]
            for j, choice in enumerate(prefix.tolist()):
                same = band.codes.field(positions, j, j + 1)[:, 0] == choice
                left, positions = left[same], positions[same]
            found.append(left)
    together = np.sort(np.concatenate(found))
    return together if table.padding_idx is None else together[together != table.padding_idx]


def near_codes(table: PackedTable, codes: ArrayLike, k: int) -> tuple[Ids, Ids]:
    """Return ids and Hamming distances of the k rows nearest to codes, [s] -> [k], [n, s] -> [n,
    k]."""
    search.check_count(k)
    array = check_codes(table, codes)
    count = fixed_codes(table)[0][1].count
    if array.ndim > 2 or array.shape[-1] != count:
        raise ArgumentError(
            f"codes have shape {array.shape}; this table takes [{count}] or [n, {count}]"
        )
    queries = np.atleast_2d(array).astype(np.uint32)

    def score(start: int, out: Floats) -> None:
        _count_matches(table, queries, start, out)
        if table.padding_idx is not None and start <= table.padding_idx < start + out.shape[1]:
            out[:, table.padding_idx - start] = -1

    ids, same = search.best_rows(table.rows, len(queries), int(k), score)
    most = table.rows - (table.padding_idx is not None)  # the padding row comes last
    ids, distances = ids[:, :most], count - same[:, :most].astype(np.int64)
    return (ids[0], distances[0]) if array.ndim == 1 else (ids, distances)


def _count_matches(
    table: PackedTable, queries: NDArray[np.uint32], start: int, out: Floats
) -> None:
    """Write the number of equal codes of queries [n, s] and the rows from ``start`` on, [n, B]."""
    first = table.bands[0].codes
    assert isinstance(first, Fixed)
    if len(table.bands) == 1 and engine.kernels(out.shape[1]):
        stream = np.ascontiguousarray(first.stream)
        plan = engine.Plan("matching_scores", stream, shape=first.shape[:3])
        for number, query in enumerate(queries):
            plan.run(out[number], start, query)
        return
    for begin in range(0, out.shape[1], table._chunk):
        part = out[:, begin : begin + table._chunk]
        ids = np.arange(start + begin, start + begin + part.shape[1])
        for band, batch, positions in table.places(ids):
            assert isinstance(band.codes, Fixed)
            stored = band.codes.field(positions, 0, first.count)
            for number, query in enumerate(queries):
                part[number, batch] = np.count_nonzero(stored == query, axis=1)


def code_recall(table: PackedTable, ids: Ids, k: int, metric: str) -> float:
    """Return the share of the k nearest rows by exact search that Hamming search finds."""
    search.check_count(k)
    fixed_codes(table)
    flat, found, total = ids.reshape(-1), 0, 0
    padding = -1 if table.padding_idx is None else table.padding_idx
    for start in range(0, len(flat), BATCH):
        own = flat[start : start + BATCH]
        exact = search.top(table, table[own], k + 2, metric)[0]  # with the row and the padding row
        close = near_codes(table, codes_of(table, own), k + 2)[0]
        for id_, right, guess in zip(own.tolist(), exact, close, strict=True):
            right, guess = (row[~np.isin(row, [id_, padding])][:k] for row in (right, guess))
            found, total = found + len(np.intersect1d(right, guess)), total + len(right)
    if total == 0:
        raise ArgumentError(
            "there are no neighbors to compare: give at least one id of a table with other rows"
        )
    return found / total
