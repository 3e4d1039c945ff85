"""A band: rows that share one layout of codes, one dictionary and one composer; and the ids it
holds.

Layouts of codes say how the indices and values of a row are stored or computed. ``Identity``,
``Hash``, ``Remainder`` and ``Every`` store nothing per row (hash and remainder are computed from
the id, identity from the row's position in its band); ``Fixed`` stores s codes for each row,
``Ragged`` a different number for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.compose import combine
from featherbed.errors import ArgumentError, FormatError
from featherbed.hashing import hash_codes
from featherbed.packed import bits, engine
from featherbed.packed.cells import Cell
from featherbed.packed.levels import ValueLevels, value_kind
from featherbed.packed.matrix import CACHE_BYTES, Floats, Graded, Matrix, level_bits

Ids = NDArray[np.int64]
RowFetcher = Callable[[int], tuple[Any, Floats | None]]  # position -> indices [s], values [s]
CONTRADICTION = "ragged codes: the counts and the directory do not match each other"
MOST_CODES = 4096  # of a row
ALONE, TOGETHER = 1 << 18, 1 << 27  # products of one thread of OpenBLAS, and of all of them
FEWEST = 32  # rows of a product
DIRECTORY_STEP = 16  # rows of a ragged layout between two directory entries


@dataclass(frozen=True)
class Identity:
    """Row i of the band is atom i."""

    def indices(self, ids: Ids, positions: Ids, atoms: int) -> Ids:  # noqa: ARG002 - one signature for all layouts
        """Return the position itself."""
        return positions[:, None]


@dataclass(frozen=True)
class Hash:
    """The row of id x combines the atoms h_1(x), ..., h_k(x)."""

    seed: int
    hashes: int

    def indices(self, ids: Ids, positions: Ids, atoms: int) -> Ids:  # noqa: ARG002
        """Return the hash buckets of ids."""
        return np.stack(hash_codes(ids, seed=self.seed, hashes=self.hashes, buckets=atoms), axis=1)


@dataclass(frozen=True)
class Remainder:
    """The row of id x combines the atoms x // divisor and (atoms - divisor) + x mod divisor."""

    divisor: int

    def indices(self, ids: Ids, positions: Ids, atoms: int) -> Ids:  # noqa: ARG002
        """Return the quotients and remainders of ids."""
        return np.stack([ids // self.divisor, atoms - self.divisor + ids % self.divisor], axis=1)


@dataclass(frozen=True)
class Every:
    """Every row uses every atom: row = values @ dictionary, or the values without a dictionary."""


@dataclass(eq=False)
class Fixed:
    """s codes per row in one bit stream: s index fields, then s value fields (none if all are
    1)."""

    rows: int
    count: int
    index_bits: int
    stream: bits.Words
    levels: ValueLevels | None = None
    parts: bool = False  # with parts, code j indexes the j-th block of the dictionary

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape a loop is compiled for: codes, index bits, value bits, kind of values."""
        value_bits = self.levels.bits if self.levels else 0
        return (self.count, self.index_bits, value_bits, value_kind(self.levels)[0])

    def choices(self, atoms: int) -> int:
        """Return the number of atoms a code chooses among."""
        return atoms // self.count if self.parts else atoms

    def stride(self, atoms: int) -> int:
        """Return the distance between parts of the dictionary; 0 if all codes share it."""
        return self.choices(atoms) if self.parts else 0

    def arguments(self, atoms: int) -> tuple[Any, ...]:
        """Return the arguments of the compiled loops."""
        return (np.ascontiguousarray(self.stream), value_kind(self.levels)[1], self.choices(atoms))

    @property
    def record_bits(self) -> int:
        """Bits of one row's record."""
        return self.count * (self.index_bits + (self.levels.bits if self.levels else 0))

    @classmethod
    def encode(
        cls,
        indices: NDArray[np.integer],
        values: NDArray[np.floating] | None,
        choices: int,
        kind: str = "float32",
        parts: bool = False,
    ) -> Fixed:
        """Store ``indices`` [V, s] below ``choices`` and ``values`` [V, s] (None: all are 1)."""
        rows, count = indices.shape
        index_bits = bits.width(choices)
        columns, widths = [indices.astype(np.uint32)], [index_bits] * count
        levels = None
        if values is not None:
            levels = ValueLevels.fit(values, kind)
            columns.append(levels.encode(np.ascontiguousarray(values)))
            widths += [levels.bits] * count
        stream = bits.pack(np.concatenate(columns, axis=1), widths)
        return cls(rows, count, index_bits, stream, levels, parts)

    @property
    def _records(self) -> NDArray[np.uint8]:  # [rows, bytes of a record]
        length = self.record_bits // 8
        flat = np.ascontiguousarray(self.stream).view(np.uint8)[: self.rows * length]
        return flat.reshape(self.rows, length)

    def row_fetcher(self, atoms: int) -> RowFetcher:
        """Return ``fetch`` of one row: from its position to its indices [s] and values [s]."""
        read, size, levels = bits.field_reader(self.stream), self.record_bits, self.levels
        choices, stride, width = self.choices(atoms), self.stride(atoms), self.index_bits
        starts = [j * width for j in range(self.count)]
        value_bits = 0 if levels is None else levels.bits
        value_starts = [self.count * width + j * value_bits for j in range(self.count)]
        if width == 8 and value_bits in (0, 8, 16, 32):
            records, count, kind = self._records, self.count, f"<u{value_bits // 8 or 1}"
            offsets = np.arange(count) * stride

            def fetch_bytes(position: int) -> tuple[Any, Floats | None]:
                stored = records[position]
                indices = stored[:count]
                if choices < 256:
                    check_indices(indices, choices)
                values = None if levels is None else levels.decode(stored[count:].view(kind))
                return indices + offsets if stride else indices, values

            return fetch_bytes

        def fetch(position: int) -> tuple[Any, Floats | None]:
            record = read(position * size, size)
            indices = bits.fields(record, width, starts)
            if max(indices) >= choices:
                check_indices(np.array(indices), choices)
            if stride:
                indices = [index + j * stride for j, index in enumerate(indices)]
            if levels is None:
                return indices, None
            raw = bits.fields(record, value_bits, value_starts)
            return indices, levels.decode(np.array(raw, dtype=np.uint32))

        return fetch

    def field(self, positions: Ids, first: int, last: int) -> NDArray[np.unsignedinteger]:
        """Return codes ``first`` to ``last - 1`` of rows: choices within a part, unchecked."""
        if self.index_bits == 8 and self.record_bits % 8 == 0:
            return self._records[:, first:last][positions]
        start = positions[:, None] * self.record_bits + np.arange(first, last) * self.index_bits
        return bits.unpack(self.stream, start, self.index_bits)

    def fetch(self, positions: Ids, atoms: int) -> tuple[Ids, Floats | None]:
        """Return indices [B, s] and values [B, s] of rows; an index out of range is an error."""
        indices = self.field(positions, 0, self.count).astype(np.int64)
        check_indices(indices, self.choices(atoms))
        indices += np.arange(self.count) * self.stride(atoms)
        if self.levels is None:
            return indices, None
        start = positions[:, None] * self.record_bits + self.count * self.index_bits
        start = start + np.arange(self.count) * self.levels.bits
        return indices, self.levels.decode(bits.unpack(self.stream, start, self.levels.bits))


@dataclass(eq=False)
class Ragged:
    """Any number of codes per row: a stream of counts, a directory of totals, a stream of
    entries."""

    rows: int
    entries: int
    index_bits: int
    count_bits: int
    counts: bits.Words
    directory: NDArray[np.unsignedinteger]  # entry number at which rows 0, 16, 32, ... start
    stream: bits.Words
    levels: ValueLevels

    @classmethod
    def encode(
        cls,
        rows: int,
        row_of: Ids,
        indices: Ids,
        values: NDArray[np.floating],
        choices: int,
        kind: str,
    ) -> Ragged:
        """Store entries (row_of, indices, values) that are sorted by row."""
        counts = np.bincount(row_of, minlength=rows)
        count_bits = bits.width(int(counts.max(initial=0)) + 1)
        totals = np.concatenate([[0], np.cumsum(counts)])[:-1][::DIRECTORY_STEP]
        levels, index_bits = ValueLevels.fit(values, kind), bits.width(choices)
        entries = np.stack([indices.astype(np.uint32), levels.encode(values)], axis=1)
        return cls(
            rows,
            len(indices),
            index_bits,
            count_bits,
            bits.pack(counts.astype(np.uint32)[:, None], [count_bits]),
            totals.astype(np.uint32 if len(indices) < 2**32 else np.uint64),
            bits.pack(entries, [index_bits, levels.bits]),
            levels,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape a loop is compiled for: count bits, index bits, value bits, kind of values."""
        return (self.count_bits, self.index_bits, self.levels.bits, value_kind(self.levels)[0])

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the compiled loops."""
        wide = int(self.directory.itemsize == 8)
        directory = np.ascontiguousarray(self.directory).view(np.uint32)
        counts, stream = map(np.ascontiguousarray, (self.counts, self.stream))
        fields = (stream, self.index_bits, self.levels.bits, *value_kind(self.levels))
        return (counts, self.count_bits, directory, wide, self.entries, *fields, self.rows)

    def read_counts(self, positions: Ids) -> Ids:
        """Return the number of codes of rows, unchecked."""
        found = bits.unpack(self.counts, positions * self.count_bits, self.count_bits)
        return found.astype(np.int64)

    def spans(self, positions: Ids) -> tuple[Ids, Ids]:
        """Return the first entry [B] and the number of entries [B] of rows.

        Counts that contradict the directory are refused.
        """
        block, last = positions // DIRECTORY_STEP, len(self.directory) - 1
        members = block[:, None] * DIRECTORY_STEP + np.arange(DIRECTORY_STEP)
        inside = members < self.rows
        sizes = self.read_counts(np.where(inside, members, 0)) * inside
        ends = self.directory[np.minimum(block + 1, last)].astype(np.int64)
        ends[block == last] = self.entries  # other blocks end where the next one begins
        return self.spans_in_blocks(positions, sizes, self.directory[block].astype(np.int64), ends)

    def spans_in_blocks(
        self, positions: Ids, sizes: Ids, begins: Ids, ends: Ids
    ) -> tuple[Ids, Ids]:
        """Return ``spans``, given the sizes [B, 16] of the rows of their blocks, and their
        bounds."""
        each, at = np.arange(len(positions)), positions % DIRECTORY_STEP
        totals = sizes.cumsum(1)
        count = sizes[each, at]
        first = begins + totals[each, at] - count
        wrong = (begins < 0) | (begins > ends) | (ends > self.entries) | (count > MOST_CODES)
        if np.any(wrong | (totals[:, -1] != ends - begins)):
            raise FormatError(CONTRADICTION)
        return first, count

    def fetch(self, positions: Ids, atoms: int) -> tuple[Ids, Floats]:
        """Return indices and values of rows, padded with value 0 to the longest row."""
        first, count = self.spans(positions)
        slot = np.arange(int(count.max(initial=0)))
        used = slot < count[:, None]
        start = np.where(used, first[:, None] + slot, 0) * (self.index_bits + self.levels.bits)
        indices = bits.unpack(self.stream, start, self.index_bits).astype(np.int64) * used
        check_indices(indices, atoms)
        raw = bits.unpack(self.stream, start + self.index_bits, self.levels.bits)
        return indices, np.where(used, self.levels.decode(raw), np.float32(0))

    def row_fetcher(self, atoms: int) -> RowFetcher:
        """Return ``fetch`` of one row: from its position to its indices [s] and values [s]."""
        counts, entries = bits.field_reader(self.counts), bits.field_reader(self.stream)
        index_bits, value_bits = self.index_bits, self.levels.bits
        width, last = index_bits + value_bits, len(self.directory) - 1

        def fetch(position: int) -> tuple[Any, Floats | None]:
            block, at = divmod(position, DIRECTORY_STEP)
            ends = range(min(DIRECTORY_STEP, self.rows - position + at) * self.count_bits)
            record = counts((position - at) * self.count_bits, len(ends))
            sizes = bits.fields(record, self.count_bits, ends[:: self.count_bits or 1])
            first, count = int(self.directory[block]), sizes[at] if sizes else 0
            end = self.entries if block == last else int(self.directory[block + 1])
            if first + sum(sizes) != end or end > self.entries or count > MOST_CODES:
                raise FormatError(CONTRADICTION)
            record = entries((first + sum(sizes[:at])) * width, count * width)
            indices = bits.fields(record, index_bits, range(0, count * width, width))
            if max(indices, default=0) >= atoms:
                check_indices(np.array(indices), atoms)
            raw = bits.fields(record, value_bits, range(index_bits, count * width, width))
            return indices, self.levels.decode(np.array(raw, dtype=np.uint32))

        return fetch

    def all_entries(self, atoms: int) -> Entries:
        """Return the entries of all rows."""
        counts = self.read_counts(np.arange(self.rows))
        start = np.arange(self.entries) * (self.index_bits + self.levels.bits)
        indices = bits.unpack(self.stream, start, self.index_bits).astype(np.int64)
        raw = bits.unpack(self.stream, start + self.index_bits, self.levels.bits)
        row_of = np.repeat(np.arange(self.rows), counts)
        return Entries(self.rows, atoms, row_of, indices, self.levels.decode(raw))


Codes = Identity | Hash | Remainder | Every | Fixed | Ragged
IMPLICIT = (Identity, Hash, Remainder)


def code_count(codes: Codes) -> int | None:
    """Return the number of codes of every row; None if rows differ, or use every atom."""
    match codes:
        case Identity():
            return 1
        case Hash():
            return codes.hashes
        case Remainder():
            return 2
        case Fixed():
            return codes.count
    return None


def check_indices(indices: Ids, atoms: int) -> None:
    """Refuse indices beyond the last atom."""
    if indices.size and int(indices.max()) >= atoms:
        raise FormatError(f"code {int(indices.max())} is out of range: there are {atoms} atoms")


def arrays(codes: Codes) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Yield the stored arrays of a layout by name."""
    for field in fields(codes):
        part = getattr(codes, field.name)
        if isinstance(part, np.ndarray):
            yield field.name, part
        elif isinstance(part, ValueLevels) and part.table is not None:
            yield "levels", part.table


@dataclass(eq=False)
class Entries:
    """The nonzero entries of a sparse matrix [rows, atoms], sorted by row and index."""

    rows: int
    atoms: int
    row_of: Ids
    indices: Ids
    values: NDArray[np.floating]

    @classmethod
    def of(
        cls,
        values: NDArray[np.floating],  # [V, K], or [V, s] with a support
        support: NDArray[np.integer] | None = None,  # [V, s], distinct in a row
        atoms: int | None = None,  # K
    ) -> Entries:
        """Return the entries of a matrix, or of its values and their columns."""
        row_of, indices = np.nonzero(values)
        entries = values[row_of, indices]
        if support is not None:
            indices = support[row_of, indices].astype(np.int64)
            order = np.lexsort((indices, row_of))
            indices, entries = indices[order], entries[order]
        return cls(len(values), atoms or values.shape[1], row_of, indices, entries)

    @classmethod
    def joined(cls, parts: list[Entries]) -> Entries:
        """Return the entries of matrices one below the other.

        >>> part = Entries.of(np.eye(2, dtype=np.float32))
        >>> Entries.joined([part, part]).row_of
        array([0, 1, 2, 3])
        """
        starts = np.cumsum([0, *(part.rows for part in parts)])
        rows = [part.row_of + start for part, start in zip(parts, starts[:-1], strict=True)]
        others = zip(*((part.indices, part.values) for part in parts), strict=True)
        return cls(
            int(starts[-1]), parts[0].atoms, np.concatenate(rows), *map(np.concatenate, others)
        )

    def layout(self, layout: str, kind: str) -> tuple[Codes, NDArray[np.floating] | None]:
        """Return a layout: "fixed", "ragged", "all" (dense), or the smallest, "auto".

        The second result is the dense matrix of values that the layout "all" needs, else None.
        """
        if layout not in ("auto", "fixed", "ragged", "all"):
            raise ArgumentError(f"layout={layout!r}: use auto, fixed, ragged or all")
        rows, atoms, row_of, indices = self.rows, self.atoms, self.row_of, self.indices
        counts = np.bincount(row_of, minlength=rows)
        most, entry = int(counts.max(initial=0)), bits.width(atoms) + level_bits(kind)
        sizes = {
            "fixed": rows * max(most, 1) * entry,
            "ragged": len(indices) * entry + rows * (bits.width(most + 1) + 2),
            "all": rows * atoms * level_bits(kind) + (32 * rows if level_bits(kind) < 16 else 0),
        }
        if most > MOST_CODES:
            del sizes["fixed"], sizes["ragged"]
            if layout in ("fixed", "ragged"):
                raise ArgumentError(
                    f"layout={layout!r}: a row has {most} codes, {MOST_CODES} is the most; "
                    "use layout='all'"
                )
        if layout == "auto":
            layout = min(sizes, key=lambda name: sizes[name])
        if layout == "all":
            dense = np.zeros((rows, atoms), dtype=self.values.dtype)
            dense[row_of, indices] = self.values
            return Every(), dense
        if layout == "ragged":
            return Ragged.encode(rows, row_of, indices, self.values, atoms, kind), None
        slots = np.arange(len(row_of)) - (np.cumsum(counts) - counts)[row_of]
        wide_indices = np.zeros((rows, max(most, 1)), dtype=np.int64)
        wide_values = np.zeros((rows, max(most, 1)), dtype=np.float32)
        wide_indices[row_of, slots], wide_values[row_of, slots] = indices, self.values
        return Fixed.encode(wide_indices, wide_values, atoms, kind), None


BLOCK_BITS = 512  # ids of a member bitmap between two directory entries
_WORDS = BLOCK_BITS // 32


@dataclass(eq=False)
class Members:
    """The ids of a band, as a bitmap with running totals; other ids belong to a later band."""

    bitmap: NDArray[np.uint32]  # bit i of word i // 32: id i is a member; whole blocks of 512 bits
    totals: NDArray[np.uint32]  # members before each block

    @classmethod
    def of(cls, ids: Ids, rows: int) -> Members:
        """Return the bitmap of ``ids`` among ``rows`` ids.

        >>> Members.of(np.array([1, 4]), 6).split(np.array([0, 1, 4, 5]))
        (array([False,  True,  True, False]), array([0, 0, 1, 2]))
        """
        flags = np.zeros(-(-max(rows, 1) // BLOCK_BITS) * BLOCK_BITS, dtype=np.uint8)
        flags[ids] = 1
        bitmap = np.packbits(flags, bitorder="little").view("<u4")
        counts = np.bitwise_count(bitmap).reshape(-1, _WORDS).sum(1)
        return cls(bitmap, (np.cumsum(counts) - counts).astype(np.uint32))

    def split(self, positions: Ids) -> tuple[NDArray[np.bool_], Ids]:
        """Return whether each position is a member, and the number of members before it."""
        word, bit = positions >> 5, (positions & 31).astype(np.uint32)
        block = positions // BLOCK_BITS
        words = self.bitmap.reshape(-1, _WORDS)[block]  # [B, 16]
        column = np.arange(_WORDS) + block[:, None] * _WORDS
        below = np.where(column < word[:, None], words, np.uint32(0))
        here = self.bitmap[word]
        inside = ((here >> bit) & 1).astype(bool)
        rank = self.totals[block].astype(np.int64) + np.bitwise_count(below).sum(1, dtype=np.int64)
        rank += np.bitwise_count(here & ((np.uint32(1) << bit) - np.uint32(1)))
        return inside, rank

    def find(self, position: int) -> tuple[bool, int]:
        """Return ``split`` of one position."""
        block, bit = divmod(position, BLOCK_BITS)
        flags = int.from_bytes(self.bitmap[block * _WORDS : (block + 1) * _WORDS], "little")
        below = (flags & ((1 << bit) - 1)).bit_count()
        return bool((flags >> bit) & 1), int(self.totals[block]) + below


def _product(rows: Floats, weight: Floats) -> Floats:  # [B, d'], [d', d] -> [B, d]
    """Return rows @ weight, a narrow one in blocks for which BLAS wakes no threads.

    Waking them takes longer than the product, and they wait by spinning where our threads work.
    """
    block = ALONE // max(1, weight.size)
    if not FEWEST <= block < len(rows) or len(rows) * weight.size > TOGETHER:
        return rows @ weight
    out = np.empty((len(rows), weight.shape[1]), dtype=np.float32)
    for start in range(0, len(rows), block):
        np.matmul(rows[start : start + block], weight, out=out[start : start + block])
    return out


@dataclass(eq=False)
class Affine:
    """The last stage of the composer: y_i = norms_i (x_i @ weight + bias).

    The weight is a projection or a rotation, the bias a mean; norms keep the length of each row.
    """

    weight: Matrix | None = None  # [d', d]
    bias: Floats | None = None  # [d]
    norms: Matrix | None = None  # [rows, 1]

    @property
    def is_identity(self) -> bool:
        """Whether there is neither a weight nor a bias."""
        return self.weight is None and self.bias is None

    def __call__(self, rows: Floats, positions: Ids) -> Floats:  # [B, d'] -> [B, d]
        """Apply the stage to the rows at ``positions``."""
        if self.weight is not None:
            rows = _product(rows, self.weight.dense())
        rows = rows if self.bias is None else rows + self.bias
        return rows if self.norms is None else rows * self.norms.rows(positions)


@dataclass(eq=False)
class Band:
    """``rows`` rows: codes over a dictionary, and the stages of the composer.

    row = affine(cell(combine(dictionary[indices], values)) + plus)

    >>> band = Band(2, Identity(), dictionary=Matrix.encode(np.eye(2, dtype=np.float32), "float32"))
    >>> band.lookup(np.array([1]), np.array([1]))
    array([[0., 1.]], dtype=float32)
    """

    rows: int
    codes: Codes
    values: Matrix | Graded | None = None  # [rows, s], or [rows, K] with Every
    dictionary: Matrix | None = None  # [K, d']; None: the values are the row
    combine: str = "sum"
    cell: Cell | None = None
    affine: Affine | None = None
    members: Members | None = None  # None: all ids that no earlier band holds
    plus: Band | None = None  # a layer of the same rows, added before the affine stage

    def __getstate__(self) -> dict[str, Any]:
        """Leave the plan out of copies and pickles: it holds addresses."""
        return {name: part for name, part in self.__dict__.items() if name != "_plan"}

    @property
    def atoms(self) -> int:
        """Number of rows of the dictionary."""
        return 0 if self.dictionary is None else self.dictionary.shape[0]

    @property
    def norms(self) -> Matrix | None:
        """The factor of each row in the affine stage, [rows, 1]."""
        return None if self.affine is None else self.affine.norms

    @property
    def gathered(self) -> int:
        """The largest number of floats (or codes) held for one row while it is composed."""
        widths = [1, *(m.shape[1] for m in (self.dictionary, self.values) if m is not None)]
        if self.affine is not None and self.affine.weight is not None:
            widths.append(self.affine.weight.shape[1])
        match self.codes:
            case Fixed():
                count = self.codes.count
            case Ragged():
                count = min(1 << self.codes.count_bits, MOST_CODES)
            case Hash():
                count = self.codes.hashes
            case _:
                count = 2
        if self.cell is not None:
            widths.append(8 * self.cell.width)
        if self.combine != "sum" and self.dictionary is not None:  # all atoms of a row at once
            widths.append(self.dictionary.shape[1] * count)
        own = max(*widths, 4 * count)
        return own if self.plus is None else max(own, self.plus.gathered)

    @property
    def layers(self) -> Iterator[Band]:
        """This band and the layers added to it."""
        yield self
        if self.plus is not None:
            yield from self.plus.layers

    @property
    def linear(self) -> bool:
        """Whether a score q . row is a sum over codes of q (or the code's part of q) . atom."""
        if self.cell is not None or self.dictionary is None or isinstance(self.codes, Identity):
            return False
        return self.combine == "sum" or self._concatenates

    @property
    def _concatenates(self) -> bool:
        """Whether a row is the atoms of fixed codes side by side (product quantization)."""
        return self.combine == "concat" and isinstance(self.codes, Fixed)

    def fetch(self, ids: Ids, positions: Ids) -> tuple[Ids, Floats | None]:
        """Return the indices [B, s] of rows and their values [B, s], None if all are 1."""
        if isinstance(self.codes, Fixed | Ragged):
            return self.codes.fetch(positions, self.atoms)
        assert isinstance(self.codes, IMPLICIT)
        indices = self.codes.indices(ids, positions, self.atoms)
        check_indices(indices, self.atoms)
        return indices, None if self.values is None else self.values.rows(positions)

    def row_reader(self, compiled: bool) -> Callable[[int], Floats]:  # position -> [d]
        """Return a function that returns one row, without the cost of arrays of one element.

        Only for a band of all ids: an id is its position.
        """
        own = self._own_reader(compiled)
        plus = None if self.plus is None else self.plus.row_reader(compiled)
        if plus is None and self.cell is None and self.affine is None:
            return own
        affine = self.affine or Affine()
        weight, bias, norms = affine.weight, affine.bias, affine.norms
        norm = None if norms is None else norms.row_reader(compiled)

        def read(position: int) -> Floats:
            row = own(position)
            if self.cell is not None:
                row = self.cell(row[None])[0]
            if plus is not None:
                row = row + plus(position)
            if weight is not None:
                row = (row[None] @ weight.dense())[0]
            if bias is not None:
                row = row + bias
            return row if norm is None else row * norm(position)

        return read

    def _own_reader(self, compiled: bool) -> Callable[[int], Floats]:  # position -> [d']
        """Return a reader of the combined atoms of this layer alone."""
        codes, shared = self.codes, self.dictionary
        stored = shared if isinstance(codes, Identity) and self.values is None else self.values
        if isinstance(stored, Matrix) and (stored is shared or shared is None):
            return stored.row_reader(compiled)
        if compiled and isinstance(codes, Fixed | Ragged) and self._has_loop:
            return partial(self._plan.row, self._row_width)
        if isinstance(codes, Fixed | Ragged) and self._has_loop:
            assert shared is not None
            fetch, dense, concat = codes.row_fetcher(self.atoms), shared.dense(), self._concatenates

            def combine_row(position: int) -> Floats:
                indices, values = fetch(position)
                atoms: Any = dense.take(indices, 0)
                if values is not None:
                    atoms *= values[:, None]
                row: Floats = atoms.reshape(-1) if concat else np.add.reduce(atoms, axis=0)
                return row

            return combine_row

        def read(position: int) -> Floats:
            at = np.array([position])
            rows = self._stored_rows(at) if isinstance(codes, Every) else self._combine(at, at)
            return rows.reshape(-1)

        return read

    def lookup(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [B, d]
        """Return the rows of ids at ``positions`` of this band."""
        rows = self.own_rows(ids, positions)
        if self.plus is not None:
            rows = rows + self.plus.lookup(ids, positions)
        return rows if self.affine is None else self.affine(rows, positions)

    def own_rows(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [B, d']
        """Return the rows of this layer alone, before the affine stage: combine, then the cell."""
        every = isinstance(self.codes, Every)
        rows = self._stored_rows(positions) if every else self._combine(ids, positions)
        return rows if self.cell is None else self.cell(rows)

    def _stored_rows(self, positions: Ids) -> Floats:  # [B] -> [B, d']
        """Return the stored values of rows, times the dictionary if there is one."""
        assert self.values is not None
        rows = self.values.rows(positions)
        return rows if self.dictionary is None else _product(rows, self.dictionary.dense())

    @cached_property
    def _has_loop(self) -> bool:
        """Whether a compiled loop combines the atoms of these rows."""
        assert self.dictionary is not None
        combined = self.combine == "sum" or self._concatenates
        return combined and keeps_decoded(self.dictionary)

    @property
    def _row_width(self) -> int:
        """Width of the combined atoms of a row."""
        assert self.dictionary is not None
        count = self.codes.count if isinstance(self.codes, Fixed) and self._concatenates else 1
        return count * self.dictionary.shape[1]

    def _combine(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [B, d']
        """Combine the atoms of rows, by a compiled loop if there is one."""
        assert self.dictionary is not None
        if isinstance(self.codes, Identity) and self.values is None:
            return self.dictionary.rows(positions)
        if not self._has_loop or not engine.kernels(len(ids)):
            return self._combine_by_numpy(ids, positions)
        out = engine.empty(len(ids), self._row_width)
        if isinstance(self.codes, Fixed | Ragged):
            if engine.shaped_loops():
                self._plan.run(out, np.ascontiguousarray(positions))
                return out
            if self._concatenates:
                return self._combine_by_numpy(ids, positions)
        indices, values = self.fetch(ids, positions)
        weights = np.ones(indices.shape, dtype=np.float32) if values is None else values
        given = (indices, weights, self.dictionary.dense())
        engine.Plan("gathered_rows", *map(np.ascontiguousarray, given)).run(out)
        return out

    def _combine_by_numpy(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [B, d']
        """Combine the atoms of rows with numpy.

        Sums go code by code, in the order of the compiled loops, so that little is held at once.
        """
        assert self.dictionary is not None
        indices, values = self.fetch(ids, positions)
        if self.combine != "sum":
            rows: Floats = combine(gather(self.dictionary, indices), values, self.combine)
            return rows
        if len(ids) == 1:
            atoms = gather(self.dictionary, indices[0])
            atoms = atoms if values is None else atoms * values[0][:, None]
            return np.add.reduce(atoms, axis=0, keepdims=True)
        counts = self.codes.spans(positions)[1] if isinstance(self.codes, Ragged) else None
        total = np.zeros((len(ids), self.dictionary.shape[1]), dtype=np.float32)
        for j in range(indices.shape[1]):
            at = slice(None) if counts is None else np.flatnonzero(counts > j)
            part = gather(self.dictionary, indices[at, j])
            if values is not None:
                part = part * values[at, j, None]
            total[at] = part if j == 0 else total[at] + part
        return total

    @cached_property
    def _plan(self) -> engine.Plan:
        """The compiled loop that combines the atoms of these rows, with its constant arguments."""
        assert self.dictionary is not None and isinstance(self.codes, Fixed | Ragged)
        dense, concat = self.dictionary.dense(), self._concatenates
        if isinstance(self.codes, Ragged):
            atoms, shape = engine.on_line(dense, CACHE_BYTES), (*self.codes.shape, dense.shape[1])
            return engine.Plan("ragged_rows", *self.codes.arguments(), atoms, shape=shape)
        place = engine.on_line if concat else engine.in_strips
        atoms = place(dense, CACHE_BYTES)
        shape = (*self.codes.shape, self.codes.stride(len(dense)), atoms.shape[1])
        shape += (dense.shape[1] // atoms.shape[1], concat)
        return engine.Plan("fixed_rows", *self.codes.arguments(len(dense)), atoms, shape=shape)

    def arrays(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Yield every stored array by name."""
        if self.members is not None:
            yield "members.bitmap", self.members.bitmap
            yield "members.totals", self.members.totals
        yield from ((f"codes.{name}", array) for name, array in arrays(self.codes))
        if self.cell is not None:
            yield from ((f"cell.{name}", array) for name, array in self.cell.arrays())
        affine = self.affine or Affine()
        matrices: dict[str, Matrix | Graded | None] = {
            "values": self.values,
            "dictionary": self.dictionary,
            "affine.weight": affine.weight,
            "norms": affine.norms,
        }
        for name, matrix in matrices.items():
            if matrix is not None:
                yield from matrix.arrays(name)
        if affine.bias is not None:
            yield "affine.bias", affine.bias
        if self.plus is not None:
            yield from ((f"plus.{name}", array) for name, array in self.plus.arrays())


def keeps_decoded(dictionary: Matrix) -> bool:
    """Return whether a dictionary is float32, or small enough to be decoded once and kept."""
    size = dictionary.shape[0] * dictionary.shape[1] * 4
    return dictionary.kind == "float32" or size <= CACHE_BYTES


def gather(dictionary: Matrix, indices: Ids) -> Floats:  # [...] -> [..., d']
    """Return the atoms at ``indices``; a small dictionary is decoded once."""
    if keeps_decoded(dictionary):
        return dictionary.dense()[indices]
    return dictionary.rows(indices.reshape(-1)).reshape(*indices.shape, dictionary.shape[1])


def join_bands(parts: list[Band], layout: str, kind: str) -> Band:
    """Return bands of the same table one below the other; shared parts are those of the first.

    Ragged codes take the ``layout`` and values of ``kind`` that all entries together would have.

    >>> eye = Matrix.encode(np.eye(2, dtype=np.float32), "float32")
    >>> join_bands([Band(2, Identity(), dictionary=eye)] * 2, "auto", "float32").rows
    4
    """
    first, rows = parts[0], sum(part.rows for part in parts)
    codes, values, dictionary = first.codes, first.values, first.dictionary
    if len(parts) == 1 and not isinstance(codes, Ragged):
        return first
    if isinstance(codes, Identity):
        dictionary = joined_matrix([part.dictionary for part in parts])
    elif values is not None:
        values = joined_matrix([part.values for part in parts])
    if isinstance(codes, Fixed):
        every = [p.codes.field(np.arange(p.rows), 0, codes.count) for p in parts]  # type: ignore[union-attr]
        codes = Fixed.encode(
            np.concatenate(every), None, codes.choices(first.atoms), parts=codes.parts
        )
    elif isinstance(codes, Ragged):
        entries = [part.codes.all_entries(first.atoms) for part in parts]  # type: ignore[union-attr]
        codes, dense = Entries.joined(entries).layout(layout, kind)
        values = None if dense is None else Matrix.encode(dense, kind)
    return replace(first, rows=rows, codes=codes, values=values, dictionary=dictionary)


def joined_matrix(parts: list[Any]) -> Matrix:
    """Return stored matrices one below the other."""
    first: Matrix = parts[0]
    scale = first.scale
    if scale is not None and first.axis == 0:
        scale = np.concatenate([part.scale for part in parts])
    data = np.concatenate([part.data for part in parts])
    return replace(first, shape=(len(data), first.shape[1]), data=data, scale=scale, _decoded=None)
