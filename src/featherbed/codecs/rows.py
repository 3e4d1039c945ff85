"""The matrix to compress, read in blocks: only a block or a sample of it is in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.errors import ArgumentError, DataError

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
BLOCK_BYTES = 32 << 20
LONGEST = 1e15  # norm of a row: squares and their sums must stay within float32


class WeightedRows:
    """Rows of a matrix with weights; the matrix is an array, a memory map, or similar.

    >>> rows = WeightedRows(np.eye(3, dtype=np.float32), weights=[2, 1, 1])
    >>> rows.count, rows.dim, rows.weights.tolist()
    (3, 3, [1.5, 0.75, 0.75])
    """

    def __init__(self, matrix: Any, weights: ArrayLike | str | None = None) -> None:
        shape = matrix.shape
        if len(shape) != 2:
            raise ArgumentError(
                f"the matrix has shape {tuple(shape)}: compress takes [rows, columns]"
            )
        if not shape[0] or not shape[1]:
            raise DataError(f"the matrix is empty: it has {shape[0]} rows and {shape[1]} columns")
        if np.dtype(matrix.dtype).kind != "f":
            raise ArgumentError(
                f"the matrix holds {matrix.dtype}: compress takes floating-point numbers, "
                "such as matrix.astype('float32')"
            )
        self.matrix = matrix
        self.count, self.dim = int(shape[0]), int(shape[1])
        self.step = max(1, min(1 << 16, BLOCK_BYTES // (4 * self.dim)))
        self.weighted = weights is not None
        self.weights = _weights(weights, self.count)

    def block(self, start: int, stop: int) -> Floats:
        """Return rows start to stop - 1."""
        return np.ascontiguousarray(self.matrix[start:stop], dtype=np.float32)

    def blocks(self) -> Iterator[tuple[int, Floats]]:
        """Yield the number of the first row and the rows of every block."""
        for start in range(0, self.count, self.step):
            yield start, self.block(start, min(start + self.step, self.count))

    def take(self, ids: Ids) -> Floats:
        """Return the rows of ids, read in ascending order."""
        if len(ids) == self.count and np.array_equal(ids, np.arange(self.count)):
            return self.block(0, self.count)
        order = np.argsort(ids, kind="stable")
        rows = np.empty((len(ids), self.dim), dtype=np.float32)
        for begin in range(0, len(ids), self.step):
            part = order[begin : begin + self.step]
            rows[part] = self.matrix[ids[part]]
        return rows

    def spread(self, count: int) -> WeightedRows:
        """Return ``count`` evenly spaced rows in the order of the weights."""
        if count >= self.count:
            return self
        order = np.argsort(-self.weights, kind="stable") if self.weighted else np.arange(self.count)
        ids = np.sort(order[np.linspace(0, self.count - 1, count).astype(np.int64)])
        return WeightedRows(self.take(ids), self.weights[ids] if self.weighted else None)

    def draw(self, count: int, generator: np.random.Generator) -> Ids:
        """Draw ``count`` distinct ids, half by weight and half evenly; all if there are no more."""
        if count >= self.count:
            return np.arange(self.count)
        if not self.weighted:
            return np.sort(generator.choice(self.count, count, replace=False))
        share = 0.5 * self.weights / self.weights.sum() + 0.5 / self.count
        return np.sort(generator.choice(self.count, count, replace=False, p=share / share.sum()))

    def lengths(self) -> Floats:  # [V]
        """Return the norm of every row; refuse rows that are not finite."""
        lengths = np.empty(self.count, dtype=np.float32)
        for start, rows in self.blocks():
            with np.errstate(over="ignore", invalid="ignore"):
                squares = np.einsum("vd,vd->v", rows, rows, dtype=np.float64)
                lengths[start : start + len(rows)] = np.sqrt(squares)
        large = np.flatnonzero(lengths > LONGEST)
        if len(large) and np.isfinite(lengths[large]).all():
            raise DataError(
                f"{_some(large)} longer than {LONGEST:.0e}, too long to compute with: "
                "scale the matrix down first"
            )
        wrong = np.flatnonzero(~np.isfinite(lengths))
        if len(wrong):
            raise DataError(
                f"{_some(wrong)} not finite (NaN, infinity or beyond float32), {len(wrong):,} of "
                f"{self.count:,} rows: remove or correct them first"
            )
        return lengths


def refuse_zeros(lengths: Floats, padding: int | None) -> None:
    """Refuse rows of zeros other than the padding row."""
    zeros = np.flatnonzero(lengths == 0)
    zeros = zeros[zeros != padding] if padding is not None else zeros
    if len(zeros):
        raise DataError(
            f"{_some(zeros)} all zero, {len(zeros):,} of {len(lengths):,}: a row of zeros has no "
            "direction to keep. Leave them out; if one is the padding row, say so with "
            f"padding_idx={zeros[0]} (--padding {zeros[0]}); or compare methods by their error, "
            "which rows of zeros have too: measure='error'"
        )


def _some(ids: NDArray[np.intp]) -> str:
    shown = ", ".join(str(i) for i in ids[:5].tolist())
    if len(ids) == 1:
        return f"row {shown} is"
    return f"rows {shown}{' and more' if len(ids) > 5 else ''} are"


def _weights(weights: ArrayLike | str | None, count: int) -> Floats:
    if weights is None:
        return np.ones(count, dtype=np.float32)
    found = numbers_of(weights, count)
    if found.shape != (count,):
        raise ArgumentError(
            f"weights have shape {found.shape}: give one for each of the {count:,} rows"
        )
    if not np.isfinite(found).all() or found.min() < 0 or found.sum() <= 0:
        raise ArgumentError(
            "weights must be finite, not negative, and not all zero: give counts or shares"
        )
    scaled: Floats = (found / found.mean()).astype(np.float32)
    return scaled


def numbers_of(weights: Any, rows: int) -> NDArray[np.float64]:  # [V]
    """Return weights of rows as numbers; "zipf" stands for 1 / (i + 1).

    >>> numbers_of("zipf", 2).tolist()
    [1.0, 0.5]
    """
    if isinstance(weights, str) and weights == "zipf":
        return 1.0 / np.arange(1, rows + 1)
    try:
        given = tensor_array(weights) if hasattr(weights, "detach") else weights
        return np.asarray(given, dtype=np.float64)
    except (ValueError, TypeError):
        shown = repr(weights) if isinstance(weights, str) else f"a {type(weights).__name__}"
        raise ArgumentError(
            f"weights={shown}: give one number for each row, or 'zipf' (row i: 1 / (i + 1))"
        ) from None


def tensor_array(tensor: Any) -> NDArray[Any]:
    """Return a torch tensor as an array that shares its memory where it can."""
    plain = tensor.detach()
    try:
        plain = plain.cpu()
        plain = plain.float() if "bfloat16" in str(plain.dtype) else plain
        found: NDArray[Any] = plain.numpy()
    except (TypeError, RuntimeError, NotImplementedError):
        where = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise ArgumentError(
            f"compress cannot read this tensor ({where}): "
            "give a dense one of float32, float16 or bfloat16"
        ) from None
    return found
