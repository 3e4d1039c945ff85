"""What readers share: opening files (plain or compressed), names of columns, lines of JSON."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import json
import lzma
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np

from featherbed.errors import ArgumentError, DataError, FeatherbedError

DATA_VARIABLE = "FEATHERBED_DATA"
BLOCK = 1 << 26  # bytes read at once
MAX_BLOCKS = 4  # blocks that one line may span
HEAD = 1 << 20  # bytes inspected before reading
COMPRESSIONS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
}
WIDE = (b"\xff\xfe", b"\xfe\xff")  # first bytes of UTF-16 and UTF-32 files
MAX_BYTES = 1 << 28  # bytes that any compressed file may expand to in memory
MAX_RATIO = 200  # larger files may expand to this many times their size
FOREIGN = {
    **dict.fromkeys(WIDE, "UTF-16 text: give --set data.encoding=utf-16, or save it as UTF-8"),
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"PAR1": "a Parquet file: write it as CSV or JSON lines",
}
READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError)  # of damaged files
Progress = Callable[[int, int], None]  # bytes read, bytes in all


def find_data(name: str) -> Path:
    """Return the folder of a data set.

    That is ``$FEATHERBED_DATA/name``, else ``data/name`` or ``../shared/data/name``.
    """
    variable = os.environ.get(DATA_VARIABLE)
    bases = [Path(variable)] if variable else [Path("data"), Path("../shared/data")]
    for base in bases:
        if (base / name).is_dir():
            return base / name
    searched = ", ".join(str(base / name) for base in bases)
    raise DataError(
        f"data set {name!r} was not found (looked in {searched}): "
        f"set {DATA_VARIABLE} to the folder that holds it"
    )


def find_file(path: str | Path) -> Path:
    """Return the path of an existing file, with the suffix ``.gz`` if only that one exists."""
    wanted = Path(path)
    if wanted.is_dir():
        raise DataError(f"{wanted} is a folder: name a file in it")
    compressed = wanted.with_name(wanted.name + ".gz")
    if not wanted.exists() and compressed.is_file():
        return compressed
    if not wanted.exists():
        raise DataError(f"{wanted}: no such file")
    return wanted


def open_compressed(raw: IO[bytes]) -> tuple[Any, str]:
    """Return a decompressing stream and the name of the compression, "" if there is none.

    The first bytes decide, not the name of the file: gzip, zstd, bzip2, xz or plain.

    >>> path = getfixture("tmp_path") / "a.txt.gz"
    >>> _ = path.write_bytes(gzip.compress(b"one"))
    >>> with path.open("rb") as file:
    ...     stream, compression = open_compressed(file)
    ...     print(stream.read(), compression)
    b'one' gzip
    """
    start = raw.read(8)
    raw.seek(0)
    name = next((name for magic, name in COMPRESSIONS.items() if start.startswith(magic)), "")
    if name == "zstd":
        return import_module("pyarrow").CompressedInputStream(raw, "zstd"), name
    openers: dict[str, Callable[[Any], Any]] = {
        "gzip": gzip.open,
        "bzip2": bz2.open,
        "xz": lzma.open,
    }
    return openers[name](raw) if name else raw, name


@contextmanager
def open_stream(path: Path) -> Iterator[tuple[Any, str]]:
    """Open a file for reading bytes, decompressed; yield the stream and the compression.

    Damaged files raise ``DataError``, also while the stream is read.
    """
    name = ""
    try:
        with path.open("rb") as raw:
            stream, name = open_compressed(raw)
            yield stream, name
    except (FeatherbedError, UnicodeDecodeError):
        raise
    except READ_ERRORS as error:
        if getattr(error, "errno", None) == errno.ENOSPC:  # of a file written meanwhile
            raise
        raise _unreadable(path, name, error) from None


def _unreadable(path: Path, compression: str, error: Exception) -> DataError:
    problem = f"is not a complete {compression} file" if compression else "cannot be read"
    return DataError(f"{path} {problem} ({str(error)[:100]}): download it again")


def read_lines(path: str | Path, encoding: str = "utf-8") -> Iterator[str]:
    """Yield the lines of a text file, compressed or not (``path`` or ``path`` + ".gz")."""
    found = find_file(path)
    try:
        with open_stream(found) as (stream, _), io.TextIOWrapper(stream, encoding) as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise DataError(f"{found} is not {encoding} text: {error}") from None


def read_text(path: Path, encoding: str | None = None) -> str:
    """Return the text of a file, decompressed and decoded; all line ends become newlines.

    >>> path = getfixture("tmp_path") / "a.txt.gz"
    >>> _ = path.write_bytes(gzip.compress(b"one\\r\\ntwo\\n"))
    >>> read_text(path)
    'one\\ntwo\\n'
    """
    try:
        data = _read_bytes(path)
        kind = next((kind for magic, kind in FOREIGN.items() if data.startswith(magic)), "")
        if kind and encoding is None:
            raise DataError(f"{path} is {kind}")
        text = data.decode(encoding or "utf-8")
    except MemoryError:
        raise DataError(
            f"{path} does not fit into memory: give a smaller file, or parts of it"
        ) from None
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} at offset {error.start:,} is not "
            f"{encoding or 'UTF-8'} text: give --set data.encoding=NAME, such as latin-1"
        ) from None
    except LookupError:
        raise ArgumentError(
            f"encoding={encoding!r} is not known: give a name such as utf-8 or latin-1"
        ) from None
    if "\0" in text:
        line = 1 + text.count("\n", 0, text.index("\0"))
        raise DataError(
            f"{path}, line {line}: a zero byte; this is not text: give a text file, or its encoding"
        )
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _read_bytes(path: Path) -> bytearray:
    data, limit = bytearray(), max(MAX_BYTES, MAX_RATIO * path.stat().st_size)
    with open_stream(path) as (stream, compression):
        while block := stream.read(1 << 20):
            data += block
            if compression and len(data) > limit:
                raise DataError(
                    f"{path} decompresses to more than {limit:,} bytes, {MAX_RATIO} times its "
                    "size, as no text does: decompress it first if it is text"
                )
    return data


class TextBlocks:
    """A text file, compressed or not, in blocks of whole lines, as UTF-8 with ``\\n`` line ends.

    ``head`` is the beginning of the text. Without ``encoding`` the file is UTF-8, or ISO-8859-1
    for blocks that are not UTF-8 if ``lenient`` was set.

    >>> path = getfixture("tmp_path") / "a.csv.gz"
    >>> _ = path.write_bytes(gzip.compress(b"1,2\\r\\n3,4\\r\\n"))
    >>> list(TextBlocks(path).blocks())
    [(1, b'1,2\\n3,4\\n')]
    """

    def __init__(
        self, path: Path, encoding: str | None = None, progress: Progress | None = None
    ) -> None:
        self.path, self.encoding, self.progress = path, encoding, progress
        self.block, self.lenient = BLOCK, False
        try:
            self.size = path.stat().st_size
            self._raw = path.open("rb")
            self._stream, self.compression = open_compressed(self._raw)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        first = self._read()
        if first.startswith(WIDE):
            self._fail("is UTF-16 or UTF-32 text: save it as UTF-8")
        if b"\0" in first[:4096]:
            self._fail("is no text: it holds zero bytes")
        self._first = first.removeprefix(b"\xef\xbb\xbf")
        self._returns = b"\n" not in first and b"\r" in first  # line ends of old Macintoshes
        head = self._first[:HEAD].replace(b"\r\n", b"\n")
        self.head = head.replace(b"\r", b"\n") if self._returns else head
        self.is_whole = len(self._first) <= HEAD and len(first) < self.block

    def _fail(self, problem: str) -> None:
        self.close()
        raise DataError(f"{self.path} {problem}")

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    def __del__(self) -> None:
        if hasattr(self, "_raw"):
            self._raw.close()

    def _read(self) -> bytes:
        parts, size = [], 0
        try:
            while size < self.block and (part := self._stream.read(self.block - size)):
                parts.append(part)
                size += len(part)
        except READ_ERRORS as error:
            self.close()
            raise _unreadable(self.path, self.compression, error) from None
        return b"".join(parts)

    def _chunks(self) -> Iterator[bytes]:
        chunk, self._first = self._first, b""
        while chunk:
            yield chunk
            if self.progress is not None and not self._raw.closed:
                self.progress(min(self._raw.tell(), self.size), self.size)
            chunk = self._read()

    def blocks(self, cut: Callable[[bytes], int] | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield each block's first line number, from 1, and its text.

        ``cut`` returns the end of the last whole record of a text, by default of the last line.
        """
        cut = cut or end_of_lines
        line, rest = 1, b""
        try:
            for chunk in self._chunks():
                data = rest + chunk.replace(b"\r", b"\n") if self._returns else rest + chunk
                end = cut(data)
                if end == 0 and len(data) > MAX_BLOCKS * self.block:
                    raise DataError(
                        f"{self.path}, line {line}: no end within {len(data) >> 20:,} MB: "
                        "is this a file of lines?"
                    )
                block, rest = data[:end], data[end:]
                if block:
                    yield line, self._decode(block, line)
                    line += block.count(b"\n")
            if rest:
                yield line, self._decode(rest.removesuffix(b"\n") + b"\n", line)
        finally:
            self.close()

    def _decode(self, block: bytes, line: int) -> bytes:
        if b"\r" in block:
            block = block.replace(b"\r\n", b"\n")
        if b"\0" in block:
            place = line + block.count(b"\n", 0, block.index(b"\0"))
            raise DataError(f"{self.path}, line {place}: a zero byte; this is no text")
        if block.isascii():
            return block
        try:
            decoded = block.decode(self.encoding or "utf-8")
        except UnicodeDecodeError as error:
            if self.lenient and self.encoding is None:
                return block.decode("latin-1").encode()
            place = line + block.count(b"\n", 0, error.start)
            raise DataError(
                f"{self.path}, line {place}: not {self.encoding or 'UTF-8'} text; "
                "name its encoding, such as latin-1"
            ) from None
        except LookupError:
            raise DataError(
                f"encoding {self.encoding!r} is not known: use a name such as utf-8 or latin-1"
            ) from None
        return block if self.encoding is None else decoded.encode()


