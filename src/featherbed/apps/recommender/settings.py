"""Settings of a recommender, and the policy that completes them.

Without tables, a recommender stores graded rows: bits by column and popularity within a byte
budget. Naming a table, a number of weights or ``table.auto`` trains tables by gradient descent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featherbed.apps.recommender.closed import COUNTS
from featherbed.apps.recommender.serve import BIASES
from featherbed.checks import Packages, read_bytes
from featherbed.errors import ArgumentError
from featherbed.io.records import POLICIES
from featherbed.packed import level_bits
from featherbed.settings import Settings, group, setting

SPLITS = ("random", "time", "leave-out")
ANCHORS, GROWING = "anchor:anchors=16", "growinganchor:anchors=8"  # default tables
YOGI_LR, ADAM_LR = 0.02, 0.01  # default learning rates
DEFAULTS = {  # of tables trained by gradient descent
    "anchors.lam": 1.5e-5,
    "anchors.refit": 0,
    "training.epochs": 15,
    "training.patience": 3,
    "training.cosine": True,
}
AUTO = {  # chosen on MovieLens-1M
    "anchors.lambda1": 2e-3,
    "anchors.lambda2": 1e-6,
    "anchors.lam": 7e-5,
    "anchors.refit": 6,
    "training.epochs": 10,
    "training.cosine": False,
}


@dataclass(frozen=True, kw_only=True)
class ColumnSettings(Settings):
    """Columns of the file, by name or by number from 1."""

    user: str | int | None = setting(None, "Column of the user keys (default: guessed).")
    item: str | int | None = setting(None, "Column of the item keys (default: guessed).")
    rating: str | int | None = setting(None, "Column of the ratings (default: guessed).")
    time: str | int | None = setting(None, "Column of the times (default: guessed, optional).")


@dataclass(frozen=True, kw_only=True)
class ReadingSettings(Settings):
    """How the file is read."""

    encoding: str | None = setting(None, "Encoding of a text file that is not UTF-8.")
    strict: bool = setting(False, "Refuse the first line that cannot be read.")
    duplicates: str = setting("last", "Policy for pairs rated more than once.", choices=POLICIES)
    low: float | None = setting(None, "Minimum rating; a lower one is an error.")
    high: float | None = setting(None, "Maximum rating; a higher one is an error.")


@dataclass(frozen=True, kw_only=True)
class HoldOutSettings(Settings):
    """How lines are split into training, validation and test."""

    method: str = setting("random", "How ratings or events are held out.", choices=SPLITS)
    validation: float = setting(0.1, "Fraction for validation.", minimum=0, maximum=1)
    test: float = setting(0.1, "Fraction for test.", minimum=0, maximum=1)
    leave: int = setting(1, "With leave-out: number of each user held out.", minimum=1)


@dataclass(frozen=True, kw_only=True)
class SplitSettings(HoldOutSettings):
    """How ratings are split into training, validation and test."""

    known_only: bool = setting(False, "Hold out only users and items that occur in training.")


@dataclass(frozen=True, kw_only=True)
class TableSettings(Settings):
    """The tables of users and items."""

    dim: int = setting(16, "Width of the rows.", minimum=1, maximum=1024)
    budget: str | None = setting(None, "Maximum size of both tables, such as 40KB.")
    ratio: float | None = setting(
        None, "Compression ratio against float32 rows (default 8).", above=0
    )
    users: str | None = setting(None, f"Table of the users, such as {ANCHORS} or dense.")
    items: str | None = setting(None, "Table of the items.")
    auto: bool = setting(False, "Find the number of anchors (NBANT).")
    biases: str | None = setting(None, "Where biases are stored (default: column).", choices=BIASES)
    mean: bool = setting(True, "Add a constant to every score: the mean of the training ratings.")

    def check(self) -> None:
        """Refuse contradictory sizes."""
        if self.budget is not None and self.ratio is not None:
            raise ArgumentError("give table.budget or table.ratio (--budget, --ratio), not both")
        if self.budget is not None:
            read_bytes(self.budget)
        if self.dim < 2 and self.biases in (None, "column"):
            raise ArgumentError(
                "dim=1: biases in the first column leave no factor: "
                "give dim of at least 2, or other biases"
            )


@dataclass(frozen=True, kw_only=True)
class AnchorSettings(Settings):
    """Sparse weights over anchors."""

    nonzeros: int | None = setting(
        None, "Number of nonzero weights left at the end, in both tables.", minimum=1
    )
    lam: float | None = setting(
        None, "L1 penalty on the weights (default 1.5e-5; 7e-5 with table.auto).", minimum=0
    )
    lambda1: float | None = setting(None, "NBANT: cost of an anchor (with table.auto: 2e-3).")
    lambda2: float | None = setting(None, "NBANT: cost of a weight (with table.auto: 1e-6).")
    refit: int | None = setting(
        None, "NBANT: epochs without penalty at the end (with table.auto: 6).", minimum=0
    )
    init_std: float = setting(0.1, "Standard deviation of the initial weights.", above=0)


@dataclass(frozen=True, kw_only=True)
class FactorizationTraining(Settings):
    """Gradient descent on tables."""

    epochs: int | None = setting(
        None, "Maximum number of epochs (default 15; 10 with table.auto).", minimum=1
    )
    batch: int | None = setting(None, "Ratings per step (default 2048).", minimum=1)
    lr: float | None = setting(
        None, "Learning rate (default 0.02 with anchors, Yogi; else 0.01, AdamW).", above=0
    )
    weight_decay: float | None = setting(
        None, "Weight decay of tables without anchors (default 0.2).", minimum=0
    )
    cosine: bool | None = setting(None, "Cosine schedule of the learning rate (default: true).")
    patience: int | None = setting(
        None, "Epochs without improvement before training stops (default 3).", minimum=0
    )
    sse_users: float | None = setting(
        None, "Probability of sharing a user's row (SSE).", minimum=0, maximum=1
    )
    sse_items: float | None = setting(
        None, "Probability of sharing an item's row (SSE).", minimum=0, maximum=1
    )


@dataclass(frozen=True, kw_only=True)
class FactorStorage(Settings):
    """How numbers are stored: float32, float16, or int8 to int2."""

    weights: str | None = setting(None, "Storage of the weights of codes (default float32).")
    dictionary: str | None = setting(None, "Storage of anchors or plain rows (default float32).")

    def check(self) -> None:
        """Refuse unknown kinds of storage."""
        for kind in (self.weights, self.dictionary):
            level_bits(kind or "float32")


@dataclass(frozen=True, kw_only=True)
class RecommenderSettings(Settings):
    """All settings of ``train_recommender``.

    >>> RecommenderSettings.from_values({"table.budget": "40KB"}).graded
    True
    >>> RecommenderSettings.from_values({"anchors.nonzeros": 300}).resolve().table.users
    'anchor:anchors=16'
    """

    titles: Path | None = setting(None, "File of item keys and titles.")
    columns: ColumnSettings = group(ColumnSettings)
    reading: ReadingSettings = group(ReadingSettings)
    split: SplitSettings = group(SplitSettings)
    table: TableSettings = group(TableSettings)
    anchors: AnchorSettings = group(AnchorSettings)
    training: FactorizationTraining = group(FactorizationTraining)
    storage: FactorStorage = group(FactorStorage)

    @property
    def graded(self) -> bool:
        """Whether rows are graded instead of trained as tables."""
        table = self.table
        by_bytes = table.budget is not None or table.ratio is not None
        named = (table.users, table.items, self.anchors.nonzeros)
        return by_bytes or not (table.auto or any(value is not None for value in named))

    @property
    def grows(self) -> bool:
        """Whether the number of anchors is found (NBANT)."""
        return self.anchors.lambda1 is not None

    def check(self) -> None:
        """Refuse settings that have no effect."""
        if not self.graded:
            if not self.table.auto and (self.anchors.lambda1 is None) != (
                self.anchors.lambda2 is None
            ):
                raise ArgumentError(
                    "anchors.lambda1 and anchors.lambda2, the NBANT costs of an anchor and of a "
                    "weight, go together, or with table.auto"
                )
            return
        values = self.values()
        unused = [
            line.name
            for line in self.describe()
            if line.name.startswith(("table.", "anchors.", "training.", "storage."))
            and line.name not in ("table.dim", "table.budget", "table.ratio")
            and values[line.name] != line.default
        ]
        if unused:
            raise ArgumentError(
                f"{unused[0]} is for tables (--users, --items); graded rows have no setting but "
                "table.dim, table.budget and table.ratio: leave one of them out"
            )

    def required_packages(self) -> Packages:
        """Return the optional packages that the tables need.

        >>> users = "banded:hot=10,tail='product:parts=4,choices=16'"
        >>> RecommenderSettings.from_values({"table.users": users}).required_packages()
        {'compress': ['faiss']}
        """
        specs = (self.table.users or "", self.table.items or "")
        coded = any(re.search(r"\b(kd|product)\b", spec) for spec in specs)
        return {"compress": ["faiss"]} if coded else {}

    def resolve(self) -> RecommenderSettings:
        """Return the settings of tables with every default filled in."""
        if self.graded:
            return self
        values = self.values()
        anchored = values["anchors.nonzeros"] is not None
        default = GROWING if self.table.auto else ANCHORS if anchored else "dense"
        defaults: dict[str, Any] = {"table.users": default, "table.items": default}
        defaults |= {"table.biases": "column", "training.batch": 2048}
        defaults |= {"training.weight_decay": 0.2}
        defaults |= dict.fromkeys(("training.sse_users", "training.sse_items"), 0.0)
        defaults |= dict.fromkeys(("storage.weights", "storage.dictionary"), "float32")
        defaults |= DEFAULTS
        if self.table.auto:
            epochs = values["training.epochs"] or AUTO["training.epochs"]
            defaults |= AUTO | {"training.patience": epochs}
        missing = {name: value for name, value in defaults.items() if values[name] is None}
        return type(self).from_values(values | missing)


@dataclass(frozen=True, kw_only=True)
class RankingColumns(Settings):
    """Columns of the file, by name or by number from 1."""

    user: str | int | None = setting(None, "Column of the user keys (default: guessed).")
    item: str | int | None = setting(None, "Column of the item keys (default: guessed).")
    count: str | int | None = setting(None, "Column of counts (default: guessed, optional).")
    time: str | int | None = setting(None, "Column of the times (default: guessed, optional).")


@dataclass(frozen=True, kw_only=True)
class EventReading(Settings):
    """How the file is read."""

    encoding: str | None = setting(None, "Encoding of a text file that is not UTF-8.")
    strict: bool = setting(False, "Refuse the first line that cannot be read.")
    minimum: float | None = setting(
        None, "Minimum rating of a line that counts as an event; the others are dropped."
    )


@dataclass(frozen=True, kw_only=True)
class RankingTables(Settings):
    """The stored rows of users and items."""

    dim: int | None = setting(
        None, "Width of the rows (default: chosen by validation).", minimum=1, maximum=1024
    )
    budget: str | None = setting(None, "Maximum size of both tables, such as 300KB.")
    ratio: float | None = setting(
        None, "Compression ratio against float32 rows of the same width (default 8).", above=0
    )
    users: str | None = setting(
        None, "Table of the users, such as product:parts=8 (default: graded)."
    )
    items: str | None = setting(None, "Table of the items.")

    def check(self) -> None:
        """Refuse contradictory sizes."""
        sized = self.budget is not None or self.ratio is not None
        if self.budget is not None and self.ratio is not None:
            raise ArgumentError("give table.budget or table.ratio (--budget, --ratio), not both")
        if self.budget is not None:
            read_bytes(self.budget)
        if (self.users is None) != (self.items is None):
            raise ArgumentError("give tables of both sides, or of neither: --users and --items")
        if self.users is not None and sized:
            raise ArgumentError(
                "--budget and --ratio are for graded rows: leave out --users, --items"
            )


@dataclass(frozen=True, kw_only=True)
class AlsSettings(Settings):
    """Alternating least squares; settings left out are chosen by the validation NDCG@10."""

    alpha: float | None = setting(None, "Factor of the confidence of events.", above=0)
    regularization: float | None = setting(None, "L2 regularization of rows.", minimum=1e-9)
    counts: str | None = setting(None, "Confidence by count.", choices=COUNTS)
    sharpness: float | None = setting(
        None, "Exponent of the weights of columns by variance.", minimum=0, maximum=1
    )
    iterations: int = setting(15, "Number of iterations.", minimum=1)


@dataclass(frozen=True, kw_only=True)
class BprSettings(Settings):
    """Bayesian personalized ranking with shared embeddings (method bpr)."""

    epochs: int = setting(40, "Maximum number of epochs.", minimum=1)
    lr: float = setting(0.1, "Learning rate.", above=0)
    weight_decay: float = setting(0.01, "Weight decay.", minimum=0)
    negatives: int = setting(3, "Items drawn for each event.", minimum=1)
    p_users: float = setting(
        0.1, "Probability of sharing a user's row (SSE).", minimum=0, maximum=1
    )
    p_items: float = setting(0.01, "Probability of sharing an item's row.", minimum=0, maximum=1)


@dataclass(frozen=True, kw_only=True)
class RankingSettings(Settings):
    """All settings of ``train_ranking``.

    >>> RankingSettings.from_values({"table.dim": 64, "als.counts": "log"}).als.counts
    'log'
    """

    method: str = setting("als", "Factorization.", choices=("als", "bpr"))
    titles: Path | None = setting(None, "File of item keys and titles.")
    columns: RankingColumns = group(RankingColumns)
    reading: EventReading = group(EventReading)
    split: HoldOutSettings = group(HoldOutSettings)
    table: RankingTables = group(RankingTables)
    als: AlsSettings = group(AlsSettings)
    bpr: BprSettings = group(BprSettings)


@dataclass(frozen=True, kw_only=True)
class UpdateReading(Settings):
    """How the file of new ratings or events is read."""

    encoding: str | None = setting(None, "Encoding of a text file that is not UTF-8.")
    strict: bool = setting(False, "Refuse the first line that cannot be read.")
    minimum: float | None = setting(
        None, "Ranking: minimum rating of an event (default: that of the training)."
    )


@dataclass(frozen=True, kw_only=True)
class UpdateSettings(Settings):
    """All settings of ``update_recommender``.

    >>> UpdateSettings.from_values({"columns.user": "customer"}).columns.user
    'customer'
    """

    columns: ColumnSettings = group(ColumnSettings)
    reading: UpdateReading = group(UpdateReading)
