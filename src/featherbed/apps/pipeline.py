"""From a file to a stored model: read → fit → store → measure → report, once for all applications.

Also what their training loops share: history, best state, early stopping, checkpoints, schedules;
and the files of a run: metrics as JSON, the history as Parquet.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from featherbed.apps.bundle import MARKERS
from featherbed.errors import ArgumentError, DataError, FeatherbedError, TrainingError
from featherbed.files import remove_stale, replacing_file, temporary_folder, write_file
from featherbed.optim import Penalty, group_of, penalties_of, total
from featherbed.optim.lazy import settle
from featherbed.progress import show_progress
from featherbed.settings import Settings
from featherbed.version import __version__

METRICS, HISTORY, REPORT = "metrics.json", "history.parquet", "report.html"
CHECKPOINTS, RUN = "checkpoints", "run.json"
Log = Callable[[str], None]


class FittedModel(Protocol):
    """The interface of a trained model that the pipeline uses."""

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
    """The interface of prepared data that the pipeline uses."""

    @property
    def lines(self) -> Sequence[str]:
        """Lines for the user: the amount of data, and notes about reading it."""


D = TypeVar("D", bound=Dataset)
F = TypeVar("F", bound=FittedModel)
S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Outcome(Generic[D, F]):
    """The numbers of ``metrics.json``, the data, the trained model, and a summary in a few
    lines."""

    metrics: dict[str, Any]
    data: D
    fitted: F
    summary: list[str]


def world_size() -> int:
    """Return the number of processes that torchrun has started, 1 without it.

    >>> world_size()
    1
    """
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """Return the number of this process, from 0."""
    return int(os.environ.get("RANK", 0))


def ignore(line: str) -> None:
    """Print nothing: the default log of Python callers."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run, the same for all applications.

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

    Class attributes: ``kind`` names the model in messages, ``marker`` is the file that marks a
    stored model, ``files`` are its other files that an earlier model may have left,
    ``settings_type`` is the class of the settings, ``irrelevant`` are prefixes of settings without
    effect on the fit.
    """

    kind: str
    marker: str
    files: tuple[str, ...] = ()
    settings_type: type[S]
    irrelevant: tuple[str, ...] = ("storage.",)

    def __init__(
        self, settings: S | Mapping[str, Any] | None, out: str | Path, options: RunOptions
    ) -> None:
        if not isinstance(settings, Settings):
            settings = self.settings_type.from_values(settings or {})
        self.settings, self.out, self.options = settings, Path(out), options
        self.seconds: dict[str, float] = {}  # by stage

    @abstractmethod
    def check(self) -> None:
        """Raise an error for anything that can be refused before the data is read."""

    @abstractmethod
    def read(self, workplace: Path) -> D:
        """Read and split the data; ``workplace`` is a folder for temporary files."""

    @abstractmethod
    def checksums(self, data: D) -> dict[str, str]:
        """Return checksums by name; a checkpoint is resumed only if they are equal."""

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

    @abstractmethod
    def summarize(self, metrics: dict[str, Any]) -> list[str]:
        """Return the lines that end a run: quality, sizes, files."""

    def run(self) -> Outcome[D, F]:
        """Run the pipeline; the model appears in ``out`` only when all of it is written."""
        options = self.options
        self.check()
        self._check_out()
        with _temporary_workplace(self.out.absolute()) as workplace:
            with self._timed("reading"):
                data = self.read(workplace)
            for line in data.lines:
                options.log(line)
            with self._timed("training"):
                fitted = self._fit(data)
            for note in fitted.notes:
                options.log(note)
            folder = workplace / "model"
            folder.mkdir()
            with self._timed("measuring"), self.stage("measuring"):
                self.store(folder, data, fitted)
                metrics = self.measure(folder, data, fitted)
            metrics |= {
                "epochs": len(fitted.history),
                "interrupted": fitted.interrupted,
                "seed": options.seed,
                "stages": self.seconds,
                "seconds": sum(self.seconds.values()),
                "settings": self.settings.values(),
            }
            with self.stage("writing"):
                write_json(folder / METRICS, {**metrics, **made_by()})
                write_history(folder / HISTORY, fitted.history)
                write_file(folder / REPORT, self.report(data, fitted, metrics))
            move_files(folder, self.out, self.marker, (*self.files, *MARKERS))
            if not fitted.interrupted:
                clear_checkpoints(self.out)
        return Outcome(metrics, data, fitted, self.summarize(metrics))

    def report_footer(self, fitted: F, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the entries about the run that all pages have."""
        return {
            "history": fitted.history,
            "settings": {k: v for k, v in self.settings.values().items() if v is not None},
            "command": self.options.command,
            "seconds": metrics["seconds"],
            "version": __version__,
            "interrupted": fitted.interrupted,
        }

    def closing_lines(self, metrics: dict[str, Any]) -> list[str]:
        """Return the lines about files, and about Ctrl-C, that end a run with epochs."""
        files = sorted(path.name for path in self.out.iterdir() if path.is_file())
        lines = [f"{self.out}: {', '.join(files)}"]
        if metrics["interrupted"]:
            lines.append("interrupted: this is the best epoch so far; --resume continues training")
        return lines

    def stage(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Return a block that shows a stage without steps."""
        return show_progress(name, shown=self.options.progress, transient=True)

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - start

    def _fit(self, data: D) -> F:
        values = self.settings.values().items()
        relevant = {name: v for name, v in values if not name.startswith(self.irrelevant)}
        fingerprint = {"seed": self.options.seed, **self.checksums(data), **relevant}
        checkpoints = open_checkpoints(self.out, fingerprint, resume=self.options.resume)
        try:
            return self.fit(data, checkpoints)
        except FeatherbedError:
            if not self.options.resume:  # checkpoints of a failed run are of no use
                clear_checkpoints(self.out)
            raise

    def _check_out(self) -> None:
        """Refuse a folder whose model would be lost, or that has nothing to resume."""
        out, options = self.out, self.options
        if out.is_file():
            raise ArgumentError(f"{out} is a file: give a folder for --out")
        if (out / self.marker).exists() and not (options.overwrite or options.resume):
            ways = "--overwrite or --resume" if (out / CHECKPOINTS).is_dir() else "or --overwrite"
            raise ArgumentError(f"{out} holds a {self.kind} already: give another folder, {ways}")
        others = [name for name in MARKERS if name != self.marker and (out / name).exists()]
        if others and not (options.overwrite or options.resume):
            raise ArgumentError(
                f"{out} holds a model of another kind ({others[0]}): give another folder, or "
                "--overwrite"
            )
        if options.resume and not (out / CHECKPOINTS).is_dir():
            raise ArgumentError(f"{out} holds no checkpoints to resume from: leave --resume out")


@contextlib.contextmanager
def _temporary_workplace(out: Path) -> Iterator[Path]:
    """Create a temporary folder in the nearest existing folder: a read-only one is an error early.

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


@dataclass
class Result:
    """A finished (or interrupted) training.

    >>> Result("ratings", {"dim": 16}, seed=0).interrupted
    False
    """

    task: str
    settings: dict[str, Any]
    seed: int
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    def write(self, path: str | Path) -> None:
        """Write the result, with the versions it was made by, atomically."""
        write_json(path, {**asdict(self), **made_by()})


def made_by() -> dict[str, Any]:
    """Return the versions and the machine of this run."""
    versions = {"featherbed": __version__, "torch": torch.__version__, "numpy": np.__version__}
    machine = {"python": platform.python_version(), "processor": platform.machine()}
    return {"versions": versions, "machine": {**machine, "threads": torch.get_num_threads()}}


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    write_file(path, json.dumps(finite(value), indent=1, default=str) + "\n")


def write_history(path: Path, history: list[dict[str, float]]) -> None:
    """Write one row per epoch as Parquet, atomically."""
    import polars as pl

    with replacing_file(path) as file:
        pl.DataFrame(history, infer_schema_length=None).write_parquet(file)


def finite(value: Any) -> Any:
    """Return the value with NaN and infinity as text, since JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


class Checkpoints:
    """A folder of checkpoints ``step-00000012.pt``; the newest ``keep`` stay.

    Model, optimizer, step and generator states are in one file, written atomically. The first one
    also writes ``fingerprint``, the data and settings of the run, beside them (in ``root``).

    >>> checkpoints = Checkpoints(getfixture("tmp_path") / "run")
    >>> model = nn.Linear(2, 1)
    >>> checkpoints.save(12, model=model)
    >>> checkpoints.latest()
    12
    >>> checkpoints.restore(model=model)["step"]
    12
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int = 2,
        fingerprint: dict[str, Any] | None = None,
        root: Path | None = None,
    ) -> None:
        if keep < 1:
            raise ArgumentError(f"keep={keep}: keep at least one checkpoint")
        self.folder, self.keep = Path(folder), keep
        self.fingerprint, self.root = fingerprint, root or self.folder

    def stage(self, name: str) -> Checkpoints:
        """Return the checkpoints of one stage of training, in a subfolder."""
        return Checkpoints(self.folder / name, self.keep, self.fingerprint, self.root)

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"))

    def latest(self) -> int | None:
        """Return the newest step saved, or None."""
        paths = self._paths()
        return int(paths[-1].stem.removeprefix("step-")) if paths else None

    def agree(self) -> None:
        """Remove checkpoints that another process has not: it was stopped before it wrote them."""
        step = torch.tensor(self.latest() or 0)
        torch.distributed.all_reduce(step, torch.distributed.ReduceOp.MIN)
        for path in self._paths():
            if int(path.stem.removeprefix("step-")) > int(step):
                path.unlink()

    def clear(self) -> None:
        """Remove all checkpoints, including those of stages, and the folder if it is empty then."""
        for path in self._paths():
            path.unlink(missing_ok=True)
        for stage in self.folder.glob("*/"):
            Checkpoints(stage).clear()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
        **extra: Any,
    ) -> None:
        """Write the state after ``step`` steps; ``extra`` takes plain values and tensors."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.fingerprint is not None:
            write_json(self.root / RUN, self.fingerprint)
        state = {
            "step": step,
            "model": model.state_dict(),
            "optimizer": None if optimizer is None else optimizer.state_dict(),
            "generators": {name: one.get_state() for name, one in (generators or {}).items()},
            "default_generator": torch.get_rng_state(),
            "extra": extra,
        }
        with replacing_file(self.folder / f"step-{step:08d}.pt") as file:
            torch.save(state, file)
        for old in self._paths()[: -self.keep]:
            old.unlink(missing_ok=True)

    def restore(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
    ) -> dict[str, Any]:
        """Load the newest checkpoint into model, optimizer and generators.

        Returns its ``step`` and ``extra``.
        """
        paths = self._paths()
        if not paths:
            raise DataError(f"{self.folder} holds no checkpoint to resume from")
        state = torch.load(paths[-1], weights_only=True)
        model.load_state_dict(state["model"])
        if optimizer is not None and state["optimizer"] is not None:
            optimizer.load_state_dict(state["optimizer"])
        for name, generator in (generators or {}).items():
            generator.set_state(state["generators"][name])
        torch.set_rng_state(state["default_generator"])
        return {"step": state["step"], "extra": state["extra"]}


def open_checkpoints(out: Path, fingerprint: dict[str, Any], *, resume: bool) -> Checkpoints:
    """Return the checkpoints of the run that writes ``out``.

    Resuming raises ``ArgumentError`` if the checkpoints belong to other data or settings; a new run
    removes old checkpoints.

    >>> open_checkpoints(getfixture("tmp_path"), {"seed": 0}, resume=False).latest() is None
    True
    """
    fingerprint = json.loads(json.dumps(fingerprint, default=str))  # as it is read back
    path = out / CHECKPOINTS / RUN
    if not resume:
        clear_checkpoints(out)
    else:
        before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if other := [name for name, value in fingerprint.items() if before.get(name) != value]:
            raise ArgumentError(
                f"{out} has checkpoints of other {', '.join(other[:3])}: ask for the same again, "
                "or leave --resume out"
            )
    return Checkpoints(path.parent, fingerprint=fingerprint)


def clear_checkpoints(out: Path) -> None:
    """Remove the checkpoints in ``out``, and the folder if it is empty then."""
    (out / CHECKPOINTS / RUN).unlink(missing_ok=True)
    Checkpoints(out / CHECKPOINTS).clear()
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()


def check_weights(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Raise ``TrainingError`` if every penalized weight is zero: all rows are equal then.

    >>> import featherbed as fb
    >>> table = fb.AnchorTable(5, 4, anchors=2)
    >>> optimizer = fb.Yogi(table.parameters(), penalties={table.transform: fb.NonNegativeL1(0.1)})
    >>> check_weights(table, optimizer, epoch=0)
    >>> _ = table.transform.data.zero_()
    >>> check_weights(table, optimizer, epoch=0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    featherbed.errors.TrainingError: all 10 penalized weights became zero in epoch 1: the penalty...
    """
    penalties = penalties_of(optimizer)
    settle(model)
    left = sum(int(torch.count_nonzero(parameter.detach())) for parameter in penalties)
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    group = group_of(penalties) if several else None
    if not penalties or int(left if group is None else total(torch.tensor(left), group)):
        return
    lam = max(penalty.lam for penalty in penalties.values())
    count = sum(parameter.numel() for parameter in penalties)
    advice = (
        f"the penalty, lambda = {lam:g}, is too strong: try lambda = {lam / 10:g}, a number of "
        "nonzero weights (nonzeros) instead of lambda, or larger initial weights (init_std)"
        if lam > 0
        else "lower the learning rate, or use larger initial weights (init_std)"
    )
    raise TrainingError(
        f"all {count:,} penalized weights became zero in epoch {epoch + 1}: {advice}"
    )


