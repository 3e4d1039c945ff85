"""Training whose weights all become zero: an error with advice, exit code 1, nothing left."""

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed import cli
from featherbed.apps.classifier.data import ClassifierSettings, prepare
from featherbed.apps.classifier.train import fit_classifier
from featherbed.apps.language.settings import LanguageSettings
from featherbed.apps.language.train import fit_language
from featherbed.apps.pipeline import check_weights
from featherbed.apps.recommender.data import make_split
from featherbed.apps.recommender.model import fit_tables
from featherbed.apps.recommender.settings import RecommenderSettings
from featherbed.io.records import make_ratings
from featherbed.io.texts import Corpus, LabeledTexts

MESSAGE = r"all [\d,]+ penalized weights became zero in epoch 1: .*lambda = 1000, .* lambda = 100"


def ratings_run():
    tables = {"table.users": "anchor:anchors=4", "table.items": "anchor:anchors=4"}
    values = {"table.dim": 4, "anchors.lam": 1000.0, "training.epochs": 2}
    recipe = RecommenderSettings.from_values(tables | values)
    fit_tables(recipe, make_split(make_ratings(60, 40, 800)), progress=False)


TABLE = {"table.dim": 8, "table.lam": 1000.0, "training.epochs": 2}


def text_run(**table):
    texts = LabeledTexts(["good film", "bad film"] * 20, np.array([1, 0] * 20), ("-", "+"))
    values = TABLE | {f"table.{name}": value for name, value in table.items()}
    values |= {"model.kind": "bag", "model.dropout": 0.0, "training.batch": 4}
    fit_classifier(ClassifierSettings.from_values(values), prepare(texts), progress=False)


def language_run():
    text = np.tile(np.arange(6), 100)
    corpus = Corpus(tuple("abcdef"), np.bincount(text), text, text[:200], text[:200])
    values = TABLE | {"table.spec": "anchor:anchors=4", "dropout.output": 0.0}
    fit_language(LanguageSettings.from_values(values), corpus, progress=False)


RUNS = {
    "ratings": ratings_run,
    "text": lambda: text_run(spec="anchor:anchors=4"),
    "mixture": lambda: text_run(spec="mixture:anchors=4"),
    "lasso": lambda: text_run(spec="dense", selection="lasso"),
    "language": language_run,
}


@pytest.mark.parametrize("name", RUNS)
def test_every_loop_says_that_all_weights_died(name):
    with pytest.raises(fb.TrainingError, match=MESSAGE) as found:
        RUNS[name]()
    assert isinstance(found.value, fb.FeatherbedError)
    assert isinstance(found.value, RuntimeError)


def test_rows_that_are_behind_are_settled_first():
    table = fb.AnchorTable(6, 4, anchors=2, sparse=True)
    optimizer = fb.Yogi(table.parameters(), penalties={table.transform: fb.NonNegativeL1(1e3)})
    for _ in range(3):
        optimizer.zero_grad()
        table(torch.tensor([0])).sum().backward()
        optimizer.step()
    with pytest.raises(fb.TrainingError, match="all 12 penalized weights"):
        check_weights(table, optimizer, 0)


def test_one_weight_is_enough_and_no_penalty_is_fine():
    table = fb.AnchorTable(6, 4, anchors=2)
    optimizer = fb.Yogi(table.parameters(), penalties={table.transform: fb.NonNegativeL1(0.0)})
    with torch.no_grad():
        table.transform.zero_()
    with pytest.raises(fb.TrainingError, match="lower the learning rate"):
        check_weights(table, optimizer, 0)
    with torch.no_grad():
        table.transform[3, 1] = 0.5
    check_weights(table, optimizer, 0)
    check_weights(table, torch.optim.SGD(table.parameters(), lr=0.1), 0)


def write_inputs(folder):
    found = make_ratings(60, 40, 800)
    triples = zip(found.users, found.items, found.values, strict=True)
    lines = ["user,item,rating", *(f"{u},{i},{r:.2f}" for u, i, r in triples)]
    (folder / "ratings.csv").write_text("\n".join(lines))
    (folder / "text.csv").write_text("label,text\n" + "good,a film\nbad,a bore\n" * 30)
    (folder / "lm.txt").write_text("the cat sat on the mat\n" * 200)


COMMANDS = {
    "ratings": "ratings ratings.csv --users anchor:anchors=4 --items anchor:anchors=4 --dim 4 "
    "--set anchors.lam=1000 --set training.epochs=2",
    "text": "text text.csv --model bag --table anchor:anchors=4 --dim 8 --set table.lam=1000 --epochs 2",
    "lm": "lm lm.txt --table anchor:anchors=4 --dim 8 --set table.lam=1000 --epochs 2",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_ends_with_exit_code_one(name, tmp_path, monkeypatch, capsys):
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["train", *COMMANDS[name].split(), "--out", "out"]
    monkeypatch.setattr("sys.argv", ["featherbed", *words])
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capsys.readouterr()
    assert end.value.code == 1
    assert out == ""
    assert "penalized weights became zero in epoch 1" in err.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == before