def end_of_lines(data: bytes) -> int:
    """Return the end of the last whole line of a text."""
    return data.rfind(b"\n") + 1


def normalize_name(name: str) -> str:
    """Return a name without case, blanks and punctuation.

    >>> normalize_name(" User_ID ")
    'userid'
    """
    return "".join(letter for letter in name.lower() if letter.isalnum())


def locate_column(role: str, wanted: str | int, names: Sequence[str], where: str) -> int:
    """Return the place of a column given by its name, else by its number from 1."""
    text = str(wanted).strip()
    for exact in (True, False):
        found = [
            place
            for place, name in enumerate(names)
            if (name == text if exact else name.lower() == text.lower())
        ]
        if len(found) == 1:
            return found[0]
        if found:
            raise DataError(
                f"{where}: {len(found)} columns are named {text!r}: "
                f"give {role} by number, 1 to {len(names)}"
            )
    if text.isascii() and text.isdigit() and 1 <= int(text) <= len(names):
        return int(text) - 1
    raise DataError(
        f"{where} has no column {text!r} for {role}; its columns are {list_names(names)}"
    )


def match_names(
    groups: Sequence[str], names: Sequence[str], exclude: Sequence[int] = ()
) -> list[int]:
    """Return the places of the names in the first group of common names that has any of them."""
    plain = {at: normalize_name(name) for at, name in enumerate(names) if at not in exclude}
    matches = ([at for at, name in plain.items() if name in group.split()] for group in groups)
    return next((found for found in matches if found), [])


def list_names(names: Sequence[str]) -> str:
    """Return the names of columns for a message, at most 20."""
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(repr(name) for name in names[:20]) + more


def json_text(value: Any) -> str | None:
    """Return a value as polars writes it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return (
            str(int(value)) if value.is_integer() else np.format_float_positional(value, trim="-")
        )
    return json.dumps(value, ensure_ascii=False)


def parse_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line, None if it is none."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
