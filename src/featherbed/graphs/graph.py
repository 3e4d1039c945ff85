"""A relation between the objects of a table: who is related to whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array, issparse

from featherbed.errors import ArgumentError


def whole(name: str, value: Any, least: int) -> int:
    """Return a setting that is a whole number of at least ``least``, or say what was given instead."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ArgumentError(f"{name}={value!r}: give a whole number of at least {least}")
    return int(value)


def as_array(name: str, values: Any) -> NDArray[Any]:
    """Return an array, or say that rows differ in length."""
    try:
        return np.asarray(values)
    except ValueError:
        raise ArgumentError(f"{name} hold rows of different lengths, which make no array") from None


def object_ids(name: str, ids: Any, objects: int) -> NDArray[np.int64]:
    """Return ids as an array of whole numbers in 0..objects - 1, or say what was given instead."""
    found = as_array(name, ids)
    if found.size == 0:
        return found.astype(np.int64)
    if found.dtype.kind not in "iu":
        raise ArgumentError(f"{name} are of type {found.dtype}: give whole numbers, the ids of objects")
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= objects:
        wrong = low if low < 0 else high
        raise ArgumentError(f"{name} name object {wrong}: there are {objects} objects, with ids 0..{objects - 1}")
    return found.astype(np.int64, copy=False)


