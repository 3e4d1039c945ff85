"""Shared by the readers of all formats: arrays of a file, the choice among them, mapping them."""

from __future__ import annotations

import contextlib
import errno
import gzip
import math
import re
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import DataError

BLOCK = 1 << 20  # bytes, or numbers, handled at once
FLOATS = ("float64", "float32", "float16", "bfloat16")


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
Parts: TypeAlias = tuple[Matrixlike, list[str] | None, str]  # the fields of a Source


@dataclass
class StoredArray:
    """An array of a file: shape, type, and the function that opens it."""

    shape: tuple[int, ...]
    dtype: str
    open: Callable[..., Any]

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


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, unpacked if it is gzipped."""
    with path.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    opener: Callable[[], Any] = partial(gzip.open if gzipped else Path.open, path, "rb")
    try:
        with opener() as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path.name} is not a complete gzip file ({error}): download it again"
        ) from None


def spooled(
    blocks: Iterable[Any], dtype: Any, shape: tuple[int, ...], order: Any = "C"
) -> NDArray[Any]:
    """Write blocks of bytes to a nameless temporary file and map it; the number of rows may be -1."""
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
