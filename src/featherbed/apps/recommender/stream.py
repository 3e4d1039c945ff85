"""Stochastic gradient descent on ratings that may be larger than memory, one rating at a time.

Memory holds the rows and one more number per row; ratings are read in blocks, in the order of a
memory-mapped file. The same seed gives the same rows, whatever the number of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, IdError, MissingExtra
from featherbed.io.records import Ratings
from featherbed.settings import Settings, setting

BLOCK = 1 << 20  # ratings in memory at once
MAX_DIM = 128  # rows that are one vector
BIASES = ("none", "column")
Floats = NDArray[np.float32]
Block = tuple[NDArray[np.int32], NDArray[np.int32], Floats]


@dataclass(frozen=True, kw_only=True)
class StreamSettings(Settings):
    """Step sizes of ``StreamedFactorization``."""

    lr: float = setting(0.12, "Learning rate of a row without earlier ratings.", minimum=0)
    weight_decay: float = setting(0.06, "Weight decay of a row at each of its ratings.", minimum=0)
    falloff: float = setting(0.003, "How fast the learning rate of a row falls.", minimum=0)
    init: float = setting(0.1, "Initial rows are uniform in [-init, init].", minimum=0)


class StreamedFactorization:
    """Rows U [num_users, dim] and V [num_items, dim] fitted by stochastic gradient descent.

        score(u, i) = mean + U[u]_0 + V[i]_0 + sum_{k >= 1} U[u]_k V[i]_k   (biases="column")
        U[u] ← U[u] - s (error V[i] + weight_decay U[u]),   s = lr / sqrt(1 + falloff n_u)

    and V[i] alike, for every rating; n_u is the number of earlier ratings of u: rare rows take
    large steps, frequent ones ever smaller ones (Koren et al. 2009, with a learning rate per row).
    With biases="none" the score is mean + U[u] . V[i]. ``train_epoch`` trains one epoch.

    Args:
        settings: step sizes and initialization.
        unit: ratings less the mean are fitted in this unit, so that learning rates need not know
            their scale; ``fold`` multiplies it into the rows.

    >>> from featherbed.io.records import make_ratings
    >>> train, validation, _ = make_ratings(300, 200, 12_000, groups=4, dim=4, seed=1).split(0)
    >>> model = StreamedFactorization(300, 200, 8, mean=float(train.values.mean()))
    >>> before = model.error(validation)
    >>> errors = [model.train_epoch(train) for _ in range(5)]
    >>> model.error(validation) < before, model.users.shape
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
        settings: StreamSettings | None = None,
        unit: float = 1.0,
        seed: int = 0,
    ) -> None:
        for name, count in (("num_users", num_users), ("num_items", num_items), ("dim", dim)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ArgumentError(f"{name}={count!r}: give a whole number of at least 1")
        if dim > MAX_DIM:
            raise ArgumentError(f"dim={dim}: streamed rows have at most {MAX_DIM} numbers")
        if biases not in BIASES:
            raise ArgumentError(f"biases={biases!r}: use {' or '.join(BIASES)} for streamed rows")
        if not (math.isfinite(unit) and unit > 0):
            raise ArgumentError(f"unit={unit!r}: give a finite number above 0")
        self.mean, self.biases, self.unit, self.seed = float(mean), biases, float(unit), seed
        self.settings = settings or StreamSettings()
        self.epochs = 0  # trained so far
        rng = np.random.default_rng(seed)
        self.users, self.items = (self._initial(rng, rows, dim) for rows in (num_users, num_items))
        self.user_counts, self.item_counts = (
            np.zeros(rows, dtype=np.float32) for rows in (num_users, num_items)
        )

    def _initial(self, rng: np.random.Generator, rows: int, dim: int) -> Floats:  # [rows, dim]
        values = np.empty((rows, dim), dtype=np.float32)
        rng.random(dtype=np.float32, out=values)
        values -= np.float32(0.5)
        values *= np.float32(2 * self.settings.init)
        if self.biases == "column":
            values[:, 0] = 0.0
        return values

    def train_epoch(self, train: Ratings, scale: float = 1.0) -> float:
        """Train on all ratings, blocks and ratings in random order; return the squared error.

        ``scale`` is a factor of the learning rate: if the number of epochs is known, letting it
        fall to near 0 helps.
        """
        if len(train) == 0:
            raise ArgumentError("there are no ratings to train on")
        loops, run = _loops()
        job = loops.learn_cells(self.users.shape[1], int(self.biases == "column"))
        sums, begins = np.zeros(loops.CELLS), np.zeros(loops.CELLS**2 + 2, dtype=np.int64)
        rng, total = np.random.default_rng([self.seed, 1, self.epochs]), 0.0
        integers = np.empty((2, BLOCK), np.int32)
        dealt: Block = (integers[0], integers[1], np.empty(BLOCK, np.float32))
        for number in rng.permutation(-(-len(train) // BLOCK)):
            block = self._read_block(train, int(number) * BLOCK)
            loops.deal(*block, *dealt, begins)
            words = self._arguments(loops, dealt, len(block[2]), sums, scale)
            words[loops.BEGINS], words[loops.SEED] = begins.ctypes.data, rng.integers(1 << 62)
            for turn in rng.permutation(loops.CELLS):
                words[loops.ROUND] = turn
                run(job, words, loops.CELLS, 1, (dealt, begins, sums, self))
                total += float(sums.sum())
            if not math.isfinite(total):
                raise ArgumentError(
                    f"errors became NaN or infinite in epoch {self.epochs + 1}: are all ratings "
                    f"finite? If so lower lr={self.settings.lr}"
                )
        self.epochs += 1
        return total / len(train) * self.unit**2

    def fold(self) -> None:
        """Multiply the unit into the rows, which then predict ratings less the mean."""
        first = int(self.biases == "column")
        for rows in (self.users, self.items):
            rows[:, :first] *= np.float32(self.unit)
            rows[:, first:] *= np.float32(math.sqrt(self.unit))
        self.unit = 1.0

    def error(self, ratings: Ratings) -> float:
        """Return the mean squared error."""
        if len(ratings) == 0:
            raise ArgumentError(
                "there are no ratings to measure the error on: "
                "give a validation set that is not empty"
            )
        loops, run = _loops()
        job = loops.square_errors(self.users.shape[1], int(self.biases == "column"))
        sums, total = np.zeros(-(-BLOCK // loops.PIECE)), 0.0
        for begin in range(0, len(ratings), BLOCK):
            block = self._read_block(ratings, begin)
            count = len(block[2])
            words, pieces = self._arguments(loops, block, count, sums), -(-count // loops.PIECE)
            run(job, words, pieces, 1, (block, sums, self))
            total += float(sums[:pieces].sum())
        return total / len(ratings) * self.unit**2

    def _arguments(
        self, loops: Any, block: Block, count: int, sums: NDArray[np.float64], scale: float = 1.0
    ) -> NDArray[np.int64]:
        """Return the arguments of a compiled loop as words."""
        rates = self.settings
        self.coefficients = np.array(
            [0.0, scale * rates.lr, rates.falloff, rates.weight_decay], dtype=np.float32
        )
        words = np.zeros(loops.WORDS, dtype=np.int64)
        words[[loops.USERS, loops.ITEMS, loops.VALUES]] = [part.ctypes.data for part in block]
        words[loops.COUNT], words[loops.SUMS] = count, sums.ctypes.data
        arrays = (
            self.users,
            self.items,
            self.user_counts,
            self.item_counts,
            self.coefficients,
        )
        words[loops.LEFT : loops.LEFT + 5] = [array.ctypes.data for array in arrays]
        return words

    def _read_block(self, ratings: Ratings, begin: int) -> Block:
        """Read a block of ratings; refuse ids without a row."""
        part = slice(begin, begin + BLOCK)
        users, items = np.asarray(ratings.users[part]), np.asarray(ratings.items[part])
        for name, ids, rows in (("user", users, len(self.users)), ("item", items, len(self.items))):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= rows:
                raise IdError(
                    f"{name} {low if low < 0 else high} has no row: ids go from 0 to {rows - 1}"
                )
        values = np.asarray(ratings.values[part], dtype=np.float32) - np.float32(self.mean)
        return (
            np.ascontiguousarray(users, dtype=np.int32),
            np.ascontiguousarray(items, dtype=np.int32),
            values / np.float32(self.unit),
        )


def _loops() -> tuple[Any, Any]:
    try:
        from featherbed.kernels import passes as loops
        from featherbed.kernels import run
    except ImportError:
        raise MissingExtra("numba", "train", "training on a stream of ratings") from None
    return loops, run
