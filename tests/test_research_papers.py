"""Papers: every one runs end to end on generated ratings; results are kept, summaries add up, bad settings are refused."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from featherbed.errors import ArgumentError, DataError, FeatherbedError
from featherbed.io.opening import find_data
from research.harness import command
from research.harness import run as running
from research.harness.page import summary_page
from research.harness.records import Outcome, Run, read_record, record_path
from research.harness.report import REPORTS
from research.harness.run import Results, planned, read_results, run_experiment
from research.harness.settings import (
    Row,
    experiment_names,
    paper_names,
    parse_experiment,
    read_experiment,
)
from research.harness.summary import (
    BESIDE,
    MEASURES,
    Figure,
    as_markdown,
    cells,
    heading,
    mean_and_error,
    summarise,
)
from research.runners.factorization import Factors, train_als, train_sgd
from research.runners.factors import checked
from research.runners.ratings import OWN, run_recipe, settings_of
from research.runners.sweep import combinations
from research.sources.events import SOURCES as EVENTS
from research.sources.neighbors import READERS
from research.sources.ratings import SOURCES, open_source, split_train
from research.sources.texts import CORPORA, TEXTS

NAMES = paper_names()
ONE_SEED = ("ant/ptb", "ant/softmax", "ant/online-long", "kd/table1", "kd/figure1", "sse/bert")
SEARCHES = ("hamming", "lookup", "asymmetric", "users_hamming", "users_lookup")
OPTIONAL = {  # measures that only some tables have
    "anchors",
    "user_anchors",
    "item_anchors",
    "bytes",
    "utilisation",
    "duplicates",
    *(f"{kind}_{of}" for kind in SEARCHES for of in ("precision", "recall")),
}
SMALL = {
    "title": "a table",
    "paper": "somebody",
    "task": "factors",
    "data": "ml-1m-few",
    "measures": ["rmse", "epochs"],
    "settings": {
        "model": "biases",
        "dim": 4,
        "lr": 0.02,
        "decay": 0.05,
        "epochs": 2,
        "patience": 2,
    },
    "rows": [
        {"name": "plain", "published": {"rmse": 0.5}},
        {"name": "shared", "settings": {"p": 0.1}},
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("papers")


def small(**changes):
    return parse_experiment("test/small", SMALL | changes)


@pytest.mark.parametrize("name", NAMES)
def test_every_paper_runs_and_shows_its_rows(name, folder, capsys):
    command.run(name, folder, size="quick", quiet=True)
    paper = read_experiment(name, quick=True)
    printed = capsys.readouterr().out
    page = (folder / name / "summary.html").read_text()
    assert paper.title in printed
    assert "A quick run on generated" in printed
    results = read_results(paper, folder)
    assert not results.missing
    for row in paper.rows:
        assert row.label in page
        for record in results.records.get(row.name, {}).values():
            assert {*paper.measures} - {*OPTIONAL, *BESIDE} <= {*record["measures"]}
            assert all(math.isfinite(value) for value in record["measures"].values())
            assert {"featherbed", "torch", "numpy"} == {*record["versions"]}
            assert record["history"] or paper.task == "hashes"
    drawn = "Plotly.newPlot(" in page
    assert drawn == (paper.plot != "none")


def test_what_the_issue_asks_for_is_there():
    wanted = {
        "ant/table14",
        "ant/table5",
        "ant/online",
        "ant/figure3",
        "ant/figure4",
        "ant/figure7",
        "ant/figure8",
    }
    assert wanted | {"sse/table1", "sse/table3"} <= {*NAMES}
    published = [row.published for row in read_experiment("ant/table14").rows]
    for mse, parameters in ((0.772, 59_400), (0.786, 29_200), (0.836, 10_800), (0.795, 27_700)):
        assert any(
            {"mse": mse, "parameters": parameters}.items() <= found.items() for found in published
        ), mse
    for name in NAMES:
        assert read_experiment(name).differences, "a paper names where its protocol differs"
        seeds = 1 if name in ONE_SEED else 10 if name == "kd/gcn" else 3
        assert read_experiment(name).seeds == tuple(range(seeds))


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_every_row_are_accepted(name):
    paper = read_experiment(name)
    data = {*SOURCES, *TEXTS, *CORPORA, *READERS, *EVENTS, "multi30k", "planetoid", "conll2003"}
    assert paper.data in data
    assert {*paper.measures} <= {*MEASURES}
    for row in paper.rows:
        assert {*row.published} <= {*MEASURES}
        if paper.task == "ratings":
            own = {key: row.settings[key] for key in OWN if key in row.settings}
            recipe = settings_of(
                {key: value for key, value in row.settings.items() if key not in OWN}, own
            )
            assert recipe.grows == bool(own.get("grows"))
        if paper.task == "factors":
            given = {key: row.settings[key] for key in row.settings if key != "sweep"}
            for chosen in combinations(row.settings.get("sweep", {})):
                assert "epochs" in checked({**given, **chosen})[1]


def test_experiments_are_listed(capsys):
    command.main(["list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == experiment_names()
    assert lines[0].split()[1:5] == ["36", "of", "36", "results"]


def test_results_are_left_alone_and_made_again_alike(tmp_path):
    paper = small()
    first = run_experiment(paper, tmp_path, quick=True)
    path = record_path(tmp_path, paper.rows[0], 0)
    other = record_path(tmp_path, paper.rows[1], 2)
    before, kept = path.read_text(), other.stat().st_mtime_ns
    path.unlink()
    second = run_experiment(paper, tmp_path, quick=True)
    assert other.stat().st_mtime_ns == kept

    def exact(record):
        return {key: record["measures"][key] for key in ("rmse", "validation", "train", "epochs")}

    assert exact(json.loads(path.read_text())) == exact(json.loads(before))
    assert exact(first.records["plain"][0]) != exact(first.records["plain"][1])
    assert exact(first.records["plain"][0]) != exact(first.records["shared"][0])
    assert [*second.records["plain"]] == [0, 1, 2]
    assert not [*tmp_path.rglob("*.tmp")]


def test_shared_rows_have_one_result(tmp_path):
    paper = read_experiment("ant/figure7", quick=True)
    homes = {row.home for row in paper.rows}
    assert homes == {"ant/figure3", "ant/figure7"}
    assert record_path(tmp_path, paper.rows[0], 0).parent == tmp_path / "ant" / "figure3"


def test_results_of_other_settings_are_refused(tmp_path):
    run_experiment(small(seeds=[0]), tmp_path, quick=True)
    changed = small(seeds=[0], settings=SMALL["settings"] | {"decay": 0.1})
    with pytest.raises(ArgumentError, match=r"other settings \(decay\): give another --out"):
        run_experiment(changed, tmp_path, quick=True)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"paper": "x"}'])
def test_files_that_are_no_results_are_refused(tmp_path, text):
    path = tmp_path / "row-seed-0.json"
    path.write_text(text)
    with pytest.raises(DataError, match="is no result"):
        read_record(path, Row("row", "row", "test/small", {}))


def test_ctrl_c_keeps_the_results_so_far(tmp_path, monkeypatch, capsys):
    runs = []

    def stopped(settings, seed, source, run):
        runs.append(seed)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return Outcome({"rmse": 1.0 + seed, "epochs": 2.0}, [{"epoch": 0}])

    monkeypatch.setattr(running, "_runner", lambda task: stopped)
    with pytest.raises(SystemExit) as ended:
        command.run(
            "sse/table1", tmp_path, size="quick", seeds="0,1", rows="sgd,sse-se", quiet=True
        )
    assert ended.value.code == 130
    printed = capsys.readouterr().out
    assert "Stopped" in printed
    assert "Not run yet: all rows (seed 1)" in printed
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == [
        "sgd-seed-0.json",
        "sse-se-seed-0.json",
    ]


def test_means_errors_and_differences():
    assert mean_and_error([]) == (None, None)
    assert mean_and_error([2.0]) == (2.0, None)
    values = [0.74, 0.75, 0.79, 0.72]
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(np.mean(values))
    assert error == pytest.approx(np.std(values, ddof=1) / 2)
    figure = Figure("mse", 0.75, 0.01, 0.786)
    assert (figure.text, figure.published_text, figure.difference_text) == (
        "0.7500 ± 0.0100",
        "0.7860",
        "-0.0360",
    )
    assert Figure("parameters", 29_102.0, None, 29_200).difference_text == "-0.1"
    assert Figure("purity", 0.5, None, 0.617).difference_text == "-11.7"
    assert replace(figure, compared=False).difference is None
    assert replace(figure, mean=None).text == "–"


def test_a_summary_adds_up():
    rows = [
        {"name": "a", "published": {"rmse": 1.5}, "reported": True},
        {"name": "b", "label": "<b>bold</b>"},
        {"name": "c", "published": {"rmse": 1.0}, "runs": False},
    ]
    paper = small(rows=rows, about="About.", differences=["another split"])
    assert [(row.name, seed) for row, seed in planned(paper)] == [
        (n, s) for s in (0, 1, 2) for n in "ab"
    ]
    same = {"seconds": 2.0, "details": {}, "history": []}
    records = {
        "a": {seed: {"measures": {"rmse": 1.0 + seed, "epochs": 4.0}, **same} for seed in (0, 1, 2)}
    }
    results = Results(paper, records)
    lines = summarise(results)
    assert heading(lines) == [
        "row",
        "test RMSE",
        "published",
        "difference",
        "epochs",
        "seeds",
        "seconds",
    ]
    assert cells(lines[0], lines) == [
        "a",
        "2.0000 ± 0.5774",
        "1.5000*",
        "+0.5000",
        "4.0 ± 0.0",
        "3",
        "2",
    ]
    assert cells(lines[2], lines) == ["c", "–", "1.0000", "–", "–", "0", "–"]
    text = as_markdown(results)
    assert "- Protocol: another split" in text
    assert "Not run yet: b (seeds 0, 1, 2)." in text
    page = summary_page(results)
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "<b>bold</b>" not in page
    assert "0 of 1 at or below the published number" in page
    with pytest.raises(ArgumentError, match="unknown measures speed"):
        summarise(Results(replace(paper, measures=("speed",)), {}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "cooking"}, "use one of ratings, online, factors, ranking"),
        ({"plot": "pie"}, "plot='pie'"),
        ({"colour": "red"}, "unknown colour"),
        ({"rows": []}, "at least one row"),
        ({"rows": [{"name": "a"}, {"name": "a"}]}, "a name of its own"),
        ({"rows": [{"name": "a/b"}]}, "letters, digits"),
        ({"rows": [{"name": "a", "publshed": {}}]}, "unknown publshed"),
        ({"rows": [{"name": "a", "published": {"rmse": math.nan}}]}, "finite"),
        ({"seeds": [0, 0]}, "different whole numbers"),
        ({"seeds": [-1]}, "at least 0"),
        ({"with": "ant/nothing"}, "no experiment 'ant/nothing'"),
    ],
)
def test_settings_files_are_checked(changes, message):
    with pytest.raises(ArgumentError, match=message):
        small(**changes)
    with pytest.raises(ArgumentError, match="title missing"):
        parse_experiment(
            "test/small", {key: value for key, value in SMALL.items() if key != "title"}
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"name": "ant/table99"},
            "no experiment 'ant/table99': there are ant/figure3, ant/figure4",
        ),
        ({"name": "sse/table1", "rows": "sgd,nothing"}, "has no row nothing: its rows are sgd"),
        ({"name": "sse/table1", "seeds": "0,x"}, "--seeds 0,x"),
        ({"name": "sse/table1", "seeds": "1,1"}, "--seeds 1,1"),
    ],
)
def test_bad_requests_say_what_there_is(given, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        command.run(**given, out=tmp_path / "out", size="quick", quiet=True)
    assert not (tmp_path / "out").exists()


def test_missing_data_says_where_to_put_it(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="FEATHERBED_DATA"):
        command.run("sse/table1", tmp_path / "out", data=tmp_path, quiet=True)
    monkeypatch.setenv("FEATHERBED_DATA", str(tmp_path))
    with pytest.raises(DataError, match="FEATHERBED_DATA"):
        command.run("ant/online", tmp_path / "out", quiet=True)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ArgumentError, match="is a file"):
        command.run("ant/online", file, size="quick", quiet=True)
    with pytest.raises(ArgumentError, match="papers are run on"):
        open_source("netflix")


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("ratings", {"speed": 3}, "speed: no setting of a recommender"),
        ("ratings", {"grows": True}, "prices"),
        ("factors", {"model": "deep", "epochs": 1}, "model='deep'"),
        ("factors", {"how": "magic"}, "factors are trained by"),
        ("factors", {"how": "als", "p": 0.1}, "p: no setting of als"),
        ("online", {"dim": 4}, "an online run takes"),
        ("ranking", {"depth": 3}, "depth: no setting of a ranking"),
    ],
)
def test_settings_a_task_does_not_know_are_refused(task, settings, message):
    with pytest.raises(FeatherbedError, match=message):
        running._runner(task)(settings, 0, open_source("ml-1m", quick=True), Run())


def test_factors_learn_and_stop_on_validation():
    source = open_source("ml-1m", quick=True)
    data, parts = source.ratings, source.split(0)
    untrained = Factors(data, 4, "biases", 0)
    untrained.mean = np.float32(parts[0].values.mean())
    seen = []
    same = {"model": "biases", "dim": 4, "seed": 0, "patience": 3}
    loop = {
        **same,
        "lr": 0.05,
        "decay": 0.02,
        "epochs": 40,
        "after": lambda epoch, error: seen.append(error),
    }
    found = train_sgd(data, parts, **loop)
    assert found["test"] < 0.8 * untrained.rmse(parts[2])
    assert found["validation"] == pytest.approx(min(seen))
    assert found["epoch"] == int(np.argmin(seen))
    assert len(seen) == 40 or len(seen) - 1 == found["epoch"] + 3
    assert train_sgd(data, parts, **loop, drop=0.5)["train"] > found["train"]
    assert train_sgd(data, parts, **loop, p=0.5)["train"] > found["train"]
    squares = train_als(data, parts, **same, decay=1.0, pull=0.0, graphs=(None, None), epochs=5)
    assert squares["train"] < 0.8 * untrained.rmse(parts[0])


def test_least_squares_follow_the_graph():
    source = open_source("ml-1m", quick=True)
    own = {
        "model": "mean",
        "dim": 4,
        "seed": 0,
        "decay": 1.0,
        "epochs": 3,
        "patience": 3,
        "graphs": source.relations,
    }
    free, pulled = (
        train_als(source.ratings, source.split(0), **own, pull=pull) for pull in (0.0, 1e4)
    )
    assert pulled["train"] > free["train"]
    assert train_als(
        source.ratings, source.split(0), **own | {"graphs": (None, None)}, pull=1e4
    ) | {"seconds": 0} == free | {"seconds": 0}


def test_subgradients_pull_rows_to_zero():
    source = open_source("ml-1m", quick=True)
    common = {"dim": 4, "epochs": 3, "batch": 64, "lr": 0.02}
    free = run_recipe({**common, "l1": 0.0}, 0, source, Run())
    pulled = run_recipe({**common, "l1": 0.1}, 0, source, Run())
    mean = float(source.split(0)[0].values.mean())
    only_mean = float(np.mean((source.split(0)[1].values - mean) ** 2))
    assert pulled.measures["validation"] == pytest.approx(only_mean, rel=0.02)
    assert free.measures["validation"] < 0.95 * only_mean


def test_splits_of_a_given_training_part():
    ratings = open_source("ml-1m", quick=True).ratings
    train, validation, test = split_train(ratings, 1000)(3)
    assert (len(train), len(validation), len(test)) == (900, 100, len(ratings) - 1000)
    assert sorted([*train.values, *validation.values]) == sorted(ratings.values[:1000])


def test_real_sources():
    try:
        find_data("ml-1m")
        find_data("kg-ml-1m")
    except DataError as error:
        pytest.skip(str(error))
    few = open_source("ml-1m-few")
    assert np.bincount(few.ratings.users).max() < 60
    assert few.genres[0] == ["Animation", "Children's", "Comedy"]
    assert few.titles[0] == "Toy Story (1995)"
    users, items = few.relations
    assert users.objects == few.ratings.num_users
    assert items.degrees.sum() > 0


def test_a_refit_keeps_the_support_and_learns_on():
    source = open_source("ml-1m", quick=True)
    growing = {
        "users": "growinganchor:anchors=3",
        "items": "growinganchor:anchors=3",
        "grows": True,
        "prices": [0.01, 1e-5],
    }
    common = {
        **growing,
        "dim": 4,
        "epochs": 4,
        "patience": 4,
        "batch": 128,
        "lr": 0.02,
        "lam": 2e-3,
        "cosine": False,
    }
    grown = run_recipe(common, 0, source, Run())
    refitted = run_recipe({**common, "refit": 6}, 0, source, Run())
    assert [row["epoch"] for row in refitted.history] == [*range(10)]
    assert refitted.measures["anchors"] == grown.measures["anchors"]
    assert 0 < refitted.measures["nonzeros"] <= grown.measures["nonzeros"]
    assert refitted.history[-1]["train_mse"] < grown.history[-1]["train_mse"]


@pytest.mark.parametrize("name", REPORTS)
def test_every_readme_is_what_its_results_say(name):
    pytest.importorskip("matplotlib")
    if name == "recommenders":
        pytest.importorskip("optuna")
    command.report([name], check=True)
