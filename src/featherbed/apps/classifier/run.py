"""From a file of labeled texts to a stored classifier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from featherbed.apps.checkpoints import Checkpoints
from featherbed.apps.classifier.data import TextData, prepare
from featherbed.apps.classifier.fit import FittedClassifier, fit_classifier
from featherbed.apps.classifier.insight import prediction_insight
from featherbed.apps.classifier.serve import Classifier, write_classifier
from featherbed.apps.classifier.settings import ClassifierSettings
from featherbed.apps.pipeline import Outcome, RunOptions
from featherbed.apps.words.bundle import CLASSIFIER
from featherbed.apps.words.store import TextRun, summary_lines
from featherbed.errors import DataError
from featherbed.extras import Packages
from featherbed.io.texts import LabeledTexts, read_texts
from featherbed.packed.table import PackedTable
from featherbed.report.texts import text_page

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
    if not isinstance(settings, ClassifierSettings):
        settings = ClassifierSettings.from_values(settings or {})
    return ClassifierRun(source, test, settings, out, RunOptions(**options)).run()


class ClassifierRun(TextRun[ClassifierSettings, TextData, FittedClassifier]):
    """One training run of a text classifier."""

    kind, marker = "text classifier", CLASSIFIER

    def __init__(
        self,
        source: str | Path,
        test: str | Path | None,
        settings: ClassifierSettings,
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

    def fingerprint(self, data: TextData) -> dict[str, Any]:
        """Return texts, seed and settings, except those of storage."""
        values = self.settings.values()
        kept = {name: value for name, value in values.items() if not name.startswith("storage.")}
        return {"texts": data.checksum, "seed": self.options.seed, **kept}

    def fit(self, data: TextData, checkpoints: Checkpoints) -> FittedClassifier:
        """Train the classifier."""
        return fit_classifier(
            self.settings,
            data,
            seed=self.options.seed,
            progress=self.options.progress,
            name=self.settings.model.kind,
            checkpoints=checkpoints,
        )

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
        return metrics | {"sizes": self.model_sizes(folder, fitted)}

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


def classifier_summary(outcome: Outcome[TextData, FittedClassifier], out: Path) -> list[str]:
    """Return the lines that end a run: accuracy, sizes, files."""
    metrics = outcome.metrics
    shown = ", ".join(f"{part} {metrics[part]['accuracy']:.2%}" for part in ("test", "validation"))
    return [f"accuracy: {shown}", *summary_lines(outcome, out, "classifies")]
