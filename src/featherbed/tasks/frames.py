"""Files of columns, read in blocks: what they have in common, JSON lines, Parquet.

Each block is a polars frame of the wanted columns, as texts where the file is text, so that every judgement about a cell
is made in one place. Lines that are broken as a whole are marked in a column of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featherbed.errors import DataError
from featherbed.tasks.lines import Lines, Progress

if TYPE_CHECKING:
    import polars as pl

BROKEN = "broken"  # the name of the column that marks broken lines
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
    """A file of columns: their names, a sample of their cells (None where there is none), and its blocks."""

    path: Path
    kind: str
    names: list[str]
    sample: list[list[str | None]]
    blocks: Callable[[Sequence[int]], Iterator[Block]]
    header: bool = True
    delimiter: str = ""
    unit: str = "line"


def looks_like_json(text: bytes) -> bool:
    """Whether a text is made of JSON objects, one a line or in a list."""
    start = text.lstrip()
    listed = start[:1] == b"[" and start[1:].lstrip()[:1] in (b"{", b"")
    return listed or (start[:1] == b"{" and any(_json_row(line) is not None for line in start.splitlines()[:SAMPLE]))


def json_lines(lines: Lines, text: bytes) -> Columns:
    """Return the columns of a file of JSON objects, one a line, that begins with ``text``."""
    rows = [row for line in text.splitlines()[:SAMPLE] if (row := _json_row(line)) is not None]
    if not rows:
        lines.close()
        raise DataError(f'{lines.path} is not JSON lines: one object such as {{"user": 1, "item": 2, "rating": 5}} a line')
    names = list(dict.fromkeys(name for row in rows for name in row))
    sample = [[_json_text(row.get(name)) for name in names] for row in rows]

    def blocks(wanted: Sequence[int]) -> Iterator[Block]:
        for first, data in lines.blocks():
            yield _json_block(data, first, [names[at] for at in wanted])

    return Columns(lines.path, "JSON lines", names, sample, blocks)


def _json_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value)


def _json_block(data: bytes, first: int, names: Sequence[str]) -> Block:
    import polars as pl

    def line(row: int) -> int:
        filled = [n for n, text in enumerate(data.split(b"\n")) if text.strip()]
        return first + filled[row]

    places = [*map(str, range(len(names)))]
    try:
        frame = pl.read_ndjson(data, schema=dict.fromkeys(names, pl.String))
    except pl.exceptions.PolarsError:
        columns: list[list[str | None]] = [[] for _ in (*names, BROKEN)]
        for text in data.split(b"\n"):
            if text.strip():
                row = _json_row(text)
                for column, name in zip(columns[:-1], names, strict=True):
                    column.append(None if row is None else _json_text(row.get(name)))
                columns[-1].append("x" if row is None else None)
        schema = dict.fromkeys((*places, BROKEN), pl.String)
        return Block(pl.DataFrame(dict(zip(schema, columns, strict=True)), schema=schema), line)
    chosen = [pl.col(name).alias(place) for place, name in zip(places, names, strict=True)]
    return Block(frame.select(*chosen, pl.lit(None, dtype=pl.String).alias(BROKEN)), line)


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
        raise DataError(f"{path} is empty")
    cells = [[None if cell is None else str(cell) for cell in column.to_pylist()] for column in start.columns]
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
            raise DataError(f"{path}, row {first} or later, cannot be read: {str(error)[:100]}") from None

    return Columns(path, "Parquet", names, sample, blocks, unit="row")


def _parquet_block(batch: Any, names: Sequence[str], first: int) -> Block:
    import polars as pl

    series = [_from_arrow(batch.column(name)).alias(str(place)) for place, name in enumerate(names)]
    frame = pl.DataFrame(series).with_columns(pl.lit(None, dtype=pl.String).alias(BROKEN))
    return Block(frame, lambda row: first + row)


def _from_arrow(column: Any) -> pl.Series:
    """Return an arrow column as polars', identifiers of sixteen bytes as text."""
    import polars as pl

    column = getattr(column, "storage", column)
    series = pl.Series(column)
    if series.dtype != pl.Binary:
        return series
    if str(column.type) == "fixed_size_binary[16]":
        digits = series.bin.encode("hex")
        cuts = ((0, 8), (8, 4), (12, 4), (16, 4), (20, 12))
        return pl.select(pl.concat_str([digits.str.slice(*cut) for cut in cuts], separator="-")).to_series()
    return series.cast(pl.String, strict=False)
