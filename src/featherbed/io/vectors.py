"""Embedding matrices of numpy, safetensors, torch, word2vec, GloVe and Parquet files, mapped.

Data that cannot be mapped in place (text, compressed members, Parquet) is written block by block to
a nameless file in the temporary folder and mapped there; ``TMPDIR`` sets that folder.
"""

from __future__ import annotations

import codecs
import errno
import json
import math
import pickle
import re
import tempfile
import warnings
import zipfile
import zlib
from array import array as numbers
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from featherbed.errors import (
    ArgumentError,
    DataError,
    IsFolderError,
    MissingExtra,
    MissingFileError,
)
from featherbed.io.opening import open_stream
from featherbed.io.records.columns import is_number

BLOCK = 1 << 20  # bytes, or numbers, handled at once
FLOATS = ("float64", "float32", "float16", "bfloat16")
KEY_NAMES = ("words", "keys", "vocab", "tokens")  # members of a .npz that name the rows
LONGEST = 1 << 24  # bytes of a line of text, or of a row
SIZES = rb"(\d{1,15}) (\d{1,15})[ \r]*\n"  # first line of word2vec files
ARROW_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}
MOST_COLUMNS = 1 << 20
ENDINGS = dict.fromkeys((".pt", ".pth", ".ckpt"), "torch") | {
    f".{kind}": kind for kind in ("npy", "npz", "safetensors", "parquet")
}
BEGINNINGS = {b"\x93NUMPY": "npy", b"PK\x03\x04": "zip", b"PAR1": "parquet", b"\x80": "torch"}
ACCEPTED = (
    ".npy, .npz, .safetensors, torch checkpoints, word2vec text and binary, GloVe text, .parquet"
)


class BFloat16Matrix:
    """A mapped matrix of bfloat16, a type numpy lacks: rows are converted to float32 on access."""

    dtype: np.dtype[Any] = np.dtype(np.float32)

    def __init__(self, bits: NDArray[Any]) -> None:
        self.bits, self.shape = bits, bits.shape

    def __len__(self) -> int:
        return len(self.bits)

    def __getitem__(self, rows: Any) -> NDArray[np.float32]:
        return (np.asarray(self.bits[rows]).astype(np.uint32) << 16).view(np.float32)


Matrixlike: TypeAlias = NDArray[Any] | BFloat16Matrix


@dataclass
class Source:
    """A matrix (V x d), the names of its rows if the file has them, and the name of the array."""

    matrix: Matrixlike
    keys: list[str] | None
    name: str


@dataclass
class StoredArray:
    """An array of a file: shape, type, and the function that opens it (bfloat16 as uint16)."""

    shape: tuple[int, ...]
    dtype: str
    open: Callable[..., Any]

    def matrix(self) -> Matrixlike:
        """Open the array."""
        return BFloat16Matrix(self.open()) if self.dtype == "bfloat16" else self.open()

    def objection(self) -> str | None:
        """Return why this is not an embedding matrix; None if it is one."""
        if re.match(r"u?int\d", self.dtype):
            return f"holds integers ({self.dtype}), probably codes: give the original float matrix"
        if self.dtype not in FLOATS:
            return f"is of type {self.dtype}: a matrix of {', '.join(FLOATS)} is needed"
        if len(self.shape) != 2 or min(self.shape) < 1:
            return f"has the shape {self.shape}: give a matrix of at least one row and one column"
        return None

    def names_rows(self) -> bool:
        """Return whether this may hold keys of rows: a list of strings, or one string of lines."""
        text = re.match(r"(str|bytes)\d", self.dtype) is not None
        return text and len(self.shape) < 2 and min(self.shape, default=1) > 0


