"""Compare the competitors.

python experiments/recommenders/run.py search [METHOD ...] [--trials 8]   choose settings, on the validation part alone
python experiments/recommenders/run.py final                              three seeds of what was chosen; the test part, once

optuna proposes settings (validation error and bytes, both to be small). Trials and runs that have a result file are left alone.
"""

import argparse
import json
import os
import time
import tomllib
import zlib
from pathlib import Path

import numpy as np
import optuna
import torch
from competitors import METHODS
from storing import Task, by_popularity

from featherbed.packed.file import replacing
from featherbed.tasks.data import find_data, read_movielens
from featherbed.version import __version__

HERE = Path(__file__).parent
RESULTS = HERE / "results"
NEAR = 1.01  # a trial counts as its smallest stored form whose error is within 1 % of its best
STARTUP = 4  # trials at random before optuna proposes
MARGIN = 0.99  # of a budget, what may be chosen: other seeds may take a few bytes more
PLAIN = (
    "dense-2",
    "dense-4",
    "dense-8",
    "dense-16",
    "bayes",
)  # what "just use a smaller d and fewer bits" means
SLACK = 1.05  # of a budget is open to plain rows, and to means over seeds: 4 or 8 columns of 4 bits with headers are just above


def settings_file():
    return tomllib.loads((HERE / "settings.toml").read_text())


def task_of(data, settings, seed):
    """Return the task of a seed, and its test part."""
    train, validation, test = by_popularity(*data.split(seed))
    loop = {key: settings[key] for key in ("epochs", "batch", "patience")}
    return Task(train, validation, seed=seed, kinds=tuple(settings["kinds"]), **loop), test


def distributions(space):
    return {name: distribution(given) for name, given in space.items()}


def distribution(given):
    if isinstance(given, list):
        return optuna.distributions.CategoricalDistribution(given)
    whole = all(isinstance(given[end], int) for end in ("low", "high"))
    kind = optuna.distributions.IntDistribution if whole else optuna.distributions.FloatDistribution
    return kind(given["low"], given["high"], log=given.get("log", False))


def write(path, found):
    versions = {
        "featherbed": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "optuna": optuna.__version__,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        replacing(path) as descriptor,
        os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as file,
    ):
        file.write(
            json.dumps(
                {**found, "versions": versions, "threads": torch.get_num_threads()}, indent=1
            )
            + "\n"
        )


def objectives(stored):
    """Return the error and the bytes a trial counts as."""
    least = min(one["validation"] for one in stored)
    one = min(
        (one for one in stored if one["validation"] <= NEAR * least), key=lambda one: one["bytes"]
    )
    return one["validation"], float(one["bytes"])


def run_once(method, own, task, test=None, kinds=None):
    """Train once; return what is stored, in the kinds asked for, with its errors (the test part is read where it is given)."""
    begun = time.perf_counter()
    stored = [one for one in METHODS[method](task, own) if kinds is None or one.kind in kinds]
    seconds = time.perf_counter() - begun
    lines = []
    for one in stored:
        line = {
            "kind": one.kind,
            "bytes": one.bytes,
            "parameters": one.parameters,
            "validation": one.error(task.validation),
        }
        lines.append(line if test is None else line | {"test": one.error(test)})
    return {
        "method": method,
        "settings": own,
        "seed": task.seed,
        "seconds": seconds,
        "stored": lines,
    }


def search(method, settings, task, trials, folder=RESULTS / "search"):
    """Run the trials of a method that have no result file yet; the study is made anew from those that have."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space, first = distributions(settings["methods"][method]), settings["first"].get(method, [])
    study = optuna.create_study(directions=["minimize", "minimize"])
    for number in range(trials):
        path = folder / f"{method}-{number}.json"
        if path.exists():
            found = json.loads(path.read_text())
            values = objectives(found["stored"])
            study.add_trial(
                optuna.trial.create_trial(
                    params=found["settings"], distributions=space, values=values
                )
            )
            continue
        seed = zlib.crc32(f"{method} {number}".encode())
        study.sampler = optuna.samplers.TPESampler(n_startup_trials=STARTUP, seed=seed)
        if number < len(first):
            study.enqueue_trial(first[number])
        trial = study.ask(space)
        found = run_once(method, dict(trial.params), task)
        study.tell(trial, objectives(found["stored"]))
        write(path, found)
        error, size = objectives(found["stored"])
        print(
            f"{path.stem}: {error:.4f} in {size:,.0f} bytes, {found['seconds']:.0f} s, {trial.params}",
            flush=True,
        )


def trials_of(folder=RESULTS / "search"):
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def flat(trials):
    """Yield (trial, method, stored line) of all trials."""
    for name, found in trials.items():
        yield from ((name, found["method"], line) for line in found["stored"])


def front(lines, size):
    """Return the lines no other one beats in both size and validation error, from the smallest."""
    kept = []
    for line in sorted(lines, key=lambda line: (line[2][size], line[2]["validation"])):
        if not kept or line[2]["validation"] < kept[-1][2]["validation"]:
            kept.append(line)
    return kept


def chosen(trials, budgets):
    """Return {trial: kinds} for the final runs: the best of each method within each budget, and the front of all in bytes."""
    lines, picks = list(flat(trials)), []
    for method in {line[1] for line in lines}:
        for budget in budgets:
            most = budget * (SLACK if method in PLAIN else MARGIN)
            within = [line for line in lines if line[1] == method and line[2]["bytes"] <= most]
            picks += [min(within, key=lambda line: line[2]["validation"])] if within else []
    picks += [line for line in front(lines, "bytes") if line[2]["bytes"] <= max(budgets)]
    found = {}
    for name, _, line in picks:
        found.setdefault(name, set()).add(line["kind"])
    return {name: sorted(found[name]) for name in sorted(found)}


def final(settings, data, folder=RESULTS):
    trials = trials_of(folder / "search")
    todo = chosen(trials, settings["budgets"])
    for seed in settings["final_seeds"]:
        task, test = task_of(data, settings, seed)
        for name, kinds in todo.items():
            path = folder / "final" / f"{name}-seed-{seed}.json"
            if path.exists():
                continue
            found = run_once(trials[name]["method"], trials[name]["settings"], task, test, kinds)
            write(path, found)
            shown = ", ".join(
                f"{one['kind']} {one['test']:.4f} in {one['bytes']:,}" for one in found["stored"]
            )
            print(f"{path.stem}: {shown}, {found['seconds']:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["search", "final"])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--trials", type=int)
    given = parser.parse_args()
    unknown = set(given.methods) - set(METHODS)
    if unknown:
        parser.error(
            f"{', '.join(sorted(unknown))}: no such method; there are {', '.join(METHODS)}"
        )
    settings = settings_file()
    torch.set_num_threads(1)
    data = read_movielens(find_data(settings["data"]))
    if given.what == "final":
        final(settings, data)
        return
    task, _ = task_of(data, settings, settings["search_seed"])
    for method in given.methods or METHODS:
        search(method, settings, task, given.trials or settings["trials"])


if __name__ == "__main__":
    main()
