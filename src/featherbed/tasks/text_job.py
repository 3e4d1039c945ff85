"""From a file of labelled texts to a folder that classifies: read, prepare, train, store, measure what was stored, report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import DataError
from featherbed.extras import TRAINING, require
from featherbed.packed.table import PackedTable
from featherbed.progress import show_progress
from featherbed.serve.bundle import CLASSIFIER, LIST, MODEL, TOKENIZER, WORDS
from featherbed.tasks.documents import Prepared, prepare
from featherbed.tasks.folders import write_history, write_page
from featherbed.tasks.jobs import (
    Clock,
    check_out,
    check_stored,
    clear_checkpoints,
    discard_on_error,
    marked_checkpoints,
    move_folder,
    word_extras,
    workplace,
)
from featherbed.tasks.results import made_by, write_json
from featherbed.tasks.text import TextFitted, TextRecipe, fit_text
from featherbed.tasks.text_store import (
    Scores,
    measured,
    page_sizes,
    parameter_line,
    report_of,
    size_line,
    sizes,
    store,
)
from featherbed.tasks.texts import Texts, read_texts
from featherbed.view.texts import text_page

TEST = 0.1  # of the texts, held out where no test file is given
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class TextJob:
    """What ``featherbed train text`` is asked for.

    ``stored`` says how weights of codes (``values``), atoms (``dictionary``) and all else (``weights``) are written;
    ``reading`` and ``preparing`` are keywords of ``read_texts`` and ``prepare``.
    """

    source: Path
    out: Path
    recipe: TextRecipe
    test: Path | None = None
    stored: dict[str, str] = field(default_factory=dict)
    reading: dict[str, Any] = field(default_factory=dict)
    preparing: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    resume: bool = False
    overwrite: bool = False
    progress: bool = True
    command: str = ""


@dataclass(frozen=True)
class TextOutcome:
    """What came of a job: the numbers of ``metrics.json``, the trained model, what it was trained on."""

    metrics: dict[str, Any]
    fitted: TextFitted
    prepared: Prepared
    packed: PackedTable | None

    def lines(self, out: Path) -> list[str]:
        """Say in a few lines what came out."""
        sizes, metrics = self.metrics["sizes"], self.metrics
        shown = ", ".join(
            f"{part} {metrics[part]['accuracy']:.2%}" for part in ("test", "validation")
        )
        lines = [f"accuracy: {shown}"]
        lines.append(parameter_line(sizes))
        if self.packed is None:
            lines.append("this table has no packed form: nothing that classifies was written")
        else:
            lines.append(size_line(sizes))
        lines.append(
            f"{out}: {', '.join(sorted(path.name for path in out.iterdir() if path.is_file()))}"
        )
        if metrics["interrupted"]:
            lines.append("interrupted: this is the best epoch so far; --resume goes on")
        return lines


def train_text(job: TextJob, say: Callable[[str], None] = lambda _: None) -> TextOutcome:
    """Do a job; everything is read, checked, trained and measured before the first file of the classifier is written.

    >>> from featherbed.tasks.word_tables import WordTable
    >>> folder = getfixture("tmp_path")
    >>> _ = (folder / "films.csv").write_text("label,text\\n" + "good,what a film\\nbad,what a bore\\n" * 30)
    >>> recipe = TextRecipe(model="bag", words=WordTable(dim=8), epochs=5, batch=4, dropout=0.0, lr=0.05)
    >>> outcome = train_text(TextJob(folder / "films.csv", folder / "out", recipe, progress=False))
    >>> outcome.metrics["test"]["accuracy"], (folder / "out" / "report.html").exists()
    (1.0, True)
    """
    clock = Clock()
    _check(job)
    with workplace(job.out.absolute()) as place:
        with show_progress("reading", shown=job.progress, transient=True):
            train, test = _read(job)
            prepared = prepare(train, test, seed=job.seed, **job.preparing)
        say(described(prepared, train))
        for note in prepared.notes:
            say(note)
        clock.passed("reading")
        run = {"texts": prepared.checksum, "seed": job.seed, **asdict(job.recipe)}
        checkpoints = marked_checkpoints(job.out, run, job.resume)
        with discard_on_error(job.out, resume=job.resume):
            fitted = fit_text(
                job.recipe,
                prepared,
                seed=job.seed,
                progress=job.progress,
                name=job.recipe.model,
                checkpoints=checkpoints,
                cache=job.preparing.get("cache"),
            )
        for note in fitted.made.notes:
            say(note)
        clock.passed("training")
        made = Path(place) / "made"
        made.mkdir()
        with show_progress("measuring", shown=job.progress, transient=True):
            about = {"source": job.source.name, "seed": job.seed}
            packed = store(made, fitted, prepared, job.stored, about)
            scores = measured(made, fitted, prepared, stored=packed is not None)
        clock.passed("measuring")
        metrics: dict[str, Any] = {
            part: {"accuracy": found["accuracy"], "texts": found["texts"]}
            for part, found in scores.items()
        }
        metrics["sizes"] = sizes(made, fitted.model, fitted.made.table, packed)
        metrics |= {
            "epochs": len(fitted.result.history),
            "interrupted": fitted.result.interrupted,
            "seed": job.seed,
        }
        metrics |= {"stages": clock.stages, "seconds": sum(clock.stages.values())}
        outcome = TextOutcome(metrics, fitted, prepared, packed)
        with show_progress("writing", shown=job.progress, transient=True):
            _write_reports(made, outcome, job, scores, train)
        move_folder(made, job.out, CLASSIFIER, (WORDS, MODEL, LIST, TOKENIZER))
        if not fitted.result.interrupted:
            clear_checkpoints(job.out)
    return outcome


def _check(job: TextJob) -> None:
    """Refuse what can be told before a file is read."""
    more = word_extras(job.recipe.words, job.preparing.get("subwords"))
    require("training a text classifier", TRAINING, more)
    check_stored(job.stored)
    check_out(job.out, CLASSIFIER, "classifier", overwrite=job.overwrite, resume=job.resume)


def _read(job: TextJob) -> tuple[Texts, Texts]:
    """Return the training and the test texts; without a test file a tenth of the texts, drawn by the seed."""
    texts = read_texts(job.source, **job.reading)
    if job.test is not None:
        return texts, read_texts(job.test, names=texts.names, **job.reading)
    order = np.random.default_rng([job.seed, 1]).permutation(len(texts))
    count = round(TEST * len(texts))
    if count < 1:
        raise DataError(
            f"{job.source} holds {len(texts)} texts, too few to hold some out: give more, or a file by --test"
        )
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    return taken(texts, kept), taken(texts, held)


def taken(texts: Texts, index: Ids) -> Texts:
    """Return the texts at ``index``."""
    lines = None if texts.lines is None else texts.lines[index]
    some = [texts.texts[at] for at in index.tolist()]
    return Texts(some, texts.labels[index], texts.names, texts.notes, texts.path, lines)


def described(prepared: Prepared, train: Texts) -> str:
    """Say what was read."""
    parts = [
        prepared.train,
        prepared.validation,
        *([] if prepared.test is None else [prepared.test]),
    ]
    counts = ", ".join(
        f"{len(part):,} {name}"
        for part, name in zip(parts, ("train", "validation", "test"), strict=False)
    )
    return f"{counts} texts of {len(train.names)} classes, {len(prepared.words):,} words"


def _write_reports(
    folder: Path, outcome: TextOutcome, job: TextJob, scores: Scores, train: Texts
) -> None:
    """Write ``metrics.json``, ``history.parquet`` and ``report.html``."""
    metrics, fitted = outcome.metrics, outcome.fitted
    settings = asdict(job.recipe)
    write_json(folder / "metrics.json", {**metrics, "settings": settings, **made_by()})
    write_history(folder / "history.parquet", fitted.result.history)
    report = report_of(
        fitted,
        outcome.prepared,
        outcome.packed,
        scores,
        texts=[train.texts[at] for at in outcome.prepared.held.tolist()],
        name=job.source.name,
        sizes=page_sizes(metrics["sizes"]),
        settings={
            **{key: value for key, value in settings.items() if key != "words"},
            **settings["words"],
            **job.stored,
        },
        command=job.command,
        seconds=metrics["seconds"],
    )
    write_page(folder / "report.html", text_page(report))
