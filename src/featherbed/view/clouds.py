"""Rows of tables as clouds of points, side by side on one page that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.codecs.principal import row_directions
from featherbed.errors import ArgumentError, MissingExtra
from featherbed.view.figures import as_html

COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#dd8855",
    "#555555",
    "#88aa00",
    "#bbbbbb",
)


def principal_axes(
    rows: NDArray[Any], count: int = 3
) -> NDArray[np.float64]:  # [n, d] -> [n, count]
    """Return rows on the axes along which they differ most (PCA).

    >>> principal_axes(np.array([[0.0, 0.0], [3.0, 4.0]]), 1).round(6).tolist()
    [[-2.5], [2.5]]
    """
    centred = np.asarray(rows, dtype=np.float64) - np.mean(rows, axis=0)
    axes = row_directions(centred, count)
    axes *= np.where(axes[np.arange(len(axes)), np.abs(axes).argmax(1)] < 0, -1.0, 1.0)[
        :, None
    ]  # signs are a matter of taste
    found: NDArray[np.float64] = centred @ axes.T
    return np.pad(found, ((0, 0), (0, count - found.shape[1])))


def mean_distance(rows: NDArray[Any], pairs: NDArray[Any]) -> float:  # [n, d], int [m, 2]
    """Return the mean distance of pairs of rows, in units of the mean distance of all rows from their mean.

    >>> mean_distance(np.array([[-1.0], [1.0]]), np.array([[0, 1]]))
    2.0
    """
    if len(pairs) == 0:
        raise ArgumentError("there are no pairs of rows to measure")
    spread = np.linalg.norm(rows - rows.mean(0), axis=1).mean()
    return float(np.linalg.norm(rows[pairs[:, 0]] - rows[pairs[:, 1]], axis=1).mean() / spread)


def clouds_page(
    clouds: Mapping[str, NDArray[Any]],  # title -> [n, d]
    names: Sequence[str],
    groups: Sequence[str],
    figures: Mapping[str, Mapping[str, float]] | None = None,
    title: str = "Embeddings",
) -> str:
    """Return an HTML page: each cloud in three principal axes, coloured by group, names on hover; ``figures`` as a table.

    The page holds all it needs. Turning one cloud leaves the others.
    """
    if not clouds or any(
        len(rows) != len(names) or len(names) != len(groups) for rows in clouds.values()
    ):
        raise ArgumentError(
            f"give as many rows in each cloud as names ({len(names)}) and groups ({len(groups)})"
        )
    try:
        draw = import_module("plotly.io").to_html
    except ModuleNotFoundError:
        raise MissingExtra("plotly", "view", "a page of embeddings") from None
    kinds = sorted(set(groups), key=lambda kind: -list(groups).count(kind))
    traces, layout = (
        [],
        {"margin": {"t": 30, "b": 0, "l": 0, "r": 0}, "legend": {"itemsizing": "constant"}},
    )
    for place, (cloud, rows) in enumerate(clouds.items(), 1):
        scene = "scene" if place == 1 else f"scene{place}"
        left, right = (place - 1) / len(clouds), place / len(clouds)
        layout[scene] = {"domain": {"x": [left, right], "y": [0, 1]}, **_axes()}
        layout.setdefault("annotations", []).append(_heading(as_html(cloud), (left + right) / 2))  # type: ignore[attr-defined]
        points = principal_axes(rows)
        for number, kind in enumerate(kinds):
            members = [i for i, group in enumerate(groups) if group == kind]
            traces.append(
                {
                    "type": "scatter3d",
                    "mode": "markers",
                    "scene": scene,
                    "name": as_html(kind),
                    "legendgroup": str(number),
                    "showlegend": place == 1,
                    "marker": {"size": 2.5, "color": COLOURS[number % len(COLOURS)]},
                    "text": [as_html(names[i]) for i in members],
                    "hovertemplate": "%{text}<extra></extra>",
                    **{
                        axis: np.round(points[members, n], 3).tolist()
                        for n, axis in enumerate("xyz")
                    },
                }
            )
    plot = draw(
        {"data": traces, "layout": layout},
        include_plotlyjs=True,
        full_html=False,
        default_height="560px",
        div_id="clouds",
    )
    style = "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1400px}td,th{padding:.2rem .8rem;text-align:right}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{as_html(title)}</title><style>{style}</style>"
        f"<h1>{as_html(title)}</h1>{plot}{_table(figures or {})}</html>"
    )


def _axes() -> dict[str, Any]:
    plain = {"showticklabels": False, "title": {"text": ""}, "backgroundcolor": "#fafafa"}
    return {f"{axis}axis": plain for axis in "xyz"} | {
        "aspectmode": "data",
        "camera": {"eye": {"x": 1.5, "y": 1.5, "z": 0.7}},
    }


def _heading(text: str, middle: float) -> dict[str, Any]:
    return {
        "text": text,
        "x": middle,
        "y": 1.0,
        "xref": "paper",
        "yref": "paper",
        "showarrow": False,
        "font": {"size": 16},
    }


def _table(figures: Mapping[str, Mapping[str, float]]) -> str:
    if not figures:
        return ""
    columns = list(dict.fromkeys(name for row in figures.values() for name in row))
    head = "".join(f"<th>{as_html(name)}</th>" for name in columns)
    body = "".join(
        f"<tr><th>{as_html(name)}</th>"
        + "".join(f"<td>{row.get(column, float('nan')):.3f}</td>" for column in columns)
        + "</tr>"
        for name, row in figures.items()
    )
    return f"<table><tr><th></th>{head}</tr>{body}</table>"
