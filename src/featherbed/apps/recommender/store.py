"""The folder of a recommender: two packed tables with keys, rated items, titles and a JSON file.

``recommender.json`` is removed first and written last: a folder without it is no recommender.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.errors import ArgumentError, FormatError, MissingFileError
from featherbed.io.arrays import write_arrays
from featherbed.packed.file import load
from featherbed.packed.schema import MOST_DIM, MOST_ROWS, FieldReader
from featherbed.packed.table import PackedTable
from featherbed.packed.writing import replacing
from featherbed.version import __version__

VERSION = 1
BIASES = ("none", "column", "apart")
MAX_JSON = 1 << 24  # bytes
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
) -> None:
    """Write a recommender into a folder; other files in it are kept.

    Tables (packed tables or their files) have keys. Everything is checked before the first write.

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
        files[TITLES] = ("titles", _encode_titles(titles, right.rows))
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
        write_arrays(folder / name, kind, arrays)
    with (
        replacing(folder / JSON) as descriptor,
        os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as file,
    ):
        file.write(text + "\n")


def read_info(folder: Path) -> RecommenderInfo:
    """Return the content of a folder's ``recommender.json``."""
    path = folder / JSON
    if not folder.is_dir():
        raise MissingFileError(
            f"{folder}: no such folder" if not folder.exists() else f"{folder} is no folder"
        )
    if not path.is_file():
        raise MissingFileError(
            f"{folder} holds no recommender ({JSON} is missing): "
            "featherbed train ratings FILE --out DIR"
        )
    if path.stat().st_size > MAX_JSON:
        raise FormatError(
            f"{JSON} has {path.stat().st_size:,} bytes, at most {MAX_JSON:,} are read"
        )
    try:
        found = FieldReader(json.loads(path.read_bytes().decode("utf-8")), JSON)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{JSON} is not JSON: {str(error)[:100]}") from None
    version = found.raw("recommender")
    if isinstance(version, bool) or version != VERSION:
        raise FormatError(
            f"{JSON}: version {str(version)[:40]} is not known here, "
            f"this featherbed reads version {VERSION}"
        )
    mean, about = found.raw("mean"), found.raw("about")
    if isinstance(mean, bool) or not isinstance(mean, int | float) or not abs(mean) < 1e30:
        raise FormatError(f"{JSON}.mean must be a number, got {str(mean)[:40]}")
    if not isinstance(about, dict):
        raise FormatError(f"{JSON}.about must be an object, got {type(about).__name__}")
    return RecommenderInfo(
        found.integer("users", 1, MOST_ROWS),
        found.integer("items", 1, MOST_ROWS),
        found.integer("dim", 1, MOST_DIM),
        float(mean),
        found.choice("biases", BIASES),
        found.integer("seen", 0, MOST_ROWS),
        found.flag("titles"),
        about,
    )


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


def _encode_titles(titles: Iterable[str | None], rows: int) -> dict[str, NDArray[Any]]:
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
