"""A table of any spec in matrix factorization and in a language model, by plain training loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

import featherbed as fb
from featherbed.apps.language.model import LSTMModel
from featherbed.apps.language.settings import LanguageSettings
from featherbed.apps.language.train import FitOptions, Schedule, perplexity, train_model
from featherbed.apps.pipeline import Checkpoints, Result
from featherbed.apps.recommender import model as ratings
from featherbed.io.texts import Corpus
from research.harness.records import Outcome, Run, outcome_of
from research.sources.ratings import Source


def make_scaled(settings: Mapping[str, Any], rows: int, generator: torch.Generator) -> fb.Table:
    """Return the table of a row, with the initial standard deviation the settings give."""
    table: fb.Table = fb.make_table(settings["table"], rows, settings["dim"], generator=generator)
    if "init_std" in settings:
        table.scale_initial_rows(settings["init_std"])
    return table


def make_optimizer(
    model: torch.nn.Module, tables: Sequence[Any], settings: Mapping[str, Any]
) -> Any:
    """Return Adam or Yogi, with a penalty on the anchor weights where ``lam`` is given."""
    lam, lr = settings.get("lam"), settings["lr"]
    penalties = {} if lam is None else {table.transform: fb.NonNegativeL1(lam) for table in tables}
    if settings["optimizer"] == "adam":
        return fb.Proximal(torch.optim.Adam(model.parameters(), lr=lr), penalties)
    return fb.Yogi(
        model.parameters(),
        lr,
        weight_decay=settings.get("weight_decay", 0.0),
        penalties=penalties,
        prox=settings.get("prox", "preconditioned"),
    )


def run_ratings(settings: Mapping[str, Any], seed: int, source: Source, run: Run) -> Outcome:
    """Train matrix factorization; read the test part once, at the end."""
    train, validation, test = source.split(seed)
    torch.set_num_threads(1)  # a second thread does not help batches of a thousand small rows
    generator = torch.Generator().manual_seed(seed)
    tables = [make_scaled(settings, n, generator) for n in (train.num_users, train.num_items)]
    model = ratings.MatrixFactorization(
        *tables,
        mean=float(train.values.mean()) if settings["mean"] else 0.0,
        biases="apart" if settings["biases"] else "none",
    )
    result = ratings.fit_model(
        model,
        make_optimizer(model, tables, settings),
        train,
        validation,
        epochs=settings["epochs"],
        batch=settings["batch"],
        seed=seed,
        checkpoints=Checkpoints(run.work / f"{run.row}-seed-{seed}"),
        settings=dict(settings),
        name=run.title,
        progress=run.shown,
    )
    result.metrics["test"] = {"mse": ratings.mean_squared_error(model, test)}
    return outcome_of(result)


def run_language(settings: Mapping[str, Any], seed: int, source: Corpus, run: Run) -> Outcome:
    """Train a language model; measure its perplexity before training, and on the test part once."""
    generator = torch.Generator().manual_seed(seed)
    table = make_scaled(settings, len(source.words), generator)
    torch.manual_seed(seed)
    model = LSTMModel(table, hidden=settings["dim"])
    before = perplexity(model, source.validation)
    optimizer = make_optimizer(model, (table,), settings)
    result = train_lstm(model, optimizer, source, settings, seed, run)
    result.metrics["untrained"] = {"perplexity": before}
    result.metrics["test"] = {"perplexity": perplexity(model, source.test)}
    return outcome_of(result)


def train_lstm(
    model: LSTMModel,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    settings: Mapping[str, Any],
    seed: int,
    run: Run,
    schedule: Schedule | None = None,
) -> Result:
    """Train a language model by the settings of a row; record validation and sizes."""
    names = [name for name in ("epochs", "batch", "length", "patience") if name in settings]
    values = {f"training.{name}": settings[name] for name in names}
    values |= {"table.spec": "dense", "table.dim": settings["dim"]}
    if "clip" in settings:
        values["optimizer.clip"] = settings["clip"]
    checkpoints = Checkpoints(run.work / f"{run.row}-seed-{seed}")
    options = FitOptions(seed, checkpoints, run.shown, run.title)
    chosen = LanguageSettings.from_values(values)
    result = train_model(model, optimizer, corpus, chosen, options, schedule=schedule)
    result.settings = dict(settings)
    result.metrics["validation"] = {"perplexity": perplexity(model, corpus.validation)}
    result.sizes = {"words": asdict(model.table.sizes(optimizer))}
    return result
