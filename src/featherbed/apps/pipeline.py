"""From a file to a stored model: read → fit → store → measure → report, the same for every application."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from featherbed.apps.checkpoints import (
    CHECKPOINTS,
    Checkpoints,
    clear_checkpoints,
    open_checkpoints,
)
from featherbed.apps.results import made_by, write_history, write_json, write_text
from featherbed.errors import ArgumentError, FeatherbedError
from featherbed.packed.writing import remove_stale, temporary_folder
from featherbed.progress import show_progress
from featherbed.settings import Settings

METRICS, HISTORY, REPORT = "metrics.json", "history.parquet", "report.html"
Log = Callable[[str], None]


class FittedModel(Protocol):
    """A trained model, as far as the pipeline knows it."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row of numbers per epoch."""

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended training early."""

    @property
    def notes(self) -> Sequence[str]:
        """Lines for the user about the fit."""


class Dataset(Protocol):
    """Data ready for training, as far as the pipeline knows it."""

    @property
    def lines(self) -> Sequence[str]:
        """Lines for the user: the amount of data, and notes about reading it."""


D = TypeVar("D", bound=Dataset)
F = TypeVar("F", bound=FittedModel)
S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Outcome(Generic[D, F]):
    """The result of a run: the numbers of ``metrics.json``, the data and the trained model."""

    metrics: dict[str, Any]
    data: D
    fitted: F


def ignore(line: str) -> None:
    """Print nothing: the default log of Python callers."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is carried out, whatever the application.

    Args:
        seed: seed of splits, initialization and training.
        resume: continue from the last checkpoint in the folder.
        overwrite: replace the model in the folder.
        progress: show progress on standard error.
        log: called with each line for the user.
        command: the command line of the run, for the report.
    """

    seed: int = 0
    resume: bool = False
    overwrite: bool = False
    progress: bool = True
    log: Log = field(default=ignore)
    command: str = ""


class Application(ABC, Generic[S, D, F]):
    """One run of an application; subclasses say how to read, fit, store, measure and report.

    Class attributes: ``kind`` names the model in messages, ``marker`` is the file that marks a stored
    model, ``files`` are its other files that an earlier model may have left.
    """

    kind: str
    marker: str
    files: tuple[str, ...] = ()

    def __init__(self, settings: S, out: str | Path, options: RunOptions) -> None:
        self.settings, self.out, self.options = settings, Path(out), options

    @abstractmethod
    def check(self) -> None:
        """Raise an error for anything that can be refused before the data is read."""

    @abstractmethod
    def read(self, workplace: Path) -> D:
        """Read and split the data; ``workplace`` is a folder for temporary files."""

    @abstractmethod
    def fingerprint(self, data: D) -> dict[str, Any]:
        """Return the values that must be equal for a checkpoint to be resumed."""

    @abstractmethod
    def fit(self, data: D, checkpoints: Checkpoints) -> F:
        """Train the model."""

    @abstractmethod
    def store(self, folder: Path, data: D, fitted: F) -> None:
        """Write the files that serving reads."""

    @abstractmethod
    def measure(self, folder: Path, data: D, fitted: F) -> dict[str, Any]:
        """Return the numbers of ``metrics.json``, measured on the stored model."""

    @abstractmethod
    def report(self, data: D, fitted: F, metrics: dict[str, Any]) -> str:
        """Return the HTML page of the run."""

    def run(self) -> Outcome[D, F]:
        """Run the pipeline; the model appears in ``out`` only when all of it is written."""
        watch, options = Stopwatch(), self.options
        self.check()
        self._check_out()
        with _temporary_workplace(self.out.absolute()) as workplace:
            with watch("reading"):
                data = self.read(workplace)
            for line in data.lines:
                options.log(line)
            with watch("training"):
                fitted = self._fit(data)
            for note in fitted.notes:
                options.log(note)
            folder = workplace / "model"
            folder.mkdir()
            with watch("measuring"), self.stage("measuring"):
                self.store(folder, data, fitted)
                metrics = self.measure(folder, data, fitted)
            metrics |= {
                "epochs": len(fitted.history),
                "interrupted": fitted.interrupted,
                "seed": options.seed,
                "stages": watch.seconds,
                "seconds": sum(watch.seconds.values()),
                "settings": self.settings.values(),
            }
            with self.stage("writing"):
                write_json(folder / METRICS, {**metrics, **made_by()})
                write_history(folder / HISTORY, fitted.history)
                write_text(folder / REPORT, self.report(data, fitted, metrics))
            move_files(folder, self.out, self.marker, self.files)
            if not fitted.interrupted:
                clear_checkpoints(self.out)
        return Outcome(metrics, data, fitted)

    def stage(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Return a block that shows a stage without steps."""
        return show_progress(name, shown=self.options.progress, transient=True)

    def _fit(self, data: D) -> F:
        resume = self.options.resume
        checkpoints = open_checkpoints(self.out, self.fingerprint(data), resume=resume)
        try:
            return self.fit(data, checkpoints)
        except FeatherbedError:
            if not resume:  # checkpoints of a failed run are of no use
                clear_checkpoints(self.out)
            raise

    def _check_out(self) -> None:
        """Refuse a folder whose model would be lost, or that has nothing to resume."""
        out, options = self.out, self.options
        if out.is_file():
            raise ArgumentError(f"{out} is a file: give a folder for --out")
        if (out / self.marker).exists() and not (options.overwrite or options.resume):
            raise ArgumentError(
                f"{out} holds a {self.kind} already: give another folder, --overwrite or --resume"
            )
        if options.resume and not (out / CHECKPOINTS).is_dir():
            raise ArgumentError(f"{out} holds no checkpoints to resume from: leave --resume out")


class Stopwatch:
    """Measures the seconds of each stage.

    >>> watch = Stopwatch()
    >>> with watch("reading"):
    ...     pass
    >>> list(watch.seconds)
    ['reading']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Measure the block as one stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = time.perf_counter() - start


@contextlib.contextmanager
def _temporary_workplace(out: Path) -> Iterator[Path]:
    """Create a temporary folder in the nearest existing folder, so that a read-only one shows early.

    Temporary files of killed runs around ``out`` are removed.
    """
    near = next(folder for folder in (out, *out.parents) if folder.exists())
    for folder in {near, out.parent, out, out / CHECKPOINTS, *(out / CHECKPOINTS).glob("*/")}:
        remove_stale(folder)
    with contextlib.ExitStack() as stack:
        try:
            workplace = stack.enter_context(temporary_folder(near))
        except OSError as error:
            raise ArgumentError(
                f"{near} cannot be written into ({error.strerror}): give another folder for --out"
            ) from None
        yield workplace


def move_files(source: Path, folder: Path, marker: str, files: tuple[str, ...] = ()) -> None:
    """Move the files of a finished model into ``folder``, in place of an earlier model.

    The marker is removed first and moved last, so there is never a mixture of two models;
    ``files`` of the earlier model are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if (folder / path.name).is_file():  # files keep their modes
            path.chmod((folder / path.name).stat().st_mode)
    for name in (marker, *files):
        (folder / name).unlink(missing_ok=True)
    for path in sorted(source.iterdir(), key=lambda path: path.name == marker):
        path.replace(folder / path.name)
