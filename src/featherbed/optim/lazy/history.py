"""History: the updates of optimizer steps to rows without a gradient."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

NEGLIGIBLE = 2.0**-40  # fraction of its momentum below which a row no longer moves
LONGEST = 1 << 16  # steps remembered; before they are more, every row is brought up to date
FIRST = 256
COLUMNS = ("decay", "move", "threshold", "debt", "fall", "tail", "odd")

Numbers = NDArray[np.float64]


class History:
    """The steps since ``begin``, as they update a row with momentum m, preconditioner s and no
    gradient:

        m ← β m,   p ← shrink(decay_t p - move_t m / s, threshold_t)      (threshold_t / s if
        ``metric``)

    Further columns allow to skip steps: ``debt`` (sum of thresholds, decayed like the row),
    ``fall`` (log of the product of decays), ``tail`` (movement by the momentum of a step since
    then, Σ_i move_i β^(i-t)) and ``odd`` (number of steps that must be replayed one by one: a
    threshold that decreased faster than the momentum, or a decay together with momentum). Step
    ``begin + j`` has index j.
    """

    def __init__(self, beta: float) -> None:
        self.beta, self.begin, self.now = beta, 0, 0
        # steps a momentum matters
        self.reach = 0 if beta == 0 else math.ceil(math.log(NEGLIGIBLE) / math.log(beta))
        self.powers: Numbers = beta ** np.arange(self.reach + 1, dtype=np.float64)
        self.last = 0.0, 1.0  # threshold and move of the last step that moved
        self.table: Numbers = np.zeros((FIRST, 8))  # the numbers of a step lie on one cache line

    def column(self, name: str) -> Numbers:
        """Return a column, by index of the step."""
        numbers: Numbers = self.table[:, COLUMNS.index(name)]
        return numbers

    def __len__(self) -> int:
        return self.now - self.begin

    def push(self, decay: float, move: float, threshold: float) -> bool:
        """Add a step; return whether all rows must be settled before the next one."""
        j = self.now - self.begin + 1
        if j == len(self.table):
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
        decays, moves, thresholds, debt, fall, tail, odd = self.table.T[: len(COLUMNS)]
        decays[j], moves[j], thresholds[j] = decay, move, threshold
        debt[j] = decay * debt[j - 1] + threshold
        fall[j] = fall[j - 1] + (math.log(decay) if decay != 1.0 else 0.0)
        falls = threshold * self.last[1] < self.beta * self.last[0] * move
        odd[j] = odd[j - 1] + (self.beta > 0 and (falls or decay != 1.0))
        first = max(0, j - self.reach)
        tail[first:j] += move * self.powers[j - first : 0 : -1]
        tail[j] = 0.0
        if move > 0:
            self.last = threshold, move
        self.now += 1
        return j + 1 >= LONGEST

    def clear(self) -> None:
        """Remove all steps: every row is up to date."""
        self.begin, self.last = self.now, (0.0, 1.0)
        self.table[0] = 0.0
