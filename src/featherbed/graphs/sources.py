"""Pairs of objects that have a value in common, and of objects with similar vectors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.checks import check_choice
from featherbed.errors import ArgumentError, MissingExtra
from featherbed.graphs.checks import as_array, object_ids
from featherbed.graphs.lists import Ids

MOST_PAIRS = 1 << 27  # sixteen bytes each while lists are made: 2 GB
EXACT = 1 << 16  # objects up to which every vector is compared with every other
PROBES = 32  # of 4 √V cells, how many are searched above that
NUMBERS = 1 << 22  # in a block of vectors and its results
METRICS = ("cosine", "l2")
Floats = NDArray[np.float32]


def sharing_pairs(
    objects: int,
    attributes: Any,
    largest: int | None,
    most: int | None,
    generator: np.random.Generator,
) -> tuple[Iterator[tuple[Ids, Ids]], int]:
    """Return pairs of objects that share a value, in pieces, and how many pairs at most.

    The objects with a value are arranged in a circle, in random order, and each is paired with the
    next, the next but one and so on, halfway around: all pairs. With ``most`` the distance is
    limited so that each object has about that number of pairs.
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
            f"{MOST_PAIRS:,} are the most: give largest= to leave common values out, or a smaller "
            "most= to keep some neighbors of each object"
        )
    order = np.lexsort((generator.permutation(len(ids)), values))
    ids, values = ids[order], values[order]

    def pieces() -> Iterator[tuple[Ids, Ids]]:
        at, first = np.arange(len(ids)), np.cumsum(sizes) - sizes
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
        ids, attributes = object_ids("ids", attributes[0], objects), attributes[1]
    else:
        ids = np.arange(objects)
    values = np.asarray(attributes, dtype=object)
    if ids.ndim != 1 or values.shape != ids.shape:
        raise ArgumentError(
            f"attributes have shape {values.shape}, the ids of their objects {ids.shape}: give one "
            f"value for each of the {objects} objects, or a tuple (ids [n], values [n])"
        )
    # NaN != NaN
    there = np.array([value is not None and value == value for value in values], dtype=bool)
    ids, values, numbers = ids[there], values[there], dict[Any, int]()
    try:
        columns = [numbers.setdefault(value, len(numbers)) for value in values]
    except TypeError as error:
        raise ArgumentError(
            f"attributes are texts, numbers or other values that can be looked up: {error}"
        ) from None
    cells = np.unique(ids * max(len(numbers), 1) + np.array(columns, dtype=np.int64))
    return np.divmod(cells, max(len(numbers), 1))


def nearest_arcs(vectors: Any, k: int, metric: str) -> Iterator[tuple[Ids, Ids, Floats]]:
    """Yield (i, j, squared distance) of the ``k`` nearest j of every i in blocks; vectors are
    checked.
    """
    import faiss

    rows = Rows(vectors, metric, k)
    index: Any = faiss.IndexFlatL2(rows.dim)
    if rows.count > EXACT:
        cells = int(4 * math.sqrt(rows.count))
        index = faiss.IndexIVFFlat(index, rows.dim, cells)
        index.nprobe, index.cp.niter, index.cp.min_points_per_centroid = PROBES, 10, 1
        sample = np.sort(np.random.default_rng(0).permutation(rows.count)[: 64 * cells])
        index.train(rows.ready(sample))
    for _, block in rows.blocks():
        index.add(block)
    for own, block in rows.blocks():
        far, found = index.search(block, k + 1)
        other = (found != own[:, None]) & (found >= 0)  # -1: the cells searched held no more
        other &= other.cumsum(axis=1) <= k  # the own one may be missing among equal vectors
        yield own[np.nonzero(other)[0]], found[other], far[other]


class Rows:
    """Vectors prepared for Euclidean distances in float32, in blocks.

    For unit vectors squared distances are 2 - 2 cos. For "l2" the vectors are centered and scaled,
    which keeps the order: faiss subtracts squares, which cancel for vectors far from zero.
    """

    def __init__(self, vectors: Any, metric: str, k: int) -> None:
        self.vectors, self.cosine = vectors, metric == "cosine"
        self.count, self.dim = vectors.shape
        self.step = max(NUMBERS // (self.dim + 4 * k), 1)
        top, total = 0.0, np.zeros(self.dim)
        for own in self._ids():
            block = vectors[own[0] : own[-1] + 1].astype(np.float64)
            wrong = ~np.isfinite(block).all(axis=1)
            if wrong.any():
                raise ArgumentError(
                    f"vector {own[wrong.argmax()]} holds NaN or infinity: give finite numbers"
                )
            if self.cosine and not block.any(axis=1).all():
                raise ArgumentError(
                    f"vector {own[(~block.any(axis=1)).argmax()]} is zero and has no angle to "
                    "others: leave such objects out, or use metric='l2'"
                )
            top = max(top, float(np.abs(block).max()))
        self.top = top or 1.0
        for own in [] if self.cosine else self._ids():
            total += (vectors[own[0] : own[-1] + 1].astype(np.float64) / self.top).sum(axis=0)
        self.mean = total / self.count

    def _ids(self) -> list[Ids]:
        return np.split(np.arange(self.count), range(self.step, self.count, self.step))

    def ready(self, ids: Ids) -> Floats:  # [n] -> [n, d]
        """Return vectors in their prepared form."""
        block = self.vectors[ids].astype(np.float64)
        if self.cosine:
            block /= np.abs(block).max(axis=1, keepdims=True)
            block /= np.linalg.norm(block, axis=1, keepdims=True)
        else:
            block = block / self.top - self.mean
        return np.ascontiguousarray(block, dtype=np.float32)

    def blocks(self) -> Iterator[tuple[Ids, Floats]]:
        """Yield ids and their vectors."""
        for own in self._ids():
            yield own, self.ready(own)


def checked_vectors(vectors: Any, metric: Any) -> NDArray[Any]:  # [V, d]
    """Return vectors as an array, or raise an error for bad vectors, metric or installation."""
    try:
        import faiss  # noqa: F401
    except ImportError:
        raise MissingExtra("faiss", "compress", "Graph.nearest") from None
    check_choice("metric", metric, METRICS)
    found = as_array("vectors", vectors)
    if found.ndim != 2 or found.shape[1] == 0 or found.dtype.kind not in "fiu":
        raise ArgumentError(
            f"vectors are {found.dtype} of shape {found.shape}: give numbers [V, d], one row for "
            "each object"
        )
    return found


def nearest_first(objects: int, arcs: Iterator[tuple[Ids, Ids, Floats]]) -> tuple[Ids, Ids]:
    """Return the distinct pairs i < j of arcs, by increasing distance."""
    first, second, far = (np.concatenate(part) for part in zip(*arcs, strict=True))
    low, high = np.minimum(first, second), np.maximum(first, second)
    order = np.lexsort((high, low, far))
    # the first of each pair: its shorter distance
    _, once = np.unique((low * objects + high)[order], return_index=True)
    order = order[np.sort(once)]
    return low[order], high[order]
