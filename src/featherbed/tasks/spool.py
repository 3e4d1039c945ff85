"""Columns that grow block by block: in memory while they are short, in a nameless file once they are long.

A nameless file takes no name in the folder and is gone when its last array is, however the process ends.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from featherbed.errors import DataError
from featherbed.packed.keys import IntegerKeys, TextKeys

if TYPE_CHECKING:
    import polars as pl

LONG = 8_000_000  # rows; about 256 MB of text. Longer columns lie in files
BLOCK = 1 << 21  # rows taken at a time from a long column
S = TypeVar("S", bound=np.generic)
T = TypeVar("T")


def new_array(
    rows: int, dtype: DTypeLike, folder: str | Path | None = None, *, stored: bool
) -> NDArray[Any]:  # [rows]
    """Return an array of zeros, in a nameless file of ``folder`` (else of the system's temporary folder) if ``stored``.

    >>> type(new_array(3, np.int32, stored=True)).__name__
    'memmap'
    """
    if not stored or rows == 0:
        return np.zeros(rows, dtype=dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(rows * np.dtype(dtype).itemsize)
        return np.memmap(file, dtype=dtype, mode="r+", shape=(rows,))


def is_stored(array: NDArray[Any]) -> bool:
    """Whether an array, or what it is a view of, lies in a file."""
    found: Any = array
    while found is not None:
        if isinstance(found, np.memmap):
            return True
        found = getattr(found, "base", None)
    return False


def cuts(rows: int, block: int = BLOCK) -> Iterator[slice]:
    """Yield the slices that cut ``rows`` into blocks."""
    yield from (slice(begin, min(begin + block, rows)) for begin in range(0, rows, block))


def ahead(things: Iterator[T]) -> Iterator[T]:
    """Yield things, the next of which is made while the last is worked on.

    >>> list(ahead(iter("abc")))
    ['a', 'b', 'c']
    """
    nothing: Any = object()
    with ThreadPoolExecutor(1, "featherbed-ahead") as maker:
        coming = maker.submit(next, things, nothing)
        while (thing := coming.result()) is not nothing:
            coming = maker.submit(next, things, nothing)
            yield thing


def by_user(
    users: NDArray[np.integer], num_users: int, most: int = 8 * BLOCK
) -> Iterator[NDArray[np.int64]]:
    """Yield where the ratings of some users are, about ``most`` at a time, until all users have been.

    >>> [places.tolist() for places in by_user(np.array([1, 0, 2, 1]), 3, most=2)]
    [[1], [0, 3], [2]]
    """
    if len(users) <= most:
        yield np.arange(len(users))
        return
    totals = np.zeros(num_users, dtype=np.int64)
    for cut in cuts(len(users)):
        totals += np.bincount(users[cut], minlength=num_users)
    share = np.cumsum(totals) // most
    for number in np.unique(share).tolist():
        begin, end = np.searchsorted(share, [number, number + 1]).tolist()
        found = []
        for cut in cuts(len(users)):
            here = users[cut]
            found.append(np.flatnonzero((here >= begin) & (here < end)) + cut.start)
        yield np.concatenate(found)


def chosen(
    column: NDArray[Any], keep: NDArray[np.bool_], folder: str | Path | None = None
) -> NDArray[Any]:  # [n], [n] -> [m]
    """Return the kept rows of a column, in a file if the column is in one."""
    made = new_array(int(np.count_nonzero(keep)), column.dtype, folder, stored=is_stored(column))
    at = 0
    for cut in cuts(len(column)):
        part = column[cut][keep[cut]]
        made[at : at + len(part)] = part
        at += len(part)
    return made


class Spool(Generic[S]):
    """A column that is appended to, then read.

    >>> spool = Spool(np.int32, long=4)
    >>> for _ in range(3):
    ...     spool.append(np.arange(2))
    >>> spool.array().tolist(), is_stored(spool.array())
    ([0, 1, 0, 1, 0, 1], True)
    """

    def __init__(
        self, dtype: type[S], folder: str | Path | None = None, *, long: int = LONG
    ) -> None:
        self.dtype, self.folder, self.long = np.dtype(dtype), folder, long
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
        if self.rows > self.long:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - lives as long as the spool
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
        """Return the whole column; a memory map if it is long."""
        if self._file is None:
            if len(self._parts) != 1:
                self._parts = [np.concatenate([np.zeros(0, dtype=self.dtype), *self._parts])]
            return self._parts[0]
        self._file.flush()
        return np.memmap(self._file, dtype=self.dtype, mode="r+", shape=(self.rows,))


class KeyColumn:
    """The keys of one side as they arrive, numbered once all are known.

    Whole numbers are kept as they are. Texts are kept as places in a pool of the different texts of each block. Ids
    follow the order of the keys (numbers by size if all keys are numbers, else UTF-8 bytes), never that of the lines.
    """

    def __init__(self, folder: str | Path | None = None, *, long: int = LONG) -> None:
        self.folder, self.long = folder, long
        self._places: Spool[np.int64] = Spool(np.int64, folder, long=long)
        self._sizes: list[int] = []
        self._texts: list[bool] = []
        self._pools: list[Any] = []  # arrow's arrays of different texts
        self._pooled = 0
        self._low, self._high = 2**63 - 1, -(2**63)

    def append(self, keys: pl.Series) -> None:  # Int64 or String [n], nothing missing
        """Add the keys of a block."""
        if len(keys) == 0:
            return
        numbers = keys.dtype.is_integer()
        self._sizes.append(len(keys))
        self._texts.append(not numbers)
        if numbers:
            found = keys.to_numpy()
            self._low, self._high = (
                min(self._low, int(found.min())),
                max(self._high, int(found.max())),
            )
            self._places.append(found)
            return
        encoded = keys.to_arrow().cast(import_module("pyarrow").large_string()).dictionary_encode()
        self._places.append(encoded.indices.to_numpy().astype(np.int64) + self._pooled)
        self._pools.append(encoded.dictionary)
        self._pooled += len(encoded.dictionary)

    def finish(self) -> tuple[NDArray[np.int32], IntegerKeys | TextKeys]:
        """Return the id of every row, and the keys in the order of their ids."""
        if any(self._texts):
            return self._finish_texts()
        numbers, ids_of = self._numbered()
        self._refuse_many(len(numbers))
        return self._mapped(lambda block, _text: ids_of(block)), IntegerKeys(numbers)

    def _mapped(self, ids_of: Any) -> NDArray[np.int32]:
        ids: Spool[np.int32] = Spool(np.int32, self.folder, long=self.long)
        for block, text in zip(self._places.blocks(self._sizes), self._texts, strict=True):
            ids.append(ids_of(block, text))
        return ids.array()

    def _number_blocks(self) -> Iterator[NDArray[np.int64]]:
        for block, text in zip(self._places.blocks(self._sizes), self._texts, strict=True):
            if not text:
                yield block

    def _numbered(self) -> tuple[NDArray[np.int64], Any]:
        """Return the different numbers, rising, and a function from numbers to their places among them."""
        span = self._high - self._low + 1
        if span <= max(
            1 << 20, 2 * self._places.rows
        ):  # close together: a table of all numbers between
            present = np.zeros(span, dtype=bool)
            for block in self._number_blocks():
                present[block - self._low] = True
            places = np.cumsum(present, dtype=np.int32) - np.int32(1)
            return np.flatnonzero(present) + self._low, lambda block: places[block - self._low]
        parts, size, merged = [np.zeros(0, dtype=np.int64)], 0, 0
        for block in self._number_blocks():
            parts.append(np.unique(block))
            size += len(parts[-1])
            if size > 2 * merged + 4 * BLOCK:
                parts = [np.unique(np.concatenate(parts))]
                size = merged = len(parts[0])
        numbers = np.unique(np.concatenate(parts))

        def ids_of(block: NDArray[np.int64]) -> NDArray[np.int32]:
            order = np.argsort(block)  # sorted queries walk through the numbers instead of jumping
            ids = np.empty(len(block), dtype=np.int32)
            ids[order] = np.searchsorted(numbers, block[order])
            return ids

        return numbers, ids_of

    def _finish_texts(self) -> tuple[NDArray[np.int32], TextKeys]:
        arrow = import_module("pyarrow")
        if all(self._texts):
            numbers, ids_of = np.zeros(0, dtype=np.int64), None
        else:
            numbers, ids_of = self._numbered()
        pools = [arrow.array(numbers).cast(arrow.large_string()), *self._pools]
        keys, places = _merged(arrow.chunked_array(pools, type=arrow.large_string()))
        self._pools.clear()
        self._refuse_many(len(keys))

        def mapped(block: NDArray[np.int64], text: bool) -> NDArray[np.int32]:
            found: NDArray[np.int32] = (
                places[block + len(numbers)] if text or ids_of is None else places[ids_of(block)]
            )
            return found

        return self._mapped(mapped), keys

    def _refuse_many(self, count: int) -> None:
        if count >= 2**31:
            raise DataError(f"{count:,} different keys: at most {2**31 - 1:,} can be numbered")


def _merged(pools: Any) -> tuple[TextKeys, NDArray[np.int32]]:
    """Return the different texts of all pools in the order of their bytes, and the place there of every text of the pools."""
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
    return text_keys(texts.gather(order)), rank[codes]


def text_keys(texts: pl.Series) -> TextKeys:  # String [n]
    """Return a column of texts as keys."""
    stored = texts.rechunk().to_arrow().cast(import_module("pyarrow").large_string())
    _, offsets, data = stored.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[stored.offset : stored.offset + len(stored) + 1]
    text = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, dtype=np.uint8)
    return TextKeys(text[int(ends[0]) : int(ends[-1])], ends[1:] - ends[0])
