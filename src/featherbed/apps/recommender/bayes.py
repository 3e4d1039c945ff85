"""Matrix factorization by variational Bayes, in closed form: means and covariances of all rows.

Rows with few ratings stay near the mean of the prior instead of overfitting, without a penalty to
tune:

    r(u, i) ~ N(mean + U[u]_0 + V[i]_0 + Σ_{k>=1} U[u]_k V[i]_k, noise)
    U[u]_k ~ N(0, a_k),   V[i]_k ~ N(0, b_k)

(Lim and Teh 2007, "Variational Bayesian approach to movie rating prediction"). The posterior is
approximated by a product of normal distributions of rows; each is computed in turn from the means
and covariances of the others, the variances of priors and noise from all. Between rounds the
columns are shifted, rotated and scaled to the optimum under the priors, which takes hundreds of
rounds otherwise (Luttinen and Ilin 2010, "Transformations in variational Bayesian factor
analysis").
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError
from featherbed.io.records import Ratings
from featherbed.kernels.threads import threads

Doubles = NDArray[np.float64]
Moments = tuple[Doubles, Doubles]  # means [V, d], covariances [V, T]
MAX_BYTES = 6 << 30  # memory of the fit: a million rows of width 16
PIECES = 16  # pieces of rows, independent of the number of threads: sums are reproducible
BLOCK = 4096  # rows whose full covariances are in memory at once
PREDICTED = 1 << 16  # pairs predicted at once
PATIENCE = 2  # rounds without a lower validation error


@dataclass(frozen=True)
class Posterior:
    """Means and covariances (lower triangles) of all rows, and the fitted variances.

    >>> rows, covariances = np.array([[0.5, 1.0]]), np.zeros((1, 3))
    >>> variances = 0.5, np.ones(2), np.ones(2)
    >>> posterior = Posterior(3.0, rows, rows, covariances, covariances, *variances)
    >>> posterior.predict(np.array([0]), np.array([0]))
    array([5.])
    """

    mean: float
    users: Doubles  # [Vu, d]
    items: Doubles  # [Vi, d]
    user_covariances: Doubles  # [Vu, d(d+1)/2]
    item_covariances: Doubles  # [Vi, d(d+1)/2]
    noise: float
    user_prior: Doubles  # [d], variances
    item_prior: Doubles  # [d], variances

    def predict(
        self, users: NDArray[np.integer], items: NDArray[np.integer]
    ) -> Doubles:  # [B], [B] -> [B]
        """Return the expected ratings."""
        return predict_pairs(self.mean, self.users, self.items, users, items)

    def error(self, ratings: Ratings) -> float:
        """Return the mean squared error of the expected ratings."""
        return squared_error(self.mean, self.users, self.items, ratings)


def predict_pairs(
    mean: float,
    left: NDArray[Any],
    right: NDArray[Any],
    users: NDArray[np.integer],
    items: NDArray[np.integer],
) -> Doubles:  # [Vu, d], [Vi, d], [B], [B] -> [B]
    """Return mean + U_0 + V_0 + Σ_{k>=1} U_k V_k of pairs.

    >>> predict_pairs(1.0, np.ones((1, 3)), np.ones((1, 3)), np.array([0]), np.array([0]))
    array([5.])
    """
    out = np.empty(len(users))
    for start in range(0, len(users), PREDICTED):
        part = slice(start, start + PREDICTED)
        x, y = left[users[part]], right[items[part]]
        out[part] = mean + x[:, 0] + y[:, 0] + np.einsum("nk,nk->n", x[:, 1:], y[:, 1:])
    return out


def squared_error(mean: float, left: NDArray[Any], right: NDArray[Any], ratings: Ratings) -> float:
    """Return the mean squared error of rows with biases in the first column."""
    if len(ratings) == 0:
        raise ArgumentError("there are no ratings to measure the error on")
    predictions = predict_pairs(mean, left, right, ratings.users, ratings.items)
    return float(np.mean(np.square(predictions - ratings.values)))


@dataclass(frozen=True)
class RowRatings:
    """The ratings of one side, grouped by row."""

    starts: NDArray[np.int64]  # [V+1]
    others: NDArray[np.int32]  # [N]
    values: Doubles  # [N]

    @classmethod
    def of(
        cls,
        rows: NDArray[np.integer],
        others: NDArray[np.integer],
        values: NDArray[np.floating],
        count: int,
    ) -> RowRatings:
        """Sort ratings by row and within a row by the other side, for local memory access."""
        order = np.lexsort((others, rows))
        starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))])
        return cls(
            starts.astype(np.int64), others[order].astype(np.int32), values[order].astype(float)
        )

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of ratings of each row."""
        return np.diff(self.starts)

    def subtract(self, mean: float) -> RowRatings:
        """Return the ratings less the mean."""
        return replace(self, values=self.values - mean)

    def sum_over_rows(self, job: Callable[[int, int], float]) -> float:
        """Return the sum of job(first, last) over ranges of rows with similar work, in threads."""
        load = self.starts + np.arange(len(self.starts))
        cuts = np.searchsorted(load, np.linspace(0, load[-1], PIECES + 1))
        pieces = [(int(a), int(b)) for a, b in pairwise(np.unique(cuts)) if b > a]
        if threads() == 1:
            return sum(job(*piece) for piece in pieces)
        with ThreadPoolExecutor(threads()) as pool:
            return sum(pool.map(lambda piece: job(*piece), pieces))


