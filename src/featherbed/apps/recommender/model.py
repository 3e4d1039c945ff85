"""Matrix factorization on (user, item, rating) triples with any table on either side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.apps.checkpoints import Checkpoints
from featherbed.apps.recommender import fused
from featherbed.apps.recommender.store import BIASES
from featherbed.apps.results import Result
from featherbed.apps.training import Training
from featherbed.errors import ArgumentError
from featherbed.io.records import Ratings
from featherbed.progress import show_progress
from featherbed.sharing.sse import bare
from featherbed.tables import Table
from featherbed.tables.growth import Growth
from featherbed.tables.model import auxiliary_loss


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
def mean_squared_error(model: nn.Module, ratings: Ratings, batch: int = 65_536) -> float:
    """Return the mean squared error of a model's predictions."""
    if len(ratings) == 0:
        raise ArgumentError(
            "there are no ratings to measure the error on: give a validation set that is not empty"
        )
    model.eval()
    total = 0.0
    batches = (torch.split(part, batch) for part in to_tensors(ratings))
    for users, items, values in zip(*batches, strict=True):
        total += float(F.mse_loss(model(users, items), values, reduction="sum"))
    return total / len(ratings)


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
    if type(model) is MatrixFactorization and fused.supports(model, optimizer):
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
    total = 0.0
    for index in torch.split(torch.randperm(len(values), generator=generator), batch):
        optimizer.zero_grad()
        loss = F.mse_loss(model(users[index], items[index]), values[index])
        (loss + auxiliary_loss(model)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        total += float(loss.detach()) * len(index)
    return total / len(values)


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
    return sum(counts) if counts else None


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
        model,
        optimizer,
        metric="validation_mse" if growth is None else "objective",
        patience=patience,
        checkpoints=checkpoints,
        generators={"order": generator},
        schedulers=[*schedulers, *([] if growth is None else [growth])],
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