class Training:
    """The bookkeeping of one run: ``for epoch in training.epochs(n): ...; training.record(row)``.

    Training stops ``patience`` epochs after the lowest ``metric``. ``schedulers`` are objects with
    ``state_dict``; while one of them has ``reached`` false, an epoch cannot be the best. With
    ``checkpoints`` every epoch is saved, and a stopped run continues from the last one. Ctrl-C
    inside the block marks the result as interrupted; the best state so far is kept, in the first
    epoch the current one. With ``together`` the model is the part of one of several processes:
    Ctrl-C ends them, and the checkpoints of the last epoch that all have saved are resumed.
    """

    def __init__(
        self,
        result: Result,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        metric: str,
        patience: int,
        checkpoints: Checkpoints | None = None,
        generators: dict[str, torch.Generator] | None = None,
        schedulers: Sequence[Any] = (),
        together: bool = False,
    ) -> None:
        self.result, self.model, self.optimizer = result, model, optimizer
        self.metric, self.patience, self.schedulers = metric, patience, list(schedulers)
        self.together = together
        self.checkpoints, self.generators = checkpoints, generators or {}
        self.best_state = copy.deepcopy(model.state_dict())
        self.start_epoch = 0
        self.earlier_seconds = 0.0
        self.start_time = time.perf_counter()
        if checkpoints is not None and together:
            checkpoints.agree()
        if checkpoints is not None and checkpoints.latest() is not None:
            self._resume(checkpoints)

    def _resume(self, checkpoints: Checkpoints) -> None:
        saved = checkpoints.restore(
            model=self.model, optimizer=self.optimizer, generators=self.generators
        )
        self.start_epoch, extra = saved["step"], saved["extra"]
        self.best_state, self.earlier_seconds = extra["best_state"], extra["seconds"]
        self.result.history = extra["history"]
        for scheduler, state in zip(self.schedulers, extra["schedulers"], strict=True):
            scheduler.load_state_dict(state)

    def _best_epoch(self) -> int:
        """Return the eligible epoch with the lowest metric, or the last epoch if none is
        eligible."""
        rows = [row for row in self.result.history if row["reached"]] or self.result.history[-1:]
        return int(min(rows, key=lambda row: row[self.metric])["epoch"])

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs still to run."""
        for epoch in range(self.start_epoch, count):
            if self.result.history and epoch - self._best_epoch() > self.patience:
                return
            yield epoch

    @property
    def seconds(self) -> float:
        """Training time, earlier sessions included."""
        return self.earlier_seconds + time.perf_counter() - self.start_time

    def record(self, row: dict[str, float]) -> None:
        """Record an epoch, keep its state if it is the best so far, save a checkpoint.

        Raises ``TrainingError`` if no weight or no row is left.
        """
        check_weights(self.model, self.optimizer, int(row["epoch"]))
        if row.get("parameters") == 0:
            raise TrainingError(
                f"the table lost all of its rows in epoch {int(row['epoch']) + 1}: "
                "choose settings that keep more of them"
            )
        row["reached"] = all(getattr(one, "reached", True) for one in self.schedulers)
        self.result.history.append(row)
        if self._best_epoch() == row["epoch"]:
            self.best_state = copy.deepcopy(self.model.state_dict())
        if self.checkpoints is not None:
            self.checkpoints.save(
                int(row["epoch"]) + 1,
                model=self.model,
                optimizer=self.optimizer,
                generators=self.generators,
                best_state=self.best_state,
                history=self.result.history,
                seconds=self.seconds,
                schedulers=[one.state_dict() for one in self.schedulers],
            )

    def __enter__(self) -> Training:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        if kind is KeyboardInterrupt and self.together:
            return False
        self.result.interrupted = kind is KeyboardInterrupt
        if kind is None or kind is KeyboardInterrupt:
            if self.result.history or kind is None:  # the first epoch has no other state
                self.model.load_state_dict(self.best_state)
            self.result.seconds = self.seconds
        return kind is KeyboardInterrupt


def warmup_cosine(step: int, steps: int, warmup: float = 0.1) -> float:
    """Return the factor of the learning rate at a step: linear warm-up, then half a cosine to zero.

    >>> [round(warmup_cosine(step, 20), 2) for step in (0, 1, 2, 11, 20)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return half_cosine((step - rising) / max(1, steps - rising))


def half_cosine(progress: float) -> float:
    """Return the factor of the learning rate at a fraction of training, from 1 to 0.

    >>> [round(half_cosine(progress), 2) for progress in (0.0, 0.5, 1.0)]
    [1.0, 0.5, 0.0]
    """
    return 0.5 + 0.5 * math.cos(math.pi * progress)


class PenaltyFreeze:
    """Ends penalties after ``end`` steps: zeros stay zero, the rest is trained without penalty."""

    def __init__(self, penalties: dict[nn.Parameter, Penalty], end: int) -> None:
        self.penalties, self.end, self.steps = penalties, max(1, end), 0

    @property
    def reached(self) -> bool:
        """Whether the penalties have ended."""
        return self.steps >= self.end

    def step(self) -> None:
        """Count one step of the optimizer."""
        self.steps += 1
        if self.steps == self.end:
            for parameter, penalty in self.penalties.items():
                penalty.freeze(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and the state of each penalty."""
        states = [(penalty.lam, penalty.kept) for penalty in self.penalties.values()]
        return {"steps": self.steps, "penalties": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; restore that of the model first."""
        self.steps = int(state["steps"])
        for item, (lam, kept) in zip(self.penalties.items(), state["penalties"], strict=True):
            parameter, penalty = item
            penalty.lam = lam
            penalty.keep(parameter, kept)
