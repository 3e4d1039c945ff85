"""Parts of report pages: formatted numbers, tables, plots, shared sections; one HTML file each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, MissingExtra
from featherbed.files import write_file

NONE = "–"
SHARES = ("share", "recall", "weighted_recall", "analogy")  # shown as percentages


def as_html(value: object) -> str:
    """Escape a value for use between tags (never inside an attribute) and in plotly's texts."""
    return escape(str(value), quote=False)


def as_settings(point: dict[str, Any]) -> str:
    """Format settings as keyword arguments.

    >>> as_settings({"settings": {"codes": 8, "bits": 6}})
    'codes=8, bits=6'
    """
    return ", ".join(f"{name}={value}" for name, value in point["settings"].items())


def as_number(value: Any) -> float | None:
    """Return a finite number as a float, anything else as None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def as_figure(name: str, value: float | None, digits: int | None = None) -> str:
    """Format a metric: shares in percent with one decimal, others with four; a dash for None."""
    if value is None or not math.isfinite(value):
        return NONE
    if name in SHARES:
        return f"{100 * value:.{0 if digits == 0 else 1}f} %"
    return f"{value:.{4 if digits is None else digits}f}"


def as_percent(value: float) -> str:
    """Format a share with two decimals.

    >>> as_percent(0.912)
    '91.20 %'
    """
    return f"{100 * value:.2f} %"


def as_count(value: int | None) -> str:
    """Format a count with thousands separators; a dash for None."""
    return NONE if value is None else f"{value:,}"


def as_bytes(size: float | None) -> str:
    """Format a size with three digits and decimal units; a dash for None.

    >>> as_bytes(597_812), as_bytes(12_000_000)
    ('598 KB', '12.0 MB')
    """
    if size is None:
        return NONE
    value, units = float(size), ["bytes", "KB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    digits = 0 if units[0] == "bytes" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {units[0]}"


COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6a3f", "#555555")
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "star", "cross")
AXIS: dict[str, Any] = {"gridcolor": "#e6e9ed", "zeroline": False, "automargin": True}
LAYOUT: dict[str, Any] = {
    "template": {},
    "paper_bgcolor": "#fcfcfb",
    "plot_bgcolor": "#fcfcfb",
    "hovermode": "closest",
    "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#1d2329"},
    "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
    "hoverlabel": {"align": "left", "bgcolor": "#ffffff"},
    "legend": {"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0},
}
_PLOT = "Plotly.newPlot("  # marks sections that need plotly's library; text never contains it
# defense in depth: even if an escape were forgotten, the browser would refuse to load anything
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)
STYLE = """
:root { color-scheme: light; --ink: #1d2329; --soft: #5b6671; --line: #dfe3e8; --bar: #a9c9e4; }
body { margin: 0; background: #fcfcfb; color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 46rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; overflow-wrap: anywhere; }
h1 { font-size: 1rem; font-weight: 600; color: var(--soft); margin: 0; }
h2 { font-size: 1.15rem; margin: 2.75rem 0 .5rem; } p { margin: .5rem 0; }
.lead { font-size: 1.45rem; line-height: 1.35; margin: .35rem 0 1rem; }
.soft, small, footer { color: var(--soft); } .wide { overflow-x: auto; }
mark { background: #dce9f4; font-weight: 400; }
small { display: block; font-size: .85rem; line-height: 1.4; font-weight: 400; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  font-size: .94rem; }
th, td { padding: .4rem 0 .4rem .9rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; }
th { font-weight: 600; } thead th { color: var(--soft); font-size: .85rem; }
td, thead th { white-space: nowrap; }
th:first-child { padding-left: 0; text-align: left; min-width: 5.5rem; }
td i { display: block; height: .4rem; margin-top: .15rem; background: #eef1f4; min-width: 3.5rem; }
td i b { display: block; height: 100%; background: var(--bar); }
.text td:last-child { white-space: normal; text-align: left; }
.text th:last-child { text-align: left; }
pre { background: #f1f3f5; padding: .8rem 1rem; overflow-x: auto; font-size: .88rem; }
details { margin: .75rem 0; } summary { cursor: pointer; color: var(--soft); }
footer { margin-top: 3rem; font-size: .85rem; }
@media (max-width: 30rem) { main { padding: 1.5rem 1rem 3rem; } .lead { font-size: 1.2rem; }
  table { font-size: .82rem; } thead th, small { font-size: .78rem; }
  th, td { padding-left: .5rem; } td i { min-width: 2rem; } th:first-child { min-width: 4.5rem; } }
"""


def page(heading: str, title: str, sections: Iterable[str]) -> str:
    """Return a page of sections, which are HTML already (see ``as_html``), with plotly if needed.

    >>> "<h1>a &amp; b</h1>" in page("a &amp; b", "a &amp; b", ["<p>c</p>"])
    True
    """
    parts = list(sections)
    first = next((number for number, part in enumerate(parts) if _PLOT in part), None)
    if first is not None:
        parts.insert(first, f"<script>{plotly_module('plotly.offline').get_plotlyjs()}</script>")
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv=Content-Security-Policy content="{POLICY}">'
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>{heading}</h1>" + "\n".join(parts) + "</main></body></html>\n"
    )


def report_kind(path: str | Path) -> str:
    """Return the format of a report by the end of its name, or raise an error.

    >>> report_kind("quality.htm"), report_kind("quality.json")
    ('html', 'json')
    """
    kinds = {".html": "html", ".htm": "html", ".json": "json", ".txt": "text"}
    suffix = Path(path).suffix
    if suffix not in kinds:
        raise ArgumentError(f"{path}: a report is .html, .json or .txt")
    return kinds[suffix]


def write_report(
    path: str | Path,
    report: dict[str, Any],
    html: Callable[[dict[str, Any]], str],
    text: Callable[[dict[str, Any]], str],
) -> None:
    """Write a report atomically: HTML for .html, JSON for .json, text for .txt."""
    path, kind = Path(path), report_kind(path)
    if kind == "html":
        written = html(report)
    elif kind == "json":
        data = _as_json(report)
        written = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    else:
        written = f"{text(report)}\n"
    write_file(path, written)


def _as_json(value: Any) -> Any:
    """Return a value in JSON types; NaN and infinity become null."""
    if isinstance(value, dict):
        return {str(key): _as_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    if hasattr(value, "item"):  # a number of numpy
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot(name: str, traces: list[dict[str, Any]], layout: dict[str, Any], height: int = 360) -> str:
    """Return a plot as HTML without plotly's library, which ``page`` adds; texts are HTML already.

    >>> _PLOT in plot("errors", [{"type": "scatter", "x": [1, 2], "y": [3, 4]}], LAYOUT)
    True
    """
    html = plotly_module("plotly.io").to_html(
        {"data": traces, "layout": layout},
        {"displayModeBar": False, "responsive": True},
        include_plotlyjs=False,
        full_html=False,
        default_height=f"{height}px",
        div_id=name,
    )
    return str(html)


def plotly_module(module: str) -> Any:
    """Import a module of plotly, or raise ``MissingExtra``."""
    try:
        return import_module(module)
    except ImportError:
        raise MissingExtra("plotly", "view", "a report page with plots") from None


def table(
    title: str,
    head: Iterable[str],
    rows: Sequence[tuple[str, ...]],
    note: str = "",
    *,
    wrap: bool = False,
) -> str:
    """Return a table of HTML cells under a heading, or nothing if there are no rows.

    The first cell of a row is its heading; with ``wrap`` the last column is running text.
    """
    if not rows:
        return ""
    names = "".join(f"<th scope=col>{name}</th>" for name in head)
    lines = (
        f"<tr><th scope=row>{first}</th>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    top = (f"<h2>{title}</h2>" if title else "") + (f"<p class=soft>{note}</p>" if note else "")
    kind = " class=text" if wrap else ""
    return (
        f"{top}<div class=wide><table{kind}><thead><tr>{names}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def bar(text: str, share: float | None) -> str:
    """Return a table cell: a text above a bar whose length is a share of 1."""
    width = 100 * min(1.0, max(0.0, share or 0.0))
    return f"{text}<i><b style='width:{width:.1f}%'></b></i>"


Report = dict[str, Any]

MAX_EPOCHS = 500  # points of a curve
FEW_EPOCHS = 10  # up to which every epoch has a tick
INTERRUPTED = "<b>Training was interrupted</b>: the model is the best epoch so far."


def report_page(
    report: Report, kind: str, required: Iterable[str], sections: Iterable[Callable[[Report], str]]
) -> str:
    """Return the page of a run: its sections, then all settings and the command."""
    check_parts(report, ("name", "metrics", "sizes", *required))
    full: Report = {"history": []} | report
    name = as_html(report["name"])
    parts = [section(full) for section in (*sections, settings_section, command_section)]
    return page(name, f"{name}: {kind}", parts)


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


def columns_section(report: Report, noun: str, counts: Mapping[str, str]) -> str:
    """Return columns, skipped lines and the split of a file of ratings or events.

    ``counts`` names kinds of lines.
    """
    source, split = report.get("input") or {}, report.get("split") or {}
    columns = source.get("columns") or {}
    values: dict[str, Any] = {f"column of {role}s": name for role, name in columns.items()}
    for kind, number in (source.get("counts") or {}).items():
        values[counts.get(kind, f"lines {kind}")] = number
    values |= {"split": split["how"]} if "how" in split else {}
    parts = ("train", "validation", "test")
    values |= {f"{part} {noun}": split[part] for part in parts if part in split}
    return data_section(values, source.get("notes"))


def size_table(parts: Mapping[str, int], whole: int, others: Mapping[str, int]) -> str:
    """Return the bytes of a model by part, beside those of the same model with other rows."""
    rows = [
        (as_html(name), bar(as_bytes(size), size / whole), "")
        for name, size in parts.items()
        if size
    ]
    rows.append(("whole model", as_bytes(whole), ""))
    rows += [
        (name, as_bytes(size), f"{size / whole:,.1f} times as large")
        for name, size in others.items()
    ]
    return table("Size", ("part", "bytes", "comparison"), rows)


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


COARSE, FINE = (1, 3), (1, 2, 5)  # bins per decade


def bin_edges(highest: int, steps: tuple[int, ...] = COARSE) -> list[int]:
    """Return the starts of bins of counts: 0, then ``steps`` of every decade up to ``highest``.

    >>> bin_edges(120)
    [0, 1, 3, 10, 30, 100]
    """
    decades = (10**power for power in range(19))
    return [0, *(step * ten for ten in decades for step in steps if step * ten <= highest)]


def bins_of(counts: NDArray[np.int64], highest: int) -> tuple[list[str], NDArray[np.intp]]:
    """Return the names of the bins of counts up to ``highest``, and the bin of each count.

    >>> bins_of(np.array([40, 2]), 40)
    (['0', '1 to 2', '3 to 9', '10 to 29', '30 and more'], array([4, 1]))
    """
    edges = bin_edges(highest)
    names = [bin_name(low, high) for low, high in zip(edges, [*edges[1:], None], strict=True)]
    return names, np.searchsorted(edges, counts, side="right") - 1


def means_by_bin(
    every: NDArray[np.int64],  # [V]
    counts: NDArray[np.int64],  # [n]
    values: Mapping[Any, NDArray[Any]],  # [n] each
) -> list[Report]:
    """Return means of values by the training count of their object, for bins with values.

    ``every`` are the counts of all objects, ``counts`` that of each value's object.

    >>> means_by_bin(np.array([40, 2]), np.array([2, 2]), {"error": np.array([1.0, 2.0])})
    [{'name': '1 to 2', 'objects': 1, 'measured': 2, 'share': 1.0, 'error': 1.5}]
    """
    highest = int(every.max(initial=0))
    (names, bins), (_, own), found = bins_of(every, highest), bins_of(counts, highest), []
    for n in np.unique(own).tolist():
        here = own == n
        sizes = {"objects": int((bins == n).sum()), "measured": int(here.sum())}
        means = {name: float(part[here].mean()) for name, part in values.items()}
        found.append({"name": names[n], **sizes, "share": float(here.mean()), **means})
    return found


def bin_name(low: int, high: int | None) -> str:
    """Return the name of the bin from ``low`` to below ``high``.

    >>> bin_name(3, 10), bin_name(100, None)
    ('3 to 9', '100 and more')
    """
    if high is None:
        return f"{low:,} and more"
    return f"{low:,}" if high == low + 1 else f"{low:,} to {high - 1:,}"
