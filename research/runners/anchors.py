"""Anchors for ratings: matrix factorization under a penalty, to a budget, or with NBANT's growth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

import featherbed as fb
from featherbed.apps.pipeline import Checkpoints
from featherbed.apps.recommender import model as ratings
from research.harness.records import Outcome, Run, outcome_of
from research.sources.ratings import Source


def run_anchors(settings: Mapping[str, Any], seed: int, source: Source, run: Run) -> Outcome:
    """Train anchors on both sides; read the test part once, at the end."""
    train, validation, test = source.split(seed)
    torch.set_num_threads(1)  # a second thread does not help batches of a thousand small rows
    generator = torch.Generator().manual_seed(seed)
    kind: Any = fb.GrowingAnchorTable if settings.get("grows") else fb.AnchorTable
    same = {
        "anchors": settings["anchors"],
        "init": fb.HalfNormal(settings["start"]),
        "generator": generator,
    }
    tables = [kind(n, settings["dim"], **same) for n in (train.num_users, train.num_items)]
    model = ratings.MatrixFactorization(*tables, mean=float(train.values.mean()), biases="apart")
    penalties = {table.transform: fb.NonNegativeL1(settings["lam"]) for table in tables}
    optimizer = fb.Yogi(model.parameters(), settings["lr"], penalties=penalties)
    steps = settings["epochs"] * math.ceil(len(train) / settings["batch"])
    prices = {key: settings[key] for key in ("lambda1", "lambda2") if key in settings}
    growth = fb.Growth(tables, optimizer, **prices) if settings.get("grows") else None
    result = ratings.fit_model(
        model,
        optimizer,
        train,
        validation,
        epochs=settings["epochs"],
        batch=settings["batch"],
        seed=seed,
        patience=settings["epochs"],
        schedulers=schedulers(settings, optimizer, penalties, steps),
        growth=growth,
        checkpoints=Checkpoints(run.work / f"{run.row}-seed-{seed}"),
        settings=dict(settings),
        name=run.title,
        progress=run.shown,
    )
    result.metrics["test"] = {"mse": ratings.mean_squared_error(model, test)}
    outcome = outcome_of(result)
    counts = [len(table.atoms) for table in tables]
    nonzeros = sum(int(torch.count_nonzero(table.transform)) for table in tables)
    outcome.measures["nonzeros"] = float(nonzeros)
    outcome.measures["anchors"] = sum(counts) / len(counts)
    outcome.details["anchors"] = counts
    return outcome


def schedulers(
    settings: Mapping[str, Any], optimizer: Any, penalties: Any, steps: int
) -> list[Any]:
    """Return the schedule of the learning rate and the budget of non-zero weights."""
    found: list[Any] = []
    if settings.get("schedule") == "cosine":
        found.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps))
    if "nonzeros" in settings:
        own = {key: settings[key] for key in ("how", "warmup", "until") if key in settings}
        found.append(fb.Budget(penalties, settings["nonzeros"], steps=steps, **own))
    return found
