"""The report of a byte budget that was divided among columns: an HTML page, and text."""

from __future__ import annotations

from featherbed.report.curves import CurvePanel, draw_curves
from featherbed.report.page import (
    Report,
    as_bytes,
    as_html,
    bar,
    check_parts,
    page,
    table,
    times_smaller,
)

PARTS = ("budget", "file", "dense", "columns", "curve")


def budget_page(report: Report) -> str:
    """Return the page of a division (``collection.compress(...).report.save("report.html")``).

    >>> column = {"name": "site", "rows": 900, "dim": 8, "bits": 2.5}
    >>> parts = {"budget": 4000, "file": 3900, "dense": 28_800, "columns": [column]}
    >>> found = budget_page({**parts, "curve": [(2000, 0.02), (4000, 0.01)]})
    >>> "28.8 KB → 3.90 KB, 7.4 times smaller" in found, "2,250" in found, "<svg" in found
    (True, True, True)
    """
    check_parts(report, PARTS)
    headline = _headline(report, "→")
    parts = [f"<p class=lead>{headline}</p>", _curve(report), _columns(report)]
    return page("Byte budget of a collection", headline, parts)


def budget_text(report: Report) -> str:
    """Return the report as lines: the sizes, the curve, the bits of every column."""
    check_parts(report, PARTS)
    lines = [_headline(report, "->"), f"{'bytes':>15}  expected increase of the loss"]
    lines += [f"{size:>15,}  {loss:.6f}" for size, loss in report["curve"]]
    lines.append(f"{'rows':>15}{'dim':>6}{'bits':>7}{'bytes':>14}  column")
    lines += [
        f"{one['rows']:>15,}{one['dim']:>6}{one['bits']:>7.2f}{_bytes(one):>14,}  {one['name']}"
        for one in _sorted(report)
    ]
    return "\n".join(lines)


def _headline(report: Report, arrow: str) -> str:
    columns, dense, file = report["columns"], report["dense"], report["file"]
    sizes = f"{as_bytes(dense)} {arrow} {as_bytes(file)}{times_smaller(dense, file)}"
    return f"{len(columns):,} columns: {sizes}, of a budget of {as_bytes(report['budget'])}"


def _curve(report: Report) -> str:
    lines = {"expected": report["curve"]}
    picture = draw_curves([CurvePanel("", "expected increase of the loss", lines)])
    rows = [(as_bytes(size), f"{loss:.6f}") for size, loss in report["curve"]]
    note = (
        "Expected increase of the loss at other budgets, relative to the measured rows: half the "
        "sum of importance times squared error, before any training of the compact rows."
    )
    return table("Bytes and loss", ("bytes", "expected increase"), rows, note) + picture


def _columns(report: Report) -> str:
    rows = [
        (
            as_html(one["name"]),
            f"{one['rows']:,} × {one['dim']}",
            bar(f"{one['bits']:.2f}", one["bits"] / 8),
            f"{_bytes(one):,}",
        )
        for one in _sorted(report)
    ]
    note = (
        "Mean bits of a number of each column, at most 8. Columns that share rows are listed each; "
        "their bytes are in the file once."
    )
    return table("Columns", ("column", "rows", "bits", "bytes"), rows, note)


def _sorted(report: Report) -> list[Report]:
    return sorted(report["columns"], key=lambda one: -one["bits"])


def _bytes(column: Report) -> int:
    size: float = column["rows"] * column["dim"] * column["bits"] / 8
    return round(size)
