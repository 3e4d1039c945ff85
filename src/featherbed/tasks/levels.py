"""The smallest rows that predict ratings: bits where they save most error, levels fitted to the ratings themselves.

Rows in order of popularity come in grades; grade g of a side has bits b_g[k] for column k. What rounding costs follows from
the rows' posterior (``featherbed.tasks.bayes``). Let S_k be the second moment of a side's column k over ratings, and Ŝ_k what
is left of it after rounding, Ŝ_k = Σ_g S_gk (1 - left(b_gk)). Then the squared error of predictions grows by

    Σ_{k>=1} (S_k S'_k - Ŝ_k Ŝ'_k) + (S_0 - Ŝ_0) + (S'_0 - Ŝ'_0)

(dashes for the other side; the bias columns stand alone), a column being worth on one side what the other side keeps of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.codecs.graded import LEFT, allocate_bits
from featherbed.errors import ArgumentError
from featherbed.packed.band import Band
from featherbed.packed.codes import Every
from featherbed.packed.graded import Graded, graded_scales
from featherbed.packed.matrix import to_levels
from featherbed.packed.report import file_size
from featherbed.packed.table import PackedTable
from featherbed.tasks.bayes import (
    Doubles,
    Meetings,
    Posterior,
    both_sides,
    moments,
    squared_error,
    variational,
)
from featherbed.tasks.data import Ratings

Bits = NDArray[np.uint8]
Counts = NDArray[np.integer]
Progress = Callable[[str, float], bool | None]  # true: no further round
GRADES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)  # numbers of grades tried
EVENNESS = 0.3  # a grade's rows weigh as much as any other's, a row weighing count^0.3
CLOSE = 1e-4  # of the noise's variance: plans that much apart are equally good, the smaller one is taken
TURNS = 12  # allocations in turns: bits by what the other side keeps, and anew
ENOUGH = 1e-6  # of the noise's variance: a bit that saves less error is not spent
INNER = 8  # sweeps over a row's columns
PATIENCE = 2  # sweeps without a lower validation error
LEAST_SCALE, LARGEST_SCALE = 1e-4, 5e4  # that float16 holds with all of its bits


@dataclass(frozen=True)
class Levels:
    """One side's rows as levels: ``rows`` of each grade, their bits and scales by column.

    >>> side = Levels([1, 1], np.array([[2, 1], [1, 0]], np.uint8), np.ones((2, 2)), np.array([[3, 0], [1, 0]], np.uint8))
    >>> side.dense().tolist()
    [[1.5, -0.5], [0.5, 0.0]]
    """

    rows: list[int]  # [G]
    bits: Bits  # [G, d]
    scales: Doubles  # [G, d]
    levels: Bits  # [V, d]
    scale_kind: str = "float16"

    @property
    def grades(self) -> NDArray[np.int64]:  # [V]
        """The grade of each row."""
        return np.repeat(np.arange(len(self.rows)), self.rows)

    def dense(self) -> Doubles:  # [V, d]
        """Return the rows as numbers."""
        top = (1 << self.bits.astype(np.int64)) - 1
        out: Doubles = np.where(self.bits > 0, self.scales, 0.0)[self.grades] * (
            self.levels - top[self.grades] / 2
        )
        return out

    def packed(self) -> PackedTable:
        """Return the table as it is stored."""
        graded = Graded.encode(self.levels, self.bits, self.rows, self.scales, self.scale_kind)
        return PackedTable([Band(len(self.levels), Every(), values=graded)], self.bits.shape[1])

    @classmethod
    def round(cls, matrix: Doubles, bits: Bits, rows: list[int]) -> Levels:  # [V, d], [G, d], [G]
        """Round rows to the nearest levels, scales chosen by the error they leave."""
        halves, floats = _halves(matrix), matrix.astype(np.float32)
        scales = _storable(graded_scales(floats, bits, rows).astype(np.float64), halves)
        levels = np.zeros(matrix.shape, np.uint8)
        for g, (start, stop) in enumerate(pairwise(np.cumsum([0, *rows]))):
            for k in np.flatnonzero(bits[g]):
                scale = scales[g, k : k + 1].astype(np.float32)
                levels[start:stop, k] = to_levels(floats[start:stop, k], scale, int(bits[g, k]))
        return cls(rows, bits, scales, levels, "float16" if halves else "float32")


def _halves(matrix: Doubles) -> bool:
    """Tell whether float16 can hold the scales of such rows: biases go with ratings, factors with their square root."""
    return bool(
        np.abs(matrix[:, 0]).max() > 100 * LEAST_SCALE and np.abs(matrix).max() < LARGEST_SCALE
    )


def _storable(scales: Doubles, halves: bool) -> Doubles:
    """Return scales as the file will hold them."""
    clipped = np.clip(scales, LEAST_SCALE, LARGEST_SCALE) if halves else scales
    return clipped.astype(np.float16 if halves else np.float32).astype(np.float64)


def grade_rows(counts: Counts, grades: int) -> list[int]:  # [V] -> [G]
    """Cut rows, the most popular first, into at most so many grades, those of popular rows shorter.

    >>> grade_rows(np.array([100, 50, 20, 5, 2, 1, 1, 0]), 3)
    [1, 2, 5]
    """
    weight = np.cumsum((counts + 1.0) ** EVENNESS)
    cuts = np.searchsorted(weight, weight[-1] * np.arange(1, grades) / grades)
    return [int(n) for n in np.diff(np.unique([0, *cuts, len(counts)]))]


def grade_moments(
    rows: Doubles, counts: Counts, grades: Sequence[int]
) -> Doubles:  # [V, d], [V] -> [G, d]
    """Return each grade's part of a side's second moments over ratings."""
    share = counts[:, None] / max(1, counts.sum())
    sums: Doubles = np.add.reduceat(np.square(rows) * share, np.cumsum([0, *grades[:-1]]), axis=0)
    return sums


def allocate(
    spreads: tuple[Doubles, Doubles],  # [Gu, d], [Gi, d]: parts of the second moments
    rows: tuple[list[int], list[int]],  # [Gu], [Gi]
    budget: int,
    *,
    scale_bits: int = 16,
    enough: float = 0.0,
) -> tuple[tuple[Bits, Bits], float]:
    """Spend ``budget`` bits on grades and columns of both sides; return the bits and the error they add (see above).

    Reverse water-filling, in turns: bits by falling gain for a bit, given what the other side keeps of each column. The
    first bit of a column brings a scale of ``scale_bits``; bits that save less error than ``enough`` are not spent.

    >>> sides = (np.array([[1.0, 0.5, 0.1]]), np.array([[1.0, 0.5, 0.1]]))
    >>> bits, error = allocate(sides, ([10], [20]), 120, scale_bits=0)
    >>> [side.tolist() for side in bits]
    [[[3, 1, 0]], [[3, 1, 0]]]
    """
    kept = whole = [spread.sum(axis=0) for spread in spreads]
    best, least = tuple(np.zeros(spread.shape, np.uint8) for spread in spreads), np.inf
    for _ in range(TURNS):
        worth = [np.concatenate([[1.0], other[1:]]) for other in (kept[1], kept[0])]
        costs = [spread * value for spread, value in zip(spreads, worth, strict=True)]
        bits = _spent(costs, rows, budget, scale_bits, enough)
        left = [
            (spread * (1 - LEFT[side])).sum(axis=0)
            for spread, side in zip(spreads, bits, strict=True)
        ]
        error = float(
            (whole[0] * whole[1] - left[0] * left[1])[1:].sum()
            + sum(whole[s][0] - left[s][0] for s in (0, 1))
        )
        if error < least:
            best, least = tuple(bits), error
        kept = [(old + new) / 2 for old, new in zip(kept, left, strict=True)]
    return (best[0], best[1]), least


def _spent(
    costs: list[Doubles],
    rows: tuple[list[int], list[int]],
    budget: int,
    scale_bits: int,
    enough: float,
) -> list[Bits]:
    """Take bits by falling gain until the budget is spent."""
    flat = np.concatenate([cost.reshape(-1) for cost in costs])
    length = np.concatenate(
        [np.repeat(side, cost.shape[1]) for side, cost in zip(rows, costs, strict=True)]
    )
    widths = allocate_bits(flat, length, budget, scale_bits=scale_bits, enough=enough)
    cut = costs[0].size
    return [widths[:cut].reshape(costs[0].shape), widths[cut:].reshape(costs[1].shape)]


def fit_levels(
    train: Ratings,
    posterior: Posterior,
    users: Levels,
    items: Levels,
    *,
    validation: Ratings | None = None,
    sweeps: int = 10,
    progress: Progress | None = None,
) -> tuple[Levels, Levels, list[float]]:
    """Move levels and scales to where the ratings are met best; return both sides and the errors on the way.

    In turns for users and items: each row's levels by coordinate descent, one column at a time, on the squared error it
    expects given the other side (whose columns with bits are as uncertain as the posterior says) and its prior; then the
    scales of each grade by least squares. With ``validation`` the sweep of least error is returned (the start counts too),
    otherwise the last. ``posterior`` is the one the levels were rounded from.

    >>> from featherbed.tasks.data import planted_ratings
    >>> ratings = planted_ratings(200, 100, 5000, groups=3, dim=3)
    >>> posterior = variational(ratings, 4, iterations=8)
    >>> users, items = (Levels.round(x, np.full((1, 4), 2), [len(x)]) for x in (posterior.users, posterior.items))
    >>> errors = fit_levels(ratings, posterior, users, items, validation=ratings)[2]
    >>> min(errors) < errors[0]
    True
    """
    measured = train if validation is None or len(validation) == 0 else validation
    meetings = [side.less(posterior.mean) for side in both_sides(train)]
    unsure = [
        _masked(posterior.user_covariances, users),
        _masked(posterior.item_covariances, items),
    ]
    ridges = [
        posterior.noise / np.maximum(prior, 1e-30)
        for prior in (posterior.user_prior, posterior.item_prior)
    ]
    sides, best, errors = [users, items], (users, items), list[float]()
    for sweep in range(sweeps + 1):
        for s in (0, 1) if sweep else ():
            other = sides[1 - s].dense()
            sides[s] = _swept(
                meetings[s], sides[s], other, moments(other, unsure[1 - s]), ridges[s]
            )
        errors.append(squared_error(posterior.mean, sides[0].dense(), sides[1].dense(), measured))
        stopped = progress is not None and progress("levels", errors[-1])
        if measured is train or errors[-1] < min(errors[:-1], default=np.inf):
            best = (sides[0], sides[1])
        if stopped or (
            measured is not train and len(errors) - 1 - int(np.argmin(errors)) >= PATIENCE
        ):
            break
    return *best, errors


def _masked(covariances: Doubles, side: Levels) -> Doubles:  # [V, T]
    """Return the covariances of the columns that have bits; the others are 0 for certain."""
    i, j = np.tril_indices(side.bits.shape[1])
    return np.where(((side.bits[:, i] > 0) & (side.bits[:, j] > 0))[side.grades], covariances, 0.0)


def _swept(
    meetings: Meetings, side: Levels, other: Doubles, known: tuple[Doubles, Doubles], ridge: Doubles
) -> Levels:
    """Choose all levels of one side anew, then its scales."""
    from featherbed.kernels.bayes import choose_levels

    levels, bits, grades = side.levels.copy(), side.bits.astype(np.int64), side.grades
    shape, sums = (*side.bits.shape, side.bits.shape[1]), dict[int, tuple[Doubles, Doubles]]()

    def job(first: int, last: int) -> float:
        sums[first] = np.zeros(shape), np.zeros(shape[:2])
        given = (meetings.starts, meetings.others, meetings.values, other, *known, ridge)
        choose_levels(*given, bits, side.scales, grades, INNER, first, last, levels, *sums[first])
        return 0.0

    meetings.share_out(job)
    systems, rights = (
        np.sum([sums[first][part] for first in sorted(sums)], axis=0) for part in (0, 1)
    )
    scales = side.scales.copy()
    for g in range(len(side.rows)):
        used = np.flatnonzero(side.bits[g])
        if len(used):
            system = systems[g][np.ix_(used, used)]
            found = np.linalg.solve(
                system + (1e-6 * np.trace(system) / len(used) + 1e-30) * np.eye(len(used)),
                rights[g][used],
            )
            scales[g, used] = np.where(found > 0.3 * scales[g, used], found, scales[g, used])
    return replace(side, levels=levels, scales=_storable(scales, side.scale_kind == "float16"))


def best_rounding(
    posterior: Posterior, counts: tuple[Counts, Counts], budget: int
) -> tuple[Levels, Levels, float]:
    """Round both sides to at most ``budget`` bytes of files, the number of grades chosen by the error that is expected.

    >>> rows = np.random.default_rng(0).normal(size=(40, 3))
    >>> posterior = Posterior(0.0, rows, rows, np.zeros((40, 6)), np.zeros((40, 6)), 1.0, np.ones(3), np.ones(3))
    >>> users, items, error = best_rounding(posterior, (np.arange(40, 0, -1),) * 2, 1000)
    >>> error < 1, file_size(users.packed()) + file_size(items.packed()) <= 1000
    (True, True)
    """
    matrices = (posterior.users, posterior.items)
    _check_budget(budget, len(counts[0]), len(counts[1]), matrices[0].shape[1])
    plans = [
        plan
        for grades in GRADES
        if (plan := _planned(matrices, counts, budget, grades, ENOUGH * posterior.noise))
    ]
    good = min(plan[1] for plan in plans) + CLOSE * posterior.noise
    _, expected, bits, rows = min(
        (plan for plan in plans if plan[1] <= good), key=lambda plan: plan[0]
    )
    users, items = (Levels.round(*side) for side in zip(matrices, bits, rows, strict=True))
    return users, items, expected


def _check_budget(budget: int, users: int, items: int, dim: int) -> None:
    least = _bytes([_empty(np.zeros((1, dim), np.uint8), [rows], True) for rows in (users, items)])
    if budget < least:
        raise ArgumentError(
            f"budget={budget:,}: the headers of the two files alone take {least:,} bytes, give more than that"
        )


def _planned(
    matrices: tuple[Doubles, Doubles],
    counts: tuple[Counts, Counts],
    budget: int,
    grades: int,
    enough: float,
) -> tuple[int, float, tuple[Bits, Bits], tuple[list[int], list[int]]] | None:
    """Return bytes, expected error, bits and rows with so many grades; None if their headers alone do not fit."""
    rows = (grade_rows(counts[0], grades), grade_rows(counts[1], grades))
    spreads = (
        grade_moments(matrices[0], counts[0], rows[0]),
        grade_moments(matrices[1], counts[1], rows[1]),
    )
    halves = [_halves(matrix) for matrix in matrices]
    bare = [
        _empty(np.zeros_like(s, np.uint8), r, h)
        for s, r, h in zip(spreads, rows, halves, strict=True)
    ]
    room = 8 * (budget - _bytes(bare))
    while room >= 0:
        bits, expected = allocate(
            spreads, rows, room, scale_bits=16 if all(halves) else 32, enough=enough
        )
        size = _bytes([_empty(*side) for side in zip(bits, rows, halves, strict=True)])
        if size <= budget:
            return size, expected, bits, rows
        room = max(0, room - 8 * (size - budget)) if room else -1
    return None


def _empty(bits: Bits, rows: list[int], halves: bool) -> Levels:
    levels = np.zeros((sum(rows), bits.shape[1]), np.uint8)
    return Levels(rows, bits, np.ones(bits.shape), levels, "float16" if halves else "float32")


def _bytes(sides: Sequence[Levels]) -> int:
    return sum(file_size(side.packed()) for side in sides)


def graded_tables(
    train: Ratings,
    validation: Ratings,
    *,
    dim: int = 16,
    budget: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[PackedTable, PackedTable, float, dict[str, Any]]:
    """Return users' and items' rows that fit in ``budget`` bytes of files (without keys), the mean, and notes of the making.

    Biases stand in the first column: score = mean + U_0 + V_0 + Σ_{k>=1} U_k V_k. Ids must be in falling order of training
    counts. ``progress`` is called with "rows" or "levels" and the validation error after each round.

    >>> from featherbed.tasks.data import planted_ratings
    >>> from featherbed.tasks.splits import by_frequency, make_split
    >>> split = by_frequency(make_split(planted_ratings(200, 100, 5000, groups=3, dim=3)))
    >>> users, items, mean, notes = graded_tables(split.train, split.validation, dim=4, budget=1500)
    >>> notes["bytes"] <= 1500, notes["validation"] < 0.3
    (True, True)
    """
    counts = (
        np.bincount(train.users, minlength=train.num_users),
        np.bincount(train.items, minlength=train.num_items),
    )
    if any(bool((np.diff(side) > 0).any()) for side in counts):
        raise ArgumentError(
            "ids are not in falling order of training counts: renumber them by tasks.splits.by_frequency"
        )
    _check_budget(budget, train.num_users, train.num_items, dim)
    held = validation if len(validation) else None
    posterior = variational(train, dim, validation=held, seed=seed, progress=progress)
    users, items, expected = best_rounding(posterior, counts, budget)
    users, items, errors = fit_levels(
        train, posterior, users, items, validation=held, progress=progress
    )
    dense, least = (None, None) if held is None else (posterior.error(held), min(errors))
    notes = {
        "bytes": _bytes([users, items]),
        "dense": dense,
        "expected": expected,
        "errors": errors,
        "validation": least,
    }
    return users.packed(), items.packed(), posterior.mean, notes
