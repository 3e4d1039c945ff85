"""The report of a compression: an HTML page, and a few lines for the terminal."""

from __future__ import annotations

import math
import re
from typing import Any

from featherbed.errors import ArgumentError
from featherbed.report.page import (
    AXIS,
    COLORS,
    LAYOUT,
    NONE,
    SYMBOLS,
    Report,
    as_bytes,
    as_figure,
    as_html,
    as_settings,
    bar,
    check_parts,
    command_section,
    page,
    plot,
    table,
)

PARTS = (
    *("input", "target", "measure", "budget", "chosen", "parts"),
    *("quality", "bands", "curve", "words", "seconds"),
)
METRICS = {
    "recall": ("recall", "Share of the ten nearest neighbors of a row that are preserved."),
    "error": ("error", "Squared error relative to the squared norm of the rows; 0 is exact."),
    "cosine": ("cosine", "Mean cosine similarity between original and stored rows; 1 is exact."),
    "overlap": ("overlap", "Eigenspace overlap: preserved share of the column space; 1 is all."),
    "weighted_recall": ("weighted recall", "Recall with rows weighted by frequency."),
    "weighted_error": ("weighted error", "Error with rows weighted by frequency."),
}
BAND_METRICS = ("share", "error", "cosine", "recall")
MAX_BANDS, MAX_FILES = 7, 5  # in the text


def compression_page(report: Report) -> str:
    """Return the page of a compression from the report that ``fb.compress`` attaches.

    All texts in the report are escaped.

    >>> compression_page({"input": {}, "target": "ratio=20", "measure": "recall", "budget": None})
    Traceback (most recent call last):
    featherbed.errors.ArgumentError: a report without chosen, parts, quality, bands, curve, words, \
seconds: give the whole report
    """
    _check(report)
    name = as_html(report["input"]["name"])
    sections = (_choice, _quality, _curve, _parts, _bands, _words)
    source = f" from {as_html(report['input']['dtype'])}"
    parts = [*(section(report) for section in sections), command_section(report, source)]
    return page(name, f"{name}, {_file_ratio(report):,.1f} times smaller", parts)


def compression_text(report: Report) -> str:
    """Return the report as at most 25 lines of at most 100 characters.

    The command is left out if it does not fit into a line.
    """
    _check(report)
    source, chosen, command = report["input"], report["chosen"], report.get("command", "")
    keys = f"; keys {as_bytes(chosen['keys'])}" if chosen.get("keys") else ""
    parts = sorted(report["parts"].items(), key=lambda item: -item[1])
    more = f", {len(parts) - 2} more" if parts[2:] else ""
    lines = [
        f"{source['name']} ({source['dtype']})",
        _headline(report, "x", "->"),
        f"method      {chosen['method']}({as_settings(chosen)})",
        f"target      {report['target']}; chosen {_candidates(report)} in "
        f"{report['seconds']:,.1f} s",
        f"table       {as_bytes(chosen['bytes'])}, {chosen['ratio']:,.1f} times smaller than "
        f"float32 ({as_bytes(source['bytes_float32'])}), {chosen['ratio_float16']:,.1f} times "
        f"than float16{keys}",
        *_quality_lines(report["quality"]),
        "bytes       " + ", ".join(f"{name} {as_bytes(size)}" for name, size in parts[:2]) + more,
        *_band_lines(report["bands"]),
        *_word_lines(report["words"] or []),
        *([f"command     {command}"] if command and len(command) <= 88 else []),
    ]
    clean = ("".join(letter if letter.isprintable() else "?" for letter in line) for line in lines)
    return "\n".join(line if len(line) <= 100 else line[:97] + "..." for line in clean)


def _quality_lines(quality: dict[str, float]) -> list[str]:
    known = [name for name in METRICS if name in quality]
    texts = [f"{name} {as_figure(name, quality[name])}" for name in known]
    plain = [text for text in texts if not text.startswith("weighted_")]
    weighted = [text.removeprefix("weighted_") for text in texts if text not in plain]
    lines = ["quality     " + ", ".join(plain)]
    return lines + (["weighted    " + ", ".join(weighted)] if weighted else [])


def _band_lines(bands: list[Report]) -> list[str]:
    lines = [f"{'rows':<30}{'share':>9}{'error':>9}{'cosine':>9}{'recall':>9}"] if bands else []
    for band in bands[:MAX_BANDS]:
        metrics = "".join(f"{as_figure(name, band[name], 3):>9}" for name in BAND_METRICS)
        lines.append(f"  {band['name'][:27]:<28}{metrics}")
    return lines + ([f"  and {len(bands) - MAX_BANDS} more"] if bands[MAX_BANDS:] else [])


