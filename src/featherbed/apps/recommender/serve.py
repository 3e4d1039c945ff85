"""A recommender in a folder: two packed tables with keys, rated items, titles and a JSON file.

    score(u, i) = mean + U[u]_0 + V[i]_0 + sum_{k >= 1} U[u]_k V[i]_k     biases "column"
    score(u, i) = mean + b_u + b_i + U[u] . V[i]                          biases "apart"

and without b_u and b_i for biases "none". A ranking (implicit feedback) has the mean 0, no biases
and rows of users of length 1, so that scores order the items of one user. numpy only: opening reads
headers; the rest is memory-mapped and checked when a request reads it. ``recommender.json`` is
removed first and written last: a folder without it is no recommender.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Container, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.apps.bundle import read_description
from featherbed.apps.recommender.closed import (
    COUNTS,
    Confidence,
    Doubles,
    solve_implicit,
    solve_ratings,
)
from featherbed.errors import ArgumentError, DataError, FormatError, UnknownKeyError
from featherbed.files import write_file
from featherbed.packed import (
    ARRAYS_VERSION,
    CHUNK,
    MOST_DIM,
    MOST_ROWS,
    Floats,
    Ids,
    PackedTable,
    TopRows,
    as_loaded,
    check_count,
    load,
    read_arrays,
    write_arrays,
)
from featherbed.packed import check as check_table
from featherbed.version import __version__

VERSION = 1
BIASES = ("none", "column", "apart")
PAIRS = 1 << 23  # pairs sorted at once
JSON, USERS, ITEMS = "recommender.json", "users.safetensors", "items.safetensors"
SEEN, TITLES, APART = "seen.safetensors", "titles.safetensors", "biases.safetensors"

Seen = tuple[NDArray[np.unsignedinteger], NDArray[np.uint32]]  # offsets [users + 1], items [pairs]


class RecommenderInfo(NamedTuple):
    """The content of ``recommender.json``."""

    users: int
    items: int
    dim: int
    mean: float
    biases: str
    seen: int  # number of (user, item) pairs in training
    titles: bool
    about: dict[str, Any]
    implicit: Confidence | None = None  # of a ranking


def collect_rated(
    users: NDArray[np.integer], items: NDArray[np.integer], num_users: int, num_items: int
) -> Seen:  # [n], [n]
    """Return the rated items of each user: ``items[offsets[u]:offsets[u + 1]]``, ascending, once.

    Users are processed in ranges, since there may be more pairs than memory can sort at once.

    >>> users, items = np.array([2, 0, 2, 2]), np.array([5, 1, 3, 5])
    >>> offsets, rated = collect_rated(users, items, num_users=3, num_items=6)
    >>> offsets.tolist(), rated.tolist()
    ([0, 1, 1, 3], [1, 3, 5])
    """
    blocks = [slice(begin, begin + PAIRS) for begin in range(0, len(users), PAIRS)]
    counts = np.zeros(num_users, dtype=np.int64)
    for block in blocks:
        counts += np.bincount(users[block], minlength=num_users)
    totals, low, found = np.cumsum(counts), 0, [np.empty(0, np.uint32)]
    while low < num_users:
        before = int(totals[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(totals, before + PAIRS, side="right")))
        parts = [np.empty(0, np.int64)]
        for block in blocks:
            own = users[block]
            inside = (own >= low) & (own < high)
            parts.append(own[inside].astype(np.int64) * num_items + items[block][inside])
        pairs = np.sort(np.concatenate(parts))
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]
        counts[low:high] = np.bincount(pairs // num_items - low, minlength=high - low)
        found.append((pairs % num_items).astype(np.uint32))
        low = high
    rated = np.concatenate(found)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return offsets.astype(np.uint32 if len(rated) < 2**32 else np.uint64), rated


def write_recommender(
    folder: str | Path,
    users: PackedTable | str | Path,
    items: PackedTable | str | Path,
    *,
    mean: float,
    biases: str,
    seen: tuple[ArrayLike, ArrayLike],  # of ``collect_rated``: offsets [users + 1], items [pairs]
    user_bias: ArrayLike | None = None,  # [users], with biases="apart"
    item_bias: ArrayLike | None = None,  # [items]
    titles: Iterable[str | None] | None = None,  # [items]
    about: dict[str, Any] | None = None,
    implicit: Confidence | None = None,
) -> None:
    """Write a recommender into a folder; other files in it are kept.

    Tables (packed tables or their files) have keys. ``implicit`` are the settings of a ranking.
    Everything is checked before the first write.

    >>> import featherbed as fb
    >>> from featherbed.apps.recommender.serve import Recommender
    >>> folder = getfixture("tmp_path")
    >>> users = fb.save(fb.DenseTable(2, 4), folder / "users.safetensors", keys=["ann", "bob"])
    >>> drinks = ["tea", "rum", "ale"]
    >>> items = fb.save(fb.DenseTable(3, 4), folder / "items.safetensors", keys=drinks)
    >>> write_recommender(folder, users, items, mean=3.5, biases="column", seen=([0, 1, 1], [2]))
    >>> sorted(item.key for item in Recommender.open(folder).recommend("ann", k=5))
    ['rum', 'tea']
    """
    folder = Path(folder)
    left, right = (
        table if isinstance(table, PackedTable) else load(table) for table in (users, items)
    )
    _check_tables(left, right, mean, biases)
    offsets, pairs = _check_rated(seen, left.rows, right.rows)
    files: dict[str, tuple[str, dict[str, NDArray[Any]]]] = {
        SEEN: ("seen", {"offsets": offsets, "items": pairs})
    }
    if biases == "apart":
        apart = {
            "users": _check_bias("user_bias", user_bias, left.rows),
            "items": _check_bias("item_bias", item_bias, right.rows),
        }
        files[APART] = ("biases", apart)
    elif user_bias is not None or item_bias is not None:
        raise ArgumentError(f"user_bias and item_bias go with biases='apart', not with {biases!r}")
    if titles is not None:
        files[TITLES] = ("titles", encode_titles(titles, right.rows))
    info = {
        "recommender": VERSION,
        "featherbed": __version__,
        "users": left.rows,
        "items": right.rows,
        "dim": left.dim,
        "mean": float(mean),
        "biases": biases,
        "seen": len(pairs),
        "titles": titles is not None,
        "about": about or {},
    }
    if implicit is not None:
        info["implicit"] = implicit.values_by_name()
    try:
        text = json.dumps(info, ensure_ascii=False, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"about must be plain JSON: {str(error)[:100]}") from None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON).unlink(missing_ok=True)
    for name in (APART, TITLES):
        (folder / name).unlink(missing_ok=True)
    for name, given, table in ((USERS, users, left), (ITEMS, items, right)):
        if isinstance(given, PackedTable) or not _is_same(Path(given), folder / name):
            table.save(folder / name)
    for name, (kind, arrays) in files.items():
        write_arrays(folder / name, {kind: ARRAYS_VERSION}, arrays)
    write_file(folder / JSON, text + "\n")


def read_info(folder: Path) -> RecommenderInfo:
    """Return the content of a folder's ``recommender.json``."""
    found = read_description(
        folder, JSON, "recommender", VERSION, "featherbed train ratings FILE --out DIR"
    )
    mean, about = found.raw("mean"), found.raw("about")
    if isinstance(mean, bool) or not isinstance(mean, int | float) or not abs(mean) < 1e30:
        raise FormatError(f"{JSON}.mean must be a number, got {str(mean)[:40]}")
    return RecommenderInfo(
        found.integer("users", 1, MOST_ROWS),
        found.integer("items", 1, MOST_ROWS),
        found.integer("dim", 1, MOST_DIM),
        float(mean),
        found.choice("biases", BIASES),
        found.integer("seen", 0, MOST_ROWS),
        found.flag("titles"),
        about,
        _read_confidence(found.raw("implicit")) if "implicit" in found.fields else None,
    )


