"""Running an experiment: every row with every seed, one record each; existing records are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from featherbed.errors import DataError
from featherbed.progress import show_progress
from research.harness.records import Outcome, Record, Run, read_record, record_path, write_record
from research.harness.settings import WORK, Experiment, Row
from research.harness.tasks import TASKS, function

Runner = Callable[[Mapping[str, Any], int, Any, Run], Outcome]


@dataclass(frozen=True)
class Results:
    """The records of an experiment, by row and seed.

    ``interrupted`` says that the run was stopped; ``absent`` holds an explanation for each data
    set that was not found.
    """

    experiment: Experiment
    records: dict[str, dict[int, Record]]
    interrupted: bool = False
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[tuple[str, int]]:
        """Rows and seeds without a record."""
        return [
            (row.name, seed)
            for row, seed in planned(self.experiment)
            if seed not in self.records.get(row.name, {})
        ]


def with_planned_rows(experiment: Experiment, folder: Path) -> Experiment:
    """Return the experiment with the rows its task plans from other results in ``folder``."""
    plan = TASKS[experiment.task].plan
    return (
        replace(experiment, rows=tuple(function(plan)(experiment, folder))) if plan else experiment
    )


def planned(experiment: Experiment) -> Iterator[tuple[Row, int]]:
    """Yield rows and seeds to run, seed after seed: a stopped run has all rows of the first."""
    yield from _rows_and_seeds(experiment, replaced=False)


def _rows_and_seeds(experiment: Experiment, replaced: bool) -> Iterator[tuple[Row, int]]:
    seeds = dict.fromkeys(experiment.seeds)
    seeds |= dict.fromkeys(seed for row in experiment.rows for seed in row.seeds)
    for seed in seeds:
        for row in experiment.rows:
            own = row.seeds or experiment.seeds
            if row.runs and bool(row.replaced) == replaced and seed in own:
                yield row, seed


def read_results(experiment: Experiment, folder: Path) -> Results:
    """Return the results that are in ``folder``."""
    records: dict[str, dict[int, Record]] = {}
    for row, seed in (*planned(experiment), *_rows_and_seeds(experiment, replaced=True)):
        path = record_path(folder, row, seed)
        if path.exists():
            records.setdefault(row.name, {})[seed] = read_record(path, row)
    return Results(experiment, records)


def run_experiment(
    experiment: Experiment,
    folder: Path,
    *,
    data: str | Path | None = None,
    quick: bool = False,
    shown: bool = False,
    work: Path = WORK,
) -> Results:
    """Run every row and seed without a record in ``folder``; Ctrl-C keeps the records so far.

    ``work`` is the folder for checkpoints and trained models.

    >>> from research.harness.settings import read_experiment
    >>> experiment = read_experiment("sse/table1", quick=True).chosen(["sgd"])
    >>> run_experiment(experiment, getfixture("tmp_path"), quick=True).missing
    []
    """
    left = read_results(experiment, folder).missing
    rows, begun = {row.name: row for row in experiment.rows}, time.monotonic()
    runner, opener = _runner(experiment.task), function(TASKS[experiment.task].open)
    absent: dict[str, str] = {}

    @cache
    def source(name: str) -> Any:  # read when the first run needs it
        return opener(name, data, quick)

    interrupted = False
    for count, (name, seed) in enumerate(left):
        row = rows[name]
        if row.data in absent:
            continue
        whole = _time_left(begun, count, len(left))
        title = f"{name} seed {seed}, run {count + 1} of {len(left)}{whole}"
        run = Run(title, shown, name, work / row.home, folder / row.home)
        try:
            with show_progress(f"reading {row.data}", shown=shown, transient=True):
                found = source(row.data)
        except DataError as error:
            if row.data == experiment.data:
                raise
            absent[row.data] = str(error)  # only some rows need these data
            continue
        started = time.perf_counter()
        try:
            outcome = runner(row.settings, seed, found, run)
        except KeyboardInterrupt:
            interrupted = True
            break
        path = record_path(folder, row, seed)
        write_record(path, row, seed, outcome, time.perf_counter() - started)
    return Results(experiment, read_results(experiment, folder).records, interrupted, absent)


def _runner(task: str) -> Runner:
    found: Runner = function(TASKS[task].run)
    return found


def _time_left(begun: float, done: int, total: int) -> str:
    if not done:
        return ""
    seconds = (time.monotonic() - begun) / done * (total - done)
    return f" ({timedelta(seconds=round(seconds))} left in all)"
