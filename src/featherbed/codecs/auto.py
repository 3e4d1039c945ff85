"""The search for the best table: within a budget of bytes, or the smallest of a given quality.

Read from top to bottom: ``find_best`` tries one budget, or several until the smallest of sufficient
quality is found; for each budget, the most promising candidates (codecs with settings) are fitted
quickly and compared by their weighted error, and the best is refined.
"""

from __future__ import annotations

from dataclasses import replace

from featherbed.codecs.codec import Codec, Settings
from featherbed.codecs.hot import HotCodec
from featherbed.codecs.registry import CODECS
from featherbed.codecs.target import Target
from featherbed.codecs.trial import EFFORTS, Candidate, MeasuredCandidate, Trial
from featherbed.errors import ArgumentError

HEADER = 2200  # bytes of a file besides its arrays, at most
KEYS_HEADER = 400  # bytes that keys add to the header of a file
# compression ratios tried to reach a quality, the smallest table first
RATIOS = (96, 64, 48, 40, 32, 24, 20, 16, 12, 10, 8, 7, 6, 5, 4.5, 4, 3.7)
# settings of each codec that are compared, besides those of layered codes
COMPARED = {"int8": 2, "int4": 2, "int3": 2, "int2": 2, "lowrank": 2, "clusters": 1, "pq": 1}
COMPARED |= {"opq": 1, "rq": 1, "ksvd": 1}
SMALLEST = ("layered", "pq", "clusters", "int2", "lowrank")  # codecs of the smallest tables
KEPT_FITS = 4  # of the least errors: a fit to the whole matrix starts from the one chosen
# errors of different codecs that differ by less than this factor are told apart by recall
OTHER = 2.0
HOT = HotCodec(CODECS["layered"])
Request = tuple[Codec, Settings] | None  # the codec and settings asked for; None: compare all


def find_best(trial: Trial, request: Request, target: Target) -> MeasuredCandidate:
    """Return the best candidate within the budget, or the smallest that reaches the quality."""
    if request is None or request[0].name.endswith(("layered", "rq", "lsq")):
        trial.compile()
    if target.budget is not None:
        return best_within(trial, request, target.budget)
    return smallest_reaching(trial, request, target)


def smallest_reaching(trial: Trial, request: Request, target: Target) -> MeasuredCandidate:
    """Return the smallest table of sufficient quality: found by bisection with quick fits.

    The fits of the wanted effort may reach the quality with fewer bytes than quick ones.
    """
    dense, effort = trial.job.rows.count * trial.job.rows.dim * 4, trial.effort
    budgets = [int(dense / ratio) for ratio in RATIOS]
    found = "nothing fits"

    def reaches(budget: int) -> MeasuredCandidate | None:
        nonlocal found
        try:
            best = best_within(trial, request, budget)
        except ArgumentError:
            return None
        quality = trial.quality(trial.table(best))
        value = quality.get(f"weighted_{target.measure}", quality[target.measure])
        found = f"{best.candidate.method.name} has {target.measure} {value:.4f}"
        return best if target.reached(value) else None

    trial.effort = EFFORTS["quick"]
    low, high = 0, len(budgets)  # the smallest that quick fits reach is within [low, high]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(budgets[middle]) else (middle + 1, high)
    trial.effort = effort
    for budget in budgets[max(0, low - 1) :]:
        best = reaches(budget)
        if best is not None:
            return best
    raise ArgumentError(
        f"quality={target.measure}:{target.floor} is out of reach even at "
        f"{dense / budgets[-1]:.1f} times smaller: {found}"
    )


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
    listed = trial.candidates(method, trial.order(method, fitting)[: trial.effort.named])
    trial.plan_work(listed if len(listed) > 1 else [], listed[:1])
    if len(listed) == 1:
        return _finish(trial, [MeasuredCandidate(listed[0])])
    return _finish(trial, _rank(trial, listed)[:1])


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
            f"the budget is {budget:,}"
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
    """Compare the candidates of all codecs on the sample and refine the best of them."""
    listed = candidates(trial, budget - HEADER)
    if not listed:
        raise ArgumentError(_smallest_size(trial, budget, [CODECS[name] for name in SMALLEST]))
    finalists = trial.effort.finalists
    trial.plan_work(listed, sorted(listed, key=trial.work)[-finalists:])
    ranked = _rank(trial, listed)
    return _finish(trial, ranked[:finalists])


def candidates(trial: Trial, budget: int) -> list[Candidate]:
    """Return the candidates worth comparing within ``budget`` bytes of arrays."""
    found: list[Candidate] = []
    for name, count in COMPARED.items():
        listed = trial.candidates(CODECS[name], trial.settings(CODECS[name], budget)[:count])
        found += [candidate for candidate in listed if trial.work(candidate) < trial.effort.work]
    if not trial.whole:  # clusters of few rows of a sample say nothing of the matrix
        most = trial.sample.training_rows // 4
        found = [candidate for candidate in found if candidate.settings.get("clusters", 0) <= most]
    for method in (CODECS["layered"], *([HOT] if trial.job.rows.weighted else [])):
        likely = trial.order(method, trial.settings(method, budget))
        left = trial.effort.further
        for candidate in trial.candidates(method, likely[: trial.effort.shapes]):
            if left >= 0:
                found.append(candidate)
            left -= trial.work(candidate)
    return found


def _rank(trial: Trial, listed: list[Candidate]) -> list[MeasuredCandidate]:
    """Compare candidates, the best first: by error, and by recall if neighbors count.

    Recall tells apart candidates of close errors and the best of each codec: equal errors of
    different codecs (directions left out, or noise in all of them) cost neighbors unequally.
    """
    ranked: list[MeasuredCandidate] = []
    for candidate in listed:
        if ranked and trial.job.late():
            break
        ranked = sorted([*ranked, trial.compare(candidate)], key=lambda found: found.expected)
        for found in ranked[KEPT_FITS:]:
            found.fit = None  # they would fill the memory
    first = {found.candidate.method.name: found for found in reversed(ranked)}
    close = [
        found
        for found in ranked
        if found.expected <= trial.effort.close * ranked[0].expected
        or (found in first.values() and found.expected < OTHER * ranked[0].expected)
    ]
    if trial.measure == "recall" and len(close) > 1:
        recalls = {id(found): trial.expected_recall(found) for found in close}
        ranked.sort(key=lambda found: -recalls.get(id(found), 0.0))
    return ranked


# --- the last steps ------------------------------------------------------------------------------


def _finish(trial: Trial, finalists: list[MeasuredCandidate]) -> MeasuredCandidate:
    """Fit finalists to the whole matrix and refine them; return the best of all fits."""
    found: list[MeasuredCandidate] = []
    trial.plan_work([], [found.candidate for found in finalists])
    for finalist in finalists:
        candidate, fit = finalist.candidate, finalist.fit
        if fit is None or not trial.whole:
            fit = trial.fit(candidate, fit)
        else:
            found.append(replace(finalist))
        if fit.refinable:
            trial.refine(candidate, fit)
        elif trial.whole and finalist.fit is fit:
            continue
        found.append(trial.measure_error(candidate, "refined", fit, trial.job))
    several = len({one.candidate for one in found}) > 1 and trial.measure == "recall"
    best = min(found, key=lambda one: -trial.recall(one) if several else one.error)
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
