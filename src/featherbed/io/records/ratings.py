"""Ratings and titles of items from files of any common format; generated and streamed ratings.

Files are read in blocks and every line is checked; skipped lines are counted and reported. Memory
is needed for the keys and for one block. Columns grow block by block: in memory while short, in an
unnamed file once long, which has no entry in its folder and disappears with its last array, however
the process ends.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from featherbed.errors import ArgumentError, DataError, MissingExtra
from featherbed.io.opening import Progress, read_lines
from featherbed.io.records.columns import (
    BROKEN,
    FAULTS,
    Block,
    Columns,
    find_columns,
    guess_column,
    is_number,
    open_columns,
)
from featherbed.packed.keys import IntegerKeys, TextKeys

if TYPE_CHECKING:
    import polars as pl

MAX_ROWS = 8_000_000  # in memory; longer columns are in files
BLOCK = 1 << 21  # rows of a long column processed at once
S = TypeVar("S", bound=np.generic)
T = TypeVar("T")
ToIds = Callable[[NDArray[np.int64]], NDArray[np.int32]]


def new_array(
    rows: int, dtype: DTypeLike, folder: str | Path | None = None, *, stored: bool
) -> NDArray[Any]:  # [rows]
    """Return an array of zeros, if ``stored`` in an unnamed file of ``folder``.

    The default folder is the temporary folder of the system.

    >>> type(new_array(3, np.int32, stored=True)).__name__
    'memmap'
    """
    if not stored or rows == 0:
        return np.zeros(rows, dtype=dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(rows * np.dtype(dtype).itemsize)
        return np.memmap(file, dtype=dtype, mode="r+", shape=(rows,))


def is_stored(array: NDArray[Any]) -> bool:
    """Whether an array, or the array it is a view of, is in a file."""
    found: Any = array
    while found is not None:
        if isinstance(found, np.memmap):
            return True
        found = getattr(found, "base", None)
    return False


def block_slices(rows: int, block: int = BLOCK) -> Iterator[slice]:
    """Yield the slices that divide ``rows`` into blocks."""
    yield from (slice(begin, min(begin + block, rows)) for begin in range(0, rows, block))


def count_ids(ids: NDArray[np.integer], rows: int) -> NDArray[np.int64]:  # [n] -> [rows]
    """Return how often each id occurs, block by block.

    >>> count_ids(np.array([2, 0, 2]), 4).tolist()
    [1, 0, 2, 0]
    """
    totals = np.zeros(rows, dtype=np.int64)
    for block in block_slices(len(ids)):
        totals += np.bincount(ids[block], minlength=rows)
    return totals


def prefetch(values: Iterator[T]) -> Iterator[T]:
    """Yield values, computing the next one in a thread while the last one is used.

    >>> list(prefetch(iter("abc")))
    ['a', 'b', 'c']
    """
    end: Any = object()
    with ThreadPoolExecutor(1, "featherbed-prefetch") as worker:
        coming = worker.submit(next, values, end)
        while (value := coming.result()) is not end:
            coming = worker.submit(next, values, end)
            yield value


def group_by_user(
    users: NDArray[np.integer], num_users: int, size: int = 8 * BLOCK
) -> Iterator[NDArray[np.int64]]:
    """Yield the places of the ratings of groups of users, about ``size`` ratings per group.

    >>> [places.tolist() for places in group_by_user(np.array([1, 0, 2, 1]), 3, size=2)]
    [[1], [0, 3], [2]]
    """
    if len(users) <= size:
        yield np.arange(len(users))
        return
    group = np.cumsum(count_ids(users, num_users)) // size
    for number in np.unique(group).tolist():
        begin, end = np.searchsorted(group, [number, number + 1]).tolist()
        found = []
        for block in block_slices(len(users)):
            here = users[block]
            found.append(np.flatnonzero((here >= begin) & (here < end)) + block.start)
        yield np.concatenate(found)


def select_rows(
    column: NDArray[Any], mask: NDArray[np.bool_], folder: str | Path | None = None
) -> NDArray[Any]:  # [n], [n] -> [m]
    """Return the rows of a column where ``mask`` is true, in a file if the column is in one."""
    out = new_array(int(np.count_nonzero(mask)), column.dtype, folder, stored=is_stored(column))
    at = 0
    for block in block_slices(len(column)):
        part = column[block][mask[block]]
        out[at : at + len(part)] = part
        at += len(part)
    return out


class Spool(Generic[S]):
    """A column that is appended to, then read; beyond ``max_rows`` it is kept in a file.

    >>> spool = Spool(np.int32, max_rows=4)
    >>> for _ in range(3):
    ...     spool.append(np.arange(2))
    >>> spool.array().tolist(), is_stored(spool.array())
    ([0, 1, 0, 1, 0, 1], True)
    """

    def __init__(
        self, dtype: type[S], folder: str | Path | None = None, *, max_rows: int = MAX_ROWS
    ) -> None:
        self.dtype, self.folder, self.max_rows = np.dtype(dtype), folder, max_rows
        self.rows = 0
        self._parts: list[NDArray[S]] = []
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        return self.rows

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, part: NDArray[Any]) -> None:  # [n]
        """Add rows."""
        self._parts.append(np.ascontiguousarray(part, dtype=self.dtype))
        self.rows += len(part)
        if self.rows > self.max_rows:
            if self._file is None:
                # closed by __del__
                self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
            for waiting in self._parts:
                self._file.write(waiting.data.cast("B"))
            self._parts.clear()

    def blocks(self, sizes: Sequence[int]) -> Iterator[NDArray[S]]:
        """Yield all rows in order, in blocks of the given sizes."""
        if self._file is None:
            column, begin = self.array(), 0
            for size in sizes:
                yield column[begin : begin + size]
                begin += size
            return
        self._file.seek(0)
        for size in sizes:
            yield np.frombuffer(self._file.read(size * self.dtype.itemsize), dtype=self.dtype)

    def array(self) -> NDArray[S]:
        """Return the whole column, a memory map if it is long."""
        if self._file is None:
            if len(self._parts) != 1:
                self._parts = [np.concatenate([np.zeros(0, dtype=self.dtype), *self._parts])]
            return self._parts[0]
        self._file.flush()
        return np.memmap(self._file, dtype=self.dtype, mode="r+", shape=(self.rows,))


class KeyColumn:
    """The keys of one side as they arrive; ids are assigned once all keys are known.

    Integers are kept as they are, texts as places in a pool of the distinct texts of each block.
    Ids follow the order of the keys (numerical if all keys are integers, else of the UTF-8 bytes),
    never the order of the lines.
    """

    def __init__(self, folder: str | Path | None = None, *, max_rows: int = MAX_ROWS) -> None:
        self.folder, self.max_rows = folder, max_rows
        self._places: Spool[np.int64] = Spool(np.int64, folder, max_rows=max_rows)
        self._sizes: list[int] = []
        self._is_text: list[bool] = []
        self._pools: list[Any] = []  # arrow arrays of distinct texts
        self._pooled = 0
        self._low, self._high = 2**63 - 1, -(2**63)

    def append(self, keys: pl.Series) -> None:  # Int64 or String [n], without nulls
        """Add the keys of a block."""
        if len(keys) == 0:
            return
        self._sizes.append(len(keys))
        self._is_text.append(not keys.dtype.is_integer())
        if keys.dtype.is_integer():
            found = keys.to_numpy()
            self._low = min(self._low, int(found.min()))
            self._high = max(self._high, int(found.max()))
            self._places.append(found)
            return
        encoded = keys.to_arrow().cast(import_module("pyarrow").large_string()).dictionary_encode()
        self._places.append(encoded.indices.to_numpy().astype(np.int64) + self._pooled)
        self._pools.append(encoded.dictionary)
        self._pooled += len(encoded.dictionary)

    def finish(self) -> tuple[NDArray[np.int32], IntegerKeys | TextKeys]:
        """Return the id of every row, and the keys in the order of their ids."""
        if any(self._is_text):
            return self._finish_texts()
        numbers, to_ids = self._number_integers()
        self._check_count(len(numbers))
        return self._map(to_ids, to_ids), IntegerKeys(numbers)

    def _blocks(self) -> Iterator[tuple[NDArray[np.int64], bool]]:
        return zip(self._places.blocks(self._sizes), self._is_text, strict=True)

    def _map(self, integers: ToIds, texts: ToIds) -> NDArray[np.int32]:
        ids: Spool[np.int32] = Spool(np.int32, self.folder, max_rows=self.max_rows)
        for block, is_text in self._blocks():
            ids.append(texts(block) if is_text else integers(block))
        return ids.array()

    def _number_integers(self) -> tuple[NDArray[np.int64], ToIds]:
        """Return the distinct integers, ascending, and a function from integers to places."""
        blocks = (block for block, is_text in self._blocks() if not is_text)
        low, span = self._low, self._high - self._low + 1
        if span <= max(1 << 20, 2 * self._places.rows):  # dense: a table of the whole range
            present = np.zeros(span, dtype=bool)
            for block in blocks:
                present[block - low] = True
            places = np.cumsum(present, dtype=np.int32) - np.int32(1)
            return np.flatnonzero(present) + low, lambda block: places[block - low]
        numbers = np.zeros(0, dtype=np.int64)
        for block in blocks:
            numbers = np.union1d(numbers, block)

        def to_ids(block: NDArray[np.int64]) -> NDArray[np.int32]:
            order = np.argsort(block)  # sorted queries scan the numbers instead of jumping
            ids = np.empty(len(block), dtype=np.int32)
            ids[order] = np.searchsorted(numbers, block[order])
            return ids

        return numbers, to_ids

    def _finish_texts(self) -> tuple[NDArray[np.int32], TextKeys]:
        arrow = import_module("pyarrow")
        numbers, to_ids = np.zeros(0, dtype=np.int64), None
        if not all(self._is_text):
            numbers, to_ids = self._number_integers()
        pools = [arrow.array(numbers).cast(arrow.large_string()), *self._pools]
        keys, places = _merge_pools(arrow.chunked_array(pools, type=arrow.large_string()))
        self._pools.clear()
        self._check_count(len(keys))
        return self._map(
            lambda block: places[to_ids(block) if to_ids else block],
            lambda block: places[block + len(numbers)],
        ), keys

    def _check_count(self, count: int) -> None:
        if count >= 2**31:
            raise DataError(f"{count:,} different keys: at most {2**31 - 1:,} can be numbered")


def _merge_pools(pools: Any) -> tuple[TextKeys, NDArray[np.int32]]:
    """Return the distinct texts of all pools by their bytes, and the place of every pool entry."""
    import polars as pl

    encoded = pools.dictionary_encode()
    codes = np.concatenate(
        [np.zeros(0, dtype=np.int32), *(chunk.indices.to_numpy() for chunk in encoded.chunks)]
    )
    texts = pl.Series(encoded.chunk(encoded.num_chunks - 1).dictionary)
    del encoded
    order = texts.arg_sort()
    rank = np.empty(len(texts), dtype=np.int32)
    rank[order.to_numpy()] = np.arange(len(texts), dtype=np.int32)
    return _to_keys(texts.gather(order)), rank[codes]


def _to_keys(texts: pl.Series) -> TextKeys:  # String [n]
    stored = texts.rechunk().to_arrow().cast(import_module("pyarrow").large_string())
    _, offsets, data = stored.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[stored.offset : stored.offset + len(stored) + 1]
    text = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, dtype=np.uint8)
    return TextKeys(text[int(ends[0]) : int(ends[-1])], ends[1:] - ends[0])


GOOD, BLANK, MISSING, UNPARSABLE, ABSURD = range(5)  # fates of a line
REASONS = {MISSING: "missing", UNPARSABLE: "unparsable"}  # for skipping a line
MAX_RATING = 1e6  # magnitude: NaN, infinity and larger ratings are refused
NULLS = ("", "na", "n/a", "null", "none", "\\n", "-")  # spellings of a missing rating
MAX_EXACT = 2.0**53  # integers below are exact in float64
EPOCH = 1e8  # numbers from here on are times, in seconds or less since 1970
TIMES = ("%Y-%m-%dT%H:%M:%S%.f%z", "%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%dT%H:%M", "%Y-%m-%d")


@dataclass(frozen=True)
class ParsedLines:
    """The good lines of a block, and the fate of every line."""

    users: pl.Series
    items: pl.Series
    values: NDArray[np.float32]
    times: NDArray[np.int64] | None
    fates: NDArray[np.uint8]


def parse_lines(
    frame: pl.DataFrame, *, decimal_comma: bool = False, strip: bool = True
) -> ParsedLines:
    """Parse a frame with the columns user, item, rating and, if there is a fourth one, time.

    Without a column of ratings every value is 1.

    ``strip`` removes blanks around keys.

    >>> import polars as pl
    >>> cells = {"0": ["a", "b", ""], "1": ["7", "x", "7"], "2": ["3.5", "good", "4"]}
    >>> parsed = parse_lines(pl.DataFrame(cells | {"broken": [None] * 3}))
    >>> parsed.users.to_list(), parsed.values.tolist(), parsed.fates.tolist()
    (['a'], [3.5], [0, 3, 2])
    """
    import polars as pl

    users, items = (parse_keys(frame[place], strip=strip) for place in ("0", "1"))
    if "2" in frame.columns:
        values, fates = parse_ratings(frame["2"], decimal_comma=decimal_comma)
    else:
        values, fates = np.ones(len(frame), np.float32), np.zeros(len(frame), np.uint8)
    times = None
    if "3" in frame.columns:
        times, wrong = parse_times(frame["3"])
        fates = np.where(wrong == MISSING, wrong, np.where(fates == GOOD, wrong, fates))
    for column in (users, items):
        if column.null_count():
            fates[column.is_null().to_numpy()] = MISSING
    if frame[BROKEN].null_count() < len(frame):
        broken = frame[BROKEN].str.strip_chars().fill_null("") != ""
        fates[broken.to_numpy()] = UNPARSABLE
    fates = fates.astype(np.uint8)
    if not fates.any():
        return ParsedLines(users, items, values, times, fates)
    fates[np.logical_and.reduce([_is_empty(frame[name]) for name in frame.columns])] = BLANK
    good = fates == GOOD
    mask = pl.Series(good)
    users, items = (parse_keys(column.filter(mask), strip=strip) for column in (users, items))
    return ParsedLines(users, items, values[good], None if times is None else times[good], fates)


def _is_empty(column: pl.Series) -> NDArray[np.bool_]:
    import polars as pl

    if column.dtype != pl.String:
        return column.is_null().to_numpy()
    return (column.str.strip_chars().fill_null("") == "").to_numpy()


def parse_keys(column: pl.Series, *, strip: bool = True) -> pl.Series:
    """Return keys as Int64 if all are integers in plain notation, else as String.

    The same key has the same text in both: ``007`` is not 7, but 7.0 in a column of floats is.
    ``strip`` removes blanks around a key.
    """
    import polars as pl

    kind = column.dtype
    if kind.is_integer():
        high = column.max()
        return column.cast(pl.String if isinstance(high, int) and high >= 2**63 else pl.Int64)
    if kind.is_float():
        whole = (column.floor() == column) & (column.abs() < MAX_EXACT)
        texts = pl.DataFrame({"x": column, "whole": whole}).select(
            pl.when(pl.col("x").is_finite() & pl.col("whole"))
            .then(pl.col("x").cast(pl.Int64, strict=False).cast(pl.String))
            .when(pl.col("x").is_finite())
            .then(pl.col("x").cast(pl.String))
        )
        return parse_keys(texts.to_series(), strip=strip)
    if kind != pl.String:
        column = column.cast(pl.String, strict=False)
    numbers = _parse_integers(column)
    if numbers is not None:
        return numbers
    stripped = column.str.strip_chars()
    column = (stripped if strip else column).set(stripped == "", None)
    numbers = _parse_integers(column)
    return column if numbers is None else numbers


def _parse_integers(column: pl.Series) -> pl.Series | None:
    """Return integers if all texts are integers in plain notation."""
    import polars as pl

    if len(column) and column.null_count() == len(column):
        return None
    for part in (column[:1000], column):
        numbers = part.cast(pl.Int64, strict=False)
        if numbers.null_count() > part.null_count():
            return None
    odd = column.str.starts_with("0") & (column.str.len_bytes() > 1)
    odd = odd | column.str.starts_with("+") | column.str.starts_with("-0")
    return None if odd.any() else numbers


def parse_ratings(
    column: pl.Series, *, decimal_comma: bool = False
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return ratings, 0 for lines without one, and the fate of each line."""
    import polars as pl

    numbers, missing = column.cast(pl.Float64, strict=False), column.is_null()
    if column.dtype == pl.Boolean or column.dtype.is_temporal():
        numbers = pl.Series([None] * len(column), dtype=pl.Float64)
    if column.dtype == pl.String and numbers.null_count():
        texts = column.str.strip_chars()
        if decimal_comma:
            texts = texts.str.replace(",", ".", literal=True)
        numbers = texts.cast(pl.Float64, strict=False)
        missing = texts.is_null() | texts.str.to_lowercase().is_in(NULLS)
    fates = np.full(len(column), GOOD, dtype=np.uint8)
    fates[numbers.is_null().to_numpy()] = UNPARSABLE
    fates[missing.to_numpy()] = MISSING
    with np.errstate(over="ignore"):
        values = numbers.fill_null(0.0).to_numpy().astype(np.float32)
    fates[~(np.abs(values) <= MAX_RATING)] = ABSURD
    return values, fates


