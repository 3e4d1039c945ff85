"""Papers about texts: sizes, settings of all rows, quick runs, gaps to plain rows, data that not everybody has."""

import csv
import math

import numpy as np
import pytest

from featherbed.errors import ArgumentError, DataError
from featherbed.io.opening import find_data
from featherbed.tables import AnchorTable, DenseTable, LowRankTable, SelectedTable, TensorTrainTable
from featherbed.tables.spec import make_table
from research.harness import command
from research.harness.page import summary_page
from research.harness.records import Run, record_path
from research.harness.run import Results, run_experiment
from research.harness.settings import changed, experiment_names, parse_experiment, read_experiment
from research.harness.summary import BESIDE, MEASURES, notes, summarise
from research.runners.language import compressed, language_settings, run_language, shortened
from research.runners.text import run_text, sized, table_sizes, text_settings
from research.sources.texts import CORPORA, TEXTS, generated_texts, open_corpus, open_texts

NAMES = ["ant/table1", "ant/table2", "ant/table11", "ant/table12", "ant/table15", "kd/text"]
KINDS = {"text": (text_settings, 41_796), "language": (language_settings, 10_000)}
MINE = {
    "title": "a table",
    "paper": "somebody",
    "task": "text",
    "data": "ag-news",
    "measures": ["accuracy", "gap_points", "times"],
    "settings": {"model": "bag", "epochs": 1, "batch": 64, "words": {"spec": "dense", "dim": 4}},
    "sizes": {
        "small": {"settings": {"lr": 0.01}},
        "full": {"seeds": [5], "settings": {"lr": 0.02, "words": {"dim": 6}}},
    },
    "rows": [
        {"name": "plain", "published": {"accuracy": 0.9}},
        {
            "name": "kept",
            "beside": "plain",
            "published": {"accuracy": 0.88},
            "settings": {"times": 2.0, "words": {"spec": "selected"}},
            "sizes": {"full": {"times": 4.0}},
        },
    ],
}


def mine(size=None, quick=False, **changes):
    return parse_experiment("test/mine", MINE | changes, quick, size)


def write_texts(folder, texts):
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train.csv", texts.train), ("test.csv", texts.test)):
        with (folder / name).open("w", newline="") as file:
            rows = zip(part.labels.tolist(), part.texts, strict=True)
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(
                [label + 1, "a title", text] for label, text in rows
            )


def test_what_the_issue_asks_for_is_there():
    assert {*NAMES} <= {*experiment_names()}
    for name in NAMES:
        paper = read_experiment(name)
        assert paper.sizes == ("small", "full")
        assert paper.size == "small"
        assert paper.seeds == (0, 1, 2)
        assert paper.home == f"{name}/small"
    published = {row.name: row.published for row in read_experiment("ant/table12").rows}
    assert published["ant-awd-100-domain"] | published["awd"] == {
        "perplexity": 59.0,
        "parameters": 4e6,
        "times": 1.0,
    }
    assert published["ant-awd-100-domain"]["perplexity"] == 70.0
    assert all(row.reported for row in read_experiment("kd/text").rows if row.published)
    assert not any(row.reported for name in NAMES[:5] for row in read_experiment(name).rows)


def test_table_15_agrees_with_its_own_numbers():
    for row in read_experiment("ant/table15").rows:
        own = row.published
        for price in ("2e-5", "1e-4", "1e-1"):
            lambda1, lambda2 = float(price), row.settings["lambda2"]
            value = (
                math.log(own["perplexity"])
                + lambda2 * own["nonzeros"]
                + (lambda1 - lambda2) * own["word_anchors"]
            )
            assert value == pytest.approx(
                own[f"objective_{price}"], abs=0.051 if price == "1e-1" else 0.0101
            )


