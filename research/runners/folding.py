"""New users of a model of ratings: rows in closed form beside rows of a training with these users."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.apps.recommender import Recommender, train_recommender
from featherbed.io.records import Ratings, read_ratings
from research.harness.records import Outcome, Run

TEST = 0.2  # of the ratings of a held-out user


def run_folded(settings: Mapping[str, Any], seed: int, source: Path, run: Run) -> Outcome:
    """Train with and without some users; return errors on ratings of theirs that neither has seen."""
    ratings = read_ratings(source).ratings
    rng = np.random.default_rng(seed)
    count = min(int(settings["users"]), ratings.num_users // 4)
    held = np.isin(ratings.users, rng.choice(ratings.num_users, count, replace=False))
    test = held & (rng.random(len(ratings)) < TEST)
    values = {"table.dim": settings["dim"]} if "dim" in settings else {}
    models: dict[str, Recommender] = {}
    with TemporaryDirectory() as place:
        for name, kept in (("full", ~test), ("others", ~held)):
            lines = _lines(ratings, np.flatnonzero(kept))
            path = Path(place) / f"{name}.csv"
            path.write_text("\n".join(["user,item,rating", *lines]) + "\n")
            train_recommender(
                path, Path(place) / name, values, seed=seed, progress=run.shown, log=run.say
            )
            models[name] = Recommender.open(Path(place) / name)
        errors = _errors(models["full"], models["others"], ratings, held, test)
    trained, folded = (float(np.mean(one)) for one in errors)
    measures = {"trained_mse": trained, "folded_mse": folded, "of_trained": folded / trained}
    return Outcome(measures | {"users": float(count), "ratings": float(len(errors[0]))})


def _lines(ratings: Ratings, places: NDArray[np.int64]) -> list[str]:
    users, items = ratings.user_keys, ratings.item_keys
    return [
        f"{users[u]},{items[i]},{value:g}"
        for u, i, value in zip(
            ratings.users[places].tolist(),
            ratings.items[places].tolist(),
            ratings.values[places].tolist(),
            strict=True,
        )
    ]


def _errors(
    full: Recommender,
    others: Recommender,
    ratings: Ratings,
    held: NDArray[np.bool_],
    test: NDArray[np.bool_],
) -> tuple[list[float], list[float]]:
    """Return squared errors of the trained rows and of the folded rows on the same ratings.

    Folding in gets the ratings that the full training learned from, not those it validated with.
    """
    trained, folded = list[float](), list[float]()
    for user in np.unique(ratings.users[held]).tolist():
        key, own = ratings.user_keys[user], np.flatnonzero(ratings.users == user)
        pairs = [(ratings.item_keys[ratings.items[at]], float(ratings.values[at])) for at in own]
        ids = full.rated_items(int(full.users.ids_of(key)))
        learned = {str(full.items.name_of(int(id_))) for id_ in ids}
        wanted = [
            pair
            for pair, hidden in zip(pairs, test[own].tolist(), strict=True)
            if hidden and pair[0] in full.items and pair[0] in others.items
        ]
        history = [pair for pair in pairs if pair[0] in learned and pair[0] in others.items]
        if not wanted or not history:
            continue
        items, truth = [item for item, _ in wanted], np.array([value for _, value in wanted])
        trained += ((full.score(key, items) - truth) ** 2).tolist()
        row = others.fold_in(history)
        rows = others.items[items]
        found = others.about.mean + row[0] + rows[:, 0] + rows[:, 1:] @ row[1:]
        folded += ((found - truth) ** 2).tolist()
    return trained, folded