def parse_times(column: pl.Series) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return times, 0 for lines without one, and the fate of each line.

    Numbers are kept (rounded down), dates become seconds since 1970.
    """
    import polars as pl

    missing = column.is_null()
    if column.dtype in (pl.Date, pl.Datetime):
        numbers = column.cast(pl.Datetime("us")).dt.epoch("s")
    elif column.dtype == pl.String:
        numbers = column.cast(pl.Int64, strict=False)
        if numbers.null_count():
            texts = column.str.strip_chars()
            missing = missing | (texts == "").fill_null(True)
            numbers = _coalesce(
                texts.cast(pl.Int64, strict=False), _floor(texts.cast(pl.Float64, strict=False))
            )
            if numbers.null_count():
                numbers = _coalesce(numbers, _parse_dates(texts))
    else:
        is_float = column.dtype.is_float()
        numbers = _floor(column) if is_float else column.cast(pl.Int64, strict=False)
    fates = np.full(len(column), GOOD, dtype=np.uint8)
    fates[numbers.is_null().to_numpy()] = UNPARSABLE
    fates[missing.to_numpy()] = MISSING
    return numbers.fill_null(0).to_numpy(), fates


def _coalesce(first: pl.Series, second: pl.Series) -> pl.Series:
    import polars as pl

    return pl.select(pl.coalesce(first, second)).to_series()


def _floor(column: pl.Series) -> pl.Series:
    import polars as pl

    return column.fill_nan(None).floor().cast(pl.Int64, strict=False)


def _parse_dates(texts: pl.Series) -> pl.Series:
    """Return ISO 8601 dates, with or without time of day and offset (default UTC), in seconds."""
    import polars as pl

    texts = (
        texts.str.replace_all("/", "-", literal=True)
        .str.replace(" UTC", "Z")
        .str.replace(r"(\d) (\d)", "${1}T${2}")
        .str.replace(r"[zZ]$", "+0000")
        .str.replace(r"([+-]\d\d):?(\d\d)$", "${1}${2}")
    )
    found = pl.Series([None] * len(texts), dtype=pl.Int64)
    for form in TIMES:
        if found.null_count() == 0:
            break
        parse = texts.str.to_date if form == "%Y-%m-%d" else texts.str.to_datetime
        found = _coalesce(found, parse(form, strict=False).cast(pl.Datetime("us")).dt.epoch("s"))
    return found


POLICIES = ("last", "first", "mean", "refuse", "keep")  # for pairs rated more than once
COUNTS = ("lines", "kept", *REASONS.values(), "duplicates")


@dataclass(frozen=True)
class Ratings:
    """(user, item, rating) triples with ids from 0, the keys of the ids, and times if known.

    >>> values, keys = np.array([4.0, 3.0], np.float32), ("u1", "u2")
    >>> ratings = Ratings(np.array([0, 1]), np.array([0, 0]), values, keys, ("film",))
    >>> len(ratings), ratings.num_users
    (2, 2)
    """

    users: NDArray[np.integer]
    items: NDArray[np.integer]
    values: NDArray[np.float32]
    user_keys: Sequence[str]
    item_keys: Sequence[str]
    times: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def num_users(self) -> int:
        """Number of users."""
        return len(self.user_keys)

    @property
    def num_items(self) -> int:
        """Number of items."""
        return len(self.item_keys)

    def take(self, index: NDArray[np.int64]) -> Ratings:
        """Return the triples at ``index``; users and items keep their ids."""
        columns = (self.users[index], self.items[index], self.values[index])
        times = None if self.times is None else self.times[index]
        return Ratings(*columns, self.user_keys, self.item_keys, times)

    def select(self, mask: NDArray[np.bool_], folder: str | Path | None = None) -> Ratings:
        """Return the triples where ``mask`` is true, in files of ``folder`` if these are in files.

        Users and items keep their ids.
        """
        users, items, values = (
            select_rows(column, mask, folder) for column in (self.users, self.items, self.values)
        )
        times = None if self.times is None else select_rows(self.times, mask, folder)
        return Ratings(users, items, values, self.user_keys, self.item_keys, times)

    def split(
        self, seed: int, validation: float = 0.1, test: float = 0.1
    ) -> tuple[Ratings, Ratings, Ratings]:
        """Return random training, validation and test triples."""
        order = np.random.default_rng(seed).permutation(len(self))
        cuts = [int(len(self) * (1 - validation - test)), int(len(self) * (1 - test))]
        train, middle, last = (self.take(np.sort(part)) for part in np.split(order, cuts))
        return train, middle, last


@dataclass(frozen=True)
class RatingsReading:
    """Ratings read from a file: role -> column, number of lines by fate, and notes for the user."""

    ratings: Ratings
    columns: dict[str, str]
    counts: dict[str, int]
    notes: list[str] = field(default_factory=list)


def read_ratings(
    path: str | Path,
    *,
    user: str | int | None = None,
    item: str | int | None = None,
    rating: str | int | None = None,
    time: str | int | None = None,
    strict: bool = False,
    duplicates: str = "last",
    low: float | None = None,
    high: float | None = None,
    workplace: str | Path | None = None,
    progress: Progress | None = None,
    encoding: str | None = None,
    max_rows: int = MAX_ROWS,
    implicit: bool = False,
    min_keys: int = 2,
) -> RatingsReading:
    """Read (user, item, rating, time) from delimited text, JSON lines or Parquet.

    Text may be compressed by gzip, zstd, bzip2 or xz.

    Args:
        path: the file; its format, delimiter and header are detected.
        user: the column of the user keys, by name or by number from 1; guessed if None.
        item: the column of the item keys, likewise.
        rating: the column of the ratings, likewise.
        time: the column of the times, likewise; optional in the file.
        strict: refuse the first line with a missing or unparsable value instead of skipping and
            counting it; a rating that is NaN, infinite or beyond ±1,000,000 is always refused.
        duplicates: policy for a pair rated more than once: keep the "last" or "first" rating (by
            time, else by line), their "mean", "refuse" the file, or "keep" all.
        low: minimum rating; a lower one is an error.
        high: maximum rating; a higher one is an error.
        workplace: folder for the columns of long files, by default the system's temporary folder.
        progress: called with the number of bytes read and the size of the file.
        encoding: of a text file; default UTF-8, or ISO-8859-1 for ``::`` files that are not UTF-8.
        max_rows: number of rows beyond which columns are kept in files.
        implicit: the lines are events, such as clicks. ``rating`` is optional and is guessed among
            names of counts first, then of ratings; it is 1 without such a column. Counts (column
            "count" of the result) of a repeated pair are added.
        min_keys: minimum number of users, and of items.

    >>> path = getfixture("tmp_path") / "ratings.csv"
    >>> _ = path.write_text("userId,movieId,rating\\nann,7,4.5\\nbob,7,good\\nbob,12,3\\n")
    >>> reading = read_ratings(path)
    >>> reading.columns, list(reading.ratings.item_keys)
    ({'user': 'userId', 'item': 'movieId', 'rating': 'rating'}, ['7', '12'])
    >>> reading.counts["kept"], reading.counts["unparsable"]
    (2, 1)
    """
    _check_arguments(duplicates, low, high, workplace)
    file = open_columns(path, encoding=encoding, progress=progress)
    given = {"user": user, "item": item, "rating": rating, "time": time}
    required = ("user", "item") if implicit else ("user", "item", "rating")
    given |= _count_column(file, given) if implicit else {}
    counted = implicit and given["rating"] is not None
    roles = find_columns(file.names, given, required, str(file.path), header=file.header)
    value = "count" if counted else "rating"
    if implicit and (counted or "rating" not in roles):
        duplicates = "sum"
    notes = [] if file.header else ["no header: columns are counted from 1"]
    if time is None and "time" in roles and (doubt := _doubt_time(file, roles["time"])):
        notes.append(f"column {file.names[roles.pop('time')]!r} was not used as the time: {doubt}")
    file.refuse_odd(roles)
    counts: Counter[str] = Counter()
    options: dict[str, Any] = {"folder": workplace, "max_rows": max_rows}
    sides = {"user": KeyColumn(**options), "item": KeyColumn(**options)}
    values, times = Spool(np.float32, **options), Spool(np.int64, **options)
    for block, parsed in parse_blocks(file, roles, counts, strict, value):
        _check_range(file, block, parsed, low, high, value)
        sides["user"].append(parsed.users)
        sides["item"].append(parsed.items)
        values.append(parsed.values)
        if parsed.times is not None:
            times.append(parsed.times)
    if len(values) == 0:
        raise no_usable_line(file, counts)
    with ThreadPoolExecutor(2, "featherbed-keys") as pool:
        (users, user_keys), (items, item_keys) = pool.map(KeyColumn.finish, sides.values())
    for side, keys in (("user", user_keys), ("item", item_keys)):
        if len(keys) < min_keys:
            raise DataError(
                f"{file.path} has {'events' if implicit else 'ratings'} of one {side} only, "
                f"{keys[0]!r}: nothing can be learned"
            )
    columns = (users, items, values.array(), user_keys, item_keys)
    ratings = Ratings(*columns, times.array() if "time" in roles else None)
    ratings = resolve_duplicates(ratings, duplicates, counts, notes, workplace)
    notes += _note_late_time(file, roles)
    counts["kept"] = len(ratings)
    named = {role: file.names[place] for role, place in roles.items()}
    return RatingsReading(
        ratings,
        {value if role == "rating" else role: name for role, name in named.items()},
        {name: counts[name] for name in COUNTS},
        [*notes, *_final_notes(ratings, counts, implicit)],
    )


def _count_column(file: Columns, given: dict[str, str | int | None]) -> dict[str, int]:
    """Return the place from 1 of a column of counts, or of times as third column without header."""
    if given["rating"] is not None:
        return {}
    if file.header:
        found = guess_column("count", file.names, str(file.path))
        return {} if found is None else {"rating": found + 1}
    if len(file.names) == 3 and given["time"] is None:
        cells = [row[2] for row in file.sample if row[2] is not None]
        if all(not is_number(cell) or float(cell) >= EPOCH for cell in cells):
            return {"time": 3}
    return {}


def _check_arguments(
    duplicates: str, low: float | None, high: float | None, workplace: str | Path | None
) -> None:
    if duplicates not in POLICIES:
        raise ArgumentError(f"duplicates={duplicates!r}: use one of {', '.join(POLICIES)}")
    if low is not None and high is not None and not low <= high:
        raise ArgumentError(f"low={low}, high={high}: low must not be above high")
    for package in ("polars", "pyarrow"):
        if find_spec(package) is None:
            raise MissingExtra(package, "train", "reading ratings")
    if workplace is not None:
        try:
            Path(workplace).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(
                f"workplace={str(workplace)!r}: not a folder that can be made: {error.strerror}"
            ) from None


def _doubt_time(file: Columns, place: int) -> str:
    """Return why a guessed column is hardly the time, "" if it may be."""
    import polars as pl

    cells = [row[place] for row in file.sample if (row[place] or "").strip()]
    _, fates = parse_times(pl.Series(cells, dtype=pl.String))
    if not cells or float(np.mean(fates == GOOD)) <= 0.5:
        return "no numbers or ISO dates"
    if 2 * len(cells) < len(file.sample):
        return (
            "few of the first lines have it; time=NAME "
            f"(command line: --set columns.time={file.names[place]}) uses it"
        )
    return ""


def _note_late_time(file: Columns, roles: dict[str, int]) -> list[str]:
    """Return a note on a time column that was found too late to be read."""
    for name in sorted(file.later) if "time" not in roles else ():
        if guess_column("time", [name], str(file.path)) is not None:
            return [
                f"column {name!r} was not read: no line of the first megabyte has it "
                "(null in the first line is enough)"
            ]
    return []


def parse_blocks(
    file: Columns, roles: dict[str, int], counts: Counter[str], strict: bool, value: str = "rating"
) -> Iterator[tuple[Block, ParsedLines]]:
    """Yield parsed blocks; count the fates of their lines, raise an error for refused ones.

    ``value`` is the word for the numbers: rating or count.
    """
    for block in prefetch(file.blocks(list(roles.values()))):
        frame = block.frame
        if "rating" not in roles and "time" in roles:
            frame = frame.rename({"2": "3"})
        parsed = parse_lines(frame, decimal_comma=file.delimiter == ";", strip=file.kind == "text")
        fates = parsed.fates
        empty = np.flatnonzero(fates == BLANK)
        if len(empty):
            fates[np.setdiff1d(empty, block.blanks())] = MISSING
        totals = np.bincount(fates, minlength=ABSURD + 1)
        counts["lines"] += len(fates) - int(totals[BLANK])
        for fate, name in REASONS.items():
            counts[name] += int(totals[fate])
        refused = MISSING if strict else ABSURD
        worst = refused if totals[refused:].any() else MISSING
        if totals[worst:].any() and (worst == refused or not file.problem):
            row = int(np.flatnonzero(fates >= worst)[0])
            problem = _describe_problem(block, row, int(fates[row]), list(roles), value)
            file.problem = f"{file.unit} {block.line(row)}: {problem}"
            if worst == refused:
                raise DataError(f"{file.path}, {file.problem}")
        yield block, parsed


def no_usable_line(file: Columns, counts: Counter[str]) -> DataError:
    """Return the error for a file of which every line was skipped; it names the first fault."""
    skipped = _list_skipped(counts)
    return DataError(
        f"{file.path}: no usable line among {counts['lines']:,}"
        + (f" ({skipped}), {file.problem}" if skipped else ": it has a header alone")
    )


def _describe_problem(block: Block, row: int, fate: int, roles: list[str], value: str) -> str:
    cells = dict(zip([*roles, BROKEN], block.frame.row(row), strict=True))
    if cells[BROKEN] in FAULTS:
        return str(cells[BROKEN])
    if (cells[BROKEN] or "").strip():
        return "it cannot be cut into the columns of the first lines"
    if fate == MISSING:
        empty = (role for role in roles if not str(cells[role] or "").strip())
        return f"no {next((value if role == 'rating' else role for role in empty), 'value')}"
    if fate == ABSURD:
        low = 0 if value == "count" else -MAX_RATING
        return (
            f"{value} {cells['rating']!r} is not a number from {low:,.0f} to "
            f"{MAX_RATING:,.0f}: correct or remove the line (an empty {value} is skipped), or "
            f"rescale the {value}s"
        )
    if "time" in roles:
        _, fates = parse_times(block.frame[str(roles.index("time"))][row : row + 1])
        if fates[0] != GOOD:
            return (
                f"time {str(cells['time'])[:60]!r} is not a number or an ISO date like 2024-05-31"
            )
    return f"{value} {str(cells['rating'])[:60]!r} is not a number"


def _check_range(
    file: Columns,
    block: Block,
    parsed: ParsedLines,
    low: float | None,
    high: float | None,
    name: str,
) -> None:
    values = parsed.values
    wrong = np.zeros(len(values), dtype=bool)
    if low is not None:
        wrong |= values < np.float32(low)
    if high is not None:
        wrong |= values > np.float32(high)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        row = int(np.flatnonzero(parsed.fates == GOOD)[at])
        found = f"{file.path}, {file.unit} {block.line(row)}: {name} {values[at]:g} is"
        if high is None:
            raise DataError(f"{found} below {low:g}: remove or correct the line")
        if low is None:
            raise DataError(f"{found} above {high:g}: remove or correct the line")
        raise DataError(f"{found} outside the range {low:g} to {high:g}")


def resolve_duplicates(
    ratings: Ratings,
    policy: str,
    counts: Counter[str],
    notes: list[str],
    folder: str | Path | None = None,
) -> Ratings:
    """Apply a policy to pairs rated more than once; count them and add a note.

    >>> values = np.array([1, 3], np.float32)
    >>> ratings = Ratings(np.array([0, 0]), np.array([0, 0]), values, ["u"], ["i"])
    >>> resolve_duplicates(ratings, "mean", Counter(), []).values.tolist()
    [2.0]
    """
    keep = np.ones(len(ratings), dtype=bool)
    for places in group_by_user(ratings.users, ratings.num_users):
        pairs = ratings.users[places].astype(np.int64) * ratings.num_items + ratings.items[places]
        ordered = np.sort(pairs)
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        counts["duplicates"] += len(repeated)
        if len(repeated) and policy == "refuse":
            user, item = divmod(int(repeated[0]), ratings.num_items)
            names = f"user {ratings.user_keys[user]!r} and item {ratings.item_keys[item]!r}"
            raise DataError(
                f"{names} are rated more than once: choose a policy: {', '.join(POLICIES)}"
            )
        if len(repeated) and policy != "keep":
            marked = np.zeros(ratings.num_users, dtype=bool)
            marked[repeated // ratings.num_items] = True
            among = np.flatnonzero(marked[ratings.users[places]])  # few: compared one by one
            among = among[np.isin(pairs[among], repeated)]
            _drop_duplicates(ratings, policy, pairs[among], places[among], keep)
    again = counts["duplicates"]
    if not again:
        return ratings
    by = "line" if ratings.times is None else "time"
    effects = {
        "last": f"the last by {by} counts",
        "first": f"the first by {by} counts",
        "mean": "their mean counts",
        "sum": "their counts are added",
        "keep": "all are kept",
    }
    what = (
        "events of pairs that occurred" if policy == "sum" else "ratings of pairs that were rated"
    )
    notes.append(f"{again:,} {what} before: {effects[policy]}")
    return ratings if policy == "keep" else ratings.select(keep, folder)


def _drop_duplicates(
    ratings: Ratings,
    policy: str,
    pairs: NDArray[np.int64],
    places: NDArray[np.int64],
    keep: NDArray[np.bool_],
) -> None:
    """Unmark the dropped ratings of repeated pairs; write their mean or sum to the kept one."""
    # stable: without times the order of lines decides
    order = np.lexsort((pairs,) if ratings.times is None else (ratings.times[places], pairs))
    same = pairs[order][1:] == pairs[order][:-1]
    kept = np.append(True, ~same) if policy == "first" else np.append(~same, True)
    keep[places[order[~kept]]] = False
    if policy in ("mean", "sum"):
        values = ratings.values[places[order]].astype(np.float64)
        begins = np.flatnonzero(np.append(True, ~same))
        sizes = np.diff(np.append(begins, len(values))) if policy == "mean" else 1
        ratings.values[places[order[kept]]] = np.add.reduceat(values, begins) / sizes


def _list_skipped(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[name]:,} {name}" for name in REASONS.values() if counts[name])


def _final_notes(ratings: Ratings, counts: Counter[str], implicit: bool) -> list[str]:
    skipped = _list_skipped(counts)
    notes = [f"lines skipped: {skipped}"] if skipped else []
    if 2 * sum(counts[name] for name in REASONS.values()) > counts["lines"]:
        notes.append("more than half of the lines were skipped: are these the right columns?")
    if is_constant(ratings) and not implicit:
        notes.append(f"every rating is {ratings.values[0]:g}: there is nothing to tell apart")
    return notes


def is_constant(ratings: Ratings) -> bool:
    """Whether all ratings are equal."""
    first = ratings.values[0]
    return all(bool((ratings.values[block] == first).all()) for block in block_slices(len(ratings)))


@dataclass(frozen=True)
class ItemTitles:
    """The title of every item by id, None if unknown; ``groups`` likewise, None without groups.

    >>> ItemTitles(["Heat", None], [("Action",), ()]).count
    1
    """

    names: list[str | None]
    groups: list[tuple[str, ...]] | None

    @property
    def count(self) -> int:
        """Number of items with a title."""
        return sum(name is not None for name in self.names)


def read_titles(
    path: str | Path,
    item_keys: Sequence[str],
    *,
    key: str | int | None = None,
    title: str | int | None = None,
    group: str | int | None = None,
    encoding: str | None = None,
) -> ItemTitles:
    """Read titles of items from any file format of ``read_ratings``, such as ``movies.dat``.

    Without a header the columns are key, title and group. Groups are separated by ``|``. Text that
    is not UTF-8 is read as ISO-8859-1. Keys that are not among ``item_keys`` are ignored.

    >>> path = getfixture("tmp_path") / "movies.dat"
    >>> _ = path.write_text("1::Heat (1995)::Action|Crime\\n2::Sabrina (1995)::Comedy\\n")
    >>> read_titles(path, ["2", "3"])
    ItemTitles(names=['Sabrina (1995)', None], groups=[('Comedy',), ()])
    """
    import polars as pl

    file = open_columns(path, encoding=encoding, min_columns=2, lenient=True)
    given = {"key": key, "title": title, "group": group}
    roles = find_columns(file.names, given, ("key", "title"), str(file.path), header=file.header)
    if not file.header and group is None and len(file.names) != 3:
        roles.pop("group", None)
    file.refuse_odd({role: place for role, place in roles.items() if role != "group"})
    id_of = {name: place for place, name in enumerate(item_keys)}
    names: list[str | None] = [None] * len(id_of)
    groups: list[tuple[str, ...]] = [()] * len(id_of)
    for block in file.blocks(list(roles.values())):
        keys = parse_keys(block.frame["0"], strip=file.kind == "text").cast(pl.String)
        texts = block.frame["1"].cast(pl.String, strict=False).str.strip_chars()
        grouped = block.frame["2"].to_list() if "group" in roles else [None] * len(keys)
        for name, text, group_text in zip(keys, texts, grouped, strict=True):
            place = id_of.get(name or "")
            if place is not None and text:
                names[place] = text
                groups[place] = _parse_groups(group_text)
    titles = ItemTitles(names, groups if "group" in roles else None)
    if not titles.count:
        known = ", ".join(repr(item_keys[place]) for place in range(min(3, len(item_keys))))
        raise DataError(
            f"{file.path}: none of the {len(item_keys):,} items (such as {known}) has its key in "
            f"column {file.names[roles['key']]!r}"
        )
    return titles


def _parse_groups(cell: Any) -> tuple[str, ...]:
    """Return the groups of a text such as ``Action|Crime`` or of a list."""
    if isinstance(cell, str) and cell.startswith("["):
        try:
            cell = json.loads(cell)
        except ValueError:
            cell = cell.strip("[]").replace("'", "").replace(", ", "|")
    parts = cell.split("|") if isinstance(cell, str) else cell or ()
    return tuple(text for part in parts if (text := str(part).strip()))


Triples = tuple[NDArray[np.str_], NDArray[np.str_], NDArray[np.float32]]


def stream_ratings(path: str | Path, batch: int = 1024, separator: str = "::") -> Iterator[Triples]:
    """Yield (users, items, ratings) of a ratings file in batches, reading as it goes.

    Keys stay text. The file may be compressed.

    >>> path = getfixture("tmp_path") / "ratings.dat"
    >>> _ = path.write_text("7::31::4::0\\n7::32::5::0\\n")
    >>> [(users.tolist(), values.tolist()) for users, _, values in stream_ratings(path)]
    [(['7', '7'], [4.0, 5.0])]
    """
    if batch < 1:
        raise ArgumentError(f"batch={batch}: give a number of ratings of at least 1")
    lines = enumerate(read_lines(path, "latin-1"), 1)
    while rows := [_parse(line, number, path, separator) for number, line in islice(lines, batch)]:
        users, items, values = zip(*rows, strict=True)
        yield np.array(users), np.array(items), np.array(values, dtype=np.float32)


def _parse(line: str, number: int, path: str | Path, separator: str) -> tuple[str, str, float]:
    fields = line.rstrip("\n").split(separator)
    try:
        return fields[0], fields[1], float(fields[2])
    except (IndexError, ValueError):
        raise DataError(
            f"{path}, line {number}: expected User{separator}Item{separator}Rating, "
            f"found {line.strip()[:60]!r}"
        ) from None


def read_movielens(folder: str | Path) -> Ratings:
    """Read MovieLens' ``ratings.dat``: ``UserID::MovieID::Rating::Timestamp``."""
    path = Path(folder) / "ratings.dat"
    batches = list(stream_ratings(path, 1 << 20))
    if not batches:
        raise DataError(f"{path} holds no ratings")
    users, items, values = (np.concatenate(column) for column in zip(*batches, strict=True))
    user_keys, user_ids = np.unique(users.astype(np.int64), return_inverse=True)
    item_keys, item_ids = np.unique(items.astype(np.int64), return_inverse=True)
    keys = (tuple(map(str, user_keys)), tuple(map(str, item_keys)))
    return Ratings(user_ids, item_ids, values, *keys)


