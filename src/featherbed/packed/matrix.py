"""A stored matrix: float32, float16, or integers of 8, 4, 3 or 2 bits.

Quantized numbers are levels with a scale for each row or column: x = scale (level - (2^bits - 1) / 2)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError
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
    spread = (levels[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(spread.reshape(len(levels), -1), axis=1, bitorder="little")


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
        """Store ``matrix`` as ``kind``, with a scale of ``scale_kind`` for each "row" or "column"."""
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
        return engine.Plan("level_rows", data, level_bits(self.kind), scale, self.axis)

    def dense(self) -> Floats:  # [n, m]
        """Return the whole matrix in float32; small ones are kept once decoded."""
        if self._decoded is not None:
            return self._decoded
        whole = self.rows(slice(None))
        if whole.nbytes <= CACHE_BYTES:
            self._decoded = whole
        return whole