@pytest.mark.parametrize("size", ["small", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_settings_of_every_row_are_accepted_and_lead_to_the_published_size(name, size):
    paper = read_experiment(name, size=size)
    settings_of, count = KINDS[paper.task]
    assert {*paper.measures} <= {*MEASURES}
    names = {row.name for row in paper.rows}
    for row in paper.rows:
        assert row.data in (*TEXTS, *CORPORA)
        assert row.home.endswith(f"/{size}")
        settings = {
            key: value
            for key, value in row.settings.items()
            if key != "times" or "post" not in row.settings
        }
        words = settings_of(settings, count).table
        elsewhere = name in ("ant/table2", "ant/table15") and row.beside == "lstm-200"
        assert row.beside in {*names, ""} or elsewhere, "a row stands beside one of its paper"
        if "times" in row.settings and not row.replaced:
            assert row.settings["times"] == pytest.approx(row.published["times"], abs=0.051)
            if words.nonzeros is not None:
                anchors = int(words.spec.partition("anchors=")[2].split(",")[0]) * (
                    4 if "sets=4" in words.spec else 1
                )
                total = words.nonzeros + anchors * words.dim
                assert count * words.dim / total == pytest.approx(row.settings["times"], rel=1e-3)


def test_tensor_trains_have_the_published_ratio():
    for size, dim in (("small", 64), ("full", 200)):
        row = next(
            row
            for row in read_experiment("ant/table2", size=size).rows
            if row.name == "tensortrain"
        )
        table = make_table(row.settings["words"]["spec"], 10_000, dim)
        assert isinstance(table, TensorTrainTable)
        assert 10_000 * dim / table.parameter_count() == pytest.approx(
            row.published["times"], rel=0.03
        )


def test_sizes_change_settings_seeds_and_folders(tmp_path):
    small, full, quick = mine(), mine("full"), mine(quick=True)
    assert [row.settings["lr"] for row in (*small.rows, *full.rows)] == [0.01, 0.01, 0.02, 0.02]
    assert [row.settings["words"]["dim"] for row in (small.rows[1], full.rows[1])] == [4, 6]
    assert [paper.rows[1].settings["times"] for paper in (small, full)] == [2.0, 4.0]
    assert (small.seeds, full.seeds, quick.seeds) == ((0, 1, 2), (5,), (0,))
    homes = [record_path(tmp_path, paper.rows[0], 0).parent.name for paper in (small, full, quick)]
    assert homes == ["small", "full", "mine"]
    assert "SIZE=full" in summary_page(Results(full, {}))
    with pytest.raises(ArgumentError, match="comes in small and full: size 'huge'"):
        mine("huge")
    with pytest.raises(ArgumentError, match="one size only"):
        read_experiment("sse/table1", size="full")
    with pytest.raises(ArgumentError, match="size='huge'"):
        mine(sizes={"huge": {}})
    with pytest.raises(ArgumentError, match="unknown epochs"):
        mine(sizes={"small": {"epochs": 3}})


def test_changes_reach_into_tables():
    settings = {"epochs": 3, "words": {"spec": "dense", "dim": 4}}
    assert changed(settings, {"words": {"dim": 8}, "lr": 1}) == {
        "epochs": 3,
        "words": {"spec": "dense", "dim": 8},
        "lr": 1,
    }
    assert changed(settings, {"words": {"by": "random"}, "lr": 1}, known_only=True) == settings
    assert settings["words"] == {"spec": "dense", "dim": 4}


def test_tables_are_made_to_a_size():
    assert sized({"spec": "lowrank", "dim": 8}, 2, 100)["spec"] == "lowrank:rank=4"
    assert sized({"spec": "selected:rest=3", "dim": 8}, 4, 100)["spec"] == "selected:rest=3,keep=22"
    assert sized({"spec": "mixture:anchors=5,sets=2", "dim": 8}, 4, 100)["nonzeros"] == 120
    for words, times in (({"spec": "lowrank", "dim": 8}, 2), ({"spec": "selected", "dim": 8}, 4)):
        table = make_table(sized(words, times, 100)["spec"], 100, 8)
        assert isinstance(table, LowRankTable | SelectedTable)
        assert table_sizes(table)["times"] == pytest.approx(times, rel=0.1)
    with pytest.raises(ArgumentError, match="50 anchors alone have 400 parameters"):
        sized({"spec": "anchor:anchors=50", "dim": 8}, 4, 100)
    with pytest.raises(ArgumentError, match="leave times out"):
        sized({"spec": "dense", "dim": 8}, 4, 100)


def test_sizes_of_tables_that_cannot_be_packed_are_parameters():
    assert {*table_sizes(TensorTrainTable(27, 8, rank=2))} == {"parameters", "times"}
    dense = table_sizes(DenseTable(1000, 8))
    assert dense["times"] == 1.0
    assert 0.9 < dense["ratio"] <= 1.0


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        (run_text, {"speed": 3}, "speed: no setting of a row"),
        (run_text, {"words": {"size": 3}}, "size: no setting of words"),
        (run_language, {"depth": 3}, "depth: no setting of a row"),
        (run_language, {"cut": 0, "words": {"dim": 4}, "hidden": 4}, "cut=0"),
    ],
)
def test_settings_a_task_does_not_know_are_refused(task, settings, message):
    source = generated_texts() if task is run_text else open_corpus("ptb", quick=True)
    with pytest.raises(ArgumentError, match=message):
        task(settings, 0, source, Run())


def test_a_text_row_is_measured_and_repeats_itself(tmp_path):
    paper = read_experiment("ant/table1", quick=True).chosen(["cnn", "ant-10"])
    first, second = (run_experiment(paper, tmp_path / name, quick=True) for name in "ab")
    for row in ("cnn", "ant-10"):
        measures = first.records[row][0]["measures"]
        assert measures == second.records[row][0]["measures"]
        assert 0 <= measures["accuracy"] <= 1
    assert first.records["ant-10"][0]["measures"]["times"] >= 2
    assert first.records["cnn"][0]["details"]["texts"] == {
        "train": 408,
        "validation": 72,
        "test": 120,
    }


