"""Samplers of negatives, with the expected count of each id."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from featherbed.checks import check_integer
from featherbed.errors import ArgumentError

MOST_AT_ONCE = 1 << 20  # ids drawn in one go while distinct ones are looked for


class Sampler(ABC):
    """Draws ids from a distribution p over ``rows`` ids; subclasses define ``pick`` and
    ``probability``.
    """

    def __init__(
        self, rows: int, *, replace: bool = False, generator: torch.Generator | None = None
    ) -> None:
        self.rows = check_integer("rows", rows)
        if not isinstance(replace, bool):
            raise ArgumentError(
                f"replace={replace!r}: give True (ids may repeat) or False (distinct ids)"
            )
        if generator is not None and not isinstance(generator, torch.Generator):
            raise ArgumentError(
                f"generator={generator!r}: give a torch.Generator, such as "
                "torch.Generator().manual_seed(0), or None"
            )
        self.replace, self.generator = replace, generator

    @abstractmethod
    def pick(self, count: int) -> Tensor:  # -> int64 [count], on self.device
        """Draw ``count`` ids from p independently."""

    @abstractmethod
    def probability(self, ids: Tensor) -> Tensor:  # int64 [...] -> float64 [...]
        """Return p(id)."""

    @property
    def device(self) -> torch.device:
        """Device of the generator."""
        return torch.device("cpu") if self.generator is None else self.generator.device

    def draw(self, count: int) -> tuple[Tensor, float]:  # -> int64 [count], tries
        """Draw ``count`` ids; return them and the number of tries, for ``log_expected``.

        Distinct ids are drawn until there are ``count``; repeats are discarded but counted as
        tries. Drawing all rows takes no tries: it is the limit of infinitely many.
        """
        self.check(count)
        if self.replace:
            return self.pick(count), float(count)
        if count == self.rows:
            return torch.arange(self.rows, device=self.device), math.inf
        found, tries = torch.empty(0, dtype=torch.int64, device=self.device), 0
        while True:
            fresh = self.pick(min(max(2 * count, tries), MOST_AT_ONCE))
            pool = torch.cat([found, fresh])
            places = first_places(pool)
            if len(places) >= count:
                return pool[places[:count]], float(tries + int(places[count - 1]) + 1 - len(found))
            found, tries = pool[places], tries + len(fresh)

    def log_expected(self, ids: Tensor, tries: float) -> Tensor:  # int64 [...] -> float64 [...]
        """Return the log expected count in a number of tries: log(p tries), distinct: log(1 - (1 -
        p)^tries).
        """
        p = self.probability(ids)
        if self.replace:
            return p.log() + math.log(tries)
        return (-torch.expm1(tries * torch.log1p(-p))).log()

    def check(self, count: int) -> int:
        """Return a number of ids that can be drawn, or say why this one cannot."""
        if check_integer("samples", count) > self.rows and not self.replace:
            raise ArgumentError(
                f"samples={count}: there are only {self.rows} distinct ids; draw at most "
                "that number, or pass replace=True"
            )
        return count

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rows}, replace={self.replace})"


class LogUniform(Sampler):
    """Negatives by Zipf's law, for ids sorted by decreasing frequency.

        P(k) = log((k + 2) / (k + 1)) / log(V + 1)

    by inverting the distribution function, k = floor((V + 1)^u) - 1 with u uniform in [0, 1): the
    cost does not depend on V. It is the distribution of TensorFlow's
    ``log_uniform_candidate_sampler``, whose ``unique`` is ``not replace``. Ids in another order are
    corrected for, but use ``Uniform`` for them.

    Args:
        rows: number of ids V.
        replace: whether an id may be drawn twice. Distinct ids (False) carry more information at
            the same cost, unless nearly all rows are drawn: the last few take very many tries (all
            of them take none).
        generator: random generator, saved by the caller; None uses torch's default, like dropout.

    >>> sampler = LogUniform(50_000, generator=torch.Generator().manual_seed(0))
    >>> ids, tries = sampler.draw(1000)
    >>> len(ids.unique()), tries > 1000, sampler.probability(torch.tensor([0, 49_999]))
    (1000, True, tensor([6.4063e-02, 1.8484e-06], dtype=torch.float64))
    """

    def pick(self, count: int) -> Tensor:
        """floor((V + 1)^u) - 1, in float64."""
        u = torch.rand(count, dtype=torch.float64, generator=self.generator, device=self.device)
        ids = (u * math.log(self.rows + 1)).exp().long().sub_(1)
        return ids.clamp_(max=self.rows - 1)  # rounding may reach V

    def probability(self, ids: Tensor) -> Tensor:
        """log(1 + 1 / (k + 1)) / log(V + 1)."""
        share = (ids.double() + 1).reciprocal().log1p() / math.log(self.rows + 1)
        return share.clamp(max=1.0)  # of one row, rounding may pass 1


class Uniform(Sampler):
    """Uniform negatives, P(k) = 1 / V, for ids in any order.

    The further P is from the model's distribution, the more samples are needed (Bengio and Senécal
    2008).

    Args:
        rows: number of ids V.
        replace: whether an id may be drawn twice.
        generator: random generator, saved by the caller; None uses torch's default, like dropout.

    >>> sampler = Uniform(10, replace=True, generator=torch.Generator().manual_seed(0))
    >>> ids, tries = sampler.draw(20)
    >>> sampler.log_expected(ids, tries).exp()[:2]
    tensor([2., 2.], dtype=torch.float64)
    """

    def pick(self, count: int) -> Tensor:
        """Integers below V."""
        return torch.randint(self.rows, (count,), generator=self.generator, device=self.device)

    def probability(self, ids: Tensor) -> Tensor:
        """1 / V."""
        return torch.full(ids.shape, 1 / self.rows, dtype=torch.float64, device=ids.device)


def first_places(ids: Tensor) -> Tensor:  # int64 [n] -> int64 [distinct], ascending
    """Return the positions of the first occurrence of each id.

    >>> first_places(torch.tensor([4, 2, 4, 7, 2]))
    tensor([0, 1, 3])
    """
    ordered, places = ids.sort(stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return places[new].sort().values
