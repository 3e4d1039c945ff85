"""The report pages of text classifiers and language models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from featherbed.report.page import (
    INTERRUPTED,
    Report,
    as_bytes,
    as_count,
    as_figure,
    as_html,
    as_number,
    as_percent,
    axis,
    bar,
    check_parts,
    command_section,
    data_section,
    history_lines,
    history_plot,
    lead,
    notes,
    page,
    settings_section,
    table,
)

SPLITS = ("test", "validation", "train")
MAX_MATRIX = 16  # classes of a confusion matrix; with more, the most frequent confusions are listed
MAX_ROWS = 30  # classes, pairs and misclassified texts shown
CORRECT, WRONG = "0, 114, 178", "213, 94, 0"  # blue and orange


def text_page(report: Report) -> str:
    """Return the page of a trained text classifier.

    ``report`` requires ``name``, ``metrics`` (test, validation and train, each with an
    ``accuracy``; ``stored``: the same for the stored files; ``baselines``: accuracies by name) and
    ``sizes`` (``file``: size of the whole model, ``parts``: sizes by name, ``float32`` and
    ``float16``: size of the model with dense rows, ``parameters`` and ``dense_parameters`` of the
    table). Optional: ``history`` (one row per epoch: ``epoch``, ``train_accuracy``,
    ``validation_accuracy``, ``train_loss``, ``validation_loss``, ``parameters``), ``model``
    (``kind``, ``table``, ``words``, ``dim``), ``classes`` (names) with ``confusion``
    (counts [true][predicted]), ``lengths``, ``wrong``, ``part`` (the split they were counted on),
    ``insight``, ``input`` (values by name), ``input_notes``, ``settings``, ``notes``, ``command``,
    ``seconds``, ``version``, ``interrupted``. All texts are escaped.

    >>> text_page({"name": "news.csv"})
    Traceback (most recent call last):
    featherbed.errors.ArgumentError: a report without metrics, sizes: give the whole report
    """
    sections = (_classes, _confusion, _lengths, _wrong)
    return _page(report, "a text classifier", "accuracy", sections)


def language_page(report: Report) -> str:
    """Return the page of a trained language model.

    ``report`` is that of ``text_page`` with ``perplexity`` instead of ``accuracy``, and optionally
    ``bands`` (perplexity by word frequency), ``speed`` (training tokens per second by name) and
    ``continuations`` (each with a ``start`` and the ``text`` that follows).

    >>> report = {"name": "ptb", "metrics": {"test": {"perplexity": 98.2}}, "sizes": {}}
    >>> "test perplexity 98.20" in language_page(report)
    True
    """
    sections = (_speed, _perplexities, _continuations)
    return _page(report, "a language model", "perplexity", sections)


def _page(
    report: Report, kind: str, score: str, sections: tuple[Callable[[Report], str], ...]
) -> str:
    check_parts(report, ("name", "metrics", "sizes"))
    full: Report = {"history": [], "classes": range(len(report.get("confusion") or []))}
    full |= {key: value for key, value in report.items() if value is not None} | {"score": score}
    order = (_lead, _scores, _history, _sizes, *sections, _insight, _data)
    name = as_html(report["name"])
    parts = [section(full) for section in (*order, settings_section, command_section)]
    return page(name, f"{name}: {kind}", parts)


def _lead(report: Report) -> str:
    """Return the headline and the paragraph below it: quality, size and the model."""
    sizes = report["sizes"]
    score = as_number((report["metrics"].get("test") or {}).get(report["score"]))
    if report["score"] == "accuracy":
        headline = "A text classifier"
        headline += "" if score is None else f" with test accuracy {as_percent(score)}"
    else:
        headline = "A language model"
        headline += "" if score is None else f" with test perplexity {score:,.2f}"
    file, dense = sizes.get("file"), sizes.get("float32")
    half = sizes.get("float16") or (dense // 2 if dense else None)
    headline += f", {as_bytes(file)} in total" if file else ""
    if file and dense and half and dense > file:
        headline += (
            f": {dense / file:,.1f} times smaller than with float32 rows, "
            f"{half / file:,.1f} than with float16"
        )
    sentences = [*_model_sentences(report), *([INTERRUPTED] if report.get("interrupted") else [])]
    return lead(f"{as_html(headline)}.", sentences) + notes(report.get("notes"))


def _model_sentences(report: Report) -> list[str]:
    """Return sentences on the table of words and its number of parameters."""
    sizes, model, sentences = report["sizes"], report.get("model") or {}, []
    if model.get("table"):
        shape = ""
        if model.get("words") and model.get("dim"):
            shape = f" of {model['words']:,} words, width {model['dim']},"
        kind = f" in a <b>{as_html(model['kind'])}</b> model" if model.get("kind") else ""
        sentences.append(f"The table{shape} is <b>{as_html(model['table'])}</b>{kind}.")
    parameters, dense = sizes.get("parameters"), sizes.get("dense_parameters")
    if parameters and dense:
        times = f", {dense / parameters:,.1f} times fewer than the {dense:,} of a dense table"
        sentences.append(f"It has {parameters:,} parameters{times if dense > parameters else ''}.")
    return sentences


def _scores(report: Report) -> str:
    """Return the scores of the three splits, of the stored files, and of baselines."""
    metrics, name, percent = report["metrics"], report["score"], report["score"] == "accuracy"
    scores = {split: (metrics.get(split) or {}).get(name) for split in SPLITS}
    stored = {"test, from the stored files": (metrics.get("stored") or {}).get(name)}
    scores = {"test": scores.pop("test"), **stored, **scores}
    scores |= {as_html(other): value for other, value in (metrics.get("baselines") or {}).items()}
    known = {
        part: value for part, score in scores.items() if (value := as_number(score)) is not None
    }
    most = 1.0 if percent else max(known.values(), default=1.0)
    rows = [
        (part, bar(as_percent(value) if percent else f"{value:,.2f}", value / most))
        for part, value in known.items()
    ]
    note = "" if percent else "Perplexity: lower is better."
    return table("Quality", ("split", name), rows, note)


def _history(report: Report) -> str:
    """Return plots by epoch of the scores, and of the table's parameters if they change."""
    plots = []
    for number, title in enumerate(("accuracy", "loss", "perplexity", "parameters")):
        columns = {split: f"{split}_{title}" for split in ("train", "validation")}
        lines = history_lines(report, columns | {title: title})
        if len({row.get(title) for row in report["history"]} - {None}) < 2:
            lines = [one for one in lines if one["name"] != title]
        heights = [value for one in lines for value in one["y"]]
        scale: Report = {"tickformat": ".0%"} if title == "accuracy" else {}
        scale |= {"rangemode": "tozero"} if title == "parameters" else {}
        if title == "perplexity" and max(heights, default=0.0) > 3 * min(heights, default=0.0):
            scale = {"type": "log", "tick0": 0, "dtick": math.log10(2), "tickformat": ",.0f"}
        plots.append(history_plot(report, f"curve{number}", lines, axis(title, **scale), 300))
    return f"<h2>Training history</h2>{''.join(plots)}" if any(plots) else ""


