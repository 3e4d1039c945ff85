"""Compiled loops of stochastic gradient descent, rating by rating, in cells of users and items.

Users and items are divided into ``CELLS`` classes each. Cells (a, b) and (c, d) with a != c and
b != d have no row in common: in a round every class of users is combined with one class of items,
and threads may take the cells of a round in any order, with the same result. Sixteen neighbors are
in one class, so that their counts lie on a cache line of one thread.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray

from featherbed.kernels.arithmetic import descend, score
from featherbed.kernels.compiled import Job, compiled
from featherbed.kernels.memory import doubles, floats, integers, words
from featherbed.kernels.vectors import pointer, prefetch

CELLS = 8  # classes of users, and of items
AHEAD = 24  # ratings between the prefetch of rows and their use
PIECE = 1 << 14  # ratings predicted at once
WORDS = 24
# ratings: users, items, values, their number; starts of cells; the round; sums of squares by cell;
# the seed of the block
USERS, ITEMS, VALUES, COUNT, BEGINS, ROUND, SUMS, SEED = range(8)
# rows of users and items, number of updates of each; mean, learning rate, share, weight decay
LEFT, RIGHT, LEFT_COUNTS, RIGHT_COUNTS, NUMBERS = range(8, 13)


@compiled
def _number(address: Any, row: Any) -> Any:
    return floats(address + 4 * row, 1)


@compiled
def deal(
    users: Any,
    items: Any,
    values: Any,
    out_users: Any,
    out_items: Any,
    out_values: Any,
    begins: Any,
) -> None:
    """Sort ratings by cell; those of cell (a, b) start at begins[a, b]."""
    for cell in range(CELLS * CELLS + 2):
        begins[cell] = 0
    for k in range(len(users)):
        begins[((users[k] >> 4) % CELLS) * CELLS + (items[k] >> 4) % CELLS + 2] += 1
    for cell in range(2, CELLS * CELLS + 2):
        begins[cell] += begins[cell - 1]
    for k in range(len(users)):
        cell = ((users[k] >> 4) % CELLS) * CELLS + (items[k] >> 4) % CELLS + 1
        at = begins[cell]
        out_users[at], out_items[at], out_values[at] = users[k], items[k], values[k]
        begins[cell] = at + 1


@compiled
def _shuffle(users: Any, items: Any, values: Any, begin: Any, end: Any, state: Any) -> None:
    """Shuffle ratings (Fisher and Yates) by xorshift."""
    for k in range(end - 1, begin, -1):
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        j = begin + np.int64(((state >> np.uint64(32)) * np.uint64(k - begin + 1)) >> np.uint64(32))
        users[k], users[j] = users[j], users[k]
        items[k], items[j] = items[j], items[k]
        values[k], values[j] = values[j], values[k]


@cache
def learn_cells(width: int, column: int) -> Job:
    """Compile the job that updates rows by the ratings of cells, in a random order within each.

    row ← (1 - s decay) row - s error other row; s = learning rate / sqrt(1 + share n) after n
    updates.
    """
    size = np.int64(4 * width)
    lines = (4 * width + 63) // 64

    @Job
    def cells(address: Any, start: Any, stop: Any) -> Any:
        block = words(address)
        count, left, right = block[COUNT], block[LEFT], block[RIGHT]
        users, items = integers(block[USERS], count), integers(block[ITEMS], count)
        values = floats(block[VALUES], count)
        begins = carray(pointer(np.uint64(block[BEGINS])), CELLS * CELLS + 2, np.int64)
        numbers = floats(block[NUMBERS], 4)
        mean, rate, share, decay = numbers[0], numbers[1], numbers[2], numbers[3]
        one = np.float32(1)
        for part in range(start, stop):
            cell = part * CELLS + (part + block[ROUND]) % CELLS
            begin, end, total = begins[cell], begins[cell + 1], 0.0
            state = (np.uint64(block[SEED]) + np.uint64(cell + 1)) * np.uint64(
                0x9E3779B97F4A7C15
            ) | np.uint64(1)
            _shuffle(users, items, values, begin, end, state)
            for k in range(begin, end):
                if k + AHEAD < end:
                    for line in range(lines):
                        prefetch(np.uint64(left + users[k + AHEAD] * size + 64 * line))
                        prefetch(np.uint64(right + items[k + AHEAD] * size + 64 * line))
                    prefetch(np.uint64(block[LEFT_COUNTS] + np.int64(4) * users[k + AHEAD]))
                    prefetch(np.uint64(block[RIGHT_COUNTS] + np.int64(4) * items[k + AHEAD]))
                u, i = np.int64(users[k]), np.int64(items[k])
                user, item = left + u * size, right + i * size
                error = mean + score(width, column, user, item) - values[k]
                total += np.float64(error) * np.float64(error)
                user_count, item_count = (
                    _number(block[LEFT_COUNTS], u),
                    _number(block[RIGHT_COUNTS], i),
                )
                s = rate / np.sqrt(one + share * user_count[0])
                t = rate / np.sqrt(one + share * item_count[0])
                descend(
                    width,
                    column,
                    user,
                    item,
                    (one - s * decay, one - t * decay),
                    (-s * error, -t * error),
                )
                user_count[0] += one
                item_count[0] += one
            doubles(block[SUMS], CELLS)[part] = total
        return np.int64(1)

    return cells


@cache
def square_errors(width: int, column: int) -> Job:
    """Compile the job that sums squared errors, by pieces of ratings."""
    size = np.int64(4 * width)

    @Job
    def pieces(address: Any, start: Any, stop: Any) -> Any:
        block = words(address)
        count, left, right = block[COUNT], block[LEFT], block[RIGHT]
        users, items = integers(block[USERS], count), integers(block[ITEMS], count)
        values = floats(block[VALUES], count)
        mean = floats(block[NUMBERS], 1)[0]
        for piece in range(start, stop):
            total, end = 0.0, min(count, (piece + 1) * PIECE)
            for k in range(piece * PIECE, end):
                if k + AHEAD < end:
                    prefetch(np.uint64(left + users[k + AHEAD] * size))
                    prefetch(np.uint64(right + items[k + AHEAD] * size))
                user, item = left + users[k] * size, right + items[k] * size
                error = np.float64(mean + score(width, column, user, item) - values[k])
                total += error * error
            doubles(block[SUMS], piece + 1)[piece] = total
        return np.int64(1)

    return pieces
