"""The recipe of a language model: which table its words have, which net, how it is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from featherbed.errors import ArgumentError
from featherbed.tables import DenseTable
from featherbed.tables.spec import parse_spec
from featherbed.tasks.word_tables import WordTable

MODELS, SOFTMAXES = ("lstm", "awd"), ("full", "sampled")
RATES = {
    "adamw": 3e-3,
    "yogi": 1e-2,
    "sgd": 30.0,
    "ntasgd": 30.0,
}  # learning rates where none is given


@dataclass(frozen=True)
class LanguageRecipe:
    """The table of the words, the net over it, and the settings of its training.

    ``awd`` as published (ANT, table 8): ``hidden=1150, layers=3, length=70, random_length=True, optimizer="ntasgd",
    dropout=0.4, decay=1.2e-6`` with a table of width 400; the rest are the defaults. ``sgd`` and ``ntasgd`` learn by the
    published rate of 30, and a penalty's threshold is its weight times the rate: much smaller weights than under ``adamw``.

    Args:
        model: ``lstm``, with one kind of dropout, or ``awd``, with all of them.
        tied: whether the softmax scores by the same table; otherwise by rows of its own, and only the input is compact.
        softmax: ``full``, or ``sampled`` with ``samples`` words a step in training.
        optimizer: ``adamw``, ``yogi``, ``sgd``, or ``ntasgd``: SGD that is averaged (``fb.Averaged``) once validation
            has not improved for ``averaging`` epochs.
        lr: 3e-3 for adamw, 0.01 for yogi, 30 for the others, unless given.
        cosine: whether the rate falls to zero by half a cosine; None: for adamw and yogi.
        weights_lr: rate of the weights of anchors, which start small and have far to go; ``lr`` unless given.
        dense_epochs: the first so many of ``epochs`` train plain rows; the table is then fitted to them (``fit_dense``, words
            weighed by their counts to the power of 0.7 where a table can) and trained for the epochs that are left.
        code_lr: rate at which codes (KD, DPQ) are chosen, by AdamW.
        precision: of the products of the softmax in training; ``bfloat16`` is faster where the processor has it.
        drop_words, drop_input, drop_layers, drop_weights, ar, tar: of ``awd``; the first of ``lstm`` too.

    >>> LanguageRecipe(words=WordTable("anchor:anchors=500,slots=8", dim=200)).rate
    0.003
    """

    model: str = "lstm"
    words: WordTable = field(default_factory=lambda: WordTable(dim=200))
    hidden: int = 200
    layers: int = 2
    tied: bool = True
    softmax: str = "full"
    samples: int = 1000
    epochs: int = 10
    dense_epochs: int = 0
    batch: int = 20
    length: int = 35
    random_length: bool = False
    optimizer: str = "adamw"
    lr: float | None = None
    cosine: bool | None = None
    weights_lr: float | None = None
    code_lr: float = 3e-3
    decay: float = 0.0
    clip: float = 0.25
    averaging: int = 5
    dropout: float = 0.2
    drop_words: float = 0.0
    drop_input: float = 0.4
    drop_layers: float = 0.25
    drop_weights: float = 0.5
    ar: float = 2.0
    tar: float = 1.0
    patience: int = 3
    precision: str = "float32"

    def __post_init__(self) -> None:
        for name, given, accepted in (
            ("model", self.model, MODELS),
            ("softmax", self.softmax, SOFTMAXES),
            ("optimizer", self.optimizer, tuple(RATES)),
            ("precision", self.precision, ("float32", "bfloat16")),
        ):
            if given not in accepted:
                raise ArgumentError(f"{name}={given!r}: use one of {', '.join(accepted)}")
        for name in ("hidden", "layers", "epochs", "batch", "length", "samples"):
            if getattr(self, name) < 1:
                raise ArgumentError(
                    f"{name}={getattr(self, name)}: give a whole number of at least 1"
                )
        for name in ("lr", "weights_lr"):
            given = getattr(self, name)
            if given is not None and not (math.isfinite(given) and given > 0):
                raise ArgumentError(f"{name}={given}: give a number above 0")
        if self.weights_lr is not None and not self.words.has_weights:
            raise ArgumentError(
                f"weights_lr={self.weights_lr}: {self.words.spec!r} has no anchors, so no weights to learn"
            )
        self._check_dense_epochs()
        if self.model == "lstm" and self.tied and self.hidden != self.words.dim:
            raise ArgumentError(
                f"hidden={self.hidden} and rows of width {self.words.dim}: a tied lstm needs the same for both; "
                "tied=False or model='awd' take any"
            )

    def _check_dense_epochs(self) -> None:
        if not 0 <= self.dense_epochs < self.epochs:
            raise ArgumentError(
                f"dense_epochs={self.dense_epochs} of epochs={self.epochs}: give a whole number from 0 to {self.epochs - 1}"
            )
        if not self.dense_epochs:
            return
        if issubclass(parse_spec(self.words.spec)[0], DenseTable):
            raise ArgumentError(
                f"dense_epochs={self.dense_epochs}: {self.words.spec!r} has plain rows from first to last"
            )
        if self.words.has_weights and (self.words.by is not None or self.words.domain):
            raise ArgumentError(
                f"dense_epochs={self.dense_epochs}: anchors are then fitted to the rows and stand for no words; "
                "leave by and domain out"
            )

    @property
    def rate(self) -> float:
        """The learning rate."""
        return RATES[self.optimizer] if self.lr is None else self.lr

    @property
    def falls(self) -> bool:
        """Whether the rate falls to zero."""
        return self.optimizer in ("adamw", "yogi") if self.cosine is None else self.cosine
