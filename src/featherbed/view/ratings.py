"""What a recommender has learnt from ratings, as one HTML page that needs no network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from featherbed.errors import ArgumentError
from featherbed.view.figures import NONE, as_bytes, as_figure, as_html
from featherbed.view.page import AXIS, COLOURS, PAPER, barred, page, plot, table

Report = dict[str, Any]

NEEDED = ("name", "rows", "metrics", "history", "sizes")
SIDES = ("users", "items")
COUNTS = {"lines": "lines read", "duplicates": "duplicate pairs"}
MOST_EPOCHS = 500  # drawn in a curve
FEW = 10  # epochs, each of which is marked


def ratings_page(report: Report) -> str:
    """Return one HTML page of a trained recommender: it holds all it needs and fetches nothing.

    ``report`` needs a ``name``, ``rows`` (users, items), ``metrics`` (test, validation and train, each with an ``mse``),
    ``history`` (a row an epoch) and ``sizes`` (file, resident, training, parameters, float32, keys: under ``users`` and
    ``items`` for each, or beside them for both together; ``whole`` and ``float32_whole``: all files
    that recommending needs, ``seen`` and ``titles``: some of them); more is shown where given:
    ``insight`` (of ``tasks.insight``), ``model``, ``input``, ``split``, ``settings``, ``warnings``,
    ``notes``, ``command``, ``seconds``, ``version``, ``interrupted``. Every text is shown as text,
    never as markup.

    >>> ratings_page({"name": "ratings.csv", "rows": {}, "metrics": {}})
    Traceback (most recent call last):
    featherbed.errors.ArgumentError: a report without history, sizes: give the whole report
    """
    missing = [name for name in NEEDED if name not in report]
    if missing:
        raise ArgumentError(f"a report without {', '.join(missing)}: give the whole report")
    makers = (
        _lead,
        _errors,
        _curves,
        _nonzeros,
        _sizes,
        _bands,
        _cost,
        _anchors,
        _input,
        _settings,
        _repeat,
    )
    name = as_html(report["name"])
    return page(name, f"{name}: a recommender", [make(report) for make in makers])


def _mse(report: Report, part: str) -> float | None:
    value = (report["metrics"].get(part) or {}).get("mse")
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _whole_size(report: Report, what: str) -> int | None:
    """Return a size of both tables together: as given, or of both sides; None where one of them does not tell."""
    given = report["sizes"].get(what)
    if given is not None:
        return int(given)
    found = [(report["sizes"].get(side) or {}).get(what) for side in SIDES]
    known = [int(size) for size in found if size is not None]
    return sum(known) if len(known) == len(SIDES) else None


def _lead(report: Report) -> str:
    """Return the headline and the paragraph under it: what was trained, how large it is, how good."""
    rows, model, insight = report["rows"], report.get("model") or {}, report.get("insight") or {}
    error, base = _mse(report, "test"), insight.get("baselines") or {}
    width = f", rows of width {model['dim']}" if "dim" in model else ""
    if model.get("factors") == 0:
        width = ", biases only: no factors are stored"
    first = f"{rows.get('users', 0):,} users and {rows.get('items', 0):,} items{width}"
    whole, dense = _shipped(report)
    if whole and dense:
        first += f": {as_bytes(whole)} in all, {as_bytes(dense)} with float32 rows"
        first += f", {dense / whole:,.1f} times smaller" if dense > whole else ""
    lead = (
        f"<p class=lead>{as_html(first)}{'' if error is None else f'; test error {error:.4f}'}.</p>"
    )
    said = []
    if "users" in model and "items" in model:
        said.append(
            f"Users are <b>{as_html(model['users'])}</b>, items <b>{as_html(model['items'])}</b>."
        )
    if error is not None and base.get("mean") and base.get("biases"):
        gone, beyond = 1 - error / base["mean"], 1 - error / base["biases"]
        against = (
            f"{100 * beyond:.1f} % less than" if beyond >= 0 else f"{-100 * beyond:.1f} % more than"
        )
        said.append(
            f"The mean squared error of the test ratings is {error:.4f}: {100 * gone:.1f} % less than the {base['mean']:.4f} "
            f"of always answering the mean, and {against} the {base['biases']:.4f} of biases of users and items alone."
        )
    said += _parts(report)
    if report.get("interrupted"):
        said.append("<b>Training was interrupted</b>: this is the best epoch until then.")
    said += [f"<b>{_sentence(line)}</b>" for line in report.get("warnings") or []]
    said += [as_html(note) for note in report.get("notes") or []]
    return lead + (f"<p>{' '.join(said)}</p>" if said else "")


def _shipped(report: Report) -> tuple[int | None, int | None]:
    """Return the bytes of all files that recommending needs, as they are and with float32 rows."""
    file, dense, keys = (_whole_size(report, what) for what in ("file", "float32", "keys"))
    if file is None or dense is None:
        return None, None
    whole = report["sizes"].get("whole") or file + (keys or 0)
    return whole, report["sizes"].get("float32_whole") or whole - file + dense


def _parts(report: Report) -> list[str]:
    """Return sentences on the parts of the files: tables, keys, rated items, titles."""
    file, dense = _whole_size(report, "file"), _whole_size(report, "float32")
    if not file or not dense:
        return []
    times = f", {dense / file:,.1f} times smaller" if dense > file else ""
    found = [f"The tables alone take {as_bytes(file)}, as float32 rows {as_bytes(dense)}{times}."]
    others = {"keys (the names of users and items)": _whole_size(report, "keys")}
    others |= {"items rated in training": report["sizes"].get("seen")}
    others |= {"titles": report["sizes"].get("titles")}
    listed = [f"{name} take {as_bytes(size)}" for name, size in others.items() if size]
    return [*found, f"The {', the '.join(listed)}."] if listed else found


def _sentence(text: str) -> str:
    return f"{as_html(text[:1].upper() + text[1:])}."


def _errors(report: Report) -> str:
    """Return the table of errors of the three parts, and of what they stand against."""
    base = (report.get("insight") or {}).get("baselines") or {}
    lines = [(f"{part} ratings", _mse(report, part)) for part in ("test", "validation", "train")]
    lines += [
        ("test, biases of users and items alone", base.get("biases")),
        ("test, always the mean", base.get("mean")),
    ]
    worst = max((value for _, value in lines if value), default=1.0)
    rows = [
        (name, f"{as_figure('rmse', math.sqrt(value))}", _bar(value, worst))
        for name, value in lines
        if value is not None
    ]
    return table("How good it is", ("error on", "RMSE", "MSE"), rows)


def _bar(value: float, most: float) -> str:
    return barred("", value / most).replace(as_figure("", value / most), as_figure("", value), 1)


def _history(report: Report, name: str) -> tuple[list[int], list[float]]:
    """Return epochs (from 1) and values of a column of the history, thinned out where there are very many."""
    rows = [
        row
        for row in report["history"]
        if isinstance(row.get(name), int | float) and math.isfinite(row[name])
    ]
    step = -(-len(rows) // MOST_EPOCHS) or 1
    kept = rows[::step] + ([rows[-1]] if rows and (len(rows) - 1) % step else [])
    return [int(row.get("epoch", 0)) + 1 for row in kept], [float(row[name]) for row in kept]


def _line(name: str, x: list[Any], y: list[float], number: int) -> Report:
    colour = COLOURS[number % len(COLOURS)]
    mode = "lines+markers" if len(x) <= 60 else "lines"
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": x,
        "y": y,
        "line": {"color": colour},
        "marker": {"size": 5},
    }


def _axis(title: str, **more: Any) -> Report:
    return AXIS | {"title": {"text": title, "standoff": 8}} | more


def _epochs(report: Report) -> Report:
    """Return the axis of epochs, a mark for each where they are few."""
    return _axis("epoch", tickformat="d", **({"dtick": 1} if len(report["history"]) <= FEW else {}))


def _curves(report: Report) -> str:
    """Return the errors by epoch."""
    columns = {"train (on the way)": "train_mse", "validation": "validation_mse"}
    traces = [
        _line(name, *_history(report, column), n)
        for n, (name, column) in enumerate(columns.items())
    ]
    traces = [trace for trace in traces if len(trace["x"]) > 1]
    if not traces:
        return ""
    layout = PAPER | {"xaxis": _epochs(report), "yaxis": _axis("mean squared error")}
    drawn = plot("errors", traces, layout, 340)
    return f"<h2>Error by epoch</h2><p class=soft>The epoch with the lowest validation error is kept.</p>{drawn}"


def _nonzeros(report: Report) -> str:
    """Return the weights other than zero by epoch, and the anchors where their number is found."""
    columns = {"weights other than zero": "nonzeros", "anchors": "anchors"}
    traces = [
        _line(name, *_history(report, column), n)
        for n, (name, column) in enumerate(columns.items())
    ]
    traces = [trace for trace in traces if len(trace["x"]) > 1]
    if not traces:
        return ""
    layout = PAPER | {
        "xaxis": _epochs(report),
        "yaxis": _axis(traces[0]["name"], rangemode="tozero"),
    }
    if len(traces) > 1:
        traces[1]["yaxis"] = "y2"
        layout |= {
            "yaxis2": _axis("anchors", rangemode="tozero")
            | {"tickformat": "d", "overlaying": "y", "side": "right", "showgrid": False}
        }
    return f"<h2>Size by epoch</h2>{plot('nonzeros', traces, layout, 300)}"


def _sizes(report: Report) -> str:
    """Return the four sizes of each table, and float32 and float16 rows beside them."""
    if not all(report["sizes"].get(side) for side in SIDES):
        return ""
    names = ("file", "resident", "training")
    rows = []
    for side in SIDES:
        sizes = report["sizes"][side]
        figures = (as_bytes(sizes[name]) if sizes.get(name) is not None else NONE for name in names)
        rows.append((side, *figures, _count(sizes.get("parameters"))))
    both = [_whole_size(report, name) for name in (*names, "parameters")]
    rows.append(
        ("both", *(NONE if size is None else as_bytes(size) for size in both[:3]), _count(both[3]))
    )
    dense, file = _whole_size(report, "float32"), both[0]
    if dense:
        for name, part in (("float32 rows", dense), ("float16 rows", dense // 2)):
            times = f"<small>{part / file:,.1f} times the files</small>" if file else ""
            rows.append(
                (f"{name}{times}", as_bytes(part), as_bytes(part), NONE, _count(dense // 4))
            )
    note = "Files without keys; memory when serving; memory in training with the optimizer's state; parameters as papers count."
    return table("How large it is", ("table", *names, "parameters"), rows, note)


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def _bands(report: Report) -> str:
    """Return the test error of often and of rarely rated users and items."""
    sides = (report.get("insight") or {}).get("sides") or {}
    parts = []
    for side in ("items", "users"):
        bands = (sides.get(side) or {}).get("bands") or []
        worst = max((band["mse"] for band in bands), default=1.0) or 1.0
        rows = [
            (
                as_html(band["name"]),
                _count(band["objects"]),
                as_figure("share", band["share"]),
                as_figure("", band["biases"], 3),
                _bar(band["mse"], worst),
            )
            for band in bands
        ]
        parts.append(
            table("", ("ratings in training", side, "of test", "biases alone", "MSE"), rows)
        )
    note = "By how often a user or an item stands in the training part; the test error in each band, and that of biases alone."
    return (
        f"<h2>Error by popularity</h2><p class=soft>{note}</p>{'<br>'.join(parts)}"
        if any(parts)
        else ""
    )


def _cost(report: Report) -> str:
    """Return codes (or bits) per row against popularity, for users and items."""
    sides = (report.get("insight") or {}).get("sides") or {}
    shown = [(side, sides[side]) for side in SIDES if (sides.get(side) or {}).get("bins")]
    varied = [
        one
        for one in shown
        if any(bin_["least"] != one[1]["bins"][0]["most"] for bin_ in one[1]["bins"])
    ]
    told = ", ".join(
        f"{one['mean']:,.1f} {one['unit']} a row of {side} on average" for side, one in shown
    )
    parts = []
    for number, (side, one) in enumerate(varied):
        colour = COLOURS[SIDES.index(side)]
        bins, points = one["bins"], one["points"]
        x = [_middle(bin_["low"]) for bin_ in bins]
        cloud: Report = {
            "type": "scatter",
            "mode": "markers",
            "name": f"some {side}",
            "hoverinfo": "skip",
        }
        cloud |= {"x": [max(0.5, n) for n in points["ratings"]], "y": points["cost"]}
        cloud |= {"marker": {"size": 4, "color": colour, "opacity": 0.25}}
        mean = _line("mean", x, [bin_["mean"] for bin_ in bins], 0) | {"line": {"color": "#1d2329"}}
        layout: Report = PAPER | {
            "xaxis": _axis(f"ratings in training ({side})", type="log", dtick=1)
        }
        layout |= {"yaxis": _axis(f"{one['unit']} a row", rangemode="tozero")}
        parts.append(plot(f"cost{number}", [cloud, mean], layout, 320))
    if not shown:
        return ""
    if any(one["bins"][0]["low"] == 0 for _, one in varied):
        told += "; rows without a rating in training are drawn at 0.5"
    title = "Codes per row" if all(one["unit"] == "codes" for _, one in shown) else "Bits per row"
    return f"<h2>{title} against popularity</h2><p class=soft>{as_html(told)}.</p>{''.join(parts)}"


def _middle(low: int) -> float:
    """Return the middle of a bin on a logarithmic axis: bins begin at 0, and at 1, 2 and 5 of each decade."""
    return (
        low * (math.sqrt(2.5) if str(low).startswith("2") else math.sqrt(2))
        if low > 1
        else 0.5 + low / 2
    )


def _anchors(report: Report) -> str:
    """Return the anchors of items with what they induce most."""
    found = (report.get("insight") or {}).get("anchors")
    if not found:
        return ""
    rows = [
        (
            str(one["anchor"]),
            _count(one["leads"]),
            "; ".join(as_html(top["name"]) for top in one["top"]),
        )
        for one in found["shown"]
    ]
    more = (
        f" The first {len(rows)} of {found['total']} are shown."
        if len(rows) < found["total"]
        else ""
    )
    empty = f" {found['empty']:,} items have no weight at all." if found["empty"] else ""
    pure = found.get("purity")
    said = (
        f" {as_figure('share', pure['share'])} of items are of the main group of their anchor "
        f"({as_figure('share', pure['baseline'])} if all were in one)."
        if pure
        else ""
    )
    note = f"The items that each anchor weighs most in, and how many items have it as their largest weight.{more}{empty}{said}"
    head = ("anchor", "items", "induces most")
    return table("What the anchors stand for", head, rows, note).replace(
        "<table>", "<table class=text>", 1
    )


def _plain_table(title: str, head: tuple[str, str], values: Mapping[str, Any]) -> str:
    rows = [(as_html(name), as_html(_text(value))) for name, value in values.items()]
    return table(title, head, rows).replace("<table>", "<table class=text>", 1)


def _text(value: Any) -> str:
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _input(report: Report) -> str:
    """Return what was read: columns, lines left out, and how the ratings were split."""
    given, split = report.get("input") or {}, report.get("split") or {}
    lines: dict[str, Any] = {
        f"column of {role}s": name for role, name in (given.get("columns") or {}).items()
    }
    lines |= {
        COUNTS.get(what, f"lines {what}"): number
        for what, number in (given.get("counts") or {}).items()
    }
    lines |= {"split": split["how"]} if "how" in split else {}
    lines |= {
        f"{part} ratings": split[part] for part in ("train", "validation", "test") if part in split
    }
    notes = "".join(f"<p class=soft>{as_html(note)}</p>" for note in given.get("notes") or [])
    return (_plain_table("What was read", ("", ""), lines) + notes) if lines or notes else ""


def _settings(report: Report) -> str:
    """Return the settings, folded away."""
    settings = {
        name: value for name, value in (report.get("settings") or {}).items() if value is not None
    }
    if not settings:
        return ""
    return f"<details><summary>All settings</summary>{_plain_table('', ('setting', 'value'), settings)}</details>"


def _repeat(report: Report) -> str:
    """Return the command and the foot of the page."""
    command, seconds = report.get("command"), report.get("seconds")
    again = (
        f"<h2>How to repeat it</h2><pre><code>{as_html(command)}</code></pre>" if command else ""
    )
    version = f" {as_html(report['version'])}" if report.get("version") else ""
    time = "" if seconds is None else f" in {seconds:,.1f} s"
    return f"{again}<footer>Made by featherbed{version}{time}.</footer>"
