"""Packed files and files of named arrays: written atomically, opened by reading the header.

The header of a safetensors file is strict JSON; every entry is checked before it is used.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping
from io import BufferedReader
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, FormatError, IsFolderError, MissingFileError
from featherbed.packed.keys import FORMS, Keys, keys_for, read_keys
from featherbed.packed.schema import Take, describe, rebuild, stored_metadata
from featherbed.packed.table import PackedTable

BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8"), 8),
}


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, or raise ValueError.

    Texts that JSON readers treat differently are refused: a name that occurs twice in an object,
    NaN and Infinity, half of a surrogate pair, bytes in another encoding than UTF-8.

    >>> parse_json(b'{"rows": 3}')
    {'rows': 3}
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise ValueError("a name occurs twice in one object")
        return fields

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not JSON")

    text = text.decode() if isinstance(text, bytes) else text
    value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    if "\\ud" in text or "\\uD" in text:  # an escape may stand for half of a surrogate pair
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_header(text: bytes, size: int, name: str) -> dict[str, Any]:
    """Return the header of a file with ``size`` bytes of data; ``name`` is the name of the file.

    Every entry has a known dtype, a shape of integers and two offsets that its bytes fill, and
    the arrays cover the data exactly, each byte once. Anything else is a FormatError.
    """
    if not text.startswith(b"{"):
        raise FormatError(
            f"{name} is not a valid safetensors file: its header begins with no brace"
        )
    try:
        header: dict[str, Any] = parse_json(text)
        _check(header, size)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name} is not a valid safetensors file: {str(error)[:300]}") from None
    return header


def _check(header: Any, size: int) -> None:
    if not isinstance(header, dict):
        raise ValueError(f"its header must be an object, got {type(header).__name__}")
    texts = header.get("__metadata__") or {}
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("the __metadata__ of its header must be an object of strings")
    ranges = sorted(_range(name, entry) for name, entry in header.items() if name != "__metadata__")
    for (_, before), (begin, _) in pairwise([(0, 0), *ranges, (size, size)]):
        if begin != before:
            raise ValueError(
                f"its arrays must follow one another up to the end of the file, {size:,} bytes: "
                f"one ends at byte {str(before)[:40]}, the next begins at {str(begin)[:40]}"
            )


def _range(name: str, entry: Any) -> tuple[int, int]:
    """Return the offsets of one entry of the header."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the array {name[:80]!r} needs dtype, shape and data_offsets, no more")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"the array {name[:80]!r} has an unknown dtype, {str(dtype)[:40]}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        found = f"shape {str(shape)[:60]}, data_offsets {str(offsets)[:60]}"
        raise ValueError(f"the array {name[:80]!r} needs integers of at least 0, got {found}")
    if offsets[1] - offsets[0] != prod(shape) * BITS[dtype] // 8:
        found = f"{dtype} {str(shape)[:60]} from byte {offsets[0]} to {offsets[1]}"
        raise ValueError(f"the array {name[:80]!r} does not fill its bytes: {found[:160]}")
    return offsets[0], offsets[1]


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 1 << 64 for n in numbers)


DTYPES: dict[str, type[np.generic]] = {
    "F32": np.float32,
    "F16": np.float16,
    "U8": np.uint8,
    "U32": np.uint32,
    "U64": np.uint64,
}
NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}
ARRAYS_VERSION = 1  # of files of named arrays
ENTRY = "featherbed"  # the metadata entry that makes a safetensors file a featherbed file
MOST_HEADER = 1 << 24
CACHE_LINE = 64  # bytes
Buffer = mmap.mmap | memoryview
Arrays = dict[str, NDArray[np.generic]]


@runtime_checkable
class Packable(Protocol):
    """Anything with a packed form."""

    def pack(self) -> PackedTable:
        """Return the packed form."""


