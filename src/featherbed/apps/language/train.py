"""From plain text to a stored language model: training, measuring, the report."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from featherbed.apps.bundle import LANGUAGE
from featherbed.apps.language.data import (
    columns,
    corpus_lexicon,
    default_prompts,
    order_by_role,
    segments,
)
from featherbed.apps.language.model import RecurrentModel, State, build_model
from featherbed.apps.language.serve import LanguageModel, join_words, write_language
from featherbed.apps.language.settings import LanguageSettings, OptimizerSettings
from featherbed.apps.pipeline import Checkpoints, Outcome, Result, RunOptions, Training, half_cosine
from featherbed.apps.words import (
    FittedText,
    TextRun,
    WordTable,
    WordTableSettings,
    build_word_table,
    measure_sizes,
    table_schedulers,
)
from featherbed.checks import Packages
from featherbed.io.texts import Corpus, read_corpus, tokenize
from featherbed.optim import SGD, AdamW, Averaged, Budget, Several, Yogi, clip_grad_norm_
from featherbed.packed import PackedTable
from featherbed.progress import show_progress
from featherbed.report import bins_of, language_page
from featherbed.tables import auxiliary_loss, split_codes

COUNT_POWER = 0.7  # of the word counts that weigh rows when a table is fitted to dense rows
WARMUP = 100  # steps of a new optimizer in the middle of training

Schedule = Callable[[float], float]  # fraction of training -> factor of the learning rate


@dataclass(frozen=True)
class FittedLanguageModel(FittedText[RecurrentModel]):
    """A trained language model, and its optimizer."""

    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class FitOptions:
    """Options of a training run that are not settings of the model."""

    seed: int = 0
    checkpoints: Checkpoints | None = None
    progress: bool = True
    name: str = "lm"


def fit_language(
    settings: LanguageSettings,
    corpus: Corpus,
    *,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
    progress: bool = True,
    name: str = "lm",
) -> FittedLanguageModel:
    """Train a language model; the best epoch on the validation text is kept.

    With ``checkpoints`` every epoch is saved, and a stopped run continues from the last; Ctrl-C
    ends training early with the best model so far.

    >>> text = np.tile(np.arange(6), 100)
    >>> corpus = Corpus(tuple("abcdef"), np.bincount(text), text, text[:200], text[:200])
    >>> values = {"table.spec": "anchor:anchors=4", "table.dim": 8, "training.epochs": 2}
    >>> fitted = fit_language(LanguageSettings.from_values(values), corpus, progress=False)
    >>> [row["epoch"] for row in fitted.history]
    [0, 1]
    """
    options = FitOptions(seed, checkpoints, progress, name)
    if settings.training.dense_epochs:
        return _fit_after_dense(settings, corpus, options)
    with show_progress(f"{name}, selecting words", shown=progress, transient=True):
        words = _build_words(settings, corpus, seed)
    model = build_model(settings, words.module, seed)
    return _fit_epochs(settings, corpus, words, model, (0, settings.training.epochs), options)


def _build_words(settings: LanguageSettings, corpus: Corpus, seed: int) -> WordTable:
    lexicon = corpus_lexicon(corpus, settings.corpus.min_cooccurrence)
    return build_word_table(settings.table, lexicon, seed)


def _fit_after_dense(
    settings: LanguageSettings, corpus: Corpus, options: FitOptions
) -> FittedLanguageModel:
    """Train dense rows for the first epochs, fit the table to them, train it for the others."""
    table, seed, epochs = settings.table, options.seed, settings.training.epochs
    dense = WordTableSettings(dim=table.dim, init_std=table.init_std, sse=table.sse)
    dense_settings = replace(
        settings,
        table=dense,
        optimizer=replace(settings.optimizer, transform_lr=None),
        training=replace(settings.training, dense_epochs=0, patience=epochs),
    )
    words = _build_words(dense_settings, corpus, seed)
    model = build_model(dense_settings, words.module, seed)
    saved = options.checkpoints
    dense_options = replace(
        options,
        checkpoints=None if saved is None else saved.stage("dense"),
        name=f"{options.name}, dense rows",
    )
    middle = settings.training.dense_epochs
    first = _fit_epochs(dense_settings, corpus, words, model, (0, middle), dense_options)
    stage = f"{options.name}, fitting the table"
    with show_progress(stage, shown=options.progress, transient=True):
        words, model = fit_table(first, settings, corpus, seed)
    if first.interrupted:
        optimizer = build_optimizer(settings.optimizer, model, words)
        schedulers = table_schedulers(settings.table, words, 1)
        return _finish(
            FittedLanguageModel(model, words, first.result, optimizer), schedulers, corpus
        )
    last = _fit_epochs(settings, corpus, words, model, (middle, epochs), options)
    for row in last.history:
        row["epoch"] += middle
    last.history[:0] = first.history
    last.result.seconds += first.result.seconds
    return last


@torch.no_grad()
def fit_table(
    dense: FittedLanguageModel, settings: LanguageSettings, corpus: Corpus, seed: int
) -> tuple[WordTable, RecurrentModel]:
    """Return a table fitted to the dense rows of a trained model, and the model over it."""
    words = _build_words(settings, corpus, seed)
    table, rows = words.table, dense.words.table.weight
    weights = torch.from_numpy((corpus.counts + 1.0) ** COUNT_POWER)
    table.fit_dense(rows, weights if table.weighs_rows else None)
    model = build_model(settings, words.module, seed)
    state = dense.model.state_dict()
    network = {key: value for key, value in state.items() if not key.startswith("words.")}
    model.load_state_dict(network, strict=False)
    error = float((rows - table.weight).square().sum() / rows.square().sum())
    count = settings.training.dense_epochs
    epochs = "one epoch" if count == 1 else f"{count} epochs"
    note = f"fitted to dense rows after {epochs}: {100 * (1 - error):.0f} % of their variance"
    return words._replace(notes=(*words.notes, note)), model


def _fit_epochs(
    settings: LanguageSettings,
    corpus: Corpus,
    words: WordTable,
    model: RecurrentModel,
    span: tuple[int, int],
    options: FitOptions,
) -> FittedLanguageModel:
    """Train a model over a span of the epochs, at the learning rates that these have among all."""
    optimizer = build_optimizer(settings.optimizer, model, words)
    training = replace(settings.training, epochs=span[1] - span[0], dense_epochs=0)
    steps = sum(map(len, _epoch_segments(training, corpus, options.seed)))
    schedulers = table_schedulers(settings.table, words, steps)
    if schedulers:
        training = replace(training, patience=settings.training.epochs)
    decays = settings.optimizer.decays_lr
    schedule = cosine_span(span, settings.training.epochs, steps) if decays else None
    result = train_model(
        model,
        optimizer,
        corpus,
        replace(settings, training=training),
        options,
        schedule=schedule,
        schedulers=schedulers,
    )
    return _finish(FittedLanguageModel(model, words, result, optimizer), schedulers, corpus)


def _finish(
    fitted: FittedLanguageModel, schedulers: Sequence[Any], corpus: Corpus
) -> FittedLanguageModel:
    """Apply budgets, then measure the model."""
    for budget in [one for one in schedulers if isinstance(one, Budget)]:
        budget.finish()
    found = perplexity(fitted.model, corpus.validation)
    fitted.result.metrics["validation"] = {"perplexity": found}
    return fitted


def build_optimizer(
    settings: OptimizerSettings, model: RecurrentModel, words: WordTable
) -> torch.optim.Optimizer:
    """Return the optimizer, with the table's penalties; code logits have one of their own."""
    codes, others = split_codes(model)
    groups: list[dict[str, Any]] = [{"params": others}]
    if settings.transform_lr is not None:
        penalized = {id(parameter) for parameter in words.table.penalized}
        groups = [
            {"params": [p for p in others if id(p) not in penalized]},
            {"params": [p for p in others if id(p) in penalized], "lr": settings.transform_lr},
        ]
    rules: dict[str, Any] = {"adamw": AdamW, "yogi": Yogi}
    optimizer: torch.optim.Optimizer = rules.get(settings.kind, SGD)(
        groups, settings.learning_rate, weight_decay=settings.decay, penalties=words.penalties
    )
    if codes:
        optimizer = Several(optimizer, AdamW(codes, settings.code_lr, weight_decay=0.0))
    if settings.kind == "ntasgd":
        return Averaged(optimizer, patience=settings.averaging)
    return optimizer


