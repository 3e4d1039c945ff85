"""Delimited text: the delimiter, the header, quotation marks, and the cells in blocks.

Records of several lines are first joined into one line each. polars splits blocks into cells; text
that it refuses (odd quotation marks) goes through Python's own reader, which is slower.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import DataError
from featherbed.io.opening import TextBlocks, end_of_lines
from featherbed.io.records.columns import BROKEN, SAMPLE, UNCLOSED, Block, Columns, is_common

if TYPE_CHECKING:
    import polars as pl

DELIMITERS = ("::", "\t", ",", ";", "|", " ")
PIECE = 1 << 18  # bytes that are read again when a block has an odd line
SPAN = 1 << 20  # bytes that one cell of several lines may take
INSIDE = b"\x1f"  # replaces delimiters of two characters


def open_delimited(text: TextBlocks, head: bytes, min_columns: int) -> Columns:
    """Return the columns of delimited text that begins with ``head``, at least ``min_columns``.

    If the text is read leniently, wanted cells may span several lines, as titles do.
    """
    sample = head.decode(text.encoding or "utf-8", errors="replace")
    delimiter, rows = _sniff(sample, min_columns)
    if delimiter is None:
        text.close()
        raise DataError(
            f"{text.path}: no columns between tabs, commas, ; | :: or blanks in its first lines, "
            f"such as {sample.strip().splitlines()[0][:60]!r}"
        )
    header = _is_header(rows)
    names = _column_names(text, rows, header)
    cells: list[list[str | None]] = [
        [*row, *[None] * len(names)][: len(names)] for row in rows[header:]
    ]
    numeric = tuple(
        at
        for at in range(len(names))
        if sum(is_number(row[at]) for row in cells) * 10 > 9 * len(cells)
    )
    lines = enumerate(sample.split("\n"), 1)
    quotes = _has_quotes(sample, delimiter)
    reader = _DelimitedReader(
        text,
        delimiter,
        len(names),
        skip=next(n for n, line in lines if line.strip()) if header else 0,
        quotes=quotes,
        spaced=quotes and f'{delimiter} "' in sample,
        numeric=numeric or None,
        multiline=text.lenient,
    )
    text.lenient |= delimiter == "::"
    return Columns(text.path, "text", names, cells, reader.blocks, header, delimiter)


def _column_names(text: TextBlocks, rows: list[list[str]], header: bool) -> list[str]:
    below = rows[header:]
    width = Counter(map(len, below)).most_common(1)[0][0] if below else len(rows[0])
    names = [name.strip() or str(place) for place, name in enumerate(rows[0], 1)] if header else []
    surplus = (cell.strip() for row in below for cell in row[len(names) :])
    if header and width > len(names) and any(surplus):
        text.close()
        raise DataError(
            f"{text.path}: the header names {len(names)} columns, but the lines have {width}: "
            f"{', '.join(names)}"
        )
    return names + [str(place) for place in range(len(names) + 1, width + 1)]


def is_number(text: str | bytes | None) -> bool:
    """Whether a cell is a number."""
    try:
        float((text or "").strip())
    except ValueError:
        return False
    return True


def _has_quotes(text: str, delimiter: str) -> bool:
    """Whether quotation marks enclose cells.

    In tab-separated text they are often plain characters: there, most must be closed.
    """
    if delimiter != "\t":
        return delimiter not in ("::", " ")
    cells = [cell.strip() for line in text.split("\n") for cell in line.split("\t")]
    opened = [cell for cell in cells if cell.startswith('"')]
    return sum(len(cell) > 1 and cell.endswith('"') for cell in opened) * 10 > 9 * len(opened)


def _split(text: str, delimiter: str, count: int) -> list[list[str]]:
    """Return the cells of the first lines that are not blank."""
    quoted = _has_quotes(text, delimiter)
    if quoted and '"' in text:
        first = next(line for line in text.split("\n") if line.strip())
        data = (text if text.endswith("\n") else text + "\n").encode()
        quotes = Quotes(delimiter.encode(), len(next(_csv_rows([first], delimiter, quoted))))
        text = quotes.join_records(data, quotes.scan(data), b"").decode()
    lines = [line for line in text.split("\n", 2 * count) if line.strip()][:count]
    if delimiter in ("::", " "):
        return [line.split("::") if delimiter == "::" else line.split() for line in lines]
    return [row for row in _csv_rows(lines, delimiter, quoted) if "".join(row).strip()]


def _csv_rows(lines: list[str], delimiter: str, quoted: bool) -> Iterator[list[str]]:
    """Yield the cells of every line, none for a line that cannot be split."""
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    for line in lines:
        reader = csv.reader([line], delimiter=delimiter, quoting=quoting, skipinitialspace=True)
        try:
            yield next(reader, [])
        except csv.Error:
            yield []


def _sniff(text: str, min_columns: int) -> tuple[str | None, list[list[str]]]:
    """Return the delimiter that splits most lines equally, and the first lines split by it."""
    best: tuple[tuple[float, bool, int], str | None, list[list[str]]] = ((0.0, False, 0), None, [])
    for delimiter in DELIMITERS:
        rows = _split(text, delimiter, SAMPLE)
        width, count = Counter(map(len, rows)).most_common(1)[0] if rows else (0, 0)
        if width < 2 or (delimiter == " " and best[1] is not None):
            continue
        agreement = round(count / len(rows), 1) / (1 if width >= min_columns else 10)
        score = (agreement, delimiter == "::", width)
        if score > best[0]:
            best = (score, delimiter, rows)
    return best[1], best[2]


def _is_header(rows: list[list[str]]) -> bool:
    """Whether the first line names the columns.

    It has no number, and has a common name or a cell with numbers below it.
    """
    if any(is_number(cell) for cell in rows[0]):
        return False
    if any(is_common(cell) for cell in rows[0]):
        return True
    below = rows[1:20]
    return any(
        sum(is_number(row[at]) for row in below if at < len(row)) * 2 > len(below)
        for at in range(len(rows[0]))
        if below
    )


@dataclass
class _DelimitedReader:
    """Reads the blocks of one delimited file."""

    text: TextBlocks
    delimiter: str
    width: int
    skip: int  # lines up to the end of the header
    quotes: bool  # quotation marks may enclose cells
    spaced: bool  # a blank may precede quotation marks
    numeric: tuple[int, ...] | None  # places of numeric columns
    multiline: bool  # wanted cells may span several lines

    @property
    def separator(self) -> bytes:
        """The single byte between the cells of a normalized block."""
        return {"::": INSIDE, " ": b"\t"}.get(self.delimiter, self.delimiter.encode())

    def blocks(self, wanted: Sequence[int]) -> Iterator[Block]:
        """Yield the cells of the wanted columns."""
        skip, span = self.skip, min(SPAN, 2 * self.text.block)
        whole = () if self.multiline else tuple(wanted)
        quotes = Quotes(self.separator, self.width, whole=whole, numeric=self.numeric, span=span)
        for line, data in self.text.blocks(lambda data: self._cut(data, quotes)):
            block = data.split(b"\n", skip)[-1] if skip else data
            first, skip = line + skip, 0
            if self.delimiter == "::":
                block = block.replace(b"::", INSIDE)
            elif self.delimiter == " ":
                block = re.sub(rb"(?m)^\t+|\t+$", b"", re.sub(rb"[ \t]+", b"\t", block))
            elif self.spaced:
                block = block.replace(self.separator + b' "', self.separator + b'"')
            if block:
                yield self._block(block, first, wanted, quotes)

    def _is_quoted(self, data: bytes) -> bool:
        """Whether quotation marks begin cells; elsewhere they are plain characters."""
        if not self.quotes or b'"' not in data:
            return False
        starts = (
            self.separator + b'"',
            b'\n"',
            *((self.separator + b' "',) if self.spaced else ()),
        )
        return data.startswith(b'"') or any(start in data for start in starts)

    def _cut(self, data: bytes, quotes: Quotes) -> int:
        return quotes.cut(self._unescape(data)) if self._is_quoted(data) else end_of_lines(data)

    def _unescape(self, data: bytes) -> bytes:
        """Double the quotation marks that a backslash precedes inside cells."""
        if b'\\"' not in data:
            return data
        return re.sub(rb'\\"(?!' + re.escape(self.separator) + rb"|\r?\n)", b'""', data)

    def _block(self, block: bytes, first: int, wanted: Sequence[int], quotes: Quotes) -> Block:
        quoted, scan = self._is_quoted(block), None
        if quoted:
            block = self._unescape(block)
            scan = quotes.scan(block)
            block = quotes.join_records(block, scan, UNCLOSED.encode())
        return Block(
            self._frame(block, quoted, wanted),
            lambda row: first + (int(scan.rows()[row]) if scan and scan.joined else row),
            lambda: _blank_rows(block),
        )

    def _frame(self, block: bytes, quoted: bool, wanted: Sequence[int]) -> pl.DataFrame:
        """Return the cells, piece by piece if polars refuses the whole."""
        import polars as pl

        frame = self._read_fast(block, quoted, wanted)
        if frame is not None:
            return frame
        if len(block) <= PIECE:
            return self._read_slowly(block, quoted, wanted)
        frames, begin = list[pl.DataFrame](), 0
        while begin < len(block):
            end = block.index(b"\n", min(begin + PIECE, len(block)) - 1) + 1
            piece, begin = block[begin:end], end
            frame = self._read_fast(piece, quoted, wanted)
            frames.append(self._read_slowly(piece, quoted, wanted) if frame is None else frame)
        return pl.concat(frames)

    def _read_fast(self, block: bytes, quoted: bool, wanted: Sequence[int]) -> pl.DataFrame | None:
        import polars as pl

        names = [str(place) for place in range(self.width)] + [BROKEN]
        head = self.separator.join(name.encode() for name in names) + b"\n"
        try:
            frame = pl.read_csv(
                head + block,
                columns=[*sorted({*map(str, wanted)}, key=int), BROKEN],
                separator=self.separator.decode(),
                quote_char='"' if quoted else None,
                infer_schema=False,
                truncate_ragged_lines=True,
            )
        except pl.exceptions.PolarsError:
            return None
        if quoted and len(frame) != block.count(b"\n"):
            return None
        columns = (pl.col(str(at)).alias(str(n)) for n, at in enumerate(wanted))
        return frame.select(*columns, pl.col(BROKEN))

    def _read_slowly(self, block: bytes, quoted: bool, wanted: Sequence[int]) -> pl.DataFrame:
        import polars as pl

        columns: list[list[str | None]] = [[] for _ in (*wanted, BROKEN)]
        lines = block.decode().removesuffix("\n").split("\n")
        rows = _csv_rows(lines, self.separator.decode(), quoted)
        for line, row in zip(lines, rows, strict=True):
            for column, at in zip(columns, (*wanted, self.width), strict=True):
                column.append((row[at] or None) if at < len(row) else None)
            if line and not row:
                columns[-1][-1] = "x"
        schema = dict.fromkeys((*map(str, range(len(wanted))), BROKEN), pl.String)
        return pl.DataFrame(dict(zip(schema, columns, strict=True)), schema=schema)


def _blank_rows(block: bytes) -> list[int]:
    """Return which lines are blank."""
    rows, row, place = list[int](), 0, 0
    for found in re.finditer(rb"(?m)^[ \t]*\n", block):
        row += block.count(b"\n", place, found.start())
        place = found.start()
        rows.append(row)
    return rows


@dataclass(frozen=True)
class QuoteScan:
    """The effect of quotation marks on a text: ends of lines, joined lines, stray marks."""

    ends: NDArray[np.int64]  # [lines]
    joined: list[tuple[int, int]] = field(default_factory=list)  # first and last line of a record
    stray: list[tuple[int, int, int]] = field(default_factory=list)  # line, place of cell, of mark
    undecided: int = -1  # start of a record that may end after the text

    def continues(self) -> NDArray[np.bool_]:  # [lines]
        """Return which lines are not the last of their record."""
        change = np.zeros(len(self.ends) + 1, dtype=np.int8)
        if self.joined:
            first, last = np.array(self.joined).T
            change[first] += 1
            change[last] -= 1
        return np.cumsum(change[:-1], dtype=np.int8).astype(bool)

    def rows(self) -> NDArray[np.int64]:  # [records]
        """Return the line each record begins on, from 0."""
        return np.flatnonzero(~np.append(False, self.continues()[:-1]))


class Quotes:
    """Finds records whose cells span several lines between quotation marks, and stray marks.

    A mark that opens a cell and is not closed on its line is stray if the cell must be on one line
    (``whole``), if the closing mark is not the end of a cell, if the record does not have ``width``
    cells, or if a line in between is a record of its own: ``width`` cells with numbers at all
    places of ``numeric`` (None: at any place).

    >>> quotes = Quotes(b",", 3, whole=(0, 1))
    >>> scan = quotes.scan(b'a,b,"two\\nlines"\\na,"b,3\\na,b,4\\n')
    >>> scan.joined, scan.stray, scan.rows().tolist()
    ([(0, 1)], [(2, 1, 18)], [0, 2, 3])
    """

    def __init__(
        self,
        separator: bytes,
        width: int,
        *,
        whole: tuple[int, ...] = (),
        numeric: tuple[int, ...] | None = None,
        span: int = SPAN,
    ) -> None:
        self.separator, self.width, self.span = separator, width, span
        self.whole, self.numeric = whole, numeric
        self._closed_on_line = re.compile(rb'(?:[^"\n]++|"")*+"(?!")')
        self._closed = re.compile(rb'(?:[^"]++|"")*+"(?!")')
        self._cell_end = re.compile(rb"[ \t]*(?=" + re.escape(separator) + rb"|\r?\n)")

    def scan(self, data: bytes, *, more: bool = False) -> QuoteScan:
        """Scan the whole lines of a text; ``more`` says that the text goes on."""
        octets = np.frombuffer(data, dtype=np.uint8)
        scan = QuoteScan(np.flatnonzero(octets == ord("\n")))
        parity = np.cumsum(octets == ord('"'), dtype=np.uint8)[scan.ends] & 1
        done = -1
        # only lines with an odd number of marks can leave a cell open
        for line in np.flatnonzero(np.diff(parity, prepend=np.uint8(0))).tolist():
            if line <= done:
                continue
            start = int(scan.ends[line - 1]) + 1 if line else 0
            place, at = self._find_open(data, start, 0)
            if at < 0:
                continue
            last = self._last_line(data, scan.ends, line, place, at, more)
            if last is None:
                return QuoteScan(scan.ends, scan.joined, scan.stray, start)
            if last > line:
                scan.joined.append((line, last))
                done = last
            else:
                scan.stray.append((line, place, at))
        return scan

    def _find_open(self, data: bytes, at: int, place: int) -> tuple[int, int]:
        """Return the place of the cell left open on a line and of its mark, -1 if there is none."""
        end = data.find(b"\n", at)
        while (quote := data.find(b'"', at, end)) >= 0:
            begin = data.rfind(self.separator, at, quote) + 1 or at
            place, at = place + data.count(self.separator, at, begin), quote + 1
            if not data[begin:quote].strip(b" "):  # else the mark is a plain character
                closed = self._closed_on_line.match(data, at)
                if closed is None:
                    return place, quote
                at = closed.end()
            at = data.find(self.separator, at, end) + 1
            if at == 0:
                return place, -1
            place += 1
        return place + data.count(self.separator, at, end), -1

    def _last_line(
        self, data: bytes, ends: NDArray[np.int64], line: int, place: int, at: int, more: bool
    ) -> int | None:  # None: the text ends before the record
        """Return the last line of a record: ``line`` itself if the mark at ``at`` is stray."""
        last = line
        while at >= 0:
            if place in self.whole:
                return line
            found = self._closed.match(data, at + 1, at + self.span)
            end = found.end() if found else min(len(data), at + self.span)
            before, last = last, last + data.count(b"\n", at, end)
            between = range(before + 1, last)
            if any(self._is_record(data[int(ends[n - 1]) + 1 : int(ends[n])]) for n in between):
                return line
            if found is None:
                return None if more and end == len(data) else line
            after = self._cell_end.match(data, end)
            if after is None:
                return line
            if data[after.end() : after.end() + 1] != self.separator:
                break
            place, at = self._find_open(data, after.end() + 1, place + 1)
        return last if place + 1 == self.width else line

    def _is_record(self, line: bytes) -> bool:
        cells = line.split(self.separator)
        if len(cells) != self.width:
            return False
        if self.numeric is None:
            return any(map(is_number, cells))
        return all(is_number(cells[at]) for at in self.numeric)

    def cut(self, data: bytes) -> int:
        """Return the end of the last whole record."""
        end = end_of_lines(data)
        undecided = self.scan(data[:end], more=True).undecided
        return end if undecided < 0 else undecided

    def join_records(self, data: bytes, scan: QuoteScan, broken: bytes) -> bytes:
        """Return a text with one line per record and repaired stray marks.

        A record that cannot be repaired becomes empty cells followed by ``broken``.
        """
        octets = np.frombuffer(data, dtype=np.uint8).copy()
        octets[scan.ends[scan.continues()]] = ord(" ")
        parts, done = list[bytes](), 0
        text = octets.tobytes()
        for line, place, at in scan.stray:
            end = int(scan.ends[line])
            cell, *others = text[at:end].split(self.separator)
            start = int(scan.ends[line - 1]) + 1 if line else 0
            too_many = place + 1 + len(others) > self.width
            if place in self.whole or too_many or any(b'"' in other for other in others):
                parts += text[done:start], self.separator * self.width + broken
            else:
                escaped = b'"' + cell.replace(b'"', b'""') + b'"'
                parts += text[done:at], self.separator.join([escaped, *others])
            done = end
        return b"".join([*parts, text[done:]])
