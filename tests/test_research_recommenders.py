"""Small recommenders on generated ratings: every competitor, the search, the final runs, tables."""

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.io.records import make_ratings
from research.harness import command
from research.harness.records import load_record
from research.harness.settings import read_experiment
from research.sources.ratings import Source

pytest.importorskip("optuna")
pytest.importorskip("matplotlib")
from research.reports import recommenders as report
from research.runners import competitors, recommenders, storing


@pytest.fixture(scope="module")
def source():
    ratings = make_ratings(120, 60, 3000, groups=3, dim=3)
    return Source(ratings, ratings.split)


@pytest.fixture(scope="module")
def rows():
    """The settings of the first trial of each method."""
    found = read_experiment("recommenders/search", quick=True).rows
    return {row.settings["method"]: row.settings for row in found if row.settings["number"] == 0}


def first(space):
    """The first of each choice, the middle of each range."""
    middle = {
        name: given[0] if isinstance(given, list) else (given["low"] + given["high"]) / 2
        for name, given in space.items()
    }
    whole = {
        name
        for name, given in space.items()
        if isinstance(given, dict) and isinstance(given["low"], int)
    }
    found = {name: int(value) if name in whole else value for name, value in middle.items()}
    return (
        found
        | ({"nonzeros": 500} if "nonzeros" in found else {})
        | ({"budget": 3000} if "budget" in found else {})
    )


METHODS = ("dense-2", "dense-4", "dense-8", "dense-16", "bayes", "low-bit", "hash", "quotient-remainder", "low-rank", "mixed",
           "selected", "dpq", "sparse-cbow", "slimming", "slimming-anchors", "ant", "nbant", "online-nbant", "ant-refit",
           "hot-tail", "graded")  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_every_competitor_is_trained_and_stored(method, rows, source):
    task, test = recommenders.task_of(rows[method], 0, source)
    stored = recommenders.run_once(method, first(rows[method]["space"]), task, test)
    assert set(METHODS) == set(competitors.METHODS) == set(rows) == set(report.NAMES)
    guess = float(np.square(task.validation.values - task.mean).mean())
    for line in stored:
        assert line["validation"] < 1.2 * guess, line
        assert line["bytes"] > 0
        assert line["parameters"] > 0
    if len(stored) > 1:
        assert stored[-1]["bytes"] < stored[0]["bytes"]
    if method in ("slimming", "ant-refit"):
        assert stored[0]["parameters"] <= 500 + 2 * 16 * 16


def test_sizes_are_those_of_files_and_errors_those_of_their_rows(rows, source, tmp_path):
    task, _ = recommenders.task_of(rows["ant"], 0, source)
    for stored in competitors.METHODS["ant"](task, first(rows["ant"]["space"])):
        paths = [tmp_path / f"{side}.safetensors" for side in ("users", "items")]
        for path, table in zip(paths, (stored.users, stored.items), strict=True):
            table.save(path)
        assert stored.bytes == sum(path.stat().st_size for path in paths)
        users, items = map(fb.load, paths)
        left, right = users[task.validation.users], items[task.validation.items]
        scores = task.mean + left[:, 0] + right[:, 0] + (left[:, 1:] * right[:, 1:]).sum(1)
        assert stored.error(task.validation) == pytest.approx(
            float(np.square(scores - task.validation.values).mean()), rel=1e-4
        )


def test_ids_are_numbered_by_popularity(source):
    parts = source.split(0)
    train, validation, _ = storing.by_popularity(*parts)
    for name, rows in (("users", train.num_users), ("items", train.num_items)):
        counts = np.bincount(getattr(train, name), minlength=rows)
        assert (np.diff(counts) <= 0).all()
    before = {(parts[1].user_keys[u], parts[1].item_keys[i], v) for u, i, v in triples(parts[1])}
    assert before == {
        (validation.user_keys[u], validation.item_keys[i], v) for u, i, v in triples(validation)
    }


def triples(part):
    return zip(part.users.tolist(), part.items.tolist(), part.values.tolist(), strict=True)


def test_low_bits_have_column_scales():
    table = fb.DenseTable.from_dense(torch.randn(200, 8))
    packed = storing.packed(table, "int4")
    assert packed.nbytes == 200 * 4 + 8 * 2
    rows = table.weight.detach().numpy()
    assert np.abs(packed[:] - rows).mean() < 0.2 * np.abs(rows).mean()


def test_search_final_and_tables(tmp_path, capsys):
    trials = "dense-4-0,dense-4-1,low-rank-0,low-rank-1"
    command.run("recommenders/search", tmp_path, size="quick", rows=trials, quiet=True)
    folder = tmp_path / "recommenders"
    kept = {path.name: path.read_text() for path in (folder / "search").glob("*.json")}
    assert sorted(kept) == [f"{name}-seed-0.json" for name in trials.split(",")]
    assert all('"test"' not in text for text in kept.values())
    command.run("recommenders/search", tmp_path, size="quick", rows="dense-4-2", quiet=True)
    again = {path.name: path.read_text() for path in (folder / "search").glob("*.json")}
    assert again.items() >= kept.items()
    record = load_record(folder / "search" / "dense-4-2-seed-0.json")
    assert record["measures"]["validation"] == pytest.approx(
        recommenders.objectives(record["details"]["stored"])[0]
    )
    command.run("recommenders/final", tmp_path, size="quick", seeds="0,1", quiet=True)
    found = recommenders.read_trials(folder / "search")
    finals = report.runs_of(folder / "final")
    picked = recommenders.choose_trials(found, [2_500, 6_000])
    assert set(finals) == {(trial, kind) for trial, kinds in picked.items() for kind in kinds}
    assert all(len(lines) == 2 for lines in finals.values())
    assert "Lowest error here" in "\n".join(report.budget_lines(finals, 6_000, 2))
    assert report.front_table(found, "bytes")[0].startswith("| bytes |")
    report.picture(found, finals, "bytes", tmp_path / "bytes.svg", "bytes")
    assert (tmp_path / "bytes.svg").read_text().startswith("<?xml")


def test_a_front_is_falling():
    lines = [
        ("t", "m", {"bytes": size, "validation": error})
        for size, error in ((30, 0.7), (10, 0.9), (20, 0.95), (40, 0.8))
    ]
    assert [line[2]["bytes"] for line in recommenders.front(lines, "bytes")] == [10, 30]
