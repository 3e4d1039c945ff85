"""Columns that grow block by block: in memory while short, in an unnamed file once long.

An unnamed file has no entry in its folder and disappears with its last array, however the process
ends.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
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
