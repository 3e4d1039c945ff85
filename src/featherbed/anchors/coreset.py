"""Anchors by coreset: k-means++ seeds in a weighted sample of the objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featherbed.anchors.clusters import FeatureAnchors, Ids, seeds, squared_distances
from featherbed.anchors.given import draw_seed
from featherbed.checks import check_integer
from featherbed.errors import ArgumentError

Weights = NDArray[np.float64]


class Coreset(FeatureAnchors):
    """The anchors are k-means++ seeds of a lightweight coreset, a weighted sample of the objects.

        q(x) = 1/2 · 1/V + 1/2 · ||x - mean||² / Σ_y ||y - mean||²,   weight 1 / (m q(x)) per draw

    Bachem, Lucic and Krause 2018: for any centers the weighted sum of squared distances over the m
    draws is an unbiased estimate of that over all objects. Draws are with replacement, and weights
    of repeated draws add up. Seeds are drawn from the weighted sample, so one pass over the V
    features suffices, instead of K passes by ``fb.KMeansPlusPlus``.

    After selection ``points`` [n] and ``weights`` [n] are the objects of the coreset and their
    weights.

    Args:
        features: [V, f], as in ``fb.KMeansPlusPlus``.
        size: number of draws m; None: 20 per anchor. With m >= V the coreset is all objects with
            weight 1.
        transform_std: standard deviation of the other rows' initial weights, as in
            ``fb.HalfNormal``.

    >>> import featherbed as fb, numpy as np
    >>> features = np.random.default_rng(0).normal(size=(1000, 4))
    >>> coreset = Coreset(features)
    >>> table = fb.AnchorTable(1000, 4, anchors=8, init=coreset)
    >>> len(table.anchor_ids), len(coreset.points) <= 160
    (8, True)
    """

    points: Tensor | None = None
    weights: Tensor | None = None

    def __init__(
        self, features: Any, *, size: int | None = None, transform_std: float | None = None
    ) -> None:
        super().__init__(features, transform_std)
        self.size = None if size is None else check_integer("size", size)

    def choose(self, objects: int, count: int, generator: torch.Generator | None) -> Tensor:
        """Draw the coreset and return its seeds in order of selection."""
        features, seed = self.features_of(objects), draw_seed(generator)
        size = 20 * count if self.size is None else self.size
        points, weights = lightweight(features, size, np.random.default_rng(seed))
        if len(points) < count:
            raise ArgumentError(
                f"size={size}: the coreset holds {len(points)} objects, fewer than {count} "
                "anchors; draw more"
            )
        self.points, self.weights = torch.from_numpy(points), torch.from_numpy(weights)
        return torch.from_numpy(points[seeds(features[points], count, seed, weights=weights)])


def lightweight(
    features: Any, size: int, rng: np.random.Generator
) -> tuple[Ids, Weights]:  # [V, f] -> [n], [n]
    """Return the objects of a lightweight coreset of ``size`` draws, and their weights."""
    rows = features.shape[0]
    if size >= rows:
        return np.arange(rows), np.ones(rows)
    away = squared_distances(features, np.asarray(features.mean(axis=0)).reshape(1, -1))[:, 0]
    chance = np.full(rows, 1 / rows) if away.sum() == 0 else 0.5 / rows + 0.5 * away / away.sum()
    points, times = np.unique(rng.choice(rows, size=size, p=chance), return_counts=True)
    return points, times / (size * chance[points])
