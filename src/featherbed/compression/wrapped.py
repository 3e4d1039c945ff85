"""Methods made of methods: lengths kept apart from directions, and hot rows kept well while the tail is coded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from featherbed.compression.method import Fit, Job, Method, Settings, matrix_size
from featherbed.compression.plain import level_rows
from featherbed.compression.rows import Floats, Ids, Rows
from featherbed.errors import ArgumentError
from featherbed.packed.band import BLOCK_BITS, Band, Members
from featherbed.packed.codes import Every
from featherbed.packed.matrix import Matrix

LIKELY = 4  # settings of the inner method that are worth comparing
HOT_SHARES = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)


class UnitRows:
    """The rows of a matrix divided by their lengths, when asked for."""

    dtype = np.dtype(np.float32)

    def __init__(self, rows: Rows, lengths: Floats) -> None:
        self.rows, self.lengths, self.shape = (
            rows,
            np.where(lengths > 0, lengths, 1),
            (rows.count, rows.dim),
        )

    def __getitem__(self, index: Any) -> Floats:
        found: Floats = (
            np.asarray(self.rows.matrix[index], dtype=np.float32) / self.lengths[index][:, None]
        )
        return found


class SomeRows:
    """Some rows of a matrix, when asked for."""

    dtype = np.dtype(np.float32)

    def __init__(self, rows: Rows, ids: Ids) -> None:
        self.rows, self.ids, self.shape = rows, ids, (len(ids), rows.dim)

    def __getitem__(self, index: Any) -> Floats:
        return self.rows.take(self.ids[index])


class Apart(Method):
    """Another method on rows of length one, and every row's length in eight bits: row = length * direction."""

    def __init__(self, inner: Method) -> None:
        self.inner, self.name = inner, f"{inner.name}+norms"

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays these settings make."""
        return self.inner.size(rows, dim, **settings) + matrix_size("int8", rows, 1, "column", 4)

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:
        """Return what the inner method can do with the bytes the lengths leave."""
        return self.inner.settings(
            rows, dim, budget - matrix_size("int8", rows, 1, "column", 4), rank
        )

    def work(self, dim: int, **settings: Any) -> float:
        """Return how long a fit takes for each row."""
        return self.inner.work(dim, **settings)

    def unless_asked(self) -> Settings:
        """Return what stands for the inner method."""
        return self.inner.unless_asked()

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:
        """Return settings with those of the inner method put right."""
        return self.inner.complete(settings, dim, rank)

    def fit(self, job: Job, **settings: Any) -> Fit:
        """Compress the directions, then keep the lengths."""
        lengths = job.rows.lengths()
        rows = Rows(UnitRows(job.rows, lengths), job.rows.weights if job.rows.weighted else None)
        inner = self.inner.fit(
            replace(job, rows=rows, importance=job.importance * lengths**2), **settings
        )
        return ApartFit(inner, Matrix.encode(lengths[:, None], "int8", "column"))


@dataclass
class ApartFit(Fit):
    """Fitted directions, and lengths."""

    inner: Fit
    lengths: Matrix

    def __post_init__(self) -> None:
        self.refinable = self.inner.refinable

    def bands(self) -> list[Band]:
        """Return the packed form."""
        (band,) = self.inner.bands()
        return [replace(band, norms=self.lengths)]

    def refine(self, rounds: int) -> None:
        """Refine the directions."""
        self.inner.refine(rounds)


class Hot(Method):
    """The ``hot`` rows of greatest weight as integers of ``hot_kind``, the others by another method."""

    def __init__(self, inner: Method) -> None:
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

    def for_share(self, settings: Settings, share: float) -> Settings:
        """Return settings with the same share of hot rows."""
        return settings | {"hot": max(1, round(settings["hot"] * share))}

    def unless_asked(self) -> Settings:
        """Return what stands for the inner method."""
        return self.inner.unless_asked()

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:
        """Return settings with those of the inner method put right."""
        return self.inner.complete(settings, dim, rank)

    def fit(self, job: Job, **settings: Any) -> Fit:
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
