"""Three ways from ratings to packed rows: tables by recipe, levels within a byte budget, passes over a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from featherbed.packed.band import Band
from featherbed.packed.codes import Identity
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable
from featherbed.progress import show_progress
from featherbed.tasks.checkpoints import Checkpoints
from featherbed.tasks.data import Ratings
from featherbed.tasks.interrupts import deferred_interrupt
from featherbed.tasks.levels import graded_tables
from featherbed.tasks.passes import Passes
from featherbed.tasks.recipe import Recipe, fit
from featherbed.tasks.splits import Split

Floats = NDArray[np.float32]
BLOCK = 1 << 18  # ratings predicted at once
ROUNDS = 26  # that rows and levels take, at most
SPREAD = (
    1.1  # standard deviation of the ratings that the rates of passes were chosen for (MovieLens-1M)
)


@dataclass(frozen=True)
class Learnt:
    """Packed rows of users and items, the model's mean and biases, and what training recorded on the way."""

    users: PackedTable
    items: PackedTable
    mean: float
    biases: str = "column"
    user_bias: Floats | None = None
    item_bias: Floats | None = None
    history: list[dict[str, float]] = field(default_factory=list)
    nonzeros: int | None = None
    parameters: tuple[int, int] = (0, 0)  # of users and items, as the method's paper counts
    training: tuple[int, int] | None = None  # bytes held in training, optimizer state included
    interrupted: bool = False
    notes: tuple[str, ...] = ()

    def predictions(self, ratings: Ratings) -> Iterator[Floats]:
        """Yield predicted ratings in blocks, from the rows as they are stored."""
        for begin in range(0, len(ratings), BLOCK):
            users, items = (
                np.asarray(ids[begin : begin + BLOCK], dtype=np.int64)
                for ids in (ratings.users, ratings.items)
            )
            left, right = self.users[users], self.items[items]
            if self.biases == "column":
                scores = np.einsum("nd,nd->n", left[:, 1:], right[:, 1:]) + left[:, 0] + right[:, 0]
            else:
                scores = np.einsum("nd,nd->n", left, right)
            if self.user_bias is not None and self.item_bias is not None:
                scores += self.user_bias[users] + self.item_bias[items]
            yield (scores + np.float32(self.mean)).astype(np.float32, copy=False)

    def error(self, ratings: Ratings) -> float:
        """Return the mean squared error of the stored rows."""
        total, begin = 0.0, 0
        for scores in self.predictions(ratings):
            off = scores - ratings.values[begin : begin + len(scores)]
            total += float(np.einsum("n,n->", off, off, dtype=np.float64))
            begin += len(scores)
        return total / len(ratings)


def by_recipe(
    recipe: Recipe,
    split: Split,
    *,
    seed: int,
    stored: dict[str, str] | None = None,
    checkpoints: Checkpoints | None = None,
    progress: bool = True,
) -> Learnt:
    """Train the tables of a recipe and pack them, ``stored`` as ``Table.pack`` is asked (values, dictionary)."""
    trained = fit(recipe, split, seed=seed, checkpoints=checkpoints, progress=progress)
    model, result = trained.model, trained.result
    users, items = (table.pack(**(stored or {})) for table in trained.tables)
    apart = [
        None if bias is None else bias.detach().numpy().copy()
        for bias in (model.user_bias, model.item_bias)
    ]
    users_count, items_count = (table.parameter_count() for table in trained.tables)
    held: Any = tuple(result.sizes[side]["training"] for side in ("users", "items"))
    return Learnt(
        users,
        items,
        float(cast(Tensor, model.mean)),
        recipe.biases,
        user_bias=apart[0],
        item_bias=apart[1],
        history=result.history,
        nonzeros=trained.nonzeros,
        parameters=(users_count, items_count),
        training=None if None in held else held,
        interrupted=result.interrupted,
    )


def by_levels(budget: int, split: Split, *, dim: int, seed: int, progress: bool = True) -> Learnt:
    """Choose rows in levels within ``budget`` bytes of both files; ids are in falling order of training counts.

    Ctrl-C ends each stage with the round it is in: rounds take a second, and what comes out can be used.
    """
    history: list[dict[str, Any]] = []
    display = show_progress("rows", ROUNDS, shown=progress)
    with display as shown, deferred_interrupt() as interrupted:

        def record(stage: str, error: float) -> bool:
            history.append({"epoch": len(history), "stage": stage, "validation_mse": error})
            shown.update(advance=1, description=stage, note=f"validation {error:.4f}")
            return interrupted()

        users, items, mean, notes = graded_tables(
            split.train, split.validation, dim=dim, budget=budget, seed=seed, progress=record
        )
    counts = dim * split.train.num_users, dim * split.train.num_items
    return Learnt(
        users,
        items,
        mean,
        history=history,
        parameters=counts,
        interrupted=interrupted(),
        notes=_said(notes),
    )


def by_passes(
    recipe: Recipe, split: Split, *, seed: int, dictionary: str = "float32", progress: bool = True
) -> Learnt:
    """Train plain rows in passes over ratings that may be larger than memory: a rating at a time, compiled.

    The rate falls to zero over the passes, so the rows after the last one stay; Ctrl-C keeps them as they are.
    """
    train = split.train
    mean = float(train.values.mean(dtype=np.float64)) if recipe.mean else 0.0
    own = {} if recipe.lr is None else {"lr": recipe.lr}
    own["unit"] = float(train.values.std(dtype=np.float64)) / SPREAD or 1.0
    passes = Passes(
        train.num_users,
        train.num_items,
        recipe.dim,
        mean=mean,
        biases=recipe.biases,
        seed=seed,
        **own,
    )
    history: list[dict[str, float]] = []
    interrupted = False
    with show_progress("ratings", recipe.epochs, shown=progress) as shown:
        try:
            for epoch in range(recipe.epochs):
                row: dict[str, float] = {
                    "epoch": epoch,
                    "train_mse": passes.run(train, 1 - epoch / recipe.epochs),
                }
                row["validation_mse"] = passes.error(split.validation)
                history.append(row)
                shown.update(advance=1, note=f"validation {row['validation_mse']:.4f}")
        except KeyboardInterrupt:
            interrupted = True
    passes.fold()
    users, items = (packed_rows(rows, dictionary) for rows in (passes.users, passes.items))
    counts = passes.users.size, passes.items.size
    held = 4 * (counts[0] + train.num_users), 4 * (counts[1] + train.num_items)
    return Learnt(
        users,
        items,
        mean,
        recipe.biases,
        history=history,
        parameters=counts,
        training=held,
        interrupted=interrupted,
    )


def packed_rows(rows: Floats, kind: str = "float32") -> PackedTable:  # [V, d]
    """Pack plain rows; as float32 they are not copied.

    >>> packed_rows(np.ones((3, 2), np.float32)).dim
    2
    """
    count, dim = rows.shape
    matrix = (
        Matrix(kind, (count, dim), rows)
        if kind == "float32"
        else Matrix.encode(rows, kind, "column")
    )
    return PackedTable(
        [Band(count, Identity(), dictionary=matrix)], dim, made_by={"table": "DenseTable"}
    )


def _said(notes: dict[str, Any]) -> tuple[str, ...]:
    """Say in words what float32 rows of the same making would have given."""
    return (
        ()
        if notes["dense"] is None
        else (
            f"The float32 rows that the levels were chosen for have {notes['dense']:.4f} on validation.",
        )
    )
