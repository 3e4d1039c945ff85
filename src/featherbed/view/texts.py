"""What a text classifier or a language model has learnt, as one HTML page that needs no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from featherbed.errors import ArgumentError
from featherbed.view.figures import as_bytes, as_figure, as_html
from featherbed.view.page import PAPER, page, plot, table
from featherbed.view.ratings import (
    Report,
    _axis,
    _count,
    _epochs,
    _history,
    _line,
    _plain_table,
    _repeat,
    _settings,
)

NEEDED = ("name", "metrics", "sizes")
PARTS = ("test", "validation", "train")
SQUARE = (
    16  # classes of a confusion matrix that is written out; of more, the pairs most often confused
)
SHOWN = 30  # classes in the table of classes, pairs, wrong examples
RIGHT, WRONG = "0, 114, 178", "213, 94, 0"  # blue and orange


def text_page(report: Report) -> str:
    """Return one HTML page of a trained text classifier: it holds all it needs and fetches nothing.

    ``report`` needs ``name``, ``metrics`` (test, validation and train, each with an ``accuracy``; ``stored``: the same of
    the files as they are served; ``baselines``: accuracies by name) and ``sizes`` (``file``: bytes of the whole model,
    ``parts``: its bytes by name, ``float32`` and ``float16``: bytes of the same model with plain rows, ``parameters`` and
    ``dense_parameters`` of the table). Where there is more it is shown: ``history`` (a row an epoch: ``epoch``,
    ``train_accuracy``, ``validation_accuracy``, ``train_loss``, ``validation_loss``, ``parameters``), ``model`` (``kind``,
    ``table``, ``words``, ``dim``), ``classes`` (names) with ``confusion`` (counts [true][given]), ``lengths`` and ``wrong``
    (see ``tasks.word_insight.answers``), ``part`` (what those were counted on), ``insight`` (of ``tasks.word_insight``),
    ``input`` (any figures by name), ``input_notes``, ``settings``, ``notes``, ``command``, ``seconds``, ``version``,
    ``interrupted``. Every text is shown as text, never as markup.

    >>> text_page({"name": "news.csv"})
    Traceback (most recent call last):
    featherbed.errors.ArgumentError: a report without metrics, sizes: give the whole report
    """
    return _page(report, "a text classifier", "accuracy", (_classes, _confusion, _lengths, _wrong))


def language_page(report: Report) -> str:
    """Return one HTML page of a trained language model: it holds all it needs and fetches nothing.

    ``report`` is as that of ``text_page`` with ``perplexity`` in place of ``accuracy`` (in ``metrics`` and ``history``), and
    further ``bands`` (see ``tasks.word_insight.loss_bands``), ``speed`` (tokens a second by name, of training) and
    ``continuations`` (each with a ``start`` and the ``text`` that follows).

    >>> "test perplexity 98.20" in language_page({"name": "ptb", "metrics": {"test": {"perplexity": 98.2}}, "sizes": {}})
    True
    """
    return _page(report, "a language model", "perplexity", (_speed, _tokens, _continuations))


def _page(report: Report, what: str, score: str, own: tuple[Callable[[Report], str], ...]) -> str:
    if missing := [name for name in NEEDED if name not in report]:
        raise ArgumentError(f"a report without {', '.join(missing)}: give the whole report")
    whole = {"history": [], "classes": range(len(report.get("confusion") or []))}
    whole |= {key: value for key, value in report.items() if value is not None} | {"score": score}
    makers = (_lead, _scores, _learning, _sizes, *own, _inside, _input, _settings, _repeat)
    name = as_html(report["name"])
    return page(name, f"{name}: {what}", [make(whole) for make in makers])


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _bar(text: str, share: float) -> str:
    return f"{text}<i><b style='width:{100 * min(1.0, max(0.0, share)):.1f}%'></b></i>"


def _words(
    title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]], note: str = ""
) -> str:
    """Return a table whose last column is running text."""
    return table(title, head, rows, note).replace("<table>", "<table class=text>", 1)


def _lead(report: Report) -> str:
    """Return the headline and the paragraph under it: how good, how large, of what."""
    sizes, model, said = report["sizes"], report.get("model") or {}, []
    known = _number((report["metrics"].get("test") or {}).get(report["score"]))
    if report["score"] == "accuracy":
        first = (
            "A text classifier"
            if known is None
            else f"{_percent(known)} of test texts are classified right"
        )
    else:
        first = (
            "A language model"
            if known is None
            else f"A language model with test perplexity {known:,.2f}"
        )
    file, dense = sizes.get("file"), sizes.get("float32")
    half = sizes.get("float16") or (dense // 2 if dense else None)
    first += f", by {as_bytes(file)} in all" if file else ""
    if file and dense and half and dense > file:
        first += f": {dense / file:,.1f} times smaller than with float32 rows, {half / file:,.1f} than with float16"
    if model.get("table"):
        of = (
            f" of {model['words']:,} words, width {model['dim']},"
            if model.get("words") and model.get("dim")
            else ""
        )
        kind = f" in a <b>{as_html(model['kind'])}</b> model" if model.get("kind") else ""
        said.append(f"The table{of} is <b>{as_html(model['table'])}</b>{kind}.")
    parameters, plain = sizes.get("parameters"), sizes.get("dense_parameters")
    if parameters and plain:
        times = (
            f", {plain / parameters:,.1f} times fewer than the {plain:,} of plain rows"
            if plain > parameters
            else ""
        )
        said.append(f"It has {parameters:,} parameters{times}.")
    if report.get("interrupted"):
        said.append("<b>Training was interrupted</b>: this is the best epoch until then.")
    notes = "".join(f"<p class=soft>{as_html(note)}</p>" for note in report.get("notes") or [])
    return (
        f"<p class=lead>{as_html(first)}.</p>"
        + (f"<p>{' '.join(said)}</p>" if said else "")
        + notes
    )


def _scores(report: Report) -> str:
    """Return the scores of the three parts, of what is stored, and of what they stand against."""
    metrics, name, shares = report["metrics"], report["score"], report["score"] == "accuracy"
    lines = [(part, (metrics.get(part) or {}).get(name)) for part in PARTS]
    lines.insert(
        1, ("test, by the files as they are served", (metrics.get("stored") or {}).get(name))
    )
    lines += [(as_html(other), value) for other, value in (metrics.get("baselines") or {}).items()]
    known = [(what, value) for what, given in lines if (value := _number(given)) is not None]
    most = 1.0 if shares else max((value for _, value in known), default=1.0)
    rows = [
        (what, _bar(_percent(value) if shares else f"{value:,.2f}", value / most))
        for what, value in known
    ]
    return table(
        "How good it is", ("part", name), rows, "" if shares else "Perplexity: less is better."
    )


def _learning(report: Report) -> str:
    """Return drawings of the scores, and of the table's size where it changes, by epoch."""
    parts = []
    for number, title in enumerate(("accuracy", "loss", "perplexity", "parameters")):
        named = [(part, _history(report, f"{part}_{title}")) for part in ("train", "validation")]
        named += [(title, values)] if len(set((values := _history(report, title))[1])) > 1 else []
        traces = [
            _line(part, *values, n) for n, (part, values) in enumerate(named) if len(values[0]) > 1
        ]
        heights = [value for trace in traces for value in trace["y"]]
        steep = title == "perplexity" and max(heights, default=0.0) > 3 * min(heights, default=0.0)
        doubling = {"type": "log", "tick0": 0, "dtick": math.log10(2), "tickformat": ",.0f"}
        scale: Report = {"tickformat": ".0%"} if title == "accuracy" else doubling if steep else {}
        scale |= {"rangemode": "tozero"} if title == "parameters" else {}
        layout = PAPER | {"xaxis": _epochs(report), "yaxis": _axis(title, **scale)}
        parts += [plot(f"curve{number}", traces, layout, 300)] if traces else []
    return f"<h2>Learning by epoch</h2>{''.join(parts)}" if parts else ""