def map_blocks(
    blocks: Iterable[Any], dtype: Any, shape: tuple[int, ...], order: Any = "C"
) -> NDArray[Any]:
    """Write blocks of bytes to a nameless temporary file and map it; the number of rows may be
    -1."""
    with tempfile.TemporaryFile() as file:
        try:
            file.writelines(blocks)
            file.flush()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            folder = tempfile.gettempdir()
            message = (
                f"no space in {folder} for the matrix: set TMPDIR to a folder on a larger disk"
            )
            raise OSError(errno.ENOSPC, message) from None
        if shape[0:1] == (-1,):
            shape = (file.tell() // (shape[1] * np.dtype(dtype).itemsize), shape[1])
        if file.tell() < math.prod(shape) * np.dtype(dtype).itemsize:
            raise DataError(
                f"only {file.tell():,} bytes could be unpacked of an array {shape}: "
                "download or save the file again"
            )
        return np.memmap(file, dtype, "r", 0, shape, order)


def choose(
    path: Path, arrays: dict[str, StoredArray], array: str | None
) -> tuple[StoredArray, str]:
    """Return the only matrix of a file, or the one named ``array``, and its full name."""
    fit = {name: found for name, found in arrays.items() if not found.objection()}
    if array is None and len(fit) > 1:
        raise DataError(
            f"{path.name} holds {len(fit)} matrices: {_list_arrays(fit)}; "
            "name one with --array NAME (array= in Python)"
        )
    if array is None and not fit and len(arrays) != 1:
        raise DataError(f"{path.name} holds no matrix of floats, but {_list_arrays(arrays)}")
    name = array if array is not None else next(iter(fit or arrays))
    if name not in arrays:
        raise DataError(
            f"{path.name} holds no array {name!r}; it has: {_list_arrays(fit or arrays)}"
        )
    if objection := arrays[name].objection():
        label = f"{path.name}: the array {name!r}" if name else path.name
        raise DataError(f"{label} {objection}")
    return arrays[name], f"{path.name}:{name}" if len(arrays) > 1 else path.name


def _list_arrays(arrays: dict[str, StoredArray]) -> str:
    """Return names, shapes and types of at most 12 arrays."""
    shown = [
        f"{name} ({' x '.join(map(str, a.shape)) or 'scalar'} {a.dtype})"
        for name, a in islice(arrays.items(), 12)
    ]
    more = f" and {len(arrays) - 12} more" if len(arrays) > 12 else ""
    return ", ".join(shown or ["nothing"]) + more


def decode_key(key: bytes) -> str:
    """Return a key as text; bytes that are not UTF-8 become escapes."""
    return key.decode("utf-8", "backslashreplace")


def row_names(path: Path, keys: list[Any], rows: int) -> list[str] | None:
    """Return keys as text if they name every row once; otherwise warn and return None."""
    texts = [decode_key(key) if isinstance(key, bytes) else key for key in keys]
    if len(texts) == rows == len(set(texts)) and None not in texts:
        return texts
    counts = f"{len(texts)} keys, {len(set(texts))} of them different, for {rows} rows"
    warnings.warn(
        f"{path.name}: {counts}: read without keys, give each row a key of its own", stacklevel=4
    )
    return None


def _npy(path: Path, stream: Callable[[], IO[bytes]], start: int | None, size: int) -> StoredArray:
    """Return the .npy array of ``size`` bytes at ``start`` of a file (None: compressed in it)."""
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    with stream() as file:
        try:
            shape, fortran, dtype = readers[np.lib.format.read_magic(file)](file)
        except (ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
            raise DataError(
                f"{path.name} does not hold a valid .npy array: {str(error)[:200]}"
            ) from None
        begin, order = file.tell(), "F" if fortran else "C"
    if begin + (needed := math.prod(shape) * dtype.itemsize) > size:
        raise DataError(
            f"{path.name} is truncated: {needed:,} bytes of numbers expected, "
            f"{size - begin:,} found; download it again"
        )

    def map_array() -> NDArray[Any]:
        """Map the array in the file, or in a temporary file if it is compressed."""
        if start is not None:
            offset = start + begin
            return np.memmap(path, dtype, "r", offset, shape, order)  # type: ignore[call-overload, no-any-return]
        with stream() as file:
            file.read(begin)
            return map_blocks(iter(partial(file.read, BLOCK), b""), dtype, shape, order)

    return StoredArray(shape, dtype.name, map_array)


def read_npy(path: Path, _: str | None) -> Source:
    """Map a .npy file."""
    array = _npy(path, lambda: path.open("rb"), 0, path.stat().st_size)
    found, name = choose(path, {"": array}, None)
    return Source(found.matrix(), None, name)


def read_npz(path: Path, array: str | None) -> Source:
    """Map a member of a .npz archive, in place if it is uncompressed; one of strings gives keys."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            arrays = {}
            for info in (info for info in archive.infolist() if info.filename.endswith(".npy")):
                file.seek(info.header_offset + 26)  # after it, the lengths of name and extra field
                start = info.header_offset + 30 + sum(np.frombuffer(file.read(4), "<u2").tolist())
                stored = info.compress_type == zipfile.ZIP_STORED
                left = path.stat().st_size - start
                size = min(info.file_size, left) if stored else info.file_size
                found = _npy(path, partial(archive.open, info), start if stored else None, size)
                arrays[info.filename.removesuffix(".npy")] = found
            named = [name for name in KEY_NAMES if name in arrays and arrays[name].names_rows()]
            texts = [arrays.pop(name) for name in named]
            found, name = choose(path, arrays, array)
            matrix, keys = found.matrix(), texts[0].open().tolist() if texts else None
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as error:
        raise DataError(
            f"{path.name} is not a complete .npz archive: {str(error)[:200]}; "
            "download or save it again"
        ) from None
    if isinstance(keys, str | bytes):
        keys = (keys if isinstance(keys, bytes) else keys.encode()).removesuffix(b"\n").split(b"\n")
    return Source(matrix, None if keys is None else row_names(path, keys, len(matrix)), name)


def safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, checked by its library, and the data's offset."""
    if path.is_dir():
        raise IsFolderError(f"{path} is a folder where a safetensors file should be")
    if not path.exists():
        raise MissingFileError(f"{path}: no such file")
    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            return json.loads(file.read(start - 8)), start
    except (SafetensorError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not a valid safetensors file, or was cut short ({str(error)[:200]}): "
            "download it again"
        ) from None


def read_safetensors(path: Path, array: str | None) -> Source:
    """Map an array of a safetensors file."""
    header, start = safetensors_header(path)
    if "featherbed" in (header.pop("__metadata__", None) or {}):
        raise DataError(
            f"{path.name} is a featherbed file, which is compressed already: "
            "open it with fb.load, or give the original matrix"
        )
    kinds = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}
    arrays = {}
    for name, entry in header.items():
        kind = re.sub(r"^(F|BF|I|U)(?=\d+$)", lambda m: kinds[m[0]], entry["dtype"])
        dtype, shape = kind.replace("bfloat", "uint"), tuple(entry["shape"])
        offset = start + entry["data_offsets"][0]
        arrays[name] = StoredArray(shape, kind, partial(np.memmap, path, dtype, "r", offset, shape))
    found, name = choose(path, arrays, array)
    return Source(found.matrix(), None, name)


def read_torch(path: Path, array: str | None) -> Source:
    """Map a tensor of a torch checkpoint without running code; one that is not a zip file is
    read."""
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", "train", f"reading {path.name}") from None
    try:
        loaded = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path.name} holds more than weights, or is damaged; "
            f"torch.save(model.state_dict(), path) saves only those: {str(error)[:200]}"
        ) from None
    except Exception as error:  # a damaged file makes torch raise nearly anything
        raise DataError(
            f"{path.name} is not a complete torch checkpoint, download or save it again: "
            f"{str(error)[:200]}"
        ) from None
    found, name = choose(path, _tensors(torch, loaded), array)
    return Source(found.matrix(), None, name)


