"""The report pages of text classifiers and language models, and insight into their word tables.

Insight is computed with numpy alone, from the packed table that is served. Rows are counted in
bands of word frequency, and lists are short, so that the report of a million words is no longer
than that of a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.errors import ArgumentError
from featherbed.packed import (
    NOTHING,
    Fixed,
    Hash,
    Identity,
    Ids,
    PackedTable,
    anchor_count,
    blocks,
    clusters_of,
    evenly_spaced,
    largest_pairs,
    objects_as_anchors,
    row_cost,
    strongest,
    weighted_band,
    zero_rows,
)
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
    bins_of,
    data_section,
    history_lines,
    history_plot,
    lead,
    notes,
    report_page,
    size_table,
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
    (``kind``, ``table``, ``words``, ``dim``), ``classes`` (names) with ``confusion`` (counts by
    true and predicted class), ``lengths``, ``wrong``, ``part`` (the split they were counted on),
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
    full: Report = {"classes": range(len(report.get("confusion") or [])), "score": score}
    full |= {key: value for key, value in report.items() if value is not None}
    order = (_lead, _scores, _history, _sizes, *sections, _insight, _data)
    return report_page(full, kind, (), order)


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
    dense = {f"with {kind} rows": sizes.get(kind) for kind in ("float32", "float16")}
    return size_table(parts, whole, {name: size for name, size in dense.items() if size})


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
    for one in insight.get("neighbors") or []:
        nearest = _join(f"{other['word']} {other['cosine']:.2f}" for other in one["nearest"])
        rows.append((as_html(one["word"]), nearest))
    head = ("word", "nearest words by cosine similarity")
    return table("Nearest words", head, rows, "Computed from the stored rows.", wrap=True)


def _data(report: Report) -> str:
    return data_section(report.get("input") or {}, report.get("input_notes"))


Mask = NDArray[np.bool_]
Insight = dict[str, Any]

BLOCK = 1 << 16  # rows decoded at once
MAX_ANCHORS, TOP, MAX_PAIRS = 24, 8, 30  # anchors shown, words of each, largest weights
EXAMPLES, QUERIES, NEIGHBORS = 8, 12, 8  # words per band, words with neighbors, neighbors of each
MIN_COUNT, CANDIDATES = 5, 40  # neighbors have this count if enough of this many times more have
MAX_COMPARED = 200_000  # words whose codes are compared for equality
_FUNCTION = """about above after again against also always among another around because been before
being below between both could does doing down during each even every from further have having here
into itself just like made make many might more most much must never once only other over said same
says shall should since some still such than that their them themselves then there these they this
those through under until upon very were what when where which while whom whose will with within
without would your yours yourself"""
FUNCTION_WORDS = frozenset(_FUNCTION.split())


class _Words(NamedTuple):
    packed: PackedTable
    words: Sequence[str]  # [V]
    counts: NDArray[np.int64]  # [V]
    is_zero: Mask  # [V]: the row is zero
    is_word: Mask  # [V]: neither padding nor a marker such as <unk>


def word_insight(
    packed: PackedTable,
    words: Sequence[str],  # [V]
    counts: ArrayLike,  # int64 [V], in training
    anchor_ids: ArrayLike | None = None,  # [K]: the word of each anchor, -1 for none
) -> Insight:
    """Return the entries of a page about a word table, in plain JSON types.

    For every table: ``bands`` of frequency with the cost of rows and the fraction of zero rows, and
    the ``neighbors`` of some frequent words. For tables of weights: ``anchors`` and ``pairs``
    (Liang et al. 2021, table 5). For tables of codes: ``codes``. Words are special for anchor k if
    |T[i, k]| c[i, k] / Σ_j c[i, j] is large, with c[i, k] = |T[i, k]| ‖a_k‖.

    >>> import torch, featherbed as fb
    >>> table = fb.AnchorTable(4, 2, anchors=2)
    >>> with torch.no_grad():
    ...     _ = table.transform.copy_(torch.tensor([[1.0, 0], [2, 3], [0, 2], [0, 0]]))
    >>> words, counts = ["stock", "bonds", "august", "perl"], [90, 40, 30, 1]
    >>> found = word_insight(table.pack(), words, counts, anchor_ids=[0, -1])
    >>> found["kind"], [top["word"] for top in found["anchors"]["shown"][0]["top"]]
    ('weights', ['bonds'])
    >>> found["zero"]["examples"]
    [{'word': 'perl', 'count': 1}]
    """
    occurs, kind = np.asarray(counts), row_kind(packed)
    if len(words) != packed.rows or occurs.shape != (packed.rows,) or occurs.dtype.kind not in "iu":
        raise ArgumentError(
            f"{len(words)} words and counts of shape {occurs.shape}: give one of each for every of "
            f"the {packed.rows} rows"
        )
    is_word = np.array([not (len(w) > 2 and w[0] in "<[" and w[-1] in ">]") for w in words], bool)
    if packed.padding_idx is not None:
        is_word[packed.padding_idx] = False
    is_zero = _zero_rows(packed, kind) & is_word
    given = _Words(packed, words, occurs.astype(np.int64), is_zero, is_word)
    insight = {
        "table": str(packed.made_by.get("table", "table")),
        "kind": kind,
        "rows": packed.rows,
        "dim": packed.dim,
        "unit": "codes" if kind == "weights" else "bits",
        "bands": _frequency_bands(given, kind),
        "zero": _zero_insight(given),
        "neighbors": _neighbor_insight(given),
    }
    if kind == "weights":
        total = anchor_count(packed)
        named = objects_as_anchors(np.full(total, -1) if anchor_ids is None else anchor_ids, total)
        insight |= {"anchors": _anchor_insight(given, named), "pairs": _pair_insight(given, named)}
    elif kind == "codes":
        insight["codes"] = _code_insight(given)
    return insight


def row_kind(packed: PackedTable) -> str:
    """Return the kind of rows: "weights" over anchors, "codes", "kept" (others share rows), "rows".

    >>> import featherbed as fb
    >>> row_kind(fb.AnchorTable(9, 2, anchors=3).pack())
    'weights'
    >>> row_kind(fb.SelectedTable(9, 2, keep=4).pack())
    'kept'
    """
    layouts = [band.codes for band in packed.bands]
    try:
        weighted_band(packed)
    except ArgumentError:
        if len(layouts) == 2 and isinstance(layouts[0], Identity) and isinstance(layouts[1], Hash):
            return "kept"
        fixed = [codes.count for codes in layouts if isinstance(codes, Fixed)]
        return "codes" if len(fixed) == len(layouts) and len(set(fixed)) == 1 else "rows"
    return "rows" if "LowRank" in str(packed.made_by.get("table", "")) else "weights"


def _zero_rows(packed: PackedTable, kind: str) -> Mask:  # [V]
    """Return which rows are zero: without a weight, or without a nonzero number."""
    is_zero = np.zeros(packed.rows, dtype=bool)
    if kind == "weights":
        is_zero[zero_rows(packed).ids] = True
        return is_zero
    for start in range(0, packed.rows, BLOCK):
        rows = packed.block(start, min(start + BLOCK, packed.rows))
        is_zero[start : start + len(rows)] = np.abs(rows).max(1, initial=0) < NOTHING
    return is_zero


def _examples(given: _Words, ids: Ids, count: int = EXAMPLES) -> list[int]:
    """Return examples among the ids, at even distances; alphabetic words if there are enough."""
    found = ids[given.is_word[ids]]
    few = found[evenly_spaced(len(found), 40 * count)]
    words = [given.words[i] for i in few.tolist()]
    alphabetic = few[np.array([len(word) > 2 and word.isalpha() for word in words], dtype=bool)]
    enough = len(alphabetic) >= min(count, len(few))
    few = alphabetic if enough else few
    examples: list[int] = few[evenly_spaced(len(few), count)].tolist()
    return examples


def _zero_insight(given: _Words) -> Insight:
    """Return the number of zero rows, the fraction that occurs once, and examples."""
    ids = np.flatnonzero(given.is_zero)
    ids = ids[np.argsort(-given.counts[ids], kind="stable")]
    examples = _examples(given, ids, 2 * EXAMPLES)
    return {
        "rows": len(ids),
        "share": float(given.is_zero.mean()),
        "once": float(np.mean(given.counts[ids] == 1)) if len(ids) else None,
        "examples": [{"word": given.words[i], "count": int(given.counts[i])} for i in examples],
    }


def _frequency_bands(given: _Words, kind: str) -> list[Insight]:
    """Return the cost of rows and the zero or dropped rows by word frequency, rare words first."""
    packed, counts = given.packed, given.counts
    names, band_of = bins_of(counts, int(counts.max(initial=0)))
    band_of = np.where(given.is_word | (counts > 0), band_of, -1)
    members = packed.bands[0].members if kind == "kept" else None
    kept = None if members is None else members.split(np.arange(packed.rows))[0]
    starts = range(0, packed.rows, BLOCK)
    parts = (np.arange(start, min(start + BLOCK, packed.rows)) for start in starts)
    cost = np.concatenate([row_cost(packed, ids, kind == "weights") for ids in parts])
    bands = []
    for n in np.unique(band_of[band_of >= 0]).tolist():
        ids = np.flatnonzero(band_of == n)
        is_zero = given.is_zero[ids]
        band: Insight = {
            "name": names[n],
            "words": len(ids),
            "share": float(counts[ids].sum() / max(1, int(counts.sum()))),
            "cost": float(cost[ids].mean()),
            "zero": float(is_zero.mean()),
        }
        lists = {"zero_words": ids[is_zero], "other_words": ids[~is_zero]}
        if kept is not None:
            band["kept"] = float(kept[ids].mean())
            lists |= {"kept_words": ids[kept[ids]], "dropped_words": ids[~kept[ids]]}
        for name, some in lists.items():
            band[name] = [given.words[i] for i in _examples(given, some)]
        bands.append(band)
    return bands


def _is_content_word(word: str) -> bool:
    """Return whether a word has four letters or more and is no function word."""
    return len(word) > 3 and word.isalpha() and word.lower() not in FUNCTION_WORDS


def _frequent_words(given: _Words) -> list[int]:
    """Return the most frequent content words, or any words if there are too few."""
    order = np.argsort(-given.counts, kind="stable")[: 100 * QUERIES]
    usable = given.is_word & ~given.is_zero & (given.counts > 0)
    words: list[int] = order[usable[order]].tolist()
    content = [i for i in words if _is_content_word(given.words[i])]
    return (content if len(content) >= min(QUERIES, len(words)) else words)[:QUERIES]


def _nearest(given: _Words, word: int, ids: Ids, scores: NDArray[Any]) -> list[tuple[str, Any]]:
    """Return the first neighbors other than the word; of those with a minimum count if enough."""
    pairs = zip(ids.tolist(), scores.tolist(), strict=True)
    near = [pair for pair in pairs if given.is_word[pair[0]] and pair[0] != word]
    frequent = [pair for pair in near if given.counts[pair[0]] >= MIN_COUNT]
    shown = (frequent if len(frequent) >= NEIGHBORS else near)[:NEIGHBORS]
    return [(given.words[i], score) for i, score in shown]


def _neighbor_insight(given: _Words) -> list[Insight]:
    """Return the nearest words, by cosine, of some frequent words."""
    if not (queries := _frequent_words(given)):
        return []
    count = min(given.packed.rows, CANDIDATES * NEIGHBORS)
    results = given.packed.search(given.packed[np.array(queries)], count, metric="cosine")
    return [
        {
            "word": given.words[i],
            "count": int(given.counts[i]),
            "nearest": [
                {"word": word, "cosine": score} for word, score in _nearest(given, i, *near)
            ],
        }
        for i, *near in zip(queries, *results, strict=True)
    ]


def _code_insight(given: _Words) -> Insight:
    """Return how evenly codes are used, exp(entropy) / choices, and words that share most codes."""
    packed, rows = given.packed, given.packed.rows
    parts = packed.codes_of([0]).shape[1]
    choices = max(
        band.codes.choices(band.atoms) for band in packed.bands if isinstance(band.codes, Fixed)
    )
    used = np.zeros((parts, choices), dtype=np.int64)
    for start in range(0, rows, BLOCK):
        codes = packed.codes_of(np.arange(start, min(start + BLOCK, rows)))
        used += np.stack([np.bincount(codes[:, part], minlength=choices) for part in range(parts)])
    share = used / rows
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(1)
    compared = rows <= MAX_COMPARED
    distinct = len(np.unique(packed.codes_of(np.arange(rows)), axis=0)) if compared else None
    queries = _frequent_words(given) or [0]
    near = packed.near_codes(packed.codes_of(np.array(queries)), min(rows, CANDIDATES * NEIGHBORS))
    shared = []
    for i, *one in zip(queries, *near, strict=True):
        others = [{"word": w, "same": parts - off} for w, off in _nearest(given, i, *one)]
        shared.append({"word": given.words[i], "others": others})
    return {
        "parts": parts,
        "choices": choices,
        "used": float((used > 0).mean()),
        "even": float((np.exp(entropy) / choices).mean()),
        "distinct": distinct,
        "shared": shared,
    }


def _anchor_insight(given: _Words, named: Ids) -> Insight:
    """Return the anchors that lead most words, content words first, and their top words."""
    owner = clusters_of(given.packed)
    leads = np.bincount(owner[owner >= 0], minlength=len(named))
    names = [given.words[i] if i >= 0 else None for i in named.tolist()]
    is_other = np.array([name is None or not _is_content_word(name) for name in names])
    shown = np.lexsort((-leads, is_other))[:MAX_ANCHORS]
    classes = np.full(len(named), -1)
    classes[shown] = np.arange(len(shown))
    tops: dict[int, list[Insight]] = {k: [] for k in shown.tolist()}
    for entry in strongest(given.packed, TOP, classes, named):
        tops[entry.anchor].append({"word": given.words[entry.id], "weight": entry.weight})
    special = _special_words(given, shown, named)
    anchors = [
        {"anchor": k, "word": names[k], "leads": int(leads[k]), "top": top, "special": special[k]}
        for k, top in tops.items()
        if top
    ]
    return {"total": len(named), "words": bool((named >= 0).any()), "shown": anchors}


def _special_words(given: _Words, shown: Ids, named: Ids) -> dict[int, list[Insight]]:
    """Return the words with the largest weight times the anchor's part of the row, per anchor."""
    atoms = weighted_band(given.packed).dictionary
    assert atoms is not None
    norms = np.linalg.norm(atoms.dense()[: len(named)], axis=1)
    best: dict[int, list[tuple[float, int, float]]] = {k: [] for k in shown.tolist()}
    for ids, indices, weights in blocks(given.packed):
        size = np.abs(weights) * norms[indices]
        score = np.abs(weights) * size / np.maximum(size.sum(1, keepdims=True), NOTHING)
        for k in best:
            at, slot = np.nonzero((indices == k) & (score > 0) & (ids != named[k])[:, None])
            order = np.argsort(-score[at, slot], kind="stable")[:TOP]
            at, slot = at[order], slot[order]
            columns = (-score[at, slot], ids[at], weights[at, slot])
            new = zip(*(column.tolist() for column in columns), strict=True)
            best[k] = sorted([*best[k], *new])[:TOP]
    return {
        k: [{"word": given.words[i], "weight": weight} for _, i, weight in entries]
        for k, entries in best.items()
    }


def _pair_insight(given: _Words, named: Ids) -> list[Insight]:
    """Return the largest weights, except those of an anchor for itself; ``of`` is its word."""
    names = [given.words[i] if i >= 0 else None for i in named.tolist()]
    entries = largest_pairs(given.packed, MAX_PAIRS, anchor_ids=named)
    return [
        {"word": given.words[e.id], "anchor": e.anchor, "of": names[e.anchor], "weight": e.weight}
        for e in entries
    ]
