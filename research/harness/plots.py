"""The plot of an experiment: errors against sizes, the objective over numbers of anchors, convergence, anchors over a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from featherbed.report.page import AXIS, COLORS, LAYOUT, as_html, plot
from research.harness.run import Results
from research.harness.settings import Row
from research.harness.summary import MEASURES, mean_and_error

Trace = dict[str, Any]
MOST = 400  # points of a line


def drawing(results: Results) -> str:
    """Return the plot of an experiment, with its heading; nothing if it asks for none or nothing has run."""
    make = {
        "front": _front,
        "objective": _objective,
        "grid": _grid,
        "convergence": _convergence,
        "stream": _stream,
    }
    kind = results.experiment.plot
    traces = make[kind](results) if kind in make and results.records else []
    if not traces:
        return ""
    heading, x, y = TITLES[kind] if kind != "front" else _front_titles(results)
    layout = LAYOUT | {
        "xaxis": AXIS | {"title": {"text": x}},
        "yaxis": AXIS | {"title": {"text": y}},
    }
    if kind == "front":
        layout["xaxis"] = layout["xaxis"] | {"type": "log"}
    return f"<h2>{heading}</h2>{plot('paper', traces, layout, 440)}"


TITLES = {
    "objective": ("The objective over the number of anchors", "anchors a side", "objective (5)"),
    "grid": ("The objective over user and item anchors", "user anchors", "item anchors"),
    "convergence": ("Convergence", "epoch", "validation MSE"),
    "stream": ("Anchors over the stream", "batches", "anchors a side"),
}


def mean_of(results: Results, row: Row, measure: str) -> float | None:
    """Return the mean of a measure over the seeds there are."""
    records = results.records.get(row.name, {}).values()
    return mean_and_error(
        [record["measures"][measure] for record in records if measure in record["measures"]]
    )[0]


def _marks(
    name: str, points: Iterable[tuple[Any, Any, str]], look: Trace, mode: str = "markers"
) -> Trace:
    x, y, texts = zip(*points, strict=True)
    kind = {"type": "scatter", "mode": mode, "name": name, "hoverinfo": "text+x+y"}
    return kind | {"x": list(x), "y": list(y), "hovertext": list(texts), "marker": look}


def _front_titles(results: Results) -> tuple[str, str, str]:
    title = MEASURES[results.experiment.measures[0]][0]
    kind = "Error" if title == "test MSE" else title[:1].upper() + title[1:]
    return f"{as_html(kind)} against size", "parameters (K, logarithmic)", as_html(title)


def _front(results: Results) -> list[Trace]:
    """Return ours and the published numbers of the first measure over parameters."""
    first = results.experiment.measures[0]
    unit, scale, ours, theirs = MEASURES["parameters"][1], MEASURES[first][1], [], []
    for row in results.experiment.rows:
        size, value = mean_of(results, row, "parameters"), mean_of(results, row, first)
        if size is not None and value is not None:
            ours.append((size / unit, value / scale, as_html(row.label)))
        if {"parameters", first} <= set(row.published):
            theirs.append(
                (
                    row.published["parameters"] / unit,
                    row.published[first] / scale,
                    as_html(row.label),
                )
            )
    traces = [_marks("ours", ours, {"size": 10, "color": COLORS[0]})] if ours else []
    return traces + (
        [_marks("published", theirs, {"size": 10, "color": COLORS[1], "symbol": "cross"})]
        if theirs
        else []
    )


def _grows(row: Row) -> bool:
    return bool(row.settings.get("grows"))


def _objective(results: Results) -> list[Trace]:
    """Return the objective of runs with as many anchors as given, and of those that found it."""
    traces = []
    for name, grown, look in (
        ("K given", False, {"size": 8, "color": COLORS[0]}),
        ("NBANT", True, {"size": 16, "color": COLORS[1], "symbol": "star"}),
    ):
        points = []
        for row in results.experiment.rows:
            found = mean_of(results, row, "anchors"), mean_of(results, row, "objective")
            if _grows(row) == grown and None not in found:
                points.append((*found, as_html(row.label)))
        if points:
            traces.append(
                _marks(name, sorted(points), look, "markers" if grown else "lines+markers")
            )
    return traces


def _grid(results: Results) -> list[Trace]:
    """Return marks over user and item anchors, coloured by the objective."""
    points: dict[bool, list[tuple[Any, Any, str]]] = {False: [], True: []}
    values: dict[bool, list[float]] = {False: [], True: []}
    for row in results.experiment.rows:
        users, items, value = (
            mean_of(results, row, name) for name in ("user_anchors", "item_anchors", "objective")
        )
        if users is not None and items is not None and value is not None:
            points[_grows(row)].append((users, items, f"{as_html(row.label)}: {value:.4f}"))
            values[_grows(row)].append(value)
    every = values[False] + values[True]
    traces = []
    for grown in (False, True):
        if points[grown]:
            scale = {
                "cmin": min(every),
                "cmax": max(every),
                "colorscale": "Viridis",
                "showscale": not grown,
            }
            look = {
                "size": 22,
                "color": values[grown],
                "symbol": "star" if grown else "square",
                **scale,
            }
            edge = {
                "line": {"width": 2 if grown else 0, "color": "#d55e00"},
                "colorbar": {"title": {"text": "objective"}},
            }
            traces.append(_marks("NBANT" if grown else "K given", points[grown], look | edge))
    return traces


def _lines(results: Results, x: str, y: str) -> list[Trace]:
    """Return a line for each row: a number of its history, of the first seed there is."""
    traces: list[Trace] = []
    for row in results.experiment.rows:
        records = results.records.get(row.name, {})
        history = records[min(records)]["history"] if records else []
        points = [(one[x], one[y]) for one in history if x in one and y in one]
        if points:
            thin = points[:: -(-len(points) // MOST)]
            line = {"color": COLORS[len(traces) % len(COLORS)]}
            shown = {
                "x": [point[0] for point in thin],
                "y": [point[1] for point in thin],
                "line": line,
            }
            traces.append({"type": "scatter", "mode": "lines", "name": as_html(row.label), **shown})
    return traces


def _convergence(results: Results) -> list[Trace]:
    return _lines(results, "epoch", "validation_mse")


def _stream(results: Results) -> list[Trace]:
    return _lines(results, "batch", "anchors")
