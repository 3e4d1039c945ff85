"""Passes over ratings that may be larger than memory: plain rows for millions of users and items, a rating at a time.

Memory is the rows and one number besides for each; ratings are read in blocks, in the order of a memory-mapped file. The same
seed gives the same rows, whatever the number of threads.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, IdError, MissingExtra
from featherbed.tasks.data import Ratings

BLOCK = 1 << 20  # ratings held at once
WIDEST = 128  # rows that are one vector
BIASES = ("none", "column")
Floats = NDArray[np.float32]
Block = tuple[NDArray[np.int32], NDArray[np.int32], Floats]


class Passes:
    """Rows U [num_users, dim] and V [num_items, dim] learnt by stochastic gradient descent on squared errors.

        score(u, i) = mean + U[u]_0 + V[i]_0 + sum_{k >= 1} U[u]_k V[i]_k        (biases="column"; "none": mean + U[u] . V[i])
        U[u] ← U[u] - s (error V[i] + decay U[u]),   s = lr / sqrt(1 + share n_u)

    and V[i] alike, for every rating; n_u is how often u was seen before: rare rows take large steps, frequent ones ever
    smaller ones (Koren et al. 2009, with the rate of each row falling by its own count). ``run`` makes one pass.

    Args:
        lr: the rate of a row that was not seen before.
        decay: how much of itself a row loses at each of its ratings, times s.
        share: how fast rates fall.
        init: rows start uniformly in [-init, init], biases at 0.
        unit: ratings less the mean are learnt in this unit, so that rates need not know their scale; ``fold`` takes it back
            into the rows.

    >>> from featherbed.tasks.data import planted_ratings
    >>> train, validation, _ = planted_ratings(300, 200, 12_000, groups=4, dim=4, seed=1).split(0)
    >>> passes = Passes(300, 200, 8, mean=float(train.values.mean()))
    >>> before = passes.error(validation)
    >>> found = [passes.run(train) for _ in range(5)]
    >>> passes.error(validation) < before, passes.users.shape
    (True, (300, 8))
    """

    def __init__(
        self,
        num_users: int,
        num_items: int,
        dim: int,
        *,
        mean: float = 0.0,
        biases: str = "column",
        lr: float = 0.12,
        decay: float = 0.06,
        share: float = 0.003,
        init: float = 0.1,
        unit: float = 1.0,
        seed: int = 0,
    ) -> None:
        for name, count in (("num_users", num_users), ("num_items", num_items), ("dim", dim)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ArgumentError(f"{name}={count!r}: give a whole number of at least 1")
        if dim > WIDEST:
            raise ArgumentError(f"dim={dim}: passes take rows of at most {WIDEST} numbers")
        if biases not in BIASES:
            raise ArgumentError(f"biases={biases!r}: passes take {' or '.join(BIASES)}")
        for name, value in (("lr", lr), ("decay", decay), ("share", share), ("init", init)):
            if (
                isinstance(value, bool)
                or not isinstance(value, Real)
                or not (math.isfinite(value) and value >= 0)
            ):
                raise ArgumentError(f"{name}={value!r}: give a finite number of at least 0")
        if not (math.isfinite(unit) and unit > 0):
            raise ArgumentError(f"unit={unit!r}: give a finite number above 0")
        self.unit = float(unit)
        self.mean, self.biases, self.lr, self.decay, self.share, self.seed = (
            float(mean),
            biases,
            lr,
            decay,
            share,
            seed,
        )
        self.done = 0  # passes so far
        rng = np.random.default_rng(seed)
        self.users, self.items = (
            self._start(rng, rows, dim, init) for rows in (num_users, num_items)
        )
        self.user_counts, self.item_counts = (
            np.zeros(rows, dtype=np.float32) for rows in (num_users, num_items)
        )

    def _start(
        self, rng: np.random.Generator, rows: int, dim: int, init: float
    ) -> Floats:  # [rows, dim]
        made = np.empty((rows, dim), dtype=np.float32)
        rng.random(dtype=np.float32, out=made)
        made -= np.float32(0.5)
        made *= np.float32(2 * init)
        if self.biases == "column":
            made[:, 0] = 0.0
        return made

    def run(self, train: Ratings, scale: float = 1.0) -> float:
        """Pass over all ratings once, blocks and what is in them in random order; return the mean squared error on the way.

        ``scale`` is a factor of the rate in this pass: where the number of passes is known, letting it fall to near 0 helps.
        """
        if len(train) == 0:
            raise ArgumentError("there are no ratings to train on")
        loops, run = _loops()
        job = loops.learn_cells(self.users.shape[1], int(self.biases == "column"))
        sums, begins = np.zeros(loops.CELLS), np.zeros(loops.CELLS**2 + 2, dtype=np.int64)
        rng, total = np.random.default_rng([self.seed, 1, self.done]), 0.0
        dealt: Block = (
            np.empty(BLOCK, np.int32),
            np.empty(BLOCK, np.int32),
            np.empty(BLOCK, np.float32),
        )
        for number in rng.permutation(-(-len(train) // BLOCK)):
            block = self._block(train, int(number) * BLOCK)
            loops.deal(*block, *dealt, begins)
            words = self._words(loops, dealt, len(block[2]), sums, scale)
            words[loops.BEGINS], words[loops.SEED] = begins.ctypes.data, rng.integers(1 << 62)
            for turn in rng.permutation(loops.CELLS):
                words[loops.ROUND] = turn
                run(job, words, loops.CELLS, 1, (dealt, begins, sums, self))
                total += float(sums.sum())
            if not math.isfinite(total):
                raise ArgumentError(
                    f"errors became NaN or infinite in pass {self.done + 1}: are all ratings finite? If so lower lr={self.lr}"
                )
        self.done += 1
        return total / len(train) * self.unit**2

    def fold(self) -> None:
        """Take the unit into the rows: from here on they predict ratings less the mean as they are."""
        for rows in (self.users, self.items):
            first = int(self.biases == "column")
            rows[:, :first] *= np.float32(self.unit)
            rows[:, first:] *= np.float32(math.sqrt(self.unit))
        self.unit = 1.0

    def error(self, ratings: Ratings) -> float:
        """Return the mean squared error of the rows as they are."""
        if len(ratings) == 0:
            raise ArgumentError(
                "there are no ratings to measure the error on: give a validation set that is not empty"
            )
        loops, run = _loops()
        job = loops.square_errors(self.users.shape[1], int(self.biases == "column"))
        sums, total = np.zeros(-(-BLOCK // loops.PIECE)), 0.0
        for begin in range(0, len(ratings), BLOCK):
            block = self._block(ratings, begin)
            count = len(block[2])
            words, pieces = self._words(loops, block, count, sums), -(-count // loops.PIECE)
            run(job, words, pieces, 1, (block, sums, self))
            total += float(sums[:pieces].sum())
        return total / len(ratings) * self.unit**2

    def _words(
        self, loops: Any, block: Block, count: int, sums: NDArray[np.float64], scale: float = 1.0
    ) -> NDArray[np.int64]:
        """Lay out the arguments of a job."""
        self.numbers = np.array([0.0, scale * self.lr, self.share, self.decay], dtype=np.float32)
        words = np.zeros(loops.WORDS, dtype=np.int64)
        places = (loops.USERS, loops.ITEMS, loops.VALUES)
        words[list(places)] = [part.ctypes.data for part in block]
        words[loops.COUNT], words[loops.SUMS] = count, sums.ctypes.data
        held = (self.users, self.items, self.user_counts, self.item_counts, self.numbers)
        words[loops.LEFT : loops.LEFT + 5] = [array.ctypes.data for array in held]
        return words

    def _block(self, ratings: Ratings, begin: int) -> Block:
        """Read a block of ratings; refuse ids that have no row."""
        users, items = (
            np.asarray(ids[begin : begin + BLOCK]) for ids in (ratings.users, ratings.items)
        )
        for name, ids, rows in (("user", users, len(self.users)), ("item", items, len(self.items))):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= rows:
                raise IdError(
                    f"{name} {low if low < 0 else high} has no row: ids go from 0 to {rows - 1}"
                )
        values = (
            np.asarray(ratings.values[begin : begin + BLOCK], dtype=np.float32)
            - np.float32(self.mean)
        ) / np.float32(self.unit)
        return (
            np.ascontiguousarray(users, dtype=np.int32),
            np.ascontiguousarray(items, dtype=np.int32),
            values,
        )


def _loops() -> tuple[Any, Any]:
    try:
        import featherbed.kernels.passes as loops
        from featherbed.kernels.pool import run
    except ImportError:
        raise MissingExtra("numba", "train", "training in passes") from None
    return loops, run
