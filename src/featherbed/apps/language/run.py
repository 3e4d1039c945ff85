"""From plain text to a stored language model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from featherbed.apps.checkpoints import Checkpoints
from featherbed.apps.language.data import corpus_checksum, default_prompts, order_by_role
from featherbed.apps.language.fit import FittedLanguageModel, fit_language
from featherbed.apps.language.insight import loss_bands
from featherbed.apps.language.serve import LanguageModel, join_words, write_language
from featherbed.apps.language.settings import LanguageSettings
from featherbed.apps.pipeline import Outcome, RunOptions
from featherbed.apps.words.bundle import LANGUAGE
from featherbed.apps.words.store import TextRun, summary_lines
from featherbed.extras import Packages
from featherbed.io.texts import Corpus, read_corpus, tokenize
from featherbed.packed.table import PackedTable
from featherbed.report.texts import language_page

TOKENIZERS: dict[str, Callable[[str], list[str]]] = {"whitespace": str.split, "words": tokenize}
CONTINUED_WORDS = 40  # of each continuation in the report


def train_language(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    settings: LanguageSettings | Mapping[str, Any] | None = None,
    **options: Any,
) -> Outcome[Corpus, FittedLanguageModel]:
    """Train a language model and write it to a folder; nothing is written before it is complete.

    Args:
        sources: one text file, of which parts are held out, or three: training, validation, test.
        out: the folder to write.
        settings: the settings, or dotted names and values.
        options: ``seed``, ``resume``, ``overwrite``, ``progress``, ``log``, ``command``
            (see ``RunOptions``).

    >>> folder = getfixture("tmp_path")
    >>> _ = (folder / "text.txt").write_text("the cat sat on the mat\\n" * 200)
    >>> values = {"table.spec": "anchor:anchors=4", "table.dim": 8, "dropout.output": 0}
    >>> values |= {"training.epochs": 2, "training.batch": 4}
    >>> outcome = train_language(folder / "text.txt", folder / "out", values, progress=False)
    >>> outcome.metrics["test"]["perplexity"] < 8, (folder / "out" / "report.html").exists()
    (True, True)
    """
    if not isinstance(settings, LanguageSettings):
        settings = LanguageSettings.from_values(settings or {})
    return LanguageRun(sources, settings, out, RunOptions(**options)).run()


class LanguageRun(TextRun[LanguageSettings, Corpus, FittedLanguageModel]):
    """One training run of a language model."""

    kind, marker = "language model", LANGUAGE

    def __init__(
        self,
        sources: str | Path | Sequence[str | Path],
        settings: LanguageSettings,
        out: str | Path,
        options: RunOptions,
    ) -> None:
        super().__init__(settings, out, options)
        paths = [sources] if isinstance(sources, str | Path) else sources
        self.sources = order_by_role(paths)
        self.bands: list[dict[str, Any]] = []  # perplexity by word frequency

    def packages(self) -> list[Packages]:
        """Return the optional packages that the settings need."""
        spec, fits = self.settings.table.spec, self.settings.training.dense_epochs > 0
        needs_faiss = fits and re.search(r"\b(kd|product)\b", spec) is not None
        return [*super().packages(), *([{"compress": ["faiss"]}] if needs_faiss else [])]

    def read(self, workplace: Path) -> Corpus:  # noqa: ARG002 - texts fit into memory
        """Read and split the text."""
        corpus = self.settings.corpus
        with self.stage("reading"):
            return read_corpus(
                self.sources,
                tokenizer=TOKENIZERS[corpus.tokenizer],
                min_count=corpus.min_count,
                max_words=corpus.max_words,
                encoding=corpus.encoding,
            )

    def fingerprint(self, data: Corpus) -> dict[str, Any]:
        """Return text, seed and settings, except those of storage and prompts."""
        skipped = ("storage.", "corpus.prompts")
        values = self.settings.values().items()
        kept = {name: value for name, value in values if not name.startswith(skipped)}
        return {"text": corpus_checksum(data), "seed": self.options.seed, **kept}

    def fit(self, data: Corpus, checkpoints: Checkpoints) -> FittedLanguageModel:
        """Train the model."""
        return fit_language(
            self.settings,
            data,
            seed=self.options.seed,
            progress=self.options.progress,
            name=self.settings.model.kind,
            checkpoints=checkpoints,
        )

    @torch.no_grad()
    def write(
        self,
        folder: Path,
        packed: PackedTable,
        weights: str,
        data: Corpus,
        fitted: FittedLanguageModel,
    ) -> LanguageModel:
        """Write the model over a packed table, and open it."""
        model = fitted.model.eval()
        output = None if model.output is None else model.output.weight.detach().numpy()
        write_language(
            folder,
            packed,
            [[part.detach().numpy() for part in layer] for layer in model.layer_weights()],
            model.bias.detach().numpy(),
            output=output,
            words=data.words,
            weights=weights,
            about={"source": self.sources[0].name, "seed": self.options.seed},
        )
        return LanguageModel.open(folder)

    def measure(self, folder: Path, data: Corpus, fitted: FittedLanguageModel) -> dict[str, Any]:
        """Return the perplexity of the stored model, its sizes and continuations of prompts."""
        metrics: dict[str, Any] = {}
        for name, ids in (("validation", data.validation), ("test", data.test)):
            losses, targets = self.served.losses(ids)
            found = float(np.exp(min(losses.mean(), 700.0)))
            metrics[name] = {"perplexity": found, "words": len(ids)}
            if name == "validation":
                self.bands = loss_bands(losses, targets, data.counts)
        prompts = self.settings.corpus.prompts or default_prompts(data)
        metrics["continuations"] = [
            {"start": prompt, "text": join_words(self._continue(prompt, number))}
            for number, prompt in enumerate(prompts)
        ]
        return metrics | {"sizes": self.model_sizes(folder, fitted)}

    def _continue(self, prompt: str, number: int) -> list[str]:
        words: list[str] = self.served.generate(
            prompt, CONTINUED_WORDS, seed=self.options.seed + number
        )
        return words

    def report(self, data: Corpus, fitted: FittedLanguageModel, metrics: dict[str, Any]) -> str:
        """Return the HTML page of the run."""
        page = self.shared_report(self.sources[0].name, data.words, data.counts, fitted, metrics)
        page |= {
            "metrics": {part: metrics[part] for part in ("test", "validation")},
            "bands": self.bands,
            "speed": None,
            "continuations": metrics["continuations"],
            "input": {part: len(getattr(data, part)) for part in ("train", "validation", "test")},
        }
        if fitted.history:
            speeds = [row["tokens_per_second"] for row in fitted.history]
            best = min(row["train_perplexity"] for row in fitted.history)
            page["speed"] = {"training": float(np.median(speeds))}
            page["metrics"]["train"] = {"perplexity": best}
        return language_page(page)


def language_summary(outcome: Outcome[Corpus, FittedLanguageModel], out: Path) -> list[str]:
    """Return the lines that end a run: perplexity, sizes, files, a continuation."""
    metrics = outcome.metrics
    shown = [f"{part} {metrics[part]['perplexity']:.2f}" for part in ("test", "validation")]
    lines = [f"perplexity: {', '.join(shown)}", *summary_lines(outcome, out, "continues texts")]
    first = metrics["continuations"][0]
    return [*lines, f"{first['start']} ... {first['text']}".replace("\n", " / ")]
