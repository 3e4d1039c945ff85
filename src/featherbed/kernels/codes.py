"""Reading stored codes in compiled loops: bit fields, values, and the spans of ragged rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.kernels.compiled import compiled
from featherbed.kernels.vectors import bit_count, bit_fields, load_word

STEP = 16  # rows between two entries of a ragged directory
MOST_CODES = 4096  # of a row
HALVES, ONES = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0101010101010101)
NO_VALUES, LEVELS, FLOAT32, FLOAT16 = 0, 1, 2, 3  # kinds of values


@compiled
def field(source: Any, bit: Any, mask: Any) -> Any:
    """Return the bit field at ``bit`` of the stream at address ``source``."""
    return np.uint32((load_word(source + np.uint64(bit >> 3)) >> np.uint64(bit & 7)) & mask)


_eight_by_two, _four_by_one = bit_fields(8, 2), bit_fields(4, 1)  # narrow fields
_eight_by_four, _four_by_two = bit_fields(8, 4), bit_fields(4, 2)


@compiled
def fields(out: Any, at: Any, source: Any, bit: Any, stride: Any, bits: Any, count: Any) -> None:
    """Write ``count`` bit fields into out[at:], eight or four at a time where a word holds several.

    Field j begins at ``bit`` + j * ``stride`` of the stream at address ``source``.
    """
    place, mask, j = np.uint64(out.ctypes.data), np.uint64((1 << bits) - 1), 0
    if 3 * stride + bits + 7 <= 64:
        while j + 8 <= count:
            _eight_by_two(place + np.uint64(4 * (at + j)), source, bit + j * stride, stride, mask)
            j += 8
        if j + 4 <= count:
            _four_by_one(place + np.uint64(4 * (at + j)), source, bit + j * stride, stride, mask)
            j += 4
    elif stride + bits + 7 <= 64:
        while j + 8 <= count:
            _eight_by_four(place + np.uint64(4 * (at + j)), source, bit + j * stride, stride, mask)
            j += 8
        if j + 4 <= count:
            _four_by_two(place + np.uint64(4 * (at + j)), source, bit + j * stride, stride, mask)
            j += 4
    while j < count:
        out[at + j] = field(source, bit + j * stride, mask)
        j += 1


@compiled
def half(raw: Any) -> Any:
    """Return a float16 given by its bits as float32; a product with 2^112 corrects the exponent."""
    bits = np.uint32(raw & np.uint32(0x7FFF)) << np.uint32(13)
    if bits >= np.uint32(0x0F800000):  # infinity or NaN
        value = np.uint32(bits | np.uint32(0x7F800000)).view(np.float32)
    else:
        value = np.uint32(bits).view(np.float32) * np.float32(2.0**112)
    return -value if raw & np.uint32(0x8000) else value


@compiled
def value(source: Any, bit: Any, value_bits: Any, kind: Any, levels: Any) -> Any:
    """Return the value stored at ``bit`` of the stream at address ``source``."""
    raw = field(source, bit, np.uint64((1 << value_bits) - 1))
    if kind == LEVELS:
        return levels[raw]
    if kind == FLOAT32:
        return np.uint32(raw).view(np.float32)
    return half(raw)


@compiled
def decode(values: Any, raw: Any, count: Any, kind: Any, levels: Any) -> None:
    """Write the values of the first ``count`` stored numbers."""
    if kind == LEVELS:
        for j in range(count):
            values[j] = levels[raw[j]]
    elif kind == FLOAT32:
        for j in range(count):
            values[j] = np.uint32(raw[j]).view(np.float32)
    elif kind != NO_VALUES:
        for j in range(count):
            values[j] = half(raw[j])


@compiled
def highest(numbers: Any, count: Any) -> Any:
    """Return the highest of the first ``count`` uint32 numbers, 0 if there are none."""
    found = np.uint32(0)
    for j in range(count):
        found = max(found, numbers[j])
    return found


@compiled
def directory_entry(directory: Any, wide: Any, at: Any) -> Any:
    """Return an entry of a directory of 32-bit or (``wide``) 64-bit numbers."""
    if wide:
        return np.int64(
            np.uint64(directory[2 * at]) | (np.uint64(directory[2 * at + 1]) << np.uint64(32))
        )
    return np.int64(directory[at])


@compiled
def low_bits(size_bits: Any) -> Any:
    """Return a word with the lowest bit of every count: 16 counts up to 4 bits, 8 up to 8 bits."""
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
    """Return the sum of the counts in a word, bit by bit of all counts at once."""
    if size_bits == 4:  # sums of pairs, one in each byte, then of all bytes
        pairs = (word & HALVES) + ((word >> np.uint64(4)) & HALVES)
        return np.int64((pairs * ONES) >> np.uint64(56))
    total = np.uint64(0)
    for bit in range(size_bits):
        total += bit_count(word & (low << np.uint64(bit))) << np.uint64(bit)
    return np.int64(total)


@compiled
def _sizes(sizes: Any, size_bits: Any, low: Any, first: Any, row: Any, stop: Any) -> Any:
    """Return the sum of the counts before a row of a block, the count of the row, and the total.

    The block is ``first`` .. ``stop``. Blocks start at whole bytes: counts of up to 8 bits are
    read from one or two words.
    """
    mask = np.uint64((1 << size_bits) - 1)
    before, count, total = np.int64(0), np.int64(0), np.int64(0)
    if size_bits > 8:
        for other in range(first, stop):
            size = np.int64(field(sizes, other * size_bits, mask))
            total += size
            if other < row:
                before += size
        return before, np.int64(field(sizes, row * size_bits, mask)), total
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
def span(
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

    Both are -1 if the block of the row is invalid. The counts of a block of 16 rows must fill
    exactly the entries from the block's directory entry to the next one: 0 <= begin <= end <=
    entries, begin + Σ counts = end. Then every row of the block lies within the stored entries.
    """
    block = row // STEP
    begin, stop = directory_entry(directory, wide, block), min((block + 1) * STEP, rows)
    end = entries if stop >= rows else directory_entry(directory, wide, block + 1)
    before, count, total = _sizes(sizes, size_bits, low, block * STEP, row, stop)
    if begin < 0 or begin > end or end > entries or count > MOST_CODES or total != end - begin:
        return np.int64(-1), np.int64(-1)
    return begin + before, count
