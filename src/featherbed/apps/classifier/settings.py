"""Settings of text classifiers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from featherbed.apps.words import (
    StorageSettings,
    VocabularySettings,
    WordTableSettings,
)
from featherbed.errors import ArgumentError
from featherbed.io.texts import MAX_LENGTH
from featherbed.settings import Settings, group, setting


@dataclass(frozen=True, kw_only=True)
class ClassifierDataSettings(Settings):
    """How labeled texts are read and split."""

    label: str | None = setting(None, "Column of labels, by name or number; detected by default.")
    text: str | None = setting(
        None, "Column of texts; several with commas are joined; detected by default."
    )
    skip_empty: bool = setting(False, "Leave out texts without a word; by default an error.")
    encoding: str | None = setting(None, "Encoding of the files, by default UTF-8.")
    validation: float = setting(
        0.15, "Fraction of the training texts used for validation.", above=0, maximum=0.9
    )
    cache: Path | None = setting(None, "Folder that keeps encoded texts and co-occurrence counts.")


@dataclass(frozen=True, kw_only=True)
class TextVocabularySettings(VocabularySettings):
    """How texts become ids."""

    length: int = setting(MAX_LENGTH, "Maximum number of words per text.", minimum=1)
    long: str = setting("cut", "Handling of longer texts.", choices=("cut", "error"))
    subwords: int | None = setting(
        None, "Train this number of subwords, used instead of words.", minimum=4
    )

    def check(self) -> None:
        """Raise ``ArgumentError`` if the vocabulary has two sizes."""
        if self.subwords is not None and (self.max_words is not None or self.min_count > 1):
            raise ArgumentError(
                f"subwords={self.subwords} is the size of the vocabulary: leave min_count and "
                "max_words out"
            )


@dataclass(frozen=True, kw_only=True)
class ClassifierModelSettings(Settings):
    """The network over the word table."""

    kind: str = setting(
        "cnn",
        "cnn: convolutions over words; bag: mean of a text's rows.",
        choices=("cnn", "bag"),
    )
    channels: int = setting(100, "cnn: number of filters of each width.", minimum=1)
    widths: tuple[int, ...] = setting((3, 4, 5), "cnn: widths of the filters.", minimum=1)
    hidden: int | None = setting(None, "bag: width of a hidden layer.", minimum=1)
    dropout: float = setting(0.5, "Dropout before the last layer.", minimum=0, maximum=0.95)

    def check(self) -> None:
        """Raise ``ArgumentError`` for a layer that the network does not have."""
        if self.hidden is not None and self.kind != "bag":
            raise ArgumentError(
                f"hidden={self.hidden}: the {self.kind} has no hidden layer; use kind=bag, or "
                "leave hidden out"
            )
        if not self.widths:
            raise ArgumentError("widths=(): give at least one width")


@dataclass(frozen=True, kw_only=True)
class ClassifierTrainingSettings(Settings):
    """The training loop; the defaults are those of the CNN of Liang et al. (2021, Table 6)."""

    epochs: int = setting(20, "Maximum number of epochs.", minimum=1)
    batch: int = setting(256, "Number of texts per step.", minimum=1)
    lr: float = setting(5e-3, "Learning rate.", above=0)
    code_lr: float = setting(5e-3, "Learning rate of code logits (KD and DPQ tables).", above=0)
    optimizer: str = setting("adam", "Optimizer.", choices=("adam", "yogi"))
    decay: float = setting(
        0.0, "adam: decoupled weight decay of all but penalized weights.", minimum=0
    )
    cosine: bool = setting(
        False, "Warm the learning rate up over a tenth of the steps, then decay it to zero."
    )
    patience: int = setting(3, "Epochs without improvement before training stops.", minimum=1)

    def check(self) -> None:
        """Raise ``ArgumentError`` for weight decay with yogi."""
        if self.decay and self.optimizer == "yogi":
            raise ArgumentError(f"decay={self.decay:g}: yogi has no weight decay; use adam")


@dataclass(frozen=True, kw_only=True)
class ClassifierSettings(Settings):
    """All settings of a text classifier.

    >>> ClassifierSettings.from_values({"table.selection": "frequency"}).training.lr
    0.005
    """

    table: WordTableSettings = group(WordTableSettings, spec="anchor:anchors=10")
    model: ClassifierModelSettings = group(ClassifierModelSettings)
    training: ClassifierTrainingSettings = group(ClassifierTrainingSettings)
    vocabulary: TextVocabularySettings = group(TextVocabularySettings)
    data: ClassifierDataSettings = group(ClassifierDataSettings)
    storage: StorageSettings = group(StorageSettings)
