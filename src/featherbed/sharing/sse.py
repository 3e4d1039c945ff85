"""SSE: ids are replaced at random before a table, in training."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from featherbed.errors import ArgumentError, IdError
from featherbed.hashing import mixed
from featherbed.ops import check_ids
from featherbed.sharing.law import Law, check_rate

if TYPE_CHECKING:
    from featherbed.graphs.relation import Relation

# operators know a module by its number
_modules: WeakValueDictionary[int, SSE] = WeakValueDictionary()
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
    """Return ids, each replaced with probability ``p``, for targets or loops over ids.

    Settings are those of ``fb.SSE``; every call draws from ``generator``. Processes and data-loader
    workers draw differently even with equal generators.

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
    """Stochastic shared embeddings (Wu et al. 2019) for any module that takes ids.

    In training every occurrence of an id is replaced, with probability ``p``, by another id whose
    row is used and trained. In evaluation, and with p = 0, ids are unchanged. SSE-SE: all other ids
    are equally likely, p / (V - 1). SSE-Graph: with a ``graph``, neighbors are ``rho`` times as
    likely as other ids; an id without neighbors is replaced as in SSE-SE. Attributes of the wrapped
    module (``weight``, ``logits``, ``sizes``) are available on this one.

    Draws are a function of seed, number of training calls, position, process and data-loader
    worker: they are reproducible from the state, also when compiled. Seed, calls and p are in the
    ``state_dict``. With activation checkpointing call ``sse.share(ids)`` outside of the recomputed
    part.

    Args:
        table: the module; ``num_embeddings`` is V, and its ``padding_idx`` never changes and never
            appears.
        p: probability of replacement; may change in training (``sse.p = 0.02``, ``fb.Schedule``).
        graph: ``fb.Graph`` over the V ids.
        exclude: further ids that never change and never appear (separators, unknown words).
        include_self: draw among all ids including the old one, like the authors' code: an effective
            p of p (V - 1) / V.
        mixture: the other law of the authors' code: with probability 1/rho any id, else a neighbor
            or the id itself.
        per: "occurrence", or "id": all occurrences of an id in a batch get the same replacement.

    >>> table = nn.Embedding(100, 8)
    >>> items = SSE(table, p=0.1, generator=torch.Generator().manual_seed(0))
    >>> items(torch.tensor([3, 17])).shape, items.embedding_dim
    (torch.Size([2, 8]), 8)
    """

    scheduled: ClassVar[str] = "p"  # the attribute that fb.Schedule sets
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
            accepted = "give a module that takes ids, such as nn.Embedding"
            raise ArgumentError(f"{table!r} has no num_embeddings: {accepted}")
        padding = getattr(table, "padding_idx", None)
        self.law = Law(int(rows), graph, rho, exclude, include_self, mixture, per, padding)
        self.register_buffer("seed", torch.tensor(draw_key(generator)))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("rate", torch.tensor(bits(check_rate(p))))
        self.table = table  # last: from here on its attributes are those of this module
        self._enter()

    def _enter(self) -> None:
        self.number = next(_numbers)
        _modules[self.number] = self

    @property
    def p(self) -> float:
        """Probability of replacement."""
        return unbits(self.rate)

    @p.setter
    def p(self, value: float) -> None:
        self.rate.fill_(bits(check_rate(value)))

    def forward(self, ids: Tensor, *given: Any, **settings: Any) -> Any:
        """Call the module with ids, replaced in training."""
        return self.table(self.share(ids), *given, **settings)

    def bag(self, ids: Tensor, *given: Any, **settings: Any) -> Any:
        """Call the table's ``bag`` with ids, replaced in training (see ``fb.Bag``)."""
        bag: Any = self.table.bag
        return bag(self.share(ids), *given, **settings)

    def share(self, ids: Tensor) -> Tensor:  # integer [...] -> int64 [...]
        """Return ids, replaced at random in training."""
        if not self.training:
            return ids
        if not isinstance(ids, Tensor):
            raise IdError(
                f"ids are a tensor of whole numbers, got {type(ids).__name__}: use "
                "torch.as_tensor(ids)"
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
        """Return a state that continues the draws."""
        return {name: value for name, value in self.__dict__.items() if name != "number"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a copy."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enter()

    def extra_repr(self) -> str:
        """Show the settings."""
        if self.law.lists is None:
            return f"p={self.p:g}"
        return f"p={self.p:g}, rho={self.law.rho:g}, neighbors={len(self.law.lists[1])}"


@torch.library.custom_op("featherbed::share_ids", mutates_args=())
def _shared(ids: Tensor, rate: Tensor, seed: Tensor, calls: Tensor, number: int) -> Tensor:
    return _draw(_modules[number].law, ids, unbits(rate), call_key(int(seed), int(calls)))


@_shared.register_fake
def _(ids: Tensor, rate: Tensor, seed: Tensor, calls: Tensor, number: int) -> Tensor:  # noqa: ARG001
    return torch.empty(ids.shape, dtype=torch.int64, device=ids.device)


def _draw(law: Law, ids: Tensor, rate: float, key: int) -> Tensor:  # integer [...] -> int64 [...]
    found = law.drawn(check_ids(ids, law.rows).cpu().numpy(), rate, key)
    return torch.from_numpy(found).to(ids.device)


def call_key(seed: int, calls: int) -> int:
    """Return the key of a call, different in each process and data-loader worker (and epoch)."""
    group, worker = torch.distributed, torch.utils.data.get_worker_info()
    rank = group.get_rank() if group.is_available() and group.is_initialized() else 0
    key = np.array([seed])
    for number in (rank, 0 if worker is None else worker.seed, calls):
        key = mixed(key + mixed(np.array([number])))
    return int(key[0])


def bits(p: float) -> int:
    """Return the 64 bits of a number as an integer, which half precision does not change."""
    return int(np.float64(p).view(np.int64))


def unbits(rate: Tensor) -> float:
    """Return the number of 64 bits."""
    return float(np.int64(int(rate)).view(np.float64))
