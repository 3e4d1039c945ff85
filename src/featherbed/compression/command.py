"""``featherbed compress``: read, compress with a progress bar, write the table and its report."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from featherbed.compression.run import compress
from featherbed.compression.sources import read_matrix
from featherbed.compression.target import Target
from featherbed.errors import ArgumentError, DataError


class Left(ProgressColumn):
    """The time left as it was last told, less what has passed since."""

    def render(self, task: Task) -> Text:
        """Show it."""
        until = task.fields.get("until")
        seconds = None if until is None else max(0, round(until - time.monotonic()))
        return Text(
            "left -:--:--" if seconds is None else f"left {timedelta(seconds=seconds)}",
            style="progress.remaining",
        )


class Told:
    """Turns what a compression tells into one bar that only moves forward, and into the time left."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.done, self.began = bar, 0.0, time.monotonic()
        self.task = bar.add_task("reading", total=1.0)

    def __call__(self, what: str, share: float) -> None:
        """Move the bar."""
        now = time.monotonic()
        until = now + (now - self.began) * (1 - share) / share if share > 0 else None
        self.done = max(self.done, share)
        self.bar.update(self.task, completed=self.done, description=what, until=until)


def run(
    matrix: Path,
    out: Path,
    ratio: float | None,
    budget: str | None,
    quality: str | None,
    method: str,
    weights: Path | None,
    report: Path | None,
    words: list[Path],
    array: str | None,
    padding: int | None,
    seed: int,
    quiet: bool,
) -> None:
    """Compress a file; whatever goes wrong, no half-written file is left."""
    Target.of(budget, ratio, quality, 4)  # before anything is read
    for path in (out, report):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ArgumentError(f"{path} cannot be written: name a file in a folder that exists")
    if out.exists() and out.samefile(matrix):
        raise ArgumentError(f"{out} is the matrix itself: write the table to another file")
    source = read_matrix(matrix, array=array)
    counted = None if weights is None else read_weights(weights)
    with told_bar(quiet) as told, ending_at_once():
        table = compress(
            source.matrix,
            budget=budget,
            ratio=ratio,
            quality=quality,
            method=method,
            weights=counted,
            keys=source.keys,
            generator=seed,
            padding_idx=padding,
            words=words,
            name=source.name,
            command=shlex.join(["featherbed", *sys.argv[1:]]),
            tell=told,
        )
        told("done", 1.0)
    table.save(out)
    if report is not None:
        table.report.save(report)
    sys.stdout.write(f"{table.report}\nwritten     {out}\n")


@contextlib.contextmanager
def told_bar(quiet: bool) -> Iterator[Told]:
    """Yield what to tell of a compression, shown as a bar with the time left."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        Left(),
        console=Console(stderr=True),
        disable=quiet,
    )
    with bar:
        yield Told(bar)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process where it stands: libraries at work for a minute would hold Python's own handler up that long.

    Nothing is written meanwhile, so nothing half-written is left.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def read_weights(path: Path) -> Any:
    """Read one weight a row: a .npy array, a text file of a number a line, or the word zipf (row i: 1/(i+1))."""
    if str(path) == "zipf":
        return "zipf"
    try:
        found = np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.loadtxt(path, ndmin=1)
    except ValueError as error:
        why = str(error)[:120]
        raise DataError(
            f"{path.name}: weights are a .npy array or a text file of one number a line ({why})"
        ) from None
    return found
