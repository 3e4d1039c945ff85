"""Values stored next to their index in a code: float32, float16, or one of a few levels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError
from featherbed.packed.matrix import Floats, level_bits


def _lloyd(values: NDArray[np.floating], count: int, rounds: int = 60) -> NDArray[np.float64]:
    """Return the better of two fits of ``count`` levels by Lloyd's algorithm.

    One starts from even steps, the other from levels as dense as the cube root of the density of
    the values, which is best where there are many levels (Panter and Dite 1951).
    """
    data = np.sort(values.astype(np.float64))
    sums = np.concatenate([[0.0], np.cumsum(data)])
    squares = np.concatenate([[0.0], np.cumsum(data * data)])
    density, edges = np.histogram(data, bins=4096)
    share = np.cumsum(np.cbrt(density))
    best, least = data[:0], np.inf
    for centers in (
        np.linspace(data[0], data[-1], count),
        np.interp((np.arange(count) + 0.5) / count, share / share[-1], edges[1:]),
    ):
        for _ in range(rounds):
            cuts = _cell_bounds(data, centers)
            sizes, totals = np.diff(cuts), np.diff(sums[cuts])
            centers = np.sort(np.where(sizes > 0, totals / np.maximum(sizes, 1), centers))
        cuts = _cell_bounds(data, centers)
        linear, square = 2 * centers * np.diff(sums[cuts]), centers**2 * np.diff(cuts)
        loss = float(np.sum(np.diff(squares[cuts]) - linear + square))
        if loss < least:
            best, least = centers, loss
    return best


def _cell_bounds(data: NDArray[np.float64], centers: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the bounds, in sorted data, of the values nearest to each of ascending centers."""
    middle = np.searchsorted(data, (centers[1:] + centers[:-1]) / 2)
    return np.concatenate([[0], middle, [len(data)]])


@dataclass(eq=False)
class ValueLevels:
    """The encoding of values: float32 or float16 bits, or the index of one of 2^b levels.

    >>> ValueLevels.fit(np.array([0.0, 0.5, 1.0]), "int4").decode(np.array([0, 1], dtype=np.uint32))
    array([0. , 0.5], dtype=float32)
    """

    kind: str
    table: Floats | None = None  # [2^b], increasing except that level 0 is exactly 0

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return level_bits(self.kind)

    @classmethod
    def fit(cls, values: NDArray[np.floating], kind: str) -> ValueLevels:
        """Fit levels to values by Lloyd's algorithm; level 0 is always 0."""
        count = 2 ** level_bits(kind)
        if level_bits(kind) < 32 and not np.isfinite(values).all():
            raise ArgumentError(f"values in {kind} must be finite: the table holds NaN or infinity")
        if level_bits(kind) == 16 and np.any(np.abs(values) > 65504):
            raise ArgumentError(
                "float16 holds values up to 65,504 only: this table has larger ones, use float32"
            )
        if level_bits(kind) >= 16:
            return cls(kind)
        distinct = np.unique(values[values != 0]).astype(np.float32)
        if len(distinct) < count:
            table = np.zeros(count, dtype=np.float32)
            table[1 : 1 + len(distinct)] = distinct
            table[1 + len(distinct) :] = distinct[-1] if len(distinct) else 0.0
            return cls(kind, table)
        table = np.concatenate([[0.0], _lloyd(values[values != 0], count - 1)])
        return cls(kind, table.astype(np.float32))

    def encode(self, values: NDArray[np.floating]) -> NDArray[np.uint32]:
        """Return each value's bits; a zero is always level 0."""
        if self.kind == "float32":
            return values.astype(np.float32).view(np.uint32)
        if self.kind == "float16":
            return values.astype(np.float16).view(np.uint16).astype(np.uint32)
        assert self.table is not None
        centers = self.table[1:]
        cuts = (centers[1:] + centers[:-1]) / 2
        nearest = np.searchsorted(cuts, values.astype(np.float32)).astype(np.uint32) + 1
        return np.where(values == 0, np.uint32(0), nearest)

    def decode(self, raw: NDArray[np.uint32]) -> Floats:
        """Return the float32 values of stored bits."""
        if self.kind == "float32":
            return raw.view(np.float32)
        if self.kind == "float16":
            return raw.astype(np.uint16).view(np.float16).astype(np.float32)
        assert self.table is not None
        return self.table[raw]


def value_kind(levels: ValueLevels | None) -> tuple[int, Floats]:
    """Return the number of a kind of values in the compiled loops, and the table of its levels."""
    table = None if levels is None else levels.table
    table = np.zeros(1, dtype=np.float32) if table is None else table
    kind = 0 if levels is None else {"float32": 2, "float16": 3}.get(levels.kind, 1)
    return kind, np.ascontiguousarray(table, dtype=np.float32)
