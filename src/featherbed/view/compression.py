"""What a compression did, as one HTML page that needs no network, and as a few lines for the terminal."""

from __future__ import annotations

import math
import re
from typing import Any

from featherbed.errors import ArgumentError
from featherbed.view.figures import NONE, as_bytes, as_figure, as_html, as_settings
from featherbed.view.page import AXIS, COLOURS, PAPER, SYMBOLS, barred, page, plot, table

Report = dict[str, Any]

NEEDED = (
    "input",
    "target",
    "measure",
    "budget",
    "chosen",
    "parts",
    "quality",
    "bands",
    "curve",
    "words",
    "seconds",
)
MEANINGS = {
    "recall": (
        "recall",
        "Neighbours kept: of the ten rows nearest to a row, the share still among its ten nearest.",
    ),
    "error": (
        "error",
        "How far the rows moved, relative to how long they are. 0 is exact, 1 is no better than zeros.",
    ),
    "cosine": (
        "cosine",
        "How well a row still points where it did, on average. 1 is the same direction, 0 is unrelated.",
    ),
    "overlap": (
        "overlap",
        "How much of the space that the columns span is left (eigenspace overlap). 1 is all of it.",
    ),
    "weighted_recall": ("recall by use", "Neighbours kept, a row counting as often as it is used."),
    "weighted_error": (
        "error by use",
        "How far the rows moved, a row counting as often as it is used.",
    ),
}
BAND = ("share", "error", "cosine", "recall")


def compression_page(report: Report) -> str:
    """Return one HTML page of what a compression did: it holds all it needs and fetches nothing.

    ``report`` is what a compression attaches to its result. Every text in it is shown as text, never as markup.

    >>> compression_page({"input": {}, "target": "ratio=20", "measure": "recall", "budget": None, "chosen": {}, "parts": {}})
    Traceback (most recent call last):
    featherbed.errors.ArgumentError: a report without quality, bands, curve, words, seconds: give the whole report
    """
    _check(report)
    name = as_html(report["input"]["name"])
    sections = [
        make(report) for make in (_choice, _quality, _curve, _parts, _bands, _words, _repeat)
    ]
    return page(name, f"{name}, {_whole_ratio(report):,.1f} times smaller", sections)


def compression_text(report: Report) -> str:
    """Return what a compression did in plain lines for a terminal: at most 25, of at most 100 characters.

    The command stands there when it fits into its line.
    """
    _check(report)
    given, chosen, quality = report["input"], report["chosen"], report["quality"]
    bands, words, command = report["bands"], report["words"] or [], report.get("command", "")
    parts = sorted(report["parts"].items(), key=lambda item: -item[1])
    more = f", {len(parts) - 2} more" if parts[2:] else ""
    plain, weighted = (
        [n for n in MEANINGS if n in quality and n.startswith("weighted_") == kind]
        for kind in (False, True)
    )
    lines = [
        f"{given['name']} ({given['dtype']})",
        _headline(report, "x", "->"),
        f"method      {chosen['method']}({as_settings(chosen)})",
        f"asked for   {report['target']}; chosen {_tried(report)} in {report['seconds']:,.1f} s",
        f"table       {as_bytes(chosen['bytes'])}, {chosen['ratio']:,.1f} times smaller than "
        f"float32 ({as_bytes(given['bytes_float32'])}), "
        f"{chosen['ratio_float16']:,.1f} times than float16"
        + (f"; keys {as_bytes(chosen['keys'])}" if chosen.get("keys") else ""),
        "quality     " + ", ".join(f"{name} {as_figure(name, quality[name])}" for name in plain),
        *[
            "by use      "
            + ", ".join(f"{name[9:]} {as_figure(name, quality[name])}" for name in weighted)
            for _ in weighted[:1]
        ],
        "bytes       " + ", ".join(f"{name} {as_bytes(size)}" for name, size in parts[:2]) + more,
        *[f"{'rows':<30}{'share':>9}{'error':>9}{'cosine':>9}{'recall':>9}" for _ in bands[:1]],
        *[
            f"  {b['name'][:27]:<28}"
            + "".join(f"{as_figure(name, b[name], 3):>9}" for name in BAND)
            for b in bands[:7]
        ],
        *[f"  and {len(bands) - 7} more" for _ in bands[7:8]],
        *[f"{'words':<30}{'used':>18}{'before':>9}{'after':>9}" for _ in words[:1]],
    ]
    for line in words[:5]:
        scores = "".join(
            f"{as_figure(line['kind'], line[when], 3):>9}" for when in ("before", "after")
        )
        used = f"{line['used']:,} of {line['of']:,}"
        lines += [f"  {line['file'][:27]:<28}{used:>18}{scores}"]
    lines += [f"  and {len(words) - 5} more" for _ in words[5:6]]
    lines += [f"again       {command}"] if command and len(command) <= 88 else []
    clean = ("".join(letter if letter.isprintable() else "?" for letter in line) for line in lines)
    return "\n".join(line if len(line) <= 100 else line[:97] + "..." for line in clean)