def _sizes(report: Report) -> str:
    """Return the size of the model by part, and of the same model with dense rows."""
    sizes = report["sizes"]
    parts = {name: int(size) for name, size in (sizes.get("parts") or {}).items() if size}
    whole = sizes.get("file") or sum(parts.values())
    if not whole:
        return ""
    rows = [(as_html(name), bar(as_bytes(size), size / whole), "") for name, size in parts.items()]
    rows.append(("whole model", as_bytes(whole), ""))
    dense = {f"with {kind} rows": sizes.get(kind) for kind in ("float32", "float16")}
    rows += [
        (name, as_bytes(size), f"{size / whole:,.1f} times as large")
        for name, size in dense.items()
        if size
    ]
    memory = {"memory when serving": "resident", "memory in training": "training"}
    rows += [(name, as_bytes(sizes[key]), "") for name, key in memory.items() if sizes.get(key)]
    return table("Size", ("part", "bytes", "comparison"), rows)


def _classes(report: Report) -> str:
    """Return precision and recall of each class."""
    names, counts = report["classes"], report.get("confusion") or []
    if not counts:
        return ""
    predicted = [sum(column) for column in zip(*counts, strict=True)]
    classes = [
        (as_html(names[n]), sum(row), row[n] / max(1, predicted[n]), row[n] / max(1, sum(row)))
        for n, row in enumerate(counts)
    ]
    note = f"Counted on the {as_html(report.get('part', 'test'))} split."
    if len(classes) > MAX_ROWS:
        note += f" The {MAX_ROWS} of {len(classes)} classes with the lowest recall."
        classes = sorted(classes, key=lambda one: one[3])[:MAX_ROWS]
    rows = [
        (name, as_count(texts), as_percent(precision), bar(as_percent(recall), recall))
        for name, texts, precision, recall in classes
    ]
    return table("Accuracy by class", ("class", "texts", "precision", "recall"), rows, note)


