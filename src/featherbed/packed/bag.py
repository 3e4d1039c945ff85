"""Bags of rows: the sum or mean of the rows of several ids, as in nn.EmbeddingBag."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.errors import ArgumentError
from featherbed.packed import engine
from featherbed.packed.matrix import Floats

if TYPE_CHECKING:
    from featherbed.packed.table import PackedTable

Starts = NDArray[np.int64]


def bag_starts(ids: NDArray[Any], offsets: ArrayLike | None, include_last: bool) -> Starts:
    """Return the start of each bag among the flattened ids, and the end of the last: [bags + 1]."""
    if ids.ndim == 2 and offsets is None:
        even: Starts = np.arange(ids.shape[0] + 1, dtype=np.int64) * ids.shape[1]
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


def bag(
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


def _add(out: Floats, rows: Floats, starts: Starts, weights: Floats | None) -> None:
    """Add rows starts[b] .. starts[b + 1] - 1 to bag b, in order."""
    if engine.kernels(len(rows)):
        factors = np.ones(len(rows), dtype=np.float32) if weights is None else weights
        engine.Plan("pooled_rows", rows, factors, np.ascontiguousarray(starts)).run(out)
        return
    owner = np.repeat(np.arange(len(out)), np.diff(starts))
    np.add.at(out, owner, rows if weights is None else rows * weights[:, None])