def test_texts_are_learnt():
    settings = {
        "model": "bag",
        "epochs": 6,
        "batch": 32,
        "lr": 0.02,
        "dropout": 0.0,
        "words": {"dim": 8},
    }
    outcome = run_text(settings, 0, generated_texts(), Run())
    assert outcome.measures["accuracy"] > 0.8
    assert [row["epoch"] for row in outcome.history] == [*range(len(outcome.history))]


def test_a_language_row_has_its_objective():
    paper = read_experiment("ant/table15", quick=True)
    settings = paper.rows[0].settings | {"cut": 2000, "epochs": 2}
    measures = run_language(settings, 0, open_corpus("ptb", quick=True), Run()).measures
    expected = (
        math.log(measures["perplexity"])
        + 1e-6 * measures["nonzeros"]
        + (0.1 - 1e-6) * measures["word_anchors"]
    )
    assert measures["objective_1e-1"] == pytest.approx(expected)
    assert measures["parameters"] == measures["nonzeros"] + 8 * measures["word_anchors"]


def test_plain_rows_are_compressed_after_training():
    table = DenseTable(600, 8)
    before = table.weight.detach().clone()
    sizes = compressed(table, "hash+ksvd:anchors=16", 2.0, seed=0)
    error = float((table.weight.detach() - before).square().mean() / before.square().mean())
    assert 0 < error < 0.5
    assert sizes["parameters"] == 16 * 8 + 600 * 4
    with pytest.raises(ArgumentError, match="few enough to leave codes"):
        compressed(table, "hash:anchors=500", 2.0, seed=0)
    with pytest.raises(ArgumentError, match="compresses plain rows"):
        compressed(AnchorTable(600, 8, anchors=4), "hash:anchors=16", 2.0, seed=0)


def test_a_shorter_text_keeps_the_words():
    corpus = open_corpus("ptb", quick=True)
    short = shortened(corpus, 100)
    assert (len(short.train), short.words) == (100, corpus.words)
    assert short.counts.sum() == 100
    assert np.array_equal(short.test, corpus.test)


def test_gaps_are_taken_seed_by_seed():
    def record(accuracy):
        return {
            "measures": {"accuracy": accuracy, "times": 1.0},
            "seconds": 1.0,
            "details": {},
            "history": [],
        }

    records = {
        "plain": {0: record(0.90), 1: record(0.94)},
        "kept": {0: record(0.89), 1: record(0.91), 2: record(0.5)},
    }
    lines = summarise(Results(mine(), records))
    gap = lines[1].figures[1]
    assert gap.mean == pytest.approx(-0.02)
    assert gap.error == pytest.approx(0.01)
    assert gap.published == pytest.approx(-0.02)
    assert lines[0].figures[1].mean is None
    assert BESIDE["gap_percent"][1](110.0, 100.0) == pytest.approx(0.1)
    assert "1 run of 1 rows; 1 of 1 at or above the published number" in summary_page(
        Results(mine(), {"plain": {0: record(0.90)}})
    )


def test_rows_whose_data_are_missing_wait_and_say_so(tmp_path, capsys):
    write_texts(tmp_path / "data" / "ag-news", generated_texts(train=120, test=40))
    rows = [*MINE["rows"], {"name": "other", "data": "dbpedia"}]
    paper = mine(rows=rows, seeds=[0])
    found = run_experiment(paper, tmp_path / "out", data=tmp_path / "data")
    assert found.missing == [("other", 0)]
    assert any("want of data" in note and "train.csv" in note for note in notes(found))
    write_texts(tmp_path / "data" / "dbpedia", generated_texts(train=120, test=40))
    assert not run_experiment(paper, tmp_path / "out", data=tmp_path / "data").missing
    with pytest.raises(DataError, match=r"holds no folder ag-news with train\.csv"):
        command.run("ant/table1", tmp_path / "out", data=tmp_path / "nothing", quiet=True)
    (tmp_path / "half" / "ag-news").mkdir(parents=True)
    with pytest.raises(DataError, match=r"holds no train\.csv or train_subset\.csv"):
        command.run("ant/table1", tmp_path / "out", data=tmp_path / "half", quiet=True)
    with pytest.raises(DataError, match=r"wiki\.train\.tokens: no such file"):
        (tmp_path / "data" / "wikitext-2").mkdir()
        open_corpus("wikitext-2", tmp_path / "data")
    with pytest.raises(ArgumentError, match="texts are classified on ag-news"):
        open_texts("reuters")
    with pytest.raises(ArgumentError, match="language models are trained on ptb"):
        open_corpus("reuters")
    assert not capsys.readouterr().out


def test_real_sources():
    try:
        folders = find_data("ag-news"), find_data("ptb")
    except DataError as error:
        pytest.skip(str(error))
    if not (folders[0] / "train.csv").exists():
        source = open_texts("ag-news")
        assert (len(source.train), len(source.test), len(source.train.classes)) == (
            43_378,
            7_600,
            4,
        )
    corpus = open_corpus("ptb")
    assert (len(corpus.words), len(corpus.train)) == (10_000, 929_589)
