"""Rows whose neighbors are searched: word vectors of GloVe, and what users of MovieLens-1M like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from featherbed.errors import ArgumentError, DataError
from featherbed.io.records import read_movielens
from research.sources.texts import folder_of

GLOVE = "glove.6B.50d.top60k.npz"
LIKED = 4.0  # stars
SHARES = (0.6, 0.2)  # of the users: training, validation; the others test
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Vectors:
    """Vectors of unit length; the nearest ones are the right answers."""

    rows: Floats  # [V, d]


@dataclass(frozen=True)
class Likes:
    """Who likes what, [users, items] of 0 and 1."""

    matrix: csr_array

    @cached_property
    def parts(self) -> tuple[csr_array, csr_array, csr_array]:
        """The rows of training, validation and test users, always the same."""
        order = np.random.default_rng(0).permutation(self.matrix.shape[0])
        first, second = (np.cumsum(SHARES) * len(order)).astype(int)
        return (
            self.matrix[order[:first]],
            self.matrix[order[first:second]],
            self.matrix[order[second:]],
        )


Rows = Vectors | Likes


def open_rows(name: str, data: str | Path | None = None, quick: bool = False) -> Rows:
    """Return the vectors of GloVe or the likes of MovieLens-1M; ``quick``: generated ones.

    >>> open_rows("glove", quick=True).rows.shape, open_rows("ml-1m", quick=True).matrix.shape
    ((400, 16), (200, 90))
    """
    if name not in READERS:
        raise ArgumentError(f"data={name!r}: neighbors are searched in {', '.join(READERS)}")
    if quick:
        return generated_vectors() if name == "glove" else generated_likes()
    return READERS[name][1](folder_of(name, data, READERS[name][0]))


def read_glove(folder: Path) -> Vectors:
    """Return the vectors of GloVe's frequent words, of unit length."""
    path = folder / GLOVE
    if not path.is_file():
        raise DataError(f"{folder} holds no {GLOVE}: put it there (an array 'vectors', [V, d])")
    try:
        with np.load(path) as file:
            found = np.asarray(file["vectors"], dtype=np.float32)
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise DataError(f"{path} holds no array 'vectors': {error}") from None
    return Vectors(unit(found))


def read_likes(folder: Path) -> Likes:
    """Return the ratings of MovieLens-1M of at least four stars."""
    ratings = read_movielens(folder)
    good = ratings.values >= LIKED
    ones = np.ones(int(good.sum()), dtype=np.float32)
    places = ratings.users[good], ratings.items[good]
    return Likes(csr_array((ones, places), shape=(ratings.num_users, ratings.num_items)))


READERS: dict[str, tuple[str, Callable[[Path], Vectors | Likes]]] = {
    "glove": (GLOVE, read_glove),
    "ml-1m": ("ratings.dat", read_likes),
}


def unit(rows: Floats) -> Floats:
    """Return rows of length 1.

    >>> unit(np.array([[3.0, 4.0]], dtype=np.float32)).tolist()
    [[0.6000000238418579, 0.800000011920929]]
    """
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(length, 1e-12), dtype=np.float32)


def generated_vectors(count: int = 400, dim: int = 16, groups: int = 20) -> Vectors:
    """Return vectors around centers."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((groups, dim))
    rows = centers[rng.integers(groups, size=count)] + 0.6 * rng.standard_normal((count, dim))
    return Vectors(unit(rows.astype(np.float32)))


def generated_likes(users: int = 200, items: int = 90, groups: int = 6) -> Likes:
    """Return likes of users who prefer the items of their group."""
    rng = np.random.default_rng(0)
    own = rng.integers(groups, size=users)[:, None] == np.arange(items) % groups
    liked = rng.random((users, items)) < np.where(own, 0.6, 0.1)
    return Likes(csr_array(liked.astype(np.float32)))