def _tensors(torch: Any, loaded: Any) -> dict[str, StoredArray]:
    """Return all tensors in nested dictionaries by their names, joined by dots."""
    arrays: dict[str, StoredArray] = {}
    waiting, visited = [("", loaded)], set()
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, torch.Tensor):
            plain = value.layout == torch.strided and value.device.type == "cpu"
            kind = str(value.dtype).removeprefix("torch.")
            kind = kind if plain else f"{value.layout} on {value.device}"
            bits = value.detach().view(torch.uint16) if kind == "bfloat16" else value.detach()
            arrays[name] = StoredArray(tuple(value.shape), kind, bits.numpy)
        elif isinstance(value, dict) and id(value) not in visited:
            visited.add(id(value))
            items = reversed(value.items())
            waiting += [(f"{name}.{key}".removeprefix("."), inner) for key, inner in items]
    return arrays


def _keyed(path: Path, rows: Iterable[tuple[bytes, Any]], dtype: str, dim: int) -> Source:
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

    matrix = map_blocks(unique_rows(), dtype, (-1, dim))
    if dropped:
        message = f"dropped {dropped:,} rows with duplicate keys; the first of each is kept"
        warnings.warn(f"{path.name}: {message}", stacklevel=4)
    return Source(matrix, list(keys), path.name)


def _checked_sizes(path: Path, sizes: re.Match[bytes]) -> tuple[int, int]:
    """Return V and d of the first line of a word2vec file, checked."""
    count, dim = int(sizes[1]), int(sizes[2])
    if count < 1 or not 1 <= dim <= MOST_COLUMNS:
        raise DataError(
            f"the first line of {path.name} says {count} rows of {dim} numbers: "
            f"at least 1 x 1 and at most {MOST_COLUMNS:,} columns are possible"
        )
    return count, dim


