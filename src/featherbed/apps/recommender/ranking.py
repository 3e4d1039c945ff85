"""Ranking of items from implicit feedback by BPR, and metrics over full rankings.

Krichene and Rendle (2020) show that metrics against a few sampled items can order methods wrongly;
here every item that the user did not interact with in training is ranked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.errors import ArgumentError, DataError
from featherbed.io.records import Ratings
from featherbed.kernels import draw_negatives, ranking_pass
from featherbed.progress import show_progress
from featherbed.sharing import share
from featherbed.tables import Table

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
BLOCK = 256  # users scored at once
SCORED = 1 << 24  # scores in memory at once


class BPR(nn.Module):
    """Bayesian personalized ranking loss, -ln σ(U[u] . V[i] - U[u] . V[j]) (Rendle et al. 2009).

    Wrap a table in ``fb.SSE`` to share its rows; then give the bare one for the negative items,
    which were drawn for the original user: ``BPR(fb.SSE(users, 0.1), fb.SSE(items, 0.01),
    negatives=items)``.

    >>> import featherbed as fb
    >>> loss = BPR(fb.DenseTable(10, 4), fb.DenseTable(20, 4))
    >>> loss(torch.tensor([1]), torch.tensor([2]), torch.tensor([3])).shape
    torch.Size([])
    """

    def __init__(
        self, users: nn.Module, items: nn.Module, *, negatives: Table | None = None
    ) -> None:
        super().__init__()
        self.users, self.items = users, items
        self.negatives = items if negatives is None else negatives

    def forward(
        self, users: Tensor, positives: Tensor, negatives: Tensor
    ) -> Tensor:  # int64 [B] each -> []
        """Return the mean loss."""
        difference = self.items(positives) - self.negatives(negatives)
        return -F.logsigmoid((self.users(users) * difference).sum(-1)).mean()


@dataclass(frozen=True)
class Interactions:
    """The items of each user, as ascending lists one after the other.

    >>> users, items = np.array([1, 0, 1]), np.array([2, 0, 1])
    >>> interactions = Interactions.of(users, items, num_users=2, num_items=3)
    >>> interactions[1].tolist(), len(interactions)
    ([1, 2], 3)
    """

    starts: Ids  # [users + 1]
    items: Ids
    num_items: int

    @classmethod
    def of(
        cls, users: NDArray[np.integer], items: NDArray[np.integer], num_users: int, num_items: int
    ) -> Interactions:
        """Collect (user, item) pairs; repeated pairs count once."""
        pairs = np.unique(users.astype(np.int64) * num_items + items)
        starts = np.zeros(num_users + 1, dtype=np.int64)
        np.cumsum(np.bincount(pairs // num_items, minlength=num_users), out=starts[1:])
        return cls(starts, pairs % num_items, num_items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, user: int) -> Ids:
        return self.items[self.starts[user] : self.starts[user + 1]]

    def union(self, other: Interactions) -> Interactions:
        """Return the pairs of both."""
        users = np.concatenate([self.users, other.users])
        items = np.concatenate([self.items, other.items])
        return Interactions.of(users, items, self.num_users, self.num_items)

    @property
    def num_users(self) -> int:
        """Number of users."""
        return len(self.starts) - 1

    @property
    def users(self) -> Ids:
        """The user of each pair."""
        return np.repeat(np.arange(self.num_users), np.diff(self.starts))


@dataclass(frozen=True)
class BprFactors:
    """Rows of users and items of the best epoch, and the metrics of every epoch."""

    users: Floats
    items: Floats
    epoch: int
    history: list[dict[str, float]]


def sample_negatives(train: Interactions, users: Ids, rng: np.random.Generator) -> Ids:
    """Draw an item without interaction for every user in ``users``."""
    out = np.empty(len(users), dtype=np.int64)
    draw_negatives(users, train.starts, train.items, train.num_items, rng, out)
    return out


def train_bpr(
    train: Interactions,
    validation: Interactions | None,
    *,
    dim: int = 100,
    epochs: int = 40,
    lr: float = 0.1,
    lr_decay: float = 0.9,
    weight_decay: float = 0.01,
    negatives: int = 3,
    p_users: float = 0.0,
    p_items: float = 0.0,
    patience: int = 10,
    seed: int = 0,
    progress: bool = True,
    name: str = "ranking",
) -> BprFactors:
    """Fit plain rows by BPR, one pair at a time; keep the epoch of the best validation NDCG@10.

    Without validation the last epoch is kept.

    Defaults are those of the code of Wu et al. (2019): the learning rate is multiplied by
    ``lr_decay`` every epoch, ``negatives`` items are drawn per interaction, rows start uniform in
    ±0.01. Users and positive items are shared with ``p_users`` and ``p_items`` (SSE-SE), negative
    items are not.

    >>> rng = np.random.default_rng(0)
    >>> train = Interactions.of(rng.integers(20, size=200), rng.integers(30, size=200), 20, 30)
    >>> train_bpr(train, train, dim=4, epochs=2, progress=False).items.shape
    (30, 4)
    """
    if not len(train):
        raise DataError("the training part holds no interaction: there is nothing to learn from")
    for setting, value in (("dim", dim), ("epochs", epochs), ("negatives", negatives)):
        if value < 1:
            raise ArgumentError(f"{setting}={value}: give a whole number of at least 1")
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    rows, columns = (
        rng.uniform(-0.01, 0.01, (n, dim)).astype(np.float32)
        for n in (train.num_users, train.num_items)
    )

    def shared(ids: Ids, count: int, p: float) -> Ids:
        return share(torch.from_numpy(ids), count, p, generator=generator).numpy() if p else ids

    users, positives = np.repeat(train.users, negatives), np.repeat(train.items, negatives)
    history: list[dict[str, float]] = []
    best = (-1.0, 0, rows.copy(), columns.copy())
    with show_progress(name, epochs, shown=progress) as shown:
        for epoch in range(epochs):
            order = rng.permutation(len(users))
            drawn = sample_negatives(train, users[order], rng)
            own = shared(users[order], train.num_users, p_users)
            liked = shared(positives[order], train.num_items, p_items)
            step = lr * lr_decay**epoch
            loss = ranking_pass(rows, columns, own, liked, drawn, step, weight_decay)
            metrics = {"ndcg@10": float(epoch)}
            if validation is not None:
                metrics = ranking_metrics(rows, columns, train, validation)
                shown.update(note=f"NDCG@10 {metrics['ndcg@10']:.4f}")
                history.append({"epoch": epoch, "loss": float(loss), **metrics})
            shown.update(advance=1)
            if metrics["ndcg@10"] > best[0]:
                best = (metrics["ndcg@10"], epoch, rows.copy(), columns.copy())
            elif epoch - best[1] >= patience:
                break
    return BprFactors(best[2], best[3], best[1], history)


def split_interactions(
    ratings: Ratings, *, train: int = 50, validation: int = 5, minimum: int = 60, seed: int = 0
) -> tuple[Interactions, Interactions, Interactions]:
    """Split rated pairs: ``train`` of each user, then ``validation``, the rest for test.

    Users with fewer than ``minimum`` ratings are left out and the others renumbered, as in the data
    of Wu et al. (2019): their file has 3,937 users of MovieLens-1M with 50 pairs each, this rule
    gives 3,938.
    """
    if train < 1 or validation < 1 or minimum <= train + validation:
        raise ArgumentError(
            f"train={train}, validation={validation}, minimum={minimum}: "
            "each user needs pairs in all three parts"
        )
    counts = np.bincount(ratings.users, minlength=ratings.num_users)
    kept = np.flatnonzero(counts >= minimum)
    if not len(kept):
        raise DataError(f"no user has {minimum} ratings or more")
    number = np.full(ratings.num_users, -1)
    number[kept] = np.arange(len(kept))
    order = np.random.default_rng(seed).permutation(len(ratings))
    order = order[np.argsort(ratings.users[order], kind="stable")]
    order = order[number[ratings.users[order]] >= 0]
    users, items = number[ratings.users[order]], ratings.items[order]
    first = np.concatenate([[0], np.cumsum(counts[kept])[:-1]])
    place = np.arange(len(order)) - first[users]
    in_train, in_test = place < train, place >= train + validation
    parts = (in_train, ~in_train & ~in_test, in_test)
    left, middle, right = (
        Interactions.of(users[part], items[part], len(kept), ratings.num_items) for part in parts
    )
    return left, middle, right


METRICS = ("ndcg@10", "recall@10", "p@1", "p@5", "p@10")
TOP = 10


def ranking_metrics(
    rows: NDArray[np.floating],
    columns: NDArray[np.floating],
    train: Interactions,
    held_out: Interactions,
    *,
    users: Ids | None = None,
) -> dict[str, float]:
    """Return NDCG@10, recall@10 and precision at 1, 5 and 10 over all items not in ``train``.

        NDCG@k = Σ_{r <= k} hit_r / log2(r + 1)  over its maximum
        recall@k = hits in k / min(k, held out)

    Scores are ``rows`` [users, d] times ``columns`` [items, d]; the smaller id breaks ties. Users
    without held-out items do not count. With ``users``, which have held-out items, the rows are
    those of these users alone.

    >>> one = lambda item: Interactions.of(np.array([0]), np.array([item]), 1, 3)
    >>> columns = np.array([[3.0], [2.0], [1.0]])
    >>> ranking_metrics(np.ones((1, 1)), columns, one(0), one(1))["p@1"]
    1.0
    """
    ranks, counts = held_out_ranks(rows, columns, train, held_out, users=users)
    return {name: float(values.mean()) for name, values in user_metrics(ranks, counts).items()}


def held_out_ranks(
    rows: NDArray[np.floating],
    columns: NDArray[np.floating],
    train: Interactions,
    held_out: Interactions,
    *,
    users: Ids | None = None,
) -> tuple[Ids, Ids]:
    """Return the rank from 0 of each held-out item, user by user, and their number by user.

    >>> train, held_out = (Interactions.of(np.array([0]), np.array([i]), 1, 3) for i in (0, 2))
    >>> held_out_ranks(np.ones((1, 1)), np.array([[3.0], [2.0], [2.0]]), train, held_out)
    (array([1]), array([1]))
    """
    expected = train.num_users if users is None else len(users)
    if rows.shape[0] != expected or columns.shape[0] != train.num_items:
        raise ArgumentError(
            f"rows {rows.shape} and columns {columns.shape} do not fit {expected} users and "
            f"{train.num_items} items"
        )
    counted = np.flatnonzero(np.diff(held_out.starts)) if users is None else users
    rows = rows[counted] if users is None else rows
    if not len(counted):
        raise ArgumentError("no user has a held-out item: there is nothing to measure")
    ranks, block = [], max(1, min(BLOCK, SCORED // train.num_items))
    for begin in range(0, len(counted), block):
        own = counted[begin : begin + block]
        part = rows[begin : begin + block] @ columns.T
        for scores, user in zip(part, own.tolist(), strict=True):
            scores[train[user]] = -np.inf
            ranks.append(_ranks(scores, held_out[user]))
    return np.concatenate(ranks), np.diff(held_out.starts)[counted]


def _ranks(scores: NDArray[np.floating], items: Ids) -> Ids:  # [items], [n] -> [n]
    """Return the number of items that come before each of ``items``."""
    found, step = np.empty(len(items), dtype=np.int64), max(1, SCORED // len(scores))
    for begin in range(0, len(items), step):
        part = items[begin : begin + step]
        own = scores[part][:, None]
        found[begin : begin + step] = (scores > own).sum(axis=1)
        tied = np.flatnonzero((scores >= own).sum(axis=1) - found[begin : begin + step] > 1)
        for place in tied.tolist():
            before = scores[: part[place]] == own[place]
            found[begin + place] += np.count_nonzero(before)
    return found


def user_metrics(ranks: Ids, counts: Ids) -> dict[str, NDArray[np.float64]]:  # [n], [users]
    """Return the metrics of each user from the ranks of held-out items.

    >>> user_metrics(np.array([0, 12]), np.array([2]))["p@10"].tolist()
    [0.1]
    """
    starts, sizes = np.cumsum(counts) - counts, np.minimum(counts, TOP)
    gains = np.where(ranks < TOP, 1 / np.log2(ranks + 2.0), 0.0)
    ideal = np.cumsum(1 / np.log2(np.arange(2, TOP + 2)))
    found = [np.add.reduceat(gains, starts) / ideal[sizes - 1]]
    hits = {k: np.add.reduceat((ranks < k).astype(np.float64), starts) for k in (1, 5, TOP)}
    found += [hits[TOP] / sizes, *(hits[k] / k for k in (1, 5, TOP))]
    return dict(zip(METRICS, found, strict=True))
