"""Fitting and measuring candidates: codecs with settings, on a sample and on the whole matrix."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
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
from featherbed.codecs.coding import (
    AdditiveEncoder,
    least_squares,
    mean_square,
    single_blas_thread,
)
from featherbed.codecs.principal import effective_rank
from featherbed.codecs.quality import QUERIES, QualityEvaluator
from featherbed.codecs.rows import Ids, WeightedRows, refuse_zeros
from featherbed.codecs.scale import factor_of, scale_bands, scale_rows
from featherbed.errors import ArgumentError
from featherbed.packed.band import Band
from featherbed.packed.keys import Keys
from featherbed.packed.table import PackedTable

SAMPLE_ROWS = TRAINING_ROWS // 4  # to which candidates are fitted, if fits will not see all rows
SAMPLE_NUMBERS = 10 << 20  # and numbers in them
SAMPLE_QUERIES = 1000
ERROR_ROWS = 1 << 14  # rows whose errors are measured, at most
UNSEEN = 1 / 4  # further rows of a sample, for each training row, if fits will not see all rows
# initial estimates of the pace: seconds, and the work done in them (two busy cores)
PACES = defaultdict(
    lambda: (1.0, 2e10), measuring=(0.5, 1e8), compiling=(1.0, 1.0), predicting=(1.0, 1.0)
)
ROUND = 1 / 6  # work of one round of refinement, relative to a fit
CODING = 1 / 4  # work of coding rows, relative to a fit of as many rows


@dataclass(frozen=True)
class Effort:
    """How much is tried: shapes of layered codes, other candidates, finalists, rounds."""

    shapes: int  # settings of layered codes that are compared
    rounds: int  # of refinement, at most
    finalists: int  # candidates that are refined
    named: int  # settings of a method given by name that are compared
    work: float  # of another candidate, at most
    close: float  # errors that differ by less than this factor are told apart by recall
    further: float  # work of shapes after which no further one is compared


EFFORTS = {
    "quick": Effort(shapes=2, rounds=4, finalists=1, named=1, work=5e8, close=1.0, further=1e10),
    "normal": Effort(shapes=4, rounds=20, finalists=1, named=3, work=1e9, close=1.12, further=1e12),
    "best": Effort(shapes=12, rounds=60, finalists=3, named=6, work=4e11, close=1.12, further=1e15),
}


def effort_of(name: str) -> Effort:
    """Return the effort of a name."""
    if name not in EFFORTS:
        raise ArgumentError(f"effort={name!r}: use one of {', '.join(EFFORTS)}")
    return EFFORTS[name]


class WorkMeter:
    """Reports the completed share of the time, which falls if work is slower than estimated.

    Work has several kinds, each with a pace of its own: fits by the name of their codec (in units
    of ``Codec.work``), "measuring" (queries times rows), "compiling" and "predicting" (1 in all).

    >>> clock = iter([0.0, 4.0, 4.0, 4.0]).__next__
    >>> meter = WorkMeter(lambda step, share: print(step, round(share, 2)), 0.0, clock)
    >>> meter.left = {"pq": 8e11}
    >>> with meter.step("one", "pq", 4e11):
    ...     pass
    one 0.0
    >>> with meter.step("two", "pq", 4e11):
    ...     pass
    two 0.46
    """

    def __init__(
        self,
        progress: ProgressCallback,
        started: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.progress, self.started, self.clock = progress, started, clock
        self.done = PACES.copy()
        self.left: dict[str, float] = {}  # remaining work of each kind
        self.description, self.reports = "", False

    @contextmanager
    def step(
        self, description: str, kind: str, work: float, reports: bool = False
    ) -> Iterator[None]:
        """Measure a step of ``work``; with ``reports`` the step reports its own share."""
        self.step_started = started = self.clock()
        self.kind, self.work = kind, work
        self.description, self.reports = description, reports
        self._report(0.0, started)
        yield
        self.reports = False
        seconds, known = self.done[kind]
        self.done[kind] = (seconds + self.clock() - started, known + work)
        if kind in self.left:  # steps before the plan leave the share unknown
            self.left[kind] = max(0.0, self.left[kind] - work)

    def report_share(self, _description: str, share: float) -> None:
        """Take the completed share of the current step."""
        if self.reports:
            self._report(share, self.clock())

    def _report(self, share: float, now: float) -> None:
        left = 0.0
        for kind, work in self.left.items():
            seconds, known = self.done[kind]
            if kind == self.kind:
                seconds, known = seconds + now - self.step_started, known + share * self.work
                work -= share * self.work
            left += max(0.0, work) * seconds / known
        elapsed = now - self.started
        share = elapsed / (elapsed + left) if self.left and elapsed > 0 else 0.0
        self.progress(self.description, share)  # 0 without a plan


@dataclass(frozen=True)
class Candidate:
    """A codec with settings, and its size in bytes for the whole matrix."""

    method: Codec
    settings: Settings = field(hash=False)
    bytes: int


@dataclass(eq=False)
class MeasuredCandidate:
    """A candidate, its weighted error, its point of the curve, and its fit if kept."""

    candidate: Candidate
    error: float = math.inf  # of the whole matrix, as expected from a sample
    expected: float = math.inf  # the error after a refinement
    measured: float = math.inf  # of the rows compared
    point: dict[str, Any] = field(default_factory=dict)
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
    with single_blas_thread():
        job.rank = effective_rank(job)
    return job


class Trial:
    """A matrix, samples of it, and the quality of candidates; a small matrix is its own sample.

    ``seconds``: no comparison and no round of refinement begins after this time.
    """

    def __init__(
        self,
        job: CodecJob,
        measure: str,
        effort: Effort,
        seconds: float = math.inf,
        started: float | None = None,
    ) -> None:
        started = time.perf_counter() if started is None else started
        self.meter = WorkMeter(job.progress, started)
        job.progress, job.deadline = self.meter.report_share, started + seconds
        self.job, self.measure, self.effort = job, measure, effort
        rows, dim = job.rows.count, job.rows.dim
        self.fitted_rows = min(rows, job.training_rows)
        most = self.fitted_rows if self.fitted_rows == rows else SAMPLE_ROWS
        self.sample = self._spread(min(most, max(6000, SAMPLE_NUMBERS // dim)))
        self.whole = self.sample is job
        self.curve: list[dict[str, Any]] = []
        self._evaluator: QualityEvaluator | None = None
        self._sample_evaluator: QualityEvaluator | None = None

    def _spread(self, count: int) -> CodecJob:
        """Return the job of ``count`` training rows, and of others if fits will not see all
        rows."""
        job, fitted = self.job, self.fitted_rows
        if count >= job.rows.count:
            return job
        all_seen = fitted == job.rows.count
        rows = job.rows.spread(count if all_seen else int(count * (1 + UNSEEN)))
        weights = importance(rows, rows.lengths(), self.measure)
        part = job.of_rows(rows, weights)
        part.training_rows = count
        if not all_seen:  # half of the bias of a sample is search, the other falls with its rows
            part.bias = (1 + count / fitted) / 2 * (1 - 2 * fitted / job.rows.count)
        return part

    @property
    def rounds(self) -> int:
        """Rounds of refinement, at most: half of them if further rows must be coded after it."""
        return self.effort.rounds // (1 if self.fitted_rows == self.job.rows.count else 2)

    @property
    def evaluator(self) -> QualityEvaluator:
        """The evaluator of the whole matrix, created on first use."""
        if self._evaluator is None:
            step = self.meter.step("neighbors", "measuring", QUERIES * self.job.rows.count)
            with self._measuring_threads(), step:
                generator = np.random.default_rng(self.job.seed())
                self._evaluator = QualityEvaluator(self.job.rows, generator)
        return self._evaluator

    def _measuring_threads(self) -> AbstractContextManager[None]:
        """Return the limit of threads of a measurement: products of small matrices need none."""
        small = self.fitted_rows * self.job.rows.dim <= SAMPLE_NUMBERS
        return single_blas_thread() if small else nullcontext()

    def compile(self) -> None:
        """Compile the kernels, or load them."""
        with single_blas_thread(), self.meter.step("compiling", "compiling", 1.0):
            rows, weights = np.eye(4, dtype=np.float32), np.ones(4, dtype=np.float32)
            codes = AdditiveEncoder(np.stack([rows, rows]))(rows)
            least_squares(codes, rows, weights, 4)

    def order(self, method: Codec, listed: list[Settings]) -> list[Settings]:
        """Return settings in the order of their predicted errors, the best first."""
        with single_blas_thread(), self.meter.step("predicting errors", "predicting", 1.0):
            share = self.sample.rows.count / self.job.rows.count
            scaled = [method.for_sample(one, share) for one in listed]
            of = {id(mine): one for mine, one in zip(scaled, listed, strict=True)}
            ordered = method.order(self.sample, scaled)
            return [of[id(mine)] for mine in ordered]

    def candidates(self, method: Codec, listed: list[Settings]) -> list[Candidate]:
        """Return the candidates of one method."""
        rows, dim = self.job.rows.count, self.job.rows.dim
        return [Candidate(method, one, method.size(rows, dim, **one)) for one in listed]

    def settings(self, method: Codec, budget: int) -> list[Settings]:
        """Return the settings of a method within ``budget`` bytes, the most promising first."""
        return method.settings(self.job.rows.count, self.job.rows.dim, budget, self.job.rank)

    # --- work: how long the steps take -----------------------------------------------------------

    def work(self, candidate: Candidate) -> float:
        """Return the work of a fit to the sample."""
        return self._work_of(candidate, min(self.sample.training_rows, self.job.rows.count))

    def _work_of(self, candidate: Candidate, rows: int) -> float:
        return rows * candidate.method.work(self.job.rows.dim, **candidate.settings)

    def _coding_work(self, candidate: Candidate, job: CodecJob) -> float:
        """Return the work of coding the rows that a fit has not been trained on."""
        all_trained = job.rows.count <= job.training_rows
        return 0.0 if all_trained else CODING * self._work_of(candidate, job.rows.count)

    def plan_work(self, listed: list[Candidate], finalists: list[Candidate]) -> None:
        """Plan comparing candidates, finishing finalists, and measuring the best."""
        left = defaultdict[str, float](float)
        left["measuring"] = (1 + (self._evaluator is None)) * QUERIES * self.job.rows.count
        for candidate in listed:
            coding = self._coding_work(candidate, self.sample)
            left[candidate.method.name] += self.work(candidate) + coding
        for candidate in finalists:
            fitting = ROUND * self.rounds + (not self.whole)
            fitting *= self._work_of(candidate, self.fitted_rows)
            left[candidate.method.name] += fitting + self._coding_work(candidate, self.job)
        self.meter.left = left

    # --- steps -----------------------------------------------------------------------------------

    def compare(self, candidate: Candidate) -> MeasuredCandidate:
        """Fit a candidate to the sample and measure its error there."""
        method, job = candidate.method, self.sample
        settings = method.for_sample(candidate.settings, job.rows.count / self.job.rows.count)
        step = self.meter.step(f"comparing: {method.name}", method.name, self.work(candidate))
        with single_blas_thread(), step:
            fit = method.fit(job, **settings)
        return self.measure_error(candidate, "sample", fit, job)

    def expected_recall(self, found: MeasuredCandidate) -> float:
        """Return the recall of a candidate on the sample, and what its refinement may add."""
        if self._sample_evaluator is None:
            self._sample_evaluator = self.evaluator
            if not self.whole:
                generator = np.random.default_rng(self.job.seed())
                rows = self.sample.rows
                self._sample_evaluator = QualityEvaluator(rows, generator, SAMPLE_QUERIES)
        evaluator, table = self._sample_evaluator, PackedTable(found.bands, self.job.rows.dim)
        step = self.meter.step("comparing: recall", "measuring", evaluator.work)
        with self._measuring_threads(), step:
            recall = evaluator.recall(lambda ids: table[ids])
        # recall follows the logarithm of the error, about as a logistic function
        return recall + recall * (1 - recall) * (1 - found.expected / max(found.measured, 1e-30))

    def recall(self, found: MeasuredCandidate) -> float:
        """Return the recall of a candidate on the whole matrix."""
        evaluator, table = self.evaluator, PackedTable(found.bands, self.job.rows.dim)
        with self._measuring_threads():
            return evaluator.recall(lambda ids: table[ids])

    def fit(self, candidate: Candidate, start: Fit | None) -> Fit:
        """Fit a candidate to the whole matrix, from its fit to the sample if there is one."""
        method, settings = candidate.method, candidate.settings
        work = self._work_of(candidate, self.fitted_rows)
        step = self.meter.step(f"fitting {method.name}", method.name, work)
        with single_blas_thread(), step:
            if start is None:
                return method.fit(self.job, **settings)
            return method.grow(start, self.job, **settings)

    def refine(self, candidate: Candidate, fit: Fit) -> None:
        """Refine a fit of the whole matrix."""
        name, rounds = candidate.method.name, self.rounds
        work = ROUND * rounds * self._work_of(candidate, self.fitted_rows)
        step = self.meter.step(f"refining {name}", name, work, reports=True)
        with single_blas_thread(), step:
            fit.refine(rounds)

    def measure_error(
        self, candidate: Candidate, stage: str, fit: Fit, job: CodecJob
    ) -> MeasuredCandidate:
        """Measure the weighted error of a fit and add the point to the curve."""
        name = candidate.method.name
        coding = f"comparing: {name}" if stage == "sample" else "coding"
        step = self.meter.step(coding, name, self._coding_work(candidate, job), reports=True)
        with single_blas_thread(), step:
            bands = fit.bands()
        table = PackedTable(bands, self.job.rows.dim)

        def error_of(ids: Ids) -> float:
            ids = ids[:: -(-len(ids) // ERROR_ROWS)]
            before, weights = job.rows.take(ids), job.importance[ids]
            whole = mean_square(before, weights)
            return mean_square(before - table[ids], weights) / whole if whole else 0.0

        measured = error = error_of(np.arange(job.rows.count))
        if len(job.unseen):
            error = job.expected_error(error_of(job.training), error_of(job.unseen))
        else:  # each atom lowers the error of n rows to which it is fitted by 1 / n, about
            known = [band.dictionary.shape for band in bands if band.dictionary is not None]
            atoms = sum(math.prod(shape) for shape in known) / job.rows.dim
            error *= 1 + atoms * (1 / len(job.training) - 1 / self.fitted_rows)
        point = {"method": name, "settings": candidate.settings, "bytes": candidate.bytes}
        point |= {"error": error, "stage": stage, "chosen": False}
        self.curve.append(point)
        expected = error * fit.promise
        return MeasuredCandidate(candidate, error, expected, measured, point, fit, bands)

    def table(
        self, choice: MeasuredCandidate, padding: int | None = None, keys: Keys | None = None
    ) -> PackedTable:
        """Return the table of a measured candidate, at the scale of the matrix."""
        made_by: dict[str, Any] = {"table": "compress", "method": choice.candidate.method.name}
        made_by |= choice.candidate.settings
        bands, dim = scale_bands(choice.bands, self.job.factor), self.job.rows.dim
        return PackedTable(bands, dim, padding_idx=padding, keys=keys, made_by=made_by)

    def quality(self, table: PackedTable) -> dict[str, Any]:
        """Return the quality of a table against the matrix."""
        factor = np.float32(self.job.factor)
        evaluator = self.evaluator
        step = self.meter.step("measuring", "measuring", evaluator.work)
        with self._measuring_threads(), step:
            return evaluator(lambda ids: table[ids] / factor)
