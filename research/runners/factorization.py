"""Matrix factorisation one rating at a time (with dropout, with shared ids), and by least squares with a graph.

Wu et al. 2019 (stochastic shared embeddings) train by plain stochastic gradient descent, one rating a step; their yardstick is
alternating least squares with a graph Laplacian. The steps are compiled; numbers come from the seed alone.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featherbed.io.records import Ratings
from featherbed.kernels.compiled import compiled
from featherbed.sharing import share

MODELS = {
    "plain": (False, False),
    "mean": (True, False),
    "biases": (True, True),
}  # whether it has a mean, biases
Floats = NDArray[np.float32]
Parts = Sequence[Ratings]  # train, validation, test
After = Callable[[int, float], None]  # told the epoch and its validation error


@compiled
def sgd_epoch(
    rows: Floats,  # [Vu, d]
    columns: Floats,  # [Vi, d]
    bias_rows: Floats,
    bias_columns: Floats,
    mean: Any,
    users: Any,
    items: Any,
    values: Any,
    order: Any,
    lr: float,
    decay: float,
    biases: bool,
    drop: float,
    rng: Any,
) -> None:
    """Take a step for each rating in ``order``, in place; ``drop`` is the share of coordinates dropped from either side."""
    dim, keep = rows.shape[1], 1.0 - drop
    kept_u, kept_v = np.ones(dim, np.float32), np.ones(dim, np.float32)
    for n in order:
        u, v = users[n], items[n]
        if drop > 0:
            for k in range(dim):
                kept_u[k] = 1.0 / keep if rng.random() < keep else 0.0
                kept_v[k] = 1.0 / keep if rng.random() < keep else 0.0
        error = values[n] - mean
        if biases:
            error -= bias_rows[u] + bias_columns[v]
        for k in range(dim):
            error -= rows[u, k] * kept_u[k] * columns[v, k] * kept_v[k]
        for k in range(dim):
            a, b = rows[u, k], columns[v, k]
            both = kept_u[k] * kept_v[k]
            rows[u, k] += lr * (error * b * both - decay * a)
            columns[v, k] += lr * (error * a * both - decay * b)
        if biases:
            bias_rows[u] += lr * (error - decay * bias_rows[u])
            bias_columns[v] += lr * (error - decay * bias_columns[v])


def als_side(
    own: Floats,  # [V, d]
    other: Floats,
    ratings: Any,  # scipy.sparse CSR [V, others]
    decay: float,
    pull: NDArray[np.float64],  # [V]
    near: NDArray[Any],  # [V, d]
) -> None:
    """Solve for every row of one side while the other stands, in place; ``pull`` draws a row to ``near``."""
    starts, members, values = ratings.indptr, ratings.indices, ratings.data
    eye, wide = np.eye(own.shape[1]), other.astype(np.float64)
    for i in range(len(own)):
        rated = slice(starts[i], starts[i + 1])
        rows = wide[members[rated]]
        gram = rows.T @ rows + (decay + pull[i]) * eye
        own[i] = np.linalg.solve(gram, values[rated] @ rows + pull[i] * near[i])


def laplacian_side(
    own: Floats,  # [V, d]
    other: Floats,
    ratings: Any,  # scipy.sparse CSR [V, others]
    decay: float,
    pull: float,
    graph: Any,
) -> None:
    """Solve for one row of a side after another under pull tr(U'LU), L = D - A, in place.

    A row is set to the exact minimum while all others stand, so the objective never rises:
    (Σ v v' + (decay + pull deg_i) I) u_i = Σ r v + pull Σ_{j ~ i} u_j.
    """
    starts, members, values = ratings.indptr, ratings.indices, ratings.data
    eye, wide = np.eye(own.shape[1]), other.astype(np.float64)
    for i in range(len(own)):
        rated = slice(starts[i], starts[i + 1])
        rows = wide[members[rated]]
        near = () if graph is None else graph.indices[graph.indptr[i] : graph.indptr[i + 1]]
        gram = rows.T @ rows + (decay + pull * len(near)) * eye
        target = values[rated] @ rows
        if len(near):
            target = target + pull * own[near].sum(0, dtype=np.float64)
        own[i] = np.linalg.solve(gram, target)


class Factors:
    """Rows of users and items (columns), their biases and the mean; rows start normal with spread 1/sqrt(d).

    >>> from featherbed.io.records import make_ratings
    >>> ratings = make_ratings(40, 30, 500)
    >>> Factors(ratings, 4, "biases", seed=0).rmse(ratings) > 1
    True
    """

    def __init__(self, data: Ratings, dim: int, model: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        spread = 1 / math.sqrt(dim)
        self.rows = rng.normal(0, spread, (data.num_users, dim)).astype(np.float32)
        self.columns = rng.normal(0, spread, (data.num_items, dim)).astype(np.float32)
        self.has_mean, self.has_biases = MODELS[model]
        self.bias_rows, self.bias_columns = (
            np.zeros(data.num_users, np.float32),
            np.zeros(data.num_items, np.float32),
        )
        self.mean = np.float32(0)

    def copy(self) -> Factors:
        """Return the same factors in arrays of their own."""
        return copy.deepcopy(self)

    def rmse(self, part: Ratings) -> float:
        """Return the root of the mean squared error."""
        found = np.einsum("nd,nd->n", self.rows[part.users], self.columns[part.items]) + self.mean
        found += self.bias_rows[part.users] + self.bias_columns[part.items]
        return float(np.sqrt(np.mean((part.values - found) ** 2)))

    def descend(
        self, train: Ratings, ids: Sequence[Any], lr: float, decay: float, drop: float, rng: Any
    ) -> None:
        """Pass over all ratings once, with ``ids`` for users and items, in an order drawn from ``rng``."""
        sides = self.rows, self.columns, self.bias_rows, self.bias_columns, self.mean
        order = rng.permutation(len(train))
        users, items = ids
        sgd_epoch(*sides, users, items, train.values, order, lr, decay, self.has_biases, drop, rng)


def shared_ids(
    train: Ratings,
    p: float,
    graphs: Sequence[Any],
    rho: Sequence[float],
    generator: torch.Generator,
) -> tuple[NDArray[np.int64], ...]:
    """Return the users and items of ratings, each replaced with probability ``p`` (SSE-SE; with a graph, SSE-Graph)."""
    ids = torch.from_numpy(train.users), torch.from_numpy(train.items)
    if p:
        settings = zip(ids, (train.num_users, train.num_items), graphs, rho, strict=True)
        ids = tuple(share(i, n, p, graph=g, rho=r, generator=generator) for i, n, g, r in settings)  # type: ignore[assignment]
    return tuple(i.numpy() for i in ids)


class Best:
    """The factors at the epoch of the lowest validation error; only they are measured on the test part, at the end."""

    def __init__(self, factors: Factors, parts: Parts, patience: int, after: After | None) -> None:
        self.factors, self.parts, self.patience, self.after = factors, parts, patience, after
        self.error, self.epoch, self.kept = math.inf, 0, factors.copy()
        self.seconds: list[float] = []
        self.begun = time.perf_counter()

    def begin(self) -> None:
        """Start the clock of an epoch."""
        self.begun = time.perf_counter()

    def ended(self, epoch: int) -> bool:
        """Measure an epoch; return whether it is time to stop."""
        self.seconds.append(time.perf_counter() - self.begun)
        error = self.factors.rmse(self.parts[1])
        if self.after is not None:
            self.after(epoch, error)
        if error < self.error:
            self.error, self.epoch, self.kept = error, epoch, self.factors.copy()
        return not math.isfinite(error) or epoch - self.epoch >= self.patience

    def result(self) -> dict[str, float]:
        """Return the errors, the epoch and the seconds an epoch took."""
        train, validation, test = (self.kept.rmse(part) for part in self.parts)
        errors = {"validation": validation, "test": test, "train": train}
        return errors | {"epoch": self.epoch, "seconds": float(np.median(self.seconds))}


def train_sgd(
    data: Ratings,
    parts: Parts,
    *,
    model: str,
    dim: int,
    seed: int,
    lr: float,
    decay: float,
    drop: float = 0.0,
    p: float = 0.0,
    rho: Sequence[float] = (1.0, 1.0),
    graphs: Sequence[Any] = (None, None),
    epochs: int,
    patience: int,
    after: After | None = None,
) -> dict[str, float]:
    """Return the errors at the epoch with the lowest validation error, that epoch and the seconds an epoch took."""
    train = parts[0]
    factors = Factors(data, dim, model, seed)
    factors.mean = np.float32(train.values.mean()) if factors.has_mean else np.float32(0)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    best = Best(factors, parts, patience, after)
    for epoch in range(epochs):
        best.begin()
        factors.descend(train, shared_ids(train, p, graphs, rho, generator), lr, decay, drop, rng)
        if best.ended(epoch):
            break
    return best.result()


def train_als(
    data: Ratings,
    parts: Parts,
    *,
    model: str,
    dim: int,
    seed: int,
    decay: float,
    pull: float = 0.0,
    laplacian: bool = False,
    graphs: Sequence[Any],
    epochs: int,
    patience: int,
    after: After | None = None,
) -> dict[str, float]:
    """Minimise squared errors + decay |U|² + pull Σ |u_i - mean of its neighbors|², and the same for items, side by side.

    ``laplacian``: with pull tr(U'LU) in place of the distance to the mean of the last sweep.
    """
    from scipy.sparse import csr_array

    train = parts[0]
    factors = Factors(data, dim, model, seed)
    factors.mean = np.float32(train.values.mean()) if factors.has_mean else np.float32(0)
    left = _without_biases(factors, train)
    shape = data.num_users, data.num_items
    by_user = csr_array((left.astype(np.float32), (train.users, train.items)), shape=shape)
    by_item = by_user.T.tocsr()
    means = [_neighbours(graph, count, pull) for graph, count in zip(graphs, shape, strict=True)]
    edges = [None if graph is None else graph.matrix.tocsr() for graph in graphs]
    best = Best(factors, parts, patience, after)
    for epoch in range(epochs):
        best.begin()
        for own, other, matrix, (mean, pulls), near in (
            (factors.rows, factors.columns, by_user, means[0], edges[0]),
            (factors.columns, factors.rows, by_item, means[1], edges[1]),
        ):
            if laplacian:
                laplacian_side(own, other, matrix, decay, pull, near)
            else:
                als_side(own, other, matrix, decay, pulls, mean @ own)
        if best.ended(epoch):
            break
    return best.result()


def _without_biases(factors: Factors, train: Ratings) -> NDArray[Any]:
    """Return ratings less the mean and less biases, which are shrunken means and then held."""
    left: NDArray[Any] = train.values - factors.mean
    if factors.has_biases:
        for bias, ids in ((factors.bias_columns, train.items), (factors.bias_rows, train.users)):
            sums, counts = np.bincount(ids, left, len(bias)), np.bincount(ids, minlength=len(bias))
            bias[:] = sums / (counts + 10)
            left = left - bias[ids]
    return left


def _neighbours(graph: Any, count: int, pull: float) -> tuple[Any, NDArray[np.float64]]:
    """Return the matrix that takes the mean of each row's neighbors, and how hard each row is pulled there."""
    from scipy.sparse import csr_array, diags_array

    degrees = np.zeros(count) if graph is None else graph.degrees.astype(float)
    matrix = csr_array((count, count)) if graph is None else graph.matrix.astype(float)
    pulls: NDArray[np.float64] = np.where(degrees > 0, pull, 0.0)
    return diags_array(1 / np.maximum(degrees, 1)) @ matrix, pulls
