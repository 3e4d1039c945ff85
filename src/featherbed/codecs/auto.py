"""Which method for so many bytes: curves on a sample, the winners in full, the best of them refined."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from featherbed.codecs.codec import LEARN, Codec, CodecJob, Fit, Settings, importance
from featherbed.codecs.hot import HotCodec
from featherbed.codecs.meter import CODING, ROUND, Meter
from featherbed.codecs.quality import QUERIES, Judge
from featherbed.codecs.registry import CODECS
from featherbed.errors import ArgumentError
from featherbed.packed.band import Band
from featherbed.packed.table import PackedTable

SAMPLE = 3 * LEARN // 2  # rows candidates are compared on, at most
SAMPLE_NUMBERS = SAMPLE * 128  # and numbers in them
LEARNT = 2 / 3  # of the sample: the others show how a dictionary does on rows it has not seen
SAMPLE_QUERIES = 1000
LAYERED = 12  # shapes of layered codes that are compared
FINALISTS = 3
FIRST_ROUNDS = 8  # of refinement, for every finalist
ROUNDS = 32  # of refinement, for the best
LARGE = 200_000  # rows beyond which one finalist and fewer rounds must do
HEADER = 2200  # bytes of a file that are no arrays, at most
SMALLEST = ("layered", "pq", "clusters", "int2", "lowrank")  # the methods that can go lowest
SLOW = 1e11  # work nobody would wait for
PATIENCE = 4e11  # work of all layered candidates together (a quarter of it beyond LARGE rows)
HOT = HotCodec(CODECS["layered"])
BESIDE = 1e10  # work of a point beside the budget, for the curve


@dataclass(frozen=True)
class Candidate:
    """A method with settings, and its bytes for the whole matrix."""

    method: Codec
    settings: Settings = field(hash=False)
    bytes: int

    def point(self, stage: str, recall: float, error: float) -> dict[str, Any]:
        """Return what the curve keeps of a measurement."""
        named = {"method": self.method.name, "settings": self.settings, "bytes": self.bytes}
        return {**named, "recall": recall, "error": error, "stage": stage, "chosen": False}


@dataclass
class Entry:
    """A candidate that was measured: the point of the curve, its quality (higher is better), and the fit where it is kept."""

    candidate: Candidate
    point: dict[str, Any] = field(default_factory=dict)
    quality: float = -np.inf
    fit: Fit | None = None
    bands: list[Band] = field(default_factory=list)


class Trial:
    """A matrix, a sample of it, and judges of both; a matrix that is small enough is its own sample."""

    def __init__(self, job: CodecJob, measure: str, began: float | None = None) -> None:
        self.meter = Meter(job.tell, time.perf_counter() if began is None else began)
        self.job = job = replace(job, tell=self.meter.inside)
        self.measure = measure
        self.whole = job.rows.count <= LEARN and job.rows.count * job.rows.dim <= SAMPLE_NUMBERS
        few = (
            job.rows
            if self.whole
            else job.rows.spread(max(6000, min(SAMPLE, SAMPLE_NUMBERS // job.rows.dim)))
        )
        counted = job.importance if self.whole else importance(few, few.lengths(), measure)
        learn = few.count if self.whole else int(few.count * LEARNT)
        self.few = replace(job, rows=few, importance=counted, learn=learn, quick=True)
        self.curve: list[dict[str, Any]] = []
        self._judge: Judge | None = None
        self.sample_judge = (
            self.judge
            if self.whole
            else Judge(few, np.random.default_rng(job.seed()), SAMPLE_QUERIES)
        )

    @property
    def judge(self) -> Judge:
        """The judge of the whole matrix, made when it is first needed."""
        if self._judge is None:
            with self.meter.step("neighbours", "measuring", QUERIES * self.job.rows.count):
                self._judge = Judge(self.job.rows, np.random.default_rng(self.job.seed()))
        return self._judge

    def work(self, candidate: Candidate) -> float:
        """Return how long a fit of the sample takes."""
        return candidate.method.work(self.job.rows.dim, **candidate.settings) * self.few.learn

    def plan_work(self, listed: list[Candidate], finalists: list[Candidate], fresh: bool) -> None:
        """Plan the work of comparing candidates, and of finishing such finalists; fresh ones are still to be fitted."""
        (first, last), best = self.rounds(len(finalists)), max(finalists, key=self.work)
        judged = (
            (len(finalists) if len(finalists) > 1 else 0) + 2 + (self._judge is None)
        )  # the best again, and for the report
        left = defaultdict(
            float,
            measuring=len(listed) * self.sample_judge.work + judged * QUERIES * self.job.rows.count,
        )
        for candidate in listed:
            left[candidate.method.name] += self.work(candidate) + self._coding(candidate, self.few)
        for candidate in finalists:
            left[candidate.method.name] += self._full(candidate) * (
                fresh + ROUND * first
            ) + self._coding(candidate, self.job)
        left[best.method.name] += self._full(best) * ROUND * last + self._coding(best, self.job)
        self.meter.plan(left)

    def rounds(self, finalists: int) -> tuple[int, int]:
        """Return how many rounds of refinement every finalist gets, and the best of them."""
        return (
            FIRST_ROUNDS if finalists > 1 else 0,
            ROUNDS if self.job.rows.count <= LARGE else FIRST_ROUNDS,
        )

    def _coding(self, candidate: Candidate, job: CodecJob) -> float:
        """Return how long it takes to code the rows a fit has not learnt from."""
        each = candidate.method.work(job.rows.dim, **candidate.settings)
        return CODING * each * job.rows.count if job.rows.count > job.learn else 0.0

    def on_sample(self, candidate: Candidate) -> Entry:
        """Fit a candidate to the sample and measure it."""
        settings = candidate.method.for_sample(
            candidate.settings, self.few.rows.count / self.job.rows.count
        )
        with self.meter.step(
            f"comparing: {candidate.method.name}", candidate.method.name, self.work(candidate)
        ):
            fit = candidate.method.fit(self.few, **settings)
        entry = self.measured(candidate, "sample", fit, self.sample_judge)
        return entry if self.whole else replace(entry, fit=None, bands=[])

    def fitted(self, candidate: Candidate) -> Fit:
        """Fit a candidate to the whole matrix."""
        with self.meter.step(
            f"fitting {candidate.method.name}", candidate.method.name, self._full(candidate)
        ):
            return candidate.method.fit(self.job, **candidate.settings)

    def refined(self, candidate: Candidate, fit: Fit, rounds: int) -> None:
        """Make a fit of the whole matrix better."""
        with self.meter.step(
            f"refining {candidate.method.name}",
            candidate.method.name,
            ROUND * rounds * self._full(candidate),
            listens=True,
        ):
            fit.refine(rounds)

    def _full(self, candidate: Candidate) -> float:
        """Return how long a fit of the whole matrix takes."""
        return self.work(candidate) * min(LEARN, self.job.rows.count) / self.few.learn

    def measured(self, candidate: Candidate, stage: str, fit: Fit, judge: Judge) -> Entry:
        """Measure a fit and keep the point."""
        compared = f"comparing: {candidate.method.name}" if stage == "sample" else None
        job = self.few if stage == "sample" else self.job
        with self.meter.step(
            compared or "coding", candidate.method.name, self._coding(candidate, job), listens=True
        ):
            bands = fit.bands()
        table = PackedTable(bands, self.job.rows.dim)
        with self.meter.step(compared or "measuring", "measuring", judge.work):
            found = judge(lambda ids: table[ids])
        recall = found.get("weighted_recall", found["recall"])
        error = found.get("weighted_error", found["error"])
        point = candidate.point(stage, recall, error)
        self.curve.append(point)
        return Entry(
            candidate, point, float(recall if self.measure == "recall" else -error), fit, bands
        )


def candidates(trial: Trial, budget: int) -> list[Candidate]:
    """Return what is worth comparing within ``budget`` bytes."""
    rows, dim, rank = trial.job.rows.count, trial.job.rows.dim, trial.job.rank
    most = {
        "int8": 2,
        "int4": 2,
        "int3": 2,
        "int2": 2,
        "lowrank": 1,
        "pq": 2,
        "opq": 1,
        "rq": 1,
        "ksvd": 1,
        "clusters": 1,
    }
    found: list[Candidate] = []
    for name, count in most.items():
        method = CODECS[name]
        listed = _listed(method, rows, dim, method.settings(rows, dim, budget, rank)[:count])
        found += [candidate for candidate in listed if trial.work(candidate) < SLOW / 3]
    method = CODECS["layered"]
    likely = method.settings(rows, dim, budget, rank)
    likely = likely[:LAYERED] + [
        s for s in likely[LAYERED:] if s["codes"] == 1
    ]  # these are quick, and good at clusters
    layered = sorted(_listed(method, rows, dim, likely), key=trial.work)
    taken = np.cumsum([trial.work(candidate) for candidate in layered])
    layered = layered[: np.searchsorted(taken, PATIENCE if rows <= LARGE else PATIENCE / 4)]
    if trial.job.rows.weighted:
        layered += [
            c
            for c in _listed(HOT, rows, dim, HOT.settings(rows, dim, budget, rank))
            if trial.work(c) < SLOW / 3
        ]
    return found + layered


def _listed(method: Codec, rows: int, dim: int, settings: list[Settings]) -> list[Candidate]:
    return [Candidate(method, one, method.size(rows, dim, **one)) for one in settings]


def choose(trial: Trial, budget: int) -> Entry:
    """Compare candidates on the sample, fit the best ones in full, refine the best of those."""
    job = trial.job
    listed = candidates(trial, budget - HEADER)
    if not listed:
        methods = [CODECS[name] for name in SMALLEST]
        raise ArgumentError(too_small(job.rows.count, job.rows.dim, budget, job.rank, methods))
    finalists = FINALISTS if job.rows.count <= LARGE else 1
    beside = _beside(trial, budget)
    likely = sorted(listed, key=trial.work)[len(listed) // 2 :][:finalists]
    trial.plan_work(listed + beside, likely, fresh=not trial.whole)
    ranked = _ranked(trial, listed, [], finalists)
    if ranked[0].candidate.method is HOT:
        more = _more_hot(trial, ranked[0].candidate, budget - HEADER)
        trial.plan_work(
            more + beside, [entry.candidate for entry in ranked[:finalists]], fresh=not trial.whole
        )
        ranked = _ranked(trial, more, ranked, finalists)
    for candidate in beside:
        if not any(
            p["method"] == candidate.method.name and p["settings"] == candidate.settings
            for p in trial.curve
        ):
            trial.on_sample(candidate)
    return finish(trial, ranked[:finalists])


def _ranked(trial: Trial, listed: list[Candidate], known: list[Entry], kept: int) -> list[Entry]:
    """Measure candidates on the sample, return them among those known, the best first; the best keep their fits."""
    for candidate in listed:
        known = sorted([*known, trial.on_sample(candidate)], key=lambda entry: -entry.quality)
        for entry in known[kept:]:  # their fits would fill the memory
            entry.fit, entry.bands = None, []
    return known


def _more_hot(trial: Trial, best: Candidate, budget: int) -> list[Candidate]:
    """Return other ways to code the tail beside as many hot rows as are best."""
    rows, dim, hot = trial.job.rows.count, trial.job.rows.dim, best.settings["hot"]
    likely = HOT.beside(hot, best.settings["hot_kind"], rows, dim, budget, trial.job.rank)
    listed = _listed(HOT, rows, dim, [settings for settings in likely if settings != best.settings])
    return [candidate for candidate in listed if trial.work(candidate) < SLOW]


def finish(trial: Trial, finalists: list[Entry]) -> Entry:
    """Fit finalists to the whole matrix and refine them, refine the best further, return the best of what was seen."""
    best: Entry | None = None
    several = len(finalists) > 1
    trial.plan_work(
        [],
        [entry.candidate for entry in finalists],
        fresh=any(entry.fit is None for entry in finalists),
    )
    first, last = trial.rounds(len(finalists))
    for entry in finalists:
        candidate, fit = entry.candidate, entry.fit
        if fit is None:
            fit = trial.fitted(candidate)
        elif best is None or entry.quality > best.quality:
            best = entry
        if fit.refinable and several:
            trial.refined(candidate, fit, first)
        if several or not fit.refinable:
            found = trial.measured(candidate, "full", fit, trial.judge)
            best = found if best is None or found.quality > best.quality else best
        else:
            best = Entry(candidate, fit=fit)
    assert best is not None
    if best.fit is not None and best.fit.refinable:
        trial.refined(best.candidate, best.fit, last)
        refined = trial.measured(best.candidate, "refined", best.fit, trial.judge)
        best = refined if refined.quality > best.quality else best
    best.point["chosen"] = True
    return best


def _beside(trial: Trial, budget: int) -> list[Candidate]:
    """Return the quick methods at half and at twice the bytes, to be measured too: the curve is for people to look at."""
    rows, dim = trial.job.rows.count, trial.job.rows.dim
    found: list[Candidate] = []
    for size in (budget // 2, budget * 2):
        for name in ("int8", "int4", "int2", "lowrank", "pq", "layered"):
            method = CODECS[name]
            listed = _listed(
                method, rows, dim, method.settings(rows, dim, size - HEADER, trial.job.rank)
            )
            found += [candidate for candidate in listed if trial.work(candidate) < BESIDE][:1]
    return found


def too_small(rows: int, dim: int, budget: int, rank: int, methods: list[Codec]) -> str:
    """Say what the smallest table these methods can make would take."""

    def fits(size: int) -> bool:
        return any(method.settings(rows, dim, size - HEADER, rank) for method in methods)

    low, high = 1, rows * dim * 4 + HEADER
    if not fits(high):
        return f"{rows:,} x {dim} is too small a matrix for it, even with as many bytes as now: take int8 or int4, or leave it"
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return (
        f"nothing fits {rows:,} x {dim} into {budget:,} bytes: the smallest possible takes about {low:,} "
        f"({rows * dim * 4 / low:.1f} times smaller than float32); ask for that or more"
    )
