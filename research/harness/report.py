"""Reports: the tables of each README, filled in from records between markers, and its pictures.

A README is written by hand; what stands between ``<!-- name:begin -->`` and ``<!-- name:end -->``
is replaced by the block of that name. A module of ``research.reports`` has ``blocks()``, the lines
of each block, and may have ``pictures(folder)``.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from featherbed.errors import ArgumentError
from research.harness.records import Record
from research.harness.run import read_results, with_planned_rows
from research.harness.settings import PAPERS, RESULTS, STUDIES, read_experiment

REPORTS = (
    "papers",
    "anchors",
    "clicks",
    "codes",
    "foundation",
    "models",
    "ranking",
    "recommenders",
    "sharing",
    "text",
)
Blocks = Mapping[str, Iterable[str]]


def report_folder(name: str) -> Path:
    """Return the folder of a README."""
    if name not in REPORTS:
        raise ArgumentError(f"no report {name!r}: there are {', '.join(REPORTS)}")
    return PAPERS if name == "papers" else STUDIES / name


def report_module(name: str) -> ModuleType:
    """Return the module that makes the blocks of a README."""
    return import_module(f"research.reports.{name}")


def report_text(name: str) -> str:
    """Return a README with its blocks filled in from the records."""
    text = (report_folder(name) / "README.md").read_text(encoding="utf-8")
    return fill_blocks(text, report_module(name).blocks())


def fill_blocks(text: str, blocks: Blocks) -> str:
    """Return a text whose blocks are replaced.

    >>> fill_blocks("<!-- a:begin -->\\nold\\n<!-- a:end -->", {"a": ["new"]})
    '<!-- a:begin -->\\nnew\\n<!-- a:end -->'
    """
    marked = re.findall(r"<!-- ([\w-]+):begin -->", text)
    if sorted(marked) != sorted(blocks):
        raise ArgumentError(
            f"blocks {', '.join(sorted(marked))} are marked, but there are {', '.join(blocks)}"
        )
    for name, lines in blocks.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, _, rest = text.partition(begin)
        text = before + begin + "\n" + "\n".join(lines) + "\n" + end + rest.partition(end)[2]
    return text


def records_of(name: str) -> dict[str, list[Record]]:
    """Return the records of an experiment by row, in the order of its rows and seeds."""
    experiment = with_planned_rows(read_experiment(name), RESULTS)
    found = read_results(experiment, RESULTS).records
    rows = [row.name for row in experiment.rows if row.name in found]
    return {row: [found[row][seed] for seed in sorted(found[row])] for row in rows}


def single_records(name: str) -> dict[str, Record]:
    """Return the records of an experiment; those of other seeds than 0 are named after theirs."""
    return {
        row if record["seed"] == 0 else f"{row}-seed-{record['seed']}": record
        for row, records in records_of(name).items()
        for record in records
    }


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table.

    >>> markdown(["run", "mse"], [("dense", 0.7)])
    ['| run | mse |', '|---|---|', '| dense | 0.7 |']
    """
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def mean_text(values: Sequence[float], digits: int, factor: float = 1.0) -> str:
    """Return the mean ± its standard error.

    >>> mean_text([0.1, 0.3], 2), mean_text([0.5], 1, factor=100)
    ('0.20 ± 0.10', '50.0')
    """
    scaled = [factor * value for value in values]
    text = f"{statistics.fmean(scaled):.{digits}f}"
    if len(scaled) == 1:
        return text
    return f"{text} ± {statistics.stdev(scaled) / math.sqrt(len(scaled)):.{digits}f}"
