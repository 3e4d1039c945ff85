"""From a file of labeled texts to a stored classifier: training, measuring, the report."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import nn

from featherbed.apps.bundle import CLASSIFIER
from featherbed.apps.classifier.data import (
    ClassifierSettings,
    ClassifierTrainingSettings,
    Documents,
    TextData,
    prepare,
    text_lexicon,
)
from featherbed.apps.classifier.model import TextNetwork, build_network
from featherbed.apps.classifier.serve import Classifier, write_classifier
from featherbed.apps.pipeline import (
    Checkpoints,
    Outcome,
    Result,
    RunOptions,
    Training,
    warmup_cosine,
)
from featherbed.apps.words import (
    FittedText,
    TextRun,
    build_word_table,
    measure_sizes,
    table_schedulers,
)
from featherbed.checks import Packages
from featherbed.errors import DataError
from featherbed.io.texts import LabeledTexts, read_texts
from featherbed.optim import AdamW, Budget, Penalty, Several, Yogi
from featherbed.packed import PackedTable
from featherbed.progress import show_progress
from featherbed.report import bin_name, text_page
from featherbed.tables import auxiliary_loss, split_codes

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
    settings: ClassifierTrainingSettings, model: nn.Module, penalties: dict[nn.Parameter, Penalty]
) -> torch.optim.Optimizer:
    """Return the optimizer; penalized weights do not decay, code logits have their own
    learning rate."""
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


LENGTHS = (0, 5, 10, 20, 30, 40, 60, 80, 100, 150, 200, 300, 500, 1000)
MAX_WRONG, MAX_CHARACTERS = 12, 300  # wrong predictions shown, characters of each text


def prediction_insight(
    labels: ArrayLike,  # [n]
    predicted: ArrayLike,  # [n]
    lengths: ArrayLike,  # [n], in words
    classes: Sequence[str],
    texts: Sequence[str] = (),  # [n], to show wrong predictions
    probabilities: ArrayLike = (),  # [n], of the predicted classes
) -> dict[str, Any]:
    """Return the ``confusion``, ``lengths`` and ``wrong`` entries of a classifier's page.

    >>> found = prediction_insight(
    ...     [0, 1, 1], [0, 1, 0], [3, 12, 4], ["bad", "good"],
    ...     ["a b c", "...", "not bad at all"], [0.9, 0.6, 0.8])
    >>> found["confusion"], found["wrong"][0]["text"], found["wrong"][0]["given"]
    ([[1, 0], [1, 1]], 'not bad at all', 'bad')
    """
    true, guess, count = np.asarray(labels), np.asarray(predicted), len(classes)
    confusion = np.bincount(true * count + guess, minlength=count**2).reshape(count, -1)
    band, is_right = np.searchsorted(LENGTHS, lengths, side="right") - 1, true == guess
    by_length = []
    for n in np.unique(band).tolist():
        right = is_right[band == n]
        name = bin_name(LENGTHS[n], (*LENGTHS, None)[n + 1])
        by_length.append({"name": name, "texts": len(right), "accuracy": float(right.mean())})
    wrong = []
    if len(texts):
        certainty = np.asarray(probabilities, dtype=np.float64)
        order = np.argsort(-np.where(is_right, -1, certainty), kind="stable")[:MAX_WRONG]
        wrong = [
            {
                "text": texts[i][:MAX_CHARACTERS],
                "true": classes[true[i]],
                "given": classes[guess[i]],
                "probability": float(certainty[i]),
            }
            for i in order.tolist()
            if not is_right[i]
        ]
    return {"confusion": confusion.tolist(), "lengths": by_length, "wrong": wrong}


TEST_FRACTION = 0.1  # of the texts, without a test file


def train_classifier(
    source: str | Path,
    out: str | Path,
    settings: ClassifierSettings | Mapping[str, Any] | None = None,
    *,
    test: str | Path | None = None,
    **options: Any,
) -> Outcome[TextData, FittedClassifier]:
    """Train a text classifier and write it to a folder; nothing is written before it is complete.

    Args:
        source: CSV, TSV, JSON lines or fastText file of labels and texts.
        out: the folder to write.
        settings: the settings, or dotted names and values.
        test: the test file; by default a tenth of the texts is held out.
        options: ``seed``, ``resume``, ``overwrite``, ``progress``, ``log``, ``command``
            (see ``RunOptions``).

    >>> folder = getfixture("tmp_path")
    >>> texts = "label,text\\n" + "good,what a film\\nbad,what a bore\\n" * 30
    >>> _ = (folder / "films.csv").write_text(texts)
    >>> values = {"table.spec": "dense", "table.dim": 8, "model.kind": "bag", "training.batch": 4}
    >>> values |= {"training.epochs": 5, "training.lr": 0.05}
    >>> outcome = train_classifier(folder / "films.csv", folder / "out", values, progress=False)
    >>> outcome.metrics["test"]["accuracy"], (folder / "out" / "report.html").exists()
    (1.0, True)
    """
    return ClassifierRun(source, test, settings, out, RunOptions(**options)).run()


class ClassifierRun(TextRun[ClassifierSettings, TextData, FittedClassifier]):
    """One training run of a text classifier."""

    kind, marker, settings_type = "text classifier", CLASSIFIER, ClassifierSettings
    train = staticmethod(fit_classifier)

    def __init__(
        self,
        source: str | Path,
        test: str | Path | None,
        settings: ClassifierSettings | Mapping[str, Any] | None,
        out: str | Path,
        options: RunOptions,
    ) -> None:
        super().__init__(settings, out, options)
        self.source, self.test = Path(source), test
        self.validation_texts: list[str] = []
        self.predictions: dict[str, Any] = {}  # of the validation part

    def packages(self) -> list[Packages]:
        """Return the optional packages that the settings need."""
        subwords: Packages = {"text": ["tokenizers"]}
        return [*super().packages(), *([subwords] if self.settings.vocabulary.subwords else [])]

    def read(self, workplace: Path) -> TextData:  # noqa: ARG002 - texts fit into memory
        """Read, split and encode the texts."""
        settings, seed = self.settings.data, self.options.seed
        with self.stage("reading"):
            train, test = self._read_texts()
            data = prepare(
                train,
                test,
                self.settings.vocabulary,
                validation=settings.validation,
                seed=seed,
                cache=settings.cache,
            )
        self.validation_texts = [train.texts[at] for at in data.validation_index.tolist()]
        return data

    def _read_texts(self) -> tuple[LabeledTexts, LabeledTexts]:
        settings = self.settings.data
        columns: dict[str, Any] = {"label": settings.label, "text": settings.text}
        columns |= {"encoding": settings.encoding, "skip_empty": settings.skip_empty}
        texts = read_texts(self.source, **columns)
        if self.test is not None:
            return texts, read_texts(self.test, classes=texts.classes, **columns)
        order = np.random.default_rng([self.options.seed, 1]).permutation(len(texts))
        count = round(TEST_FRACTION * len(texts))
        if count < 1:
            raise DataError(
                f"{self.source} holds {len(texts)} texts, too few to hold some out: give more, or "
                "a file with --test"
            )
        return texts.take(np.sort(order[count:])), texts.take(np.sort(order[:count]))

    def checksums(self, data: TextData) -> dict[str, str]:
        """Return the checksum of the texts."""
        return {"texts": data.checksum}

    def write(
        self,
        folder: Path,
        packed: PackedTable,
        weights: str,
        data: TextData,
        fitted: FittedClassifier,
    ) -> Classifier:
        """Write the classifier over a packed table, and open it."""
        model, vocabulary = fitted.model.eval(), data.vocabulary
        write_classifier(
            folder,
            packed,
            model.arrays(),
            kind=model.kind,
            classes=data.classes,
            length=vocabulary.length,
            widths=model.widths,
            words=None if vocabulary.tokenizer else vocabulary.words,
            tokenizer=vocabulary.tokenizer,
            weights=weights,
            about={"source": self.source.name, "seed": self.options.seed},
        )
        return Classifier.open(folder)

    def measure(self, folder: Path, data: TextData, fitted: FittedClassifier) -> dict[str, Any]:
        """Return the accuracy of the stored classifier on every part, and its sizes."""
        metrics: dict[str, Any] = {}
        for name, part in data.parts.items():
            probabilities = self.served.probabilities(part.ids, part.offsets)
            predicted = np.argmax(probabilities, axis=1)
            right = float((predicted == part.labels).mean())
            metrics[name] = {"accuracy": right, "texts": len(part)}
            if name == "validation":
                self.predictions = prediction_insight(
                    part.labels,
                    predicted,
                    part.lengths,
                    data.classes,
                    self.validation_texts,
                    probabilities.max(axis=1),
                )
        sizes = measure_sizes(folder, fitted.model, fitted.words.table, self.packed)
        return metrics | {"sizes": sizes}

    def report(self, data: TextData, fitted: FittedClassifier, metrics: dict[str, Any]) -> str:
        """Return the HTML page of the run."""
        words, counts = data.vocabulary.words, data.vocabulary.counts
        page = self.shared_report(self.source.name, words, counts, fitted, metrics)
        page |= {
            "metrics": {part: {"accuracy": metrics[part]["accuracy"]} for part in data.parts},
            "classes": list(data.classes),
            "part": "validation",
            "input": {part: metrics[part]["texts"] for part in data.parts},
            "input_notes": list(data.notes),
        }
        return text_page(page | self.predictions)

    def summarize(self, metrics: dict[str, Any]) -> list[str]:
        """Return the lines that end a run: accuracy, sizes, files."""
        shown = [f"{part} {metrics[part]['accuracy']:.2%}" for part in ("test", "validation")]
        return [f"accuracy: {', '.join(shown)}", *super().summarize(metrics)]
