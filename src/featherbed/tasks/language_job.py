"""From plain text to a folder that continues texts: read, train, store, measure what was stored, report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featherbed.errors import ArgumentError
from featherbed.extras import TRAINING, require
from featherbed.packed.table import PackedTable
from featherbed.progress import show_progress
from featherbed.serve.bundle import LANGUAGE, LIST, MODEL, TOKENIZER, WORDS
from featherbed.serve.language import LanguageServer, write_language
from featherbed.serve.words import tokenize
from featherbed.tasks.continuation import continuation
from featherbed.tasks.data import Corpus
from featherbed.tasks.folders import write_history, write_page
from featherbed.tasks.jobs import (
    Clock,
    check_out,
    check_stored,
    clear_checkpoints,
    discard_on_error,
    fitted_extras,
    marked_checkpoints,
    move_folder,
    word_extras,
    workplace,
)
from featherbed.tasks.language import LanguageFitted, fit_language
from featherbed.tasks.language_recipe import LanguageRecipe
from featherbed.tasks.lm import columns, perplexity
from featherbed.tasks.results import made_by, write_json
from featherbed.tasks.text_store import (
    anchor_ids,
    pack_words,
    page_sizes,
    parameter_line,
    size_line,
    sizes,
)
from featherbed.tasks.texts import read_sentences
from featherbed.tasks.word_insight import loss_bands, word_insight
from featherbed.tasks.word_model import WordModel
from featherbed.version import __version__
from featherbed.view.texts import language_page

CUTS: dict[str, Callable[[str], list[str]]] = {"blanks": str.split, "words": tokenize}
STARTS = 3  # continuations on the page
WRITTEN = 40  # words of each


@dataclass(frozen=True)
class LanguageJob:
    """What ``featherbed train lm`` is asked for.

    ``sources`` is one text, of which parts are held out, or three: training, validation, test. ``cut`` says what words are:
    what stands between blanks, or what the tokenizer of texts makes. ``stored`` is as in ``TextJob``.
    """

    sources: Sequence[Path]
    out: Path
    recipe: LanguageRecipe
    cut: str = "blanks"
    reading: dict[str, Any] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    starts: Sequence[str] = ()
    seed: int = 0
    resume: bool = False
    overwrite: bool = False
    progress: bool = True
    command: str = ""


@dataclass(frozen=True)
class LanguageOutcome:
    """What came of a job: the numbers of ``metrics.json``, the trained model, its text, what it wrote."""

    metrics: dict[str, Any]
    fitted: LanguageFitted
    corpus: Corpus
    packed: PackedTable | None
    continuations: list[dict[str, str]]

    def lines(self, out: Path) -> list[str]:
        """Say in a few lines what came out."""
        metrics, found = self.metrics, self.metrics["sizes"]
        lines = [
            f"perplexity: test {metrics['test']['perplexity']:.2f}, validation {metrics['validation']['perplexity']:.2f}"
        ]
        lines.append(parameter_line(found))
        if self.packed is None:
            lines.append("this table has no packed form: nothing that continues texts was written")
        else:
            lines.append(size_line(found))
        lines += [
            f"{one['start']} ... {one['text']}".replace("\n", " / ")
            for one in self.continuations[:1]
        ]
        lines.append(
            f"{out}: {', '.join(sorted(path.name for path in out.iterdir() if path.is_file()))}"
        )
        if metrics["interrupted"]:
            lines.append("interrupted: this is the best epoch so far; --resume goes on")
        return lines


def train_language(
    job: LanguageJob, say: Callable[[str], None] = lambda _: None
) -> LanguageOutcome:
    """Do a job; everything is read, checked, trained and measured before the first file of the model is written.

    >>> from featherbed.tasks.word_tables import WordTable
    >>> folder = getfixture("tmp_path")
    >>> _ = (folder / "text.txt").write_text("the cat sat on the mat\\n" * 200)
    >>> recipe = LanguageRecipe(words=WordTable("anchor:anchors=4", dim=8), hidden=8, epochs=2, batch=4, dropout=0.0)
    >>> outcome = train_language(LanguageJob([folder / "text.txt"], folder / "out", recipe, progress=False))
    >>> outcome.metrics["test"]["perplexity"] < 8, (folder / "out" / "report.html").exists()
    (True, True)
    """
    clock = Clock()
    _check(job)
    with workplace(job.out.absolute()) as place:
        with show_progress("reading", shown=job.progress, transient=True):
            corpus = read_sentences(by_role(job.sources), cut=CUTS[job.cut], **job.reading)
        parts = {"train": corpus.train, "validation": corpus.validation, "test": corpus.test}
        say(
            f"{', '.join(f'{len(ids):,} {part}' for part, ids in parts.items())} words, {len(corpus.words):,} different"
        )
        clock.passed("reading")
        run = {"text": checksum(corpus), "seed": job.seed, **asdict(job.recipe)}
        checkpoints = marked_checkpoints(job.out, run, job.resume)
        with discard_on_error(job.out, resume=job.resume):
            fitted = fit_language(
                job.recipe,
                corpus,
                seed=job.seed,
                progress=job.progress,
                name=job.recipe.model,
                checkpoints=checkpoints,
            )
        for note in fitted.made.notes:
            say(note)
        clock.passed("training")
        made = Path(place) / "made"
        made.mkdir()
        with show_progress("measuring", shown=job.progress, transient=True):
            packed = store(made, fitted, corpus, job)
            scores = measured(made, fitted.model, parts, stored=packed is not None)
        metrics: dict[str, Any] = {
            part: {"perplexity": found, "words": len(parts[part])} for part, found in scores.items()
        }
        metrics["sizes"] = sizes(made, fitted.model, fitted.made.table, packed)
        clock.passed("measuring")
        metrics |= {
            "epochs": len(fitted.result.history),
            "interrupted": fitted.result.interrupted,
            "seed": job.seed,
        }
        metrics |= {"stages": clock.stages, "seconds": sum(clock.stages.values())}
        with show_progress("writing", shown=job.progress, transient=True):
            continuations = written(fitted.model, corpus, job)
            outcome = LanguageOutcome(metrics, fitted, corpus, packed, continuations)
            _write_reports(made, outcome, job)
        move_folder(made, job.out, LANGUAGE, (WORDS, MODEL, LIST, TOKENIZER))
        if not fitted.result.interrupted:
            clear_checkpoints(job.out)
    return outcome


def _check(job: LanguageJob) -> None:
    """Refuse what can be told before a file is read."""
    fitted = [job.recipe.words.spec] if job.recipe.dense_epochs else []
    more = fitted_extras(*fitted), word_extras(job.recipe.words)
    require("training a language model", TRAINING, *more)
    check_stored(job.stored)
    if job.cut not in CUTS:
        raise ArgumentError(f"cut={job.cut!r}: use one of {', '.join(CUTS)}")
    check_out(job.out, LANGUAGE, "language model", overwrite=job.overwrite, resume=job.resume)


def by_role(paths: Sequence[Path]) -> list[Path]:
    """Return three files as training, validation, test where their names say which is which; otherwise as they are given.

    >>> [path.name for path in by_role([Path("ptb.test.txt"), Path("ptb.train.txt"), Path("ptb.valid.txt")])]
    ['ptb.train.txt', 'ptb.valid.txt', 'ptb.test.txt']
    """
    roles = (("train",), ("valid", "dev"), ("test",))
    found = [
        [path for path in paths if any(word in path.name.lower() for word in words)]
        for words in roles
    ]
    named = len(paths) == 3 and all(len(some) == 1 for some in found)
    return [some[0] for some in found] if named else list(paths)


def checksum(corpus: Corpus) -> str:
    """Return a number for a text, by which a run that is resumed knows it."""
    found = sha256("\n".join(corpus.words).encode())
    for ids in (corpus.train, corpus.validation, corpus.test):
        found.update(ids.tobytes())
    return found.hexdigest()


def store(
    folder: Path, fitted: LanguageFitted, corpus: Corpus, job: LanguageJob
) -> PackedTable | None:
    """Write what ``featherbed continue`` opens; None, and nothing written, for a table that cannot be packed."""
    model, table = fitted.model.eval(), fitted.made.table
    packed = pack_words(table, job.stored)
    if packed is None:
        return None
    with torch.no_grad():
        write_language(
            folder,
            packed,
            [[part.detach().numpy() for part in cell] for cell in model.cells()],
            model.bias.detach().numpy(),
            output=None if model.scored is table else model.scored.weight.detach().numpy(),
            words=corpus.words,
            weights=job.stored.get("weights", "float32"),
            about={"source": job.sources[0].name, "seed": job.seed},
        )
    return packed


def measured(
    folder: Path, model: WordModel, parts: dict[str, NDArray[np.int64]], stored: bool
) -> dict[str, float]:
    """Return perplexities of the model as it is stored; of the trained one where nothing is."""
    held = {part: ids for part, ids in parts.items() if part != "train"}
    if not stored:
        return {part: perplexity(model, ids) for part, ids in held.items()}
    served = LanguageServer.open(folder)
    return {part: served.perplexity(ids) for part, ids in held.items()}


def written(model: WordModel, corpus: Corpus, job: LanguageJob) -> list[dict[str, str]]:
    """Return how the model goes on from some beginnings: those asked for, or the first words of validation lines."""
    starts = list(job.starts) or beginnings(corpus)
    return [
        {
            "start": start,
            "text": continuation(model, corpus.words, start, WRITTEN, seed=job.seed + at),
        }
        for at, start in enumerate(starts)
    ]


def beginnings(corpus: Corpus, words: int = 4) -> list[str]:
    """Return the first words of some lines of the validation text."""
    line = " ".join(corpus.words[at] for at in corpus.validation[:2000].tolist())
    found = [" ".join(part.split()[:words]) for part in line.split("<eos>")]
    return [start for start in found if len(start.split()) == words and "<unk>" not in start][
        :STARTS
    ] or [""]


@torch.no_grad()
def losses_of(
    model: WordModel, ids: NDArray[np.int64], batch: int = 10, length: int = 70
) -> tuple[Any, Any]:  # [n], [n]
    """Return the loss at every word of a text, and the words."""
    model.eval()
    text, state = columns(ids, batch), None
    found, targets = [], []
    for start in range(0, len(text) - 1, length):
        target = text[start + 1 : start + 1 + length]
        logits, state = model(text[start : start + len(target)], state)
        found.append(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), target.flatten(), reduction="none"
            )
        )
        targets.append(target.flatten())
    return torch.cat(found).numpy(), torch.cat(targets).numpy()


def described(fitted: LanguageFitted, kind: str) -> dict[str, Any]:
    """Say what the model is made of."""
    table = fitted.made.table
    return {
        "kind": kind,
        "table": type(table).__name__,
        "words": table.num_embeddings,
        "dim": table.embedding_dim,
    }


def _write_reports(folder: Path, outcome: LanguageOutcome, job: LanguageJob) -> None:
    """Write ``metrics.json``, ``history.parquet`` and ``report.html``."""
    metrics, fitted, corpus = outcome.metrics, outcome.fitted, outcome.corpus
    settings, table = asdict(job.recipe), fitted.made.table
    write_json(folder / "metrics.json", {**metrics, "settings": settings, **made_by()})
    write_history(folder / "history.parquet", fitted.result.history)
    losses, targets = losses_of(fitted.model, corpus.validation)
    rates = [row["tokens_per_second"] for row in fitted.result.history]
    train = [row["train_perplexity"] for row in fitted.result.history]
    report: dict[str, Any] = {
        "name": job.sources[0].name,
        "metrics": {part: metrics[part] for part in ("test", "validation")},
        "sizes": page_sizes(metrics["sizes"]),
        "history": fitted.result.history,
        "model": {
            "kind": job.recipe.model,
            "table": type(table).__name__,
            "words": len(corpus.words),
            "dim": table.embedding_dim,
        },
        "bands": loss_bands(losses, targets, corpus.counts),
        "speed": {"training": float(np.median(rates))} if rates else None,
        "continuations": outcome.continuations,
        "insight": None,
        "input": {
            "train": len(corpus.train),
            "validation": len(corpus.validation),
            "test": len(corpus.test),
        },
        "settings": {
            **{key: value for key, value in settings.items() if key != "words"},
            **settings["words"],
            **job.stored,
        },
        "notes": list(fitted.made.notes),
        "command": job.command,
        "seconds": metrics["seconds"],
        "version": __version__,
        "interrupted": fitted.result.interrupted,
    }
    if train:
        report["metrics"]["train"] = {"perplexity": min(train)}
    if outcome.packed is not None:
        report["insight"] = word_insight(
            outcome.packed, corpus.words, corpus.counts, anchor_ids(table)
        )
    write_page(folder / "report.html", language_page(report))
