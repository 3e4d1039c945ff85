"""Run a settings file: python experiments/sse/run.py few.toml [model ...]. What has a result is left alone: stop at will."""

import itertools
import sys
import tomllib
from pathlib import Path

import numpy as np
from mf import train_als, train_sgd

import featherbed as fb
from featherbed.tasks.data import Ratings, find_data, open_text, read_movielens
from featherbed.tasks.results import Result

HERE = Path(__file__).parent


def actor_graph(item_keys):
    place = {key: i for i, key in enumerate(item_keys)}
    lines = itertools.islice(open_text(find_data("kg-ml-1m") / "movie_actor.tsv"), 1, None)
    pairs = [line.rstrip("\n").split("\t") for line in lines]
    known = [(place[movie], actor) for movie, actor in pairs if movie in place]
    return fb.Graph.from_attributes(len(item_keys), ([i for i, _ in known], [actor for _, actor in known]), largest=100)


def age_graph(user_keys):
    age = {fields[0]: fields[2] for fields in (line.split("::") for line in open_text(find_data("ml-1m") / "users.dat"))}
    return fb.Graph.from_attributes(len(user_keys), [age[key] for key in user_keys])


def few_ratings(settings):
    """Return the ratings of users with few of them, users and items numbered anew, and the graphs of users and items."""
    data = read_movielens(find_data("ml-1m"))
    few = np.bincount(data.users)[data.users] < settings["fewer_than"]
    users, user_of = np.unique(data.users[few], return_inverse=True)
    items, item_of = np.unique(data.items[few], return_inverse=True)
    user_keys, item_keys = [data.user_keys[i] for i in users], [data.item_keys[i] for i in items]
    ratings = Ratings(user_of, item_of, data.values[few], tuple(user_keys), tuple(item_keys))
    return ratings, lambda seed: ratings.split(seed), (age_graph(user_keys), actor_graph(item_keys))


def authors_split(_settings):
    """Return the ratings of the split that the authors published; a tenth of its training part validates."""
    folder = find_data("ml-1m") / "sse-split"
    parts = [np.loadtxt(open_text(folder / f"ml1m_{part}_ratings.csv"), delimiter=",") for part in ("train", "test")]
    users, user_of = np.unique(np.concatenate([part[:, 0] for part in parts]), return_inverse=True)
    items, item_of = np.unique(np.concatenate([part[:, 1] for part in parts]), return_inverse=True)
    values = np.concatenate([part[:, 2] for part in parts]).astype(np.float32)
    names = tuple(str(int(u)) for u in users), tuple(str(int(i)) for i in items)
    return split_train(Ratings(user_of, item_of, values, *names), len(parts[0])), (None, None)


def douban(_settings):
    """Return the ratings of Douban as split by Monti et al., and the graph of its users."""
    import h5py

    with h5py.File(find_data("monti-graph-ratings") / "douban.mat") as file:
        matrix, train, test, graph = (np.array(file[name]).T for name in ("M", "Otraining", "Otest", "W_users"))
    rows, columns = (np.concatenate(both) for both in zip(np.nonzero(train), np.nonzero(test), strict=True))
    values = matrix[rows, columns].astype(np.float32)
    names = tuple(map(str, range(len(matrix)))), tuple(map(str, range(matrix.shape[1])))
    related = np.stack(np.nonzero(graph), axis=1)
    users = fb.Graph.from_edges(len(matrix), related)
    return split_train(Ratings(rows, columns, values, *names), int(train.sum())), (users, None)


def split_train(ratings, count):
    """Return how to split: the first ``count`` ratings train, but for a tenth of them that validates; the others test."""

    def split(seed):
        order = np.random.default_rng(seed).permutation(count)
        parts = np.sort(order[count // 10 :]), np.sort(order[: count // 10]), np.arange(count, len(ratings))
        return [ratings.take(part) for part in parts]

    return ratings, split


def combinations(common, own):
    """Return the settings of a method: every combination of its lists and of weight decay."""
    lists = {"decay": common["decay"]} | {key: value for key, value in own.items() if isinstance(value, list)}
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))


def main():
    path = HERE / sys.argv[1]
    file = tomllib.loads(path.read_text())
    made = {"ml-1m": few_ratings, "sse-split": authors_split, "douban": douban}[file["data"]](file)
    (ratings, split), graphs = made if len(made) == 2 else (made[:2], made[2])
    print(len(ratings), "ratings,", ratings.num_users, "users,", ratings.num_items, "items,", *graphs, flush=True)
    models = sys.argv[2:] or file["models"]
    for model, dim, (method, own) in itertools.product(models, file["dims"], file["methods"].items()):
        target = HERE / "results" / f"{path.stem}-{model}-{dim}-{method}.json"
        if target.exists():
            continue
        result = Result(f"sse {path.stem}", {"model": model, "dim": dim, "method": method, **file, **own}, file["seeds"][0])

        def run(settings, seed, model=model, dim=dim, method=method, own=own, result=result):
            loop = {"model": model, "dim": dim, "seed": seed, "patience": file["patience"], **settings}
            loop |= {"epochs": own.get("epochs", file["epochs"])}
            if method == "als-laplacian":
                found = train_als(ratings, split(seed), **loop, graphs=graphs)
            else:
                with_graph = {"graphs": graphs} if method == "sse-graph" else {}
                found = train_sgd(ratings, split(seed), **loop, **with_graph, lr=file["lr"])
            result.history.append({**settings, "run_seed": seed, **found})
            return found["validation"]

        sweep, rest = file["seeds"][:2], file["seeds"][2:]
        chosen = min(combinations(file, own), key=lambda settings: np.mean([run(settings, seed) for seed in sweep]))
        for seed in rest:
            run(chosen, seed)
        rows = [row for row in result.history if all(row[k] == v for k, v in chosen.items())]
        result.metrics["validation"] = {"rmse": float(np.mean([row["validation"] for row in rows]))} | chosen
        result.metrics["test"] = {"rmse": float(np.mean([row["test"] for row in rows]))}
        result.metrics["epochs"] = {"best": float(np.mean([row["epoch"] for row in rows]))}
        result.metrics["seconds"] = {"epoch": float(np.median([row["seconds"] for row in rows]))}
        result.write(target)
        print(target.stem, result.metrics, flush=True)


if __name__ == "__main__":
    main()
