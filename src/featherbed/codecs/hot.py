"""Hot rows as integers, and the tail by another codec."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from featherbed.codecs.codec import (
    Codec,
    CodecJob,
    Fit,
    Settings,
    WrappedFit,
    WrappingCodec,
    matrix_size,
)
from featherbed.codecs.integer import level_rows
from featherbed.codecs.rows import Floats, Ids, WeightedRows
from featherbed.errors import ArgumentError
from featherbed.packed.band import BLOCK_BITS, Band, Every, Members

COMPARED = 4  # settings of the inner codec that are worth comparing
LOSS = {"int8": 1e-4, "int4": 0.01}  # error of hot rows, about
HOT_SHARES = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)


class RowSubset:
    """Some rows of a matrix, read on access."""

    dtype = np.dtype(np.float32)

    def __init__(self, rows: WeightedRows, ids: Ids) -> None:
        self.rows, self.ids, self.shape = rows, ids, (len(ids), rows.dim)

    def __getitem__(self, index: Any) -> Floats:
        return self.rows.take(self.ids[index])


class HotCodec(WrappingCodec):
    """The ``hot`` rows of largest weight as integers of ``hot_kind``, the others by another
    codec."""

    own = ("hot", "hot_kind")

    def __init__(self, inner: Codec) -> None:
        super().__init__(inner)
        self.name = f"hot+{inner.name}"

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays with these settings."""
        tail = self.inner.size(rows - settings["hot"], dim, **self.inner_settings(settings))
        return self._head_size(rows, dim, settings["hot"], settings["hot_kind"]) + tail

    def _head_size(self, rows: int, dim: int, hot: int, kind: str) -> int:
        blocks = -(-rows // BLOCK_BITS)
        return matrix_size(kind, hot, dim) + blocks * (BLOCK_BITS // 8 + 4)

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:
        """Return promising settings of the tail for several numbers of hot rows."""
        found: list[Settings] = []
        for share in HOT_SHARES:
            hot = max(1, round(share * rows))
            for kind in LOSS if hot < rows else ():
                left = budget - self._head_size(rows, dim, hot, kind)
                inner = self.inner.settings(rows - hot, dim, left, rank) if left > 0 else []
                found += [{"hot": hot, "hot_kind": kind, **one} for one in inner[:COMPARED]]
        return found

    def order(self, job: CodecJob, listed: list[Settings]) -> list[Settings]:
        """Return settings by the expected error of hot rows and tail, each by its importance."""
        squares = np.square(job.rows.lengths(), dtype=np.float64) * job.importance
        share = np.cumsum(squares[_order(job)])
        share /= share[-1]

        def error(settings: Settings) -> float:
            tail = self.inner.predict(job, **self.inner_settings(settings))
            head = share[settings["hot"] - 1]
            return float(head * LOSS[settings["hot_kind"]] + (1 - head) * tail)

        errors = [error(settings) for settings in listed]
        if any(math.isnan(value) for value in errors):
            return listed
        return [listed[i] for i in np.argsort(errors, kind="stable")]

    def for_sample(self, settings: Settings, share: float) -> Settings:
        """Return settings with the same share of hot rows."""
        return settings | {"hot": max(1, round(settings["hot"] * share))}

    def grow(self, start: Fit, job: CodecJob, **settings: Any) -> Fit:
        """Compress the tail from a fit to a sample of it, then store the hot rows."""
        assert isinstance(start, HotFit)
        return self.fit(job, start.inner, **settings)

    def fit(self, job: CodecJob, start: Fit | None = None, **settings: Any) -> Fit:
        """Compress the tail, then store the hot rows."""
        if settings["hot"] >= job.rows.count:
            raise ArgumentError(
                f"{self.name}: hot={settings['hot']} of {job.rows.count:,} rows: "
                "leave some for the tail"
            )
        order = _order(job)
        hot, tail = np.sort(order[: settings["hot"]]), np.sort(order[settings["hot"] :])
        weights = job.rows.weights[tail]
        weighted = job.rows.weighted and weights.sum() > 0
        rows = WeightedRows(RowSubset(job.rows, tail), weights if weighted else None)
        tail_job = job.of_rows(rows, job.importance[tail])
        tail_job.training = np.flatnonzero(np.isin(tail, job.training))
        inner_settings = self.inner_settings(settings)
        inner = (
            self.inner.fit(tail_job, **inner_settings)
            if start is None
            else self.inner.grow(start, tail_job, **inner_settings)
        )
        hot_rows = WeightedRows(RowSubset(job.rows, hot))
        values = level_rows(job, hot_rows, settings["hot_kind"], "row")
        members = Members.of(hot, job.rows.count)
        return HotFit(inner, Band(len(hot), Every(), values=values, members=members))


def _order(job: CodecJob) -> Ids:
    """Return the rows, the most frequent first."""
    return np.argsort(-job.rows.weights, kind="stable")


@dataclass
class HotFit(WrappedFit):
    """A fitted tail and the hot rows."""

    head: Band

    def bands(self) -> list[Band]:
        """Return the packed form."""
        return [self.head, *self.inner.bands()]