def _sizes(report: Report) -> str:
    """Return the bytes of the model by part, and of the same model with plain rows."""
    sizes = report["sizes"]
    parts = {name: int(size) for name, size in (sizes.get("parts") or {}).items() if size}
    whole = sizes.get("file") or sum(parts.values())
    if not whole:
        return ""
    rows = [(as_html(name), _bar(as_bytes(size), size / whole), "") for name, size in parts.items()]
    rows.append(("the whole model", as_bytes(whole), ""))
    plain = {"with float32 rows": sizes.get("float32"), "with float16 rows": sizes.get("float16")}
    rows += [
        (name, as_bytes(size), f"{size / whole:,.1f} times as large")
        for name, size in plain.items()
        if size
    ]
    more = {
        "in memory when serving": sizes.get("resident"),
        "in memory in training": sizes.get("training"),
    }
    rows += [(name, as_bytes(size), "") for name, size in more.items() if size]
    return table("How large it is", ("part", "bytes", "against it"), rows)


def _classes(report: Report) -> str:
    """Return how often each class is found (recall), and how often its name is right where it is given (precision)."""
    names, counts = report["classes"], report.get("confusion") or []
    if not counts:
        return ""
    given = [sum(column) for column in zip(*counts, strict=True)]
    found = [
        (sum(row), row[n] / max(1, sum(row)), row[n] / max(1, given[n]), n)
        for n, row in enumerate(counts)
    ]
    worst = sorted(found, key=lambda one: one[1])[:SHOWN] if len(found) > SHOWN else found
    rows = [
        (as_html(names[n]), _count(all_), _percent(said), _bar(_percent(share), share))
        for all_, share, said, n in worst
    ]
    note = f"Counted on the {as_html(report.get('part', 'test'))} part."
    note += (
        f" The {SHOWN} of {len(found)} classes that are found least." if len(found) > SHOWN else ""
    )
    return table("Accuracy by class", ("class", "texts", "right when given", "found"), rows, note)


