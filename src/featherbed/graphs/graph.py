"""A relation between the objects of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array, issparse

import featherbed.graphs.lists as lists
from featherbed.checks import check_integer, is_integer
from featherbed.errors import ArgumentError
from featherbed.graphs.checks import as_array, at_most, drawn_from, flag, object_count, object_ids
from featherbed.graphs.lists import Ids, Lists, neighbor_lists, slices, within
from featherbed.graphs.sources import checked_vectors, nearest_arcs, nearest_first, sharing_pairs
from featherbed.hashing import mixed

Seed = int | np.random.Generator


class Graph:
    """A relation over objects 0..V-1, stored as sorted neighbor lists; no object is related to
    itself.

    The relation is ``symmetric`` if j is a neighbor of i whenever i is one of j; then an edge is a
    pair {i, j}, otherwise an arc i -> j (j is a neighbor of i). Graphs are immutable.

    Args:
        matrix: square scipy.sparse matrix [V, V]; the nonzero entries of row i, except the
            diagonal, are the neighbors of i. See also ``Graph.from_edges``, ``.from_attributes``,
            ``.nearest`` and ``.load``.

    >>> graph = Graph.from_edges(4, [[0, 1], [2, 1]])
    >>> graph
    Graph(objects=4, edges=2)
    >>> graph.neighbors(1)
    array([0, 2])
    >>> (graph | Graph.from_edges(4, [[0, 3]])).pairs().tolist()
    [[0, 1], [0, 3], [1, 2]]
    >>> Graph.from_edges(4, [[0, 1], [2, 1]], symmetric=False)
    Graph(objects=4, edges=2, symmetric=False)
    """

    def __init__(self, matrix: Any) -> None:
        if not issparse(matrix) or matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ArgumentError(
                f"matrix is {type(matrix).__name__} of shape {getattr(matrix, 'shape', None)}: "
                "give a square sparse matrix of scipy, or call Graph.from_edges(V, pairs)"
            )
        objects, entries = object_count(matrix.shape[0]), coo_array(matrix)
        ends, there = (entries.row, entries.col), entries.data != 0
        pieces = (
            tuple(end[here][there[here]].astype(np.int64) for end in ends)
            for here in slices(len(there))
        )
        self._hold(neighbor_lists(objects, pieces, len(there), symmetric=False))

    @classmethod
    def from_edges(
        cls,
        objects: int,
        pairs: Any,
        *,
        symmetric: bool = True,
        most: int | None = None,
        seed: Seed = 0,
    ) -> Graph:  # pairs: int [n, 2]
        """Return the graph with these edges, without duplicates and (i, i).

        Pairs are read in blocks (they may be memory-mapped); memory is 24 bytes per pair, of which
        8 remain; half of that if not ``symmetric``.

        Args:
            objects: number of objects V.
            pairs: one row (i, j) per edge.
            symmetric: both ends are neighbors of each other; otherwise j becomes a neighbor of i
                only.
            most: maximum number of neighbors per object: ``graph.capped(most, symmetric=symmetric,
                seed=seed)``.

        >>> Graph.from_edges(3, [[2, 0], [0, 2], [1, 1]]).pairs()
        array([[0, 2]])
        """
        objects, symmetric = object_count(objects), flag("symmetric", symmetric)
        most, found = at_most("most", most, 1), as_array("pairs", pairs)
        if found.size == 0:
            found = np.empty((0, 2), dtype=np.int64)
        if found.ndim != 2 or found.shape[1] != 2:
            raise ArgumentError(
                f"pairs have shape {found.shape}: give one row of two ids for each edge, [n, 2]"
            )
        pieces = (tuple(object_ids("pairs", found[here], objects).T) for here in slices(len(found)))
        made = neighbor_lists(objects, pieces, len(found), symmetric)
        return cls._of(made, symmetric or None)._kept(most, seed, symmetric)

    @classmethod
    def from_attributes(
        cls,
        objects: int,
        attributes: Any,
        *,
        largest: int | None = None,
        most: int | None = None,
        seed: Seed = 0,
    ) -> Graph:
        """Relate objects that share an attribute value: G = [B Bᵀ > 0], B_ia = 1 if object i has
        value a.

        Movies with a common actor, users of an age group, tokens of an entity type. None and NaN
        are no values. n objects with one value make n (n - 1) / 2 pairs, which carry little
        information for large n: ``largest`` omits such values, ``most`` limits the neighbors of
        each object, and more than 2²⁷ pairs raise an error.

        Args:
            objects: number of objects V.
            attributes: a tuple (ids [n], values [n]) if objects have several values or none; or a
                list or array [V] with one value per object.
            largest: maximum number of objects with a value; more frequent values are omitted. None:
                no limit.
            most: maximum number of neighbors per object. Objects with a more frequent value are
                related to ``most`` of them (or one more), drawn by ``seed``, before
                ``graph.capped``: the other pairs are never generated.

        >>> Graph.from_attributes(4, ["child", "adult", None, "child"]).pairs()
        array([[0, 3]])
        >>> films, actors = [0, 0, 1, 2, 2], ["Hepburn", "Grant", "Hepburn", "Bogart", "Grant"]
        >>> Graph.from_attributes(3, (films, actors)).pairs().tolist()
        [[0, 1], [0, 2]]
        >>> Graph.from_attributes(1000, ["token"] * 1000, most=4).degrees.max()
        np.int64(4)
        """
        objects, generator = object_count(objects), drawn_from(seed)
        largest, most = at_most("largest", largest, 2), at_most("most", most, 1)
        pairs, count = sharing_pairs(objects, attributes, largest, most, generator)
        made = neighbor_lists(objects, pairs, count, symmetric=True)
        return cls._of(made, True)._kept(most, generator)

    @classmethod
    def nearest(
        cls,
        vectors: Any,
        k: int,
        *,
        metric: Literal["cosine", "l2"] = "cosine",
        symmetric: bool = True,
        most: int | None = None,
    ) -> Graph:  # vectors: [V, d]
        """Relate each object to the ``k`` objects with the nearest vectors, by faiss.

        Up to 65,536 objects the search is exact (in float32). Beyond, vectors are clustered into 4
        √V cells by k-means and the 32 nearest cells are searched, which may miss neighbors. Vectors
        are read in blocks and may be memory-mapped; faiss holds a copy of 4 d bytes each.

        Args:
            vectors: one row per object, such as ``table.weight.detach().numpy()``.
            k: number of neighbors.
            metric: "cosine" (zero vectors raise an error) or "l2".
            symmetric: relate i and j if either is among the nearest of the other, so an object may
                have more than ``k`` neighbors. Otherwise the neighbors of i are its ``k`` nearest.
            most: maximum number of neighbors per object: pairs are taken by increasing distance
                while both objects have fewer.

        >>> vectors = np.array([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 5.0]])
        >>> Graph.nearest(vectors, 1).pairs().tolist()
        [[0, 1], [2, 3]]
        """
        found, k = checked_vectors(vectors, metric), check_integer("k", k, 1)
        symmetric, most = flag("symmetric", symmetric), at_most("most", most, 1)
        objects = object_count(len(found))
        if k >= objects:
            raise ArgumentError(
                f"k={k}: {objects} vectors were given, so there are {objects - 1} others to be "
                "near to"
            )
        if most is not None and not symmetric:
            k = min(k, most)
        arcs, count = nearest_arcs(found, k, metric), objects * k
        pieces: Iterable[tuple[Ids, Ids]] = ((i, j) for i, j, _ in arcs)
        if most is not None and symmetric:
            i, j = nearest_first(objects, arcs)
            keep = within(most, objects, i, j, np.arange(len(i)))
            pieces, count = [(i[keep], j[keep])], int(keep.sum())
        return cls._of(neighbor_lists(objects, pieces, count, symmetric), symmetric or None)

    @classmethod
    def load(cls, path: str | Path, mmap: bool = True) -> Graph:
        """Open a graph written by ``graph.save``, checked once and memory-mapped.

        Args:
            path: the file; a damaged one raises FormatError.
            mmap: False reads the lists into memory.
        """
        starts, neighbors = lists.read(Path(path))
        if not flag("mmap", mmap):
            starts, neighbors = starts.copy(), neighbors.copy()
        return cls._of((starts, neighbors))

    def save(self, path: str | Path) -> None:
        """Write one safetensors file atomically: ``starts`` [V + 1] and ``neighbors`` [arcs], 4
        bytes each.

        >>> path = getfixture("tmp_path") / "graph.safetensors"
        >>> Graph.from_edges(4, [[0, 1], [2, 1]]).save(path)
        >>> Graph.load(path)
        Graph(objects=4, edges=2)
        """
        lists.write(self._lists, Path(path))

    @classmethod
    def _of(cls, held: Lists, symmetric: bool | None = None) -> Graph:
        """Return the graph of valid neighbor lists."""
        graph = cls.__new__(cls)
        graph._hold(held, symmetric)
        return graph

    def _hold(self, held: Lists, symmetric: bool | None = None) -> None:
        starts, neighbors = held
        objects = len(starts) - 1
        every = np.broadcast_to(np.True_, len(neighbors))  # one byte that stands for all entries
        self._matrix = csr_array((every, neighbors, starts), shape=(objects, objects), copy=False)
        self._matrix.has_canonical_format = True
        self._symmetric = lists.is_symmetric(held) if symmetric is None else symmetric

    def __reduce__(self) -> tuple[Callable[..., Graph], tuple[Any, ...]]:
        return Graph._of, (self._lists, self._symmetric)

    @property
    def _lists(self) -> Lists:
        return self._matrix.indptr, self._matrix.indices

    @property
    def matrix(self) -> csr_array:
        """The relation as a read-only boolean scipy CSR matrix [V, V] with sorted rows."""
        return self._matrix

    @property
    def symmetric(self) -> bool:
        """Whether j is a neighbor of i whenever i is a neighbor of j."""
        return self._symmetric

    @property
    def objects(self) -> int:
        """Number of objects."""
        return int(self._matrix.shape[0])

    @property
    def edges(self) -> int:
        """Number of related pairs; of arcs if not symmetric."""
        return int(self._matrix.nnz) // (1 + self._symmetric)

    @property
    def degrees(self) -> NDArray[np.int64]:  # -> [V]
        """Number of neighbors of each object."""
        counts: NDArray[np.int64] = np.diff(self._matrix.indptr).astype(np.int64)
        return counts

    def neighbors(self, i: int) -> NDArray[np.int64]:
        """Return the neighbors of object ``i``, lowest id first."""
        if not is_integer(i, 0, self.objects - 1):
            raise ArgumentError(
                f"neighbors({i!r}): give the id of one of the {self.objects} objects, "
                f"0..{self.objects - 1}"
            )
        starts, neighbors = self._lists
        ids: NDArray[np.int64] = neighbors[starts[i] : starts[i + 1]].astype(np.int64)
        return ids

    def pairs(self) -> NDArray[np.int64]:  # -> [edges, 2]
        """Return every edge once, in order: (i, j) with i < j; every arc if not symmetric."""
        return self._arcs(once=self._symmetric)

    def _arcs(self, once: bool) -> NDArray[np.int64]:  # -> [n, 2]
        """Return every arc, or one of i -> j and j -> i."""
        found, filled = np.empty((self._matrix.nnz // (1 + once), 2), dtype=np.int64), 0
        for i, j in lists.blocks(self._lists):
            keep = i < j if once else slice(None)
            fresh = np.stack([i[keep], j[keep]], axis=1)
            found[filled : filled + len(fresh)] = fresh
            filled += len(fresh)
        return found

    def capped(self, most: int, *, symmetric: bool = True, seed: Seed = 0) -> Graph:
        """Return the graph with at most ``most`` neighbors per object.

        Edges are taken in a random order, given by hashes of (seed, i, j), while both ends have
        fewer than ``most``; a symmetric relation stays symmetric, and no omitted edge would fit,
        but an object may lose all neighbors. If not ``symmetric``, or for an asymmetric relation,
        each object independently keeps the first ``most`` of its own.

        >>> star = Graph.from_edges(100, [[0, i] for i in range(1, 100)])
        >>> star.capped(3).degrees.sum(), star.capped(3, symmetric=False).degrees.sum()
        (np.int64(6), np.int64(102))
        """
        most, key = check_integer("most", most, 1), int(drawn_from(seed).integers(1 << 62))
        both = flag("symmetric", symmetric) and self._symmetric
        if self.degrees.max() <= most:
            return self
        i, j = self._arcs(once=both).T
        hashes = mixed(mixed(i * self.objects + j) ^ key)
        if both:
            keep = within(most, self.objects, i, j, np.argsort(hashes))
        else:
            order = np.lexsort((hashes, i))
            keep = np.empty(len(i), dtype=bool)
            keep[order] = np.arange(len(i)) - self._matrix.indptr[i] < most
        pieces = ((i[here][keep[here]], j[here][keep[here]]) for here in slices(len(keep)))
        return Graph._of(neighbor_lists(self.objects, pieces, int(keep.sum()), both), both or None)

    def _kept(self, most: int | None, seed: Seed, symmetric: bool = True) -> Graph:
        return self if most is None else self.capped(most, symmetric=symmetric, seed=seed)

    def non_edges(self, count: int, seed: Seed) -> NDArray[np.int64]:  # -> [count, 2]
        """Draw unrelated pairs (i, j), i < j, uniformly with replacement.

        A draw enumerates unrelated pairs, so its cost does not depend on the density. In an
        asymmetric relation a pair with an arc in either direction is related.

        >>> Graph.from_edges(3, [[0, 1], [1, 2]]).non_edges(2, seed=0)
        array([[0, 2],
               [0, 2]])
        """
        count, generator = check_integer("count", count, 0), drawn_from(seed)
        left = self.objects**2 - len(self._before)
        if left == 0:
            raise ArgumentError(
                f"{self!r} is complete: every pair of objects is related, there is no other pair "
                "to draw"
            )
        number = generator.integers(left, size=count)
        cell = number + np.searchsorted(self._before, number, side="right")
        drawn = np.stack(np.divmod(cell, self.objects), axis=1)
        drawn.sort(axis=1)
        return drawn

    @cached_property
    def _before(self) -> NDArray[np.int64]:  # -> [V + 2 edges]
        """Return the number of unrelated cells of the V x V matrix before each edge or diagonal
        cell.
        """
        related = self._matrix if self._symmetric else (self._matrix + self._matrix.T).tocsr()
        own = np.arange(self.objects)
        first = np.concatenate([np.repeat(own, np.diff(related.indptr)), own])
        taken = np.sort(first * self.objects + np.concatenate([related.indices, own]))
        before: NDArray[np.int64] = taken - np.arange(len(taken))
        return before

    def __or__(self, other: Graph) -> Graph:
        if not isinstance(other, Graph):
            return NotImplemented
        if other.objects != self.objects:
            raise ArgumentError(
                f"one graph is over {self.objects} objects, the other over {other.objects}: a "
                "union needs the same objects"
            )
        return Graph(self._matrix + other._matrix)

    def __repr__(self) -> str:
        kind = "" if self._symmetric else ", symmetric=False"
        return f"Graph(objects={self.objects}, edges={self.edges}{kind})"
