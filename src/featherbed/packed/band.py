"""A band: the rows that share one layout, one dictionary and one composer; and which ids belong to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.compose import combine
from featherbed.errors import FormatError
from featherbed.packed import engine
from featherbed.packed.cells import Cell
from featherbed.packed.codes import (
    IMPLICIT,
    MOST_CODES,
    Codes,
    Every,
    Fixed,
    Hash,
    Identity,
    Ids,
    Ragged,
    arrays,
    check_indices,
)
from featherbed.packed.graded import Graded
from featherbed.packed.matrix import CACHE_BYTES, Floats, Matrix

BLOCK_BITS = 512  # ids of a member bitmap between two directory entries
_WORDS = BLOCK_BITS // 32


@dataclass(eq=False)
class Members:
    """Which ids are in a band, as a bitmap with running totals; the others go on to the next band."""

    bitmap: NDArray[np.uint32]  # bit i of word i // 32: id i is a member; whole blocks of 512 bits
    totals: NDArray[np.uint32]  # members before each block

    @classmethod
    def of(cls, ids: Ids, rows: int) -> Members:
        """Make the bitmap of ``ids`` among ``rows`` ids.

        >>> Members.of(np.array([1, 4]), 6).split(np.array([0, 1, 4, 5]))
        (array([False,  True,  True, False]), array([0, 0, 1, 2]))
        """
        flags = np.zeros(-(-max(rows, 1) // BLOCK_BITS) * BLOCK_BITS, dtype=np.uint8)
        flags[ids] = 1
        bitmap = np.packbits(flags, bitorder="little").view("<u4")
        counts = np.bitwise_count(bitmap).reshape(-1, _WORDS).sum(1)
        return cls(bitmap, (np.cumsum(counts) - counts).astype(np.uint32))

    def split(self, positions: Ids) -> tuple[NDArray[np.bool_], Ids]:
        """Tell which positions are members, and how many members stand before each."""
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


@dataclass(eq=False)
class Affine:
    """The last stage of the composer: y = x @ weight + bias (a projection, a rotation, a folded normalisation, a mean)."""

    weight: Matrix | None = None  # [d', d]
    bias: Floats | None = None  # [d]

    def __call__(self, rows: Floats) -> Floats:  # [B, d'] -> [B, d]
        """Apply the stage."""
        if self.weight is not None:
            rows = rows @ self.weight.dense()
        return rows if self.bias is None else rows + self.bias


@dataclass(eq=False)
class Band:
    """``rows`` rows: codes over a dictionary, combined, a cell, a layer added, then the affine stage and the row's length.

    row = norms * affine(cell(combine(dictionary[indices], values)) + plus)

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
    members: Members | None = None  # None: all the ids that are left
    norms: Matrix | None = None  # [rows, 1]: what each row is multiplied by at last
    plus: Band | None = None  # a layer of the same rows that is added before the affine stage

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave the plan behind: it holds addresses."""
        return {name: part for name, part in self.__dict__.items() if name != "_plan"}

    @property
    def atoms(self) -> int:
        """Rows of the dictionary."""
        return 0 if self.dictionary is None else self.dictionary.shape[0]

    @property
    def gathered(self) -> int:
        """Floats (or codes) held for a row on the way to it, at most."""
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
        own = max(*widths, 4 * count)
        if (
            self.combine != "sum" and self.dictionary is not None
        ):  # every atom of a row is held at once
            own = max(own, self.dictionary.shape[1] * count)
        return own if self.plus is None else max(own, self.plus.gathered)

    @property
    def layers(self) -> Iterator[Band]:
        """This band and those that are added to it."""
        yield self
        if self.plus is not None:
            yield from self.plus.layers

    @property
    def linear(self) -> bool:
        """Whether a score q . row is a sum over the codes: of q . atom, or with concat of (the code's part of q) . atom."""
        if self.cell is not None or self.dictionary is None or isinstance(self.codes, Identity):
            return False
        return self.combine == "sum" or self._side_by_side

    @property
    def _side_by_side(self) -> bool:
        """Whether rows are atoms of fixed codes laid side by side (product quantisation)."""
        return self.combine == "concat" and isinstance(self.codes, Fixed)

    def fetch(
        self, ids: Ids, positions: Ids
    ) -> tuple[Ids, Floats | None]:  # -> indices [B, s], values [B, s] or None
        """Return indices and values of rows, whatever their layout."""
        if isinstance(self.codes, Fixed | Ragged):
            return self.codes.fetch(positions, self.atoms)
        assert isinstance(self.codes, IMPLICIT)
        indices = self.codes.indices(ids, positions, self.atoms)
        check_indices(indices, self.atoms)
        return indices, None if self.values is None else self.values.rows(positions)

    def lookup(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [B, d]
        """Compose the rows of ids that stand at ``positions`` in this band."""
        rows = self.composed(ids, positions)
        if self.plus is not None:
            rows = rows + self.plus.lookup(ids, positions)
        rows = rows if self.affine is None else self.affine(rows)
        return rows if self.norms is None else rows * self.norms.rows(positions)

    def composed(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [B, d']
        """Compose this layer's own part of rows: what codes and cell say, before anything is added or multiplied."""
        rows = self.combined(ids, positions)
        return rows if self.cell is None else self.cell(rows)

    def combined(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [B, d']
        """Combine the atoms of rows."""
        if isinstance(self.codes, Every):
            assert self.values is not None
            rows = self.values.rows(positions)
            return rows if self.dictionary is None else rows @ self.dictionary.dense()
        return self._coded(ids, positions)

    def _coded(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [B, d']
        assert self.dictionary is not None
        if isinstance(self.codes, Identity) and self.values is None:
            return self.dictionary.rows(positions)
        coded = (self.combine == "sum" or self._side_by_side) and keeps_decoded(self.dictionary)
        if not coded or not engine.kernels(len(ids)):
            return self._plain(ids, positions)
        across = self.codes.count if isinstance(self.codes, Fixed) and self._side_by_side else 1
        out = engine.empty(len(ids), across * self.dictionary.shape[1])
        if isinstance(self.codes, Fixed | Ragged):
            self._plan.run(out, np.ascontiguousarray(positions))
        else:
            indices, values = self.fetch(ids, positions)
            weights = np.ones(indices.shape, dtype=np.float32) if values is None else values
            atoms = np.ascontiguousarray(self.dictionary.dense())
            engine.Plan(
                "gathered_rows", np.ascontiguousarray(indices), np.ascontiguousarray(weights), atoms
            ).run(out)
        return out

    def _plain(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [B, d']
        """Compose with numpy; sums go one code after the other, as in the compiled loops, so that little is held at once."""
        assert self.dictionary is not None
        indices, values = self.fetch(ids, positions)
        if self.combine != "sum":
            rows: Floats = combine(gather(self.dictionary, indices), values, self.combine)
            return rows
        used = (
            self.codes.spans(positions)[1]
            if isinstance(self.codes, Ragged)
            else np.full(len(ids), indices.shape[1])
        )
        total = np.zeros((len(ids), self.dictionary.shape[1]), dtype=np.float32)
        for j in range(indices.shape[1]):
            at = np.flatnonzero(used > j) if isinstance(self.codes, Ragged) else slice(None)
            part = gather(self.dictionary, indices[at, j])
            if values is not None:
                part = part * values[at, j, None]
            total[at] = part if j == 0 else total[at] + part
        return total

    @cached_property
    def _plan(self) -> engine.Plan:
        """The compiled loop that composes these rows, with all of its arguments that never change."""
        assert self.dictionary is not None
        atoms = engine.on_line(self.dictionary.dense(), CACHE_BYTES)
        if isinstance(self.codes, Ragged):
            return engine.Plan("ragged_rows", *self.codes.arguments(), atoms)
        assert isinstance(self.codes, Fixed)
        known = self.codes.arguments(len(atoms))
        if self._side_by_side:
            sides = (*self.codes.shape, self.codes.stride(len(atoms)), atoms.shape[1])
            return engine.Plan("concat_rows", *known, atoms, shape=sides)
        if self.codes.bytewise:
            return engine.Plan("byte_rows", self.codes.records(), *known[1:], atoms)
        shape = (*self.codes.shape, self.codes.stride(len(atoms)))
        return engine.Plan("fixed_rows", *known, atoms, shape=shape)

    def arrays(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Yield every stored array by name."""
        if self.members is not None:
            yield from (
                ("members.bitmap", self.members.bitmap),
                ("members.totals", self.members.totals),
            )
        yield from ((f"codes.{name}", array) for name, array in arrays(self.codes))
        if self.cell is not None:
            yield from ((f"cell.{name}", array) for name, array in self.cell.arrays())
        weight = None if self.affine is None else self.affine.weight
        matrices: dict[str, Matrix | Graded | None]
        matrices = {
            "values": self.values,
            "dictionary": self.dictionary,
            "affine.weight": weight,
            "norms": self.norms,
        }
        for name, matrix in matrices.items():
            if matrix is not None:
                yield name, matrix.data
                if matrix.scale is not None:
                    yield f"{name}.scale", matrix.scale
        if self.affine is not None and self.affine.bias is not None:
            yield "affine.bias", self.affine.bias
        if self.plus is not None:
            yield from ((f"plus.{name}", array) for name, array in self.plus.arrays())


def keeps_decoded(dictionary: Matrix) -> bool:
    """Whether the dictionary is float32 already, or small enough to be decoded once and kept."""
    return (
        dictionary.kind == "float32" or dictionary.shape[0] * dictionary.shape[1] * 4 <= CACHE_BYTES
    )


def gather(dictionary: Matrix, indices: Ids) -> Floats:  # [...] -> [..., d']
    """Fetch atoms; a dictionary worth keeping in memory is decoded once."""
    columns = dictionary.shape[1]
    if keeps_decoded(dictionary):
        return dictionary.dense()[indices]
    return dictionary.rows(indices.reshape(-1)).reshape(*indices.shape, columns)


def check_bands(bands: list[Band], rows: int) -> None:
    """Refuse bands that do not add up to ``rows``, or whose members do not count what they say."""
    if sum(band.rows for band in bands) != rows:
        raise FormatError(f"bands hold {[band.rows for band in bands]} rows; the table has {rows}")


def check_values(bands: list[Band]) -> None:
    """Read the scales of graded values: refuse those that are not finite."""
    for values in (layer.values for band in bands for layer in band.layers):
        if isinstance(values, Graded):
            values.check()
