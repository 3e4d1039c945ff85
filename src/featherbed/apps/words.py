"""What text applications share: settings, selection of words, word tables, the run."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.anchors import (
    Coreset,
    Frequency,
    FrequencyThenClusters,
    GroupLasso,
    HalfNormal,
    KMeansPlusPlus,
    ObjectAnchors,
    TfIdf,
    VocabularyDropout,
)
from featherbed.apps.bundle import LIST, MODEL, PRECISIONS, TOKENIZER, WORDS, stored_bytes
from featherbed.apps.pipeline import Application, Checkpoints, PenaltyFreeze, Result
from featherbed.checks import TRAINING, Packages, require
from featherbed.errors import ArgumentError, DataError, NotPackable
from featherbed.graphs import Graph, wordnet
from featherbed.io import find_data
from featherbed.optim import L1, Budget, GroupL1, NonNegativeL1, Penalty
from featherbed.packed import PackedTable, compare_sizes, file_size, level_bits
from featherbed.report import word_insight
from featherbed.settings import Settings, setting
from featherbed.sharing import SSE
from featherbed.tables import DenseTable, Table, make_table, parse_spec

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
        if self.has_anchors and "anchors" not in keywords:
            raise ArgumentError(
                f"selection={self.selection}: {self.spec!r} leaves the number of anchors open; "
                "add anchors=..."
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


GLOVE = "glove.6B.50d.top60k.npz"
SUBWORD_MARKS = "Ġ▁#"  # of tokenizers, at the start or end of a subword


@dataclass(frozen=True)
class Lexicon:
    """The vocabulary of a training text, and the statistics used to select words.

    ``documents`` returns counts [documents, V], ``cooccurrence`` counts of pairs [V, V] (both
    scipy.sparse), ``related`` a graph of the pairs that co-occur often enough; ``samples`` is the
    number of training examples.

    >>> int(Lexicon(("<pad>", "<unk>", "news"), np.array([0, 0, 9]), padding_idx=0).counts.sum())
    9
    """

    words: Sequence[str]
    counts: NDArray[np.int64]  # [V]
    documents: Callable[[], Any] | None = None
    labels: NDArray[np.int64] | None = None  # [documents]
    cooccurrence: Callable[[], Any] | None = None
    related: Callable[[], Graph] | None = None
    padding_idx: int | None = None
    samples: int | None = None

    def show(self, ids: Tensor, limit: int = 10) -> str:
        """Return the first of some words, for a note."""
        first = ", ".join(self.words[int(i)] for i in ids[:limit])
        return first if len(ids) <= limit else f"{first} and {len(ids) - limit:,} more"


class WordAnchors(ObjectAnchors):
    """Anchors at given words; atoms start at ``rows`` [K, d] if given."""

    def __init__(self, ids: Tensor, rows: Tensor | None, transform_std: float) -> None:
        super().__init__(transform_std)
        self.ids, self.rows = ids, rows

    def choose(self, *_: object) -> Tensor:
        """Return the ids of the words."""
        return self.ids

    def vectors(self, *_: object) -> Tensor | None:
        """Return the initial atoms."""
        return self.rows


def select_words(
    selection: str, lexicon: Lexicon, count: int, dim: int, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:  # -> [K], [K, d]
    """Return the selected words, best first, without padding, and their initial atoms if known."""
    padding = -1 if lexicon.padding_idx is None else lexicon.padding_idx
    available = len(lexicon.words) - (padding >= 0)
    if not 1 <= count <= available:
        raise ArgumentError(
            f"{count} words are to be selected, the vocabulary has {available:,}: select fewer"
        )
    if selection == "random":
        order = torch.randperm(len(lexicon.words), generator=generator)
        return order[order != padding][:count], None
    candidates, selector = _selector(selection, lexicon)
    order = selector.choose(len(candidates), min(count + 1, len(candidates)), generator)
    order = order[candidates[order] != padding][:count]
    if len(order) < count:
        raise ArgumentError(
            f"selection={selection}: only {len(order):,} words have the statistics or vectors it "
            f"needs, {count:,} are to be selected; select fewer"
        )
    return candidates[order], selector.vectors(order, dim)


def _selector(selection: str, lexicon: Lexicon) -> tuple[Tensor, ObjectAnchors]:
    """Return the candidate words and the object that selects among them."""
    everything = torch.arange(len(lexicon.words))
    match selection:
        case "frequency":
            return everything, Frequency(lexicon.counts)
        case "tfidf":
            return everything, TfIdf(statistic(selection, "documents", lexicon.documents)())
        case "lasso" | "vvd":
            documents = statistic(selection, "documents", lexicon.documents)
            labels = statistic(selection, "labels", lexicon.labels)
            method = GroupLasso if selection == "lasso" else VocabularyDropout
            return everything, method(documents(), labels)
        case "kmeans-cooccurrence" | "coreset":
            counts = statistic(selection, "co-occurrence counts", lexicon.cooccurrence)()
            features = counts.astype(np.float64).log1p().tocsr()
            known = np.flatnonzero(np.diff(features.indptr))
            clusters = Coreset if selection == "coreset" else KMeansPlusPlus
            return torch.from_numpy(known), clusters(features[known])
    known, vectors = glove_vectors(lexicon.words)
    if selection == "kmeans-glove":
        return torch.from_numpy(known), KMeansPlusPlus(vectors)
    return torch.from_numpy(known), FrequencyThenClusters(lexicon.counts[known], vectors)


def statistic(selection: str, name: str, value: Any) -> Any:
    """Return a statistic, or raise ``ArgumentError`` if the text has none."""
    if value is None:
        raise ArgumentError(
            f"selection={selection} needs {name}, which this text does not have: "
            "use frequency or random"
        )
    return value


def glove_vectors(
    words: Sequence[str],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:  # -> ids [n], vectors [n, 50]
    """Return the ids of the words that GloVe knows, and their vectors, normalized."""
    path = find_data("glove") / GLOVE
    try:
        with np.load(path, allow_pickle=False) as stored:
            known = stored["words"].item().decode().split("\n")
            vectors: NDArray[np.float32] = stored["vectors"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read as GloVe vectors: {error}") from None
    row_of = {word: row for row, word in enumerate(known)}
    rows = np.array([row_of.get(word.strip(SUBWORD_MARKS).lower(), -1) for word in words])
    ids: NDArray[np.int64] = np.flatnonzero(rows >= 0)
    found = vectors[rows[ids]].astype(np.float32)
    return ids, found / np.linalg.norm(found, axis=1, keepdims=True).clip(min=1e-12)


LASSO_END = 0.6  # fraction of the steps after which a group lasso removes no more rows


M = TypeVar("M", bound=nn.Module)


class WordTable(NamedTuple):
    """A table of words, the module a model calls (with SSE if used), its penalties and notes."""

    table: Table
    module: Table | SSE
    penalties: dict[nn.Parameter, Penalty]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class FittedText(Generic[M]):
    """A trained model, its table of words (or items), and the record of its training."""

    model: M
    words: WordTable
    result: Result

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row of numbers per epoch."""
        return self.result.history

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended training early."""
        return self.result.interrupted

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the table."""
        return self.words.notes


