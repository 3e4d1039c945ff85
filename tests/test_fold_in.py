"""New users: rows in closed form from the stored rows of items, without torch."""

import json
import subprocess
import sys

import numpy as np
import pytest

import featherbed as fb
from featherbed.apps.recommender import (
    Recommender,
    RecommenderSettings,
    parse_history,
    train_recommender,
    write_recommender,
)
from featherbed.io.records import make_ratings


def written(folder, biases, noise=0.25, dim=4, users=200, items=60):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(users, dim)) * [0.3, *[1.0] * (dim - 1)]
    films = rng.normal(size=(items, dim)) * [0.3, *[1.0] * (dim - 1)]
    tables = [
        fb.save(fb.DenseTable.from_dense(part), folder / f"{name}.safetensors", keys=keys)
        for name, part, keys in (
            ("u", rows, [f"u{i}" for i in range(users)]),
            ("i", films, [f"i{i}" for i in range(items)]),
        )
    ]
    apart = {}
    if biases == "apart":
        apart = {"user_bias": rng.normal(size=users), "item_bias": rng.normal(size=items)}
    seen = np.zeros(users + 1, np.int64), np.empty(0, np.int64)
    about = {"test_mse": noise}
    write_recommender(
        folder / "r", *tables, mean=3.0, biases=biases, seen=seen, about=about, **apart
    )
    return Recommender.open(folder / "r")


@pytest.mark.parametrize("biases", ["column", "apart", "none"])
def test_ratings_of_a_stored_user_give_its_row_back(tmp_path, biases):
    recommender = written(tmp_path, biases, noise=1e-8)
    items = [f"i{number}" for number in range(40)]
    ratings = recommender.score("u7", items).tolist()
    row = recommender.fold_in(list(zip(items, ratings, strict=True)))
    expected = recommender.users[7]
    if biases == "apart":
        expected = np.append(recommender._apart[0][7], expected)
    np.testing.assert_allclose(row, expected, atol=1e-3)
    best = recommender.recommend_history(list(zip(items, ratings, strict=True)), k=5)
    unrated = [item for item in recommender.recommend("u7", 60) if item.key not in items]
    assert [item.key for item in best] == [item.key for item in unrated[:5]]


@pytest.mark.parametrize("biases", ["column", "none"])
def test_the_row_minimizes_the_posterior(tmp_path, biases):
    recommender = written(tmp_path, biases)
    history = [("i3", 5.0), ("i9", 1.0), ("i9", 2.0), ("i20", 4.0)]
    row = recommender.fold_in(history).astype(np.float64)
    users = recommender.users[:].astype(np.float64)
    mean, variance = users.mean(0), users.var(0)
    ids = [3, 9, 9, 20]
    items = recommender.items[ids].astype(np.float64)
    ratings = np.array([5.0, 1.0, 2.0, 4.0])

    def cost(u):
        bias = u[0] + items[:, 0] if biases == "column" else 0.0
        first = int(biases == "column")
        scores = 3.0 + bias + items[:, first:] @ u[first:]
        return ((ratings - scores) ** 2).sum() / 0.25 + ((u - mean) ** 2 / variance).sum()

    rng = np.random.default_rng(1)
    for _ in range(50):
        assert cost(row) <= cost(row + 1e-3 * rng.normal(size=4))


def test_unknown_items_are_skipped_and_named(tmp_path):
    recommender = written(tmp_path, "column")
    history = [("i3", 5.0), ("zz", 1.0)]
    np.testing.assert_array_equal(recommender.fold_in(history), recommender.fold_in(history[:1]))
    assert recommender.unknown_items(history) == ["zz"]
    with pytest.raises(fb.ArgumentError, match="no item of the history is known"):
        recommender.fold_in([("zz", 1.0)])
    with pytest.raises(fb.ArgumentError, match="not a finite number"):
        recommender.fold_in([("i3", float("nan"))])
    assert "i3" not in [item.key for item in recommender.recommend_history([("i3", None)], k=60)]