def _confusion(report: Report) -> str:
    """Return what is taken for what."""
    names, counts = [as_html(name) for name in report["classes"]], report.get("confusion") or []
    if 0 < len(counts) <= SQUARE:
        rows = []
        for n, row in enumerate(counts):
            shades = [
                min(0.45, value / max(1, sum(row)) * (0.45 if n == m else 1.8))
                for m, value in enumerate(row)
            ]
            colours = [
                f"rgba({RIGHT if n == m else WRONG}, {shade:.3f})" for m, shade in enumerate(shades)
            ]
            cells = (
                f"<span style='background:{c};padding:.15rem .5rem'>{v:,}</span>"
                for v, c in zip(row, colours, strict=True)
            )
            rows.append((names[n], *cells))
        return table("What is taken for what", ("true \\ given", *names), rows)
    pairs = [
        (value, n, m)
        for n, row in enumerate(counts)
        for m, value in enumerate(row)
        if n != m and value
    ]
    lines = [
        (names[n], _count(value), names[m]) for value, n, m in sorted(pairs, reverse=True)[:SQUARE]
    ]
    return _words(
        "What is taken for what",
        ("true", "texts", "given"),
        lines,
        "The pairs most often confused.",
    )


def _lengths(report: Report) -> str:
    """Return the accuracy of short and of long texts."""
    found = [
        (as_html(one["name"]), _count(one["texts"]), one["accuracy"])
        for one in report.get("lengths") or []
    ]
    rows = [(name, texts, _bar(_percent(share), share)) for name, texts, share in found]
    return table("Accuracy by length of the text", ("words", "texts", "right"), rows)


def _wrong(report: Report) -> str:
    """Return the texts it is surest of and wrong about."""
    rows = []
    for one in (report.get("wrong") or [])[:SHOWN]:
        sure = _number(one.get("probability"))
        given = as_html(one["given"]) + (
            "" if sure is None else f"<small>{100 * sure:.1f} %</small>"
        )
        rows.append((as_html(one["true"]), given, f"<small>{as_html(one['text'])}</small>"))
    note = "The texts whose wrong answer it was surest of: mistakes of the model, and labels one may doubt."
    return _words("Most confidently wrong", ("true", "given", "text"), rows, note)


def _speed(report: Report) -> str:
    """Return the tokens that training read a second."""
    speed = {name: _number(value) for name, value in (report.get("speed") or {}).items()}
    most = max((value for value in speed.values() if value), default=1.0)
    rows = [
        (as_html(name), _bar(f"{value:,.0f}", value / most))
        for name, value in speed.items()
        if value
    ]
    return table("How fast it trains", ("model", "tokens a second"), rows)


def _tokens(report: Report) -> str:
    """Return the perplexity of rare and of frequent words."""
    bands = [(one, math.log(max(1.0, one["perplexity"]))) for one in report.get("bands") or []]
    most = max((size for _, size in bands), default=1.0) or 1.0
    rows = [
        (
            as_html(one["name"]),
            as_figure("share", one["share"]),
            _bar(f"{one['perplexity']:,.1f}", size / most),
        )
        for one, size in bands
    ]
    note = "By how often a word occurs in training; bars are logarithmic."
    return table(
        "Perplexity by frequency", ("times in training", "of all tokens", "perplexity"), rows, note
    )


def _continuations(report: Report) -> str:
    """Return what the model writes after a few words."""
    texts = [
        f"<p><b>{as_html(one['start'])}</b> {as_html(one['text'])}</p>"
        for one in report.get("continuations") or []
    ]
    return f"<h2>How it goes on</h2>{''.join(texts)}" if texts else ""


def _listed(words: Iterable[str]) -> str:
    return ", ".join(as_html(word) for word in words)


def _inside(report: Report) -> str:
    """Return the look inside: rows by frequency, words without a row, anchors, pairs, codes, nearest words."""
    insight = report.get("insight") or {}
    return "".join(
        make(insight) for make in (_bands, _empty, _anchors, _pairs, _codes, _neighbours)
    )


