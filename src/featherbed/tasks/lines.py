"""A text file as blocks of whole lines: unpacked, in UTF-8, with the number of each block's first line."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from featherbed.errors import DataError

BLOCK = 1 << 26  # bytes
MOST = 4  # blocks that one line may take
PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}
WIDE = (b"\xff\xfe", b"\xfe\xff")  # how UTF-16 and UTF-32 files begin
Progress = Callable[[int, int], None]


def found_file(path: str | Path) -> Path:
    """Return the path of a file that is there, plain or with the ending .gz; say what is wrong if it is not."""
    wanted = Path(path)
    if wanted.is_dir():
        raise DataError(f"{wanted} is a folder: name a file in it")
    near = wanted.with_name(wanted.name + ".gz")
    if not wanted.exists() and near.is_file():
        return near
    if not wanted.exists():
        raise DataError(f"{wanted}: no such file")
    return wanted


class Lines:
    """The lines of a file, which may be packed by gzip, zstd, bzip2 or xz.

    ``head`` is the beginning of the text. With ``encoding`` None the file is UTF-8, or ISO-8859-1 where ``lenient`` was set.

    >>> path = getfixture("tmp_path") / "a.csv.gz"
    >>> _ = path.write_bytes(gzip.compress(b"1,2\\r\\n3,4\\r\\n"))
    >>> list(Lines(path).blocks())
    [(1, b'1,2\\n3,4\\n')]
    """

    def __init__(self, path: Path, encoding: str | None = None, progress: Progress | None = None) -> None:
        self.path, self.encoding, self.block, self.progress = path, encoding, BLOCK, progress
        self.lenient = False
        self.packed = ""
        try:
            self.size = path.stat().st_size
            self._raw = path.open("rb")
            start = self._raw.read(8)
            self._raw.seek(0)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        self._stream = self._opened(start)
        first = self._read()
        if first.startswith(WIDE) or b"\0" in first[:4096]:
            self.close()
            kind = "UTF-16 or UTF-32 text: save it as UTF-8" if first.startswith(WIDE) else "no text: it holds zero bytes"
            raise DataError(f"{path} is {kind}")
        self._first = first.removeprefix(b"\xef\xbb\xbf")
        self._returns = b"\n" not in first and b"\r" in first  # lines end as they did on old Macintoshes
        self.head = self._first[: 1 << 20].replace(b"\r\n", b"\n").replace(b"\r", b"\n" if self._returns else b"\r")
        self.whole = len(self._first) <= 1 << 20 and len(first) < self.block

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    def __del__(self) -> None:
        if hasattr(self, "_raw"):
            self._raw.close()

    def _opened(self, start: bytes) -> Any:
        self.packed = next((name for magic, name in PACKED.items() if start.startswith(magic)), "")
        if self.packed == "zstd":
            return import_module("pyarrow").CompressedInputStream(self._raw, "zstd")
        openers: dict[str, Callable[[Any], Any]] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
        return openers[self.packed](self._raw) if self.packed else self._raw

    def _read(self) -> bytes:
        parts, size = [], 0
        try:
            while size < self.block and (part := self._stream.read(self.block - size)):
                parts.append(part)
                size += len(part)
        except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
            self.close()
            kind = f"a complete {self.packed} file" if self.packed else "readable"
            raise DataError(f"{self.path} is not {kind}: {str(error)[:100]}") from None
        return b"".join(parts)

    def _chunks(self) -> Iterator[bytes]:
        chunk, self._first = self._first, b""
        while chunk:
            yield chunk
            if self.progress is not None and not self._raw.closed:
                self.progress(min(self._raw.tell(), self.size), self.size)
            chunk = self._read()

    def blocks(self, cut: Callable[[bytes], int] | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield the number of the first line and the text of every block; ``cut`` says where whole lines end in a text."""
        cut = cut or whole_lines
        line, rest = 1, b""
        try:
            for chunk in self._chunks():
                data = rest + chunk.replace(b"\r", b"\n") if self._returns else rest + chunk
                end = cut(data)
                if end == 0 and len(data) > MOST * self.block:
                    size = f"{len(data) >> 20:,} MB"
                    raise DataError(f"{self.path}, line {line}: no end within {size}; is a quotation mark never closed?")
                block, rest = data[:end], data[end:]
                if block:
                    yield line, self._text(block, line)
                    line += block.count(b"\n")
            if rest:
                yield line, self._text(rest + b"\n" if not rest.endswith(b"\n") else rest, line)
        finally:
            self.close()

    def _text(self, block: bytes, line: int) -> bytes:
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
            name = self.encoding or "UTF-8"
            raise DataError(f"{self.path}, line {place}: not {name} text; name its encoding, such as latin-1") from None
        except LookupError:
            raise DataError(f"encoding {self.encoding!r} is not known: use a name such as utf-8 or latin-1") from None
        return block if self.encoding is None else decoded.encode()


def whole_lines(data: bytes) -> int:
    """Return where the last whole line of a text ends."""
    return data.rfind(b"\n") + 1


def whole_records(data: bytes) -> int:
    """Return where the last line ends that lies outside quotation marks."""
    end = data.rfind(b"\n")
    odd = data.count(b'"', 0, max(end, 0)) % 2
    while end >= 0 and odd:
        before = data.rfind(b"\n", 0, end)
        odd = (odd - data.count(b'"', max(before, 0), end)) % 2
        end = before
    return end + 1
