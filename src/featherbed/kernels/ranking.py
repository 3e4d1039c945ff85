"""Bayesian personalized ranking, one pair of items at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.kernels.compiled import compiled, fast

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
TRIES = 100  # draws of a negative that is not among the user's items


@compiled
def _contains(item: int, known: Any) -> bool:
    """Return whether an item is in a sorted list."""
    low, high = 0, len(known)
    while low < high:
        middle = (low + high) // 2
        if known[middle] < item:
            low = middle + 1
        else:
            high = middle
    return low < len(known) and known[low] == item


@compiled
def draw_negatives(users: Ids, starts: Ids, known: Ids, items: int, rng: Any, out: Ids) -> None:
    """Draw an item for every user, uniformly among those outside the user's sorted list."""
    for n in range(len(users)):
        mine = known[starts[users[n]] : starts[users[n] + 1]]
        drawn = int(rng.integers(0, items))
        for _ in range(TRIES):
            if not _contains(drawn, mine):
                break
            drawn = int(rng.integers(0, items))
        out[n] = drawn


@fast
def ranking_pass(
    rows: Floats, columns: Floats, users: Ids, liked: Ids, others: Ids, lr: float, decay: float
) -> Any:
    """Update by each (user, liked, other) in turn; return the mean of -ln σ(x_liked - x_other)."""
    dim = rows.shape[1]
    total: Any = 0.0
    rate, shrink = np.float32(lr), np.float32(lr * decay)
    for n in range(len(users)):
        u, i, j = rows[users[n]], columns[liked[n]], columns[others[n]]
        ahead = np.float32(0)
        for k in range(dim):
            ahead += u[k] * (i[k] - j[k])
        total += np.log1p(np.exp(-ahead)) if ahead > -30 else -ahead
        push = rate / (np.float32(1) + np.exp(ahead))
        for k in range(dim):
            a, b, c = u[k], i[k], j[k]
            u[k] = a + push * (b - c) - shrink * a
            i[k] = b + push * a - shrink * b
            j[k] = c - push * a - shrink * c
    return total / max(1, len(users))
