"""PackedTable: rows by id or key, scores and nearest rows, with numpy only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.errors import ArgumentError, FormatError, IdError, UnknownKeyError
from featherbed.packed import engine
from featherbed.packed.band import Band, Every, Hash, Ids, Remainder
from featherbed.packed.engine import WORTH
from featherbed.packed.matrix import Floats, Graded

if TYPE_CHECKING:
    from featherbed.packed.keys import Keys

CHUNK = 1 << 16  # rows composed at once: a large look-up allocates little beyond its result
CALLS = 1024  # look-ups of one row between two choices of the way they are made
LOADING = 32  # choices after which single rows have cost as much as loading the compiled loops
HELD = 1 << 23  # gathered floats held at once while rows are composed
MISMATCH = "a band's member bitmap does not match its number of rows"


class PackedTable:
    """A compact table as stored: ``len(packed)`` rows of width ``packed.dim``.

    >>> import torch, featherbed as fb
    >>> packed = fb.QuantizedTable.from_dense(torch.eye(4), bits=8).pack()
    >>> packed[[2, 0]].shape, packed.search(packed[2], k=1)[0].tolist()
    ((2, 4), [2])
    """

    _read_row: Callable[[int], Floats]

    def __init__(
        self,
        bands: list[Band],
        dim: int,
        *,
        padding_idx: int | None = None,
        keys: Keys | None = None,
        made_by: dict[str, Any] | None = None,
    ) -> None:
        self.bands = bands
        self.dim = dim
        self.rows = sum(band.rows for band in bands)
        self.padding_idx = padding_idx
        self.keys = keys
        self.made_by = made_by or {}
        self.report: Any = None  # of the compression that made the table; not stored
        self._norms: Floats | None = None
        self._calls = 0  # look-ups of one row
        self._mean: Floats | None = None
        self._chunk = max(1, min(CHUNK, HELD // max(dim, *(band.gathered for band in bands))))

    def replace(self, **changes: Any) -> PackedTable:
        """Return a table of the same parts but for ``changes``: bands, padding_idx, keys,
        made_by."""
        parts = {"padding_idx": self.padding_idx, "keys": self.keys, "made_by": self.made_by}
        return PackedTable(changes.pop("bands", self.bands), self.dim, **parts | changes)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the way one row is read out of copies and pickles: it holds addresses."""
        kept = {name: part for name, part in self.__dict__.items() if name != "_read_row"}
        return kept | {"_calls": 0}

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        name, keys = self.made_by.get("table", "table"), ", with keys" if self.keys else ""
        return f"PackedTable({self.rows:,} x {self.dim}, {name}, {self.nbytes:,} bytes{keys})"

    def __contains__(self, key: object) -> bool:
        """Return whether the table has a key, or an id."""
        if isinstance(key, str):
            return self.keys is not None and self.keys.has(key)
        return isinstance(key, int | np.integer) and 0 <= int(key) < self.rows

    def __iter__(self) -> Iterator[Floats]:
        for start in range(0, self.rows, self._chunk):
            yield from self.block(start, min(start + self._chunk, self.rows))

    def __getitem__(self, ids: Any) -> Floats:
        """Return the rows [..., d] of an id, a key, a slice, or any array of ids or keys."""
        if isinstance(ids, str):
            ids = self.ids_of(ids)
        elif isinstance(ids, np.integer):
            ids = int(ids)
        if type(ids) is int and 0 <= ids < self.rows:
            return self._row(ids)
        if isinstance(ids, slice):
            ids = np.arange(*ids.indices(self.rows))
        ids = self._as_ids(ids)
        flat = ids.reshape(-1)
        if len(flat) <= self._chunk:
            rows = self._compose(flat)
            return rows if ids.ndim == 1 else rows.reshape(*ids.shape, self.dim)
        out = np.empty((len(flat), self.dim), dtype=np.float32)
        for start in range(0, len(flat), self._chunk):
            out[start : start + self._chunk] = self._compose(flat[start : start + self._chunk])
        return out.reshape(*ids.shape, self.dim)

    def _row(self, id_: int) -> Floats:  # -> [d]
        """Return one row; whether to load compiled loops is decided every ``CALLS`` calls."""
        if self._calls % CALLS == 0:
            worth = engine.kernels(1 if self._calls < LOADING * CALLS else engine.WORTH)
            self._read_row = self._row_reader(worth)
        self._calls += 1
        if id_ == self.padding_idx:
            return np.zeros(self.dim, dtype=np.float32)
        return self._read_row(id_)

    def _row_reader(self, compiled: bool) -> Callable[[int], Floats]:  # id -> [d]
        """Return a function that returns one row: what ``places`` and ``lookup`` do for many."""
        readers = [band.row_reader(compiled) for band in self.bands]
        if len(readers) == 1:
            return readers[0]
        if any(isinstance(band.codes, Hash | Remainder) for band in self.bands):
            return lambda id_: self._compose(np.array([id_]))[0]

        def read(id_: int) -> Floats:
            position, left = id_, self.rows
            for band, reader in zip(self.bands, readers, strict=True):
                if band.members is None:
                    return reader(position)
                inside, rank = band.members.find(position)
                left -= band.rows
                if rank >= band.rows if inside else not 0 <= position - rank < left:
                    raise FormatError(MISMATCH)
                if inside:
                    return reader(rank)
                position -= rank
            raise FormatError(MISMATCH)

        return read

    def _as_ids(self, ids: Any) -> Ids:
        return np.asarray(self.ids_of(ids)) if _is_keys(ids) else as_ids(ids, self.rows)

    def _index(self, keys: Any) -> Keys:
        if self.keys is None:
            raise UnknownKeyError(
                f"{str(keys)[:80]!r}: this table was saved without keys; "
                f"look rows up by id, 0 to {self.rows - 1}"
            )
        return self.keys

    def ids_of(self, keys: str | Sequence[str] | NDArray[np.str_]) -> Any:
        """Return the id of a key, or the ids of several; unknown keys are an UnknownKeyError."""
        index = self._index(keys)
        if isinstance(keys, str):
            id_ = index.id_of(keys)
            return id_ if id_ >= 0 else int(index.find([keys])[0])
        array = np.asarray(keys, dtype=object)
        return index.find(array.reshape(-1).tolist()).reshape(array.shape)

    def ids(self, keys: str | Sequence[str] | NDArray[np.str_]) -> Any:
        """Return the id of a key, or the ids of several, -1 for unknown keys.

        In a table with shared rows no key is unknown: all others have one of these.
        """
        index = self._index(keys)
        if isinstance(keys, str):
            return index.id_of(keys)
        array = np.asarray(keys, dtype=object)
        return index.ids(array.reshape(-1).tolist()).reshape(array.shape)

    def get(
        self, keys: str | Sequence[str] | NDArray[np.str_], default: str | ArrayLike = "zeros"
    ) -> Floats:
        """Return the rows [..., d] of keys, and ``default`` for unknown ones.

        Args:
            default: "zeros", "mean" (of all rows) or a row [d].

        >>> import torch, featherbed as fb
        >>> packed = fb.DenseTable.from_dense(torch.eye(2)).pack()
        >>> packed = packed.replace(keys=fb.Keys.of(["tea", "rum"]))
        >>> packed.get(["rum", "ale"]).tolist(), packed.get("ale", default="mean").tolist()
        ([[0.0, 1.0], [0.0, 0.0]], [0.5, 0.5])
        """
        ids = np.asarray(self.ids(keys))
        unknown = ids < 0
        if not unknown.any():
            return self[ids]
        row = self._default_row(default)
        rows = self[np.where(unknown, 0, ids)]
        rows[unknown] = row
        return rows

    def _default_row(self, default: str | ArrayLike) -> Floats:  # [d]
        if isinstance(default, str) and default == "zeros":
            return np.zeros(self.dim, dtype=np.float32)
        if isinstance(default, str) and default == "mean":
            if self._mean is None:
                steps = range(0, self.rows, self._chunk)
                blocks = (self.block(at, min(at + self._chunk, self.rows)) for at in steps)
                total = sum(block.sum(0, dtype=np.float64) for block in blocks)
                self._mean = np.asarray(total / self.rows, dtype=np.float32)
            return self._mean
        row = None if isinstance(default, str) else np.asarray(default)
        if row is None or row.shape != (self.dim,) or row.dtype.kind not in "fiu":
            raise ArgumentError(
                f'default={str(default)[:60]!r}: use "zeros", "mean" or a row of {self.dim} numbers'
            )
        return row.astype(np.float32)

    def name_of(self, id_: int) -> str | None:
        """Return the key of a row; None if the file has none, or no text of it."""
        return None if self.keys is None else self.keys.name(id_)

    def block(self, start: int, stop: int) -> Floats:
        """Return rows start to stop - 1."""
        return self[np.arange(start, stop, dtype=np.int64)]

    def places(self, ids: Ids) -> Iterator[tuple[Band, NDArray[np.intp], Ids]]:
        """Yield each band, the places of its ids in the batch and their positions in the band."""
        batch, positions, left = np.arange(len(ids)), ids, self.rows
        for band in self.bands:
            if band.members is None:
                yield band, batch, positions
                return
            inside, rank = band.members.split(positions)
            mine, others = rank[inside], (positions - rank)[~inside]
            left -= band.rows
            if beyond(mine, band.rows) or beyond(others, left):
                raise FormatError(MISMATCH)
            yield band, batch[inside], mine
            batch, positions = batch[~inside], others

    def _compose(self, ids: Ids) -> Floats:  # [B] -> [B, d]
        if len(self.bands) == 1:
            rows = self.bands[0].lookup(ids, ids)
        else:
            rows = np.empty((len(ids), self.dim), dtype=np.float32)
            for band, batch, positions in self.places(ids):
                if len(batch):
                    rows[batch] = band.lookup(ids[batch], positions)
        if self.padding_idx is not None:
            rows[ids == self.padding_idx] = 0
        return rows

    def bag(
        self,
        ids: ArrayLike,  # [B, n], or [N] with offsets
        offsets: ArrayLike | None = None,
        per_sample_weights: ArrayLike | None = None,
        *,
        mode: str = "sum",
        include_last_offset: bool = False,
    ) -> Floats:  # [B, d]
        """Pool rows as nn.EmbeddingBag does: Σ_i w_i row(i), or the mean; padding does not
        count."""
        from featherbed.packed.search import pool_rows

        return pool_rows(self, ids, offsets, per_sample_weights, mode, include_last_offset)

    def logits(self, queries: ArrayLike) -> Floats:  # [d] -> [V], [n, d] -> [n, V]
        """Return the dot product of every row with the query, through the atoms where possible."""
        from featherbed.packed.search import logits

        return logits(self, queries)

    def search(self, queries: ArrayLike, k: int = 10, *, metric: str = "dot") -> tuple[Ids, Floats]:
        """Return ids and scores of the k best rows by "dot" or "cosine", best first, exactly.

        [d] -> [k], [n, d] -> [n, k].
        """
        from featherbed.packed.search import top

        return top(self, queries, k, metric)

    def codes_of(self, ids: Any) -> Ids:
        """Return the codes of rows, [..., s]: of the first layer, each the choice within its part.

        >>> from featherbed.packed.band import Fixed
        >>> from featherbed.packed.matrix import Matrix
        >>> atoms = Matrix.encode(np.array([[0.0], [1.0], [0.0], [3.0]]), "float32")  # 2 parts of 2
        >>> indices = np.array([[0, 1], [1, 1], [0, 0], [0, 1]])
        >>> codes = Fixed.encode(indices, None, choices=2, parts=True)
        >>> packed = PackedTable([Band(4, codes, dictionary=atoms, combine="concat")], dim=2)
        >>> packed.codes_of([2, 0]).tolist(), packed[[2, 0]].tolist()
        ([[0, 0], [0, 1]], [[0.0, 0.0], [0.0, 3.0]])
        """
        from featherbed.packed.code_search import codes_of

        return codes_of(self, self._as_ids(ids))

    def rows_with(self, code: ArrayLike) -> Ids:
        """Return the ids of all rows whose codes start with ``code`` [j], ascending.

        Codes fitted stage by stage name ever smaller groups of similar rows: the "semantic ids" of
        generative recommenders (Rajput et al. 2023), which generate codes one by one.

        >>> from featherbed.packed.band import Fixed
        >>> from featherbed.packed.matrix import Matrix
        >>> atoms = Matrix.encode(np.array([[0.0], [1.0], [0.0], [3.0]]), "float32")  # 2 parts of 2
        >>> indices = np.array([[0, 1], [1, 1], [0, 0], [0, 1]])
        >>> codes = Fixed.encode(indices, None, choices=2, parts=True)
        >>> packed = PackedTable([Band(4, codes, dictionary=atoms, combine="concat")], dim=2)
        >>> packed.rows_with([0]).tolist(), packed.rows_with([0, 1]).tolist()
        ([0, 2, 3], [0, 3])
        """
        from featherbed.packed.code_search import rows_with

        return rows_with(self, code)

    def near_codes(self, codes: ArrayLike, k: int = 10) -> tuple[Ids, Ids]:
        """Return ids and Hamming distances Σ_j [c_j(i) ≠ codes_j] of the k nearest rows, exactly.

        Ties go to the smaller id. [s] -> [k], [n, s] -> [n, k]. ``code_recall`` compares it with
        ``search``.

        >>> from featherbed.packed.band import Fixed
        >>> from featherbed.packed.matrix import Matrix
        >>> atoms = Matrix.encode(np.array([[0.0], [1.0], [0.0], [3.0]]), "float32")  # 2 parts of 2
        >>> indices = np.array([[0, 1], [1, 1], [0, 0], [0, 1]])
        >>> codes = Fixed.encode(indices, None, choices=2, parts=True)
        >>> packed = PackedTable([Band(4, codes, dictionary=atoms, combine="concat")], dim=2)
        >>> ids, distances = packed.near_codes([1, 1], k=3)
        >>> ids.tolist(), distances.tolist()
        ([1, 0, 3], [0, 1, 1])
        """
        from featherbed.packed.code_search import near_codes

        return near_codes(self, codes, k)

    def code_recall(self, ids: Any, k: int = 10, *, metric: str = "cosine") -> float:
        """Return the recall of ``near_codes`` against ``search``.

        That is the mean of |k nearest rows ∩ k nearest codes| / k over ids, the row itself left
        out.

        >>> from featherbed.packed.band import Fixed
        >>> from featherbed.packed.matrix import Matrix
        >>> atoms = Matrix.encode(np.array([[0.0], [1.0], [0.0], [3.0]]), "float32")  # 2 parts of 2
        >>> indices = np.array([[0, 1], [1, 1], [0, 0], [0, 1]])
        >>> codes = Fixed.encode(indices, None, choices=2, parts=True)
        >>> packed = PackedTable([Band(4, codes, dictionary=atoms, combine="concat")], dim=2)
        >>> packed.code_recall([0, 1, 3], k=1)  # rows 0 and 3 are the same, and so are their codes
        1.0
        """
        from featherbed.packed.code_search import code_recall

        return code_recall(self, self._as_ids(ids), k, metric)

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Every stored array by the name it has in the file."""
        bands = enumerate(self.bands)
        found = {f"b{i}.{name}": array for i, band in bands for name, array in band.arrays()}
        return found | ({} if self.keys is None else self.keys.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored arrays without the keys (see ``sizes_by_part``)."""
        return sum(array.nbytes for band in self.bands for _, array in band.arrays())

    def sizes_by_part(self) -> dict[str, int]:
        """Bytes of each stored array, and of the file's header."""
        from featherbed.packed.file import header_of

        sizes = {name: array.nbytes for name, array in self.arrays.items()}
        return {"header": len(header_of(self))} | sizes

    def columns_with_bits(self) -> NDArray[np.bool_] | None:  # -> [d]
        """Return whether each column of graded rows has bits in some row, without reading them.

        A column with zero bits is 0 in every row. None for other tables.
        """
        found = np.zeros(self.dim, dtype=bool)
        for band in self.bands:
            composed = (band.dictionary, band.cell, band.affine, band.plus)
            if not isinstance(band.codes, Every) or any(part is not None for part in composed):
                return None
            if not isinstance(band.values, Graded):
                return None
            for rows, digits in band.values.grades:
                if rows:
                    found |= np.array([digit != "0" for digit in digits])
        return found

    def nonzero_columns(self) -> NDArray[np.bool_]:  # -> [d]
        """Return whether each column is nonzero in some row; rows are read until all columns are.

        >>> import featherbed as fb
        >>> table = fb.DenseTable.from_dense(np.array([[0.0, 2.0], [0.0, 0.0]]))
        >>> table.pack().nonzero_columns().tolist()
        [False, True]
        """
        known = self.columns_with_bits()
        if known is not None:
            return known
        found = np.zeros(self.dim, dtype=bool)
        for start in range(0, self.rows, WORTH - 1):
            found |= self.block(start, min(start + WORTH - 1, self.rows)).any(axis=0)
            if found.all():
                break
        return found

    def save(self, path: str | Path) -> None:
        """Write the table to ``path``, atomically."""
        from featherbed.packed.file import write

        write(self, Path(path))


