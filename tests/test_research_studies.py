"""Studies: settings of all of them are read, each kind runs on generated data, results are kept."""

import doctest
import importlib
import json
import math
import pkgutil
import re
import tomllib

import pytest

import research
from featherbed.errors import ArgumentError
from research.harness import command
from research.harness.legacy import converted, is_legacy
from research.harness.records import load_record
from research.harness.report import REPORTS, fill_blocks
from research.harness.run import planned, read_results, with_planned_rows, with_records
from research.harness.settings import (
    RESULTS,
    ROOT,
    STUDIES,
    experiment_names,
    names_in,
    paper_names,
    parse_experiment,
    read_experiment,
)
from research.harness.summary import MEASURES
from research.harness.tasks import TASKS, function

pytest.importorskip("matplotlib")
NAMES = names_in(STUDIES)
MODULES = sorted(module.name for module in pkgutil.walk_packages(research.__path__, "research."))
PAGES = sorted(ROOT.rglob("README.md"))
QUICK = {  # a study for each runner that no paper uses, and rows that differ in kind
    "anchors/planted": "refit,budget-66000,k-5,growth-from-10",
    "anchors/ml1m": "prox-5e-5,penalty-refit,projection-cosine,growth",
    "foundation/ml1m": "dense,anchor-1e-4-scalar",
    "foundation/ptb": "dense,anchor-500",
    "clicks/generated": "dlrm-budget,deepfm-hashing,dlrm-mixed-dimensions,dlrm-hot-and-tail,"
    "dlrm-anchors,dlrm-product-codes,dlrm-int4-rows,dlrm-quotient-remainder",
    "codes/ptb": "",
    "models/static": "float32,featherbed-quarter,model2vec-pca",
    "sharing/split": "",
    "sharing/few": "plain-10-sse-graph,biases-50-als-laplacian",
    "sharing/rademacher": "brief,biases",
    "sharing/figure3": "",
    "ranking/stored": "random-32",
    "ranking/counts": "noise",
    "ranking/foldin": "",
    "text/agnews": "bag-int4,ant-10",
    "text/imdb": "",
    "text/ptb": "ant-500-fitted,tensortrain",
}


PACKAGES = {"models/static": ("model2vec", "transformers")}


@pytest.mark.parametrize("name", QUICK)
def test_every_kind_of_study_runs(name, tmp_path, capsys):
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package)
    command.run(name, tmp_path, size="quick", rows=QUICK[name], quiet=True)
    experiment = read_experiment(name, quick=True).chosen([*filter(None, QUICK[name].split(","))])
    results = read_results(experiment, tmp_path)
    assert not results.missing
    assert experiment.title in capsys.readouterr().out
    assert experiment.title in (tmp_path / name / "summary.html").read_text()
    optional = {"bytes", "objective", "utilisation", "entropy", "duplicates", "gap_points"}
    for records in results.records.values():
        for record in records.values():
            assert {*experiment.measures} - optional <= {*record["measures"]}
            assert all(math.isfinite(value) for value in record["measures"].values())


def test_an_absent_guide_is_trained_again(tmp_path):
    command.run("codes/ptb", tmp_path, size="quick", rows="cr-ste-entropy-pdg", quiet=True)
    folder = tmp_path / "codes" / "ptb"
    names = sorted(path.name for path in folder.rglob("*.json") if "seed" in path.name)
    assert names == ["cr-ste-entropy-pdg-seed-0.json"]
    record = load_record(folder / names[0])
    assert record["measures"]["perplexity"] > 1


@pytest.mark.filterwarnings("ignore:OpenBLAS is configured")
def test_implicit_is_a_yardstick(tmp_path):
    pytest.importorskip("implicit")
    command.run("ranking/ml1m", tmp_path, size="quick", rows="implicit-als", quiet=True)
    record = load_record(tmp_path / "ranking" / "ml1m" / "implicit-als-seed-0.json")
    assert record["details"]["chosen"]["factors"] == 4
    assert 0 <= record["measures"]["ndcg@10"] <= 1


