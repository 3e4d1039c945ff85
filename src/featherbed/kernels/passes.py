"""Compiled loops that learn plain rows a rating at a time, in cells of users and items that threads never share.

Users and items are dealt into ``CELLS`` classes each. Cells (a, b) and (c, d) with a != c and b != d have no row in common:
in a round every class of users meets one class of items, and threads may take the cells of a round in any order, with the
same result. Sixteen neighbours are of one class, so that what is kept for them lies on a cache line of one thread.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray

from featherbed.kernels.arithmetic import descend, score
from featherbed.kernels.compiled import compiled, job
from featherbed.kernels.memory import floats, integers
from featherbed.kernels.vectors import pointer, prefetch

CELLS = 8  # classes of users, and of items
AHEAD = 24  # ratings between asking for rows and reading them
PIECE = 1 << 14  # ratings predicted at once
WORDS = 24
# ratings: users, items, values, how many; where cells begin; the round; sums of squares by cell; the seed of the block
USERS, ITEMS, VALUES, COUNT, BEGINS, ROUND, SUMS, SEED = range(8)
# rows of users and items, how often each was seen; mean, rate, share, decay
LEFT, RIGHT, LEFT_SEEN, RIGHT_SEEN, NUMBERS = range(8, 13)


@compiled
def _words(address: Any) -> Any:
    return carray(pointer(np.uint64(address)), WORDS, np.int64)


@compiled
def _number(address: Any, row: Any) -> Any:
    return carray(pointer(np.uint64(address + 4 * row)), 1, np.float32)


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
    """Sort ratings by cell; those of cell (a, b) stand from begins[a, b] to the next begin."""
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
    """Put ratings into a random order (Fisher and Yates), by xorshift."""
    for k in range(end - 1, begin, -1):
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        j = begin + np.int64(((state >> np.uint64(32)) * np.uint64(k - begin + 1)) >> np.uint64(32))
        users[k], users[j] = users[j], users[k]
        items[k], items[j] = items[j], items[k]
        values[k], values[j] = values[j], values[k]


@cache
def learn_cells(width: int, column: int) -> int:
    """Make the job that learns from the ratings of some cells of a round, each cell in a random order.

    s = rate / sqrt(1 + share n) for a row that was seen n times:  row ← (1 - s decay) row - s error other row.
    """
    size = np.int64(4 * width)
    lines = (4 * width + 63) // 64

    @job
    def cells(address: Any, start: Any, stop: Any) -> Any:
        block = _words(address)
        count, left, right = block[COUNT], block[LEFT], block[RIGHT]
        users, items, values = (
            integers(block[USERS], count),
            integers(block[ITEMS], count),
            floats(block[VALUES], count),
        )
        begins = carray(pointer(np.uint64(block[BEGINS])), CELLS * CELLS + 2, np.int64)
        numbers = floats(block[NUMBERS], 4)
        mean, rate, share, decay, one = (
            numbers[0],
            numbers[1],
            numbers[2],
            numbers[3],
            np.float32(1),
        )
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
                    prefetch(np.uint64(block[LEFT_SEEN] + np.int64(4) * users[k + AHEAD]))
                    prefetch(np.uint64(block[RIGHT_SEEN] + np.int64(4) * items[k + AHEAD]))
                u, i = np.int64(users[k]), np.int64(items[k])
                user, item = left + u * size, right + i * size
                error = mean + score(width, column, user, item) - values[k]
                total += np.float64(error) * np.float64(error)
                seen_user, seen_item = _number(block[LEFT_SEEN], u), _number(block[RIGHT_SEEN], i)
                s, t = (
                    rate / np.sqrt(one + share * seen_user[0]),
                    rate / np.sqrt(one + share * seen_item[0]),
                )
                descend(
                    width,
                    column,
                    user,
                    item,
                    (one - s * decay, one - t * decay),
                    (-s * error, -t * error),
                )
                seen_user[0] += one
                seen_item[0] += one
            carray(pointer(np.uint64(block[SUMS])), CELLS, np.float64)[part] = total
        return np.int64(1)

    return cells


@cache
def square_errors(width: int, column: int) -> int:
    """Make the job that sums squared errors, by pieces of ratings."""
    size = np.int64(4 * width)

    @job
    def pieces(address: Any, start: Any, stop: Any) -> Any:
        block = _words(address)
        count, left, right = block[COUNT], block[LEFT], block[RIGHT]
        users, items, values = (
            integers(block[USERS], count),
            integers(block[ITEMS], count),
            floats(block[VALUES], count),
        )
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
            carray(pointer(np.uint64(block[SUMS])), piece + 1, np.float64)[piece] = total
        return np.int64(1)

    return pieces
