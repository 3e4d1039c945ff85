"""Stored sequence models: recommendations after a history of items, with numpy alone.

    x_0 = p_0,  x_t = sqrt(d) row(i_t) + p_t          (with users, beside it sqrt(u) row(user))
    x <- x + attention(norm(x)),  x <- x + W2 relu(W1 norm(x) + b1) + b2       layer by layer
    logits = norm(x_last)[:d] . row(v) for all items v

A folder holds the packed rows of items with their keys, those of users if there are any, the other
weights, titles, and ``sequences.json``, which is removed first and written last: a folder without
it holds no model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from featherbed.apps.bundle import (
    MODEL,
    PRECISIONS,
    SEQUENCES,
    decode_weights,
    encode_weights,
    read_description,
)
from featherbed.apps.recommender.serve import (
    FEW,
    ITEMS,
    TITLES,
    USERS,
    ScoredItem,
    StoredTitles,
    encode_titles,
    split_history,
)
from featherbed.errors import ArgumentError, FormatError
from featherbed.files import write_file
from featherbed.packed import (
    ARRAYS_VERSION,
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
MAX_LAYERS, MAX_LENGTH, MAX_INNER = 16, 4096, 1 << 16
EPS = 1e-5  # of torch's LayerNorm
FILES = (ITEMS, USERS, MODEL, TITLES, SEQUENCES)


class SequenceShape(NamedTuple):
    """The sizes of a sequence model."""

    items: int
    dim: int
    users: int  # width of the rows of users, 0 without
    length: int  # number of last items that are read
    layers: int
    heads: int
    inner: int

    @property
    def width(self) -> int:
        """The width of the transformer."""
        return self.dim + self.users

    def arrays(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by name, as ``torch.nn.Linear`` has them.

        >>> SequenceShape(9, 4, 0, 5, 1, 2, 8).arrays()["layer0.expand.weight"]
        (8, 4)
        """
        width = self.width
        shapes: dict[str, tuple[int, ...]] = {"positions": (self.length + 1, width)}
        layer = {"attention": (3 * width, width), "project": (width, width)}
        layer |= {"expand": (self.inner, width), "contract": (width, self.inner)}
        for number in range(self.layers):
            for name, shape in layer.items():
                shapes[f"layer{number}.{name}.weight"] = shape
                shapes[f"layer{number}.{name}.bias"] = shape[:1]
            for name in ("norm1", "norm2"):
                shapes |= {f"layer{number}.{name}.{part}": (width,) for part in ("weight", "bias")}
        shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
        return shapes | ({"user_mean": (self.users,)} if self.users else {})

    def check(self, error: type[ArgumentError] | type[FormatError]) -> None:
        """Raise ``error`` for sizes that do not go together."""
        if self.width % self.heads:
            raise error(f"{self.heads} heads do not divide a width of {self.width}")


