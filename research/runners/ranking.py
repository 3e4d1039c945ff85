"""Rankings of all items: BPR with shared embeddings, and the models of the ``implicit`` package."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from featherbed.apps.recommender import train_ranking
from featherbed.apps.recommender.als import CountedEvents, some_users
from featherbed.apps.recommender.rank import LEAST, SCORES
from featherbed.apps.recommender.ranking import (
    Interactions,
    ranking_metrics,
    split_interactions,
    train_bpr,
)
from featherbed.errors import ArgumentError, MissingExtra
from research.harness.records import Outcome, Run
from research.runners.rankers import train_ranker
from research.runners.sweep import combinations
from research.sources.counts import Writer
from research.sources.ratings import Source

PARTS = ("train", "validation", "minimum")  # interactions per user, minimum number of ratings
OLD_NAMES = {"least": "minimum", "fall": "lr_decay", "decay": "weight_decay"}  # of earlier runs
LOOP = tuple(
    name
    for name in inspect.signature(train_bpr).parameters
    if name not in ("train", "validation", "seed", "progress", "name")
)


def run_ranking(settings: Mapping[str, Any], seed: int, source: Source, run: Run) -> Outcome:
    """Train by BPR, stop on the validation interactions, and rank all other items for the test part.

    With ``yardstick`` (als or bpr) the model is one of the ``implicit`` package instead; ``how`` is
    sql-rank, or dropout (BPR with coordinates dropped from rows). Lists in ``sweep`` are swept by
    the NDCG@10 of the validation interactions.
    """
    settings = {OLD_NAMES.get(key, key): value for key, value in settings.items()}
    if "yardstick" in settings:
        return run_implicit(settings, seed, source, run)
    how, sweep = settings.get("how"), settings.get("sweep", {})
    given = {key: value for key, value in settings.items() if key not in ("how", "sweep")}
    unknown = sorted({*given, *sweep} - {*PARTS, *LOOP} - ({"drop"} if how else set()))
    if unknown:
        raise ArgumentError(
            f"{', '.join(unknown)}: no setting of a ranking, which takes {', '.join([*PARTS, *LOOP])}"
        )
    parts = {key: settings[key] for key in PARTS if key in settings}
    train, validation, test = split_interactions(source.ratings, **parts, seed=seed)
    loop = {key: value for key, value in given.items() if key not in PARTS}
    loop |= {"seed": seed, "progress": run.shown, "name": run.title}
    found: list[tuple[float, dict[str, Any], Any]] = []
    for chosen in combinations(sweep):
        train_one = train_bpr if how is None else partial(train_ranker, how=how)
        one = train_one(train, validation, **{**loop, **chosen})
        found.append((one.history[one.epoch]["ndcg@10"], chosen, one))
    _, best, ranked = max(found, key=lambda one: one[0])
    known = both(train, validation)
    measures = ranking_metrics(ranked.users, ranked.items, known, test)
    measures |= {
        "validation": ranked.history[ranked.epoch]["ndcg@10"],
        "epochs": ranked.epoch + 1.0,
    }
    details = {"chosen": best} if sweep else {}
    return Outcome(measures, [dict(row) for row in ranked.history], details)


def run_stored(settings: Mapping[str, Any], seed: int, source: Path, run: Run) -> Outcome:
    """Run ``train_ranking`` on a file: the stored rows beside float32 ALS, popularity, fold-in."""
    groups = {"dim": "table", "ratio": "table", "minimum": "reading"}
    values = {f"{groups[key]}.{key}": value for key, value in settings.items() if key in groups}
    values |= {"split.method": settings["split"]}
    with TemporaryDirectory() as folder:
        outcome = train_ranking(
            source, Path(folder) / "out", values, seed=seed, progress=run.shown, log=run.say
        )
    found = outcome.metrics
    measures: dict[str, float] = dict(found["test"])
    for name in ("als", "popularity", "validation"):
        measures |= {f"{name}_{key}": value for key, value in found[name].items()}
    measures["of_als"] = found["test"]["ndcg@10"] / found["als"]["ndcg@10"]
    folded = found["fold_in"]
    measures |= {"folded": folded["ndcg@10"], "trained": folded["trained"]}
    measures |= {"of_trained": folded["ndcg@10"] / folded["trained"], "users": folded["users"]}
    sizes = found["sizes"]
    measures |= {"bytes": sizes["file"], "float32_bytes": sizes["float32"], "dim": found["dim"]}
    details = {"stored": found["implicit"], "als": found["als_settings"], "method": found["method"]}
    return Outcome(measures, outcome.fitted.history, details)


def run_defaults(settings: Mapping[str, Any], seed: int, source: Writer, run: Run) -> Outcome:
    """Run ``train_ranking`` with default settings beside ALS of the package implicit with its own.

    Both learn from training and validation events, and rank the same test events.
    """
    with TemporaryDirectory() as place:
        path = source(settings["file"], Path(place))
        outcome = train_ranking(
            path, Path(place) / "out", seed=seed, progress=run.shown, log=run.say
        )
    found, split = outcome.metrics, outcome.data.split
    known, held = CountedEvents.of(split.train, split.validation), CountedEvents.of(split.test)
    model = implicit_model("als")(random_state=seed, num_threads=1)
    shape = known.lists.num_users, known.lists.num_items
    matrix = csr_matrix((known.counts, known.lists.items, known.lists.starts), shape=shape)
    model.fit(matrix, show_progress=False)
    most = max(LEAST, SCORES // known.lists.num_items)  # as train_ranking draws them
    users = some_users(held.lists, most, np.random.default_rng(seed))
    default = ranking_metrics(
        model.user_factors[users], model.item_factors, known.lists, held.lists, users=users
    )
    own, popular = found["test"]["ndcg@10"], found["popularity"]["ndcg@10"]
    measures = {"ndcg@10": own, "default_ndcg@10": default["ndcg@10"]}
    measures |= {"als_ndcg@10": found["als"]["ndcg@10"], "popularity_ndcg@10": popular}
    measures |= {"of_default": own / default["ndcg@10"], "of_popularity": own / popular}
    measures |= {"dim": found["dim"], "bytes": found["sizes"]["file"], "users": len(users)}
    measures |= {"pairs": len(known.lists) + len(held.lists), "items": known.lists.num_items}
    details = {"stored": found["implicit"], "method": found["method"]}
    return Outcome(measures, outcome.fitted.history, details)


def run_implicit(settings: Mapping[str, Any], seed: int, source: Source, run: Run) -> Outcome:
    """Fit a model of the ``implicit`` package; lists in the settings are swept on validation."""
    parts = {key: settings[key] for key in PARTS if key in settings}
    train, validation, test = split_interactions(source.ratings, **parts, seed=seed)
    swept = {key: value for key, value in settings.items() if isinstance(value, list)}
    shape = train.num_users, train.num_items
    matrix = csr_matrix((np.ones(len(train), np.float32), train.items, train.starts), shape=shape)
    best: tuple[dict[str, float], dict[str, Any], Any] | None = None
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        model = implicit_model(settings["yardstick"])(
            **chosen, iterations=settings["iterations"], random_state=seed, num_threads=1
        )
        model.fit(matrix, show_progress=False)
        found = ranking_metrics(model.user_factors, model.item_factors, train, validation)
        run.say(f"{run.row} {chosen}: NDCG@10 {found['ndcg@10']:.4f}")
        if best is None or found["ndcg@10"] > best[0]["ndcg@10"]:
            best = found, chosen, model
    if best is None:
        raise ArgumentError(f"{run.row}: every list of settings needs at least one value")
    found, chosen, model = best
    measures = ranking_metrics(
        model.user_factors, model.item_factors, both(train, validation), test
    )
    return Outcome(measures | {"validation": found["ndcg@10"]}, [], {"chosen": chosen})


def implicit_model(name: str) -> Any:
    """Return a model class of the ``implicit`` package."""
    places = {
        "als": ("implicit.cpu.als", "AlternatingLeastSquares"),
        "bpr": ("implicit.cpu.bpr", "BayesianPersonalizedRanking"),
    }
    if name not in places:
        raise ArgumentError(f"yardstick={name!r}: use one of {', '.join(places)}")
    module, kind = places[name]
    try:
        return getattr(import_module(module), kind)
    except ImportError:
        raise MissingExtra("implicit", "yardsticks", "a comparison with implicit") from None


def both(first: Interactions, second: Interactions) -> Interactions:
    """Return what users chose in either part.

    >>> one = Interactions.of(np.array([0]), np.array([2]), 1, 4)
    >>> both(one, Interactions.of(np.array([0]), np.array([1]), 1, 4))[0].tolist()
    [1, 2]
    """
    users, items = np.append(first.users, second.users), np.append(first.items, second.items)
    return Interactions.of(users, items, first.num_users, first.num_items)
