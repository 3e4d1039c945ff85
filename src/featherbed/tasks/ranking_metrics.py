"""How well a ranking of all items finds those a user chose: full rankings, never samples of items.

Krichene and Rendle (2020) show that metrics against a few sampled items can order methods wrongly; here every item that the
user did not choose in training is ranked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError

Ids = NDArray[np.int64]
BLOCK = 256  # users scored at once


@dataclass(frozen=True)
class Chosen:
    """The items each user chose, as rising lists one after the other.

    >>> chosen = Chosen.of(np.array([1, 0, 1]), np.array([2, 0, 1]), num_users=2, num_items=3)
    >>> chosen[1].tolist(), len(chosen)
    ([1, 2], 3)
    """

    starts: Ids  # [users + 1]
    items: Ids
    num_items: int

    @classmethod
    def of(
        cls, users: NDArray[np.integer], items: NDArray[np.integer], num_users: int, num_items: int
    ) -> Chosen:
        """Gather (user, item) pairs; a pair that stands twice counts once."""
        pairs = np.unique(users.astype(np.int64) * num_items + items)
        starts = np.zeros(num_users + 1, dtype=np.int64)
        np.cumsum(np.bincount(pairs // num_items, minlength=num_users), out=starts[1:])
        return cls(starts, pairs % num_items, num_items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, user: int) -> Ids:
        return self.items[self.starts[user] : self.starts[user + 1]]

    def joined(self, other: Chosen) -> Chosen:
        """Return what users chose here or there."""
        users, items = (
            np.concatenate([self.users, other.users]),
            np.concatenate([self.items, other.items]),
        )
        return Chosen.of(users, items, self.num_users, self.num_items)

    @property
    def num_users(self) -> int:
        """How many users there are."""
        return len(self.starts) - 1

    @property
    def users(self) -> Ids:
        """The user of each item of the lists."""
        return np.repeat(np.arange(self.num_users), np.diff(self.starts))


def ranking_metrics(
    rows: NDArray[np.floating], columns: NDArray[np.floating], train: Chosen, held_out: Chosen
) -> dict[str, float]:
    """Return NDCG@10, recall@10 and precision at 1, 5 and 10 of the scores rows . columns, over all items not in ``train``.

        NDCG@k = Σ_{r <= k} hit_r / log2(r + 1)  over its greatest value;   recall@k = hits in k / min(k, chosen)

    ``rows`` are [users, d], ``columns`` [items, d]. Users who chose nothing held out do not count.

    >>> chosen = lambda item: Chosen.of(np.array([0]), np.array([item]), 1, 3)
    >>> ranking_metrics(np.ones((1, 1)), np.array([[3.0], [2.0], [1.0]]), chosen(0), chosen(1))["p@1"]
    1.0
    """
    if rows.shape[0] != train.num_users or columns.shape[0] != train.num_items:
        raise ArgumentError(
            f"rows {rows.shape} and columns {columns.shape} do not fit {train.num_users} users and {train.num_items} items"
        )
    counted = np.flatnonzero(np.diff(held_out.starts))
    if not len(counted):
        raise ArgumentError(
            "no user chose anything in the part that is held out: there is nothing to measure"
        )
    most = min(10, train.num_items)
    discounts = 1 / np.log2(np.arange(2, 12))
    sums = np.zeros(5)
    for begin in range(0, len(counted), BLOCK):
        users = counted[begin : begin + BLOCK]
        hits = _hits(_best(rows[users] @ columns.T, users, train, most), users, held_out)
        chosen = np.diff(held_out.starts)[users]
        ideal = np.cumsum(discounts)[np.minimum(chosen, 10) - 1]
        sums += [
            (hits @ discounts[:most] / ideal).sum(),
            (hits.sum(1) / np.minimum(chosen, 10)).sum(),
            *((hits[:, :k].sum(1) / k).sum() for k in (1, 5, 10)),
        ]
    return dict(
        zip(
            ("ndcg@10", "recall@10", "p@1", "p@5", "p@10"),
            (sums / len(counted)).tolist(),
            strict=True,
        )
    )


def _best(
    scores: NDArray[np.floating], users: Ids, train: Chosen, most: int
) -> Ids:  # [B, items] -> [B, most]
    """Return the best items of each row that the user did not choose in training, best first."""
    for row, user in zip(scores, users, strict=True):
        row[train[user]] = -np.inf
    best = np.argpartition(-scores, most - 1, axis=1)[:, :most]
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best, order, axis=1)


def _hits(
    best: Ids, users: Ids, held_out: Chosen
) -> NDArray[np.float64]:  # [B, most] -> [B, most] of 0 and 1
    keys = held_out.users * held_out.num_items + held_out.items  # rising
    asked = users[:, None] * held_out.num_items + best
    place = np.searchsorted(keys, asked).clip(max=len(keys) - 1)
    hits: NDArray[np.float64] = (keys[place] == asked).astype(np.float64)
    return hits
