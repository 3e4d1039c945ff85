"""What every job from a file to a folder shares: a workplace, a clock, checkpoints that know which run they are of."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from featherbed.errors import ArgumentError, FeatherbedError
from featherbed.extras import Packages
from featherbed.packed.keys import Keys
from featherbed.packed.matrix import level_bits
from featherbed.packed.table import PackedTable
from featherbed.packed.writing import remove_stale, temporary_folder
from featherbed.serve.bundle import KINDS
from featherbed.tasks.checkpoints import Checkpoints
from featherbed.tasks.results import write_json
from featherbed.tasks.word_tables import WordTable

CHECKPOINTS, RUN = "checkpoints", "run.json"


@contextlib.contextmanager
def workplace(out: Path) -> Iterator[str]:
    """Make a temporary folder in the nearest existing folder, so that a read-only one shows at once.

    Temporary files that killed runs left around ``out`` are removed.
    """
    near = next(folder for folder in (out, *out.parents) if folder.exists())
    for folder in {near, out.parent, out, out / CHECKPOINTS, *(out / CHECKPOINTS).glob("*/")}:
        remove_stale(folder)
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(temporary_folder(near))
        except OSError as error:
            raise ArgumentError(
                f"{near} cannot be written into ({error.strerror}): give another folder for --out"
            ) from None
        yield str(place)


def fitted_extras(*specs: str) -> Packages:
    """Return the optional packages that fitting tables of these specs to rows needs.

    >>> fitted_extras("dense", "banded:hot=10,tail='product:parts=4,choices=16'")
    {'compress': ['faiss']}
    """
    coded = any(re.search(r"\b(kd|product)\b", spec) for spec in specs)
    return {"compress": ["faiss"]} if coded else {}


def word_extras(words: WordTable, subwords: int | None = None) -> Packages:
    """Return the optional packages that choosing words and cutting them into pieces need.

    >>> word_extras(WordTable("selected:keep=9", by="tfidf"), subwords=300)
    {'train': ['sklearn'], 'text': ['tokenizers']}
    """
    learnt = words.by not in (None, "random", "frequency")
    found: dict[str, list[str]] = {"train": ["sklearn"]} if learnt else {}
    return found if subwords is None else found | {"text": ["tokenizers"]}


class Clock:
    """Tells how many seconds each stage took.

    >>> clock = Clock()
    >>> clock.passed("reading")
    >>> list(clock.stages)
    ['reading']
    """

    def __init__(self) -> None:
        self.last, self.stages = time.perf_counter(), dict[str, float]()

    def passed(self, stage: str) -> None:
        """Note that a stage has ended now."""
        now = time.perf_counter()
        self.stages[stage], self.last = now - self.last, now


def check_out(out: Path, mark: str, what: str, *, overwrite: bool, resume: bool) -> None:
    """Refuse a folder to write whose model, told by the file ``mark``, would be lost, or that has nothing to resume."""
    if out.is_file():
        raise ArgumentError(f"{out} is a file: give a folder for --out")
    if (out / mark).exists() and not (overwrite or resume):
        raise ArgumentError(
            f"{out} holds a {what} already: give another folder, --overwrite or --resume"
        )
    if resume and not (out / CHECKPOINTS).is_dir():
        raise ArgumentError(f"{out} holds no checkpoints to resume from: leave --resume out")


def check_stored(stored: dict[str, str]) -> None:
    """Refuse a precision that values, dictionary or weights of a text model cannot be stored in.

    >>> check_stored({"values": "int8", "weights": "float16"})
    """
    for name in ("values", "dictionary"):
        level_bits(stored.get(name, "float32"))
    if (kind := stored.get("weights", "float32")) not in KINDS:
        raise ArgumentError(f"weights={kind!r}: use one of {', '.join(KINDS)}")


class Marked(Checkpoints):
    """Checkpoints with a file that says which run they are of, written with the first one."""

    def __init__(self, folder: Path, run: dict[str, Any], mark: Path | None = None) -> None:
        super().__init__(folder)
        self.run, self.mark = run, mark or folder / RUN

    def stage(self, name: str) -> Checkpoints:
        """Return the checkpoints of a stage; what says which run they are of is the same file."""
        return Marked(self.folder / name, self.run, self.mark)

    def save(self, step: int, **state: Any) -> None:
        """Write the state after ``step`` steps."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.mark, self.run)
        super().save(step, **state)


def marked_checkpoints(out: Path, run: dict[str, Any], resume: bool) -> Checkpoints:
    """Return the folder's checkpoints; those of a run on other data or with other settings are not resumed.

    >>> marked_checkpoints(getfixture("tmp_path"), {"seed": 0}, resume=False).latest() is None
    True
    """
    run = json.loads(json.dumps(run))  # as it reads when it comes back
    path = out / CHECKPOINTS / RUN
    if resume:
        before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if other := [name for name, value in run.items() if before.get(name) != value]:
            raise ArgumentError(
                f"{out} has checkpoints of other {', '.join(other[:3])}: ask for the same again, or leave --resume out"
            )
    else:
        clear_checkpoints(out)
    return Marked(path.parent, run)


def clear_checkpoints(out: Path) -> None:
    """Take the checkpoints away, and the folder if it holds nothing else."""
    (out / CHECKPOINTS / RUN).unlink(missing_ok=True)
    Checkpoints(out / CHECKPOINTS).clear()
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()


@contextlib.contextmanager
def discard_on_error(out: Path, *, resume: bool) -> Iterator[None]:
    """Remove checkpoints where training fails by a named error; those of a resumed run stay."""
    try:
        yield
    except FeatherbedError:
        if not resume:
            clear_checkpoints(out)
        raise


def with_keys(table: PackedTable, keys: Any) -> PackedTable:
    """Return the table with its rows named."""
    return PackedTable(
        table.bands,
        table.dim,
        padding_idx=table.padding_idx,
        keys=Keys.of(keys),
        made_by=table.made_by,
    )


def move_folder(made: Path, folder: Path, mark: str, optional: tuple[str, ...] = ()) -> None:
    """Put the files of a finished folder into another on the same disk, in place of those of a model that is there.

    The file ``mark``, which tells that there is a model, goes first and comes last: in between there is none, never half of
    two. ``optional`` files of a model that was there before go with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in made.iterdir():
        if (folder / path.name).is_file():  # files keep their modes
            path.chmod((folder / path.name).stat().st_mode)
    for name in (mark, *optional):
        (folder / name).unlink(missing_ok=True)
    for path in sorted(made.iterdir(), key=lambda path: path.name == mark):
        path.replace(folder / path.name)
