"""A trained recommender in a folder: the best items for a user, scores, similar items; numpy only.

    score(u, i) = mean + U[u]_0 + V[i]_0 + sum_{k >= 1} U[u]_k V[i]_k     biases "column"
    score(u, i) = mean + b_u + b_i + U[u] . V[i]                          biases "apart"

and without b_u and b_i for biases "none".

Opening reads headers; the rest is memory-mapped and checked when a request reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from featherbed.apps.recommender.store import (
    APART,
    ITEMS,
    SEEN,
    TITLES,
    USERS,
    RecommenderInfo,
    Seen,
    read_info,
)
from featherbed.errors import ArgumentError, FormatError, UnknownKeyError
from featherbed.io.arrays import read_arrays
from featherbed.packed.codes import Ids
from featherbed.packed.columns import nonzero_columns
from featherbed.packed.engine import WORTH
from featherbed.packed.file import check as check_table
from featherbed.packed.file import load
from featherbed.packed.matrix import Floats
from featherbed.packed.search import Scorer, TopRows, check_count, score_block
from featherbed.packed.table import CHUNK, PackedTable

FEW = 1 << 16  # rows that numpy scores before compiled loops are even loaded
CLOSE = 20_000  # maximum number of keys compared with an unknown one


class ScoredItem(NamedTuple):
    """An item: its key, its score, and its title if known."""

    key: str
    score: float
    title: str | None


@dataclass(frozen=True)
class StoredTitles:
    """The titles of items: concatenated text, and the end of each."""

    text: NDArray[np.uint8]
    ends: NDArray[np.unsignedinteger]

    def __getitem__(self, id_: int) -> str | None:
        start, end = (int(self.ends[id_ - 1]) if id_ else 0), int(self.ends[id_])
        if not start <= end <= len(self.text):
            raise FormatError(f"the title of item {id_} lies outside the stored text")
        return self.text[start:end].tobytes().decode("utf-8", "replace") or None


class Recommender:
    """A recommender that ``featherbed train ratings`` wrote to a folder.

    >>> import featherbed as fb
    >>> from featherbed.apps.recommender.store import write_recommender
    >>> folder = getfixture("tmp_path")
    >>> rows = np.array([[0.5, 1.0]]), np.array([[0.0, 1.0], [0.25, 0.5], [0.0, -1.0]])
    >>> users = fb.save(fb.DenseTable.from_dense(rows[0]), folder / "u.safetensors", keys=["ann"])
    >>> items = fb.save(fb.DenseTable.from_dense(rows[1]), folder / "i.safetensors", keys="abc")
    >>> options = {"mean": 3.0, "biases": "column", "titles": ["A", "B", None]}
    >>> write_recommender(folder, users, items, seen=([0, 1], [0]), **options)
    >>> recommender = Recommender.open(folder)
    >>> recommender.recommend("ann", k=2)
    [ScoredItem(key='b', score=4.25, title='B'), ScoredItem(key='c', score=2.5, title=None)]
    >>> recommender.score("ann", ["a", "b"]).tolist()
    [4.5, 4.25]
    """

    def __init__(
        self,
        users: PackedTable,
        items: PackedTable,
        about: RecommenderInfo,
        seen: Seen,
        apart: tuple[Floats, Floats] | None = None,
        titles: StoredTitles | None = None,
    ) -> None:
        self.users, self.items, self.about, self.titles = users, items, about, titles
        self._seen, self._apart = seen, apart
        self._norm_cache: Floats | None = None

    @classmethod
    def open(cls, folder: str | Path) -> Recommender:
        """Open a folder; missing, broken or foreign files raise an error that names them."""
        folder = Path(folder)
        about = read_info(folder)
        users, items = (
            _table(folder / name, rows, about.dim)
            for name, rows in ((USERS, about.users), (ITEMS, about.items))
        )
        seen = read_arrays(folder / SEEN, "seen", {"offsets": ("U32", "U64"), "items": ("U32",)})
        offsets, pairs = seen["offsets"], seen["items"]
        if (
            len(offsets) != about.users + 1
            or len(pairs) != about.seen
            or int(offsets[-1]) != len(pairs)
        ):
            raise FormatError(
                f"{SEEN} does not hold the {about.seen:,} pairs of {about.users:,} users"
            )
        apart = titles = None
        if about.biases == "apart":
            found = read_arrays(folder / APART, "biases", {"users": ("F32",), "items": ("F32",)})
            if len(found["users"]) != about.users or len(found["items"]) != about.items:
                raise FormatError(
                    f"{APART} does not hold a bias for each of {about.users:,} users and "
                    f"{about.items:,} items"
                )
            apart = found["users"], found["items"]
        if about.titles:
            texts = read_arrays(
                folder / TITLES, "titles", {"text": ("U8",), "ends": ("U32", "U64")}
            )
            if len(texts["ends"]) != about.items:
                raise FormatError(
                    f"{TITLES} does not hold a title for each of {about.items:,} items"
                )
            titles = StoredTitles(texts["text"], texts["ends"])
        return cls(users, items, about, (offsets, pairs), apart, titles)

    def __repr__(self) -> str:
        about = self.about
        return f"Recommender({about.users:,} users, {about.items:,} items, width {about.dim})"

    def recommend(self, user: str, k: int = 10, *, include_rated: bool = False) -> list[ScoredItem]:
        """Return the k best items for a user, best first; the smaller id breaks ties.

        Items that the user rated in training are left out by default. Fewer than k items are
        returned if there are no more.
        """
        check_count(k)
        id_ = self._user(user)
        query, base = self._query(id_)
        scores = self._scores(query, base)
        excluded = np.empty(0, np.int64) if include_rated else self.rated_items(id_)
        if self.items.padding_idx is not None:
            excluded = np.union1d(excluded, [self.items.padding_idx])
        scores[excluded] = -np.inf
        return self._best(scores, min(k, self.about.items - len(excluded)))

    def score(self, user: str, items: Sequence[str]) -> Floats:  # [n]
        """Return the predicted ratings of a user for items, given by their keys."""
        wanted = np.array([self._item(key) for key in items], dtype=np.int64)
        id_ = self._user(user)
        query, base = self._query(id_)
        scores: Floats = self.items[wanted] @ query + base
        return scores if self._apart is None else scores + self._apart[1][wanted]

    def similar(self, item: str, k: int = 10) -> list[ScoredItem]:
        """Return the k items with the largest cosine similarity to an item's row, without biases.

        Raises an ArgumentError if the recommender has no factors.
        """
        check_count(k)
        if not self.factors:
            raise ArgumentError(
                "this recommender stores no factors, only biases, so items have nothing to be "
                "compared by: train it on more ratings or with a larger budget"
            )
        id_, first = self._item(item), int(self.about.biases == "column")
        query = self.items[id_].copy()
        query[:first] = 0
        norms = self._norms(first)
        scores = self._raw(query) / (norms * norms[id_])
        excluded = {id_} | ({self.items.padding_idx} - {None})
        scores[list(excluded)] = -np.inf
        return self._best(scores, min(k, self.about.items - len(excluded)))

    @cached_property
    def factors(self) -> int:
        """Number of columns, without biases, that are nonzero for some user and some item.

        0 means biases only: every user has the same order of items, and no two items are similar.
        """
        first = int(self.about.biases == "column")
        columns = nonzero_columns(self.users) & nonzero_columns(self.items)
        return int(np.count_nonzero(columns[first:]))

    def rated_items(self, user: int) -> Ids:
        """Return the ids of the items a user (by id) rated in training, ascending."""
        offsets, pairs = self._seen
        start, end = int(offsets[user]), int(offsets[user + 1])
        if not start <= end <= len(pairs):
            raise FormatError(f"{SEEN}: the items of user {user} lie outside the stored ones")
        found = np.unique(pairs[start:end]).astype(np.int64)
        if len(found) and int(found[-1]) >= self.about.items:
            raise FormatError(
                f"{SEEN}: user {user} has seen item {found[-1]}, there are {self.about.items}"
            )
        return found

    def _user(self, key: str) -> int:
        return _id_of(self.users, key, "user")

    def _item(self, key: str) -> int:
        return _id_of(self.items, key, "item")

    def _query(self, user: int) -> tuple[Floats, float]:
        """Return the query vector of a user, and the constant of every score."""
        query, base = self.users[user].copy(), self.about.mean
        if self.about.biases == "column":
            base += float(query[0])
            query[0] = 1
        elif self._apart is not None:
            base += float(self._apart[0][user])
        return query, base

    def _scores(self, query: Floats, base: float) -> Floats:  # [items]
        scores = self._raw(query)
        scores += np.float32(base)
        if self._apart is not None:
            scores += self._apart[1]
        return scores

    def _raw(self, query: Floats) -> Floats:  # [d] -> [items]
        """Return the dot product of every item with a query, in numpy for few items."""
        table = self.items
        if table.rows > FEW:
            return table.logits(query)
        scorers = [Scorer(band, query[None]) for band in table.bands]
        out = np.empty(table.rows, dtype=np.float32)
        for start in range(0, table.rows, WORTH - 1):
            score_block(table, scorers, start, out[None, start : start + WORTH - 1])
        return out

    def _norms(self, first: int) -> Floats:  # [items]
        """Return the norms of the rows of items from column ``first`` on, 1 for zero rows."""
        if self._norm_cache is None:
            rows = self.about.items
            step = CHUNK if rows > FEW else WORTH - 1
            norms = np.empty(rows, dtype=np.float32)
            for start in range(0, rows, step):
                part = self.items.block(start, min(start + step, rows))[:, first:]
                norms[start : start + step] = np.sqrt(np.einsum("vd,vd->v", part, part))
            norms[norms == 0] = 1
            self._norm_cache = norms
        return self._norm_cache

    def _best(self, scores: Floats, k: int) -> list[ScoredItem]:
        if k < 1:
            return []
        best = TopRows(1, k)
        best.add(0, scores[None])
        ids, found = best.sorted()
        if not np.isfinite(found).all():
            raise FormatError(
                "a score is not a finite number: the tables hold such values, train again"
            )
        return [
            self._named(id_, score)
            for id_, score in zip(ids[0].tolist(), found[0].tolist(), strict=True)
        ]

    def _named(self, id_: int, score: float) -> ScoredItem:
        assert self.items.keys is not None
        return ScoredItem(
            self.items.keys[id_], score, None if self.titles is None else self.titles[id_]
        )


def check_recommender(folder: str | Path) -> Recommender:
    """Open a folder and check every byte of its tables and of the rated items.

    >>> check_recommender("nothing")
    Traceback (most recent call last):
    featherbed.errors.MissingFileError: nothing: no such folder
    """
    found = Recommender.open(folder)
    for name in (USERS, ITEMS):
        check_table(Path(folder) / name)
    offsets, pairs = found._seen
    if int(offsets[0]) != 0 or np.any(offsets[1:] < offsets[:-1]):
        raise FormatError(f"{SEEN}: offsets must rise from 0")
    if len(pairs) and int(pairs.max()) >= found.about.items:
        raise FormatError(f"{SEEN} names item {pairs.max()}, there are {found.about.items}")
    return found


def _table(path: Path, rows: int, dim: int) -> PackedTable:
    try:
        table = load(path)
    except FormatError as error:
        raise FormatError(f"{path.name}: {error}") from None
    if table.rows != rows or table.dim != dim or table.keys is None:
        keys = "" if table.keys is None else " with keys"
        raise FormatError(
            f"{path.name} holds {table.rows} x {table.dim}{keys}, "
            f"the recommender has {rows} x {dim} with keys"
        )
    return table


def _id_of(table: PackedTable, key: str, what: str) -> int:
    try:
        return int(table.ids_of(key))
    except UnknownKeyError:
        raise UnknownKeyError(f"no {what} has the key {key!r}: {_hint(table, key)}") from None


def _hint(table: PackedTable, key: str) -> str:
    """Suggest keys similar to an unknown one: other spellings, and close matches among few keys."""
    keys = table.keys
    assert keys is not None
    near = [
        word
        for word in dict.fromkeys((key.strip(), key.lower(), key.upper(), key.lstrip("0")))
        if word in table
    ]
    if not near and len(keys) <= CLOSE:
        from difflib import get_close_matches

        near = get_close_matches(key, (keys[i] for i in range(len(keys))), n=3)
    if near:
        return f"is it {' or '.join(repr(word) for word in near)}?"
    some = ", ".join(repr(keys[i]) for i in range(min(3, len(keys))))
    return f"there are {len(keys):,}, such as {some}"
