"""Ratings of well-known data sets, generated ratings, and ratings as a stream of batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, DataError
from featherbed.io.opening import read_lines
from featherbed.io.records.ratings import Ratings

Triples = tuple[NDArray[np.str_], NDArray[np.str_], NDArray[np.float32]]


def stream_ratings(path: str | Path, batch: int = 1024, separator: str = "::") -> Iterator[Triples]:
    """Yield (users, items, ratings) of a ratings file in batches, reading as it goes.

    Keys stay text. The file may be compressed.

    >>> path = getfixture("tmp_path") / "ratings.dat"
    >>> _ = path.write_text("7::31::4::0\\n7::32::5::0\\n")
    >>> [(users.tolist(), values.tolist()) for users, _, values in stream_ratings(path)]
    [(['7', '7'], [4.0, 5.0])]
    """
    if batch < 1:
        raise ArgumentError(f"batch={batch}: give a number of ratings of at least 1")
    lines = enumerate(read_lines(path, "latin-1"), 1)
    while rows := [_parse(line, number, path, separator) for number, line in islice(lines, batch)]:
        users, items, values = zip(*rows, strict=True)
        yield np.array(users), np.array(items), np.array(values, dtype=np.float32)


def _parse(line: str, number: int, path: str | Path, separator: str) -> tuple[str, str, float]:
    fields = line.rstrip("\n").split(separator)
    try:
        return fields[0], fields[1], float(fields[2])
    except (IndexError, ValueError):
        raise DataError(
            f"{path}, line {number}: expected User{separator}Item{separator}Rating, "
            f"found {line.strip()[:60]!r}"
        ) from None


def read_movielens(folder: str | Path) -> Ratings:
    """Read MovieLens' ``ratings.dat``: ``UserID::MovieID::Rating::Timestamp``."""
    path = Path(folder) / "ratings.dat"
    batches = list(stream_ratings(path, 1 << 20))
    if not batches:
        raise DataError(f"{path} holds no ratings")
    users, items, values = (np.concatenate(column) for column in zip(*batches, strict=True))
    user_keys, user_ids = np.unique(users.astype(np.int64), return_inverse=True)
    item_keys, item_ids = np.unique(items.astype(np.int64), return_inverse=True)
    keys = (tuple(map(str, user_keys)), tuple(map(str, item_keys)))
    return Ratings(user_ids, item_ids, values, *keys)


def make_ratings(
    num_users: int = 2000,
    num_items: int = 1000,
    count: int = 260_000,
    groups: int = 12,
    dim: int = 12,
    seed: int = 0,
) -> Ratings:
    """Generate ratings with planted structure: groups of users and items, Zipf popularity.

    rating = 3.5 + taste . style + noise, clipped to 1..5; a taste mixes those of two groups.
    """
    rng = np.random.default_rng(seed)

    def vectors(rows: int) -> NDArray[np.float64]:
        centers = rng.normal(size=(groups, dim)) / dim**0.25
        share = rng.beta(0.4, 0.4, size=(rows, 1))
        first, second = rng.integers(groups, size=(2, rows))
        mixed: NDArray[np.float64] = share * centers[first] + (1 - share) * centers[second]
        return mixed

    tastes, styles = vectors(num_users), vectors(num_items)
    popularity = 1.0 / np.arange(1, num_items + 1) ** 0.8
    users = rng.integers(num_users, size=count)
    items = rng.choice(num_items, size=count, p=popularity / popularity.sum())
    pairs = np.unique(users * num_items + items)
    users, items = pairs // num_items, pairs % num_items
    affinity = np.einsum("nd,nd->n", tastes[users], styles[items])
    scores = 3.5 + 1.2 * affinity + rng.normal(0, 0.4, len(users))
    values = np.clip(scores, 1, 5).astype(np.float32)
    keys = tuple(map(str, range(num_users))), tuple(map(str, range(num_items)))
    return Ratings(users, items, values, *keys)
