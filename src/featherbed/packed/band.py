"""A band: rows that share one layout, one dictionary and one composer; and the ids it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.compose import combine
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
            rows = rows @ self.weight.dense()
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

    def lookup(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [B, d]
        """Return the rows of ids at ``positions`` of this band."""
        rows = self.own_rows(ids, positions)
        if self.plus is not None:
            rows = rows + self.plus.lookup(ids, positions)
        return rows if self.affine is None else self.affine(rows, positions)

    def own_rows(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [B, d']
        """Return the rows of this layer alone, before the affine stage: combine, then the cell."""
        if isinstance(self.codes, Every):
            assert self.values is not None
            rows = self.values.rows(positions)
            rows = rows if self.dictionary is None else rows @ self.dictionary.dense()
        else:
            rows = self._combine_atoms(ids, positions)
        return rows if self.cell is None else self.cell(rows)

    def _combine_atoms(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [B, d']
        """Combine the atoms of rows, by a compiled loop if there is one."""
        assert self.dictionary is not None
        if isinstance(self.codes, Identity) and self.values is None:
            return self.dictionary.rows(positions)
        has_loop = self.combine == "sum" or self._concatenates
        if not has_loop or not keeps_decoded(self.dictionary) or not engine.kernels(len(ids)):
            return self._combine_by_numpy(ids, positions)
        across = self.codes.count if isinstance(self.codes, Fixed) and self._concatenates else 1
        out = engine.empty(len(ids), across * self.dictionary.shape[1])
        if isinstance(self.codes, Fixed | Ragged):
            self._plan.run(out, np.ascontiguousarray(positions))
            return out
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
        atoms = engine.on_line(self.dictionary.dense(), CACHE_BYTES)
        shape = (*self.codes.shape, atoms.shape[1])
        if isinstance(self.codes, Ragged):
            return engine.Plan("ragged_rows", *self.codes.arguments(), atoms, shape=shape)
        shape = (*self.codes.shape, self.codes.stride(len(atoms)), atoms.shape[1])
        known = (*self.codes.arguments(len(atoms)), atoms)
        return engine.Plan("fixed_rows", *known, shape=(*shape, self._concatenates))

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
