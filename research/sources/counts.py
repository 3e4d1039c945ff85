"""Files of counts, of purchases and of clicks: generated ones with known structure, and public ones.

Generated users choose items by scores u . v + ln popularity and noise of the Gumbel distribution, and choose an item they like
better more often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError
from featherbed.io.opening import read_lines
from research.sources.ratings import find_folder

Writer = Callable[[str, Path], Path]  # (kind, folder) -> file
Doubles = NDArray[np.float64]
# users, items, pairs, factors, exponent of popularity, weight of factors, distribution of counts
PLANTED = {
    "poisson": (2000, 1200, 60_000, 8, 0.8, 2.0, "poisson"),
    "zipf": (1500, 2000, 40_000, 5, 1.0, 1.5, "zipf"),
    "plays": (3000, 2500, 150_000, 12, 0.7, 2.0, "lognormal"),
    "sparse": (6000, 3000, 14_000, 4, 0.9, 2.0, "poisson"),
    "noise": (500, 300, 6_000, 3, 1.0, 0.0, "poisson"),
    "quick": (90, 60, 1_500, 3, 0.7, 2.0, "poisson"),
}


def open_counts(name: str, data: str | Path | None = None, quick: bool = False) -> Writer:
    """Return a function that writes a file of a kind into a folder."""
    if name != "counts":
        raise ArgumentError(f"data={name!r}: files of counts are called counts")

    def write(kind: str, folder: Path) -> Path:
        path, kind = folder / f"{kind}.csv", "quick" if quick else kind
        makers: dict[str, Callable[[], Iterable[str]]] = {
            **{one: partial(_planted, *values) for one, values in PLANTED.items()},
            "log": _log,
            "beauty": lambda: _beauty(find_folder("amazon", data)),
            "films": lambda: _films(find_folder("ml-100k", data)),
            "books": lambda: _books(find_folder("book-crossing", data)),
        }
        if kind not in makers:
            raise ArgumentError(f"file={kind!r}: use one of {', '.join(makers)}")
        path.write_text("\n".join(makers[kind]()) + "\n")
        return path

    return write


def _planted(
    users: int, items: int, pairs: int, dim: int, exponent: float, weight: float, counts: str
) -> Iterable[str]:
    """Yield pairs with counts; how active users are has a lognormal distribution."""
    rng = np.random.default_rng(1)
    left, right = rng.normal(size=(users, dim)) / np.sqrt(dim), rng.normal(size=(items, dim))
    popularity = -exponent * np.log(rng.permutation(items) + 1.0)
    active = rng.lognormal(0, 1, users)
    active = np.clip(active * pairs / active.sum(), 1, items // 2).astype(int)
    yield "user,item,count"
    for user in range(users):
        scores = weight * (right @ left[user]) + popularity
        own = np.argsort(-(scores + rng.gumbel(size=items)))[: active[user]]
        liking = scores[own] - scores[own].mean()
        for item, count in zip(own.tolist(), _counts(counts, liking, rng).tolist(), strict=True):
            yield f"u{user},i{item},{count}"


def _counts(kind: str, liking: Doubles, rng: np.random.Generator) -> NDArray[np.int64]:  # [n]
    if kind == "zipf":  # without regard to liking
        return np.minimum(rng.zipf(1.6, len(liking)), 5_000)
    if kind == "lognormal":
        return np.maximum(1, rng.lognormal(2 + 0.5 * liking, 1.3)).astype(np.int64)
    return 1 + rng.poisson(np.exp(np.minimum(4, 0.5 * liking)))


def _log(users: int = 1200, items: int = 700, events: int = 120_000) -> Iterable[str]:
    """Yield visits in the order of time, in which pairs recur."""
    rng, time = np.random.default_rng(8), 1_600_000_000
    left, right = rng.normal(size=(users, 6)) / np.sqrt(6), rng.normal(size=(items, 6))
    scores = 2 * left @ right.T - 0.8 * np.log(np.arange(1, items + 1))
    chances = np.cumsum(np.exp(scores - scores.max(1, keepdims=True)), axis=1)
    yield "visitorid,itemid,timestamp"
    for _ in range(events):
        user = int(users * rng.random() ** 2)
        item = int(np.searchsorted(chances[user], rng.random() * chances[user, -1]))
        time += int(rng.integers(1, 60))
        yield f"{user},{item},{time}"


def _beauty(folder: Path) -> Iterable[str]:
    yield "user,item"
    for line in read_lines(folder / "beauty_train.txt"):
        user, _, items = line.partition(":")
        yield from (f"{user},{item}" for item in items.split())


def _films(folder: Path) -> Iterable[str]:
    """Yield ratings of MovieLens-100K as if they were counts."""
    yield "user,item,count,time"
    yield from (",".join(line.split()) for line in read_lines(folder / "u.data"))


def _books(folder: Path) -> Iterable[str]:
    """Yield the pairs of Book-Crossing without a rating, of users and books with five or more."""
    pairs = set()
    for line in read_lines(folder / "BX-Book-Ratings.csv.xz", "iso-8859-1"):
        user, book, rating = line.strip().strip('"').split('";"')
        if rating == "0":
            pairs.add((user, book.replace(",", "")))
    found = np.array(sorted(pairs))
    for _ in range(6):
        for side in (0, 1):
            _, ids, counts = np.unique(found[:, side], return_inverse=True, return_counts=True)
            found = found[counts[ids] >= 5]
    yield "user,item"
    yield from (f"{user},{book}" for user, book in found.tolist())
