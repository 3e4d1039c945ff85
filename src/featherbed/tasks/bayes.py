"""Matrix factorisation in closed form: variational Bayes, which says what each row is and how sure that is.

Rows that few ratings tell about stay near the prior's mean instead of fitting them, without a penalty to be tuned:

    r(u, i) ~ N(mean + U[u]_0 + V[i]_0 + Σ_{k>=1} U[u]_k V[i]_k, noise),   U[u]_k ~ N(0, a_k),  V[i]_k ~ N(0, b_k)

(Lim and Teh 2007, "Variational Bayesian approach to movie rating prediction"). The posterior is taken as a product of normal
distributions of rows; each is found in turn from the others' means and covariances, variances of priors and noise from all.
Between rounds the columns are shifted, turned and scaled to where the priors fit best, without which they creep there over
hundreds of rounds (Luttinen and Ilin 2010, "Transformations in variational Bayesian factor analysis").
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
from featherbed.kernels.pool import threads
from featherbed.tasks.data import Ratings

Doubles = NDArray[np.float64]
MOST_BYTES = 6 << 30  # that fitting may take: a million rows of width 16
PIECES = 16  # rows are shared out in so many pieces, however many threads there are: sums come out the same
BLOCK = 4096  # rows whose covariances are held in full at once
PATIENCE = 2  # rounds without a lower validation error


@dataclass(frozen=True)
class Posterior:
    """Means of rows, their covariances (lower triangles, row by row), and the variances the model has learnt.

    >>> rows, sure = np.array([[0.5, 1.0]]), np.zeros((1, 3))
    >>> Posterior(3.0, rows, rows, sure, sure, 0.5, np.ones(2), np.ones(2)).predict(np.array([0]), np.array([0]))
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
        return predicted(self.mean, self.users, self.items, users, items)

    def error(self, ratings: Ratings) -> float:
        """Return the mean squared error of the expected ratings."""
        return squared_error(self.mean, self.users, self.items, ratings)


def predicted(
    mean: float,
    left: NDArray[Any],
    right: NDArray[Any],
    users: NDArray[np.integer],
    items: NDArray[np.integer],
) -> Doubles:  # [Vu, d], [Vi, d], [B], [B] -> [B]
    """Return mean + U_0 + V_0 + Σ_{k>=1} U_k V_k of pairs.

    >>> predicted(1.0, np.ones((1, 3)), np.ones((1, 3)), np.array([0]), np.array([0]))
    array([5.])
    """
    out = np.empty(len(users))
    for start in range(0, len(users), 1 << 16):
        part = slice(start, start + (1 << 16))
        x, y = left[users[part]], right[items[part]]
        out[part] = mean + x[:, 0] + y[:, 0] + np.einsum("nk,nk->n", x[:, 1:], y[:, 1:])
    return out


def squared_error(mean: float, left: NDArray[Any], right: NDArray[Any], ratings: Ratings) -> float:
    """Return the mean squared error of rows whose first column is the bias."""
    if len(ratings) == 0:
        raise ArgumentError("there are no ratings to measure the error on")
    return float(
        np.mean(
            np.square(predicted(mean, left, right, ratings.users, ratings.items) - ratings.values)
        )
    )


@dataclass(frozen=True)
class Meetings:
    """The ratings of one side, row by row."""

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
    ) -> Meetings:
        """Sort ratings by row, within a row by the other side: neighbours in memory are met one after the other."""
        order = np.lexsort((others, rows))
        starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))]).astype(
            np.int64
        )
        return cls(starts, others[order].astype(np.int32), values[order].astype(np.float64))

    @property
    def counts(self) -> NDArray[np.int64]:
        """Ratings of each row."""
        return np.diff(self.starts)

    def less(self, mean: float) -> Meetings:
        """Take the mean off."""
        return replace(self, values=self.values - mean)

    def share_out(self, job: Callable[[int, int], float]) -> float:
        """Call job(first, last) on stretches of about as many ratings each, in threads; return the sum of what they return."""
        load = self.starts + np.arange(len(self.starts))
        cuts = np.searchsorted(load, np.linspace(0, load[-1], PIECES + 1))
        pieces = [(int(a), int(b)) for a, b in pairwise(np.unique(cuts)) if b > a]
        if threads() == 1:
            return sum(job(*piece) for piece in pieces)
        with ThreadPoolExecutor(threads()) as pool:
            return sum(pool.map(lambda piece: job(*piece), pieces))


