"""The distribution by which ids are replaced."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from featherbed.checks import check_choice, is_integer, is_number
from featherbed.errors import ArgumentError
from featherbed.hashing import mixed

if TYPE_CHECKING:
    from featherbed.graphs.relation import Relation

Ids = NDArray[np.int64]
PER = ("occurrence", "id")
# three numbers for each place: whether, how, which
STREAMS = (0x632BE59BD9B4E019, 0x1F83D9ABFB41BD6B, 0x2545F4914F6CDD1D)


class Law:
    """p(j -> k), Wu et al. 2019: neighbors are ``rho`` times as likely, j stays by 1 - p.

        q_j = p / (rho n_j + N - 1 - n_j)
        p(j -> k) = rho q_j for the n_j neighbors of j, q_j for the other k != j

    over the N ids that are not excluded; excluded ids neither change nor appear. Without a graph
    p(j -> k) = p / (N - 1). No V x V matrix is built: neighbors, and the ids between them, are
    enumerated.

    >>> law = Law(5, exclude=[0])
    >>> law.drawn(np.array([0, 1, 2]), rate=1.0, key=7)[0]
    np.int64(0)
    """

    def __init__(
        self,
        rows: int,
        graph: Relation | None = None,
        rho: float = 1.0,
        exclude: Iterable[int] = (),
        include_self: bool = False,
        mixture: bool = False,
        per: str = "occurrence",
        padding: int | None = None,
    ) -> None:
        if not is_integer(rows, 1):
            raise ArgumentError(f"num_embeddings={rows!r}: give the number of ids, at least 1")
        if not is_number(rho, 0) or rho == 0:
            times = "a neighbor is rho times as likely as another id"
            raise ArgumentError(f"rho={rho!r}: {times}; give a number above 0")
        self.rows, self.rho = int(rows), float(rho)
        for name, given in (("include_self", include_self), ("mixture", mixture)):
            if not isinstance(given, bool):
                raise ArgumentError(f"{name}={given!r}: True or False")
        if mixture and (graph is None or rho < 1):
            chance = "mixture=True draws a neighbor with probability 1 - 1/rho"
            raise ArgumentError(f"{chance}: give a graph and rho of at least 1")
        check_choice("per", per, PER)
        self.include_self, self.mixture, self.per = include_self, mixture, per
        self.blocked = blocked_ids(exclude, padding, self.rows)
        self.free = self.rows - len(self.blocked)  # N
        self.lists = None if graph is None else neighbor_lists(graph, self.rows, self.blocked)

    def resize(self, rows: int) -> None:
        """Continue with another number of ids, after rows were added."""
        if self.lists is not None:
            raise ArgumentError(
                f"there are {rows} ids now, the graph is over {self.rows}: share with a graph over "
                "all of them"
            )
        self.rows, self.free = rows, rows - len(self.blocked)

    def __deepcopy__(self, memo: dict[int, Any]) -> Law:
        """Return the same object: copies share the immutable law."""
        return self

    def drawn(self, ids: Ids, rate: float, key: int) -> Ids:  # [...] -> [...]
        """Return ids, each replaced with probability ``rate``, deterministic for a ``key``."""
        out = ids.copy()
        if rate == 0 or self.free < 2:
            return out
        flat = out.reshape(-1)
        if self.per == "id":
            at = np.flatnonzero(uniform(flat, key, 0) < rate)
            places = flat[at]
        else:
            places = at = replaced(flat.size, rate, key)
        if len(self.blocked):
            free = ~np.isin(flat[at], self.blocked)
            at, places = at[free], places[free]
        flat[at] = self._others(flat[at], uniform(places, key, 1), numbers(places, key, 2))
        return out

    def _others(self, ids: Ids, how: NDArray[np.float64], which: Ids) -> Ids:  # [m], how in [0, 1)
        """Return the replacements of ids."""
        if self.lists is None:
            none = np.zeros_like(ids)
            return self._unrank(self._far(ids, which, none, none))
        starts, neighbors = self.lists
        begin = starts[ids].astype(np.int64)
        count = starts[ids + 1] - begin
        if self.mixture:
            near = how >= 1 / self.rho
            # the list of the authors' code holds the id itself, here at the end
            inner = which % (count + 1)
        else:
            rest = self.free - count - (not self.include_self)
            # and 1 / (1 + rho) for the others: no rho is too large
            weight = self.rho / (1 + self.rho) * count
            near = how * (weight + rest / (1 + self.rho)) < weight
            inner = which % np.maximum(count, 1)
        out, far, listed = ids.copy(), ~near, near & (inner < count)
        out[listed] = neighbors[(begin + inner)[listed]]
        parts = [part[far] for part in (ids, which, begin, count)]
        ranks = which[far] % self.free if self.mixture else self._far(*parts)
        out[far] = self._unrank(ranks)
        return out

    def _far(self, ids: Ids, which: Ids, begin: Ids, count: Ids) -> Ids:
        """Draw ranks among free ids that are no neighbors (the id itself by ``include_self``)."""
        left = self.free - count
        if self.include_self:
            return self._unlisted(which % left, begin, count)
        ranks = self._unlisted(which % np.maximum(left - 1, 1), begin, count)
        # the last of them, which was not drawn, replaces the old id
        same = ranks == self._rank(ids)
        ranks[same] = self._unlisted(left[same] - 1, begin[same], count[same])
        return ranks

    def _unlisted(self, number: Ids, begin: Ids, count: Ids) -> Ids:
        """Return the rank of the n-th free id that is not a neighbor, by bisection."""
        below = np.zeros_like(number)
        if self.lists is not None:
            neighbors = self.lists[1]
            for bit in reversed(range(int(count.max(initial=0)).bit_length())):
                reach = below + (1 << bit)
                fits = reach <= count
                rank = self._rank(neighbors[np.where(fits, begin + reach - 1, 0)])
                below = np.where(fits & (rank - (reach - 1) <= number), reach, below)
        return number + below

    def _rank(self, ids: Ids) -> Ids:
        """Return the rank of ids among the ids that are not excluded."""
        return ids - np.searchsorted(self.blocked, ids).astype(np.int64)

    def _unrank(self, ranks: Ids) -> Ids:
        before = self.blocked - np.arange(len(self.blocked))
        return ranks + np.searchsorted(before, ranks, side="right").astype(np.int64)


def check_rate(p: Any) -> float:
    """Return a probability, or raise an error."""
    if not is_number(p, 0, 1):
        chance = "the probability of being replaced is from 0 to 1"
        raise ArgumentError(f"p={p!r}: {chance} (0.01 replaces one id in a hundred)")
    return float(p)


def blocked_ids(exclude: Iterable[int], padding: int | None, rows: int) -> Ids:
    """Return the sorted distinct excluded ids, or raise an error."""
    try:
        given = list(exclude)
        kept = given if padding is None else [*given, padding]
        found = sorted({operator.index(i) for i in kept})
    except TypeError:
        raise ArgumentError(
            f"exclude={exclude!r}: give a list of ids, whole numbers from 0 to {rows - 1}"
        ) from None
    if any(isinstance(i, bool) for i in given) or (found and (found[0] < 0 or found[-1] >= rows)):
        raise ArgumentError(f"exclude={given!r}: ids go from 0 to {rows - 1}")
    return np.array(found, dtype=np.int64)


Lists = tuple[NDArray[Any], NDArray[Any]]  # [V + 1], [n]
_lists: WeakKeyDictionary[Relation, tuple[bytes, Lists]] = WeakKeyDictionary()


def neighbor_lists(graph: Relation, rows: int, blocked: Ids) -> Lists:
    """Return the start of each id's list, and all lists without blocked ids; cached per graph."""
    if not hasattr(graph, "objects") or not hasattr(graph, "matrix"):
        raise ArgumentError(
            f"graph is {type(graph).__name__}: give a graph, such as "
            "fb.Graph.from_edges(num_embeddings, pairs)"
        )
    if graph.objects != rows:
        raise ArgumentError(
            f"the graph is over {graph.objects} objects, there are {rows} ids: give a graph over "
            "all of them"
        )
    excluded = blocked.tobytes()
    known = _lists.get(graph)
    if known is not None and known[0] == excluded:
        return known[1]
    starts, neighbors = np.asarray(graph.matrix.indptr), np.asarray(graph.matrix.indices)
    for wrong in (neighbors.min(initial=0), neighbors.max(initial=0)):
        if not 0 <= wrong < rows:
            raise ArgumentError(f"the graph names neighbor {wrong}: ids go from 0 to {rows - 1}")
    if len(blocked):
        kept = ~np.isin(neighbors, blocked)
        before = np.concatenate([[0], np.cumsum(kept)]).astype(starts.dtype)
        starts, neighbors = before[starts], neighbors[kept]
    _lists[graph] = excluded, (starts, neighbors)
    return starts, neighbors


