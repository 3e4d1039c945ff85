"""Vocabulary clusters: every row is the centroid of its cluster, row ≈ C[b]."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np

from featherbed.codecs.codec import Codec, CodecJob, Fit, Settings, matrix_size, stream_size
from featherbed.codecs.coding import Codes, kmeans, move_centroids, nearest
from featherbed.codecs.rows import Floats
from featherbed.packed.band import Band, Fixed
from featherbed.packed.bits import width
from featherbed.packed.matrix import Matrix

MOST = 1 << 14  # clusters
PAIRS = 1 << 31  # distances computed by k-means, about


class ClusterCodec(Codec):
    """One code per row, over ``clusters`` centroids stored as ``kind``."""

    name = "clusters"

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays with these settings."""
        clusters = settings["clusters"]
        codes = stream_size(rows, width(clusters))
        return codes + matrix_size(settings["kind"], clusters, dim)

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:  # noqa: ARG002
        """Return the most clusters that fit for each kind of centroids, the most first."""
        found: list[Settings] = []
        for kind in ("int8", "float16"):
            counts = range(2, min(MOST, rows // 2) + 1)
            sizes = [self.size(rows, dim, clusters=n, kind=kind) for n in counts]
            fitting = bisect_right(sizes, budget)
            found += [{"clusters": counts[fitting - 1], "kind": kind}] if fitting else []
        if len(found) == 2 and found[0]["clusters"] == found[1]["clusters"]:
            found.reverse()  # float16 first if there are as many
        return found

    def work(self, dim: int, **settings: Any) -> float:
        """Return the work of a fit for each row."""
        return float(6 * dim * settings["clusters"])

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the matrix."""
        return ClusterFit(job, settings)


class ClusterFit(Fit):
    """The state of a fit: centroids as stored, and the clusters of the training rows."""

    refinable = True

    def __init__(self, job: CodecJob, settings: Settings) -> None:
        self.job, self.settings = job, settings
        self.ids = job.training
        self.sample, self.weights = job.rows.take(self.ids), job.importance[self.ids]
        job.progress("clusters", 0.0)
        drawn = by_importance(self.sample, self.weights, job.generator)
        rounds = int(np.clip(PAIRS // (len(self.ids) * settings["clusters"]), 4, 15))
        self._store(kmeans(drawn, settings["clusters"], job.seed(), rounds))

    def _store(self, centroids: Floats) -> None:
        """Round centroids as stored and assign every row to the nearest."""
        self.dictionary = Matrix.encode(centroids, self.settings["kind"], scale_kind="float16")
        self.codes: Codes = nearest(self.sample, self.dictionary.dense())
        left = self.sample - self.dictionary.dense()[self.codes]
        self.errors = self.weights * np.einsum("nd,nd->n", left, left)

    def refine(self, rounds: int) -> None:
        """Alternate weighted means of clusters and assignments; keep the best of all rounds."""
        kept = dict(self.__dict__)
        for done in range(rounds):
            self.job.progress("refining", done / rounds)
            self._store(self._means())
            if self.errors.sum(dtype=np.float64) < kept["errors"].sum(dtype=np.float64):
                kept = dict(self.__dict__)
        self.__dict__.update(kept)

    def _means(self) -> Floats:  # -> [K, d]
        """Return the weighted mean of each cluster; an empty one moves to a row of large error."""
        means = move_centroids(self.dictionary.dense(), self.codes, self.sample, self.weights)
        empty = np.flatnonzero(np.bincount(self.codes, minlength=len(means)) == 0)
        worst = np.argsort(-self.errors)[: len(empty)]
        means[empty[: len(worst)]] = self.sample[worst]
        return means

    def bands(self) -> list[Band]:
        """Return the packed form."""
        rows, codes = self.job.rows, self.codes
        if len(self.ids) < rows.count:
            codes = np.empty(rows.count, dtype=np.int32)
            for place, block in self.job.blocks():
                codes[place] = nearest(block, self.dictionary.dense())
        coded = Fixed.encode(codes[:, None].astype(np.int64), None, self.dictionary.shape[0])
        return [Band(rows.count, coded, dictionary=self.dictionary)]


def by_importance(rows: Floats, weights: Floats, generator: np.random.Generator) -> Floats:
    """Resample rows by weight, for libraries without weights; equal weights leave rows
    unchanged."""
    if np.ptp(weights) == 0:
        return rows
    share = weights / weights.sum(dtype=np.float64)
    return rows[generator.choice(len(rows), len(rows), p=share)]
