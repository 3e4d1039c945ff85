"""``python -m research``: list experiments, run one, and write the tables of the READMEs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid

from featherbed.errors import ArgumentError, FeatherbedError
from featherbed.files import replacing
from research.harness.page import summary_page
from research.harness.queue import QUEUE, list_queue, run_queue
from research.harness.records import record_path
from research.harness.report import REPORTS, report_folder, report_module, report_text
from research.harness.run import Results, planned, run_experiment, with_planned_rows
from research.harness.settings import (
    QUICK,
    RESULTS,
    SIZES,
    WORK,
    checked_seeds,
    experiment_names,
    read_experiment,
)
from research.harness.summary import cells, heading, notes, summarise

WIDTH = 160  # of the table where the output is no terminal


def run(
    name: str,
    out: Path | None = None,
    data: Path | None = None,
    seeds: str | None = None,
    rows: str | None = None,
    size: str | None = None,
    quiet: bool = False,
) -> None:
    """Run every row and seed without a record, print the summary and write it as a page.

    Records are written to ``research/results``; those of a quick run, pages, checkpoints and
    trained models to ``research/runs``, or all of them below ``out``.
    """
    quick = size == QUICK
    experiment = read_experiment(name, quick, None if quick else size)
    if out is not None and out.exists() and not out.is_dir():
        raise ArgumentError(f"{out} is a file: give --out a folder for the results")
    work = out or (WORK / QUICK if quick else WORK)
    folder = out or (WORK / QUICK if quick else RESULTS)
    experiment = with_planned_rows(experiment, folder).chosen(_listed(rows))
    if seeds is not None:
        given = _seeds(seeds)
        own = tuple(replace(row, seeds=()) for row in experiment.rows)
        experiment = replace(experiment, seeds=given, rows=own)
    results = run_experiment(experiment, folder, data=data, quick=quick, shown=not quiet, work=work)
    page = work / experiment.home / "summary.html"
    write_text(page, summary_page(results))
    show(results)
    sys.stdout.write(f"results     {folder / experiment.home}\npage        {page}\n")
    if quick:
        sys.stdout.write("A quick run on generated data: it shows that the code works, no more.\n")
    if results.interrupted:
        sys.stdout.write("Stopped; records so far are kept, and the same command continues.\n")
        raise SystemExit(130)


def write_text(path: Path, text: str) -> None:
    """Write a text file, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        replacing(path) as descriptor,
        os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as file,
    ):
        file.write(text)


def show(results: Results) -> None:
    """Print the summary."""
    lines = summarise(results)
    grid = Grid(box=None, pad_edge=False)
    for place, column in enumerate(heading(lines)):
        grid.add_column(column, justify="right" if place else "left", overflow="fold")
    for line in lines:
        grid.add_row(*cells(line, lines))
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(results.experiment.title)
    console.print(grid)
    for note in notes(results):
        console.print(note)


def list_experiments() -> None:
    """Print a line for each experiment: its name, existing and planned records, its title."""
    for name in experiment_names():
        experiment = with_planned_rows(read_experiment(name), RESULTS)
        paths = [record_path(RESULTS, row, seed) for row, seed in planned(experiment)]
        count = sum(path.exists() for path in paths)
        found = f"{count} of {len(paths)} results" if count else "no results"
        sys.stdout.write(f"{name:<22}{found:<20}{experiment.title}\n")


def report(names: list[str], check: bool = False, pictures: bool = False) -> None:
    """Fill in the tables of READMEs; ``check``: only say which README is not up to date."""
    for name in names or REPORTS:
        path = report_folder(name) / "README.md"
        text = report_text(name)
        if check and path.read_text(encoding="utf-8") != text:
            raise ArgumentError(
                f"{path} differs from its results: run python -m research report {name}"
            )
        if not check:
            write_text(path, text)
        draw = getattr(report_module(name), "pictures", None)
        if pictures and draw is not None:
            draw(path.parent)


def queue(
    path: Path = QUEUE, data: Path | None = None, until: str | None = None, listed: bool = False
) -> None:
    """Run what the queue plans and has no record, or list it."""
    if listed:
        sys.stdout.write("\n".join(list_queue(path)) + "\n")
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the run under way ends with it
    if run_queue(path, data=data, until=None if until is None else _time(until)):
        raise SystemExit(1)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line; a bad request ends with exit code 2 and one line."""
    given = parser().parse_args(arguments)
    try:
        if given.command == "run":
            names = ("name", "out", "data", "seeds", "rows", "size", "quiet")
            run(**{name: getattr(given, name) for name in names})
        elif given.command == "report":
            report(given.names, given.check, given.pictures)
        elif given.command == "queue":
            queue(given.plan, given.data, given.until, given.list)
        else:
            list_experiments()
    except FeatherbedError as error:
        sys.stderr.write(f"Error: {error}\n")
        raise SystemExit(2) from None


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(prog="python -m research", description=__doc__)
    commands = found.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list all experiments")
    one = commands.add_parser("run", help="run an experiment")
    one.add_argument("name", help="such as ant/table14")
    one.add_argument("--size", help=f"{QUICK} (generated data), {' or '.join(SIZES)}")
    one.add_argument("--seeds", help="such as 0,1,2")
    one.add_argument("--rows", help="some rows only, such as ant-29k,nbant-28k")
    one.add_argument("--data", type=Path, help="the folder of data sets (or FEATHERBED_DATA)")
    one.add_argument("--out", type=Path, help="another folder for results and pages")
    one.add_argument("--quiet", action="store_true", help="show no progress")
    three = commands.add_parser("queue", help="run what research/queue.toml plans, on one thread")
    three.add_argument("--plan", type=Path, default=QUEUE, help="another file of planned runs")
    three.add_argument("--data", type=Path, help="the folder of data sets (or FEATHERBED_DATA)")
    three.add_argument("--until", help="stop at this time of today, such as 11:30")
    three.add_argument("--list", action="store_true", help="list what waits, and run nothing")
    two = commands.add_parser("report", help="fill in the tables of the READMEs from the results")
    two.add_argument("names", nargs="*", metavar="NAME", help=", ".join(REPORTS))
    two.add_argument("--check", action="store_true", help="write nothing; fail if one differs")
    two.add_argument("--pictures", action="store_true", help="draw the pictures again, too")
    return found


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _time(text: str) -> datetime:
    try:
        given = datetime.strptime(text, "%H:%M")
    except ValueError:
        raise ArgumentError(f"--until {text}: give a time of today, such as 11:30") from None
    return datetime.now().replace(hour=given.hour, minute=given.minute, second=0, microsecond=0)


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return checked_seeds(tuple(int(part) for part in _listed(text)))
    except ValueError:
        raise ArgumentError(
            f"--seeds {text}: give whole numbers of at least 0, separated by commas"
        ) from None
