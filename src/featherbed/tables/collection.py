"""Collection: many named columns, looked up or pooled in one call and stored in one file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from featherbed.checks import check_choice, check_integer
from featherbed.errors import ArgumentError, IdError
from featherbed.packed.collection import Column, Layout, PackedCollection
from featherbed.packed.keys import FORMS, Keys, Vocabulary
from featherbed.tables.division import Division, Sensitivity, divide_budget
from featherbed.tables.spec import make_table, parse_spec
from featherbed.tables.table import Table

Batch = Tensor | Mapping[str, Tensor]
Spec = tuple[int | Vocabulary, int, str] | str


class Collection(nn.Module):
    """Columns of ids over tables: ``collection(ids)`` returns the rows of all columns side by side.

    Columns of the same width and spec are one table, with their rows one after the other: they are
    looked up, differentiated and updated by one call, and share the dictionary of the method.

    Args:
        tables: the tables.
        columns: where the rows of each column are in them.

    >>> columns = {"site": (5_000, 16, "anchor:anchors=8"), "app": (900, 16, "anchor:anchors=8")}
    >>> collection = Collection.from_spec({**columns, "last_site": "site"})
    >>> collection(torch.tensor([[17, 3, 4999], [0, 899, 17]])).shape, len(collection.tables)
    (torch.Size([2, 48]), 1)
    >>> collection({"site": torch.tensor([17]), "app": torch.tensor([3]),
    ...             "last_site": torch.tensor([17])}).shape
    torch.Size([1, 48])
    """

    def __init__(self, tables: Sequence[Table], columns: Sequence[Column]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self.layout = Layout(columns, [table.num_embeddings for table in tables])
        self.dims = [tables[column.table].embedding_dim for column in columns]
        self.sensitivity: Sensitivity | None = None  # while ``importance`` measures
        self.report: Division | None = None  # of the budget, after ``compress``
        self.register_buffer("starts", torch.from_numpy(self.layout.starts), persistent=False)
        self.starts: Tensor
        self.register_state_dict_post_hook(_keep_places)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        """Refuse the state of other columns, whose tables may have the same shapes."""
        theirs = local_metadata.get("columns", self._places())
        if theirs != self._places():
            rest[-1].append(  # error_msgs
                f"the state is of the columns {str(theirs)[:100]}, this collection has "
                f"{str(self._places())[:100]} (table, first row, rows): make it of the same columns"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _places(self) -> dict[str, list[int]]:
        return {c.name: [c.table, c.start, c.rows] for c in self.layout.columns}

    @classmethod
    def from_spec(cls, columns: Mapping[str, Spec], *, fuse: bool = True, **settings: Any) -> Self:
        """Create a collection from {name: (rows, dim, spec)}, or the name of a column to share.

        In the place of rows an ``fb.Vocabulary`` may stand: the column then has its keys.

        Args:
            fuse: one table for all columns of the same dim and spec, where its rows are alike
                (``Table.rows_alike``); False: a table for each column.
            settings: generator, dtype and device of the tables.

        >>> Collection.from_spec({"site": (50, 4, "dense"), "app": (9, 8, "quantized:bits=4")})
        Collection(2 columns, 59 rows: site 50 x 4, app 9 x 8)
        """
        if not isinstance(columns, Mapping) or not columns:
            raise ArgumentError(f"columns={columns!r}: give {{name: (rows, dim, spec), ...}}")
        groups: dict[Any, list[tuple[str, int]]] = {}  # (dim, spec) -> its columns
        vocabularies: dict[str, Vocabulary] = {}
        for name, given in columns.items():
            if isinstance(given, str):
                continue
            if not isinstance(given, tuple | list) or len(given) != 3:
                raise ArgumentError(f"column {name!r}: give (rows, dim, spec), not {given!r}")
            rows, dim, spec = given
            if isinstance(rows, Vocabulary):
                vocabularies[name], rows = rows, len(rows)
            kind, chosen = parse_spec(spec)
            # fused, the row of padding_idx would be that of the first column alone
            alike = fuse and kind.rows_alike and chosen.get("padding_idx") is None
            key = (check_integer("dim", dim), spec, None if alike else name)
            groups.setdefault(key, []).append((name, check_integer("rows", rows)))
        tables, places = list[Table](), dict[str, Column]()
        for (dim, spec, _), members in groups.items():
            start = 0
            for name, rows in members:
                places[name] = Column(name, len(tables), start, rows, vocabularies.get(name))
                start += rows
            tables.append(make_table(spec, start, dim, **settings))
        for name, given in columns.items():
            if isinstance(given, str):
                if given not in places or given == name:
                    raise ArgumentError(f"column {name!r} shares {given!r}, which has no table")
                like = places[given]
                places[name] = replace(like, name=name)
        return cls(tables, [places[name] for name in columns])

    @classmethod
    def from_tables(cls, tables: Mapping[str, Table]) -> Self:
        """Create a collection of tables that are there; one given twice is shared.

        >>> import featherbed as fb
        >>> Collection.from_tables({"word": fb.DenseTable(9, 4), "tag": fb.DenseTable(3, 2)})
        Collection(2 columns, 12 rows: word 9 x 4, tag 3 x 2)
        """
        if not isinstance(tables, Mapping):
            raise ArgumentError(f"tables are {type(tables).__name__}: give {{name: table, ...}}")
        for name, table in tables.items():
            if not isinstance(table, Table):
                raise ArgumentError(
                    f"{name!r} is {type(table).__name__}: give a table of featherbed, such as "
                    "fb.DenseTable, or let replace_embeddings(..., collect=True) make them"
                )
        different = list({id(table): table for table in tables.values()}.values())
        number = {id(table): place for place, table in enumerate(different)}
        columns = [
            Column(name, number[id(table)], 0, table.num_embeddings)
            for name, table in tables.items()
        ]
        return cls(different, columns)

    @property
    def names(self) -> list[str]:
        """Names of the columns, in their order."""
        return list(self.layout.names)

    @property
    def penalized(self) -> tuple[nn.Parameter, ...]:
        """Parameters of all tables whose entries an L1 penalty makes sparse."""
        return tuple(parameter for table in self.all_tables() for parameter in table.penalized)

    def all_tables(self) -> list[Table]:
        """Return the tables that hold the columns."""
        return list(self.tables)  # type: ignore[arg-type]

    def forward(self, ids: Batch) -> Tensor:  # [B, columns] -> [B, Σ d]
        """Return the rows of all columns; ids [B, columns], or [B] by the name of the column."""
        batch = self.shifted(ids)
        rows = self._look_up(batch)
        return rows if self.sensitivity is None else self.sensitivity.of_batch(rows, batch)

    def _look_up(self, batch: Tensor) -> Tensor:  # [B, columns], rows of the tables -> [B, Σ d]
        if len(self.tables) == 1:
            whole: Tensor = self.tables[0](batch)
            return whole.flatten(1)
        found: list[Tensor | None] = [None] * len(self.dims)
        for table, columns in self.layout.groups:
            rows: Tensor = self.tables[table](batch[:, columns])
            for column, part in zip(columns, rows.unbind(1), strict=True):
                found[column] = part
        return torch.cat([part for part in found if part is not None], dim=1)

    def importance(
        self, batches: Iterable[Any], loss: Callable[[Any], Tensor]
    ) -> dict[str, Tensor]:  # name -> float64 [rows]
        """Measure how sensitive the task is to each row, in one pass over ``batches``.

        ``loss(batch)`` is the mean loss of a batch through this collection, whose samples are rows
        of ids or bags. The importance of a row is the mean squared gradient of a sample's loss:
        changing the row by e adds about ½ importance |e|² to the loss. No parameter and no gradient
        of the model changes.
        """
        self.sensitivity = Sensitivity(self)
        try:
            return self.sensitivity.measure(batches, loss)
        finally:
            self.sensitivity = None

    def compress(self, budget: int | str, importance: dict[str, Tensor]) -> Collection:
        """Return a collection of graded rows (``fb.GradedTable``) in a file of at most ``budget``.

        The bytes are those of rows and header; the keys of vocabularies are counted apart.

        Every bit goes where it is expected to save most of the loss, by the ``importance`` of rows
        and columns: some columns get many bits, rare rows of others none. Ids of a column are
        sorted by falling frequency. ``report`` says what each column got and what other budgets are
        expected to cost. Training goes on with straight-through rounding, so that the rows adapt.

        >>> columns = {"site": (500, 8, "dense"), "app": (90, 8, "dense")}
        >>> collection = Collection.from_spec(columns, generator=torch.Generator().manual_seed(0))
        >>> ids = torch.stack([torch.arange(90), torch.arange(90)], dim=1)
        >>> loss = lambda ids: collection(ids)[:, :8].square().mean()
        >>> importance = collection.importance([ids], loss)
        >>> small = collection.compress("2KB", importance)
        >>> small.report.file <= 2000, small.report.bits["site"] > small.report.bits["app"]
        (True, True)
        """
        tables, columns, report = divide_budget(self, budget, importance)
        small = Collection(tables, columns)
        small.report = report
        return small

    def shifted(self, ids: Batch) -> Tensor:  # -> int64 [B, columns], rows of the tables
        """Return the checked ids of a batch as rows of the tables."""
        if isinstance(ids, Mapping):
            self.layout.check_names(ids)
            parts = [ids[name] for name in self.names]
            lengths = [p.shape[0] if isinstance(p, Tensor) and p.dim() == 1 else -1 for p in parts]
            if min(lengths) < 0 or min(lengths) < max(lengths):
                given = ", ".join(f"{n} {k}" for n, k in zip(self.names, lengths, strict=True))
                raise ArgumentError(
                    f"ids by name have the lengths {given[:200]} (-1: no tensor [B]): give a "
                    "tensor [B] for every column"
                )
            ids = torch.stack(parts, dim=1)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] != len(self.dims):
            shape = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            raise ArgumentError(f"ids are {shape}: give a tensor [B, {len(self.dims)}]")
        counts = self.layout.counts.tolist()
        checked: Tensor = column_ids(ids, counts, "\n".join(map(repr, self.names)))
        return checked + self.starts

    def ids(self, keys: Mapping[str, Any]) -> Tensor:  # -> int64 [B, columns]
        """Return the ids of a batch of keys, [B] by the name of the column.

        Unseen keys have one of the shared rows of the column's vocabulary. Keys are text: numbers
        are ids, of columns without a vocabulary.

        >>> import featherbed as fb
        >>> sites = fb.Vocabulary(["a.org", "b.com"], shared=2)
        >>> columns = {"site": (sites, 4, "dense"), "hour": (24, 4, "dense")}
        >>> collection = Collection.from_spec(columns)
        >>> collection.ids({"site": ["b.com", "new.net"], "hour": [7, 23]}).tolist()
        [[1, 7], [3, 23]]
        """
        return torch.from_numpy(self.layout.batch(keys, text=True))

    def rows(self, name: str, ids: Tensor) -> Tensor:  # [...] -> [..., d]
        """Return the rows of ids of one column."""
        number = self.layout.number(name)
        column = self.layout.columns[number]
        _check_tensors(ids=ids)
        flat = column_ids(ids.reshape(-1, 1), [column.rows], repr(name))[:, 0] + column.start
        found: Tensor = self.tables[column.table](flat)
        found = found.reshape(*ids.shape, found.shape[1])
        if self.sensitivity is None:
            return found
        return self.sensitivity.of_column(found, number, flat)

    def bag(
        self,
        ids: Tensor,  # integer [N]
        lengths: Tensor,  # integer [columns, B]
        per_sample_weights: Tensor | None = None,  # [N]
        *,
        mode: str = "sum",
    ) -> Tensor:  # [B, Σ d]
        """Pool the rows of bags of all columns: the ids of all bags of a column, then of the next.

        ``lengths`` are the numbers of ids in the bags, as in a KeyedJaggedTensor of TorchRec.

        >>> collection = Collection.from_spec({"site": (50, 4, "dense"), "app": (9, 4, "dense")})
        >>> lengths = torch.tensor([[2, 1], [0, 1]])  # two sites and no app, one site and one app
        >>> collection.bag(torch.tensor([3, 4, 49, 8]), lengths).shape
        torch.Size([2, 8])
        """
        _check_tensors(ids=ids, lengths=lengths)
        given, counts = self.layout.bags(ids.cpu().numpy(), lengths.cpu().numpy())
        if per_sample_weights is not None:
            _check_tensors(per_sample_weights=per_sample_weights)
            self.layout.check_weights(per_sample_weights.shape, len(given))
        bags, ends = counts.shape[1], np.cumsum(counts.sum(1))
        rows = torch.from_numpy(given + np.repeat(self.layout.starts, counts.sum(1))).to(ids.device)
        found: list[Tensor | None] = [None] * len(self.dims)
        for number, columns in self.layout.groups:
            parts = [slice(ends[c] - counts[c].sum(), ends[c]) for c in columns]
            weights = None
            if per_sample_weights is not None:
                weights = torch.cat([per_sample_weights[part] for part in parts])
            inside = counts[columns].reshape(-1)
            offsets = torch.from_numpy(np.cumsum(inside) - inside).to(ids.device)
            own = torch.cat([rows[part] for part in parts])
            pooled = self.all_tables()[number].bag(own, offsets, weights, mode=mode)
            for place, column in enumerate(columns):
                found[column] = pooled[place * bags : (place + 1) * bags]
        whole = torch.cat([part for part in found if part is not None], dim=1)
        if self.sensitivity is None:
            return whole
        return self.sensitivity.of_bags(whole, rows, counts, per_sample_weights, mode)

    def pack(
        self,
        values: str = "float32",
        dictionary: str = "float32",
        layout: str = "auto",
        keys: str = "plain",
    ) -> PackedCollection:
        """Return the packed form, see ``fb.Table.pack``; ``keys`` is the form of stored keys."""
        check_choice("keys", keys, FORMS)
        tables = [table.pack(values, dictionary, layout) for table in self.all_tables()]
        columns = [
            replace(column, keys=None if column.keys is None else Keys.of(column.keys, keys))
            for column in self.layout.columns
        ]
        return PackedCollection(tables, columns)

    def save(self, path: str | Path, keys: str = "plain") -> None:
        """Write tables and vocabularies to one file, atomically (``fb.PackedCollection.load``).

        ``keys``: the form of stored keys, plain, text, hashed or integer (see ``fb.save``).
        """
        self.pack(keys=keys).save(path)

    def __repr__(self) -> str:
        sizes = zip(self.layout.columns, self.dims, strict=True)
        shown = [f"{column.name} {column.rows:,} x {dim}" for column, dim in sizes]
        more = f", {len(shown) - 8} more" if len(shown) > 8 else ""
        total = sum(table.num_embeddings for table in self.all_tables())
        return f"Collection({len(shown)} columns, {total:,} rows: {', '.join(shown[:8])}{more})"


def _keep_places(module: Any, _: Any, __: str, local_metadata: Any) -> None:
    local_metadata["columns"] = module._places()


def _check_tensors(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(f"{name} are {type(value).__name__}: give a tensor")


@torch.library.custom_op("featherbed::column_ids", mutates_args=())
def column_ids(ids: Tensor, rows: list[int], names: str) -> Tensor:  # [B, columns] -> int64
    """Return ids as int64, or raise an error that names the column of the bad id.

    ``names`` are the names of the columns as shown, one on each line.

    >>> column_ids(torch.tensor([[1, 0]]), [5, 1], "'site'\\n'app'").tolist()
    [[1, 0]]
    """
    if ids.is_floating_point() or ids.dtype == torch.bool or ids.is_complex():
        raise IdError(f"ids have dtype {ids.dtype}: a column takes whole numbers, ids.long()")
    checked = ids.to(torch.int64, copy=True)
    if len(checked):
        low, high = (part.tolist() for part in torch.aminmax(checked, dim=0))
        for column, count in enumerate(rows):
            if low[column] < 0 or high[column] >= count:
                bad = low[column] if low[column] < 0 else high[column]
                name = names.split("\n")[column]
                raise IdError(
                    f"id {bad} is not in the column {name}: its ids go from 0 to {count - 1}"
                )
    return checked


@column_ids.register_fake
def _(ids: Tensor, rows: list[int], names: str) -> Tensor:  # noqa: ARG001
    return torch.empty_like(ids, dtype=torch.int64)
