"""The report page of a recommender, and insight into its tables beyond the error.

Everything is counted in bins of popularity (training ratings), so that the size of a report does
not depend on the number of rows. Computed with numpy from the packed tables, as they are served.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError
from featherbed.packed import (
    PackedTable,
    anchor_count,
    clusters_of,
    evenly_spaced,
    has_weighted_atoms,
    purity,
    row_cost,
    strongest,
)
from featherbed.report.page import (
    COLORS,
    FINE,
    INTERRUPTED,
    LAYOUT,
    NONE,
    Report,
    as_bytes,
    as_count,
    as_figure,
    as_html,
    as_number,
    axis,
    bar,
    bin_edges,
    columns_section,
    history_lines,
    history_plot,
    lead,
    line,
    means_by_bin,
    plot,
    report_page,
    table,
    times_smaller,
)

SIDES = ("users", "items")
SPLITS = ("test", "validation", "train")
ROWS = 1 << 18  # rows measured at once
POINTS = 1200  # rows drawn as points
MAX_ANCHORS, MAX_ITEMS = 24, 8  # anchors shown, and items of each
MAX_GROUPED = 200_000  # items whose groups are compared with their anchors
COUNTS = {"lines": "lines read", "duplicates": "duplicate pairs"}


def ratings_page(report: Report) -> str:
    """Return the page of a trained recommender.

    ``report`` requires ``name``, ``rows`` (users, items), ``metrics`` (test, validation and train,
    each with an ``mse``), ``history`` (one row per epoch) and ``sizes`` (file, resident, training,
    parameters, float32, keys: under ``users`` and ``items``, or once for both; ``whole`` and
    ``float32_whole``: all files needed for recommending, of which ``seen`` and ``titles`` are
    parts). Optional: ``insight``, ``model``, ``input``, ``split``, ``settings``, ``warnings``,
    ``notes``, ``command``, ``seconds``, ``version``, ``interrupted``. All texts are escaped.

    >>> ratings_page({"name": "ratings.csv", "rows": {}, "metrics": {}})
    Traceback (most recent call last):
    featherbed.errors.ArgumentError: a report without sizes, history: give the whole report
    """
    sections = (_lead, _errors, _history, _nonzeros, sizes_section, _bands)
    more = (cost_section, _anchors, _data)
    return report_page(report, "a recommender", ("rows", "history"), (*sections, *more))


def _insight(report: Report, part: str) -> Any:
    return (report.get("insight") or {}).get(part) or {}


def _mse(report: Report, split: str) -> float | None:
    return as_number((report["metrics"].get(split) or {}).get("mse"))


def _total_size(report: Report, name: str) -> int | None:
    """Return a size of both tables together; None if it is unknown for one of them."""
    given = report["sizes"].get(name)
    if given is not None:
        return int(given)
    sizes = [(report["sizes"].get(side) or {}).get(name) for side in SIDES]
    known = [int(size) for size in sizes if size is not None]
    return sum(known) if len(known) == len(SIDES) else None


def _lead(report: Report) -> str:
    """Return the headline and the paragraph below it: the model, its size and its error."""
    rows, model = report["rows"], report.get("model") or {}
    error = _mse(report, "test")
    width = f", rows of width {model['dim']}" if "dim" in model else ""
    if model.get("factors") == 0:
        width = ", biases only: no factors are stored"
    headline = f"{rows.get('users', 0):,} users and {rows.get('items', 0):,} items{width}"
    whole, dense = shipped_sizes(report)
    if whole and dense:
        headline += f": {as_bytes(whole)} in total, {as_bytes(dense)} with float32 rows"
        headline += times_smaller(dense, whole)
    headline += "" if error is None else f"; test error {error:.4f}"
    sentences = []
    if "users" in model and "items" in model:
        sentences.append(
            f"Users are <b>{as_html(model['users'])}</b>, items <b>{as_html(model['items'])}</b>."
        )
    sentences += [*_comparison(report, error), *size_sentences(report)]
    sentences += [INTERRUPTED] if report.get("interrupted") else []
    sentences += [f"<b>{_sentence(text)}</b>" for text in report.get("warnings") or []]
    sentences += [as_html(note) for note in report.get("notes") or []]
    return lead(f"{as_html(headline)}.", sentences)


def _comparison(report: Report, error: float | None) -> list[str]:
    """Return a sentence that compares the test error with the baselines."""
    base = _insight(report, "baselines")
    if error is None or not base.get("mean") or not base.get("biases"):
        return []
    below_mean, below = 1 - error / base["mean"], 1 - error / base["biases"]
    against = f"{100 * abs(below):.1f} % {'less' if below >= 0 else 'more'} than"
    return [
        f"The mean squared error on the test ratings is {error:.4f}: {100 * below_mean:.1f} % less "
        f"than the {base['mean']:.4f} of always predicting the mean, and {against} the "
        f"{base['biases']:.4f} of biases of users and items alone."
    ]


def shipped_sizes(report: Report) -> tuple[int | None, int | None]:
    """Return the size of all files needed for recommending, as stored and with float32 rows."""
    file, dense, keys = (_total_size(report, name) for name in ("file", "float32", "keys"))
    if file is None or dense is None:
        return None, None
    whole = report["sizes"].get("whole") or file + (keys or 0)
    return whole, report["sizes"].get("float32_whole") or whole - file + dense


def size_sentences(report: Report) -> list[str]:
    """Return sentences on the sizes of tables, keys, rated items and titles."""
    file, dense = _total_size(report, "file"), _total_size(report, "float32")
    if not file or not dense:
        return []
    smaller = times_smaller(dense, file)
    tables = f"The tables alone take {as_bytes(file)}, as float32 rows {as_bytes(dense)}{smaller}."
    others = {
        "keys (the names of users and items)": _total_size(report, "keys"),
        "items rated in training": report["sizes"].get("seen"),
        "titles": report["sizes"].get("titles"),
    }
    listed = [f"{name} take {as_bytes(size)}" for name, size in others.items() if size]
    return [tables, f"The {', the '.join(listed)}."] if listed else [tables]


def _sentence(text: str) -> str:
    return f"{as_html(text[:1].upper() + text[1:])}."


def _errors(report: Report) -> str:
    """Return the errors of the three splits and of the baselines."""
    base = _insight(report, "baselines")
    errors = {f"{split} ratings": _mse(report, split) for split in SPLITS}
    errors["test, biases of users and items alone"] = base.get("biases")
    errors["test, always the mean"] = base.get("mean")
    known = {name: value for name, value in errors.items() if value is not None}
    worst = max(known.values(), default=1.0) or 1.0
    rows = [
        (name, as_figure("", math.sqrt(value)), bar(as_figure("", value), value / worst))
        for name, value in known.items()
    ]
    return table("Quality", ("error on", "RMSE", "MSE"), rows)


def _history(report: Report) -> str:
    """Return the errors by epoch."""
    columns = {"train (running)": "train_mse", "validation": "validation_mse"}
    lines = history_lines(report, columns)
    shown = history_plot(report, "errors", lines, axis("mean squared error"), 340)
    note = "<p class=soft>The epoch with the lowest validation error is kept.</p>"
    return f"<h2>Error by epoch</h2>{note}{shown}" if shown else ""


def _nonzeros(report: Report) -> str:
    """Return the nonzero weights by epoch, and the anchors if their number changes."""
    lines = history_lines(report, {"nonzero weights": "nonzeros", "anchors": "anchors"})
    layout: Report = {}
    if len(lines) > 1:
        lines[1]["yaxis"] = "y2"
        right = axis("anchors", rangemode="tozero", tickformat="d", overlaying="y", side="right")
        layout = {"yaxis2": right | {"showgrid": False}}
    left = axis(lines[0]["name"] if lines else "", rangemode="tozero")
    shown = history_plot(report, "nonzeros", lines, left, 300, **layout)
    return f"<h2>Size by epoch</h2>{shown}" if shown else ""


def sizes_section(report: Report) -> str:
    """Return the four sizes of each table, beside float32 and float16 rows."""
    if not all(report["sizes"].get(side) for side in SIDES):
        return ""
    names = ("file", "resident", "training")
    sizes = {side: report["sizes"][side] for side in SIDES}
    sizes["both"] = {name: _total_size(report, name) for name in (*names, "parameters")}
    rows = [
        (side, *(as_bytes(own.get(name)) for name in names), as_count(own.get("parameters")))
        for side, own in sizes.items()
    ]
    dense, file = _total_size(report, "float32"), sizes["both"]["file"]
    for name, part in (("float32 rows", dense), ("float16 rows", (dense or 0) // 2)):
        if dense and part:
            times = f"<small>{part / file:,.1f} times the files</small>" if file else ""
            size = as_bytes(part)
            rows.append((f"{name}{times}", size, size, NONE, as_count(dense // 4)))
    note = (
        "Files without keys; memory when serving; memory in training including the optimizer "
        "state; number of parameters as counted in papers."
    )
    return table("Size", ("table", *names, "parameters"), rows, note)


def _bands(report: Report) -> str:
    """Return the test error by popularity of users and items."""
    sides = _insight(report, "sides")
    parts = []
    for side in ("items", "users"):
        bands = (sides.get(side) or {}).get("bands") or []
        worst = max((band["mse"] for band in bands), default=1.0) or 1.0
        rows = [
            (
                as_html(band["name"]),
                as_count(band["objects"]),
                as_figure("share", band["share"]),
                as_figure("", band["biases"], 3),
                bar(as_figure("", band["mse"]), band["mse"] / worst),
            )
            for band in bands
        ]
        head = ("ratings in training", side, "of test", "biases alone", "MSE")
        parts.append(table("", head, rows))
    note = (
        "Test error by the number of training ratings of a user or an item, "
        "beside the error of biases alone."
    )
    shown = f"<h2>Error by popularity</h2><p class=soft>{note}</p>{'<br>'.join(parts)}"
    return shown if any(parts) else ""


def cost_section(report: Report) -> str:
    """Return codes (or bits) per row against popularity, for users and items."""
    sides = _insight(report, "sides")
    shown = {side: sides[side] for side in SIDES if (sides.get(side) or {}).get("bins")}
    if not shown:
        return ""
    varied = {
        side: cost
        for side, cost in shown.items()
        if any(bin_["least"] != cost["bins"][0]["most"] for bin_ in cost["bins"])
    }
    means = (
        f"{cost['mean']:,.1f} {cost['unit']} per row of {side}" for side, cost in shown.items()
    )
    text = f"On average {', '.join(means)}"
    if any(cost["bins"][0]["low"] == 0 for cost in varied.values()):
        text += "; rows without a training rating are drawn at 0.5"
    plots = [_cost_plot(f"cost{n}", *pair) for n, pair in enumerate(varied.items())]
    unit = "Codes" if all(cost["unit"] == "codes" for cost in shown.values()) else "Bits"
    return (
        f"<h2>{unit} per row by popularity</h2><p class=soft>{as_html(text)}.</p>{''.join(plots)}"
    )


def _cost_plot(name: str, side: str, cost: Report) -> str:
    points, bins = cost["points"], cost["bins"]
    cloud: Report = {
        "type": "scatter",
        "mode": "markers",
        "name": f"some {side}",
        "hoverinfo": "skip",
        "x": [max(0.5, count) for count in points["ratings"]],
        "y": points["cost"],
        "marker": {"size": 4, "color": COLORS[SIDES.index(side)], "opacity": 0.25},
    }
    x = [_bin_center(bin_["low"]) for bin_ in bins]
    mean = line("mean", x, [bin_["mean"] for bin_ in bins], 0) | {"line": {"color": "#1d2329"}}
    axes = {
        "xaxis": axis(f"ratings in training ({side})", type="log", dtick=1),
        "yaxis": axis(f"{cost['unit']} per row", rangemode="tozero"),
    }
    return plot(name, [cloud, mean], LAYOUT | axes, 320)


def _bin_center(low: int) -> float:
    """Return the center of a bin on a logarithmic axis; bins start at 0 and 1, 2, 5 per decade."""
    if low <= 1:
        return 0.5 + low / 2
    return low * math.sqrt(2.5 if str(low).startswith("2") else 2)


def _anchors(report: Report) -> str:
    """Return the anchors of items with the items they contribute to most."""
    found = _insight(report, "anchors")
    if not found:
        return ""
    rows = []
    for one in found["shown"]:
        names = "; ".join(as_html(top["name"]) for top in one["top"])
        rows.append((str(one["anchor"]), as_count(one["leads"]), names))
    note = (
        "Items with the largest weights on each anchor, and the number of items for which it "
        "has the largest weight."
    )
    if len(rows) < found["total"]:
        note += f" The first {len(rows)} of {found['total']} are shown."
    if found["empty"]:
        note += f" {found['empty']:,} items have no nonzero weight."
    if pure := found.get("purity"):
        share, baseline = (as_figure("share", pure[name]) for name in ("share", "baseline"))
        note += (
            f" {share} of items are of the main group of their anchor "
            f"({baseline} with a single cluster)."
        )
    return table("Anchors", ("anchor", "items", "largest weights"), rows, note, wrap=True)


def _data(report: Report) -> str:
    """Return columns, skipped lines and splits of the input."""
    return columns_section(report, "ratings", COUNTS)


def error_by_popularity(
    counts: NDArray[np.int64],
    ids: NDArray[np.integer],
    errors: NDArray[np.float64],
    baseline_errors: NDArray[np.float64],
) -> list[dict[str, Any]]:
    """Return the test error by training count of the rated object, for bins with test ratings."""
    values = {"mse": errors, "biases": baseline_errors}
    return [
        band | {"ratings": band.pop("measured")}
        for band in means_by_bin(counts, counts[ids], values)
    ]


def describe_cost(table: PackedTable, counts: NDArray[np.int64]) -> dict[str, Any]:
    """Return the codes (of weighted atoms) or bits of rows by popularity, and of some as points."""
    coded = all(has_weighted_atoms(band) for band in table.bands)
    edges = np.array(bin_edges(int(counts.max(initial=0)), FINE))
    number, total, least, most = (np.zeros(len(edges), dtype=np.int64) for _ in range(4))
    least += np.iinfo(np.int64).max
    for start in range(0, table.rows, ROWS):
        block = slice(start, min(start + ROWS, table.rows))
        cost = row_cost(table, np.arange(block.start, block.stop), coded)
        bins = np.searchsorted(edges, counts[block], side="right") - 1
        number += np.bincount(bins, minlength=len(edges))
        total += np.bincount(bins, cost, minlength=len(edges)).astype(np.int64)
        np.minimum.at(least, bins, cost)
        np.maximum.at(most, bins, cost)
    shown = evenly_spaced(table.rows, POINTS)
    return {
        "unit": "codes" if coded else "bits",
        "mean": float(total.sum() / table.rows),
        "bins": [
            {
                "low": int(edges[n]),
                "rows": int(number[n]),
                "mean": float(total[n] / number[n]),
                "least": int(least[n]),
                "most": int(most[n]),
            }
            for n in np.flatnonzero(number)
        ],
        "points": {
            "ratings": counts[shown].tolist(),
            "cost": row_cost(table, shown, coded).tolist(),
        },
    }


def describe_anchors(items: PackedTable, titles: Any) -> dict[str, Any] | None:
    """Return the anchors of the most items, with the items of the largest weights.

    None for tables without anchors.
    """
    if "Anchor" not in str(items.made_by.get("table", "")) or not all(
        has_weighted_atoms(band) or band.values is not None for band in items.bands
    ):
        return None
    try:
        total = anchor_count(items)
    except ArgumentError:
        return None
    clusters = clusters_of(items)
    sizes = np.bincount(clusters[clusters >= 0], minlength=total)
    shown = np.argsort(-sizes, kind="stable")[:MAX_ANCHORS]
    classes = np.full(total, -1)
    classes[shown] = np.arange(len(shown))
    tops: dict[int, list[dict[str, Any]]] = {int(k): [] for k in shown}
    for entry in strongest(items, MAX_ITEMS, classes):
        title = titles.names[entry.id] if titles is not None else None
        name = title or entry.key or str(entry.id)
        tops[entry.anchor].append({"name": name, "weight": entry.weight})
    groups = None if titles is None else titles.groups
    pure = None
    if groups is not None and items.rows <= MAX_GROUPED and any(groups):
        share = purity(clusters, groups)
        pure = {"share": share.share, "baseline": share.baseline}
    return {
        "total": total,
        "empty": int(np.count_nonzero(clusters < 0)),
        "purity": pure,
        "shown": [
            {"anchor": k, "leads": int(sizes[k]), "top": top} for k, top in tops.items() if top
        ],
    }
