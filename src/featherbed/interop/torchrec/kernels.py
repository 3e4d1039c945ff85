"""Look-up kernels over shards of tables, in the place of TorchRec's own.

TorchRec plans which process holds which rows, sends ids to them and composed rows (or codes) back.
A kernel is what it calls in between: the rows that this process holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding

from featherbed.optim.processes import mark, of_first, total
from featherbed.tables.parts.norms import Normalize
from featherbed.tables.table import Table

WIRES = ("rows", "codes")


@dataclass
class Shard:
    """The rows of a table that this process holds (``table`` is None if it holds none of it).

    ``plan`` are the offsets and sizes of the rows of every process, ``group`` the processes.
    """

    name: str
    table: Table | None
    rows: int
    dim: int
    plan: list[ShardMetadata]
    group: Any
    padding_idx: int | None

    @property
    def divided(self) -> bool:
        """Whether several processes hold rows of the table."""
        return len(self.plan) > 1

    @property
    def start(self) -> int:
        """The first row of this process."""
        return int(self.plan[torch.distributed.get_rank(self.group)].shard_offsets[0])


def cut(whole: Table, start: int, stop: int, group: Any, seed: int) -> Table:
    """Return rows of a table: copied, or initialized if the table is on the meta device."""
    found = whole.part(start, stop)
    if whole.device.type == "meta":
        rank = torch.distributed.get_rank(group)
        found.to_empty(device="cpu")
        found.reset_parameters(torch.Generator().manual_seed(seed + rank))
    return found


def join_processes(table: Table, group: Any, wire: str, divided: bool) -> None:
    """Make what rows share one for all processes: values, gradients, statistics.

    TorchRec divides the gradients of rows by the number of processes, so the gradients of what the
    rows of all owners share are sums. With codes on the wire rows are composed where they were
    asked for, and gradients are means.
    """
    world = torch.distributed.get_world_size(group)
    for name, parameter in table.named_parameters():
        own = name in table.row_tensors
        mark(parameter, group, divided=own or not divided)
        if own or not divided:
            continue
        parameter.data.copy_(of_first(parameter.data, group))
        share = gradient_share(wire, world)

        def combine(gradient: Tensor, share: float = share) -> Tensor:
            return total(gradient, group) * share

        parameter.register_hook(combine)  # type: ignore[no-untyped-call]
    for name, buffer in table.named_buffers() if divided else ():
        if name not in table.row_tensors:
            buffer.copy_(of_first(buffer, group))
    for module in table.modules() if divided else ():
        if isinstance(module, Normalize):
            module.group = group


def gradient_share(wire: str, world: int) -> float:
    """Return the factor of summed gradients of what rows share."""
    return 1.0 if wire == "rows" else 1 / world


class TableKernel(BaseEmbedding):
    """Looks up the rows of local shards, or pools them into bags."""

    def __init__(
        self, config: Any, tables: list[Table], *, wire: str, pooled: bool, mean: bool
    ) -> None:
        super().__init__()
        self._config, self.wire, self.pooled, self.mean = config, wire, pooled, mean
        self.tables = nn.ModuleList(tables)

    @property
    def config(self) -> Any:
        """Tables and features."""
        return self._config

    def forward(self, features: Any) -> Tensor:
        """Return rows [n, d], or bags [B, features d]."""
        counts = [table.num_features() for table in self._config.embedding_tables]
        lengths = features.lengths().view(sum(counts), -1)
        ends = [0, *torch.cumsum(lengths.sum(1), 0).tolist()]
        ids, weights = features.values().long(), features.weights_or_none()
        parts: list[Tensor] = []
        first = 0
        for table, count in zip(self.tables, counts, strict=True):
            part = slice(ends[first], ends[first + count])
            if self.pooled:
                own = lengths[first : first + count].reshape(-1)
                shares = None if weights is None else weights[part]
                bags = self._bags(table, ids[part], own, shares)  # type: ignore[arg-type]
                parts += bags.view(count, -1, bags.shape[1]).unbind(0)
            else:
                parts.append(self._rows(table, ids[part]))  # type: ignore[arg-type]
            first += count
        return torch.cat(parts, 1 if self.pooled else 0)

    def _rows(self, table: Table, ids: Tensor) -> Tensor:  # [n] -> [n, d] or [n, K]
        if self.wire == "rows":
            rows: Tensor = table(ids)
            return rows
        values = table.codes(ids).values
        assert values is not None
        return table.mask_padding(ids, values)

    def _bags(self, table: Table, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        bags = len(lengths)
        owner = torch.repeat_interleave(torch.arange(bags), lengths, output_size=len(ids))
        if self.wire == "rows":
            pooled = table.pooled(ids, owner, bags, weights)
        else:
            rows = self._rows(table, ids)
            rows = rows if weights is None else rows * weights[:, None]
            pooled = rows.new_zeros(bags, rows.shape[1]).index_add(0, owner, rows)
        return pooled / lengths.clamp(min=1)[:, None] if self.mean else pooled

    def flush(self) -> None:
        """Apply the pending updates of all rows."""
        for table in self.tables:
            table.settle()  # type: ignore[operator]

    purge = flush

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield nothing: tables are modules of the collection, with parameters of their own."""
        yield from ()


MakeKernel = Callable[[Any], nn.Module]


class SequenceLookup(GroupedEmbeddingsLookup):
    """TorchRec's look-up of rows, with our kernels."""

    def __init__(self, make: MakeKernel, **settings: Any) -> None:
        self.make = make
        super().__init__(**settings)

    def _create_embedding_kernel(self, config: Any, *_: Any) -> Any:
        return self.make(config)


class BagLookup(GroupedPooledEmbeddingsLookup):
    """TorchRec's look-up of bags, with our kernels."""

    def __init__(self, make: MakeKernel, **settings: Any) -> None:
        self.make = make
        super().__init__(**settings)

    def _create_embedding_kernel(self, config: Any, *_: Any) -> Any:
        return self.make(config)


class MakesLookup:
    """A sharding whose look-ups use the kernels of ``make``."""

    make: MakeKernel
    lookup: type[nn.Module]

    def create_lookup(self, *_: Any, **__: Any) -> nn.Module:
        """Return the look-up of this process."""
        given: Any = self
        how = {"pg": given._pg, "device": given._device, "env": given._env}
        return self.lookup(self.make, grouped_configs=given._grouped_embedding_configs, **how)


class RowWiseSequence(MakesLookup, RwSequenceEmbeddingSharding):
    """Rows of one table on all processes."""

    lookup = SequenceLookup


class TableWiseSequence(MakesLookup, TwSequenceEmbeddingSharding):
    """Rows of one table on one process."""

    lookup = SequenceLookup


class RowWiseBags(MakesLookup, RwPooledEmbeddingSharding):
    """Bags over one table on all processes: each sums its own rows."""

    lookup = BagLookup


class TableWiseBags(MakesLookup, TwPooledEmbeddingSharding):
    """Bags over one table on one process."""

    lookup = BagLookup


SHARDINGS: dict[tuple[str, bool], type[MakesLookup]] = {
    ("row_wise", False): RowWiseSequence,
    ("table_wise", False): TableWiseSequence,
    ("row_wise", True): RowWiseBags,
    ("table_wise", True): TableWiseBags,
}
