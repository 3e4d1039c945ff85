"""Neighbor lists: the sorted neighbors of object i are neighbors[starts[i] : starts[i + 1]].

Their file is a safetensors container of the two arrays, memory-mapped and checked on opening.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import FormatError
from featherbed.graphs.checks import MOST_OBJECTS
from featherbed.hashing import mixed
from featherbed.packed.file import ARRAYS_VERSION, read_arrays, write_arrays

BLOCK = 1 << 20  # arcs handled at a time
Ids = NDArray[np.int64]
Lists = tuple[NDArray[Any], NDArray[Any]]  # starts [V + 1], neighbors [arcs]; int64 from 2³¹ on
KIND = "graph"  # of the file, in its metadata
NAMES = ("starts", "neighbours")  # of the arrays of a file


def neighbor_lists(
    objects: int, arcs: Iterable[tuple[Ids, Ids]], most_arcs: int, symmetric: bool
) -> Lists:
    """Return the lists of arcs i -> j (and j -> i if ``symmetric``), without duplicates and i -> i.

    The arcs come in pieces, at most ``most_arcs`` in all. One array holds them as sorted integers i
    V + j; with the resulting lists the peak memory is 8 + 4 bytes per entry.
    """
    keys, filled = np.empty(most_arcs * (1 + symmetric), dtype=np.int64), 0
    for first, second in arcs:
        apart = first != second
        for i, j in ((first, second), (second, first))[: 1 + symmetric]:
            fresh = i[apart] * objects + j[apart]
            keys[filled : filled + len(fresh)] = fresh
            filled += len(fresh)
    keys = keys[:filled]
    keys.sort()
    pieces = range(0, len(keys), BLOCK)
    arcs_left = sum(np.count_nonzero(_new(keys, at)) for at in pieces)
    kind = np.int32 if arcs_left < 1 << 31 else np.int64
    starts: NDArray[Any] = np.zeros(objects + 1, dtype=kind)
    neighbors, filled = np.empty(arcs_left, dtype=kind), 0
    for at in pieces:
        i, j = np.divmod(keys[at : at + BLOCK][_new(keys, at)], objects)
        neighbors[filled : filled + len(j)] = j
        filled += len(j)
        rows, counts = np.unique(i, return_counts=True)
        starts[rows + 1] += counts.astype(kind)
    np.cumsum(starts, out=starts)
    return starts, neighbors


def _new(keys: Ids, at: int) -> NDArray[np.bool_]:
    """Return which keys of a block starting at ``at`` differ from the previous key."""
    here = keys[at : at + BLOCK]
    new = np.ones(len(here), dtype=bool)
    np.not_equal(here[1:], here[:-1], out=new[1:])
    new[0] = at == 0 or keys[at - 1] != here[0]
    return new


def slices(count: int) -> Iterator[slice]:
    """Yield slices of BLOCK positions."""
    return (slice(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK))


def blocks(lists: Lists) -> Iterator[tuple[Ids, Ids]]:
    """Yield the arcs (i, j) in order, BLOCK at a time."""
    starts, neighbors = lists
    for here in slices(len(neighbors)):
        low = int(np.searchsorted(starts, here.start, side="right")) - 1
        high = int(np.searchsorted(starts, here.stop, side="left"))
        bounds: Ids = np.clip(starts[low : high + 1].astype(np.int64), here.start, here.stop)
        yield np.repeat(np.arange(low, high), np.diff(bounds)), neighbors[here].astype(np.int64)


def is_symmetric(lists: Lists) -> bool:
    """Return whether every arc i -> j has an arc j -> i, by comparing sums of 63-bit hashes.

    The probability of an accidental match is 2^-63; comparing with the transposed lists would need
    a copy.
    """
    objects, difference = len(lists[0]) - 1, 0
    for i, j in blocks(lists):
        difference += int((mixed(i * objects + j) - mixed(j * objects + i)).sum())
    return difference % (1 << 64) == 0  # the sums wrap around


def within(most: int, objects: int, first: Ids, second: Ids, order: Ids) -> NDArray[np.bool_]:
    """Return the pairs kept if taken in ``order`` while both ends have fewer than ``most``."""
    crowded = np.bincount(first, minlength=objects) + np.bincount(second, minlength=objects) > most
    keep = ~(crowded[first] | crowded[second])  # these fit in any order
    order = order[~keep[order]]
    room = [most] * objects
    for here in slices(len(order)):
        taken = []
        for i, j in zip(first[order[here]].tolist(), second[order[here]].tolist(), strict=True):
            fits = room[i] > 0 and room[j] > 0
            if fits:
                room[i] -= 1
                room[j] -= 1
            taken.append(fits)
        keep[order[here]] = taken
    return keep


def write(lists: Lists, path: Path) -> None:
    """Write neighbor lists to a temporary file, then rename it to ``path``."""
    arrays = (array.view(array.dtype.str.replace("i", "u")) for array in lists)
    write_arrays(path, {KIND: ARRAYS_VERSION}, dict(zip(NAMES, arrays, strict=True)))


def read(path: Path) -> Lists:
    """Return the neighbor lists of a file, memory-mapped; raise FormatError where they are
    none."""
    arrays = read_arrays(path, KIND, dict.fromkeys(NAMES, ("U32", "U64")))
    starts, neighbors = (
        arrays[name].view(arrays[name].dtype.str.replace("u", "i")) for name in NAMES
    )
    problem = _problem(starts, neighbors)
    if problem:
        raise FormatError(f"{path.name} is broken: {problem}")
    return starts, neighbors


def _problem(starts: NDArray[Any], neighbors: NDArray[Any]) -> str | None:
    """Return why two arrays are no neighbor lists, or None."""
    objects = len(starts) - 1
    if not 1 <= objects <= MOST_OBJECTS or starts.dtype != neighbors.dtype:
        kinds = f"{starts.dtype} [{len(starts)}] and {neighbors.dtype} [{len(neighbors)}]"
        return f"starts [V + 1] and neighbors [arcs] are of one type with V from 1, not {kinds}"
    if starts[0] != 0 or starts[-1] != len(neighbors):
        span = f"starts go from {starts[0]} to {starts[-1]}"
        return f"{span}, not from 0 to the number of neighbors, {len(neighbors)}"
    decreasing = np.flatnonzero(starts[1:] < starts[:-1])
    if len(decreasing):
        return (
            f"object {decreasing[0]} has a negative number of neighbors, starts must not decrease"
        )
    last = -1
    for i, j in blocks((starts, neighbors)):
        wrong = (j < 0) | (j >= objects) | (i == j)
        if wrong.any():
            at = int(wrong.argmax())
            wrong = f"object {i[at]} has the neighbor {j[at]}"
            return f"{wrong}: neighbors are others of the {objects} objects"
        keys = i * objects + j
        wrong = np.diff(keys, prepend=last) <= 0
        if wrong.any():
            return f"the neighbors of object {i[wrong.argmax()]} are not sorted, each once"
        last = int(keys[-1])
    return None