def _confusion(report: Report) -> str:
    """Return the confusion matrix, or the most frequent confusions of many classes."""
    names, counts = [as_html(name) for name in report["classes"]], report.get("confusion") or []
    if 0 < len(counts) <= MAX_MATRIX:
        rows = [
            (names[n], *(_shaded(value, sum(row), n == m) for m, value in enumerate(row)))
            for n, row in enumerate(counts)
        ]
        return table("Confusion matrix", ("true \\ predicted", *names), rows)
    cells = ((value, n, m) for n, row in enumerate(counts) for m, value in enumerate(row))
    pairs = sorted((cell for cell in cells if cell[1] != cell[2] and cell[0]), reverse=True)
    rows = [(names[n], as_count(value), names[m]) for value, n, m in pairs[:MAX_MATRIX]]
    return table("Most frequent confusions", ("true", "texts", "predicted"), rows, wrap=True)


def _shaded(value: int, total: int, correct: bool) -> str:
    """Return a cell of the confusion matrix; the shade is its share of the row."""
    shade = min(0.45, value / max(1, total) * (0.45 if correct else 1.8))
    color = f"rgba({CORRECT if correct else WRONG}, {shade:.3f})"
    return f"<span style='background:{color};padding:.15rem .5rem'>{value:,}</span>"


def _lengths(report: Report) -> str:
    """Return the accuracy of short and of long texts."""
    rows = [
        (
            as_html(one["name"]),
            as_count(one["texts"]),
            bar(as_percent(one["accuracy"]), one["accuracy"]),
        )
        for one in report.get("lengths") or []
    ]
    return table("Accuracy by text length", ("words", "texts", "accuracy"), rows)


def _wrong(report: Report) -> str:
    """Return the misclassified texts with the highest predicted probability."""
    rows = []
    for one in (report.get("wrong") or [])[:MAX_ROWS]:
        probability = as_number(one.get("probability"))
        sure = "" if probability is None else f"<small>{100 * probability:.1f} %</small>"
        text = f"<small>{as_html(one['text'])}</small>"
        rows.append((as_html(one["true"]), as_html(one["given"]) + sure, text))
    note = "Errors with the highest predicted probability: model errors and questionable labels."
    return table("Most confident errors", ("true", "predicted", "text"), rows, note, wrap=True)


def _speed(report: Report) -> str:
    """Return the training speed."""
    speeds = {name: as_number(value) for name, value in (report.get("speed") or {}).items()}
    known = {name: value for name, value in speeds.items() if value}
    most = max(known.values(), default=1.0)
    rows = [(as_html(name), bar(f"{value:,.0f}", value / most)) for name, value in known.items()]
    return table("Training speed", ("model", "tokens per second"), rows)


def _perplexities(report: Report) -> str:
    """Return the perplexity of rare and of frequent words."""
    bands = [(one, math.log(max(1.0, one["perplexity"]))) for one in report.get("bands") or []]
    most = max((size for _, size in bands), default=1.0) or 1.0
    rows = [
        (
            as_html(one["name"]),
            as_figure("share", one["share"]),
            bar(f"{one['perplexity']:,.1f}", size / most),
        )
        for one, size in bands
    ]
    note = "By the number of occurrences in training; bars are logarithmic."
    head = ("occurrences in training", "of all tokens", "perplexity")
    return table("Perplexity by frequency", head, rows, note)


def _continuations(report: Report) -> str:
    """Return sample continuations of a few words."""
    texts = [
        f"<p><b>{as_html(one['start'])}</b> {as_html(one['text'])}</p>"
        for one in report.get("continuations") or []
    ]
    return f"<h2>Sample continuations</h2>{''.join(texts)}" if texts else ""


def _insight(report: Report) -> str:
    """Return the sections on the table of words."""
    insight = report.get("insight") or {}
    sections = (_bands, _shared_rows, _anchors, _pairs, _codes, _neighbors)
    return "".join(section(insight) for section in sections)


def _join(words: Iterable[str]) -> str:
    return ", ".join(as_html(word) for word in words)


