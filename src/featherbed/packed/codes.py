"""The layouts of codes: how the indices and values of a row are stored or computed.

``Identity``, ``Hash``, ``Remainder`` and ``Every`` store nothing per row (hash and remainder are
computed from the id, identity from the row's position in its band); ``Fixed`` stores s codes for
each row, ``Ragged`` a different number for each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, FormatError
from featherbed.hashing import hash_codes
from featherbed.packed import bits
from featherbed.packed.levels import ValueLevels, value_kind
from featherbed.packed.matrix import Floats, level_bits

Ids = NDArray[np.int64]
MOST_CODES = 4096  # of a row
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
    """s codes per row in one bit stream: s index fields, then s value fields (none if all are 1)."""

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

    def field(self, positions: Ids, first: int, last: int) -> NDArray[np.unsignedinteger]:
        """Return codes ``first`` to ``last - 1`` of rows: choices within a part, unchecked."""
        if self.index_bits == 8 and self.record_bits % 8 == 0:
            length = self.record_bits // 8
            flat = np.ascontiguousarray(self.stream).view(np.uint8)[: self.rows * length]
            return flat.reshape(self.rows, length)[:, first:last][positions]
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
    """Any number of codes per row: a stream of counts, a directory of totals, a stream of entries."""

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
        """Return ``spans``, given the sizes [B, 16] of the rows of their blocks, and their bounds."""
        each, at = np.arange(len(positions)), positions % DIRECTORY_STEP
        totals = sizes.cumsum(1)
        count = sizes[each, at]
        first = begins + totals[each, at] - count
        wrong = (begins < 0) | (begins > ends) | (ends > self.entries) | (count > MOST_CODES)
        if np.any(wrong | (totals[:, -1] != ends - begins)):
            raise FormatError("ragged codes: the counts and the directory do not match each other")
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


def sparse_layout(
    values: NDArray[np.floating],  # [V, K], or [V, s] with a support
    layout: str,
    kind: str,
    support: NDArray[np.integer] | None = None,  # [V, s], distinct in a row
    atoms: int | None = None,  # K
) -> tuple[Codes, NDArray[np.floating] | None]:
    """Return the layout of a sparse matrix: "fixed", "ragged", "all" (dense), or the smallest, "auto".

    The second result is the dense matrix of values that the layout "all" needs, else None.
    """
    if layout not in ("auto", "fixed", "ragged", "all"):
        raise ArgumentError(f"layout={layout!r}: use auto, fixed, ragged or all")
    rows, atoms = len(values), atoms or values.shape[1]
    row_of, indices = np.nonzero(values)
    entries = values[row_of, indices]
    if support is not None:
        indices = support[row_of, indices].astype(np.int64)
        order = np.lexsort((indices, row_of))
        indices, entries = indices[order], entries[order]
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
        dense = np.zeros((rows, atoms), dtype=values.dtype)
        dense[row_of, indices] = entries
        return Every(), dense
    if layout == "ragged":
        return Ragged.encode(rows, row_of, indices, entries, atoms, kind), None
    slots = np.arange(len(row_of)) - (np.cumsum(counts) - counts)[row_of]
    wide_indices = np.zeros((rows, max(most, 1)), dtype=np.int64)
    wide_values = np.zeros((rows, max(most, 1)), dtype=np.float32)
    wide_indices[row_of, slots], wide_values[row_of, slots] = indices, entries
    return Fixed.encode(wide_indices, wide_values, atoms, kind), None
