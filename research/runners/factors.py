"""Rows that are factors: matrix factorisation one rating at a time, with dropout or shared ids, or by least squares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from featherbed.errors import ArgumentError
from featherbed.progress import show_progress
from research.harness.records import Outcome, Run
from research.runners.factorization import MODELS, train_als, train_sgd
from research.sources.ratings import Source

WAYS = {
    "sgd": {"model", "dim", "lr", "decay", "epochs", "patience", "drop", "p"},
    "sse-graph": {"model", "dim", "lr", "decay", "epochs", "patience", "drop", "p", "rho"},
    "als": {"model", "dim", "decay", "pull", "epochs", "patience"},
}


def run_factors(settings: Mapping[str, Any], seed: int, source: Source, run: Run) -> Outcome:
    """Train factors and measure the root of the mean squared error on the test part, once."""
    how, own = checked(settings)
    parts, history = source.split(seed), []
    with show_progress(run.title, own["epochs"], shown=run.shown) as shown:

        def after(epoch: int, error: float) -> None:
            history.append({"epoch": epoch, "validation": round(error, 6)})
            shown.update(advance=1, note=f"validation {error:.4f}")

        loop: dict[str, Any] = {**own, "seed": seed, "after": after}
        if how == "als":
            found = train_als(source.ratings, parts, **loop, graphs=source.relations)
        else:
            graphs = source.relations if how == "sse-graph" else (None, None)
            found = train_sgd(source.ratings, parts, **loop, graphs=graphs)
    measures = {"rmse": found["test"], "validation": found["validation"], "train": found["train"]}
    return Outcome(
        measures | {"epochs": found["epoch"] + 1.0, "epoch_seconds": found["seconds"]}, history
    )


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
