"""The interface of codecs: the settings that fit a budget, and a fit of the matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from featherbed.codecs.rows import Floats, Rows
from featherbed.packed import bits as bit_streams
from featherbed.packed.band import Band
from featherbed.packed.matrix import level_bits, row_bytes

Settings = dict[str, Any]
SHORTEST = 1e-12  # of the longest row: shorter rows count as if they had this length
LEARN = 1 << 16  # rows that dictionaries are learnt from
Tell = Callable[
    [str, float], None
]  # what is being done, and which share is done (of it, or told to a user: of the whole)


def quiet(_what: str, _share: float) -> None:
    """Report no progress."""


@dataclass
class CodecJob:
    """The input of a codec: rows, the weight of each row's error, random numbers, a progress callback."""

    rows: Rows
    importance: Floats  # [V]: Σ_i importance_i ||x_i - row_i||² is what fits make small
    generator: np.random.Generator
    rank: int = 0  # columns that carry all but two thousandths of the variance
    tell: Tell = field(default=quiet)
    learn: int = LEARN  # rows to learn from, at most
    factor: float = 1.0  # by which the rows of the finished bands are multiplied
    quick: bool = False  # to compare methods, not to keep: fewer iterations where a method is slow

    def seed(self) -> int:
        """Draw a seed for a library that wants one."""
        return int(self.generator.integers(2**31 - 1000))


def importance(
    rows: Rows, lengths: Floats, measure: str, padding: int | None = None
) -> Floats:  # -> [V]
    """Return how much the error of each row counts: by its weight, for recall relative to its length; padding not."""
    least = SHORTEST * lengths.max(initial=0)
    squares = np.where(lengths > 0, np.maximum(lengths, least), 1).astype(np.float64) ** 2
    counted = rows.weights / (squares if measure == "recall" else squares.mean())
    counted[(lengths == 0) & ((measure == "recall") | (np.arange(rows.count) == padding))] = 0
    return counted.astype(np.float32)


class Fit(ABC):
    """A codec fitted to a matrix: its bands, and a refinement where the codec has one."""

    refinable = False

    @abstractmethod
    def bands(self) -> list[Band]:
        """Return the packed form."""

    def refine(self, rounds: int) -> None:
        """Make the fit better: ``rounds`` times new codes and a new dictionary."""
        raise NotImplementedError(
            f"{type(self).__name__} has nothing to refine ({rounds} rounds asked for)"
        )


@dataclass
class FinalFit(Fit):
    """A fit that cannot be refined."""

    found: list[Band]

    def bands(self) -> list[Band]:
        """Return the packed form."""
        return self.found


class Codec(ABC):
    """A method that turns a matrix into packed bands."""

    name: str

    @abstractmethod
    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays these settings make."""

    @abstractmethod
    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:
        """Return the settings worth trying that fit ``budget`` bytes, the likeliest first; none if nothing fits."""

    @abstractmethod
    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the matrix."""

    def work(self, dim: int, **settings: Any) -> float:  # noqa: ARG002 - for methods that take their time
        """Return how long a fit takes for each row it learns from: about 3e9 of these are a second."""
        return 0.0

    def for_sample(self, settings: Settings, share: float) -> Settings:  # noqa: ARG002 - for methods that count rows
        """Return the settings for a sample that holds a ``share`` of the rows."""
        return settings

    def defaults(self) -> Settings:
        """Return settings used where the caller gave others but not these."""
        return {}

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:  # noqa: ARG002 - for methods that need them
        """Return settings with the ones that follow from others filled in."""
        return settings


def stream_size(rows: int, record_bits: int) -> int:
    """Return the bytes of a stream of codes."""
    return 4 * bit_streams.word_count(rows, record_bits)


def matrix_size(
    kind: str, rows: int, columns: int, scales: str = "row", scale_bytes: int = 2
) -> int:
    """Return the bytes of a stored matrix, its scales included."""
    scaled = 0 if level_bits(kind) >= 16 else scale_bytes * (rows if scales == "row" else columns)
    return rows * row_bytes(kind, columns) + scaled
