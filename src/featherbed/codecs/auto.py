"""The search for the best table: within a budget of bytes, or the smallest of a given quality.

Read from top to bottom: ``find_best`` tries one budget, or rising ones until the quality is reached;
for each budget, candidates (codecs with settings) are compared on a sample, the best are fitted to
the whole matrix, and the best of these is refined.
"""

from __future__ import annotations

import numpy as np

from featherbed.codecs.codec import Codec, Settings
from featherbed.codecs.hot import HotCodec
from featherbed.codecs.registry import CODECS
from featherbed.codecs.target import Target
from featherbed.codecs.trial import Candidate, MeasuredCandidate, Trial
from featherbed.errors import ArgumentError

HEADER = 2200  # bytes of a file besides its arrays, at most
KEYS_HEADER = 400  # bytes that keys add to the header of a file
# compression ratios tried to reach a quality, the smallest table first
RATIOS = (96, 64, 48, 40, 32, 24, 20, 16, 12, 10, 8, 7, 6, 5, 4.5, 4, 3.7)
# settings of each codec that are compared, besides those of layered codes
COMPARED = {"int8": 2, "int4": 2, "int3": 2, "int2": 2, "lowrank": 1, "pq": 2, "opq": 1}
COMPARED |= {"rq": 1, "ksvd": 1, "clusters": 1}
LAYERED = 12  # settings of layered codes that are compared
PROBES = ("layered", "int8", "int4", "int3", "int2")  # codecs that tell whether a size may do
CURVE = ("int8", "int4", "int2", "lowrank", "pq", "layered")  # codecs shown at other sizes
SMALLEST = ("layered", "pq", "clusters", "int2", "lowrank")  # codecs of the smallest tables
HOT = HotCodec(CODECS["layered"])
FINALISTS = 3
# limits of work: of one candidate, of all layered candidates (a quarter for large matrices), and of
# one candidate at another size than the budget
MOST_WORK, MOST_LAYERED_WORK, MOST_CURVE_WORK = 1e11, 4e11, 1e10
Request = tuple[Codec, Settings] | None  # the codec and settings asked for; None: compare all


def find_best(trial: Trial, request: Request, target: Target) -> MeasuredCandidate:
    """Return the best candidate within the budget, or the smallest that reaches the quality."""
    if target.budget is not None:
        return best_within(trial, request, target.budget)
    return smallest_reaching(trial, request, target)


def smallest_reaching(trial: Trial, request: Request, target: Target) -> MeasuredCandidate:
    """Return the smallest table of sufficient quality: by the sample first, then as measured."""
    dense = trial.job.rows.count * trial.job.rows.dim * 4
    budgets = [int(dense / ratio) for ratio in RATIOS]
    best: MeasuredCandidate | None = None
    for budget in budgets:
        trial.meter.plan({})  # the number of sizes is not known
        if not _may_reach(trial, request, budget, target):
            continue
        try:
            best = best_within(trial, request, budget)
        except ArgumentError:
            continue
        if target.reached(abs(best.quality)):
            return best
    found = "nothing fits"
    if best is not None:
        found = f"{best.candidate.method.name} has {target.measure} {abs(best.quality):.4f}"
    raise ArgumentError(
        f"quality={target.measure}:{target.floor} is out of reach even at "
        f"{dense / budgets[-1]:.1f} times smaller: {found}"
    )


def _may_reach(trial: Trial, request: Request, budget: int, target: Target) -> bool:
    """Return whether the sample nearly reaches the quality; the whole matrix seldom does better."""
    methods = [request[0]] if request else [CODECS[name] for name in PROBES]
    for method in methods:
        for candidate in trial.candidates(method, trial.settings(method, budget - HEADER)[:1]):
            found = trial.compare(candidate).point[target.measure]
            if target.reached(found + 0.02 if target.measure == "recall" else found * 0.97):
                return True
    return False


def best_within(trial: Trial, request: Request, budget: int) -> MeasuredCandidate:
    """Return the best candidate whose file is no larger than ``budget`` bytes."""
    allowed = budget
    for _ in range(6):  # a file that turns out larger than estimated is tried again with less
        best = (
            _compare_all(trial, allowed) if request is None else _fit_one(trial, request, allowed)
        )
        table = trial.table(best)
        over = sum(table.sizes_by_part().values()) + KEYS_HEADER - budget
        if over <= 0:
            return best
        allowed = min(allowed, table.nbytes + HEADER) - over
    raise ArgumentError(
        f"no table of {budget:,} bytes was found for this matrix: ask for a little more"
    )


