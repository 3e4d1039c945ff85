"""Files of columns, read in blocks: what they have in common, JSON lines, Parquet.

Each block is a polars frame of the wanted columns, as texts where the file is text, so that every judgement about a cell
is made in one place. Lines that are broken as a whole are marked in a column of their own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from featherbed.errors import DataError
from featherbed.tasks.lines import Lines, Progress

if TYPE_CHECKING:
    import polars as pl

BROKEN = "broken"  # the name of the column that marks broken lines
UNCLOSED, NO_OBJECT = (
    "a quotation mark is not closed",
    "it is no JSON object",
)  # what that column says
NESTED, NO_TEXT = "a list or an object is no key", "bytes that are not UTF-8"
FAULTS = (UNCLOSED, NO_OBJECT, NESTED, NO_TEXT)
SAMPLE = 200  # lines looked at before reading
ROWS = 1 << 21  # of a Parquet file at a time


@dataclass(frozen=True)
class Block:
    """Some lines: their cells, the line a row began on, and which rows are blank lines."""

    frame: pl.DataFrame
    line: Callable[[int], int]
    blanks: Callable[[], list[int]] = list


@dataclass
class Columns:
    """A file of columns: their names, a sample of their cells (None where there is none), and its blocks.

    ``odd`` has the types of columns that hold neither numbers nor text nor dates; ``later`` gathers, while blocks are read,
    names that are not among the columns.
    """

    path: Path
    kind: str
    names: list[str]
    sample: list[list[str | None]]
    blocks: Callable[[Sequence[int]], Iterator[Block]]
    header: bool = True
    delimiter: str = ""
    unit: str = "line"
    odd: dict[int, str] = field(default_factory=dict)
    later: set[str] = field(default_factory=set)


def looks_like_json(text: bytes) -> bool:
    """Whether a text is made of JSON objects, one a line or in a list."""
    start = text.lstrip()
    listed = start[:1] == b"[" and start[1:].lstrip()[:1] in (b"{", b"")
    return listed or (
        start[:1] == b"{"
        and any(_json_row(line) is not None for line in start.splitlines()[:SAMPLE])
    )


def json_lines(lines: Lines, text: bytes) -> Columns:
    """Return the columns of a file of JSON objects, one a line, that begins with ``text``."""
    rows = [row for line in text.splitlines() if (row := _json_row(line)) is not None]
    if not rows:
        lines.close()
        raise DataError(
            f'{lines.path} is not JSON lines: one object such as {{"user": 1, "item": 2, "rating": 5}} a line'
        )
    names = list(dict.fromkeys(name for row in rows for name in row))
    sample = [[_json_text(row.get(name)) for name in names] for row in rows]
    later: set[str] = set()

    def blocks(wanted: Sequence[int]) -> Iterator[Block]:
        for first, data in lines.blocks():
            later.update(name for name in _json_names(data) if name not in names)
            yield _json_block(data, first, [names[at] for at in wanted])

    return Columns(lines.path, "JSON lines", names, sample, blocks, later=later)


def _json_names(data: bytes) -> set[str]:
    """Return the names in some lines of a block, the last among them."""
    found, step = set[str](), max(1, len(data) // SAMPLE)
    for at in (*range(0, len(data), step), len(data) - 1):
        begin = data.rfind(b"\n", 0, at) + 1
        found.update(_json_row(data[begin : data.find(b"\n", at)]) or ())
    return found


def _json_text(value: Any) -> str | None:
    """Return a value as polars writes it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return (
            str(int(value)) if value.is_integer() else np.format_float_positional(value, trim="-")
        )
    return json.dumps(value, ensure_ascii=False)


def _json_block(data: bytes, first: int, names: Sequence[str]) -> Block:
    import polars as pl

    def line(row: int) -> int:
        filled = [n for n, text in enumerate(data.split(b"\n")) if text.strip()]
        return first + filled[row]

    places = [*map(str, range(len(names)))]
    try:
        frame = pl.read_ndjson(data, schema=dict.fromkeys(names, pl.String))
    except pl.exceptions.PolarsError:
        return Block(_json_slow(data, names), line)
    if any(
        frame[name].str.contains(r"^[\[{]").any() for name in names[:2]
    ):  # keys that may be lists or objects, not texts
        return Block(_json_slow(data, names), line)
    chosen = [pl.col(name).alias(place) for place, name in zip(places, names, strict=True)]
    return Block(frame.select(*chosen, pl.lit(None, dtype=pl.String).alias(BROKEN)), line)


