"""The data of a recommender: ratings from a file, checked, split, and numbered by frequency.

A split can be saved with two bits per rating and used again; it is refused for other ratings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from featherbed.apps.recommender.settings import SPLITS, RecommenderSettings
from featherbed.errors import ArgumentError, DataError, FormatError
from featherbed.files import write_file
from featherbed.io.records import (
    ItemTitles,
    Ratings,
    RatingsReading,
    block_slices,
    count_ids,
    group_by_user,
    is_constant,
    is_stored,
    new_array,
    read_ratings,
    read_titles,
)
from featherbed.progress import show_progress

TRAIN, VALIDATION, TEST, LEFT_OUT = range(4)
FORMAT = "featherbed split 1"
PARTS = ("train", "validation", "test")
KEYS_CHECKED = 1024  # keys that enter a checksum
SAMPLE = 1_000_000  # ratings inspected for counts
MAX_SCALE = 20  # top of common rating scales: larger whole numbers may be counts


@dataclass(frozen=True)
class Split:
    """Training, validation and test parts of the same ratings.

    ``parts`` holds the part of every rating (0 train, 1 validation, 2 test, 3 left out),
    ``checksum`` identifies the ratings.
    """

    train: Ratings
    validation: Ratings
    test: Ratings
    method: str
    seed: int
    parts: NDArray[np.uint8] | None = field(default=None, repr=False, compare=False)
    checksum: str = ""


@dataclass(frozen=True)
class RecommenderData:
    """Ratings, their split with ids by falling frequency, titles, and lines for the user."""

    reading: RatingsReading
    split: Split
    titles: ItemTitles | None
    lines: list[str]


def read_data(
    source: Path, settings: RecommenderSettings, seed: int, workplace: Path, *, progress: bool
) -> RecommenderData:
    """Read and split the ratings of a file."""
    columns, reading_settings = settings.columns.values(), settings.reading.values()
    with show_progress("reading", percent=True, shown=progress, transient=True) as shown:

        def update(done: int, size: int) -> None:
            shown.update(done, total=size)

        reading = read_ratings(
            source, **columns, **reading_settings, workplace=workplace, progress=update
        )
    ratings = reading.ratings
    check_ratings(ratings, source)
    shown_columns = ", ".join(f"{role} = {column}" for role, column in reading.columns.items())
    lines = [
        f"{len(ratings):,} ratings of {ratings.num_items:,} items by {ratings.num_users:,} users "
        f"({shown_columns})",
        *reading.notes,
        *note_counts(ratings),
    ]
    with show_progress("splitting", shown=progress, transient=True):
        split = _split_data(ratings, settings, seed, workplace, lines)
        split = sort_by_frequency(split, workplace)
    path, keys = settings.titles, split.train.item_keys
    titles = None if path is None else read_titles(path, keys)
    return RecommenderData(reading, split, titles, lines)


def _split_data(
    ratings: Ratings, settings: RecommenderSettings, seed: int, workplace: Path, lines: list[str]
) -> Split:
    given = settings.split
    split = make_split(
        ratings,
        given.method,
        seed=seed,
        validation=given.validation,
        test=given.test,
        leave=given.leave,
        workplace=workplace,
    )
    if given.known_only:
        before = len(split.validation), len(split.test)
        split = keep_known(split, workplace)
        lines.append(
            f"users and items not seen in training: {before[0] - len(split.validation):,} "
            f"validation and {before[1] - len(split.test):,} test ratings left out"
        )
    sizes = {name: len(getattr(split, name)) for name in PARTS}
    for name, size in sizes.items():
        if not size:
            raise DataError(
                f"the {name} part of the {split.method} split is empty: give more ratings, or "
                "another --split"
            )
    counts = ", ".join(f"{size:,} {name}" for name, size in sizes.items())
    lines.append(f"{split.method} split: {counts}")
    return split


def check_ratings(ratings: Ratings, source: Path | str = "the file") -> None:
    """Refuse ratings that are all equal: they are implicit feedback, a task for ranking.

    >>> ids = np.array([0, 1])
    >>> same = Ratings(ids, ids, np.ones(2, np.float32), ("a", "b"), ("x", "y"))
    >>> check_ratings(same, "plays.csv")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    featherbed.errors.DataError: plays.csv: every rating is 1, so there is nothing to predict: ...
    """
    if is_constant(ratings):
        raise DataError(
            f"{source}: every rating is {ratings.values[0]:g}, so there is nothing to predict: "
            "such implicit data (clicks, purchases) need ranking, not a ratings model: "
            "featherbed train ranking FILE --out DIR"
        )


def note_counts(ratings: Ratings) -> list[str]:
    """Return a note on ratings that look like counts.

    >>> counts = np.array([1] * 60 + [2] * 20 + [3] * 10 + [40] * 10, np.float32)
    >>> ids, keys = np.arange(100), [str(i) for i in range(100)]
    >>> len(note_counts(Ratings(ids, ids, counts, keys, keys)))
    1
    """
    if not look_like_counts(ratings):
        return []
    low, high = float(ratings.values.min()), float(ratings.values.max())
    return [
        f"the ratings look like counts (whole numbers from {low:g} to {high:,.0f}, most of them "
        f"near {low:g}): a ratings model predicts their size and may rank items worse than "
        "popularity does; featherbed train ranking FILE --out DIR ranks items"
    ]


def look_like_counts(ratings: Ratings) -> bool:
    """Whether ratings look like counts: whole numbers with a long tail, mostly the smallest two."""
    step = -(-len(ratings) // SAMPLE)
    values = np.asarray(ratings.values[::step], dtype=np.float64)
    low, high = float(values.min()), float(values.max())
    if low not in (0.0, 1.0) or high <= MAX_SCALE or not (values == np.floor(values)).all():
        return False
    return bool(np.mean(values <= low + 1) >= 0.5 and np.median(values) <= 0.1 * high)


def make_split(
    ratings: Ratings,
    method: str = "random",
    *,
    seed: int = 0,
    validation: float = 0.1,
    test: float = 0.1,
    leave: int = 1,
    workplace: str | Path | None = None,
) -> Split:
    """Split ratings into training, validation and test.

    Args:
        ratings: all ratings.
        method: "random", as ``ratings.split(seed)``; "time", the last ratings to test and those
            before to validation; "leave-out", the last ``leave`` ratings of every user to test and
            the ``leave`` before to validation, by time or, without times, at random. A user with
            fewer than 2 ``leave`` + 1 ratings stays in training.
        seed: random seed.
        validation: fraction of the ratings; not used by "leave-out".
        test: fraction of the ratings; not used by "leave-out".
        leave: number of ratings per user.
        workplace: folder for the parts of ratings that are in files.

    >>> ids = np.arange(10)
    >>> keys, times = (("u", "v"), tuple("abcde")), ids[::-1].copy()
    >>> ratings = Ratings(ids % 2, ids // 2, ids.astype(np.float32), *keys, times)
    >>> split = make_split(ratings, "time", test=0.2)
    >>> split.test.values.tolist(), split.validation.values.tolist()
    ([0.0, 1.0], [2.0])
    """
    if method not in SPLITS:
        raise ArgumentError(f"method={method!r}: use one of {', '.join(SPLITS)}")
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        raise ArgumentError(
            f"validation={validation}, test={test}: "
            "give fractions from 0 that leave ratings for training"
        )
    if method == "leave-out":
        required = {"train": 1.0, "test": 1.0}
        parts = _hold_out_last(ratings, leave, seed)
    else:
        required = {"train": 1.0, "validation": validation, "test": test}
        cuts = (int(len(ratings) * (1 - validation - test)), int(len(ratings) * (1 - test)))
        by_time = method == "time"
        parts = _cut_by_time(ratings, cuts) if by_time else _draw(len(ratings), cuts, seed)
    sizes = np.bincount(parts, minlength=3)
    for number, name in enumerate(PARTS):
        if required.get(name) and not sizes[number]:
            raise DataError(
                f"{len(ratings):,} pairs of users and items are too few for a {method} split: "
                f"none is left for {name}, give more"
            )
    return apply_parts(ratings, parts, method, seed, ratings_checksum(ratings), workplace)


def apply_parts(
    ratings: Ratings,
    parts: NDArray[np.uint8],
    method: str,
    seed: int,
    checksum: str,
    folder: str | Path | None = None,
) -> Split:
    """Return the split in which every rating is in its part."""
    train, validation, test = (
        ratings.select(parts == part, folder) for part in (TRAIN, VALIDATION, TEST)
    )
    return Split(train, validation, test, method, seed, parts, checksum)


def _draw(count: int, cuts: tuple[int, int], seed: int) -> NDArray[np.uint8]:
    order = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)
    # the order of permutation(count), in half the memory
    np.random.default_rng(seed).shuffle(order)
    parts = np.zeros(count, dtype=np.uint8)
    parts[order[cuts[0] : cuts[1]]] = VALIDATION
    parts[order[cuts[1] :]] = TEST
    return parts


def _cut_by_time(ratings: Ratings, cuts: tuple[int, int]) -> NDArray[np.uint8]:
    if ratings.times is None:
        raise ArgumentError(
            "there are no times: name their column (--set columns.time=NAME), or split at random"
        )
    return _is_later(ratings.times, cuts[0]).astype(np.uint8) + _is_later(ratings.times, cuts[1])


def _is_later(times: NDArray[np.int64], place: int) -> NDArray[np.bool_]:  # [n] -> [n]
    """Mark ratings from ``place`` on in the order of time; the order of lines breaks ties."""
    if place >= len(times):
        return np.zeros(len(times), dtype=bool)
    edge = np.partition(times, place)[place]
    later: NDArray[np.bool_] = np.asarray(times > edge)
    same = np.flatnonzero(times == edge)
    later[same[place - int(np.count_nonzero(times < edge)) :]] = True
    return later


def _hold_out_last(ratings: Ratings, leave: int, seed: int) -> NDArray[np.uint8]:
    if leave < 1:
        raise ArgumentError(f"leave={leave}: give at least one rating per user")
    order_by: NDArray[Any] = (
        np.random.default_rng(seed).random(len(ratings), dtype=np.float32)
        if ratings.times is None
        else ratings.times
    )
    parts = np.zeros(len(ratings), dtype=np.uint8)
    for places in group_by_user(ratings.users, ratings.num_users):
        users = ratings.users[places]
        order = np.lexsort((order_by[places], users))  # stable: the order of lines breaks ties
        begins = np.flatnonzero(np.append(True, np.diff(users[order]) != 0)[: len(order)])
        sizes = np.diff(np.append(begins, len(order)))
        rank = np.repeat(begins + sizes, sizes) - np.arange(len(order))  # 1 for a user's last
        enough = np.repeat(sizes > 2 * leave, sizes)
        parts[places[order[enough & (rank <= 2 * leave)]]] = VALIDATION
        parts[places[order[enough & (rank <= leave)]]] = TEST
    return parts


def keep_known(split: Split, workplace: str | Path | None = None) -> Split:
    """Restrict validation and test to users and items that occur in training.

    >>> ids, keys = np.array([0, 0, 1, 1]), (("u", "v"), ("a", "b"))
    >>> train, other = (Ratings(u, u, u.astype(np.float32), *keys) for u in (ids[:2], ids[1:3]))
    >>> split = keep_known(Split(train, other, other, "random", 0))
    >>> len(split.train), len(split.validation)
    (2, 1)
    """
    train = split.train
    known_users = count_ids(train.users, train.num_users) > 0
    known_items = count_ids(train.items, train.num_items) > 0
    parts = None if split.parts is None else split.parts.copy()
    kept = []
    for number, part in ((VALIDATION, split.validation), (TEST, split.test)):
        known = known_users[part.users] & known_items[part.items]
        if len(part) and not known.any():
            raise DataError(
                "no held-out pair is of a user and an item that occur in training: give more "
                "lines, or another --split"
            )
        kept.append(part.select(known, workplace))
        if parts is not None:
            parts[np.flatnonzero(parts == number)[~known]] = LEFT_OUT
    return replace(split, validation=kept[0], test=kept[1], parts=parts)


def sort_by_frequency(split: Split, workplace: str | Path | None = None) -> Split:
    """Renumber users and items by falling number of training ratings; the old id breaks ties.

    >>> users, items = np.array([0, 1, 1]), np.array([2, 2, 0])
    >>> one = Ratings(users, items, np.ones(3, np.float32), ("u", "v"), ("a", "b", "c"))
    >>> renumbered = sort_by_frequency(Split(one, one, one, "random", 0)).train
    >>> renumbered.user_keys, renumbered.items.tolist(), renumbered.item_keys
    (('v', 'u'), [0, 0, 1], ('c', 'a', 'b'))
    """
    train = split.train
    new, keys = list[NDArray[np.int32]](), list[Sequence[str]]()
    for ids, names in ((train.users, train.user_keys), (train.items, train.item_keys)):
        order = np.argsort(-count_ids(ids, len(names)), kind="stable")
        new.append(np.empty(len(names), dtype=np.int32))
        new[-1][order] = np.arange(len(names), dtype=np.int32)
        take = getattr(names, "take", None)
        keys.append(take(order) if take else tuple(names[at] for at in order.tolist()))

    def renumber(part: Ratings) -> Ratings:
        users = _map_ids(part.users, new[0], workplace)
        items = _map_ids(part.items, new[1], workplace)
        return Ratings(users, items, part.values, keys[0], keys[1], part.times)

    return replace(
        split,
        train=renumber(train),
        validation=renumber(split.validation),
        test=renumber(split.test),
    )


def _map_ids(
    ids: NDArray[np.integer], new: NDArray[np.int32], folder: str | Path | None
) -> NDArray[np.int32]:
    out = new_array(len(ids), np.int32, folder, stored=is_stored(ids))
    for block in block_slices(len(ids)):
        out[block] = new[ids[block]]
    return out


def ratings_checksum(ratings: Ratings) -> str:
    """Return a SHA-256 of users, items and ratings in their order, and of some of the keys.

    >>> values, keys = np.array([4, 3], np.float32), (("u", "v"), ("film",))
    >>> one = Ratings(np.array([0, 1]), np.array([0, 0]), values, *keys)
    >>> swapped = one.take(np.array([1, 0]))
    >>> ratings_checksum(one) == ratings_checksum(swapped)
    False
    """
    digest = hashlib.sha256(f"{len(ratings)} {ratings.num_users} {ratings.num_items}".encode())
    columns = ((ratings.users, "<i4"), (ratings.items, "<i4"), (ratings.values, "<f4"))
    for block in block_slices(len(ratings)):
        for column, kind in columns:
            digest.update(np.ascontiguousarray(column[block], dtype=kind).tobytes())
    for keys in (ratings.user_keys, ratings.item_keys):
        count = min(KEYS_CHECKED, len(keys))
        for at in np.unique(np.linspace(0, max(len(keys) - 1, 0), count, dtype=np.int64)).tolist():
            digest.update(keys[at].encode() + b"\n")
    return digest.hexdigest()


def save_split(split: Split, path: str | Path) -> None:
    """Write the part of every rating, two bits each, atomically.

    >>> ids, keys = np.arange(20), (tuple("stuv"), tuple("abcde"))
    >>> ratings = Ratings(ids % 4, ids // 4, ids.astype(np.float32), *keys)
    >>> path = getfixture("tmp_path") / "split.safetensors"
    >>> save_split(make_split(ratings, seed=3), path)
    >>> load_split(path, ratings).test.values.tolist() == ratings.split(3)[2].values.tolist()
    True
    """
    if split.parts is None or not split.checksum:
        raise ArgumentError(
            "this split does not know the ratings it was made of: save a split of make_split"
        )
    padded = np.zeros(-(-len(split.parts) // 4) * 4, dtype=np.uint8)
    padded[: len(split.parts)] = split.parts
    fours = padded.reshape(-1, 4)
    packed = fours[:, 0] | fours[:, 1] << 2 | fours[:, 2] << 4 | fours[:, 3] << 6
    about = {
        "format": FORMAT,
        "how": split.method,
        "seed": split.seed,
        "rows": len(split.parts),
        "checksum": split.checksum,
    }
    data = save_tensors({"parts": packed}, metadata={"split": json.dumps(about)})
    write_file(path, data)


def load_split(path: str | Path, ratings: Ratings, workplace: str | Path | None = None) -> Split:
    """Read a split and apply it to the ratings it was made of; other ratings are refused."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    try:
        size = int.from_bytes(data[:8], "little")
        about = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["split"])
        method, checksum = str(about["how"]), str(about["checksum"])
        seed, rows = int(about["seed"]), int(about["rows"])
        packed = load_tensors(data)["parts"]
        known = about["format"] == FORMAT and packed.dtype == np.uint8
        known = known and packed.shape == (-(-rows // 4),)
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise FormatError(f"{path} is no split: {str(error)[:80]}") from None
    if not known:
        raise FormatError(f"{path} is no split that this version can read")
    if rows != len(ratings) or checksum != ratings_checksum(ratings):
        raise DataError(
            f"{path} is a split of other ratings ({rows:,}; here are {len(ratings):,}): "
            "make a new one"
        )
    fours = np.stack([packed & 3, packed >> 2 & 3, packed >> 4 & 3, packed >> 6], axis=1)
    return apply_parts(ratings, fours.reshape(-1)[:rows], method, seed, checksum, workplace)
