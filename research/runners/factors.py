"""Rows that are factors: matrix factorisation one rating at a time, with dropout or shared ids, or by least squares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from featherbed.errors import ArgumentError
from featherbed.progress import show_progress
from research.harness.records import Outcome, Run
from research.runners.factorization import MODELS, Parts, train_als, train_sgd
from research.runners.sweep import combinations
from research.sources.ratings import Source

WAYS = {
    "sgd": {"model", "dim", "lr", "decay", "epochs", "patience", "drop", "p"},
    "sse-graph": {"model", "dim", "lr", "decay", "epochs", "patience", "drop", "p", "rho"},
    "als": {"model", "dim", "decay", "pull", "laplacian", "epochs", "patience"},
}


def run_factors(settings: Mapping[str, Any], seed: int, source: Source, run: Run) -> Outcome:
    """Train factors and measure the root of the mean squared error on the test part, once.

    Lists in ``sweep`` are swept by the validation error of the same seed.
    """
    sweep = settings.get("sweep", {})
    given = {key: value for key, value in settings.items() if key != "sweep"}
    train, validation, _ = source.split(seed)
    errors: list[float] = []
    candidates = [*combinations(sweep)]
    for chosen in candidates if sweep else ():
        how, own = checked({**given, **chosen})
        blind = (train, validation, validation)  # candidates never see the test part
        errors.append(fit_factors(how, {**own, "seed": seed}, source, blind)["validation"])
    best = candidates[int(np.argmin(errors))] if errors else {}
    how, own = checked({**given, **best})
    history: list[dict[str, float]] = []
    with show_progress(run.title, own["epochs"], shown=run.shown) as shown:

        def after(epoch: int, error: float) -> None:
            history.append({"epoch": epoch, "validation": round(error, 6)})
            shown.update(advance=1, note=f"validation {error:.4f}")

        loop: dict[str, Any] = {**own, "seed": seed, "after": after}
        found = fit_factors(how, loop, source, source.split(seed))
    measures = {"rmse": found["test"], "validation": found["validation"], "train": found["train"]}
    measures |= {"epochs": found["epoch"] + 1.0, "epoch_seconds": found["seconds"]}
    return Outcome(measures, history, {"chosen": best} if sweep else {})


def fit_factors(
    how: str, loop: Mapping[str, Any], source: Source, parts: Parts
) -> dict[str, float]:
    """Train factors by ``how``, least squares or steps, and return the errors of the parts."""
    if how == "als":
        return train_als(source.ratings, parts, **loop, graphs=source.relations)
    graphs = source.relations if how == "sse-graph" else (None, None)
    return train_sgd(source.ratings, parts, **loop, graphs=graphs)


def checked(settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the way of training and its own settings; settings of other ways are refused."""
    how = settings.get("how", "sgd")
    if how not in WAYS:
        raise ArgumentError(f"how={how!r}: factors are trained by {', '.join(WAYS)}")
    own = {key: value for key, value in settings.items() if key != "how"}
    if how == "als":
        own.pop("lr", None)  # common to all rows of a paper, but least squares have no steps
    unknown = sorted(set(own) - WAYS[how])
    if unknown:
        raise ArgumentError(
            f"{', '.join(unknown)}: no setting of {how}, which takes {', '.join(sorted(WAYS[how]))}"
        )
    if own.get("model") not in MODELS:
        raise ArgumentError(f"model={own.get('model')!r}: use one of {', '.join(MODELS)}")
    return how, own
