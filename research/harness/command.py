"""``featherbed paper``: run a published table or figure, print ours beside the published numbers, write a page."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid

from featherbed.errors import ArgumentError
from featherbed.packed.writing import replacing
from featherbed.papers.page import summary_page
from featherbed.papers.run import Results, run_paper
from featherbed.papers.settings import checked_seeds, paper_names, read_paper
from featherbed.papers.summary import cells, heading, notes, summarise

WIDTH = 160  # of the table where no terminal says how wide it is


def run(
    name: str | None = None,
    out: Path = Path("papers"),
    data: Path | None = None,
    seeds: str | None = None,
    rows: str | None = None,
    quick: bool = False,
    quiet: bool = False,
    size: str | None = None,
) -> None:
    """Run what has no result yet, print the summary and write it as a page; without a name, list the papers.

    Results lie in ``out``/NAME, or in ``out``/NAME/SIZE where a paper comes in sizes, one file for each row and seed; what was
    run with ``quick``, on generated data, in ``out``/quick/NAME.
    """
    if name is None:
        sys.stdout.write("".join(f"{one:<14}{read_paper(one).title}\n" for one in paper_names()))
        return
    paper = read_paper(name, quick, size).chosen(_listed(rows))
    if seeds is not None:
        paper = replace(paper, seeds=_seeds(seeds))
    if out.exists() and not out.is_dir():
        raise ArgumentError(f"{out} is a file: give --out a folder for the results")
    folder = out / "quick" if quick else out
    results = run_paper(paper, folder, data=data, quick=quick, shown=not quiet)
    page = folder / paper.home / "summary.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    with (
        replacing(page) as descriptor,
        os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as file,
    ):
        file.write(summary_page(results))
    show(results)
    sys.stdout.write(f"results     {page.parent}\npage        {page}\n")
    if quick:
        what = "texts" if paper.task in ("text", "language") else "ratings"
        sys.stdout.write(
            f"A quick look on generated {what}: the figures say that it runs, and nothing else.\n"
        )
    if results.interrupted:
        sys.stdout.write(
            "Stopped; the results so far are kept, and the same command goes on from there.\n"
        )
        raise SystemExit(130)


def show(results: Results) -> None:
    """Print the summary."""
    lines = summarise(results)
    grid = Grid(title=results.paper.title, title_justify="left", box=None, pad_edge=False)
    for place, column in enumerate(heading(lines)):
        grid.add_column(column, justify="right" if place else "left", overflow="fold")
    for line in lines:
        grid.add_row(*cells(line, lines))
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(grid)
    for note in notes(results):
        console.print(note)


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return checked_seeds(tuple(int(part) for part in _listed(text)))
    except ValueError:
        raise ArgumentError(
            f"--seeds {text}: give whole numbers of at least 0, separated by commas"
        ) from None
