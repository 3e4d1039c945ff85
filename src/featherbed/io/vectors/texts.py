"""Files of rows with keys: text of word2vec and GloVe, binary word2vec, and Parquet."""

from __future__ import annotations

import errno
import re
import warnings
from array import array as numbers
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from featherbed.errors import DataError, MissingExtra
from featherbed.io.vectors.reading import (
    BLOCK,
    FLOATS,
    Parts,
    StoredArray,
    choose,
    decode_key,
    opened,
    row_names,
    spooled,
)

LONGEST = 1 << 24  # bytes of a line of text, or of a row
SIZES = rb"(\d{1,15}) (\d{1,15})[ \r]*\n"  # first line of word2vec files
ARROW_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}
MOST_COLUMNS = 1 << 20


def _keyed(path: Path, rows: Iterable[tuple[bytes, Any]], dtype: str, dim: int) -> Parts:
    """Write rows to a temporary file and map it; of rows with the same key the first is kept."""
    keys: dict[str, None] = {}
    dropped = 0

    def unique_rows() -> Iterator[Any]:
        """Yield the rows whose keys are new."""
        nonlocal dropped
        for key, row in rows:
            name = decode_key(key)
            if name in keys:
                dropped += 1
                continue
            keys[name] = None
            yield row

    matrix = spooled(unique_rows(), dtype, (-1, dim))
    if dropped:
        message = f"dropped {dropped:,} rows with duplicate keys; the first of each is kept"
        warnings.warn(f"{path.name}: {message}", stacklevel=4)
    return matrix, list(keys), path.name


def _checked_sizes(path: Path, sizes: re.Match[bytes]) -> tuple[int, int]:
    """Return V and d of the first line of a word2vec file, checked."""
    count, dim = int(sizes[1]), int(sizes[2])
    if count < 1 or not 1 <= dim <= MOST_COLUMNS:
        raise DataError(
            f"the first line of {path.name} says {count} rows of {dim} numbers: "
            f"at least 1 x 1 and at most {MOST_COLUMNS:,} columns are possible"
        )
    return count, dim


def read_text(path: Path, _: str | None) -> Parts:
    """Read word2vec or GloVe text; without a first line "V d", most of the first lines tell d."""
    with opened(path) as file:
        lines = iter(partial(file.readline, LONGEST), b"")
        head = list(islice(lines, 64))
        sizes = re.fullmatch(SIZES, head[0])
        if sizes:
            count, dim = _checked_sizes(path, sizes)
            return _keyed(path, _text_rows(path, chain(head[1:], lines), 2, dim, count), "f4", dim)
        fields = Counter(line.rstrip(b" \r\n").count(b" ") for line in head if line.strip())
        dim = fields.most_common(1)[0][0] if fields else 0
        if not dim:
            raise DataError(
                f"{path.name}, line 1: expected a key and numbers separated by single spaces, "
                f"found {decode_key(head[0][:60])!r}"
            )
        return _keyed(path, _text_rows(path, chain(head, lines), 1, dim, None), "f4", dim)


def _text_rows(
    path: Path, lines: Iterable[bytes], first: int, dim: int, count: int | None
) -> Iterator[tuple[bytes, Any]]:
    """Yield key and numbers of each line; a key may hold spaces, the last ``dim`` fields are the numbers."""
    rows = 0
    for number, line in enumerate(lines, first):
        if not line.strip():
            continue
        key, *fields = line.rstrip(b" \r\n").rsplit(b" ", dim)
        try:
            row = numbers("f", map(float, fields))
        except ValueError:
            row = numbers("f")
        if len(row) != dim:
            bad = next((field for field in fields if not _is_number(field)), line.strip())[:60]
            raise DataError(
                f"{path.name}, line {number}: expected a key and {dim} numbers separated by single "
                f"spaces, found {decode_key(bad)!r} in a line of {len(fields) + 1} fields"
            )
        rows += 1
        yield key, row
    if count is not None and rows != count:
        raise DataError(
            f"{path.name} holds {rows:,} of the {count:,} rows of its first line: "
            "is the download incomplete?"
        )


def _is_number(field: bytes) -> bool:
    """Return whether a field of a line is a number."""
    try:
        float(field)
    except ValueError:
        return False
    return True


def read_binary(path: Path, _: str | None) -> Parts:
    """Read binary word2vec: "V d", then key, space, d little-endian float32, maybe a newline."""
    with opened(path) as file:
        sizes = re.fullmatch(SIZES, file.readline(100))
        assert sizes is not None  # the format was recognized by them
        count, dim = _checked_sizes(path, sizes)
        return _keyed(path, _binary_rows(path, file, count, dim), "<f4", dim)


