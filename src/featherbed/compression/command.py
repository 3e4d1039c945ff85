"""``featherbed compress``: read, compress with a progress bar, write the table and its report."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from featherbed.compression.run import compress
from featherbed.compression.sources import read_matrix
from featherbed.compression.target import Target
from featherbed.errors import ArgumentError, DataError

# where each piece of work begins and ends, as a share of the whole
STAGES = {
    "reading": (0.0, 0.02),
    "comparing": (0.02, 0.55),
    "fitting": (0.55, 0.56),
    "first": (0.56, 0.58),
    "refining": (0.58, 0.7),
    "neighbours": (0.7, 0.75),
    "coding": (0.75, 0.93),
    "measuring": (0.93, 1.0),
}


class Told:
    """Turns what a compression tells into one bar that only moves forward."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.done = bar, 0.0
        self.task = bar.add_task("reading", total=1.0)

    def __call__(self, what: str, share: float) -> None:
        """Move the bar."""
        low, high = STAGES.get(what.split()[0].rstrip(":"), (self.done, 1.0))
        self.done = max(self.done, low + (high - low) * share)
        self.bar.update(self.task, completed=self.done, description=what)


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
    counted = None if weights is None else read_weights(weights, source.matrix.shape[0])
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=quiet,
    )
    told = Told(bar)
    with bar, ending_at_once():
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
def ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process where it stands: libraries at work for a minute would hold Python's own handler up that long.

    Nothing is written meanwhile, so nothing half-written is left.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def read_weights(path: Path, rows: int) -> Any:
    """Read one weight a row: a .npy array, a text file of a number a line, or the word zipf (row i: 1/(i+1))."""
    if str(path) == "zipf":
        return 1.0 / np.arange(1, rows + 1)
    try:
        found = np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.loadtxt(path, ndmin=1)
    except ValueError as error:
        why = str(error)[:120]
        raise DataError(f"{path.name}: weights are a .npy array or a text file of one number a line ({why})") from None
    return found