def both_sides(train: Ratings) -> tuple[Meetings, Meetings]:
    """Return the ratings by user and by item.

    >>> ratings = Ratings(np.array([1, 0]), np.array([0, 0]), np.array([4.0, 3.0], np.float32), ("a", "b"), ("film",))
    >>> [side.values.tolist() for side in both_sides(ratings)]
    [[3.0, 4.0], [3.0, 4.0]]
    """
    users = Meetings.of(train.users, train.items, train.values, train.num_users)
    return users, Meetings.of(train.items, train.users, train.values, train.num_items)


def moments(
    rows: Doubles, covariances: Doubles
) -> tuple[Doubles, Doubles]:  # [V, d], [V, T] -> [V, T], [V, d]
    """Return E[f f'] (lower triangles) and E[f y_0] of rows y, where f is y with a 1 in the place of the bias."""
    i, j = np.tril_indices(rows.shape[1])
    features = rows.copy()
    features[:, 0] = 1.0
    second = features[:, i]
    second *= features[:, j]
    second[:, j > 0] += covariances[:, j > 0]
    cross = features * rows[:, :1] + covariances[:, j == 0]
    cross[:, 0] = rows[:, 0] ** 2 + covariances[:, 0]
    return second, cross


def variational(
    train: Ratings,
    dim: int = 16,
    *,
    iterations: int = 15,
    validation: Ratings | None = None,
    seed: int = 0,
    progress: Callable[[str, float], bool | None] | None = None,
) -> Posterior:
    """Fit the model; with ``validation``, stop when its error no longer falls and return the round where it was least.

    ``progress`` is called after each round with "rows" and the error (of validation where given, else the noise's variance);
    where it returns true, that round is the last.
    Rows without a rating get the prior's mean, 0 (rounded to levels, the one nearest to it).

    >>> from featherbed.tasks.data import planted_ratings
    >>> ratings = planted_ratings(200, 100, 5000, groups=3, dim=3)
    >>> variational(ratings, 4, iterations=8).error(ratings) < 0.25
    True
    """
    _check(train, dim, iterations)
    sides = both_sides(train)
    now, floor = _start(train, dim, seed)
    best, least, waited = now, np.inf, 0
    for number in range(iterations):
        now = _round(now, sides, floor, learn=number > 0)
        error = now.noise if validation is None else now.error(validation)
        stopped = progress is not None and progress("rows", error)
        if validation is None or error < least:
            best, least, waited = now, error, 0
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
    rows, need = train.num_users + train.num_items, needed_bytes(train, dim)
    if need > MOST_BYTES:
        raise ArgumentError(
            f"{rows:,} rows of width {dim} and {len(train):,} ratings need {need / 1e9:.1f} GB to be fitted, "
            f"{MOST_BYTES / 1e9:.1f} at most: take a smaller dim, or train plain rows (--users dense --items dense)"
        )


def needed_bytes(train: Ratings, dim: int) -> int:
    """Return about how many bytes fitting takes: 2.5 times the covariances of all rows, and 40 bytes a rating (measured)."""
    return int((train.num_users + train.num_items) * dim * (dim + 1) * 20 + 40 * len(train))


def _start(train: Ratings, dim: int, seed: int) -> tuple[Posterior, float]:
    """Return small random rows, and the least variance the noise may have."""
    generator = np.random.default_rng(seed)
    mean = float(np.mean(train.values, dtype=np.float64))
    spread = max(float(np.std(train.values, dtype=np.float64)), 1e-6 * max(abs(mean), 1.0))
    prior = np.full(dim, 0.1 * spread)
    prior[0] *= spread
    i, j = np.tril_indices(dim)
    rows, sure = [], []
    for count in (train.num_users, train.num_items):
        fresh = generator.normal(0.0, 0.1 * np.sqrt(spread), (count, dim))
        fresh[:, 0] = 0.0
        rows.append(fresh)
        sure.append(np.where(i == j, 0.1 * prior[i], 0.0) + np.zeros((count, 1)))
    return Posterior(
        mean, rows[0], rows[1], sure[0], sure[1], spread**2, prior, prior
    ), 1e-6 * spread**2


def _round(
    now: Posterior, sides: tuple[Meetings, Meetings], floor: float, learn: bool
) -> Posterior:
    """Find users' rows, then items'; then (not yet in the first round) move the columns and learn the priors."""
    users, user_covariances, _ = solved(
        sides[0].less(now.mean), now.items, now.item_covariances, now.user_prior, now.noise
    )
    items, item_covariances, error = solved(
        sides[1].less(now.mean), users, user_covariances, now.item_prior, now.noise
    )
    noise = max(error / len(sides[0].values), floor)
    now = Posterior(
        now.mean,
        users,
        items,
        user_covariances,
        item_covariances,
        noise,
        now.user_prior,
        now.item_prior,
    )
    if not learn:
        return now
    now = balanced(now, np.ones(len(users)), np.ones(len(items)))
    now.users[sides[0].counts == 0] = 0.0
    now.items[sides[1].counts == 0] = 0.0
    return now


