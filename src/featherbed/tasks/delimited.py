"""Delimited text: which delimiter, which header, and the cells in blocks.

Records of several lines are first brought onto one line each. polars cuts blocks into cells; what it refuses (odd quotation
marks) goes through Python's own reader, which is slower.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from featherbed.errors import DataError
from featherbed.tasks.frames import BROKEN, SAMPLE, UNCLOSED, Block, Columns
from featherbed.tasks.lines import SPAN, Held, Lines, Quotes, is_number, whole_lines
from featherbed.tasks.roles import is_usual

if TYPE_CHECKING:
    import polars as pl

DELIMITERS = ("::", "\t", ",", ";", "|", " ")
PIECE = 1 << 18  # bytes that are read anew when a block has an odd line
INSIDE = b"\x1f"  # what two-character delimiters are replaced by


def delimited(lines: Lines, text: bytes, least: int) -> Columns:
    """Return the columns of a file of delimited text that begins with ``text``; there must be ``least`` of them.

    Where the text is read leniently the wanted cells too may go over several lines, as titles do.
    """
    spanning = lines.lenient
    sample = text.decode(lines.encoding or "utf-8", errors="replace")
    delimiter, rows = _sniffed(sample, least)
    if delimiter is None:
        lines.close()
        first = sample.strip().splitlines()[0][:60]
        raise DataError(
            f"{lines.path}: no columns between tabs, commas, ; | :: or blanks in its first lines, such as {first!r}"
        )
    lines.lenient |= delimiter == "::"
    header = _is_header(rows)
    width = (
        Counter(len(row) for row in rows[header:]).most_common(1)[0][0]
        if rows[header:]
        else len(rows[0])
    )
    names = [name.strip() or str(place) for place, name in enumerate(rows[0], 1)] if header else []
    if (
        header
        and width > len(names)
        and any(cell.strip() for row in rows[1:] for cell in row[len(names) :])
    ):
        lines.close()
        raise DataError(
            f"{lines.path}: the header names {len(names)} columns, but the lines have {width}: {', '.join(names)}"
        )
    names += [str(place) for place in range(len(names) + 1, width + 1)]
    skipped = (
        1 + next(n for n, line in enumerate(sample.split("\n")) if line.strip()) if header else 0
    )
    quotes = _has_quotes(sample, delimiter)
    shown: list[list[str | None]] = [
        [*row, *[None] * len(names)][: len(names)] for row in rows[header:]
    ]
    numbers = tuple(
        at
        for at in range(len(names))
        if sum(is_number(row[at]) for row in shown) * 10 > 9 * len(shown)
    )
    spaced = quotes and f'{delimiter} "' in sample
    reader = _Reader(
        lines, delimiter, len(names), skipped, quotes, spaced, numbers or None, spanning
    )
    return Columns(lines.path, "text", names, shown, reader.blocks, header, delimiter)


def _has_quotes(text: str, delimiter: str) -> bool:
    """Whether quotation marks hold cells together; between tabs they often are letters, so there most must be closed."""
    if delimiter != "\t":
        return delimiter not in ("::", " ")
    cells = [cell.strip() for line in text.split("\n") for cell in line.split("\t")]
    opened = [cell for cell in cells if cell.startswith('"')]
    return sum(len(cell) > 1 and cell.endswith('"') for cell in opened) * 10 > 9 * len(opened)


def _split(text: str, delimiter: str, count: int) -> list[list[str]]:
    """Return the cells of the first lines that are not blank."""
    if delimiter in ("::", " "):
        lines = [line for line in text.split("\n", 2 * count) if line.strip()][:count]
        return [line.split("::") if delimiter == "::" else line.split() for line in lines]
    quoted = _has_quotes(text, delimiter)
    if quoted and '"' in text:
        first = next(line for line in text.split("\n") if line.strip())
        data = (text if text.endswith("\n") else text + "\n").encode()
        quotes = Quotes(delimiter.encode(), len(next(_csv_rows([first], delimiter, quoted))))
        text = quotes.one_line_each(data, quotes.held(data), b"").decode()
    lines = [line for line in text.split("\n", 2 * count) if line.strip()][:count]
    return [row for row in _csv_rows(lines, delimiter, quoted) if "".join(row).strip()]


def _csv_rows(lines: list[str], delimiter: str, quoted: bool) -> Iterator[list[str]]:
    """Yield the cells of every line, none where a line cannot be cut."""
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    for line in lines:
        try:
            yield next(
                csv.reader([line], delimiter=delimiter, quoting=quoting, skipinitialspace=True), []
            )
        except csv.Error:
            yield []


def _sniffed(text: str, least: int) -> tuple[str | None, list[list[str]]]:
    """Return the delimiter that cuts most lines into the same number of columns, and the first lines cut by it."""
    best: tuple[tuple[float, bool, int], str | None, list[list[str]]] = ((0.0, False, 0), None, [])
    for delimiter in DELIMITERS:
        rows = _split(text, delimiter, SAMPLE)
        width, count = Counter(map(len, rows)).most_common(1)[0] if rows else (0, 0)
        if width < 2 or (delimiter == " " and best[1] is not None):
            continue
        agree = round(count / len(rows), 1) / (1 if width >= least else 10)
        score = (agree, delimiter == "::", width)
        if score > best[0]:
            best = (score, delimiter, rows)
    return best[1], best[2]


def _is_header(rows: list[list[str]]) -> bool:
    """Whether the first line names the columns: no number in it, and a number below one of its cells or a usual name."""
    if any(is_number(cell) for cell in rows[0]):
        return False
    if any(is_usual(cell) for cell in rows[0]):
        return True
    below = rows[1:20]
    return any(
        sum(is_number(row[at]) for row in below if at < len(row)) * 2 > len(below)
        for at in range(len(rows[0]))
        if below
    )


@dataclass
class _Reader:
    lines: Lines
    delimiter: str
    width: int
    skipped: int  # lines up to the end of the header
    quotes: bool  # quotation marks may hold cells together
    spaced: bool  # a blank stands before quotation marks
    numbers: tuple[int, ...] | None  # places where numbers stand
    spanning: bool  # wanted cells may go over several lines

    @property
    def mark(self) -> bytes:
        return {"::": INSIDE, " ": b"\t"}.get(self.delimiter, self.delimiter.encode())

    def _quoted(self, data: bytes) -> bool:
        """Whether quotation marks begin fields; elsewhere they are letters."""
        if not self.quotes or b'"' not in data:
            return False
        starts = (self.mark + b'"', b'\n"', *((self.mark + b' "',) if self.spaced else ()))
        return data.startswith(b'"') or any(start in data for start in starts)

    def _cut(self, data: bytes, quotes: Quotes) -> int:
        return quotes.cut(self._unescaped(data)) if self._quoted(data) else whole_lines(data)

    def _unescaped(self, data: bytes) -> bytes:
        """Return a text whose quotation marks inside cells are doubled, where it had backslashes before them."""
        if b'\\"' not in data:
            return data
        return re.sub(rb'\\"(?!' + re.escape(self.mark) + rb"|\r?\n)", b'""', data)

    def blocks(self, wanted: Sequence[int]) -> Iterator[Block]:
        """Yield the cells of the wanted columns."""
        skipped, span = self.skipped, min(SPAN, 2 * self.lines.block)
        whole = () if self.spanning else tuple(wanted)
        quotes = Quotes(self.mark, self.width, whole=whole, numbers=self.numbers, span=span)
        for line, data in self.lines.blocks(lambda data: self._cut(data, quotes)):
            begin = 0
            for _ in range(skipped):
                begin = data.index(b"\n", begin) + 1
            block = data[begin:] if skipped else data
            first, skipped = line + skipped, 0
            if self.delimiter == "::":
                block = block.replace(b"::", INSIDE)
            elif self.delimiter == " ":
                block = re.sub(rb"(?m)^\t+|\t+$", b"", re.sub(rb"[ \t]+", b"\t", block))
            elif self.spaced:
                block = block.replace(self.mark + b' "', self.mark + b'"')
            if block:
                yield self._block(block, first, wanted, quotes)

    def _block(self, block: bytes, first: int, wanted: Sequence[int], quotes: Quotes) -> Block:
        quoted, held = self._quoted(block), None
        if quoted:
            block = self._unescaped(block)
            held = quotes.held(block)
            block = quotes.one_line_each(block, held, UNCLOSED.encode())
        return Block(
            self._frame(block, quoted, wanted),
            lambda row: first + _line_of(held, row),
            lambda: _blanks(block),
        )

    def _frame(self, block: bytes, quoted: bool, wanted: Sequence[int]) -> pl.DataFrame:
        """Return the cells, piece by piece if the whole cannot be read fast."""
        import polars as pl

        frame = self._fast(block, quoted, wanted)
        if frame is not None:
            return frame
        if len(block) <= PIECE:
            return self._slow(block, quoted, wanted)
        frames, begin = list[pl.DataFrame](), 0
        while begin < len(block):
            end = block.index(b"\n", min(begin + PIECE, len(block)) - 1) + 1
            piece, begin = block[begin:end], end
            found = self._fast(piece, quoted, wanted)
            frames.append(self._slow(piece, quoted, wanted) if found is None else found)
        return pl.concat(frames)

    def _fast(self, block: bytes, quoted: bool, wanted: Sequence[int]) -> pl.DataFrame | None:
        import polars as pl

        names = [str(place) for place in range(self.width)] + [BROKEN]
        head = self.mark.join(name.encode() for name in names) + b"\n"
        try:
            frame = pl.read_csv(
                head + block,
                columns=[*sorted({*map(str, wanted)}, key=int), BROKEN],
                separator=self.mark.decode(),
                quote_char='"' if quoted else None,
                infer_schema=False,
                truncate_ragged_lines=True,
            )
        except pl.exceptions.PolarsError:
            return None
        if quoted and len(frame) != block.count(b"\n"):
            return None
        return frame.select(
            *(pl.col(str(at)).alias(str(n)) for n, at in enumerate(wanted)), pl.col(BROKEN)
        )

    def _slow(self, block: bytes, quoted: bool, wanted: Sequence[int]) -> pl.DataFrame:
        import polars as pl

        columns: list[list[str | None]] = [[] for _ in (*wanted, BROKEN)]
        lines = block.decode().removesuffix("\n").split("\n")
        for line, row in zip(lines, _csv_rows(lines, self.mark.decode(), quoted), strict=True):
            for column, at in zip(columns, (*wanted, self.width), strict=True):
                column.append((row[at] or None) if at < len(row) else None)
            if line and not row:
                columns[-1][-1] = "x"
        names = [*map(str, range(len(wanted))), BROKEN]
        return pl.DataFrame(
            dict(zip(names, columns, strict=True)), schema=dict.fromkeys(names, pl.String)
        )


def _line_of(held: Held | None, row: int) -> int:
    return row if held is None or not held.joined else int(held.rows()[row])


def _blanks(block: bytes) -> list[int]:
    """Return which lines are blank."""
    rows, row, place = list[int](), 0, 0
    for found in re.finditer(rb"(?m)^[ \t]*\n", block):
        row += block.count(b"\n", place, found.start())
        place = found.start()
        rows.append(row)
    return rows
