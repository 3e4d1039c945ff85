"""The law by which ids are replaced: which other id an id becomes, and how likely that is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from featherbed.errors import ArgumentError
from featherbed.hashing import mixed

PER = ("occurrence", "id")
UNIT = 2.0**-63  # from numbers of 63 bits to [0, 1)
STREAMS = (0x632BE59BD9B4E019, 0x1F83D9ABFB41BD6B, 0x2545F4914F6CDD1D)  # three numbers for each id: whether, how, which


class Relation(Protocol):
    """Neighbours of each object: featherbed.graphs.Graph, or what has a sparse matrix [V, V] of them."""

    @property
    def objects(self) -> int:
        """V."""

    @property
    def matrix(self) -> Any:
        """scipy.sparse CSR [V, V], sorted, without the diagonal."""


class Law:
    """p(j -> k), Wu et al. 2019: j stays with probability 1 - p; else a neighbour k of j is ``rho`` times as likely as another.

        q_j = p / (rho n_j + N - 1 - n_j),   p(j -> k) = rho q_j for the n_j neighbours of j, q_j for the other k != j

    over the N ids that are not ``exclude``d; these neither change nor appear. Without a graph p(j -> k) = p / (N - 1). No
    V x V table is made: the neighbour lists are numbered, and so are the ids between them.
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
    ) -> None:
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise ArgumentError(f"num_embeddings={rows!r}: give the number of ids, at least 1")
        if isinstance(rho, bool) or not isinstance(rho, int | float) or not (math.isfinite(rho) and rho > 0):
            raise ArgumentError(f"rho={rho!r}: a neighbour is rho times as likely as another id; give a number above 0")
        if mixture and (graph is None or rho < 1):
            raise ArgumentError("mixture=True draws a neighbour with probability 1 - 1/rho: give a graph and rho of at least 1")
        if per not in PER:
            raise ArgumentError(f"per={per!r}: use {' or '.join(PER)}")
        if graph is not None and graph.objects != rows:
            raise ArgumentError(f"the graph is over {graph.objects} objects, there are {rows} ids")
        blocked = sorted({int(i) for i in exclude})
        if blocked and (blocked[0] < 0 or blocked[-1] >= rows):
            raise ArgumentError(f"exclude={blocked}: ids go from 0 to {rows - 1}")
        self.rows, self.rho, self.include_self, self.mixture, self.per = rows, float(rho), include_self, mixture, per
        self.blocked = torch.tensor(blocked, dtype=torch.int64)
        self.free = rows - len(blocked)  # N
        self.starts: Tensor | None = None
        self.neighbours: Tensor | None = None
        if graph is not None:
            matrix = graph.matrix
            if blocked:
                free = torch.ones(rows, dtype=torch.bool)
                free[self.blocked] = False
                matrix = matrix.multiply(free.numpy()[None, :]).tocsr()
                matrix.eliminate_zeros()
                matrix.sort_indices()
            self.starts, self.neighbours = torch.from_numpy(matrix.indptr), torch.from_numpy(matrix.indices)

    def drawn(self, ids: Tensor, rate: float, key: int) -> Tensor:  # int64 [...] -> int64 [...]
        """Return ids, each replaced with probability ``rate``; the same ``key`` draws the same."""
        out = ids.clone()
        if rate == 0 or self.free < 2:
            return out
        flat = out.view(-1)
        if self.per == "id":
            at = (uniform(flat, key, 0) < rate).nonzero()[:, 0]
            seeds = flat[at]
        else:
            at = replaced(len(flat), rate, key).to(ids.device)
            seeds = at
        if len(self.blocked):
            free = ~torch.isin(flat[at], self.blocked.to(ids.device))
            at, seeds = at[free], seeds[free]
        if len(at):
            seeds = seeds.cpu()
            flat[at] = self._others(flat[at].cpu(), uniform(seeds, key, 1), numbers(seeds, key, 2)).to(ids.device)
        return out

    def _others(self, ids: Tensor, how: Tensor, which: Tensor) -> Tensor:  # [m], [m] in [0, 1), [m] -> [m]
        """Return what ids that are replaced become."""
        own = self._rank(ids)
        if self.starts is None or self.neighbours is None:
            return self._unrank(self._rest(own, which, None, None))
        begin = self.starts[ids].long()
        count = self.starts[ids + 1].long() - begin
        rest = self.free - count - (0 if self.include_self else 1)
        if self.mixture:
            near = how >= 1 / self.rho
            inner = which % (count + 1)  # the list of the authors' code holds the id itself
            place = begin + inner.clamp(max=count - 1).clamp(min=0)
            alike = torch.where(inner == count, ids, self._neighbour(place))
            return torch.where(near, alike, self._unrank(which % self.free))
        near = how * (self.rho * count + rest) < self.rho * count
        neighbour = self._neighbour(begin + which % count.clamp(min=1))
        return torch.where(near, neighbour, self._unrank(self._rest(own, which, begin, count)))

    def _neighbour(self, place: Tensor) -> Tensor:
        assert self.neighbours is not None
        return self.neighbours[place.clamp(max=len(self.neighbours) - 1)].long() if len(self.neighbours) else place

    def _rest(self, own: Tensor, which: Tensor, begin: Tensor | None, count: Tensor | None) -> Tensor:
        """Draw evenly among the free ids that are no neighbours (nor the id itself), as ranks."""
        near = torch.zeros_like(own) if count is None else count
        number = which % (self.free - near - (0 if self.include_self else 1)).clamp(min=1)
        if not self.include_self:
            number = number + (number >= own - self._below(own, begin, near, shifted=False))
        return number + self._below(number, begin, near, shifted=True)

    def _below(self, value: Tensor, begin: Tensor | None, count: Tensor, *, shifted: bool) -> Tensor:
        """Count the neighbours whose rank, less their place in the list if ``shifted``, is at most ``value``: by halving."""
        low, high = torch.zeros_like(value), count.clone()
        if begin is None:
            return low
        while bool((low < high).any()):
            middle = (low + high) // 2
            rank = self._rank(self._neighbour(begin + middle)) - (middle if shifted else 0)
            above = (rank <= value) & (low < high)
            low, high = torch.where(above, middle + 1, low), torch.where(above | (low >= high), high, middle)
        return low

    def _rank(self, ids: Tensor) -> Tensor:
        """Return the place of ids among those that are not excluded."""
        return ids - torch.searchsorted(self.blocked, ids) if len(self.blocked) else ids

    def _unrank(self, ranks: Tensor) -> Tensor:
        if not len(self.blocked):
            return ranks
        return ranks + torch.searchsorted(self.blocked - torch.arange(len(self.blocked)), ranks, right=True)


