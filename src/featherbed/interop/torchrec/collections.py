"""TorchRec's embedding collections over featherbed tables, before and after they are sharded."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard as TensorShard
from torchrec import EmbeddingBagCollection, EmbeddingCollection, JaggedTensor, KeyedTensor
from torchrec.distributed.embedding import (
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)

from featherbed.checks import check_choice
from featherbed.errors import ArgumentError, FeatherbedError, IdError
from featherbed.interop.torchrec.kernels import (
    SHARDINGS,
    WIRES,
    Shard,
    TableKernel,
    cut,
    join_processes,
)
from featherbed.optim.processes import raise_together
from featherbed.tables.spec import make_table
from featherbed.tables.table import Table

META = torch.device("meta")


class CompactTables:
    """What both collections share: a table for every configuration of TorchRec."""

    pooled: bool
    inside: str  # the attribute that holds the tables, before and after they are sharded
    wire: str

    @property
    def tables(self) -> nn.ModuleDict:
        """The tables by the names of their configurations."""
        found: nn.ModuleDict = getattr(self, self.inside)
        return found

    def _hold(self, configs: list[Any], method: str | Mapping[str, Table], wire: str) -> None:
        self.wire = check_choice("wire", wire, WIRES)
        setattr(self, self.inside, nn.ModuleDict())
        for config in configs:
            shape = config.num_embeddings, config.embedding_dim
            table = make_table(method, *shape) if isinstance(method, str) else method[config.name]
            if (table.num_embeddings, table.embedding_dim) != shape:
                raise ArgumentError(
                    f"table {config.name!r} is {table.num_embeddings} x {table.embedding_dim}, "
                    f"its configuration {shape[0]} x {shape[1]}"
                )
            if not table.row_tensors:
                raise ArgumentError(
                    f"the rows of table {config.name!r} ({type(table).__name__}) cannot be divided "
                    "among processes: they depend on their ids, or on each other"
                )
            if wire == "codes" and (not table.weighted_codes or table.grows):
                raise ArgumentError(
                    f"wire='codes' is for tables that weigh all atoms of one dictionary, unlike "
                    f"{config.name!r} ({type(table).__name__}): use wire='rows'"
                )
            self.tables[config.name] = table

    def widths(self) -> dict[str, int]:
        """Return the numbers of a row that travel: d, or K with codes on the wire."""
        tables: dict[str, Any] = dict(self.tables.items())
        if self.wire == "codes":
            return {name: len(table.atoms) for name, table in tables.items()}
        return {name: table.embedding_dim for name, table in tables.items()}

    def on_wire(self, kind: type[nn.Module], configs: list[Any], **settings: Any) -> Any:
        """Return an empty collection of TorchRec with the widths that travel."""
        widths = self.widths()
        thin = [dataclasses.replace(one, embedding_dim=widths[one.name]) for one in configs]
        found = kind(tables=thin, device=META, **settings)
        inside: Any = found.embedding_bags if self.pooled else found.embeddings
        for name, table in self.tables.items():
            inside[name].weight.source = (table, self.wire)
        return found


class CompactEmbeddingCollection(CompactTables, EmbeddingCollection):
    """TorchRec's EmbeddingCollection with featherbed tables: KeyedJaggedTensor in, rows out.

    Sharded by ``CompactCollectionSharder``, row-wise or table-wise, as any other collection of
    TorchRec, or by ``fb.distributed.shard``; before that it works in one process.

    Args:
        tables: TorchRec's configurations of the tables.
        method: a spec of all tables such as "anchor:anchors=50", or a table for each name.
        wire: "rows" (width d) or "codes" (width K, composed where they were asked for).

    >>> import torchrec
    >>> configs = [torchrec.EmbeddingConfig(name="t", num_embeddings=100, embedding_dim=8,
    ...                                     feature_names=["user"])]
    >>> collection = CompactEmbeddingCollection(configs, "anchor:anchors=4")
    >>> ids = torchrec.KeyedJaggedTensor(["user"], torch.tensor([3, 17]),
    ...                                  lengths=torch.tensor([2]))
    >>> collection(ids)["user"].values().shape
    torch.Size([2, 8])
    """

    pooled, inside = False, "embeddings"

    def __init__(
        self, tables: list[Any], method: str | Mapping[str, Table], wire: str = "rows"
    ) -> None:
        super().__init__(tables=tables, device=META)
        self._device = torch.device("cpu")
        self._hold(tables, method, wire)

    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """Return the rows of every feature."""
        found, given = {}, features.to_dict()
        for config, names in zip(
            self.embedding_configs(), self.embedding_names_by_table(), strict=True
        ):
            for feature, name in zip(config.feature_names, names, strict=True):
                ids = given[feature]
                rows = self.tables[config.name](ids.values())
                found[name] = JaggedTensor(values=rows, lengths=ids.lengths())
        return found


class CompactEmbeddingBagCollection(CompactTables, EmbeddingBagCollection):
    """TorchRec's EmbeddingBagCollection with featherbed tables: KeyedJaggedTensor in, bags out.

    Args:
        tables: TorchRec's configurations of the tables.
        method: a spec of all tables such as "anchor:anchors=50", or a table for each name.
        wire: "rows" (bags of width d) or "codes" (bags of K weights, composed once per bag).

    >>> import torchrec
    >>> configs = [torchrec.EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=8,
    ...                                        feature_names=["user"])]
    >>> collection = CompactEmbeddingBagCollection(configs, "anchor:anchors=4")
    >>> ids = torchrec.KeyedJaggedTensor(["user"], torch.tensor([3, 17]),
    ...                                  lengths=torch.tensor([2, 0]))
    >>> collection(ids)["user"].shape
    torch.Size([2, 8])
    """

    pooled, inside = True, "embedding_bags"

    def __init__(
        self, tables: list[Any], method: str | Mapping[str, Table], wire: str = "rows"
    ) -> None:
        super().__init__(tables=tables, device=META)
        self._device = torch.device("cpu")
        self._hold(tables, method, wire)

    def forward(self, features: Any) -> KeyedTensor:
        """Return the bags of every feature."""
        given, bags, names = features.to_dict(), [], []
        for config, own in zip(self.embedding_bag_configs(), self._names_by_table(), strict=True):
            for feature, name in zip(config.feature_names, own, strict=True):
                ids, table = given[feature], self.tables[config.name]
                mode = config.pooling.value.lower()
                starts = ids.offsets()[:-1].long()
                bags.append(table.bag(ids.values(), starts, ids.weights_or_none(), mode=mode))  # type: ignore[operator]
                names.append(name)
        return KeyedTensor(names, [bag.shape[1] for bag in bags], torch.cat(bags, 1))

    def _names_by_table(self) -> list[list[str]]:
        return [list(config.feature_names) for config in self.embedding_bag_configs()]


class ShardedTables:
    """What both sharded collections share: the shards, checked ids, states that can be
    resharded."""

    pooled: bool
    inside: str  # the attribute that holds the tables
    shards: dict[str, Shard]

    @classmethod
    def _sharding(cls, kind: str, infos: list[Any], env: Any, device: Any) -> Any:
        sources = {info.embedding_config.name: info.param.source for info in infos}
        group, by_row = env.process_group, kind == "row_wise"

        def make(config: Any) -> TableKernel:
            tables = []
            for seed, one in enumerate(config.embedding_tables):
                whole, wire = sources[one.name]
                start = one.local_metadata.shard_offsets[0]
                table = cut(whole, start, start + one.local_rows, group, seed << 16)
                join_processes(table, group, wire, divided=by_row)
                tables.append(table)
            # row-wise, a bag lies on several processes: TorchRec divides their sum
            mean = cls.pooled and config.pooling.value == "MEAN" and not by_row
            return TableKernel(config, tables, wire=wire, pooled=cls.pooled, mean=mean)

        found: Any = SHARDINGS[kind, cls.pooled](infos, env, device)  # type: ignore[call-arg]
        found.make, found.sources = make, sources
        return found

    def _shardings(self) -> list[Any]:
        given: Any = self
        kept = given._embedding_shardings if self.pooled else given._sharding_type_to_sharding
        return list(kept.values()) if isinstance(kept, dict) else list(kept)

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        """Make the local shards modules of the collection, so that they are seen and saved."""
        given: Any = self
        given._model_parallel_name_to_local_shards = OrderedDict()
        kernels = [kernel for lookup in given._lookups for kernel in lookup._emb_modules]
        local = {
            config.name: table
            for kernel in kernels
            for config, table in zip(kernel.config.embedding_tables, kernel.tables, strict=True)
        }
        setattr(self, self.inside, nn.ModuleDict(local))
        self.shards, self.wires = {}, {}
        for sharding in self._shardings():
            for name, (whole, wire) in sharding.sources.items():
                plan = given.module_sharding_plan[name].sharding_spec.shards
                shape = whole.num_embeddings, whole.embedding_dim
                how = plan, given._env.process_group, whole.padding_idx
                self.shards[name] = Shard(name, local.get(name), *shape, *how)
                self.wires[name] = wire
        if not skip_registering:
            given._register_state_dict_hook(divide_state)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yield the parameters of all tables: none of them is left to DistributedDataParallel."""
        given: Any = self
        for name, _ in given.named_parameters():
            yield f"{prefix}.{name}" if prefix else name

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Check ids in all processes, then send them to the processes that hold their rows."""
        given: Any = self
        error: FeatherbedError | None = None
        rows = {f: self.shards[c.name].rows for c in self._configs() for f in c.feature_names}
        for name, ids in features.to_dict().items():
            if name in rows and ids.values().numel():
                low, high = map(int, torch.aminmax(ids.values()))
                if low < 0 or high >= rows[name]:
                    wrong = low if low < 0 else high
                    text = f"id {wrong} of feature {name!r}: ids go from 0 to {rows[name] - 1}"
                    error = IdError(text)
        raise_together(error, given._env.process_group)
        if not features.values().is_contiguous():  # FBGEMM reads memory in order
            features = features.from_lengths_sync(
                features.keys(),
                features.values().contiguous(),
                features.weights_or_none(),
                features.lengths(),
            )
        return super().input_dist(ctx, features)  # type: ignore[misc]

    def _configs(self) -> list[Any]:
        given: Any = self
        return list(given._embedding_bag_configs if self.pooled else given._embedding_configs)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:  # noqa: A002 - TorchRec's name
        """Look rows up and send them back; compose them here if codes have travelled."""
        found = super().compute_and_output_dist(ctx, input)  # type: ignore[misc]
        if "codes" in self.wires.values():
            found.callbacks.append(self.composed)
        return found

    def composed(self, codes: Any) -> Any:
        """Return rows or bags composed from codes."""
        names = [(c.name, f) for c in self._configs() for f in c.feature_names]
        rows = {}
        for table_name, feature in names:
            table = self.shards[table_name].table
            assert table is not None
            kept = codes[feature]
            values = kept if self.pooled else kept.values()
            rows[feature] = values @ table.atoms
        if self.pooled:
            keys = codes.keys()
            widths = [rows[key].shape[1] for key in keys]
            return KeyedTensor(keys, widths, torch.cat([rows[key] for key in keys], 1))
        return {f: JaggedTensor(rows[f], lengths=codes[f].lengths()) for f in codes}


class ShardedCompactCollection(ShardedTables, ShardedEmbeddingCollection):
    """A CompactEmbeddingCollection on several processes."""

    pooled, inside = False, "embeddings"

    @classmethod
    def create_embedding_sharding(
        cls, sharding_type: str, sharding_infos: Any, env: Any, device: Any = None, **_: Any
    ) -> Any:
        """Return the sharding of the tables of one type."""
        return cls._sharding(sharding_type, sharding_infos, env, device)


class ShardedCompactBagCollection(ShardedTables, ShardedEmbeddingBagCollection):
    """A CompactEmbeddingBagCollection on several processes."""

    pooled, inside = True, "embedding_bags"

    @classmethod
    def create_embedding_bag_sharding(
        cls, sharding_infos: Any, env: Any, device: Any = None, *_: Any, **__: Any
    ) -> Any:
        """Return the sharding of the tables of one type."""
        kind = sharding_infos[0].param_sharding.sharding_type
        return cls._sharding(kind, sharding_infos, env, device)


def divide_state(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Make the row tensors in a state dict parts of tensors that all processes hold together."""
    for shard in module.shards.values():
        if shard.divided and shard.table is not None:
            for name in shard.table.row_tensors:
                key = f"{prefix}{module.inside}.{shard.name}.{name}"
                if key in state:
                    state[key] = sharded_tensor(state[key], shard)