def test_histories_are_parsed(tmp_path):
    (tmp_path / "history.txt").write_text("i3:5\ni9\n")
    assert parse_history(str(tmp_path / "history.txt")) == [("i3", 5.0), ("i9", None)]
    assert parse_history("uri:3,i9:2", items=["uri:3"]) == [("uri:3", None), ("i9", 2.0)]
    with pytest.raises(fb.ArgumentError, match="item:rating"):
        parse_history("i3:good")
    text = "Heat, The\nFog, The:2\ni9,i3:4"
    commas = [("Heat, The", None), ("Fog, The", 2.0), ("i9", None), ("i3", 4.0)]
    assert parse_history(text, items=["Heat, The", "Fog, The"]) == commas


def test_histories_need_no_ratings(tmp_path):
    recommender = written(tmp_path, "column")
    row = recommender.fold_in([("i3", None), ("i4", None)])
    np.testing.assert_array_equal(recommender.fold_in(["i3", "i4"]), row)
    assert recommender.unknown_items(["i3", "zz"]) == ["zz"]
    every = recommender.recommend_history(["i3"], 10**6, include_history=True)
    assert len(every) == recommender.about.items
    assert len(recommender.recommend_history(["i3"], 10**6)) == recommender.about.items - 1


def test_the_command(tmp_path):
    recommender = written(tmp_path, "column")
    code = "import sys; sys.modules['torch'] = None; from featherbed.cli import main; main()"

    def run(*words):
        command = [sys.executable, "-c", code, "recommend", str(tmp_path / "r"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run("--history", "i3:5,zz", "-k", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert "unknown items are skipped: zz" in done.stderr
    expected = recommender.recommend_history([("i3", 5.0)], k=2)
    assert [item["key"] for item in json.loads(done.stdout)] == [item.key for item in expected]
    assert run().returncode == 2
    assert run("--history", "zz").returncode == 2


def test_users_held_out_of_training_are_predicted_as_well(tmp_path):
    """Ratings of held-out users: folding in is near to training with them."""
    data = make_ratings(400, 120, 16_000, seed=0)
    rng = np.random.default_rng(0)
    lines = [
        f"{u},{i},{r:.3f}" for u, i, r in zip(data.users, data.items, data.values, strict=True)
    ]
    held = set(rng.choice(400, 60, replace=False).tolist())
    test = rng.random(len(lines)) < 0.2
    given, wanted = [], []
    for line, user, hidden in zip(lines, data.users.tolist(), test.tolist(), strict=True):
        if user in held:
            (wanted if hidden else given).append(line)
    others = [line for line, u in zip(lines, data.users.tolist(), strict=True) if u not in held]
    errors = {}
    for name, content in {"without": others, "with": others + given}.items():
        (tmp_path / f"{name}.csv").write_text("user,item,rating\n" + "\n".join(content) + "\n")
        settings = RecommenderSettings.from_values({"table.budget": "20KB"})
        train_recommender(tmp_path / f"{name}.csv", tmp_path / name, settings)
        model, total = Recommender.open(tmp_path / name), []
        for user in sorted(held):
            own = [line.split(",") for line in wanted if line.startswith(f"{user},")]
            keys = [item for _, item, _ in own if item in model.items]
            truth = np.array([float(rating) for _, item, rating in own if item in model.items])
            if name == "with":
                found = model.score(str(user), keys)
            else:
                history = [line.split(",") for line in given if line.startswith(f"{user},")]
                row = model.fold_in([(item, float(rating)) for _, item, rating in history])
                query, base = model._query_of(row)
                found = model.items[keys] @ query + base if keys else np.empty(0)
            total.append((found - truth) ** 2)
        errors[name] = float(np.concatenate(total).mean())
    assert errors["without"] < 1.05 * errors["with"], errors