def make_ratings(
    num_users: int = 2000,
    num_items: int = 1000,
    count: int = 260_000,
    groups: int = 12,
    dim: int = 12,
    seed: int = 0,
) -> Ratings:
    """Generate ratings with planted structure: groups of users and items, Zipf popularity.

    rating = 3.5 + taste . style + noise, clipped to 1..5; a taste mixes the tastes of two groups.
    """
    rng = np.random.default_rng(seed)

    def vectors(rows: int) -> NDArray[np.float64]:
        centers = rng.normal(size=(groups, dim)) / dim**0.25
        share = rng.beta(0.4, 0.4, size=(rows, 1))
        first, second = rng.integers(groups, size=(2, rows))
        mixed: NDArray[np.float64] = share * centers[first] + (1 - share) * centers[second]
        return mixed

    tastes, styles = vectors(num_users), vectors(num_items)
    popularity = 1.0 / np.arange(1, num_items + 1) ** 0.8
    users = rng.integers(num_users, size=count)
    items = rng.choice(num_items, size=count, p=popularity / popularity.sum())
    pairs = np.unique(users * num_items + items)
    users, items = pairs // num_items, pairs % num_items
    affinity = np.einsum("nd,nd->n", tastes[users], styles[items])
    scores = 3.5 + 1.2 * affinity + rng.normal(0, 0.4, len(users))
    values = np.clip(scores, 1, 5).astype(np.float32)
    keys = tuple(map(str, range(num_users))), tuple(map(str, range(num_items)))
    return Ratings(users, items, values, *keys)