def build_word_table(
    settings: WordTableSettings, lexicon: Lexicon, seed: int, *, sparse: bool = False
) -> WordTable:
    """Build a table over the words of a lexicon.

    ``sparse``: wide rows (of a dense table, or code logits) have sparse gradients, for optimizers
    of this library.

    >>> lexicon = Lexicon(("<pad>", "<unk>", "good", "bad"), np.array([0, 0, 5, 9]), padding_idx=0)
    >>> settings = WordTableSettings(spec="anchor:anchors=1", dim=8, selection="frequency")
    >>> build_word_table(settings, lexicon, seed=0).notes
    ('anchors: bad',)
    """
    generator = torch.Generator().manual_seed(seed)
    method, keywords = parse_spec(settings.spec)
    notes: list[str] = []
    extra: dict[str, Any] = {"padding_idx": lexicon.padding_idx, "generator": generator}
    accepted = inspect.signature(method.__init__).parameters
    if "samples" in accepted and "samples" not in keywords:
        samples = int(lexicon.counts.sum()) if lexicon.samples is None else lexicon.samples
        extra["samples"] = max(1, samples)
    if "std" in accepted and "std" not in keywords:
        extra["std"] = settings.init_std
    if "counts" in accepted:
        scores = _row_scores(settings, keywords, lexicon, generator, notes)
        extra["counts"] = torch.from_numpy(scores)
    if sparse and "sparse" in accepted and "sparse" not in keywords and not method.has_anchors:
        extra["sparse"] = True
    if method.has_anchors:
        extra |= _anchor_init(settings, method, keywords, lexicon, generator, notes)
    table = make_table(settings.spec, len(lexicon.words), settings.dim, **extra)
    if not method.has_anchors or settings.row_std is not None:
        table.scale_initial_rows(settings.row_std or settings.init_std)
    penalties = _penalties(settings, table, lexicon, notes)
    module: Table | SSE = SSE(table, settings.sse, generator=generator) if settings.sse else table
    return WordTable(table, module, penalties, tuple(notes))


