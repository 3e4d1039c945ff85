"""From a file of ratings to a folder that recommends: read, split, train, store, measure what was stored, report."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from featherbed.errors import ArgumentError, DataError, FeatherbedError
from featherbed.packed.keys import Keys
from featherbed.packed.matrix import level_bits
from featherbed.packed.report import file_size
from featherbed.packed.table import PackedTable
from featherbed.serve.folder import JSON
from featherbed.tables import DenseTable
from featherbed.tables.spec import parse_spec
from featherbed.tasks.bayes import MOST_BYTES, needed_bytes
from featherbed.tasks.checkpoints import Checkpoints
from featherbed.tasks.data import Ratings
from featherbed.tasks.folders import move_recommender, write_folder
from featherbed.tasks.passes import WIDEST
from featherbed.tasks.progress import reading_bar
from featherbed.tasks.reading import Reading, read_ratings
from featherbed.tasks.recipe import Recipe
from featherbed.tasks.results import write_json
from featherbed.tasks.splits import WAYS, Split, by_frequency, make_split, save_split, seen_only
from featherbed.tasks.titles import Titles, read_titles
from featherbed.tasks.trainers import Learnt, by_levels, by_passes, by_recipe

RATIO = 8  # times smaller than float32 rows, where nothing is asked for
HEADERS = 1_200  # bytes of the headers of two files, about
STREAM = 5_000_000  # ratings from which plain rows are trained in passes
SAMPLE = 10_000_000  # ratings the training error is measured on, at most
CHECKPOINTS, RUN, SPLIT = "checkpoints", "run.json", "split.safetensors"


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
    """What came of a job: the numbers of ``metrics.json``, the rows, what was read and how it was split."""

    metrics: dict[str, Any]
    learnt: Learnt
    reading: Reading
    split: Split
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
    with _workplace(job.out.absolute()) as workplace:
        reading = _read(job, workplace)
        for line in described(reading):
            say(line)
        clock.passed("reading")
        split = by_frequency(_split(job, reading.ratings, workplace, say), workplace)
        titles = None if job.titles is None else read_titles(job.titles, split.train.item_keys)
        clock.passed("splitting")
        learnt = _learn(job, split, say)
        clock.passed("training")
        keys = split.train.user_keys, split.train.item_keys
        learnt = replace(learnt, users=_with_keys(learnt.users, keys[0]), items=_with_keys(learnt.items, keys[1]))
        outcome = Outcome(_measured(job, split, learnt), learnt, reading, split, titles)
        clock.passed("measuring")
        outcome.metrics.update(stages=clock.stages, seconds=sum(clock.stages.values()))
        settings = asdict(job.recipe) if job.recipe else {"dim": job.dim, "budget": outcome.metrics["sizes"]["file"]}
        made = Path(workplace) / "made"
        write_folder(made, outcome, job.source.name, job.command, settings)
        save_split(split, made / SPLIT)
        move_recommender(made, job.out)
        if not learnt.interrupted:
            _clear(job.out)
    return outcome


def _workplace(out: Path) -> tempfile.TemporaryDirectory[str]:
    """Make a folder for long columns in the nearest folder there is, so that one that cannot be written shows at once."""
    near = next(folder for folder in (out, *out.parents) if folder.exists())
    try:
        return tempfile.TemporaryDirectory(prefix=".featherbed-", dir=near)
    except OSError as error:
        raise ArgumentError(f"{near} cannot be written into ({error.strerror}): give another folder for --out") from None


class Clock:
    """Tells how many seconds each stage took."""

    def __init__(self) -> None:
        self.last, self.stages = time.perf_counter(), dict[str, float]()

    def passed(self, stage: str) -> None:
        """Note that a stage has ended now."""
        now = time.perf_counter()
        self.stages[stage], self.last = now - self.last, now


def _read(job: Job, workplace: str) -> Reading:
    with reading_bar(job.progress) as bar:
        task = bar.add_task("reading", total=None)

        def shown(done: int, size: int) -> None:
            bar.update(task, completed=done, total=size)

        return read_ratings(job.source, **job.reading, workplace=workplace, progress=shown)


def described(reading: Reading) -> list[str]:
    """Say what was read: columns, sizes, what was left out."""
    ratings = reading.ratings
    columns = ", ".join(f"{role} = {column}" for role, column in reading.columns.items())
    sizes = f"{len(ratings):,} ratings of {ratings.num_items:,} items by {ratings.num_users:,} users"
    return [f"{sizes} ({columns})", *reading.notes]


def _check(job: Job) -> None:
    """Refuse what can be told before the file is read; above all a folder whose recommender would be lost."""
    for kind in (job.values, job.dictionary):
        level_bits(kind)
    if job.recipe is not None and job.values != "float32" and _rows_only(job.recipe):
        raise ArgumentError("--values is for the weights of codes, and plain rows have none: store them by --dictionary")
    for name in ("low", "high"):
        if np.isnan(job.reading.get(name) or 0.0):
            raise ArgumentError(f"--{name} nan: give a number, or leave it out")
    if (how := job.splitting.get("how", WAYS[0])) not in WAYS:
        raise ArgumentError(f"--split {how}: use one of {', '.join(WAYS)}")
    if job.titles is not None and not job.titles.is_file():
        raise ArgumentError(f"{job.titles}: no such file, give one of item keys and titles")
    if job.out.is_file():
        raise ArgumentError(f"{job.out} is a file: give a folder for --out")
    if (job.out / JSON).exists() and not (job.overwrite or job.resume):
        raise ArgumentError(f"{job.out} holds a recommender already: give another folder, --overwrite or --resume")
    if job.resume and not (job.out / CHECKPOINTS).is_dir():
        raise ArgumentError(f"{job.out} holds no checkpoints to resume from: leave --resume out")


def _split(job: Job, ratings: Ratings, workplace: str, say: Callable[[str], None]) -> Split:
    split = make_split(ratings, seed=job.seed, **job.splitting, workplace=workplace)
    if job.seen:
        before = len(split.validation), len(split.test)
        split = seen_only(split, workplace)
        gone = before[0] - len(split.validation), before[1] - len(split.test)
        say(f"users and items not seen in training: {gone[0]:,} validation and {gone[1]:,} test ratings left out")
    for name in ("train", "validation", "test"):
        if not len(getattr(split, name)):
            raise DataError(f"the {name} part of the {split.how} split is empty: give more ratings, or another --split")
    say(f"{split.how} split: {len(split.train):,} train, {len(split.validation):,} validation, {len(split.test):,} test")
    return split


def _rows_only(recipe: Recipe) -> bool:
    return all(parse_spec(spec)[0] is DenseTable for spec in (recipe.users, recipe.items))


def _plain(recipe: Recipe) -> bool:
    """Whether a recipe is of plain rows, which passes over a stream can train."""
    return (
        _rows_only(recipe) and recipe.dim <= WIDEST and recipe.biases != "apart" and not (recipe.sse_users or recipe.sse_items)
    )


def _learn(job: Job, split: Split, say: Callable[[str], None]) -> Learnt:
    rows = split.train.num_users + split.train.num_items
    recipe, dictionary = job.recipe, job.dictionary
    if recipe is None and job.budget is None and job.ratio is None and needed_bytes(split.train, job.dim) > MOST_BYTES:
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
    try:
        return by_recipe(recipe, split, seed=job.seed, stored=stored, checkpoints=checkpoints, progress=job.progress)
    except FeatherbedError:
        if not job.resume:
            _clear(job.out)
        raise


class Marked(Checkpoints):
    """Checkpoints with a file that says which run they are of, written with the first one."""

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        super().__init__(folder)
        self.run = run

    def save(self, step: int, **state: Any) -> None:
        """Write the state after ``step`` steps."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / RUN, self.run)
        super().save(step, **state)


