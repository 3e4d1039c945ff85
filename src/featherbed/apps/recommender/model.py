"""Matrix factorization with any table on either side, trained by gradient descent."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.anchors import HalfNormal
from featherbed.apps.pipeline import Checkpoints, Result, Training, warmup_cosine, world_size
from featherbed.apps.recommender import fused, processes
from featherbed.apps.recommender.data import Split
from featherbed.apps.recommender.serve import BIASES
from featherbed.apps.recommender.settings import ADAM_LR, YOGI_LR, RecommenderSettings
from featherbed.errors import ArgumentError
from featherbed.io.records import Ratings, count_ids
from featherbed.optim import AdamW, Budget, NonNegativeL1, Yogi
from featherbed.progress import show_progress
from featherbed.sharing import SSE, bare
from featherbed.tables import (
    Growth,
    Table,
    auxiliary_loss,
    make_table,
    parse_spec,
    table_from_dense,
)


class MatrixFactorization(nn.Module):
    """score(u, i) = mean + b_u + b_i + U[u] . V[i]; the mean and the biases are optional.

    ``biases`` says where biases are stored: ``"none"``; ``"apart"``, in two vectors; ``"column"``,
    in the first column of the rows, so that they are stored and counted with the rows:

        score(u, i) = mean + U[u]_0 + V[i]_0 + sum_{k >= 1} U[u]_k V[i]_k

    >>> import featherbed as fb
    >>> users, items = fb.AnchorTable(100, 8, anchors=4), fb.DenseTable(50, 8)
    >>> model = MatrixFactorization(users, items, mean=3.5)
    >>> model(torch.tensor([1, 2]), torch.tensor([3, 4])).shape
    torch.Size([2])
    """

    user_bias: nn.Parameter | None
    item_bias: nn.Parameter | None
    parallel: Any = None  # what is called in its place, on several processes

    def __init__(
        self, users: Table, items: Table, *, mean: float = 0.0, biases: str = "none"
    ) -> None:
        super().__init__()
        if users.embedding_dim != items.embedding_dim:
            raise ArgumentError(
                f"users have width {users.embedding_dim}, items {items.embedding_dim}: "
                "they must agree"
            )
        if biases not in BIASES:
            raise ArgumentError(f"biases={biases!r}: use one of {', '.join(BIASES)}")
        self.users, self.items, self.biases = users, items, biases
        self.register_buffer("mean", torch.tensor(float(mean)))
        self.user_bias, self.item_bias = (
            nn.Parameter(torch.zeros(table.num_embeddings)) if biases == "apart" else None
            for table in (users, items)
        )

    def forward(self, users: Tensor, items: Tensor) -> Tensor:  # int64 [B], int64 [B] -> [B]
        """Return the predicted ratings."""
        left, right = self.users(users), self.items(items)
        if self.biases == "column":
            products = (left[:, 1:] * right[:, 1:]).sum(-1)
            return cast(Tensor, products + left[:, 0] + right[:, 0] + self.mean)
        scores: Tensor = (left * right).sum(-1) + self.mean
        if self.user_bias is not None and self.item_bias is not None:
            scores = scores + self.user_bias[users] + self.item_bias[items]
        return scores

    def scores(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the predicted ratings, by all processes together if there are several."""
        found: Tensor = (self.parallel or self)(users, items)
        return found

    def local(self) -> nn.Module:
        """Return the module whose state this process holds: itself, or its part of the rows."""
        if self.parallel is None:
            return self
        from featherbed.interop.torchrec import local_parts

        found: nn.Module = local_parts(self.parallel)
        return found

    @property
    def tables(self) -> tuple[Table, Table]:
        """The tables of users and items, without SSE."""
        return bare(self.users), bare(self.items)


def to_tensors(ratings: Ratings) -> tuple[Tensor, Tensor, Tensor]:
    """Return users, items and ratings as tensors."""
    users, items = (
        torch.from_numpy(ids.astype(np.int64, copy=False)) for ids in (ratings.users, ratings.items)
    )
    return users, items, torch.from_numpy(ratings.values)


@torch.no_grad()
def mean_squared_error(model: MatrixFactorization, ratings: Ratings, batch: int = 65_536) -> float:
    """Return the mean squared error of a model's predictions, over all processes."""
    if len(ratings) == 0:
        raise ArgumentError(
            "there are no ratings to measure the error on: give a validation set that is not empty"
        )
    model.eval()
    total = 0.0
    batches = (torch.split(part, batch) for part in to_tensors(ratings))
    mine = processes.share()
    for users, items, values in zip(*batches, strict=True):
        scores = model.scores(users[mine], items[mine])
        total += float(F.mse_loss(scores, values[mine], reduction="sum"))
    return processes.everywhere(total) / len(ratings)


def train_epoch(
    model: MatrixFactorization,
    optimizer: torch.optim.Optimizer,
    triples: tuple[Tensor, Tensor, Tensor],
    batch: int,
    generator: torch.Generator,
    schedulers: Sequence[Any] = (),
) -> float:
    """Train one epoch in an order drawn from ``generator``; return its mean squared error.

    Compiled loops take the same steps where they apply (see ``apps.recommender.fused``).
    """
    plain = type(model) is MatrixFactorization and model.parallel is None
    if plain and fused.supports(model, optimizer):
        return fused.epoch(model, optimizer, triples, batch, generator, schedulers)
    return plain_epoch(model, optimizer, triples, batch, generator, schedulers)


