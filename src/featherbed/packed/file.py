"""The file: a safetensors container, written atomically, opened by its header, checked in full on demand."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, FormatError, IsFolderError, MissingFileError
from featherbed.packed.band import check_values
from featherbed.packed.container import parsed, read_header
from featherbed.packed.header import VERSION, describe, rebuild, stored
from featherbed.packed.keys import Keys
from featherbed.packed.table import PackedTable
from featherbed.packed.validate import validate
from featherbed.packed.writing import replacing

DTYPES: dict[str, type[np.generic]] = {
    "F32": np.float32,
    "F16": np.float16,
    "U8": np.uint8,
    "U32": np.uint32,
    "U64": np.uint64,
}
NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}
ENTRY = "featherbed"  # the metadata entry that makes a safetensors file a featherbed file
MOST_HEADER = 1 << 24
CACHE_LINE = 64  # bytes
Buffer = mmap.mmap | memoryview


@runtime_checkable
class Packable(Protocol):
    """Anything with a packed form."""

    def pack(self) -> PackedTable:
        """Return the packed form."""


def save(
    table: PackedTable | Packable, path: str | Path, keys: Iterable[str] | None = None
) -> PackedTable:
    """Write a table (packed exactly first, if it is a training one) to one file, atomically; return what was written.

    ``keys`` names every row: ``fb.load(path)["the"]``.

    >>> import featherbed as fb
    >>> path = getfixture("tmp_path") / "words.safetensors"
    >>> fb.save(fb.AnchorTable(3, 4, anchors=2), path, keys=["the", "cat", "sat"])
    PackedTable(3 x 4, AnchorTable, 56 bytes, with keys)
    >>> fb.load(path)["cat"].shape
    (4,)
    """
    if not isinstance(table, PackedTable | Packable):
        raise ArgumentError(
            f"{type(table).__name__} has no packed form: save a table, such as fb.DenseTable.from_dense(old.weight.detach())"
        )
    packed = table if isinstance(table, PackedTable) else table.pack()
    if keys is not None:
        index = Keys.of(keys)
        if len(index) != packed.rows:
            raise ArgumentError(
                f"{len(index)} keys were given for {packed.rows} rows: give one for each"
            )
        packed = PackedTable(
            packed.bands,
            packed.dim,
            padding_idx=packed.padding_idx,
            keys=index,
            made_by=packed.made_by,
        )
    write(packed, Path(path))
    return packed


def load(path: str | Path, *, mmap: bool = True) -> PackedTable:
    """Open a packed file: its header is read, the rest is memory-mapped and read when asked for.

    With ``mmap=False`` the whole file is read into memory, and nothing that happens to it later
    matters. A mapped file may be replaced or deleted, but must not be rewritten or truncated in
    place: reading a page that is gone ends the process (SIGBUS).

    >>> import featherbed as fb
    >>> path = getfixture("tmp_path") / "items.safetensors"
    >>> _ = fb.save(fb.DenseTable(5, 4), path)
    >>> fb.load(path)[[0, 4]].shape, fb.load(path, mmap=False)[[0, 4]].shape
    ((2, 4), (2, 4))
    """
    if not isinstance(mmap, bool):
        raise ArgumentError(f"mmap={mmap!r}: use True (map the file) or False (read it whole)")
    return _table_of(*opened(Path(path), mapped=mmap))


def to_bytes(table: PackedTable) -> bytes:
    """Return what ``save`` would write.

    >>> import featherbed as fb
    >>> from_bytes(to_bytes(fb.DenseTable(5, 4).pack()))
    PackedTable(5 x 4, DenseTable, 80 bytes)
    """
    refuse_unreadable(table)
    arrays = (np.ascontiguousarray(array).tobytes() for _, array in _in_order(table))
    return b"".join((header_of(table), *arrays))


def from_bytes(data: Any) -> PackedTable:  # bytes, or an array of them
    """Return the table in ``data``, which are the bytes of a packed file: read where they lie, so leave them there."""
    held = memoryview(data).cast("B")
    length = int.from_bytes(held[:8], "little")
    if length > MOST_HEADER or 8 + length > len(held):
        raise FormatError(
            f"these {len(held):,} bytes are no featherbed file: their header would have {length:,} bytes"
        )
    text = bytes(held[8 : 8 + length])
    return _table_of(read_header(text, len(held) - 8 - length, "this"), 8 + length, held)


def _table_of(header: dict[str, Any], start: int, mapped: Buffer) -> PackedTable:
    taken: set[str] = set()

    def take(name: str, kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
        taken.add(name)
        return array_of(mapped, header, start, name, kind, shape)

    bands, rows, dim, padding, has_keys, made_by = rebuild(metadata_of(header), take)
    keys = _keys(header, take, rows) if has_keys else None
    extra = set(header) - taken - {"__metadata__"}
    if extra:
        raise FormatError(
            f"the file holds arrays no part of the table uses: {', '.join(sorted(extra))[:200]}"
        )
    return PackedTable(bands, dim, padding_idx=padding, keys=keys, made_by=made_by)


def check(path: str | Path) -> PackedTable:
    """Open a packed file and read every byte of it: codes in range, members and keys consistent. Raises FormatError.

    >>> import featherbed as fb
    >>> path = getfixture("tmp_path") / "items.safetensors"
    >>> _ = fb.save(fb.DenseTable(5, 4), path)
    >>> len(fb.check(path))
    5
    """
    table = load(path)
    validate(table)
    check_values(table.bands)
    return table


def opened(path: Path, *, mapped: bool = True) -> tuple[dict[str, Any], int, Buffer]:
    """Return the header, where the data begins, and the bytes of the file, mapped or read.

    All three are of one file, even if ``path`` is replaced meanwhile.
    """
    if path.is_dir():
        raise IsFolderError(f"{path} is a folder: name a file in it")
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file")
    while True:
        with path.open("rb") as file:
            header, start = _header(path, file)
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


def _header(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the container's header, checked, and where the data begins."""
    length = int.from_bytes(file.read(8), "little")
    if length > MOST_HEADER:
        raise FormatError(
            f"{path.name} is no featherbed file: its header would have {length:,} bytes, {MOST_HEADER:,} is the most"
        )
    size = os.fstat(file.fileno()).st_size - 8 - length
    return read_header(file.read(length), size, path.name), 8 + length


