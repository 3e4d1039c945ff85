"""What every loop keeps besides its steps: history, the best state, early stopping, checkpoints."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from featherbed.errors import TrainingError
from featherbed.optim.averaged import penalties_of
from featherbed.optim.lazy.rows import settle
from featherbed.tasks.checkpoints import Checkpoints
from featherbed.tasks.results import Result


def check_weights(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Raise ``TrainingError`` if every weight under a penalty is zero: all rows are the same then.

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
        "weights to keep (nonzeros) in place of lambda, or larger initial weights (start)"
        if lam > 0
        else "lower the learning rate, or start with larger weights (start)"
    )
    raise TrainingError(
        f"all {count:,} penalized weights became zero in epoch {epoch + 1}: {advice}"
    )


class Training:
    """The bookkeeping of one run: ``for epoch in training.epochs(n): ...; training.record(row)``, then ``finish()``.

    Epochs end ``patience`` after the lowest ``metric``. ``stepped`` are schedules and the like, with a state of their own;
    where one of them says it has not ``reached`` its end, an epoch cannot be the best. With ``checkpoints`` every epoch is
    saved, and a stopped run goes on from the last one. Leaving the block by Ctrl-C marks the result as interrupted; the
    best state so far is kept, in the first epoch the state as it is.
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
        stepped: Sequence[Any] = (),
    ) -> None:
        self.result, self.model, self.optimizer, self.stepped = (
            result,
            model,
            optimizer,
            list(stepped),
        )
        self.metric, self.patience = metric, patience
        self.checkpoints, self.generators = checkpoints, generators or {}
        self.best_state = copy.deepcopy(model.state_dict())
        self.first = 0
        self.seconds_before = 0.0
        self.started = time.perf_counter()
        if checkpoints is not None and checkpoints.latest() is not None:
            self._resume(checkpoints)

    def _resume(self, checkpoints: Checkpoints) -> None:
        saved = checkpoints.restore(
            model=self.model, optimizer=self.optimizer, generators=self.generators
        )
        self.first, extra = saved["step"], saved["extra"]
        self.best_state, self.seconds_before = extra["best_state"], extra["seconds"]
        self.result.history = extra["history"]
        for one, state in zip(self.stepped, extra["stepped"], strict=True):
            one.load_state_dict(state)

    def _best_epoch(self) -> int:
        """Return the epoch of the lowest metric among those that may be the best; the last one while none may."""
        rows = [row for row in self.result.history if row["reached"]] or self.result.history[-1:]
        return int(min(rows, key=lambda row: row[self.metric])["epoch"])

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs still to run."""
        for epoch in range(self.first, count):
            if self.result.history and epoch - self._best_epoch() > self.patience:
                return
            yield epoch

    @property
    def seconds(self) -> float:
        """Time spent, earlier sittings included."""
        return self.seconds_before + time.perf_counter() - self.started

    def record(self, row: dict[str, float]) -> None:
        """Take in an epoch's numbers; keep the state if it is the best so far; save a checkpoint.

        Raises ``TrainingError`` if no weight is left.
        """
        check_weights(self.model, self.optimizer, int(row["epoch"]))
        if row.get("parameters") == 0:
            raise TrainingError(
                f"the table lost all of its rows in epoch {int(row['epoch']) + 1}: "
                "choose settings that keep more of them"
            )
        row["reached"] = all(getattr(one, "reached", True) for one in self.stepped)
        self.result.history.append(row)
        if self._best_epoch() == row["epoch"]:
            self.best_state = copy.deepcopy(self.model.state_dict())
        if self.checkpoints is not None:
            extra = {
                "best_state": self.best_state,
                "history": self.result.history,
                "seconds": self.seconds,
            }
            extra["stepped"] = [one.state_dict() for one in self.stepped]
            step = int(row["epoch"]) + 1
            self.checkpoints.save(
                step,
                model=self.model,
                optimizer=self.optimizer,
                generators=self.generators,
                **extra,
            )

    def __enter__(self) -> Training:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        self.result.interrupted = kind is KeyboardInterrupt
        if kind is None or kind is KeyboardInterrupt:
            if (
                self.result.history or kind is None
            ):  # in the first epoch what has been learnt so far is all there is
                self.model.load_state_dict(self.best_state)
            self.result.seconds = self.seconds
        return kind is KeyboardInterrupt
