"""A recipe of a language model: which table its words have, which net, how it is trained. Settings in, trained model out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

from featherbed.errors import ArgumentError
from featherbed.graphs import cooccurrence_counts
from featherbed.optim import SGD, AdamW, Averaged, Budget, Several, Yogi
from featherbed.tables.model import split_codes
from featherbed.tasks.awd import AwdModel
from featherbed.tasks.checkpoints import Checkpoints
from featherbed.tasks.data import Corpus
from featherbed.tasks.lm import LanguageModel, columns, perplexity, segments, train
from featherbed.tasks.results import Result
from featherbed.tasks.steering import steering
from featherbed.tasks.word_choice import Lexicon
from featherbed.tasks.word_model import WordModel
from featherbed.tasks.word_tables import WordsMade, WordTable, make_word_table

MODELS, SOFTMAXES = ("lstm", "awd"), ("full", "sampled")
RATES = {"adamw": 3e-3, "yogi": 1e-2, "sgd": 30.0, "ntasgd": 30.0}  # learning rates where none is given
END, UNKNOWN = "<eos>", "<unk>"
SPECIAL = ("<pad>", UNKNOWN)


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
                raise ArgumentError(f"{name}={getattr(self, name)}: give a whole number of at least 1")
        for name in ("lr", "weights_lr"):
            given = getattr(self, name)
            if given is not None and not (math.isfinite(given) and given > 0):
                raise ArgumentError(f"{name}={given}: give a number above 0")
        if self.weights_lr is not None and not self.words.has_weights:
            raise ArgumentError(f"weights_lr={self.weights_lr}: {self.words.spec!r} has no anchors, so no weights to learn")
        if self.model == "lstm" and self.tied and self.hidden != self.words.dim:
            raise ArgumentError(
                f"hidden={self.hidden} and rows of width {self.words.dim}: a tied lstm needs the same for both; "
                "tied=False or model='awd' take any"
            )

    @property
    def rate(self) -> float:
        """The learning rate."""
        return RATES[self.optimizer] if self.lr is None else self.lr

    @property
    def falls(self) -> bool:
        """Whether the rate falls to zero."""
        return self.optimizer in ("adamw", "yogi") if self.cosine is None else self.cosine


class LanguageFitted(NamedTuple):
    """A trained model, its table as it was made, its optimizer and what the loop recorded."""

    model: WordModel
    made: WordsMade
    optimizer: torch.optim.Optimizer
    result: Result


def lexicon_of(corpus: Corpus) -> Lexicon:
    """Return what choosing words may ask of a corpus: its lines are the documents, a window is 10 words of the training text.

    >>> corpus = Corpus(("a", "<eos>"), np.array([3, 1]), np.array([0, 0, 1, 0]), np.array([0]), np.array([0]))
    >>> lexicon_of(corpus).documents().toarray()
    array([[2, 1],
           [1, 0]])
    """
    count = len(corpus.words)
    return Lexicon(
        corpus.words,
        corpus.counts,
        documents=lambda: lines_of(corpus),
        cooccurrence=lambda: cooccurrence_counts(corpus.train, count, window=10),
        samples=len(corpus.train),
    )


def lines_of(corpus: Corpus) -> csr_array:  # -> int64 [lines, V]
    """Count the words of every line of the training text."""
    end = corpus.words.index(END) if END in corpus.words else -1
    line = np.concatenate([[0], np.cumsum(corpus.train == end)[:-1]])
    ones = np.ones(len(corpus.train), dtype=np.int64)
    return csr_array((ones, (line, corpus.train)), shape=(int(line[-1]) + 1, len(corpus.words)))


def new_model(recipe: LanguageRecipe, made: WordsMade, seed: int) -> WordModel:
    """Make the net that a recipe asks for over a table."""
    torch.manual_seed(seed)  # torch's own layers start from its own generator
    samples = min(recipe.samples, made.table.num_embeddings) if recipe.softmax == "sampled" else None
    shared: dict[str, Any] = {"hidden": recipe.hidden, "layers": recipe.layers, "tied": recipe.tied, "samples": samples}
    shared |= {"dropout": recipe.dropout, "drop_words": recipe.drop_words}
    if recipe.model == "lstm":
        model: WordModel = LanguageModel(made.module, **shared)
    else:
        own = {name: getattr(recipe, name) for name in ("drop_input", "drop_layers", "drop_weights", "ar", "tar")}
        model = AwdModel(made.module, **shared, **own)
    model.precision = torch.bfloat16 if recipe.precision == "bfloat16" else None
    return model


def new_optimizer(recipe: LanguageRecipe, model: WordModel, made: WordsMade) -> torch.optim.Optimizer:
    """Make the optimizer that a recipe asks for, with the table's penalties; codes have one of their own."""
    codes, others = split_codes(model)
    groups: list[dict[str, Any]] = [{"params": others}]
    if recipe.weights_lr is not None:
        weights = made.table.transform
        groups = [{"params": [one for one in others if one is not weights]}, {"params": [weights], "lr": recipe.weights_lr}]
    rules: dict[str, Any] = {"adamw": AdamW, "yogi": Yogi}
    rule = rules.get(recipe.optimizer, SGD)
    found: torch.optim.Optimizer = rule(groups, recipe.rate, weight_decay=recipe.decay, penalties=made.penalties)
    if codes:
        found = Several(found, AdamW(codes, recipe.code_lr, weight_decay=0.0))
    return Averaged(found, patience=recipe.averaging) if recipe.optimizer == "ntasgd" else found


