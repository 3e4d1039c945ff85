"""Rankings from implicit feedback: training, bits, serving, folding in, bad input."""

import json
import subprocess
import sys

import numpy as np
import pytest

import featherbed as fb
from featherbed.apps.recommender import (
    Confidence,
    Recommender,
    load_split,
    sort_by_frequency,
    train_ranking,
    train_recommender,
)
from featherbed.apps.recommender.als import AlsSearch, CountedEvents, fit_als
from featherbed.apps.recommender.ranking import ranking_metrics
from featherbed.apps.recommender.serve import split_history
from featherbed.cli import main
from featherbed.io.records import Ratings, read_ratings

FIXED = {"table.dim": 6, "als.alpha": 4.0, "als.regularization": 1.0, "als.sharpness": 0.1}


def events(users=90, items=60, each=14, groups=3, seed=0):
    """Users choose items of their group, popular ones more often; some a second time."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, items + 1) ** 0.5
    found = {}
    for user in range(users):
        own = weights * np.where(np.arange(items) % groups == user % groups, 8.0, 1.0)
        for item in rng.choice(items, each, replace=False, p=own / own.sum()).tolist():
            found[user, item] = int(rng.integers(1, 6))
    return found


def lines_of(found, names="user,item,plays,time"):
    rows = [f"u{u},i{i},{n},{100 + at}" for at, ((u, i), n) in enumerate(found.items())]
    return "\n".join([names, *rows]) + "\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranking")
    found = events()
    (folder / "titles.csv").write_text(
        "item,title\n" + "\n".join(f"i{i},Song {i}" for i in range(60))
    )
    # one user with a single event
    (folder / "plays.csv").write_text(lines_of({**found, (90, 0): 1}))
    log = []
    values = FIXED | {"titles": str(folder / "titles.csv")}
    outcome = train_ranking(
        folder / "plays.csv", folder / "out", values, progress=False, log=log.append
    )
    return folder, outcome, log


def test_the_stored_rows_are_measured_and_better_than_popularity(trained):
    folder, outcome, log = trained
    metrics = outcome.metrics
    assert metrics["test"]["ndcg@10"] > 1.1 * metrics["popularity"]["ndcg@10"]
    assert metrics["sizes"]["file"] <= metrics["sizes"]["float32"] / 8 + 1_200
    assert any("1 users with a single event are trained and not evaluated" in line for line in log)
    assert metrics["fold_in"]["users"] >= 20
    text = "\n".join(outcome.summary)
    assert "float32 ALS" in text and "popularity" in text and "folded in" in text
    report = (folder / "out" / "report.html").read_text()
    assert "By popularity" in report and "NDCG@10" in report


def test_metrics_are_those_of_the_lists_that_are_served(trained):
    folder, outcome, _ = trained
    model = Recommender.open(folder / "out")
    reading = read_ratings(folder / "plays.csv", implicit=True)
    split = sort_by_frequency(load_split(folder / "out" / "split.safetensors", reading.ratings))
    assert not {"u90"} & {split.test.user_keys[u] for u in split.test.users}
    found = []
    for user in np.unique(split.test.users):
        key = split.test.user_keys[user]
        wanted = {split.test.item_keys[i] for i in split.test.items[split.test.users == user]}
        listed = [one.key for one in model.recommend(key, 10)]
        gains = [1 / np.log2(rank + 2) for rank, item in enumerate(listed) if item in wanted]
        ideal = [1 / np.log2(rank + 2) for rank in range(min(10, len(wanted)))]
        found.append(sum(gains) / sum(ideal))
        seen = {model.items.keys[int(i)] for i in model.rated_items(model.users.ids_of(key))}
        assert not seen & set(listed)
    assert np.mean(found) == pytest.approx(outcome.metrics["test"]["ndcg@10"], abs=1e-6)


def test_folding_in_solves_the_normal_equations(trained):
    model = Recommender.open(trained[0] / "out")
    implicit = model.about.implicit
    history = [("i0", 3.0), ("i4", None), ("i9", 1.0), ("nothing", 1.0)]
    row = model.fold_in(history)
    items = model.items[:].astype(np.float64)
    ids = [int(model.items.ids_of(f"i{n}")) for n in (0, 4, 9)]
    confidence = np.ones(len(items))
    confidence[ids] = implicit.weights([3.0, 1.0, 1.0])
    chosen = np.zeros(len(items))
    chosen[ids] = 1

    def slope(x):
        return items.T @ (confidence * (items @ x - chosen)) + implicit.regularization * x

    raw = model.row_of_events(np.array(ids), implicit.weights([3.0, 1.0, 1.0]))
    np.testing.assert_allclose(slope(raw), 0, atol=1e-9)
    weighted = raw * np.diag(items.T @ items) ** implicit.sharpness
    np.testing.assert_allclose(row, weighted / np.linalg.norm(weighted), atol=1e-6)
    assert model.unknown_items(history) == ["nothing"]
    assert not {"i0", "i4", "i9"} & {one.key for one in model.recommend_history(history, 60)}
    with pytest.raises(fb.ArgumentError, match="count of the history is not above 0"):
        model.fold_in([("i0", -1.0)])


def test_counts_of_an_item_in_a_history_are_added(trained):
    model = Recommender.open(trained[0] / "out")
    twice = model.fold_in([("i3", 1.0), ("i6", 1.0), ("i3", 2.0)])
    np.testing.assert_array_equal(twice, model.fold_in([("i3", 3.0), "i6"]))


def test_rows_folded_in_are_near_those_of_training(trained):
    model = Recommender.open(trained[0] / "out")
    cosines, counts = [], events()
    for user in range(0, 90, 5):
        key = f"u{user}"
        ids = model.rated_items(int(model.users.ids_of(key)))
        items = [model.items.keys[int(i)] for i in ids]
        row = model.fold_in([(item, float(counts[user, int(item[1:])])) for item in items])
        stored = model.users[key]
        cosines.append(row @ stored / np.linalg.norm(stored))
    assert np.mean(cosines) > 0.93


def test_serving_needs_neither_torch_nor_implicit(trained):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['implicit'] = sys.modules['scipy'] = None;"
        "from featherbed.cli import main; main()"
    )
    model = Recommender.open(trained[0] / "out")
    for words, expected in (
        (["--user", "u3"], model.recommend("u3", 3)),
        (["--history", "i3,i6:2"], model.recommend_history([("i3", None), ("i6", 2.0)], 3)),
    ):
        command = [sys.executable, "-c", code, "recommend", str(trained[0] / "out"), "--json"]
        done = subprocess.run(
            [*command, "-k", "3", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found = [(item["key"], item["title"]) for item in json.loads(done.stdout)]
        assert found == [(one.key, one.title) for one in expected]


def test_bits_depend_on_the_budget(tmp_path, trained):
    outcome = train_ranking(
        trained[0] / "plays.csv", tmp_path / "out", FIXED | {"table.budget": "1600"}, progress=False
    )
    assert outcome.metrics["sizes"]["file"] <= 1_600
    values = FIXED | {"table.users": "quantized:bits=8", "table.items": "dense"}
    outcome = train_ranking(trained[0] / "plays.csv", tmp_path / "spec", values, progress=False)
    assert Recommender.open(tmp_path / "spec").users.made_by["table"] == "QuantizedTable"
    assert outcome.metrics["test"]["ndcg@10"] == pytest.approx(
        ranking_metrics_of(outcome, trained[0] / "plays.csv"), rel=0.1
    )


def ranking_metrics_of(outcome, path):
    """NDCG@10 of float32 rows with the same settings, fitted here."""
    known = CountedEvents.of(outcome.data.split.train, outcome.data.split.validation)
    held = CountedEvents.of(outcome.data.split.test)
    users, items = fit_als(known, Confidence(**outcome.metrics["implicit"]), 6)
    return ranking_metrics(users, items, known.lists, held.lists)["ndcg@10"]


def test_bpr_is_trained_and_folds_users_in(tmp_path, trained):
    values = FIXED | {"method": "bpr", "bpr.epochs": 12}
    outcome = train_ranking(trained[0] / "plays.csv", tmp_path / "out", values, progress=False)
    assert outcome.metrics["method"] == "bpr"
    assert outcome.metrics["test"]["ndcg@10"] > outcome.metrics["popularity"]["ndcg@10"]
    assert len(Recommender.open(tmp_path / "out").recommend_history([("i0", None)], 5)) == 5


def test_settings_are_searched_and_random_events_fall_back_to_popularity(tmp_path):
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, 31)
    lines = ["user,item"]
    for user in range(40):
        chosen = rng.choice(30, 8, replace=False, p=weights / weights.sum())
        lines += [f"{user},{item}" for item in chosen.tolist()]
    (tmp_path / "noise.csv").write_text("\n".join(lines))
    outcome = train_ranking(tmp_path / "noise.csv", tmp_path / "out", progress=False)
    metrics = outcome.metrics
    assert len(outcome.fitted.history) > 10
    assert metrics["test"]["ndcg@10"] > 0.7 * metrics["popularity"]["ndcg@10"]


def test_the_search_finds_what_is_better():
    keys = tuple(map(str, range(90)))
    found = events(groups=9, each=10)
    users, items = np.array(list(found)).T
    order = np.random.default_rng(0).permutation(len(users))
    values = np.ones(len(users), np.float32)
    train, held = (
        CountedEvents.of(Ratings(users[part], items[part], values[part], keys, keys[:60]))
        for part in (order[90:], order[:90])
    )
    search = AlsSearch(train, held)
    best, dim = search.run({"alpha": 4.0}, 8)
    assert best.alpha == 4.0 and dim == 8
    assert search.measure(best, dim) == max(search.measure(*one) for one in search.found)


def test_counts_are_weights_and_are_added(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("user,item,plays\na,x,2\na,x,3\nb,y,1\nb,x,0\n")
    reading = read_ratings(path, implicit=True)
    assert reading.columns["count"] == "plays"
    assert sorted(reading.ratings.values.tolist()) == [0.0, 1.0, 5.0]
    path.write_text("a,x\na,y\nb,x\n")
    assert read_ratings(path, implicit=True).ratings.values.tolist() == [1.0, 1.0, 1.0]
    path.write_text("a,x,1700000000\na,y,1700000001\nb,x,1700000002\n")
    reading = read_ratings(path, implicit=True)
    assert reading.ratings.times is not None and "count" not in reading.columns
    one = Confidence(2.0, 1.0, "linear")
    assert one.weights([3.0]).tolist() == [6.0]
    assert Confidence(2.0, 1.0, "binary").weights([3.0]).tolist() == [2.0]


def run(capsys, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["featherbed", *map(str, words)])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ("user,item,plays\na,x,1\na,y,-2\nb,x,1\n", (), "count -2 is below 0"),
        ("user,item,plays\na,x,1\na,y,NaN\nb,x,1\n", (), "count 'NaN' is not a number"),
        ("user,item,plays\na,x,0\na,y,0\nb,x,0\n", (), "every count is 0"),
        ("user,item\na,x\nb,x\nc,x\n", (), "events of one item only"),
        ("user,item\na,x\na,y\na,z\n", (), "of one user only"),
        ("user,item\na,x\nb,y\nc,z\n", (), "too few for a random split|part .* is empty"),
        ("user,item\na,x\na,y\nb,x\n", ("--split", "time"), "no times"),
        ("user,item\na,x\na,y\nb,x\n", ("--minimum", "4"), "no column of ratings"),
        ("user,item,rating\na,x,1\na,y,2\nb,x,1\n", ("--minimum", "4"), "no events are left"),
        ("user,item\na,x\n", ("--budget", "1KB", "--ratio", "3"), "not both"),
        ("name\na\n", (), "no columns between"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path, capsys, monkeypatch, content, words, message
):
    (tmp_path / "in.csv").write_text(content)
    out = tmp_path / "out"
    code, error = run(
        capsys, monkeypatch, "train", "ranking", tmp_path / "in.csv", "--out", out, *words
    )
    lines = [line for line in error.splitlines() if line.startswith("error")]
    assert code == 2 and len(lines) == 1, error
    import re

    assert re.search(message, lines[0]), lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv"]


def test_a_history_that_is_no_text_is_one_line(tmp_path, capsys, monkeypatch, trained):
    (tmp_path / "history").write_bytes(b"\xffi3\x80")
    assert len(split_history(",".join(["i3"] * 200))) == 200  # longer than any name of a file
    words = ("recommend", trained[0] / "out", "--history", tmp_path / "history")
    code, error = run(capsys, monkeypatch, *words)
    assert code == 2 and "cannot be read as UTF-8 text" in error and error.count("\n") == 1


def test_ratings_point_to_rankings(tmp_path, capsys, monkeypatch):
    (tmp_path / "same.csv").write_text("user,item,rating\na,x,1\na,y,1\nb,x,1\n")
    code, error = run(
        capsys, monkeypatch, "train", "ratings", tmp_path / "same.csv", "--out", tmp_path / "o"
    )
    assert code == 2 and "featherbed train ranking" in error
    heavy = {pair: 40 if n % 9 == 0 else 1 for n, pair in enumerate(events())}
    (tmp_path / "counts.csv").write_text(lines_of(heavy, "user,item,rating,time"))
    log = []
    train_recommender(
        tmp_path / "counts.csv", tmp_path / "r", {"table.dim": 4}, progress=False, log=log.append
    )
    assert any("featherbed train ranking" in line for line in log)


def test_a_file_of_ratings_is_read_as_events(tmp_path):
    found = {pair: 1 + n % 5 for n, pair in enumerate(events())}
    (tmp_path / "r.csv").write_text(lines_of(found, "user,item,rating,time"))
    log = []
    values = FIXED | {"reading.minimum": 4.0, "split.method": "leave-out"}
    outcome = train_ranking(
        tmp_path / "r.csv", tmp_path / "out", values, progress=False, log=log.append
    )
    assert any("pairs have a rating of 4 or more" in line for line in log)
    events_used = outcome.metrics["events"]
    assert sum(events_used.values()) <= sum(value >= 4 for value in found.values())


def test_a_broken_description_is_refused(tmp_path, trained):
    import shutil

    shutil.copytree(trained[0] / "out", tmp_path / "copy")
    path = tmp_path / "copy" / "recommender.json"
    good = json.loads(path.read_text())
    for change in ({"alpha": -1}, {"counts": "cubic"}, {"sharpness": "x"}, {"more": 1}):
        path.write_text(json.dumps(good | {"implicit": good["implicit"] | change}))
        with pytest.raises(fb.FormatError, match=r"recommender\.json\.implicit"):
            Recommender.open(tmp_path / "copy")


def test_the_server_serves_a_ranking(trained):
    pytest.importorskip("fastapi")
    httpx, anyio = pytest.importorskip("httpx"), pytest.importorskip("anyio")
    from featherbed.server.app import create_app
    from featherbed.server.catalog import Catalog

    model = Recommender.open(trained[0] / "out")
    app = create_app(Catalog([f"songs={trained[0] / 'out'}"]))

    async def ask(body):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.post("/songs/recommend", json=body)).json()

    found = anyio.run(ask, {"user": "u3", "k": 3})["items"]
    assert [item["key"] for item in found] == [one.key for one in model.recommend("u3", 3)]
    history = ["i3", {"item": "i6", "rating": 2.0}]
    found = anyio.run(ask, {"history": history, "k": 3})["items"]
    expected = model.recommend_history([("i3", None), ("i6", 2.0)], 3)
    assert [item["key"] for item in found] == [one.key for one in expected]
    assert "no item of the history is known" in str(anyio.run(ask, {"history": ["?"]}))
