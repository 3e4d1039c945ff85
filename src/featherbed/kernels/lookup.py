"""Compiled look-ups and scores on the arrays of the packed form.

Each job is a function of a block of arguments and a range of rows. The block is an array of int64: an integer stands for
itself, an array for its address followed by its shape; ``packed.engine`` fills it in the order each job's first lines read.
Jobs add in the order numpy does and without fused or reordered arithmetic, so that both give the same rows. They return 1,
or 0 when a code points outside the dictionary; the caller raises.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray

from featherbed.kernels.compiled import compiled, job
from featherbed.kernels.vectors import bit_count, copy, load_word, pointer, prefetch, row_sum

STEP = 16  # rows between two entries of a ragged directory
MOST_CODES = 4096  # a row may have
AHEAD = 8  # rows between asking for a record and reading it
NO_VALUES, LEVELS, FLOAT32, FLOAT16 = 0, 1, 2, 3
_BYTE = np.uint64(255)
_set8, _add8 = row_sum(8, add=False), row_sum(8, add=True)
_set4, _add4 = row_sum(4, add=False), row_sum(4, add=True)
_set1, _add1 = row_sum(1, add=False), row_sum(1, add=True)


@compiled
def _block(address: Any) -> Any:
    return carray(pointer(np.uint64(address)), 40, np.int64)


@compiled
def _flat(block: Any, at: Any, kind: Any) -> Any:  # one-dimensional array at words at, at + 1
    return carray(pointer(np.uint64(block[at])), block[at + 1], kind)


@compiled
def _grid(
    block: Any, at: Any, kind: Any
) -> Any:  # two-dimensional array at words at, at + 1, at + 2
    return carray(pointer(np.uint64(block[at])), (block[at + 1], block[at + 2]), kind)


@compiled
def _field(source: Any, bit: Any, mask: Any) -> Any:  # source: address of a stream
    return np.uint32((load_word(source + np.uint64(bit >> 3)) >> np.uint64(bit & 7)) & mask)


@compiled
def _half(raw: Any) -> Any:
    """Turn the bits of a float16 into a float32: shift, and let a product with 2^112 mend the exponent, subnormals too."""
    bits = np.uint32(raw & np.uint32(0x7FFF)) << np.uint32(13)
    if bits >= np.uint32(0x0F800000):  # infinity or NaN
        value = np.uint32(bits | np.uint32(0x7F800000)).view(np.float32)
    else:
        value = np.uint32(bits).view(np.float32) * np.float32(2.0**112)
    return -value if raw & np.uint32(0x8000) else value


@compiled
def _value(source: Any, bit: Any, value_bits: Any, kind: Any, levels: Any) -> Any:
    raw = _field(source, bit, np.uint64((1 << value_bits) - 1))
    if kind == LEVELS:
        return levels[raw]
    if kind == FLOAT32:
        return np.uint32(raw).view(np.float32)
    return _half(raw)


@compiled
def weigh(indices: Any, values: Any, row: Any, count: Any, atoms: Any, out: Any, to: Any) -> None:
    """out[to] = Σ_j values[row, j] * atoms[indices[row, j]], up to eight codes in one pass over the row, added in order."""
    width = out.shape[1]
    size = np.uint64(width * 4)
    base, place = np.uint64(atoms.ctypes.data), np.uint64(out.ctypes.data) + np.uint64(to) * size
    j = 0
    while j + 8 <= count:
        a0, a1 = (
            base + np.uint64(indices[row, j]) * size,
            base + np.uint64(indices[row, j + 1]) * size,
        )
        a2, a3 = (
            base + np.uint64(indices[row, j + 2]) * size,
            base + np.uint64(indices[row, j + 3]) * size,
        )
        a4, a5 = (
            base + np.uint64(indices[row, j + 4]) * size,
            base + np.uint64(indices[row, j + 5]) * size,
        )
        a6, a7 = (
            base + np.uint64(indices[row, j + 6]) * size,
            base + np.uint64(indices[row, j + 7]) * size,
        )
        near = (values[row, j], values[row, j + 1], values[row, j + 2], values[row, j + 3])
        far = (values[row, j + 4], values[row, j + 5], values[row, j + 6], values[row, j + 7])
        if j == 0:
            _set8(place, (a0, a1, a2, a3, a4, a5, a6, a7), near + far, width)
        else:
            _add8(place, (a0, a1, a2, a3, a4, a5, a6, a7), near + far, width)
        j += 8
    if j + 4 <= count:
        a0, a1 = (
            base + np.uint64(indices[row, j]) * size,
            base + np.uint64(indices[row, j + 1]) * size,
        )
        a2, a3 = (
            base + np.uint64(indices[row, j + 2]) * size,
            base + np.uint64(indices[row, j + 3]) * size,
        )
        near = (values[row, j], values[row, j + 1], values[row, j + 2], values[row, j + 3])
        if j == 0:
            _set4(place, (a0, a1, a2, a3), near, width)
        else:
            _add4(place, (a0, a1, a2, a3), near, width)
        j += 4
    while j < count:
        a0 = base + np.uint64(indices[row, j]) * size
        if j == 0:
            _set1(place, (a0,), (values[row, j],), width)
        else:
            _add1(place, (a0,), (values[row, j],), width)
        j += 1
    if count == 0:
        for k in range(width):
            out[to, k] = np.float32(0)


@job
def byte_rows(address: Any, start: Any, stop: Any) -> Any:
    """Compose rows whose indices and values take a byte each, eight codes at a time: the fast case of fixed_rows."""
    block = _block(address)
    records = _grid(
        block, 0, np.uint64
    )  # s index bytes, then s value bytes a row; s is a multiple of 8
    levels, choices = _flat(block, 3, np.float32), block[5]
    atoms, positions, out = (
        _grid(block, 6, np.float32),
        _flat(block, 9, np.int64),
        _grid(block, 11, np.float32),
    )
    groups, width, good = records.shape[1] // 2, out.shape[1], True
    top, length = np.uint64(choices - 1), np.uint64(records.shape[1] * 8)
    base, result, size = (
        np.uint64(atoms.ctypes.data),
        np.uint64(out.ctypes.data),
        np.uint64(width * 4),
    )
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
            if (
                top < _BYTE
                and max(max(max(i0, i1), max(i2, i3)), max(max(i4, i5), max(i6, i7))) > top
            ):
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
    """Make the job that composes rows from fixed codes of one shape: with the shape known, every shift is a constant."""
    record, values_at = count * (index_bits + value_bits), count * index_bits
    mask, whole = np.uint64((1 << index_bits) - 1), record % 8 == 0

    @job
    def rows(address: Any, start: Any, stop: Any) -> Any:
        block = _block(address)
        source, levels, choices = np.uint64(block[0]), _flat(block, 2, np.float32), block[4]
        atoms, positions, out = (
            _grid(block, 5, np.float32),
            _flat(block, 8, np.int64),
            _grid(block, 10, np.float32),
        )
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
                index = _field(begin, rest + j * index_bits, mask)
                if index >= limit:
                    good, index = False, np.uint32(0)
                indices[0, j] = index + np.uint32(j * stride)
            if kind != NO_VALUES:
                for j in range(count):
                    values[0, j] = _value(
                        begin, rest + values_at + j * value_bits, value_bits, kind, levels
                    )
            weigh(indices, values, 0, count, atoms, out, np.uint64(row))
        return np.int64(good)

    return rows


@cache
def concat_rows(
    count: int, index_bits: int, value_bits: int, kind: int, stride: int, width: int
) -> int:
    """Make the job that lays the atoms of fixed codes side by side, ``width`` floats each: copies of a known size."""
    record, values_at, size = count * (index_bits + value_bits), count * index_bits, 4 * width
    mask, whole = np.uint64((1 << index_bits) - 1), record % 8 == 0

    @job
    def rows(address: Any, start: Any, stop: Any) -> Any:
        block = _block(address)
        source, levels, choices = np.uint64(block[0]), _flat(block, 2, np.float32), block[4]
        base, positions, target = (
            np.uint64(block[5]),
            _flat(block, 8, np.int64),
            np.uint64(block[10]),
        )
        limit, good = np.uint32(min(choices, 2**32 - 1)), True
        for row in range(start, min(start + AHEAD, stop)):
            prefetch(source + np.uint64((positions[row] * record) >> 3))
        for row in range(start, stop):
            if row + AHEAD < stop:
                prefetch(source + np.uint64((positions[row + AHEAD] * record) >> 3))
            bit, place = positions[row] * record, target + np.uint64(row * count * size)
            begin, rest = source + np.uint64(bit >> 3), 0 if whole else bit & 7
            for j in range(count):
                index = _field(begin, rest + j * index_bits, mask)
                if index >= limit:
                    good, index = False, np.uint32(0)
                atom, to = (
                    base + (np.uint64(index) + np.uint64(j * stride)) * np.uint64(size),
                    place + np.uint64(j * size),
                )
                if kind == NO_VALUES:
                    copy(to, atom, size)
                else:
                    weight = _value(
                        begin, rest + values_at + j * value_bits, value_bits, kind, levels
                    )
                    _set1(to, (atom,), (weight,), width)
        return np.int64(good)

    return rows


@compiled
def _entry(directory: Any, wide: Any, at: Any) -> Any:
    if wide:
        return np.int64(
            np.uint64(directory[2 * at]) | (np.uint64(directory[2 * at + 1]) << np.uint64(32))
        )
    return np.int64(directory[at])


@compiled
def _low_bits(size_bits: Any) -> Any:
    """Return the lowest bit of every count of a word: 16 counts up to 4 bits, 8 up to 8 bits."""
    bits, each = np.uint64(0), STEP if size_bits <= 4 else STEP // 2
    if 0 < size_bits <= 8:
        for k in range(each):
            bits |= np.uint64(1) << np.uint64(k * size_bits)
    return bits


@compiled
def _below(word: Any, bits: Any) -> Any:
    """Return the lowest ``bits`` bits of a word, 0 to 64."""
    return word & (~np.uint64(0) >> np.uint64(64 - bits)) if bits > 0 else np.uint64(0)


@compiled
def _sum_of(word: Any, size_bits: Any, low: Any) -> Any:
    """Return the sum of the counts in a word, one bit of all of them at a time."""
    total = np.uint64(0)
    for bit in range(size_bits):
        total += bit_count(word & (low << np.uint64(bit))) << np.uint64(bit)
    return np.int64(total)


@compiled
def _sizes(sizes: Any, size_bits: Any, low: Any, first: Any, row: Any, stop: Any) -> Any:
    """Return the sum of the counts before a row of a block, the row's own, and the sum of all.

    The block is ``first`` .. ``stop``. Blocks start at whole bytes: counts of up to 8 bits are
    taken from one or two words.
    """
    mask = np.uint64((1 << size_bits) - 1)
    before, count, total = np.int64(0), np.int64(0), np.int64(0)
    if size_bits > 8:
        for other in range(first, stop):
            size = np.int64(_field(sizes, other * size_bits, mask))
            total += size
            if other < row:
                before += size
        return before, np.int64(_field(sizes, row * size_bits, mask)), total
    each = STEP if size_bits <= 4 else STEP // 2
    for begin in range(first, stop, each):
        word, at = load_word(sizes + np.uint64((begin * size_bits) >> 3)), row - begin
        part = _sum_of(_below(word, min(each, stop - begin) * size_bits), size_bits, low)
        total += part
        if at >= each:
            before += part
        elif at >= 0:
            before += _sum_of(_below(word, at * size_bits), size_bits, low)
            count = np.int64((word >> np.uint64(at * size_bits)) & mask)
    return before, count, total


@compiled
def _span(
    sizes: Any,
    size_bits: Any,
    low: Any,
    directory: Any,
    wide: Any,
    rows: Any,
    entries: Any,
    row: Any,
) -> Any:
    """Return the first entry of a row of ragged codes and the number of its entries.

    Both are -1 if the block of the row is unsound. The counts of a block of 16 rows must fill
    exactly the entries from the block's directory entry to the next one: 0 <= begin <= end <=
    entries, begin + Σ counts = end. Then every row of the block lies within the stored entries.
    """
    block = row // STEP
    begin, stop = _entry(directory, wide, block), min((block + 1) * STEP, rows)
    end = entries if stop >= rows else _entry(directory, wide, block + 1)
    before, count, total = _sizes(sizes, size_bits, low, block * STEP, row, stop)
    if begin < 0 or begin > end or end > entries or count > MOST_CODES or total != end - begin:
        return np.int64(-1), np.int64(-1)
    return begin + before, count


@job
def ragged_rows(address: Any, start: Any, stop: Any) -> Any:
    """Compose rows from ragged codes."""
    block = _block(address)
    sizes, size_bits, directory, wide = (
        np.uint64(block[0]),
        block[2],
        _flat(block, 3, np.uint32),
        block[5],
    )
    entries, source, index_bits, value_bits = block[6], np.uint64(block[7]), block[9], block[10]
    kind, levels = block[11], _flat(block, 12, np.float32)
    rows, atoms = block[14], _grid(block, 15, np.float32)
    positions, out = _flat(block, 18, np.int64), _grid(block, 20, np.float32)
    entry, mask = index_bits + value_bits, np.uint64((1 << index_bits) - 1)
    good, limit = True, np.uint32(min(atoms.shape[0], 2**32 - 1))
    indices, values = np.empty((1, 16), np.uint32), np.empty((1, 16), np.float32)
    far, low = np.uint64(directory.ctypes.data), _low_bits(size_bits)
    for row in range(start, stop):
        if row + 2 * AHEAD < stop:
            soon = positions[row + 2 * AHEAD]
            prefetch(sizes + np.uint64((soon * size_bits) >> 3))
            prefetch(far + np.uint64(soon // STEP * (8 if wide else 4)))
        if row + AHEAD < stop:
            prefetch(
                source
                + np.uint64((_entry(directory, wide, positions[row + AHEAD] // STEP) * entry) >> 3)
            )
        first, count = _span(sizes, size_bits, low, directory, wide, rows, entries, positions[row])
        if count < 0:
            good, first, count = False, np.int64(0), np.int64(0)
        if count > indices.shape[1]:
            indices, values = (
                np.empty((1, 2 * count), np.uint32),
                np.empty((1, 2 * count), np.float32),
            )
        bit = first * entry
        for j in range(count):
            index = _field(source, bit, mask)
            if index >= limit:
                good, index = False, np.uint32(0)
            indices[0, j] = index
            values[0, j] = _value(source, bit + index_bits, value_bits, kind, levels)
            bit += entry
        weigh(indices, values, 0, count, atoms, out, np.uint64(row))
    return np.int64(good)


@job
def gathered_rows(address: Any, start: Any, stop: Any) -> Any:
    """Compose rows from indices [B, s] and values [B, s] that are known (hash, remainder)."""
    block = _block(address)
    indices, values = _grid(block, 0, np.int64), _grid(block, 3, np.float32)
    atoms, out = _grid(block, 6, np.float32), _grid(block, 9, np.float32)
    for row in range(start, stop):
        weigh(indices, values, row, indices.shape[1], atoms, out, np.uint64(row))
    return np.int64(1)