def table_schedulers(settings: WordTableSettings, words: WordTable, steps: int) -> list[Any]:
    """Return the objects stepped after the optimizer, over ``steps`` steps, for the table.

    They are a budget of nonzero weights, the end of a group lasso, or the table's own schedulers.

    >>> lexicon = Lexicon(("a", "b"), np.array([1, 1]))
    >>> settings = WordTableSettings(spec="anchor:anchors=2", dim=4, nonzeros=3)
    >>> len(table_schedulers(settings, build_word_table(settings, lexicon, seed=0), steps=10))
    1
    """
    if settings.nonzeros is not None:
        return [Budget(words.penalties, settings.nonzeros, steps=steps)]
    if settings.is_group_lasso:
        return [PenaltyFreeze(words.penalties, round(LASSO_END * steps))]
    return words.table.schedulers(steps)


def _row_scores(
    settings: WordTableSettings,
    keywords: dict[str, Any],
    lexicon: Lexicon,
    generator: torch.Generator,
    notes: list[str],
) -> NDArray[np.int64]:  # -> [V]
    """Return the scores by which a table keeps words: counts, or the order of a selection."""
    if settings.selection in (None, "frequency") or "keep" not in keywords:
        return np.asarray(lexicon.counts, dtype=np.int64)
    count = int(keywords["keep"])
    ids, _ = select_words(str(settings.selection), lexicon, count, settings.dim, generator)
    scores = np.zeros(len(lexicon.words), dtype=np.int64)
    scores[ids.numpy()] = np.arange(len(ids), 0, -1)
    notes.append(f"kept by {settings.selection}: {lexicon.show(ids)}")
    return scores


def _anchor_init(
    settings: WordTableSettings,
    method: type[Table],
    keywords: dict[str, Any],
    lexicon: Lexicon,
    generator: torch.Generator,
    notes: list[str],
) -> dict[str, Any]:
    """Return the constructor keywords that initialize the anchors."""
    if "init" in keywords or "inits" in keywords or "anchors" not in keywords:
        return {}
    selection = settings.selection or ("random" if settings.domain else None)
    if selection is None or (selection == "random" and not settings.domain):
        return method.init_settings([HalfNormal(settings.init_std)])
    sizes = list(method.anchor_sizes(keywords))
    ids, rows = select_words(selection, lexicon, sum(sizes), settings.dim, generator)
    notes.append(f"anchors: {lexicon.show(ids)}")
    atoms = [None] * len(sizes) if rows is None else torch.split(rows, sizes)
    return method.init_settings(
        [
            WordAnchors(part, start, settings.init_std)
            for part, start in zip(torch.split(ids, sizes), atoms, strict=True)
        ]
    )


