"""Ratings by the published algorithm of ANT: no mean, no biases, Xavier, small batches, Yogi.

Settings: ``users`` and ``items`` (specs), ``dim``, ``lr``, ``lam`` (of the proximal step on anchor
weights), ``batch``, ``epochs``, ``patience``, ``halve_every`` (steps after which the learning rate
is halved); ``rule`` with ``lambda1`` and ``lambda2`` for NBANT; ``mixed`` = {width, blocks, alpha}
for mixed dimensions; ``l1``, the weight of |E| on plain rows, lowered by subgradients (Sparse CBOW).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import featherbed as fb
from featherbed.apps.pipeline import Checkpoints
from featherbed.apps.recommender import model as ratings
from featherbed.io.records import Ratings
from research.harness.records import Outcome, Run, outcome_of
from research.runners.ratings import PulledRows, epochs_to_near
from research.sources.ratings import Source


def run_literal(settings: Mapping[str, Any], seed: int, source: Source, run: Run) -> Outcome:
    """Train matrix factorization; read the test part once, at the end."""
    train, validation, test = source.split(seed)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    tables = make_tables(settings, train, generator)
    model = ratings.MatrixFactorization(*tables)
    anchored = [table for table in tables if table.penalized]
    penalties = {table.transform: fb.NonNegativeL1(settings["lam"]) for table in anchored}
    optimizer = fb.Yogi(model.parameters(), settings["lr"], penalties=penalties)
    growth = None
    if "rule" in settings:
        prices = {name: settings[name] for name in ("lambda1", "lambda2")}
        growth = fb.Growth(tables, optimizer, **prices, rule=settings["rule"])
    result = ratings.fit_model(
        model,
        optimizer,
        train,
        validation,
        epochs=settings["epochs"],
        batch=settings["batch"],
        patience=settings["patience"],
        seed=seed,
        schedulers=[torch.optim.lr_scheduler.StepLR(optimizer, settings["halve_every"], 0.5)],
        growth=growth,
        checkpoints=Checkpoints(run.work / f"{run.row}-seed-{seed}"),
        settings=dict(settings),
        name=run.title,
        progress=run.shown,
    )
    result.metrics["test"] = {"mse": ratings.mean_squared_error(model, test)}
    outcome = outcome_of(result)
    errors = [row["validation_mse"] for row in outcome.history]
    outcome.measures["epochs"] = float(epochs_to_near(errors))
    if anchored:
        counts = [table.anchor_count for table in tables]
        outcome.measures["user_anchors"], outcome.measures["item_anchors"] = map(float, counts)
        outcome.measures["nonzeros"] = float(ratings.count_nonzeros(model) or 0)
    return outcome


def make_tables(
    settings: Mapping[str, Any], train: Ratings, generator: torch.Generator
) -> list[Any]:
    """Return the tables of users and items, filled as Glorot and Bengio (2010) say.

    Weights of anchors start with either sign, as in the authors' code: the first proximal step
    sets the negative half to zero.
    """
    tables: list[Any] = []
    for side, ids, rows in (
        ("users", train.users, train.num_users),
        ("items", train.items, train.num_items),
    ):
        given = {"generator": generator}
        if "mixed" in settings:
            counts = np.bincount(ids, minlength=rows)
            dims = mixed_dims(counts, **settings["mixed"])
            spec = f"mixed:dims=[{','.join(map(str, dims))}]"
            width = settings["mixed"]["width"]
            table = fb.make_table(spec, rows, width, counts=torch.from_numpy(counts), **given)
        elif "l1" in settings:
            table = PulledRows(rows, settings["dim"], l1=settings["l1"], **given)
        else:
            table = fb.make_table(settings[side], rows, settings["dim"], **given)
        fill_tables(table, generator)
        tables.append(table)
    return tables


@torch.no_grad()
def fill_tables(table: Any, generator: torch.Generator) -> None:
    """Draw every matrix of a table from ±sqrt(6 / (rows + columns))."""
    if table.penalized:
        fb.Xavier().fill(table.atoms, table.transform, False, generator)
        return
    for parameter in table.parameters():
        bound = math.sqrt(6.0 / sum(parameter.shape))
        parameter.uniform_(-bound, bound, generator=generator)


def mixed_dims(counts: Any, width: int, blocks: int, alpha: float) -> list[int]:
    """Return the widths of blocks with equal shares of the ratings, popularity^alpha, powers of 2.

    A block of n ids with a share 1 / k of the ratings has the popularity 1 / (k n), so its width is
    ``width`` (n_1 / n)^alpha for the n_1 ids of the most popular block (Ginart et al. 2019).

    >>> mixed_dims(np.array([8, 4, 4, 2, 2, 2, 2]), width=16, blocks=3, alpha=0.5)
    [16, 16, 8]
    """
    ordered = np.sort(counts)[::-1]
    ends = np.searchsorted(np.cumsum(ordered), np.arange(1, blocks + 1) / blocks * ordered.sum())
    sizes = np.maximum(1, np.diff(np.concatenate([[-1], np.minimum(ends, len(counts) - 1)])))
    wide = width * (sizes[0] / sizes) ** alpha
    return [min(width, max(1, 2 ** round(math.log2(one)))) for one in wide.tolist()]
