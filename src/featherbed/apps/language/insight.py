"""Insight into a language model's predictions: perplexity by word frequency."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from featherbed.apps.popularity import bin_edges, bin_name


def loss_bands(
    losses: ArrayLike, targets: ArrayLike, counts: ArrayLike
) -> list[dict[str, Any]]:  # [n], [n], [V]
    """Return the perplexity exp(mean loss) of words by training count, rare words first.

    >>> bands = loss_bands([0.0, 0.0, 0.0], [1, 1, 0], [2, 500])
    >>> [(band["name"], band["perplexity"]) for band in bands]
    [('1 to 2', 1.0), ('300 and more', 1.0)]
    """
    lost, occurs = np.asarray(losses), np.asarray(counts)
    edges = bin_edges(int(np.max(occurs)))
    band_of = np.searchsorted(edges, occurs[np.asarray(targets)], side="right") - 1
    bands = []
    for n in np.unique(band_of).tolist():
        part = lost[band_of == n]
        bands.append(
            {
                "name": bin_name(edges[n], (*edges, None)[n + 1]),
                "tokens": len(part),
                "share": len(part) / len(lost),
                "perplexity": float(np.exp(min(part.mean(), 700))),
            }
        )
    return bands
