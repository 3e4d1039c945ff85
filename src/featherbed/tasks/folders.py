"""The files that training on ratings leaves beside the recommender: metrics, history, a page to look at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from featherbed.packed.writing import replacing
from featherbed.serve.folder import (
    APART,
    ITEMS,
    JSON,
    SEEN,
    TITLES,
    USERS,
    seen_of,
    write_recommender,
)
from featherbed.tasks.insight import insight
from featherbed.tasks.results import made_by, write_json
from featherbed.tasks.summary import warning_lines
from featherbed.version import __version__
from featherbed.view.ratings import ratings_page

if TYPE_CHECKING:
    from featherbed.tasks.recommender import Outcome

FILES = (USERS, ITEMS, SEEN, TITLES, APART, JSON)  # that recommending reads


def write_folder(
    folder: Path, outcome: Outcome, name: str, command: str, settings: dict[str, Any]
) -> None:
    """Write what ``featherbed recommend`` opens, then ``metrics.json``, ``history.parquet`` and ``report.html``."""
    learnt, split, titles = outcome.learnt, outcome.split, outcome.titles
    train = split.train
    write_recommender(
        folder,
        learnt.users,
        learnt.items,
        mean=learnt.mean,
        biases=learnt.biases,
        seen=seen_of(train.users, train.items, train.num_users, train.num_items),
        user_bias=learnt.user_bias,
        item_bias=learnt.item_bias,
        titles=None if titles is None else titles.names,
        about={
            "ratings": len(train),
            "test_mse": outcome.metrics["test"]["mse"],
            "settings": settings,
        },
    )
    outcome.metrics["sizes"] |= shipped_sizes(folder, outcome.metrics["sizes"])
    report = report_of(outcome, name, command, settings)
    write_json(folder / "metrics.json", {**outcome.metrics, **made_by()})
    write_history(folder / "history.parquet", learnt.history)
    write_page(folder / "report.html", ratings_page(report))


def shipped_sizes(folder: Path, tables: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of all files that recommending reads, and of some of them.

    ``float32_whole`` is what all files take with float32 rows.
    """
    found = {name: (folder / name).stat().st_size for name in FILES if (folder / name).is_file()}
    whole = sum(found.values())
    return {
        "whole": whole,
        "seen": found.get(SEEN, 0),
        "titles": found.get(TITLES, 0),
        "float32_whole": whole - tables["file"] + tables["float32"],
    }


def write_page(path: Path, page: str) -> None:
    """Write a page, atomically."""
    with (
        replacing(path) as descriptor,
        os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as file,
    ):
        file.write(page)


def write_history(path: Path, history: list[dict[str, float]]) -> None:
    """Write a row an epoch as Parquet, atomically."""
    import polars as pl

    with replacing(path) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
        pl.DataFrame(history, infer_schema_length=None).write_parquet(file)


def report_of(
    outcome: Outcome, name: str, command: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return what the page shows."""
    learnt, reading, split, titles, metrics = (
        outcome.learnt,
        outcome.reading,
        outcome.split,
        outcome.titles,
        outcome.metrics,
    )
    guess = np.concatenate(list(learnt.predictions(split.test)))
    names, groups = (None, None) if titles is None else (titles.names, titles.groups)
    kinds = {side: str(table.made_by.get("table", "rows")) for side, table in _sides(outcome)}
    return {
        "name": name,
        "rows": {side: table.rows for side, table in _sides(outcome)},
        "metrics": {part: metrics[part] for part in ("train", "validation", "test")},
        "history": learnt.history,
        "sizes": metrics["sizes"],
        "insight": insight(learnt.users, learnt.items, split, guess, names, groups, outcome.biases),
        "model": {"dim": learnt.users.dim, "factors": metrics["factors"], **kinds},
        "input": {"columns": reading.columns, "counts": reading.counts, "notes": reading.notes},
        "split": {
            "how": split.how,
            "seed": split.seed,
            **{p: metrics[p]["ratings"] for p in ("train", "validation", "test")},
        },
        "settings": {key: value for key, value in settings.items() if value is not None},
        "warnings": warning_lines(metrics),
        "notes": list(learnt.notes),
        "command": command,
        "seconds": metrics["seconds"],
        "version": __version__,
        "interrupted": learnt.interrupted,
    }


def _sides(outcome: Outcome) -> list[tuple[str, Any]]:
    return [("users", outcome.learnt.users), ("items", outcome.learnt.items)]
