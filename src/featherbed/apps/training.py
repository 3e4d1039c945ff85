"""Bookkeeping of training loops: history, best state, early stopping, checkpoints, schedules."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from featherbed.apps.checkpoints import Checkpoints
from featherbed.apps.results import Result
from featherbed.errors import TrainingError
from featherbed.optim import Penalty
from featherbed.optim.lazy.rows import settle
from featherbed.optim.wrappers import penalties_of


def check_weights(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Raise ``TrainingError`` if every penalized weight is zero: all rows are equal then.

    >>> import featherbed as fb
    >>> table = fb.AnchorTable(5, 4, anchors=2)
    >>> optimizer = fb.Yogi(table.parameters(), penalties={table.transform: fb.NonNegativeL1(0.1)})
    >>> check_weights(table, optimizer, epoch=0)
    >>> _ = table.transform.data.zero_()
    >>> check_weights(table, optimizer, epoch=0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    featherbed.errors.TrainingError: all 10 penalized weights became zero in epoch 1: the penalty...
    """
    penalties = penalties_of(optimizer)
    settle(model)
    if not penalties or any(bool(torch.any(parameter.detach() != 0)) for parameter in penalties):
        return
    lam = max(penalty.lam for penalty in penalties.values())
    count = sum(parameter.numel() for parameter in penalties)
    advice = (
        f"the penalty, lambda = {lam:g}, is too strong: try lambda = {lam / 10:g}, a number of "
        "nonzero weights (nonzeros) instead of lambda, or larger initial weights (init_std)"
        if lam > 0
        else "lower the learning rate, or use larger initial weights (init_std)"
    )
    raise TrainingError(
        f"all {count:,} penalized weights became zero in epoch {epoch + 1}: {advice}"
    )


class Training:
    """The bookkeeping of one run: ``for epoch in training.epochs(n): ...; training.record(row)``.

    Training stops ``patience`` epochs after the lowest ``metric``. ``schedulers`` are objects with
    ``state_dict``; while one of them has ``reached`` false, an epoch cannot be the best. With
    ``checkpoints`` every epoch is saved, and a stopped run continues from the last one. Ctrl-C
    inside the block marks the result as interrupted; the best state so far is kept, in the first
    epoch the current one.
    """

    def __init__(
        self,
        result: Result,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        metric: str,
        patience: int,
        checkpoints: Checkpoints | None = None,
        generators: dict[str, torch.Generator] | None = None,
        schedulers: Sequence[Any] = (),
    ) -> None:
        self.result, self.model, self.optimizer = result, model, optimizer
        self.metric, self.patience, self.schedulers = metric, patience, list(schedulers)
        self.checkpoints, self.generators = checkpoints, generators or {}
        self.best_state = copy.deepcopy(model.state_dict())
        self.start_epoch = 0
        self.earlier_seconds = 0.0
        self.start_time = time.perf_counter()
        if checkpoints is not None and checkpoints.latest() is not None:
            self._resume(checkpoints)

    def _resume(self, checkpoints: Checkpoints) -> None:
        saved = checkpoints.restore(
            model=self.model, optimizer=self.optimizer, generators=self.generators
        )
        self.start_epoch, extra = saved["step"], saved["extra"]
        self.best_state, self.earlier_seconds = extra["best_state"], extra["seconds"]
        self.result.history = extra["history"]
        for scheduler, state in zip(self.schedulers, extra["schedulers"], strict=True):
            scheduler.load_state_dict(state)

    def _best_epoch(self) -> int:
        """Return the epoch of the lowest metric among those that may be the best, else the last."""
        rows = [row for row in self.result.history if row["reached"]] or self.result.history[-1:]
        return int(min(rows, key=lambda row: row[self.metric])["epoch"])

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs still to run."""
        for epoch in range(self.start_epoch, count):
            if self.result.history and epoch - self._best_epoch() > self.patience:
                return
            yield epoch

    @property
    def seconds(self) -> float:
        """Training time, earlier sessions included."""
        return self.earlier_seconds + time.perf_counter() - self.start_time

    def record(self, row: dict[str, float]) -> None:
        """Record an epoch, keep its state if it is the best so far, save a checkpoint.

        Raises ``TrainingError`` if no weight or no row is left.
        """
        check_weights(self.model, self.optimizer, int(row["epoch"]))
        if row.get("parameters") == 0:
            raise TrainingError(
                f"the table lost all of its rows in epoch {int(row['epoch']) + 1}: "
                "choose settings that keep more of them"
            )
        row["reached"] = all(getattr(one, "reached", True) for one in self.schedulers)
        self.result.history.append(row)
        if self._best_epoch() == row["epoch"]:
            self.best_state = copy.deepcopy(self.model.state_dict())
        if self.checkpoints is not None:
            self.checkpoints.save(
                int(row["epoch"]) + 1,
                model=self.model,
                optimizer=self.optimizer,
                generators=self.generators,
                best_state=self.best_state,
                history=self.result.history,
                seconds=self.seconds,
                schedulers=[one.state_dict() for one in self.schedulers],
            )

    def __enter__(self) -> Training:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        self.result.interrupted = kind is KeyboardInterrupt
        if kind is None or kind is KeyboardInterrupt:
            if self.result.history or kind is None:  # the first epoch has no other state
                self.model.load_state_dict(self.best_state)
            self.result.seconds = self.seconds
        return kind is KeyboardInterrupt


def warmup_cosine(step: int, steps: int, warmup: float = 0.1) -> float:
    """Return the factor of the learning rate at a step: linear warm-up, then half a cosine to zero.

    >>> [round(warmup_cosine(step, 20), 2) for step in (0, 1, 2, 11, 20)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return half_cosine((step - rising) / max(1, steps - rising))


def half_cosine(progress: float) -> float:
    """Return the factor of the learning rate at a fraction of training, from 1 to 0.

    >>> [round(half_cosine(progress), 2) for progress in (0.0, 0.5, 1.0)]
    [1.0, 0.5, 0.0]
    """
    return 0.5 + 0.5 * math.cos(math.pi * progress)


class PenaltyFreeze:
    """Ends penalties after ``end`` steps: zeros stay zero, the rest is trained without penalty."""

    def __init__(self, penalties: dict[nn.Parameter, Penalty], end: int) -> None:
        self.penalties, self.end, self.steps = penalties, max(1, end), 0

    @property
    def reached(self) -> bool:
        """Whether the penalties have ended."""
        return self.steps >= self.end

    def step(self) -> None:
        """Count one step of the optimizer."""
        self.steps += 1
        if self.steps == self.end:
            for parameter, penalty in self.penalties.items():
                penalty.freeze(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and the state of each penalty."""
        states = [(penalty.lam, penalty.kept) for penalty in self.penalties.values()]
        return {"steps": self.steps, "penalties": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; restore that of the model first."""
        self.steps = int(state["steps"])
        for item, (lam, kept) in zip(self.penalties.items(), state["penalties"], strict=True):
            parameter, penalty = item
            penalty.lam = lam
            penalty.keep(parameter, kept)