def _check(report: Report) -> None:
    """Refuse a report that lacks a part, or whose measure is none of the two."""
    missing = [name for name in NEEDED if name not in report]
    if missing:
        raise ArgumentError(f"a report without {', '.join(missing)}: give the whole report")
    if report["measure"] not in ("recall", "error"):
        raise ArgumentError(
            f"a report with measure {report['measure']!r}: it is 'recall' or 'error'"
        )


def _whole_ratio(report: Report) -> float:
    """Return how many times smaller the file is than float32 rows, the keys in both."""
    chosen, keys = report["chosen"], report["chosen"].get("keys", 0)
    if not keys:
        return float(chosen["ratio"])
    return float((report["input"]["bytes_float32"] + keys) / (chosen["bytes"] + keys))


def _headline(report: Report, times: str, arrow: str) -> str:
    """Return size before and after, keys included, and the neighbours kept, in one sentence."""
    given, chosen = report["input"], report["chosen"]
    kept, keys = as_figure("recall", report["quality"].get("recall"), 0), chosen.get("keys", 0)
    file = f"{as_bytes(given['bytes_float32'] + keys)} {arrow} {as_bytes(chosen['bytes'] + keys)}"
    size = f"{given['rows']:,} {times} {given['dim']:,}{' with keys' if keys else ''}"
    text = f"{size}: {file}, {_whole_ratio(report):,.1f} times smaller"
    if kept == NONE:
        return text
    return f"{text}; {kept} of {'ten' if keys else 'the ten nearest'} neighbours kept"


def _choice(report: Report) -> str:
    """Return the headline, and what was asked for and chosen."""
    chosen = report["chosen"]
    apart = " without keys" if chosen.get("keys") else ""
    budget = "" if report["budget"] is None else f" (at most {as_bytes(report['budget'])}{apart})"
    settings = f" with {as_html(as_settings(chosen))}" if chosen["settings"] else ""
    without = (
        f"Keys take {as_bytes(chosen['keys'])}. Without them it is {chosen['ratio']:,.1f} times "
        "smaller than float32 rows; a"
        if chosen.get("keys")
        else "A"
    )
    return (
        f"<p class=lead>{as_html(_headline(report, '×', '→'))}</p>\n"
        f"<p>Asked for: <b>{as_html(report['target'])}</b>{budget}. Chosen: <b>{as_html(chosen['method'])}</b>{settings}, "
        f"{_tried(report)}. {without}gainst float16 rows it is {chosen['ratio_float16']:,.1f} times smaller.</p>"
    )


def _quality(report: Report) -> str:
    """Return the table of figures, each with what it means."""
    known = [
        (MEANINGS[key], as_figure(key, report["quality"][key]))
        for key in MEANINGS
        if key in report["quality"]
    ]
    rows = [(f"{name}<small>{meaning}</small>", figure) for (name, meaning), figure in known]
    return table("How good it is", ("figure", "value"), rows)


def _curve(report: Report) -> str:
    """Return the plot of bytes against quality for what was tried, and the same as a table; nothing if there was no choice."""
    points = sorted(report["curve"], key=lambda point: point["bytes"])
    if len(points) < 2:
        return ""
    drawing = plot("curve", _traces(points, report["measure"]), _layout(points, report), height=440)
    rows = []
    for point in points:
        mark = " <mark>chosen</mark>" if point["chosen"] else ""
        name = f"{as_html(point['method'])}{mark}<small>{as_html(as_settings(point))}</small>"
        figures = (as_figure(key, point[key]) for key in ("recall", "error"))
        rows.append((name, as_html(point["stage"]), f"{point['bytes']:,}", *figures))
    whole = table("", ("method", "fit", "bytes", "recall", "error"), rows)
    note = "Hollow marks are quick fits (of a sample, if there are many rows), solid ones full fits; the ring is the one chosen."
    every = f"<details><summary>The same as a table</summary>{whole}</details>"
    return f"<h2>What was tried</h2><p class=soft>{note}</p>{drawing}{every}"


def _traces(points: list[Report], measure: str) -> list[Report]:
    """Return one plotly trace of marks for each method, and a ring around the point chosen."""

    def trace(name: str, own: list[Report], marker: Report) -> Report:
        x, y = [point["bytes"] for point in own], [point[measure] for point in own]
        hover = [_hover(point) for point in own]
        return {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": x,
            "y": y,
            "marker": marker,
            "hovertext": hover,
        }

    traces = []
    for number, method in enumerate(dict.fromkeys(point["method"] for point in points)):
        own = [point for point in points if point["method"] == method]
        shape, colour = SYMBOLS[number % len(SYMBOLS)], COLOURS[number % len(COLOURS)]
        symbols = [shape + ("-open" if point["stage"] == "sample" else "") for point in own]
        look = {
            "symbol": symbols,
            "size": 9,
            "color": colour,
            "line": {"width": 1.5, "color": colour},
        }
        traces.append(trace(as_html(method), own, look) | {"hoverinfo": "text"})
    chosen = [point for point in points if point["chosen"]]
    ring = {"symbol": "circle-open", "size": 20, "color": "#1d2329", "line": {"width": 2}}
    return [*traces, trace("chosen", chosen, ring) | {"hoverinfo": "skip"}] if chosen else traces