def group_ratings(train: Ratings) -> tuple[RowRatings, RowRatings]:
    """Return the ratings by user and by item.

    >>> values, keys = np.array([4.0, 3.0], np.float32), (("a", "b"), ("film",))
    >>> ratings = Ratings(np.array([1, 0]), np.array([0, 0]), values, *keys)
    >>> [side.values.tolist() for side in group_ratings(ratings)]
    [[3.0, 4.0], [3.0, 4.0]]
    """
    users = RowRatings.of(train.users, train.items, train.values, train.num_users)
    return users, RowRatings.of(train.items, train.users, train.values, train.num_items)


def feature_moments(
    rows: Doubles, covariances: Doubles
) -> tuple[Doubles, Doubles]:  # [V, d], [V, T] -> [V, T], [V, d]
    """Return E[f f'] (lower triangles) and E[f y_0] of rows y, where f is y with f_0 = 1."""
    i, j = np.tril_indices(rows.shape[1])
    features = rows.copy()
    features[:, 0] = 1.0
    second = features[:, i]
    second *= features[:, j]
    second[:, j > 0] += covariances[:, j > 0]
    cross = features * rows[:, :1] + covariances[:, j == 0]
    cross[:, 0] = rows[:, 0] ** 2 + covariances[:, 0]
    return second, cross


def fit_posterior(
    train: Ratings,
    dim: int = 16,
    *,
    iterations: int = 15,
    validation: Ratings | None = None,
    seed: int = 0,
    progress: Callable[[str, float], bool | None] | None = None,
) -> Posterior:
    """Fit the model; with ``validation``, stop early and return the round of the lowest error.

    ``progress`` is called after each round with "rows" and the validation error (the variance of
    the noise without validation); if it returns true, that round is the last. Rows without a
    rating get the mean of the prior, 0.

    >>> from featherbed.io.records import make_ratings
    >>> ratings = make_ratings(200, 100, 5000, groups=3, dim=3)
    >>> fit_posterior(ratings, 4, iterations=8).error(ratings) < 0.25
    True
    """
    _check(train, dim, iterations)
    sides = group_ratings(train)
    now, min_noise = _initialize(train, dim, seed)
    best, lowest, waited = now, np.inf, 0
    for number in range(iterations):
        now = _round(now, sides, min_noise, update_priors=number > 0)
        error = now.noise if validation is None else now.error(validation)
        stopped = progress is not None and progress("rows", error)
        if validation is None or error < lowest:
            best, lowest, waited = now, error, 0
        else:
            waited += 1
        if stopped or waited == PATIENCE:
            break
    return best


def _check(train: Ratings, dim: int, iterations: int) -> None:
    if len(train) == 0:
        raise ArgumentError("there are no ratings to train on")
    if dim < 1 or iterations < 1:
        raise ArgumentError(f"dim={dim}, iterations={iterations}: both are at least 1")
    if not np.isfinite(train.values).all():
        raise ArgumentError("the ratings hold NaN or infinity: skip them when reading the file")
    rows, need = train.num_users + train.num_items, required_bytes(train, dim)
    if need > MAX_BYTES:
        raise ArgumentError(
            f"{rows:,} rows of width {dim} and {len(train):,} ratings need {need / 1e9:.1f} GB to "
            f"be fitted, {MAX_BYTES / 1e9:.1f} at most: use a smaller dim, or train plain rows "
            "(--users dense --items dense)"
        )


def required_bytes(train: Ratings, dim: int) -> int:
    """Return the approximate memory of the fit: 2.5 times all covariances, 40 bytes per rating."""
    return int((train.num_users + train.num_items) * dim * (dim + 1) * 20 + 40 * len(train))


def _initialize(train: Ratings, dim: int, seed: int) -> tuple[Posterior, float]:
    """Return small random rows, and the minimum variance of the noise."""
    generator = np.random.default_rng(seed)
    mean = float(np.mean(train.values, dtype=np.float64))
    std = max(float(np.std(train.values, dtype=np.float64)), 1e-6 * max(abs(mean), 1.0))
    prior = np.full(dim, 0.1 * std)
    prior[0] *= std
    i, j = np.tril_indices(dim)
    rows, covariances = [], []
    for count in (train.num_users, train.num_items):
        initial = generator.normal(0.0, 0.1 * np.sqrt(std), (count, dim))
        initial[:, 0] = 0.0
        rows.append(initial)
        covariances.append(np.where(i == j, 0.1 * prior[i], 0.0) + np.zeros((count, 1)))
    sides = (rows[0], rows[1], covariances[0], covariances[1])
    return Posterior(mean, *sides, std**2, prior, prior), 1e-6 * std**2


