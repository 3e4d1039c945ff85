"""Compiled loops for rows made of slots: composed once per distinct id, pooled, and their
gradients.

The arguments of jobs are described in ``featherbed.kernels.memory``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from featherbed.kernels.compiled import Job, compiled
from featherbed.kernels.lookup import weigh
from featherbed.kernels.memory import matrix, vector, words
from featherbed.kernels.train import AHEAD
from featherbed.kernels.vectors import by_atom, copy, prefetch

LANES = 16  # minima kept side by side
FEWEST = 512  # rows of a block


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
    job returns 0 if the support names an atom that does not exist; the first atom is then used
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
def copy_rows(address: Any, start: Any, stop: Any) -> Any:
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


@compiled
def _dot(a: Any, b: Any, first: Any) -> Any:
    total = np.float32(0)
    for k in range(first, len(a)):
        total += a[k] * b[k]
    return total


@compiled
def _sort(parts: Any, slots: Any, starts: Any, places: Any, pairs: Any) -> None:
    """Sort pairs of a row and an atom by atom, stably; those of atom k end at starts[k]."""
    starts[:] = 0
    for number in range(len(parts)):
        starts[np.uint64(parts[number]) + np.uint64(1)] += np.int32(1)
    for atom in range(1, len(starts)):
        starts[atom] += starts[atom - 1]
    pair: Any = np.int32(0)
    for row in range(len(parts) // slots):
        for _ in range(slots):
            k = np.uint64(parts[pair])
            at = np.uint64(starts[k])
            starts[k] += np.int32(1)
            places[at], pairs[at] = row, pair
            pair += np.int32(1)


@Job
def gradients(address: Any, start: Any, stop: Any) -> Any:
    """Gradients of values [U, s] and atoms (one sum [K, d] for each piece) from those of rows [U,
    d].

    Rows are taken in blocks that stay in the L2 cache, and the pairs of a block atom by atom.
    """
    block = words(address)
    support, values = matrix(block, 0, np.int32), matrix(block, 3, np.float32)
    atoms, total = matrix(block, 6, np.float32), matrix(block, 9, np.float32)
    to_values, to_atoms = matrix(block, 12, np.float32), matrix(block, 15, np.float32)
    anchors, slots, width, count = atoms.shape[0], support.shape[1], atoms.shape[1], len(total)
    pieces, many = len(to_atoms) // anchors, max(FEWEST, anchors // slots)  # rows of a block
    starts, places = np.empty(anchors + 1, np.int32), np.empty(many * slots, np.int32)
    pairs, size = np.empty_like(places), np.uint64(4 * width)
    for piece in range(start, stop):
        sums = np.uint64(to_atoms.ctypes.data) + np.uint64(piece * anchors) * size
        end = count * (piece + 1) // pieces
        for first in range(count * piece // pieces, end, many):
            last = min(first + many, end)
            rows = total[first:last]
            parts = support[first:last].reshape(-1)
            own, found = values[first:last].reshape(-1), to_values[first:last].reshape(-1)
            found[:] = 0
            _sort(parts, slots, starts, places, pairs)
            begin = np.int64(0)
            for k in range(anchors):
                ends, many_pairs = np.int64(starts[k]), np.int64(starts[k]) - begin
                if many_pairs > 0:
                    done = by_atom(
                        np.uint64(atoms.ctypes.data) + np.uint64(k) * size,
                        sums + np.uint64(k) * size,
                        np.uint64(rows.ctypes.data),
                        np.uint64(places.ctypes.data) + np.uint64(4 * begin),
                        np.uint64(pairs.ctypes.data) + np.uint64(4 * begin),
                        many_pairs,
                        np.uint64(own.ctypes.data),
                        np.uint64(found.ctypes.data),
                        width,
                    )
                    if done < width:
                        into = to_atoms[piece * anchors + k]
                        for i in range(begin, ends):
                            row, pair = rows[places[i]], pairs[i]
                            found[pair] += _dot(row, atoms[k], done)
                            for column in range(done, width):
                                into[column] += own[pair] * row[column]
                begin = ends
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