def save(
    table: PackedTable | Packable, path: str | Path, keys: Iterable[str] | None = None
) -> PackedTable:
    """Write a table to one file, atomically, and return the packed table that was written.

    A training table is packed first, without loss.

    Args:
        keys: the names of all rows (``fb.load(path)["the"]``), as they are or in another form by
            ``fb.Keys.of(names, form)``, or a vocabulary; or the form in which the keys that the
            table has are stored: "plain", "text" (compressed), "hashed" (no text, about five
            bytes a key) or "integer".

    >>> import featherbed as fb
    >>> path = getfixture("tmp_path") / "words.safetensors"
    >>> fb.save(fb.AnchorTable(3, 4, anchors=2), path, keys=["the", "cat", "sat"])
    PackedTable(3 x 4, AnchorTable, 56 bytes, with keys)
    >>> fb.load(path)["cat"].shape
    (4,)
    >>> fb.save(fb.load(path), path, keys="hashed").keys.form
    'hashed'
    """
    if not isinstance(table, PackedTable | Packable):
        raise ArgumentError(
            f"{type(table).__name__} has no packed form: save a table, "
            "such as fb.DenseTable.from_dense(old.weight.detach())"
        )
    packed = table if isinstance(table, PackedTable) else table.pack()
    if not isinstance(packed, PackedTable):  # a collection has a packed form of its own
        raise ArgumentError(
            f"{type(table).__name__} holds the tables of many columns: store it with its own .save"
        )
    if isinstance(keys, str) and keys in FORMS:
        if packed.keys is None:
            raise ArgumentError(
                f"keys={keys!r} is the form of the keys a table has, this one has none: "
                f"give fb.Keys.of(names, {keys!r})"
            )
        packed = packed.replace(keys=Keys.of(packed.keys, keys))
    elif keys is not None:
        packed = packed.replace(keys=keys_for(packed.rows, keys))
    write(packed, Path(path))
    return packed


def load(path: str | Path | bytes | memoryview, *, mmap: bool = True) -> PackedTable:
    """Open a packed file, or its bytes: the header is read, everything else is memory-mapped.

    With ``mmap=False`` the whole file is read into memory, and later changes to it have no effect.
    A mapped file may be replaced or deleted, but must not be rewritten or truncated in place:
    reading a page that is gone ends the process (SIGBUS).

    >>> import featherbed as fb
    >>> path = getfixture("tmp_path") / "items.safetensors"
    >>> _ = fb.save(fb.DenseTable(5, 4), path)
    >>> fb.load(path)[[0, 4]].shape, fb.load(path, mmap=False)[[0, 4]].shape
    ((2, 4), (2, 4))
    >>> fb.load(path.read_bytes())[[0, 4]].shape
    (2, 4)
    """
    if not isinstance(mmap, bool):
        raise ArgumentError(f"mmap={mmap!r}: use True (map the file) or False (read it whole)")
    if isinstance(path, bytes | bytearray | memoryview):
        return from_bytes(path)
    return _read_table(*open_file(Path(path), mapped=mmap))


def to_bytes(table: PackedTable) -> bytes:
    """Return the bytes that ``save`` would write.

    >>> import featherbed as fb
    >>> from_bytes(to_bytes(fb.DenseTable(5, 4).pack()))
    PackedTable(5 x 4, DenseTable, 80 bytes)
    """
    refuse_unreadable(table)
    arrays = (np.ascontiguousarray(array).tobytes() for _, array in _in_order(table.arrays))
    return b"".join((header_of(table), *arrays))


def from_bytes(data: Any) -> PackedTable:
    """Return the table in the bytes of a packed file, or an array of them; they are not copied."""
    return _read_table(*open_bytes(data))


def open_bytes(data: Any) -> tuple[dict[str, Any], int, Buffer]:
    """Return the header, the offset of the data, and all of the bytes of a file."""
    view = memoryview(data).cast("B")
    length = int.from_bytes(view[:8], "little")
    if length > MOST_HEADER or 8 + length > len(view):
        raise FormatError(
            f"these {len(view):,} bytes are not a featherbed file: "
            f"their header would have {length:,} bytes"
        )
    text = bytes(view[8 : 8 + length])
    return read_header(text, len(view) - 8 - length, "this"), 8 + length, view


