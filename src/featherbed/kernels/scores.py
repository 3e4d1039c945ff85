"""Compiled scores of one query against consecutive rows, from its dot products with the atoms.

Fixed codes read ``scores`` at any index their bits can hold: the caller pads it to that length. The
numpy code for the same scores is ``featherbed.packed.search.Scorer``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from featherbed.kernels.codes import MOST_CODES, NO_VALUES, STEP, field, low_bits, span, value
from featherbed.kernels.compiled import Job
from featherbed.kernels.memory import vector, words
from featherbed.kernels.vectors import load_word


@cache
def fixed_scores(count: int, index_bits: int, value_bits: int, kind: int, stride: int) -> Job:
    """Compile the job that scores rows with fixed codes of one shape: Σ_j v_j scores[index_j]."""
    record, values_at = count * (index_bits + value_bits), count * index_bits
    mask, whole = np.uint64((1 << index_bits) - 1), record % 8 == 0

    @Job
    def score(address: Any, start: Any, stop: Any) -> Any:
        block = words(address)
        source, levels, choices = np.uint64(block[0]), vector(block, 2, np.float32), block[4]
        offset = block[5]
        scores, out = vector(block, 6, np.float32), vector(block, 8, np.float32)
        limit, bad = np.uint32(min(choices, 2**32 - 1)), False
        full = choices >= 1 << index_bits  # then no code is out of range, and checks cost time
        for row in range(start, stop):
            bit, total = (offset + row) * record, np.float32(0)
            begin, rest = source + np.uint64(bit >> 3), 0 if whole else bit & 7
            for j in range(count):
                index = field(begin, rest + j * index_bits, mask)
                if not full:
                    bad |= index >= limit
                part = scores[index + np.uint32(j * stride)]
                if kind != NO_VALUES:
                    part *= value(
                        begin, rest + values_at + j * value_bits, value_bits, kind, levels
                    )
                total += part
            out[row] = total
        return np.int64(not bad)

    return score


@cache
def matching_scores(count: int, index_bits: int, value_bits: int) -> Job:
    """Compile the job that counts the codes of rows, fixed and of one shape, equal to given
    ones."""
    record, mask = count * (index_bits + value_bits), np.uint64((1 << index_bits) - 1)
    whole, groups = record % 8 == 0, count // 8 if index_bits == 8 and record % 8 == 0 else 0
    low = np.uint64(0x7F7F7F7F7F7F7F7F)

    @Job
    def match(address: Any, start: Any, stop: Any) -> Any:
        block = words(address)
        source, offset = np.uint64(block[0]), block[2]
        query, out = vector(block, 3, np.uint32), vector(block, 5, np.float32)
        groups_of_query = np.zeros(max(groups, 1), np.uint64)  # eight of the given codes each
        for j in range(8 * groups):
            groups_of_query[j // 8] |= np.uint64(query[j]) << np.uint64(8 * (j % 8))
        for row in range(start, stop):
            bit, same = (offset + row) * record, np.int64(0)
            begin, rest = source + np.uint64(bit >> 3), 0 if whole else bit & 7
            for g in range(groups):
                apart = load_word(begin + np.uint64(8 * g)) ^ groups_of_query[g]
                equal = ~(((apart & low) + low) | apart | low)  # highest bit of each equal byte
                ones = (equal >> np.uint64(7)) * np.uint64(0x0101010101010101)
                same += np.int64(ones >> np.uint64(56))
            for j in range(8 * groups, count):
                same += np.int64(field(begin, rest + j * index_bits, mask) == query[j])
            out[row] = np.float32(same)
        return np.int64(1)

    return match


@Job
def ragged_scores(address: Any, start: Any, stop: Any) -> Any:
    """Score rows with ragged codes, one after the other."""
    block = words(address)
    sizes, size_bits, directory = np.uint64(block[0]), block[2], vector(block, 3, np.uint32)
    wide = block[5]
    entries, source, index_bits, value_bits = block[6], np.uint64(block[7]), block[9], block[10]
    kind, levels, rows = block[11], vector(block, 12, np.float32), block[14]
    offset, scores, out = block[15], vector(block, 16, np.float32), vector(block, 18, np.float32)
    entry, mask, good = index_bits + value_bits, np.uint64((1 << index_bits) - 1), True
    limit, size_mask = np.uint32(min(scores.shape[0], 2**32 - 1)), np.uint64((1 << size_bits) - 1)
    low, block_start = low_bits(size_bits), start
    while block_start < stop:
        position = offset + block_start
        first, count = span(sizes, size_bits, low, directory, wide, rows, entries, position)
        if count < 0:
            return np.int64(0)
        block_stop = min(stop, block_start + STEP - position % STEP)
        bit, at = first * entry, position * size_bits
        for row in range(block_start, block_stop):  # the block is valid: its rows are consecutive
            count, total = np.int64(field(sizes, at, size_mask)), np.float32(0)
            if count > MOST_CODES:
                good = False
            for _ in range(count):
                index = field(source, bit, mask)
                if index >= limit:
                    good, index = False, np.uint32(0)
                total += scores[index] * value(source, bit + index_bits, value_bits, kind, levels)
                bit += entry
            out[row] = total
            at += size_bits
        block_start = block_stop
    return np.int64(good)
