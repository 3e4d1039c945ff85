"""Compiled loops of matrix factorization: errors of a batch of ratings, gradients, one step.

The block of a batch holds the addresses of the blocks of its two sides, users and items. Jobs run
over pieces of fixed size, so that results do not depend on the number of threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from featherbed.kernels.arithmetic import NONE, add_outer, add_scaled, combine, score, step
from featherbed.kernels.compiled import Job, compiled
from featherbed.kernels.memory import doubles, floats, integers, words

ROWS = 128  # rows of a piece
PLACES = 256  # ratings of a piece
LANES = 16  # weights of a row processed at once; buffers for them are padded to it
WORDS = 32  # of a block
# a batch: addresses of both sides, number of ratings, addresses of values, errors, sums of squares
# by piece, and of mean and scale
SIDES, COUNT, VALUES, ERRORS, SUMS, NUMBERS = 0, 2, 3, 4, 5, 6
# a side: ids of the batch, rows of the table; start of the places of each row, places by row;
# composed rows
IDS, LENGTH, STARTS, ORDER, COMPOSED = range(5)
# the updated parameter (weights over anchors, or rows), its width; its moments and the distance of
# their rows; mask of kept elements
STORED, WIDTH, FIRST, FIRST_APART, SECOND, SECOND_APART, KEPT = range(5, 12)
# anchors (0: none), their moments, the transposed anchors [d, padded], the padded width; sums and
# buffers by piece
(
    ATOMS,
    ATOM_FIRST,
    ATOM_FIRST_APART,
    ATOM_SECOND,
    ATOM_SECOND_APART,
    TRANSPOSED,
    PADDED,
    PARTS,
    ROOM,
) = range(12, 21)
# a bias for each row (0: none), its moments and its gradient; the numbers of a step: of the
# parameter, of anchors, of biases
BIAS, BIAS_FIRST, BIAS_SECOND, BIAS_GRADIENT, STEPS = range(21, 26)


@compiled
def _numbers(address: Any, which: Any) -> Any:
    """Return the nine numbers of a step (``arithmetic.step``)."""
    n = floats(address, 27)
    a = 9 * which
    return n[a], n[a + 1], n[a + 2], n[a + 3], n[a + 4], n[a + 5], n[a + 6], n[a + 7], n[a + 8]


@compiled
def _clear(values: Any) -> None:
    for j in range(len(values)):
        values[j] = 0


@Job
def group_sides(address: Any, start: Any, stop: Any) -> Any:
    """Sort the places of the batch by row: order[starts[r] : starts[r + 1]] are those of row r."""
    batch = words(address)
    for which in range(start, stop):
        side = words(batch[SIDES + which])
        count, rows = batch[COUNT], side[LENGTH]
        ids, starts = integers(side[IDS], count), integers(side[STARTS], rows + 2)
        order = integers(side[ORDER], count)
        for r in range(rows + 2):
            starts[r] = 0
        for i in range(count):
            starts[ids[i] + 2] += 1
        for r in range(2, rows + 2):
            starts[r] += starts[r - 1]
        for i in range(count):
            order[starts[ids[i] + 1]] = i
            starts[ids[i] + 1] += 1
    return np.int64(1)


@cache
def compose_rows(width: int) -> Job:
    """Compile the job that composes the rows of one side that are in the batch."""
    size = np.int64(4 * width)

    @Job
    def compose(address: Any, start: Any, stop: Any) -> Any:
        side = words(address)
        rows, count = side[LENGTH], side[WIDTH]
        starts = integers(side[STARTS], rows + 1)
        for r in range(start * ROWS, min(rows, stop * ROWS)):
            if starts[r] < starts[r + 1]:
                out, stored = side[COMPOSED] + r * size, side[STORED] + r * count * 4
                if side[ATOMS]:
                    combine(width, out, stored, side[ATOMS], count, size)
                else:
                    source, target = floats(stored, width), floats(out, width)
                    for j in range(width):
                        target[j] = source[j]
        return np.int64(1)

    return compose


@cache
def find_errors(width: int, column: int) -> Job:
    """Compile the job that writes errors times 2 / count, and their sum of squares by piece."""
    size = np.int64(4 * width)

    @Job
    def errors(address: Any, start: Any, stop: Any) -> Any:
        batch = words(address)
        users, items, count = words(batch[SIDES]), words(batch[SIDES + 1]), batch[COUNT]
        u, i = integers(users[IDS], count), integers(items[IDS], count)
        values, out, sums = floats(batch[VALUES], count), floats(batch[ERRORS], count), batch[SUMS]
        numbers = floats(batch[NUMBERS], 2)
        mean, factor = numbers[0], numbers[1]
        left, right, apart = users[COMPOSED], items[COMPOSED], users[BIAS] != 0
        user_bias = floats(users[BIAS], users[LENGTH])
        item_bias = floats(items[BIAS], items[LENGTH])
        for piece in range(start, stop):
            total = 0.0
            for k in range(piece * PLACES, min(count, (piece + 1) * PLACES)):
                found = mean + score(width, column, left + u[k] * size, right + i[k] * size)
                if apart:
                    found += user_bias[u[k]] + item_bias[i[k]]
                error = found - values[k]
                total += np.float64(error) * np.float64(error)
                out[k] = factor * error
            doubles(sums, piece + 1)[piece] = total
        return np.int64(1)

    return errors


@cache
def step_side(width: int, column: int, rule: int, kind: int, metric: int) -> Job:
    """Compile the job that updates every row of one side and sums its anchors' gradient by piece.

    It takes the block of the batch for users, the block with its sides exchanged for items.
    """
    size = np.int64(4 * width)

    @Job
    def rows(address: Any, start: Any, stop: Any) -> Any:
        batch = words(address)
        side, other = words(batch[SIDES]), words(batch[SIDES + 1])
        count, length, stored, padded = batch[COUNT], side[LENGTH], side[WIDTH], side[PADDED]
        starts, order = integers(side[STARTS], length + 1), integers(side[ORDER], count)
        others, errors = integers(other[IDS], count), floats(batch[ERRORS], count)
        c, slopes = _numbers(side[STEPS], 0), floats(side[BIAS_GRADIENT], length)
        for piece in range(start, stop):
            total = side[ROOM] + piece * (size + 4 * padded)
            gradient, buffer, begin = total + size, floats(total, width + padded), piece * ROWS
            part = side[PARTS] + piece * stored * size
            if side[ATOMS]:
                _clear(floats(part, stored * width))
            for r in range(begin, min(length, begin + ROWS)):
                if r == begin or starts[r - 1] < starts[r + 1]:
                    _clear(buffer)
                slope = np.float32(0)
                for at in range(starts[r], starts[r + 1]):
                    k = order[at]
                    add_scaled(width, column, total, other[COMPOSED] + others[k] * size, errors[k])
                    slope += errors[k]
                here = side[STORED] + r * stored * 4
                if side[ATOMS] and starts[r] < starts[r + 1]:
                    for j in range(0, 4 * padded, 4 * LANES):
                        combine(LANES, gradient + j, total, side[TRANSPOSED] + j, width, 4 * padded)
                    add_outer(width, part, here, total, stored)
                m, v = side[FIRST] + r * side[FIRST_APART], side[SECOND] + r * side[SECOND_APART]
                kept = side[KEPT] + r * stored if side[KEPT] else 0
                g = gradient if side[ATOMS] else total
                step(rule, kind, metric, here, m, v, g, kept, stored, c)
                if side[BIAS]:
                    slopes[r] = slope
        return np.int64(1)

    return rows


@cache
def step_biases(rule: int) -> Job:
    """Compile the job that updates the biases of one side."""

    @Job
    def biases(address: Any, start: Any, stop: Any) -> Any:
        side = words(address)
        c, far, end = _numbers(side[STEPS], 2), 4 * ROWS * start, min(side[LENGTH], stop * ROWS)
        first, second = side[BIAS_FIRST] + far, side[BIAS_SECOND] + far
        slopes = side[BIAS_GRADIENT] + far
        step(rule, NONE, 0, side[BIAS] + far, first, second, slopes, 0, end - start * ROWS, c)
        return np.int64(1)

    return biases


@cache
def step_atoms(width: int, rule: int) -> Job:
    """Compile the job that updates and transposes the anchors of one side."""
    size = np.int64(4 * width)

    @Job
    def atoms(address: Any, start: Any, stop: Any) -> Any:
        side = words(address)
        count, pieces = side[WIDTH], (side[LENGTH] + ROWS - 1) // ROWS
        parts = floats(side[PARTS], pieces * count * width)
        for piece in range(1, pieces):
            for j in range(count * width):
                parts[j] += parts[piece * count * width + j]
        c = _numbers(side[STEPS], 1)
        for k in range(count):
            m = side[ATOM_FIRST] + k * side[ATOM_FIRST_APART]
            v = side[ATOM_SECOND] + k * side[ATOM_SECOND_APART]
            step(rule, NONE, 0, side[ATOMS] + k * size, m, v, side[PARTS] + k * size, 0, width, c)
        transpose_anchors(side, width)
        return np.int64(1)

    return atoms


@compiled
def transpose_anchors(side: Any, width: Any) -> None:
    """Write the transposed anchors of a side."""
    count, padded = side[WIDTH], side[PADDED]
    atoms, transposed = floats(side[ATOMS], count * width), floats(side[TRANSPOSED], width * padded)
    for k in range(count):
        for j in range(width):
            transposed[j * padded + k] = atoms[k * width + j]
