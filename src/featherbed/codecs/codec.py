"""The interface of codecs: settings within a budget of bytes, and a fit to a matrix."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from featherbed.codecs.coding import ResidualStages
from featherbed.codecs.principal import Square, moments
from featherbed.codecs.rows import Floats, Ids, WeightedRows
from featherbed.packed import bits as bit_streams
from featherbed.packed.band import Band
from featherbed.packed.matrix import level_bits, row_bytes

Settings = dict[str, Any]
SHORTEST = 1e-12  # of the longest row: shorter rows count as if they had this length
TRAINING_ROWS = 1 << 16  # rows to which dictionaries are fitted, at most
ProgressCallback = Callable[[str, float], None]  # description of the step, completed share


def no_progress(_what: str, _share: float) -> None:
    """Report no progress."""


@dataclass
class CodecJob:
    """The input of a codec: rows, the weight of each row's error, a generator, a callback."""

    rows: WeightedRows
    importance: Floats  # [V]: fits minimize Σ_i importance_i ||x_i - row_i||²
    generator: np.random.Generator
    rank: int = 0  # number of columns with all but two thousandths of the variance
    progress: ProgressCallback = field(default=no_progress)
    training_rows: int = TRAINING_ROWS  # rows to which dictionaries are fitted, at most
    factor: float = 1.0  # of the rows of the finished bands
    deadline: float = math.inf  # of time.perf_counter, after which refinements end
    bias: float | None = None  # of a sample: see ``expected_error``

    @cached_property
    def moments(self) -> tuple[Square, Square]:
        """The mean [d] and the covariance [d, d] of the rows, weighted by importance."""
        return moments(self.rows, self.importance)

    @cached_property
    def training(self) -> Ids:
        """The rows to which dictionaries are fitted."""
        return self.rows.draw(self.training_rows, self.generator)

    @cached_property
    def unseen(self) -> Ids:
        """The rows of a sample to which no dictionary is fitted."""
        seen = np.full(self.rows.count, self.bias is None)
        seen[self.training] = True
        return np.flatnonzero(~seen)

    def expected_error(self, seen: float, unseen: float) -> float:
        """Return the error expected of the whole matrix, from errors of a sample.

        Errors of training rows and of others differ from their mean, down and up: dictionaries were
        fitted to the former, and their codes were searched in every round. ``bias`` is the part of
        the difference that a fit to the whole matrix has.
        """
        if self.bias is None:
            return seen
        return max(0.0, (seen + unseen) / 2 + self.bias * (unseen - seen) / 2)

    @cached_property
    def _stages(self) -> dict[int, ResidualStages]:
        return {}

    def stages(self, bits: int) -> ResidualStages:
        """Return the dictionaries of ``bits`` bits fitted to residuals, which all fits share."""
        if bits not in self._stages:
            ids = np.concatenate([self.training, self.unseen])
            rows = self.rows.take(ids) - self.moments[0].astype(np.float32)
            seen, seed = len(self.training), self.seed()
            self._stages[bits] = ResidualStages(
                rows, self.importance[ids], 1 << bits, seed, seen, self.expected_error
            )
        return self._stages[bits]

    def late(self) -> bool:
        """Return whether the deadline has passed."""
        return time.perf_counter() > self.deadline

    def of_rows(self, rows: WeightedRows, importance: Floats) -> CodecJob:
        """Return the job of a part of the rows; stages fitted to all of them are shared."""
        part = replace(self, rows=rows, importance=importance)
        part.__dict__["_stages"] = self._stages
        return part

    def blocks(self) -> Iterator[tuple[slice, Floats]]:
        """Yield all rows in blocks with their places, to code them; progress is reported."""
        for start, block in self.rows.blocks():
            self.progress("coding", start / self.rows.count)
            yield slice(start, start + len(block)), block

    def seed(self) -> int:
        """Draw a seed for another library."""
        return int(self.generator.integers(2**31 - 1000))