def _penalties(
    settings: WordTableSettings, table: Table, lexicon: Lexicon, notes: list[str]
) -> dict[nn.Parameter, Penalty]:
    """Return the penalties of a table; weights between related words are exempt."""
    if settings.is_group_lasso:
        return {parameter: GroupL1(settings.lam) for parameter in table.penalized_rows}
    if lexicon.padding_idx is not None:
        with torch.no_grad():
            for parameter in table.penalized:
                parameter[lexicon.padding_idx] = 0.0
    if not table.nonnegative:
        if settings.domain:
            raise ArgumentError(
                f"domain={', '.join(settings.domain)} exempts weights from a non-negative "
                "penalty: leave nonnegative=false out"
            )
        return {parameter: L1(settings.lam) for parameter in table.penalized}
    exempt = None
    if settings.domain:
        exempt = table.related(_domain_graph(settings, lexicon))
        notes.append(
            f"related by {' and '.join(settings.domain)}: {len(exempt):,} of "
            f"{exempt.rows * exempt.anchors:,} weights"
        )
    return {parameter: NonNegativeL1(settings.lam, exempt) for parameter in table.penalized}


def _domain_graph(settings: WordTableSettings, lexicon: Lexicon) -> Graph:
    """Return the relations between words, of all domains together."""
    graphs: list[Graph] = []
    if "wordnet" in settings.domain:
        graphs.append(wordnet(list(lexicon.words)))
    if "cooccurrence" in settings.domain:
        related = statistic("cooccurrence", "co-occurrence counts", lexicon.related)
        graphs.append(related())
    return graphs[0] if len(graphs) == 1 else graphs[0] | graphs[1]


Numbers = dict[str, Any]


D = TypeVar("D", bound=Any)
F = TypeVar("F", bound=Any)
S = TypeVar("S", bound=Any)


class TextRun(Application[S, D, F]):
    """A run of a text application.

    ``served`` is the stored model, opened again; a table without packed form is stored as dense
    rows beside the folder, so that it can be measured.
    """

    files = (WORDS, MODEL, LIST, TOKENIZER)
    packed: PackedTable | None
    served: Any
    train: Callable[..., F]

    def check(self) -> None:
        """Raise an error if a package is missing."""
        require(f"training a {self.kind}", TRAINING, *self.packages())

    def packages(self) -> list[Packages]:
        """Return the optional packages that the settings need."""
        simple = self.settings.table.selection in (None, "random", "frequency")
        return [] if simple else [{"train": ["sklearn"]}]

    def fit(self, data: D, checkpoints: Checkpoints) -> F:
        """Train the model."""
        options, name = self.options, self.settings.model.kind
        shared: dict[str, Any] = {"seed": options.seed, "progress": options.progress, "name": name}
        return self.train(self.settings, data, checkpoints=checkpoints, **shared)

    def store(self, folder: Path, data: D, fitted: F) -> None:
        """Write the files that serving reads, and open them."""
        storage: StorageSettings = self.settings.storage
        table = fitted.words.table.eval()
        kinds = {"values": storage.code_weights, "dictionary": storage.dictionary}
        try:
            self.packed = table.pruned().pack(**kinds)
        except NotPackable:
            self.packed = None
            rows = DenseTable.from_dense(table.weight.detach(), padding_idx=table.padding_idx)
            place = folder.with_name("rows")
            self.served = self.write(place, rows.pack(), "float32", data, fitted)
        else:
            self.served = self.write(folder, self.packed, storage.weights, data, fitted)

    @abstractmethod
    def write(self, folder: Path, packed: PackedTable, weights: str, data: D, fitted: F) -> Any:
        """Write the model over a packed table, its other weights in a precision, and open it."""

    def shared_report(
        self, name: str, words: Sequence[str], counts: Any, fitted: F, metrics: Numbers
    ) -> Numbers:
        """Return the entries that the pages of both applications have."""
        table, insight = fitted.words.table, None
        if self.packed is not None:
            anchors = table.anchor_objects()
            known = None if anchors is None else anchors.tolist()
            insight = word_insight(self.packed, words, counts, known)
        return self.report_footer(fitted, metrics) | {
            "name": name,
            "sizes": page_sizes(metrics["sizes"]),
            "model": {
                "kind": self.settings.model.kind,
                "table": type(table).__name__,
                "words": len(words),
                "dim": table.embedding_dim,
            },
            "insight": insight,
            "notes": list(fitted.notes),
        }

    def summarize(self, metrics: Numbers) -> list[str]:
        """Return the lines about size and files."""
        sizes = metrics["sizes"]
        packed = "the table has no packed form: no model that can be served was written"
        stored = size_line(sizes) if "whole" in sizes else packed
        return [parameter_line(sizes), stored, *self.closing_lines(metrics)]