def _hover(point: Report) -> str:
    """Return what is shown at a mark."""
    figures = (
        f"recall {as_figure('recall', point['recall'])}, error {as_figure('error', point['error'])}"
    )
    settings = f"<b>{as_html(point['method'])}</b> {as_html(as_settings(point))}"
    return f"{settings}<br>{as_bytes(point['bytes'])}, {figures} ({as_html(point['stage'])})"


def _layout(points: list[Report], report: Report) -> Report:
    """Return axes, legend and the line of the budget."""
    budget, measure = report["budget"], report["measure"]
    sizes = [
        max(1, size)
        for size in [*(point["bytes"] for point in points), *([budget] if budget else [])]
    ]
    low, high = min(sizes) / 1.15, max(sizes) * 1.15
    ticks = _ticks(low, high)
    span = {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "title": {"text": "bytes (logarithmic)", "standoff": 8},
    }
    names = {
        "tickvals": ticks,
        "ticktext": [re.sub(r"\.0+ ", " ", as_bytes(tick)) for tick in ticks],
        "tickangle": 0,
    }
    line = {
        "type": "line",
        "x0": budget,
        "x1": budget,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "layer": "below",
        "showlegend": True,
    }
    dashes = {"color": "#5b6671", "width": 1.5, "dash": "dash"}
    return PAPER | {
        "xaxis": AXIS | span | names,
        "yaxis": AXIS
        | {
            "title": {"text": MEANINGS[measure][0]},
            "tickformat": ".0%" if measure == "recall" else "",
        },
        "shapes": [line | {"line": dashes, "name": f"budget {as_bytes(budget)}"}] if budget else [],
    }


def _ticks(low: float, high: float) -> list[float]:
    """Return at most six round numbers between two sizes: 1, 2, 5 of each decade, or fewer; the ends if there is none."""
    inside = [
        tick
        for power in range(15)
        for tick in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)
        if low <= tick <= high
    ]
    if len(inside) > 6:
        inside = [10.0**power for power in range(15) if low <= 10.0**power <= high]
    return inside[:: -(-len(inside) // 6)] if len(inside) > 1 else [low * 1.1, high / 1.1]


def _parts(report: Report) -> str:
    """Return the bytes of each part, the largest first, each with its bar."""
    total = sum(report["parts"].values()) or 1
    parts = sorted(report["parts"].items(), key=lambda item: -item[1])
    rows = [(as_html(name), f"{size:,}", barred("share", size / total)) for name, size in parts]
    keys = report["chosen"].get("keys")
    note = f"Keys, the names of the rows, take {keys:,} bytes more." if keys else ""
    return table("Where the bytes are", ("part", "bytes", "share"), rows, note)


def _bands(report: Report) -> str:
    """Return the quality of frequent and of rare rows."""
    rows = []
    for band in report["bands"]:
        figures = (as_figure(key, band[key], 3) for key in BAND[:-1])
        rows.append(
            (as_html(band["name"]), f"{band['rows']:,}", *figures, barred("recall", band["recall"]))
        )
    note = "The share is that of all use where counts were given, else that of the rows."
    return table("Frequent and rare rows", ("band", "rows", *BAND), rows, note)


def _words(report: Report) -> str:
    """Return the scores of word files before and after."""
    kinds = {"analogy": "analogies", "similarity": "similarities"}
    rows = []
    for line in report["words"] or []:
        scores = (as_figure(line["kind"], line[when], 3) for when in ("before", "after"))
        name = f"{as_html(line['file'])}<small>{kinds.get(line['kind'], '')}</small>"
        rows.append((name, f"{line['used']:,} of {line['of']:,}", *scores))
    note = "Similarities: rank correlation with what people said, 1 is best. Analogies: share answered right."
    return table("As word vectors", ("file", "used", "before", "after"), rows, note)


def _repeat(report: Report) -> str:
    """Return the command and the foot of the page."""
    command, version = report.get("command"), as_html(report.get("version", ""))
    again = (
        f"<h2>How to repeat it</h2><pre><code>{as_html(command)}</code></pre>" if command else ""
    )
    made = f"Made by featherbed {version} in {report['seconds']:,.1f} s from {as_html(report['input']['dtype'])}."
    return f"{again}<footer>{made}</footer>"


def _tried(report: Report) -> str:
    """Return what the choice was made by, and among how many."""
    count = len({(point["method"], as_settings(point)) for point in report["curve"]})
    return (
        f"by {report['measure']} among {count:,} candidates"
        if count > 1
        else "as the only candidate"
    )
