"""Refitting what growth has found: the support of the weights is frozen, and they are trained without shrinkage."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from featherbed.optim import NonNegativeL1, Yogi
from featherbed.papers.records import Bar
from featherbed.tables import AnchorTable, GrowingAnchorTable
from featherbed.tasks.ratings import train
from featherbed.tasks.recipe import Recipe, Trained
from featherbed.tasks.splits import Split

WARMUP = 0.1  # of the steps, in which the learning rate rises


def refitted(trained: Trained, recipe: Recipe, split: Split, *, epochs: int, lr: float, seed: int, bar: Bar) -> Trained:
    """Train a model with anchors on, zeros staying zero and the others free, at a learning rate that falls to zero.

    The number of anchors and the support are those the first training ended with; the best epoch on the validation part stays.
    """
    model = trained.model
    tables = [table for table in trained.tables if isinstance(table, AnchorTable)]
    for table in tables:
        if isinstance(table, GrowingAnchorTable):
            table.on_training = table.on_gradient = None  # a change that growth had planned is not made
    penalties = {table.transform: NonNegativeL1(0.0) for table in tables}
    for parameter, penalty in penalties.items():
        penalty.freeze(parameter)
    optimizer = Yogi(model.parameters(), lr, penalties=penalties)
    steps = epochs * math.ceil(len(split.train) / recipe.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, steps))
    result = train(
        model,
        optimizer,
        split.train,
        split.validation,
        epochs=epochs,
        batch=recipe.batch,
        patience=epochs,
        seed=seed + 1,
        schedulers=[schedule],
        progress=bar.shown,
        name=f"{bar.name}, refit",
    )
    before = len(trained.result.history)
    result.history = [*trained.result.history, *({**row, "epoch": before + row["epoch"]} for row in result.history)]
    return replace(trained, optimizer=optimizer, result=result)


def share_of_rate(step: int, steps: int) -> float:
    """Return what part of the learning rate a step takes: rising over the first tenth, then half a cosine down to zero.

    >>> [round(share_of_rate(step, 20), 2) for step in (0, 1, 2, 11, 20)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    rising = max(1, round(WARMUP * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 + 0.5 * math.cos(math.pi * (step - rising) / max(1, steps - rising))