def plain_epoch(
    model: MatrixFactorization,
    optimizer: torch.optim.Optimizer,
    triples: tuple[Tensor, Tensor, Tensor],
    batch: int,
    generator: torch.Generator,
    schedulers: Sequence[Any] = (),
) -> float:
    """Train one epoch by autograd with any tables and optimizer: the reference implementation."""
    model.train()
    users, items, values = triples
    total, mine, world = 0.0, processes.share(), world_size()
    for whole in torch.split(torch.randperm(len(values), generator=generator), batch):
        optimizer.zero_grad()
        index = whole[mine]
        scores = model.scores(users[index], items[index])
        # processes average gradients: the mean over the whole batch, whatever their shares
        loss = F.mse_loss(scores, values[index], reduction="sum") * (world / len(whole))
        (loss + auxiliary_loss(model)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        total += float(loss.detach()) * len(whole) / world
    return processes.everywhere(total) / len(values)


def count_nonzeros(model: MatrixFactorization) -> int | None:
    """Return the number of nonzero weights in both tables, None for tables without sparse codes.

    >>> import featherbed as fb
    >>> users, items = fb.AnchorTable(10, 4, anchors=2), fb.DenseTable(5, 4)
    >>> count_nonzeros(MatrixFactorization(users, items))
    20
    """
    counts = [
        int(torch.count_nonzero(parameter))
        for table in model.tables
        if table.sparse_codes
        for parameter in table.penalized
    ]
    return int(processes.everywhere(sum(counts))) if counts else None


def fit_model(
    model: MatrixFactorization,
    optimizer: torch.optim.Optimizer,
    train: Ratings,
    validation: Ratings,
    *,
    epochs: int = 20,
    batch: int = 1024,
    patience: int = 3,
    seed: int = 0,
    schedulers: Sequence[Any] = (),
    growth: Growth | None = None,
    checkpoints: Checkpoints | None = None,
    settings: dict[str, Any] | None = None,
    progress: bool = True,
    name: str = "ratings",
) -> Result:
    """Train a model; stop ``patience`` epochs after the lowest validation error and restore it.

    Args:
        schedulers: step once per batch: learning rates, ``fb.Schedule``, ``fb.Budget`` (epochs
            before it is reached cannot be the best).
        growth: decides once per epoch; the best epoch is then that of the lowest objective.
        checkpoints: every epoch is saved, and a stopped run continues from the last one.
        settings: recorded in the result beside those of the loop.

    Ctrl-C ends training early with the best model so far.
    """
    if len(train) == 0:
        raise ArgumentError("there are no ratings to train on")
    generator = torch.Generator().manual_seed(seed)
    triples = to_tensors(train)
    loop = {"epochs": epochs, "batch": batch, "patience": patience}
    result = Result(name, {**loop, **(settings or {})}, seed)
    training = Training(
        result,
        model.local(),
        optimizer,
        metric="validation_mse" if growth is None else "objective",
        patience=patience,
        checkpoints=checkpoints,
        generators={"order": generator},
        schedulers=[*schedulers, *([] if growth is None else [growth])],
        together=model.parallel is not None,
    )
    display = show_progress(name, epochs, completed=training.start_epoch, shown=progress)
    with training, display as shown:
        for epoch in training.epochs(epochs):
            begin = time.perf_counter()
            error = train_epoch(model, optimizer, triples, batch, generator, schedulers)
            row = {"epoch": epoch, "train_mse": error, "seconds": time.perf_counter() - begin}
            row |= _measure_epoch(model, validation, growth)
            training.record(row)
            shown.update(advance=1, note=_epoch_note(row, len(train)))
    for table in () if growth is None else growth.tables:
        # the best state is restored: a pending change must not be applied
        table.on_training = table.on_gradient = None
    result.metrics["train"] = {"mse": mean_squared_error(model, train)}
    result.metrics["validation"] = {"mse": mean_squared_error(model, validation)}
    result.sizes = {
        "users": asdict(model.users.sizes(optimizer)),
        "items": asdict(model.items.sizes(optimizer)),
    }
    return result


def _measure_epoch(
    model: MatrixFactorization, validation: Ratings, growth: Growth | None
) -> dict[str, float]:
    row: dict[str, float] = {}
    if growth is not None:
        found = growth.step(lambda: mean_squared_error(model, validation))
        row |= {"anchors": found.anchors, "objective": found.objective}
    row["validation_mse"] = mean_squared_error(model, validation)
    row["parameters"] = model.users.parameter_count() + model.items.parameter_count()
    nonzeros = count_nonzeros(model)
    return row if nonzeros is None else {**row, "nonzeros": nonzeros}


def _epoch_note(row: dict[str, float], count: int) -> str:
    weights = f", {row['nonzeros']:,} weights" if "nonzeros" in row else ""
    speed = count / row["seconds"] / 1000
    return f"validation {row['validation_mse']:.4f}{weights}, {speed:,.0f}k/s"


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
    model.__dict__["parallel"] = processes.divide(model)  # no part of its state
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
        growing: Any = [getattr(t, "shard", t) for t in model.tables if t.grows]
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
