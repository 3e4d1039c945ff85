"""Ratings that a ratings model cannot learn from: all equal, or counts of what users did."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from featherbed.errors import DataError
from featherbed.tasks.data import Ratings
from featherbed.tasks.spool import cuts

SAMPLE = 1_000_000  # ratings looked at for what they look like
SCALE = 20  # the top of rating scales that are common: larger whole numbers may be counts


def check_values(ratings: Ratings, source: Path | str = "the file") -> None:
    """Refuse ratings that are all equal: they say who chose what, which is a task for ranking.

    >>> ids = np.array([0, 1])
    >>> same = Ratings(ids, ids, np.ones(2, np.float32), ("a", "b"), ("x", "y"))
    >>> check_values(same, "plays.csv")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    featherbed.errors.DataError: plays.csv: every rating is 1, so there is nothing to predict: ...
    """
    first = ratings.values[0]
    if all(bool((ratings.values[cut] == first).all()) for cut in cuts(len(ratings))):
        raise DataError(
            f"{source}: every rating is {first:g}, so there is nothing to predict: such implicit "
            "data (clicks, purchases) need ranking, not a ratings model; see "
            "featherbed.tasks.ranking.train_bpr"
        )


def count_notes(ratings: Ratings) -> list[str]:
    """Return a remark on ratings that look like counts: whole numbers, mostly the smallest two.

    >>> counts = np.array([1] * 60 + [2] * 20 + [3] * 10 + [40] * 10, np.float32)
    >>> ids = np.arange(100)
    >>> len(count_notes(Ratings(ids, ids, counts, [str(i) for i in ids], [str(i) for i in ids])))
    1
    """
    step = -(-len(ratings) // SAMPLE)
    values = np.asarray(ratings.values[::step], dtype=np.float64)
    low, high = float(values.min()), float(values.max())
    if low not in (0.0, 1.0) or high <= SCALE or not (values == np.floor(values)).all():
        return []
    if np.mean(values <= low + 1) < 0.5 or np.median(values) > 0.1 * high:
        return []
    return [
        f"the ratings look like counts (whole numbers from {low:g} to {high:,.0f}, most of them "
        f"near {low:g}): a ratings model predicts their size and may rank items worse than "
        "popularity does"
    ]
