"""Settings of language models."""

from __future__ import annotations

from dataclasses import dataclass

from featherbed.apps.words import StorageSettings, VocabularySettings, WordTableSettings
from featherbed.errors import ArgumentError
from featherbed.settings import Settings, group, setting
from featherbed.tables import parse_spec

LEARNING_RATES = {"adamw": 3e-3, "yogi": 1e-2, "sgd": 30.0, "ntasgd": 30.0}


@dataclass(frozen=True, kw_only=True)
class CorpusSettings(VocabularySettings):
    """How plain text is read."""

    tokenizer: str = setting(
        "whitespace", "How lines are split into words.", choices=("whitespace", "words")
    )
    encoding: str | None = setting(None, "Encoding of the files, by default UTF-8.")
    prompts: tuple[str, ...] = setting((), "Texts to continue in the report.")


@dataclass(frozen=True, kw_only=True)
class LanguageModelSettings(Settings):
    """The network between the word table and the softmax."""

    kind: str = setting("lstm", "lstm, or awd: AWD-LSTM.", choices=("lstm", "awd"))
    hidden: int | None = setting(None, "Width of the LSTM, by default that of rows.", minimum=1)
    layers: int = setting(2, "Number of LSTM layers.", minimum=1, maximum=16)
    tied: bool = setting(True, "Score words with the input table; otherwise with a dense one.")
    softmax: str = setting("full", "Softmax in training.", choices=("full", "sampled"))
    samples: int = setting(1000, "sampled: number of words per step.", minimum=1)
    precision: str = setting(
        "float32", "Precision of the softmax in training.", choices=("float32", "bfloat16")
    )


@dataclass(frozen=True, kw_only=True)
class DropoutSettings(Settings):
    """Dropout and activation penalties; all but ``output`` and ``words`` are of the AWD-LSTM."""

    output: float = setting(0.2, "Dropout of the output (lstm: of every layer).", minimum=0)
    words: float = setting(0.0, "Dropout of whole words.", minimum=0)
    input: float = setting(0.4, "awd: dropout of the rows.", minimum=0)
    layers: float = setting(0.25, "awd: dropout between layers.", minimum=0)
    weights: float = setting(0.5, "awd: dropout of hidden-to-hidden weights.", minimum=0)
    ar: float = setting(2.0, "awd: penalty on the size of activations.", minimum=0)
    tar: float = setting(1.0, "awd: penalty on changes of activations.", minimum=0)

    def check(self) -> None:
        """Raise ``ArgumentError`` for a dropout of 1 or more."""
        for name in ("output", "words", "input", "layers", "weights"):
            if getattr(self, name) >= 1:
                raise ArgumentError(f"{name}={getattr(self, name):g}: give a fraction below 1")


@dataclass(frozen=True, kw_only=True)
class LanguageTrainingSettings(Settings):
    """The training loop."""

    epochs: int = setting(10, "Maximum number of epochs.", minimum=1)
    dense_epochs: int = setting(
        0, "First epochs that train dense rows, to which the table is then fitted.", minimum=0
    )
    batch: int = setting(20, "Number of text columns read in parallel.", minimum=1)
    length: int = setting(35, "Number of words of backpropagation through time.", minimum=1)
    random_length: bool = setting(False, "Vary the length at random, as the AWD-LSTM does.")
    patience: int = setting(3, "Epochs without improvement before training stops.", minimum=0)

    def check(self) -> None:
        """Raise ``ArgumentError`` if no epoch is left for the table."""
        if self.dense_epochs >= self.epochs:
            raise ArgumentError(
                f"dense_epochs={self.dense_epochs} of epochs={self.epochs}: give a whole number "
                f"from 0 to {self.epochs - 1}"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Settings):
    """The optimizer.

    The published learning rate of sgd and ntasgd is 30; the threshold of a penalty is its weight
    times the learning rate, so they need much smaller weights than adamw.
    """

    kind: str = setting(
        "adamw",
        "Optimizer; ntasgd: SGD, averaged when validation stops improving.",
        choices=tuple(LEARNING_RATES),
    )
    lr: float | None = setting(
        None, "Learning rate (default: adamw 0.003, yogi 0.01, others 30).", above=0
    )
    transform_lr: float | None = setting(
        None, "Learning rate of anchor weights, by default lr.", above=0
    )
    code_lr: float = setting(3e-3, "Learning rate of code logits (KD and DPQ tables).", above=0)
    cosine: bool | None = setting(
        None, "Decay the learning rate to zero (default: for adamw and yogi)."
    )
    decay: float = setting(0.0, "Weight decay.", minimum=0)
    clip: float = setting(0.25, "Maximum norm of the gradient.", above=0)
    averaging: int = setting(
        5, "ntasgd: epochs without improvement before averaging starts.", minimum=1
    )

    @property
    def learning_rate(self) -> float:
        """The learning rate, or its default."""
        return LEARNING_RATES[self.kind] if self.lr is None else self.lr

    @property
    def decays_lr(self) -> bool:
        """Whether the learning rate decays to zero."""
        return self.kind in ("adamw", "yogi") if self.cosine is None else self.cosine


@dataclass(frozen=True, kw_only=True)
class LanguageSettings(Settings):
    """All settings of a language model.

    The AWD-LSTM as published (ANT, table 8) has a table of width 400 and ``model.kind=awd,
    model.hidden=1150, model.layers=3, training.length=70, training.random_length=true,
    optimizer.kind=ntasgd, optimizer.decay=1.2e-6, dropout.output=0.4, dropout.words=0.1``.

    >>> LanguageSettings.from_values({"table.dim": "100"}).width
    100
    """

    table: WordTableSettings = group(WordTableSettings, spec="anchor:anchors=500,slots=16", dim=200)
    model: LanguageModelSettings = group(LanguageModelSettings)
    dropout: DropoutSettings = group(DropoutSettings)
    training: LanguageTrainingSettings = group(LanguageTrainingSettings)
    optimizer: OptimizerSettings = group(OptimizerSettings)
    corpus: CorpusSettings = group(CorpusSettings)
    storage: StorageSettings = group(StorageSettings)

    def check(self) -> None:
        """Raise ``ArgumentError`` if network, table and training do not go together."""
        table, model, dense_epochs = self.table, self.model, self.training.dense_epochs
        if self.optimizer.transform_lr is not None and not table.has_anchors:
            raise ArgumentError(
                f"optimizer.transform_lr={self.optimizer.transform_lr}: {table.spec!r} has no "
                "anchors, so there are no anchor weights"
            )
        if model.kind == "lstm" and model.tied and self.width != table.dim:
            raise ArgumentError(
                f"model.hidden={model.hidden}: a tied lstm has the width of rows, {table.dim}; "
                "model.tied=false or model.kind=awd take any"
            )
        if dense_epochs and parse_spec(table.spec)[0].is_dense:
            raise ArgumentError(
                f"training.dense_epochs={dense_epochs}: all epochs of {table.spec!r} train dense "
                "rows"
            )
        if dense_epochs and table.has_anchors and (table.selection or table.domain):
            raise ArgumentError(
                f"training.dense_epochs={dense_epochs}: anchors are fitted to rows and correspond "
                "to no words; leave table.selection and table.domain out"
            )

    @property
    def width(self) -> int:
        """The width of the LSTM."""
        return self.table.dim if self.model.hidden is None else self.model.hidden
