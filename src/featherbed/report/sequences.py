"""The report page of a sequence model."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.report.page import (
    INTERRUPTED,
    Report,
    as_bytes,
    as_count,
    as_figure,
    as_html,
    axis,
    bar,
    data_section,
    history_lines,
    history_plot,
    lead,
    means_by_bin,
    notes,
    report_page,
    size_table,
    table,
    times_smaller,
)

SAMPLED = "_of_100_sampled"  # ending of the names of metrics against 100 sampled items
METRICS = {"ndcg@10": "NDCG@10", "hit@10": "Hit@10"}


def sequences_page(report: Report) -> str:
    """Return the page of a trained sequence model.

    ``report`` requires ``name``, ``metrics`` (by model, the stored one first, then others to
    compare it with: ``ndcg@10`` and ``hit@10`` of full rankings, and the same against 100 sampled
    items) and ``sizes`` (``parts``: bytes by name; ``whole``; ``float32_whole``). Optional:
    ``history``, ``bands`` (by popularity), ``examples`` (each with a ``history`` and ``items``,
    texts), ``model`` (sentences), ``notes``, ``input``, ``settings``, ``command``, ``seconds``,
    ``version``, ``interrupted``. All texts are escaped.

    >>> metrics = {"this model": {"ndcg@10": 0.17, "hit@10": 0.3}}
    >>> sizes = {"parts": {"items": 80}, "whole": 100, "float32_whole": 400}
    >>> "NDCG@10 of 0.1700" in sequences_page({"name": "a", "metrics": metrics, "sizes": sizes})
    True
    """
    sections = (_lead, _quality, _history, _sizes, _bands, _examples, _data)
    return report_page(report, "a sequence model", (), sections)


def _lead(report: Report) -> str:
    best, sizes = next(iter(report["metrics"].values())), report["sizes"]
    headline = (
        f"A sequence model with an NDCG@10 of {best['ndcg@10']:.4f} on full rankings, "
        f"{as_bytes(sizes['whole'])} in total"
        f"{times_smaller(sizes['float32_whole'], sizes['whole'])} "
        "than with float32 rows and weights"
    )
    sentences = [as_html(line) for line in report.get("model") or []]
    sentences += [INTERRUPTED] if report.get("interrupted") else []
    return lead(f"{headline}.", sentences) + notes(report.get("notes"))


def _quality(report: Report) -> str:
    return "".join(
        _metrics_table(report, title, ending, note)
        for title, ending, note in (
            (
                "Quality",
                "",
                "The last item of each user among all items; items of the history are left out "
                "unless the model recommends them again.",
            ),
            (
                "Quality against 100 sampled items",
                SAMPLED,
                "As papers on SASRec print it: the last item among 100 items that the user never "
                "had, drawn at random. Such figures are much higher and can order models wrongly.",
            ),
        )
    )


def _metrics_table(report: Report, title: str, ending: str, note: str) -> str:
    rows = []
    for model, found in report["metrics"].items():
        if all(f"{name}{ending}" in found for name in METRICS):
            values = (found[f"{name}{ending}"] for name in METRICS)
            rows.append((as_html(model), *(bar(f"{value:.4f}", value) for value in values)))
    return table(title, ("model", *METRICS.values()), rows, note)


def _history(report: Report) -> str:
    plots = []
    for number, (title, columns) in enumerate(
        (("NDCG@10", {"validation": "validation_ndcg@10"}), ("loss", {"train": "train_loss"}))
    ):
        lines = history_lines(report, columns)
        plots.append(history_plot(report, f"curve{number}", lines, axis(title), 300))
    return f"<h2>Training history</h2>{''.join(plots)}" if any(plots) else ""


def _sizes(report: Report) -> str:
    sizes = report["sizes"]
    others = {"with float32 rows and weights": sizes["float32_whole"]}
    return size_table(sizes["parts"], sizes["whole"], others)


def _bands(report: Report) -> str:
    rows = [
        (
            as_html(band["name"]),
            as_count(band["items"]),
            as_figure("share", band["share"]),
            bar(f"{band['ndcg@10']:.4f}", band["ndcg@10"]),
            f"{band['popularity']:.4f}",
        )
        for band in report.get("bands") or []
    ]
    head = ("events in training", "items", "of held-out items", "NDCG@10", "by popularity")
    note = "Full rankings, by the number of training events of the held-out item."
    return table("Quality by popularity", head, rows, note)


def _examples(report: Report) -> str:
    rows = [
        (
            as_html(one["last"]),
            f"{as_html(one['items'])}<small>after {as_html(one['history'])}</small>",
        )
        for one in report.get("examples") or []
    ]
    note = "The last items of some histories of the test users, and what is recommended after them."
    return table("Examples", ("what followed", "recommended"), rows, note, wrap=True)


def _data(report: Report) -> str:
    return data_section(report.get("input") or {}, None)


def bands_by_popularity(
    counts: NDArray[np.int64],  # [V]
    targets: NDArray[np.int64],  # [n]
    gains: NDArray[np.float64],  # [n]
    baseline: NDArray[np.float64],  # [n]
) -> list[dict[str, Any]]:
    """Return the mean gain of held-out items by their training count, and that of a baseline.

    >>> gains = np.array([1.0, 0.0, 0.5])
    >>> bands = bands_by_popularity(np.array([40, 2]), np.array([0, 1, 0]), gains, gains)
    >>> [(band["name"], band["items"], band["ndcg@10"]) for band in bands]
    [('1 to 2', 1, 0.0), ('30 and more', 1, 0.75)]
    """
    bands = means_by_bin(counts, counts[targets], {"ndcg@10": gains, "popularity": baseline})
    for band in bands:
        band["items"] = band.pop("objects")
    return bands
