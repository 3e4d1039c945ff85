"""Small recommenders side by side: settings searched on validation, the best run on the test part.

Every row of a search is a trial: optuna proposes its settings (validation error and bytes, both to
be small) from the trials of the same method before it. The rows of the final experiment follow
from the search: the best of each method within each budget, and the front of all methods.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import torch

from featherbed.errors import DataError
from research.harness.records import Outcome, Record, Run, load_record
from research.harness.settings import Experiment, Row
from research.runners.competitors import METHODS
from research.runners.storing import Task, by_popularity
from research.sources.ratings import Source

SEARCH = "recommenders/search"
NEAR = 1.01  # a trial counts as its smallest stored form whose error is within 1 % of its best
STARTUP = 4  # random trials before optuna proposes
MARGIN = 0.99  # of a budget may be used: other seeds may take a few bytes more
PLAIN = ("dense-2", "dense-4", "dense-8", "dense-16", "bayes")  # smaller d and fewer bits
SLACK = 1.05  # of a budget is open to plain rows, and to means over seeds: headers count too
Line = tuple[str, str, dict[str, Any]]  # trial, method, stored form


def task_of(settings: Mapping[str, Any], seed: int, source: Source) -> tuple[Task, Any]:
    """Return the task of a seed, and its test part."""
    train, validation, test = by_popularity(*source.split(seed))  # type: ignore[no-untyped-call]
    loop = {key: settings[key] for key in ("epochs", "batch", "patience")}
    return Task(train, validation, seed=seed, kinds=tuple(settings["kinds"]), **loop), test


def run_once(
    method: str, own: Mapping[str, Any], task: Task, test: Any = None, kinds: Any = None
) -> list[dict[str, Any]]:
    """Train once; return every stored form (of ``kinds``) with its errors."""
    competitor: Any = METHODS[method]
    stored = [one for one in competitor(task, own) if kinds is None or one.kind in kinds]
    lines = []
    for one in stored:
        line = {
            "kind": one.kind,
            "bytes": one.bytes,
            "parameters": one.parameters,
            "validation": one.error(task.validation),
        }
        lines.append(line if test is None else line | {"test": one.error(test)})
    return lines


def objectives(stored: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the error and the bytes a trial counts as.

    >>> objectives([{"validation": 0.8, "bytes": 100}, {"validation": 0.801, "bytes": 50}])
    (0.801, 50.0)
    """
    lines = [*stored]
    lowest = min(one["validation"] for one in lines)
    near = (one for one in lines if one["validation"] <= NEAR * lowest)
    best = min(near, key=lambda one: float(one["bytes"]))
    return best["validation"], float(best["bytes"])


def distribution(given: Any) -> optuna.distributions.BaseDistribution:
    """Return the distribution of a setting: a list of choices, or a range from low to high."""
    if isinstance(given, list):
        return optuna.distributions.CategoricalDistribution(given)
    if all(isinstance(given[end], int) for end in ("low", "high")):
        whole = given["low"], given["high"]
        return optuna.distributions.IntDistribution(*whole, log=given.get("log", False))
    return optuna.distributions.FloatDistribution(
        given["low"], given["high"], log=given.get("log", False)
    )


def run_trial(settings: Mapping[str, Any], seed: int, source: Source, run: Run) -> Outcome:
    """Run one trial of a method, on the validation part alone."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    method, number = settings["method"], settings["number"]
    space = {name: distribution(given) for name, given in settings["space"].items()}
    study = optuna.create_study(directions=["minimize", "minimize"])
    for before in range(number):
        path = run.results / f"{method}-{before}-seed-{seed}.json"
        if not path.exists():
            continue
        details = load_record(path)["details"]
        values = objectives(details["stored"])
        study.add_trial(
            optuna.trial.create_trial(params=details["chosen"], distributions=space, values=values)
        )
    sampler_seed = zlib.crc32(f"{method} {number}".encode())
    study.sampler = optuna.samplers.TPESampler(n_startup_trials=STARTUP, seed=sampler_seed)
    first = settings.get("first", [])
    if number < len(first):
        study.enqueue_trial(first[number])
    chosen = dict(study.ask(space).params)
    stored = run_once(method, chosen, task_of(settings, seed, source)[0])
    error, size = objectives(stored)
    run.say(f"{run.row}: {error:.4f} in {size:,.0f} bytes, {chosen}")
    details = {"method": method, "chosen": chosen, "stored": stored}
    return Outcome({"validation": error, "bytes": size}, [], details)


def run_final(settings: Mapping[str, Any], seed: int, source: Source, run: Run) -> Outcome:
    """Train what the search chose, and read the test part once for each stored form."""
    torch.set_num_threads(1)
    task, test = task_of(settings, seed, source)
    method, chosen = settings["method"], settings["chosen"]
    stored = run_once(method, chosen, task, test, settings["stored"])
    best = min(stored, key=lambda line: float(line["validation"]))
    measures = {
        "mse": best["test"],
        "validation": best["validation"],
        "bytes": float(best["bytes"]),
        "parameters": float(best["parameters"]),
    }
    return Outcome(measures, [], {"method": method, "chosen": chosen, "stored": stored})


def plan_final(experiment: Experiment, folder: Path) -> list[Row]:
    """Return the rows of the final experiment, as the search in ``folder`` chose them."""
    template = experiment.rows[0]
    trials = read_trials(folder / SEARCH)
    if not trials:
        raise DataError(f"{folder / SEARCH} holds no trials: run {SEARCH} first")
    rows = []
    for name, kinds in choose_trials(trials, template.settings["budgets"]).items():
        details = trials[name]["details"]
        own = {"method": details["method"], "chosen": details["chosen"], "stored": kinds}
        settings = {**template.settings, **own}
        rows.append(replace(template, name=name, label=name, settings=settings))
    return rows


def read_trials(folder: Path) -> dict[str, Record]:
    """Return the records of a search by trial."""
    names = ((path.stem.rpartition("-seed-")[0], path) for path in sorted(folder.glob("*.json")))
    return {name: load_record(path) for name, path in names}


def stored_lines(trials: Mapping[str, Record]) -> Iterator[Line]:
    """Yield (trial, method, stored form) of all trials."""
    for name, found in trials.items():
        details = found["details"]
        yield from ((name, details["method"], line) for line in details["stored"])


def front(lines: Iterable[Line], size: str) -> list[Line]:
    """Return the lines no other one beats in both size and validation error, smallest first."""
    kept: list[Line] = []
    for line in sorted(lines, key=lambda line: (line[2][size], line[2]["validation"])):
        if not kept or line[2]["validation"] < kept[-1][2]["validation"]:
            kept.append(line)
    return kept


def choose_trials(trials: Mapping[str, Record], budgets: list[int]) -> dict[str, list[str]]:
    """Return {trial: kinds}: the best of each method within each budget, and the front in bytes."""
    lines, picks = [*stored_lines(trials)], []
    for method in {line[1] for line in lines}:
        for budget in budgets:
            most = budget * (SLACK if method in PLAIN else MARGIN)
            within = [line for line in lines if line[1] == method and line[2]["bytes"] <= most]
            picks += [min(within, key=lambda line: float(line[2]["validation"]))] if within else []
    picks += [line for line in front(lines, "bytes") if line[2]["bytes"] <= max(budgets)]
    found: dict[str, set[str]] = {}
    for name, _, line in picks:
        found.setdefault(name, set()).add(line["kind"])
    return {name: sorted(found[name]) for name in sorted(found)}