def _word_lines(files: list[Report]) -> list[str]:
    lines = [f"{'words':<30}{'used':>18}{'before':>9}{'after':>9}"] if files else []
    for one in files[:MAX_FILES]:
        before, after = (as_figure(one["kind"], one[when], 3) for when in ("before", "after"))
        used = f"{one['used']:,} of {one['of']:,}"
        lines.append(f"  {one['file'][:27]:<28}{used:>18}{before:>9}{after:>9}")
    return lines + ([f"  and {len(files) - MAX_FILES} more"] if files[MAX_FILES:] else [])


def _check(report: Report) -> None:
    check_parts(report, PARTS)
    if report["measure"] not in ("recall", "error"):
        raise ArgumentError(
            f"a report with measure {report['measure']!r}: it is 'recall' or 'error'"
        )


def _file_ratio(report: Report) -> float:
    """Return the compression ratio of the file against float32 rows, keys included in both."""
    chosen, keys = report["chosen"], report["chosen"].get("keys", 0)
    if not keys:
        return float(chosen["ratio"])
    return float((report["input"]["bytes_float32"] + keys) / (chosen["bytes"] + keys))


def _headline(report: Report, times: str, arrow: str) -> str:
    """Return sizes before and after, keys included, and the recall, in one sentence."""
    source, chosen = report["input"], report["chosen"]
    recall, keys = as_figure("recall", report["quality"].get("recall"), 0), chosen.get("keys", 0)
    sizes = f"{as_bytes(source['bytes_float32'] + keys)} {arrow} {as_bytes(chosen['bytes'] + keys)}"
    shape = f"{source['rows']:,} {times} {source['dim']:,}{' with keys' if keys else ''}"
    text = f"{shape}: {sizes}, {_file_ratio(report):,.1f} times smaller"
    if recall == NONE:
        return text
    return f"{text}; {recall} of {'ten' if keys else 'the ten nearest'} neighbors preserved"


def _candidates(report: Report) -> str:
    """Return the metric of the choice and the number of candidates."""
    count = len({(point["method"], as_settings(point)) for point in report["curve"]})
    if count < 2:
        return "as the only candidate"
    return f"by error among {count:,} candidates"


def _choice(report: Report) -> str:
    """Return the headline, the target and the chosen method."""
    chosen, budget = report["chosen"], report["budget"]
    apart = " without keys" if chosen.get("keys") else ""
    limit = "" if budget is None else f" (at most {as_bytes(budget)}{apart})"
    settings = f" with {as_html(as_settings(chosen))}" if chosen["settings"] else ""
    without = "A"
    if chosen.get("keys"):
        without = (
            f"Keys take {as_bytes(chosen['keys'])}. Without them it is {chosen['ratio']:,.1f} "
            "times smaller than float32 rows; a"
        )
    return (
        f"<p class=lead>{as_html(_headline(report, '×', '→'))}</p>\n"
        f"<p>Target: <b>{as_html(report['target'])}</b>{limit}. "
        f"Chosen: <b>{as_html(chosen['method'])}</b>{settings}, {_candidates(report)}. "
        f"{without}gainst float16 rows it is {chosen['ratio_float16']:,.1f} times smaller.</p>"
    )


def _quality(report: Report) -> str:
    quality = report["quality"]
    rows = [
        (f"{label}<small>{meaning}</small>", as_figure(name, quality[name]))
        for name, (label, meaning) in METRICS.items()
        if name in quality
    ]
    return table("Quality", ("metric", "value"), rows)


def _curve(report: Report) -> str:
    """Return all candidates as a plot and as a table, or nothing if there was only one."""
    points = sorted(report["curve"], key=lambda point: point["bytes"])
    if len(points) < 2:
        return ""
    chart = plot("curve", _traces(points), _layout(points, report["budget"]), height=440)
    rows = []
    for point in points:
        mark = " <mark>chosen</mark>" if point["chosen"] else ""
        name = f"{as_html(point['method'])}{mark}<small>{as_html(as_settings(point))}</small>"
        error = as_figure("error", point["error"])
        rows.append((name, as_html(point["stage"]), f"{point['bytes']:,}", error))
    listed = table("", ("method", "fit", "bytes", "error"), rows)
    note = (
        "The errors used to compare candidates, relative to the norm of each row if the target "
        "is neighbors. Hollow markers are quick fits (on a sample of large matrices), solid "
        "markers full fits; the ring is the chosen candidate."
    )
    return (
        f"<h2>Candidates</h2><p class=soft>{note}</p>{chart}"
        f"<details><summary>Candidates as a table</summary>{listed}</details>"
    )


def _trace(name: str, points: list[Report], marker: Report, hover: str) -> Report:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [point["bytes"] for point in points],
        "y": [point["error"] for point in points],
        "marker": marker,
        "hovertext": [_hover_text(point) for point in points],
        "hoverinfo": hover,
    }


