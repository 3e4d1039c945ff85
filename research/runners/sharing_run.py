"""Run a settings file: python experiments/sse/run.py few.toml [model ...]. What has a result is left alone: stop at will."""

import itertools
import sys
import tomllib
from pathlib import Path

import numpy as np

from featherbed.papers.factors import train_als, train_sgd
from featherbed.papers.sources import open_source
from featherbed.tasks.results import Result

HERE = Path(__file__).parent


DATA = {
    "ml-1m": "ml-1m-few",
    "sse-split": "ml-1m-sse",
    "douban": "douban",
}  # what a settings file calls the ratings


def combinations(common, own):
    """Return the settings of a method: every combination of its lists and of weight decay."""
    lists = {"decay": common["decay"]} | {
        key: value for key, value in own.items() if isinstance(value, list)
    }
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))


def main():
    path = HERE / sys.argv[1]
    file = tomllib.loads(path.read_text())
    source = open_source(DATA[file["data"]])
    ratings, split, graphs = source.ratings, source.split, source.relations
    print(
        len(ratings),
        "ratings,",
        ratings.num_users,
        "users,",
        ratings.num_items,
        "items,",
        *graphs,
        flush=True,
    )
    models = sys.argv[2:] or file["models"]
    for model, dim, (method, own) in itertools.product(
        models, file["dims"], file["methods"].items()
    ):
        target = HERE / "results" / f"{path.stem}-{model}-{dim}-{method}.json"
        if target.exists():
            continue
        result = Result(
            f"sse {path.stem}",
            {"model": model, "dim": dim, "method": method, **file, **own},
            file["seeds"][0],
        )

        def run(settings, seed, model=model, dim=dim, method=method, own=own, result=result):
            loop = {
                "model": model,
                "dim": dim,
                "seed": seed,
                "patience": file["patience"],
                **settings,
            }
            loop |= {"epochs": own.get("epochs", file["epochs"])}
            if method == "als-laplacian":
                found = train_als(ratings, split(seed), **loop, graphs=graphs)
            else:
                with_graph = {"graphs": graphs} if method == "sse-graph" else {}
                found = train_sgd(ratings, split(seed), **loop, **with_graph, lr=file["lr"])
            result.history.append({**settings, "run_seed": seed, **found})
            return found["validation"]

        sweep, rest = file["seeds"][:2], file["seeds"][2:]
        chosen = min(
            combinations(file, own),
            key=lambda settings: np.mean([run(settings, seed) for seed in sweep]),
        )
        for seed in rest:
            run(chosen, seed)
        rows = [row for row in result.history if all(row[k] == v for k, v in chosen.items())]
        result.metrics["validation"] = {
            "rmse": float(np.mean([row["validation"] for row in rows]))
        } | chosen
        result.metrics["test"] = {"rmse": float(np.mean([row["test"] for row in rows]))}
        result.metrics["epochs"] = {"best": float(np.mean([row["epoch"] for row in rows]))}
        result.metrics["seconds"] = {"epoch": float(np.median([row["seconds"] for row in rows]))}
        result.write(target)
        print(target.stem, result.metrics, flush=True)


if __name__ == "__main__":
    main()
