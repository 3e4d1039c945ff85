"""Planted rows: a table whose rows are a few planted anchors each, learnt from noisy copies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import featherbed as fb
from featherbed.progress import show_progress
from featherbed.theory import nbant_objective
from research.harness.records import Outcome, Run


class Planted:
    """Rows that are sums of a few planted anchors each, observed with noise."""

    def __init__(self, settings: Mapping[str, Any], seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        rows, dim, planted = settings["rows"], settings["dim"], settings["planted"]
        self.atoms = torch.randn(planted, dim, generator=self.generator)
        transform = torch.zeros(rows, planted)
        places = (
            torch.rand(rows, planted, generator=self.generator)
            .topk(settings["weights"], dim=1)
            .indices
        )
        transform.scatter_(1, places, torch.rand(places.shape, generator=self.generator) + 0.5)
        self.rows, self.nonzeros = transform @ self.atoms, int(torch.count_nonzero(transform))
        self.noise_std = settings["noise"] * float(self.rows.std())
        self.validation_ids = torch.randperm(rows, generator=self.generator)[: rows // 4]
        self.validation_rows = self.sample(self.validation_ids)

    def sample(self, ids: Tensor) -> Tensor:
        """Return noisy copies of the rows of ids."""
        shape = len(ids), self.rows.shape[1]
        noise = self.noise_std * torch.randn(shape, generator=self.generator)
        return torch.add(self.rows[ids], noise)

    def loss(self, table: fb.Table, ids: Tensor, rows: Tensor) -> Tensor:
        """Return the mean squared distance of a table's rows to the given ones."""
        distance: Tensor = (table(ids) - rows).square().sum(1).mean()
        return distance

    @torch.no_grad()
    def validation(self, table: fb.Table) -> float:
        """Return the loss on the validation rows."""
        table.eval()
        value = float(self.loss(table, self.validation_ids, self.validation_rows))
        table.train()
        return value

    @torch.no_grad()
    def error(self, table: fb.Table) -> float:
        """Return the relative distance to the planted rows."""
        return float((table.weight - self.rows).norm() / self.rows.norm())


def run_planted(settings: Mapping[str, Any], seed: int, source: object, run: Run) -> Outcome:
    """Learn planted rows with a given number of anchors, or with NBANT's growth.

    With prices the epoch of the lowest objective counts, otherwise the last one.
    """
    torch.set_num_threads(1)
    data = Planted(settings, seed)
    generator = torch.Generator().manual_seed(seed)
    table = fb.GrowingAnchorTable(
        settings["rows"],
        settings["dim"],
        anchors=settings["anchors"],
        max_anchors=max(100, settings["anchors"]),
        init=fb.HalfNormal(settings["start"]),
        generator=generator,
        sparse=True,
    )
    training = Training(settings, table, generator)
    history: list[dict[str, Any]] = []
    with show_progress(run.title, settings["epochs"], shown=run.shown) as shown:
        for epoch in range(settings["epochs"]):
            training.epoch(epoch, data)
            history.append(measured(settings, epoch, data, table))
            shown.update(advance=1, note=f"error {history[-1]['error']:.2%}")
    best = (
        min(history, key=lambda row: float(row["objective"]))
        if "objective" in history[0]
        else history[-1]
    )
    return Outcome({**best, "planted_nonzeros": float(data.nonzeros)}, history)


class Training:
    """The optimizer, schedules and growth of a run on planted rows."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        table: fb.GrowingAnchorTable,
        generator: torch.Generator,
    ) -> None:
        self.settings, self.table, self.generator = settings, table, generator
        self.penalties = {table.transform: fb.NonNegativeL1(settings["lam"])}
        self.optimizer = fb.Yogi(table.parameters(), settings["lr"], penalties=self.penalties)
        steps = settings["epochs"] * math.ceil(settings["rows"] / settings["batch"])
        self.budget = (
            fb.Budget(self.penalties, settings["nonzeros"], steps=steps)
            if "nonzeros" in settings
            else None
        )
        names = ("lambda1", "lambda2", "rule", "restarts")
        own = {key: settings[key] for key in names if key in settings}
        self.growth = (
            fb.Growth(table, self.optimizer, **own, generator=generator)
            if settings.get("grows")
            else None
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.learning_rate)

    def learning_rate(self, epoch: int) -> float:
        """Return the factor of the learning rate: constant at first, then half a cosine."""
        flat = self.settings.get("flat", 0.0)
        share = max(0.0, (epoch / self.settings["epochs"] - flat) / (1 - flat))
        return 0.5 + 0.5 * math.cos(math.pi * share)

    def epoch(self, epoch: int, data: Planted) -> None:
        """Train for one epoch; freeze the support where the refit begins."""
        settings = self.settings
        if "refit" in settings and epoch == int(settings["refit"] * settings["epochs"]):
            for parameter, penalty in self.penalties.items():
                penalty.freeze(parameter)
        order = torch.randperm(settings["rows"], generator=self.generator)
        for ids in torch.split(order, settings["batch"]):
            self.optimizer.zero_grad()
            loss = data.loss(self.table, ids, data.sample(ids))
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            if self.budget is not None:
                self.budget.step()
        self.schedule.step()
        if self.growth is not None:
            self.growth.step(lambda: data.validation(self.table))


def measured(
    settings: Mapping[str, Any], epoch: int, data: Planted, table: fb.GrowingAnchorTable
) -> dict[str, Any]:
    """Return the measures of a table after an epoch."""
    loss, nonzeros = data.validation(table), int(torch.count_nonzero(table.transform))
    found = {
        "epoch": epoch,
        "loss": loss,
        "nonzeros": nonzeros,
        "anchors": table.anchor_count,
        "error": data.error(table),
    }
    if "lambda1" in settings:
        prices = settings["lambda1"], settings["lambda2"]
        found["objective"] = nbant_objective(loss, nonzeros, table.anchor_count, *prices)
    return found
