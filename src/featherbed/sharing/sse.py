"""SSE: ids are replaced at random on their way to a table, while training."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from numbers import Integral
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from featherbed.errors import ArgumentError, IdError
from featherbed.hashing import mixed
from featherbed.ops import check_ids
from featherbed.sharing.law import Law, Relation, check_rate

_modules: WeakValueDictionary[int, SSE] = (
    WeakValueDictionary()
)  # operators know a module by its number
_numbers = count()


def draw_key(generator: torch.Generator | None) -> int:
    """Draw a key of 62 bits."""
    return int(torch.randint(1 << 62, (), generator=generator))


def share(
    ids: Tensor,
    num_embeddings: int,
    p: float,
    *,
    graph: Relation | None = None,
    rho: float = 1.0,
    exclude: Iterable[int] = (),
    include_self: bool = False,
    mixture: bool = False,
    per: str = "occurrence",
    generator: torch.Generator | None = None,
) -> Tensor:  # integer [...] -> int64 [...]
    """Return ids, each replaced by another with probability ``p``: for targets, and loops that handle ids themselves.

    The law and the settings are those of ``fb.SSE``; every call draws anew from ``generator``. Processes and data-loader
    workers draw differently even where their generators are alike.

    >>> ids = torch.zeros(1000, dtype=torch.int64)
    >>> shared = share(ids, 50, 0.1, generator=torch.Generator().manual_seed(0))
    >>> 50 < int((shared != 0).sum()) < 150, int(shared.max()) < 50
    (True, True)
    """
    law = Law(num_embeddings, graph, rho, exclude, include_self, mixture, per)
    return _draw(law, ids, check_rate(p), call_key(draw_key(generator), 0))


def bare(module: nn.Module) -> Any:
    """Return the module behind an SSE, or the module itself.

    >>> table = nn.Embedding(10, 2)
    >>> bare(SSE(table, p=0.1)) is table and bare(table) is table
    True
    """
    return module.table if isinstance(module, SSE) else module


class SSE(nn.Module):
    """Stochastic shared embeddings (Wu et al. 2019) in front of any module that takes ids: nn.Embedding, EmbeddingBag, tables.

    While training every occurrence of an id is replaced, with probability ``p``, by another id; the rows of that one are used
    and learn. In evaluation, and with p = 0, ids pass as they are. SSE-SE: every other id is as likely, p / (V - 1).
    SSE-Graph: with a ``graph`` a neighbour is ``rho`` times as likely as an id that is none; an id without neighbours is
    replaced as in SSE-SE. Whatever else the wrapped module has (``weight``, ``logits``, ``sizes``) is reached through this one.

    Draws depend on a seed, the number of calls in training, the place of the id and, with several processes or data-loader
    workers, which one this is: they are the same again with the same state, and compiled. Seed, calls and p are in the
    ``state_dict``. A part of a model that runs twice (activation checkpointing) takes ``sse.share(ids)`` from outside it.

    Args:
        table: the module; its ``num_embeddings`` is V, its ``padding_idx`` never changes and never appears.
        p: the probability of being replaced; may be changed while training (``sse.p = 0.02``, ``fb.Schedule``).
        graph: ``fb.Graph`` over the V ids.
        exclude: further ids that never change and never appear (separators, unknown words).
        include_self: draw among all ids, the old one too, as the authors' code does: an effective p of p (V - 1) / V.
        mixture: their code's other law: with probability 1/rho any id, else one of the neighbours and the id itself.
        per: "occurrence", or "id": the same id in a batch becomes the same other.

    >>> table = nn.Embedding(100, 8)
    >>> items = SSE(table, p=0.1, generator=torch.Generator().manual_seed(0))
    >>> items(torch.tensor([3, 17])).shape, items.embedding_dim
    (torch.Size([2, 8]), 8)
    """

    seed: Tensor
    calls: Tensor
    rate: Tensor

    def __init__(
        self,
        table: nn.Module,
        p: float,
        *,
        graph: Relation | None = None,
        rho: float = 1.0,
        exclude: Iterable[int] = (),
        include_self: bool = False,
        mixture: bool = False,
        per: str = "occurrence",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        rows = getattr(table, "num_embeddings", None)
        if not isinstance(table, nn.Module) or not isinstance(rows, Integral):
            raise ArgumentError(
                f"{table!r} has no num_embeddings: give a module that takes ids, such as nn.Embedding"
            )
        padding = getattr(table, "padding_idx", None)
        self.law = Law(int(rows), graph, rho, exclude, include_self, mixture, per, padding)
        self.register_buffer("seed", torch.tensor(draw_key(generator)))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("rate", torch.tensor(bits(check_rate(p))))
        self.table = table  # last: what it has is an attribute of this module from here on
        self._enter()

    def _enter(self) -> None:
        self.number = next(_numbers)
        _modules[self.number] = self

    @property
    def p(self) -> float:
        """The probability of being replaced."""
        return unbits(self.rate)

    @p.setter
    def p(self, value: float) -> None:
        self.rate.fill_(bits(check_rate(value)))

    def forward(self, ids: Tensor, *given: Any, **settings: Any) -> Any:
        """Pass ids, shared while training, to the module."""
        return self.table(self.share(ids), *given, **settings)

    def bag(self, ids: Tensor, *given: Any, **settings: Any) -> Any:
        """Pass ids, shared while training, to the ``bag`` of a table (see ``fb.Bag``)."""
        bag: Any = self.table.bag
        return bag(self.share(ids), *given, **settings)

    def share(self, ids: Tensor) -> Tensor:  # integer [...] -> int64 [...]
        """Return ids as the module is to see them: replaced at random while training."""
        if not self.training:
            return ids
        if not isinstance(ids, Tensor):
            raise IdError(
                f"ids are a tensor of whole numbers, got {type(ids).__name__}: use torch.as_tensor(ids)"
            )
        if self.table.num_embeddings != self.law.rows:
            self.law.resize(int(self.table.num_embeddings))  # type: ignore[arg-type]
        self.calls.add_(1)
        shared: Tensor = _shared(ids, self.rate, self.seed, self.calls, self.number)
        return shared

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "table":
                raise
            return getattr(super().__getattr__("table"), name)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles draw on from here."""
        return {name: value for name, value in self.__dict__.items() if name != "number"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take in a copy's state."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enter()

    def extra_repr(self) -> str:
        """Show the law."""
        near = (
            f", rho={self.law.rho:g}, neighbours={len(self.law.lists[1])}"
            if self.law.lists is not None
            else ""
        )
        return f"p={self.p:g}{near}"


@torch.library.custom_op("featherbed::share_ids", mutates_args=())
def _shared(ids: Tensor, rate: Tensor, seed: Tensor, calls: Tensor, number: int) -> Tensor:
    return _draw(_modules[number].law, ids, unbits(rate), call_key(int(seed), int(calls)))


@_shared.register_fake
def _(ids: Tensor, rate: Tensor, seed: Tensor, calls: Tensor, number: int) -> Tensor:  # noqa: ARG001
    return torch.empty(ids.shape, dtype=torch.int64, device=ids.device)


def _draw(law: Law, ids: Tensor, rate: float, key: int) -> Tensor:  # integer [...] -> int64 [...]
    return torch.from_numpy(law.drawn(check_ids(ids, law.rows).cpu().numpy(), rate, key)).to(
        ids.device
    )


def call_key(seed: int, calls: int) -> int:
    """Return the key of a call, another in each process and data-loader worker (whose seed is another in each epoch)."""
    group, worker = torch.distributed, torch.utils.data.get_worker_info()
    rank = group.get_rank() if group.is_available() and group.is_initialized() else 0
    key = np.array([seed])
    for number in (rank, 0 if worker is None else worker.seed, calls):
        key = mixed(key + mixed(np.array([number])))
    return int(key[0])


def bits(p: float) -> int:
    """Return the 64 bits of a number: as a whole number it stays what it is when a model becomes half precision."""
    return int(np.float64(p).view(np.int64))


def unbits(rate: Tensor) -> float:
    """Return the number that 64 bits stand for."""
    return float(np.int64(int(rate)).view(np.float64))