def _binary_rows(
    path: Path, file: IO[bytes], count: int, dim: int
) -> Iterator[tuple[bytes, bytes]]:
    """Yield key and bytes of each row."""
    data, at = b"", 0
    for row in range(count):
        while (space := data.find(b" ", at)) < 0 or len(data) < space + 1 + 4 * dim:
            more = file.read(BLOCK)
            if not more:
                raise DataError(
                    f"{path.name} holds {row:,} of {count:,} rows: "
                    "the download is probably incomplete, download it again"
                )
            if space < 0 and len(data) - at > BLOCK:
                raise DataError(
                    f"{path.name}: no key of row {row} within {BLOCK:,} bytes: "
                    "the file is damaged, or not a word2vec file"
                )
            data, at = data[at:] + more, 0
        yield data[at:space].lstrip(b"\n"), data[space + 1 : space + 1 + 4 * dim]
        at = space + 1 + 4 * dim


def read_parquet(path: Path, array: str | None) -> Parts:
    """Read a column of lists, or all columns of floats; the only column of strings gives keys."""
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise MissingExtra("pyarrow", "compress", f"reading {path.name}") from None
    try:
        with parquet.ParquetFile(path, memory_map=True) as file:
            arrays, strings = _columns(path, file, arrow.types, array)
            found, name = choose(path, arrays, array)
            keys: list[Any] = []
            matrix = spooled(found.open(keys), found.dtype, found.shape)
    except (arrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise
        raise DataError(
            f"{path.name} is not a complete Parquet file: {str(error)[:200]}; "
            "download or save it again"
        ) from None
    return matrix, row_names(path, keys, len(matrix)) if strings else None, name


def _columns(
    path: Path, file: Any, types: Any, array: str | None
) -> tuple[dict[str, StoredArray], list[str]]:
    """Return the columns of a Parquet file, and the column of strings if there is exactly one."""
    fields = {field.name: field.type for field in file.schema_arrow}
    strings = [name for name, t in fields.items() if types.is_string(t) or types.is_large_string(t)]
    strings = strings if len(strings) == 1 else []
    arrays: dict[str, StoredArray] = {}
    rows = file.metadata.num_rows
    for name, kind in fields.items():
        lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        shape = (rows, _first_length(file, name)) if lists else (rows,)
        given = str(kind.value_type if lists else kind)
        dtype = ARROW_FLOATS.get(given, given)
        read = partial(_parquet_rows, path, file, [name], strings, shape[-1], dtype)
        arrays[name] = StoredArray(shape, dtype, read)
    vectors = [name for name, found in arrays.items() if len(found.shape) == 1]
    floats = [name for name in vectors if arrays[name].dtype in FLOATS]
    if array is None and len(floats) > 1 and all(found.objection() for found in arrays.values()):
        dtype = np.result_type(*(arrays[name].dtype for name in floats)).name
        read = partial(_parquet_rows, path, file, floats, strings, len(floats), dtype)
        return {"": StoredArray((rows, len(floats)), dtype, read)}, strings
    return {name: found for name, found in arrays.items() if name not in strings}, strings


def _first_length(file: Any, column: str) -> int:
    """Return the length of the list in the first row of a column; 1 if there is none."""
    for batch in file.iter_batches(batch_size=1, columns=[column]):
        first = batch.column(0)[0]
        return len(first) if first.is_valid else 1
    return 1


def _parquet_rows(
    path: Path,
    file: Any,
    columns: list[str],
    strings: list[str],
    dim: int,
    dtype: str,
    keys: list[Any],
) -> Iterator[Any]:
    """Yield blocks of rows of a column of lists, or ``dim`` columns of floats; extend ``keys``."""
    count = 0
    for batch in file.iter_batches(batch_size=max(1, BLOCK // dim), columns=[*columns, *strings]):
        parts = [batch.column(name) for name in columns]
        if len(columns) == 1:
            lengths = import_module("pyarrow.compute").list_value_length(parts[0]).fill_null(-1)
            lengths = lengths.to_numpy(zero_copy_only=False)
            if (lengths != dim).any():
                row = int(np.argmax(lengths != dim))
                found = "nothing" if lengths[row] < 0 else f"{lengths[row]} numbers"
                raise DataError(
                    f"{path.name}: row {count + row} of {columns[0]!r} holds {found}, "
                    f"the first one {dim}"
                )
            parts = [parts[0].flatten()]
        if any(part.null_count for part in parts):
            raise DataError(
                f"{path.name}: a number is missing (null) in rows {count} to "
                f"{count + len(batch) - 1}: fill or drop them"
            )
        numbers_ = [part.to_numpy(zero_copy_only=False).astype(dtype, copy=False) for part in parts]
        block = np.stack(numbers_, axis=-1)
        for name in strings:
            keys += batch.column(name).to_pylist()
        count += len(batch)
        yield block.tobytes()
