"""k-means: centroids of rows, the nearest centroid of each row, weighted sums of each cluster."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Codes = NDArray[np.int32]


def kmeans(
    rows: Floats,
    choices: int,
    seed: int,
    rounds: int = 10,
    start: Floats | None = None,
    restarts: int = 1,
) -> Floats:  # [n, d] -> [K, d]
    """Return ``choices`` centroids of rows (faiss); fewer rows than centroids are repeated, a little moved.

    The best of ``restarts`` runs is returned.
    """
    import faiss

    if len(rows) < choices:
        noise = (
            np.random.default_rng(seed).standard_normal((choices, rows.shape[1])).astype(np.float32)
        )
        repeated: Floats = (
            rows[np.arange(choices) % len(rows)] + np.float32(1e-3 * rows.std()) * noise
        )
        return repeated
    means = faiss.Kmeans(
        rows.shape[1],
        choices,
        niter=rounds,
        seed=seed + 1,
        nredo=restarts,
        min_points_per_centroid=1,
        max_points_per_centroid=256,
    )
    means.train(np.ascontiguousarray(rows), init_centroids=start)
    centroids: Floats = np.asarray(means.centroids, dtype=np.float32).reshape(choices, -1).copy()
    return centroids


def nearest(rows: Floats, centroids: Floats) -> Codes:  # [n, d], [K, d] -> [n]
    """Return the nearest centroid of each row."""
    import faiss

    index = faiss.IndexFlatL2(rows.shape[1])
    index.add(np.ascontiguousarray(centroids))
    found: Codes = index.search(np.ascontiguousarray(rows), 1)[1][:, 0].astype(np.int32)
    return found


def enough(rows: Floats, count: int) -> Floats:  # [n, d] -> [m, d], m >= count
    """Return rows, over again where there are fewer than ``count``: faiss learns from no fewer than its centroids and columns.

    >>> enough(np.ones((2, 3), dtype=np.float32), 3).shape
    (4, 3)
    """
    return rows if len(rows) >= count else np.concatenate([rows] * -(-count // len(rows)))


def sums_by_code(
    codes: Codes, rows: Floats, weights: Floats, choices: int
) -> NDArray[np.float64]:  # [n], [n, d] -> [K, d]
    """Add up the weighted rows of each code."""
    return np.stack([np.bincount(codes, weights * column, choices) for column in rows.T], axis=1)
