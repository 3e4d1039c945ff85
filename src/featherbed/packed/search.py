"""Scores of all rows, search for the best ones, and bags of rows (nn.EmbeddingBag), in numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.errors import ArgumentError
from featherbed.packed import engine
from featherbed.packed.band import Band, Codes, Every, Fixed, Identity, Ids, Ragged
from featherbed.packed.matrix import Floats

if TYPE_CHECKING:
    from featherbed.packed.table import PackedTable

BLOCK_SCORES = 1 << 22  # scores held at once
BLOCK_ROWS = 1 << 18  # rows scored at once
FIRST_ROWS = 1 << 12  # rows of the first block


def check_queries(queries: ArrayLike, dim: int) -> Floats:
    """Return queries as float32, checked."""
    try:
        array = np.asarray(queries, dtype=np.float32)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"queries are vectors of {dim} numbers, got {str(queries)[:40]!r}: "
            "look a key's row up first"
        ) from None
    if array.ndim not in (1, 2) or array.shape[-1] != dim:
        raise ArgumentError(
            f"queries have shape {array.shape}; this table takes [{dim}] or [n, {dim}]"
        )
    return array


class Scorer:
    """The scores of one band's rows for given queries, through the atoms where possible.

    sum: q . row = Σ_j v_j (q . a_j);  concat: q . row = Σ_j v_j (q_j . a_j) with part j of q
    """

    def __init__(self, band: Band, queries: Floats) -> None:  # queries [n, d]
        self.band = band
        self.shift: Floats | None = None
        self.atom_scores: Floats | None = None  # [n, K], with concat [n, s K]: one table a part
        if band.affine is not None:
            if band.affine.bias is not None:
                self.shift = (queries @ band.affine.bias)[:, None]
            if band.affine.weight is not None:
                queries = queries @ band.affine.weight.dense().T
        self.queries = queries  # [n, d']: before the affine stage
        self.plus = None if band.plus is None else Scorer(band.plus, queries)
        if band.linear and not _wider_than_rows(band):
            assert band.dictionary is not None
            atoms = band.dictionary.dense()
            concat = band.combine == "concat"
            scores = part_scores(band.codes, atoms, queries) if concat else queries @ atoms.T
            self.atom_scores = scores

    @property
    def stride(self) -> int:
        """Distance of the tables of two codes in ``atom_scores``; 0 if all codes share one."""
        codes = self.band.codes
        if not isinstance(codes, Fixed):
            return 0
        concat = self.band.combine == "concat"
        return codes.choices(self.band.atoms) if concat else codes.stride(self.band.atoms)

    def __call__(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [n, B]
        """Score rows given by ids and their positions in the band."""
        total = self._own_scores(ids, positions)
        if self.plus is not None:
            total = total + self.plus(ids, positions)
        if self.shift is not None:
            total = total + self.shift
        return total if self.band.norms is None else total * self.band.norms.rows(positions)[:, 0]

    def _own_scores(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [n, B]
        """Score the rows of this layer alone, before the affine stage."""
        band = self.band
        if self.atom_scores is None:
            return self.queries @ band.own_rows(ids, positions).T
        if isinstance(band.codes, Every):
            assert band.values is not None
            return self.atom_scores @ band.values.rows(positions).T
        indices, values = band.fetch(ids, positions)
        if isinstance(band.codes, Fixed):  # with parts, fetch has added their offsets
            indices += np.arange(band.codes.count) * (self.stride - band.codes.stride(band.atoms))
        used = None
        if isinstance(band.codes, Ragged) and not np.isfinite(self.atom_scores[:, :1]).all():
            used = band.codes.spans(positions)[1]  # 0 times the score of atom 0 would not be 0
        total = np.zeros((len(self.queries), len(ids)), dtype=np.float32)
        for j in range(indices.shape[1]):
            at = slice(None) if used is None else np.flatnonzero(used > j)
            part = self.atom_scores[:, indices[at, j]]
            total[:, at] += part if values is None else part * values[at, j]
        return total

    @cached_property
    def _plan(self) -> tuple[engine.Plan, Floats]:
        """The compiled loop, and the scores of atoms padded to the largest index codes can hold."""
        codes, scores = self.band.codes, self.atom_scores
        assert scores is not None
        if isinstance(codes, Ragged):
            plan = engine.Plan("ragged_scores", *codes.arguments())
            return plan, np.ascontiguousarray(scores)
        assert isinstance(codes, Fixed)
        padded = np.pad(np.ascontiguousarray(scores), ((0, 0), (0, 2**codes.index_bits)))
        shape = (*codes.shape, self.stride)
        return engine.Plan("fixed_scores", *codes.arguments(self.band.atoms), shape=shape), padded

    @property
    def compiled(self) -> bool:
        """Whether every layer of the band has a compiled loop."""
        own = self.atom_scores is not None and isinstance(self.band.codes, Fixed | Ragged)
        return own and (self.plus is None or self.plus.compiled)

    @cached_property
    def _stored(self) -> Floats | None:  # [V, d]
        """The rows of a dense float32 band, which need no composing."""
        band = self.band
        plain = isinstance(band.codes, Identity) and band.values is None and band.cell is None
        if not plain or band.norms is not None or self.plus is not None or self.shift is not None:
            return None
        assert band.dictionary is not None
        return band.dictionary.dense() if band.dictionary.kind == "float32" else None

    def fill(self, first: int, out: Floats) -> bool:  # out [n, B]
        """Score rows from position ``first`` on without composing or copying them; return False if
        that is not possible."""
        if self._stored is not None:
            np.matmul(self.queries, self._stored[first : first + out.shape[1]].T, out=out)
            return True
        if not self.compiled or not engine.kernels(out.shape[1]):
            return False
        plan, tables = self._plan
        for query, scores in enumerate(tables):
            plan.run(out[query], first, scores)
        if self.plus is not None:
            layer = np.empty_like(out)
            self.plus.fill(first, layer)
            out += layer
        if self.shift is not None:
            out += self.shift
        if self.band.norms is not None:
            out *= self.band.norms.rows(slice(first, first + out.shape[1]))[:, 0]
        return True


def _wider_than_rows(band: Band) -> bool:
    """Return whether the scores of all choices of all parts take far more memory than the rows."""
    if band.combine != "concat" or not isinstance(band.codes, Fixed):
        return False
    choices = band.codes.choices(band.atoms)
    return choices > band.rows and band.codes.count * choices > BLOCK_SCORES


def part_scores(codes: Codes, atoms: Floats, queries: Floats) -> Floats:
    """Return the dot products [n, s K] of atoms [K or s K, d/s] with their parts of queries [n,
    d]."""
    assert isinstance(codes, Fixed)
    count, width = codes.count, atoms.shape[1]
    choices, parts = codes.choices(len(atoms)), queries.reshape(len(queries), count, width)
    if not codes.parts:
        return (parts.reshape(-1, width) @ atoms.T).reshape(len(queries), count * choices)
    blocks = atoms[: count * choices].reshape(count, choices, width)
    scores: Floats = parts.transpose(1, 0, 2) @ blocks.transpose(0, 2, 1)  # [s, n, K]
    return scores.transpose(1, 0, 2).reshape(len(queries), count * choices)


def score_block(table: PackedTable, scorers: list[Scorer], start: int, out: Floats) -> None:
    """Write the scores [n, B] of the rows from ``start`` on into ``out``."""
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
    """Return the norm of every row (1 for a zero row, whose cosine is 0), computed once."""
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
    check_count(k)
    array = check_queries(queries, table.dim)
    wide = np.atleast_2d(array)
    if metric == "cosine":
        _check_direction(table)
        lengths = np.sqrt(np.einsum("nd,nd->n", wide, wide))[:, None]
        lengths[lengths == 0] = 1
        wide = wide / lengths
    scorers = [Scorer(band, wide) for band in table.bands]

    def score(start: int, out: Floats) -> None:
        score_block(table, scorers, start, out)
        if metric == "cosine":
            out /= norms(table)[start : start + out.shape[1]]

    best_ids, best = best_rows(table.rows, len(wide), int(k), score)
    return (best_ids[0], best[0]) if array.ndim == 1 else (best_ids, best)


def _check_direction(table: PackedTable) -> None:
    """Refuse the cosine of rows with one stored column: it is always 1, -1 or 0."""
    known = table.columns_with_bits()
    if known is not None and table.dim > 1 and np.count_nonzero(known) < 2:
        raise ArgumentError(
            f"cosine cannot tell these rows apart: {np.count_nonzero(known)} of {table.dim} "
            "columns are stored, the others have zero bits (a recommender without factors stores "
            "biases only): train with more ratings or a larger budget, or search by metric='dot'"
        )


def check_count(k: int) -> None:
    """Refuse a number of results below 1."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ArgumentError(f"k={k!r}: give an integer of at least 1")


