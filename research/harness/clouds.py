"""Rows of tables as clouds of points, side by side on one page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.codecs.principal import row_directions
from featherbed.errors import ArgumentError
from featherbed.report.page import as_html, plotly_module

COLORS = (
    *("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee"),
    *("#aa3377", "#dd8855", "#555555", "#88aa00", "#bbbbbb"),
)
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1400px}"
    "td,th{padding:.2rem .8rem;text-align:right}"
)
HIDDEN = {"showticklabels": False, "title": {"text": ""}, "backgroundcolor": "#fafafa"}
SCENE: dict[str, Any] = {
    **{f"{name}axis": HIDDEN for name in "xyz"},
    "aspectmode": "data",
    "camera": {"eye": {"x": 1.5, "y": 1.5, "z": 0.7}},
}
HEADING = {"y": 1.0, "xref": "paper", "yref": "paper", "showarrow": False, "font": {"size": 16}}


def principal_axes(
    rows: NDArray[Any], count: int = 3
) -> NDArray[np.float64]:  # [n, d] -> [n, count]
    """Return the projection of rows onto their principal axes (PCA).

    >>> principal_axes(np.array([[0.0, 0.0], [3.0, 4.0]]), 1).round(6).tolist()
    [[-2.5], [2.5]]
    """
    centered = np.asarray(rows, dtype=np.float64) - np.mean(rows, axis=0)
    axes = row_directions(centered, count)
    largest = axes[np.arange(len(axes)), np.abs(axes).argmax(1)]
    axes *= np.where(largest < 0, -1.0, 1.0)[:, None]  # signs are arbitrary: fix them
    projected: NDArray[np.float64] = centered @ axes.T
    return np.pad(projected, ((0, 0), (0, count - projected.shape[1])))


def mean_distance(rows: NDArray[Any], pairs: NDArray[Any]) -> float:  # [n, d], int [m, 2]
    """Return the mean distance of pairs of rows, relative to the mean distance from the centroid.

    >>> mean_distance(np.array([[-1.0], [1.0]]), np.array([[0, 1]]))
    2.0
    """
    if len(pairs) == 0:
        raise ArgumentError("there are no pairs of rows to measure: give at least one")
    radius = np.linalg.norm(rows - rows.mean(0), axis=1).mean()
    return float(np.linalg.norm(rows[pairs[:, 0]] - rows[pairs[:, 1]], axis=1).mean() / radius)


def clouds_page(
    clouds: Mapping[str, NDArray[Any]],  # title -> [n, d]
    names: Sequence[str],
    groups: Sequence[str],
    figures: Mapping[str, Mapping[str, float]] | None = None,
    title: str = "Embeddings",
) -> str:
    """Return a page that shows each cloud along three principal axes, colored by group.

    Names are shown on hover, ``figures`` as a table. Clouds are rotated independently.
    """
    if not clouds or any(
        len(rows) != len(names) or len(names) != len(groups) for rows in clouds.values()
    ):
        raise ArgumentError(
            f"give as many rows in each cloud as names ({len(names)}) and groups ({len(groups)})"
        )
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "margin": {"t": 30, "b": 0, "l": 0, "r": 0},
        "legend": {"itemsizing": "constant"},
        "annotations": [],
    }
    for number, (cloud, rows) in enumerate(clouds.items()):
        scene = f"scene{number + 1}" if number else "scene"
        left, right = number / len(clouds), (number + 1) / len(clouds)
        layout[scene] = SCENE | {"domain": {"x": [left, right], "y": [0, 1]}}
        heading = {"text": as_html(cloud), "x": (left + right) / 2}
        layout["annotations"].append(HEADING | heading)
        points = principal_axes(rows).round(3)
        traces += _traces(points, names, groups, scene, legend=number == 0)
    html = plotly_module("plotly.io").to_html(
        {"data": traces, "layout": layout},
        include_plotlyjs=True,
        full_html=False,
        default_height="560px",
        div_id="clouds",
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{as_html(title)}</title>"
        f"<style>{STYLE}</style><h1>{as_html(title)}</h1>{html}{_table(figures or {})}</html>"
    )


def _traces(
    points: NDArray[np.float64],  # [n, 3]
    names: Sequence[str],
    groups: Sequence[str],
    scene: str,
    legend: bool,
) -> list[dict[str, Any]]:
    """Return a plotly trace per group of one cloud, the largest group first."""
    traces = []
    for number, (group, _) in enumerate(Counter(groups).most_common()):
        members = [i for i, other in enumerate(groups) if other == group]
        x, y, z = points[members].T.tolist()
        traces.append(
            {
                "type": "scatter3d",
                "mode": "markers",
                "scene": scene,
                "name": as_html(group),
                "legendgroup": str(number),
                "showlegend": legend,
                "marker": {"size": 2.5, "color": COLORS[number % len(COLORS)]},
                "text": [as_html(names[i]) for i in members],
                "hovertemplate": "%{text}<extra></extra>",
                "x": x,
                "y": y,
                "z": z,
            }
        )
    return traces


def _table(figures: Mapping[str, Mapping[str, float]]) -> str:
    if not figures:
        return ""
    columns = list(dict.fromkeys(name for row in figures.values() for name in row))
    head = "".join(f"<th>{as_html(name)}</th>" for name in columns)
    lines = []
    for name, row in figures.items():
        cells = "".join(f"<td>{row.get(column, float('nan')):.3f}</td>" for column in columns)
        lines.append(f"<tr><th>{as_html(name)}</th>{cells}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(lines)}</table>"
