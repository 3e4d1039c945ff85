"""A text file as blocks of whole lines: unpacked, in UTF-8, with the number of each block's first line.

Cells between quotation marks may go over several lines. ``Quotes`` finds them, and tells them from marks that were never
closed and would swallow the lines after them.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import DataError

BLOCK = 1 << 26  # bytes
MOST = 4  # blocks that one line may take
SPAN = 1 << 20  # bytes that one cell of several lines may take
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

    def __init__(
        self, path: Path, encoding: str | None = None, progress: Progress | None = None
    ) -> None:
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
            kind = (
                "UTF-16 or UTF-32 text: save it as UTF-8"
                if first.startswith(WIDE)
                else "no text: it holds zero bytes"
            )
            raise DataError(f"{path} is {kind}")
        self._first = first.removeprefix(b"\xef\xbb\xbf")
        self._returns = (
            b"\n" not in first and b"\r" in first
        )  # lines end as they did on old Macintoshes
        self.head = (
            self._first[: 1 << 20]
            .replace(b"\r\n", b"\n")
            .replace(b"\r", b"\n" if self._returns else b"\r")
        )
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
        openers: dict[str, Callable[[Any], Any]] = {
            "gzip": gzip.open,
            "bzip2": bz2.open,
            "xz": lzma.open,
        }
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
                    raise DataError(
                        f"{self.path}, line {line}: no end within {size}: is this a file of lines?"
                    )
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
            raise DataError(
                f"{self.path}, line {place}: not {name} text; name its encoding, such as latin-1"
            ) from None
        except LookupError:
            raise DataError(
                f"encoding {self.encoding!r} is not known: use a name such as utf-8 or latin-1"
            ) from None
        return block if self.encoding is None else decoded.encode()


def whole_lines(data: bytes) -> int:
    """Return where the last whole line of a text ends."""
    return data.rfind(b"\n") + 1


def is_number(text: str | bytes | None) -> bool:
    """Whether a cell is a number."""
    try:
        float((text or "").strip())
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Held:
    """What quotation marks do in a text: where its lines end, which lines go on in the next, which marks are stray."""

    ends: NDArray[np.int64]  # [lines]
    joined: list[tuple[int, int]] = field(default_factory=list)  # first and last line of a record
    stray: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # line, place of the cell, where its mark is
    undecided: int = -1  # where a record begins that may end after the text

    def goes_on(self) -> NDArray[np.bool_]:  # [lines]
        """Return which lines are not the last of their record."""
        change = np.zeros(len(self.ends) + 1, dtype=np.int8)
        if self.joined:
            first, last = np.array(self.joined).T
            change[first] += 1
            change[last] -= 1
        return np.cumsum(change[:-1], dtype=np.int8).astype(bool)

    def rows(self) -> NDArray[np.int64]:  # [records]
        """Return the line each record begins on, from 0."""
        return np.flatnonzero(~np.append(False, self.goes_on()[:-1]))


class Quotes:
    """Records whose cells may go over several lines between quotation marks.

    A mark that opens a cell and is not closed on its line is stray if the cell must lie on one line (``whole``), if what
    closes it is not the end of a cell, if the record has not ``width`` cells, or if a line in between is a record of its
    own: ``width`` cells, numbers at all places of ``numbers`` (None: at any place).

    >>> quotes = Quotes(b",", 3, whole=(0, 1))
    >>> held = quotes.held(b'a,b,"two\\nlines"\\na,"b,3\\na,b,4\\n')
    >>> held.joined, held.stray, held.rows().tolist()
    ([(0, 1)], [(2, 1, 18)], [0, 2, 3])
    """

    def __init__(
        self,
        mark: bytes,
        width: int,
        *,
        whole: tuple[int, ...] = (),
        numbers: tuple[int, ...] | None = None,
        span: int = SPAN,
    ) -> None:
        self.mark, self.width, self.whole, self.numbers, self.span = (
            mark,
            width,
            whole,
            numbers,
            span,
        )
        self._closed = re.compile(rb'(?:[^"\n]++|"")*+"(?!")')
        self._closes = re.compile(rb'(?:[^"]++|"")*+"(?!")')
        self._after = re.compile(rb"[ \t]*(?=" + re.escape(mark) + rb"|\r?\n)")

    def held(self, data: bytes, *, more: bool = False) -> Held:
        """Look through the whole lines of a text; ``more`` says that the text goes on."""
        octets = np.frombuffer(data, dtype=np.uint8)
        held = Held(np.flatnonzero(octets == ord("\n")))
        marks = np.cumsum(octets == ord('"'), dtype=np.uint8)[held.ends] & 1
        done = -1
        for line in np.flatnonzero(
            np.diff(marks, prepend=np.uint8(0))
        ).tolist():  # lines with an odd number of marks
            if line <= done:
                continue
            start = int(held.ends[line - 1]) + 1 if line else 0
            place, at = self._opening(data, start, 0)
            if at < 0:
                continue
            last = self._last_line(data, held.ends, line, place, at, more)
            if last is None:
                return Held(held.ends, held.joined, held.stray, start)
            if last > line:
                held.joined.append((line, last))
                done = last
            else:
                held.stray.append((line, place, at))
        return held

    def _opening(self, data: bytes, at: int, place: int) -> tuple[int, int]:
        """Return the place of the cell that is opened and not closed on its line, and where its mark is, else -1."""
        end = data.find(b"\n", at)
        while (quote := data.find(b'"', at, end)) >= 0:
            begin = data.rfind(self.mark, at, quote) + 1 or at
            place, at = place + data.count(self.mark, at, begin), quote + 1
            if not data[begin:quote].strip(b" "):  # else the mark is a letter
                closed = self._closed.match(data, at)
                if closed is None:
                    return place, quote
                at = closed.end()
            at = data.find(self.mark, at, end) + 1
            if at == 0:
                return place, -1
            place += 1
        return place + data.count(self.mark, at, end), -1

    def _last_line(
        self, data: bytes, ends: NDArray[np.int64], line: int, place: int, at: int, more: bool
    ) -> int | None:  # None: the text ends first
        """Return the last line of a record, which is ``line`` itself if the mark at ``at`` is stray."""
        last = line
        while at >= 0:
            if place in self.whole:
                return line
            found = self._closes.match(data, at + 1, at + self.span)
            end = found.end() if found else min(len(data), at + self.span)
            before, last = last, last + data.count(b"\n", at, end)
            between = range(before + 1, last)
            if any(self._is_record(data[int(ends[n - 1]) + 1 : int(ends[n])]) for n in between):
                return line
            if found is None:
                return None if more and end == len(data) else line
            after = self._after.match(data, end)
            if after is None:
                return line
            if data[after.end() : after.end() + 1] != self.mark:
                break
            place, at = self._opening(data, after.end() + 1, place + 1)
        return last if place + 1 == self.width else line

    def _is_record(self, line: bytes) -> bool:
        cells = line.split(self.mark)
        if len(cells) != self.width:
            return False
        return (
            any(map(is_number, cells))
            if self.numbers is None
            else all(is_number(cells[at]) for at in self.numbers)
        )

    def cut(self, data: bytes) -> int:
        """Return where the last record ends that is whole."""
        end = whole_lines(data)
        undecided = self.held(data[:end], more=True).undecided
        return end if undecided < 0 else undecided

    def one_line_each(self, data: bytes, held: Held, broken: bytes) -> bytes:
        """Return a text in which every record is one line; ``broken`` follows its cells if a stray mark spoilt them."""
        octets = np.frombuffer(data, dtype=np.uint8).copy()
        octets[held.ends[held.goes_on()]] = ord(" ")
        parts, done = list[bytes](), 0
        text = octets.tobytes()
        for line, place, at in held.stray:
            end = int(held.ends[line])
            cell, *others = text[at:end].split(self.mark)
            start = int(held.ends[line - 1]) + 1 if line else 0
            if (
                place in self.whole
                or place + 1 + len(others) > self.width
                or any(b'"' in other for other in others)
            ):
                parts += text[done:start], self.mark * self.width + broken
            else:
                parts += (
                    text[done:at],
                    self.mark.join([b'"' + cell.replace(b'"', b'""') + b'"', *others]),
                )
            done = end
        return b"".join([*parts, text[done:]])
