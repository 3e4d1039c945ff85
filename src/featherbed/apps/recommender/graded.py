"""Graded rows within a byte budget: a Bayesian fit of all rows, then bits where they reduce the
error.

Matrix factorization by variational Bayes, in closed form, gives means and covariances of all rows.
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

Rows are then sorted by popularity and divided into grades; grade g of a side stores column k with
b_g[k] bits. Let S_k be the second moment of a side's column k over ratings and Ŝ_k the part that
remains after rounding, Ŝ_k = Σ_g S_gk (1 - left(b_gk)). The squared error of predictions grows by

    Σ_{k>=1} (S_k S'_k - Ŝ_k Ŝ'_k) + (S_0 - Ŝ_0) + (S'_0 - Ŝ'_0)

(primes for the other side; bias columns stand alone). A column's weight on one side is its
remaining second moment on the other.

The baseline of every recommender is mean + bias of the user + bias of the item,

    b_u = Σ (r(u, i) - mean - b_i) / (n_u + shrinkage_u),   b_i alike

alternating (Koren 2008, "Factorization meets the neighborhood", section 2.1). The two shrinkages
are chosen on the validation ratings: with fixed ones the baseline is weak on sparse data, and a
model looks better than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.codecs import LEFT, allocate_bits
from featherbed.errors import ArgumentError
from featherbed.io.records import Ratings, block_slices, count_ids
from featherbed.kernels import choose_levels, solve_rows, thread_count
from featherbed.packed import Band, Every, Graded, PackedTable, file_size, graded_scales, to_levels

Doubles = NDArray[np.float64]
Moments = tuple[Doubles, Doubles]  # means [V, d], covariances [V, T]
MAX_BYTES = 6 << 30  # memory of the fit: a million rows of width 16
PIECES = 16  # pieces of rows, independent of the number of threads: sums are reproducible
COVARIANCES = 4096  # rows whose full covariances are in memory at once
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
        if thread_count() == 1:
            return sum(job(*piece) for piece in pieces)
        with ThreadPoolExecutor(thread_count()) as pool:
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
    for start in range(0, len(rows), COVARIANCES):
        part = slice(start, start + COVARIANCES)
        full = np.empty((len(covariances[part]), dim, dim))
        full[:, i, j] = full[:, j, i] = covariances[part]
        out[part] = (matrix.T @ full @ matrix)[:, i, j]
    return rows @ matrix, out


Bits = NDArray[np.uint8]
Counts = NDArray[np.integer]
Progress = Callable[[str, float], bool | None]  # true: no further round
GRADES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)  # numbers of grades tried
EXPONENT = 0.3  # grades have equal sums of count^0.3
CLOSE = 1e-4  # of the noise variance: of plans this close in error the smallest is used
TURNS = 12  # alternating allocations of bits
MIN_GAIN = 1e-6  # of the noise variance: a bit that reduces the error by less is not spent
INNER_SWEEPS = 8  # over the columns of a row
LEVEL_PATIENCE = 2  # sweeps without a lower validation error
MIN_SCALE, MAX_SCALE = 1e-4, 5e4  # scales that float16 holds with full precision


@dataclass(frozen=True)
class GradedRows:
    """The rows of one side: integer levels, and bits and scales by grade and column.

    >>> bits, levels = np.array([[2, 1], [1, 0]], np.uint8), np.array([[3, 0], [1, 0]], np.uint8)
    >>> GradedRows([1, 1], bits, np.ones((2, 2)), levels).dense().tolist()
    [[1.5, -0.5], [0.5, 0.0]]
    """

    rows: list[int]  # [G], number of rows of each grade
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
        scales = np.where(self.bits > 0, self.scales, 0.0)[self.grades]
        out: Doubles = scales * (self.levels - top[self.grades] / 2)
        return out

    def pack(self) -> PackedTable:
        """Return the packed table."""
        graded = Graded.encode(self.levels, self.bits, self.rows, self.scales, self.scale_kind)
        return PackedTable([Band(len(self.levels), Every(), values=graded)], self.bits.shape[1])

    @classmethod
    def round(cls, matrix: Doubles, bits: Bits, rows: list[int]) -> GradedRows:
        """Round rows [V, d] to the nearest levels, with the scales of the lowest error."""
        half, floats = fits_float16(matrix), matrix.astype(np.float32)
        scales = _to_storable(graded_scales(floats, bits, rows).astype(np.float64), half)
        levels = np.zeros(matrix.shape, np.uint8)
        for g, (start, stop) in enumerate(pairwise(np.cumsum([0, *rows]))):
            for k in np.flatnonzero(bits[g]):
                scale = scales[g, k : k + 1].astype(np.float32)
                levels[start:stop, k] = to_levels(floats[start:stop, k], scale, int(bits[g, k]))
        return cls(rows, bits, scales, levels, "float16" if half else "float32")

    @classmethod
    def zeros(cls, bits: Bits, rows: list[int], half: bool) -> GradedRows:
        """Return rows of level 0, to measure their size."""
        levels = np.zeros((sum(rows), bits.shape[1]), np.uint8)
        return cls(rows, bits, np.ones(bits.shape), levels, "float16" if half else "float32")


def fits_float16(matrix: Doubles) -> bool:
    """Whether float16 can hold the scales; biases scale with ratings, factors with their root."""
    largest_bias, largest = np.abs(matrix[:, 0]).max(), np.abs(matrix).max()
    return bool(largest_bias > 100 * MIN_SCALE and largest < MAX_SCALE)


def _to_storable(scales: Doubles, half: bool) -> Doubles:
    """Return scales as the file will hold them."""
    clipped = np.clip(scales, MIN_SCALE, MAX_SCALE) if half else scales
    return clipped.astype(np.float16 if half else np.float32).astype(np.float64)


def grade_sizes(counts: Counts, grades: int) -> list[int]:  # [V] -> [G]
    """Divide rows, the most popular first, into at most ``grades`` grades of increasing size.

    >>> grade_sizes(np.array([100, 50, 20, 5, 2, 1, 1, 0]), 3)
    [1, 2, 5]
    """
    weight = np.cumsum((counts + 1.0) ** EXPONENT)
    cuts = np.searchsorted(weight, weight[-1] * np.arange(1, grades) / grades)
    return [int(n) for n in np.diff(np.unique([0, *cuts, len(counts)]))]


def grade_moments(
    rows: Doubles, counts: Counts, sizes: Sequence[int]
) -> Doubles:  # [V, d], [V] -> [G, d]
    """Return the part of each grade in the second moments of a side over ratings."""
    share = counts[:, None] / max(1, counts.sum())
    sums: Doubles = np.add.reduceat(np.square(rows) * share, np.cumsum([0, *sizes[:-1]]), axis=0)
    return sums


def allocate_sides(
    moments: tuple[Doubles, Doubles],  # [Gu, d], [Gi, d]: parts of the second moments
    sizes: tuple[list[int], list[int]],  # [Gu], [Gi]
    budget: int,
    *,
    scale_bits: int = 16,
    min_gain: float = 0.0,
) -> tuple[tuple[Bits, Bits], float]:
    """Spend ``budget`` bits on grades and columns of both sides; return bits and added error.

    Alternating reverse water-filling: bits by falling gain per bit, given the second moments that
    remain on the other side. The first bit of a column adds a scale of ``scale_bits``; bits that
    reduce the error by less than ``min_gain`` are not spent.

    >>> sides = (np.array([[1.0, 0.5, 0.1]]), np.array([[1.0, 0.5, 0.1]]))
    >>> bits, error = allocate_sides(sides, ([10], [20]), 120, scale_bits=0)
    >>> [side.tolist() for side in bits]
    [[[3, 1, 0]], [[3, 1, 0]]]
    """
    total = [side.sum(axis=0) for side in moments]
    remaining, lowest = total, np.inf
    best = (np.zeros(moments[0].shape, np.uint8), np.zeros(moments[1].shape, np.uint8))
    cut = moments[0].size
    lengths = np.concatenate(
        [np.repeat(size, side.shape[1]) for size, side in zip(sizes, moments, strict=True)]
    )
    for _ in range(TURNS):
        weights = [np.concatenate([[1.0], other[1:]]) for other in remaining[::-1]]
        costs = np.concatenate([(moments[s] * weights[s]).reshape(-1) for s in (0, 1)])
        flat = allocate_bits(costs, lengths, budget, scale_bits=scale_bits, enough=min_gain)
        bits = (flat[:cut].reshape(moments[0].shape), flat[cut:].reshape(moments[1].shape))
        kept = [(moments[s] * (1 - LEFT[bits[s]])).sum(axis=0) for s in (0, 1)]
        error = float(
            (total[0] * total[1] - kept[0] * kept[1])[1:].sum()
            + sum(total[s][0] - kept[s][0] for s in (0, 1))
        )
        if error < lowest:
            best, lowest = bits, error
        remaining = [(old + new) / 2 for old, new in zip(remaining, kept, strict=True)]
    return best, lowest


def fit_levels(
    train: Ratings,
    posterior: Posterior,
    users: GradedRows,
    items: GradedRows,
    *,
    validation: Ratings | None = None,
    sweeps: int = 10,
    progress: Progress | None = None,
) -> tuple[GradedRows, GradedRows, list[float]]:
    """Fit levels and scales to the ratings; return both sides and the error after each sweep.

    Alternating over users and items: the levels of each row by coordinate descent on the expected
    squared error given the other side (whose stored columns have the covariances of the posterior)
    and its prior; then the scales of each grade by least squares. With ``validation`` the sweep of
    the lowest error is returned, the start included, otherwise the last. ``posterior`` is the one
    that was rounded.

    >>> from featherbed.io.records import make_ratings
    >>> ratings = make_ratings(200, 100, 5000, groups=3, dim=3)
    >>> posterior, bits = fit_posterior(ratings, 4, iterations=8), np.full((1, 4), 2)
    >>> sides = (GradedRows.round(x, bits, [len(x)]) for x in (posterior.users, posterior.items))
    >>> errors = fit_levels(ratings, posterior, *sides, validation=ratings)[2]
    >>> min(errors) < errors[0]
    True
    """
    measured = train if validation is None or len(validation) == 0 else validation
    ratings = [side.subtract(posterior.mean) for side in group_ratings(train)]
    covariances = [
        _stored_covariances(posterior.user_covariances, users),
        _stored_covariances(posterior.item_covariances, items),
    ]
    priors = (posterior.user_prior, posterior.item_prior)
    ridges = [posterior.noise / np.maximum(prior, 1e-30) for prior in priors]
    sides, best, errors = [users, items], (users, items), list[float]()
    for sweep in range(sweeps + 1):
        for s in (0, 1) if sweep else ():
            other = sides[1 - s].dense()
            moments = feature_moments(other, covariances[1 - s])
            sides[s] = _sweep(ratings[s], sides[s], other, moments, ridges[s])
        errors.append(squared_error(posterior.mean, sides[0].dense(), sides[1].dense(), measured))
        stopped = progress is not None and progress("levels", errors[-1])
        if measured is train or errors[-1] < min(errors[:-1], default=np.inf):
            best = (sides[0], sides[1])
        waited = len(errors) - 1 - int(np.argmin(errors))
        if stopped or (measured is not train and waited >= LEVEL_PATIENCE):
            break
    return *best, errors


def _stored_covariances(covariances: Doubles, side: GradedRows) -> Doubles:  # [V, T]
    """Return the covariances of columns with bits; the others are 0 with certainty."""
    i, j = np.tril_indices(side.bits.shape[1])
    return np.where(((side.bits[:, i] > 0) & (side.bits[:, j] > 0))[side.grades], covariances, 0.0)


def _sweep(
    ratings: RowRatings,
    side: GradedRows,
    other: Doubles,
    moments: tuple[Doubles, Doubles],
    ridge: Doubles,
) -> GradedRows:
    """Fit all levels of one side, then its scales."""
    levels, bits, grades = side.levels.copy(), side.bits.astype(np.int64), side.grades
    shape, sums = (*side.bits.shape, side.bits.shape[1]), dict[int, tuple[Doubles, Doubles]]()
    given = (ratings.starts, ratings.others, ratings.values, other, *moments, ridge)
    own = (bits, side.scales, grades, INNER_SWEEPS)

    def job(first: int, last: int) -> float:
        sums[first] = np.zeros(shape), np.zeros(shape[:2])
        choose_levels(*given, *own, first, last, levels, *sums[first])
        return 0.0

    ratings.sum_over_rows(job)
    systems, rights = (
        np.sum([sums[first][part] for first in sorted(sums)], axis=0) for part in (0, 1)
    )
    scales = side.scales.copy()
    for g in range(len(side.rows)):
        used = np.flatnonzero(side.bits[g])
        if len(used):
            system = systems[g][np.ix_(used, used)]
            ridge_ = (1e-6 * np.trace(system) / len(used) + 1e-30) * np.eye(len(used))
            found = np.linalg.solve(system + ridge_, rights[g][used])
            scales[g, used] = np.where(found > 0.3 * scales[g, used], found, scales[g, used])
    return replace(side, levels=levels, scales=_to_storable(scales, side.scale_kind == "float16"))


def round_posterior(
    posterior: Posterior, counts: tuple[Counts, Counts], budget: int
) -> tuple[GradedRows, GradedRows, float]:
    """Round both sides to at most ``budget`` bytes of files, with the best number of grades.

    Returns both sides and the expected error.

    >>> rows, covariances = np.random.default_rng(0).normal(size=(40, 3)), np.zeros((40, 6))
    >>> priors = np.ones(3), np.ones(3)
    >>> posterior = Posterior(0.0, rows, rows, covariances, covariances, 1.0, *priors)
    >>> users, items, error = round_posterior(posterior, (np.arange(40, 0, -1),) * 2, 1000)
    >>> error < 1, file_size(users.pack()) + file_size(items.pack()) <= 1000
    (True, True)
    """
    matrices = (posterior.users, posterior.items)
    _check_budget(budget, len(counts[0]), len(counts[1]), matrices[0].shape[1])
    plans = [
        plan
        for grades in GRADES
        if (plan := _plan(matrices, counts, budget, grades, MIN_GAIN * posterior.noise))
    ]
    highest = min(plan.error for plan in plans) + CLOSE * posterior.noise
    plan = min((plan for plan in plans if plan.error <= highest), key=lambda plan: plan.size)
    users, items = (
        GradedRows.round(*side) for side in zip(matrices, plan.bits, plan.sizes, strict=True)
    )
    return users, items, plan.error


def _check_budget(budget: int, users: int, items: int, dim: int) -> None:
    no_bits = np.zeros((1, dim), np.uint8)
    least = file_bytes([GradedRows.zeros(no_bits, [rows], True) for rows in (users, items)])
    if budget < least:
        raise ArgumentError(
            f"budget={budget:,}: the headers of the two files alone take {least:,} bytes, "
            "give more than that"
        )


@dataclass(frozen=True)
class _Plan:
    size: int  # bytes of both files
    error: float  # expected
    bits: tuple[Bits, Bits]
    sizes: tuple[list[int], list[int]]


def _plan(
    matrices: tuple[Doubles, Doubles],
    counts: tuple[Counts, Counts],
    budget: int,
    grades: int,
    min_gain: float,
) -> _Plan | None:
    """Return the best bits with a number of grades, None if their headers alone do not fit."""
    sizes = (grade_sizes(counts[0], grades), grade_sizes(counts[1], grades))
    moments = (
        grade_moments(matrices[0], counts[0], sizes[0]),
        grade_moments(matrices[1], counts[1], sizes[1]),
    )
    half = [fits_float16(matrix) for matrix in matrices]

    def size_of(bits: Sequence[Bits]) -> int:
        return file_bytes([GradedRows.zeros(*side) for side in zip(bits, sizes, half, strict=True)])

    room = 8 * (budget - size_of([np.zeros_like(side, np.uint8) for side in moments]))
    scale_bits = 16 if all(half) else 32
    while room >= 0:
        bits, error = allocate_sides(moments, sizes, room, scale_bits=scale_bits, min_gain=min_gain)
        size = size_of(bits)
        if size <= budget:
            return _Plan(size, error, bits, sizes)
        room = max(0, room - 8 * (size - budget)) if room else -1
    return None


def file_bytes(sides: Sequence[GradedRows]) -> int:
    """Return the bytes of the files of both sides, without keys."""
    return sum(file_size(side.pack()) for side in sides)


def fit_graded(
    train: Ratings,
    validation: Ratings,
    *,
    dim: int = 16,
    budget: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[PackedTable, PackedTable, float, dict[str, Any]]:
    """Fit the tables of users and items within ``budget`` bytes of files, without keys.

    Returns both tables, the mean, and details of the fit. Biases are in the first column:
    score = mean + U_0 + V_0 + Σ_{k>=1} U_k V_k. Ids must be in falling order of training counts.
    ``progress`` is called with "rows" or "levels" and the validation error after each round.

    >>> from featherbed.apps.recommender.data import make_split, sort_by_frequency
    >>> from featherbed.io.records import make_ratings
    >>> split = sort_by_frequency(make_split(make_ratings(200, 100, 5000, groups=3, dim=3)))
    >>> users, items, mean, details = fit_graded(split.train, split.validation, dim=4, budget=1500)
    >>> details["bytes"] <= 1500, details["validation"] < 0.3
    (True, True)
    """
    counts = count_ids(train.users, train.num_users), count_ids(train.items, train.num_items)
    if any(bool((np.diff(side) > 0).any()) for side in counts):
        raise ArgumentError(
            "ids are not in falling order of training counts: renumber them by sort_by_frequency"
        )
    _check_budget(budget, train.num_users, train.num_items, dim)
    held_out = validation if len(validation) else None
    posterior = fit_posterior(train, dim, validation=held_out, seed=seed, progress=progress)
    users, items, expected = round_posterior(posterior, counts, budget)
    users, items, errors = fit_levels(
        train, posterior, users, items, validation=held_out, progress=progress
    )
    details = {
        "bytes": file_bytes([users, items]),
        "dense": None if held_out is None else posterior.error(held_out),
        "expected": expected,
        "errors": errors,
        "validation": None if held_out is None else min(errors),
    }
    return users.pack(), items.pack(), posterior.mean, details


BIAS_BLOCK = 1 << 22  # ratings processed at once
SEARCHED = 4_000_000  # maximum number of ratings for the search, those of every n-th user
GRID = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # shrinkages of both sides
FACTORS = (0.25, 0.5, 2.0, 4.0)  # of one side's shrinkage, tried after the grid
DEFAULT_SHRINKAGE = 5.0  # shrinkage without validation ratings
SEARCH_SWEEPS, SWEEPS = 4, 20
TOLERANCE = 1e-4  # of the ratings' standard deviation: sweeps end when no bias changes by more

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
            for here, values in _value_blocks(ratings)
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
        return fit_biases(train, (DEFAULT_SHRINKAGE, DEFAULT_SHRINKAGE))
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
            for here, values in _value_blocks(train):
                residual = values - mean - biases[1 - side][ids[1 - side][here]]
                total += np.bincount(ids[side][here], residual, minlength=sizes[side])
            new = total / weights[side]
            change = max(change, float(np.abs(new - biases[side]).max()))
            biases[side] = new
        if change <= tolerance:
            break
    return Biases(mean, biases[0], biases[1], shrinkage)


def _value_blocks(ratings: Ratings) -> Iterator[tuple[slice, Doubles]]:
    """Yield slices of the ratings and their values."""
    for block in block_slices(len(ratings), BIAS_BLOCK):
        yield block, np.asarray(ratings.values[block], dtype=np.float64)
