"""Running a paper: every row with every seed, one result file each; what has a result is left alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from featherbed.errors import DataError
from featherbed.papers.records import Bar, Outcome, Record, read_record, record_path, write_record
from featherbed.papers.settings import Paper, Row
from featherbed.progress import show_progress

Runner = Callable[[Mapping[str, Any], int, Any, Bar], Outcome]
RUNNERS = {  # by task: the module and the function that runs a row
    "ratings": ("recipes", "run_recipe"),
    "online": ("online", "run_online"),
    "factors": ("sharing", "run_factors"),
    "ranking": ("ranking", "run_ranking"),
    "text": ("text", "run_text"),
    "language": ("language", "run_language"),
}
OPENERS = {  # by task, where it does not run on ratings: the module and the function that opens its data
    "text": ("text_sources", "open_texts"),
    "language": ("text_sources", "open_corpus"),
}


@dataclass(frozen=True)
class Results:
    """The results of a paper there are, by row and seed; whether some are missing because the run was stopped, and which data
    were not found, by name, with what to do about it."""

    paper: Paper
    records: dict[str, dict[int, Record]]
    interrupted: bool = False
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[tuple[str, int]]:
        """Rows and seeds that have no result."""
        return [
            (row.name, seed)
            for row, seed in planned(self.paper)
            if seed not in self.records.get(row.name, {})
        ]


def planned(paper: Paper) -> Iterator[tuple[Row, int]]:
    """Yield what a paper runs, seed after seed, so that a run that is stopped has all rows of the first seeds."""
    for seed in paper.seeds:
        for row in paper.rows:
            if row.runs:
                yield row, seed


def read_results(paper: Paper, folder: Path) -> Results:
    """Return the results that are in ``folder``."""
    records: dict[str, dict[int, Record]] = {}
    for row, seed in planned(paper):
        path = record_path(folder, row, seed)
        if path.exists():
            records.setdefault(row.name, {})[seed] = read_record(path, row)
    return Results(paper, records)


def run_paper(
    paper: Paper,
    folder: Path,
    *,
    data: str | Path | None = None,
    quick: bool = False,
    shown: bool = False,
) -> Results:
    """Run what has no result in ``folder`` yet; Ctrl-C ends it, and the results so far stay.

    >>> from featherbed.papers.settings import read_paper
    >>> paper = read_paper("sse/table1", quick=True).chosen(["sgd"])
    >>> run_paper(paper, getfixture("tmp_path"), quick=True).missing
    []
    """
    left = read_results(paper, folder).missing
    rows, begun = {row.name: row for row in paper.rows}, time.monotonic()
    runner, opener = _runner(paper.task), _opener(paper.task)
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
        bar = Bar(f"{name} seed {seed}, run {count + 1} of {len(left)}{whole}", shown)
        try:
            with show_progress(f"reading {row.data}", shown=shown, transient=True):
                found = source(row.data)
        except DataError as error:
            if row.data == paper.data:
                raise
            absent[row.data] = str(error)  # data of some rows only, which not everybody has
            continue
        started = time.perf_counter()
        try:
            outcome = runner(row.settings, seed, found, bar)
        except KeyboardInterrupt:
            interrupted = True
            break
        write_record(
            record_path(folder, row, seed), row, seed, outcome, time.perf_counter() - started
        )
    return Results(paper, read_results(paper, folder).records, interrupted, absent)


def _runner(task: str) -> Runner:
    found: Runner = _named(*RUNNERS[task])
    return found


def _opener(task: str) -> Callable[[str, Any, bool], Any]:
    found: Callable[[str, Any, bool], Any] = _named(*OPENERS.get(task, ("sources", "open_source")))
    return found


def _named(module: str, name: str) -> Any:
    return getattr(import_module(f"featherbed.papers.{module}"), name)


def _time_left(begun: float, done: int, total: int) -> str:
    if not done:
        return ""
    seconds = (time.monotonic() - begun) / done * (total - done)
    return f" ({timedelta(seconds=round(seconds))} left in all)"