def solved(
    side: Meetings, others: Doubles, covariances: Doubles, prior: Doubles, noise: float
) -> tuple[Doubles, Doubles, float]:  # -> [V, d], [V, T]
    """Return one side's means and covariances given the other side's, and the expected squared error, added up."""
    from featherbed.kernels.bayes import solve_rows

    known = moments(others, covariances)
    means, found = (
        np.empty((len(side.counts), others.shape[1])),
        np.empty((len(side.counts), covariances.shape[1])),
    )
    arrays = (side.starts, side.others, side.values, others, *known, 1.0 / prior, noise)
    error = side.share_out(lambda first, last: solve_rows(*arrays, first, last, means, found))
    return means, found, error


def balanced(
    posterior: Posterior, user_weights: NDArray[Any], item_weights: NDArray[Any]
) -> Posterior:  # [Vu], [Vi]
    """Shift, turn and scale the columns so that both sides' second moments are diagonal, equal and falling, means 0.

    Predictions stay as they are. Weights are those of rows in the moments: how often each is used, for instance.

    >>> rows = np.random.default_rng(0).normal(size=(50, 3))
    >>> made = Posterior(0.0, rows, rows[:40] @ np.diag([1, 2, 3]), np.zeros((50, 6)), np.zeros((40, 6)), 1.0, *np.ones((2, 3)))
    >>> turned = balanced(made, np.ones(50), np.ones(40))
    >>> np.allclose(turned.predict(np.arange(40), np.arange(40)), made.predict(np.arange(40), np.arange(40)))
    True
    """
    dim = posterior.users.shape[1]
    users, items = (
        (posterior.users, posterior.user_covariances),
        (posterior.items, posterior.item_covariances),
    )
    users, items, first = _centred(users, items, user_weights)
    items, users, second = _centred(items, users, item_weights)
    if dim > 1:
        a, b = (
            _second(*side, weights)[1:, 1:]
            for side, weights in ((users, user_weights), (items, item_weights))
        )
        lower = np.linalg.cholesky(_firm(a))
        values, vectors = np.linalg.eigh(lower.T @ _firm(b) @ lower)
        turn, back = np.eye(dim), np.eye(dim)
        turn[1:, 1:] = np.linalg.solve(lower.T, vectors[:, ::-1] * values[::-1] ** 0.25)
        back[1:, 1:] = np.linalg.inv(turn[1:, 1:]).T
        users, items = _mapped(*users, turn), _mapped(*items, back)
    priors = (np.diag(_second(*side, np.ones(len(side[0])))).copy() for side in (users, items))
    return Posterior(
        posterior.mean + first + second,
        users[0],
        items[0],
        users[1],
        items[1],
        posterior.noise,
        *priors,
    )


Side = tuple[Doubles, Doubles]  # means [V, d], covariances [V, T]


def _centred(side: Side, other: Side, weights: NDArray[Any]) -> tuple[Side, Side, float]:
    """Take the mean row off one side; what it gave to predictions goes to the other side's biases and to the mean."""
    middle = weights @ side[0] / weights.sum()
    into = np.eye(len(middle))
    into[1:, 0] = middle[1:]
    return (side[0] - middle, side[1]), _mapped(*other, into), float(middle[0])


def _second(rows: Doubles, covariances: Doubles, weights: NDArray[Any]) -> Doubles:  # -> [d, d]
    """Return the weighted mean of E[x x']."""
    i, j = np.tril_indices(rows.shape[1])
    total: Doubles = (rows.T * weights) @ rows
    total[i, j] += weights @ covariances
    total[j, i] = total[i, j]
    mean: Doubles = total / weights.sum()
    return mean


def _firm(matrix: Doubles) -> Doubles:
    """Keep a matrix of moments away from singular: columns nobody uses stay."""
    firm: Doubles = matrix + (1e-9 * np.trace(matrix) + 1e-30) * np.eye(len(matrix))
    return firm


def _mapped(rows: Doubles, covariances: Doubles, matrix: Doubles) -> Side:
    """Return what becomes of rows x under x -> x M."""
    dim = len(matrix)
    i, j = np.tril_indices(dim)
    out = np.empty_like(covariances)
    for start in range(0, len(rows), BLOCK):
        part = slice(start, start + BLOCK)
        whole = np.empty((len(covariances[part]), dim, dim))
        whole[:, i, j] = whole[:, j, i] = covariances[part]
        out[part] = (matrix.T @ whole @ matrix)[:, i, j]
    return rows @ matrix, out
