"""Clouds of movies in three dimensions: without sharing, with SSE-Graph and with SSE-SE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure

from research.harness.clouds import clouds_page, mean_distance, principal_axes
from research.harness.records import Outcome, Run
from research.runners.factorization import Factors, shared_ids
from research.sources.ratings import Source

GENRES = (
    "Action",
    "Comedy",
    "Drama",
    "Children's",
    "Horror",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "Documentary",
)
PAIRS = 200_000  # drawn at random to estimate mean distances


def run_clouds(settings: Mapping[str, Any], seed: int, source: Source, run: Run) -> Outcome:
    """Train three factorizations and measure distances between movies.

    The picture (``figure3.png``) and the interactive page (``clouds.html``) are written to the
    folder of work.
    """
    train, validation, _ = source.split(seed)
    graphs, none = source.relations, (None, None)
    ways = {
        "without": (0.0, none, (1.0, 1.0)),
        "SSE-Graph": (settings["p"], graphs, settings["rho"]),
        "SSE-SE": (settings["p"], none, (1.0, 1.0)),
    }
    shown = np.argsort(-np.bincount(train.items, minlength=train.num_items))[: settings["shown"]]
    group = [next((g for g in GENRES if g in own), "other") for own in source.genres]
    kinds = np.array([group[movie] for movie in shown])
    pairs = movie_pairs(shown, kinds, graphs[1], seed)
    clouds: dict[str, Any] = {}
    measures: dict[str, float] = {}
    distances: dict[str, dict[str, float]] = {}
    for name, (p, own, rho) in ways.items():
        factors = trained_factors(train, settings, seed, p, own, rho)
        clouds[name] = factors.columns[shown]
        distances[name] = {what: mean_distance(clouds[name], some) for what, some in pairs.items()}
        distances[name]["validation RMSE"] = factors.rmse(validation)
        run.say(f"{name}: {distances[name]}")
        measures |= {f"{name}_{what}": value for what, value in distances[name].items()}
    run.work.mkdir(parents=True, exist_ok=True)
    draw_clouds(clouds, kinds).savefig(run.work / "figure3.png", dpi=110)
    names = [source.titles[movie] for movie in shown]
    title = "Movies: no sharing, SSE-Graph, SSE-SE"
    page = clouds_page(clouds, names, list(kinds), distances, title)
    (run.work / "clouds.html").write_text(page, encoding="utf-8")
    return Outcome(measures)


def trained_factors(
    train: Any, settings: Mapping[str, Any], seed: int, p: float, graphs: Any, rho: Any
) -> Factors:
    """Return factors trained one rating at a time, ids shared with probability ``p``."""
    factors = Factors(train, settings["dim"], "plain", seed)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    for _ in range(settings["epochs"]):
        ids = shared_ids(train, p, graphs, rho, generator)
        factors.descend(train, ids, settings["lr"], settings["decay"], 0.0, rng)
    return factors


def movie_pairs(shown: Any, kinds: Any, graph: Any, seed: int) -> dict[str, Any]:
    """Return pairs of movies with a common actor, of the same genre, and at random."""
    place = {movie: i for i, movie in enumerate(shown)}
    actors = np.array([[place[a], place[b]] for a, b in graph.pairs() if a in place and b in place])
    drawn = np.random.default_rng(seed).integers(len(shown), size=(PAIRS, 2))
    drawn = drawn[drawn[:, 0] != drawn[:, 1]]
    same = (kinds[drawn[:, 0]] == kinds[drawn[:, 1]]) & (kinds[drawn[:, 0]] != "other")
    return {"same actor": actors, "same genre": drawn[same], "any two": drawn}


def draw_clouds(clouds: Mapping[str, Any], kinds: Any) -> Figure:
    """Return a figure of the clouds along their principal axes."""
    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(clouds), figsize=(12, 4), subplot_kw={"projection": "3d"})
    for axis, (name, rows) in zip(axes, clouds.items(), strict=True):
        points = principal_axes(rows)
        for kind in GENRES:
            axis.scatter(*points[kinds == kind].T, s=2, label=kind)
        axis.set_title(name)
    axes[0].legend(fontsize=6, loc="upper left")
    figure.tight_layout()
    plt.close(figure)
    return figure