def _is_keys(ids: Any) -> bool:
    """Return whether keys are given: a string, or a list or array of strings."""
    if isinstance(ids, str):
        return True
    if isinstance(ids, list | tuple) or (isinstance(ids, np.ndarray) and ids.dtype == object):
        flat = np.asarray(ids, dtype=object).reshape(-1)
        count = sum(isinstance(word, str) for word in flat.tolist())
        if 0 < count < len(flat):
            raise IdError("ids and keys are mixed: look up one kind at a time")
        return count > 0
    return isinstance(ids, np.ndarray) and ids.dtype.kind in "UT"


def beyond(positions: Ids, rows: int) -> bool:
    """Return whether a position lies outside 0 .. rows - 1 (as unsigned, negative ones are
    huge)."""
    return len(positions) > 0 and int(positions.view(np.uint64).max()) >= rows


def as_ids(ids: Any, rows: int) -> Ids:
    """Return ids as int64; raise IdError for one that is not in the table."""
    array = np.asarray(ids)
    if array.dtype.kind not in "iu":
        if array.size == 0:
            return array.astype(np.int64)
        flat = array.reshape(-1)
        if array.dtype == object and all(isinstance(id_, int) for id_ in flat):  # beyond 64 bits
            raise _unknown_id(max(flat, key=abs), rows)
        raise IdError(
            f"ids have dtype {array.dtype}; a table takes integer ids from 0 to {rows - 1}"
        )
    if array.dtype.kind == "u" and array.itemsize == 8 and array.size and int(array.max()) >= rows:
        raise _unknown_id(int(array.max()), rows)
    wide = array.astype(np.int64, copy=False)
    if wide.size and int(wide.view(np.uint64).max()) >= rows:  # as unsigned, negative ids are huge
        low, high = int(wide.min()), int(wide.max())
        raise _unknown_id(low if low < 0 else high, rows)
    return wide


def _unknown_id(id_: int, rows: int) -> IdError:
    return IdError(f"id {id_} is not in this table: ids go from 0 to {rows - 1}")
