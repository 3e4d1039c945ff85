"""Compiled look-ups of rows that are stored one by one: float32, float16 and low-bit levels (see ``kernels.lookup``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.kernels.compiled import compiled, job
from featherbed.kernels.lookup import AHEAD, _add1, _block, _flat, _grid, _half, _set1
from featherbed.kernels.vectors import level_row, prefetch

_bytes, _bytes_by = level_row(8, by_column=False), level_row(8, by_column=True)
_halves, _halves_by = level_row(4, by_column=False), level_row(4, by_column=True)


@job
def float_rows(address: Any, start: Any, stop: Any) -> Any:
    """Copy float32 rows."""
    block = _block(address)
    data, positions, out = (
        _grid(block, 0, np.float32),
        _flat(block, 3, np.int64),
        _grid(block, 5, np.float32),
    )
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
    """Copy float16 rows (seen as uint16) into float32."""
    block = _block(address)
    data, positions, out = (
        _grid(block, 0, np.uint16),
        _flat(block, 3, np.int64),
        _grid(block, 5, np.float32),
    )
    for row in range(start, stop):
        position, to = np.uint64(positions[row]), np.uint64(row)
        for k in range(out.shape[1]):
            out[to, k] = _half(np.uint32(data[position, k]))
    return np.int64(1)


@compiled
def _level(data: Any, p: Any, bits: Any, k: Any) -> Any:
    """Return level k of row p: bits of a byte, or of two."""
    at = k * bits
    pair = np.uint32(data[p, at >> 3])
    if (at & 7) + bits > 8:
        pair |= np.uint32(data[p, (at >> 3) + 1]) << np.uint32(8)
    return np.float32((pair >> np.uint32(at & 7)) & np.uint32((1 << bits) - 1))


@job
def level_rows(address: Any, start: Any, stop: Any) -> Any:
    """Decode rows of 8, 4, 3 or 2-bit levels: x = scale * (level - (2^bits - 1) / 2)."""
    block = _block(address)
    data, bits, scale, axis = (
        _grid(block, 0, np.uint8),
        block[3],
        _flat(block, 4, np.float32),
        block[6],
    )
    positions, out = _flat(block, 7, np.int64), _grid(block, 9, np.float32)
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
    block = _block(address)
    rows, weights, starts = (
        _grid(block, 0, np.float32),
        _flat(block, 3, np.float32),
        _flat(block, 5, np.int64),
    )
    out = _grid(block, 7, np.float32)
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
