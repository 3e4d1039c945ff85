"""Compiled look-ups: rows composed from codes, and rows stored one by one.

Each job is a function of a block of arguments (see ``featherbed.kernels.memory``) and a range of
rows. Jobs add in the order numpy does, without fused or reordered arithmetic, so that both give the
same rows (``featherbed.packed.band.Band`` and ``featherbed.packed.matrix.Matrix`` hold the numpy
code). They return 1, or 0 if a code points outside the dictionary; the caller raises.

The codes of a piece of rows are read first, then its rows are composed: reading waits for memory,
composing for arithmetic, and a loop that alternates waits for both.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from featherbed.kernels.codes import (
    NO_VALUES,
    STEP,
    decode,
    field,
    fields,
    half,
    highest,
    low_bits,
    span,
    value,
)
from featherbed.kernels.compiled import Job, compiled
from featherbed.kernels.memory import floats, matrix, vector, words
from featherbed.kernels.vectors import copy, half_row, level_row, prefetch, row_sum

PIECE = 64  # rows whose codes are read at once, and prefetched during the piece before
STRIPS_PIECE = 256  # the same where a piece is composed strip by strip
AHEAD = 8  # rows between the prefetch of a stored row and its use
_set8, _add8 = row_sum(8, add=False), row_sum(8, add=True)
_set4, _add4 = row_sum(4, add=False), row_sum(4, add=True)
_set1, _add1 = row_sum(1, add=False), row_sum(1, add=True)
# A closure that holds a compiled function is never found in the cache: loops use these as globals.
_levels8, _levels4, _levels3, _levels2 = (level_row(bits) for bits in (8, 4, 3, 2))


@compiled
def addresses4(base: Any, size: Any, indices: Any, at: Any) -> Any:
    """Return the addresses of the atoms of four codes, from code ``at`` on."""
    return (
        base + np.uint64(indices[at]) * size,
        base + np.uint64(indices[at + 1]) * size,
        base + np.uint64(indices[at + 2]) * size,
        base + np.uint64(indices[at + 3]) * size,
    )


@compiled
def addresses8(base: Any, size: Any, indices: Any, at: Any) -> Any:
    """Return the addresses of the atoms of eight codes, from code ``at`` on."""
    return addresses4(base, size, indices, at) + addresses4(base, size, indices, at + 4)


@compiled
def _values4(values: Any, at: Any) -> Any:
    return values[at], values[at + 1], values[at + 2], values[at + 3]


@compiled
def weigh(
    indices: Any, values: Any, at: Any, count: Any, base: Any, width: Any, place: Any
) -> None:
    """Write Σ_j values[at + j] * atoms[indices[at + j]] over ``count`` codes, added in order.

    The atoms begin at the address ``base``, the row at ``place``; both have ``width`` floats.
    """
    size, j = np.uint64(width * 4), 0
    while j + 8 <= count:
        atoms8 = addresses8(base, size, indices, at + j)
        values8 = _values4(values, at + j) + _values4(values, at + j + 4)
        if j == 0:
            _set8(place, atoms8, values8, width)
        else:
            _add8(place, atoms8, values8, width)
        j += 8
    if j + 4 <= count:
        atoms4, values4 = addresses4(base, size, indices, at + j), _values4(values, at + j)
        if j == 0:
            _set4(place, atoms4, values4, width)
        else:
            _add4(place, atoms4, values4, width)
        j += 4
    while j < count:
        atom = base + np.uint64(indices[at + j]) * size
        if j == 0:
            _set1(place, (atom,), (values[at + j],), width)
        else:
            _add1(place, (atom,), (values[at + j],), width)
        j += 1
    if count == 0:
        row = floats(place, width)
        for k in range(width):
            row[k] = np.float32(0)


@cache
def fixed_rows(  # noqa: C901 - every branch is decided when compiled
    count: int,
    index_bits: int,
    value_bits: int,
    kind: int,
    stride: int,
    width: int,
    strips: int,
    concat: bool,
) -> Job:
    """Compile the job that composes rows from fixed codes of one shape: all shifts are constants.

    Atoms of ``width`` floats are added, or stand side by side (``concat``). With ``strips`` > 1
    they are parts of atoms: the first ``width`` columns of all atoms, then the next, and so on.
    """
    record, values_at, size = count * (index_bits + value_bits), count * index_bits, 4 * width
    columns, whole = width * (count if concat else strips), record % 8 == 0
    piece = STRIPS_PIECE if strips > 1 else PIECE
    last = np.uint64(max(record - 1, 0) // 8)

    @Job
    def rows(address: Any, start: Any, stop: Any) -> Any:  # noqa: C901 - as above
        block = words(address)
        source, levels, choices = np.uint64(block[0]), vector(block, 2, np.float32), block[4]
        base, atoms = np.uint64(block[5]), block[6] // strips
        positions, target = vector(block, 8, np.int64), np.uint64(block[10])
        limit, good = np.uint32(min(choices, 2**32 - 1)), True
        indices = np.empty(piece * count, np.uint32)
        values = np.ones(piece * count, np.float32)
        raw = np.empty(piece * count if kind != NO_VALUES else 0, np.uint32)
        for row in range(start, min(start + piece, stop)):
            prefetch(source + np.uint64((positions[row] * record) >> 3))
        for first in range(start, stop, piece):
            end = min(first + piece, stop)
            for row in range(first, end):
                bit, at = positions[row] * record, (row - first) * count
                begin, rest = source + np.uint64(bit >> 3), 0 if whole else bit & 7
                fields(indices, at, begin, rest, index_bits, index_bits, count)
                if kind != NO_VALUES:
                    fields(raw, at, begin, rest + values_at, value_bits, value_bits, count)
            total = (end - first) * count
            if highest(indices, total) >= limit:
                good, indices[:] = False, np.uint32(0)
            decode(values, raw, total, kind, levels)
            if stride > 0:
                for at in range(0, total, count):
                    for j in range(count):
                        indices[at + j] += np.uint32(j * stride)
            for row in range(first, end):
                if row + piece < stop:
                    soon = source + np.uint64((positions[row + piece] * record) >> 3)
                    prefetch(soon)
                    prefetch(soon + last)
                at, place = (row - first) * count, target + np.uint64(4 * row * columns)
                if not concat:
                    weigh(indices, values, at, count, base, width, place)
                else:
                    for j in range(at, at + count):
                        atom = base + np.uint64(indices[j]) * np.uint64(size)
                        if kind == NO_VALUES:
                            copy(place, atom, size)
                        else:
                            _set1(place, (atom,), (values[j],), width)
                        place += np.uint64(size)
            for strip in range(1, strips):
                near = base + np.uint64(strip * atoms * size)
                for row in range(first, end):
                    place = target + np.uint64(4 * row * columns + strip * size)
                    weigh(indices, values, (row - first) * count, count, near, width, place)
        return np.int64(good)

    return rows


@cache
def ragged_rows(size_bits: int, index_bits: int, value_bits: int, kind: int, width: int) -> Job:
    """Compile the job that composes rows of ``width`` floats from ragged codes of one shape."""
    entry, mask = index_bits + value_bits, np.uint64((1 << index_bits) - 1)
    whole = entry % 8 == 0

    @Job
    def rows(address: Any, start: Any, stop: Any) -> Any:
        block = words(address)
        sizes, directory, wide = np.uint64(block[0]), vector(block, 3, np.uint32), block[5]
        entries, source, levels = block[6], np.uint64(block[7]), vector(block, 12, np.float32)
        held, base, atoms = block[14], np.uint64(block[15]), block[16]
        positions, target = vector(block, 18, np.int64), np.uint64(block[20])
        far, low = np.uint64(directory.ctypes.data), low_bits(size_bits)
        good, limit = True, np.uint32(min(atoms, 2**32 - 1))
        firsts, counts = np.empty(PIECE, np.int64), np.empty(PIECE, np.int64)
        indices, values = np.empty(8 * PIECE, np.uint32), np.empty(8 * PIECE, np.float32)
        for first in range(start, stop, PIECE):
            end, total = min(first + PIECE, stop), 0
            for row in range(first, end):
                if row + PIECE < stop:
                    soon = positions[row + PIECE]
                    prefetch(sizes + np.uint64((soon * size_bits) >> 3))
                    prefetch(far + np.uint64(soon // STEP * (8 if wide else 4)))
                number, count = span(
                    sizes, size_bits, low, directory, wide, held, entries, positions[row]
                )
                if count < 0:
                    good, number, count = False, np.int64(0), np.int64(0)
                prefetch(source + np.uint64((number * entry) >> 3))
                prefetch(source + np.uint64(((number + count) * entry) >> 3))
                firsts[row - first], counts[row - first] = number * entry, count
                total += count
            if total > len(indices):
                indices, values = np.empty(total, np.uint32), np.empty(total, np.float32)
            at, most = 0, np.uint32(0)
            for row in range(end - first):
                bit = firsts[row]
                begin, rest = source + np.uint64(bit >> 3), 0 if whole else bit & 7
                for j in range(counts[row]):  # few codes a row: eight at a time are no faster
                    index = field(begin, rest + j * entry, mask)
                    most = max(most, index)
                    indices[at + j] = index
                    values[at + j] = value(
                        begin, rest + j * entry + index_bits, value_bits, kind, levels
                    )
                at += counts[row]
            if total > 0 and most >= limit:
                good, indices[:] = False, np.uint32(0)
            at = 0
            for row in range(first, end):
                count, place = counts[row - first], target + np.uint64(4 * row * width)
                weigh(indices, values, at, count, base, width, place)
                at += count
        return np.int64(good)

    return rows


@Job
def gathered_rows(address: Any, start: Any, stop: Any) -> Any:
    """Compose rows from indices [B, s] and values [B, s] that are known (hash, remainder)."""
    block = words(address)
    indices, count = matrix(block, 0, np.int64).reshape(-1), block[2]
    values = matrix(block, 3, np.float32).reshape(-1)
    base, target, width = np.uint64(block[6]), np.uint64(block[9]), block[11]
    for row in range(start, stop):
        place = target + np.uint64(4 * row * width)
        weigh(indices, values, row * count, count, base, width, place)
    return np.int64(1)


@compiled
def _prefetch_row(address: Any, size: Any) -> None:
    for line in range((size + 63) // 64):
        prefetch(address + np.uint64(64 * line))


@Job
def float_rows(address: Any, start: Any, stop: Any) -> Any:
    """Copy float32 rows."""
    block = words(address)
    source, positions = np.uint64(block[0]), vector(block, 3, np.int64)
    target, width = np.uint64(block[5]), block[7]
    size = np.uint64(4 * width)
    for row in range(start, stop):
        if row + AHEAD < stop:
            _prefetch_row(source + np.uint64(positions[row + AHEAD]) * size, 4 * width)
        atom = (source + np.uint64(positions[row]) * size,)
        _set1(target + np.uint64(row) * size, atom, (np.float32(1),), width)
    return np.int64(1)


@Job
def half_rows(address: Any, start: Any, stop: Any) -> Any:
    """Convert float16 rows (viewed as uint16) to float32."""
    block = words(address)
    data, positions = matrix(block, 0, np.uint16), vector(block, 3, np.int64)
    out = matrix(block, 5, np.float32)
    source, target, width = np.uint64(block[0]), np.uint64(block[5]), block[7]
    size = np.uint64(2 * width)
    for row in range(start, stop):
        if row + AHEAD < stop:
            _prefetch_row(source + np.uint64(positions[row + AHEAD]) * size, 2 * width)
        p, to = np.uint64(positions[row]), np.uint64(row)
        done = half_row(target + to * np.uint64(4 * width), source + p * size, width)
        for k in range(done, width):
            out[to, k] = half(np.uint32(data[p, k]))
    return np.int64(1)


@compiled
def _level(data: Any, p: Any, bits: Any, k: Any) -> Any:
    """Return level k of row p, the bits of one byte or of two."""
    at = k * bits
    pair = np.uint32(data[p, at >> 3])
    if (at & 7) + bits > 8:
        pair |= np.uint32(data[p, (at >> 3) + 1]) << np.uint32(8)
    return np.float32((pair >> np.uint32(at & 7)) & np.uint32((1 << bits) - 1))


@cache
def level_rows(bits: int, axis: int) -> Job:
    """Compile the job that decodes rows of levels: x = scale * (level - (2^bits - 1) / 2)."""
    middle, by_column = np.float32((2**bits - 1) / 2), axis == 1

    @Job
    def rows(address: Any, start: Any, stop: Any) -> Any:
        block = words(address)
        data, scale = matrix(block, 0, np.uint8), vector(block, 3, np.float32)
        positions, out = vector(block, 5, np.int64), matrix(block, 7, np.float32)
        source, length, width = np.uint64(block[0]), np.uint64(block[2]), block[9]
        target, scales = np.uint64(block[7]), np.uint64(block[3])
        for row in range(start, stop):
            if row + AHEAD < stop:
                soon = np.uint64(positions[row + AHEAD])
                _prefetch_row(source + soon * length, block[2])
                if axis == 0:
                    prefetch(scales + soon * np.uint64(4))
            p, to = np.uint64(positions[row]), np.uint64(row)
            here, there = source + p * length, target + to * np.uint64(4 * width)
            factors = scales + p * np.uint64(4) if axis == 0 else scales
            if bits == 8:
                done = _levels8(there, here, middle, factors, by_column, width)
            elif bits == 4:
                done = _levels4(there, here, middle, factors, by_column, width)
            elif bits == 3:
                done = _levels3(there, here, middle, factors, by_column, width)
            else:
                done = _levels2(there, here, middle, factors, by_column, width)
            for k in range(done, width):
                factor = scale[p if axis == 0 else np.uint64(k)]
                out[to, k] = (_level(data, p, bits, k) - middle) * factor
        return np.int64(1)

    return rows


@Job
def pooled_rows(address: Any, start: Any, stop: Any) -> Any:
    """Add weighted rows to their bags: bag b takes rows starts[b] to starts[b + 1] - 1, in
    order."""
    block = words(address)
    source, weights = np.uint64(block[0]), vector(block, 3, np.float32)
    starts, target, width = vector(block, 5, np.int64), np.uint64(block[7]), block[9]
    size = np.uint64(4 * width)
    for bag in range(start, stop):
        place = target + np.uint64(bag) * size
        for row in range(starts[bag], starts[bag + 1]):
            _add1(place, (source + np.uint64(row) * size,), (weights[row],), width)
    return np.int64(1)