def best_rows(
    rows: int, queries: int, k: int, score: Callable[[int, Floats], None]
) -> tuple[Ids, Floats]:
    """Return ids and scores [n, k] of the best rows, best first, ties by the smaller id.

    ``score(start, out)`` writes the scores [n, B] of the rows from ``start`` on. The first block is
    short: it finds a threshold that most later scores do not exceed.
    """
    step = max(64, min(BLOCK_ROWS, BLOCK_SCORES // max(1, queries)))
    best = TopRows(queries, k)
    start, size = 0, min(step, FIRST_ROWS)
    while start < rows:
        scores = np.empty((queries, min(size, rows - start)), dtype=np.float32)
        score(start, scores)
        best.add(start, scores)
        start, size = start + scores.shape[1], step
    return best.sorted()


class TopRows:
    """The k best rows so far of each query.

    Blocks come in order of ids, so that a later score equal to the k-th best loses the tie.

    >>> best = TopRows(1, 2)
    >>> best.add(0, np.array([[1.0, 3.0, 2.0]], dtype=np.float32))
    >>> best.add(3, np.array([[2.0, 3.0]], dtype=np.float32))
    >>> best.sorted()
    (array([[1, 4]]), array([[3., 3.]], dtype=float32))
    """

    def __init__(self, queries: int, k: int) -> None:
        self.k = k
        self.ids = [np.empty(0, dtype=np.int64)] * queries  # ascending
        self.scores = [np.empty(0, dtype=np.float32)] * queries
        self.threshold = np.full(queries, -np.inf, dtype=np.float32)  # the k-th best score
        self.count = 0

    def add(self, start: int, scores: Floats) -> None:  # [n, B]
        """Add the scores of the rows from ``start`` on; NaN counts as the lowest score."""
        if self.count < self.k:
            low = np.where(np.isnan(scores), np.float32(-np.inf), scores)
            for query, row in enumerate(low):
                self._merge(query, np.arange(start, start + len(row)), row)
        else:
            better = scores > self.threshold[:, None]  # False for NaN
            for query in np.flatnonzero(better.any(axis=1)).tolist():
                columns = np.flatnonzero(better[query])
                self._merge(query, start + columns, scores[query, columns])
        self.count += scores.shape[1]

    def _merge(self, query: int, ids: Ids, scores: Floats) -> None:
        ids = np.concatenate([self.ids[query], ids])
        scores = np.concatenate([self.scores[query], scores])
        if len(scores) >= self.k:
            kth = np.partition(scores, len(scores) - self.k)[len(scores) - self.k]
            above, equal = np.flatnonzero(scores > kth), np.flatnonzero(scores == kth)
            kept = np.sort(np.concatenate([above, equal[: self.k - len(above)]]))
            ids, scores, self.threshold[query] = ids[kept], scores[kept], kth
        self.ids[query], self.scores[query] = ids, scores

    def sorted(self) -> tuple[Ids, Floats]:  # [n, k] each
        """Return ids and scores, best first, ties by the smaller id."""
        shape = (len(self.ids), min(self.k, self.count))
        ids = np.array(self.ids, dtype=np.int64).reshape(shape)
        scores = np.array(self.scores, dtype=np.float32).reshape(shape)
        order = np.argsort(-scores, axis=1, kind="stable")
        return np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)


def bag_starts(
    ids: NDArray[Any], offsets: ArrayLike | None, include_last: bool
) -> NDArray[np.int64]:
    """Return the start of each bag among the flattened ids, and the end of the last: [bags + 1]."""
    if ids.ndim == 2 and offsets is None:
        even: NDArray[np.int64] = np.arange(ids.shape[0] + 1, dtype=np.int64) * ids.shape[1]
        return even
    if ids.ndim != 1 or offsets is None:
        raise ArgumentError(f"bag takes 2-D ids, or 1-D ids with offsets; got {ids.ndim}-D ids")
    given = np.asarray(offsets)
    if given.ndim != 1 or given.dtype.kind not in "iu" or (include_last and not len(given)):
        raise ArgumentError(
            f"offsets must be a 1-D array of integers, got {given.dtype} of shape {given.shape}"
        )
    starts = given.astype(np.int64)
    if not include_last:
        starts = np.concatenate([starts, [len(ids)]])
    if starts[0] != 0 or np.any(np.diff(starts) < 0) or starts[-1] != len(ids):
        raise ArgumentError(
            f"offsets must start at 0, never fall and end at the {len(ids)} ids given: {given}"
        )
    return starts


def pool_rows(
    table: PackedTable,
    ids: ArrayLike,
    offsets: ArrayLike | None,
    weights: ArrayLike | None,
    mode: str,
    include_last: bool,
) -> Floats:  # [bags, d]
    """Pool rows into bags; padding ids do not count."""
    array = np.asarray(ids)
    if mode not in ("sum", "mean"):
        raise ArgumentError(f"mode={mode!r}: bags are pooled by sum or mean")
    starts = bag_starts(array, offsets, include_last)
    factors = None if weights is None else np.asarray(weights, dtype=np.float32)
    if factors is not None and (mode != "sum" or factors.shape != array.shape):
        raise ArgumentError(
            "per_sample_weights go with mode='sum' and have the shape of the ids, "
            "as in nn.EmbeddingBag"
        )
    flat = array.reshape(-1)
    if factors is not None:
        factors = np.ascontiguousarray(factors.reshape(-1))
    out = np.zeros((len(starts) - 1, table.dim), dtype=np.float32)
    step = max(1, table._chunk)
    for begin in range(0, len(flat), step):
        rows = table[flat[begin : begin + step]]
        part = None if factors is None else factors[begin : begin + step]
        _add(out, rows, np.clip(starts - begin, 0, len(rows)), part)
    if mode == "mean":
        padding = -1 if table.padding_idx is None else table.padding_idx
        totals = np.concatenate([[0], np.cumsum(flat != padding)])
        out /= np.maximum(totals[starts[1:]] - totals[starts[:-1]], 1)[:, None].astype(np.float32)
    return out


def _add(out: Floats, rows: Floats, starts: NDArray[np.int64], weights: Floats | None) -> None:
    """Add rows starts[b] .. starts[b + 1] - 1 to bag b, in order."""
    if engine.kernels(len(rows)):
        factors = np.ones(len(rows), dtype=np.float32) if weights is None else weights
        engine.Plan("pooled_rows", rows, factors, np.ascontiguousarray(starts)).run(out)
        return
    owner = np.repeat(np.arange(len(out)), np.diff(starts))
    np.add.at(out, owner, rows if weights is None else rows * weights[:, None])