# --- one codec -----------------------------------------------------------------------------------


def _fit_one(trial: Trial, request: tuple[Codec, Settings], budget: int) -> MeasuredCandidate:
    """Return the best candidate of one codec, with the settings that are given."""
    method, given = request
    given = given and method.defaults() | given
    fitting = trial.settings(method, budget - HEADER)
    if given:
        fitting = [settings for settings in fitting if given.items() <= settings.items()]
        fitting = fitting or _complete_settings(trial, method, given, budget)
    if not fitting:
        raise ArgumentError(f"{method.name}: {_smallest_size(trial, budget, [method])}")
    listed = trial.candidates(method, fitting[:3])
    if len(listed) > 1:
        trial.plan_work(listed, listed[:1], fresh=True)
        listed = [max(map(trial.compare, listed), key=lambda found: found.quality).candidate]
    return _finish(trial, [MeasuredCandidate(listed[0])])


def _complete_settings(trial: Trial, method: Codec, given: Settings, budget: int) -> list[Settings]:
    """Return the given settings completed by the codec: the largest table within the budget."""
    rows, dim, rank = trial.job.rows.count, trial.job.rows.dim, trial.job.rank
    sizes = (budget // 8, budget // 2, budget, 2 * budget, 8 * budget, 64 * budget, rows * dim * 64)
    offered = [found for size in sizes for found in trial.settings(method, size - HEADER)]
    if not offered:
        return []
    for name, value in given.items():
        _check_setting(method.name, name, value, offered)
    complete = [method.complete(found | given, dim, rank) for found in offered]
    for name, value in given.items():
        if all(settings[name] != value for settings in complete):
            raise ArgumentError(
                f"{method.name}: {name}={value} does not go with the other settings, "
                f"{complete[0][name]} would: leave it out"
            )
    matching = [settings for settings in complete if given.items() <= settings.items()]
    listed = sorted(trial.candidates(method, matching), key=lambda c: -c.bytes)
    fitting = [candidate for candidate in listed if candidate.bytes <= budget - HEADER]
    if not fitting:
        raise ArgumentError(
            f"{method.name} with {given} takes at least {listed[-1].bytes + HEADER:,} bytes: "
            f"{budget:,} were asked for"
        )
    return [fitting[0].settings]


def _check_setting(method: str, name: str, value: int | str, offered: list[Settings]) -> None:
    """Refuse a setting the codec does not have, and values of the wrong kind."""
    if name not in offered[0]:
        raise ArgumentError(f"{method} has no setting {name!r}: it has {', '.join(offered[0])}")
    if isinstance(offered[0][name], str):
        words = {found[name] for found in offered}
        words |= {"int8", "float16"} if name == "kind" else set()
        if value not in words:
            accepted = ", ".join(sorted(words))
            raise ArgumentError(f"{method}: {name}={value!r}: use one of {accepted}")
        return
    least = 0 if name in ("blocks", "block_bits") else 1
    most = {"bits": 12, "block_bits": 16}.get(name, 1 << 24)
    if not isinstance(value, int) or not least <= value <= most:
        raise ArgumentError(f"{method}: {name}={value!r}: give an integer from {least} to {most:,}")


# --- all codecs ----------------------------------------------------------------------------------


def _compare_all(trial: Trial, budget: int) -> MeasuredCandidate:
    """Compare the candidates of all codecs on the sample and finish the best of them."""
    listed = candidates(trial, budget - HEADER)
    if not listed:
        raise ArgumentError(_smallest_size(trial, budget, [CODECS[name] for name in SMALLEST]))
    finalists = 1 if trial.large else FINALISTS
    others = _candidates_of_curve(trial, budget)
    likely = sorted(listed, key=trial.work)[len(listed) // 2 :][:finalists]
    trial.plan_work(listed + others, likely, fresh=not trial.whole)
    ranked = _rank(trial, listed, [], finalists)
    if ranked[0].candidate.method is HOT:
        more = _more_hot_candidates(trial, ranked[0].candidate, budget - HEADER)
        best = [found.candidate for found in ranked[:finalists]]
        trial.plan_work(more + others, best, fresh=not trial.whole)
        ranked = _rank(trial, more, ranked, finalists)
    for candidate in others:
        known = [(point["method"], point["settings"]) for point in trial.curve]
        if (candidate.method.name, candidate.settings) not in known:
            trial.compare(candidate)
    return _finish(trial, ranked[:finalists])


def candidates(trial: Trial, budget: int) -> list[Candidate]:
    """Return the candidates worth comparing within ``budget`` bytes of arrays."""
    found: list[Candidate] = []
    for name, count in COMPARED.items():
        method = CODECS[name]
        listed = trial.candidates(method, trial.settings(method, budget)[:count])
        found += [candidate for candidate in listed if trial.work(candidate) < MOST_WORK / 3]
    method = CODECS["layered"]
    likely = trial.settings(method, budget)
    quick = [settings for settings in likely[LAYERED:] if settings["codes"] == 1]
    layered = sorted(trial.candidates(method, likely[:LAYERED] + quick), key=trial.work)
    total = np.cumsum([trial.work(candidate) for candidate in layered])
    layered = layered[: np.searchsorted(total, MOST_LAYERED_WORK / (4 if trial.large else 1))]
    if trial.job.rows.weighted:
        hot = trial.candidates(HOT, trial.settings(HOT, budget))
        layered += [candidate for candidate in hot if trial.work(candidate) < MOST_WORK / 3]
    return found + layered


def _more_hot_candidates(trial: Trial, best: Candidate, budget: int) -> list[Candidate]:
    """Return other codes of the tail after the best number of hot rows."""
    job, hot, kind = trial.job, best.settings["hot"], best.settings["hot_kind"]
    likely = HOT.tail_settings(hot, kind, job.rows.count, job.rows.dim, budget, job.rank)
    listed = trial.candidates(HOT, [settings for settings in likely if settings != best.settings])
    return [candidate for candidate in listed if trial.work(candidate) < MOST_WORK]


def _candidates_of_curve(trial: Trial, budget: int) -> list[Candidate]:
    """Return quick candidates of half and twice the budget, measured for the curve of the report."""
    found: list[Candidate] = []
    for size in (budget // 2, budget * 2):
        for method in (CODECS[name] for name in CURVE):
            listed = trial.candidates(method, trial.settings(method, size - HEADER))
            found += [c for c in listed if trial.work(c) < MOST_CURVE_WORK][:1]
    return found


def _rank(
    trial: Trial, listed: list[Candidate], known: list[MeasuredCandidate], kept: int
) -> list[MeasuredCandidate]:
    """Compare candidates with known ones, the best first; the best ``kept`` keep their fits."""
    for candidate in listed:
        known = sorted([*known, trial.compare(candidate)], key=lambda found: -found.quality)
        for found in known[kept:]:  # their fits would fill the memory
            found.fit, found.bands = None, []
    return known


# --- the last steps ------------------------------------------------------------------------------


def _finish(trial: Trial, finalists: list[MeasuredCandidate]) -> MeasuredCandidate:
    """Fit finalists to the whole matrix, refine them, then the best; return the best of all fits."""
    best: MeasuredCandidate | None = None
    several = len(finalists) > 1
    listed = [found.candidate for found in finalists]
    trial.plan_work([], listed, fresh=any(found.fit is None for found in finalists))
    first, last = trial.rounds(len(finalists))
    for finalist in finalists:
        candidate, fit = finalist.candidate, finalist.fit
        if fit is None:
            fit = trial.fit(candidate)
        elif best is None or finalist.quality > best.quality:
            best = finalist
        if fit.refinable and several:
            trial.refine(candidate, fit, first)
        if several or not fit.refinable:
            found = trial.evaluate(candidate, "full", fit)
            best = found if best is None or found.quality > best.quality else best
        else:
            best = MeasuredCandidate(candidate, fit=fit)
    assert best is not None
    if best.fit is not None and best.fit.refinable:
        trial.refine(best.candidate, best.fit, last)
        refined = trial.evaluate(best.candidate, "refined", best.fit)
        best = refined if refined.quality > best.quality else best
    best.point["chosen"] = True
    return best


def _smallest_size(trial: Trial, budget: int, methods: list[Codec]) -> str:
    """Return a message with the size of the smallest table that these codecs can make."""
    rows, dim = trial.job.rows.count, trial.job.rows.dim

    def fits(size: int) -> bool:
        return any(trial.settings(method, size - HEADER) for method in methods)

    low, high = 1, rows * dim * 4 + HEADER
    if not fits(high):
        return (
            f"{rows:,} x {dim} is too small a matrix for it, even with as many bytes as now: "
            "take int8 or int4, or leave it"
        )
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return (
        f"nothing fits {rows:,} x {dim} into {budget:,} bytes: the smallest possible takes about "
        f"{low:,} ({rows * dim * 4 / low:.1f} times smaller than float32); ask for that or more"
    )