def _checkpoints(job: Job, recipe: Recipe, split: Split) -> Checkpoints:
    """Return the folder's checkpoints; those of other ratings, another split or other settings are not resumed."""
    path = job.out / CHECKPOINTS / RUN
    parts = b"" if split.parts is None else split.parts.tobytes()
    run = {"ratings": split.checksum, "seed": job.seed, "split": sha256(parts).hexdigest(), **asdict(recipe)}
    if job.resume:
        before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if other := [name for name, value in run.items() if before.get(name) != value]:
            raise ArgumentError(
                f"{job.out} has checkpoints of other {', '.join(other[:3])}: ask for the same again, or leave --resume out"
            )
    else:
        _clear(job.out)
    return Marked(path.parent, run)


def _clear(out: Path) -> None:
    """Take the checkpoints away, and the folder if it holds nothing else."""
    (out / CHECKPOINTS / RUN).unlink(missing_ok=True)
    Checkpoints(out / CHECKPOINTS).clear()
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()


def _budget(job: Job, split: Split) -> int:
    """Return the bytes a ratio stands for; where none is given, few rows get room for the headers of their files besides."""
    rows = split.train.num_users + split.train.num_items
    asked = int(rows * job.dim * 4 / (RATIO if job.ratio is None else job.ratio))
    return asked + HEADERS if job.ratio is None and asked < 4 * HEADERS else asked


def _with_keys(table: PackedTable, keys: Any) -> PackedTable:
    return PackedTable(table.bands, table.dim, padding_idx=table.padding_idx, keys=Keys.of(keys), made_by=table.made_by)


def _measured(job: Job, split: Split, learnt: Learnt) -> dict[str, Any]:
    """Return the numbers of ``metrics.json``: errors of the rows as they are stored, sizes without keys and with them."""
    train = split.train
    if len(train) > SAMPLE:
        train = train.take(np.sort(np.random.default_rng(job.seed).choice(len(train), SAMPLE, replace=False)))
    found: dict[str, Any] = {
        "train": {"mse": learnt.error(train), "ratings": len(split.train)},
        "validation": {"mse": learnt.error(split.validation), "ratings": len(split.validation)},
        "test": {"mse": learnt.error(split.test), "ratings": len(split.test)},
    }
    found |= {"nonzeros": learnt.nonzeros, "sizes": _sizes(learnt), "epochs": len(learnt.history)}
    return found | {"interrupted": learnt.interrupted, "split": split.how, "seed": job.seed}


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
