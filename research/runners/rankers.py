"""Yardsticks for rankings: BPR with dropout, and SQL-Rank, which is listwise.

SQL-Rank (Wu, Hsieh and Sharpnack 2018) draws a list for each user in every epoch, the user's items
in random order and then items drawn at random from the others, and maximizes its Plackett-Luce
likelihood: with scores s_1 ... s_n of a list whose first m items are the user's,

    loss = -Σ_{j <= m} (s_j - log Σ_{l >= j} exp s_l).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.apps.recommender.ranking import (
    BprFactors,
    Interactions,
    ranking_metrics,
    sample_negatives,
)
from featherbed.kernels.compiled import compiled
from featherbed.progress import show_progress

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Epoch = Callable[[Floats, Floats, float, np.random.Generator], float]  # rows, columns, lr, rng


@compiled
def dropout_pass(
    rows: Floats,  # [Vu, d]
    columns: Floats,  # [Vi, d]
    users: Ids,
    positives: Ids,
    negatives: Ids,
    lr: float,
    decay: float,
    drop: float,
    rng: Any,
) -> float:
    """Take a BPR step for each triple with coordinates dropped from all three rows; return the loss."""
    dim, keep = rows.shape[1], 1.0 - drop
    kept = np.ones((3, dim), np.float32)
    total = 0.0
    for n in range(len(users)):
        u, i, j = users[n], positives[n], negatives[n]
        score = 0.0
        for k in range(dim):
            for side in range(3):
                kept[side, k] = 1.0 / keep if rng.random() < keep else 0.0
            difference = columns[i, k] * kept[1, k] - columns[j, k] * kept[2, k]
            score += rows[u, k] * kept[0, k] * difference
        total += np.log1p(np.exp(-score)) if score > -30 else -score
        step = 1.0 / (1.0 + np.exp(score))
        for k in range(dim):
            own, liked, other = rows[u, k], columns[i, k], columns[j, k]
            difference = liked * kept[1, k] - other * kept[2, k]
            rows[u, k] += lr * (step * kept[0, k] * difference - decay * own)
            columns[i, k] += lr * (step * own * kept[0, k] * kept[1, k] - decay * liked)
            columns[j, k] += lr * (-step * own * kept[0, k] * kept[2, k] - decay * other)
    return total / max(1, len(users))


@compiled
def listwise_pass(
    rows: Floats,  # [Vu, d]
    columns: Floats,  # [Vi, d]
    order: Ids,
    starts: Ids,
    lists: Ids,  # items of all lists, one after the other
    liked: Ids,  # [Vu], how many of the first items are the user's
    lr: float,
    decay: float,
) -> float:
    """Take a step for the list of each user in ``order``; return the mean loss of an item."""
    dim, total, count = rows.shape[1], 0.0, 0
    for u in order:
        items = lists[starts[u] : starts[u + 1]]
        size, first = len(items), liked[u]
        if first == 0:
            continue
        scores = np.zeros(size)
        for at in range(size):
            for k in range(dim):
                scores[at] += rows[u, k] * columns[items[at], k]
        weights = np.exp(scores - scores.max())
        tails = np.zeros(size + 1)
        for at in range(size - 1, -1, -1):
            tails[at] = tails[at + 1] + weights[at]
        passed, slope = 0.0, np.zeros(size)
        for at in range(size):
            if at < first:
                passed += 1.0 / tails[at]
                total -= np.log(weights[at] / tails[at])
                slope[at] = -1.0
            slope[at] += weights[at] * passed
        count += first
        own = rows[u].copy()
        for k in range(dim):
            rows[u, k] -= lr * decay * own[k]
        for at in range(size):
            item = items[at]
            for k in range(dim):
                rows[u, k] -= lr * slope[at] * columns[item, k]
                columns[item, k] -= lr * (slope[at] * own[k] + decay * columns[item, k])
    return total / max(1, count)


def dropout_epochs(train: Interactions, negatives: int, decay: float, drop: float) -> Epoch:
    """Return an epoch of BPR with dropout."""
    users, positives = np.repeat(train.users, negatives), np.repeat(train.items, negatives)

    def epoch(rows: Floats, columns: Floats, lr: float, rng: np.random.Generator) -> float:
        order = rng.permutation(len(users))
        drawn = sample_negatives(train, users[order], rng)
        triple = users[order], positives[order], drawn
        return float(dropout_pass(rows, columns, *triple, lr, decay, drop, rng))

    return epoch


def listwise_epochs(train: Interactions, negatives: int, decay: float) -> Epoch:
    """Return an epoch of SQL-Rank with ``negatives`` other items for each item of a user."""
    counts = np.diff(train.starts)
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts * (1 + negatives), out=starts[1:])
    others = np.repeat(np.arange(len(counts)), counts * negatives)

    def epoch(rows: Floats, columns: Floats, lr: float, rng: np.random.Generator) -> float:
        lists = np.empty(starts[-1], dtype=np.int64)
        own = np.repeat(starts[:-1] - train.starts[:-1], counts) + np.arange(len(train))
        shuffled = np.lexsort((rng.random(len(train)), train.users))
        lists[own] = train.items[shuffled]
        places = np.ones(len(lists), dtype=bool)
        places[own] = False
        lists[places] = sample_negatives(train, others, rng)
        order = rng.permutation(len(counts))
        return float(listwise_pass(rows, columns, order, starts, lists, counts, lr, decay))

    return epoch


def train_ranker(
    train: Interactions,
    validation: Interactions,
    how: str,
    *,
    dim: int,
    epochs: int,
    lr: float,
    lr_decay: float,
    weight_decay: float,
    negatives: int,
    patience: int,
    seed: int,
    drop: float = 0.0,
    progress: bool = True,
    name: str = "ranking",
) -> BprFactors:
    """Fit plain rows by ``how``, sql-rank or dropout; keep the epoch of the best NDCG@10.

    >>> rng = np.random.default_rng(0)
    >>> train = Interactions.of(rng.integers(20, size=200), rng.integers(30, size=200), 20, 30)
    >>> settings = {"dim": 4, "epochs": 2, "lr": 0.1, "lr_decay": 0.9, "weight_decay": 0.01}
    >>> settings |= {"negatives": 2, "patience": 2, "seed": 0, "progress": False}
    >>> train_ranker(train, train, "sql-rank", **settings).items.shape
    (30, 4)
    """
    rng = np.random.default_rng(seed)
    shapes = (train.num_users, dim), (train.num_items, dim)
    rows, columns = (rng.uniform(-0.01, 0.01, shape).astype(np.float32) for shape in shapes)
    one_epoch = (
        listwise_epochs(train, negatives, weight_decay)
        if how == "sql-rank"
        else dropout_epochs(train, negatives, weight_decay, drop)
    )
    history: list[dict[str, float]] = []
    best = (-1.0, 0, rows.copy(), columns.copy())
    with show_progress(name, epochs, shown=progress) as shown:
        for epoch in range(epochs):
            loss = one_epoch(rows, columns, lr * lr_decay**epoch, rng)
            metrics = ranking_metrics(rows, columns, train, validation)
            history.append({"epoch": epoch, "loss": loss, **metrics})
            shown.update(advance=1, note=f"NDCG@10 {metrics['ndcg@10']:.4f}")
            if metrics["ndcg@10"] > best[0]:
                best = (metrics["ndcg@10"], epoch, rows.copy(), columns.copy())
            elif epoch - best[1] >= patience:
                break
    return BprFactors(best[2], best[3], best[1], history)
