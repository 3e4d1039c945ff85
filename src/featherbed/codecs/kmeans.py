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
) -> Floats:
    """Return ``choices`` centroids [K, d] of rows [n, d] by faiss, the best of ``restarts`` runs.

    Fewer rows than centroids are repeated with a little noise.
    """
    import faiss

    if len(rows) < choices:
        noise = np.random.default_rng(seed).standard_normal((choices, rows.shape[1]))
        scale, repeated = np.float32(1e-3 * rows.std()), rows[np.arange(choices) % len(rows)]
        noisy: Floats = repeated + scale * noise.astype(np.float32)
        return noisy
    options = {"niter": rounds, "seed": seed + 1, "nredo": restarts}
    limits = {"min_points_per_centroid": 1, "max_points_per_centroid": 256}
    means = faiss.Kmeans(rows.shape[1], choices, **options, **limits)
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
    """Return rows, repeated to at least ``count``: faiss needs as many as centroids and columns.

    >>> enough(np.ones((2, 3), dtype=np.float32), 3).shape
    (4, 3)
    """
    return rows if len(rows) >= count else np.concatenate([rows] * -(-count // len(rows)))


def sums_by_code(codes: Codes, rows: Floats, weights: Floats, choices: int) -> NDArray[np.float64]:
    """Return the sum [K, d] of the weighted rows [n, d] of each code."""
    return np.stack([np.bincount(codes, weights * column, choices) for column in rows.T], axis=1)
