"""Compiled scores: one query against consecutive rows, through its products with the atoms (see ``kernels.lookup``).

Fixed codes read ``scores`` at any index their bits can hold: the caller pads it to that length.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from featherbed.kernels.compiled import job
from featherbed.kernels.lookup import (
    MOST_CODES,
    NO_VALUES,
    STEP,
    _block,
    _field,
    _flat,
    _low_bits,
    _span,
    _value,
)
from featherbed.kernels.vectors import load_word


@cache
def fixed_scores(count: int, index_bits: int, value_bits: int, kind: int, stride: int) -> int:
    """Make the job that scores rows with fixed codes of one shape: Σ_j v_j scores[index_j], every shift a constant."""
    record, values_at = count * (index_bits + value_bits), count * index_bits
    mask, whole = np.uint64((1 << index_bits) - 1), record % 8 == 0

    @job
    def score(address: Any, start: Any, stop: Any) -> Any:
        block = _block(address)
        source, levels, choices, offset = (
            np.uint64(block[0]),
            _flat(block, 2, np.float32),
            block[4],
            block[5],
        )
        scores, out = _flat(block, 6, np.float32), _flat(block, 8, np.float32)
        limit, bad = np.uint32(min(choices, 2**32 - 1)), False
        full = (
            choices >= 1 << index_bits
        )  # then no code can be out of range, and looking would cost more than adding
        for row in range(start, stop):
            bit, total = (offset + row) * record, np.float32(0)
            begin, rest = source + np.uint64(bit >> 3), 0 if whole else bit & 7
            for j in range(count):
                index = _field(begin, rest + j * index_bits, mask)
                if not full:
                    bad |= index >= limit
                part = scores[index + np.uint32(j * stride)]
                if kind != NO_VALUES:
                    part *= _value(
                        begin, rest + values_at + j * value_bits, value_bits, kind, levels
                    )
                total += part
            out[row] = total
        return np.int64(not bad)

    return score


@cache
def matching_scores(count: int, index_bits: int, value_bits: int) -> int:
    """Make the job that counts in how many codes rows with fixed codes of one shape agree with given ones."""
    record, mask = count * (index_bits + value_bits), np.uint64((1 << index_bits) - 1)
    whole, eights = record % 8 == 0, count // 8 if index_bits == 8 and record % 8 == 0 else 0
    low = np.uint64(0x7F7F7F7F7F7F7F7F)

    @job
    def match(address: Any, start: Any, stop: Any) -> Any:
        block = _block(address)
        source, offset = np.uint64(block[0]), block[2]
        wanted, out = _flat(block, 3, np.uint32), _flat(block, 5, np.float32)
        words = np.zeros(max(eights, 1), np.uint64)  # eight of the given codes each
        for j in range(8 * eights):
            words[j // 8] |= np.uint64(wanted[j]) << np.uint64(8 * (j % 8))
        for row in range(start, stop):
            bit, same = (offset + row) * record, np.int64(0)
            begin, rest = source + np.uint64(bit >> 3), 0 if whole else bit & 7
            for g in range(eights):
                apart = load_word(begin + np.uint64(8 * g)) ^ words[g]
                equal = ~(
                    ((apart & low) + low) | apart | low
                )  # the highest bit of every byte in which nothing differs
                same += np.int64(
                    ((equal >> np.uint64(7)) * np.uint64(0x0101010101010101)) >> np.uint64(56)
                )
            for j in range(8 * eights, count):
                same += np.int64(_field(begin, rest + j * index_bits, mask) == wanted[j])
            out[row] = np.float32(same)
        return np.int64(1)

    return match


@job
def ragged_scores(address: Any, start: Any, stop: Any) -> Any:
    """Score rows with ragged codes, one after the other."""
    block = _block(address)
    sizes, size_bits, directory, wide = (
        np.uint64(block[0]),
        block[2],
        _flat(block, 3, np.uint32),
        block[5],
    )
    entries, source, index_bits, value_bits = block[6], np.uint64(block[7]), block[9], block[10]
    kind, levels, rows = block[11], _flat(block, 12, np.float32), block[14]
    offset, scores, out = block[15], _flat(block, 16, np.float32), _flat(block, 18, np.float32)
    entry, mask, good = index_bits + value_bits, np.uint64((1 << index_bits) - 1), True
    limit, size_mask = np.uint32(min(scores.shape[0], 2**32 - 1)), np.uint64((1 << size_bits) - 1)
    low, block_start = _low_bits(size_bits), start
    while block_start < stop:
        position = offset + block_start
        first, count = _span(sizes, size_bits, low, directory, wide, rows, entries, position)
        if count < 0:
            return np.int64(0)
        block_stop = min(stop, block_start + STEP - position % STEP)
        bit, at = first * entry, position * size_bits
        for row in range(block_start, block_stop):  # the block is sound: its rows follow each other
            count, total = np.int64(_field(sizes, at, size_mask)), np.float32(0)
            if count > MOST_CODES:
                good = False
            for _ in range(count):
                index = _field(source, bit, mask)
                if index >= limit:
                    good, index = False, np.uint32(0)
                total += scores[index] * _value(source, bit + index_bits, value_bits, kind, levels)
                bit += entry
            out[row] = total
            at += size_bits
        block_start = block_stop
    return np.int64(good)
