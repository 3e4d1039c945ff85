"""Rows that are streams: online NBANT, one pass, each batch trained and then gone, users and items arriving."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from featherbed.anchors import HalfNormal
from featherbed.apps.recommender.model import MatrixFactorization
from featherbed.apps.recommender.online import train_online
from featherbed.errors import ArgumentError
from featherbed.io.records import Ratings
from featherbed.optim import NonNegativeL1, Yogi
from featherbed.progress import show_progress
from featherbed.tables import GrowingAnchorTable
from featherbed.tables.arrivals import Arrivals
from featherbed.tables.growth import Growth
from research.harness.records import Outcome, Run
from research.sources.ratings import Source

NEEDED = (
    "dim",
    "biases",
    "anchors",
    "start",
    "lr",
    "lam",
    "lambda1",
    "lambda2",
    "batch",
    "steps",
    "every",
    "ahead",
    "mean",
)
Batch = tuple[Any, Any, Any]  # users, items, ratings


class Stream:
    """A model whose users and items appear with the ratings; rows of unseen ones are the mean of the others."""

    def __init__(self, settings: Mapping[str, Any], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        same = {
            "anchors": settings["anchors"],
            "init": HalfNormal(settings["start"]),
            "generator": generator,
        }
        self.tables = [GrowingAnchorTable(1, settings["dim"], **same) for _ in range(2)]
        self.model = MatrixFactorization(
            *self.tables, mean=settings["mean"], biases=settings["biases"]
        )
        penalties = {table.transform: NonNegativeL1(settings["lam"]) for table in self.tables}
        self.optimizer = Yogi(self.model.parameters(), settings["lr"], penalties=penalties)
        prices = {key: settings[key] for key in ("lambda1", "lambda2")}
        self.growth = Growth(self.tables, self.optimizer, **prices)
        self.biases = [
            bias for bias in (self.model.user_bias, self.model.item_bias) if bias is not None
        ]
        held = (
            zip(self.tables, self.biases, strict=True)
            if self.biases
            else ([table] for table in self.tables)
        )
        self.known = [Arrivals([*holders], self.optimizer) for holders in held]

    def train_loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch in training; whoever is new gets a row."""
        ids = [arrivals.admit(keys) for arrivals, keys in zip(self.known, batch[:2], strict=True)]
        return F.mse_loss(self.model(*ids), torch.from_numpy(batch[2]))

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch in evaluation."""
        self.model.eval()
        ids = [arrivals.ids(keys) for arrivals, keys in zip(self.known, batch[:2], strict=True)]
        value = F.mse_loss(self.model(*ids), torch.from_numpy(batch[2]))
        self.model.train()
        return value

    def parameters(self) -> int:
        """Count non-zero weights, anchors and biases."""
        biases = sum(len(arrivals) for arrivals in self.known) if self.biases else 0
        return sum(table.parameter_count() for table in self.tables) + biases

    def error(self, ratings: Ratings) -> float:
        """Return the mean squared error on ratings."""
        with torch.no_grad():
            return float(self.loss((ratings.users, ratings.items, ratings.values)))


def run_online(settings: Mapping[str, Any], seed: int, source: Source, run: Run) -> Outcome:
    """Pass over the training ratings as a shuffled stream; measure batches before training, and the test part at the end."""
    odd = sorted(set(NEEDED) ^ set(settings))
    if odd:
        raise ArgumentError(
            f"{', '.join(odd)}: missing or unknown, an online run takes {', '.join(NEEDED)}"
        )
    train, validation, test = source.split(seed)
    stream = Stream(settings, seed)
    order = np.random.default_rng(seed).permutation(len(train))
    parts = np.array_split(order, math.ceil(len(train) / settings["batch"]))
    batches: Iterator[Batch] = (
        (train.users[part], train.items[part], train.values[part]) for part in parts
    )
    loop = {key: settings[key] for key in ("steps", "every", "ahead")}
    rows = train_online(
        batches, stream.train_loss, stream.loss, stream.optimizer, growth=stream.growth, **loop
    )
    history: list[dict[str, Any]] = []
    with show_progress(run.title, len(parts), shown=run.shown) as shown:
        for row in rows:
            here = {
                "batch": int(row["batch"]),
                "before": round(row["before"], 5),
                "anchors": int(row["anchors"]),
            }
            history.append(here | {"users": len(stream.known[0]), "items": len(stream.known[1])})
            shown.update(advance=1, note=f"before {row['before']:.3f}, {here['anchors']} anchors")
    before = [row["before"] for row in history]
    anchors = [len(table.atoms) for table in stream.tables]
    measures = {
        "mse": stream.error(test),
        "validation": stream.error(validation),
        "before": float(np.mean(before)),
        "before_last": float(np.mean(before[-max(1, len(before) // 10) :])),
        "parameters": float(stream.parameters()),
        "nonzeros": float(stream.growth.nonzeros()),
        "anchors": float(np.mean(anchors)),
        "most_anchors": float(max(row["anchors"] for row in history)),
    }
    return Outcome(measures, history)
