"""Signs drawn for shared losses of fixed factors: the empirical side of a Rademacher complexity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import featherbed as fb
from featherbed.apps.recommender import model as ratings
from featherbed.theory.sharing import Factors, Transition, bias_term, rademacher_draws
from research.harness.records import Outcome, Run
from research.sources.ratings import Source

QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}


def run_rademacher(settings: Mapping[str, Any], seed: int, source: Source, run: Run) -> Outcome:
    """Train factors, then draw signs for their shared losses at every probability."""
    torch.set_num_threads(1)  # a second thread does not help batches of a thousand small rows
    train, validation, _ = source.split(seed)
    factors, model = trained_factors(train, settings, seed)
    probabilities = settings["probabilities"]
    losses = np.empty((len(train), len(probabilities)))
    for column, p in enumerate(probabilities):
        laws = Transition(train.num_users, p), Transition(train.num_items, p)
        losses[:, column] = factors.losses(train.users, train.items, train.values, *laws)
    values = rademacher_draws(losses, settings["draws"], generator=np.random.default_rng(seed))
    history: list[dict[str, Any]] = []
    for column, p in enumerate(probabilities):
        of_p = losses[:, column]
        row = {"p": p, "mean": float(values[:, column].mean())}
        row |= {
            name: float(np.quantile(values[:, column], share)) for name, share in QUANTILES.items()
        }
        row["predicted"] = math.sqrt(2 / math.pi) * float(np.linalg.norm(of_p)) / len(of_p)
        row |= {"loss": float(of_p.mean()), "spread": float(of_p.std())}
        row["bias"] = bias_term(of_p, losses[:, 0]) / len(of_p)
        history.append(row)
    measures = {
        "train_mse": ratings.mean_squared_error(model, train),
        "validation": ratings.mean_squared_error(model, validation),
    }
    return Outcome(measures, history)


def trained_factors(
    train: Any, settings: Mapping[str, Any], seed: int
) -> tuple[Factors, ratings.MatrixFactorization]:
    """Return factors and their model after plain training (Adam, no sharing, no weight decay)."""
    generator = torch.Generator().manual_seed(seed)
    tables = [
        fb.DenseTable(rows, settings["dim"], generator=generator)
        for rows in (train.num_users, train.num_items)
    ]
    with torch.no_grad():
        for table in tables:
            table.weight.normal_(std=settings["std"], generator=generator)
    mean = float(train.values.mean()) if settings["centred"] else 0.0
    model = ratings.MatrixFactorization(
        *tables, mean=mean, biases="apart" if settings["centred"] else "none"
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=settings["lr"])
    triples = ratings.to_tensors(train)
    for _ in range(settings["epochs"]):
        ratings.train_epoch(model, optimizer, triples, settings["batch"], generator)
    sides = [
        bias.detach().numpy()
        for bias in (model.user_bias, model.item_bias)
        if bias is not None and settings["centred"]
    ]
    rows = [table.weight.detach().numpy() for table in tables]
    factors = Factors(*rows, biases=(sides[0], sides[1]) if sides else None, mean=mean)
    return factors, model
