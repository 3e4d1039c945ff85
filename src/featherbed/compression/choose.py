"""Which method for so many bytes: curves on a sample, the winners in full, the best of them refined."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from featherbed.compression.method import Fit, Job, Method, Settings, importance, quiet
from featherbed.compression.methods import METHODS
from featherbed.compression.quality import Judge
from featherbed.compression.wrapped import Hot
from featherbed.errors import ArgumentError
from featherbed.packed.band import Band
from featherbed.packed.table import PackedTable

SAMPLE = 30_000  # rows candidates are compared on, at most
SAMPLE_NUMBERS = 1_500_000  # and numbers in them
SAMPLE_QUERIES = 1000
FINALISTS = 2
ROUNDS = 24  # of refinement
LARGE = 200_000  # rows beyond which one finalist and fewer rounds must do
HEADER = 2200  # bytes of a file that are no arrays, at most
SMALLEST = ("layered", "pq", "clusters", "int2", "lowrank")  # the methods that can go lowest
SLOW = 1e12  # multiplications of a candidate nobody would wait for


@dataclass(frozen=True)
class Candidate:
    """A method with settings, and its bytes for the whole matrix."""

    method: Method
    settings: Settings = field(hash=False)
    bytes: int

    def point(self, stage: str, recall: float, error: float) -> dict[str, Any]:
        """Return what the curve keeps of a measurement."""
        named = {"method": self.method.name, "settings": self.settings, "bytes": self.bytes}
        return {**named, "recall": recall, "error": error, "stage": stage, "chosen": False}


def candidates(rows: int, dim: int, budget: int, rank: int, weighted: bool) -> list[Candidate]:
    """Return what is worth comparing within ``budget`` bytes."""
    most = {"rq": 1, "pq": 2, "opq": 2, "layered": 4, "ksvd": 1, "clusters": 1, "lowrank": 1}
    found = []
    for name in ("int8", "int4", "int3", "int2", *most):
        method = METHODS[name]
        fitting = method.settings(rows, dim, budget, rank)
        fast = [s for s in fitting if work(method, s, dim) * min(rows, sample_rows(dim)) < SLOW][: most.get(name, 2)]
        found += [Candidate(method, settings, method.size(rows, dim, **settings)) for settings in fast]
    if weighted:
        hot = Hot(METHODS["layered"])
        found += [Candidate(hot, s, hot.size(rows, dim, **s)) for s in hot.settings(rows, dim, budget, rank)]
    return found


def work(method: Method, settings: Settings, dim: int) -> float:
    """Return about how many multiplications a row of the sample costs."""
    codes = settings.get("codes", 0) if "bits" in settings else 0
    per_round = codes << settings.get("bits", 0)
    rounds = 100 if method.name == "rq" else 60
    return float(per_round * dim * rounds)


def sample_rows(dim: int) -> int:
    """Return how many rows candidates are compared on: fewer where rows are wide."""
    return max(6000, min(SAMPLE, SAMPLE_NUMBERS // dim))


class Trial:
    """A matrix, a sample of it, and judges of both."""

    def __init__(self, job: Job, measure: str) -> None:
        self.job, self.measure = job, measure
        few = job.rows.spread(sample_rows(job.rows.dim))
        counted = job.importance if few is job.rows else importance(few, few.lengths(), measure)
        self.few = replace(job, rows=few, importance=counted, tell=quiet, quick=True)
        self.judge_few = Judge(few, np.random.default_rng(job.seed()), SAMPLE_QUERIES)
        self.curve: list[dict[str, Any]] = []
        self._judge: Judge | None = None

    @property
    def judge(self) -> Judge:
        """The judge of the whole matrix, made when it is first needed."""
        if self._judge is None:
            self.job.tell("neighbours of the matrix", 0.0)
            self._judge = Judge(self.job.rows, np.random.default_rng(self.job.seed()))
        return self._judge

    def on_sample(self, candidate: Candidate) -> float:
        """Fit a candidate to the sample, keep the point, return its quality (higher is better)."""
        settings = candidate.method.for_share(candidate.settings, self.few.rows.count / self.job.rows.count)
        bands = candidate.method.fit(self.few, **settings).bands()
        return self.keep(candidate, "sample", bands, self.judge_few)

    def keep(self, candidate: Candidate, stage: str, bands: list[Band], judge: Judge) -> float:
        """Measure bands, keep the point, return the quality."""
        table = PackedTable(bands, self.job.rows.dim)
        found = judge(lambda ids: table[ids])
        recall = found.get("weighted_recall", found["recall"])
        error = found.get("weighted_error", found["error"])
        self.curve.append(candidate.point(stage, recall, error))
        return float(recall if self.measure == "recall" else -error)


@dataclass
class Choice:
    """The method that was chosen, its bands, and what it is worth."""

    candidate: Candidate
    bands: list[Band]
    quality: float


def choose(trial: Trial, budget: int) -> Choice:
    """Compare candidates on the sample, fit the best ones in full, refine the best of those."""
    job = trial.job
    rows, dim = job.rows.count, job.rows.dim
    listed = candidates(rows, dim, budget - HEADER, job.rank, job.rows.weighted)
    if not listed:
        raise ArgumentError(too_small(rows, dim, budget, job.rank, [METHODS[name] for name in SMALLEST]))
    ranked = []
    for number, candidate in enumerate(listed):
        job.tell(f"comparing on a sample: {candidate.method.name}", number / len(listed))
        ranked.append((trial.on_sample(candidate), -number, candidate))
    ranked.sort(reverse=True, key=lambda item: item[:2])
    _rest_of_curve(trial, budget)
    finalists = [item[2] for item in ranked[: FINALISTS if rows <= LARGE else 1]]
    return finish(trial, finalists)


def finish(trial: Trial, finalists: list[Candidate]) -> Choice:
    """Fit finalists to the whole matrix, refine the best, return the better of refined and not."""
    best: tuple[float, Candidate, Fit, list[Band]] | None = None
    for candidate in finalists:
        trial.job.tell(f"fitting {candidate.method.name}", 0.0)
        fit = candidate.method.fit(trial.job, **candidate.settings)
        if len(finalists) == 1 and fit.refinable:
            best = (-np.inf, candidate, fit, [])
            break
        bands = fit.bands()
        quality = trial.keep(candidate, "full", bands, trial.judge)
        if best is None or quality > best[0]:
            best = (quality, candidate, fit, bands)
    assert best is not None
    quality, candidate, fit, bands = best
    if fit.refinable:
        fit.refine(ROUNDS if trial.job.rows.count <= LARGE else ROUNDS // 2)
        refined = fit.bands()
        after = trial.keep(candidate, "refined", refined, trial.judge)
        if after > quality:
            quality, bands = after, refined
    trial.curve[-1 if bands is not best[3] else trial.curve.index(_point(trial, candidate, "full"))]["chosen"] = True
    return Choice(candidate, bands, quality)


def _point(trial: Trial, candidate: Candidate, stage: str) -> dict[str, Any]:
    return next(
        point
        for point in reversed(trial.curve)
        if point["stage"] == stage and point["method"] == candidate.method.name and point["settings"] == candidate.settings
    )


def _rest_of_curve(trial: Trial, budget: int) -> None:
    """Measure the cheap methods at half and at twice the bytes too: the curve is for people to look at."""
    rows, dim = trial.job.rows.count, trial.job.rows.dim
    for size in (budget // 2, budget * 2):
        for name in ("int8", "int4", "int2", "lowrank", "pq", "layered"):
            method = METHODS[name]
            for settings in method.settings(rows, dim, size - HEADER, trial.job.rank)[:1]:
                known = any(p["method"] == name and p["settings"] == settings for p in trial.curve)
                if not known and work(method, settings, dim) * trial.few.rows.count < SLOW / 4:
                    trial.on_sample(Candidate(method, settings, method.size(rows, dim, **settings)))


def too_small(rows: int, dim: int, budget: int, rank: int, methods: list[Method]) -> str:
    """Say what the smallest table these methods can make would take."""
    low, high = 1, rows * dim * 4 + HEADER
    while low < high:
        middle = (low + high) // 2
        if any(method.settings(rows, dim, middle - HEADER, rank) for method in methods):
            high = middle
        else:
            low = middle + 1
    return (
        f"nothing fits {rows:,} x {dim} into {budget:,} bytes: the smallest possible takes about {low:,} "
        f"({rows * dim * 4 / low:.0f} times smaller than float32); ask for that or more"
    )
