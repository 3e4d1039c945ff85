"""A recipe: which tables a recommender has, and how they are trained. Settings in, trained model out."""

from __future__ import annotations

import inspect
import math
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch

from featherbed.anchors import HalfNormal
from featherbed.errors import ArgumentError
from featherbed.optim import AdamW, Budget, NonNegativeL1, Yogi
from featherbed.serve.folder import BIASES
from featherbed.sharing.sse import SSE, bare
from featherbed.tables import AnchorTable, GrowingAnchorTable, Table
from featherbed.tables.growth import Growth
from featherbed.tables.spec import make_table, parse_spec, table_from_dense
from featherbed.tasks.checkpoints import Checkpoints
from featherbed.tasks.data import Ratings
from featherbed.tasks.ratings import MatrixFactorization, count_nonzeros, mean_squared_error, train
from featherbed.tasks.results import Result
from featherbed.tasks.splits import Split

YOGI, ADAM = 0.02, 0.01  # learning rates where none is given
SPREAD = 0.1  # of the random rows that tables without anchors start near


@dataclass(frozen=True)
class Recipe:
    """Tables by spec on either side, and the settings of their training.

    Tables with anchors are trained by Yogi under a penalty ``lam`` on their weights, all others by AdamW with weight decay
    ``decay``: Yogi's large eps is slow for plain rows. ``nonzeros`` ends training with so many weights on both sides
    together (``fb.Budget``); ``lambda1`` and ``lambda2`` are the prices of NBANT, which
    finds the number of anchors; the weights it leaves are then trained for ``refit`` epochs without shrinkage.

    >>> Recipe(users="anchor:anchors=4", items="dense").has_anchors
    True
    """

    dim: int = 16
    users: str = "dense"
    items: str = "dense"
    biases: str = "column"
    mean: bool = True
    nonzeros: int | None = None
    lam: float = 1.5e-5
    lambda1: float | None = None
    lambda2: float | None = None
    refit: int = 0
    start: float = 0.1
    lr: float | None = None
    decay: float = 0.2
    cosine: bool = True
    epochs: int = 15
    batch: int = 2048
    patience: int = 3
    sse_users: float = 0.0
    sse_items: float = 0.0

    def __post_init__(self) -> None:
        grown = [issubclass(kind, GrowingAnchorTable) for kind in self._kinds]
        if self.biases not in BIASES:
            raise ArgumentError(f"biases={self.biases!r}: use one of {', '.join(BIASES)}")
        for name in ("dim", "epochs", "batch"):
            if getattr(self, name) < 1:
                raise ArgumentError(
                    f"{name}={getattr(self, name)}: give a whole number of at least 1"
                )
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise ArgumentError(f"lr={self.lr}: give a number above 0")
        if self.dim < 2 and self.biases == "column":
            raise ArgumentError(
                "dim=1 with biases in the first column leaves no factor: give dim of at least 2, or other biases"
            )
        if self.nonzeros is not None and not self.has_anchors:
            raise ArgumentError(
                f"nonzeros={self.nonzeros}: neither {self.users!r} nor {self.items!r} has anchors, so no weights to count"
            )
        if (self.lambda1 is None) != (self.lambda2 is None):
            raise ArgumentError(
                "lambda1 and lambda2, the prices of an anchor and of a weight, go together"
            )
        if self.grows and not all(grown):
            raise ArgumentError(
                f"NBANT takes growinganchor on both sides, not {self.users!r} and {self.items!r}"
            )

    @property
    def _kinds(self) -> tuple[type[Table], ...]:
        return tuple(parse_spec(spec)[0] for spec in (self.users, self.items))

    @property
    def has_anchors(self) -> bool:
        """Whether a side's weights are penalised."""
        return any(issubclass(kind, AnchorTable) for kind in self._kinds)

    @property
    def grows(self) -> bool:
        """Whether the number of anchors is found."""
        return self.lambda1 is not None


@dataclass(frozen=True)
class Trained:
    """A trained model, its optimizer and what the loop recorded."""

    model: MatrixFactorization
    optimizer: torch.optim.Optimizer
    result: Result

    @property
    def tables(self) -> tuple[Table, Table]:
        """The tables of users and items, without what shares their ids."""
        return bare(self.model.users), bare(self.model.items)

    @property
    def nonzeros(self) -> int | None:
        """Weights other than zero in both transforms together; None where there are no anchors."""
        return count_nonzeros(self.model)


def new_table(
    spec: str, counts: np.ndarray[Any, Any], recipe: Recipe, generator: torch.Generator
) -> Table:
    """Make a table for objects that occur ``counts`` times: near short random rows, or with anchors that start small."""
    kind, _ = parse_spec(spec)
    extra: dict[str, Any] = {}
    if "counts" in inspect.signature(kind.__init__).parameters:
        extra["counts"] = torch.from_numpy(counts)
    if issubclass(kind, AnchorTable):
        init = {} if "init=" in spec else {"init": HalfNormal(recipe.start)}
        return make_table(spec, len(counts), recipe.dim, generator=generator, **init)
    rows = SPREAD * torch.randn(len(counts), recipe.dim, generator=generator)
    return table_from_dense(spec, rows, **extra)


