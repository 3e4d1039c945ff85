"""The quality of a compressed table: recall, error, cosine and overlap with the original."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.codecs.principal import principal_directions
from featherbed.codecs.rows import Floats, Ids, WeightedRows

NEIGHBORS = 10
QUERIES = 2000  # rows whose neighbors are compared
ERROR_ROWS = 20_000  # rows whose errors and overlap are measured, at most
BANDS = 5
SHORT = 1e-15  # shorter rows are scaled up before their squares are summed
RowsOf = Callable[[Ids], Floats]


def unit(rows: Floats) -> Floats:
    """Return rows of norm 1 (zero rows stay zero)."""
    lengths = np.sqrt(np.einsum("vd,vd->v", rows, rows))
    small = np.flatnonzero(lengths < SHORT)
    if len(small):  # their squares are too small for float32
        rows = rows.copy()
        rows[small] *= np.float32(1 / SHORT)
        lengths[small] = np.sqrt(np.einsum("vd,vd->v", rows[small], rows[small]))
    out: Floats = rows / np.where(lengths > 0, lengths, np.float32(1)).astype(np.float32)[:, None]
    return out


class QualityEvaluator:
    """Measures how well rows approximate those of a matrix, on the same rows every time.

    - recall@10: the share of the ten nearest rows by cosine in the matrix that are among the ten
      nearest in the compressed table (of compressed rows), mean over 2,000 rows
    - error: Σ ||x - y||² / Σ ||x||²
    - cosine: mean of cos(x, y)
    - overlap: ||U^T V||_F² / d of the left singular vectors U, V of both (May et al. 2019, "On the
      downstream performance of compressed word embeddings")

    With weights, weighted means are measured as well, and bands are in order of weights.

    >>> rows = WeightedRows(np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32))
    >>> QualityEvaluator(rows, np.random.default_rng(0))(lambda ids: rows.take(ids))["recall"]
    1.0
    """

    def __init__(
        self, rows: WeightedRows, generator: np.random.Generator, queries: int = QUERIES
    ) -> None:
        self.rows, self.neighbors = rows, min(NEIGHBORS, rows.count - 1)
        evenly = np.sort(generator.choice(rows.count, min(queries, rows.count), replace=False))
        self.queries = evenly
        if rows.weighted:  # half of the queries by weight, to measure frequent rows well
            share = rows.weights / rows.weights.sum()
            often = generator.choice(rows.count, min(queries, rows.count), replace=True, p=share)
            self.queries = np.unique(np.concatenate([evenly, often]))
            places = np.searchsorted(self.queries, often)
            self.drawn = np.bincount(places, minlength=len(self.queries)).astype(np.float64)
        self.even = np.isin(self.queries, evenly)
        drawn = generator.choice(rows.count, min(ERROR_ROWS, rows.count), replace=False)
        self.ids = np.unique(np.concatenate([drawn, self.queries]))  # rows whose errors count
        self.nearest = self._nearest(rows.take)
        order = np.argsort(-rows.weights, kind="stable") if rows.weighted else np.arange(rows.count)
        self.place = np.empty(rows.count, dtype=np.int64)
        self.place[order] = np.arange(rows.count)

    @property
    def work(self) -> float:
        """The work of an evaluation: the number of scores."""
        return float(len(self.queries) * self.rows.count)

    def recalls(self, rows_of: RowsOf) -> NDArray[np.float64]:  # [queries]
        """Return the recall of each query."""
        if self.neighbors < 1:
            return np.ones(len(self.queries))
        both = np.concatenate([self.nearest, self._nearest(rows_of)], axis=1)
        both.sort(axis=1)
        recalls: NDArray[np.float64] = (both[:, 1:] == both[:, :-1]).sum(axis=1) / self.neighbors
        return recalls

    def _nearest(self, rows_of: RowsOf) -> Ids:  # [queries, k]
        """Return the nearest rows of each query."""
        count, step = self.rows.count, self.rows.step
        return nearest_rows(
            lambda ids: unit(rows_of(ids)), count, step, self.queries, self.neighbors
        )

    def recall(self, rows_of: RowsOf) -> float:
        """Return recall@10, weighted if there are weights."""
        return self._mean(self.recalls(rows_of))

    def _mean(self, recalls: NDArray[np.float64]) -> float:
        if self.rows.weighted:
            return float(np.average(recalls, weights=self.drawn))
        return float(recalls.mean())

    def __call__(self, rows_of: RowsOf) -> dict[str, Any]:
        """Return every measure, for all rows and by band."""
        recalls = self.recalls(rows_of)
        before, after = self.rows.take(self.ids), rows_of(self.ids)
        squares = np.einsum("vd,vd->v", before, before).astype(np.float64)
        gap = before - after
        errors = np.einsum("vd,vd->v", gap, gap).astype(np.float64)
        cosines = np.einsum("vd,vd->v", unit(before), unit(after)).astype(np.float64)
        found: dict[str, Any] = {
            "recall": float(recalls[self.even].mean()),
            "error": float(errors.sum() / squares.sum()),
            "cosine": float(cosines.mean()),
            "overlap": overlap(before, after),
        }
        if self.rows.weighted:
            weights = self.rows.weights[self.ids].astype(np.float64)
            found["weighted_recall"] = self._mean(recalls)
            found["weighted_error"] = float((weights * errors).sum() / (weights * squares).sum())
        found["bands"] = [
            self._band(low, high, recalls, errors, squares, cosines)
            for low, high in band_edges(self.rows.count)
        ]
        return found

    def _band(
        self, low: int, high: int, recalls: Any, errors: Any, squares: Any, cosines: Any
    ) -> dict[str, Any]:
        wide = (self.place[self.ids] >= low) & (self.place[self.ids] < high)
        queries = (self.place[self.queries] >= low) & (self.place[self.queries] < high)
        members = (self.place >= low) & (self.place < high)
        label = "ranks" if self.rows.weighted else "rows"
        return {
            "name": f"{label} {low:,} to {high - 1:,}",
            "rows": high - low,
            "share": float(self.rows.weights[members].sum() / self.rows.weights.sum()),
            "error": float(errors[wide].sum() / squares[wide].sum())
            if squares[wide].any()
            else None,
            "cosine": float(cosines[wide].mean()) if wide.any() else None,
            "recall": float(recalls[queries].mean()) if queries.any() else None,
        }


def band_edges(count: int) -> list[tuple[int, int]]:
    """Return bands of ranks 0 .. count - 1 that grow by a factor, the first one the smallest.

    >>> band_edges(100_000)
    [(0, 10), (10, 100), (100, 1000), (1000, 10000), (10000, 100000)]
    """
    steps = np.geomspace(max(1, count / 10**BANDS), count, BANDS + 1)
    cuts = np.unique(np.round(steps).astype(int))
    edges = [0, *(cut for cut in cuts[1:].tolist() if cut < count), count]
    return [(low, high) for low, high in pairwise(edges) if high > low]


def overlap(before: Floats, after: Floats) -> float:
    """Return the eigenspace overlap of two matrices: 1 if their columns span the same space."""
    left, right = (_orthonormal(rows) for rows in (before, after))
    most = max(left.shape[1], right.shape[1])
    return float(np.square(left.T @ right).sum() / most) if most else 1.0


def _orthonormal(rows: Floats) -> Any:  # [n, d] -> [n, r]
    """Return an orthonormal basis of the column space."""
    square = rows.T.astype(np.float64) @ rows
    directions = principal_directions(square, len(square))
    sizes = np.einsum("rd,de,re->r", directions, square, directions)
    kept = sizes > sizes.max(initial=0) * 1e-10
    return (rows @ directions[kept].T) / np.sqrt(sizes[kept])


def nearest_rows(units: RowsOf, count: int, step: int, queries: Ids, k: int) -> Ids:  # -> [n, k]
    """Return the k nearest rows of each query by cosine, itself left out, in blocks of rows."""
    if k < 1:  # a single row has no neighbors
        return np.zeros((len(queries), 0), dtype=np.int64)
    query_rows = units(queries)
    best: Floats = np.empty((len(queries), 0), dtype=np.float32)
    ids: Ids = np.empty((len(queries), 0), dtype=np.int64)
    step = max(k, min(step, (1 << 22) // max(1, len(queries))))
    for start in range(0, count, step):
        stop = min(start + step, count)
        scores = query_rows @ units(np.arange(start, stop)).T
        inside = np.flatnonzero((queries >= start) & (queries < stop))
        scores[inside, queries[inside] - start] = -np.inf
        if start == 0:  # all scores are above those of no rows
            ids = np.argpartition(scores, -k, axis=1)[:, -k:]
            best = np.take_along_axis(scores, ids, 1)
            continue
        rows, found = np.nonzero(scores > best.min(axis=1)[:, None])  # few after the first blocks
        if not len(rows):
            continue
        own = np.bincount(rows, minlength=len(queries))
        place = k + np.arange(len(rows)) - np.repeat(np.cumsum(own) - own, own)
        all_scores = np.full((len(queries), k + own.max()), -np.inf, dtype=np.float32)
        all_ids = np.zeros(all_scores.shape, dtype=np.int64)
        all_scores[:, :k], all_ids[:, :k] = best, ids
        all_scores[rows, place], all_ids[rows, place] = scores[rows, found], found + start
        keep = np.argpartition(all_scores, -k, axis=1)[:, -k:]
        best, ids = np.take_along_axis(all_scores, keep, 1), np.take_along_axis(all_ids, keep, 1)
    return ids