class SequenceRecommender:
    """A model written by ``featherbed train sequences``, opened from its folder.

    >>> import featherbed as fb
    >>> rng = np.random.default_rng(0)
    >>> shape = SequenceShape(items=5, dim=4, users=0, length=3, layers=1, heads=2, inner=4)
    >>> weights = {name: rng.normal(size=size) for name, size in shape.arrays().items()}
    >>> folder = getfixture("tmp_path") / "model"
    >>> keys = fb.Keys.of(["tea", "rum", "ale", "gin", "cider"])
    >>> items = fb.DenseTable.from_dense(rng.normal(size=(5, 4))).pack().replace(keys=keys)
    >>> write_sequences(folder, items, weights, shape, repeats=False)
    >>> model = SequenceRecommender.open(folder)
    >>> found = model.recommend_history(["tea", "gin"], k=2)
    >>> len(found), {item.key for item in found} & {"tea", "gin"}
    (2, set())
    """

    def __init__(
        self,
        items: PackedTable,
        weights: Mapping[str, Floats],
        shape: SequenceShape,
        *,
        repeats: bool,
        users: PackedTable | None = None,
        titles: StoredTitles | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        self.items, self.weights, self.shape, self.repeats = items, weights, shape, repeats
        self.users, self.titles, self.about = users, titles, about or {}

    @classmethod
    def open(cls, folder: str | Path) -> SequenceRecommender:
        """Open a folder; missing, broken or foreign files raise an error that names them."""
        folder = Path(folder)
        found = read_description(
            folder,
            SEQUENCES,
            "sequence model",
            VERSION,
            "featherbed train sequences FILE --out DIR",
        )
        shape = SequenceShape(
            found.integer("items", 2, MOST_ROWS),
            found.integer("dim", 1, MOST_DIM),
            found.integer("user_dim", 0, MOST_DIM),
            found.integer("length", 1, MAX_LENGTH),
            found.integer("layers", 1, MAX_LAYERS),
            found.integer("heads", 1, MOST_DIM),
            found.integer("inner", 1, MAX_INNER),
        )
        shape.check(FormatError)
        items = _open_rows(folder / ITEMS, shape.items, shape.dim)
        users = titles = None
        if shape.users:
            count = found.integer("users", 1, MOST_ROWS)
            users = _open_rows(folder / USERS, count, shape.users)
        weights = decode_weights(
            folder / MODEL, shape.arrays(), found.choice("weights", PRECISIONS)
        )
        if found.flag("titles"):
            kinds = {"text": ("U8",), "ends": ("U32", "U64")}
            stored = read_arrays(folder / TITLES, "titles", kinds)
            if len(stored["ends"]) != shape.items:
                raise FormatError(f"{TITLES} does not hold a title for each of {shape.items} items")
            titles = StoredTitles(stored["text"], stored["ends"])
        return cls(
            items,
            weights,
            shape,
            repeats=found.flag("repeats"),
            users=users,
            titles=titles,
            about=found.raw("about"),
        )

    def __repr__(self) -> str:
        shape = self.shape
        return (
            f"SequenceRecommender({shape.items:,} items, width {shape.width}, "
            f"{shape.layers} layers, {shape.length} items read)"
        )

    def recommend_history(
        self,
        history: Sequence[Any],  # keys, or (key, rating) pairs whose ratings are not used
        k: int = 10,
        *,
        user: str | None = None,
        include_history: bool | None = None,
    ) -> list[ScoredItem]:
        """Return the k items most likely to follow a history, oldest first, with probabilities.

        Unknown items are skipped; ``unknown_items`` names them. Items of the history are left out
        unless ``include_history``, by default the setting of the model. ``user`` is the key of a
        user of the training data, for models with rows of users; by default the mean row is used.
        """
        check_count(k)
        ids = self.known_ids(history)
        logits = self.scores(ids[-self.shape.length :], self._user(user))
        shifted = logits - logits.max()
        probabilities = np.exp(shifted) / np.exp(shifted).sum()
        excluded = np.empty(0, np.int64)
        if not (self.repeats if include_history is None else include_history):
            excluded = np.unique(ids)
        logits[excluded] = -np.inf
        count = min(k, self.shape.items - len(excluded))
        if not count:
            return []
        best = TopRows(1, count)
        best.add(0, logits[None])
        return [self._named(id_, float(probabilities[id_])) for id_ in best.sorted()[0][0].tolist()]

    def known_ids(self, history: Sequence[Any]) -> Ids:  # -> [n]
        """Return the ids of the known items of a history; none is an error."""
        keys = _keys_of(history)
        found = self._find(keys)
        known = found[found >= 0]
        if not len(known):
            names = ", ".join(repr(key[:40]) for key in keys[:3])
            raise ArgumentError(
                f"no item of the history is known ({names or 'it is empty'}): give at least one of "
                f"the {self.shape.items:,} items"
            )
        return known

    def unknown_items(self, history: Sequence[Any]) -> list[str]:
        """Return the items of a history that the model does not know."""
        keys = _keys_of(history)
        return [keys[place] for place in np.flatnonzero(self._find(keys) < 0).tolist()]

    def _find(self, keys: list[str]) -> Ids:  # -> [n], -1 for unknown ones
        return np.asarray(self.items.ids(keys) if keys else [], dtype=np.int64)

    def scores(self, ids: ArrayLike, user: Floats | None = None) -> Floats:  # [n] -> [V]
        """Return the logit of every item after a history of ids, oldest first."""
        row = np.asarray(ids, dtype=np.int64)[None]
        users = None if user is None else user[None]
        found: Floats = self.batch_scores(row, np.array([row.shape[1]]), users)[0]
        if not np.isfinite(found).all():
            raise FormatError(f"a score is not finite: {ITEMS} holds such values, train again")
        return found

    def batch_scores(
        self, ids: Ids, lengths: Ids, users: Floats | None = None
    ) -> Floats:  # [B, n], [B], [B, u] -> [B, V]
        """Return the logits after the first ``lengths`` items of each row of ids."""
        hidden = self._hidden(ids, lengths, users)[:, : self.shape.dim]
        with as_loaded() if self.shape.items <= FEW else nullcontext():
            return self.items.logits(hidden)

    def _hidden(self, ids: Ids, lengths: Ids, users: Floats | None) -> Floats:  # -> [B, w]
        shape, weights = self.shape, self.weights
        count, length = len(ids), ids.shape[1] + 1
        x = np.zeros((count, length, shape.width), dtype=np.float32)
        with as_loaded():
            x[:, 1:, : shape.dim] = self.items[ids] * np.float32(math.sqrt(shape.dim))
        if shape.users:
            rows = np.broadcast_to(weights["user_mean"], (count, shape.users))
            own = rows if users is None else users
            x[:, :, shape.dim :] = own[:, None] * np.float32(math.sqrt(shape.users))
        x += weights["positions"][:length]
        for number in range(shape.layers):
            last = lengths if number == shape.layers - 1 else None
            x = self._layer(x, f"layer{number}", last)
        found: Floats = _normalize(x[:, 0], weights["norm.weight"], weights["norm.bias"])
        return found

    def _layer(self, x: Floats, name: str, last: Ids | None) -> Floats:
        """Return the output of all positions, or of the ``last`` [B] alone: [B, 1, w]."""
        weights, heads = self.weights, self.shape.heads
        count, length, width = x.shape

        def linear(given: Floats, part: str) -> Floats:
            weight, bias = weights[f"{name}.{part}.weight"], weights[f"{name}.{part}.bias"]
            found: Floats = given @ weight.T + bias
            return found

        def norm(given: Floats, part: str) -> Floats:
            return _normalize(given, *(weights[f"{name}.{part}.{p}"] for p in ("weight", "bias")))

        parts = linear(norm(x, "norm1"), "attention").reshape(count, length, 3, heads, -1)
        query, key, value = parts.transpose(2, 0, 3, 1, 4)  # [B, heads, L, width of a head]
        place = np.arange(length)
        limits = np.broadcast_to(place, (count, length))
        if last is not None:
            limits = last[:, None]
            query = query[np.arange(count), :, last][:, :, None]
            x = x[np.arange(count), last][:, None]
        scores = query @ key.swapaxes(2, 3) / np.float32(math.sqrt(width // heads))
        scores += np.where(place > limits[:, :, None], np.float32(-np.inf), np.float32(0))[:, None]
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        mixed = (scores @ value).swapaxes(1, 2).reshape(count, -1, width)
        x = x + linear(mixed, "project")
        inner = np.maximum(linear(norm(x, "norm2"), "expand"), 0)
        return x + linear(inner, "contract")

    def user_rows(self, users: ArrayLike) -> Floats | None:  # int [B] -> [B, u]
        """Return the rows of users by id, None for a model without rows of users."""
        if self.users is None:
            return None
        with as_loaded():
            return self.users[np.asarray(users, dtype=np.int64)]

    def _user(self, key: str | None) -> Floats | None:
        if key is None:
            return None
        if self.users is None:
            raise ArgumentError(
                "this model has no rows of users: leave the user out (model.users=32 in training "
                "gives every user a row)"
            )
        with as_loaded():
            return self.users[key]

    def _named(self, id_: int, score: float) -> ScoredItem:
        key = self.items.name_of(id_) or f"row {id_}"
        return ScoredItem(key, score, None if self.titles is None else self.titles[id_])


def write_sequences(
    folder: str | Path,
    items: PackedTable,
    weights: Mapping[str, ArrayLike],
    shape: SequenceShape,
    *,
    repeats: bool,
    users: PackedTable | None = None,
    titles: Iterable[str | None] | None = None,
    precision: str = "float32",
    about: dict[str, Any] | None = None,
) -> None:
    """Write a sequence model into a folder; everything is checked before anything is written."""
    folder = Path(folder)
    shape.check(ArgumentError)
    arrays = {name: np.asarray(value, dtype=np.float32) for name, value in weights.items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    if shapes != shape.arrays():
        raise ArgumentError(
            f"a model of these sizes takes the arrays {shape.arrays()}, got {shapes}"[:1000]
        )
    for side, table, dim in (("items", items, shape.dim), ("users", users, shape.users)):
        if table is not None and (table.dim != dim or table.keys is None):
            raise ArgumentError(f"the rows of {side} need keys and the width {dim}")
    if items.rows != shape.items or (users is None) != (shape.users == 0):
        raise ArgumentError(f"the tables do not have the sizes of {shape}")
    description = {
        "sequences": VERSION,
        "featherbed": __version__,
        "items": items.rows,
        "users": 0 if users is None else users.rows,
        "dim": shape.dim,
        "user_dim": shape.users,
        **{name: getattr(shape, name) for name in ("length", "layers", "heads", "inner")},
        "weights": precision,
        "repeats": repeats,
        "titles": titles is not None,
        "about": about or {},
    }
    try:
        text = json.dumps(description, ensure_ascii=False, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"about must be plain JSON: {str(error)[:100]}") from None
    encoded = encode_weights(arrays, precision)
    named = None if titles is None else encode_titles(titles, items.rows)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (SEQUENCES, USERS, TITLES):
        (folder / name).unlink(missing_ok=True)
    items.save(folder / ITEMS)
    if users is not None:
        users.save(folder / USERS)
    if named is not None:
        write_arrays(folder / TITLES, {"titles": ARRAYS_VERSION}, named)
    write_arrays(folder / MODEL, {"weights": ARRAYS_VERSION}, encoded)
    write_file(folder / SEQUENCES, text + "\n")


def check_sequences(folder: str | Path) -> SequenceRecommender:
    """Open a folder and read every byte of its tables too. Raises FormatError.

    >>> check_sequences("nothing")
    Traceback (most recent call last):
    featherbed.errors.MissingFileError: nothing: no such folder
    """
    model = SequenceRecommender.open(folder)
    for name in (ITEMS, USERS) if model.users is not None else (ITEMS,):
        check_table(Path(folder) / name)
    return model


def parse_items(text: str, items: Container[str] = ()) -> list[str]:
    """Return the item keys of a text, oldest first, or of a file of such lines.

    A line that is a key of ``items`` as a whole is one item, whatever commas it has.

    >>> parse_items("12, 57,tt:99")
    ['12', '57', 'tt:99']
    """
    return split_history(text, items)


def _keys_of(history: Sequence[Any]) -> list[str]:
    return [entry if isinstance(entry, str) else str(entry[0]) for entry in history]


def _normalize(x: Floats, weight: Floats, bias: Floats) -> Floats:  # [..., w]
    centered = x - x.mean(-1, keepdims=True)
    variance = np.square(centered).mean(-1, keepdims=True)
    found: Floats = centered / np.sqrt(variance + np.float32(EPS)) * weight + bias
    return found


def _open_rows(path: Path, rows: int, dim: int) -> PackedTable:
    try:
        table = load(path)
    except FormatError as error:
        raise FormatError(f"{path.name}: {error}") from None
    if (table.rows, table.dim) != (rows, dim) or table.keys is None:
        keys = "without" if table.keys is None else "with"
        raise FormatError(
            f"{path.name} holds {table.rows} x {table.dim} {keys} keys, the model has {rows} rows "
            f"of width {dim}"
        )
    return table
