"""Ratings: matrix factorisation on (user, item, rating) triples, any table on either side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.progress import show_progress
from featherbed.serve.folder import BIASES
from featherbed.sharing.sse import bare
from featherbed.tables.anchor import AnchorTable
from featherbed.tables.growth import Growth
from featherbed.tables.model import auxiliary_loss
from featherbed.tables.table import Table
from featherbed.tasks import fused
from featherbed.tasks.checkpoints import Checkpoints
from featherbed.tasks.data import Ratings
from featherbed.tasks.results import Result
from featherbed.tasks.training import Training


class MatrixFactorization(nn.Module):
    """score(u, i) = mean + b_u + b_i + U[u] . V[i]; the mean and the biases are optional.

    Where biases stand: ``"none"`` of them; ``"apart"``, two vectors of their own; ``"column"``, the first column of the
    rows, so that whatever stores the rows stores and counts them too:

        score(u, i) = mean + U[u]_0 + V[i]_0 + sum_{k >= 1} U[u]_k V[i]_k

    >>> import featherbed as fb
    >>> model = MatrixFactorization(fb.AnchorTable(100, 8, anchors=4), fb.DenseTable(50, 8), mean=3.5)
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
                f"users have width {users.embedding_dim}, items {items.embedding_dim}: they must agree"
            )
        if biases not in BIASES:
            raise ArgumentError(f"biases={biases!r}: use one of {', '.join(BIASES)}")
        self.users, self.items, self.biases = users, items, biases
        self.register_buffer("mean", torch.tensor(float(mean)))
        self.user_bias = (
            nn.Parameter(torch.zeros(users.num_embeddings)) if biases == "apart" else None
        )
        self.item_bias = (
            nn.Parameter(torch.zeros(items.num_embeddings)) if biases == "apart" else None
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
    for users, items, values in zip(
        *(torch.split(part, batch) for part in to_tensors(ratings)), strict=True
    ):
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
    """Pass over all triples once, in an order drawn from ``generator``; return the mean squared error on the way.

    Where compiled loops fit (see ``featherbed.tasks.fused``) they take the same steps.
    """
    if type(model) is MatrixFactorization and fused.fits(model, optimizer):
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
    """Pass over all triples once by autograd, whatever the tables and the optimizer: the reference."""
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
    """Return how many weights over anchors are other than zero, in both tables; None where neither has anchors.

    >>> import featherbed as fb
    >>> count_nonzeros(MatrixFactorization(fb.AnchorTable(10, 4, anchors=2), fb.DenseTable(5, 4)))
    20
    """
    tables = bare(model.users), bare(model.items)
    counts = [
        int(torch.count_nonzero(table.transform))
        for table in tables
        if isinstance(table, AnchorTable)
    ]
    return sum(counts) if counts else None


def train(
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
    """Fit the model; stop ``patience`` epochs after the best validation error; leave the best parameters in the model.

    ``schedulers`` step once a batch: schedules of learning rates, ``fb.Schedule``, ``fb.Budget`` (epochs before it
    is reached cannot be the best). With ``growth``, which decides once an epoch, the best epoch is that of the lowest
    objective. With ``checkpoints`` every epoch is saved and a stopped run goes on from the last. Ctrl-C ends training early
    with the best model so far. ``settings`` are kept in the result beside the loop's own.
    """
    if len(train) == 0:
        raise ArgumentError("there are no ratings to train on")
    generator = torch.Generator().manual_seed(seed)
    triples = to_tensors(train)
    result = Result(
        name, {"epochs": epochs, "batch": batch, "patience": patience, **(settings or {})}, seed
    )
    training = Training(
        result,
        model,
        optimizer,
        metric="validation_mse" if growth is None else "objective",
        patience=patience,
        checkpoints=checkpoints,
        generators={"order": generator},
        stepped=[*schedulers, *([] if growth is None else [growth])],
    )
    display = show_progress(name, epochs, completed=training.first, shown=progress)
    with training, display as shown:
        for epoch in training.epochs(epochs):
            begun = time.perf_counter()
            row = {
                "epoch": epoch,
                "train_mse": train_epoch(model, optimizer, triples, batch, generator, schedulers),
            }
            row["seconds"] = time.perf_counter() - begun
            if growth is not None:
                found = growth.step(lambda: mean_squared_error(model, validation))
                row |= {"anchors": found.anchors, "objective": found.objective}
            row["validation_mse"] = mean_squared_error(model, validation)
            row["parameters"] = model.users.parameter_count() + model.items.parameter_count()
            nonzeros = count_nonzeros(model)
            if nonzeros is not None:
                row["nonzeros"] = nonzeros
            training.record(row)
            rate, weights = (
                len(train) / row["seconds"] / 1000,
                "" if nonzeros is None else f", {nonzeros:,} weights",
            )
            shown.update(
                advance=1, note=f"validation {row['validation_mse']:.4f}{weights}, {rate:,.0f}k/s"
            )
    for table in () if growth is None else growth.tables:
        table.on_training = table.on_gradient = (
            None  # the best state is back: a change that was due is not made
        )
    result.metrics["train"] = {"mse": mean_squared_error(model, train)}
    result.metrics["validation"] = {"mse": mean_squared_error(model, validation)}
    result.sizes = {
        "users": asdict(model.users.sizes(optimizer)),
        "items": asdict(model.items.sizes(optimizer)),
    }
    return result
