"""Ranking: which items a user will choose, learnt from what users chose (BPR), with shared embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.errors import ArgumentError, DataError
from featherbed.kernels.ranking import draw_negatives, ranking_pass
from featherbed.progress import show_progress
from featherbed.sharing.sse import share
from featherbed.tables import Table
from featherbed.tasks.data import Ratings
from featherbed.tasks.ranking_metrics import Chosen, ranking_metrics

Floats = NDArray[np.float32]


class BPR(nn.Module):
    """The loss of Bayesian personalised ranking, -ln σ(U[u] . V[i] - U[u] . V[j]), on any tables (Rendle et al. 2009).

    Wrap a table in ``fb.SSE`` to share its rows; then give ``items`` the bare one for the others, which were drawn for
    the user as he was: ``BPR(fb.SSE(users, 0.1), fb.SSE(items, 0.01), others=items)``.

    >>> import featherbed as fb
    >>> loss = BPR(fb.DenseTable(10, 4), fb.DenseTable(20, 4))
    >>> loss(torch.tensor([1]), torch.tensor([2]), torch.tensor([3])).shape
    torch.Size([])
    """

    def __init__(self, users: nn.Module, items: nn.Module, *, others: Table | None = None) -> None:
        super().__init__()
        self.users, self.items, self.others = users, items, items if others is None else others

    def forward(
        self, users: Tensor, liked: Tensor, others: Tensor
    ) -> Tensor:  # int64 [B] each -> []
        """Return the mean loss."""
        ahead = (self.users(users) * (self.items(liked) - self.others(others))).sum(-1)
        return -F.logsigmoid(ahead).mean()


@dataclass(frozen=True)
class Ranked:
    """Rows of users and items at the best epoch, and what every epoch measured."""

    users: Floats
    items: Floats
    epoch: int
    history: list[dict[str, float]]


def draw_others(
    train: Chosen, users: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw for every user an item that the user did not choose."""
    out = np.empty(len(users), dtype=np.int64)
    draw_negatives(users, train.starts, train.items, train.num_items, rng, out)
    return out


def train_bpr(
    train: Chosen,
    validation: Chosen,
    *,
    dim: int = 100,
    epochs: int = 40,
    lr: float = 0.1,
    fall: float = 0.9,
    decay: float = 0.01,
    negatives: int = 3,
    p_users: float = 0.0,
    p_items: float = 0.0,
    patience: int = 10,
    seed: int = 0,
    progress: bool = True,
    name: str = "ranking",
) -> Ranked:
    """Fit plain rows by BPR, a pair at a time; the epoch of the best NDCG@10 on ``validation`` stays.

    Settings are those of the code of Wu et al. (2019): learning rate ``lr`` times ``fall`` every epoch, ``negatives`` other
    items for each choice, rows that start uniform in ±0.01. Users and chosen items are shared with ``p_users`` and
    ``p_items`` (SSE-SE); the other item is not.

    >>> rng = np.random.default_rng(0)
    >>> chosen = Chosen.of(rng.integers(20, size=200), rng.integers(30, size=200), 20, 30)
    >>> train_bpr(chosen, chosen, dim=4, epochs=2, progress=False).items.shape
    (30, 4)
    """
    if not len(train):
        raise DataError(
            "nobody chose anything in the training part: there is nothing to learn from"
        )
    for name, value in (("dim", dim), ("epochs", epochs), ("negatives", negatives)):
        if value < 1:
            raise ArgumentError(f"{name}={value}: give a whole number of at least 1")
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    rows, columns = (
        rng.uniform(-0.01, 0.01, (n, dim)).astype(np.float32)
        for n in (train.num_users, train.num_items)
    )
    users, liked = np.repeat(train.users, negatives), np.repeat(train.items, negatives)
    history: list[dict[str, float]] = []
    best = (-1.0, 0, rows.copy(), columns.copy())
    with show_progress(name, epochs, shown=progress) as shown:
        for epoch in range(epochs):
            order = rng.permutation(len(users))
            others = draw_others(train, users[order], rng)
            ids = [
                share(torch.from_numpy(part[order]), count, p, generator=generator).numpy()
                if p
                else part[order]
                for part, count, p in (
                    (users, train.num_users, p_users),
                    (liked, train.num_items, p_items),
                )
            ]
            loss = ranking_pass(rows, columns, ids[0], ids[1], others, lr * fall**epoch, decay)
            found = ranking_metrics(rows, columns, train, validation)
            history.append({"epoch": epoch, "loss": float(loss), **found})
            shown.update(advance=1, note=f"NDCG@10 {found['ndcg@10']:.4f}")
            if found["ndcg@10"] > best[0]:
                best = (found["ndcg@10"], epoch, rows.copy(), columns.copy())
            elif epoch - best[1] >= patience:
                break
    return Ranked(best[2], best[3], best[1], history)


def choices(
    ratings: Ratings, *, train: int = 50, validation: int = 5, least: int = 60, seed: int = 0
) -> tuple[Chosen, Chosen, Chosen]:
    """Split what users rated into choices: ``train`` of each user, then ``validation``, the rest is held out.

    Users with fewer than ``least`` ratings are left out and the others numbered anew, as in the data of Wu et al. (2019):
    their file has 3,937 users of MovieLens-1M with 50 choices each, this rule gives 3,938.
    """
    if train < 1 or validation < 1 or least <= train + validation:
        raise ArgumentError(
            f"train={train}, validation={validation}, least={least}: each user needs some of each, and some left over"
        )
    counts = np.bincount(ratings.users, minlength=ratings.num_users)
    kept = np.flatnonzero(counts >= least)
    if not len(kept):
        raise DataError(f"no user has {least} ratings or more")
    number = np.full(ratings.num_users, -1)
    number[kept] = np.arange(len(kept))
    order = np.random.default_rng(seed).permutation(len(ratings))
    order = order[np.argsort(ratings.users[order], kind="stable")]
    order = order[number[ratings.users[order]] >= 0]
    users = number[ratings.users[order]]
    first = np.concatenate([[0], np.cumsum(counts[kept])[:-1]])
    place = np.arange(len(order)) - first[users]
    parts = (
        place < train,
        (place >= train) & (place < train + validation),
        place >= train + validation,
    )
    made = [
        Chosen.of(users[part], ratings.items[order][part], len(kept), ratings.num_items)
        for part in parts
    ]
    return made[0], made[1], made[2]