def _bands(insight: Report) -> str:
    """Return what the rows of rare and of frequent words cost, and how many of them are zero or shared."""
    bands, unit = insight.get("bands") or [], insight.get("unit", "bits")
    asked = {"zero": "zero rows", "kept": "with a row"}
    shown = {key: head for key, head in asked.items() if any(band.get(key) for band in bands)}
    rows = [
        (
            *(
                as_html(band["name"]),
                _count(band["words"]),
                as_figure("share", band["share"]),
                f"{band['cost']:,.1f}",
            ),
            *(_bar(as_figure("share", band[key]), band[key]) for key in shown),
        )
        for band in bands
    ]
    head = (
        "times in training",
        "words",
        "of all tokens",
        f"{as_html(unit)} a row",
        *shown.values(),
    )
    return table(
        "Rows of rare and of frequent words",
        head,
        rows,
        "What is stored for each word, by how often it occurs.",
    )


def _empty(insight: Report) -> str:
    """Return examples of words without a row of their own, and of equally rare ones that have one."""
    dropped = any("kept" in band for band in insight.get("bands") or [])
    none, some = ("dropped_words", "kept_words") if dropped else ("zero_words", "other_words")
    rows = [
        (
            as_html(band["name"]),
            f"{_listed(band[none])}<small>with a row: {_listed(band.get(some) or []) or 'none'}</small>",
        )
        for band in insight.get("bands") or []
        if band.get(none)
    ]
    zero = insight.get("zero") or {}
    note = "" if dropped or not zero.get("rows") else f"{zero['rows']:,} words have a row of zeros."
    note += (
        f" {as_figure('share', zero['once'])} of them occur once in training."
        if note and zero.get("once")
        else ""
    )
    title = "Words that share a row" if dropped else "Words with a row of zeros"
    return _words(title, ("times in training", "some of them"), rows, note)


def _anchors(insight: Report) -> str:
    """Return the anchors with the words they induce."""
    found = insight.get("anchors") or {}
    rows = []
    for one in found.get("shown") or []:
        own, heavy = (_listed([top["word"] for top in one[key]]) for key in ("special", "top"))
        name = as_html(one["anchor"] if one["word"] is None else one["word"])
        rows.append((name, _count(one["leads"]), f"{own}<small>{heavy}</small>"))
    more = (
        f" {len(rows)} of {found['total']:,} anchors are shown."
        if rows and len(rows) < found["total"]
        else ""
    )
    note = "How many words have the anchor as their largest weight, and the words that are most its own: a large weight and "
    note += (
        f"little of other anchors. Below them, in grey, those with the largest weights alone.{more}"
    )
    return _words("What the anchors stand for", ("anchor", "words", "induces"), rows, note)


def _pairs(insight: Report) -> str:
    """Return the largest weights between a word and an anchor."""
    found = (insight.get("pairs") or [])[:SHOWN]
    ends = [
        (one["word"], one["anchor"] if one["of"] is None else one["of"], one["weight"])
        for one in found
    ]
    pairs = [as_html(f"{word} – {anchor} ({weight:.3g})") for word, anchor, weight in ends]
    note = "Word and anchor, an anchor's weight for itself left out."
    return (
        f"<h2>Largest weights</h2><p class=soft>{note}</p><p>{'; '.join(pairs)}</p>"
        if pairs
        else ""
    )


def _codes(insight: Report) -> str:
    """Return how codes are used, and the words that share most of theirs."""
    found = insight.get("codes")
    if not found:
        return ""
    parts = found["parts"]
    lists = [
        (one["word"], [f"{other['word']} ({other['same']})" for other in one["others"]])
        for one in found["shared"]
    ]
    rows = [(as_html(word), _listed(others)) for word, others in lists]
    note = f"{parts} codes a word, each one of {found['choices']}: {as_figure('share', found['used'])} of choices are used, as "
    note += f"evenly as {as_figure('share', found['even'])} of them at equal frequencies."
    distinct = found.get("distinct")
    note += (
        f" {insight['rows']:,} words have {distinct:,} different codes."
        if distinct and "rows" in insight
        else ""
    )
    return _words(
        "Words with nearly the same codes", ("word", f"codes in common, of {parts}"), rows, note
    )


def _neighbours(insight: Report) -> str:
    """Return the words whose rows point the same way."""
    found = [(one["word"], one["nearest"]) for one in insight.get("neighbours") or []]
    rows = [
        (as_html(word), _listed(f"{one['word']} {one['cosine']:.2f}" for one in near))
        for word, near in found
    ]
    return _words(
        "Nearest words", ("word", "nearest, by cosine"), rows, "Of the rows as they are stored."
    )


def _input(report: Report) -> str:
    """Return what was read."""
    notes = "".join(
        f"<p class=soft>{as_html(note)}</p>" for note in report.get("input_notes") or []
    )
    lines = report.get("input") or {}
    return (_plain_table("What was read", ("", ""), lines) + notes) if lines or notes else ""
