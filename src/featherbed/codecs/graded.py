"""Graded rows: integer rows whose bits differ by grade (a run of rows) and by column."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.packed.matrix import MOST_BITS, graded_scales

Bits = NDArray[np.uint8]
# relative error of the best uniform quantizer of a normal variable with 0, 1, ... 8 bits (Max 1960;
# beyond 5 bits by the same integral)
LEFT = np.array([1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001040, 0.0003043, 0.00008769])


def grade_ends(rows: int, grades: int) -> list[int]:
    """Return the ends of runs, each twice as long as the one before: V (2^g - 1) / (2^G - 1).

    >>> grade_ends(700, 3)
    [100, 300, 700]
    """
    return sorted({-(-rows * (2**g - 1) // (2**grades - 1)) for g in range(1, grades + 1)})


def allocate_bits(
    costs: NDArray[np.floating],  # [cells]
    lengths: NDArray[np.integer],  # [cells]
    budget: int,
    *,
    scale_bits: int = 0,
    enough: float = 0.0,
) -> Bits:  # [cells]
    """Divide ``budget`` bits among cells of ``lengths`` elements, by decreasing gain per bit.

    A cell with b bits has the error cost * LEFT[b]; its first bit also costs ``scale_bits`` for a
    scale. Bits that save no more than ``enough`` are not spent. Gains decrease with every bit of a
    cell, so that the greedy order is best up to the last few bits (Shoham and Gersho 1988).

    >>> allocate_bits(np.array([8.0, 2.0, 4.0, 0.0]), np.array([2, 2, 4, 4]), 20).tolist()
    [4, 2, 2, 0]
    """
    price = np.repeat(lengths[:, None], MOST_BITS, axis=1)
    price[:, 0] += scale_bits
    saved = costs[:, None] * -np.diff(LEFT)
    gain = np.minimum.accumulate(saved / price, axis=1)
    widths, left, least = np.zeros(len(costs), dtype=np.uint8), budget, int(lengths.min())
    for at in np.argsort(-gain.reshape(-1), kind="stable").tolist():
        cell, bit = divmod(at, MOST_BITS)
        if widths[cell] == bit and saved[cell, bit] > enough and price[cell, bit] <= left:
            widths[cell] += 1
            left -= int(price[cell, bit])
            if left < least:
                break
    return widths


def fit_grades(
    rows: NDArray[np.float32],  # [V, d]
    lengths: list[int],  # [G]
    bits: float,
    weights: NDArray[Any] | None = None,  # [V]
) -> tuple[Bits, NDArray[np.float32]]:  # -> [G, d], [G, d]
    """Return bits (``bits`` per element on average) and scales of each grade and column.

    Both are chosen by the squared error, in which a grade counts by the mean weight of its rows.

    >>> widths, scales = fit_grades(np.eye(4, dtype=np.float32), [1, 3], 2)
    >>> widths.shape, scales.shape
    ((2, 4), (2, 4))
    """
    starts, count = np.cumsum([0, *lengths[:-1]]), np.array(lengths)
    squares = np.add.reduceat(np.square(rows, dtype=np.float64), starts, axis=0)
    share = np.ones(len(rows)) if weights is None else np.asarray(weights, dtype=np.float64)
    costs = squares * (np.add.reduceat(share, starts) / count)[:, None]
    every = np.repeat(count, rows.shape[1])
    widths = allocate_bits(costs.reshape(-1), every, int(bits * rows.size)).reshape(costs.shape)
    return widths, graded_scales(rows, widths, lengths)
