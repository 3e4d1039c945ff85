"""``fb.compress``: a matrix in, a packed table with a report out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from featherbed.compression.choose import HEADER, Candidate, Entry, Trial, choose, finish, too_small
from featherbed.compression.given import matrix_of
from featherbed.compression.method import Job, Settings, Tell, importance, quiet
from featherbed.compression.methods import METHODS, method_of
from featherbed.compression.plain import effective_rank
from featherbed.compression.report import Report
from featherbed.compression.rows import Rows, refuse_zeros
from featherbed.compression.scale import factor_of, scale_bands, scale_rows
from featherbed.compression.target import Target
from featherbed.errors import ArgumentError, DataError, MissingExtra
from featherbed.packed.keys import Keys
from featherbed.packed.table import PackedTable

KEYS_HEADER = 400  # bytes of a file's header that keys add
RATIOS = (
    96,
    64,
    48,
    40,
    32,
    24,
    20,
    16,
    12,
    10,
    8,
    7,
    6,
    5,
    4.5,
    4,
    3.7,
)  # tried, smallest table first, to reach a quality


def compress(
    matrix: Any,  # [V, d]: an array, a memory map, a tensor, a module
    *,
    budget: int | str | None = None,
    ratio: float | None = None,
    quality: str | None = None,
    method: str = "auto",
    measure: str = "recall",
    weights: ArrayLike | str | None = None,
    keys: Iterable[str] | None = None,
    generator: np.random.Generator | int | None = None,
    padding_idx: int | None = None,
    words: Iterable[str | Path] = (),
    name: str = "matrix",
    command: str | None = None,
    tell: Tell = quiet,
) -> PackedTable:
    """Make a matrix smaller: to ``budget`` bytes, ``ratio`` times smaller than float32, or just good enough for ``quality``.

    The file, without its keys, takes no more than the bytes asked for. ``method="auto"`` compares the methods on a sample, fits
    the best in full and refines the winner by turns of new codes and least-squares dictionaries; the result's ``report``
    says what was lost, and keeps the whole curve. Methods are compared by neighbour recall@10, or by the error
    Σ ||x - y||² / Σ ||x||² where ``measure`` or ``quality`` asks for it; ``weights`` (how often each row is used) make both
    weighted means, and keep the rows used most better than the others.

    Args:
        matrix: [V, d] of floats; read in blocks, so that a memory map may be larger than the memory. Of a module such as
            nn.Embedding, its weight (and the padding row, if it is zero).
        budget: bytes of the file, such as 600_000 or "600KB".
        ratio: how many times smaller than V x d float32.
        quality: "recall:0.9" (at least) or "error:0.1" (at most), with as few bytes as do.
        method: "auto", or one by name: int8, int4, int3, int2, lowrank, pq, opq, rq, lsq, layered, kd, ksvd, hash, hash+ksvd,
            anchors, clusters; with lengths apart "rq+norms"; after hot rows "hot+layered"; with settings "rq:codes=8,bits=8".
        measure: "recall" or "error": what methods are compared by, where no quality says it.
        weights: how often each row is used, such as word counts; "zipf" where rows are sorted by use.
        keys: a name for every row.
        generator: a numpy generator or a seed; 0 by default, so that results repeat.
        padding_idx: this row is zero and stays so.
        words: similarity or analogy files to score before and after (needs keys).
        name, command: what the report calls the matrix and the way to repeat it.
        tell: is told what is being done and which share of the whole, by the time it should take, is done (0: not known yet).

    >>> matrix = np.random.default_rng(0).standard_normal((400, 16)).astype(np.float32)
    >>> small = compress(matrix, ratio=4, method="int4")
    >>> small.nbytes <= matrix.nbytes / 4, small.report.quality["recall"] > 0.7
    (True, True)
    """
    started = time.perf_counter()
    _need_faiss()
    matrix, own_padding = matrix_of(matrix)
    padding_idx = own_padding if padding_idx is None else padding_idx
    rows = Rows(matrix, weights)
    target = Target.of(budget, ratio, quality, rows.count * rows.dim * 4, measure)
    found_keys = None if keys is None else Keys.of(keys)
    if found_keys is not None and len(found_keys) != rows.count:
        raise ArgumentError(
            f"{len(found_keys)} keys were given for {rows.count} rows: give one for each"
        )
    if padding_idx is not None and not 0 <= padding_idx < rows.count:
        raise ArgumentError(f"padding_idx={padding_idx}: rows go from 0 to {rows.count - 1}")
    files = [Path(path) for path in words]
    if files and found_keys is None:
        raise ArgumentError("word files can be scored only when rows have keys: give keys as well")
    for path in files:
        if not path.is_file():
            raise DataError(f"{path}: there is no such file of words")
    chosen, settings = (None, {}) if method == "auto" else method_of(method)
    job = _job(rows, target, generator, padding_idx, tell)
    trial = Trial(job, target.measure, started)
    named = None if chosen is None else (chosen, settings)
    choice = (
        _fit(trial, named, target.budget)
        if target.budget is not None
        else _reach(trial, named, target)
    )
    table = _table(trial, choice, padding_idx, found_keys)
    if command is None:
        asked: dict[str, Any] = {"budget": budget, "ratio": ratio, "quality": quality}
        asked["method"] = method
        asked |= {"measure": measure, "weights": weights, "keys": keys, "generator": generator}
        command = _call(asked | {"padding_idx": padding_idx})
    with trial.meter.step("measuring", "measuring", trial.judge.work):
        table.report = Report.of(table, trial, choice, target, name, command, files)
    table.report.data["seconds"] = time.perf_counter() - started
    return table


def _call(settings: dict[str, Any]) -> str:
    """Return the call that repeats a compression; arrays and the like are named after their arguments.

    >>> _call({"ratio": 8, "method": "opq", "measure": "recall", "weights": np.ones(3), "keys": None})
    "featherbed.compress(matrix, ratio=8, method='opq', weights=weights)"
    """
    defaults = {"method": "auto", "measure": "recall"}
    shown = [
        f"{name}={value!r}" if isinstance(value, str | int | float) else f"{name}={name}"
        for name, value in settings.items()
        if value is not None and not (isinstance(value, str) and value == defaults.get(name))
    ]
    return f"featherbed.compress({', '.join(['matrix', *shown])})"


def _table(
    trial: Trial, choice: Entry, padding: int | None = None, keys: Keys | None = None
) -> PackedTable:
    made_by: dict[str, Any] = {
        "table": "compress",
        "method": choice.candidate.method.name,
        **choice.candidate.settings,
    }
    bands = scale_bands(choice.bands, trial.job.factor)
    return PackedTable(bands, trial.job.rows.dim, padding_idx=padding, keys=keys, made_by=made_by)


def _need_faiss() -> None:
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # threads that wait must not take the core another one works on
    for package in ("faiss", "numba", "scipy"):
        try:
            __import__(package)
        except ModuleNotFoundError:
            raise MissingExtra(package, "compress", "compressing a matrix") from None


def _job(
    rows: Rows,
    target: Target,
    generator: np.random.Generator | int | None,
    padding: int | None,
    tell: Tell,
) -> Job:
    tell("reading the matrix", 0.0)
    lengths = rows.lengths()
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
    job = Job(rows, counted, made, tell=tell, factor=factor)
    return replace(job, rank=effective_rank(job))


def _fit(trial: Trial, named: tuple[Any, Settings] | None, budget: int) -> Entry:
    """Return the best table within the budget; should its file be larger than foreseen, ask for less."""
    asked = budget
    for _ in range(6):
        choice = _within(trial, named, asked)
        table = _table(trial, choice)
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
    asked = asked and method.unless_asked() | asked
    rows, dim = trial.job.rows.count, trial.job.rows.dim
    fitting = method.settings(rows, dim, budget - HEADER, trial.job.rank)
    if asked:
        fitting = [settings for settings in fitting if asked.items() <= settings.items()]
        fitting = fitting or _asked(method, asked, rows, dim, trial.job.rank, budget)
    if not fitting:
        raise ArgumentError(
            f"{method.name}: {too_small(rows, dim, budget, trial.job.rank, [method])}"
        )
    listed = [
        Candidate(method, settings, method.size(rows, dim, **settings)) for settings in fitting[:3]
    ]
    if len(listed) > 1:
        trial.outlook(listed, listed[:1], fresh=True)
        listed = [max(map(trial.on_sample, listed), key=lambda entry: entry.quality).candidate]
    return finish(trial, [Entry(listed[0])])


def _asked(
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


def _reach(trial: Trial, named: tuple[Any, Settings] | None, target: Target) -> Entry:
    """Return the smallest table that is good enough: up the sizes by what the sample promises, then by what is measured."""
    dense = trial.job.rows.count * trial.job.rows.dim * 4
    budgets = [int(dense / ratio) for ratio in RATIOS]
    best: Entry | None = None
    for budget in budgets:
        trial.meter.plan({})  # how many sizes it will take is not known
        if not _promising(trial, named, budget, target):
            continue
        try:
            best = _fit(trial, named, budget)
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
        else [METHODS[name] for name in ("layered", "int8", "int4", "int3", "int2")]
    )
    for method in methods:
        for settings in method.settings(rows, dim, budget - HEADER, trial.job.rank)[:1]:
            found = trial.on_sample(
                Candidate(method, settings, method.size(rows, dim, **settings))
            ).point[target.measure]
            if target.reached(found + 0.02 if target.measure == "recall" else found * 0.97):
                return True
    return False
