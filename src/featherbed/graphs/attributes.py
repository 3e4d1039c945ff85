"""Objects that have something in common: an actor, an age group, an entity type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError
from featherbed.graphs.checks import object_ids
from featherbed.graphs.lists import Ids

MOST_PAIRS = 1 << 27  # sixteen bytes each while lists are made: 2 GB


def sharing_pairs(
    objects: int,
    attributes: Any,
    largest: int | None,
    most: int | None,
    generator: np.random.Generator,
) -> tuple[Iterator[tuple[Ids, Ids]], int]:
    """Return pairs of objects that share a value, in pieces, and how many pairs at most.

    The holders of a value stand in a circle, in random order, and each is paired with the next, the
    next but one and so on, half around: all pairs. With ``most`` no further than gives each that
    many.
    """
    ids, values = _cells(objects, attributes)
    sizes = np.bincount(values)
    if largest is not None:
        few = sizes[values] <= largest
        ids, values = ids[few], values[few]
        sizes = np.bincount(values, minlength=len(sizes))
    reach = sizes // 2 if most is None else np.minimum(sizes // 2, -(-most // 2))
    pairs = int((sizes * reach).sum())
    if pairs > MOST_PAIRS:
        raise ArgumentError(
            f"the values relate {pairs:,} pairs (one is shared by {sizes.max():,} objects), "
            f"{MOST_PAIRS:,} are the most: give "
            "largest= to leave common values out, or a smaller most= to keep some neighbours of "
            "each object"
        )
    order = np.lexsort((generator.permutation(len(ids)), values))
    ids, values = ids[order], values[order]

    def pieces() -> Iterator[tuple[Ids, Ids]]:
        at, first = (
            np.arange(len(ids)),
            np.concatenate([[0], np.cumsum(sizes)[:-1]]) if len(sizes) else sizes,
        )
        for step in range(1, int(reach.max(initial=0)) + 1):
            at = at[reach[values[at]] >= step]
            start = first[values[at]]
            yield ids[at], ids[start + (at - start + step) % sizes[values[at]]]

    return pieces(), pairs


def _cells(objects: int, attributes: Any) -> tuple[Ids, Ids]:
    """Return which object has which value, values as numbers, each (object, value) once."""
    if isinstance(attributes, tuple):
        if len(attributes) != 2:
            raise ArgumentError(
                f"a tuple of {len(attributes)} attributes: give (ids [n], values [n]), or a list "
                "of values"
            )
        ids, values = (
            object_ids("ids", attributes[0], objects),
            np.asarray(attributes[1], dtype=object),
        )
    else:
        ids, values = np.arange(objects), np.asarray(attributes, dtype=object)
    if ids.ndim != 1 or values.shape != ids.shape:
        raise ArgumentError(
            f"attributes have shape {values.shape}, the ids of their objects {ids.shape}: give one "
            "value for each of the "
            f"{objects} objects, or a tuple (ids [n], values [n])"
        )
    there: NDArray[np.bool_] = np.array(
        [value is not None and value == value for value in values], dtype=bool
    )  # NaN != NaN
    ids, values, numbers = ids[there], values[there], dict[Any, int]()
    try:
        columns = np.array(
            [numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64
        )
    except TypeError as error:
        raise ArgumentError(
            f"attributes are texts, numbers or other values that can be looked up: {error}"
        ) from None
    cells = np.unique(ids * max(len(numbers), 1) + columns)
    rows, columns = np.divmod(cells, max(len(numbers), 1))
    return rows, columns
