"""The report page of a ranking: metrics beside the baselines, by popularity, sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.report.page import (
    Report,
    as_bytes,
    as_count,
    as_figure,
    as_html,
    axis,
    bar,
    columns_section,
    history_lines,
    history_plot,
    lead,
    means_by_bin,
    report_page,
    table,
    times_smaller,
)
from featherbed.report.ratings import cost_section, shipped_sizes, size_sentences, sizes_section

METRICS = {
    "ndcg@10": "NDCG@10",
    "recall@10": "Recall@10",
    "p@1": "P@1",
    "p@5": "P@5",
    "p@10": "P@10",
}
MODELS = {"test": "stored model", "als": "float32 ALS", "popularity": "popularity"}


def ranking_page(report: Report) -> str:
    """Return the page of a trained ranking.

    ``report`` requires ``name``, ``rows`` (users, items), ``metrics`` (``test``, ``als`` and
    ``popularity``, each with NDCG@10, recall@10 and precisions; ``fold_in``), ``sizes`` (as
    ``ratings_page``) and ``history``. Optional: ``bands`` (of users and items, by
    ``ranking_bands``), ``insight``, ``input``, ``split``, ``warnings``, ``notes``, ``settings``,
    ``command``, ``seconds``, ``version``. All texts are escaped.

    >>> ranking_page({"name": "clicks.csv", "rows": {}, "metrics": {}})
    Traceback (most recent call last):
    featherbed.errors.ArgumentError: a report without sizes, history: give the whole report
    """
    sections = (_lead, _quality, _bands, _search, sizes_section, cost_section, _data)
    return report_page(report, "a ranking", ("rows", "history"), sections)


def _lead(report: Report) -> str:
    rows, metrics = report["rows"], report["metrics"]
    headline = (
        f"{rows['users']:,} users and {rows['items']:,} items: NDCG@10 "
        f"{metrics['test']['ndcg@10']:.4f} on full rankings"
    )
    whole, dense = shipped_sizes(report)
    if whole and dense:
        headline += f"; {as_bytes(whole)} in total, {as_bytes(dense)} with float32 rows"
        headline += times_smaller(dense, whole)
    sentences = [
        f"<b>{as_html(text[:1].upper() + text[1:])}.</b>" for text in report.get("warnings") or []
    ]
    sentences += [as_html(note) for note in report.get("notes") or []]
    if found := metrics.get("fold_in"):
        sentences.append(
            f"{found['users']:,} users who were left out of a training and folded in have an "
            f"NDCG@10 of {found['ndcg@10']:.4f}, the same users in the stored model "
            f"{found['trained']:.4f}."
        )
    return lead(f"{headline}.", [*sentences, *size_sentences(report)])


def _quality(report: Report) -> str:
    metrics = report["metrics"]
    rows = [
        (label, *(as_figure("", metrics[name][metric]) for metric in METRICS))
        for name, label in MODELS.items()
        if name in metrics
    ]
    note = (
        "Test events of each user among all items that the user did not choose in training or "
        "validation; recall@10 is the hits over the smaller of 10 and the number of test events."
    )
    return table("Quality", ("", *METRICS.values()), rows, note)


def _search(report: Report) -> str:
    """Return the validation NDCG@10 of every fit of the search of settings."""
    lines = history_lines(report, {"validation NDCG@10": "validation"})
    shown = history_plot(report, "search", lines, axis("NDCG@10"), 300)
    note = "<p class=soft>Fits with other settings, then divisions of the bits, in order.</p>"
    return f"<h2>Search of settings</h2>{note}{shown}" if shown else ""


def _bands(report: Report) -> str:
    """Return metrics by the number of events of users, and recall by popularity of items."""
    parts = []
    for side, metric in (("users", "ndcg@10"), ("items", "recall@10")):
        bands = (report.get("bands") or {}).get(side) or []
        metrics = METRICS if side == "users" else {metric: "test events in the top 10"}
        best = max((band["test"][metric] for band in bands), default=1.0) or 1.0
        rows = [
            (
                as_html(band["name"]),
                as_count(band["objects"]),
                as_count(band["measured"]),
                *(as_figure("", band["test"][name]) for name in metrics if name != metric),
                *(as_figure("", band[other][metric]) for other in ("als", "popularity")),
                bar(as_figure("", band["test"][metric]), band["test"][metric] / best),
            )
            for band in bands
        ]
        others = [label for name, label in metrics.items() if name != metric]
        measured = "measured" if side == "users" else "test events"
        named = "NDCG@10" if side == "users" else "in the top 10"
        head = ("events", side, measured, *others, "float32 ALS", "popularity", named)
        parts.append(table("", head, rows))
    note = (
        "By the number of events of a user or an item in training; NDCG@10 (and the part of test "
        "events in the top 10) of the stored model in the last column, of the baselines before it."
    )
    shown = f"<h2>By popularity</h2><p class=soft>{note}</p>{'<br>'.join(filter(None, parts))}"
    return shown if any(parts) else ""


def _data(report: Report) -> str:
    return columns_section(report, "events", {})


def ranking_bands(
    counts: NDArray[np.int64],  # [n]
    every: NDArray[np.int64],  # [rows]
    metrics: Mapping[str, Mapping[str, NDArray[Any]]],  # of [n] each
) -> list[dict[str, Any]]:
    """Return mean metrics by the training events of measured objects, of each model.

    >>> bands = ranking_bands(np.array([2, 40]), np.array([2, 40]), {"a": {"p": np.array([0, 1])}})
    >>> [(band["name"], band["a"]["p"]) for band in bands]
    [('1 to 2', 0.0), ('30 and more', 1.0)]
    """
    flat = {(model, name): part for model, one in metrics.items() for name, part in one.items()}
    found = []
    for band in means_by_bin(every, counts, flat):
        own: dict[Any, Any] = band  # keys of metrics are pairs
        means = {model: {name: own[model, name] for name in one} for model, one in metrics.items()}
        found.append({key: band[key] for key in ("name", "objects", "measured")} | means)
    return found
