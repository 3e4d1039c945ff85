"""Scores of all rows and the best of them, without ever holding the scores of many queries, or the dense table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from featherbed.errors import ArgumentError
from featherbed.packed import engine
from featherbed.packed.band import Band
from featherbed.packed.codes import Every, Fixed, Ids, Ragged
from featherbed.packed.matrix import Floats

if TYPE_CHECKING:
    from featherbed.packed.table import PackedTable

BLOCK_SCORES = 1 << 22  # scores held at once
BLOCK_ROWS = 1 << 16


def check_queries(queries: ArrayLike, dim: int) -> Floats:
    """Return queries as float32, or say which width is wanted."""
    try:
        array = np.asarray(queries, dtype=np.float32)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"queries are vectors of {dim} numbers, got {str(queries)[:40]!r}: look a key's row up first"
        ) from None
    if array.ndim not in (1, 2) or array.shape[-1] != dim:
        raise ArgumentError(f"queries have shape {array.shape}; this table takes [{dim}] or [n, {dim}]")
    return array


class Scorer:
    """The scores of one band's rows for given queries: q . row = Σ_j v_j (q . a_j) where the composer is a sum."""

    def __init__(self, band: Band, queries: Floats) -> None:  # queries [n, d]
        self.band = band
        self.shift: Floats | None = None
        self.atom_scores: Floats | None = None  # [n, K]
        if band.affine is not None:
            if band.affine.bias is not None:
                self.shift = (queries @ band.affine.bias)[:, None]
            if band.affine.weight is not None:
                queries = queries @ band.affine.weight.dense().T
        self.queries = queries  # [n, d']: as the codes see them
        self.plus = None if band.plus is None else Scorer(band.plus, queries)
        if band.linear:
            assert band.dictionary is not None
            self.atom_scores = queries @ band.dictionary.dense().T

    def __call__(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [n, B]
        """Score rows given by ids and their positions in the band."""
        total = self._own(ids, positions)
        if self.plus is not None:
            total = total + self.plus(ids, positions)
        if self.shift is not None:
            total = total + self.shift
        return total if self.band.norms is None else total * self.band.norms.rows(positions)[:, 0]

    def _own(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [n, B]
        band = self.band
        if self.atom_scores is None:
            return self.queries @ band.composed(ids, positions).T
        if isinstance(band.codes, Every):
            assert band.values is not None
            return self.atom_scores @ band.values.rows(positions).T
        indices, values = band.fetch(ids, positions)
        total = np.zeros((len(self.queries), len(ids)), dtype=np.float32)
        for j in range(indices.shape[1]):
            part = self.atom_scores[:, indices[:, j]]
            total += part if values is None else part * values[:, j]
        return total

    def fill(self, first: int, out: Floats) -> bool:  # out [n, B]
        """Score the rows from position ``first`` on into ``out`` by a compiled loop; say whether there is one for them."""
        codes = self.band.codes
        if self.plus is not None or self.band.norms is not None:
            return False
        if self.atom_scores is None or not isinstance(codes, Fixed | Ragged) or not engine.kernels(out.shape[1]):
            return False
        atoms = self.atom_scores.shape[1]
        if isinstance(codes, Ragged):
            plan = engine.Plan("ragged_scores", *codes.arguments(), first)
        else:
            shape = (*codes.shape, codes.stride(atoms))
            plan = engine.Plan("fixed_scores", *codes.arguments(atoms), first, shape=shape)
        length = atoms if isinstance(codes, Ragged) else atoms + 2**codes.index_bits
        padded = np.zeros((len(self.queries), length), dtype=np.float32)
        padded[:, :atoms] = self.atom_scores
        for query, scores in enumerate(padded):
            plan.run(out[query], scores)
        if self.shift is not None:
            out += self.shift
        return True


def score_block(table: PackedTable, scorers: list[Scorer], start: int, out: Floats) -> None:  # out [n, B]
    """Fill in the scores of the rows from ``start`` on."""
    if len(scorers) > 1 or not scorers[0].fill(start, out):
        for begin in range(0, out.shape[1], table._chunk):
            part = out[:, begin : begin + table._chunk]
            ids = np.arange(start + begin, start + begin + part.shape[1])
            for score, (_, batch, positions) in zip(scorers, table.places(ids), strict=False):
                if len(batch):
                    part[:, batch] = score(ids[batch], positions)
    if table.padding_idx is not None and start <= table.padding_idx < start + out.shape[1]:
        out[:, table.padding_idx - start] = 0


def logits(table: PackedTable, queries: ArrayLike) -> Floats:  # [d] -> [V], [n, d] -> [n, V]
    """Return the dot product of every row with every query."""
    array = check_queries(queries, table.dim)
    wide = np.atleast_2d(array)
    scorers = [Scorer(band, wide) for band in table.bands]
    out = np.empty((len(wide), table.rows), dtype=np.float32)
    step = BLOCK_ROWS if len(wide) > 1 else 1 << 20
    for start in range(0, table.rows, step):
        score_block(table, scorers, start, out[:, start : start + step])
    return out[0] if array.ndim == 1 else out


def norms(table: PackedTable) -> Floats:  # [V]
    """Return the length of every row (1 for a zero row, whose cosine is 0 anyway); computed once, then kept."""
    if table._norms is None:
        lengths = np.empty(table.rows, dtype=np.float32)
        step = table._chunk
        for start in range(0, table.rows, step):
            rows = table.block(start, min(start + step, table.rows))
            lengths[start : start + step] = np.sqrt(np.einsum("vd,vd->v", rows, rows))
        lengths[lengths == 0] = 1
        table._norms = lengths
    return table._norms


def top(table: PackedTable, queries: ArrayLike, k: int, metric: str) -> tuple[Ids, Floats]:
    """Return the k best rows of every query, best first, ties by the smaller id."""
    if metric not in ("dot", "cosine"):
        raise ArgumentError(f"metric={metric!r}: use dot or cosine")
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ArgumentError(f"k={k!r}: ask for a whole number of rows, at least one")
    array = check_queries(queries, table.dim)
    wide = np.atleast_2d(array)
    if metric == "cosine":
        lengths = np.sqrt(np.einsum("nd,nd->n", wide, wide))[:, None]
        lengths[lengths == 0] = 1
        wide = wide / lengths
    scorers = [Scorer(band, wide) for band in table.bands]
    step = max(64, min(BLOCK_ROWS, BLOCK_SCORES // max(1, len(wide))))
    best_ids = np.empty((len(wide), 0), dtype=np.int64)
    best = np.empty((len(wide), 0), dtype=np.float32)
    for start in range(0, table.rows, step):
        ids = np.arange(start, min(start + step, table.rows))
        scores = np.empty((len(wide), len(ids)), dtype=np.float32)
        score_block(table, scorers, start, scores)
        if metric == "cosine":
            scores = np.divide(scores, norms(table)[ids], dtype=np.float32)
        scores[np.isnan(scores)] = -np.inf  # rows that are not numbers are nobody's neighbours
        best_ids, best = keep_best(best_ids, best, np.broadcast_to(ids, scores.shape), scores, k)
    order = np.lexsort((best_ids, -best), axis=1)
    best_ids, best = np.take_along_axis(best_ids, order, 1), np.take_along_axis(best, order, 1)
    return (best_ids[0], best[0]) if array.ndim == 1 else (best_ids, best)


def keep_best(best_ids: Ids, best: Floats, ids: Ids, scores: Floats, k: int) -> tuple[Ids, Floats]:  # all [n, .]
    """Merge a block's scores into the k best so far (ids rise from block to block, so earlier ones win ties)."""
    best_ids, best = np.concatenate([best_ids, ids], axis=1), np.concatenate([best, scores], axis=1)
    if best.shape[1] <= k:
        return best_ids, best
    edge = -np.partition(-best, k - 1, axis=1)[:, k - 1 : k]  # the k-th best score
    rank = np.where(best > edge, 0, np.where(best == edge, 1, 2))
    chosen = np.sort(np.argsort(rank, axis=1, kind="stable")[:, :k], axis=1)
    return np.take_along_axis(best_ids, chosen, 1), np.take_along_axis(best, chosen, 1)
