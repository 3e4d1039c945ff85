"""From a file of ratings to a folder that recommends: read, split, train, store, measure what was stored, report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from featherbed.errors import ArgumentError, DataError
from featherbed.extras import TRAINING, require
from featherbed.packed.columns import nonzero_columns
from featherbed.packed.matrix import level_bits
from featherbed.packed.report import file_size
from featherbed.progress import Progress, show_progress
from featherbed.serve.folder import APART, JSON, TITLES
from featherbed.tables import DenseTable
from featherbed.tables.spec import parse_spec
from featherbed.tasks.baselines import Biases, validated_biases
from featherbed.tasks.bayes import MOST_BYTES, needed_bytes
from featherbed.tasks.checkpoints import Checkpoints
from featherbed.tasks.data import Ratings
from featherbed.tasks.folders import write_folder
from featherbed.tasks.jobs import (
    Clock,
    check_out,
    clear_checkpoints,
    discard_on_error,
    fitted_extras,
    marked_checkpoints,
    move_folder,
    with_keys,
    workplace,
)
from featherbed.tasks.passes import WIDEST
from featherbed.tasks.rating_checks import check_values, count_notes
from featherbed.tasks.reading import Reading, read_ratings
from featherbed.tasks.recipe import Recipe
from featherbed.tasks.splits import WAYS, Split, by_frequency, make_split, save_split, seen_only
from featherbed.tasks.titles import Titles, read_titles
from featherbed.tasks.trainers import Learnt, by_levels, by_passes, by_recipe

RATIO = 8  # times smaller than float32 rows, where nothing is asked for
HEADERS = 1_200  # bytes of the headers of two files, about
STREAM = 5_000_000  # ratings from which plain rows are trained in passes
SAMPLE = 10_000_000  # ratings the training error is measured on, at most
SPLIT = "split.safetensors"


@dataclass(frozen=True)
class Job:
    """What ``featherbed train ratings`` is asked for.

    Without ``recipe`` rows are stored in levels within ``budget`` bytes (``ratio`` times smaller than float32 rows where
    no budget is given). ``reading`` and ``splitting`` are keywords of ``read_ratings`` and ``make_split``.
    """

    source: Path
    out: Path
    recipe: Recipe | None = None
    budget: int | None = None
    ratio: float | None = None
    dim: int = 16
    values: str = "float32"
    dictionary: str = "float32"
    reading: dict[str, Any] = field(default_factory=dict)
    splitting: dict[str, Any] = field(default_factory=dict)
    seen: bool = False
    titles: Path | None = None
    seed: int = 0
    resume: bool = False
    overwrite: bool = False
    progress: bool = True
    command: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of a job: the numbers of ``metrics.json``, rows, baseline, ratings and split."""

    metrics: dict[str, Any]
    learnt: Learnt
    reading: Reading
    split: Split
    biases: Biases
    titles: Titles | None = None


