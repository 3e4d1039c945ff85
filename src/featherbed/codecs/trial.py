"""Fitting and measuring candidates: codecs with settings, on a sample and on the whole matrix."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from featherbed.codecs.codec import (
    TRAINING_ROWS,
    Codec,
    CodecJob,
    Fit,
    ProgressCallback,
    Settings,
    importance,
)
from featherbed.codecs.meter import CODING, ROUND, WorkMeter
from featherbed.codecs.principal import effective_rank
from featherbed.codecs.quality import QUERIES, QualityEvaluator
from featherbed.codecs.rows import WeightedRows, refuse_zeros
from featherbed.codecs.scale import factor_of, scale_bands, scale_rows
from featherbed.errors import ArgumentError
from featherbed.packed.band import Band
from featherbed.packed.keys import Keys
from featherbed.packed.table import PackedTable

SAMPLE_ROWS = 3 * TRAINING_ROWS // 2  # rows on which candidates are compared, at most
SAMPLE_NUMBERS = SAMPLE_ROWS * 128  # and numbers in them
SAMPLE_QUERIES = 1000
TRAINING_SHARE = 2 / 3  # of the sample: the other rows measure how a dictionary generalizes
FIRST_ROUNDS = 8  # rounds of refinement for every finalist
ROUNDS = 32  # rounds of refinement for the best
LARGE = 200_000  # rows above which one finalist and fewer rounds are used


@dataclass(frozen=True)
class Candidate:
    """A codec with settings, and its size in bytes for the whole matrix."""

    method: Codec
    settings: Settings = field(hash=False)
    bytes: int

    @classmethod
    def of(cls, method: Codec, settings: Settings, rows: int, dim: int) -> Candidate:
        """Return the candidate for a matrix of ``rows`` x ``dim``."""
        return cls(method, settings, method.size(rows, dim, **settings))


@dataclass
class MeasuredCandidate:
    """A candidate, its point of the curve, its quality (higher is better), and its fit if kept."""

    candidate: Candidate
    point: dict[str, Any] = field(default_factory=dict)
    quality: float = -np.inf
    fit: Fit | None = None
    bands: list[Band] = field(default_factory=list)


def prepare_job(
    rows: WeightedRows,
    measure: str,
    generator: np.random.Generator | int | None,
    padding: int | None,
    progress: ProgressCallback,
) -> CodecJob:
    """Return the input of the codecs: rows near scale 1, their importance and effective rank."""
    progress("reading the matrix", 0.0)
    lengths = rows.lengths()  # refuses rows that are not finite, or too long
    factor = factor_of(lengths, rows.dim)
    rows, lengths = scale_rows(rows, factor), lengths / np.float32(factor)
    if measure == "recall":
        refuse_zeros(lengths, padding)
    known = generator is None or isinstance(generator, int | np.integer | np.random.Generator)
    if isinstance(generator, bool) or not known:
        raise ArgumentError(
            f"generator={generator!r}: give numpy.random.default_rng(seed), a seed, or nothing"
        )
    if not isinstance(generator, np.random.Generator):
        generator = np.random.default_rng(generator or 0)
    weights = importance(rows, lengths, measure, padding)
    job = CodecJob(rows, weights, generator, progress=progress, factor=factor)
    return replace(job, rank=effective_rank(job))


class Trial:
    """A matrix, a sample of it, and evaluators of both; a small matrix is its own sample."""

    def __init__(self, job: CodecJob, measure: str, started: float | None = None) -> None:
        self.meter = WorkMeter(job.progress, time.perf_counter() if started is None else started)
        self.job = job = replace(job, progress=self.meter.report_share)
        self.measure = measure
        rows, dim = job.rows.count, job.rows.dim
        self.large = rows > LARGE
        self.whole = rows <= TRAINING_ROWS and rows * dim <= SAMPLE_NUMBERS
        sample, weights, training = job.rows, job.importance, rows
        if not self.whole:
            sample = job.rows.spread(max(6000, min(SAMPLE_ROWS, SAMPLE_NUMBERS // dim)))
            weights = importance(sample, sample.lengths(), measure)
            training = int(sample.count * TRAINING_SHARE)
        self.sample = replace(
            job, rows=sample, importance=weights, training_rows=training, quick=True
        )
        self.curve: list[dict[str, Any]] = []
        self._evaluator: QualityEvaluator | None = None
        self.sample_evaluator = (
            self.evaluator
            if self.whole
            else QualityEvaluator(sample, np.random.default_rng(job.seed()), SAMPLE_QUERIES)
        )

    @property
    def evaluator(self) -> QualityEvaluator:
        """The evaluator of the whole matrix, created on first use."""
        if self._evaluator is None:
            with self.meter.step("neighbors", "measuring", QUERIES * self.job.rows.count):
                generator = np.random.default_rng(self.job.seed())
                self._evaluator = QualityEvaluator(self.job.rows, generator)
        return self._evaluator

    def candidates(self, method: Codec, listed: list[Settings]) -> list[Candidate]:
        """Return the candidates of one method."""
        rows, dim = self.job.rows.count, self.job.rows.dim
        return [Candidate.of(method, settings, rows, dim) for settings in listed]

    def settings(self, method: Codec, budget: int) -> list[Settings]:
        """Return the settings of a method within ``budget`` bytes, the most promising first."""
        return method.settings(self.job.rows.count, self.job.rows.dim, budget, self.job.rank)

    # --- work: how long the steps take -----------------------------------------------------------

    def work(self, candidate: Candidate) -> float:
        """Return the work of a fit to the sample."""
        each = candidate.method.work(self.job.rows.dim, **candidate.settings)
        return each * self.sample.training_rows

    def _full_work(self, candidate: Candidate) -> float:
        """Return the work of a fit to the whole matrix."""
        rows = min(TRAINING_ROWS, self.job.rows.count)
        return self.work(candidate) * rows / self.sample.training_rows

    def _coding_work(self, candidate: Candidate, job: CodecJob) -> float:
        """Return the work of coding the rows that a fit has not been trained on."""
        each = candidate.method.work(job.rows.dim, **candidate.settings)
        return CODING * each * job.rows.count if job.rows.count > job.training_rows else 0.0

    def rounds(self, finalists: int) -> tuple[int, int]:
        """Return the rounds of refinement of every finalist, and of the best of them."""
        first = FIRST_ROUNDS if finalists > 1 else 0
        return first, FIRST_ROUNDS if self.large else ROUNDS

    def plan_work(self, listed: list[Candidate], finalists: list[Candidate], fresh: bool) -> None:
        """Plan comparing candidates and finishing finalists; ``fresh`` ones are not fitted yet."""
        (first, last), best = self.rounds(len(finalists)), max(finalists, key=self.work)
        several = len(finalists) if len(finalists) > 1 else 0
        evaluations = several + 2 + (self._evaluator is None)  # the best again, and the report
        left = defaultdict[str, float](float)
        left["measuring"] = len(listed) * self.sample_evaluator.work
        left["measuring"] += evaluations * QUERIES * self.job.rows.count
        for candidate in listed:
            coding = self._coding_work(candidate, self.sample)
            left[candidate.method.name] += self.work(candidate) + coding
        for candidate in finalists:
            fitting = self._full_work(candidate) * (fresh + ROUND * first)
            left[candidate.method.name] += fitting + self._coding_work(candidate, self.job)
        refining = self._full_work(best) * ROUND * last
        left[best.method.name] += refining + self._coding_work(best, self.job)
        self.meter.plan(left)

    # --- steps -----------------------------------------------------------------------------------

    def compare(self, candidate: Candidate) -> MeasuredCandidate:
        """Fit a candidate to the sample and measure it."""
        method, share = candidate.method, self.sample.rows.count / self.job.rows.count
        settings = method.for_sample(candidate.settings, share)
        with self.meter.step(f"comparing: {method.name}", method.name, self.work(candidate)):
            fit = method.fit(self.sample, **settings)
        found = self.evaluate(candidate, "sample", fit)
        return found if self.whole else replace(found, fit=None, bands=[])

    def fit(self, candidate: Candidate) -> Fit:
        """Fit a candidate to the whole matrix."""
        name, work = candidate.method.name, self._full_work(candidate)
        with self.meter.step(f"fitting {name}", name, work):
            return candidate.method.fit(self.job, **candidate.settings)

    def refine(self, candidate: Candidate, fit: Fit, rounds: int) -> None:
        """Refine a fit of the whole matrix."""
        name, work = candidate.method.name, ROUND * rounds * self._full_work(candidate)
        with self.meter.step(f"refining {name}", name, work, reports=True):
            fit.refine(rounds)

    def evaluate(self, candidate: Candidate, stage: str, fit: Fit) -> MeasuredCandidate:
        """Measure a fit and add the point to the curve."""
        name, on_sample = candidate.method.name, stage == "sample"
        job = self.sample if on_sample else self.job
        evaluator = self.sample_evaluator if on_sample else self.evaluator
        coding = f"comparing: {name}" if on_sample else "coding"
        measuring = coding if on_sample else "measuring"
        with self.meter.step(coding, name, self._coding_work(candidate, job), reports=True):
            bands = fit.bands()
        table = PackedTable(bands, self.job.rows.dim)
        with self.meter.step(measuring, "measuring", evaluator.work):
            found = evaluator(lambda ids: table[ids])
        recall = found.get("weighted_recall", found["recall"])
        error = found.get("weighted_error", found["error"])
        point = {"method": name, "settings": candidate.settings, "bytes": candidate.bytes}
        point |= {"recall": recall, "error": error, "stage": stage, "chosen": False}
        self.curve.append(point)
        quality = float(recall if self.measure == "recall" else -error)
        return MeasuredCandidate(candidate, point, quality, fit, bands)

    def table(
        self, choice: MeasuredCandidate, padding: int | None = None, keys: Keys | None = None
    ) -> PackedTable:
        """Return the table of a measured candidate, at the scale of the matrix."""
        made_by: dict[str, Any] = {"table": "compress", "method": choice.candidate.method.name}
        made_by |= choice.candidate.settings
        bands, dim = scale_bands(choice.bands, self.job.factor), self.job.rows.dim
        return PackedTable(bands, dim, padding_idx=padding, keys=keys, made_by=made_by)
