"""Training of text classifiers: the best epoch on the validation part is kept."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from featherbed.apps.checkpoints import Checkpoints
from featherbed.apps.classifier.data import Documents, TextData, text_lexicon
from featherbed.apps.classifier.model import TextNetwork, build_network
from featherbed.apps.classifier.settings import ClassifierSettings, ClassifierTrainingSettings
from featherbed.apps.results import Result
from featherbed.apps.training import Training, warmup_cosine
from featherbed.apps.words.table import FittedText, build_word_table, table_schedulers
from featherbed.optim import AdamW, Budget, Penalty, Several, Yogi
from featherbed.progress import show_progress
from featherbed.tables.model import auxiliary_loss, split_codes

POOL = 32  # batches among which texts are sorted by length: random batches with little padding
EVALUATION_BATCH = 512  # texts

Ids = NDArray[np.int64]


class FittedClassifier(FittedText[TextNetwork]):
    """A trained text classifier."""


def fit_classifier(
    settings: ClassifierSettings,
    data: TextData,
    *,
    seed: int = 0,
    progress: bool = True,
    name: str = "text",
    checkpoints: Checkpoints | None = None,
) -> FittedClassifier:
    """Train a classifier; the best epoch on the validation part is kept.

    With ``checkpoints`` every epoch is saved, and a stopped run continues from the last; Ctrl-C
    ends training early with the best model so far.

    >>> from featherbed.apps.classifier.data import prepare
    >>> from featherbed.io.texts import LabeledTexts
    >>> texts = LabeledTexts(["good film", "bad film"] * 20, np.array([1, 0] * 20), ("-", "+"))
    >>> values = {"table.spec": "dense", "table.dim": 8, "model.kind": "bag", "training.batch": 4}
    >>> settings = ClassifierSettings.from_values({**values, "training.lr": 0.05})
    >>> fitted = fit_classifier(settings, prepare(texts), progress=False)
    >>> fitted.result.metrics["validation"]["accuracy"]
    1.0
    """
    training_settings = settings.training
    with show_progress(f"{name}, selecting words", shown=progress, transient=True):
        lexicon = text_lexicon(data, settings.vocabulary.min_cooccurrence, settings.data.cache)
        words = build_word_table(settings.table, lexicon, seed, sparse=True)
    torch.manual_seed(seed)  # initialization of layers and dropout use torch's global generator
    model = build_network(settings.model, words.module, len(data.classes))
    optimizer = build_optimizer(training_settings, model, words.penalties)
    result = Result(name, settings.values(), seed)
    steps = math.ceil(len(data.train) / training_settings.batch)
    table_schedules = table_schedulers(settings.table, words, training_settings.epochs * steps)
    schedulers = [*table_schedules]
    if training_settings.cosine:
        schedulers.insert(0, cosine_schedule(optimizer, training_settings.epochs * steps))
    order = torch.Generator().manual_seed(seed)
    training = Training(
        result,
        model,
        optimizer,
        metric="validation_error",
        patience=training_settings.epochs if table_schedules else training_settings.patience,
        checkpoints=checkpoints,
        generators={"order": order},
        schedulers=schedulers,
    )
    display = show_progress(
        name,
        training_settings.epochs * steps,
        completed=training.start_epoch * steps,
        shown=progress,
    )
    length = data.vocabulary.length
    with training, display as shown:
        for epoch in training.epochs(training_settings.epochs):
            start, loss, correct, count = time.perf_counter(), 0.0, 0, 1
            batches = sample_batches(
                data.train, training_settings.batch, order, model.kind == "cnn"
            )
            for loss, correct, count in train_epoch(
                model, optimizer, schedulers, data.train, batches, length
            ):
                note = f"epoch {epoch}, train loss {loss:.3f}, accuracy {correct / count:.1%}"
                shown.update(advance=1, note=note)
            seconds = time.perf_counter() - start
            validation = accuracy(model, data.validation, length)
            training.record(
                {
                    "epoch": epoch,
                    "train_loss": loss,
                    "train_accuracy": correct / count,
                    "seconds": seconds,
                    "validation_accuracy": validation,
                    "validation_error": 1 - validation,
                    "parameters": words.table.pruned_parameter_count(),
                }
            )
    for budget in [one for one in schedulers if isinstance(one, Budget)]:
        budget.finish()
    result.metrics["validation"] = {"accuracy": accuracy(model, data.validation, length)}
    return FittedClassifier(model, words, result)


def build_optimizer(
    settings: ClassifierTrainingSettings,
    model: nn.Module,
    penalties: dict[nn.Parameter, Penalty],
) -> torch.optim.Optimizer:
    """Return the optimizer; penalized weights do not decay, code logits have their own rate."""
    codes, others = split_codes(model)
    if settings.optimizer == "yogi":
        optimizer: torch.optim.Optimizer = Yogi(others, settings.lr, penalties=penalties)
    else:
        penalized = {id(parameter) for parameter in penalties}
        groups = [
            {
                "params": [p for p in others if id(p) not in penalized],
                "weight_decay": settings.decay,
            },
            {"params": [p for p in others if id(p) in penalized], "weight_decay": 0.0},
        ]
        used = [group for group in groups if group["params"]]
        optimizer = AdamW(used, settings.lr, penalties=penalties)
    if not codes:
        return optimizer
    return Several(optimizer, AdamW(codes, settings.code_lr, weight_decay=0.0))


def cosine_schedule(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Return a scheduler of the learning rate: warm-up over a tenth of the steps, then decay."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, steps))


def sample_batches(
    documents: Documents, size: int, generator: torch.Generator, by_length: bool
) -> Iterator[Ids]:
    """Yield random batches of text indices; ``by_length``: of texts of similar length."""
    order = torch.randperm(len(documents), generator=generator).numpy()
    if not by_length:
        yield from (order[start : start + size] for start in range(0, len(order), size))
        return
    lengths, batches = documents.lengths, []
    for start in range(0, len(order), POOL * size):
        pool = order[start : start + POOL * size]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        batches += [pool[at : at + size] for at in range(0, len(pool), size)]
    yield from (batches[at] for at in torch.randperm(len(batches), generator=generator).tolist())


def train_epoch(
    model: TextNetwork,
    optimizer: torch.optim.Optimizer,
    schedulers: list[Any],
    documents: Documents,
    batches: Iterator[Ids],
    length: int,
) -> Iterator[tuple[float, int, int]]:
    """Train on each batch; yield the mean loss, correct texts and texts so far."""
    model.train()
    total, correct, count = 0.0, 0, 0
    for index in batches:
        labels = torch.from_numpy(documents.labels[index])
        optimizer.zero_grad()
        logits = model.logits(documents, index, length)
        loss = F.cross_entropy(logits, labels)
        (loss + auxiliary_loss(model)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        total, count = total + float(loss.detach()) * len(index), count + len(index)
        correct += int((logits.detach().argmax(1) == labels).sum())
        yield total / count, correct, count


@torch.no_grad()
def predict(model: TextNetwork, documents: Documents, length: int | None = None) -> Ids:  # -> [n]
    """Return the predicted class of each text; ``length`` is the maximum length of texts."""
    was_training = model.training
    model.eval()
    limit = int(documents.lengths.max(initial=1)) if length is None else length
    order = np.argsort(documents.lengths, kind="stable")
    classes = np.empty(len(documents), dtype=np.int64)
    for start in range(0, len(order), EVALUATION_BATCH):
        index = order[start : start + EVALUATION_BATCH]
        classes[index] = model.logits(documents, index, limit).argmax(1).numpy()
    model.train(was_training)
    return classes


def accuracy(model: TextNetwork, documents: Documents, length: int | None = None) -> float:
    """Return the fraction of texts whose class is predicted correctly."""
    return float((predict(model, documents, length) == documents.labels).mean())