def cosine_span(span: tuple[int, int], epochs: int, steps: int) -> Schedule:
    """Return the schedule of a span of the epochs; after the first span a new optimizer warms up.

    >>> schedule = cosine_span((2, 4), 4, 1000)
    >>> [round(schedule(fraction), 2) for fraction in (0.0, 0.05, 0.5, 1.0)]
    [0.0, 0.23, 0.15, 0.0]
    """
    first, last = span

    def factor(fraction: float) -> float:
        warmup = min(1.0, fraction * steps / WARMUP) if first else 1.0
        return warmup * half_cosine((first + fraction * (last - first)) / epochs)

    return factor


def train_model(
    model: RecurrentModel,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    settings: LanguageSettings,
    options: FitOptions,
    *,
    schedule: Schedule | None = None,
    schedulers: Sequence[Any] = (),
) -> Result:
    """Train by truncated backpropagation through time; the best parameters are left in the model.

    ``schedule`` gives the factor of the learning rate at a fraction of training; with random
    lengths it is also proportional to the length of a segment. ``schedulers`` step with the
    optimizer. With ``fb.Averaged`` the averages are validated.
    """
    torch.manual_seed(options.seed)  # dropout uses torch's global generator
    loop = settings.training
    text = columns(corpus.train, loop.batch)
    epoch_segments = _epoch_segments(loop, corpus, options.seed)
    ends = np.cumsum([0, *map(len, epoch_segments)]).tolist()
    result = Result(options.name, settings.values(), options.seed)
    training = Training(
        result,
        model,
        optimizer,
        metric="validation_perplexity",
        patience=loop.patience,
        checkpoints=options.checkpoints,
        schedulers=schedulers,
    )
    completed = ends[min(training.start_epoch, loop.epochs)]
    display = show_progress(options.name, ends[-1], completed=completed, shown=options.progress)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    with training, display as shown:
        for epoch in training.epochs(loop.epochs):
            start_time = time.perf_counter()

            def set_lr(start: int, stop: int, epoch: int = epoch) -> None:
                fraction = (epoch + start / len(text)) / loop.epochs
                factor = 1.0 if schedule is None else schedule(fraction)
                factor *= (stop - start) / loop.length if loop.random_length else 1.0
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * factor

            def after_step(
                loss: float, count: int, epoch: int = epoch, start_time: float = start_time
            ) -> None:
                for scheduler in schedulers:
                    scheduler.step()
                speed = count / (time.perf_counter() - start_time)
                note = f"epoch {epoch}, train {loss:.1f}, {speed:,.0f} tokens/s"
                shown.update(advance=1, note=note)

            clip = settings.optimizer.clip
            loss, count = train_epoch(
                model, optimizer, text, epoch_segments[epoch], clip, set_lr, after_step
            )
            seconds = time.perf_counter() - start_time
            row = {"epoch": epoch, "train_perplexity": loss, "seconds": seconds}
            row["tokens_per_second"] = count / seconds
            with _averages(optimizer):
                row["validation_perplexity"] = perplexity(model, corpus.validation)
                if isinstance(optimizer, Averaged):
                    optimizer.observe(row["validation_perplexity"])
                row["parameters"] = model.table.parameter_count()
                training.record(row)
    return result


