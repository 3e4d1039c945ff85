"""The queue: planned runs one after another, each in a process of its own with one thread.

``research/queue.toml`` lists them by value: experiments, some of their rows and seeds, and the
core-hours that one run takes. A run that has its record is skipped, so the queue can be stopped and
started again at any time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from featherbed.errors import ArgumentError
from research.harness.records import record_path
from research.harness.run import planned, with_planned_rows
from research.harness.settings import RESULTS, ROOT, WORK, checked_seeds, read_experiment

QUEUE = ROOT / "queue.toml"
LOG = WORK / "queue.log"
KEYS = {"name", "size", "rows", "seeds", "hours"}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "FEATHERBED_THREADS")


@dataclass(frozen=True)
class Planned:
    """One run of the queue: a row and a seed of an experiment, its record, its core-hours."""

    name: str
    size: str
    row: str
    seed: int
    record: Path
    hours: float

    @property
    def arguments(self) -> list[str]:
        """The arguments of ``python -m research run``."""
        size = ["--size", self.size] if self.size else []
        return [self.name, *size, "--rows", self.row, "--seeds", str(self.seed)]

    @property
    def title(self) -> str:
        """The command line of the run."""
        return "python -m research run " + " ".join(self.arguments)


def read_queue(path: Path = QUEUE, folder: Path = RESULTS) -> list[Planned]:
    """Return all runs of the queue, those that have records among them.

    >>> queue = read_queue()
    >>> len({run.record for run in queue}) == len(queue)
    True
    """
    file = tomllib.loads(path.read_text("utf-8"))
    return [run for given in file.get("runs", []) for run in _runs(given, folder)]


def _runs(given: Mapping[str, Any], folder: Path) -> Iterator[Planned]:
    """Yield the runs of one entry of the queue."""
    unknown = sorted(set(given) - KEYS)
    if unknown or "name" not in given:
        raise ArgumentError(
            f"queue: an entry has a name, and may have {', '.join(sorted(KEYS - {'name'}))}; "
            f"got {', '.join(given)}"
        )
    experiment = read_experiment(given["name"], size=given.get("size"))
    experiment = with_planned_rows(experiment, folder).chosen(list(given.get("rows", [])))
    if "seeds" in given:
        rows = tuple(replace(row, seeds=()) for row in experiment.rows)
        experiment = replace(experiment, seeds=checked_seeds(tuple(given["seeds"])), rows=rows)
    for row, seed in planned(experiment):
        path = record_path(folder, row, seed)
        yield Planned(
            given["name"], experiment.size, row.name, seed, path, float(given.get("hours", 0.0))
        )


def remaining(runs: list[Planned]) -> list[Planned]:
    """Return the runs without a record."""
    return [run for run in runs if not run.record.exists()]


def run_queue(
    path: Path = QUEUE, *, data: Path | None = None, until: datetime | None = None, log: Path = LOG
) -> int:
    """Run what has no record, in order; return the number of runs that failed.

    A failed run is logged, and the next one starts. ``until``: no run starts after that time, and
    the one that is under way then is ended; it continues from its last checkpoint if it has one.
    """
    environment = os.environ | dict.fromkeys(THREADS, "1")
    log.parent.mkdir(parents=True, exist_ok=True)
    failed = 0
    for run in remaining(read_queue(path)):
        left = None if until is None else (until - datetime.now()).total_seconds()
        if run.record.exists() or (left is not None and left <= 0):
            continue
        command = [sys.executable, "-m", "research", "run", *run.arguments, "--quiet"]
        command += [] if data is None else ["--data", str(data)]
        start = time.monotonic()
        _write(log, f"started   {run.title}")
        with log.open("a", encoding="utf-8") as file:
            process = subprocess.Popen(
                command, env=environment, cwd=ROOT.parent, stdout=subprocess.DEVNULL, stderr=file
            )
            try:
                code = process.wait(left)
            except BaseException as error:
                process.terminate()
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                code = 0
        done = run.record.exists()
        failed += bool(code)
        outcome = "finished" if done else f"failed, exit code {code}" if code else "stopped"
        _write(log, f"{outcome} after {time.monotonic() - start:,.0f} s: {run.title}")
    return failed


def list_queue(path: Path = QUEUE) -> Iterator[str]:
    """Yield a line for each run that waits, and the core-hours of all of them."""
    waiting = remaining(read_queue(path))
    for run in waiting:
        yield f"{run.hours:6.2f} h  {run.title}"
    yield f"{sum(run.hours for run in waiting):6.2f} core-hours in {len(waiting)} runs"


def _write(log: Path, line: str) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}\n")