def sharded_tensor(local: Tensor, shard: Shard) -> ShardedTensor:
    """Return the tensor of which ``local`` are the rows of this process."""
    tail = list(local.shape[1:])
    plan = [
        ShardMetadata([one.shard_offsets[0], *[0] * len(tail)], [one.shard_sizes[0], *tail],
                      one.placement)
        for one in shard.plan
        if one.shard_sizes[0]
    ]  # fmt: skip
    kept = local.detach()
    kind = TensorProperties(dtype=kept.dtype, layout=kept.layout, requires_grad=False)
    whole = ShardedTensorMetadata(plan, torch.Size([shard.rows, *tail]), kind)
    rank = torch.distributed.get_rank(shard.group)
    mine = [TensorShard(kept, one) for one in plan if one.placement.rank() == rank]  # type: ignore[union-attr]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        mine, whole, process_group=shard.group
    )


class CompactSharding:
    """What both sharders share: the sharding types, and the size of what a table stores."""

    def sharding_types(self, compute_device_type: str) -> list[str]:  # noqa: ARG002
        """Return the ways that tables can be divided."""
        return ["row_wise", "table_wise"]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:  # noqa: ARG002
        """Return what TorchRec's planner may choose; it plans no kernels of others."""
        return ["fused"]

    def shardable_parameters(self, module: CompactTables) -> dict[str, nn.Parameter]:
        """Return an empty parameter of the shape that travels for every table."""
        found = {}
        for name, width in module.widths().items():
            table: Any = module.tables[name]
            found[name] = nn.Parameter(torch.empty(table.num_embeddings, width, device=META))
            found[name].source = (table, module.wire)  # type: ignore[attr-defined]
        return found

    def storage_usage(self, tensor: Any, compute_device_type: str, compute_kernel: str) -> Any:  # noqa: ARG002
        """Return the bytes of a table's rows, which are fewer than those of a dense table."""
        table = tensor.source[0]
        state = {**table._parameters, **table._buffers}
        kept = [state[name] for name in table.row_tensors if state.get(name) is not None]
        place = {"cuda": "hbm"}.get(compute_device_type, "ddr")
        return {place: sum(one.numel() * one.element_size() for one in kept)}


