"""Where a row's indices and values come from: the layouts of the packed form.

``Identity``, ``Hash``, ``Remainder`` and ``Every`` store nothing for a row (hash and remainder are taken of the id, identity
of the row's position in its band); ``Fixed`` stores s codes a row, ``Ragged`` as many as the row has.
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
from featherbed.packed.levels import Levels, value_kind
from featherbed.packed.matrix import Floats, level_bits

Ids = NDArray[np.int64]
MOST_CODES = 4096  # a row may have
DIRECTORY_STEP = 16  # rows of a ragged layout between two directory entries


@dataclass(frozen=True)
class Identity:
    """Row i of the band is atom i."""

    def indices(self, ids: Ids, positions: Ids, atoms: int) -> Ids:  # noqa: ARG002 - one signature for all layouts
        """Return the position itself."""
        return positions[:, None]


@dataclass(frozen=True)
class Hash:
    """Row of id x is made of atoms h_1(x), ..., h_k(x)."""

    seed: int
    hashes: int

    def indices(self, ids: Ids, positions: Ids, atoms: int) -> Ids:  # noqa: ARG002
        """Return the buckets of ids."""
        return np.stack(hash_codes(ids, seed=self.seed, hashes=self.hashes, buckets=atoms), axis=1)


@dataclass(frozen=True)
class Remainder:
    """Row of id x is made of atoms x // divisor and quotients + x mod divisor, quotients = atoms - divisor."""

    divisor: int

    def indices(self, ids: Ids, positions: Ids, atoms: int) -> Ids:  # noqa: ARG002
        """Return the two parts of ids."""
        return np.stack([ids // self.divisor, atoms - self.divisor + ids % self.divisor], axis=1)


@dataclass(frozen=True)
class Every:
    """Every row uses every atom: row = values @ dictionary (or the values are the row, without a dictionary)."""


@dataclass(eq=False)
class Fixed:
    """s codes a row, row after row in one bit stream: s index fields, then s value fields (none for unit values)."""

    rows: int
    count: int
    index_bits: int
    stream: bits.Words
    levels: Levels | None = None
    parts: bool = False  # with parts, code j indexes the j-th block of the dictionary

    @property
    def shape(self) -> tuple[int, ...]:
        """What the compiled loops are made for: codes, index bits, value bits, kind of values."""
        value_bits = self.levels.bits if self.levels else 0
        return (self.count, self.index_bits, value_bits, value_kind(self.levels)[0])

    def choices(self, atoms: int) -> int:
        """How many atoms a code chooses among."""
        return atoms // self.count if self.parts else atoms

    def stride(self, atoms: int) -> int:
        """How far apart the parts of the dictionary are: 0 where all codes share it."""
        return self.choices(atoms) if self.parts else 0

    def arguments(self, atoms: int) -> tuple[Any, ...]:
        """Return what the compiled loops want to know of this layout."""
        return (np.ascontiguousarray(self.stream), value_kind(self.levels)[1], self.choices(atoms))

    @property
    def bytewise(self) -> bool:
        """Whether indices and values take a byte each and come in eights: the layout of the fastest loop."""
        eights = self.count % 8 == 0 and self.index_bits == 8 and not self.parts
        return eights and self.levels is not None and self.levels.kind == "int8"

    def records(self) -> NDArray[np.uint64]:  # [V, s / 4]
        """Return the stream of a bytewise layout as words: eight indices each, then eight values each."""
        flat = np.ascontiguousarray(self.stream).view(np.uint8)[: self.rows * 2 * self.count]
        return flat.reshape(self.rows, 2 * self.count).view(np.uint64)

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
        """Store ``indices`` [V, s] below ``choices`` and, unless they are all one, ``values`` [V, s]."""
        rows, count = indices.shape
        index_bits = bits.width(choices)
        columns, widths = [indices.astype(np.uint32)], [index_bits] * count
        levels = None
        if values is not None:
            levels = Levels.fit(values, kind)
            columns.append(levels.encode(np.ascontiguousarray(values)))
            widths += [levels.bits] * count
        return cls(
            rows,
            count,
            index_bits,
            bits.pack(np.concatenate(columns, axis=1), widths),
            levels,
            parts,
        )

    def field(
        self, positions: Ids, first: int, last: int
    ) -> NDArray[np.unsignedinteger]:  # [B] -> [B, last - first]
        """Read codes ``first`` to ``last - 1`` of rows as they are stored: choices within a part, unchecked."""
        if self.index_bits == 8 and self.record_bits % 8 == 0:
            length = self.record_bits // 8
            records = (
                np.ascontiguousarray(self.stream)
                .view(np.uint8)[: self.rows * length]
                .reshape(self.rows, length)
            )
            return records[:, first:last][positions]
        start = positions[:, None] * self.record_bits + np.arange(first, last) * self.index_bits
        return bits.unpack(self.stream, start, self.index_bits)

    def fetch(
        self, positions: Ids, atoms: int
    ) -> tuple[Ids, Floats | None]:  # [B] -> indices [B, s], values [B, s]
        """Read the codes of rows; an index no atom stands behind is a FormatError."""
        indices = self.field(positions, 0, self.count).astype(np.int64)
        check_indices(indices, self.choices(atoms))
        indices += np.arange(self.count) * self.stride(atoms)
        if self.levels is None:
            return indices, None
        start = positions[:, None] * self.record_bits + self.count * self.index_bits
        raw = bits.unpack(
            self.stream, start + np.arange(self.count) * self.levels.bits, self.levels.bits
        )
        return indices, self.levels.decode(raw)


@dataclass(eq=False)
class Ragged:
    """As many codes as a row has: counts in a bit stream, a directory of running totals, then (index, value) entries."""

    rows: int
    entries: int
    index_bits: int
    count_bits: int
    counts: bits.Words
    directory: NDArray[np.unsignedinteger]  # entry number at which rows 0, 16, 32, ... start
    stream: bits.Words
    levels: Levels

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
        """Store entries (row_of, indices, values), sorted by row."""
        counts = np.bincount(row_of, minlength=rows)
        count_bits = bits.width(int(counts.max(initial=0)) + 1)
        totals = np.concatenate([[0], np.cumsum(counts)])[:-1][::DIRECTORY_STEP]
        levels, index_bits = Levels.fit(values, kind), bits.width(choices)
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

    def arguments(self) -> tuple[Any, ...]:
        """Return what the compiled loops want to know of this layout."""
        wide = int(self.directory.itemsize == 8)
        directory = np.ascontiguousarray(self.directory).view(np.uint32)
        where = (np.ascontiguousarray(self.counts), self.count_bits, directory, wide, self.entries)
        return (
            *where,
            np.ascontiguousarray(self.stream),
            self.index_bits,
            self.levels.bits,
            *value_kind(self.levels),
            self.rows,
        )

    def spans(
        self, positions: Ids
    ) -> tuple[Ids, Ids]:  # [B] -> first entry [B], number of entries [B]
        """Return where the entries of rows stand; refuse counts that contradict the directory."""
        block, last = positions // DIRECTORY_STEP, len(self.directory) - 1
        members = block[:, None] * DIRECTORY_STEP + np.arange(DIRECTORY_STEP)
        inside = members < self.rows
        sizes = bits.unpack(
            self.counts, np.where(inside, members, 0) * self.count_bits, self.count_bits
        ).astype(np.int64)
        sizes *= inside
        ends = self.directory[np.minimum(block + 1, last)].astype(
            np.int64
        )  # a block ends where the next begins
        ends[block == last] = self.entries
        return self.placed(positions, sizes, self.directory[block].astype(np.int64), ends)

    def placed(
        self, positions: Ids, sizes: Ids, begins: Ids, ends: Ids
    ) -> tuple[Ids, Ids]:  # [B], [B, 16], [B], [B]
        """Return ``spans`` of positions, given the sizes of the rows of their blocks and where the blocks begin and end."""
        each, at = np.arange(len(positions)), positions % DIRECTORY_STEP
        totals = sizes.cumsum(1)
        count = sizes[each, at]
        first = begins + totals[each, at] - count
        wrong = (
            (begins < 0)
            | (begins > ends)
            | (ends > self.entries)
            | (count > MOST_CODES)
            | (totals[:, -1] != ends - begins)
        )
        if np.any(wrong):
            raise FormatError("ragged codes: the counts and the directory do not match each other")
        return first, count

    def fetch(
        self, positions: Ids, atoms: int
    ) -> tuple[Ids, Floats]:  # -> indices [B, most], values [B, most], 0-padded
        """Read the codes of rows, padded with value 0 to the longest."""
        first, count = self.spans(positions)
        slot = np.arange(int(count.max(initial=0)))
        used = slot < count[:, None]
        start = np.where(used, first[:, None] + slot, 0) * (self.index_bits + self.levels.bits)
        indices = np.where(
            used, bits.unpack(self.stream, start, self.index_bits).astype(np.int64), 0
        )
        check_indices(indices, atoms)
        values = self.levels.decode(
            bits.unpack(self.stream, start + self.index_bits, self.levels.bits)
        )
        return indices, np.where(used, values, np.float32(0))


Codes = Identity | Hash | Remainder | Every | Fixed | Ragged
IMPLICIT = (Identity, Hash, Remainder)


def check_indices(indices: Ids, atoms: int) -> None:
    """Refuse codes no atom stands behind."""
    if indices.size and int(indices.max()) >= atoms:
        raise FormatError(f"code {int(indices.max())} is out of range: there are {atoms} atoms")


def arrays(codes: Codes) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Yield the stored arrays of a layout by name."""
    for field in fields(codes):
        part = getattr(codes, field.name)
        if isinstance(part, np.ndarray):
            yield field.name, part
        elif isinstance(part, Levels) and part.table is not None:
            yield "levels", part.table


def sparse_layout(
    values: NDArray[np.floating],  # [V, K], or [V, s] with a support
    layout: str,
    kind: str,
    support: NDArray[np.integer] | None = None,  # [V, s], distinct in a row
    atoms: int | None = None,  # K
) -> tuple[Codes, NDArray[np.floating] | None]:
    """Choose how to store a sparse matrix of values: "fixed", "ragged", "all" (dense), or "auto", the smallest of them.

    Returns the layout, and the values left over for a matrix.
    """
    if layout not in ("auto", "fixed", "ragged", "all"):
        raise ArgumentError(f"layout={layout!r}: use auto, fixed, ragged or all")
    rows, atoms = len(values), atoms or values.shape[1]
    row_of, at = np.nonzero(values)
    entries, indices = (
        values[row_of, at],
        at if support is None else support[row_of, at].astype(np.int64),
    )
    if support is not None:
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
                f"layout={layout!r}: a row has {most} codes, {MOST_CODES} is the most; use layout='all'"
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
