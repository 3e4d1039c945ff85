"""From the recipe of a language model and a text to the trained model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array

from featherbed.graphs import cooccurrence_counts
from featherbed.optim import SGD, AdamW, Averaged, Budget, Several, Yogi
from featherbed.progress import show_progress
from featherbed.tables.model import split_codes
from featherbed.tasks.awd import AwdModel
from featherbed.tasks.checkpoints import Checkpoints
from featherbed.tasks.continuation import END
from featherbed.tasks.data import Corpus
from featherbed.tasks.language_recipe import LanguageRecipe
from featherbed.tasks.lm import LanguageModel, columns, perplexity, segments, sizes_of, train
from featherbed.tasks.results import Result
from featherbed.tasks.steering import steering
from featherbed.tasks.word_choice import Lexicon
from featherbed.tasks.word_model import WordModel
from featherbed.tasks.word_tables import WordsMade, WordTable, make_word_table

EMPHASIS = 0.7  # power of counts by which words weigh in a fit to plain rows
WARMING = 100  # steps in which a new optimizer comes to its rate in the middle of training


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
    samples = (
        min(recipe.samples, made.table.num_embeddings) if recipe.softmax == "sampled" else None
    )
    shared: dict[str, Any] = {
        "hidden": recipe.hidden,
        "layers": recipe.layers,
        "tied": recipe.tied,
        "samples": samples,
    }
    shared |= {"dropout": recipe.dropout, "drop_words": recipe.drop_words}
    if recipe.model == "lstm":
        model: WordModel = LanguageModel(made.module, **shared)
    else:
        own = {
            name: getattr(recipe, name)
            for name in ("drop_input", "drop_layers", "drop_weights", "ar", "tar")
        }
        model = AwdModel(made.module, **shared, **own)
    model.precision = torch.bfloat16 if recipe.precision == "bfloat16" else None
    return model


def new_optimizer(
    recipe: LanguageRecipe, model: WordModel, made: WordsMade
) -> torch.optim.Optimizer:
    """Make the optimizer that a recipe asks for, with the table's penalties; codes have one of their own."""
    codes, others = split_codes(model)
    groups: list[dict[str, Any]] = [{"params": others}]
    if recipe.weights_lr is not None:
        weights = made.table.transform
        groups = [
            {"params": [one for one in others if one is not weights]},
            {"params": [weights], "lr": recipe.weights_lr},
        ]
    rules: dict[str, Any] = {"adamw": AdamW, "yogi": Yogi}
    rule = rules.get(recipe.optimizer, SGD)
    found: torch.optim.Optimizer = rule(
        groups, recipe.rate, weight_decay=recipe.decay, penalties=made.penalties
    )
    if codes:
        found = Several(found, AdamW(codes, recipe.code_lr, weight_decay=0.0))
    return Averaged(found, patience=recipe.averaging) if recipe.optimizer == "ntasgd" else found


def falling(span: tuple[int, int], epochs: int, steps: int) -> Callable[[float], float]:
    """Return the share of the rate at a place of a span of epochs; after the first span the optimizer is new and warms up.

    >>> [round(falling((2, 4), 4, 1000)(place), 2) for place in (0.0, 0.05, 0.5, 1.0)]
    [0.0, 0.23, 0.15, 0.0]
    """
    first, last = span

    def share(place: float) -> float:
        warm = min(1.0, place * steps / WARMING) if first else 1.0
        return warm * half_cosine((first + place * (last - first)) / epochs)

    return share


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
    if not recipe.dense_epochs:
        with show_progress(f"{name}, choosing words", shown=progress, transient=True):
            made = make_word_table(recipe.words, lexicon_of(corpus), seed)
        model = new_model(recipe, made, seed)
        return trained(
            recipe, corpus, made, model, (0, recipe.epochs), seed, checkpoints, progress, name
        )
    words = WordTable(dim=recipe.words.dim, start=recipe.words.start, sse=recipe.words.sse)
    plain = replace(recipe, words=words, dense_epochs=0, weights_lr=None, patience=recipe.epochs)
    rows = make_word_table(plain.words, lexicon_of(corpus), seed)
    apart = None if checkpoints is None else checkpoints.stage("dense")
    span, model = (0, recipe.dense_epochs), new_model(plain, rows, seed)
    first = trained(plain, corpus, rows, model, span, seed, apart, progress, f"{name}, plain rows")
    with show_progress(f"{name}, fitting the table", shown=progress, transient=True):
        made, model = fitted_to(first, recipe, corpus, seed)
    if first.result.interrupted:
        optimizer = new_optimizer(recipe, model, made)
        first.result.sizes = {"words": sizes_of(model, optimizer)}
        return finished(
            LanguageFitted(model, made, optimizer, first.result),
            steering(recipe.words, made, 1),
            corpus,
        )
    last = trained(
        recipe,
        corpus,
        made,
        model,
        (recipe.dense_epochs, recipe.epochs),
        seed,
        checkpoints,
        progress,
        name,
    )
    for row in last.result.history:
        row["epoch"] += recipe.dense_epochs
    last.result.history[:0] = first.result.history
    last.result.seconds += first.result.seconds
    return last