def _traces(points: list[Report]) -> list[Report]:
    """Return a plotly trace of markers per method, and a ring around the chosen candidate."""
    traces = []
    for number, method in enumerate(dict.fromkeys(point["method"] for point in points)):
        own = [point for point in points if point["method"] == method]
        shape, color = SYMBOLS[number % len(SYMBOLS)], COLORS[number % len(COLORS)]
        symbols = [shape + ("-open" if point["stage"] == "sample" else "") for point in own]
        marker: Report = {"symbol": symbols, "size": 9, "color": color}
        marker |= {"line": {"width": 1.5, "color": color}}
        traces.append(_trace(as_html(method), own, marker, "text"))
    chosen = [point for point in points if point["chosen"]]
    ring = {"symbol": "circle-open", "size": 20, "color": "#1d2329", "line": {"width": 2}}
    return [*traces, _trace("chosen", chosen, ring, "skip")] if chosen else traces


def _hover_text(point: Report) -> str:
    error = f"error {as_figure('error', point['error'])}"
    settings = f"<b>{as_html(point['method'])}</b> {as_html(as_settings(point))}"
    return f"{settings}<br>{as_bytes(point['bytes'])}, {error} ({as_html(point['stage'])})"


def _layout(points: list[Report], budget: int | None) -> Report:
    """Return axes, legend and the line of the budget."""
    sizes = [max(1, point["bytes"]) for point in points] + ([budget] if budget else [])
    low, high = min(sizes) / 1.15, max(sizes) * 1.15
    ticks = _ticks(low, high)
    x_axis: Report = AXIS | {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "title": {"text": "bytes (logarithmic)", "standoff": 8},
        "tickvals": ticks,
        "ticktext": [re.sub(r"\.0+ ", " ", as_bytes(tick)) for tick in ticks],
        "tickangle": 0,
    }
    y_axis: Report = AXIS | {"type": "log", "title": {"text": "error (logarithmic)"}}
    line: dict[str, Any] = {"type": "line", "x0": budget, "x1": budget, "y0": 0, "y1": 1}
    line |= {"yref": "paper", "layer": "below", "showlegend": True}
    line |= {"line": {"color": "#5b6671", "width": 1.5, "dash": "dash"}}
    shapes = [line | {"name": f"budget {as_bytes(budget)}"}] if budget else []
    return LAYOUT | {"xaxis": x_axis, "yaxis": y_axis, "shapes": shapes}


def _ticks(low: float, high: float) -> list[float]:
    """Return at most six round numbers within a range, or its ends if there are fewer than two."""
    decades = [10.0**power for power in range(15)]
    inside = [tick * m for tick in decades for m in (1, 2, 5) if low <= tick * m <= high]
    if len(inside) > 6:
        inside = [tick for tick in decades if low <= tick <= high]
    return inside[:: -(-len(inside) // 6)] if len(inside) > 1 else [low * 1.1, high / 1.1]


def _parts(report: Report) -> str:
    """Return the bytes of each part, the largest first."""
    total = sum(report["parts"].values()) or 1
    parts = sorted(report["parts"].items(), key=lambda item: -item[1])
    rows = [
        (as_html(name), f"{size:,}", bar(as_figure("share", size / total), size / total))
        for name, size in parts
    ]
    keys = report["chosen"].get("keys")
    note = f"Keys, the names of the rows, take another {keys:,} bytes." if keys else ""
    return table("Size by part", ("part", "bytes", "share"), rows, note)


def _bands(report: Report) -> str:
    """Return the quality of frequent and of rare rows."""
    rows = []
    for band in report["bands"]:
        metrics = (as_figure(key, band[key], 3) for key in BAND_METRICS[:-1])
        recall = bar(as_figure("recall", band["recall"]), band["recall"])
        rows.append((as_html(band["name"]), f"{band['rows']:,}", *metrics, recall))
    note = "The share is the share of occurrences if weights were given, otherwise of rows."
    return table("Frequent and rare rows", ("band", "rows", *BAND_METRICS), rows, note)


def _words(report: Report) -> str:
    """Return the scores on word similarity and analogy files before and after."""
    kinds = {"analogy": "analogies", "similarity": "similarities"}
    rows = []
    for one in report["words"] or []:
        scores = (as_figure(one["kind"], one[when], 3) for when in ("before", "after"))
        name = f"{as_html(one['file'])}<small>{kinds.get(one['kind'], '')}</small>"
        rows.append((name, f"{one['used']:,} of {one['of']:,}", *scores))
    note = (
        "Similarities: rank correlation with human judgments, 1 is best. "
        "Analogies: share of correct answers."
    )
    return table("Word vectors", ("file", "used", "before", "after"), rows, note)