def _json_slow(data: bytes, names: Sequence[str]) -> pl.DataFrame:
    """Return the cells of lines one by one; lines that are no objects or have lists or objects for keys are broken."""
    import polars as pl

    columns: list[list[str | None]] = [[] for _ in (*names, BROKEN)]
    for text in data.split(b"\n"):
        if text.strip():
            row = _json_row(text)
            for column, name in zip(columns[:-1], names, strict=True):
                column.append(None if row is None else _json_text(row.get(name)))
            nested = row is not None and any(
                isinstance(row.get(name), list | dict) for name in names[:2]
            )
            columns[-1].append(NO_OBJECT if row is None else NESTED if nested else None)
    schema = dict.fromkeys((*map(str, range(len(names))), BROKEN), pl.String)
    return pl.DataFrame(dict(zip(schema, columns, strict=True)), schema=schema)


def _json_row(text: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(text)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def parquet_file(path: Path, progress: Progress | None) -> Columns:
    """Return the columns of a Parquet file."""
    parquet, arrow = import_module("pyarrow.parquet"), import_module("pyarrow")
    try:
        file = parquet.ParquetFile(path)
        names = list(file.schema_arrow.names)
        start = next(file.iter_batches(batch_size=SAMPLE), None)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {str(error)[:100]}") from None
    if start is None or not start.num_rows:
        raise DataError(f"{path} is empty: give a file with ratings")
    cells = [
        [None if cell is None else str(cell) for cell in column.to_pylist()]
        for column in start.columns
    ]
    sample = [list(row) for row in zip(*cells, strict=True)]

    def blocks(wanted: Sequence[int]) -> Iterator[Block]:
        first, total = 1, file.metadata.num_rows
        try:
            for batch in file.iter_batches(batch_size=ROWS, columns=[names[at] for at in wanted]):
                yield _parquet_block(batch, [names[at] for at in wanted], first)
                first += batch.num_rows
                if progress is not None:
                    progress(first - 1, total)
        except (arrow.ArrowException, OSError) as error:
            raise DataError(
                f"{path}, row {first} or later, cannot be read: {str(error)[:100]}"
            ) from None

    odd = {at: str(kind) for at, kind in enumerate(file.schema_arrow.types) if _is_odd(kind)}
    return Columns(path, "Parquet", names, sample, blocks, unit="row", odd=odd)


def _is_odd(kind: Any) -> bool:
    """Whether an arrow type is neither a number nor a text nor a date."""
    types = import_module("pyarrow").types
    kind = getattr(kind, "storage_type", kind)
    if types.is_dictionary(kind):
        return _is_odd(kind.value_type)
    known = (
        *(
            types.is_boolean,
            types.is_integer,
            types.is_floating,
            types.is_decimal128,
            types.is_null,
        ),
        *(
            types.is_string,
            types.is_large_string,
            types.is_string_view,
            types.is_date,
            types.is_timestamp,
        ),
        *(types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary),
    )
    return not any(check(kind) for check in known)


def _parquet_block(batch: Any, names: Sequence[str], first: int) -> Block:
    import polars as pl

    columns = [_from_arrow(batch.column(name)) for name in names]
    frame = pl.DataFrame([column.alias(str(place)) for place, (column, _) in enumerate(columns)])
    broken = [wrong for _, wrong in columns if wrong is not None]
    marks = pl.any_horizontal(*broken) if broken else pl.lit(False)
    return Block(
        frame.with_columns(pl.when(marks).then(pl.lit(NO_TEXT)).alias(BROKEN)),
        lambda row: first + row,
    )


def _from_arrow(column: Any) -> tuple[pl.Series, pl.Series | None]:
    """Return an arrow column as polars', identifiers of sixteen bytes as text, and where bytes are no text."""
    import polars as pl

    column = getattr(column, "storage", column)
    series = pl.Series(column)
    if series.dtype in (pl.Categorical, pl.Enum):
        return series.cast(pl.String), None
    if series.dtype != pl.Binary:
        return series, None
    if str(column.type) == "fixed_size_binary[16]":
        digits = series.bin.encode("hex")
        cuts = ((0, 8), (8, 4), (12, 4), (16, 4), (20, 12))
        return pl.select(
            pl.concat_str([digits.str.slice(*cut) for cut in cuts], separator="-")
        ).to_series(), None
    try:
        return series.cast(pl.String), None
    except pl.exceptions.PolarsError:
        texts = pl.Series([_utf8(cell) for cell in series], dtype=pl.String)
        return texts, texts.is_null() & series.is_not_null()


def _utf8(cell: bytes | None) -> str | None:
    try:
        return None if cell is None else cell.decode()
    except UnicodeDecodeError:
        return None