def train_recommender(job: Job, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Do a job; everything is read, checked and trained before the first file of the recommender is written.

    >>> from featherbed.tasks.data import planted_ratings
    >>> folder, ratings = getfixture("tmp_path"), planted_ratings(80, 60, 2000)
    >>> triples = zip(ratings.users, ratings.items, ratings.values)
    >>> _ = (folder / "ratings.csv").write_text("user,item,rating\\n" + "\\n".join(f"{u},{i},{r:.1f}" for u, i, r in triples))
    >>> outcome = train_recommender(Job(folder / "ratings.csv", folder / "out", dim=4, progress=False))
    >>> outcome.metrics["sizes"]["file"] <= 80 * 4 * 4 + 60 * 4 * 4 and (folder / "out" / "report.html").exists()
    True
    """
    clock = Clock()
    _check(job)
    with workplace(job.out.absolute()) as place:
        reading = _read(job, place)
        check_values(reading.ratings, job.source)
        for line in (*described(reading), *count_notes(reading.ratings)):
            say(line)
        clock.passed("reading")
        with _stage(job, "splitting"):
            split = by_frequency(_split(job, reading.ratings, place, say), place)
        titles = None if job.titles is None else read_titles(job.titles, split.train.item_keys)
        clock.passed("splitting")
        learnt = _learn(job, split, say)
        clock.passed("training")
        keys = split.train.user_keys, split.train.item_keys
        learnt = replace(
            learnt, users=with_keys(learnt.users, keys[0]), items=with_keys(learnt.items, keys[1])
        )
        with _stage(job, "measuring"):
            biases = validated_biases(split.train, split.validation)
            metrics = _measured(job, split, learnt, biases)
        outcome = Outcome(metrics, learnt, reading, split, biases, titles)
        clock.passed("measuring")
        outcome.metrics.update(stages=clock.stages, seconds=sum(clock.stages.values()))
        settings = (
            asdict(job.recipe)
            if job.recipe
            else {"dim": job.dim, "budget": outcome.metrics["sizes"]["file"]}
        )
        made = Path(place) / "made"
        with _stage(job, "writing"):
            write_folder(made, outcome, job.source.name, job.command, settings)
            save_split(split, made / SPLIT)
        move_folder(made, job.out, JSON, (TITLES, APART))
        if not learnt.interrupted:
            clear_checkpoints(job.out)
    return outcome


def _stage(job: Job, name: str) -> AbstractContextManager[Progress]:
    """Return a block in which a stage without steps is shown."""
    return show_progress(name, shown=job.progress, transient=True)


def _read(job: Job, workplace: str) -> Reading:
    display = show_progress("reading", percent=True, shown=job.progress, transient=True)
    with display as shown:

        def update(done: int, size: int) -> None:
            shown.update(done, total=size)

        return read_ratings(job.source, **job.reading, workplace=workplace, progress=update)


def described(reading: Reading) -> list[str]:
    """Say what was read: columns, sizes, what was left out."""
    ratings = reading.ratings
    columns = ", ".join(f"{role} = {column}" for role, column in reading.columns.items())
    sizes = (
        f"{len(ratings):,} ratings of {ratings.num_items:,} items by {ratings.num_users:,} users"
    )
    return [f"{sizes} ({columns})", *reading.notes]


def _check(job: Job) -> None:
    """Refuse what can be told before the file is read; above all a folder whose recommender would be lost."""
    specs = () if job.recipe is None else (job.recipe.users, job.recipe.items)
    require("training a recommender", TRAINING, fitted_extras(*specs))
    for kind in (job.values, job.dictionary):
        level_bits(kind)
    if job.recipe is not None and job.values != "float32" and _rows_only(job.recipe):
        raise ArgumentError(
            "--values is for the weights of codes, and plain rows have none: store them by --dictionary"
        )
    for name in ("low", "high"):
        if np.isnan(job.reading.get(name) or 0.0):
            raise ArgumentError(f"--{name} nan: give a number, or leave it out")
    if (how := job.splitting.get("how", WAYS[0])) not in WAYS:
        raise ArgumentError(f"--split {how}: use one of {', '.join(WAYS)}")
    if job.titles is not None and not job.titles.is_file():
        raise ArgumentError(f"{job.titles}: no such file, give one of item keys and titles")
    check_out(job.out, JSON, "recommender", overwrite=job.overwrite, resume=job.resume)


def _split(job: Job, ratings: Ratings, workplace: str, say: Callable[[str], None]) -> Split:
    split = make_split(ratings, seed=job.seed, **job.splitting, workplace=workplace)
    if job.seen:
        before = len(split.validation), len(split.test)
        split = seen_only(split, workplace)
        gone = before[0] - len(split.validation), before[1] - len(split.test)
        say(
            f"users and items not seen in training: {gone[0]:,} validation and {gone[1]:,} test ratings left out"
        )
    for name in ("train", "validation", "test"):
        if not len(getattr(split, name)):
            raise DataError(
                f"the {name} part of the {split.how} split is empty: give more ratings, or another --split"
            )
    say(
        f"{split.how} split: {len(split.train):,} train, {len(split.validation):,} validation, {len(split.test):,} test"
    )
    return split


def _rows_only(recipe: Recipe) -> bool:
    return all(parse_spec(spec)[0] is DenseTable for spec in (recipe.users, recipe.items))


def _plain(recipe: Recipe) -> bool:
    """Whether a recipe is of plain rows, which passes over a stream can train."""
    return (
        _rows_only(recipe)
        and recipe.dim <= WIDEST
        and recipe.biases != "apart"
        and not (recipe.sse_users or recipe.sse_items)
    )


def _learn(job: Job, split: Split, say: Callable[[str], None]) -> Learnt:
    rows = split.train.num_users + split.train.num_items
    recipe, dictionary = job.recipe, job.dictionary
    if (
        recipe is None
        and job.budget is None
        and job.ratio is None
        and needed_bytes(split.train, job.dim) > MOST_BYTES
    ):
        say(f"{rows:,} rows and {len(split.train):,} ratings are many: plain rows, stored as int4")
        recipe, dictionary = Recipe(dim=job.dim, epochs=5), "int4"
    if recipe is None:
        budget = _budget(job, split) if job.budget is None else job.budget
        say(f"rows in levels, at most {budget:,} bytes")
        return by_levels(budget, split, dim=job.dim, seed=job.seed, progress=job.progress)
    if _plain(recipe) and len(split.train) >= STREAM:
        say("trained in passes, a rating at a time: a batch and patience do not apply")
        return by_passes(recipe, split, seed=job.seed, dictionary=dictionary, progress=job.progress)
    stored = {"values": job.values, "dictionary": dictionary}
    checkpoints = _checkpoints(job, recipe, split)
    with discard_on_error(job.out, resume=job.resume):
        return by_recipe(
            recipe,
            split,
            seed=job.seed,
            stored=stored,
            checkpoints=checkpoints,
            progress=job.progress,
        )


def _checkpoints(job: Job, recipe: Recipe, split: Split) -> Checkpoints:
    """Return the folder's checkpoints; those of other ratings, another split or other settings are not resumed."""
    parts = b"" if split.parts is None else split.parts.tobytes()
    run = {
        "ratings": split.checksum,
        "seed": job.seed,
        "split": sha256(parts).hexdigest(),
        **asdict(recipe),
    }
    return marked_checkpoints(job.out, run, job.resume)


def _budget(job: Job, split: Split) -> int:
    """Return the bytes a ratio stands for; where none is given, few rows get room for the headers of their files besides."""
    rows = split.train.num_users + split.train.num_items
    asked = int(rows * job.dim * 4 / (RATIO if job.ratio is None else job.ratio))
    return asked + HEADERS if job.ratio is None and asked < 4 * HEADERS else asked


def _measured(job: Job, split: Split, learnt: Learnt, biases: Biases) -> dict[str, Any]:
    """Return the numbers of ``metrics.json``: errors of the stored rows, baselines, sizes."""
    train = split.train
    if len(train) > SAMPLE:
        train = train.take(
            np.sort(np.random.default_rng(job.seed).choice(len(train), SAMPLE, replace=False))
        )
    found: dict[str, Any] = {
        "train": {"mse": learnt.error(train), "ratings": len(split.train)},
        "validation": {"mse": learnt.error(split.validation), "ratings": len(split.validation)},
        "test": {"mse": learnt.error(split.test), "ratings": len(split.test)},
    }
    found["baselines"] = {
        "mean": float(np.mean(np.square(split.test.values.astype(np.float64) - biases.mean))),
        "biases": biases.error(split.test),
        "shrinkage": list(biases.shrinkage),
    }
    found["factors"] = _factors(learnt)
    found |= {"nonzeros": learnt.nonzeros, "sizes": _sizes(learnt), "epochs": len(learnt.history)}
    return found | {"interrupted": learnt.interrupted, "split": split.how, "seed": job.seed}


def _factors(learnt: Learnt) -> int:
    """Count the columns, biases left out, that are other than 0 for some user and for some item."""
    columns = nonzero_columns(learnt.users) & nonzero_columns(learnt.items)
    return int(np.count_nonzero(columns[int(learnt.biases == "column") :]))


def _sizes(learnt: Learnt) -> dict[str, Any]:
    """Return bytes of each side and of both together; ``file`` is without keys, which are listed apart."""
    sides: dict[str, dict[str, Any]] = {}
    for number, (side, table) in enumerate((("users", learnt.users), ("items", learnt.items))):
        file = file_size(table, keys=False)
        sides[side] = {
            "file": file,
            "keys": file_size(table, keys=True) - file,
            "resident": table.nbytes,
            "float32": 4 * table.rows * table.dim,
            "parameters": learnt.parameters[number],
            "training": None if learnt.training is None else learnt.training[number],
        }
    names = [name for name in sides["users"] if name != "training" or learnt.training is not None]
    whole: dict[str, Any] = {name: sum(size[name] for size in sides.values()) for name in names}
    ratio = whole["float32"] / whole["file"]
    return {**sides, **whole, "ratio": ratio, "ratio_float16": ratio / 2}
