"""Principal components: the leading directions of the rows of a matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from featherbed.codecs.codec import CodecJob
    from featherbed.codecs.rows import WeightedRows

Floats = NDArray[np.float32]
Square = NDArray[np.float64]


def principal_directions(square: Square, count: int) -> Square:  # [d, d] -> [count, d]
    """Return the eigenvectors of the largest eigenvalues of a symmetric matrix, largest first.

    >>> principal_directions(np.diag([1.0, 3.0, 2.0]), 2).round().tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    _, vectors = np.linalg.eigh(square)
    return np.ascontiguousarray(vectors[:, ::-1][:, :count].T)


def row_directions(rows: NDArray[Any], count: int) -> Square:  # [n, d] -> [min(count, n, d), d]
    """Return the leading right singular vectors of rows.

    They come from the Gram matrix, or from the rows if these are fewer than the columns.

    >>> np.abs(row_directions(np.array([[3.0, 4.0], [6.0, 8.0]]), 1)).round(6).tolist()
    [[0.6, 0.8]]
    """
    wide = np.asarray(rows, dtype=np.float64)
    if len(wide) < wide.shape[1]:
        vectors: Square = np.linalg.svd(wide, full_matrices=False)[2][:count]
        return vectors
    return principal_directions(wide.T @ wide, count)


def moments(rows: WeightedRows, weights: Floats) -> tuple[Square, Square]:
    """Return the mean [d] and the covariance [d, d] of rows, with a weight for each."""
    total, first, second = 0.0, np.zeros(rows.dim), np.zeros((rows.dim, rows.dim))
    for start, block in rows.blocks():
        share = weights[start : start + len(block)]
        total += float(share.sum(dtype=np.float64))
        first += share @ block
        second += (block * share[:, None]).T @ block
    mean = first / total
    return mean, second / total - np.outer(mean, mean)


def principal(job: CodecJob, rank: int) -> tuple[Floats, Floats]:  # -> mean [d], components [r, d]
    """Return the mean and the leading principal components."""
    mean, covariance = job.moments
    return mean.astype(np.float32), principal_directions(covariance, rank).astype(np.float32)


def effective_rank(job: CodecJob) -> int:
    """Return the number of components with all but two thousandths of the variance."""
    sizes = np.clip(np.linalg.eigvalsh(job.moments[1])[::-1], 0, None)
    if sizes.sum() <= 0:
        return 1
    return min(job.rows.dim, int(np.searchsorted(np.cumsum(sizes) / sizes.sum(), 0.998)) + 1)
