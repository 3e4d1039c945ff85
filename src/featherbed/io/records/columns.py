"""Files of columns: delimited text, JSON lines or Parquet, compressed or not, read in blocks.

A column has a role: named by the caller or guessed by its name. Records of delimited text that span
several lines are first joined into one line each. polars splits blocks into cells; text that it
refuses (odd quotation marks) goes through Python's own reader, which is slower.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import DataError
from featherbed.io.opening import (
    FOREIGN,
    Progress,
    TextBlocks,
    end_of_lines,
    find_file,
    json_text,
    list_names,
    locate_column,
    match_names,
    parse_object,
)

if TYPE_CHECKING:
    import polars as pl

BROKEN = "broken"  # the name of the column that marks lines broken as a whole
UNCLOSED, NO_OBJECT = "a quotation mark is not closed", "it is no JSON object"
NESTED, NO_TEXT = "a list or an object is no key", "bytes that are not UTF-8"
FAULTS = (UNCLOSED, NO_OBJECT, NESTED, NO_TEXT)  # texts of that column
SAMPLE = 200  # lines inspected before reading

# Common names without case, blanks and punctuation. The first group with a match decides; two
# matches in one group are ambiguous.
COMMON_NAMES: dict[str, tuple[str, ...]] = {
    "user": (
        "userid users userkey uid useridx useruuid",
        "memberid customerid custid clientid reviewerid accountid personid buyerid viewerid "
        "visitorid profileid raterid",
        "user username usr member customer cust client reviewer account person buyer viewer rater "
        "reader authorid userno",
        "u reviewername profilename author",
    ),
    "item": (
        "itemid items itemkey iid itemidx itemuuid",
        "movieid filmid productid asin isbn isbn13 isbn10 bookid songid trackid artistid showid "
        "animeid gameid appid jokeid businessid restaurantid recipeid courseid articleid newsid "
        "videoid postid sku skuid goodsid contentid beerid mid",
        "item movie film product book song track artist show anime game app joke business "
        "restaurant recipe course article itemno tconst imdbid tmdbid docid documentid placeid "
        "venueid eventid wineid",
        "i parentasin itemname productname movietitle booktitle title name",
    ),
    "rating": (
        "rating ratings userrating",
        "score stars star starrating overall ratingvalue reviewrating reviewoverall reviewscore "
        "bookrating movierating value grade rate userscore",
        "r label target preference",
    ),
    "count": (
        "count counts plays playcount listens listencount clicks clickcount views viewcount",
        "quantity qty purchases visits frequency weight events interactions confidence n",
        "hours hoursplayed minutesplayed playtime watchtime",
    ),
    "time": (
        "timestamp time unixreviewtime unixtime unixtimestamp ts epoch ratingtime ratingtimestamp "
        "timestampms",
        "date datetime reviewdate ratingdate createdat created createdtime createddate reviewtime "
        "updatedat dateadded day t",
    ),
    "key": (
        "itemid movieid bookid productid asin isbn songid trackid artistid businessid gameid appid "
        "animeid iid",
        "id key item",
    ),
    "title": (
        "title titles name",
        "movietitle booktitle productname producttitle itemname itemtitle songtitle trackname "
        "label",
    ),
    "group": ("genres genre groups group", "categories category tags tag type"),
}


@dataclass(frozen=True)
class Block:
    """Some lines of a file: cells, the line number of a row, and the rows that are blank lines."""

    frame: pl.DataFrame
    line: Callable[[int], int]
    blanks: Callable[[], list[int]] = list


@dataclass
class Columns:
    """A file of columns: names, a sample of the cells (None where missing), and its blocks.

    Every block is a polars frame of the wanted columns, named "0", "1", ..., as text where the file
    is text, and a column that marks broken lines. ``odd`` holds the types of columns that are
    neither numbers nor text nor dates; ``later`` collects, while blocks are read, names that are
    not among the columns, ``problem`` says why the first skipped line was skipped.
    """

    path: Path
    kind: str
    names: list[str]
    sample: list[list[str | None]]
    blocks: Callable[[Sequence[int]], Iterator[Block]]
    header: bool = True
    delimiter: str = ""
    odd: dict[int, str] = field(default_factory=dict)
    later: set[str] = field(default_factory=set)
    problem: str = ""

    @property
    def unit(self) -> str:
        """The word for one record in messages."""
        return "row" if self.kind == "Parquet" else "line"

    def refuse_odd(self, roles: Mapping[str, int]) -> None:
        """Refuse columns of lists, objects and the like where numbers or text are required."""
        for role, place in roles.items():
            if place in self.odd:
                raise DataError(
                    f"{self.path}: column {self.names[place]!r} for the {role} is of the type "
                    f"{self.odd[place]}: name one of numbers or text"
                )


def is_common(name: str) -> bool:
    """Whether columns of rating files often have this name."""
    return any(
        match_names(COMMON_NAMES[role], [name]) for role in ("user", "item", "rating", "time")
    )


def guess_column(
    role: str, names: Sequence[str], where: str, exclude: Sequence[int] = ()
) -> int | None:
    """Return the place of the column with a common name for a role, None if there is none.

    >>> guess_column("user", ["asin", "reviewerID", "overall"], "a.csv")
    1
    """
    found = match_names(COMMON_NAMES[role], names, exclude)
    if len(found) > 1:
        several = " and ".join(repr(names[place]) for place in found)
        raise DataError(
            f"{where}: {several} may both hold the {role}: name one with {role}=NAME"
            f" (command line: --set columns.{role}=NAME)"
        )
    return found[0] if found else None


def find_columns(
    names: Sequence[str],
    given: Mapping[str, str | int | None],
    required: Sequence[str],
    where: str,
    *,
    header: bool,
) -> dict[str, int]:
    """Return role -> place for the roles in ``given``; without a header they come in that order."""
    roles = {
        role: locate_column(role, wanted, names, where)
        for role, wanted in given.items()
        if wanted is not None
    }
    for place, role in enumerate(given):
        if role in roles:
            continue
        if header:
            found = guess_column(role, names, where, list(roles.values()))
        else:
            found = place if place < len(names) and place not in roles.values() else None
        if found is not None:
            roles[role] = found
    missing = [role for role in required if role not in roles]
    if missing:
        example = f"{missing[0]}=NAME (command line: --set columns.{missing[0]}=NAME)"
        if missing == ["rating"]:
            example += "; clicks or purchases without ratings: featherbed train ranking"
        raise DataError(
            f"{where}: no column for {' and '.join(missing)}; its columns are {list_names(names)}: "
            f"name it with {example}"
        )
    double = [role for role in roles if list(roles.values()).count(roles[role]) > 1]
    if double:
        raise DataError(
            f"{where}: column {names[roles[double[0]]]!r} is given for {' and '.join(double)}: "
            "name different ones"
        )
    return {role: roles[role] for role in given if role in roles}


ROWS = 1 << 21  # rows of a Parquet file read at once


def open_columns(
    path: str | Path,
    *,
    encoding: str | None = None,
    progress: Progress | None = None,
    min_columns: int = 3,
    lenient: bool = False,
) -> Columns:
    """Inspect a file and return its columns.

    With ``lenient``, text that is not UTF-8 is read as ISO-8859-1, and wanted cells of delimited
    text may span several lines.
    """
    found = find_file(path)
    try:
        with found.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise DataError(f"{found} cannot be read: {error.strerror}") from None
    if start == b"PAR1":
        return _open_parquet(found, progress)
    if start in FOREIGN:
        raise DataError(f"{found} is {FOREIGN[start]}")
    text = TextBlocks(found, encoding, progress)
    text.lenient = lenient
    head = text.head if text.is_whole else text.head[: end_of_lines(text.head)]
    if not head.strip():
        text.close()
        raise DataError(
            f"{found} is empty: give a file with lines of data"
            if text.is_whole
            else f"{found} has no line in its first megabyte: it is no text"
        )
    if _is_json(head):
        return _open_json(text, head)
    return open_delimited(text, head, min_columns)


def _is_json(head: bytes) -> bool:
    """Whether a text consists of JSON objects, one per line or in a list."""
    start = head.lstrip()
    listed = start[:1] == b"[" and start[1:].lstrip()[:1] in (b"{", b"")
    return listed or (
        start[:1] == b"{"
        and any(parse_object(line) is not None for line in start.splitlines()[:SAMPLE])
    )


def _open_json(text: TextBlocks, head: bytes) -> Columns:
    rows = [row for line in head.splitlines() if (row := parse_object(line)) is not None]
    if not rows:
        text.close()
        raise DataError(
            f"{text.path} is not JSON lines: "
            'one object such as {"user": 1, "item": 2, "rating": 5} per line'
        )
    names = list(dict.fromkeys(name for row in rows for name in row))
    sample = [[json_text(row.get(name)) for name in names] for row in rows]
    later: set[str] = set()

    def blocks(wanted: Sequence[int]) -> Iterator[Block]:
        for first, data in text.blocks():
            later.update(name for name in _sample_names(data) if name not in names)
            yield _json_block(data, first, [names[at] for at in wanted])

    return Columns(text.path, "JSON lines", names, sample, blocks, later=later)


def _sample_names(data: bytes) -> set[str]:
    """Return the names in some lines of a block, including the last."""
    found, step = set[str](), max(1, len(data) // SAMPLE)
    for at in (*range(0, len(data), step), len(data) - 1):
        begin = data.rfind(b"\n", 0, at) + 1
        found.update(parse_object(data[begin : data.find(b"\n", at)]) or ())
    return found


def _json_block(data: bytes, first: int, names: Sequence[str]) -> Block:
    import polars as pl

    def line(row: int) -> int:
        filled = [n for n, text in enumerate(data.split(b"\n")) if text.strip()]
        return first + filled[row]

    try:
        frame = pl.read_ndjson(data, schema=dict.fromkeys(names, pl.String))
    except pl.exceptions.PolarsError:
        return Block(_read_json_slowly(data, names), line)
    # keys may be lists or objects instead of text
    if any(frame[name].str.contains(r"^[\[{]").any() for name in names[:2]):
        return Block(_read_json_slowly(data, names), line)
    columns = [pl.col(name).alias(str(place)) for place, name in enumerate(names)]
    return Block(frame.select(*columns, pl.lit(None, dtype=pl.String).alias(BROKEN)), line)


def _read_json_slowly(data: bytes, names: Sequence[str]) -> pl.DataFrame:
    """Return the cells line by line; lines without an object or with nested keys are broken."""
    import polars as pl

    columns: list[list[str | None]] = [[] for _ in (*names, BROKEN)]
    for text in data.split(b"\n"):
        if text.strip():
            row = parse_object(text)
            for column, name in zip(columns[:-1], names, strict=True):
                column.append(None if row is None else json_text(row.get(name)))
            nested = row and any(isinstance(row.get(name), list | dict) for name in names[:2])
            columns[-1].append(NO_OBJECT if row is None else NESTED if nested else None)
    schema = dict.fromkeys((*map(str, range(len(names))), BROKEN), pl.String)
    return pl.DataFrame(dict(zip(schema, columns, strict=True)), schema=schema)


def _open_parquet(path: Path, progress: Progress | None) -> Columns:
    parquet, arrow = import_module("pyarrow.parquet"), import_module("pyarrow")
    try:
        file = parquet.ParquetFile(path)
        names = list(file.schema_arrow.names)
        start = next(file.iter_batches(batch_size=SAMPLE), None)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {str(error)[:100]}") from None
    if start is None or not start.num_rows:
        raise DataError(f"{path} is empty: give a file with lines of data")
    cells = [
        [None if cell is None else str(cell) for cell in column.to_pylist()]
        for column in start.columns
    ]
    sample = [list(row) for row in zip(*cells, strict=True)]

    def blocks(wanted: Sequence[int]) -> Iterator[Block]:
        first, total = 1, file.metadata.num_rows
        columns = [names[at] for at in wanted]
        try:
            for batch in file.iter_batches(batch_size=ROWS, columns=columns):
                yield _parquet_block(batch, columns, first)
                first += batch.num_rows
                if progress is not None:
                    progress(first - 1, total)
        except (arrow.ArrowException, OSError) as error:
            raise DataError(
                f"{path}, row {first} or later, cannot be read: {str(error)[:100]}"
            ) from None

    odd = {at: str(kind) for at, kind in enumerate(file.schema_arrow.types) if _is_odd(kind)}
    return Columns(path, "Parquet", names, sample, blocks, odd=odd)


def _is_odd(kind: Any) -> bool:
    """Whether an arrow type is neither a number nor text nor a date."""
    types = import_module("pyarrow").types
    kind = getattr(kind, "storage_type", kind)
    if types.is_dictionary(kind):
        return _is_odd(kind.value_type)
    known = (
        "boolean integer floating decimal128 null string large_string string_view date timestamp "
        "binary large_binary binary_view fixed_size_binary"
    )
    return not any(getattr(types, f"is_{name}")(kind) for name in known.split())


def _parquet_block(batch: Any, names: Sequence[str], first: int) -> Block:
    import polars as pl

    columns = [_from_arrow(batch.column(name)) for name in names]
    frame = pl.DataFrame([column.alias(str(place)) for place, (column, _) in enumerate(columns)])
    broken = [wrong for _, wrong in columns if wrong is not None]
    marks = pl.any_horizontal(*broken) if broken else pl.lit(False)
    return Block(
        frame.with_columns(pl.when(marks).then(pl.lit(NO_TEXT)).alias(BROKEN)),
        lambda row: first + row,
    )


def _from_arrow(column: Any) -> tuple[pl.Series, pl.Series | None]:
    """Return a column for polars, UUIDs as text, and a mask of bytes that are no text."""
    import polars as pl

    column = getattr(column, "storage", column)
    series = pl.Series(column)
    if series.dtype in (pl.Categorical, pl.Enum):
        return series.cast(pl.String), None
    if series.dtype != pl.Binary:
        return series, None
    if str(column.type) == "fixed_size_binary[16]":
        digits = series.bin.encode("hex")
        cuts = ((0, 8), (8, 4), (12, 4), (16, 4), (20, 12))
        parts = [digits.str.slice(*cut) for cut in cuts]
        return pl.select(pl.concat_str(parts, separator="-")).to_series(), None
    try:
        return series.cast(pl.String), None
    except pl.exceptions.PolarsError:
        text = pl.Series([_decode(cell) for cell in series], dtype=pl.String)
        return text, text.is_null() & series.is_not_null()


def _decode(cell: bytes | None) -> str | None:
    try:
        return None if cell is None else cell.decode()
    except UnicodeDecodeError:
        return None


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
            elif self.spaced:  # doubled marks inside a cell follow a blank, too
                mark = re.escape(self.separator) + rb' "(?!"[^' + re.escape(self.separator)
                block = re.sub(mark + rb"\r\n])", self.separator + b'"', block)
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
        """Return the cells; if polars refuses the block, of its halves, and so on."""
        import polars as pl

        frame = self._read_fast(block, quoted, wanted)
        if frame is not None:
            return frame
        cut = block.index(b"\n", len(block) // 2 - 1) + 1
        if len(block) <= PIECE or cut == len(block):
            return self._read_slowly(block, quoted, wanted)
        halves = (block[:cut], block[cut:])
        return pl.concat([self._frame(half, quoted, wanted) for half in halves])

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
