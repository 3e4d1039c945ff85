"""``featherbed train sequences``: sequences with planted transitions, storing, serving, bad input."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import featherbed as fb
from featherbed import cli
from featherbed.apps.sequences import (
    SequenceRecommender,
    Sequences,
    SequenceSettings,
    check_sequences,
    fit_sequences,
    parse_items,
    rank_targets,
)
from featherbed.apps.sequences import fit as fitting
from featherbed.apps.sequences import model as network
from featherbed.apps.sequences.data import SequenceData, pad, windows
from featherbed.apps.sequences.ranking import draw_negatives, gains, metrics_of, rank_of
from featherbed.apps.sequences.settings import TransformerSettings
from featherbed.apps.sequences.train import write_model
from featherbed.errors import ArgumentError, FormatError
from featherbed.io.records import Events, read_events
from featherbed.sharing import bare

ITEMS = 40
SMALL = ("--dim", "16", "--length", "12", "--epochs", "6", "--set", "training.lr=0.01", "--quiet")
TINY = {"table.dim": 8, "model.length": 6, "training.epochs": 2, "training.lr": 0.01}


def planted(users=160, seed=0):
    """(user, item, time): each item has two followers, one of which comes next in nine of ten."""
    rng = np.random.default_rng(seed)
    followers = np.stack([rng.choice(ITEMS, 2, replace=False) for _ in range(ITEMS)])
    rows = []
    for user in range(users):
        item = int(rng.integers(ITEMS))
        for _ in range(int(rng.choice([1, 2, 5, 9, 16]))):
            rows.append((f"u{user}", f"i{item}", len(rows)))
            follows = rng.random() < 0.9
            item = int(followers[item, rng.integers(2)] if follows else rng.integers(ITEMS))
    return rows


def write_csv(path, rows, header="user,item,time"):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def run(*words):
    """Return the exit code and the output of a command, as ``featherbed`` ends it."""
    result = CliRunner().invoke(cli.app, [str(word) for word in words])
    if isinstance(result.exception, fb.FeatherbedError):
        return 2, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def plays(tmp_path_factory):
    return write_csv(tmp_path_factory.mktemp("plays") / "plays.csv", planted())


@pytest.fixture(scope="module")
def trained(plays):
    out = plays.parent / "model"
    code, printed = run("train", "sequences", plays, "--out", out, *SMALL)
    assert code == 0
    return out, printed


@pytest.fixture(scope="module")
def sequences(plays):
    return Sequences.of(read_events(plays).events)


def fitted_tiny(sequences, **values):
    settings = SequenceSettings.from_values({**TINY, "training.epochs": 1} | values)
    return settings, fit_sequences(settings, sequences, progress=False)


def test_transitions_are_learned(trained):
    out, printed = trained
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["test"]["ndcg@10"] > 2 * metrics["popularity"]["ndcg@10"]
    assert metrics["test"]["ndcg@10"] > 0.95 * metrics["float32"]["ndcg@10"]
    assert "ndcg@10_of_100_sampled" in metrics["test"]
    assert "full rankings: test NDCG@10" in printed
    assert "not better than popularity" not in printed
    page = (out / "report.html").read_text()
    assert "100 sampled items" in page
    assert "Quality by popularity" in page


def test_few_events_are_counted_and_used(sequences, trained):
    lengths = sequences.lengths
    few, single = int((lengths < 3).sum()), int((lengths == 1).sum())
    assert few > single > 0
    assert f"{few:,} users with fewer than 3 events ({single:,} with a single one)" in trained[1]
    task = sequences.task("test")
    assert len(task.users) == len(lengths) - few
    assert (lengths[task.users] >= 3).all()
    owner = int(np.flatnonzero(lengths == 1)[0])
    cut = windows(sequences, 5, (0, 0))
    assert cut[cut[:, 0] == owner].tolist() == [[owner, 0, 1]]
    covered = np.bincount(cut[:, 0], cut[:, 2] - cut[:, 1])
    assert (covered == sequences.train_lengths).all()
    assert (cut[:, 2] - cut[:, 1]).max() == 5
    assert sequences.counts.sum() == lengths.sum() - 2 * len(task.users)


def test_recommend_prints_items_and_names_unknown_ones(trained):
    out, _ = trained
    code, printed = run("recommend", out, "--history", "i1,nothing,i2", "-k", "3")
    assert code == 0
    assert "unknown items are skipped: nothing" in printed
    assert len([line for line in printed.splitlines() if line.lstrip()[:1].isdigit()]) == 3
    code, printed = run("recommend", out, "--history", "i1", "-k", "2", "--json")
    rows = json.loads(printed)
    assert code == 0
    assert [row["rank"] for row in rows] == [1, 2]
    assert 1 >= rows[0]["score"] >= rows[1]["score"] > 0


def test_a_line_of_a_history_may_be_a_key_with_commas():
    assert parse_items("Heat, The\n12, 57", ["Heat, The"]) == ["Heat, The", "12", "57"]


def test_recommend_does_not_need_torch(trained):
    out, _ = trained
    code = "import sys; sys.modules['torch'] = None; from featherbed.cli import main; main()"
    command = [sys.executable, "-c", code, "recommend", str(out), "--history", "i1,i2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("rank")


@pytest.mark.parametrize("users", [0, 4])
def test_numpy_ranks_as_torch(sequences, tmp_path, users):
    settings, fitted = fitted_tiny(
        sequences, **{"model.users": users, "storage.weights": "float32", "storage.ratio": 4}
    )
    served = write_model(tmp_path, fitted, settings, SequenceData(sequences, None, False, []))
    model = fitted.model.eval()
    ids, lengths = pad([sequences[u][:6] for u in range(20)])
    own = np.arange(20)
    with torch.no_grad():
        model.table.weight.copy_(torch.from_numpy(served.items[np.arange(ITEMS)]))
        if users:
            rows = served.users[np.arange(len(sequences))]
            bare(model.users).weight.copy_(torch.from_numpy(rows))
        given = map(torch.from_numpy, (ids, lengths, own))
        expected = model.scores(*given).numpy()
    found = served.batch_scores(ids, lengths, served.user_rows(own))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    history = [sequences.item_keys[i] for i in ids[3, : lengths[3]]]
    options = {"user": sequences.user_keys[3]} if users else {}
    items = served.recommend_history(history, ITEMS, include_history=True, **options)
    order = np.argsort(-expected[3], kind="stable")
    assert [item.key for item in items] == [sequences.item_keys[i] for i in order]


def test_history_is_left_out_unless_asked(sequences, tmp_path):
    settings, fitted = fitted_tiny(sequences)
    data = SequenceData(sequences, None, False, [])
    served = write_model(tmp_path, fitted, settings, data)
    history = ["i1", "i2", "i1"]
    found = {item.key for item in served.recommend_history(history, ITEMS)}
    assert len(found) == ITEMS - 2
    assert not found & set(history)
    assert len(served.recommend_history(history, ITEMS, include_history=True)) == ITEMS
    long = ["i3"] * 50 + ["i1", "i2", "i4", "i5", "i6", "i7"]  # six are read
    np.testing.assert_array_equal(
        served.scores(served.known_ids(long)[-6:]), served.scores(served.known_ids(long[-6:]))
    )
    with pytest.raises(ArgumentError, match="no rows of users"):
        served.recommend_history(history, user="u1")


@pytest.mark.parametrize("side", ["inputs", "targets"])
def test_sse_replaces_one_side_only(sequences, monkeypatch, side):
    calls = []

    def record(hidden, rows, bias, targets):
        calls.append((hidden.detach().clone(), targets.clone()))
        return hidden.sum() * 0 + rows.sum() * 0

    monkeypatch.setattr(network, "tied_cross_entropy", record)
    targets, lengths = map(torch.from_numpy, pad([sequences[u] for u in range(30)]))
    for p in (0.0, 1.0):
        values = {**TINY, "model.length": 20, "model.dropout": 0, f"sse.{side}": p}
        settings = SequenceSettings.from_values(values)
        model = fitting.prepare_model(settings, sequences, None, 0)[1].train()
        model.loss(targets, lengths)
    (hidden, wanted), (other_hidden, other_wanted) = calls
    if side == "inputs":
        assert torch.equal(wanted, other_wanted)
        starts = torch.cumsum(lengths, 0) - lengths  # no item is read before the first
        assert torch.equal(hidden[starts], other_hidden[starts])
        assert not torch.allclose(hidden, other_hidden)
    else:
        assert torch.equal(hidden, other_hidden)
        assert not (wanted == other_wanted).any()


def test_graph_relates_replaced_items(plays, tmp_path):
    edges = tmp_path / "edges.csv"
    edges.write_text("".join(f"i{n},i{(n + 1) % ITEMS}\n" for n in range(ITEMS)))
    graph = ("--set", f"sse.graph={edges}", "--set", "sse.inputs=0.2", "--set", "sse.targets=0.1")
    out = tmp_path / "out"
    tiny = ("--dim", "8", "--length", "6", "--epochs", "1", "--quiet")
    assert run("train", "sequences", plays, "--out", out, *tiny, *graph)[0] == 0
    code, printed = run("train", "sequences", plays, "--out", tmp_path / "o", *tiny, *graph[:2])
    assert code == 2
    assert "sse.graph has no effect" in printed
    edges.write_text("x,y\n")
    code, printed = run("train", "sequences", plays, "--out", tmp_path / "o", *tiny, *graph)
    assert code == 2
    assert "relates no two items" in printed
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "values",
    [
        {"table.spec": "anchor:anchors=10"},
        {"table.spec": "graded:bits=4,grades=2"},
        {"model.softmax": "sampled", "model.samples": 10},
        {"table.spec": "anchor:anchors=10", "table.nonzeros": 90},
    ],
    ids=str,
)
def test_other_tables_and_losses(sequences, tmp_path, values):
    settings, fitted = fitted_tiny(sequences, **values)
    data = SequenceData(sequences, None, False, [])
    served = write_model(tmp_path, fitted, settings, data)
    rows = fitted.model.table.weight.detach().numpy()
    error = np.linalg.norm(served.items[np.arange(ITEMS)] - rows) / np.linalg.norm(rows)
    assert error < (0.15 if settings.table.spec == "dense" else 0.01)
    assert check_sequences(tmp_path).shape.items == ITEMS
    if "table.nonzeros" in values:
        assert int((fitted.model.table.transform != 0).sum()) == 90


def test_resume_gives_the_same_bytes(tmp_path, monkeypatch):
    options = ("--dim", "8", "--length", "6", "--epochs", "3", "--set", "sse.inputs=0.1", "--quiet")
    plays = write_csv(tmp_path / "few.csv", planted(40))
    assert run("train", "sequences", plays, "--out", tmp_path / "whole", *options)[0] == 0
    evaluate, calls = fitting.evaluate, []

    def interrupted(*given, **settings):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return evaluate(*given, **settings)

    monkeypatch.setattr(fitting, "evaluate", interrupted)
    code, printed = run("train", "sequences", plays, "--out", tmp_path / "parts", *options)
    assert code == 0
    assert "--resume continues" in printed
    monkeypatch.setattr(fitting, "evaluate", evaluate)
    assert (
        run("train", "sequences", plays, "--out", tmp_path / "parts", *options, "--resume")[0] == 0
    )
    for name in ("items.safetensors", "model.safetensors", "sequences.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_bad_files_end_with_one_line(tmp_path):
    rows = planted(30)
    cases = {
        "no time": ([row[:2] for row in rows], "user,item", "no column for time"),
        "one item": ([(u, "i1", t) for u, _, t in rows], "user,item,time", "one item only, 'i1'"),
        "short": (
            [(f"u{n}", i, t) for n, (_, i, t) in enumerate(rows)],
            "user,item,time",
            "3 events",
        ),
        "bare": (rows, "u1,i1,0", "it is not known which one is the time"),
        "dates": (
            [(u, i, f"{1 + t % 28}.5.2024") for u, i, t in rows],
            "user,item,date",
            "line 2: time '1.5.2024' is not a number or an ISO date like 2024-05-31",
        ),
        "header only": ([], "user,item,time", "a header alone"),
    }
    for name, (lines, header, message) in cases.items():
        path = write_csv(tmp_path / "bad.csv", lines, header)
        code, printed = run("train", "sequences", path, "--out", tmp_path / "out", "--quiet")
        assert (code, "\n" in printed.strip()) == (2, False), (name, printed)
        assert message in printed, name
        assert not (tmp_path / "out").exists()


def test_columns_can_be_named(tmp_path):
    path = write_csv(tmp_path / "bare.csv", planted(20), "u0,i0,0")
    reading = read_events(path, time=3)
    assert len(reading.events) == reading.counts["kept"]
    path = write_csv(tmp_path / "dates.csv", [("a", "x", "2020-01-02"), ("a", "y", "2019-01-02")])
    assert read_events(path).events.items.tolist() == [1, 0]


def test_equal_times_are_noted(tmp_path):
    path = write_csv(tmp_path / "day.csv", [("a", "x", 7), ("a", "y", 7), ("b", "x", 7)])
    assert "order of their lines" in " ".join(read_events(path).notes)
    path = write_csv(tmp_path / "day.csv", [("a", "x", 7), ("a", "y", 7), ("b", "x", 8)])
    assert not read_events(path).notes


def test_bad_requests_end_with_one_line(trained, tmp_path):
    out, _ = trained
    for words, message in (
        (("--history", "nothing,none"), "no item of the history is known"),
        (("--history", ","), "it is empty"),
        (("--user", "u1"), "holds a sequence model: give --history"),
        (("--history", "i1", "--user", "u1"), "no rows of users"),
    ):
        code, printed = run("recommend", out, *words)
        assert code == 2
        assert message in printed
    code, printed = run("update", out, write_csv(tmp_path / "new.csv", planted(3)))
    assert code == 2
    assert "holds a sequence model" in printed
    code, printed = run("recommend", tmp_path, "--history", "i1")
    assert code == 2
    with pytest.raises(fb.MissingFileError, match="no sequence model"):
        SequenceRecommender.open(tmp_path)


def test_a_folder_of_another_kind_is_kept(plays, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "recommender.json").write_text("{}")
    tiny = ("--dim", "8", "--length", "6", "--epochs", "1", "--quiet")
    code, printed = run("train", "sequences", plays, "--out", out, *tiny)
    assert code == 2
    assert "holds a model of another kind (recommender.json)" in printed
    assert [path.name for path in out.iterdir()] == ["recommender.json"]
    assert run("train", "sequences", plays, "--out", out, *tiny, "--overwrite")[0] == 0
    assert not (out / "recommender.json").exists()
    assert run("recommend", out, "--history", "i1")[0] == 0


def test_settings_that_do_not_go_together():
    for values, message in (
        ({"table.dim": 15}, "model.heads=2"),
        ({"model.dropout": 1}, "dropout=1"),
        ({"table.spec": "tensortrain"}, "no packed form"),
        ({"table.nonzeros": 5}, "has no anchors"),
    ):
        with pytest.raises(ArgumentError, match=message):
            SequenceSettings.from_values(values)


@pytest.mark.parametrize(
    ("name", "value"), [("length", 7), ("heads", 5), ("items", 39), ("dim", 8), ("layers", 0)]
)
def test_lying_descriptions_are_refused(trained, tmp_path, name, value):
    out, _ = trained
    for path in out.iterdir():
        if path.suffix in (".json", ".safetensors"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "sequences.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(FormatError):
        check_sequences(tmp_path)


def test_ranks_and_sampled_items(sequences):
    assert rank_of(np.array([1.0, 2.0, 2.0, 0.0]), 2) == 1
    assert rank_of(np.array([1.0, 2.0, 2.0, 0.0]), 2, np.array([0, 3])) == 0
    for user in range(20):
        drawn = draw_negatives(sequences, user, (0, user))
        assert len(np.unique(drawn)) == len(drawn) == ITEMS - len(np.unique(sequences[user]))
        assert not np.isin(drawn, sequences[user]).any()
    task = sequences.task("test")

    def knows(ids, lengths, users):
        scores = np.zeros((len(ids), ITEMS))
        places = [np.flatnonzero(task.users == user)[0] for user in users]
        scores[np.arange(len(ids)), task.targets[places]] = 1
        return scores

    full, sampled = rank_targets(knows, sequences, task, 5)
    assert metrics_of(full, sampled)["ndcg@10_of_100_sampled"] == 1 == gains(full).mean()


def test_repeated_items_are_recommended_again(sequences):
    assert sequences.repeated() > 0.1
    once = Events(np.arange(9) // 3, np.arange(9), list("uvw"), list("abcdefghi"))
    assert Sequences.of(once).repeated() == 0
    assert TransformerSettings().length == 200
