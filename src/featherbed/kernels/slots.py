"""Compiled loops for rows made of slots: composed once for each distinct id, pooled, and their gradients.

Blocks are as in ``featherbed.kernels.lookup``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.kernels.compiled import compiled, job, reordered
from featherbed.kernels.lookup import weigh
from featherbed.kernels.train import AHEAD, _block, _flat, _grid
from featherbed.kernels.vectors import prefetch


@job
def compose(address: Any, start: Any, stop: Any) -> Any:
    """out[u] = Σ_j values[u, j] * atoms[support[u, j]]."""
    block = _block(address)
    support, values = _grid(block, 0, np.int32), _grid(block, 3, np.float32)
    atoms, out = _grid(block, 6, np.float32), _grid(block, 9, np.float32)
    for u in range(start, stop):
        weigh(support, values, u, support.shape[1], atoms, out, np.uint64(u))
    return np.int64(1)


@job
def spread(address: Any, start: Any, stop: Any) -> Any:
    """out[i] = rows[index[i]]."""
    block = _block(address)
    rows, index, out = _grid(block, 0, np.float32), _flat(block, 3, np.int32), _grid(block, 5, np.float32)
    width = rows.shape[1]
    base = np.uint64(rows.ctypes.data)
    for i in range(start, stop):
        if i + AHEAD < stop:
            prefetch(base + np.uint64(index[i + AHEAD]) * np.uint64(4 * width))
        one, to = rows[index[i]], out[i]
        for k in range(width):
            to[k] = one[k]
    return np.int64(1)


@job
def pool(address: Any, start: Any, stop: Any) -> Any:
    """out[b] = Σ weights[i] * rows[index[i]] over the places i of bag b: bounds[b] .. bounds[b + 1]."""
    block = _block(address)
    rows, index, out = _grid(block, 0, np.float32), _flat(block, 3, np.int32), _grid(block, 5, np.float32)
    bounds, weights = _flat(block, 8, np.int64), _flat(block, 10, np.float32)
    width, weighted = rows.shape[1], len(weights) > 0
    for b in range(start, stop):
        to = out[b]
        for k in range(width):
            to[k] = np.float32(0)
        for i in range(bounds[b], bounds[b + 1]):
            one, w = rows[index[i]], weights[i] if weighted else np.float32(1)
            for k in range(width):
                to[k] += w * one[k]
    return np.int64(1)


@reordered
def _dot(a: Any, b: Any) -> Any:
    total = np.float32(0)
    for k in range(len(a)):
        total += a[k] * b[k]
    return total


@compiled
def _gathered(gradient: Any, order: Any, owner: Any, weights: Any, first: Any, last: Any, out: Any) -> None:
    """out = Σ weights[i] * gradient[owner[i]] over the places of one row."""
    bags, weighted, width = len(owner) > 0, len(weights) > 0, len(out)
    for i in range(first, last):
        place = order[i]
        one = gradient[owner[place]] if bags else gradient[place]
        if i == first and not weighted:
            for k in range(width):
                out[k] = one[k]
        elif weighted:
            w = weights[place]
            for k in range(width):
                out[k] = (np.float32(0) if i == first else out[k]) + w * one[k]
        else:
            for k in range(width):
                out[k] += one[k]


@job
def gradients(address: Any, start: Any, stop: Any) -> Any:
    """Gradients of values [U, s] and atoms (a part [pieces, K, d] for each piece) from that of the pooled rows.

    A piece is a range of rows, borders[piece] .. borders[piece + 1]; ``total`` [U, d], the gradient of each row, is kept where
    there is room for it.
    """
    block = _block(address)
    support, values = _grid(block, 0, np.int32), _grid(block, 3, np.float32)
    atoms, gradient = _grid(block, 6, np.float32), _grid(block, 9, np.float32)
    order, starts = _flat(block, 12, np.int32), _flat(block, 14, np.int32)
    owner, weights = _flat(block, 16, np.int64), _flat(block, 18, np.float32)
    to_values, to_atoms = _grid(block, 20, np.float32), _grid(block, 23, np.float32)
    total, borders = _grid(block, 26, np.float32), _flat(block, 29, np.int64)
    keep, anchors, width, slots = len(total) > 0, atoms.shape[0], atoms.shape[1], support.shape[1]
    local = np.empty(width, np.float32)
    base = np.uint64(gradient.ctypes.data)
    for piece in range(start, stop):
        part = to_atoms[piece * anchors : (piece + 1) * anchors]
        for u in range(borders[piece], borders[piece + 1]):
            ahead = starts[u] + AHEAD
            if ahead < starts[borders[piece + 1]] and len(owner) == 0:
                soon = base + np.uint64(order[ahead]) * np.uint64(4 * width)
                prefetch(soon)
                prefetch(soon + np.uint64(64))
            one = total[u] if keep else local
            _gathered(gradient, order, owner, weights, starts[u], starts[u + 1], one)
            for j in range(slots):
                k = support[u, j]
                to_values[u, j] = _dot(one, atoms[k])
                w, into = values[u, j], part[k]
                if w != np.float32(0):
                    for c in range(width):
                        into[c] += w * one[c]
    return np.int64(1)


@job
def weight_gradients(address: Any, start: Any, stop: Any) -> Any:
    """out[i] = rows[index[i]] . gradient[owner[i]]."""
    block = _block(address)
    rows, index, gradient = _grid(block, 0, np.float32), _flat(block, 3, np.int32), _grid(block, 5, np.float32)
    owner, out = _flat(block, 8, np.int64), _flat(block, 10, np.float32)
    for i in range(start, stop):
        out[i] = _dot(rows[index[i]], gradient[owner[i]])
    return np.int64(1)