def numbers(places: Ids, key: int, stream: int) -> Ids:  # [m] -> [m] of 63 bits
    """Return the random numbers of a key for positions."""
    found: Ids = mixed(mixed(places + (key - (1 << 62))) ^ STREAMS[stream])
    return found


def uniform(places: Ids, key: int, stream: int) -> NDArray[np.float64]:  # [m] -> [m] in [0, 1)
    """Return random numbers as floats in [0, 1)."""
    found = (numbers(places, key, stream) >> 10).astype(np.float64)
    return found * 2.0**-53  # 53 bits are exact: one itself never comes


def replaced(count: int, rate: float, key: int) -> Ids:  # -> [m], ascending
    """Return which of ``count`` positions are replaced, each with probability ``rate``.

    Gaps between them are geometric, floor(log u / log(1 - rate)), so only as many numbers are drawn
    as positions are replaced.

    >>> replaced(10, 1.0, key=1)
    array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> len(replaced(1_000_000, 0.01, key=1)) // 100
    100
    """
    if rate == 1:
        return np.arange(count)
    few = int(count * rate + 2 * math.sqrt(count * rate)) + 1  # mostly enough at once
    found: list[Ids] = []
    last, drawn = -1, 0
    while last < count - 1:
        share = uniform(np.arange(drawn, drawn + few), key, 0)
        with np.errstate(over="ignore"):  # rates near 0: beyond the last place in any case
            gaps = np.minimum(np.log1p(-share) / math.log1p(-rate), count).astype(np.int64)
        found.append(last + (gaps + 1).cumsum())
        last, drawn = int(found[-1][-1]), drawn + few
    places = np.concatenate(found) if found else np.arange(0)
    return places[places < count]