def read_text(path: Path, _: str | None) -> Source:
    """Read word2vec or GloVe text; without a first line "V d", most of the first lines tell d."""
    with open_stream(path) as (file, _):
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
    """Yield key and numbers of each line; a key may hold spaces, the last ``dim`` fields are the
    numbers."""
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
            bad = next((field for field in fields if not is_number(field)), line.strip())[:60]
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


def read_binary(path: Path, _: str | None) -> Source:
    """Read binary word2vec: "V d", then key, space, d little-endian float32, maybe a newline."""
    with open_stream(path) as (file, _):
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


def read_parquet(path: Path, array: str | None) -> Source:
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
            matrix = map_blocks(found.open(keys), found.dtype, found.shape)
    except (arrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise
        raise DataError(
            f"{path.name} is not a complete Parquet file: {str(error)[:200]}; "
            "download or save it again"
        ) from None
    return Source(matrix, row_names(path, keys, len(matrix)) if strings else None, name)


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


def read_matrix(path: str | Path, *, array: str | None = None) -> Source:
    """Open the embedding matrix of a file, memory-mapped.

    ``array`` names one if the file holds several. Text and word2vec files may be compressed; of
    rows with the same key the first is kept; keys need not be UTF-8 (``\\xff``).

    >>> path = getfixture("tmp_path") / "glove.txt"
    >>> _ = path.write_text("the 0.5 1.0\\ncat 0.25 2.0\\n")
    >>> source = read_matrix(path)
    >>> source.matrix.shape, source.keys, source.matrix[1:2].tolist()
    ((2, 2), ['the', 'cat'], [[0.25, 2.0]])
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.stat().st_size:
        raise DataError(f"{path.name} is empty, perhaps a failed download: download it again")
    kind = _kind(path)
    if kind in ("npy", "text", "binary") and array is not None:
        raise ArgumentError(
            f"array={array!r} was given, but {path.name} holds one matrix without a name: "
            "leave it out"
        )
    return _READERS[kind](path, array)


def _kind(path: Path) -> str:
    """Return the format of a file by its extension, else by its first bytes."""
    if path.suffix.lower() in ENDINGS:
        return ENDINGS[path.suffix.lower()]
    with open_stream(path) as (file, compression):
        head = file.read(1 << 16)
    kinds = (kind for beginning, kind in BEGINNINGS.items() if head.startswith(beginning))
    kind = next(kinds, None)
    kind = "safetensors" if head[5:9] == b"\0\0\0{" else kind
    if kind and compression:
        compressed = "gzipped" if compression == "gzip" else f"{compression}-compressed"
        raise DataError(
            f"{path.name} is a {compressed} {kind} file, "
            "only text and word2vec files are read compressed: unpack it first"
        )
    if kind == "zip":
        return "torch" if b"/data.pkl" in head else "npz"  # torch writes its pickle first
    sizes = re.match(SIZES, head)
    if not kind and sizes:
        first = head[sizes.end() :].partition(b" ")[2][: 4 * int(sizes[2])]  # if it were binary
        kind = "text" if _is_text(first) else "binary"
    if not kind and b"\0" in head:
        raise DataError(
            f"{path.name} has an unknown format (it begins with {head[:8]!r}): give {ACCEPTED}"
        )
    return kind or "text"


def _is_text(data: bytes) -> bool:
    """Return whether bytes are UTF-8 without control characters; the last one may be incomplete."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return not re.search(r"[\x00-\x08\x0e-\x1f]", text)


_READERS: dict[str, Callable[[Path, str | None], Source]] = {
    "npy": read_npy,
    "npz": read_npz,
    "safetensors": read_safetensors,
    "torch": read_torch,
    "text": read_text,
    "binary": read_binary,
    "parquet": read_parquet,
}


def read_weights(path: Path) -> Any:
    """Read one weight per row from a .npy array or a text file with one number per line.

    The word zipf instead of a file stands for the weights 1 / (i + 1).

    >>> path = getfixture("tmp_path") / "counts.txt"
    >>> _ = path.write_text("3\\n1\\n")
    >>> read_weights(path).tolist()
    [3.0, 1.0]
    """
    if str(path) == "zipf":
        return "zipf"
    try:
        found = np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.loadtxt(path, ndmin=1)
    except ValueError as error:
        why = str(error)[:120]
        raise DataError(
            f"{path.name}: weights are a .npy array or a text file of one number a line ({why})"
        ) from None
    return found