@torch.no_grad()
def measure_sizes(
    folder: Path, model: nn.Module, table: Table, packed: PackedTable | None
) -> Numbers:
    """Return the sizes of a model: parameters as papers count them, bytes of each stored part.

    ``dense_whole`` are the bytes of the same model with float32 rows and weights.
    """
    dense = table.num_embeddings * table.embedding_dim
    others = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in table.parameters())
    sizes: Numbers = {
        "parameters": table.pruned_parameter_count(),
        "dense_parameters": dense,
        "other_parameters": others,
        "float32": 4 * dense,
    }
    if packed is None:
        return sizes
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    words, whole = files.get(LIST, 0) + files.get(TOKENIZER, 0), stored_bytes(folder)
    return sizes | {
        "whole": whole,
        "table": files[WORDS],
        "words": words,
        "rest": whole - files[WORDS] - words,
        "resident": packed.nbytes,
        "ratio": 4 * dense / file_size(packed, keys=False),
        "dense_whole": 4 * (dense + others) + words,
    }


def parameter_line(sizes: Numbers) -> str:
    """Compare the number of parameters with that of dense rows.

    >>> parameter_line({"parameters": 500, "dense_parameters": 2000})
    'the table has 500 parameters, 4.0 times fewer than the 2,000 of dense rows'
    """
    times = sizes["dense_parameters"] / max(1, sizes["parameters"])
    compared = f"{times:,.1f} times fewer than" if times >= 1 else f"{1 / times:,.1f} times"
    return (
        f"the table has {sizes['parameters']:,} parameters, {compared} "
        f"the {sizes['dense_parameters']:,} of dense rows"
    )


def size_line(sizes: Numbers) -> str:
    """Compare the bytes of all stored files with those of float32 rows and weights.

    >>> size_line({"whole": 100, "dense_whole": 400, "table": 50, "words": 20, "rest": 30})
    ... # doctest: +ELLIPSIS
    '100 bytes in all, 4.0 times smaller than 400 with float32 rows and weights: table 50, ...
    """
    compared = compare_sizes(sizes["whole"], sizes["dense_whole"])
    parts = f"table {sizes['table']:,}, words {sizes['words']:,}, the rest {sizes['rest']:,}"
    return f"{sizes['whole']:,} bytes in all, {compared} with float32 rows and weights: {parts}"


def page_sizes(sizes: Numbers) -> Numbers:
    """Return sizes as a page shows them."""
    shown = {name: sizes[name] for name in ("parameters", "dense_parameters")}
    if "whole" not in sizes:
        return shown
    rest = {"the rest of the model": sizes["rest"]}
    return shown | {
        "file": sizes["whole"],
        "parts": {"table": sizes["table"], "words": sizes["words"], **rest},
        "float32": sizes["dense_whole"],
        "float16": (sizes["dense_whole"] - sizes["words"]) // 2 + sizes["words"],
    }
