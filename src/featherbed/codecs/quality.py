"""What a compressed table keeps of the matrix it was made from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from featherbed.codecs.principal import principal_directions
from featherbed.codecs.rows import Floats, Ids, Rows

NEIGHBOURS = 10
QUERIES = 2000  # rows whose neighbours are compared
WIDE = 20_000  # rows that errors and overlap are taken of, at most
BANDS = 5
SHORT = 1e-15  # rows that are shorter are made longer before their squares are summed
RowsOf = Callable[[Ids], Floats]


def unit(rows: Floats) -> Floats:
    """Return rows of length one (zero rows stay zero)."""
    lengths = np.sqrt(np.einsum("vd,vd->v", rows, rows))
    small = np.flatnonzero(lengths < SHORT)
    if len(small):  # their squares are too small for float32
        rows = rows.copy()
        rows[small] *= np.float32(1 / SHORT)
        lengths[small] = np.sqrt(np.einsum("vd,vd->v", rows[small], rows[small]))
    out: Floats = rows / np.where(lengths > 0, lengths, np.float32(1)).astype(np.float32)[:, None]
    return out


class Judge:
    """Measures how well rows stand in for those of a matrix, on the same rows every time.

    recall@10: of the ten rows nearest to a row by cosine in the matrix, itself left out, the share that is among the ten
    nearest in the compressed table, where both the row and its neighbours are compressed; mean over 2,000 rows.
    error: Σ ||x - y||² / Σ ||x||². cosine: mean of cos(x, y). overlap: ||U^T V||_F² / d of the left singular vectors U, V
    of both (May et al. 2019, "On the downstream performance of compressed word embeddings").
    With weights, each figure is a weighted mean beside the plain one, and bands go by falling weight.

    >>> rows = Rows(np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32))
    >>> Judge(rows, np.random.default_rng(0))(lambda ids: rows.take(ids))["recall"]
    1.0
    """

    def __init__(self, rows: Rows, generator: np.random.Generator, queries: int = QUERIES) -> None:
        self.rows, self.neighbours = rows, min(NEIGHBOURS, rows.count - 1)
        evenly = np.sort(generator.choice(rows.count, min(queries, rows.count), replace=False))
        self.queries = evenly
        if (
            rows.weighted
        ):  # half of the queries by weight, so that the few rows that matter are measured well
            share = rows.weights / rows.weights.sum()
            often = generator.choice(rows.count, min(queries, rows.count), replace=True, p=share)
            self.queries = np.unique(np.concatenate([evenly, often]))
            self.drawn = np.bincount(
                np.searchsorted(self.queries, often), minlength=len(self.queries)
            ).astype(np.float64)
        self.even = np.isin(self.queries, evenly)
        wide = generator.choice(rows.count, min(WIDE, rows.count), replace=False)
        self.wide = np.unique(np.concatenate([wide, self.queries]))
        self.found = nearest_rows(
            lambda ids: unit(rows.take(ids)), rows.count, rows.step, self.queries, self.neighbours
        )
        order = np.argsort(-rows.weights, kind="stable") if rows.weighted else np.arange(rows.count)
        self.place = np.empty(rows.count, dtype=np.int64)
        self.place[order] = np.arange(rows.count)

    @property
    def work(self) -> float:
        """How long a judgement takes: scores that are compared."""
        return float(len(self.queries) * self.rows.count)

    def recalls(self, rows_of: RowsOf) -> np.ndarray[Any, np.dtype[np.float64]]:  # [queries]
        """Return for each query the share of its neighbours that is kept."""
        if self.neighbours < 1:
            return np.ones(len(self.queries))
        kept = nearest_rows(
            lambda ids: unit(rows_of(ids)),
            self.rows.count,
            self.rows.step,
            self.queries,
            self.neighbours,
        )
        both = np.concatenate([self.found, kept], axis=1)
        both.sort(axis=1)
        shared: np.ndarray[Any, np.dtype[np.float64]] = (both[:, 1:] == both[:, :-1]).sum(
            axis=1
        ) / self.neighbours
        return shared

    def recall(self, rows_of: RowsOf) -> float:
        """Return recall@10, weighted if there are weights."""
        return self._mean(self.recalls(rows_of))

    def _mean(self, recalls: np.ndarray[Any, np.dtype[np.float64]]) -> float:
        if self.rows.weighted:
            return float(np.average(recalls, weights=self.drawn))
        return float(recalls.mean())

    def __call__(self, rows_of: RowsOf) -> dict[str, Any]:
        """Return every figure, for all rows and by band."""
        recalls = self.recalls(rows_of)
        before, after = self.rows.take(self.wide), rows_of(self.wide)
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
            weights = self.rows.weights[self.wide].astype(np.float64)
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
        wide = (self.place[self.wide] >= low) & (self.place[self.wide] < high)
        asked = (self.place[self.queries] >= low) & (self.place[self.queries] < high)
        members = (self.place >= low) & (self.place < high)
        what = "ranks" if self.rows.weighted else "rows"
        return {
            "name": f"{what} {low:,} to {high - 1:,}",
            "rows": high - low,
            "share": float(self.rows.weights[members].sum() / self.rows.weights.sum()),
            "error": float(errors[wide].sum() / squares[wide].sum())
            if squares[wide].any()
            else None,
            "cosine": float(cosines[wide].mean()) if wide.any() else None,
            "recall": float(recalls[asked].mean()) if asked.any() else None,
        }


def band_edges(count: int) -> list[tuple[int, int]]:
    """Cut ranks 0 .. count - 1 into bands that grow by a factor: the first, by far the most used, is the smallest.

    >>> band_edges(100_000)
    [(0, 10), (10, 100), (100, 1000), (1000, 10000), (10000, 100000)]
    """
    cuts = np.unique(
        np.round(np.geomspace(max(1, count / 10**BANDS), count, BANDS + 1)).astype(int)
    )
    edges = [0, *(cut for cut in cuts[1:].tolist() if cut < count), count]
    return [(low, high) for low, high in pairwise(edges) if high > low]


def overlap(before: Floats, after: Floats) -> float:
    """Return the eigenspace overlap of two matrices of the same rows: 1 when they span the same space."""
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
    """Return the k nearest rows of each query by cosine, itself left out, going through all rows in blocks."""
    asked = units(queries)
    best = np.full((len(queries), k), -np.inf, dtype=np.float32)
    ids = np.zeros((len(queries), k), dtype=np.int64)
    step = max(k, min(step, (1 << 24) // max(1, len(queries))))
    for start in range(0, count, step):
        stop = min(start + step, count)
        scores = asked @ units(np.arange(start, stop)).T
        inside = np.flatnonzero((queries >= start) & (queries < stop))
        scores[inside, queries[inside] - start] = -np.inf
        if scores.shape[1] > k:
            top = np.argpartition(scores, -k, axis=1)[:, -k:]
        else:
            top = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
        all_scores = np.concatenate([best, np.take_along_axis(scores, top, 1)], axis=1)
        all_ids = np.concatenate([ids, top + start], axis=1)
        keep = np.argpartition(all_scores, -k, axis=1)[:, -k:]
        best, ids = np.take_along_axis(all_scores, keep, 1), np.take_along_axis(all_ids, keep, 1)
    return ids
