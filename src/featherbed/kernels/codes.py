"""Reading stored codes in compiled loops: bit fields, values, and the spans of ragged rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from featherbed.kernels.compiled import compiled, inlined
from featherbed.kernels.vectors import bit_count, load_word

STEP = 16  # rows between two entries of a ragged directory
MOST_CODES = 4096  # of a row
NO_VALUES, LEVELS, FLOAT32, FLOAT16 = 0, 1, 2, 3  # kinds of values


@compiled
def field(source: Any, bit: Any, mask: Any) -> Any:
    """Return the bit field at ``bit`` of the stream at address ``source``."""
    return np.uint32((load_word(source + np.uint64(bit >> 3)) >> np.uint64(bit & 7)) & mask)


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
def decoded(raw: Any, kind: Any, levels: Any) -> Any:
    """Return the value of a kind that has the bits ``raw``."""
    if kind == LEVELS:
        return levels[raw]
    if kind == FLOAT32:
        return np.uint32(raw).view(np.float32)
    return half(raw)


@compiled
def value(source: Any, bit: Any, value_bits: Any, kind: Any, levels: Any) -> Any:
    """Return the value stored at ``bit`` of the stream at address ``source``."""
    return decoded(field(source, bit, np.uint64((1 << value_bits) - 1)), kind, levels)


@compiled
def directory_entry(directory: Any, wide: Any, at: Any) -> Any:
    """Return an entry of a directory of 32-bit or (``wide``) 64-bit numbers."""
    if wide:
        return np.int64(
            np.uint64(directory[2 * at]) | (np.uint64(directory[2 * at + 1]) << np.uint64(32))
        )
    return np.int64(directory[at])


@compiled
def _below(word: Any, bits: Any) -> Any:
    """Return the lowest ``bits`` bits of a word, 0 to 64."""
    return word & (~np.uint64(0) >> np.uint64(64 - bits)) if bits > 0 else np.uint64(0)


@cache
def spanner(size_bits: int) -> Any:
    """Return ``f(sizes, directory, wide, rows, entries, row)``: the entries of a row of ragged codes.

    It returns the first entry and their number, both -1 if the block of the row is invalid. The
    counts of a block of 16 rows, ``size_bits`` bits each, must fill exactly the entries from the
    block's directory entry to the next one: 0 <= begin <= end <= entries, begin + Σ counts = end.
    Then every row of the block lies within the stored entries. Blocks start at whole bytes: counts
    of up to 4 bits are read from one word, of up to 8 bits from two.
    """
    each = STEP if size_bits <= 4 else STEP // 2 if size_bits <= 8 else 1
    low = np.uint64(sum(1 << (k * size_bits) for k in range(each)) if size_bits else 0)
    mask = np.uint64((1 << size_bits) - 1)

    @compiled
    def sum_of(word: Any) -> Any:
        """Return the sum of the counts in a word, bit by bit of all counts at once."""
        if each == 1:
            return np.int64(word)
        total = np.uint64(0)
        for bit in range(size_bits):
            total += bit_count(word & (low << np.uint64(bit))) << np.uint64(bit)
        return np.int64(total)

    @inlined
    def span(sizes: Any, directory: Any, wide: Any, rows: Any, entries: Any, row: Any) -> Any:
        block = row // STEP
        begin, stop = directory_entry(directory, wide, block), min((block + 1) * STEP, rows)
        end = entries if stop >= rows else directory_entry(directory, wide, block + 1)
        before, count, total = np.int64(0), np.int64(0), np.int64(0)
        for first in range(block * STEP, stop, each):
            bit, at = first * size_bits, row - first
            word = load_word(sizes + np.uint64(bit >> 3)) >> np.uint64(bit & 7)
            part = sum_of(_below(word, min(each, stop - first) * size_bits))
            total += part
            if at >= each:
                before += part
            elif at >= 0:
                before += sum_of(_below(word, at * size_bits))
                count = np.int64((word >> np.uint64(at * size_bits)) & mask)
        if begin < 0 or begin > end or end > entries or count > MOST_CODES or total != end - begin:
            return np.int64(-1), np.int64(-1)
        return begin + before, count

    return span