def new_model(recipe: Recipe, ratings: Ratings, seed: int) -> MatrixFactorization:
    """Make the model a recipe asks for."""
    generator = torch.Generator().manual_seed(seed)
    counts = (
        np.bincount(ratings.users, minlength=ratings.num_users),
        np.bincount(ratings.items, minlength=ratings.num_items),
    )
    users, items = (
        new_table(s, c, recipe, generator)
        for s, c in zip((recipe.users, recipe.items), counts, strict=True)
    )
    shared = [
        cast(Table, SSE(table, p, generator=generator)) if p else table
        for table, p in ((users, recipe.sse_users), (items, recipe.sse_items))
    ]
    mean = float(ratings.values.mean(dtype=np.float64)) if recipe.mean else 0.0
    return MatrixFactorization(*shared, mean=mean, biases=recipe.biases)


def fit(
    recipe: Recipe,
    split: Split,
    *,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
    progress: bool = True,
    name: str = "ratings",
) -> Trained:
    """Train what a recipe asks for on the training part; the best epoch on the validation part stays.

    >>> from featherbed.tasks.data import planted_ratings
    >>> from featherbed.tasks.splits import make_split
    >>> recipe = Recipe(dim=4, users="anchor:anchors=4", items="anchor:anchors=4", nonzeros=300, epochs=2)
    >>> trained = fit(recipe, make_split(planted_ratings(100, 50, 2000)), progress=False)
    >>> trained.nonzeros <= 300
    True
    """
    model = new_model(recipe, split.train, seed)
    tables = bare(model.users), bare(model.items)
    batch = min(recipe.batch, max(1, len(split.train)))
    steps = recipe.epochs * math.ceil(len(split.train) / batch)
    penalties = {
        table.transform: NonNegativeL1(recipe.lam)
        for table in tables
        if isinstance(table, AnchorTable)
    }
    optimizer: torch.optim.Optimizer = (
        Yogi(model.parameters(), recipe.lr or YOGI, penalties=penalties)
        if penalties
        else AdamW(model.parameters(), recipe.lr or ADAM, weight_decay=recipe.decay)
    )
    schedulers: list[Any] = []
    budget = None
    if recipe.cosine:
        schedulers.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps))
    if recipe.nonzeros is not None:
        budget = Budget(penalties, recipe.nonzeros, steps=steps)
        schedulers.append(budget)
    growth = None
    if recipe.lambda1 is not None and recipe.lambda2 is not None:
        growing = [table for table in tables if isinstance(table, GrowingAnchorTable)]
        growth = Growth(growing, optimizer, lambda1=recipe.lambda1, lambda2=recipe.lambda2)
    patience = recipe.epochs if recipe.nonzeros is not None else recipe.patience
    result = train(
        model,
        optimizer,
        split.train,
        split.validation,
        epochs=recipe.epochs,
        batch=batch,
        patience=patience,
        seed=seed,
        schedulers=schedulers,
        growth=growth,
        checkpoints=checkpoints,
        settings=asdict(recipe),
        progress=progress,
        name=name,
    )
    if recipe.refit and recipe.grows and not result.interrupted:
        return refitted(
            Trained(model, optimizer, result),
            recipe,
            split,
            seed=seed,
            progress=progress,
            name=name,
        )
    if budget is not None:
        budget.finish()
        for part in ("train", "validation"):
            result.metrics[part] = {"mse": mean_squared_error(model, getattr(split, part))}
    return Trained(model, optimizer, result)


def refitted(
    trained: Trained,
    recipe: Recipe,
    split: Split,
    *,
    seed: int = 0,
    progress: bool = True,
    name: str = "ratings",
) -> Trained:
    """Train a model with anchors on for ``recipe.refit`` epochs: zeros stay zero, the other weights are free of the penalty.

    The number of anchors and the support are those of the first training. The learning rate rises for a tenth of the steps
    and falls to zero; the best epoch on the validation part stays.
    """
    tables = [table for table in trained.tables if isinstance(table, AnchorTable)]
    penalties = {table.transform: NonNegativeL1(0.0) for table in tables}
    for parameter, penalty in penalties.items():
        penalty.freeze(parameter)
    optimizer = Yogi(trained.model.parameters(), recipe.lr or YOGI, penalties=penalties)
    batch = min(recipe.batch, max(1, len(split.train)))
    steps = recipe.refit * math.ceil(len(split.train) / batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, steps))
    result = train(
        trained.model,
        optimizer,
        split.train,
        split.validation,
        epochs=recipe.refit,
        batch=batch,
        patience=recipe.refit,
        seed=seed + 1,
        schedulers=[schedule],
        settings=asdict(recipe),
        progress=progress,
        name=f"{name}, refit",
    )
    before = len(trained.result.history)
    result.history = [
        *trained.result.history,
        *({**row, "epoch": before + row["epoch"]} for row in result.history),
    ]
    return Trained(trained.model, optimizer, result)


def share_of_rate(step: int, steps: int, warmup: float = 0.1) -> float:
    """Return what part of the learning rate a step takes: rising over the first steps, then half a cosine down to zero.

    >>> [round(share_of_rate(step, 20), 2) for step in (0, 1, 2, 11, 20)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 + 0.5 * math.cos(math.pi * (step - rising) / max(1, steps - rising))