def _round(
    now: Posterior, sides: tuple[RowRatings, RowRatings], min_noise: float, update_priors: bool
) -> Posterior:
    """Compute the rows of users, then of items, then move the columns and update the priors."""
    users, user_covariances, _ = solve_side(
        sides[0].subtract(now.mean), now.items, now.item_covariances, now.user_prior, now.noise
    )
    items, item_covariances, error = solve_side(
        sides[1].subtract(now.mean), users, user_covariances, now.item_prior, now.noise
    )
    now = replace(
        now,
        users=users,
        items=items,
        user_covariances=user_covariances,
        item_covariances=item_covariances,
        noise=max(error / len(sides[0].values), min_noise),
    )
    if not update_priors:
        return now
    now = balance(now, np.ones(len(users)), np.ones(len(items)))
    now.users[sides[0].counts == 0] = 0.0
    now.items[sides[1].counts == 0] = 0.0
    return now


def solve_side(
    side: RowRatings, others: Doubles, covariances: Doubles, prior: Doubles, noise: float
) -> tuple[Doubles, Doubles, float]:  # -> [V, d], [V, T]
    """Return means and covariances of one side given the other, and the expected squared error."""
    from featherbed.kernels.bayes import solve_rows

    rows = len(side.counts)
    means, found = np.empty((rows, others.shape[1])), np.empty((rows, covariances.shape[1]))
    moments = feature_moments(others, covariances)
    arrays = (side.starts, side.others, side.values, others, *moments, 1.0 / prior, noise)
    error = side.sum_over_rows(lambda first, last: solve_rows(*arrays, first, last, means, found))
    return means, found, error


def balance(
    posterior: Posterior, user_weights: NDArray[Any], item_weights: NDArray[Any]
) -> Posterior:  # [Vu], [Vi]
    """Shift, rotate and scale the columns: means 0, second moments diagonal, equal and falling.

    Predictions do not change. Weights are those of the rows in the moments, such as counts.

    >>> rows = np.random.default_rng(0).normal(size=(50, 3))
    >>> sides = rows, rows[:40] @ np.diag([1, 2, 3]), np.zeros((50, 6)), np.zeros((40, 6))
    >>> before, ids = Posterior(0.0, *sides, 1.0, *np.ones((2, 3))), np.arange(40)
    >>> after = balance(before, np.ones(50), np.ones(40))
    >>> np.allclose(after.predict(ids, ids), before.predict(ids, ids))
    True
    """
    dim = posterior.users.shape[1]
    users = (posterior.users, posterior.user_covariances)
    items = (posterior.items, posterior.item_covariances)
    users, items, first = _center(users, items, user_weights)
    items, users, second = _center(items, users, item_weights)
    if dim > 1:
        a = _regularize(_second_moment(*users, user_weights)[1:, 1:])
        b = _regularize(_second_moment(*items, item_weights)[1:, 1:])
        lower = np.linalg.cholesky(a)
        values, vectors = np.linalg.eigh(lower.T @ b @ lower)
        forward, inverse = np.eye(dim), np.eye(dim)
        forward[1:, 1:] = np.linalg.solve(lower.T, vectors[:, ::-1] * values[::-1] ** 0.25)
        inverse[1:, 1:] = np.linalg.inv(forward[1:, 1:]).T
        users, items = _transform(*users, forward), _transform(*items, inverse)
    user_prior, item_prior = (
        np.diag(_second_moment(*side, np.ones(len(side[0])))).copy() for side in (users, items)
    )
    mean = posterior.mean + first + second
    rows = (users[0], items[0], users[1], items[1])
    return Posterior(mean, *rows, posterior.noise, user_prior, item_prior)


def _center(side: Moments, other: Moments, weights: NDArray[Any]) -> tuple[Moments, Moments, float]:
    """Subtract the mean row of a side; its effect moves to the other side's biases and the mean."""
    center = weights @ side[0] / weights.sum()
    matrix = np.eye(len(center))
    matrix[1:, 0] = center[1:]
    return (side[0] - center, side[1]), _transform(*other, matrix), float(center[0])


def _second_moment(
    rows: Doubles, covariances: Doubles, weights: NDArray[Any]
) -> Doubles:  # -> [d, d]
    """Return the weighted mean of E[x x']."""
    i, j = np.tril_indices(rows.shape[1])
    total: Doubles = (rows.T * weights) @ rows
    total[i, j] += weights @ covariances
    total[j, i] = total[i, j]
    mean: Doubles = total / weights.sum()
    return mean


def _regularize(matrix: Doubles) -> Doubles:
    """Keep a matrix of moments away from singular, for columns that no row uses."""
    regular: Doubles = matrix + (1e-9 * np.trace(matrix) + 1e-30) * np.eye(len(matrix))
    return regular


def _transform(rows: Doubles, covariances: Doubles, matrix: Doubles) -> Moments:
    """Return the moments of x M for rows x."""
    dim = len(matrix)
    i, j = np.tril_indices(dim)
    out = np.empty_like(covariances)
    for start in range(0, len(rows), BLOCK):
        part = slice(start, start + BLOCK)
        full = np.empty((len(covariances[part]), dim, dim))
        full[:, i, j] = full[:, j, i] = covariances[part]
        out[part] = (matrix.T @ full @ matrix)[:, i, j]
    return rows @ matrix, out