def places(names: Iterable[str], form: Callable[[str], str]) -> dict[str, list[int]]:
    """Return the objects behind each name, names brought into ``form``: "Dog" and "dog" may be two objects of one name."""
    if isinstance(names, str):
        raise ArgumentError(f"got the text {names[:40]!r}: give a list of names, one for each object")
    found = defaultdict(list)
    for place, name in enumerate(names):
        if not isinstance(name, str):
            raise ArgumentError(f"name {place} is {name!r}: give a list of texts, one for each object")
        found[form(name)].append(place)
    if not found:
        raise ArgumentError("the list of names is empty: give one for each object")
    return dict(found)


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """A symmetric relation over objects 0..n-1, G_ij = G_ji, kept as a sparse boolean matrix; no object is related to itself.

    Args:
        matrix: sparse and square, [n, n]; whatever is not zero is an edge, the diagonal is left out. It must be symmetric:
            ``Graph.of_pairs`` takes pairs in one direction.

    >>> graph = Graph.of_pairs([[0, 1], [2, 1]], objects=4)
    >>> graph
    Graph(objects=4, edges=2)
    >>> graph.neighbours(1)
    array([0, 2])
    >>> (graph | Graph.of_pairs([[0, 3]], objects=4)).pairs().tolist()
    [[0, 1], [0, 3], [1, 2]]
    """

    matrix: csr_array

    def __post_init__(self) -> None:
        given = self.matrix
        if not issparse(given) or given.ndim != 2 or given.shape[0] != given.shape[1]:
            raise ArgumentError(
                f"matrix is {type(given).__name__} of shape {getattr(given, 'shape', None)}: give a square sparse matrix of "
                "scipy, or call Graph.of_pairs(pairs, objects)"
            )
        entries = coo_array(given)
        keep = (entries.row != entries.col) & (entries.data != 0)
        made = _matrix(entries.row[keep], entries.col[keep], given.shape[0])
        lonely = (made != made.T).nnz
        if lonely:
            raise ArgumentError(
                f"matrix is not symmetric: {lonely} entries differ from their mirror image; Graph.of_pairs takes pairs in one "
                "direction"
            )
        object.__setattr__(self, "matrix", made)

    @classmethod
    def of_pairs(cls, pairs: Any, objects: int) -> Graph:  # pairs: int [n, 2]
        """Return the graph whose edges are these pairs, in either direction; repeats and (i, i) are left out.

        >>> Graph.of_pairs([[2, 0], [0, 2], [1, 1]], objects=3).pairs()
        array([[0, 2]])
        """
        objects = whole("objects", objects, 1)
        found = as_array("pairs", pairs)
        if found.size == 0:
            found = np.empty((0, 2), dtype=np.int64)
        if found.ndim != 2 or found.shape[1] != 2:
            raise ArgumentError(f"pairs have shape {found.shape}: give one row of two ids for each edge, [n, 2]")
        ids = object_ids("pairs", found, objects)
        apart = ids[ids[:, 0] != ids[:, 1]]
        made = _matrix(np.concatenate(apart.T), np.concatenate(apart.T[::-1]), objects)
        return cls(made)

    @property
    def objects(self) -> int:
        """How many objects the relation is over."""
        return int(self.matrix.shape[0])

    @property
    def edges(self) -> int:
        """How many pairs are related, each counted once."""
        return int(self.matrix.nnz) // 2

    @property
    def degrees(self) -> NDArray[np.int64]:  # -> [n]
        """How many neighbours each object has."""
        counts: NDArray[np.int64] = np.diff(self.matrix.indptr).astype(np.int64)
        return counts

    def neighbours(self, i: int) -> NDArray[np.int64]:
        """Return the objects related to object ``i``, lowest id first."""
        if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < self.objects:
            raise ArgumentError(f"neighbours({i!r}): give the id of one of the {self.objects} objects, 0..{self.objects - 1}")
        ids: NDArray[np.int64] = self.matrix.indices[self.matrix.indptr[i] : self.matrix.indptr[i + 1]].astype(np.int64)
        return ids

    def pairs(self) -> NDArray[np.int64]:  # -> [edges, 2]
        """Return every edge once, as (i, j) with i < j, in order."""
        first = np.repeat(np.arange(self.objects), self.degrees)
        both = np.stack([first, self.matrix.indices.astype(np.int64)], axis=1)
        return both[both[:, 0] < both[:, 1]]

    def non_edges(self, count: int, seed: int | np.random.Generator) -> NDArray[np.int64]:  # -> [count, 2]
        """Draw pairs (i, j), i < j, that are not related, each of them equally likely at every draw (a pair may come again).

        A draw numbers the unrelated pairs and picks a number: it costs the same in a dense graph as in a sparse one.

        >>> Graph.of_pairs([[0, 1], [1, 2]], objects=3).non_edges(2, seed=0)
        array([[0, 2],
               [0, 2]])
        """
        count = whole("count", count, 0)
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer | np.random.Generator):
            raise ArgumentError(f"seed={seed!r}: give a whole number or a numpy generator, np.random.default_rng(0)")
        left = self.objects**2 - len(self._before)
        if left == 0:
            raise ArgumentError(f"{self!r} is complete: every pair of objects is related, there is no other pair to draw")
        number = np.random.default_rng(seed).integers(left, size=count)
        cell = number + np.searchsorted(self._before, number, side="right")
        drawn = np.stack(np.divmod(cell, self.objects), axis=1)
        drawn.sort(axis=1)
        return drawn

    @cached_property
    def _before(self) -> NDArray[np.int64]:  # -> [n + 2 edges]
        """How many unrelated cells of the n x n matrix come before each taken one: an edge or the diagonal."""
        own = np.arange(self.objects)
        first = np.concatenate([np.repeat(own, self.degrees), own])
        taken = np.sort(first * self.objects + np.concatenate([self.matrix.indices, own]))
        before: NDArray[np.int64] = taken - np.arange(len(taken))
        return before

    def __or__(self, other: Graph) -> Graph:
        if not isinstance(other, Graph):
            return NotImplemented
        if other.objects != self.objects:
            raise ArgumentError(
                f"one graph is over {self.objects} objects, the other over {other.objects}: a union needs the same objects"
            )
        return Graph(self.matrix + other.matrix)

    def __repr__(self) -> str:
        return f"Graph(objects={self.objects}, edges={self.edges})"


def _matrix(first: NDArray[Any], second: NDArray[Any], objects: int) -> csr_array:
    """Return the boolean matrix with these entries: sorted, each once."""
    made = coo_array((np.ones(len(first), dtype=bool), (first, second)), shape=(objects, objects)).tocsr()
    made.sum_duplicates()
    return made