def numbers(places: Tensor, key: int, stream: int) -> Tensor:  # int64 [m] -> int64 [m] of 63 bits
    """Return the numbers that a key draws for places."""
    found: Tensor = mixed(mixed(places + (key - (1 << 62))) ^ STREAMS[stream])
    return found


def uniform(places: Tensor, key: int, stream: int) -> Tensor:  # -> float64 [m] in [0, 1)
    """Return the numbers as shares of one."""
    return numbers(places, key, stream).double() * UNIT


def replaced(count: int, rate: float, key: int) -> Tensor:  # -> int64 [m], rising
    """Return which of ``count`` places are replaced, each with probability ``rate`` on its own.

    Gaps between such places are geometric, floor(log u / log(1 - rate)): as many numbers are drawn as places are replaced.

    >>> replaced(10, 1.0, key=1)
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> len(replaced(1_000_000, 0.01, key=1)) // 100
    100
    """
    if rate == 1:
        return torch.arange(count)
    few = int(count * rate + 6 * math.sqrt(count * rate) + 16)
    found: list[Tensor] = []
    last, drawn = -1, 0
    while last < count:
        share = uniform(torch.arange(drawn, drawn + few), key, 0)
        gaps = (torch.log1p(-share) / math.log1p(-rate)).clamp(max=float(count)).long()
        found.append(last + (gaps + 1).cumsum(0))
        last, drawn = int(found[-1][-1]), drawn + few
    places = torch.cat(found)
    return places[places < count]
