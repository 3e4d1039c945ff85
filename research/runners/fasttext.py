"""fastText on the same AG-News rows: tuned on validation, made smaller, and read once on test.

Needs the fasttext package (`pip install fasttext-wheel`), which no part of featherbed needs. Words
are split by featherbed's tokenizer and texts cut after 100 words; the validation part is that of
`prepare(seed=0)`: the data our own models get. fastText has no early stopping, so it could also
train on the validation rows: both kinds are in the record.

To fastText the seeds 0 and 1 are the same (its generator takes 0 for 1), so that seeds 0, 1, 2 are
two different runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from featherbed.apps.classifier.data import TextVocabularySettings, prepare
from featherbed.errors import DataError, MissingExtra
from featherbed.io.texts import LabeledTexts, read_texts, tokenize
from research.harness.records import Outcome, Run, load_record
from research.sources.texts import TextFiles

NAMES = ("lr", "epoch", "wordNgrams", "dim")
Rows = list[dict[str, Any]]


def run_fasttext(settings: Mapping[str, Any], seed: int, source: TextFiles, run: Run) -> Outcome:
    """Tune on validation (row ``tuning``), or read the test part with the settings tuning chose."""
    with TemporaryDirectory() as name:
        trainer = Trainer(settings, Path(name), source, run)
        if not settings["test"]:
            return trainer.tune()
        path = run.results / f"tuning-seed-{seed}.json"
        if not path.exists():
            raise DataError(f"no record {path}: run the row tuning first, it chooses the settings")
        return trainer.final(load_record(path)["details"]["chosen"])


class Trainer:
    """fastText models of one data set, whose parts are written as the package reads them."""

    def __init__(
        self, settings: Mapping[str, Any], folder: Path, source: TextFiles, run: Run
    ) -> None:
        self.settings, self.folder, self.run = settings, folder, run
        try:
            self.package: Any = import_module("fasttext")
        except ImportError:
            raise MissingExtra("fasttext", "yardsticks", "a comparison with fastText") from None
        self.files = self._parts(source)

    def _parts(self, source: TextFiles) -> dict[str, Path]:
        texts, length = read_texts(source.train), self.settings["length"]
        vocabulary = TextVocabularySettings(length=length)
        held = prepare(texts, settings=vocabulary, seed=0).validation_index.tolist()
        kept = sorted(set(range(len(texts))) - set(held))
        parts = {"train": (texts, kept), "validation": (texts, held)}
        parts["all"] = texts, [*range(len(texts))]
        if self.settings["test"]:
            test = read_texts(source.test, classes=texts.classes)
            parts["test"] = test, [*range(len(test))]
        return {name: self._written(name, *part) for name, part in parts.items()}

    def _written(self, name: str, texts: LabeledTexts, index: Iterable[int]) -> Path:
        path = self.folder / f"{name}.txt"
        with path.open("w", encoding="utf-8") as file:
            for at in index:
                words = tokenize(texts.texts[at])[: self.settings["length"]]
                file.write(f"__label__{texts.labels[at]} {' '.join(words)}\n")
        return path

    def train(self, part: str, seed: int, own: Mapping[str, Any]) -> Any:
        """Train a model on a part."""
        fixed = self.settings["fixed"]
        return self.package.train_supervised(str(self.files[part]), seed=seed, **fixed, **own)

    def quantize(
        self, model: Any, part: str, own: Mapping[str, Any], how: Mapping[str, Any]
    ) -> int:
        """Quantize a model in place, and return the bytes of its file."""
        model.quantize(
            input=str(self.files[part]),
            retrain=True,
            qnorm=True,
            thread=1,
            verbose=0,
            epoch=own["epoch"],
            lr=own["lr"],
            **how,
        )
        path = self.folder / "model.ftz"
        model.save_model(str(path))
        return path.stat().st_size

    def accuracy(self, model: Any, part: str) -> float:
        """Return the share of texts of a part that are classified correctly."""
        count, precision, _ = model.test(str(self.files[part]))
        return float(round(precision * count) / count)

    def tune(self) -> Outcome:
        """Choose learning rate, epochs and n-grams, then the width, then the quantization."""
        grid, full = self.settings["grid"], []
        for lr, epoch, ngrams in itertools.product(grid["lr"], grid["epoch"], grid["wordNgrams"]):
            full.append(
                self._look(dict(zip(NAMES, (lr, epoch, ngrams, grid["dim"][0]), strict=True)))
            )
        best = max(full, key=lambda row: float(row["validation"]))
        full += [self._look({**{n: best[n] for n in NAMES}, "dim": d}) for d in grid["dim"][1:]]
        ranked = sorted(full, key=lambda row: -float(row["validation"]))
        pairs = next((row for row in ranked if row["wordNgrams"] == 2), ranked[0])
        quantized: Rows = []
        for row, cutoff in itertools.product((*ranked[:2], pairs), grid["cutoff"]):
            own = {name: row[name] for name in NAMES}
            how = {"cutoff": cutoff, "dsub": self.settings["dsub"]}
            model = self.train("train", 0, own)
            size = self.quantize(model, "train", own, how)
            error = self.accuracy(model, "validation")
            quantized.append({**own, **how, "bytes": size, "validation": error})
        small = [row for row in quantized if row["bytes"] <= self.settings["most_bytes"]]
        if not small:
            raise DataError(f"no quantized model has at most {self.settings['most_bytes']:,} bytes")
        chosen = max(small, key=lambda row: (row["validation"], -row["bytes"]))
        measures = {
            "validation_accuracy": float(chosen["validation"]),
            "bytes": float(chosen["bytes"]),
        }
        details = {"full": full, "quantised": quantized, "best_full": ranked[0], "chosen": chosen}
        return Outcome(measures, [], details)

    def _look(self, own: dict[str, Any]) -> dict[str, Any]:
        row = {**own, "validation": self.accuracy(self.train("train", 0, own), "validation")}
        self.run.say(str(row))
        return row

    def final(self, chosen: Mapping[str, Any]) -> Outcome:
        """Train the chosen settings with each seed, on the training part and on all rows."""
        own = {name: chosen[name] for name in NAMES}
        how = {name: chosen[name] for name in ("cutoff", "dsub")}
        rows: Rows = []
        for part, seed in itertools.product(("train", "all"), self.settings["seeds"]):
            model = self.train(part, seed, own)
            measured = ("validation", "test") if part == "train" else ("test",)
            full = {name: self.accuracy(model, name) for name in measured}
            size = self.quantize(model, part, own, how)
            quantized = {name: self.accuracy(model, name) for name in measured}
            row = {"rows": part, "seed": seed, "full": full, "quantised": quantized, "bytes": size}
            rows.append(row)
            self.run.say(str(row))
        trained = [row for row in rows if row["rows"] == "train"]
        measures = {
            "accuracy": sum(row["quantised"]["test"] for row in trained) / len(trained),
            "bytes": sum(row["bytes"] for row in trained) / len(trained),
        }
        return Outcome(measures, [], {"settings": own, "quantised": how, "runs": rows})
