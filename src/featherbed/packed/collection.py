"""PackedCollection: the tables of many columns in one file, looked up together with numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.errors import ArgumentError, FormatError, IdError, UnknownKeyError
from featherbed.packed.band import Ids
from featherbed.packed.file import (
    Buffer,
    array_of,
    metadata_of,
    open_bytes,
    open_file,
    refuse_unreadable,
    table_from,
    write_arrays,
)
from featherbed.packed.keys import Keys, Vocabulary, read_keys
from featherbed.packed.matrix import Floats
from featherbed.packed.schema import FieldReader, Take, stored_metadata
from featherbed.packed.table import PackedTable
from featherbed.packed.validate import validate

COLLECTION_VERSION = 3  # the version of the format that added collections
MOST_COLUMNS = 1 << 12
LONGEST_NAME = 1000  # characters


@dataclass(frozen=True)
class Column:
    """Where the rows of a column are: rows start .. start + rows - 1 of a table of the collection.

    >>> Column("site", table=0, start=0, rows=5000).rows
    5000
    """

    name: str
    table: int
    start: int
    rows: int
    keys: Keys | Vocabulary | None = field(default=None, repr=False, compare=False)

    def ids(self, given: Any, *, text: bool = False) -> NDArray[Any]:
        """Return ids as they are, and the ids of keys: strings, where the column has keys.

        With ``text`` such a column takes keys alone: a number might be meant as one.
        """
        what = f"ids of the column {self.name!r}"
        array = as_array(given, what, object if _starts_with_text(given) else None)
        if array.dtype.kind not in "UTO":
            if text and self.keys is not None and array.size:
                raise ArgumentError(
                    f"the column {self.name!r} has keys, which are text, and got "
                    f"{array.reshape(-1)[0]}: give its keys, such as list(map(str, numbers))"
                )
            return array
        if self.keys is None:
            raise UnknownKeyError(
                f"the column {self.name!r} has no keys: give ids from 0 to {self.rows - 1}"
            )
        array = as_array(given, what, object)
        flat = array.reshape(-1).tolist()
        others = [key for key in flat if not isinstance(key, str)]
        if others:
            raise ArgumentError(
                f"the column {self.name!r} got {others[0]!r} among its keys: give keys, which are "
                "strings, or ids, which are whole numbers, not both"
            )
        found = np.asarray(self.keys.ids(flat), dtype=np.int64)
        if len(found) and int(found.min()) < 0:
            unknown = flat[int(np.flatnonzero(found < 0)[0])]
            raise UnknownKeyError(
                f"the column {self.name!r} has no key {unknown!r}, and no shared rows for others"
            )
        return found.reshape(array.shape)


def _starts_with_text(given: Any) -> bool:
    while isinstance(given, list | tuple) and len(given):
        given = given[0]
    return isinstance(given, str)


def as_array(given: Any, name: str, kind: Any = None) -> NDArray[Any]:
    """Return an array of what was given, or raise an error if its rows differ in length."""
    try:
        return np.asarray(given, dtype=kind)
    except (ValueError, OverflowError) as error:
        raise ArgumentError(f"{name} are no array: {str(error)[:100]}") from None


class PackedCollection:
    """Named columns over few packed tables, as stored in one file.

    >>> import featherbed as fb
    >>> path = getfixture("tmp_path") / "clicks.safetensors"
    >>> columns = {"site": (50, 4, "dense"), "app": (9, 4, "dense")}
    >>> fb.Collection.from_spec(columns).save(path)
    >>> packed = PackedCollection.load(path)
    >>> packed[{"site": [3, 17], "app": [8, 0]}].shape, packed.rows("app", [8]).shape
    ((2, 8), (1, 4))
    """

    def __init__(self, tables: Sequence[PackedTable], columns: Sequence[Column]) -> None:
        self.tables = list(tables)
        self.columns = [
            replace(c, keys=Keys.of(c.keys)) if isinstance(c.keys, Vocabulary) else c
            for c in columns
        ]
        self.layout = Layout(self.columns, [table.rows for table in self.tables])
        self.dims = [self.tables[column.table].dim for column in self.columns]

    def __len__(self) -> int:
        return len(self.columns)

    def __repr__(self) -> str:
        rows = sum(column.rows for column in self.columns)
        return f"PackedCollection({len(self)} columns, {rows:,} rows, {self.nbytes:,} bytes)"

    def rows(self, name: str, ids: ArrayLike) -> Floats:  # [...] -> [..., d]
        """Return the rows of ids, or of keys, of one column."""
        number = self.layout.number(name)
        column = self.columns[number]
        given = column.ids(ids)
        checked = self.layout.checked(given.reshape(-1, 1), [number])
        found = self.tables[column.table][checked + column.start]
        return found.reshape(*given.shape, self.dims[number])

    def __getitem__(self, ids: ArrayLike | Mapping[str, ArrayLike]) -> Floats:  # [B, C] -> [B, Σ d]
        """Return the rows of a batch of all columns, those of the columns side by side.

        Ids [B, columns], or ids or keys [B] by the name of their column.
        """
        batch = self.layout.batch(ids)
        out = np.empty((len(batch), sum(self.dims)), dtype=np.float32)
        ends = np.cumsum(self.dims)
        for table, columns in self.layout.groups:
            dim = self.tables[table].dim
            rows = self.tables[table][batch[:, columns] + self.layout.starts[columns]]
            for place, column in enumerate(columns):
                out[:, ends[column] - dim : ends[column]] = rows[:, place]
        return out

    def bag(
        self,
        ids: ArrayLike,  # [N]
        lengths: ArrayLike,  # [columns, B]
        per_sample_weights: ArrayLike | None = None,  # [N]
        *,
        mode: str = "sum",
    ) -> Floats:  # [B, Σ d]
        """Pool the rows of bags, the ids of all bags of a column after those of the one before.

        ``lengths``: the number of ids in each bag.
        """
        given, counts = self.layout.bags(as_array(ids, "ids"), as_array(lengths, "lengths"))
        rows, ends = given + np.repeat(self.layout.starts, counts.sum(1)), counts.sum(1).cumsum()
        parts = np.split(rows, ends[:-1])
        weights: list[NDArray[Any]] | None = None
        if per_sample_weights is not None:
            shares = as_array(per_sample_weights, "per_sample_weights", np.float32)
            self.layout.check_weights(shares.shape, len(given))
            weights = np.split(shares, ends[:-1])
        out = np.empty((counts.shape[1], sum(self.dims)), dtype=np.float32)
        ends = np.cumsum(self.dims)
        for table, columns in self.layout.groups:
            inside = counts[columns].reshape(-1)
            own = np.concatenate([parts[column] for column in columns])
            some = None if weights is None else np.concatenate([weights[c] for c in columns])
            pooled = self.tables[table].bag(own, np.cumsum(inside) - inside, some, mode=mode)
            for column, part in zip(columns, np.split(pooled, len(columns)), strict=True):
                out[:, ends[column] - part.shape[1] : ends[column]] = part
        return out

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Every stored array by the name it has in the file."""
        parts = {f"t{i}": table.arrays for i, table in enumerate(self.tables)}
        for i, column in enumerate(self.columns):
            parts[f"c{i}"] = column.keys.arrays if isinstance(column.keys, Keys) else {}
        return {f"{own}.{name}": a for own, arrays in parts.items() for name, a in arrays.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the stored arrays without keys."""
        return sum(table.nbytes for table in self.tables)

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of the file."""
        tables = [stored_metadata(table) for table in self.tables]
        columns = []
        for column in self.columns:
            fields = {name: getattr(column, name) for name in ("name", "table", "start", "rows")}
            columns.append(fields | ({} if column.keys is None else {"keys": _described(column)}))
        return {"version": COLLECTION_VERSION, "tables": tables, "columns": columns}

    def save(self, path: str | Path) -> None:
        """Write all tables to one file, atomically."""
        for table in self.tables:
            refuse_unreadable(table)
        write_arrays(Path(path), self.metadata(), self.arrays)

    @classmethod
    def load(cls, path: str | Path | bytes | memoryview, *, mmap: bool = True) -> PackedCollection:
        """Open a collection's file, or its bytes: the header is read, the rest memory-mapped."""
        if isinstance(path, bytes | bytearray | memoryview):
            return read_collection(*open_bytes(path))
        return read_collection(*open_file(Path(path), mapped=mmap))

    def check(self) -> None:
        """Check every stored byte; raise FormatError at the first fault."""
        for table in self.tables:
            validate(table)
        for column in self.columns:
            if isinstance(column.keys, Keys):
                column.keys.check()


def _described(column: Column) -> Any:
    assert isinstance(column.keys, Keys)
    fields = column.keys.describe()
    if isinstance(fields, dict):
        fields = {n: v for n, v in fields.items() if v is not None and v is not False}
    return fields


class Layout:
    """The places of columns in the tables of a collection; checks names, ids and batches."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[int]) -> None:
        self.columns = list(columns)
        self.names = [column.name for column in columns]
        if not self.columns or len(set(self.names)) < len(self.names):
            raise ArgumentError(f"columns={self.names}: give one or more, each under its own name")
        for name in self.names:
            if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME:
                raise ArgumentError(
                    f"a column is named {repr(name)[:42]}: give a text of 1 to {LONGEST_NAME} "
                    "characters"
                )
        for column in self.columns:
            inside = 0 <= column.table < len(rows)
            if not inside or not 0 <= column.start <= rows[column.table] - column.rows:
                raise ArgumentError(f"{column} lies outside of the tables, which have {rows} rows")
            keys = column.keys
            count = column.rows if keys is None else len(keys)
            count += keys.shared if isinstance(keys, Keys) else 0
            if count != column.rows:
                raise ArgumentError(
                    f"the column {column.name!r} has {column.rows} rows, its vocabulary {count}: "
                    "give the vocabulary it was made with"
                )
        self.starts = np.array([column.start for column in columns])
        self.counts = np.array([column.rows for column in columns])
        used = sorted({column.table for column in columns})
        if used != list(range(len(rows))):
            raise ArgumentError(f"the columns use the tables {used}, there are {len(rows)}")
        self.groups = [(t, [i for i, c in enumerate(columns) if c.table == t]) for t in used]

    def number(self, name: str) -> int:
        """Return the place of a column, or raise an error."""
        if name not in self.names:
            raise ArgumentError(f"there is no column {name!r}: the columns are {self._shown()}")
        return self.names.index(name)

    def _shown(self) -> str:
        more = f" and {len(self.names) - 8} more" if len(self.names) > 8 else ""
        return ", ".join(map(repr, self.names[:8])) + more

    def check_names(self, given: Any, what: str = "the batch") -> None:
        """Raise an error unless something is given for every column, and for no other."""
        if not isinstance(given, Mapping):
            raise ArgumentError(
                f"{what} is {type(given).__name__}: give a dictionary with the columns "
                f"{self._shown()}"
            )
        for name in given:
            self.number(name)
        missing = [name for name in self.names if name not in given]
        if missing:
            raise ArgumentError(
                f"{what} lacks the column {missing[0]!r}: the columns are {self._shown()}"
            )

    def check_weights(self, shape: Sequence[int], count: int) -> None:
        """Raise an error unless there is one weight for every id of the bags."""
        if tuple(shape) != (count,):
            raise ArgumentError(
                f"per_sample_weights have the shape {tuple(shape)}: give [{count}], one for each id"
            )

    def batch(self, ids: Any, *, text: bool = False) -> Ids:  # -> [B, columns]
        """Return the checked ids of a batch; see ``Column.ids`` for ``text``."""
        if isinstance(ids, Mapping):
            self.check_names(ids)
            parts = [column.ids(ids[column.name], text=text) for column in self.columns]
            if len({part.shape for part in parts}) > 1 or parts[0].ndim != 1:
                shapes = {name: part.shape for name, part in zip(self.names, parts, strict=True)}
                raise ArgumentError(f"ids have the shapes {shapes}: give [B] for every column")
            ids = np.stack(parts, axis=1)
        given = as_array(ids, "ids")
        if given.ndim != 2 or given.shape[1] != len(self.names):
            raise ArgumentError(
                f"ids have the shape {given.shape}: give [B, {len(self.names)}], a column each for "
                f"{self._shown()}"
            )
        return self.checked(given, range(len(self.names)))

    def bags(self, ids: NDArray[Any], lengths: NDArray[Any]) -> tuple[Ids, Ids]:
        """Return checked ids [N] and lengths [columns, B] of bags."""
        if lengths.ndim != 2 or len(lengths) != len(self.names) or lengths.dtype.kind not in "iu":
            raise ArgumentError(
                f"lengths are {lengths.dtype} of shape {lengths.shape}: give whole numbers "
                f"[{len(self.names)}, B], the number of ids in each bag of each column"
            )
        counts = lengths.astype(np.int64)
        if counts.size and int(counts.min()) < 0:
            raise ArgumentError(f"lengths hold {int(counts.min())}: a bag has 0 ids or more")
        if ids.ndim != 1 or int(counts.sum()) != len(ids):
            raise ArgumentError(
                f"lengths add up to {int(counts.sum())}, there are {ids.size} ids of shape "
                f"{ids.shape}: give the ids of all bags [N], column by column"
            )
        parts = np.split(ids, np.cumsum(counts.sum(1))[:-1])
        found = [self.checked(part[:, None], [c])[:, 0] for c, part in enumerate(parts)]
        return np.concatenate(found), counts

    def checked(self, ids: NDArray[Any], columns: Sequence[int]) -> Ids:  # [n, columns]
        """Return ids as int64; an error names the column of a bad one."""
        if ids.dtype.kind not in "iu" and ids.size:
            raise IdError(f"ids have dtype {ids.dtype}: a column takes whole numbers")
        if ids.size:
            for place, column in enumerate(columns):
                low, high = int(ids[:, place].min()), int(ids[:, place].max())
                if low < 0 or high >= self.counts[column]:
                    raise self.beyond(column, low if low < 0 else high)
        return ids.astype(np.int64)

    def beyond(self, column: int, bad: int) -> IdError:
        """Return the error for an id that a column does not have."""
        last = self.counts[column] - 1
        return IdError(
            f"id {bad} is not in the column {self.names[column]!r}: its ids go from 0 to {last}"
        )


def read_collection(header: dict[str, Any], start: int, buffer: Buffer) -> PackedCollection:
    """Return the collection in a file; anything wrong is a FormatError."""
    top = FieldReader(metadata_of(header), "metadata", sparse=True)
    if top.raw("version") != COLLECTION_VERSION or not isinstance(top.raw("tables"), list):
        raise FormatError(
            "the file holds no collection of this version: open a table with fb.load, or use a "
            "newer featherbed"
        )
    listed, described = top.raw("tables"), top.raw("columns")
    if not isinstance(described, list) or not 1 <= len(described) <= MOST_COLUMNS:
        raise FormatError(f"metadata.columns must be a list of 1 to {MOST_COLUMNS} columns")
    if not 1 <= len(listed) <= len(described):
        raise FormatError(f"{len(described)} columns cannot use {len(listed)} tables")
    top.finish()
    used: set[str] = set()

    entries: dict[str, dict[str, Any]] = {}
    for name, entry in header.items():
        owner, _, own = name.partition(".")
        entries.setdefault(owner, {})[own] = entry

    def taker(prefix: str) -> Take:
        def take(name: str, kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
            used.add(prefix + name)
            return array_of(buffer, header, start, prefix + name, kind, shape)

        return take

    tables = [
        table_from(fields, entries.get(f"t{i}", {}), taker(f"t{i}."))
        for i, fields in enumerate(listed)
    ]
    columns = [
        _read_column(fields, i, tables, entries.get(f"c{i}", {}), taker(f"c{i}."))
        for i, fields in enumerate(described)
    ]
    extra = set(header) - used - {"__metadata__"}
    if extra:
        raise FormatError(
            f"the file holds arrays no part of a table uses: {', '.join(sorted(extra))[:200]}"
        )
    try:
        return PackedCollection(tables, columns)
    except ArgumentError as error:
        raise FormatError(f"metadata.columns: {str(error)[:300]}") from None


def _read_column(
    fields: Any, number: int, tables: list[PackedTable], entries: dict[str, Any], take: Take
) -> Column:
    reader = FieldReader(fields, f"columns[{number}]", sparse=True)
    name, table = reader.raw("name"), reader.integer("table", 0, len(tables) - 1)
    if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME:
        raise FormatError(
            f"columns[{number}].name must be a text of 1 to {LONGEST_NAME} characters"
        )
    rows = reader.integer("rows", 1, tables[table].rows)
    start = reader.integer("start", 0, tables[table].rows - rows)
    keyed = isinstance(reader.raw("keys"), dict)
    keys = read_keys(reader.nested("keys") if keyed else reader.flag("keys"), entries, take, rows)
    reader.finish()
    return Column(name, table, start, rows, keys)
