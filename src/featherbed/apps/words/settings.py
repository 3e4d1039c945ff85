"""Settings that classifiers and language models share: word table, vocabulary, storage."""

from __future__ import annotations

from dataclasses import dataclass

from featherbed.apps.words.bundle import PRECISIONS
from featherbed.errors import ArgumentError
from featherbed.packed.matrix import level_bits
from featherbed.settings import Settings, setting
from featherbed.tables.spec import parse_spec

SELECTIONS = (
    "random",
    "frequency",
    "tfidf",
    "kmeans-glove",
    "kmeans-cooccurrence",
    "coreset",
    "frequency-clusters",
    "lasso",
    "vvd",
)
DOMAINS = ("wordnet", "cooccurrence")


@dataclass(frozen=True, kw_only=True)
class WordTableSettings(Settings):
    """The table of word vectors: its method, initialization and penalty.

    With ``selection="lasso"`` and the spec ``dense``, whole rows have a group lasso of weight
    ``lam``. Without a selection, anchors correspond to no word, and ``selected`` keeps the most
    frequent words.

    >>> WordTableSettings(spec="anchor:anchors=10", selection="frequency").has_anchors
    True
    """

    spec: str = setting("dense", "Table method, such as anchor:anchors=10, dense, kd:parts=32.")
    dim: int = setting(256, "Row width.", minimum=1, maximum=4096)
    selection: str | None = setting(
        None, "How words are selected as anchors, or to be kept.", choices=SELECTIONS
    )
    domain: tuple[str, ...] = setting(
        (), "Relations between words and anchors exempt from the penalty.", choices=DOMAINS
    )
    lam: float = setting(
        0.0, "Weight of the L1 penalty on anchor weights (group lasso: on rows).", minimum=0
    )
    nonzeros: int | None = setting(
        None, "Number of nonzero anchor weights at the end of training.", minimum=1
    )
    sse: float = setting(
        0.0, "Probability of replacing a word by another in training.", minimum=0, maximum=1
    )
    init_std: float = setting(
        0.1, "Standard deviation of initial rows (of anchor weights, with anchors).", above=0
    )
    row_std: float | None = setting(
        None, "With anchors: standard deviation of initial rows; anchors are scaled.", above=0
    )

    def check(self) -> None:
        """Raise ``ArgumentError`` for settings that the table has no use for."""
        method, keywords = parse_spec(self.spec)
        if not self.has_anchors:
            unused = {"nonzeros": self.nonzeros, "row_std": self.row_std, "domain": self.domain}
            for name, value in unused.items():
                if value:
                    text = ", ".join(value) if isinstance(value, tuple) else value
                    raise ArgumentError(
                        f"{name}={text}: {self.spec!r} has no anchors, so {name} has no meaning; "
                        "leave it out"
                    )
        if self.lam and not (self.has_anchors or self.is_group_lasso):
            raise ArgumentError(
                f"lam={self.lam:g}: {self.spec!r} has no penalized weights; selection=lasso "
                "penalizes dense rows"
            )
        if self.is_group_lasso and not self.lam:
            raise ArgumentError(
                f"lam={self.lam:g}: selection=lasso with dense rows needs lam, the weight of the "
                "penalty, above 0"
            )
        if self.selection is None:
            return
        if not (self.has_anchors or method.selects_rows or self.is_group_lasso):
            raise ArgumentError(
                f"selection={self.selection}: {self.spec!r} selects no words; anchor, mixture and "
                "selected do"
            )
        if "init" in keywords or "inits" in keywords:
            raise ArgumentError(
                f"selection={self.selection}: {self.spec!r} initializes anchors too; give one"
            )

    @property
    def has_anchors(self) -> bool:
        """Whether rows are weighted sums of anchors."""
        return parse_spec(self.spec)[0].has_anchors

    @property
    def is_group_lasso(self) -> bool:
        """Whether whole rows of a dense table are penalized."""
        return self.selection == "lasso" and parse_spec(self.spec)[0].is_dense


@dataclass(frozen=True, kw_only=True)
class VocabularySettings(Settings):
    """The words that a model knows."""

    min_count: int = setting(1, "Words with a lower count are unknown.", minimum=1)
    max_words: int | None = setting(
        None, "Maximum size of the vocabulary; the most frequent words stay.", minimum=4
    )
    min_cooccurrence: int = setting(
        5, "Co-occurrences of two words from which they count as related.", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class StorageSettings(Settings):
    """The precision of the stored files."""

    code_weights: str = setting("float16", "Weights of codes: float32, float16, int8, int4 ...")
    dictionary: str = setting("float16", "Anchors, atoms or plain rows: float32, float16, int8 ...")
    weights: str = setting("float16", "All other weights of the model.", choices=PRECISIONS)

    def check(self) -> None:
        """Raise ``ArgumentError`` for an unknown precision."""
        level_bits(self.code_weights)
        level_bits(self.dictionary)
