"""PackedTable: rows by id or key, scores and nearest rows, with numpy alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.errors import FormatError, IdError, UnknownKeyError
from featherbed.packed import bag, nearby, search
from featherbed.packed.band import Band, check_bands
from featherbed.packed.codes import Ids
from featherbed.packed.matrix import Floats

if TYPE_CHECKING:
    from featherbed.packed.keys import Keys

CHUNK = (
    1 << 16
)  # rows composed at once, so that a look-up of many rows allocates little beyond its result
HELD = 1 << 23  # gathered floats held at once on the way to the rows


class PackedTable:
    """A compact table as stored: ``len(packed)`` rows of width ``packed.dim``.

    >>> import torch, featherbed as fb
    >>> packed = fb.QuantizedTable.from_dense(torch.eye(4), bits=8).pack()
    >>> packed[[2, 0]].shape, packed.search(packed[2], k=1)[0].tolist()
    ((2, 4), [2])
    """

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
        self.report: Any = (
            None  # of the compression that made it, in the process that did; not stored
        )
        self._norms: Floats | None = None
        self._chunk = max(1, min(CHUNK, HELD // max(dim, *(band.gathered for band in bands))))
        check_bands(bands, self.rows)

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        what = self.made_by.get("table", "table")
        return f"PackedTable({self.rows:,} x {self.dim}, {what}, {self.nbytes:,} bytes{', with keys' if self.keys else ''})"

    def __contains__(self, key: object) -> bool:
        """Whether a key is there, or an id."""
        if isinstance(key, str):
            return self.keys is not None and self.keys.has(key)
        return isinstance(key, int | np.integer) and 0 <= int(key) < self.rows

    def __iter__(self) -> Iterator[Floats]:
        for start in range(0, self.rows, self._chunk):
            yield from self.block(start, min(start + self._chunk, self.rows))

    def __getitem__(
        self, ids: Any
    ) -> Floats:  # int, key, slice, or any array of ids or keys -> [..., d]
        if isinstance(ids, slice):
            ids = np.arange(*ids.indices(self.rows))
        wanted = self._wanted(ids)
        flat = wanted.reshape(-1)
        if len(flat) <= self._chunk:
            rows = self._compose(flat)
            return rows if wanted.ndim == 1 else rows.reshape(*wanted.shape, self.dim)
        out = np.empty((len(flat), self.dim), dtype=np.float32)
        for start in range(0, len(flat), self._chunk):
            out[start : start + self._chunk] = self._compose(flat[start : start + self._chunk])
        return out.reshape(*wanted.shape, self.dim)

    def _wanted(self, ids: Any) -> Ids:
        return np.asarray(self.ids_of(ids)) if _is_keys(ids) else as_ids(ids, self.rows)

    def ids_of(self, keys: str | Sequence[str] | NDArray[np.str_]) -> Any:
        """Return the id of a key, or the ids of several."""
        if self.keys is None:
            raise UnknownKeyError(
                f"{keys!r}: this table was saved without keys; look rows up by id, 0 to {self.rows - 1}"
            )
        if isinstance(keys, str):
            return int(self.keys.find([keys])[0])
        array = np.asarray(keys, dtype=object)
        return self.keys.find(array.reshape(-1).tolist()).reshape(array.shape)

    def block(self, start: int, stop: int) -> Floats:
        """Return rows start to stop - 1."""
        return self[np.arange(start, stop, dtype=np.int64)]

    def places(self, ids: Ids) -> Iterator[tuple[Band, NDArray[np.intp], Ids]]:
        """Yield for each band the rows of the batch it serves and their positions in it."""
        batch, positions, left = np.arange(len(ids)), ids, self.rows
        for band in self.bands:
            if band.members is None:
                yield band, batch, positions
                return
            inside, rank = band.members.split(positions)
            mine, others = rank[inside], (positions - rank)[~inside]
            left -= band.rows
            if beyond(mine, band.rows) or beyond(others, left):
                raise FormatError("a band's member bitmap does not count what the band says")
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
        """Pool rows into bags as nn.EmbeddingBag does: Σ_i w_i row(i), or the mean; padding ids do not count."""
        return bag.bag(self, ids, offsets, per_sample_weights, mode, include_last_offset)

    def logits(self, queries: ArrayLike) -> Floats:  # [d] -> [V], [n, d] -> [n, V]
        """Return the dot product of every row with the query: q . row(i), through the atoms where the composer allows."""
        return search.logits(self, queries)

    def search(self, queries: ArrayLike, k: int = 10, *, metric: str = "dot") -> tuple[Ids, Floats]:
        """Return ids and scores of the k best rows by "dot" or "cosine", best first, exactly. [d] -> [k], [n, d] -> [n, k]."""
        return search.top(self, queries, k, metric)

    def codes_of(self, ids: Any) -> Ids:  # int, key, or any array of ids or keys -> [..., s]
        """Return the codes of rows, c(i) = (c_1, ..., c_s): of the first layer, each the choice within its part.

        >>> from featherbed.packed.codes import Fixed
        >>> from featherbed.packed.matrix import Matrix
        >>> atoms = Matrix.encode(np.array([[0.0], [1.0], [0.0], [3.0]]), "float32")  # two choices for each of two parts
        >>> codes = Fixed.encode(np.array([[0, 1], [1, 1], [0, 0], [0, 1]]), None, choices=2, parts=True)
        >>> packed = PackedTable([Band(4, codes, dictionary=atoms, combine="concat")], dim=2)
        >>> packed.codes_of([2, 0]).tolist(), packed[[2, 0]].tolist()
        ([[0, 0], [0, 1]], [[0.0, 0.0], [0.0, 3.0]])
        """
        return nearby.codes_of(self, self._wanted(ids))

    def rows_with(self, code: ArrayLike) -> Ids:
        """Return the ids of all rows whose codes start with ``code`` [j], ascending: {i : c_1(i) .. c_j(i) = code}.

        Codes learnt stage by stage name ever smaller groups of similar rows: the "semantic ids" of generative recommenders
        (Rajput et al. 2023), which write codes one by one and need the rows they stand for.

        >>> from featherbed.packed.codes import Fixed
        >>> from featherbed.packed.matrix import Matrix
        >>> atoms = Matrix.encode(np.array([[0.0], [1.0], [0.0], [3.0]]), "float32")  # two choices for each of two parts
        >>> codes = Fixed.encode(np.array([[0, 1], [1, 1], [0, 0], [0, 1]]), None, choices=2, parts=True)
        >>> packed = PackedTable([Band(4, codes, dictionary=atoms, combine="concat")], dim=2)
        >>> packed.rows_with([0]).tolist(), packed.rows_with([0, 1]).tolist()
        ([0, 2, 3], [0, 3])
        """
        return nearby.rows_with(self, code)

    def near_codes(self, codes: ArrayLike, k: int = 10) -> tuple[Ids, Ids]:
        """Return ids and distances of the k rows whose codes differ in the fewest parts, Σ_j [c_j(i) ≠ codes_j], exactly.

        Ties go to the smaller id. [s] -> [k], [n, s] -> [n, k]. How well it stands in for ``search``: ``code_recall``.

        >>> from featherbed.packed.codes import Fixed
        >>> from featherbed.packed.matrix import Matrix
        >>> atoms = Matrix.encode(np.array([[0.0], [1.0], [0.0], [3.0]]), "float32")  # two choices for each of two parts
        >>> codes = Fixed.encode(np.array([[0, 1], [1, 1], [0, 0], [0, 1]]), None, choices=2, parts=True)
        >>> packed = PackedTable([Band(4, codes, dictionary=atoms, combine="concat")], dim=2)
        >>> ids, distances = packed.near_codes([1, 1], k=3)
        >>> ids.tolist(), distances.tolist()
        ([1, 0, 3], [0, 1, 1])
        """
        return nearby.near_codes(self, codes, k)

    def code_recall(self, ids: Any, k: int = 10, *, metric: str = "cosine") -> float:
        """Return how much of exact search ``near_codes`` finds: |k nearest rows ∩ k nearest codes| / k over ids, self left out.

        >>> from featherbed.packed.codes import Fixed
        >>> from featherbed.packed.matrix import Matrix
        >>> atoms = Matrix.encode(np.array([[0.0], [1.0], [0.0], [3.0]]), "float32")  # two choices for each of two parts
        >>> codes = Fixed.encode(np.array([[0, 1], [1, 1], [0, 0], [0, 1]]), None, choices=2, parts=True)
        >>> packed = PackedTable([Band(4, codes, dictionary=atoms, combine="concat")], dim=2)
        >>> packed.code_recall([0, 1, 3], k=1)  # the cosine of 0 and 3 is 1, and they have the same codes
        1.0
        """
        return nearby.code_recall(self, self._wanted(ids), k, metric)

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Every stored array by the name it has in the file."""
        found = {
            f"b{i}.{name}": array
            for i, band in enumerate(self.bands)
            for name, array in band.arrays()
        }
        return found | ({} if self.keys is None else self.keys.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored arrays, keys not counted (they are listed apart, see ``sizes_by_part``)."""
        return sum(
            array.nbytes for name, array in self.arrays.items() if not name.startswith("keys.")
        )

    def sizes_by_part(self) -> dict[str, int]:
        """Bytes of each stored array, and of the file's header."""
        from featherbed.packed.file import header_of

        return {"header": len(header_of(self))} | {
            name: array.nbytes for name, array in self.arrays.items()
        }

    def save(self, path: str | Path) -> None:
        """Write the table to ``path``, atomically."""
        from featherbed.packed.file import write

        write(self, Path(path))


def _is_keys(ids: Any) -> bool:
    """Whether keys are given: a string, an array of strings, or a list of nothing else."""
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
    """Whether a position lies outside 0 .. rows - 1 (a negative one is a huge unsigned one)."""
    return len(positions) > 0 and int(positions.view(np.uint64).max()) >= rows


def as_ids(ids: Any, rows: int) -> Ids:
    """Return ids as int64, or raise the error that names the offending one."""
    array = np.asarray(ids)
    if array.dtype.kind not in "iu":
        if array.size == 0:
            return array.astype(np.int64)
        if array.dtype == object and all(
            isinstance(id_, int) for id_ in array.reshape(-1)
        ):  # beyond 64 bits
            raise IdError(
                f"id {max(array.reshape(-1), key=abs)} is not in this table: ids go from 0 to {rows - 1}"
            )
        raise IdError(
            f"ids have dtype {array.dtype}; a table takes integer ids from 0 to {rows - 1}"
        )
    if array.dtype.kind == "u" and array.itemsize == 8 and array.size and int(array.max()) >= rows:
        raise IdError(f"id {int(array.max())} is not in this table: ids go from 0 to {rows - 1}")
    wide = array.astype(np.int64, copy=False)
    if (
        wide.size and int(wide.view(np.uint64).max()) >= rows
    ):  # a negative id is a huge unsigned one
        low, high = int(wide.min()), int(wide.max())
        raise IdError(
            f"id {low if low < 0 else high} is not in this table: ids go from 0 to {rows - 1}"
        )
    return wide