def half_cosine(place: float) -> float:
    """Return the share of the rate at a place of training, from 0 to 1.

    >>> [round(half_cosine(place), 2) for place in (0.0, 0.5, 1.0)]
    [1.0, 0.5, 0.0]
    """
    return 0.5 + 0.5 * math.cos(math.pi * place)


def fit_language(
    recipe: LanguageRecipe,
    corpus: Corpus,
    *,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
    progress: bool = True,
    name: str = "lm",
) -> LanguageFitted:
    """Train what a recipe asks for on the training text; the best epoch on the validation text stays.

    >>> text = np.tile(np.arange(6), 100)
    >>> corpus = Corpus(tuple("abcdef"), np.bincount(text), text, text[:200], text[:200])
    >>> recipe = LanguageRecipe(words=WordTable("anchor:anchors=4", dim=8), hidden=8, epochs=2, dropout=0.0)
    >>> fitted = fit_language(recipe, corpus, progress=False)
    >>> [row["epoch"] for row in fitted.result.history]
    [0, 1]
    """
    made = make_word_table(recipe.words, lexicon_of(corpus), seed)
    model = new_model(recipe, made, seed)
    optimizer = new_optimizer(recipe, model, made)
    places = len(columns(corpus.train, recipe.batch)) - 1
    draws = [(seed, epoch) if recipe.random_length else None for epoch in range(recipe.epochs)]
    steps = sum(len(segments(places, recipe.length, draw)) for draw in draws)
    steered = steering(recipe.words, made, steps)
    result = train(
        model,
        optimizer,
        corpus,
        epochs=recipe.epochs,
        batch=recipe.batch,
        length=recipe.length,
        clip=recipe.clip,
        patience=recipe.epochs if steered else recipe.patience,
        seed=seed,
        random_length=recipe.random_length,
        rate=half_cosine if recipe.falls else None,
        schedulers=steered,
        checkpoints=checkpoints,
        settings=asdict(recipe),
        progress=progress,
        name=name,
    )
    for budget in [one for one in steered if isinstance(one, Budget)]:
        budget.finish()
        result.metrics["validation"] = {"perplexity": perplexity(model, corpus.validation)}
    return LanguageFitted(model, made, optimizer, result)


@torch.no_grad()
def continuation(
    model: WordModel, words: Sequence[str], start: str, count: int = 30, *, seed: int = 0, temperature: float = 0.8
) -> str:
    """Return ``count`` words that the model draws after ``start``, words between blanks; an end of line begins a new one.

    p ∝ exp(logit / temperature); temperature 0 takes the most likely word. ``<pad>`` and ``<unk>`` are never drawn.

    >>> import featherbed as fb
    >>> model = LanguageModel(fb.DenseTable(3, 4), hidden=4)
    >>> len(continuation(model, ("the", "cat", "<unk>"), "the", 5).split())
    5
    """
    if not math.isfinite(temperature) or temperature < 0:
        raise ArgumentError(f"temperature={temperature}: give a number of at least 0")
    if count < 1:
        raise ArgumentError(f"count={count}: give a whole number of at least 1")
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    barred = barred_words(words)
    ids = torch.from_numpy(word_ids(words, start))
    state, written, everything = None, [], model.all_rows()
    for _ in range(count):
        found = model.read(model.rows_of(ids[:, None], everything), state)
        assert everything is not None
        scores = everything.logits(found.hidden[-1, 0], model.bias)
        scores[barred] = -torch.inf
        if temperature:
            chances = ((scores - scores.max()).double() / temperature).softmax(0)
            ids = torch.multinomial(chances, 1, generator=generator)
        else:
            ids = scores.argmax()[None]
        state = found.state
        written.append(words[int(ids)])
    return " ".join(written).replace(f" {END} ", "\n").replace(END, "\n").strip(" ")


def barred_words(words: Sequence[str]) -> list[int]:
    """Return the ids that are never written: padding and unknown words, unless there is nothing else."""
    found = [at for at, word in enumerate(words) if word in SPECIAL]
    return found if len(found) < len(words) else []


def word_ids(words: Sequence[str], text: str) -> NDArray[np.int64]:  # -> [n], n at least 1
    """Return the ids of the words of a text; without any it begins after an end of line.

    >>> word_ids(("a", "<unk>", "<eos>"), "a b").tolist(), word_ids(("a", "<unk>", "<eos>"), "").tolist()
    ([0, 1], [2])
    """
    id_of = {word: number for number, word in enumerate(words)}
    unknown = id_of.get(UNKNOWN)
    found = [id_of.get(word, unknown) for word in text.split()] or [id_of.get(END, 0)]
    if None in found:
        missing = next(word for word in text.split() if word not in id_of)
        raise ArgumentError(f"{missing!r} is no word of this model, which has no {UNKNOWN}: use words it knows")
    return np.array(found, dtype=np.int64)
