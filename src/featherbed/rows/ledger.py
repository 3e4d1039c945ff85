"""Ledger: the rows of one parameter, each brought up to date before it is read or changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from featherbed.rows.fast import in_kernels, settle_rows
from featherbed.rows.history import History

BLOCK = 1 << 18  # rows settled at once


class Shrinkage(Protocol):
    """A penalty, as far as rows that catch up need it; ``kept`` [V, s]: entries that may be other than zero (None: all)."""

    kept: Tensor | None

    def shrink(self, x: Tensor, threshold: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the proximal point of x, the rows ``ids`` of the parameter, for thresholds lam * step."""


@dataclass
class Account:
    """What the optimizer keeps for the rows of a parameter, and how it moves them.

    ``momentum`` [V, s] (None: rows without a gradient do not move), ``second`` [V, s] the squares behind the preconditioner
    s = sqrt(second) + eps (None: 1), ``metric``: thresholds are divided by s; ``penalty`` (or None) and ``kind``, by which
    compiled loops know it ("none", "nonnegative", "l1"; None for others).
    """

    momentum: Tensor | None
    second: Tensor | None
    eps: float
    metric: bool
    penalty: Shrinkage | None
    kind: str | None


class Ledger:
    """When each row was last up to date (``stamps`` [V]), what it has missed since, and all ``steps`` of the optimizer."""

    def __init__(self, weight: Tensor, account: Account, beta: float, steps: int) -> None:
        self.weight, self.account, self.beta = weight, account, beta
        self.history = History(beta)
        self.stamps = torch.zeros(len(weight), dtype=torch.int32, device=weight.device)
        self.steps = steps

    @property
    def now(self) -> int:
        """Steps so far that moved rows without a gradient."""
        return self.history.now

    @property
    def behind(self) -> bool:
        """Whether any row may have missed a step."""
        return len(self.history) > 0

    def settled(self, ids: Tensor) -> Tensor:  # [n] -> [n, s]
        """Return rows as they are now, without writing anything."""
        if not self.behind:
            return self.weight.detach()[ids]
        if in_kernels(self.weight, wide=True) and self.account.kind is not None:
            return settle_rows(self, ids, write=False)
        return self._replayed(ids)[0]

    def settle(self, ids: Tensor | None = None) -> None:  # [n], distinct
        """Bring rows (all by default) up to date where they are stored."""
        if not self.behind:
            return
        if ids is not None:
            self._settle(ids)
            return
        for start in range(0, len(self.weight), BLOCK):
            self._settle(
                torch.arange(start, min(start + BLOCK, len(self.weight)), device=self.weight.device)
            )
        self.history.clear()

    def _settle(self, ids: Tensor) -> None:
        if in_kernels(self.weight, wide=True) and self.account.kind is not None:
            settle_rows(self, ids, write=True)
            return
        rows, momentum = self._replayed(ids)
        self.weight.data[ids] = rows
        if self.account.momentum is not None and momentum is not None:
            self.account.momentum[ids] = momentum
        self.stamps[ids] = self.now

    def _replayed(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return rows and their momentum after the steps they missed: one after the other while momentum matters, then at once.

        The reference every faster way must equal.
        """
        history, account = self.history, self.account
        rows = self.weight.detach()[ids]
        at = (
            self.stamps[ids].long() - history.begin
        ).cpu()  # place of the last step each row has seen
        missed = len(history) - at
        scale = 1.0 if account.second is None else account.second[ids].sqrt() + account.eps
        momentum = None if account.momentum is None else account.momentum[ids]
        table = {
            name: torch.from_numpy(history.column(name))
            for name in ("decay", "move", "threshold", "debt", "fall")
        }

        def column(name: str, place: Tensor) -> Tensor:
            return table[name][place][:, None].to(rows)

        def shrunk(values: Tensor, threshold: Tensor) -> Tensor:
            if account.penalty is None:
                return values
            return account.penalty.shrink(
                values, threshold / scale if account.metric else threshold, ids
            )

        steps = min(int(missed.max()) if len(missed) else 0, history.reach)
        for k in range(1, steps + 1):
            late = (missed >= k).to(rows.device)[:, None]
            place = (at + k).clamp(max=len(history))
            moved = column("decay", place) * rows
            if momentum is not None:
                moved = moved - column("move", place) * (history.powers[k] * momentum) / scale
            rows = torch.where(late, shrunk(moved, column("threshold", place)), rows)
        rest = (at + history.reach).clamp(max=len(history))  # the place each row has come to
        end = torch.full_like(rest, len(history))
        fallen = (table["fall"][end] - table["fall"][rest]).exp()
        owed = table["debt"][end] - table["debt"][rest] * fallen
        late = (rest < end).to(rows.device)[:, None]
        rows = torch.where(
            late, shrunk(rows * fallen[:, None].to(rows), owed[:, None].to(rows)), rows
        )
        if momentum is not None:
            momentum = momentum * (history.beta ** missed.double())[:, None].to(rows)
        return rows, momentum
