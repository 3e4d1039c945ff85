"""Hot rows as integers, and the tail by another codec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from featherbed.codecs.codec import Codec, CodecJob, Fit, Settings, matrix_size
from featherbed.codecs.integer import level_rows
from featherbed.codecs.rows import Floats, Ids, Rows
from featherbed.errors import ArgumentError
from featherbed.packed.band import BLOCK_BITS, Band, Members
from featherbed.packed.codes import Every

LIKELY = 4  # settings of the inner method that are worth comparing
HOT_SHARES = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)


class SomeRows:
    """Some rows of a matrix, when asked for."""

    dtype = np.dtype(np.float32)

    def __init__(self, rows: Rows, ids: Ids) -> None:
        self.rows, self.ids, self.shape = rows, ids, (len(ids), rows.dim)

    def __getitem__(self, index: Any) -> Floats:
        return self.rows.take(self.ids[index])


class HotCodec(Codec):
    """The ``hot`` rows of greatest weight as integers of ``hot_kind``, the others by another method."""

    def __init__(self, inner: Codec) -> None:
        self.inner, self.name = inner, f"hot+{inner.name}"

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays these settings make."""
        rest = {name: value for name, value in settings.items() if name not in ("hot", "hot_kind")}
        return self._head(rows, dim, settings["hot"], settings["hot_kind"]) + self.inner.size(
            rows - settings["hot"], dim, **rest
        )

    def _head(self, rows: int, dim: int, hot: int, kind: str) -> int:
        blocks = -(-rows // BLOCK_BITS)
        return matrix_size(kind, hot, dim) + blocks * (BLOCK_BITS // 8 + 4)

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:
        """Return beside several numbers of hot rows the quickest of the inner method's likely settings."""
        found = []
        for share in HOT_SHARES:
            for kind in ("int8", "int4"):
                likely = self.beside(max(1, round(share * rows)), kind, rows, dim, budget, rank)
                found += [min(likely, key=lambda s: self.work(dim, **s))] if likely else []
        return found

    def beside(
        self, hot: int, kind: str, rows: int, dim: int, budget: int, rank: int
    ) -> list[Settings]:
        """Return the inner method's likely settings beside so many hot rows, the likeliest first."""
        left = budget - self._head(rows, dim, hot, kind)
        inner = self.inner.settings(rows - hot, dim, left, rank) if left > 0 and hot < rows else []
        return [{"hot": hot, "hot_kind": kind, **settings} for settings in inner[:LIKELY]]

    def work(self, dim: int, **settings: Any) -> float:
        """Return how long a fit takes for each row."""
        return self.inner.work(
            dim,
            **{name: value for name, value in settings.items() if name not in ("hot", "hot_kind")},
        )

    def for_sample(self, settings: Settings, share: float) -> Settings:
        """Return settings with the same share of hot rows."""
        return settings | {"hot": max(1, round(settings["hot"] * share))}

    def defaults(self) -> Settings:
        """Return the defaults of the inner codec."""
        return self.inner.defaults()

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:
        """Return settings completed by the inner codec."""
        return self.inner.complete(settings, dim, rank)

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the tail, then keep the head."""
        if settings["hot"] >= job.rows.count:
            raise ArgumentError(
                f"{self.name}: hot={settings['hot']} of {job.rows.count:,} rows: leave some for the tail"
            )
        rest = {name: value for name, value in settings.items() if name not in ("hot", "hot_kind")}
        order = np.argsort(-job.rows.weights, kind="stable")
        hot, tail = np.sort(order[: settings["hot"]]), np.sort(order[settings["hot"] :])
        weights = (
            job.rows.weights[tail]
            if job.rows.weighted and job.rows.weights[tail].sum() > 0
            else None
        )
        rows = Rows(SomeRows(job.rows, tail), weights)
        inner = self.inner.fit(replace(job, rows=rows, importance=job.importance[tail]), **rest)
        head = level_rows(job, Rows(SomeRows(job.rows, hot)), settings["hot_kind"], "row")
        return HotFit(
            inner, Band(len(hot), Every(), values=head, members=Members.of(hot, job.rows.count))
        )


@dataclass
class HotFit(Fit):
    """A fitted tail and the rows kept before it."""

    inner: Fit
    head: Band

    def __post_init__(self) -> None:
        self.refinable = self.inner.refinable

    def bands(self) -> list[Band]:
        """Return the packed form."""
        return [self.head, *self.inner.bands()]

    def refine(self, rounds: int) -> None:
        """Refine the tail."""
        self.inner.refine(rounds)
