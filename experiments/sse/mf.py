"""Matrix factorisation by stochastic gradient descent, one rating at a time, and by alternating least squares with a graph."""

import math
import time

import numpy as np
import torch
from numba import njit

import featherbed as fb

MODELS = {"plain": (False, False), "mean": (True, False), "biases": (True, True)}


@njit(cache=True)
def sgd_epoch(rows, columns, bias_rows, bias_columns, mean, users, items, values, order, lr, decay, biases, drop, rng):
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


class Factors:
    def __init__(self, data, dim, model, seed):
        rng = np.random.default_rng(seed)
        spread = 1 / math.sqrt(dim)
        self.rows = rng.normal(0, spread, (data.num_users, dim)).astype(np.float32)
        self.columns = rng.normal(0, spread, (data.num_items, dim)).astype(np.float32)
        self.has_mean, self.has_biases = MODELS[model]
        self.bias_rows, self.bias_columns = np.zeros(data.num_users, np.float32), np.zeros(data.num_items, np.float32)
        self.mean = np.float32(0)

    def rmse(self, part):
        found = np.einsum("nd,nd->n", self.rows[part.users], self.columns[part.items]) + self.mean
        found += self.bias_rows[part.users] + self.bias_columns[part.items]
        return float(np.sqrt(np.mean((part.values - found) ** 2)))


def train_sgd(
    data, parts, *, model, dim, seed, lr, decay, drop=0.0, p=0.0, rho=(1.0, 1.0), graphs=(None, None), epochs, patience
):
    """Return the errors at the epoch with the lowest validation error, that epoch and the seconds an epoch took."""
    train, validation, test = parts
    factors = Factors(data, dim, model, seed)
    factors.mean = np.float32(train.values.mean()) if factors.has_mean else np.float32(0)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    ids = torch.from_numpy(train.users), torch.from_numpy(train.items)
    counts = data.num_users, data.num_items
    best, seconds = {"validation": math.inf}, []
    for epoch in range(epochs):
        begun = time.perf_counter()
        shared = ids
        if p:
            settings = zip(ids, counts, graphs, rho, strict=True)
            shared = [fb.share(i, n, p, graph=g, rho=r, generator=generator) for i, n, g, r in settings]
        users, items = (i.numpy() for i in shared)
        sides = factors.rows, factors.columns, factors.bias_rows, factors.bias_columns, factors.mean
        order = rng.permutation(len(train))
        sgd_epoch(*sides, users, items, train.values, order, lr, decay, factors.has_biases, drop, rng)
        seconds.append(time.perf_counter() - begun)
        error = factors.rmse(validation)
        if not math.isfinite(error):
            break
        if error < best["validation"]:
            best = {"validation": error, "test": factors.rmse(test), "train": factors.rmse(train), "epoch": epoch}
        elif epoch - best["epoch"] >= patience:
            break
    return best | {"seconds": float(np.median(seconds))}


@njit(cache=True)
def als_side(own, other, starts, members, values, decay, pull, near):
    dim = own.shape[1]
    for i in range(len(own)):
        gram = (decay + pull[i]) * np.eye(dim)
        right = pull[i] * near[i].astype(np.float64)
        for n in range(starts[i], starts[i + 1]):
            row = other[members[n]].astype(np.float64)
            gram += np.outer(row, row)
            right += values[n] * row
        own[i] = np.linalg.solve(gram, right).astype(np.float32)


def train_als(data, parts, *, model, dim, seed, decay, pull, graphs, epochs, patience):
    """Minimise squared errors + decay |U|² + pull Σ |u_i - mean of its neighbours|², and the same for items, side by side."""
    from scipy.sparse import csr_array, diags_array

    train, validation, test = parts
    factors = Factors(data, dim, model, seed)
    factors.mean = np.float32(train.values.mean()) if factors.has_mean else np.float32(0)
    left = train.values - factors.mean
    if factors.has_biases:  # biases by shrunken means, then held
        for bias, ids in ((factors.bias_columns, train.items), (factors.bias_rows, train.users)):
            sums, counts = np.bincount(ids, left, len(bias)), np.bincount(ids, minlength=len(bias))
            bias[:] = sums / (counts + 10)
            left = left - bias[ids]
    shape = data.num_users, data.num_items
    by_user = csr_array((left.astype(np.float32), (train.users, train.items)), shape=shape)
    by_item = by_user.T.tocsr()
    means = []
    for graph, count in zip(graphs, shape, strict=True):
        degrees = np.zeros(count) if graph is None else graph.degrees.astype(float)
        matrix = csr_array((count, count)) if graph is None else graph.matrix.astype(float)
        means.append((diags_array(1 / np.maximum(degrees, 1)) @ matrix, pull * (degrees > 0)))
    best, seconds = {"validation": math.inf}, []
    for epoch in range(epochs):
        begun = time.perf_counter()
        for own, other, matrix, (mean, pulls) in (
            (factors.rows, factors.columns, by_user, means[0]),
            (factors.columns, factors.rows, by_item, means[1]),
        ):
            als_side(own, other, matrix.indptr, matrix.indices, matrix.data, decay, pulls, mean @ own)
        seconds.append(time.perf_counter() - begun)
        error = factors.rmse(validation)
        if error < best["validation"]:
            best = {"validation": error, "test": factors.rmse(test), "train": factors.rmse(train), "epoch": epoch}
        elif epoch - best["epoch"] >= patience:
            break
    return best | {"seconds": float(np.median(seconds))}
