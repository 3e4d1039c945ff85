"""Sweeps of factorizations: settings chosen by the validation error of the first seeds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from featherbed.progress import show_progress
from research.harness.records import Outcome, Run
from research.runners.factorization import train_als, train_sgd
from research.sources.ratings import Source

SEARCH = 2  # the number of seeds that choose the settings


def combinations(sweep: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the values in a sweep.

    >>> [*combinations({"decay": [0.1, 0.2], "p": [0.5]})]
    [{'decay': 0.1, 'p': 0.5}, {'decay': 0.2, 'p': 0.5}]
    """
    for values in itertools.product(*sweep.values()):
        yield dict(zip(sweep, values, strict=True))


def run_sweep(settings: Mapping[str, Any], seed: int, source: Source, run: Run) -> Outcome:
    """Sweep the settings of a method on the first two of ``seeds``; run all seeds with the best."""
    history: list[dict[str, Any]] = []
    candidates = [*combinations(settings["sweep"])]
    search, rest = settings["seeds"][:SEARCH], settings["seeds"][SEARCH:]
    total = len(candidates) * len(search) + len(rest)
    with show_progress(run.title, total, shown=run.shown) as shown:

        def error(chosen: Mapping[str, Any], at: int) -> float:
            found = train_method(settings, chosen, seed + at, source)
            history.append({**chosen, "run_seed": seed + at, **found})
            shown.update(advance=1, note=f"validation {found['validation']:.4f}")
            return float(found["validation"])

        best = min(candidates, key=lambda one: np.mean([error(one, at) for at in search]))
        for at in rest:
            error(best, at)
    rows = [row for row in history if all(row[key] == value for key, value in best.items())]
    measures = {
        "rmse": float(np.mean([row["test"] for row in rows])),
        "validation": float(np.mean([row["validation"] for row in rows])),
        "epochs": float(np.mean([row["epoch"] for row in rows])),
        "epoch_seconds": float(np.median([row["seconds"] for row in rows])),
    }
    return Outcome(measures, history, {"chosen": best})


def train_method(
    settings: Mapping[str, Any], chosen: Mapping[str, Any], seed: int, source: Source
) -> dict[str, Any]:
    """Train a method once with the settings chosen, and return its errors."""
    loop = {key: settings[key] for key in ("model", "dim", "patience", "epochs")}
    parts, method = source.split(seed), settings["method"]
    graphs = source.relations if method in ("als-laplacian", "sse-graph") else (None, None)
    if method == "als-laplacian":
        return dict(train_als(source.ratings, parts, seed=seed, **loop, **chosen, graphs=graphs))
    return dict(
        train_sgd(
            source.ratings, parts, seed=seed, **loop, **chosen, graphs=graphs, lr=settings["lr"]
        )
    )
