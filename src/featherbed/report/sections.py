"""Sections shared by report pages: data, training history, settings, command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from featherbed.errors import ArgumentError
from featherbed.report.figures import NONE, as_html, as_number
from featherbed.report.page import AXIS, COLORS, LAYOUT, plot, table

Report = dict[str, Any]

MAX_EPOCHS = 500  # points of a curve
FEW_EPOCHS = 10  # up to which every epoch has a tick
INTERRUPTED = "<b>Training was interrupted</b>: the model is the best epoch so far."


def check_parts(report: Report, names: Iterable[str]) -> None:
    """Raise ``ArgumentError`` if a part of the report is missing."""
    missing = [name for name in names if name not in report]
    if missing:
        raise ArgumentError(f"a report without {', '.join(missing)}: give the whole report")


def lead(headline: str, sentences: Iterable[str]) -> str:
    """Return the headline of a page and the paragraph below it."""
    text = " ".join(sentences)
    return f"<p class=lead>{headline}</p>" + (f"<p>{text}</p>" if text else "")


def notes(lines: Iterable[str] | None) -> str:
    """Return remarks, one paragraph each."""
    return "".join(f"<p class=soft>{as_html(line)}</p>" for line in lines or [])


def times_smaller(dense: float | None, size: float | None) -> str:
    """Return the ratio of two sizes as words, or nothing if the second is not smaller.

    >>> times_smaller(400, 80)
    ', 5.0 times smaller'
    """
    return f", {dense / size:,.1f} times smaller" if dense and size and dense > size else ""


def axis(title: str, **settings: Any) -> Report:
    """Return a plotly axis with a title."""
    return AXIS | {"title": {"text": title, "standoff": 8}} | settings


def line(name: str, x: list[Any], y: list[float], number: int) -> Report:
    """Return a plotly line in the color of its number, with markers if it has few points."""
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 60 else "lines",
        "name": name,
        "x": x,
        "y": y,
        "line": {"color": COLORS[number % len(COLORS)]},
        "marker": {"size": 5},
    }


def history_lines(report: Report, columns: Mapping[str, str]) -> list[Report]:
    """Return a line per column of the history (label: column) with at least two epochs."""
    lines = []
    for number, (label, column) in enumerate(columns.items()):
        rows = [row for row in report["history"] if as_number(row.get(column)) is not None]
        step = -(-len(rows) // MAX_EPOCHS) or 1
        kept = rows[::step] + ([rows[-1]] if rows and (len(rows) - 1) % step else [])
        epochs = [int(row.get("epoch", 0)) + 1 for row in kept]
        lines.append(line(label, epochs, [float(row[column]) for row in kept], number))
    return [one for one in lines if len(one["x"]) > 1]


def history_plot(
    report: Report, name: str, lines: list[Report], y_axis: Report, height: int, **layout: Any
) -> str:
    """Return a plot by epoch, or nothing if there are no lines."""
    if not lines:
        return ""
    ticks = {"dtick": 1} if len(report["history"]) <= FEW_EPOCHS else {}
    x_axis = axis("epoch", tickformat="d", **ticks)
    return plot(name, lines, LAYOUT | {"xaxis": x_axis, "yaxis": y_axis} | layout, height)


def values_table(title: str, head: tuple[str, str], values: Mapping[str, Any]) -> str:
    """Return a table of names and values."""
    rows = [(as_html(name), as_html(_as_text(value))) for name, value in values.items()]
    return table(title, head, rows, wrap=True)


def _as_text(value: Any) -> str:
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def data_section(values: Mapping[str, Any], remarks: Iterable[str] | None) -> str:
    """Return the description of the input data."""
    return values_table("Data", ("", ""), values) + notes(remarks)


def settings_section(report: Report) -> str:
    """Return all settings, collapsed."""
    given = report.get("settings") or {}
    settings = {name: value for name, value in given.items() if value is not None}
    shown = values_table("", ("setting", "value"), settings)
    return f"<details><summary>All settings</summary>{shown}</details>" if settings else ""


def command_section(report: Report, source: str = "") -> str:
    """Return the command and the footer."""
    command, seconds = report.get("command"), report.get("seconds")
    shown = f"<h2>Command</h2><pre><code>{as_html(command)}</code></pre>" if command else ""
    version = f" {as_html(report['version'])}" if report.get("version") else ""
    time = "" if seconds is None else f" in {seconds:,.1f} s"
    return f"{shown}<footer>Made by featherbed{version}{time}{source}.</footer>"
