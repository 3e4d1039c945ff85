"""Which ratings to train on, to choose by, and to measure with: at random, by time, or the last of every user.

A split can be saved as two bits a rating and used again; a file is refused for ratings other than its own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from featherbed.errors import ArgumentError, DataError, FormatError
from featherbed.packed.writing import replacing
from featherbed.tasks.data import Ratings
from featherbed.tasks.spool import by_user, chosen, cuts, is_stored, new_array

WAYS = ("random", "time", "leave-out")
TRAIN, VALIDATION, TEST, LEFT_OUT = range(4)
FORMAT = "featherbed split 1"
LOOKED_AT = 1024  # keys a checksum looks at


@dataclass(frozen=True)
class Split:
    """Three parts of the same ratings, and how they were made.

    ``parts`` tells the part of every rating of the whole (0 train, 1 validation, 2 test, 3 left out), ``checksum`` which
    whole that is.
    """

    train: Ratings
    validation: Ratings
    test: Ratings
    how: str
    seed: int
    parts: NDArray[np.uint8] | None = field(default=None, repr=False, compare=False)
    checksum: str = ""


def make_split(
    ratings: Ratings,
    how: str = "random",
    *,
    seed: int = 0,
    validation: float = 0.1,
    test: float = 0.1,
    leave: int = 1,
    workplace: str | Path | None = None,
) -> Split:
    """Split ratings for training, validation and test.

    Args:
        ratings: all of them.
        how: "random", as ``ratings.split(seed)``; "time", the last to test and those before to validation; "leave-out",
            the last ``leave`` of every user to test and the ``leave`` before to validation, by time or, without times, at
            random. A user with fewer than 2 ``leave`` + 1 ratings stays in training.
        seed: of what is drawn.
        validation: share of the ratings; not used by "leave-out".
        test: share of the ratings; not used by "leave-out".
        leave: ratings of a user.
        workplace: the folder for the parts of ratings that lie in files.

    >>> ids = np.arange(10)
    >>> ratings = Ratings(ids % 2, ids // 2, ids.astype(np.float32), ("u", "v"), tuple("abcde"), times=ids[::-1].copy())
    >>> split = make_split(ratings, "time", test=0.2)
    >>> split.test.values.tolist(), split.validation.values.tolist()
    ([0.0, 1.0], [2.0])
    """
    if how not in WAYS:
        raise ArgumentError(f"how={how!r}: use one of {', '.join(WAYS)}")
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        raise ArgumentError(
            f"validation={validation}, test={test}: shares from 0 that leave something to train on"
        )
    if how == "leave-out":
        parts = _last_of_users(ratings, leave, seed)
    else:
        at = (int(len(ratings) * (1 - validation - test)), int(len(ratings) * (1 - test)))
        parts = _by_time(ratings, at) if how == "time" else _at_random(len(ratings), at, seed)
    shares = (
        {"train": 1.0, "validation": validation, "test": test}
        if how != "leave-out"
        else dict.fromkeys(("train", "test"), 1.0)
    )
    sizes = np.bincount(parts, minlength=3)
    for number, name in enumerate(("train", "validation", "test")):
        if shares.get(name, 0) and not sizes[number]:
            raise DataError(
                f"{len(ratings):,} ratings are too few for a {how} split: nothing is left for {name}"
            )
    return _split(ratings, parts, how, seed, checksum(ratings), workplace)


def _split(
    ratings: Ratings,
    parts: NDArray[np.uint8],
    how: str,
    seed: int,
    whole: str,
    folder: str | Path | None,
) -> Split:
    train, validation, test = (
        chosen_ratings(ratings, parts == part, folder) for part in (TRAIN, VALIDATION, TEST)
    )
    return Split(train, validation, test, how, seed, parts, whole)


def chosen_ratings(
    ratings: Ratings, keep: NDArray[np.bool_], folder: str | Path | None = None
) -> Ratings:
    """Return the kept ratings, in files if they were; users and items keep their ids."""
    users, items, values = (
        chosen(column, keep, folder) for column in (ratings.users, ratings.items, ratings.values)
    )
    times = None if ratings.times is None else chosen(ratings.times, keep, folder)
    return Ratings(users, items, values, ratings.user_keys, ratings.item_keys, times)


def _at_random(count: int, at: tuple[int, int], seed: int) -> NDArray[np.uint8]:
    order = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)
    np.random.default_rng(seed).shuffle(
        order
    )  # the same order as permutation(count), in half the memory
    parts = np.zeros(count, dtype=np.uint8)
    parts[order[at[0] : at[1]]] = VALIDATION
    parts[order[at[1] :]] = TEST
    return parts


def _by_time(ratings: Ratings, at: tuple[int, int]) -> NDArray[np.uint8]:
    times = ratings.times
    if times is None:
        raise ArgumentError(
            "these ratings have no times: name their column (--time), or split at random"
        )
    return _from(times, at[0]).astype(np.uint8) + _from(times, at[1])


def _from(times: NDArray[np.int64], place: int) -> NDArray[np.bool_]:  # [n] -> [n]
    """Mark what comes at ``place`` or later in the order of time; at the same time the order of lines counts."""
    if place >= len(times):
        return np.zeros(len(times), dtype=bool)
    edge = np.partition(times, place)[place]
    later: NDArray[np.bool_] = np.asarray(times > edge)
    same = np.flatnonzero(times == edge)
    later[same[place - int(np.count_nonzero(times < edge)) :]] = True
    return later


def _last_of_users(ratings: Ratings, leave: int, seed: int) -> NDArray[np.uint8]:
    if leave < 1:
        raise ArgumentError(f"leave={leave}: at least one rating of a user")
    drawn = (
        np.random.default_rng(seed).random(len(ratings), dtype=np.float32)
        if ratings.times is None
        else None
    )
    parts = np.zeros(len(ratings), dtype=np.uint8)
    for places in by_user(ratings.users, ratings.num_users):
        users = ratings.users[places]
        when: NDArray[Any] = (
            drawn[places] if drawn is not None else np.asarray(ratings.times)[places]
        )
        order = np.lexsort((when, users))  # stable: at the same time the order of lines counts
        begins = (
            np.flatnonzero(np.append(True, np.diff(users[order]) != 0))
            if len(order)
            else np.zeros(0, dtype=np.int64)
        )
        sizes = np.diff(np.append(begins, len(order)))
        left = np.repeat(begins + sizes, sizes) - np.arange(
            len(order)
        )  # 1 for a user's last rating, 2 for the one before
        enough = np.repeat(sizes > 2 * leave, sizes)
        parts[places[order[enough & (left <= 2 * leave)]]] = VALIDATION
        parts[places[order[enough & (left <= leave)]]] = TEST
    return parts


def seen_only(split: Split, workplace: str | Path | None = None) -> Split:
    """Restrict validation and test to users and items that occur in training.

    >>> ids = np.array([0, 0, 1, 1])
    >>> parts = [Ratings(u, u, u.astype(np.float32), ("u", "v"), ("a", "b")) for u in (ids[:2], ids[1:3], ids[2:])]
    >>> split = seen_only(Split(*parts[:2], parts[1], "random", 0))
    >>> len(split.train), len(split.validation)
    (2, 1)
    """
    train = split.train
    seen = [np.zeros(count, dtype=bool) for count in (train.num_users, train.num_items)]
    for cut in cuts(len(train)):
        seen[0][train.users[cut]] = True
        seen[1][train.items[cut]] = True
    parts = None if split.parts is None else split.parts.copy()
    kept = []
    for number, part in ((VALIDATION, split.validation), (TEST, split.test)):
        known = seen[0][part.users] & seen[1][part.items]
        if len(part) and not known.any():
            raise DataError(
                "no rating outside training is of a user and an item that training has seen"
            )
        kept.append(chosen_ratings(part, known, workplace))
        if parts is not None:
            parts[np.flatnonzero(parts == number)[~known]] = LEFT_OUT
    return replace(split, validation=kept[0], test=kept[1], parts=parts)


def by_frequency(split: Split, workplace: str | Path | None = None) -> Split:
    """Renumber users and items so that id 0 has the most training ratings; ties go by the old id, keys follow.

    >>> users, items = np.array([0, 1, 1]), np.array([2, 2, 0])
    >>> one = Ratings(users, items, np.ones(3, np.float32), ("u", "v"), ("a", "b", "c"))
    >>> renumbered = by_frequency(Split(one, one, one, "random", 0)).train
    >>> renumbered.user_keys, renumbered.items.tolist(), renumbered.item_keys
    (('v', 'u'), [0, 0, 1], ('c', 'a', 'b'))
    """
    train = split.train
    new, keys = list[NDArray[np.int32]](), list[Sequence[str]]()
    for ids, names in ((train.users, train.user_keys), (train.items, train.item_keys)):
        totals = np.zeros(len(names), dtype=np.int64)
        for cut in cuts(len(ids)):
            totals += np.bincount(ids[cut], minlength=len(names))
        order = np.argsort(-totals, kind="stable")
        new.append(np.empty(len(names), dtype=np.int32))
        new[-1][order] = np.arange(len(names), dtype=np.int32)
        keys.append(
            names.take(order)
            if hasattr(names, "take")
            else tuple(names[at] for at in order.tolist())
        )

    def renumbered(part: Ratings) -> Ratings:
        users, items = (
            _mapped(ids, to, workplace)
            for ids, to in zip((part.users, part.items), new, strict=True)
        )
        return Ratings(users, items, part.values, keys[0], keys[1], part.times)

    return replace(
        split,
        train=renumbered(train),
        validation=renumbered(split.validation),
        test=renumbered(split.test),
    )


def _mapped(
    ids: NDArray[np.integer], to: NDArray[np.int32], folder: str | Path | None
) -> NDArray[np.int32]:
    made = new_array(len(ids), np.int32, folder, stored=is_stored(ids))
    for cut in cuts(len(ids)):
        made[cut] = to[ids[cut]]
    return made


def checksum(ratings: Ratings) -> str:
    """Return a SHA-256 of users, items and ratings in their order, and of some of the keys.

    >>> one = Ratings(np.array([0, 1]), np.array([0, 0]), np.array([4, 3], np.float32), ("u", "v"), ("film",))
    >>> checksum(one) == checksum(one.take(np.array([0, 1]))), checksum(one) == checksum(one.take(np.array([1, 0])))
    (True, False)
    """
    digest = hashlib.sha256(f"{len(ratings)} {ratings.num_users} {ratings.num_items}".encode())
    for cut in cuts(len(ratings)):
        for column, kind in (
            (ratings.users, "<i4"),
            (ratings.items, "<i4"),
            (ratings.values, "<f4"),
        ):
            digest.update(np.ascontiguousarray(column[cut], dtype=kind).tobytes())
    for keys in (ratings.user_keys, ratings.item_keys):
        for at in np.unique(
            np.linspace(0, max(len(keys) - 1, 0), min(LOOKED_AT, len(keys)), dtype=np.int64)
        ).tolist():
            digest.update(keys[at].encode() + b"\n")
    return digest.hexdigest()


def save_split(split: Split, path: str | Path) -> None:
    """Write which rating is in which part, two bits each, atomically.

    >>> ids = np.arange(20)
    >>> ratings = Ratings(ids % 4, ids // 4, ids.astype(np.float32), tuple("stuv"), tuple("abcde"))
    >>> path = getfixture("tmp_path") / "split.safetensors"
    >>> save_split(make_split(ratings, seed=3), path)
    >>> load_split(path, ratings).test.values.tolist() == ratings.split(3)[2].values.tolist()
    True
    """
    if split.parts is None or not split.checksum:
        raise ArgumentError(
            "this split does not know the ratings it was made of: save one that make_split has made"
        )
    filled = np.zeros(-(-len(split.parts) // 4) * 4, dtype=np.uint8)
    filled[: len(split.parts)] = split.parts
    fours = filled.reshape(-1, 4)
    packed = fours[:, 0] | fours[:, 1] << 2 | fours[:, 2] << 4 | fours[:, 3] << 6
    about = {
        "format": FORMAT,
        "how": split.how,
        "seed": split.seed,
        "rows": len(split.parts),
        "checksum": split.checksum,
    }
    data = save_tensors({"parts": packed}, metadata={"split": json.dumps(about)})
    with replacing(Path(path)) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)


def load_split(path: str | Path, ratings: Ratings, workplace: str | Path | None = None) -> Split:
    """Read a split and apply it to the ratings it was made of; others are refused."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    try:
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size])["__metadata__"]
        about = json.loads(metadata["split"])
        how, seed, rows, whole = (
            str(about["how"]),
            int(about["seed"]),
            int(about["rows"]),
            str(about["checksum"]),
        )
        packed = load_tensors(data)["parts"]
        known = (
            about["format"] == FORMAT
            and packed.dtype == np.uint8
            and packed.shape == (-(-rows // 4),)
        )
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise FormatError(f"{path} is no split: {str(error)[:80]}") from None
    if not known:
        raise FormatError(f"{path} is no split that this version can read")
    if rows != len(ratings) or whole != checksum(ratings):
        raise DataError(
            f"{path} is a split of other ratings ({rows:,}; here are {len(ratings):,}): make a new one"
        )
    fours = np.stack([packed & 3, packed >> 2 & 3, packed >> 4 & 3, packed >> 6], axis=1)
    return _split(ratings, fours.reshape(-1)[:rows], how, seed, whole, workplace)
