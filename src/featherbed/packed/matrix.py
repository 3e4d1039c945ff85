"""Stored matrices: float32, float16, integers of 8, 4, 3 or 2 bits, and graded rows.

Quantized numbers are levels with a scale for each row or column: x = scale (level - (2^bits - 1) /
2)

Graded rows are runs of rows ("grades") that each have their own number of bits for every column. A
row of grade g takes Σ_k b_g[k] bits: important rows get more bits, columns of little variance get
fewer. This suits files of a few kilobytes.

    x = s_g[k] (q - (2^b - 1) / 2)  with b = b_g[k] of 1 to 8 bits,  x = 0  with b = 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, FormatError
from featherbed.packed import engine

Floats = NDArray[np.float32]
KINDS = {"float32": 32, "float16": 16, "int8": 8, "int4": 4, "int3": 3, "int2": 2}
FULL_HALF = 6.2e-5  # the smallest float16 with all of its bits
SMALLEST_HALF = 1.2e-7  # a float16 that is still told from zero
HELD = 1 << 15  # numbers whose scales are searched at once: they stay in the cache of a core
CACHE_BYTES = 32 << 20  # a dictionary up to this size is decoded once and kept


def level_bits(kind: str) -> int:
    """Return the bits of one element of a storage kind."""
    if kind not in KINDS:
        raise ArgumentError(f"{kind!r} is not a storage kind: use one of {', '.join(KINDS)}")
    return KINDS[kind]


def row_bytes(kind: str, columns: int) -> int:
    """Return the bytes of a row of ``columns`` elements: rows start on byte boundaries."""
    return -(-level_bits(kind) * columns // 8)


def pack_levels(levels: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack levels below 2^bits, [n, m] -> [n, ceil(m bits / 8)], lowest bits first.

    >>> pack_levels(np.array([[1, 2, 3]], dtype=np.uint8), 4)
    array([[33,  3]], dtype=uint8)
    """
    if bits == 8:
        return levels
    flags = (levels[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(flags.reshape(len(levels), -1), axis=1, bitorder="little")


def unpack_levels(data: NDArray[np.uint8], bits: int, columns: int) -> NDArray[np.uint8]:
    """Unpack rows of levels: the inverse of ``pack_levels``.

    >>> unpack_levels(np.array([[33, 3]], dtype=np.uint8), 4, 3)
    array([[1, 2, 3]], dtype=uint8)
    """
    if bits == 8:
        return data
    flat = np.unpackbits(data, axis=1, count=bits * columns, bitorder="little")
    shifted = flat.reshape(len(data), columns, bits) << np.arange(bits, dtype=np.uint8)
    levels: NDArray[np.uint8] = np.bitwise_or.reduce(shifted, axis=2)
    return levels


def best_scales(matrix: Floats, bits: int, axis: int, weights: Any = None) -> Floats:
    """Return the scale of each row [n] (axis 0) or column [m] (axis 1) of a matrix [n, m].

    It is the one of several clipped ranges with the smallest squared error. ``weights`` of the
    elements of a vector are [m] for rows, [n] for columns.
    """
    root = None if weights is None else np.sqrt(weights).astype(np.float32)
    vectors = matrix if axis == 0 else matrix.T
    step = max(1, HELD // max(1, vectors.shape[1]))
    scales = np.empty(len(vectors), dtype=np.float32)
    for start in range(0, len(vectors), step):
        part = np.ascontiguousarray(vectors[start : start + step])
        scales[start : start + step] = _best_scales(part, bits, root)
    return scales


def _best_scales(vectors: Floats, bits: int, root: Any) -> Floats:  # [n, m] -> [n]
    top = (2.0**bits - 1) / 2
    peak = np.abs(vectors).max(axis=1, initial=0.0).astype(np.float32)
    low, tries = (0.98, 2) if bits == 8 else (0.3, 36)
    best, least = peak / top, np.full(len(vectors), np.inf, dtype=np.float32)
    for share in np.linspace(1.0, low, tries, dtype=np.float32):
        scale = np.maximum(peak * share / np.float32(top), np.float32(1e-30))[:, None]
        error = vectors / scale
        error += np.float32(top)
        np.rint(error, out=error)
        np.clip(error, 0, 2 * np.float32(top), out=error)
        error -= np.float32(top)
        error *= scale
        np.subtract(vectors, error, out=error)
        if root is not None:
            error *= root
        loss = np.einsum("nm,nm->n", error, error)
        better = loss < least
        best[better], least[better] = scale[better, 0], loss[better]
    found: Floats = np.maximum(best, np.float32(1e-30)).astype(np.float32)
    return found


def to_levels(matrix: Floats, scale: Floats, bits: int) -> NDArray[np.uint8]:
    """Round to the nearest level; ``scale`` must broadcast against ``matrix``."""
    top = 2**bits - 1
    nearest = np.rint(matrix / scale + np.float32(top / 2))
    levels: NDArray[np.uint8] = np.clip(nearest, 0, top).astype(np.uint8)
    return levels


@dataclass(eq=False)
class Matrix:
    """A matrix of ``shape`` (n, m) stored as ``kind``; quantized ones have scales [n] or [m].

    >>> Matrix.encode(np.eye(2, dtype=np.float32), "int8").rows(np.array([1])).round(2)
    array([[0., 1.]], dtype=float32)
    """

    kind: str
    shape: tuple[int, int]
    data: NDArray[np.generic]  # float [n, m] or packed levels uint8 [n, row_bytes]
    scale: NDArray[np.generic] | None = None
    axis: int = 0  # 0: a scale for each row, 1: for each column
    _decoded: Floats | None = None

    @classmethod
    def encode(
        cls,
        matrix: NDArray[np.floating],
        kind: str,
        scales: str = "row",
        scale_kind: str = "float32",
    ) -> Matrix:
        """Store ``matrix`` as ``kind``, with a scale of ``scale_kind`` for each "row" or
        "column"."""
        bits = level_bits(kind)
        matrix = np.ascontiguousarray(matrix, dtype=np.float32)
        shape = (matrix.shape[0], matrix.shape[1])
        if bits >= 16:
            with np.errstate(over="ignore"):
                data = matrix.astype(np.float32 if bits == 32 else np.float16)
            if not np.array_equal(np.isfinite(data), np.isfinite(matrix)):
                raise ArgumentError(
                    "float16 holds values up to 65,504 only: "
                    "this matrix has larger ones, use float32"
                )
            return cls(kind, shape, data)
        if not np.isfinite(matrix).all():
            raise ArgumentError(f"{kind} storage needs finite values: found NaN or infinity")
        axis = {"row": 0, "column": 1}[scales]
        scale = best_scales(matrix, bits, axis)
        stored: NDArray[np.generic] = scale
        if scale_kind == "float16" and FULL_HALF * 8 < scale.max(initial=1.0) < 6e4:
            stored = np.maximum(scale, np.float32(SMALLEST_HALF)).astype(np.float16)
        wide = np.expand_dims(stored.astype(np.float32), 1 - axis)
        return cls(kind, shape, pack_levels(to_levels(matrix, wide, bits), bits), stored, axis)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the plan, which holds addresses, and the decoded matrix out of copies."""
        kept = {name: part for name, part in self.__dict__.items() if name != "_plan"}
        return kept | {"_decoded": None}

    def arrays(self, name: str) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Yield the stored arrays by their names in a file."""
        yield name, self.data
        if self.scale is not None:
            yield f"{name}.scale", self.scale

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + (self.scale.nbytes if self.scale is not None else 0)

    def decode(self, data: NDArray[np.generic], scale: NDArray[np.generic] | None) -> Floats:
        """Return stored rows in float32; ``scale`` is that of these rows, or of the columns."""
        bits = level_bits(self.kind)
        if bits >= 16 or scale is None:
            return data.astype(np.float32, copy=False)
        levels = unpack_levels(data.astype(np.uint8, copy=False), bits, self.shape[1])
        rows = levels.astype(np.float32)
        rows -= np.float32((2**bits - 1) / 2)
        rows *= np.expand_dims(scale.astype(np.float32, copy=False), 1 - self.axis)
        return rows

    def rows(self, index: NDArray[np.int64] | slice) -> Floats:  # [B] -> [B, m]
        """Return the rows at ``index`` (checked by the caller) in float32."""
        if self._decoded is not None and isinstance(index, slice):
            return self._decoded[index]
        if not isinstance(index, slice) and engine.kernels(len(index)):
            out = engine.empty(len(index), self.shape[1])
            self._plan.run(out, np.ascontiguousarray(index))
            return out
        if self._decoded is not None:
            return self._decoded[index]
        scale = self.scale[index] if self.scale is not None and self.axis == 0 else self.scale
        return self.decode(self.data[index], scale)

    def row_reader(self, compiled: bool) -> Callable[[int], Floats]:
        """Return a function from the position of a row (checked by the caller) to the row [m]."""
        known = self.data if self.kind == "float32" else self._decoded
        if known is not None:
            return lambda position: known[position].astype(np.float32)
        if compiled and self.kind != "float16":
            return partial(self._plan.row, self.shape[1])
        bits, columns, data, scale = level_bits(self.kind), self.shape[1], self.data, self.scale
        if scale is None:
            return lambda position: data[position].astype(np.float32)
        powers = (1 << np.arange(bits)).astype(np.float32)
        middle = np.float32((2**bits - 1) / 2)
        shared = scale.astype(np.float32) if self.axis == 1 else None  # a scale for each column

        def read(position: int) -> Floats:
            stored = data[position]
            if bits < 8:
                flags = np.unpackbits(stored, count=bits * columns, bitorder="little")
                stored = flags.reshape(columns, bits) @ powers
            row: Floats = stored - middle
            row *= scale[position] if shared is None else shared
            return row

        return read

    @cached_property
    def _plan(self) -> engine.Plan:
        if self._decoded is not None or self.kind == "float32":
            data = self.data if self._decoded is None else self._decoded
            return engine.Plan("float_rows", np.ascontiguousarray(data))
        if self.kind == "float16":
            return engine.Plan("half_rows", np.ascontiguousarray(self.data))
        assert self.scale is not None
        scale = np.ascontiguousarray(self.scale, dtype=np.float32)
        data = np.ascontiguousarray(self.data)
        return engine.Plan("level_rows", data, scale, shape=(level_bits(self.kind), self.axis))

    def dense(self) -> Floats:  # [n, m]
        """Return the whole matrix in float32; small ones are kept once decoded."""
        if self._decoded is not None:
            return self._decoded
        whole = self.rows(slice(None))
        if whole.nbytes <= CACHE_BYTES:
            self._decoded = whole
        return whole


MOST_GRADES = 64
MOST_BITS = 8
DECODED = 1 << 18  # elements decoded at once
KEPT = 8  # a small matrix is decoded whole once a call takes more than this part of its rows
SHARES = np.geomspace(1.0, 0.05, 36, dtype=np.float32)  # candidates for the range of a scale
Bits = NDArray[np.uint8]
Grades = tuple[tuple[int, str], ...]  # rows of each grade, bits of its columns as digits


class _Layout(NamedTuple):
    """Position and meaning of the bits of a row, by grade."""

    ends: NDArray[np.int64]  # [G] rows up to and with the grade
    base: NDArray[np.int64]  # [G] bit where row 0 would start, were all rows of this grade
    record: NDArray[np.int64]  # [G] bits of a row
    offset: NDArray[np.int64]  # [G, m] of a column within a row
    mask: NDArray[np.uint16]  # [G, m]
    middle: Floats  # [G, m]
    scale: Floats  # [G, m], 0 where there are no bits


@dataclass(eq=False)
class Graded:
    """A matrix of ``shape`` (n, m) in runs of rows, each with bits and scales of its own by column.

    >>> bits = np.array([[2, 1], [1, 0]], dtype=np.uint8)
    >>> levels = np.array([[3, 0], [1, 0]], dtype=np.uint8)
    >>> graded = Graded.encode(levels, bits, [1, 1], np.ones((2, 2)))
    >>> graded.dense().tolist(), graded.data.tolist(), graded.grades
    ([[1.5, -0.5], [0.5, 0.0]], [11], ((1, '21'), (1, '10')))
    """

    shape: tuple[int, int]
    grades: Grades
    data: Bits  # one stream of bits over all rows, lowest bit first, [ceil(bits / 8)]
    scale: NDArray[np.generic]  # float16 or float32, one for each column with bits of each grade
    _decoded: Floats | None = None
    kind = "graded"

    @classmethod
    def encode(
        cls,
        levels: NDArray[np.uint8] | Sequence[NDArray[np.uint8]],  # [n, m], or [r_g, m] by grade
        bits: NDArray[np.integer],  # [G, m]
        rows: Sequence[int],  # [G]
        scales: NDArray[np.floating],  # [G, m]
        scale_kind: str = "float16",
    ) -> Graded:
        """Store levels and scales; those of columns without bits are ignored."""
        bits, counts = _checked(bits, rows)
        parts = [levels] if isinstance(levels, np.ndarray) else list(levels)
        whole = np.concatenate([np.empty((0, bits.shape[1]), np.uint8), *parts])
        if whole.shape != (sum(counts), bits.shape[1]):
            raise ArgumentError(
                f"levels have shape {whole.shape}: "
                f"bits and rows say {sum(counts)} rows of {bits.shape[1]} columns"
            )
        kept = np.asarray(scales)[bits > 0] if np.shape(scales) == bits.shape else None
        if kept is None or not np.isfinite(kept).all():
            raise ArgumentError(
                f"scales are finite numbers {list(bits.shape)}, one for each grade and column"
            )
        starts = np.cumsum([0, *counts])
        stream = _pack([whole[start:stop] for start, stop in pairwise(starts)], bits)
        texts = ("".join(map(str, line.tolist())) for line in bits)
        grades = tuple(zip(counts, texts, strict=True))
        return cls((len(whole), bits.shape[1]), grades, stream, _store_scales(kept, scale_kind))

    @classmethod
    def round(
        cls,
        matrix: NDArray[np.floating],
        bits: NDArray[np.integer],
        rows: Sequence[int],
        scale_kind: str = "float16",
    ) -> Graded:  # [n, m], [G, m], [G]
        """Round a matrix to the nearest levels, with scales by ``graded_scales``.

        >>> rows = np.array([[2.0, 1.0], [-2.0, -1.0], [7.0, 5.0]], dtype=np.float32)
        >>> Graded.round(rows, np.array([[1, 1], [3, 0]]), [2, 1]).dense().tolist()
        [[2.0, 1.0], [-2.0, -1.0], [7.0, 0.0]]
        """
        matrix = np.asarray(matrix, dtype=np.float32)
        bits, counts = _checked(bits, rows)
        if matrix.shape != (sum(counts), bits.shape[1]) or not np.isfinite(matrix).all():
            raise ArgumentError(
                f"the matrix {matrix.shape} must hold finite numbers, "
                f"{sum(counts)} rows of {bits.shape[1]} columns as bits and rows say"
            )
        scales = graded_scales(matrix, bits, counts)
        used = np.ones(bits.shape, dtype=np.float32)
        used[bits > 0] = _store_scales(scales[bits > 0], scale_kind).astype(np.float32)
        levels = graded_levels(matrix, bits, counts, used)
        return cls.encode(levels, bits, counts, scales, scale_kind)

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + self.scale.nbytes

    def __getstate__(self) -> dict[str, Any]:
        """Leave computed values out of copies and pickles."""
        kept = {name: part for name, part in self.__dict__.items() if name != "_layout"}
        return kept | {"_decoded": None}

    def arrays(self, name: str) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Yield the stored arrays by their names in a file."""
        yield name, self.data
        yield f"{name}.scale", self.scale

    @cached_property
    def bits(self) -> Bits:  # [G, m]
        """The bits of every column, by grade."""
        return bits_of(self.grades, self.shape[1])

    @cached_property
    def _layout(self) -> _Layout:
        counts = np.array([count for count, _ in self.grades], dtype=np.int64)
        bits = self.bits.astype(np.int64)
        record, ends = bits.sum(axis=1), np.cumsum(counts)
        first = np.cumsum(counts * record) - counts * record
        scale = np.zeros(bits.shape, dtype=np.float32)
        scale[bits > 0] = self.scale.astype(np.float32)
        if not np.isfinite(scale).all():
            raise FormatError("a scale of graded rows is not finite")
        top = (1 << bits) - 1
        middle = top.astype(np.float32) / np.float32(2)
        base, offset = first - (ends - counts) * record, np.cumsum(bits, axis=1) - bits
        return _Layout(ends, base, record, offset, top.astype(np.uint16), middle, scale)

    def check(self) -> None:
        """Refuse scales that are not finite; everything else was checked when the file was
        opened."""
        _ = self._layout

    def rows(self, index: NDArray[np.int64] | slice) -> Floats:  # [B] -> [B, m]
        """Return the rows at ``index`` (checked by the caller) in float32."""
        rows, columns = self.shape
        ids = np.arange(*index.indices(rows)) if isinstance(index, slice) else index
        small = rows * columns * 4 <= CACHE_BYTES
        if self._decoded is None and small and len(ids) * KEPT > rows:
            self._decoded = self._decode(np.arange(rows))
        return self._decode(ids) if self._decoded is None else self._decoded[index]

    def dense(self) -> Floats:  # [n, m]
        """Return the whole matrix in float32; a small one is kept once decoded."""
        return self.rows(slice(None))

    def _decode(self, index: NDArray[np.int64]) -> Floats:
        layout = self._layout
        out = np.zeros((len(index), self.shape[1]), dtype=np.float32)
        step = max(1, DECODED // self.shape[1])
        for start in range(0, len(index), step):
            row = index[start : start + step]
            grade = np.searchsorted(layout.ends, row, side="right")
            for g in np.unique(grade).tolist():
                here = np.flatnonzero(grade == g)
                used = np.flatnonzero(layout.mask[g])
                if len(used):
                    out[np.ix_(start + here, used)] = self._decode_grade(g, row[here], used)
        return out

    def _decode_grade(self, g: int, row: NDArray[np.int64], used: NDArray[np.intp]) -> Floats:
        """Decode the columns ``used`` [c] of rows [B] of one grade: bits of one byte, or of two."""
        layout, last = self._layout, len(self.data) - 1
        at = (layout.base[g] + row * layout.record[g])[:, None] + layout.offset[g, used]
        byte = at >> 3
        pair = self.data[byte].astype(np.uint16)
        pair |= self.data[np.minimum(byte + 1, last)].astype(np.uint16) << np.uint16(8)
        levels = (pair >> (at & 7).astype(np.uint16)) & layout.mask[g, used]
        rows: Floats = (levels.astype(np.float32) - layout.middle[g, used]) * layout.scale[g, used]
        return rows


def bits_of(grades: Grades, columns: int) -> Bits:
    """Return the bits [G, m] that grades hold as digits.

    >>> bits_of(((1, "21"), (1, "10")), 2).tolist()
    [[2, 1], [1, 0]]
    """
    digits = np.frombuffer("".join(text for _, text in grades).encode(), dtype=np.uint8)
    bits: Bits = (digits - np.uint8(ord("0"))).reshape(len(grades), columns)
    return bits


def stream_bytes(grades: Grades) -> int:
    """Return the bytes of the stream of Σ_g r_g Σ_k b_g[k] bits."""
    return -(-sum(rows * sum(map(int, text)) for rows, text in grades) // 8)


def graded_levels(
    matrix: Floats, bits: NDArray[np.integer], rows: Sequence[int], scales: Floats
) -> NDArray[np.uint8]:  # [n, m], [G, m], [G], [G, m] -> [n, m]
    """Return the nearest levels of a matrix in the bits and scales of each grade and column."""
    grade, levels = np.repeat(np.arange(len(rows)), rows), np.zeros(matrix.shape, dtype=np.uint8)
    for width in np.unique(bits[bits > 0]).tolist():
        here = (bits == width)[grade]
        levels[here] = to_levels(matrix[here], scales[grade][here], width)
    return levels


def graded_scales(matrix: Floats, bits: NDArray[np.integer], rows: Sequence[int]) -> Floats:
    """Return the scale of each grade and column, [G, m], for a matrix [n, m] and bits [G, m].

    It is the best by squared error: among clipped ranges first, then by least squares.
    """
    scales = np.ones(bits.shape, dtype=np.float32)
    starts = np.cumsum([0, *rows])
    for g, (start, stop) in enumerate(pairwise(starts)):
        for width in np.unique(bits[g][bits[g] > 0]).tolist():
            columns = np.flatnonzero(bits[g] == width)
            scales[g, columns] = _scales(np.ascontiguousarray(matrix[start:stop, columns]), width)
    return scales


def _scales(block: Floats, bits: int) -> Floats:  # [r, c] -> [c]
    middle = np.float32((2**bits - 1) / 2)
    peak = np.maximum(np.abs(block).max(axis=0, initial=0.0), np.float32(1e-30))
    best: Floats = (peak / middle).astype(np.float32)
    least = np.full(block.shape[1], np.inf, dtype=np.float32)

    def keep(scale: Floats) -> Floats:
        shape = to_levels(block, scale, bits).astype(np.float32) - middle
        loss = np.square(block - scale * shape).sum(axis=0)
        better = loss < least
        best[better], least[better] = scale[better], loss[better]
        return shape

    for share in SHARES:
        keep(peak * share / middle)
    for _ in range(4):
        shape = keep(best)
        fitted = (block * shape).sum(axis=0) / np.square(shape).sum(axis=0)
        keep(np.maximum(fitted, np.float32(1e-30)))
    return best


def _store_scales(scales: NDArray[np.floating], kind: str) -> NDArray[np.generic]:
    """Return scales as ``kind``; float32 where float16 would lose precision."""
    if kind not in ("float16", "float32"):
        raise ArgumentError(f"scale_kind={kind!r}: use float16 or float32")
    size = np.abs(scales)
    fits = bool(((size == 0) | ((size >= FULL_HALF) & (size < 6e4))).all())
    return scales.astype(np.float16 if kind == "float16" and fits else np.float32)


def _checked(bits: NDArray[np.integer], rows: Sequence[int]) -> tuple[Bits, list[int]]:
    """Return the bits [G, m] and rows [G] of grades, checked."""
    bits, counts = np.asarray(bits), [int(count) for count in rows]
    fits = bits.ndim == 2 and len(bits) == len(counts) <= MOST_GRADES
    if not fits or min(counts, default=1) < 1:
        raise ArgumentError(
            f"bits {bits.shape} and rows {str(counts)[:60]}: give [G, columns] bits and "
            f"the rows of each of at most {MOST_GRADES} grades, at least 1"
        )
    integers = bits.dtype.kind in "iu"
    if not integers or bits.min(initial=0) < 0 or bits.max(initial=0) > MOST_BITS:
        raise ArgumentError(
            f"bits are integers from 0 to {MOST_BITS}, got {bits.dtype} up to {bits.max(initial=0)}"
        )
    return bits.astype(np.uint8), counts


def _pack(parts: list[NDArray[np.uint8]], bits: Bits) -> Bits:
    """Pack the levels of each grade into one stream, some rows at a time."""
    rest, out = np.empty(0, dtype=np.uint8), []
    for levels, widths in zip(parts, bits, strict=True):
        record, most = int(widths.sum()), (1 << widths.astype(np.int64)) - 1
        if record and len(levels) and bool((levels > most)[:, widths > 0].any()):
            raise ArgumentError(
                "a level is larger than its bits can hold: levels go from 0 to 2^bits - 1"
            )
        column = np.repeat(np.arange(len(widths)), widths)
        shift = (np.arange(record) - np.repeat(np.cumsum(widths) - widths, widths)).astype(np.uint8)
        step = max(1, DECODED // max(1, record)) if record else max(1, len(levels))
        for start in range(0, len(levels), step):
            flags = ((levels[start : start + step, column] >> shift) & 1).astype(np.uint8)
            flags = np.concatenate([rest, flags.reshape(-1)])
            whole = len(flags) // 8 * 8
            out.append(np.packbits(flags[:whole], bitorder="little"))
            rest = flags[whole:]
    return np.concatenate([*out, np.packbits(rest, bitorder="little")])
