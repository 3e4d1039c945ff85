"""The harness of experiments/recommenders, on generated ratings: every competitor, the search, the final runs, the page."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.tasks.data import planted_ratings

pytest.importorskip("optuna")
pytest.importorskip("matplotlib")
FOLDER = Path(__file__).parent.parent / "experiments" / "recommenders"


@pytest.fixture(scope="module")
def harness():
    """The modules of the experiment, under their own names only while this file is tested."""
    sys.path.insert(0, str(FOLDER))
    try:
        import competitors
        import report
        import run
        import storing

        yield {"competitors": competitors, "report": report, "run": run, "storing": storing}
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("competitors", "report", "run", "storing"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def data():
    return planted_ratings(120, 60, 3000, groups=3, dim=3)


@pytest.fixture(scope="module")
def settings(harness):
    return harness["run"].settings_file() | {
        "epochs": 2,
        "batch": 256,
        "budgets": [2_500, 6_000],
        "final_seeds": [0, 1],
    }


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
def test_every_competitor_is_trained_and_stored(method, harness, settings, data):
    task, test = harness["run"].task_of(data, settings, 0)
    found = harness["run"].run_once(method, first(settings["methods"][method]), task, test)
    assert (
        set(METHODS)
        == set(harness["competitors"].METHODS)
        == set(settings["methods"])
        == set(harness["report"].NAMES)
    )
    guess = float(np.square(task.validation.values - task.mean).mean())
    for line in found["stored"]:
        assert line["validation"] < 1.2 * guess, line
        assert line["bytes"] > 0
        assert line["parameters"] > 0
    if len(found["stored"]) > 1:
        assert found["stored"][-1]["bytes"] < found["stored"][0]["bytes"]
    if method in ("slimming", "ant-refit"):
        assert found["stored"][0]["parameters"] <= 500 + 2 * 16 * 16


def test_sizes_are_those_of_files_and_errors_those_of_their_rows(harness, settings, data, tmp_path):
    task, _ = harness["run"].task_of(data, settings, 0)
    for stored in harness["competitors"].METHODS["ant"](task, first(settings["methods"]["ant"])):
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


def test_ids_are_numbered_by_popularity(harness, data):
    parts = data.split(0)
    train, validation, _ = harness["storing"].by_popularity(*parts)
    for name, rows in (("users", train.num_users), ("items", train.num_items)):
        counts = np.bincount(getattr(train, name), minlength=rows)
        assert (np.diff(counts) <= 0).all()
    before = {(parts[1].user_keys[u], parts[1].item_keys[i], v) for u, i, v in triples(parts[1])}
    assert before == {
        (validation.user_keys[u], validation.item_keys[i], v) for u, i, v in triples(validation)
    }


def triples(part):
    return zip(part.users.tolist(), part.items.tolist(), part.values.tolist(), strict=True)


def test_low_bits_have_column_scales(harness):
    table = fb.DenseTable.from_dense(torch.randn(200, 8))
    packed = harness["storing"].packed(table, "int4")
    assert packed.nbytes == 200 * 4 + 8 * 2
    rows = table.weight.detach().numpy()
    assert np.abs(packed[:] - rows).mean() < 0.2 * np.abs(rows).mean()


def test_search_final_and_page(harness, settings, data, tmp_path, monkeypatch):
    run, report = harness["run"], harness["report"]
    task, _ = run.task_of(data, settings, 0)
    for method in ("dense-4", "low-rank"):
        run.search(method, settings, task, 2, tmp_path / "search")
    kept = {path.name: path.read_text() for path in (tmp_path / "search").glob("*.json")}
    assert sorted(kept) == [
        "dense-4-0.json",
        "dense-4-1.json",
        "low-rank-0.json",
        "low-rank-1.json",
    ]
    assert all("test" not in line for text in kept.values() for line in json.loads(text)["stored"])
    run.search("dense-4", settings, task, 3, tmp_path / "search")
    assert {
        path.name: path.read_text() for path in (tmp_path / "search").glob("*.json")
    }.items() >= kept.items()
    run.final(settings, data, tmp_path)
    trials, finals = run.trials_of(tmp_path / "search"), report.runs_of(tmp_path / "final")
    picked = run.chosen(trials, settings["budgets"])
    assert set(finals) == {(trial, kind) for trial, kinds in picked.items() for kind in kinds}
    assert all(len(lines) == 2 for lines in finals.values())
    text = "\n".join(report.page(settings, trials, finals))
    assert "Within 2.5 KB" in text
    assert "Lowest error here" in text
    report.picture(trials, finals, "bytes", tmp_path / "bytes.svg", "bytes")
    assert (tmp_path / "bytes.svg").read_text().startswith("<?xml")


def test_a_front_is_falling(harness):
    lines = [
        ("t", "m", {"bytes": size, "validation": error})
        for size, error in ((30, 0.7), (10, 0.9), (20, 0.95), (40, 0.8))
    ]
    assert [line[2]["bytes"] for line in harness["run"].front(lines, "bytes")] == [10, 30]
