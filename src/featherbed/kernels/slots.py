"""Compiled loops for rows made of slots: composed once per distinct id, pooled, and their
gradients.

The arguments of jobs are described in ``featherbed.kernels.memory``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from featherbed.kernels.compiled import Job, compiled
from featherbed.kernels.lookup import addresses8, weigh
from featherbed.kernels.memory import matrix, vector, words
from featherbed.kernels.train import AHEAD
from featherbed.kernels.vectors import copy, eight_slots, prefetch, row_sum

LANES = 16  # minima kept side by side


@compiled
def _are_below(parts: Any, u: Any, slots: Any, most: Any) -> Any:
    """Return whether the parts of a row are below ``most``; as unsigned, negative ones are huge."""
    wrong = np.uint32(0)
    for j in range(slots):
        wrong |= np.uint32(np.uint32(parts[u, j]) >= most)
    return wrong == 0


@cache
def compose(kind: Any, fixed: int) -> Job:
    """Compile the job out[u] = Σ_j values[u, j] * atoms[parts[u, j]], parts[u] = support[ids[u]].

    ``kind`` is the dtype of the support, ``fixed`` the width of rows if it is known, else 0. The
    job returns 0 if the support names an atom that does not exist; the first atom then stands in
    for it.
    """

    @Job
    def rows(address: Any, start: Any, stop: Any) -> Any:
        block = words(address)
        support, ids = matrix(block, 0, kind), vector(block, 3, np.int64)
        parts = matrix(block, 5, np.int32)
        values, atoms = matrix(block, 8, np.float32), matrix(block, 11, np.float32)
        out = matrix(block, 14, np.float32)
        base, slots = np.uint64(support.ctypes.data), support.shape[1]
        size, good = np.uint64(slots * support.itemsize), True
        most, width = np.uint32(min(atoms.shape[0], 2**31)), fixed if fixed else atoms.shape[1]
        flat_parts, flat_values = parts.reshape(-1), values.reshape(-1)
        atoms_at, out_at = np.uint64(atoms.ctypes.data), np.uint64(out.ctypes.data)
        for u in range(start, stop):
            if u + AHEAD < stop:
                prefetch(base + np.uint64(ids[u + AHEAD]) * size)
            for j in range(slots):
                parts[u, j] = support[ids[u], j]
            if not _are_below(parts, u, slots, most):
                good, parts[u] = False, 0
            place = out_at + np.uint64(4 * u * width)
            weigh(flat_parts, flat_values, u * slots, slots, atoms_at, width, place)
        return np.int64(good)

    return rows


@Job
def spread(address: Any, start: Any, stop: Any) -> Any:
    """out[i] = rows[index[i]]."""
    block = words(address)
    rows, index = matrix(block, 0, np.float32), vector(block, 3, np.int32)
    out = matrix(block, 5, np.float32)
    base, to = np.uint64(rows.ctypes.data), np.uint64(out.ctypes.data)
    size = 4 * rows.shape[1]
    for i in range(start, stop):
        if i + AHEAD < stop:
            soon = base + np.uint64(index[i + AHEAD] * size)
            for line in range(min(4, (size + 63) // 64)):
                prefetch(soon + np.uint64(64 * line))
        copy(to + np.uint64(i * size), base + np.uint64(index[i] * size), np.int64(size))
    return np.int64(1)


@Job
def pool(address: Any, start: Any, stop: Any) -> Any:
    """out[b] = Σ weights[i] * rows[index[i]] over the places i of bag b, bounds[b] .. bounds[b +
    1]."""
    block = words(address)
    rows, index = matrix(block, 0, np.float32), vector(block, 3, np.int32)
    out = matrix(block, 5, np.float32)
    bounds, weights = vector(block, 8, np.int64), vector(block, 10, np.float32)
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


_add8, _add1, _set1 = row_sum(8, add=True), row_sum(1, add=True), row_sum(1, add=False)
_ONES = (np.float32(1),) * 8


@compiled
def _place(gradient: Any, order: Any, owner: Any, i: Any) -> Any:
    """Return the address of the gradient that belongs to place i of the order."""
    row = owner[order[i]] if len(owner) > 0 else np.int64(order[i])
    return np.uint64(gradient.ctypes.data) + np.uint64(row) * np.uint64(4 * gradient.shape[1])


@compiled
def _prefetch_row(gradient: Any, order: Any, owner: Any, i: Any, last: Any) -> None:
    """Prefetch four cache lines of the gradient that belongs to a place of the order."""
    if i < last:
        soon = _place(gradient, order, owner, i)
        for line in range(min(4, (4 * gradient.shape[1] + 63) // 64)):
            prefetch(soon + np.uint64(64 * line))


@compiled
def _gathered(
    gradient: Any, order: Any, owner: Any, weights: Any, first: Any, last: Any, out: Any
) -> None:
    """out = Σ weights[i] * gradient[owner[i]] over the places of one row."""
    weighted, width, to = len(weights) > 0, gradient.shape[1], np.uint64(out.ctypes.data)
    _set1(
        to,
        (_place(gradient, order, owner, first),),
        (weights[order[first]] if weighted else np.float32(1),),
        width,
    )
    i = first + 1
    while not weighted and i + 8 <= last:
        for k in range(i + AHEAD, i + AHEAD + 8):
            _prefetch_row(gradient, order, owner, k, last)
        a0, a1 = _place(gradient, order, owner, i), _place(gradient, order, owner, i + 1)
        a2, a3 = _place(gradient, order, owner, i + 2), _place(gradient, order, owner, i + 3)
        a4, a5 = _place(gradient, order, owner, i + 4), _place(gradient, order, owner, i + 5)
        a6, a7 = _place(gradient, order, owner, i + 6), _place(gradient, order, owner, i + 7)
        _add8(to, (a0, a1, a2, a3, a4, a5, a6, a7), _ONES, width)
        i += 8
    while i < last:
        _add1(
            to,
            (_place(gradient, order, owner, i),),
            (weights[order[i]] if weighted else np.float32(1),),
            width,
        )
        i += 1


@compiled
def _dot(a: Any, b: Any, first: Any) -> Any:
    total = np.float32(0)
    for k in range(first, len(a)):
        total += a[k] * b[k]
    return total


@compiled
def _four(values: Any, at: Any) -> Any:
    return values[at], values[at + 1], values[at + 2], values[at + 3]


@compiled
def _by_slots(one: Any, atoms: Any, sums: Any, parts: Any, values: Any, at: Any, out: Any) -> None:
    """out[j] = one . atoms[k] and sums[k] += values[j] * one for the atoms k = parts[j] of a row.

    Its slots j begin at place ``at``; eight of them in one loop over the row.
    """
    width, slots, j = atoms.shape[1], len(out), 0
    base, into = np.uint64(atoms.ctypes.data), np.uint64(sums.ctypes.data)
    row, size, to = np.uint64(one.ctypes.data), np.uint64(4 * width), np.uint64(out.ctypes.data)
    while j + 8 <= slots:
        atoms8, sums8 = addresses8(base, size, parts, at + j), addresses8(into, size, parts, at + j)
        values8 = _four(values, at + j) + _four(values, at + j + 4)
        done = eight_slots(to + np.uint64(4 * j), row, atoms8, sums8, values8, width)
        if done < width:
            for k in range(j, j + 8):
                out[k] += _dot(one, atoms[parts[at + k]], done)
                _add(one, values[at + k], sums[parts[at + k]], done)
        j += 8
    while j < slots:
        out[j] = _dot(one, atoms[parts[at + j]], 0)
        _add(one, values[at + j], sums[parts[at + j]], 0)
        j += 1


@compiled
def _add(row: Any, factor: Any, out: Any, first: Any) -> None:
    for k in range(first, len(row)):
        out[k] += factor * row[k]


@Job
def gradients(address: Any, start: Any, stop: Any) -> Any:
    """Gradients of values [U, s] and atoms (one sum [K, d] for each piece) from that of pooled
    rows.

    A piece is a range of rows, borders[piece] .. borders[piece + 1]; the gradient of each row is
    kept in ``total`` [U, d] unless that is empty.
    """
    block = words(address)
    support, values = matrix(block, 0, np.int32), matrix(block, 3, np.float32)
    atoms, gradient = matrix(block, 6, np.float32), matrix(block, 9, np.float32)
    order, starts = vector(block, 12, np.int32), vector(block, 14, np.int32)
    owner, weights = vector(block, 16, np.int64), vector(block, 18, np.float32)
    to_values, to_atoms = matrix(block, 20, np.float32), matrix(block, 23, np.float32)
    total, borders = matrix(block, 26, np.float32), vector(block, 29, np.int64)
    keep, anchors, width, slots = len(total) > 0, atoms.shape[0], atoms.shape[1], support.shape[1]
    local, plain = np.empty(width, np.float32), not keep and len(owner) == 0
    parts, flat = support.reshape(-1), values.reshape(-1)
    for piece in range(start, stop):
        part = to_atoms[piece * anchors : (piece + 1) * anchors]
        for u in range(borders[piece], borders[piece + 1]):
            for i in range(starts[u], min(starts[u + 1], starts[u] + AHEAD)):
                _prefetch_row(gradient, order, owner, i + AHEAD, starts[borders[piece + 1]])
            one = total[u] if keep else local
            if starts[u + 1] - starts[u] == 1 and plain:
                one = gradient[order[starts[u]]]
            else:
                _gathered(gradient, order, owner, weights, starts[u], starts[u + 1], one)
            _by_slots(one, atoms, part, parts, flat, u * slots, to_values[u])
    return np.int64(1)


@Job
def weight_gradients(address: Any, start: Any, stop: Any) -> Any:
    """out[i] = rows[index[i]] . gradient[owner[i]]."""
    block = words(address)
    rows, index = matrix(block, 0, np.float32), vector(block, 3, np.int32)
    gradient = matrix(block, 5, np.float32)
    owner, out = vector(block, 8, np.int64), vector(block, 10, np.float32)
    for i in range(start, stop):
        out[i] = _dot(rows[index[i]], gradient[owner[i]], 0)
    return np.int64(1)


@compiled
def _least(row: Any, lanes: Any) -> Any:
    """Return index and value of the minimum of a row if it is negative, else 0, 0; vectorized."""
    whole = len(row) - len(row) % LANES
    for lane in range(LANES):
        lanes[lane] = np.float32(0)
    for first in range(0, whole, LANES):
        for lane in range(LANES):
            x = row[first + lane]
            lanes[lane] = x if x < lanes[lane] else lanes[lane]
    best, least = np.int64(0), np.float32(0)
    for lane in range(LANES):
        least = lanes[lane] if lanes[lane] < least else least
    for k in range(whole, len(row)):
        least = row[k] if row[k] < least else least
    if least < np.float32(0):
        while row[best] != least:
            best += 1
    return best, least


@Job
def best_atoms(address: Any, start: Any, stop: Any) -> Any:
    """For each row, the atom outside its support with the largest gradient, and the gradient.

    ``scores`` [n, K], which are overwritten, are the gradients up to a positive factor; ``signed``:
    the most negative gradient instead of the largest magnitude. The gradient is 0 if there is none.
    """
    block = words(address)
    scores, support = matrix(block, 0, np.float32), matrix(block, 3, np.int32)
    atoms, found = vector(block, 6, np.int64), vector(block, 8, np.float32)
    factor, signed = np.float32(vector(block, 10, np.float64)[0]), block[12]
    lanes, magnitudes = np.empty(LANES, np.float32), np.empty(scores.shape[1], np.float32)
    for u in range(start, stop):
        row = scores[u]
        for j in range(support.shape[1]):
            row[support[u, j]] = np.float32(0)
        if signed:
            best, least = _least(row, lanes)
        else:
            for k in range(len(row)):
                magnitudes[k] = -abs(row[k])
            best, least = _least(magnitudes, lanes)
        atoms[u], found[u] = best, factor * row[best] if least < np.float32(0) else np.float32(0)
    return np.int64(1)
