"""Matrix factorization with any tables, trained as ``featherbed train ratings`` does it.

Besides settings of ``RecommenderSettings`` (by the last part of their names) a row may have
``prices`` [lambda1, lambda2], by which the objective of NBANT is measured;
``grows``, whether the number of anchors is found by them; ``clusters``, how many titles of each anchor are kept; and
``l1``, the weight of |E| on plain rows, lowered by subgradients (Sparse CBOW, Sun et al. 2016).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from featherbed.apps.recommender.data import Split
from featherbed.apps.recommender.model import (
    INIT_STD,
    FittedTables,
    MatrixFactorization,
    check_tables,
    fit_model,
    fit_tables,
    mean_squared_error,
)
from featherbed.apps.recommender.settings import ADAM_LR, RecommenderSettings
from featherbed.errors import ArgumentError
from featherbed.optim import AdamW
from featherbed.packed.inspect import objects_of, purity, zero_rows
from featherbed.tables import DenseTable, Table
from featherbed.theory.objective import nbant_objective
from research.harness.records import Outcome, Run
from research.sources.ratings import Source

OWN = ("prices", "grows", "clusters", "l1")
OLD_NAMES = {"start": "init_std", "decay": "weight_decay"}  # in settings of earlier runs
NEAR = 1.01  # an epoch is near the best when its error is at most so many times the lowest


class PulledRows(DenseTable):
    """Plain rows with ``l1`` times the sum of all |entries| added to the loss.

    >>> PulledRows(3, 2, l1=0.5).auxiliary().shape
    torch.Size([])
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, l1: float, **rest: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, **rest)
        self.l1 = l1

    def auxiliary(self) -> Tensor | None:
        """Return l1 times the sum of all |entries|."""
        return self.l1 * self.weight.abs().sum()


def run_recipe(settings: Mapping[str, Any], seed: int, source: Source, run: Run) -> Outcome:
    """Train a recipe, measure its error on the test part once, its size and, with prices, its objective."""
    own = {key: settings[key] for key in OWN if key in settings}
    recipe = settings_of({key: value for key, value in settings.items() if key not in OWN}, own)
    split = Split(*source.split(seed), method="random", seed=seed)
    trained = _trained(recipe, split, seed, own, run)
    users, items = trained.model.tables
    measures = {
        "mse": mean_squared_error(trained.model, split.test),
        "validation": trained.result.metrics["validation"]["mse"],
    }
    measures["parameters"] = float(users.parameter_count() + items.parameter_count())
    if users.sparse_codes and items.sparse_codes and trained.nonzeros is not None:
        counts = users.anchor_count, items.anchor_count
        measures |= {
            "nonzeros": float(trained.nonzeros),
            "user_anchors": counts[0],
            "item_anchors": counts[1],
        }
        measures["anchors"] = sum(counts) / 2
        if "prices" in own:
            prices = own["prices"]
            measures["objective"] = float(
                nbant_objective(measures["validation"], trained.nonzeros, sum(counts), *prices)
            )
    history = [{key: row[key] for key in row if key != "reached"} for row in trained.result.history]
    measures["epochs"] = float(epochs_to_near([row["validation_mse"] for row in history]))
    details = clusters(items, split, source, own["clusters"], measures) if "clusters" in own else {}
    return Outcome(measures, history, details)


def _trained(
    recipe: RecommenderSettings, split: Split, seed: int, own: Mapping[str, Any], run: Run
) -> FittedTables:
    if "l1" in own:
        found = pulled(recipe, split, seed, own["l1"], run)
    else:
        found = fit_tables(recipe, split, seed=seed, progress=run.shown, name=run.title)
    if found.result.interrupted:
        raise KeyboardInterrupt
    return found


def settings_of(settings: Mapping[str, Any], own: Mapping[str, Any]) -> RecommenderSettings:
    """Return the settings of a row, or say which one is unknown."""
    names = {line.name.rpartition(".")[2]: line.name for line in RecommenderSettings.describe()}
    names |= {old: names[new] for old, new in OLD_NAMES.items()}
    unknown = sorted(set(settings) - set(names))
    if unknown:
        known = ", ".join([*sorted(names), *OWN])
        raise ArgumentError(f"{', '.join(unknown)}: no setting of a recommender, use {known}")
    if own.get("grows") and len(own.get("prices", ())) != 2:
        raise ArgumentError("grows needs prices = [lambda1, lambda2], of an anchor and of a weight")
    values = {"table.users": "dense", "table.items": "dense"}
    values |= {names[name]: value for name, value in settings.items()}
    if own.get("grows"):
        values |= dict(zip(("anchors.lambda1", "anchors.lambda2"), own["prices"], strict=True))
    resolved = RecommenderSettings.from_values(values).resolve()
    check_tables(resolved)
    return resolved


def epochs_to_near(errors: list[float]) -> int:
    """Return after how many epochs the error was within 1 % of the lowest.

    >>> epochs_to_near([1.0, 0.804, 0.8, 0.81])
    2
    """
    return next(count for count, error in enumerate(errors, 1) if error <= NEAR * min(errors))


def pulled(
    recipe: RecommenderSettings, split: Split, seed: int, l1: float, run: Run
) -> FittedTables:
    """Train plain rows under an l1 term whose subgradient is taken with that of the loss."""
    generator = torch.Generator().manual_seed(seed)
    table, training = recipe.table, recipe.training
    tables: list[Table] = []
    for count in (split.train.num_users, split.train.num_items):
        rows = INIT_STD * torch.randn(count, table.dim, generator=generator)
        tables.append(PulledRows.from_dense(rows, l1=l1))
    mean = float(split.train.values.mean(dtype=np.float64)) if table.mean else 0.0
    model = MatrixFactorization(*tables, mean=mean, biases=table.biases or "column")
    optimizer = AdamW(model.parameters(), training.lr or ADAM_LR, weight_decay=0.0)
    loop: dict[str, Any] = {
        "epochs": training.epochs,
        "batch": training.batch,
        "patience": training.patience,
        "seed": seed,
    }
    result = fit_model(
        model, optimizer, split.train, split.validation, **loop, progress=run.shown, name=run.title
    )
    return FittedTables(model, optimizer, result)


def clusters(
    items: Table, split: Split, source: Source, count: int, measures: dict[str, float]
) -> dict[str, Any]:
    """Return the titles each anchor induces most, and measure how well clusters agree with genres."""
    packed, genres, titles = items.pack(), source.genres, source.titles
    found = purity(packed, genres)
    empty = zero_rows(packed, np.bincount(split.train.items, minlength=packed.rows))
    measures |= {
        "purity": found.share,
        "baseline": found.baseline,
        "zero_rows": float(len(empty.ids)),
    }
    measures["zero_share"] = len(empty.ids) / empty.objects
    anchors: list[dict[str, Any]] = []
    firsts: list[tuple[int, list[str]]] = []
    for anchor, (genre, inside, size) in found.majority.items():
        best = [one.id for one in objects_of(packed, anchor, count)]
        firsts += [(anchor, genres[film]) for film in best]
        first = [{"title": titles[film], "genres": genres[film]} for film in best]
        anchors.append(
            {"anchor": anchor, "genre": str(genre), "inside": inside, "films": size, "first": first}
        )
    measures["purity_first"] = purity(
        np.array([anchor for anchor, _ in firsts]), [own for _, own in firsts]
    ).share
    return {"clusters": anchors, "once": empty.once}
