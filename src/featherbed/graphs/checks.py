"""Checks of inputs: integers, ids, names, seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.checks import check_integer, is_integer
from featherbed.errors import ArgumentError

MOST_OBJECTS = (1 << 31) - 1  # ids are 32-bit numbers, and i * objects + j stays below 2⁶²


def at_most(name: str, value: Any, minimum: int) -> int | None:
    """Return a limit, which may be None, or raise an error."""
    return None if value is None else check_integer(name, value, minimum)


def object_count(value: Any) -> int:
    """Return the number of objects of a relation, or raise an error."""
    objects = check_integer("objects", value, 1)
    if objects > MOST_OBJECTS:
        raise ArgumentError(f"objects={objects}: a graph is over at most {MOST_OBJECTS:,} objects")
    return objects


def flag(name: str, value: Any) -> bool:
    """Return a setting that is True or False, or raise an error."""
    if not isinstance(value, bool | np.bool_):
        raise ArgumentError(f"{name}={value!r}: give True or False")
    return bool(value)


def drawn_from(seed: Any) -> np.random.Generator:
    """Return the generator of a seed, or the given generator."""
    if isinstance(seed, np.random.Generator):
        return seed
    if not is_integer(seed, 0):
        raise ArgumentError(
            f"seed={seed!r}: give a whole number from 0 or a numpy generator, "
            "np.random.default_rng(0)"
        )
    return np.random.default_rng(seed)


def as_array(name: str, values: Any) -> NDArray[Any]:
    """Return an array, or raise an error for rows of different length."""
    try:
        return np.asarray(values)
    except ValueError:
        raise ArgumentError(f"{name} hold rows of different lengths, which make no array") from None


def object_ids(name: str, ids: Any, objects: int) -> NDArray[np.int64]:
    """Return integer ids in 0..objects - 1 as an array, or raise an error."""
    found = as_array(name, ids)
    if found.size == 0:
        return found.astype(np.int64)
    if found.dtype.kind not in "iu":
        raise ArgumentError(
            f"{name} are of type {found.dtype}: give whole numbers, the ids of objects"
        )
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= objects:
        wrong = low if low < 0 else high
        raise ArgumentError(
            f"{name} name object {wrong}: there are {objects} objects, with ids 0..{objects - 1}"
        )
    return found.astype(np.int64, copy=False)


def places(names: Iterable[str], form: Callable[[str], str]) -> dict[str, list[int]]:
    """Return the objects of each name after ``form``: "Dog" and "dog" may be two objects of one
    name.
    """
    if isinstance(names, str):
        raise ArgumentError(
            f"got the text {names[:40]!r}: give a list of names, one for each object"
        )
    found = defaultdict(list)
    for place, name in enumerate(names):
        if not isinstance(name, str):
            raise ArgumentError(
                f"name {place} is {name!r}: give a list of texts, one for each object"
            )
        found[form(name)].append(place)
    if not found:
        raise ArgumentError("the list of names is empty: give one for each object")
    return dict(found)
