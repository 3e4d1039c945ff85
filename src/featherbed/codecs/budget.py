"""The best table within a budget of bytes, and the smallest one that reaches a quality."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from featherbed.codecs.auto import HEADER, Candidate, Entry, Trial, choose, finish, too_small
from featherbed.codecs.codec import CodecJob, Settings, Tell, importance
from featherbed.codecs.principal import effective_rank
from featherbed.codecs.registry import CODECS
from featherbed.codecs.rows import Rows, refuse_zeros
from featherbed.codecs.scale import factor_of, scale_bands, scale_rows
from featherbed.codecs.target import Target
from featherbed.errors import ArgumentError
from featherbed.packed.keys import Keys
from featherbed.packed.table import PackedTable

KEYS_HEADER = 400  # bytes of a file's header that keys add
# compression ratios tried to reach a quality, the smallest table first
RATIOS = (96, 64, 48, 40, 32, 24, 20, 16, 12, 10, 8, 7, 6, 5, 4.5, 4, 3.7)


def make_job(
    rows: Rows,
    target: Target,
    generator: np.random.Generator | int | None,
    padding: int | None,
    tell: Tell,
) -> CodecJob:
    """Return the input of the codecs: rows near scale 1, their importance and effective rank."""
    tell("reading the matrix", 0.0)
    lengths = rows.lengths()  # refuses rows that are not numbers, or too long
    factor = factor_of(lengths, rows.dim)
    rows, lengths = scale_rows(rows, factor), lengths / np.float32(factor)
    if target.measure == "recall":
        refuse_zeros(lengths, padding)
    if isinstance(generator, bool) or not (
        generator is None or isinstance(generator, int | np.integer | np.random.Generator)
    ):
        raise ArgumentError(
            f"generator={generator!r}: give numpy.random.default_rng(seed), a seed, or nothing"
        )
    made = (
        generator
        if isinstance(generator, np.random.Generator)
        else np.random.default_rng(generator or 0)
    )
    counted = importance(rows, lengths, target.measure, padding)
    job = CodecJob(rows, counted, made, tell=tell, factor=factor)
    return replace(job, rank=effective_rank(job))


def best_within(trial: Trial, named: tuple[Any, Settings] | None, budget: int) -> Entry:
    """Return the best table within the budget; should its file be larger than foreseen, ask for less."""
    asked = budget
    for _ in range(6):
        choice = _within(trial, named, asked)
        table = table_of(trial, choice)
        over = sum(table.sizes_by_part().values()) + KEYS_HEADER - budget
        if over <= 0:
            return choice
        asked = min(asked, table.nbytes + HEADER) - over
    raise ArgumentError(
        f"no table of {budget:,} bytes was found for this matrix: ask for a little more"
    )


def _within(trial: Trial, named: tuple[Any, Settings] | None, budget: int) -> Entry:
    """Return the best table of all methods, or of the one that was named, that should take no more than the budget."""
    if named is None:
        return choose(trial, budget)
    method, asked = named
    asked = asked and method.defaults() | asked
    rows, dim = trial.job.rows.count, trial.job.rows.dim
    fitting = method.settings(rows, dim, budget - HEADER, trial.job.rank)
    if asked:
        fitting = [settings for settings in fitting if asked.items() <= settings.items()]
        fitting = fitting or _complete_settings(method, asked, rows, dim, trial.job.rank, budget)
    if not fitting:
        raise ArgumentError(
            f"{method.name}: {too_small(rows, dim, budget, trial.job.rank, [method])}"
        )
    listed = [
        Candidate(method, settings, method.size(rows, dim, **settings)) for settings in fitting[:3]
    ]
    if len(listed) > 1:
        trial.plan_work(listed, listed[:1], fresh=True)
        listed = [max(map(trial.on_sample, listed), key=lambda entry: entry.quality).candidate]
    return finish(trial, [Entry(listed[0])])


def _complete_settings(
    method: Any, asked: Settings, rows: int, dim: int, rank: int, budget: int
) -> list[Settings]:
    """Return what was asked for, the other settings as the method chooses them: of those that fit, the largest first."""
    sizes = (budget // 8, budget // 2, budget, 2 * budget, 8 * budget, 64 * budget, rows * dim * 64)
    offered = [found for size in sizes for found in method.settings(rows, dim, size - HEADER, rank)]
    if not offered:
        return []
    for name, value in asked.items():
        _check_setting(method.name, name, value, offered)
    whole = [method.complete(found | asked, dim, rank) for found in offered]
    for name, value in asked.items():
        if all(settings[name] != value for settings in whole):
            raise ArgumentError(
                f"{method.name}: {name}={value} does not go with the rest, {whole[0][name]} would: leave it out"
            )
    whole = [settings for settings in whole if asked.items() <= settings.items()]
    taken = [(method.size(rows, dim, **settings), settings) for settings in whole]
    fitting = sorted(
        (pair for pair in taken if pair[0] <= budget - HEADER), key=lambda pair: -pair[0]
    )
    if not fitting:
        least = min(size for size, _ in taken) + HEADER
        raise ArgumentError(
            f"{method.name} with {asked} takes at least {least:,} bytes: {budget:,} were asked for"
        )
    return [settings for _, settings in fitting[:1]]


def _check_setting(method: str, name: str, value: int | str, offered: list[Settings]) -> None:
    """Refuse a setting the method does not have, or a value none of its kind could be."""
    if name not in offered[0]:
        raise ArgumentError(f"{method} has no setting {name!r}: it has {', '.join(offered[0])}")
    known = offered[0][name]
    if isinstance(known, str):
        words = {found[name] for found in offered} | (
            {"int8", "float16"} if name == "kind" else set()
        )
        if value not in words:
            raise ArgumentError(
                f"{method}: {name}={value!r}: use one of {', '.join(sorted(words))}"
            )
        return
    least = 0 if name in ("blocks", "block_bits") else 1
    most = {"bits": 12, "block_bits": 16}.get(name, 1 << 24)
    if not isinstance(value, int) or not least <= value <= most:
        raise ArgumentError(
            f"{method}: {name}={value!r}: give a whole number from {least} to {most:,}"
        )


def smallest_reaching(trial: Trial, named: tuple[Any, Settings] | None, target: Target) -> Entry:
    """Return the smallest table that is good enough: up the sizes by what the sample promises, then by what is measured."""
    dense = trial.job.rows.count * trial.job.rows.dim * 4
    budgets = [int(dense / ratio) for ratio in RATIOS]
    best: Entry | None = None
    for budget in budgets:
        trial.meter.plan({})  # how many sizes it will take is not known
        if not _promising(trial, named, budget, target):
            continue
        try:
            best = best_within(trial, named, budget)
        except ArgumentError:
            continue
        if target.reached(abs(best.quality)):
            return best
    kept = (
        "nothing fits"
        if best is None
        else f"{best.candidate.method.name} has {target.measure} {abs(best.quality):.4f}"
    )
    raise ArgumentError(
        f"quality={target.measure}:{target.floor} is out of reach even at {dense / budgets[-1]:.1f} times smaller: {kept}"
    )


def _promising(
    trial: Trial, named: tuple[Any, Settings] | None, budget: int, target: Target
) -> bool:
    """Whether the sample reaches the quality with this many bytes (the whole, with more rows to confuse, seldom does)."""
    rows, dim = trial.job.rows.count, trial.job.rows.dim
    methods = (
        [named[0]]
        if named
        else [CODECS[name] for name in ("layered", "int8", "int4", "int3", "int2")]
    )
    for method in methods:
        for settings in method.settings(rows, dim, budget - HEADER, trial.job.rank)[:1]:
            found = trial.on_sample(
                Candidate(method, settings, method.size(rows, dim, **settings))
            ).point[target.measure]
            if target.reached(found + 0.02 if target.measure == "recall" else found * 0.97):
                return True
    return False


def table_of(
    trial: Trial, choice: Entry, padding: int | None = None, keys: Keys | None = None
) -> PackedTable:
    """Return the table of a measured candidate, at the scale of the matrix."""
    made_by: dict[str, Any] = {
        "table": "compress",
        "method": choice.candidate.method.name,
        **choice.candidate.settings,
    }
    bands = scale_bands(choice.bands, trial.job.factor)
    return PackedTable(bands, trial.job.rows.dim, padding_idx=padding, keys=keys, made_by=made_by)
