"""Compiled look-ups: rows composed from codes, and rows stored one by one.

Each job is a function of a block of arguments (see ``featherbed.kernels.memory``) and a range of
rows. Jobs add in the order numpy does, without fused or reordered arithmetic, so that both give the
same rows (``featherbed.packed.band.Band`` and ``featherbed.packed.matrix.Matrix`` hold the numpy
code). They return 1, or 0 if a code points outside the dictionary; the caller raises.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from featherbed.kernels.codes import (
    NO_VALUES,
    STEP,
    directory_entry,
    field,
    half,
    low_bits,
    span,
    value,
)
from featherbed.kernels.compiled import compiled, job
from featherbed.kernels.memory import matrix, vector, words
from featherbed.kernels.vectors import copy, level_row, prefetch, row_sum

AHEAD = 8  # rows between the prefetch of a record and its use
_BYTE = np.uint64(255)
_set8, _add8 = row_sum(8, add=False), row_sum(8, add=True)
_set4, _add4 = row_sum(4, add=False), row_sum(4, add=True)
_set1, _add1 = row_sum(1, add=False), row_sum(1, add=True)
_bytes, _bytes_by = level_row(8, by_column=False), level_row(8, by_column=True)
_halves, _halves_by = level_row(4, by_column=False), level_row(4, by_column=True)


@compiled
def addresses8(base: Any, size: Any, indices: Any, row: Any, j: Any) -> Any:
    """Return the addresses of the atoms of eight codes of a row, from code ``j`` on."""
    return addresses4(base, size, indices, row, j) + addresses4(base, size, indices, row, j + 4)


@compiled
def addresses4(base: Any, size: Any, indices: Any, row: Any, j: Any) -> Any:
    """Return the addresses of the atoms of four codes of a row, from code ``j`` on."""
    return (
        base + np.uint64(indices[row, j]) * size,
        base + np.uint64(indices[row, j + 1]) * size,
        base + np.uint64(indices[row, j + 2]) * size,
        base + np.uint64(indices[row, j + 3]) * size,
    )


@compiled
def _values4(values: Any, row: Any, j: Any) -> Any:
    return values[row, j], values[row, j + 1], values[row, j + 2], values[row, j + 3]


@compiled
def weigh(indices: Any, values: Any, row: Any, count: Any, atoms: Any, out: Any, to: Any) -> None:
    """out[to] = Σ_j values[row, j] * atoms[indices[row, j]], added in order, eight codes a loop."""
    width = out.shape[1]
    size = np.uint64(width * 4)
    base, place = np.uint64(atoms.ctypes.data), np.uint64(out.ctypes.data) + np.uint64(to) * size
    j = 0
    while j + 8 <= count:
        atoms8 = addresses8(base, size, indices, row, j)
        values8 = _values4(values, row, j) + _values4(values, row, j + 4)
        if j == 0:
            _set8(place, atoms8, values8, width)
        else:
            _add8(place, atoms8, values8, width)
        j += 8
    if j + 4 <= count:
        atoms4, values4 = addresses4(base, size, indices, row, j), _values4(values, row, j)
        if j == 0:
            _set4(place, atoms4, values4, width)
        else:
            _add4(place, atoms4, values4, width)
        j += 4
    while j < count:
        atom = base + np.uint64(indices[row, j]) * size
        if j == 0:
            _set1(place, (atom,), (values[row, j],), width)
        else:
            _add1(place, (atom,), (values[row, j],), width)
        j += 1
    if count == 0:
        for k in range(width):
            out[to, k] = np.float32(0)


@job
def byte_rows(address: Any, start: Any, stop: Any) -> Any:
    """Compose rows whose indices and values take a byte each: the fast case of ``fixed_rows``."""
    block = words(address)
    records = matrix(block, 0, np.uint64)  # s index bytes, then s value bytes; s is a multiple of 8
    levels, choices = vector(block, 3, np.float32), block[5]
    atoms, positions = matrix(block, 6, np.float32), vector(block, 9, np.int64)
    out = matrix(block, 11, np.float32)
    groups, width, good = records.shape[1] // 2, out.shape[1], True
    top, length = np.uint64(choices - 1), np.uint64(records.shape[1] * 8)
    base, result = np.uint64(atoms.ctypes.data), np.uint64(out.ctypes.data)
    size = np.uint64(width * 4)
    source = np.uint64(records.ctypes.data)
    for row in range(start, min(start + AHEAD, stop)):
        prefetch(source + np.uint64(positions[row]) * length)
    for row in range(start, stop):
        if row + AHEAD < stop:
            prefetch(source + np.uint64(positions[row + AHEAD]) * length)
        position, place = np.uint64(positions[row]), result + np.uint64(row) * size
        for g in range(groups):
            x, y = records[position, g], records[position, groups + g]
            i0, i1 = x & _BYTE, (x >> np.uint64(8)) & _BYTE
            i2, i3 = (x >> np.uint64(16)) & _BYTE, (x >> np.uint64(24)) & _BYTE
            i4, i5 = (x >> np.uint64(32)) & _BYTE, (x >> np.uint64(40)) & _BYTE
            i6, i7 = (x >> np.uint64(48)) & _BYTE, x >> np.uint64(56)
            highest = max(max(max(i0, i1), max(i2, i3)), max(max(i4, i5), max(i6, i7)))
            if top < _BYTE and highest > top:
                good = False
                i0 = i1 = i2 = i3 = i4 = i5 = i6 = i7 = np.uint64(0)
            near = (base + i0 * size, base + i1 * size, base + i2 * size, base + i3 * size)
            far = (base + i4 * size, base + i5 * size, base + i6 * size, base + i7 * size)
            w0, w1 = levels[y & _BYTE], levels[(y >> np.uint64(8)) & _BYTE]
            w2, w3 = levels[(y >> np.uint64(16)) & _BYTE], levels[(y >> np.uint64(24)) & _BYTE]
            w4, w5 = levels[(y >> np.uint64(32)) & _BYTE], levels[(y >> np.uint64(40)) & _BYTE]
            w6, w7 = levels[(y >> np.uint64(48)) & _BYTE], levels[y >> np.uint64(56)]
            if g == 0:
                _set8(place, near + far, (w0, w1, w2, w3, w4, w5, w6, w7), width)
            else:
                _add8(place, near + far, (w0, w1, w2, w3, w4, w5, w6, w7), width)
    return np.int64(good)


@cache
def fixed_rows(count: int, index_bits: int, value_bits: int, kind: int, stride: int) -> int:
    """Compile the job that composes rows from fixed codes of one shape: all shifts are constants."""
    record, values_at = count * (index_bits + value_bits), count * index_bits
    mask, whole = np.uint64((1 << index_bits) - 1), record % 8 == 0

    @job
    def rows(address: Any, start: Any, stop: Any) -> Any:
        block = words(address)
        source, levels, choices = np.uint64(block[0]), vector(block, 2, np.float32), block[4]
        atoms, positions = matrix(block, 5, np.float32), vector(block, 8, np.int64)
        out = matrix(block, 10, np.float32)
        limit, good = np.uint32(min(choices, 2**32 - 1)), True
        indices, values = np.empty((1, count), np.uint32), np.ones((1, count), np.float32)
        for row in range(start, min(start + AHEAD, stop)):
            prefetch(source + np.uint64((positions[row] * record) >> 3))
        for row in range(start, stop):
            if row + AHEAD < stop:
                prefetch(source + np.uint64((positions[row + AHEAD] * record) >> 3))
            bit = positions[row] * record
            begin, rest = source + np.uint64(bit >> 3), 0 if whole else bit & 7
            for j in range(count):
                index = field(begin, rest + j * index_bits, mask)
                if index >= limit:
                    good, index = False, np.uint32(0)
                indices[0, j] = index + np.uint32(j * stride)
            if kind != NO_VALUES:
                for j in range(count):
                    values[0, j] = value(
                        begin, rest + values_at + j * value_bits, value_bits, kind, levels
                    )
            weigh(indices, values, 0, count, atoms, out, np.uint64(row))
        return np.int64(good)

    return rows


@cache
def concat_rows(
    count: int, index_bits: int, value_bits: int, kind: int, stride: int, width: int
) -> int:
    """Compile the job that copies the atoms of fixed codes, ``width`` floats each, side by side."""
    record, values_at, size = count * (index_bits + value_bits), count * index_bits, 4 * width
    mask, whole = np.uint64((1 << index_bits) - 1), record % 8 == 0

    @job
    def rows(address: Any, start: Any, stop: Any) -> Any:
        block = words(address)
        source, levels, choices = np.uint64(block[0]), vector(block, 2, np.float32), block[4]
        base, positions = np.uint64(block[5]), vector(block, 8, np.int64)
        target = np.uint64(block[10])
        limit, good = np.uint32(min(choices, 2**32 - 1)), True
        for row in range(start, min(start + AHEAD, stop)):
            prefetch(source + np.uint64((positions[row] * record) >> 3))
        for row in range(start, stop):
            if row + AHEAD < stop:
                prefetch(source + np.uint64((positions[row + AHEAD] * record) >> 3))
            bit, place = positions[row] * record, target + np.uint64(row * count * size)
            begin, rest = source + np.uint64(bit >> 3), 0 if whole else bit & 7
            for j in range(count):
                index = field(begin, rest + j * index_bits, mask)
                if index >= limit:
                    good, index = False, np.uint32(0)
                atom = base + (np.uint64(index) + np.uint64(j * stride)) * np.uint64(size)
                to = place + np.uint64(j * size)
                if kind == NO_VALUES:
                    copy(to, atom, size)
                else:
                    weight = value(
                        begin, rest + values_at + j * value_bits, value_bits, kind, levels
                    )
                    _set1(to, (atom,), (weight,), width)
        return np.int64(good)

    return rows


@job
def ragged_rows(address: Any, start: Any, stop: Any) -> Any:
    """Compose rows from ragged codes."""
    block = words(address)
    sizes, size_bits, directory = np.uint64(block[0]), block[2], vector(block, 3, np.uint32)
    wide = block[5]
    entries, source, index_bits, value_bits = block[6], np.uint64(block[7]), block[9], block[10]
    kind, levels = block[11], vector(block, 12, np.float32)
    rows, atoms = block[14], matrix(block, 15, np.float32)
    positions, out = vector(block, 18, np.int64), matrix(block, 20, np.float32)
    entry, mask = index_bits + value_bits, np.uint64((1 << index_bits) - 1)
    good, limit = True, np.uint32(min(atoms.shape[0], 2**32 - 1))
    indices, values = np.empty((1, 16), np.uint32), np.empty((1, 16), np.float32)
    far, low = np.uint64(directory.ctypes.data), low_bits(size_bits)
    for row in range(start, stop):
        if row + 2 * AHEAD < stop:
            soon = positions[row + 2 * AHEAD]
            prefetch(sizes + np.uint64((soon * size_bits) >> 3))
            prefetch(far + np.uint64(soon // STEP * (8 if wide else 4)))
        if row + AHEAD < stop:
            prefetch(
                source
                + np.uint64(
                    (directory_entry(directory, wide, positions[row + AHEAD] // STEP) * entry) >> 3
                )
            )
        first, count = span(sizes, size_bits, low, directory, wide, rows, entries, positions[row])
        if count < 0:
            good, first, count = False, np.int64(0), np.int64(0)
        if count > indices.shape[1]:
            indices = np.empty((1, 2 * count), np.uint32)
            values = np.empty((1, 2 * count), np.float32)
        bit = first * entry
        for j in range(count):
            index = field(source, bit, mask)
            if index >= limit:
                good, index = False, np.uint32(0)
            indices[0, j] = index
            values[0, j] = value(source, bit + index_bits, value_bits, kind, levels)
            bit += entry
        weigh(indices, values, 0, count, atoms, out, np.uint64(row))
    return np.int64(good)


@job
def gathered_rows(address: Any, start: Any, stop: Any) -> Any:
    """Compose rows from indices [B, s] and values [B, s] that are known (hash, remainder)."""
    block = words(address)
    indices, values = matrix(block, 0, np.int64), matrix(block, 3, np.float32)
    atoms, out = matrix(block, 6, np.float32), matrix(block, 9, np.float32)
    for row in range(start, stop):
        weigh(indices, values, row, indices.shape[1], atoms, out, np.uint64(row))
    return np.int64(1)


@job
def float_rows(address: Any, start: Any, stop: Any) -> Any:
    """Copy float32 rows."""
    block = words(address)
    data, positions = matrix(block, 0, np.float32), vector(block, 3, np.int64)
    out = matrix(block, 5, np.float32)
    width = out.shape[1]
    size = np.uint64(4 * width)
    source, target = np.uint64(data.ctypes.data), np.uint64(out.ctypes.data)
    for row in range(start, stop):
        if row + AHEAD < stop:
            soon = source + np.uint64(positions[row + AHEAD]) * size
            for line in range((width + 15) // 16):
                prefetch(soon + np.uint64(64 * line))
        atom = (source + np.uint64(positions[row]) * size,)
        _set1(target + np.uint64(row) * size, atom, (np.float32(1),), width)
    return np.int64(1)


@job
def half_rows(address: Any, start: Any, stop: Any) -> Any:
    """Convert float16 rows (viewed as uint16) to float32."""
    block = words(address)
    data, positions = matrix(block, 0, np.uint16), vector(block, 3, np.int64)
    out = matrix(block, 5, np.float32)
    for row in range(start, stop):
        position, to = np.uint64(positions[row]), np.uint64(row)
        for k in range(out.shape[1]):
            out[to, k] = half(np.uint32(data[position, k]))
    return np.int64(1)


@compiled
def _level(data: Any, p: Any, bits: Any, k: Any) -> Any:
    """Return level k of row p, the bits of one byte or of two."""
    at = k * bits
    pair = np.uint32(data[p, at >> 3])
    if (at & 7) + bits > 8:
        pair |= np.uint32(data[p, (at >> 3) + 1]) << np.uint32(8)
    return np.float32((pair >> np.uint32(at & 7)) & np.uint32((1 << bits) - 1))


@job
def level_rows(address: Any, start: Any, stop: Any) -> Any:
    """Decode rows of 8, 4, 3 or 2-bit levels: x = scale * (level - (2^bits - 1) / 2)."""
    block = words(address)
    data, bits, scale = matrix(block, 0, np.uint8), block[3], vector(block, 4, np.float32)
    axis = block[6]
    positions, out = vector(block, 7, np.int64), matrix(block, 9, np.float32)
    middle, width = np.float32((2**bits - 1) / 2), out.shape[1]
    source, length = np.uint64(data.ctypes.data), np.uint64(data.shape[1])
    target, scales = np.uint64(out.ctypes.data), np.uint64(scale.ctypes.data)
    for row in range(start, stop):
        if row + AHEAD < stop:
            soon = source + np.uint64(positions[row + AHEAD]) * length
            for line in range((data.shape[1] + 63) // 64):
                prefetch(soon + np.uint64(64 * line))
        p, to = np.uint64(positions[row]), np.uint64(row)
        here, there = source + p * length, target + to * np.uint64(4 * width)
        factor, done = scale[p] if axis == 0 else np.float32(1), 0
        if bits == 8:
            done = (
                _bytes(there, here, middle, factor, width)
                if axis == 0
                else _bytes_by(there, here, middle, scales, width)
            )
        elif bits == 4:
            done = (
                _halves(there, here, middle, factor, width)
                if axis == 0
                else _halves_by(there, here, middle, scales, width)
            )
        for k in range(done, width):
            out[to, k] = (_level(data, p, bits, k) - middle) * (factor if axis == 0 else scale[k])
    return np.int64(1)


@job
def pooled_rows(address: Any, start: Any, stop: Any) -> Any:
    """Add weighted rows to their bags: bag b takes rows starts[b] to starts[b + 1] - 1, in order."""
    block = words(address)
    rows, weights = matrix(block, 0, np.float32), vector(block, 3, np.float32)
    starts = vector(block, 5, np.int64)
    out = matrix(block, 7, np.float32)
    width = out.shape[1]
    size = np.uint64(4 * width)
    source, target = np.uint64(rows.ctypes.data), np.uint64(out.ctypes.data)
    for bag in range(start, stop):
        for row in range(starts[bag], starts[bag + 1]):
            _add1(
                target + np.uint64(bag) * size,
                (source + np.uint64(row) * size,),
                (weights[row],),
                width,
            )
    return np.int64(1)