def _bands(insight: Report) -> str:
    """Return the cost of the rows of rare and of frequent words, and the share of zero rows."""
    bands, unit = insight.get("bands") or [], insight.get("unit", "bits")
    labels = {"zero": "zero rows", "kept": "with a row"}
    shown = {key: label for key, label in labels.items() if any(band.get(key) for band in bands)}
    rows = []
    for band in bands:
        shares = (bar(as_figure("share", band[key]), band[key]) for key in shown)
        cost, share = f"{band['cost']:,.1f}", as_figure("share", band["share"])
        rows.append((as_html(band["name"]), as_count(band["words"]), share, cost, *shares))
    head = ("occurrences in training", "words", "of all tokens", f"{as_html(unit)} per row")
    note = "Stored size of a row by the number of occurrences of its word."
    return table("Rows by word frequency", (*head, *shown.values()), rows, note)


def _shared_rows(insight: Report) -> str:
    """Return words without a row of their own, beside words of the same frequency with one."""
    bands = insight.get("bands") or []
    dropped = any("kept" in band for band in bands)
    without, other = ("dropped_words", "kept_words") if dropped else ("zero_words", "other_words")
    rows = []
    for band in bands:
        if band.get(without):
            owners = _join(band.get(other) or []) or "none"
            cell = f"{_join(band[without])}<small>with a row: {owners}</small>"
            rows.append((as_html(band["name"]), cell))
    zero, note = insight.get("zero") or {}, ""
    if not dropped and zero.get("rows"):
        note = f"{zero['rows']:,} words have a row of zeros."
        if zero.get("once"):
            note += f" {as_figure('share', zero['once'])} of them occur once in training."
    title = "Words that share a row" if dropped else "Words with a row of zeros"
    return table(title, ("occurrences in training", "examples"), rows, note, wrap=True)


def _anchors(insight: Report) -> str:
    """Return the anchors with their most specific words and their largest weights."""
    found, rows = insight.get("anchors") or {}, []
    for one in found.get("shown") or []:
        specific, largest = (_join([top["word"] for top in one[key]]) for key in ("special", "top"))
        name = as_html(one["anchor"] if one["word"] is None else one["word"])
        rows.append((name, as_count(one["leads"]), f"{specific}<small>{largest}</small>"))
    note = (
        "Number of words whose largest weight is on the anchor, and its most specific words: a "
        "large weight on the anchor and little on others. In gray, the words with the largest "
        "weights."
    )
    if rows and len(rows) < found["total"]:
        note += f" {len(rows)} of {found['total']:,} anchors are shown."
    return table("Anchors", ("anchor", "words", "specific words"), rows, note, wrap=True)


def _pairs(insight: Report) -> str:
    """Return the largest weights of the table."""
    pairs = []
    for one in (insight.get("pairs") or [])[:MAX_ROWS]:
        anchor = one["anchor"] if one["of"] is None else one["of"]
        pairs.append(as_html(f"{one['word']} – {anchor} ({one['weight']:.3g})"))
    note = "Word and anchor; the weight of an anchor for itself is left out."
    shown = f"<h2>Largest weights</h2><p class=soft>{note}</p><p>{'; '.join(pairs)}</p>"
    return shown if pairs else ""


def _codes(insight: Report) -> str:
    """Return the usage of codes, and words that share most of their codes."""
    found: Any = insight.get("codes")
    if not found:
        return ""
    parts = found["parts"]
    used, even = (as_figure("share", found[name]) for name in ("used", "even"))
    note = (
        f"{parts} codes per word, each one of {found['choices']}: {used} of the choices are used, "
        f"with the entropy of {even} of them at equal frequency."
    )
    if found.get("distinct") and "rows" in insight:
        note += f" {insight['rows']:,} words have {found['distinct']:,} different codes."
    rows = []
    for one in found["shared"]:
        others = _join(f"{other['word']} ({other['same']})" for other in one["others"])
        rows.append((as_html(one["word"]), others))
    head = ("word", f"codes in common, of {parts}")
    return table("Words with similar codes", head, rows, note, wrap=True)


def _neighbors(insight: Report) -> str:
    """Return the nearest words of some words."""
    rows = []
    for one in insight.get("neighbours") or []:
        nearest = _join(f"{other['word']} {other['cosine']:.2f}" for other in one["nearest"])
        rows.append((as_html(one["word"]), nearest))
    head = ("word", "nearest words by cosine similarity")
    return table("Nearest words", head, rows, "Computed from the stored rows.", wrap=True)


def _data(report: Report) -> str:
    return data_section(report.get("input") or {}, report.get("input_notes"))