def importance(
    rows: WeightedRows, lengths: Floats, measure: str, padding: int | None = None
) -> Floats:
    """Return the weight [V] of each row's squared error: relative to its length for recall.

    The padding row has weight 0.
    """
    least = SHORTEST * lengths.max(initial=0)
    squares = np.where(lengths > 0, np.maximum(lengths, least), 1).astype(np.float64) ** 2
    found = rows.weights / (squares if measure == "recall" else squares.mean())
    found[(lengths == 0) & ((measure == "recall") | (np.arange(rows.count) == padding))] = 0
    return found.astype(np.float32)


class Fit(ABC):
    """A codec fitted to a matrix: its bands, and a refinement where the codec has one."""

    refinable = False
    promise = 1.0  # the error after a refinement, relative to that of the initial fit, about

    @abstractmethod
    def bands(self) -> list[Band]:
        """Return the packed form."""

    def refine(self, rounds: int) -> None:
        """Improve the fit by ``rounds`` rounds of new codes and a new dictionary."""
        raise NotImplementedError(f"{type(self).__name__} cannot be refined ({rounds} rounds)")


@dataclass
class FinalFit(Fit):
    """A fit that cannot be refined."""

    found: list[Band]

    def bands(self) -> list[Band]:
        """Return the packed form."""
        return self.found


class Codec(ABC):
    """A method that compresses a matrix to packed bands."""

    name: str

    @abstractmethod
    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays with these settings."""

    @abstractmethod
    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:
        """Return the settings worth trying within ``budget`` bytes, the most promising first."""

    @abstractmethod
    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the matrix."""

    def grow(self, start: Fit, job: CodecJob, **settings: Any) -> Fit:  # noqa: ARG002
        """Compress the matrix, starting from a fit to a sample of it where that helps."""
        return self.fit(job, **settings)

    def predict(self, job: CodecJob, **settings: Any) -> float:  # noqa: ARG002
        """Return the expected share of the weighted squares that is lost; NaN if unknown."""
        return math.nan

    def order(self, job: CodecJob, listed: list[Settings]) -> list[Settings]:  # noqa: ARG002
        """Return settings in the order of the errors expected for these rows, the best first."""
        return listed

    def work(self, dim: int, **settings: Any) -> float:  # noqa: ARG002 - for slow codecs
        """Return the work of a fit for each training row: about 3e9 of these take a second."""
        return 0.0

    def for_sample(self, settings: Settings, share: float) -> Settings:  # noqa: ARG002
        """Return the settings for a sample of a ``share`` of the rows."""
        return settings

    def defaults(self) -> Settings:
        """Return defaults for settings that the caller left out while giving others."""
        return {}

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:  # noqa: ARG002
        """Return settings with those that follow from others filled in."""
        return settings


class WrappingCodec(Codec):
    """A codec that has the settings of an inner codec, and settings ``own`` besides them."""

    own: tuple[str, ...] = ()

    def __init__(self, inner: Codec) -> None:
        self.inner = inner

    def inner_settings(self, settings: Settings) -> Settings:
        """Return the settings of the inner codec."""
        return {name: value for name, value in settings.items() if name not in self.own}

    def work(self, dim: int, **settings: Any) -> float:
        """Return the work of a fit for each row."""
        return self.inner.work(dim, **self.inner_settings(settings))

    def defaults(self) -> Settings:
        """Return the defaults of the inner codec."""
        return self.inner.defaults()

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:
        """Return settings completed by the inner codec."""
        return self.inner.complete(settings, dim, rank)


@dataclass
class WrappedFit(Fit):
    """A fit that is refined by refining an inner fit."""

    inner: Fit

    def __post_init__(self) -> None:
        self.refinable = self.inner.refinable

    def refine(self, rounds: int) -> None:
        """Refine the inner fit."""
        self.inner.refine(rounds)


def stream_size(rows: int, record_bits: int) -> int:
    """Return the bytes of a stream of codes."""
    return 4 * bit_streams.word_count(rows, record_bits)


def matrix_size(
    kind: str, rows: int, columns: int, scales: str = "row", scale_bytes: int = 2
) -> int:
    """Return the bytes of a stored matrix, its scales included."""
    scaled = 0 if level_bits(kind) >= 16 else scale_bytes * (rows if scales == "row" else columns)
    return rows * row_bytes(kind, columns) + scaled