def _read_table(header: dict[str, Any], start: int, buffer: Buffer) -> PackedTable:
    used: set[str] = set()

    def take(name: str, kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
        used.add(name)
        return array_of(buffer, header, start, name, kind, shape)

    metadata = metadata_of(header)
    if isinstance(metadata, dict) and isinstance(metadata.get("columns"), list):
        raise FormatError(
            f"the file holds a collection of {len(metadata['columns'])} columns: open it with "
            "fb.PackedCollection.load, or serve it with featherbed serve"
        )
    table = table_from(metadata, header, take)
    extra = set(header) - used - {"__metadata__"}
    if extra:
        raise FormatError(
            f"the file holds arrays no part of the table uses: {', '.join(sorted(extra))[:200]}"
        )
    return table


def table_from(metadata: Any, entries: dict[str, Any], take: Take) -> PackedTable:
    """Return a table from its metadata, the header entries of its arrays and the arrays."""
    found = rebuild(metadata, take)
    keys = read_keys(found.keys, entries, take, found.rows)
    return PackedTable(
        found.bands, found.dim, padding_idx=found.padding_idx, keys=keys, made_by=found.made_by
    )


def check(path: str | Path) -> PackedTable:
    """Open a packed file and check every byte of it; raise FormatError at the first fault.

    Codes must be in range, members and keys consistent.

    >>> import featherbed as fb
    >>> path = getfixture("tmp_path") / "items.safetensors"
    >>> _ = fb.save(fb.DenseTable(5, 4), path)
    >>> len(fb.check(path))
    5
    """
    from featherbed.packed.validate import validate

    table = load(path)
    validate(table)
    return table


def open_file(path: Path, *, mapped: bool = True) -> tuple[dict[str, Any], int, Buffer]:
    """Return the header, the offset of the data, and the bytes of the file, mapped or read.

    All three belong to one file, even if ``path`` is replaced meanwhile.
    """
    if path.is_dir():
        raise IsFolderError(f"{path} is a folder: name a file in it")
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file")
    while True:
        with path.open("rb") as file:
            header, start = _read_file_header(path, file)
            here, there = os.fstat(file.fileno()), path.stat()
            if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
                if not mapped:
                    return header, start, _read_whole(file)
                return header, start, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_whole(file: BufferedReader) -> memoryview:
    """Return the bytes of a file in memory, aligned to a cache line as mapped ones are."""
    size = os.fstat(file.fileno()).st_size
    buffer = np.empty(size + CACHE_LINE, dtype=np.uint8)
    first = -buffer.ctypes.data % CACHE_LINE
    data = buffer.data[first : first + size]
    file.seek(0)
    found = 0
    while found < size and (count := file.readinto(data[found:])):
        found += count
    return data[:found].toreadonly()


def _read_file_header(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the header of the file, checked, and the offset of the data."""
    length = int.from_bytes(file.read(8), "little")
    if length > MOST_HEADER:
        raise FormatError(
            f"{path.name} is not a featherbed file: its header would have {length:,} bytes, "
            f"{MOST_HEADER:,} is the most"
        )
    size = os.fstat(file.fileno()).st_size - 8 - length
    return read_header(file.read(length), size, path.name), 8 + length


def metadata_of(header: dict[str, Any]) -> Any:
    """Return the featherbed metadata in the header of a file."""
    entries = header.get("__metadata__") or {}
    if ENTRY not in entries:
        raise FormatError(
            "this safetensors file was not written by featherbed: "
            "its metadata has no 'featherbed' entry"
        )
    try:
        return parse_json(entries[ENTRY])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the featherbed metadata is not JSON: {str(error)[:100]}") from None


def array_of(
    buffer: Buffer, header: dict[str, Any], start: int, name: str, kind: str, shape: tuple[int, ...]
) -> NDArray[Any]:
    """Return an array of a file, whose data begins at ``start``, without copying it."""
    entry = header.get(name)
    if entry is None:
        raise FormatError(f"the array {name!r} is missing")
    if entry["dtype"] != kind or tuple(entry["shape"]) != shape:
        found = f"{entry['dtype']} {entry['shape']}"[:100]
        raise FormatError(f"the array {name!r} must be {kind} {list(shape)}, the file has {found}")
    offset = start + entry["data_offsets"][0]
    dtype = np.dtype(DTYPES[kind]).newbyteorder("<")
    count = int(np.prod(shape, dtype=object)) if shape else 1
    if offset % dtype.itemsize:
        raise FormatError(
            f"the array {name!r} is not aligned to its {dtype.itemsize}-byte elements"
        )
    if offset + count * dtype.itemsize > len(buffer):
        raise FormatError(f"the array {name!r} reaches beyond the end of the file")
    if count == 0:
        return np.empty(shape, dtype=dtype)
    return np.frombuffer(buffer, dtype=dtype, count=count, offset=offset).reshape(shape)


def _compact(fields: dict[str, Any]) -> str:  # every byte of a small file counts
    return json.dumps(fields, separators=(",", ":"))


def header_of(table: PackedTable) -> bytes:
    """Return the header of a table's file: length, JSON, padding to 8 bytes.

    Arrays are in order of decreasing element size, so that all are aligned.
    """
    return header_for(stored_metadata(table), table.arrays)


def header_for(fields: dict[str, Any], arrays: Arrays) -> bytes:
    """Return the header of a file with the given metadata and arrays."""
    metadata = {"format": "featherbed", ENTRY: _compact(fields)}
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, array in _in_order(arrays):
        entries[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = _compact(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _in_order(arrays: Arrays) -> list[tuple[str, NDArray[np.generic]]]:
    return sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))


def write(table: PackedTable, path: Path) -> None:
    """Write header and arrays to a new file, which then replaces ``path`` in one step."""
    refuse_unreadable(table)
    write_arrays(path, stored_metadata(table), table.arrays)


def write_arrays(path: Path, fields: dict[str, Any], arrays: Arrays) -> None:
    """Write metadata and arrays to a new file, which then replaces ``path`` in one step."""
    from featherbed.files import replacing_file  # only writers need it

    with replacing_file(path) as file:
        file.write(header_for(fields, arrays))
        for _, array in _in_order(arrays):
            flat = np.ascontiguousarray(array).reshape(-1)
            for begin in range(0, len(flat), 1 << 22):
                file.write(flat[begin : begin + (1 << 22)].tobytes())


def refuse_unreadable(table: PackedTable) -> None:
    """Refuse a table that could not be read again: the limits of the format hold for writers
    too."""
    arrays = table.arrays

    def take(name: str, kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
        found = arrays[name]
        if NAMES.get(found.dtype) != kind or found.shape != shape:
            raise FormatError(f"{name} is {found.dtype} {found.shape}, not {kind} {shape}")
        return found

    try:
        rebuild(describe(table), take)
    except FormatError as error:
        raise ArgumentError(f"this table cannot be stored: {error}") from None


def read_arrays(
    path: Path, kind: str, wanted: Mapping[str, tuple[str, ...]]
) -> dict[str, NDArray[Any]]:
    """Return the flat arrays of a file, memory-mapped; ``wanted``: name -> accepted types.

    The metadata of the file are its kind and version.

    >>> path = getfixture("tmp_path") / "seen.safetensors"
    >>> items = np.array([4, 7], dtype=np.uint32)
    >>> write_arrays(path, {"seen": ARRAYS_VERSION}, {"items": items})
    >>> read_arrays(path, "seen", {"items": ("U32",)})["items"].tolist()
    [4, 7]
    """
    header, start, mapped = open_file(path)
    if metadata_of(header) != {kind: ARRAYS_VERSION}:
        raise FormatError(
            f"{path.name} is not what this featherbed reads as {kind!r}, version {ARRAYS_VERSION}"
        )
    if set(header) - {"__metadata__"} != set(wanted):
        raise FormatError(
            f"{path.name} must hold the arrays {' and '.join(wanted)}, and nothing else"
        )
    found = {}
    for name, kinds in wanted.items():
        stored, shape = header[name]["dtype"], header[name]["shape"]
        if stored not in kinds or stored not in DTYPES or len(shape) != 1:
            actual = f"{stored} {shape}"[:100]
            raise FormatError(
                f"{path.name}: the array {name!r} must be flat, of {' or '.join(kinds)}; "
                f"it is {actual}"
            )
        found[name] = array_of(mapped, header, start, name, stored, (int(shape[0]),))
    return found