def _read_confidence(given: Any) -> Confidence:
    """Return the settings of a ranking, checked."""
    limits = {"alpha": 0.0, "regularization": 1e-9, "sharpness": 0.0, "typical": 0.0}
    if not isinstance(given, dict) or set(given) != {*limits, "counts"}:
        raise FormatError(f"{JSON}.implicit must have {', '.join([*limits, 'counts'])}")
    for name, low in limits.items():
        value = given[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < 1e30:
            raise FormatError(
                f"{JSON}.implicit.{name} must be a number from {low:g} on, got {str(value)[:40]}"
            )
    if given["counts"] not in COUNTS:
        raise FormatError(f"{JSON}.implicit.counts must be one of {', '.join(COUNTS)}")
    return Confidence(**given)


def _check_tables(users: PackedTable, items: PackedTable, mean: float, biases: str) -> None:
    if biases not in BIASES:
        raise ArgumentError(f"biases={biases!r}: use one of {', '.join(BIASES)}")
    if not math.isfinite(mean) or abs(mean) >= 1e30:
        raise ArgumentError(f"mean={mean!r}: give the mean of the ratings, a finite number")
    if users.dim != items.dim:
        raise ArgumentError(f"users have width {users.dim}, items {items.dim}: they must agree")
    for side, table in (("users", users), ("items", items)):
        if table.keys is None:
            raise ArgumentError(
                f"the table of {side} has no keys: save it with fb.save(table, path, keys=...)"
            )


def _check_rated(seen: tuple[ArrayLike, ArrayLike], users: int, items: int) -> Seen:
    offsets, pairs = np.asarray(seen[0]), np.asarray(seen[1])
    if (
        offsets.shape != (users + 1,)
        or pairs.ndim != 1
        or (len(pairs) and pairs.dtype.kind not in "iu")
    ):
        raise ArgumentError(
            f"seen has offsets of shape {offsets.shape}, items {pairs.shape}: "
            f"give [{users + 1}] and [pairs]"
        )
    if offsets[0] != 0 or offsets[-1] != len(pairs) or np.any(offsets[1:] < offsets[:-1]):
        raise ArgumentError(
            f"the offsets of seen must rise from 0 to the number of pairs, {len(pairs)}"
        )
    if len(pairs) and not 0 <= int(pairs.min()) <= int(pairs.max()) < items:
        raise ArgumentError(
            f"seen names items from {pairs.min()} to {pairs.max()}: ids go from 0 to {items - 1}"
        )
    return offsets.astype(np.uint32 if len(pairs) < 2**32 else np.uint64), pairs.astype(
        np.uint32, copy=False
    )


def _check_bias(name: str, values: ArrayLike | None, rows: int) -> NDArray[np.float32]:
    found = np.asarray([] if values is None else values, dtype=np.float32)
    if found.shape != (rows,) or not np.isfinite(found).all():
        raise ArgumentError(
            f"{name} has shape {found.shape}: "
            f"biases='apart' takes a finite number for each of {rows} rows"
        )
    return found


def encode_titles(titles: Iterable[str | None], rows: int) -> dict[str, NDArray[Any]]:
    """Return titles as text and ends; an empty one is a missing one."""
    raw = [(title or "").encode("utf-8", "replace") for title in titles]
    if len(raw) != rows:
        raise ArgumentError(
            f"{len(raw)} titles were given for {rows} items: "
            "give one for each, None for an unknown one"
        )
    ends = np.cumsum(np.fromiter(map(len, raw), dtype=np.int64, count=rows))
    return {
        "text": np.frombuffer(b"".join(raw), dtype=np.uint8),
        "ends": ends.astype(np.uint32 if ends[-1] < 2**32 else np.uint64),
    }


def _is_same(one: Path, other: Path) -> bool:
    return other.exists() and one.samefile(other)


FEW = 1 << 16  # rows that numpy scores before compiled loops are even loaded
PRIOR_USERS = 20_000  # users whose rows give the prior of a new one
CLOSE = 20_000  # maximum number of keys compared with an unknown one
ItemHistory = Sequence[str | tuple[str, float | None]]  # items, or items with a rating or a count


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
    """A recommender that ``featherbed train ratings`` or ``train ranking`` wrote to a folder.

    >>> import featherbed as fb
    >>> from featherbed.apps.recommender.serve import write_recommender
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

    def recommend_history(
        self, history: ItemHistory, k: int = 10, *, include_history: bool = False
    ) -> list[ScoredItem]:
        """Return the k best items for a user who is not in the training data, best first.

        ``history`` are items, or (item, rating) pairs; the row of the user is computed by
        ``fold_in``. Items of the history are left out by default.
        """
        check_count(k)
        known, row = self._folded(history)
        scores = self._scores(*self._query_of(row))
        excluded = np.empty(0, np.int64) if include_history else np.unique(known)
        if self.items.padding_idx is not None:
            excluded = np.union1d(excluded, [self.items.padding_idx])
        scores[excluded] = -np.inf
        return self._best(scores, min(k, self.about.items - len(excluded)))

    def fold_in(self, history: ItemHistory) -> Floats:  # [d]
        """Return the row of a new user in closed form from the stored rows of rated items.

        Ratings: with rows u ~ N(m, diag(s)) of the stored users as prior, ratings r_i of items with
        rows v_i, and the model's error as noise,

            u = m + (X'X / noise + diag(1 / s))^-1 X' (r - mean - b - X m) / noise

        X holds the rows v_i (with a column of ones for the bias of the user), b the biases of
        items. Ratings of None, and items without rating, mean that the item was liked: they count
        as the mean plus one standard deviation of the model's error.

        A ranking: the numbers are counts with confidences c, None is one event, counts of an item
        are added,

            u = (V'V + Σ_i (c_i - 1) v_i v_i' + λ I)^-1 Σ_i c_i v_i

        with its columns weighted and its length made 1 as in training. Items that are not known are
        skipped; ``unknown_items`` names them.
        """
        return self._folded(history)[1]

    def unknown_items(self, history: ItemHistory) -> list[str]:
        """Return the items of a history that the recommender does not know."""
        return [item for item, _ in _pairs(history) if item not in self.items]

    def _folded(self, history: ItemHistory) -> tuple[Ids, Floats]:  # -> known ids, row [d]
        implicit, pairs = self.about.implicit, _pairs(history)
        liked = self.about.mean + math.sqrt(self._noise) if implicit is None else 1.0
        found = self.items.ids([item for item, _ in pairs]).tolist() if pairs else []
        known = [
            (id_, liked if rating is None else float(rating))
            for id_, (_, rating) in zip(found, pairs, strict=True)
            if id_ >= 0
        ]
        if not known:
            names = ", ".join(repr(item) for item, _ in pairs[:3])
            raise ArgumentError(
                f"no item of the history is known ({names or 'it is empty'}): give at least one "
                f"of the {self.about.items:,} items"
            )
        ids = np.array([id_ for id_, _ in known])
        values = np.array([value for _, value in known])
        if not (np.abs(values) < 1e30).all():
            kind = "rating" if implicit is None else "count"
            raise ArgumentError(f"a {kind} of the history is not a finite number")
        if implicit is None:
            return ids, self.row_of_ratings(self._item_rows(ids), values).astype(np.float32)
        if (values <= 0).any():
            raise ArgumentError("a count of the history is not above 0: leave the item out instead")
        ids, places = np.unique(ids, return_inverse=True)
        raw = self.row_of_events(ids, implicit.weights(np.bincount(places, values)))
        return ids, implicit.finish(raw, self.item_gram).astype(np.float32)

    def row_of_ratings(
        self, rows: Doubles, ratings: Doubles, earlier: tuple[Doubles, Ids] | None = None
    ) -> Doubles:  # [n, d], [n] -> [d]
        """Return the row of a user from ratings of items, given by their rows.

        ``earlier`` are a row and the ids of the items whose ratings it was computed from. With
        biases apart the biases come first.
        """
        x, base = self._features(rows)
        before = None
        if earlier is not None:
            before = earlier[0], self._features(self._item_rows(earlier[1]))[0]
        residuals = ratings - self.about.mean - base
        return solve_ratings(x, residuals, *self._prior(0), self._noise, before)

    def row_of_item(self, rows: Doubles, ratings: Doubles) -> Doubles:  # [n, d], [n] -> [d]
        """Return the row of an item from ratings by users, given by their rows."""
        x, base = self._features(rows)
        return solve_ratings(x, ratings - self.about.mean - base, *self._prior(1), self._noise)

    def _features(self, rows: Doubles) -> tuple[Doubles, Doubles]:  # [n, d] -> [n, d], [n]
        """Return the numbers that the row of the other side is multiplied with, and the biases."""
        if self.about.biases == "none":
            return rows, np.zeros(len(rows))
        x = rows.copy()
        x[:, 0] = 1
        return x, rows[:, 0]

    def _item_rows(self, ids: Ids) -> Doubles:  # [n] -> [n, d]
        """Return rows of items; with biases apart the bias comes first."""
        rows = self.items[ids].astype(np.float64)
        return rows if self._apart is None else np.column_stack([self._apart[1][ids], rows])

    def row_of_events(self, ids: Ids, weights: Doubles) -> Doubles:  # [n], [n] -> [d]
        """Return the row of a user from items with confidences, before columns are weighted."""
        assert self.about.implicit is not None, "a model of ratings"
        rows = self.items[ids].astype(np.float64)
        return solve_implicit(self.item_gram, rows, weights, self.about.implicit.regularization)

    @cached_property
    def item_gram(self) -> Doubles:  # [d, d]
        """V'V of all items."""
        gram = np.zeros((self.about.dim, self.about.dim))
        for start in range(0, self.about.items, CHUNK):
            rows = self.items.block(start, min(start + CHUNK, self.about.items)).astype(np.float64)
            gram += rows.T @ rows
        return gram

    @property
    def _noise(self) -> float:
        """The variance of ratings around predictions: the test error of training."""
        error = self.about.about.get("test_mse")
        if isinstance(error, bool) or not isinstance(error, int | float) or not 0 < error < 1e30:
            raise ArgumentError(
                "this recommender stores no error of its predictions, which folding in needs: "
                "train it again"
            )
        return float(error)

    @cache  # noqa: B019 - two small arrays for as long as the recommender lives
    def _prior(self, side: int) -> tuple[Doubles, Doubles]:  # -> [d], [d]
        """Mean and variance of the columns of users or items; with biases apart, these first."""
        table = (self.users, self.items)[side]
        count = min(table.rows, PRIOR_USERS)
        ids = np.linspace(0, table.rows - 1, count).astype(np.int64)
        rows = table[ids].astype(np.float64)
        if self._apart is not None:
            rows = np.column_stack([self._apart[side][ids], rows])
        return rows.mean(0), rows.var(0)

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
        columns = self.users.nonzero_columns() & self.items.nonzero_columns()
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

    def popularity(self) -> Ids:  # [items]
        """Return the number of training ratings of every item."""
        items = self._seen[1]
        counts = np.bincount(items[items < self.about.items], minlength=self.about.items)
        return counts.astype(np.int64)

    def _user(self, key: str) -> int:
        return _id_of(self.users, key, "user")

    def _item(self, key: str) -> int:
        return _id_of(self.items, key, "item")

    def _query(self, user: int) -> tuple[Floats, float]:
        """Return the query vector of a user, and the constant of every score."""
        row = self.users[user].copy()
        if self._apart is not None:
            row = np.append(self._apart[0][user], row)
        return self._query_of(row)

    def _query_of(self, row: Floats) -> tuple[Floats, float]:
        """Return the query vector of a user's row (with biases apart, the bias comes first)."""
        base = self.about.mean
        if self.about.biases == "none":
            return row, base
        base += float(row[0])
        if self._apart is not None:
            return row[1:], base
        query = row.copy()
        query[0] = 1
        return query, base

    def _scores(self, query: Floats, base: float) -> Floats:  # [items]
        scores = self._raw(query)
        scores += np.float32(base)
        if self._apart is not None:
            scores += self._apart[1]
        return scores

    def _raw(self, query: Floats) -> Floats:  # [d] -> [items]
        """Return the dot product of every item with a query, in numpy for few items."""
        with as_loaded() if self.items.rows <= FEW else nullcontext():
            return self.items.logits(query)

    def _norms(self, first: int) -> Floats:  # [items]
        """Return the norms of the rows of items from column ``first`` on, 1 for zero rows."""
        if self._norm_cache is None:
            norms = np.empty(self.about.items, dtype=np.float32)
            with as_loaded() if len(norms) <= FEW else nullcontext():
                for start in range(0, len(norms), CHUNK):
                    part = self.items.block(start, min(start + CHUNK, len(norms)))[:, first:]
                    norms[start : start + CHUNK] = np.sqrt(np.einsum("vd,vd->v", part, part))
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
        key = self.items.name_of(id_) or f"row {id_}"  # hashed keys have no text
        return ScoredItem(key, score, None if self.titles is None else self.titles[id_])


def parse_history(text: str, items: Container[str] = ()) -> list[tuple[str, float | None]]:
    """Return the (item, rating or None) pairs of a text, or of a file: ``12:5,57`` or such lines.

    Entries that are keys of ``items`` as a whole have no rating.

    >>> parse_history("12:5, 57:3.5,tt:99,80", items=["tt:99"])
    [('12', 5.0), ('57', 3.5), ('tt:99', None), ('80', None)]
    """
    pairs: list[tuple[str, float | None]] = []
    for entry in split_history(text, items):
        item, colon, rating = ("", "", "") if entry in items else entry.rpartition(":")
        try:
            pairs.append((item, float(rating)) if colon else (entry, None))
        except ValueError:
            raise ArgumentError(
                f"{entry[:60]!r} in the history: write item:rating or item, separated by commas"
            ) from None
    return pairs


def _pairs(history: ItemHistory) -> list[tuple[str, float | None]]:
    return [(entry, None) if isinstance(entry, str) else entry for entry in history]


def split_history(text: str, items: Container[str] = ()) -> list[str]:
    """Return the entries of a text, which commas and ends of lines separate, or of such a file.

    A line that is a key of ``items`` as a whole, perhaps with a rating, is one entry.

    >>> split_history("12:5, 57\\nHeat, The:4", items=["Heat, The"])
    ['12:5', '57', 'Heat, The:4']
    """
    if os.path.isfile(text):  # noqa: PTH113 - Path.is_file raises an error for a long history
        try:
            text = Path(text).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError):
            raise DataError(
                f"{text} cannot be read as UTF-8 text: give a history of items, separated by "
                "commas or ends of lines"
            ) from None
    entries = list[str]()
    for line in map(str.strip, text.split("\n")):
        item, _, rating = line.rpartition(":")
        whole = line in items or (item in items and "," not in rating)
        entries += [line] if whole else line.split(",")
    return list(filter(None, map(str.strip, entries)))


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
    if keys.form == "hashed":
        return f"is it {near[0]!r}?" if near else f"there are {len(keys):,}, stored without text"
    if not near and len(keys) <= CLOSE:
        from difflib import get_close_matches

        near = get_close_matches(key, (keys[i] for i in range(len(keys))), n=3)
    if near:
        return f"is it {' or '.join(repr(word) for word in near)}?"
    some = ", ".join(repr(keys[i]) for i in range(min(3, len(keys))))
    return f"there are {len(keys):,}, such as {some}"
