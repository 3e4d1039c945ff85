"""Opening a file of columns: delimited text, JSON lines or Parquet, compressed or not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from featherbed.errors import DataError
from featherbed.io.opening import Progress, TextBlocks, end_of_lines, find_file
from featherbed.io.records.columns import (
    BROKEN,
    NESTED,
    NO_OBJECT,
    NO_TEXT,
    SAMPLE,
    Block,
    Columns,
)
from featherbed.io.records.delimited import open_delimited

if TYPE_CHECKING:
    import polars as pl

ROWS = 1 << 21  # rows of a Parquet file read at once


def open_columns(
    path: str | Path,
    *,
    encoding: str | None = None,
    progress: Progress | None = None,
    min_columns: int = 3,
    lenient: bool = False,
) -> Columns:
    """Inspect a file and return its columns.

    With ``lenient``, text that is not UTF-8 is read as ISO-8859-1, and wanted cells of delimited
    text may span several lines.
    """
    found = find_file(path)
    try:
        with found.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise DataError(f"{found} cannot be read: {error.strerror}") from None
    if start == b"PAR1":
        return _open_parquet(found, progress)
    if start == b"PK\x03\x04":
        raise DataError(f"{found} is a zip archive: unpack it first")
    text = TextBlocks(found, encoding, progress)
    text.lenient = lenient
    head = text.head if text.is_whole else text.head[: end_of_lines(text.head)]
    if not head.strip():
        text.close()
        raise DataError(
            f"{found} is empty: give a file with ratings"
            if text.is_whole
            else f"{found} has no line in its first megabyte: it is no text"
        )
    if _is_json(head):
        return _open_json(text, head)
    return open_delimited(text, head, min_columns)


def _is_json(head: bytes) -> bool:
    """Whether a text consists of JSON objects, one per line or in a list."""
    start = head.lstrip()
    listed = start[:1] == b"[" and start[1:].lstrip()[:1] in (b"{", b"")
    return listed or (
        start[:1] == b"{"
        and any(_parse_object(line) is not None for line in start.splitlines()[:SAMPLE])
    )


def _open_json(text: TextBlocks, head: bytes) -> Columns:
    rows = [row for line in head.splitlines() if (row := _parse_object(line)) is not None]
    if not rows:
        text.close()
        raise DataError(
            f"{text.path} is not JSON lines: "
            'one object such as {"user": 1, "item": 2, "rating": 5} per line'
        )
    names = list(dict.fromkeys(name for row in rows for name in row))
    sample = [[_json_text(row.get(name)) for name in names] for row in rows]
    later: set[str] = set()

    def blocks(wanted: Sequence[int]) -> Iterator[Block]:
        for first, data in text.blocks():
            later.update(name for name in _sample_names(data) if name not in names)
            yield _json_block(data, first, [names[at] for at in wanted])

    return Columns(text.path, "JSON lines", names, sample, blocks, later=later)


def _sample_names(data: bytes) -> set[str]:
    """Return the names in some lines of a block, including the last."""
    found, step = set[str](), max(1, len(data) // SAMPLE)
    for at in (*range(0, len(data), step), len(data) - 1):
        begin = data.rfind(b"\n", 0, at) + 1
        found.update(_parse_object(data[begin : data.find(b"\n", at)]) or ())
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

    try:
        frame = pl.read_ndjson(data, schema=dict.fromkeys(names, pl.String))
    except pl.exceptions.PolarsError:
        return Block(_read_json_slowly(data, names), line)
    # keys may be lists or objects instead of text
    if any(frame[name].str.contains(r"^[\[{]").any() for name in names[:2]):
        return Block(_read_json_slowly(data, names), line)
    columns = [pl.col(name).alias(str(place)) for place, name in enumerate(names)]
    return Block(frame.select(*columns, pl.lit(None, dtype=pl.String).alias(BROKEN)), line)


def _read_json_slowly(data: bytes, names: Sequence[str]) -> pl.DataFrame:
    """Return the cells line by line; lines without an object or with nested keys are broken."""
    import polars as pl

    columns: list[list[str | None]] = [[] for _ in (*names, BROKEN)]
    for text in data.split(b"\n"):
        if text.strip():
            row = _parse_object(text)
            for column, name in zip(columns[:-1], names, strict=True):
                column.append(None if row is None else _json_text(row.get(name)))
            nested = row and any(isinstance(row.get(name), list | dict) for name in names[:2])
            columns[-1].append(NO_OBJECT if row is None else NESTED if nested else None)
    schema = dict.fromkeys((*map(str, range(len(names))), BROKEN), pl.String)
    return pl.DataFrame(dict(zip(schema, columns, strict=True)), schema=schema)


def _parse_object(text: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(text)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _open_parquet(path: Path, progress: Progress | None) -> Columns:
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
        columns = [names[at] for at in wanted]
        try:
            for batch in file.iter_batches(batch_size=ROWS, columns=columns):
                yield _parquet_block(batch, columns, first)
                first += batch.num_rows
                if progress is not None:
                    progress(first - 1, total)
        except (arrow.ArrowException, OSError) as error:
            raise DataError(
                f"{path}, row {first} or later, cannot be read: {str(error)[:100]}"
            ) from None

    odd = {at: str(kind) for at, kind in enumerate(file.schema_arrow.types) if _is_odd(kind)}
    return Columns(path, "Parquet", names, sample, blocks, odd=odd)


def _is_odd(kind: Any) -> bool:
    """Whether an arrow type is neither a number nor text nor a date."""
    types = import_module("pyarrow").types
    kind = getattr(kind, "storage_type", kind)
    if types.is_dictionary(kind):
        return _is_odd(kind.value_type)
    known = (
        "boolean integer floating decimal128 null string large_string string_view date timestamp "
        "binary large_binary binary_view fixed_size_binary"
    )
    return not any(getattr(types, f"is_{name}")(kind) for name in known.split())


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
    """Return a column for polars, UUIDs as text, and a mask of bytes that are no text."""
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
        parts = [digits.str.slice(*cut) for cut in cuts]
        return pl.select(pl.concat_str(parts, separator="-")).to_series(), None
    try:
        return series.cast(pl.String), None
    except pl.exceptions.PolarsError:
        text = pl.Series([_decode(cell) for cell in series], dtype=pl.String)
        return text, text.is_null() & series.is_not_null()


def _decode(cell: bytes | None) -> str | None:
    try:
        return None if cell is None else cell.decode()
    except UnicodeDecodeError:
        return None