def metadata_of(header: dict[str, Any]) -> Any:
    entries = header.get("__metadata__") or {}
    if ENTRY not in entries:
        raise FormatError(
            "this safetensors file was not written by featherbed: its metadata has no 'featherbed' entry"
        )
    try:
        return parsed(entries[ENTRY])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the featherbed metadata is not JSON: {str(error)[:100]}") from None


def array_of(
    mapped: Buffer, header: dict[str, Any], start: int, name: str, kind: str, shape: tuple[int, ...]
) -> NDArray[Any]:
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
    if offset + count * dtype.itemsize > len(mapped):
        raise FormatError(f"the array {name!r} reaches beyond the end of the file")
    if count == 0:
        return np.empty(shape, dtype=dtype)
    return np.frombuffer(mapped, dtype=dtype, count=count, offset=offset).reshape(shape)


def _keys(header: dict[str, Any], take: Any, rows: int) -> Keys:
    def kind(name: str) -> str:
        entry = header.get(name)
        return "U64" if entry is not None and entry["dtype"] == "U64" else "U32"

    text = header.get("keys.text")
    if text is None or len(text["shape"]) != 1:
        raise FormatError("the array 'keys.text' is missing or not flat")
    return Keys(
        take("keys.text", "U8", (text["shape"][0],)),
        take("keys.ends", kind("keys.ends"), (rows,)),
        take("keys.checksums", "U32", (rows,)),
        take("keys.order", kind("keys.order"), (rows,)),
    )


def _compact(fields: dict[str, Any]) -> str:  # every byte of a small file counts
    return json.dumps(fields, separators=(",", ":"))


def header_of(table: PackedTable) -> bytes:
    """Return the container's header: length, JSON, padding to 8 bytes; arrays in order of falling element size."""
    entries: dict[str, Any] = {
        "__metadata__": {"format": "featherbed", ENTRY: _compact(stored(table))}
    }
    offset = 0
    for name, array in _in_order(table):
        entries[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = _compact(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _in_order(table: PackedTable) -> list[tuple[str, NDArray[np.generic]]]:
    return sorted(table.arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))


def write(table: PackedTable, path: Path) -> None:
    """Write header and arrays to a new file, then put it in the place of ``path`` in one step."""
    refuse_unreadable(table)
    with replacing(path) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(header_of(table))
        for _, array in _in_order(table):
            flat = np.ascontiguousarray(array).reshape(-1)
            for begin in range(0, len(flat), 1 << 22):
                file.write(flat[begin : begin + (1 << 22)].tobytes())


def refuse_unreadable(table: PackedTable) -> None:
    """Refuse to write what could not be read again: the limits of the format hold for writers too."""
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


__all__ = ["VERSION", "check", "load", "save"]
