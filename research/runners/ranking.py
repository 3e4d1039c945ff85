"""Rows that are rankings: BPR with shared embeddings, measured over full rankings of all items."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from featherbed.errors import ArgumentError
from featherbed.papers.records import Bar, Outcome
from featherbed.papers.sources import Source
from featherbed.tasks.ranking import choices, train_bpr
from featherbed.tasks.ranking_metrics import Chosen, ranking_metrics

PARTS = (
    "train",
    "validation",
    "least",
)  # choices of each user, and how many ratings a user must have
LOOP = tuple(
    name
    for name in inspect.signature(train_bpr).parameters
    if name not in ("train", "validation", "seed", "progress", "name")
)


def run_ranking(settings: Mapping[str, Any], seed: int, source: Source, bar: Bar) -> Outcome:
    """Train by BPR, stop on the validation choices, and rank all other items for the test part, once."""
    unknown = sorted(set(settings) - {*PARTS, *LOOP})
    if unknown:
        raise ArgumentError(
            f"{', '.join(unknown)}: no setting of a ranking, which takes {', '.join([*PARTS, *LOOP])}"
        )
    parts = {key: settings[key] for key in PARTS if key in settings}
    train, validation, test = choices(source.ratings, **parts, seed=seed)
    loop = {key: settings[key] for key in LOOP if key in settings}
    ranked = train_bpr(train, validation, **loop, seed=seed, progress=bar.shown, name=bar.name)
    known = both(train, validation)
    measures = ranking_metrics(ranked.users, ranked.items, known, test)
    measures |= {
        "validation": ranked.history[ranked.epoch]["ndcg@10"],
        "epochs": ranked.epoch + 1.0,
    }
    return Outcome(measures, [dict(row) for row in ranked.history])


def both(first: Chosen, second: Chosen) -> Chosen:
    """Return what users chose in either part.

    >>> one = Chosen.of(np.array([0]), np.array([2]), 1, 4)
    >>> both(one, Chosen.of(np.array([0]), np.array([1]), 1, 4))[0].tolist()
    [1, 2]
    """
    users, items = np.append(first.users, second.users), np.append(first.items, second.items)
    return Chosen.of(users, items, first.num_users, first.num_items)