def _epoch_segments(loop: Any, corpus: Corpus, seed: int) -> list[list[tuple[int, int]]]:
    """Return the segments of each epoch."""
    positions = len(columns(corpus.train, loop.batch)) - 1
    return [
        segments(positions, loop.length, (seed, epoch) if loop.random_length else None)
        for epoch in range(loop.epochs)
    ]


def train_epoch(
    model: RecurrentModel,
    optimizer: torch.optim.Optimizer,
    text: Tensor,  # int64 [N, columns]
    parts: Sequence[tuple[int, int]],
    clip: float,
    before_step: Callable[[int, int], None],
    after_step: Callable[[float, int], None],
) -> tuple[float, int]:
    """Train on each segment of the text; return the perplexity and the number of words."""
    model.train()
    clipped = split_codes(model)[1]
    total, count, state = 0.0, 0, None
    for start, stop in parts:
        target = text[start + 1 : stop + 1]
        before_step(start, stop)
        optimizer.zero_grad()
        losses = model.losses(text[start:stop], target, detach(state))
        (losses.total + auxiliary_loss(model)).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(clipped, clip)
        optimizer.step()
        total += float(losses.cross_entropy.detach()) * target.numel()
        state, count = losses.state, count + target.numel()
        after_step(_exp(total / count), count)
    return _exp(total / count), count


