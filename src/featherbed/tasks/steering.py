"""What steers a table of words while it is trained: budgets, the end of a lasso, a divergence that comes in slowly."""

from __future__ import annotations

from typing import Any

from torch import nn

from featherbed.optim import Budget
from featherbed.optim.penalties import Penalty
from featherbed.tables.variational import VariationalTable
from featherbed.tasks.word_tables import WordsMade, WordTable


def steering(asked: WordTable, made: WordsMade, steps: int) -> list[Any]:
    """Return what is stepped after the optimizer, over all ``steps`` of training, for the table to end as it was asked for.

    A budget of weights; the end of a group lasso; the slow coming in of a variational table's divergence. An epoch cannot be
    the best before all of them say it has ``reached`` what it must.

    >>> import numpy as np
    >>> from featherbed.tasks.word_tables import Lexicon, make_word_table
    >>> lexicon = Lexicon(("a", "b"), np.array([1, 1]))
    >>> asked = WordTable("anchor:anchors=2", dim=4, nonzeros=3)
    >>> len(steering(asked, make_word_table(asked, lexicon, seed=0), steps=10))
    1
    """
    if asked.nonzeros is not None:
        return [Budget(made.penalties, asked.nonzeros, steps=steps)]
    if asked.lassoed:
        return [Freeze(made.penalties, round(0.6 * steps))]
    if isinstance(made.table, VariationalTable):
        return [Warming(made.table, round(0.5 * steps))]
    return []


class Freeze:
    """Lets penalties work for ``end`` steps; from then on what is zero stays zero and the rest is trained without them."""

    def __init__(self, penalties: dict[nn.Parameter, Penalty], end: int) -> None:
        self.penalties, self.end, self.done = penalties, max(1, end), 0

    @property
    def reached(self) -> bool:
        """Whether the penalties have done their work."""
        return self.done >= self.end

    def step(self) -> None:
        """Go on by a step of the optimizer."""
        self.done += 1
        if self.done == self.end:
            for parameter, penalty in self.penalties.items():
                penalty.freeze(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        return {
            "done": self.done,
            "penalties": [(penalty.lam, penalty.kept) for penalty in self.penalties.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; load the model's state first."""
        self.done = int(state["done"])
        for (parameter, penalty), (lam, kept) in zip(
            self.penalties.items(), state["penalties"], strict=True
        ):
            penalty.lam = lam
            penalty.keep(parameter, kept)


class Warming:
    """Lets the divergence of a variational table come in over ``end`` steps: few words are dropped before they are learnt."""

    def __init__(self, table: VariationalTable, end: int) -> None:
        self.table, self.end, self.done = table, max(1, end), 0
        table.warm(0.0)

    @property
    def reached(self) -> bool:
        """Whether the divergence has its whole weight."""
        return self.done >= self.end

    def step(self) -> None:
        """Go on by a step of the optimizer."""
        self.done += 1
        self.table.warm(min(1.0, self.done / self.end))

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.done = int(state["done"])
        self.table.warm(min(1.0, self.done / self.end))