def customized(params: dict[str, Any]) -> dict[str, Any]:
    """Return a plan with the kernels that TorchRec leaves to others."""
    return {
        name: dataclasses.replace(one, compute_kernel="customized_kernel")
        for name, one in params.items()
    }


class CompactCollectionSharder(CompactSharding, EmbeddingCollectionSharder):
    """Shards a CompactEmbeddingCollection, for TorchRec's DistributedModelParallel."""

    def shard(
        self, module: Any, params: Any, env: Any, device: Any = None, module_fqn: str | None = None
    ) -> Any:
        """Return the sharded collection."""
        thin = module.on_wire(EmbeddingCollection, copy.copy(module.embedding_configs()))
        return ShardedCompactCollection(
            thin, customized(params), env, self.fused_params, device, module_fqn=module_fqn
        )

    @property
    def module_type(self) -> Any:
        """What is sharded."""
        return CompactEmbeddingCollection

    @property
    def sharded_module_type(self) -> Any:
        """What it becomes."""
        return ShardedCompactCollection


class CompactBagCollectionSharder(CompactSharding, EmbeddingBagCollectionSharder):
    """Shards a CompactEmbeddingBagCollection, for TorchRec's DistributedModelParallel."""

    def shard(
        self, module: Any, params: Any, env: Any, device: Any = None, module_fqn: str | None = None
    ) -> Any:
        """Return the sharded collection."""
        thin = module.on_wire(EmbeddingBagCollection, copy.copy(module.embedding_bag_configs()))
        return ShardedCompactBagCollection(
            thin, customized(params), env, self.fused_params, device, module_fqn=module_fqn
        )

    @property
    def module_type(self) -> Any:
        """What is sharded."""
        return CompactEmbeddingBagCollection

    @property
    def sharded_module_type(self) -> Any:
        """What it becomes."""
        return ShardedCompactBagCollection
