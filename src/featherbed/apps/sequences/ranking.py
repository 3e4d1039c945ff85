"""Metrics of leave-one-out evaluation: on full rankings, and against 100 sampled items.

    NDCG@10 = mean of 1 / log2(rank + 2) where rank < 10, else 0;  Hit@10 = mean of [rank < 10]

rank counts, from 0, the items scored above the held-out one. Krichene and Rendle (2020) show that
metrics against a few sampled items can order models wrongly; papers on SASRec print them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from featherbed.apps.sequences.data import Ids, Sequences, Task, pad

TOP = 10
NEGATIVES = 100
BLOCK = 64  # users scored at once
Scores = NDArray[np.floating]
Scorer = Callable[[Ids, Ids, Ids], Scores]  # items [B, n], lengths [B], users [B] -> [B, V]


def rank_targets(
    score: Scorer,
    sequences: Sequences,
    task: Task,
    length: int,
    *,
    repeats: bool = False,
    seed: int = 0,
    after: Callable[[int], None] = lambda _: None,
) -> tuple[Ids, Ids]:  # -> [n], [n]
    """Return the ranks of held-out items among all items, and among 100 sampled ones and itself.

    Items of the history are left out of full rankings unless ``repeats``. Sampled items are none of
    the user's. Of equal scores the smaller id is ranked first. ``after`` is called with the number
    of users of every block.
    """
    lengths = np.minimum(task.ends, length)
    order = np.argsort(lengths, kind="stable")
    full, sampled = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    for start in range(0, len(order), BLOCK):
        block = order[start : start + BLOCK]
        users, ends = task.users[block], task.ends[block]
        histories = [sequences[u][:e] for u, e in zip(users.tolist(), ends.tolist(), strict=True)]
        ids, counts = pad([history[-length:] for history in histories])
        scores = np.array(score(ids, counts, users))
        for row, place in enumerate(block.tolist()):
            target = int(task.targets[place])
            negatives = draw_negatives(sequences, int(users[row]), (seed, int(users[row])))
            sampled[place] = rank_of(scores[row], target, negatives)
            if not repeats:
                value = scores[row, target]
                scores[row, histories[row]] = -np.inf
                scores[row, target] = value
            full[place] = rank_of(scores[row], target)
        after(len(block))
    return full, sampled


def rank_of(scores: Scores, target: int, among: Ids | None = None) -> int:  # [V], [m]
    """Return the rank of an item, from 0; of equal scores the smaller id is first.

    >>> rank_of(np.array([1.0, 3.0, 1.0, 2.0]), 2)
    3
    """
    others = scores if among is None else scores[among]
    ids = np.arange(len(scores)) if among is None else among
    value = scores[target]
    return int(np.count_nonzero((others > value) | ((others == value) & (ids < target))))


def draw_negatives(sequences: Sequences, user: int, seed: tuple[int, int]) -> Ids:  # -> [<= 100]
    """Return 100 different items without an event of the user, all if there are fewer."""
    own, count = np.unique(sequences[user]), len(sequences.counts)
    free = count - len(own)
    drawn = np.random.default_rng(seed).choice(free, min(NEGATIVES, free), replace=False)
    # the place among free items plus the number of own items before it
    found: Ids = drawn + np.searchsorted(own - np.arange(len(own)), drawn, side="right")
    return found


def metrics_of(full: Ids, sampled: Ids | None = None) -> dict[str, float]:  # [n], [n]
    """Return NDCG@10 and Hit@10 of ranks; those against sampled items say so in their names.

    >>> metrics_of(np.array([0, 20]))
    {'ndcg@10': 0.5, 'hit@10': 0.5}
    """
    found = {"ndcg@10": float(gains(full).mean()), "hit@10": float((full < TOP).mean())}
    if sampled is None:
        return found
    return found | {
        f"{name}_of_{NEGATIVES}_sampled": value for name, value in metrics_of(sampled).items()
    }


def gains(ranks: Ids) -> NDArray[np.float64]:  # [n] -> [n]
    """Return 1 / log2(rank + 2) of ranks below 10, else 0."""
    found: NDArray[np.float64] = np.where(ranks < TOP, 1 / np.log2(ranks + 2.0), 0.0)
    return found
