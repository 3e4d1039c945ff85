"""Insight into a classifier's predictions: confusion, accuracy by length, wrong predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from featherbed.apps.popularity import bin_name

LENGTHS = (0, 5, 10, 20, 30, 40, 60, 80, 100, 150, 200, 300, 500, 1000)
MAX_WRONG, MAX_CHARACTERS = 12, 300  # wrong predictions shown, characters of each text


def prediction_insight(
    labels: ArrayLike,  # [n]
    predicted: ArrayLike,  # [n]
    lengths: ArrayLike,  # [n], in words
    classes: Sequence[str],
    texts: Sequence[str] = (),  # [n], to show wrong predictions
    probabilities: ArrayLike = (),  # [n], of the predicted classes
) -> dict[str, Any]:
    """Return the ``confusion``, ``lengths`` and ``wrong`` entries of a classifier's page.

    >>> found = prediction_insight(
    ...     [0, 1, 1], [0, 1, 0], [3, 12, 4], ["bad", "good"],
    ...     ["a b c", "...", "not bad at all"], [0.9, 0.6, 0.8])
    >>> found["confusion"], found["wrong"][0]["text"], found["wrong"][0]["given"]
    ([[1, 0], [1, 1]], 'not bad at all', 'bad')
    """
    true, guess, count = np.asarray(labels), np.asarray(predicted), len(classes)
    confusion = np.bincount(true * count + guess, minlength=count**2).reshape(count, -1)
    band, is_right = np.searchsorted(LENGTHS, lengths, side="right") - 1, true == guess
    by_length = []
    for n in np.unique(band).tolist():
        right = is_right[band == n]
        name = bin_name(LENGTHS[n], (*LENGTHS, None)[n + 1])
        by_length.append({"name": name, "texts": len(right), "accuracy": float(right.mean())})
    wrong = []
    if len(texts):
        certainty = np.asarray(probabilities, dtype=np.float64)
        order = np.argsort(-np.where(is_right, -1, certainty), kind="stable")[:MAX_WRONG]
        wrong = [
            {
                "text": texts[i][:MAX_CHARACTERS],
                "true": classes[true[i]],
                "given": classes[guess[i]],
                "probability": float(certainty[i]),
            }
            for i in order.tolist()
            if not is_right[i]
        ]
    return {"confusion": confusion.tolist(), "lengths": by_length, "wrong": wrong}
