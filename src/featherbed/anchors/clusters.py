"""Anchors by clustering: k-means++ seeds in a feature space or a coreset of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featherbed.anchors.given import as_features, dense_rows, draw_seed, sklearn
from featherbed.anchors.objects import ObjectAnchors, highest, scores_for
from featherbed.checks import check_integer, is_number
from featherbed.errors import ArgumentError

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


class FeatureAnchors(ObjectAnchors):
    """Objects with features, which initialize the atoms if they have the width of the table."""

    def __init__(self, features: Any, transform_std: float | None) -> None:
        super().__init__(transform_std)
        self.features = as_features(features)

    def features_of(self, objects: int) -> Any:  # -> [V, f], an array or scipy CSR
        """Return the features, checked for the number of objects."""
        if self.features.shape[0] != objects:
            raise ArgumentError(
                f"features have shape {self.features.shape}; give a row for each of the {objects} "
                "objects"
            )
        return self.features

    def vectors(self, ids: Tensor, width: int) -> Tensor | None:  # [K] -> [K, d]
        """Return the features if they have the width of the atoms."""
        if self.features.shape[1] != width:
            return None
        return torch.from_numpy(dense_rows(self.features, ids.numpy()))


class KMeansPlusPlus(FeatureAnchors):
    """The k-means++ seeds of a feature space are the anchors (Liang et al. 2021, section 2.1).

        P(next = x) = D(x)² / Σ_y D(y)²,   D(x): distance to the nearest seed; the first is uniform

    Arthur and Vassilvitskii 2007. Large features attract seeds: take logarithms of counts, or rows
    of length 1, to avoid that a few frequent objects dominate. Atoms are initialized to the
    features if these have the width of the table.

    Args:
        features: [V, f], an array, a tensor or a scipy.sparse matrix: GloVe vectors, co-occurrence
            counts, attributes.
        trials: number of candidates per seed, of which the one with the smallest sum of squared
            distances is taken; None: 2 + log K as in scikit-learn; 1: the distribution above.
        transform_std: standard deviation of the other rows' initial weights, as in
            ``fb.HalfNormal``.

    >>> import featherbed as fb, numpy as np
    >>> features = np.array([[0.0, 0], [0, 0.1], [9, 0], [9, 0.1], [0, 9]])
    >>> table = fb.AnchorTable(5, 2, anchors=3, init=KMeansPlusPlus(features))
    >>> sorted(min(i, 4) // 2 for i in table.anchor_ids.tolist())  # 0 or 1, 2 or 3, and 4
    [0, 1, 2]
    """

    def __init__(
        self, features: Any, *, trials: int | None = None, transform_std: float | None = None
    ) -> None:
        super().__init__(features, transform_std)
        self.trials = None if trials is None else check_integer("trials", trials)

    def choose(self, objects: int, count: int, generator: torch.Generator | None) -> Tensor:
        """Return the seeds in order of selection."""
        features = self.features_of(objects)
        return torch.from_numpy(seeds(features, count, draw_seed(generator), trials=self.trials))


class FrequencyThenClusters(FeatureAnchors):
    """The most frequent objects, then k-means++ seeds among the others (Liang et al., figure 2).

    The frequent objects are the initial centers: every further anchor is drawn with P(x) = D(x)² /
    Σ_y D(y)², where D(x) is the distance to the nearest anchor.

    Args:
        counts: number of occurrences of each object, [V].
        features: [V, f], as in ``fb.KMeansPlusPlus``.
        frequent: share of the anchors selected by frequency, 0 to 1.
        transform_std: standard deviation of the other rows' initial weights, as in
            ``fb.HalfNormal``.

    >>> import featherbed as fb, numpy as np
    >>> features = np.array([[0.0, 0], [0, 0.1], [0, 0.2], [9, 0]])  # the last is rare
    >>> init = FrequencyThenClusters([9, 8, 7, 1], features)
    >>> fb.AnchorTable(4, 8, anchors=2, init=init).anchor_ids
    tensor([0, 3])
    """

    def __init__(
        self,
        counts: Any,
        features: Any,
        *,
        frequent: float = 0.5,
        transform_std: float | None = None,
    ) -> None:
        super().__init__(features, transform_std)
        if not is_number(frequent, 0, 1):
            raise ArgumentError(
                f"frequent={frequent!r}: give the share of the anchors chosen by frequency, from 0 "
                "to 1"
            )
        self.counts, self.frequent = counts, frequent

    def choose(self, objects: int, count: int, generator: torch.Generator | None) -> Tensor:
        """Return the most frequent objects, then the seeds in order of selection."""
        features = self.features_of(objects)
        counts = scores_for("counts", self.counts, objects)
        first = highest(counts, round(self.frequent * count)).numpy()
        rng = np.random.default_rng(draw_seed(generator))
        return torch.from_numpy(more_seeds(features, first, count, rng))


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


def seeds(
    features: Any, count: int, seed: int, trials: int | None = None, weights: Floats | None = None
) -> Ids:
    """Return k-means++ seeds among the rows of ``features`` [V, f] with weights."""
    settings = {"random_state": seed, "n_local_trials": trials, "sample_weight": weights}
    ids: Ids = sklearn("cluster").kmeans_plusplus(features, count, **settings)[1].astype(np.int64)
    _check_distinct(features, ids, 0)
    return ids


def more_seeds(features: Any, first: Ids, count: int, rng: np.random.Generator) -> Ids:  # [K]
    """Return ``first`` and further k-means++ seeds, ``count`` in all.

    scikit-learn's seeding cannot start from given centers.
    """
    ids = [int(i) for i in first] or [int(rng.integers(features.shape[0]))]
    nearest = squared_distances(features, dense_rows(features, np.array(ids))).min(axis=1)
    while len(ids) < count:
        nearest[ids] = 0  # rounding may say otherwise
        total = nearest.sum()
        if total == 0:
            raise _too_few(len(ids), count)
        ids.append(int(rng.choice(len(nearest), p=nearest / total)))
        new = squared_distances(features, dense_rows(features, np.array(ids[-1:])))[:, 0]
        nearest = np.minimum(nearest, new)
    found: Ids = np.array(ids, dtype=np.int64)
    _check_distinct(features, found, len(first))
    return found


def squared_distances(features: Any, centers: NDArray[Any]) -> Floats:  # [V, f], [K, f] -> [V, K]
    """Return the squared Euclidean distances of rows to centers."""
    found = sklearn("metrics").pairwise.euclidean_distances(features, centers, squared=True)
    distances: Floats = found.astype(np.float64)
    return distances


def _check_distinct(features: Any, ids: Ids, given: int) -> None:
    """Raise an error for repeated seeds, except among the first ``given``."""
    rows = dense_rows(features, ids)
    different = len(np.unique(rows, axis=0)) - len(np.unique(rows[:given], axis=0))
    if different < len(ids) - given:
        raise _too_few(given + different, len(ids))


def _too_few(found: int, count: int) -> ArgumentError:
    return ArgumentError(
        f"the features tell only {found} anchors apart, of {count}: too many rows are equal; use "
        "fewer anchors"
    )


def lightweight(features: Any, size: int, rng: np.random.Generator) -> tuple[Ids, Floats]:
    """Return the objects of a lightweight coreset of ``size`` draws, and their weights."""
    rows = features.shape[0]
    if size >= rows:
        return np.arange(rows), np.ones(rows)
    away = squared_distances(features, np.asarray(features.mean(axis=0)).reshape(1, -1))[:, 0]
    chance = np.full(rows, 1 / rows) if away.sum() == 0 else 0.5 / rows + 0.5 * away / away.sum()
    points, times = np.unique(rng.choice(rows, size=size, p=chance), return_counts=True)
    return points, times / (size * chance[points])
