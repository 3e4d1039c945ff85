"""Classifiers of texts, trained: settings in, the best epoch on the validation part out. The test part is never looked at."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.errors import ArgumentError, NotPackable
from featherbed.graphs import Graph, cooccurrence_counts
from featherbed.optim import AdamW, Budget, Several, Yogi
from featherbed.progress import show_progress
from featherbed.tables import DenseTable, Table
from featherbed.tables.model import auxiliary_loss, split_codes
from featherbed.tasks.checkpoints import Checkpoints
from featherbed.tasks.classifiers import BagClassifier, TextCNN, check_dropout
from featherbed.tasks.documents import Documents, Prepared, cooccurring
from featherbed.tasks.recipe import share_of_rate
from featherbed.tasks.results import Result
from featherbed.tasks.steering import steering
from featherbed.tasks.training import Training
from featherbed.tasks.word_tables import Lexicon, WordsMade, WordTable, make_word_table

MODELS = ("cnn", "bag")
OPTIMIZERS = ("adam", "yogi")
POOL = 32  # batches among which texts are sorted by length: batches stay random, and have little padding
TEXTS = 512  # scored at once
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class TextRecipe:
    """A classifier by name, its table of words, and the settings of its training. The defaults are the paper's CNN.

    Args:
        model: ``cnn`` (windows of words, Liang et al. 2021, Table 6) or ``bag`` (the mean of a text's rows).
        words: the table of words.
        epochs: at most so many; training stops ``patience`` epochs after the best on the validation part.
        optimizer: ``adam`` or ``yogi``.
        decay: decoupled weight decay of everything but the weights of anchors (adam only).
        cosine: the learning rate rises over a tenth of the steps and falls to zero along half a cosine; if not it is constant.
        code_lr: learning rate of the code logits of KD and DPQ tables.
        channels, widths: the filters of the CNN, so many of each width.
        hidden: a layer between the mean and the classes of a bag, None for none.

    >>> TextRecipe(words=WordTable("anchor:anchors=10", by="frequency")).lr
    0.005
    """

    model: str = "cnn"
    words: WordTable = field(default_factory=WordTable)
    epochs: int = 20
    batch: int = 256
    lr: float = 5e-3
    dropout: float = 0.5
    patience: int = 3
    optimizer: str = "adam"
    decay: float = 0.0
    cosine: bool = False
    code_lr: float = 5e-3
    channels: int = 100
    widths: tuple[int, ...] = (3, 4, 5)
    hidden: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths))
        for name, known in (("model", MODELS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise ArgumentError(f"{name}={getattr(self, name)!r}: use {' or '.join(known)}")
        for name in ("epochs", "batch", "patience"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name}={value!r}: give a whole number of at least 1")
        for name in ("lr", "code_lr"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ArgumentError(f"{name}={getattr(self, name)}: give a number above 0")
        check_dropout(self.dropout)
        if self.decay and self.optimizer == "yogi":
            raise ArgumentError(f"decay={self.decay:g} goes with optimizer='adam'")
        if self.hidden is not None and self.model != "bag":
            raise ArgumentError(
                f"hidden={self.hidden} is a layer of the bag: give model='bag', or leave it out"
            )


class TextFitted(NamedTuple):
    """A trained classifier, its table of words, its optimizer and what the loop recorded."""

    model: TextCNN | BagClassifier
    made: WordsMade
    optimizer: torch.optim.Optimizer
    result: Result


def lexicon_of(prepared: Prepared, window: int = 10, cache: str | Path | None = None) -> Lexicon:
    """Return what the training part tells of its words; ``cache`` is a folder where related words are kept."""
    train, size = prepared.train, len(prepared.words)

    def near() -> Any:
        return cooccurrence_counts(np.split(train.ids, train.offsets[1:-1]), size, window=window)

    def related(least: int) -> Graph:
        return cooccurring(prepared, window=window, least=least, cache=cache)

    known = None if cache is None else related
    return Lexicon(
        prepared.words,
        prepared.counts,
        lambda: train.counts(size),
        train.labels,
        near,
        0,
        len(train),
        known,
    )


def new_classifier(recipe: TextRecipe, made: WordsMade, classes: int) -> TextCNN | BagClassifier:
    """Make the classifier that a recipe asks for over a table of words."""
    if recipe.model == "cnn":
        return TextCNN(made.module, classes, recipe.widths, recipe.channels, recipe.dropout)
    return BagClassifier(made.module, classes, recipe.dropout, recipe.hidden)


def optimizer_of(recipe: TextRecipe, model: nn.Module, made: WordsMade) -> torch.optim.Optimizer:
    """Return the optimizer; weights under a penalty do not decay, and code logits have a learning rate of their own."""
    codes, others = split_codes(model)
    if recipe.optimizer == "yogi":
        step: torch.optim.Optimizer = Yogi(others, recipe.lr, penalties=made.penalties)
    else:
        penalised = {id(p) for p in made.penalties}
        groups = [
            {"params": [p for p in others if id(p) not in penalised], "weight_decay": recipe.decay},
            {"params": [p for p in others if id(p) in penalised], "weight_decay": 0.0},
        ]
        step = AdamW(
            [group for group in groups if group["params"]], recipe.lr, penalties=made.penalties
        )
    return Several(step, AdamW(codes, recipe.code_lr, weight_decay=0.0)) if codes else step


def batches(
    documents: Documents, size: int, generator: torch.Generator, by_length: bool
) -> Iterator[Ids]:
    """Yield the texts of each batch, all of them once in random order; by length: a batch holds texts of similar length."""
    order = torch.randperm(len(documents), generator=generator).numpy()
    if not by_length:
        yield from (order[start : start + size] for start in range(0, len(order), size))
        return
    lengths, found = documents.lengths, []
    for start in range(0, len(order), POOL * size):
        pool = order[start : start + POOL * size]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        found += [pool[at : at + size] for at in range(0, len(pool), size)]
    yield from (found[at] for at in torch.randperm(len(found), generator=generator).tolist())


def logits_of(
    model: TextCNN | BagClassifier, documents: Documents, index: Ids, length: int
) -> Tensor:  # [B] -> [B, classes]
    """Return what a classifier says of the texts at ``index``."""
    if isinstance(model, BagClassifier):
        ids, offsets = documents.bags(index)
        return model.pooled(torch.from_numpy(ids), torch.from_numpy(offsets))
    widest = max(model.widths)
    logits: Tensor = model(
        torch.from_numpy(documents.padded(index, least=widest, slack=widest, length=length))
    )
    return logits


@torch.no_grad()
def predictions(
    model: TextCNN | BagClassifier, documents: Documents, length: int | None = None
) -> Ids:  # -> [n]
    """Return the class that a classifier gives each text; ``length`` is what texts of the CNN are padded to."""
    was = model.training
    model.eval()
    limit = int(documents.lengths.max(initial=1)) if length is None else length
    order = np.argsort(documents.lengths, kind="stable")
    found = np.empty(len(documents), dtype=np.int64)
    for start in range(0, len(order), TEXTS):
        index = order[start : start + TEXTS]
        found[index] = logits_of(model, documents, index, limit).argmax(1).numpy()
    model.train(was)
    return found


def accuracy(
    model: TextCNN | BagClassifier, documents: Documents, length: int | None = None
) -> float:
    """Return the share of texts whose class is found."""
    return float((predictions(model, documents, length) == documents.labels).mean())


def train_epoch(
    fitted: TextFitted,
    schedulers: list[Any],
    documents: Documents,
    recipe: TextRecipe,
    length: int,
    order: torch.Generator,
) -> Iterator[tuple[float, int, int]]:  # mean loss so far, correct so far, texts so far
    """Go through the training part once, a step at a time."""
    model, optimizer = fitted.model, fitted.optimizer
    model.train()
    total, right, seen = 0.0, 0, 0
    for index in batches(documents, recipe.batch, order, by_length=recipe.model == "cnn"):
        labels = torch.from_numpy(documents.labels[index])
        optimizer.zero_grad()
        logits = logits_of(model, documents, index, length)
        loss = F.cross_entropy(logits, labels)
        (loss + auxiliary_loss(model)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        total, seen = total + float(loss.detach()) * len(index), seen + len(index)
        right += int((logits.detach().argmax(1) == labels).sum())
        yield total / seen, right, seen


def schedulers_of(recipe: TextRecipe, fitted: TextFitted, steps: int) -> list[Any]:
    """Return what is stepped after the optimizer: the learning rate, and what steers the table."""
    steered = steering(recipe.words, fitted.made, steps)
    if not recipe.cosine:
        return steered
    return [
        torch.optim.lr_scheduler.LambdaLR(
            fitted.optimizer, lambda step: share_of_rate(step, steps)
        ),
        *steered,
    ]


def fit_text(
    recipe: TextRecipe,
    prepared: Prepared,
    *,
    seed: int = 0,
    progress: bool = True,
    name: str = "text",
    checkpoints: Checkpoints | None = None,
    cache: str | Path | None = None,
) -> TextFitted:
    """Train what a recipe asks for; the best epoch on the validation part stays.

    With ``checkpoints`` every epoch is saved and a stopped run goes on from the last; Ctrl-C ends training early with the best
    model so far.

    >>> from featherbed.tasks.documents import prepare
    >>> from featherbed.tasks.texts import Texts
    >>> texts = Texts(["good film", "bad film"] * 20, np.array([1, 0] * 20), ("-", "+"))
    >>> recipe = TextRecipe(model="bag", words=WordTable(dim=8), epochs=5, batch=4, dropout=0.0, lr=0.05)
    >>> fit_text(recipe, prepare(texts), progress=False).result.metrics["validation"]["accuracy"]
    1.0
    """
    with show_progress(f"{name}, choosing words", shown=progress, transient=True):
        made = make_word_table(recipe.words, lexicon_of(prepared, cache=cache), seed, sparse=True)
    torch.manual_seed(seed)  # layers start, and dropout draws, by torch's own generator
    model = new_classifier(recipe, made, len(prepared.classes))
    settings = {**asdict(recipe), "vocabulary": len(prepared.words)}
    fitted = TextFitted(
        model, made, optimizer_of(recipe, model, made), Result(name, settings, seed)
    )
    steps = math.ceil(len(prepared.train) / recipe.batch)
    schedulers = schedulers_of(recipe, fitted, recipe.epochs * steps)
    steered = [one for one in schedulers if hasattr(one, "reached")]  # which takes all epochs
    order = torch.Generator().manual_seed(seed)
    training = Training(
        fitted.result,
        model,
        fitted.optimizer,
        metric="validation_error",
        patience=recipe.epochs if steered else recipe.patience,
        checkpoints=checkpoints,
        generators={"order": order},
        stepped=schedulers,
    )
    display = show_progress(
        name, recipe.epochs * steps, completed=training.first * steps, shown=progress
    )
    with training, display as shown:
        for epoch in training.epochs(recipe.epochs):
            begun, loss, right, seen = time.perf_counter(), 0.0, 0, 1
            for loss, right, seen in train_epoch(
                fitted, schedulers, prepared.train, recipe, prepared.length, order
            ):
                shown.update(
                    advance=1,
                    note=f"epoch {epoch}, train loss {loss:.3f}, accuracy {right / seen:.1%}",
                )
            row = {"epoch": epoch, "train_loss": loss, "train_accuracy": right / seen}
            row["seconds"] = time.perf_counter() - begun
            row["validation_accuracy"] = accuracy(model, prepared.validation, prepared.length)
            row["validation_error"] = 1 - row["validation_accuracy"]
            row["parameters"] = parameter_count(made.table)
            training.record(row)
    for budget in [one for one in steered if isinstance(one, Budget)]:
        budget.finish()
    fitted.result.metrics["validation"] = {
        "accuracy": accuracy(model, prepared.validation, prepared.length)
    }
    fitted.result.sizes = {"words": sizes_of(made.table, fitted.optimizer)}
    return fitted


def parameter_count(table: Table) -> int:
    """Count the parameters of a table; rows of a dense one that a penalty has emptied do not count."""
    if not isinstance(table, DenseTable):
        return table.parameter_count()
    empty = (table.weight.detach() == 0).all(1)
    if table.padding_idx is not None:
        empty[table.padding_idx] = False
    return int((~empty).sum()) * table.embedding_dim


def sizes_of(table: Table, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the sizes of a table; of one that cannot be packed its parameters only."""
    try:
        return {**asdict(table.sizes(optimizer)), "parameters": parameter_count(table)}
    except NotPackable:
        return {"parameters": table.parameter_count()}
