"""Figure 3: movies without sharing, with SSE-Graph and with SSE-SE. python experiments/sse/figure3.py [page.html]

Trains three matrix factorisations of MovieLens-1M (d = 50, one rating at a time), writes distances to results/figure3.json, a
picture to figure3.png and, if asked for, the page on which the clouds can be turned.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from featherbed.papers.factors import Factors, shared_ids
from featherbed.papers.sources import open_source
from featherbed.tasks.results import Result
from featherbed.view.clouds import clouds_page, mean_distance, principal_axes

HERE = Path(__file__).parent
SETTINGS = {
    "dim": 50,
    "lr": 0.01,
    "decay": 0.1,
    "epochs": 40,
    "p": 0.1,
    "rho": [500, 200],
    "shown": 1000,
}
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


def learn(train, p, graphs, rho):
    factors = Factors(train, SETTINGS["dim"], "plain", 0)
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for _ in range(SETTINGS["epochs"]):
        factors.descend(
            train,
            shared_ids(train, p, graphs, rho, generator),
            SETTINGS["lr"],
            SETTINGS["decay"],
            0.0,
            rng,
        )
    return factors


def main():
    source = open_source("ml-1m")
    data, graphs = source.ratings, source.relations
    train, validation, _ = source.split(0)
    ways = {
        "without": (0.0, (None, None), (1.0, 1.0)),
        "SSE-Graph": (SETTINGS["p"], graphs, SETTINGS["rho"]),
        "SSE-SE": (SETTINGS["p"], (None, None), (1.0, 1.0)),
    }
    titles = source.titles
    group = [next((g for g in GENRES if g in own), "other") for own in source.genres]
    seen = np.bincount(train.items, minlength=data.num_items)
    shown = np.argsort(-seen)[: SETTINGS["shown"]]
    place = {movie: i for i, movie in enumerate(shown)}
    actors = np.array(
        [[place[a], place[b]] for a, b in graphs[1].pairs() if a in place and b in place]
    )
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(shown), size=(200_000, 2))
    drawn = drawn[drawn[:, 0] != drawn[:, 1]]
    kinds = np.array([group[movie] for movie in shown])
    alike = drawn[(kinds[drawn[:, 0]] == kinds[drawn[:, 1]]) & (kinds[drawn[:, 0]] != "other")]
    result, clouds, figures = Result("sse figure 3", SETTINGS, 0), {}, {}
    for name, (p, own, rho) in ways.items():
        factors = learn(train, p, own, rho)
        clouds[name] = factors.columns[shown]
        figures[name] = {
            "same actor": mean_distance(clouds[name], actors),
            "same genre": mean_distance(clouds[name], alike),
            "any two": mean_distance(clouds[name], drawn),
            "validation RMSE": factors.rmse(validation),
        }
        print(name, figures[name], flush=True)
    result.metrics = figures
    result.write(HERE / "results" / "figure3.json")
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), subplot_kw={"projection": "3d"})
    for axis, (name, rows) in zip(axes, clouds.items(), strict=True):
        points = principal_axes(rows)
        for kind in GENRES:
            axis.scatter(*points[kinds == kind].T, s=2, label=kind)
        axis.set_title(name)
    axes[0].legend(fontsize=6, loc="upper left")
    figure.tight_layout()
    figure.savefig(HERE / "figure3.png", dpi=110)
    if len(sys.argv) > 1:
        names = [titles[movie] for movie in shown]
        Path(sys.argv[1]).write_text(
            clouds_page(
                clouds, names, list(kinds), figures, "Movies: no sharing, SSE-Graph, SSE-SE"
            )
        )


if __name__ == "__main__":
    main()
