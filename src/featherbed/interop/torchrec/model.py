"""shard: the tables of an ordinary model divided among processes; the model's code stays."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from featherbed.checks import check_choice
from featherbed.errors import ArgumentError, FeatherbedWarning, IdError, MissingExtra
from featherbed.interop.torchrec import kernels
from featherbed.interop.torchrec.packing import pack
from featherbed.optim.processes import largest, mark, total
from featherbed.tables.bag import Bag
from featherbed.tables.codes import Codes
from featherbed.tables.dense import DenseTable
from featherbed.tables.table import Table

SHARDINGS = ("auto", "row_wise", "table_wise")
FEATURE = "ids"
CAPABILITIES = ("has_anchors", "sparse_codes", "is_dense", "grows", "nonnegative", "slots")


class Divided(nn.Module):
    """What stands in the place of a table: ``shard`` is the part that this process holds."""

    rows: Any  # the collection, sharded by TorchRec

    @property
    def place(self) -> kernels.Shard:
        """The shard, its rows and its processes."""
        (found,) = self.rows.shards.values()
        return found  # type: ignore[no-any-return]

    @property
    def shard(self) -> Table | None:
        """The rows of this process, a table of its own; None if it holds none."""
        return self.place.table

    def exchange(self, ids: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Any:
        """Send ids in bags of the given lengths to their owners; return what comes back."""
        from torchrec import KeyedJaggedTensor

        if weights is not None and weights.requires_grad:
            raise ArgumentError(
                "per_sample_weights have no gradient in a model whose tables are divided among "
                "processes: pool the rows of the table yourself"
            )
        # FBGEMM reads memory in order, whatever the strides
        weights = None if weights is None else weights.contiguous()
        sent = KeyedJaggedTensor([FEATURE], ids.contiguous(), weights, lengths.contiguous())
        return self.rows(sent)[FEATURE]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the shard that this module lacks: ``transform``, ``atoms`` ..."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            rows = self.__dict__.get("_modules", {}).get("rows")
            shard = self.shard if hasattr(rows, "shards") else None
            if shard is None or name.startswith("__"):
                raise
            return getattr(shard, name)


class DividedTable(Divided, Table):
    """A table whose rows are divided among processes: called by all of them, with their own ids."""

    def __init__(self, table: Table, rows: nn.Module) -> None:
        Table.__init__(self, table.num_embeddings, table.embedding_dim, table.padding_idx)
        self.rows = rows
        for name in CAPABILITIES:
            self.__dict__[name] = getattr(table, name)

    def lookup(self, ids: Tensor) -> Tensor:  # int64 [...], checked -> [..., d]
        """Return rows, from the processes that hold them."""
        flat = ids.reshape(-1)
        sent = self.exchange(flat, torch.tensor([len(flat)]))  # one bag: its length is one number
        found: Tensor = sent.values()
        return found.reshape(*ids.shape, self.embedding_dim)

    def forward(self, ids: Tensor) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids; wrong ids are an error in all processes."""
        return self.lookup(_whole(ids))

    @property
    def penalized(self) -> tuple[nn.Parameter, ...]:
        """The penalized parameters of the shard."""
        return () if self.shard is None else self.shard.penalized

    @property
    def penalized_rows(self) -> tuple[nn.Parameter, ...]:
        """The parameters of the shard of which whole rows may be emptied."""
        return () if self.shard is None else self.shard.penalized_rows

    def code_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the shard that only choose codes."""
        return [] if self.shard is None else self.shard.code_parameters()

    def schedulers(self, steps: int) -> list[Any]:
        """Return those of the shard."""
        return [] if self.shard is None else self.shard.schedulers(steps)

    def codes(self, ids: Tensor) -> Codes:  # noqa: ARG002
        """Raise an error: codes are where the rows are."""
        raise ArgumentError("codes of a divided table are those of its shard: table.shard.codes")

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialize the shard; processes need generators of different seeds."""
        if self.shard is not None:
            self.shard.reset_parameters(generator)

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # noqa: ARG002
        """Raise an error: fit the table before it is divided."""
        raise ArgumentError("fit the table before fb.distributed.shard divides it")

    def parameter_count(self) -> int:
        """Count parameters as the method's paper does, over all processes."""
        own = shared = 0
        if self.shard is not None:
            own, shared = self.shard.parameter_count(), self.shard.part(0, 0).parameter_count()
        group = self.place.group
        rows = int(total(torch.tensor(own - shared), group))
        return rows + largest(shared, group)

    def pack(
        self, values: str = "float32", dictionary: str = "float32", layout: str = "auto"
    ) -> Any:
        """Return the packed form in the first process, None in the others."""
        return pack(self, values, dictionary, layout)

    def sizes(self, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Return the sizes of the shard."""
        return None if self.shard is None else self.shard.sizes(optimizer)


class DividedBag(Divided):
    """nn.EmbeddingBag's call over rows that are divided among processes: owners pool their own."""

    def __init__(self, table: Table, rows: nn.Module, mode: str, include_last_offset: bool) -> None:
        super().__init__()
        self.rows, self.mode, self.padding_idx = rows, mode, table.padding_idx
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: Tensor,  # noqa: A002 - nn.EmbeddingBag's name for it; [B, n], or [N] with offsets
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:  # [B, d]
        """Pool the rows of each bag."""
        ids, weights = _whole(input).reshape(-1), per_sample_weights
        if input.dim() == 2:
            lengths = torch.full((len(input),), input.shape[1])
        elif offsets is not None:
            ends = offsets if self.include_last_offset else [*offsets.tolist(), len(ids)]
            lengths = torch.as_tensor(ends).diff()
        else:
            raise ArgumentError("bags are 2-D ids, or 1-D ids with offsets")
        weights = None if weights is None else weights.reshape(-1)
        if self.padding_idx is not None:  # not counted by a mean either
            stays = ids != self.padding_idx
            owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[stays]
            lengths, ids = torch.bincount(owner, minlength=len(lengths)), ids[stays]
            weights = None if weights is None else weights[stays]
        bags, most = len(lengths), largest(len(lengths), self.place.group)
        lengths = nn.functional.pad(lengths, (0, max(1, most) - bags))  # TorchRec wants equal ones
        found: Tensor = self.exchange(ids, lengths, weights)
        return found[:bags]


def _whole(ids: Tensor) -> Tensor:
    """Return ids as int64; refuse what ``long`` would round."""
    if ids.numel() and (ids.is_floating_point() or ids.dtype == torch.bool):
        raise IdError(f"ids have dtype {ids.dtype}: a table takes whole numbers, ids.long()")
    return ids.long()


def shard(
    model: nn.Module,
    *,
    sharding: str = "auto",
    wire: str = "rows",
    group: Any = None,
) -> nn.Module:
    """Divide the tables of a model among the processes of torch.distributed; return it, wrapped.

    Every featherbed table, fb.Bag and nn.EmbeddingBag is replaced by one whose rows are divided,
    with TorchRec's planner and exchange; the code of the model stays as it is. Everything else is
    left to DistributedDataParallel. Tables on the meta device are initialized part by part, so that
    no process ever holds a whole one. Then train as in one process, each process with its share of
    the batch:

        model = fb.distributed.shard(model)
        items = model.module.items                    # items.shard: the rows of this process
        optimizer = fb.Yogi(model.parameters(), penalties={p: penalty for p in items.penalized})

    A step equals that of one process with the batches of all, if these have one size. A table with
    rows that depend on their ids (hashing ...) or on each other stays whole in every process.

    Args:
        sharding: "row_wise" (each process has some rows of every table), "table_wise" (each table
            is in one process), or "auto": TorchRec's planner decides for each table.
        wire: "rows" of width d travel between processes, or "codes", K weights of a row that are
            composed where they were asked for (row-wise fb.AnchorTable and fb.LowRankTable).
        group: process group, all processes by default.

    >>> import os, tempfile, featherbed as fb
    >>> meeting = "file://" + os.path.join(tempfile.mkdtemp(), "meeting")
    >>> torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    >>> model = nn.Sequential(fb.AnchorTable(100, 8, anchors=4), nn.Linear(8, 1))
    >>> ids = torch.tensor([3, 17])
    >>> before = model(ids)
    >>> model = fb.distributed.shard(model)
    >>> torch.allclose(model(ids), before)
    True
    >>> torch.distributed.destroy_process_group()
    """
    check_choice("sharding", sharding, SHARDINGS)
    check_choice("wire", wire, kernels.WIRES)
    parallel, planning = _torchrec()
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ArgumentError(
            "there is no process group: call torch.distributed.init_process_group first, in "
            "processes that torchrun starts"
        )
    group = torch.distributed.group.WORLD if group is None else group
    if not isinstance(model, nn.Module) or isinstance(model, Table | Bag | nn.EmbeddingBag):
        what = "itself a table" if isinstance(model, nn.Module) else type(model).__name__
        raise ArgumentError(f"the model is {what}: give a module that contains its tables")
    if any(isinstance(one, Divided) for one in model.modules()):
        raise ArgumentError("the tables of the model are divided already: shard it once")
    names = replace_tables(model, torch.distributed.get_world_size(group), wire)
    from featherbed.interop.torchrec.collections import (
        CompactBagCollectionSharder,
        CompactCollectionSharder,
    )

    sharders = [CompactCollectionSharder(), CompactBagCollectionSharder()]
    world = torch.distributed.get_world_size(group)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    types = ["row_wise", "table_wise"] if sharding == "auto" else [sharding]
    types = ["row_wise"] if wire == "codes" else types
    constraint = planning.types.ParameterConstraints(sharding_types=types)
    with _quiet():
        planner = planning.EmbeddingShardingPlanner(
            topology=planning.Topology(world, "cpu", local_world_size=local),
            constraints=dict.fromkeys(names, constraint),
        )
        found: nn.Module = parallel.DistributedModelParallel(
            model,
            env=_environment(group),
            device=torch.device("cpu"),
            plan=planner.collective_plan(model, sharders, group),
            sharders=sharders,
        )
    ours = {id(p) for one in divided_tables(found) for p in one.parameters()}
    for parameter in found.parameters():
        if id(parameter) not in ours:
            mark(parameter, group, divided=False)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out TorchRec's warnings about its own calls, which users of ``shard`` cannot change."""
    log = logging.getLogger("torchrec.distributed.planner")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torchrec")
            yield
    finally:
        log.setLevel(level)


def _environment(group: Any) -> Any:
    from torchrec.distributed.types import ShardingEnv

    return ShardingEnv.from_process_group(group)


def _torchrec() -> tuple[Any, Any]:
    try:
        from torchrec.distributed import model_parallel, planner
    except ImportError:
        raise MissingExtra("torchrec", "distributed", "fb.distributed.shard") from None
    return model_parallel, planner


def replace_tables(model: nn.Module, world: int, wire: str) -> list[str]:
    """Replace every table of a model by one over a collection of TorchRec; return their names."""
    names: list[str] = []
    done: dict[int, tuple[str, nn.Module]] = {}
    for path, module in [*model.named_modules(remove_duplicate=False)]:
        bag = isinstance(module, Bag | nn.EmbeddingBag)
        parent = path.rpartition(".")[0]
        inside = any(path.startswith(f"{other}.") for other, _ in done.values())
        if not (bag or isinstance(module, Table)) or inside:
            continue
        name = "rows_" + path.replace(".", "_")  # no attribute of nn.ModuleDict, as "items" is
        if id(module) not in done:
            made = _divided(module, name, path, world, wire)
            if made is None:
                continue
            done[id(module)] = path, made
            names.append(name)
        setattr(model.get_submodule(parent), path.rpartition(".")[2], done[id(module)][1])
    if not names:
        raise ArgumentError(
            f"{type(model).__name__} has no table that can be divided among processes: "
            "featherbed tables, fb.Bag and nn.EmbeddingBag are"
        )
    return names


def _divided(module: Any, name: str, path: str, world: int, wire: str) -> nn.Module | None:
    """Return the replacement of a table or a bag, None if it stays whole."""
    from torchrec import EmbeddingBagConfig, EmbeddingConfig, PoolingType

    from featherbed.interop.torchrec.collections import (
        CompactEmbeddingBagCollection,
        CompactEmbeddingCollection,
    )

    pooled = not isinstance(module, Table)
    table = _table_of(module, path) if pooled else module
    if not table.row_tensors:
        warnings.warn(
            f"{path} ({type(table).__name__}) stays whole in every process: its rows depend on "
            "their ids, or on each other",
            FeatherbedWarning,
            stacklevel=4,
        )
        return None
    rows, dim = table.num_embeddings, table.embedding_dim
    if rows < world:
        raise ArgumentError(
            f"{path} has {rows} rows and there are {world} processes: start at most {rows}"
        )
    wire = wire if table.weighted_codes and not table.grows else "rows"
    shape = {"name": name, "num_embeddings": rows, "embedding_dim": dim}
    if not pooled:
        config = EmbeddingConfig(**shape, feature_names=[FEATURE])
        return DividedTable(table, CompactEmbeddingCollection([config], {name: table}, wire))
    pooling = PoolingType.SUM if module.mode == "sum" else PoolingType.MEAN
    bag = EmbeddingBagConfig(**shape, feature_names=[FEATURE], pooling=pooling)
    collection = CompactEmbeddingBagCollection([bag], {name: table}, wire)
    return DividedBag(table, collection, module.mode, module.include_last_offset)


def _table_of(module: Any, path: str) -> Table:
    """Return the table of a bag."""
    if isinstance(module, Bag):
        return module.table
    if module.mode == "max" or module.max_norm is not None:
        raise ArgumentError(f"{path}: bags with mode='max' or max_norm cannot be divided")
    weight = module.weight
    table = DenseTable(
        *weight.shape, sparse=True, padding_idx=module.padding_idx, dtype=weight.dtype,
        device="meta",
    )  # fmt: skip
    if not weight.is_meta:
        table.load_state_dict({"weight": weight.detach()}, assign=True)
    return table


def divided_tables(model: nn.Module) -> list[Any]:
    """Return what stands for tables in a model that ``shard`` has divided.

    >>> divided_tables(nn.Linear(2, 2))
    []
    """
    return [module for module in model.modules() if isinstance(module, Divided)]


def local_parts(model: nn.Module) -> nn.Module:
    """Return a module of what this process holds of a divided model: its shards, and the rest.

    Its state dict is that of one process, for a checkpoint that the same processes resume.

    >>> list(local_parts(nn.Linear(2, 1)).state_dict())
    ['rest.0', 'rest.1']
    """
    shards = [one.shard for one in divided_tables(model) if one.shard is not None]
    ours = {id(p) for one in shards for p in one.parameters()}
    found = nn.Module()
    found.shards = nn.ModuleList(shards)
    found.rest = nn.ParameterList(p for p in model.parameters() if id(p) not in ours)
    return found