@torch.no_grad()
def perplexity(
    model: RecurrentModel, ids: NDArray[np.int64], batch: int = 10, length: int = 70
) -> float:
    """Return exp(mean cross-entropy) of a text, over all words."""
    model.eval()
    text, state, all_rows = columns(ids, batch), None, model.all_rows()
    total, count = 0.0, 0
    for start in range(0, len(text) - 1, length):
        target = text[start + 1 : start + 1 + length]
        losses = model.losses(text[start : start + len(target)], target, state, all_rows)
        total += float(losses.cross_entropy) * target.numel()
        state, count = losses.state, count + target.numel()
    return _exp(total / count)


def detach(state: State | None) -> State | None:
    """Detach a state from the graph that computed it."""
    if state is None:
        return None
    return tuple(detach(part) if isinstance(part, tuple) else part.detach() for part in state)


def _exp(loss: float) -> float:
    """Return e^loss without overflow: a diverging run has a large perplexity."""
    return math.exp(min(loss, 700.0))


def _averages(optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    """Return a block in which parameters are their averages, if the optimizer has them."""
    return optimizer.swapped() if isinstance(optimizer, Averaged) else nullcontext()


def loss_bands(
    losses: ArrayLike, targets: ArrayLike, counts: ArrayLike
) -> list[dict[str, Any]]:  # [n], [n], [V]
    """Return the perplexity exp(mean loss) of words by training count, rare words first.

    >>> bands = loss_bands([0.0, 0.0, 0.0], [1, 1, 0], [2, 500])
    >>> [(band["name"], band["perplexity"]) for band in bands]
    [('1 to 2', 1.0), ('300 and more', 1.0)]
    """
    lost, occurs = np.asarray(losses), np.asarray(counts)
    names, band_of = bins_of(occurs[np.asarray(targets)], int(np.max(occurs)))
    bands = []
    for n in np.unique(band_of).tolist():
        part = lost[band_of == n]
        bands.append(
            {
                "name": names[n],
                "tokens": len(part),
                "share": len(part) / len(lost),
                "perplexity": float(np.exp(min(part.mean(), 700))),
            }
        )
    return bands


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
    return LanguageRun(sources, settings, out, RunOptions(**options)).run()


class LanguageRun(TextRun[LanguageSettings, Corpus, FittedLanguageModel]):
    """One training run of a language model."""

    kind, marker, settings_type = "language model", LANGUAGE, LanguageSettings
    train = staticmethod(fit_language)
    irrelevant = ("storage.", "corpus.prompts")

    def __init__(
        self,
        sources: str | Path | Sequence[str | Path],
        settings: LanguageSettings | Mapping[str, Any] | None,
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

    def checksums(self, data: Corpus) -> dict[str, str]:
        """Return the checksum of words and text."""
        found = sha256("\n".join(data.words).encode())
        for ids in (data.train, data.validation, data.test):
            found.update(ids.tobytes())
        return {"text": found.hexdigest()}

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
        prompts, seed = self.settings.corpus.prompts or default_prompts(data), self.options.seed
        metrics["continuations"] = [
            {
                "start": prompt,
                "text": join_words(self.served.generate(prompt, CONTINUED_WORDS, seed + number)),
            }
            for number, prompt in enumerate(prompts)
        ]
        sizes = measure_sizes(folder, fitted.model, fitted.words.table, self.packed)
        return metrics | {"sizes": sizes}

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

    def summarize(self, metrics: dict[str, Any]) -> list[str]:
        """Return the lines that end a run: perplexity, sizes, files, a continuation."""
        shown = [f"{part} {metrics[part]['perplexity']:.2f}" for part in ("test", "validation")]
        lines = [f"perplexity: {', '.join(shown)}", *super().summarize(metrics)]
        first = metrics["continuations"][0]
        return [*lines, f"{first['start']} ... {first['text']}".replace("\n", " / ")]
