"""Compiled scores: one query against consecutive rows, through its products with the atoms (see ``kernels.lookup``).

The fixed layouts read ``scores`` at any index their bits can hold: the caller pads it to that length.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.kernels.compiled import job
from featherbed.kernels.lookup import LEVELS, NO_VALUES, _block, _field, _flat, _grid, _span, _value


@job
def fixed_scores(address: Any, start: Any, stop: Any) -> Any:
    """Score rows with fixed codes: Σ_j v_j scores[index_j]."""
    block = _block(address)
    source, count, index_bits, value_bits, kind = np.uint64(block[0]), block[2], block[3], block[4], block[5]
    levels, choices, stride, offset = _flat(block, 6, np.float32), block[8], block[9], block[10]
    scores, out = _flat(block, 11, np.float32), _flat(block, 13, np.float32)
    mask, values_at, record = np.uint64((1 << index_bits) - 1), count * index_bits, count * (index_bits + value_bits)
    value_mask, bit, worst = np.uint64((1 << value_bits) - 1), (offset + start) * record, np.uint32(0)
    for row in range(start, stop):
        total = np.float32(0)
        for j in range(count):
            index = _field(source, bit + j * index_bits, mask)
            worst = max(worst, index)
            part = scores[index + np.uint32(j * stride)]
            if kind == LEVELS:
                part *= levels[_field(source, bit + values_at + j * value_bits, value_mask)]
            elif kind != NO_VALUES:
                part *= _value(source, bit + values_at + j * value_bits, value_bits, kind, levels)
            total += part
        out[row] = total
        bit += record
    return np.int64(worst < np.uint32(min(choices, 2**32 - 1)))


@job
def byte_scores(address: Any, start: Any, stop: Any) -> Any:
    """Score rows whose indices and values take a byte each: the fast case of fixed_scores."""
    block = _block(address)
    records, levels, choices = _grid(block, 0, np.uint8), _flat(block, 3, np.float32), block[5]
    scores, out = _flat(block, 6, np.float32), _flat(block, 8, np.float32)
    count, worst = records.shape[1] // 2, np.uint8(0)
    for row in range(start, stop):
        total = np.float32(0)
        for j in range(count):
            index = records[np.uint64(row), j]
            worst = max(worst, index)
            total += scores[index] * levels[records[np.uint64(row), count + j]]
        out[row] = total
    return np.int64(np.int64(worst) < choices)


@job
def ragged_scores(address: Any, start: Any, stop: Any) -> Any:
    """Score rows with ragged codes, one after the other."""
    block = _block(address)
    sizes, size_bits, directory, wide = np.uint64(block[0]), block[2], _flat(block, 3, np.uint32), block[5]
    entries, source, index_bits, value_bits = block[6], np.uint64(block[7]), block[9], block[10]
    kind, levels, offset = block[11], _flat(block, 12, np.float32), block[14]
    scores, out = _flat(block, 15, np.float32), _flat(block, 17, np.float32)
    entry, mask, good = index_bits + value_bits, np.uint64((1 << index_bits) - 1), True
    limit, size_mask = np.uint32(min(scores.shape[0], 2**32 - 1)), np.uint64((1 << size_bits) - 1)
    first, _ = _span(sizes, size_bits, directory, wide, offset + start)
    for row in range(start, stop):
        count, total = np.int64(_field(sizes, (offset + row) * size_bits, size_mask)), np.float32(0)
        if first < 0 or first + count > entries:
            return np.int64(0)
        bit = first * entry
        for _ in range(count):
            index = _field(source, bit, mask)
            if index >= limit:
                good, index = False, np.uint32(0)
            total += scores[index] * _value(source, bit + index_bits, value_bits, kind, levels)
            bit += entry
        out[row] = total
        first += count
    return np.int64(good)