def test_a_model_is_compressed_tuned_and_reloaded(tmp_path):
    pytest.importorskip("transformers")
    command.run("models/gpt", tmp_path, size="quick", rows="eight-int4", quiet=True)
    record = load_record(tmp_path / "models" / "gpt" / "eight-int4-seed-0.json")
    assert record["details"]["same_logits"]
    assert record["measures"]["perplexity"] > 1


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_every_study_are_read(name):
    experiment = read_experiment(name)
    assert {*experiment.measures} <= {*MEASURES}
    assert callable(function(TASKS[experiment.task].open))
    assert {row.home for row in experiment.rows} == {name}


def test_names_are_unique_and_every_study_has_a_readme():
    names = experiment_names()
    assert len(set(names)) == len(names)
    groups = {name.partition("/")[0] for name in NAMES}
    assert not groups & {name.partition("/")[0] for name in paper_names()}
    assert {"papers", *groups} == {*REPORTS}


def test_every_result_belongs_to_a_row():
    pytest.importorskip("optuna")
    kept = {
        path.relative_to(RESULTS).as_posix()
        for path in RESULTS.rglob("*.json")
        if not path.is_relative_to(RESULTS / "recommenders")
    }
    for name in experiment_names():
        for size in read_experiment(name).sizes or (None,):
            experiment = with_planned_rows(read_experiment(name, size=size), RESULTS)
            for row, seed in with_records(experiment):
                kept.discard(f"{row.home}/{row.name}-seed-{seed}.json")
    assert not kept


def test_rows_are_expanded_and_have_seeds_of_their_own():
    file = {
        "title": "a study",
        "task": "planted",
        "measures": ["error"],
        "seeds": [0],
        "rows": [
            {"name": "k-{anchors}", "each": {"anchors": [5, 10]}, "settings": {"lr": 0.1}},
            {"name": "twice", "seeds": [0, 1]},
        ],
    }
    study = parse_experiment("test/study", file)
    assert study.rows[1].settings == {"anchors": 10, "lr": 0.1}
    runs = [(row.name, seed) for row, seed in planned(study)]
    assert runs == [("k-5", 0), ("k-10", 0), ("twice", 0), ("twice", 1)]
    with pytest.raises(ArgumentError, match="task='cooking', use one of ratings"):
        parse_experiment("test/study", file | {"task": "cooking"})


def test_older_records_are_converted_and_never_written(tmp_path):
    old = {
        "task": "ml1m-dense",
        "settings": {"dim": 4},
        "seed": 1,
        "metrics": {"validation": {"mse": 0.8, "nonzeros": 3}, "test": {"mse": 0.7}},
        "sizes": {"users": {"parameters": 8, "file": 60}, "items": {"parameters": 4, "file": 40}},
        "history": [{"epoch": 0}],
        "seconds": 2.0,
    }
    path = tmp_path / "row-seed-1.json"
    path.write_text(json.dumps(old))
    record = load_record(path)
    measures = {"mse": 0.7, "validation": 0.8, "nonzeros": 3.0, "parameters": 12.0, "bytes": 100.0}
    assert record["measures"] == measures
    assert (record["seed"], record["seconds"], len(record["history"])) == (1, 2.0, 1)
    assert json.loads(path.read_text()) == old
    assert not is_legacy(record)
    stored = converted({"method": "ant", "settings": {"lam": 1}, "seed": 0, "stored": []})
    assert stored["details"]["chosen"] == {"lam": 1}


def test_blocks_are_filled_by_name():
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb"
    assert fill_blocks(text, {"x": ["new"]}) == "a\n<!-- x:begin -->\nnew\n<!-- x:end -->\nb"
    with pytest.raises(ArgumentError, match="blocks x are marked, but there are y"):
        fill_blocks(text, {"y": []})


def test_bad_requests_end_with_exit_code_2(capsys, tmp_path):
    for arguments in (["run", "ant/table99"], ["report", "nothing"]):
        with pytest.raises(SystemExit) as ended:
            command.main(arguments)
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith("Error: no ")
    with pytest.raises(SystemExit) as ended:
        command.main(["run", "recommenders/final", "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert "run recommenders/search first" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_docstring_examples(name, request):
    pytest.importorskip("optuna")
    pytest.importorskip("transformers")
    module = importlib.import_module(name)
    found = doctest.testmod(module, extraglobs={"getfixture": request.getfixturevalue})
    assert found.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.parent.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


def test_nothing_of_research_is_distributed():
    text = (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8")
    targets = tomllib.loads(text)["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"]["packages"] == ["src/featherbed"]
    assert "research" not in targets["sdist"]["include"]
