"""The baseline of every recommender: mean + bias of the user + bias of the item.

    b_u = Σ (r(u, i) - mean - b_i) / (n_u + shrinkage_u),   b_i alike

alternating (Koren 2008, "Factorization meets the neighborhood", section 2.1). The two shrinkages
are chosen on the validation ratings: with fixed ones the baseline is weak on sparse data, and a
model looks better than it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError
from featherbed.io.records import Ratings, block_slices, count_ids

BLOCK = 1 << 22  # ratings processed at once
SEARCHED = 4_000_000  # maximum number of ratings for the search, those of every n-th user
GRID = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # shrinkages of both sides
FACTORS = (0.25, 0.5, 2.0, 4.0)  # of one side's shrinkage, tried after the grid
DEFAULT = 5.0  # shrinkage without validation ratings
SEARCH_SWEEPS, SWEEPS = 4, 20
TOLERANCE = 1e-4  # of the ratings' standard deviation: sweeps end when no bias changes by more

Doubles = NDArray[np.float64]
Shrinkage = tuple[float, float]  # of users, of items


@dataclass(frozen=True)
class Biases:
    """A fitted baseline.

    >>> biases = Biases(3.0, np.array([0.5]), np.array([-1.0, 0.25]), shrinkage=(5.0, 5.0))
    >>> biases.predict(np.array([0, 0]), np.array([0, 1]))
    array([2.5 , 3.75])
    """

    mean: float
    users: Doubles  # [num_users]
    items: Doubles  # [num_items]
    shrinkage: Shrinkage

    def predict(self, users: NDArray[Any], items: NDArray[Any]) -> Doubles:  # [B], [B] -> [B]
        """Return the predicted ratings."""
        found: Doubles = self.mean + self.users[users] + self.items[items]
        return found

    def error(self, ratings: Ratings) -> float:
        """Return the mean squared error."""
        total = sum(
            float(np.square(self.predict(ratings.users[here], ratings.items[here]) - values).sum())
            for here, values in _blocks(ratings)
        )
        return total / max(1, len(ratings))


def fit_validated_biases(train: Ratings, validation: Ratings) -> Biases:
    """Fit biases to the training ratings, with the shrinkages of the lowest validation error.

    Without validation ratings both shrinkages are 5.

    >>> from featherbed.io.records import make_ratings
    >>> train, validation, test = make_ratings(200, 100, 4000).split(0)
    >>> fitted = fit_validated_biases(train, validation)
    >>> fitted.error(validation) <= fit_biases(train, (5.0, 5.0)).error(validation)
    True
    """
    if not len(validation):
        return fit_biases(train, (DEFAULT, DEFAULT))
    every = -(-len(train) // SEARCHED)
    parts = [part if every == 1 else _some_users(part, every) for part in (train, validation)]
    if not all(len(part) for part in parts):
        parts = [train, validation]
    return fit_biases(train, _best_shrinkage(*parts))


def _some_users(ratings: Ratings, every: int) -> Ratings:
    return ratings.take(np.flatnonzero(np.asarray(ratings.users) % every == 0))


def _best_shrinkage(train: Ratings, validation: Ratings) -> Shrinkage:
    """Search a grid shared by both sides, then each side around its best value."""
    known: dict[Shrinkage, float] = {}
    start: Biases | None = None

    def try_all(candidates: list[Shrinkage]) -> Shrinkage:
        nonlocal start
        for shrinkage in candidates:
            if shrinkage not in known:
                start = fit_biases(train, shrinkage, sweeps=SEARCH_SWEEPS, start=start)
                known[shrinkage] = start.error(validation)
        return min(known, key=lambda shrinkage: known[shrinkage])

    users, items = try_all([(value, value) for value in GRID])
    users, items = try_all([(users * factor, items) for factor in FACTORS])
    return try_all([(users, items * factor) for factor in FACTORS])


def fit_biases(
    train: Ratings,
    shrinkage: Shrinkage,
    *,
    sweeps: int = SWEEPS,
    start: Biases | None = None,
) -> Biases:
    """Fit biases by alternating updates, items first, until they converge.

    >>> values = np.array([1, 3], np.float32)
    >>> ratings = Ratings(np.array([0, 1]), np.array([0, 0]), values, ("a", "b"), ("film",))
    >>> fit_biases(ratings, (1.0, 0.0)).users.tolist()
    [-0.5, 0.5]
    """
    if not len(train):
        raise ArgumentError("there are no ratings to fit biases to")
    mean = float(np.mean(train.values, dtype=np.float64))
    tolerance = TOLERANCE * max(float(np.std(train.values, dtype=np.float64)), 1e-12)
    sizes = train.num_users, train.num_items
    biases = (
        [np.zeros(size) for size in sizes]
        if start is None
        else [start.users.copy(), start.items.copy()]
    )
    ids = train.users, train.items
    weights = [
        np.maximum(count_ids(ids[side], sizes[side]) + shrinkage[side], 1e-12) for side in (0, 1)
    ]
    for _ in range(sweeps):
        change = 0.0
        for side in (1, 0):
            total = np.zeros(sizes[side])
            for here, values in _blocks(train):
                residual = values - mean - biases[1 - side][ids[1 - side][here]]
                total += np.bincount(ids[side][here], residual, minlength=sizes[side])
            new = total / weights[side]
            change = max(change, float(np.abs(new - biases[side]).max()))
            biases[side] = new
        if change <= tolerance:
            break
    return Biases(mean, biases[0], biases[1], shrinkage)


def _blocks(ratings: Ratings) -> Iterator[tuple[slice, Doubles]]:
    """Yield slices of the ratings and their values."""
    for block in block_slices(len(ratings), BLOCK):
        yield block, np.asarray(ratings.values[block], dtype=np.float64)