@torch.no_grad()
def fitted_to(
    first: LanguageFitted, recipe: LanguageRecipe, corpus: Corpus, seed: int
) -> tuple[WordsMade, WordModel]:
    """Return the table of a recipe, fitted to the plain rows of a trained model, and the model over it, with its net."""
    made = make_word_table(recipe.words, lexicon_of(corpus), seed)
    rows = first.made.table.weight
    weights = torch.from_numpy((corpus.counts + 1.0) ** EMPHASIS)
    made.table.fit_dense(rows, weights if made.table.weighs_rows else None)
    model = new_model(recipe, made, seed)
    net = {
        key: value
        for key, value in first.model.state_dict().items()
        if not key.startswith("words.")
    }
    model.load_state_dict(net, strict=False)
    left = float((rows - made.table.weight).square().sum() / rows.square().sum())
    epochs = "one epoch" if recipe.dense_epochs == 1 else f"{recipe.dense_epochs} epochs"
    note = f"fitted to plain rows after {epochs}: {100 * (1 - left):.0f} % of their squares"
    return made._replace(notes=(*made.notes, note)), model


def trained(
    recipe: LanguageRecipe,
    corpus: Corpus,
    made: WordsMade,
    model: WordModel,
    span: tuple[int, int],
    seed: int,
    checkpoints: Checkpoints | None,
    progress: bool,
    name: str,
) -> LanguageFitted:
    """Train a model over the epochs of a span, at the rates that these have among all epochs of the recipe."""
    optimizer = new_optimizer(recipe, model, made)
    places = len(columns(corpus.train, recipe.batch)) - 1
    draws = [(seed, epoch) if recipe.random_length else None for epoch in range(span[1] - span[0])]
    steps = sum(len(segments(places, recipe.length, draw)) for draw in draws)
    steered = steering(recipe.words, made, steps)
    result = train(
        model,
        optimizer,
        corpus,
        epochs=span[1] - span[0],
        batch=recipe.batch,
        length=recipe.length,
        clip=recipe.clip,
        patience=recipe.epochs if steered else recipe.patience,
        seed=seed,
        random_length=recipe.random_length,
        rate=falling(span, recipe.epochs, steps) if recipe.falls else None,
        schedulers=steered,
        checkpoints=checkpoints,
        settings=asdict(recipe),
        progress=progress,
        name=name,
    )
    fitted = LanguageFitted(model, made, optimizer, result)
    return (
        finished(fitted, steered, corpus)
        if any(isinstance(one, Budget) for one in steered)
        else fitted
    )


def finished(fitted: LanguageFitted, steered: list[Any], corpus: Corpus) -> LanguageFitted:
    """Let budgets end with what they allow, and measure the model as it then is."""
    for budget in [one for one in steered if isinstance(one, Budget)]:
        budget.finish()
    fitted.result.metrics["validation"] = {
        "perplexity": perplexity(fitted.model, corpus.validation)
    }
    return fitted
