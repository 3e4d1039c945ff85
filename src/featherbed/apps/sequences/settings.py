"""Settings of sequence models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from featherbed.apps.bundle import PRECISIONS
from featherbed.apps.words import WordTableSettings
from featherbed.errors import ArgumentError
from featherbed.packed import level_bits
from featherbed.settings import Settings, group, setting
from featherbed.tables import parse_spec

MAX_FULL = 20_000  # items up to which the softmax is over all of them by default


@dataclass(frozen=True, kw_only=True)
class EventColumns(Settings):
    """Columns of the file, by name or by number from 1."""

    user: str | int | None = setting(None, "Column of the user keys (default: guessed).")
    item: str | int | None = setting(None, "Column of the item keys (default: guessed).")
    time: str | int | None = setting(None, "Column of the times (default: guessed).")


@dataclass(frozen=True, kw_only=True)
class EventReadingSettings(Settings):
    """How the file is read."""

    encoding: str | None = setting(None, "Encoding of a text file that is not UTF-8.")
    strict: bool = setting(False, "Refuse the first line that cannot be read.")
    repeats: bool | None = setting(
        None, "Recommend items of the history again (default: if a tenth of the events repeat)."
    )


@dataclass(frozen=True, kw_only=True)
class ItemTableSettings(Settings):
    """The table of the items, read by the model and scored by its softmax.

    >>> ItemTableSettings(spec="anchor:anchors=20").word_table.has_anchors
    True
    """

    spec: str = setting("dense", "Table method, such as dense, anchor:anchors=50, graded:bits=3.")
    dim: int = setting(64, "Row width.", minimum=2, maximum=4096)
    lam: float = setting(0.0, "Weight of the L1 penalty on anchor weights.", minimum=0)
    nonzeros: int | None = setting(
        None, "Number of nonzero anchor weights at the end of training.", minimum=1
    )

    @property
    def word_table(self) -> WordTableSettings:
        """The settings of a table of words that is built in the same way."""
        return WordTableSettings(
            spec=self.spec,
            dim=self.dim,
            lam=self.lam,
            nonzeros=self.nonzeros,
            init_std=0.1 if self.has_anchors else self.dim**-0.5,
            row_std=self.dim**-0.5 if self.has_anchors else None,
        )

    @property
    def has_anchors(self) -> bool:
        """Whether rows are weighted sums of anchors."""
        return parse_spec(self.spec)[0].has_anchors

    def check(self) -> None:
        """Raise ``ArgumentError`` for settings that the table has no use for, or no packed form."""
        if self.word_table and not parse_spec(self.spec)[0].packable:
            raise ArgumentError(
                f"table.spec={self.spec}: this table has no packed form, so it could not be served"
            )


@dataclass(frozen=True, kw_only=True)
class TransformerSettings(Settings):
    """The causal transformer over the last items."""

    length: int = setting(200, "Number of last items the model reads.", minimum=1, maximum=4096)
    layers: int = setting(2, "Number of blocks.", minimum=1, maximum=16)
    heads: int = setting(2, "Number of attention heads.", minimum=1, maximum=64)
    inner: int = setting(2, "Width of the feed-forward layer, in row widths.", minimum=1, maximum=8)
    users: int = setting(
        0, "Width of a user's row beside every item (SSE-PT), 0 for none.", minimum=0, maximum=4096
    )
    softmax: str | None = setting(
        None,
        f"Softmax in training (default: full up to {MAX_FULL:,} items).",
        choices=("full", "sampled"),
    )
    samples: int = setting(2000, "sampled: number of items per step.", minimum=1)
    dropout: float = setting(0.2, "Dropout of rows and of both parts of a block.", minimum=0)

    def check(self) -> None:
        """Raise ``ArgumentError`` for a dropout of 1 or more."""
        if self.dropout >= 1:
            raise ArgumentError(f"dropout={self.dropout:g}: give a fraction below 1")


@dataclass(frozen=True, kw_only=True)
class SharingSettings(Settings):
    """Stochastic shared embeddings in training: ids replaced after the sequence is built."""

    inputs: float = setting(
        0.0, "Probability of replacing an item that is read.", minimum=0, maximum=1
    )
    targets: float = setting(
        0.0, "Probability of replacing an item to be predicted.", minimum=0, maximum=1
    )
    users: float = setting(
        0.9, "Probability of replacing the user of a sequence.", minimum=0, maximum=1
    )
    graph: Path | None = setting(
        None, "File of pairs of related item keys (SSE-Graph); without it SSE-SE."
    )
    rho: float = setting(
        100.0, "graph: how many times as likely a neighbor is as any other item.", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class SequenceTraining(Settings):
    """The training loop: AdamW, warm-up, then half a cosine to zero."""

    epochs: int = setting(30, "Maximum number of epochs.", minimum=1)
    batch: int = setting(32, "Number of windows of a user's history per step.", minimum=1)
    lr: float = setting(2e-3, "Learning rate.", above=0)
    weight_decay: float = setting(0.01, "Weight decay.", minimum=0)
    clip: float = setting(1.0, "Maximum norm of the gradient.", above=0)
    patience: int = setting(5, "Epochs without improvement before training stops.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class SequenceStorage(Settings):
    """How the model is stored."""

    ratio: float = setting(
        8.0, "Dense rows: bytes of float32 rows over those of the stored rows.", minimum=1
    )
    code_weights: str = setting("float16", "Other tables: storage of weights of codes.")
    dictionary: str = setting("float16", "Other tables: storage of anchors or atoms.")
    weights: str = setting("int8", "All other weights of the model.", choices=PRECISIONS)

    def check(self) -> None:
        """Raise ``ArgumentError`` for an unknown precision."""
        for kind in (self.code_weights, self.dictionary):
            level_bits(kind)


@dataclass(frozen=True, kw_only=True)
class SequenceSettings(Settings):
    """All settings of a sequence model.

    SSE-PT as published has ``table.dim=50, model.users=50, sse.users=0.92, sse.inputs=0.1``.

    >>> SequenceSettings.from_values({"table.dim": "50", "model.users": 30}).width
    80
    """

    titles: Path | None = setting(None, "File of item keys and titles.")
    columns: EventColumns = group(EventColumns)
    reading: EventReadingSettings = group(EventReadingSettings)
    table: ItemTableSettings = group(ItemTableSettings)
    model: TransformerSettings = group(TransformerSettings)
    sse: SharingSettings = group(SharingSettings)
    training: SequenceTraining = group(SequenceTraining)
    storage: SequenceStorage = group(SequenceStorage)

    def check(self) -> None:
        """Raise ``ArgumentError`` if the width cannot be divided among the heads."""
        if self.width % self.model.heads:
            raise ArgumentError(
                f"model.heads={self.model.heads}: the width of the model, {self.width}, must be a "
                "multiple of it"
            )
        if self.sse.graph is not None and not (self.sse.inputs or self.sse.targets):
            raise ArgumentError(
                "sse.graph has no effect without sse.inputs or sse.targets, the probabilities of "
                "replacement"
            )

    @property
    def width(self) -> int:
        """The width of the transformer: of an item's row and a user's."""
        return self.table.dim + self.model.users
