"""Tables by spec, trained by gradient descent: settings in, trained model out."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from featherbed.anchors import HalfNormal
from featherbed.apps.checkpoints import Checkpoints
from featherbed.apps.recommender.data import Split
from featherbed.apps.recommender.model import (
    MatrixFactorization,
    count_nonzeros,
    fit_model,
    mean_squared_error,
)
from featherbed.apps.recommender.settings import ADAM_LR, YOGI_LR, RecommenderSettings
from featherbed.apps.results import Result
from featherbed.apps.training import warmup_cosine
from featherbed.errors import ArgumentError
from featherbed.io.records import Ratings, count_ids
from featherbed.optim import AdamW, Budget, NonNegativeL1, Yogi
from featherbed.sharing import SSE
from featherbed.tables import Table
from featherbed.tables.growth import Growth
from featherbed.tables.spec import make_table, parse_spec, table_from_dense

INIT_STD = 0.1  # of the initial rows of tables without anchors


@dataclass(frozen=True)
class FittedTables:
    """A trained model, its optimizer and the record of its training."""

    model: MatrixFactorization
    optimizer: torch.optim.Optimizer
    result: Result

    @property
    def nonzeros(self) -> int | None:
        """Number of nonzero weights in both tables, None without anchors."""
        return count_nonzeros(self.model)


def check_tables(settings: RecommenderSettings) -> None:
    """Refuse tables that the settings do not fit."""
    table, anchors = settings.table, settings.anchors
    kinds = [parse_spec(spec or "dense")[0] for spec in (table.users, table.items)]
    if anchors.nonzeros is not None and not any(kind.sparse_codes for kind in kinds):
        raise ArgumentError(
            f"anchors.nonzeros={anchors.nonzeros}: neither {table.users!r} nor {table.items!r} "
            "has anchors, so there are no weights to count"
        )
    if settings.grows and not all(kind.grows for kind in kinds):
        raise ArgumentError(
            f"NBANT takes growinganchor on both sides, not {table.users!r} and {table.items!r}"
        )
    if settings.storage.weights not in (None, "float32") and all(kind.is_dense for kind in kinds):
        raise ArgumentError(
            "storage.weights is for the weights of codes, and plain rows have none: "
            "set storage.dictionary"
        )


def new_table(
    spec: str, counts: np.ndarray[Any, Any], dim: int, init_std: float, generator: torch.Generator
) -> Table:
    """Return a table for objects that occur ``counts`` times.

    It is fitted to short random rows; tables with sparse codes have small random weights.
    """
    kind, _ = parse_spec(spec)
    if kind.sparse_codes:
        init = {} if "init=" in spec else kind.init_settings([HalfNormal(init_std)])
        return make_table(spec, len(counts), dim, generator=generator, **init)
    extra: dict[str, Any] = {}
    if "counts" in inspect.signature(kind.__init__).parameters:
        extra["counts"] = torch.from_numpy(counts)
    rows = INIT_STD * torch.randn(len(counts), dim, generator=generator)
    return table_from_dense(spec, rows, **extra)


def new_model(settings: RecommenderSettings, ratings: Ratings, seed: int) -> MatrixFactorization:
    """Return the initial model of resolved settings."""
    table, training = settings.table, settings.training
    generator = torch.Generator().manual_seed(seed)
    sides = (
        (table.users, count_ids(ratings.users, ratings.num_users)),
        (table.items, count_ids(ratings.items, ratings.num_items)),
    )
    init_std = settings.anchors.init_std
    tables = [
        new_table(spec or "dense", counts, table.dim, init_std, generator) for spec, counts in sides
    ]
    shared = [
        cast(Table, SSE(one, p, generator=generator)) if p else one
        for one, p in zip(tables, (training.sse_users, training.sse_items), strict=True)
    ]
    mean = float(ratings.values.mean(dtype=np.float64)) if table.mean else 0.0
    return MatrixFactorization(*shared, mean=mean, biases=table.biases or "column")


def fit_tables(
    settings: RecommenderSettings,
    split: Split,
    *,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
    progress: bool = True,
    name: str = "ratings",
) -> FittedTables:
    """Train tables on the training part; the best epoch on the validation part is kept.

    Tables with anchors are trained by Yogi under the penalty ``anchors.lam``, all others by AdamW
    with weight decay: Yogi's large eps is slow for plain rows. ``anchors.nonzeros`` is reached by
    ``fb.Budget``; ``anchors.lambda1`` and ``anchors.lambda2`` are the costs of NBANT, which finds
    the number of anchors; its weights are then trained for ``anchors.refit`` epochs without
    penalty.

    >>> from featherbed.apps.recommender.data import make_split
    >>> from featherbed.io.records import make_ratings
    >>> values = {"table.dim": 4, "anchors.nonzeros": 300, "training.epochs": 2}
    >>> settings, split = RecommenderSettings.from_values(values), make_split(make_ratings(100, 50))
    >>> fit_tables(settings, split, progress=False).nonzeros <= 300
    True
    """
    settings = settings.resolve()
    check_tables(settings)
    training, anchors = settings.training, settings.anchors
    model = new_model(settings, split.train, seed)
    epochs, batch, steps = _steps(settings, split)
    optimizer, penalties = _new_optimizer(settings, model)
    schedulers: list[Any] = []
    budget = growth = None
    if training.cosine:
        schedulers.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps))
    if anchors.nonzeros is not None:
        budget = Budget(penalties, anchors.nonzeros, steps=steps)
        schedulers.append(budget)
    if anchors.lambda1 is not None and anchors.lambda2 is not None:
        growing: Any = [table for table in model.tables if table.grows]
        growth = Growth(growing, optimizer, lambda1=anchors.lambda1, lambda2=anchors.lambda2)
    result = fit_model(
        model,
        optimizer,
        split.train,
        split.validation,
        epochs=epochs,
        batch=batch,
        patience=epochs if budget is not None else training.patience or 0,
        seed=seed,
        schedulers=schedulers,
        growth=growth,
        checkpoints=checkpoints,
        settings=settings.values(),
        progress=progress,
        name=name,
    )
    fitted = FittedTables(model, optimizer, result)
    if anchors.refit and growth is not None and not result.interrupted:
        return refit_tables(fitted, settings, split, seed=seed, progress=progress, name=name)
    if budget is not None:
        budget.finish()
        for part in ("train", "validation"):
            result.metrics[part] = {"mse": mean_squared_error(model, getattr(split, part))}
    return fitted


def _new_optimizer(
    settings: RecommenderSettings, model: MatrixFactorization
) -> tuple[torch.optim.Optimizer, dict[torch.nn.Parameter, NonNegativeL1]]:
    """Return the optimizer of a model, and its penalties."""
    training = settings.training
    penalties = {
        parameter: NonNegativeL1(settings.anchors.lam or 0.0)
        for table in model.tables
        if table.sparse_codes
        for parameter in table.penalized
    }
    if penalties:
        lr = training.lr or YOGI_LR
        return Yogi(model.parameters(), lr, penalties=penalties), penalties
    decay = training.weight_decay or 0.0
    return AdamW(model.parameters(), training.lr or ADAM_LR, weight_decay=decay), {}


def _steps(
    settings: RecommenderSettings, split: Split, refit: bool = False
) -> tuple[int, int, int]:
    """Return the number of epochs, the batch size and the number of steps."""
    training = settings.training
    epochs = (settings.anchors.refit if refit else training.epochs) or 1
    batch = min(training.batch or 1, max(1, len(split.train)))
    return epochs, batch, epochs * math.ceil(len(split.train) / batch)


def refit_tables(
    fitted: FittedTables,
    settings: RecommenderSettings,
    split: Split,
    *,
    seed: int = 0,
    progress: bool = True,
    name: str = "ratings",
) -> FittedTables:
    """Train on for ``anchors.refit`` epochs without penalty; zero weights stay zero.

    The learning rate rises for a tenth of the steps and falls to zero; the best epoch on the
    validation part is kept.
    """
    model = fitted.model
    penalties = {p: NonNegativeL1(0.0) for table in model.tables for p in table.penalized}
    for parameter, penalty in penalties.items():
        penalty.freeze(parameter)
    optimizer = Yogi(model.parameters(), settings.training.lr or YOGI_LR, penalties=penalties)
    epochs, batch, steps = _steps(settings, split, refit=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, steps))
    result = fit_model(
        model,
        optimizer,
        split.train,
        split.validation,
        epochs=epochs,
        batch=batch,
        patience=epochs,
        seed=seed + 1,
        schedulers=[schedule],
        settings=settings.values(),
        progress=progress,
        name=f"{name}, refit",
    )
    before = len(fitted.result.history)
    later = ({**row, "epoch": before + row["epoch"]} for row in result.history)
    result.history = [*fitted.result.history, *later]
    return FittedTables(model, optimizer, result)
