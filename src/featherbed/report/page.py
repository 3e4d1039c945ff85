"""The frame of report pages: style, tables and plots in one HTML file that loads nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from featherbed.errors import MissingExtra

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
