"""Run the runs of ml1m.toml, one result file for each run and seed, then write README.md: python experiments/ranking/run.py

Runs that have a result file are left alone. The epoch, and the settings of the `implicit` package, are chosen on the
validation choices; the held-out ones are read once.
"""

import itertools
import json
import time
import tomllib
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix

from featherbed.tasks.data import find_data, read_movielens
from featherbed.tasks.ranking import choices, train_bpr
from featherbed.tasks.ranking_metrics import ranking_metrics
from featherbed.tasks.results import Result

HERE = Path(__file__).parent
PUBLISHED = {"bpr": (0.6977, 0.6568, 0.6257), "sse-se": (0.7254, 0.6813, 0.6469)}


def run_implicit(settings, train, validation, seed):
    from implicit.cpu.als import AlternatingLeastSquares
    from implicit.cpu.bpr import BayesianPersonalizedRanking

    kind = {"als": AlternatingLeastSquares, "bpr": BayesianPersonalizedRanking}[
        settings["yardstick"]
    ]
    swept = {key: value for key, value in settings.items() if isinstance(value, list)}
    shape = (train.num_users, train.num_items)
    matrix = csr_matrix((np.ones(len(train), np.float32), train.items, train.starts), shape=shape)
    best = None
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        model = kind(**chosen, iterations=settings["iterations"], random_state=seed, num_threads=1)
        model.fit(matrix, show_progress=False)
        found = ranking_metrics(model.user_factors, model.item_factors, train, validation)
        if best is None or found["ndcg@10"] > best[0]["ndcg@10"]:
            best = found, chosen, model.user_factors, model.item_factors
    return best


def run(name, settings, common, ratings, seed):
    train, validation, test = choices(ratings, seed=seed)
    begun = time.perf_counter()
    result = Result(f"ranking-{name}", common | settings, seed)
    if "yardstick" in settings:
        found, chosen, users, items = run_implicit(settings, train, validation, seed)
        result.settings["chosen"] = chosen
    else:
        ranked = train_bpr(train, validation, **common, **settings, seed=seed, progress=False)
        users, items, found = ranked.users, ranked.items, ranked.history[ranked.epoch]
        result.history = ranked.history
    result.metrics = {
        "validation": found,
        "test": ranking_metrics(users, items, train.joined(validation), test),
    }
    result.seconds = time.perf_counter() - begun
    return result


def report(file):
    lines = [
        "# Ranking: BPR with shared embeddings",
        "",
        "`python experiments/ranking/run.py`; settings stand in ml1m.toml.",
        "",
    ]
    lines += [
        "MovieLens-1M, the 3,938 users with 60 ratings or more, 50 choices each to learn from, 5 to choose the epoch, the rest",
        "held out and ranked among all items; mean of 3 seeds and its standard error. Published (Wu et al. 2019, Table 3, as",
        "reported): 3,937 users, the epoch chosen on the test part.",
        "",
        "| run | P@1 | P@5 | P@10 | NDCG@10 | recall@10 | published P@1/5/10 | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ndcg = {}
    for name in file["runs"]:
        found = [
            json.loads(path.read_text())
            for path in sorted((HERE / "results").glob(f"{name}-seed*.json"))
        ]
        cells = []
        for metric in ("p@1", "p@5", "p@10", "ndcg@10", "recall@10"):
            values = np.array([one["metrics"]["test"][metric] for one in found])
            error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
            cells.append(f"{values.mean():.4f} ± {error:.4f}")
            if metric == "ndcg@10":
                ndcg[name] = values
        published = " ".join(f"{value:.4f}" for value in PUBLISHED.get(name, ()))
        lines.append(
            f"| {name} | {' | '.join(cells)} | {published} | {np.mean([one['seconds'] for one in found]):.0f} |"
        )
    gain = ndcg["sse-se"] - ndcg["bpr"]
    lines += [
        "",
        f"Sharing gains {gain.mean():+.4f} ± {gain.std(ddof=1) / len(gain) ** 0.5:.4f} NDCG@10 (seeds in pairs).",
    ]
    (HERE / "README.md").write_text("\n".join(lines) + "\n")


def main():
    file = tomllib.loads((HERE / "ml1m.toml").read_text())
    ratings = read_movielens(find_data(file["data"]))
    for name, settings in file["runs"].items():
        for seed in file["seeds"]:
            target = HERE / "results" / f"{name}-seed{seed}.json"
            if target.exists():
                continue
            result = run(
                name, settings, {} if "yardstick" in settings else file["bpr"], ratings, seed
            )
            target.parent.mkdir(exist_ok=True)
            result.write(target)
            print(target.stem, result.metrics["test"], f"{result.seconds:.0f} s", flush=True)
    report(file)


if __name__ == "__main__":
    main()
