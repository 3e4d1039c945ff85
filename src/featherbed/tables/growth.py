"""Growth: the number of anchors follows the NBANT objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.optim import Optimizer

from featherbed.checks import check_choice, check_integer
from featherbed.errors import ArgumentError
from featherbed.optim.processes import group_of, total
from featherbed.optim.row_optimizer import owners
from featherbed.tables.growing import (
    AnchorSnapshot,
    Departure,
    GradientMoment,
    GrowingAnchorTable,
    departures,
)
from featherbed.theory.objective import check_lambdas, nbant_objective

RULES = ("trial", "trend")
# the attributes that a state keeps as they are
PLAIN = ("restarts", "_young", "_trial", "_direction", "_failed", "_rest", "_pause", "_due")
OVER = 1 << 30  # a change that starts over
CANDIDATES = 3  # anchors whose removal is measured, those of the lowest expected cost


@dataclass(frozen=True)
class GrowthRecord:
    """The measurements of one ``Growth.step`` and its decision: grow, shrink, undo or keep."""

    anchors: int
    loss: float
    nonzeros: int
    objective: float
    decision: str


class Growth:
    """Adds and removes anchors to minimize loss + lambda2 ||T||_0 + (lambda1 - lambda2) K (NBANT).

    Liang et al. 2021, equation 5 and algorithm 2, with the mean validation loss. Call ``step`` once
    per epoch, in any training loop. Tables are tied: all have the same number of anchors, which
    change together, and K is the total. A change is applied at the next look-up in training, so a
    checkpoint written after ``step`` is the model that was evaluated.

    ``rule="trend"`` is the paper's: ``window`` non-increasing objectives add ``delta`` anchors,
    ``window`` non-decreasing ones remove as many; it mistakes ordinary learning for a need of
    anchors. ``rule="trial"``: new anchors are tried for one epoch, and removed if the objective
    rose and is lower without them. Once an epoch improves the objective by less than the price of
    an anchor, anchors whose removal lowers the objective are removed, and others are removed on
    trial for one epoch. If neither helps, the tables may restart with the directions of their
    anchors (at most ``restarts`` times; kept if the objective improves), which resets weights
    fitted to fewer anchors.

    A new anchor points in the direction of the largest row gradients (the top eigenvector of their
    d x d second moment) and has weights of zero. The weights of a removed anchor go to the most
    similar one; the anchor is kept with its weights and optimizer state, to be restored later.

    Args:
        tables: one or several fb.GrowingAnchorTable.
        optimizer: the optimizer that trains them, or None.
        lambda1, lambda2: the prices of an anchor and of a nonzero weight, lambda1 > lambda2 > 0.
        delta: number of anchors added or removed at a time.
        window: number of objectives in a trend; also the number of epochs that new anchors are
            protected from removal, and of the first pause after failed trials.
        generator: random generator for the weights after a restart.

    >>> import featherbed as fb
    >>> table = fb.GrowingAnchorTable(100, 8, anchors=4)
    >>> optimizer = fb.Yogi(table.parameters(), penalties={table.transform: fb.NonNegativeL1(1e-5)})
    >>> growth = Growth([table], optimizer, lambda1=1e-2, lambda2=1e-5, rule="trend")
    >>> [growth.step(loss).decision for loss in (3.0, 2.0, 1.0)], growth.anchor_count
    (['keep', 'keep', 'grow'], 4)
    >>> rows = table(torch.tensor([1, 2]))  # training goes on
    >>> growth.anchor_count
    5
    """

    def __init__(
        self,
        tables: Sequence[GrowingAnchorTable] | GrowingAnchorTable,
        optimizer: Optimizer | None,
        *,
        lambda1: float,
        lambda2: float,
        delta: int = 1,
        window: int = 3,
        rule: str = "trial",
        restarts: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        self.tables = list(tables) if isinstance(tables, Iterable) else [tables]
        if not self.tables or not all(isinstance(t, GrowingAnchorTable) for t in self.tables):
            raise ArgumentError(f"tables={tables!r}: give one or several fb.GrowingAnchorTable")
        if len({id(table) for table in self.tables}) < len(self.tables):
            raise ArgumentError("a table is given twice: give each once")
        if len({table.anchor_count for table in self.tables}) > 1:
            raise ArgumentError(
                "tied tables start with as many anchors each, not "
                f"{[t.anchor_count for t in self.tables]}"
            )
        check_choice("rule", rule, RULES)
        check_integer("restarts", restarts, 0)
        groups = [group for owner in owners(optimizer) for group in owner.param_groups]
        steps = {id(parameter) for group in groups for parameter in group["params"]}
        if steps and any(id(table.transform) not in steps for table in self.tables):
            raise ArgumentError(
                "the optimizer does not hold the transform of every table: pass it the parameters "
                "of all"
            )
        if rule == "trend" and check_integer("window", window) < 2:
            raise ArgumentError(f"window={window}: a trend takes at least 2 objectives")
        check_lambdas(lambda1, lambda2)
        self.optimizer, self.rule = optimizer, rule
        self.lambda1, self.lambda2 = float(lambda1), float(lambda2)
        self.delta, self.window = check_integer("delta", delta), check_integer("window", window)
        self.restarts, self.generator = restarts, generator
        self.history: list[GrowthRecord] = []
        # removals of anchors, the last one last: a departure for each table
        self.removed: list[list[Departure]] = []
        self._moments = [GradientMoment(table) for table in self.tables]
        # for how many epochs each of the last anchors is still left to learn
        self._young: list[int] = []
        # the objective before, and by how many anchors K has changed
        self._trial: tuple[float, int] | None = None
        # snapshots of tables that started over, while that is on trial
        self._before: list[AnchorSnapshot] = []
        self._direction, self._failed, self._rest = 1, 0, 0
        self._pause = (
            self.window
        )  # epochs without a trial after trials both ways have failed: longer each time
        self._due = 0  # by how many anchors K is to change with the next look-up in training

    @property
    def anchor_count(self) -> int:
        """K of each table."""
        return self.tables[0].anchor_count

    def nonzeros(self) -> int:
        """Return ||T||_0 over all tables."""
        own = torch.tensor([int(torch.count_nonzero(table.transform)) for table in self.tables])
        return int(total(own, group_of(table.transform for table in self.tables)).sum())

    def step(self, evaluate: Callable[[], float] | float) -> GrowthRecord:
        """Measure the objective and decide; ``evaluate()`` returns the mean validation loss."""
        if not callable(evaluate) and self.rule != "trend":
            raise ArgumentError(
                "rule='trial' evaluates more than once: give a function that returns the "
                "validation loss"
            )
        self._change()  # if it is still due, because nothing was trained since
        self._young = [left - 1 for left in self._young if left > 1]
        found = self._measured(evaluate)
        found = self._by_trend(found) if self.rule == "trend" else self._by_trial(found, evaluate)
        self.history.append(found)
        for table in self.tables:
            table.on_training = self._change if self._due else None
        return found

    def _measured(self, evaluate: Any) -> GrowthRecord:
        given = evaluate() if callable(evaluate) else evaluate
        given = given.detach() if isinstance(given, torch.Tensor) else given
        try:
            loss = float("no" if isinstance(given, bool | str) else given)
        except (TypeError, ValueError):
            raise ArgumentError(
                f"the validation loss is {given!r}: give or return one number"
            ) from None
        group = group_of(table.transform for table in self.tables)
        if group is not None:  # processes decide alike, by the mean of their losses
            losses = total(torch.tensor([loss, 1.0], dtype=torch.float64), group)
            loss = float(losses[0] / losses[1])
        if not math.isfinite(loss):
            cause = "is the validation set empty, or has training diverged?"
            raise ArgumentError(f"the validation loss is {loss}: {cause}")
        nonzeros, anchors = self.nonzeros(), self.anchor_count * len(self.tables)
        value = nbant_objective(loss, nonzeros, anchors, self.lambda1, self.lambda2)
        return GrowthRecord(self.anchor_count, loss, nonzeros, float(value), "keep")

    def _by_trend(self, found: GrowthRecord) -> GrowthRecord:
        recent = [*(m.objective for m in self.history), found.objective][-self.window :]
        for direction, decision in ((1, "grow"), (-1, "shrink")):
            trend = all(direction * a >= direction * b for a, b in pairwise(recent))
            if len(recent) == self.window and trend and self._room(direction):
                self._due = direction * self._room(direction)
                return replace(found, decision=decision)
        return found

    def _by_trial(self, found: GrowthRecord, evaluate: Any) -> GrowthRecord:
        decision = "keep"
        fell = self.history[-1].objective - found.objective if self.history else math.inf
        # an epoch teaches less than an anchor costs
        slow = fell < (self.lambda1 - self.lambda2) * len(self.tables)
        if self._before:
            self._rest = max(0, self._rest - 1)
            if self._rest or not slow:
                return found
            found, decision = self._started_over(found, evaluate)
        elif self._trial is not None:
            found, decision = self._judged(found, evaluate)
        for _ in range(self.delta if slow else 0):
            better = self._without(found, evaluate)
            if better is not None:
                found, decision, self._failed = better, "shrink", 0
        if decision != "shrink":
            self._propose(found.objective)
        return replace(found, decision=decision)

    def _started_over(self, found: GrowthRecord, evaluate: Any) -> tuple[GrowthRecord, str]:
        """Keep the result of a restart, or restore the snapshot."""
        assert self._trial is not None
        (objective, _), self._trial, before, self._before = self._trial, None, self._before, []
        self._direction = 1
        if found.objective < objective:
            return found, "restart"
        for table, one in zip(self.tables, before, strict=True):
            table.take_back(one, self.optimizer)
        return self._measured(evaluate), "undo"

    def _judged(self, found: GrowthRecord, evaluate: Any) -> tuple[GrowthRecord, str]:
        """Keep the change on trial, or undo it."""
        assert self._trial is not None
        (before, change), self._trial = self._trial, None
        if change > 0:  # is the objective lower without the new anchors after an epoch?
            new = [*range(self.anchor_count - change, self.anchor_count)]
            taken = [table.take_anchors(new, self.optimizer) for table in self.tables]
            try:
                without = self._measured(evaluate)
            finally:
                for table, anchors in zip(self.tables, taken, strict=True):
                    table.put_anchors(anchors, self.optimizer)
            if found.objective <= before or found.objective < without.objective:
                self._failed = 0
                return found, "grow"
            for table in self.tables:
                table.take_anchors(new, self.optimizer)
            self._young = self._young[: len(self._young) - change]
        else:  # are they worse off than with the anchors they had before?
            if found.objective <= before:
                self._failed = 0
                return found, "shrink"
            for _ in range(-change):
                self._put_back()
            without = self._measured(evaluate)
        self._failed, self._direction = self._failed + 1, -self._direction
        return without, "undo"

    def _propose(self, objective: float) -> None:
        if self._failed >= 2 and self.restarts:  # neither way helps: start over
            self.restarts -= 1
            self._failed, self._rest = 0, self.window
            self._trial, self._due = (objective, 0), OVER
            return
        if self._failed >= 2:  # let the tables learn for a while, each time for longer
            self._failed, self._rest, self._pause = 0, self._pause, 2 * self._pause
        if self._rest or not self.history:
            self._rest = max(0, self._rest - 1)
        elif self._room(self._direction):
            self._due = self._direction * self._room(self._direction)
            self._trial = objective, self._due
        else:
            self._failed, self._direction = self._failed + 1, -self._direction

    def _room(self, direction: int) -> int:
        """Return the number of anchors that may be added (1) or removed (-1) at once."""
        most = min(table.max_anchors for table in self.tables)
        return min(self.delta, most - self.anchor_count if direction > 0 else self.anchor_count - 1)

    def _without(self, found: GrowthRecord, evaluate: Any) -> GrowthRecord | None:
        """Remove the anchors whose absence lowers the objective most; None if there are none."""
        best, chosen = found, None
        if self.anchor_count == 1:
            return None
        for leaving in zip(*(self._ripe(table)[:CANDIDATES] for table in self.tables), strict=True):
            self._take_out([*leaving])
            try:
                tried = self._measured(evaluate)
            finally:
                self._put_back()
            if tried.objective < best.objective:
                best, chosen = tried, [*leaving]
        if chosen is None:
            return None
        self._take_out(chosen)
        return best

    def _change(self) -> None:
        """Apply the pending change."""
        due, self._due = self._due, 0
        for table in self.tables:
            table.on_training = None
        if due == OVER:
            self._before = [t.start_over(self.optimizer, self.generator) for t in self.tables]
            return
        for _ in range(-due):
            self._take_out([(self._ripe(table) or departures(table))[0] for table in self.tables])
        back = min(due, len(self.removed)) if self.rule == "trend" else 0
        for _ in range(back):
            self._put_back()
        if due > back:
            for table, gradients in zip(self.tables, self._moments, strict=True):
                table.add_anchors(gradients.directions(due - back), optimizer=self.optimizer)
            self._young = [*self._young, *[self.window] * (due - back)]

    def _ripe(self, table: GrowingAnchorTable) -> list[Departure]:
        """Return the possible removals of anchors that are no longer protected."""
        ripe = table.anchor_count - len(self._young)
        return [one for one in departures(table) if one.place < ripe]

    def _take_out(self, leaving: list[Departure]) -> None:
        for one in leaving:
            one.leave(self.optimizer)
        self.removed.append(leaving)

    def _put_back(self) -> None:
        for one in self.removed.pop():
            one.come_back(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the removed anchors; save model and optimizer states with it."""
        plain = {name: getattr(self, name) for name in PLAIN}
        return {
            **plain,
            "history": [asdict(found) for found in self.history],
            "removed": [[one.state() for one in change] for change in self.removed],
            "before": [vars(one) for one in self._before],
            "moments": [(one.moment.clone(), one.mean.clone()) for one in self._moments],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; load the states of the model and the optimizer first."""
        for name in PLAIN:
            setattr(self, name, state[name])
        self.history = [GrowthRecord(**found) for found in state["history"]]
        self.removed = [
            [Departure.of_state(table, one) for table, one in zip(self.tables, change, strict=True)]
            for change in state["removed"]
        ]
        self._before = [AnchorSnapshot(**one) for one in state["before"]]
        moments = state["moments"] if "moments" in state else state["asked"]  # its former name
        for own, (moment, mean) in zip(self._moments, moments, strict=True):
            own.moment, own.mean = moment.to(own.moment).clone(), mean.to(own.mean).clone()
        for table in self.tables:
            table.on_training = self._change if self._due else None
