"""``featherbed train text``, ``train lm``, ``classify`` and ``continue``: what they leave on disk, and bad input."""

import gzip
import json

import numpy as np
import pytest

import featherbed as fb
from featherbed import cli
from featherbed.apps.bundle import stored_bytes
from featherbed.apps.classifier.serve import Classifier
from featherbed.apps.language.serve import LanguageModel

GOOD, BAD = ("good", "fine", "lovely", "witty"), ("dull", "bad", "boring", "weak")
PLAIN = ("film", "story", "a", "the", "actor", "and", "scene", "of")
SMALL = (
    "--dim",
    "12",
    "--epochs",
    "3",
    "--set",
    "training.batch=16",
    "--set",
    "training.lr=0.03",
    "--quiet",
)
BAG = (*SMALL, "--model", "bag", "--set", "model.dropout=0")
CNN = (*SMALL, "--model", "cnn", "--set", "model.channels=6", "--set", "vocabulary.length=20")
MODEL = {"words.safetensors", "words.txt.xz", "model.safetensors"}
REPORTS = {"metrics.json", "history.parquet", "report.html"}


def made_texts(count=160, seed=0):
    """(label, text) whose class is told by one word in eight."""
    rng = np.random.default_rng(seed)
    found = []
    for at in range(count):
        words = [*rng.choice(PLAIN, 5), rng.choice(GOOD if at % 2 else BAD)]
        found.append(("yes" if at % 2 else "no", " ".join(rng.permutation(words))))
    return found


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my texts.csv"
    path.write_text("\n".join(["label,text", *(f"{label},{text}" for label, text in made_texts())]))
    return path


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(text for _, text in made_texts(300)))
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process; return its exit code, what it printed, and what it said on stderr."""

    def call(*words):
        monkeypatch.setattr("sys.argv", ["featherbed", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return call


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("options", [BAG, CNN])
def test_a_classifier_is_trained_stored_and_asked(run, file, tmp_path, options):
    out = tmp_path / "out"
    code, printed, said = run(
        "train", "text", file, "--out", out, "--table", "anchor:anchors=4", *options
    )
    assert code == 0, said
    assert names(out) == MODEL | REPORTS | {"classifier.json"}
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["test"]["accuracy"] > 0.8 and metrics["test"]["texts"] == 16
    assert f"accuracy: test {metrics['test']['accuracy']:.2%}" in printed
    sizes = metrics["sizes"]
    assert sizes["whole"] == stored_bytes(out) == sizes["table"] + sizes["words"] + sizes["rest"]
    assert sizes["parameters"] < sizes["dense_parameters"]
    code, printed, _ = run("classify", out, "a lovely story", "--json")
    assert code == 0 and json.loads(printed)
    assert Classifier.open(out).classify("a lovely witty story", k=1)[0].label == "yes"
    assert fb.load(out / "words.safetensors").dim == 12


def test_accuracies_are_those_of_the_files(run, file, tmp_path):
    out, test = tmp_path / "out", tmp_path / "test.csv"
    test.write_text(
        "\n".join(["label,text", *(f"{label},{text}" for label, text in made_texts(60, seed=1))])
    )
    coarse = ("--set", "storage.dictionary=int2", "--set", "storage.weights=int8")
    assert (
        run("train", "text", file, "--test", test, "--table", "dense", "--out", out, *BAG, *coarse)[
            0
        ]
        == 0
    )
    metrics = json.loads((out / "metrics.json").read_text())
    given = [
        Classifier.open(out).classify(text, k=1)[0].label == label
        for label, text in made_texts(60, seed=1)
    ]
    assert metrics["test"] == {"accuracy": pytest.approx(np.mean(given)), "texts": 60}


@pytest.mark.parametrize(
    "words",
    [
        ("anchor:anchors=3", "--set", "table.selection=frequency", "--set", "table.nonzeros=12"),
        (
            "anchor:anchors=3",
            "--set",
            "table.selection=tfidf",
            "--set",
            "table.domain=cooccurrence",
            "--set",
            "vocabulary.min_cooccurrence=3",
            "--set",
            "table.lam=0.001",
        ),
        ("mixture:anchors=2,sets=2", "--set", "table.sse=0.05"),
        ("selected:keep=5", "--set", "table.selection=vvd"),
        ("dense", "--set", "table.selection=lasso", "--set", "table.lam=0.001"),
        ("variational:noise=row",),
        ("kd:choices=4,parts=2",),
        ("product:choices=4,parts=2",),
    ],
)
def test_tables_of_every_kind(run, file, tmp_path, words):
    out = tmp_path / "out"
    code, _, said = run("train", "text", file, "--out", out, "--table", *words, *BAG)
    assert code == 0, said
    assert Classifier.open(out).classify("film", k=1)
    assert (out / "report.html").stat().st_size > 10_000


def test_a_table_that_cannot_be_packed_leaves_reports_only(run, file, tmp_path):
    out = tmp_path / "out"
    code, printed, _ = run(
        "train", "text", file, "--out", out, "--table", "tensortrain:rank=2", *BAG
    )
    assert code == 0 and "no packed form" in printed
    assert names(out) == REPORTS
    assert run("classify", out, "film")[0] == 2


def test_sub_words(run, file, tmp_path):
    out = tmp_path / "out"
    assert (
        run(
            "train",
            "text",
            file,
            "--out",
            out,
            "--table",
            "dense",
            "--set",
            "vocabulary.subwords=300",
            *BAG,
        )[0]
        == 0
    )
    assert (
        names(out)
        == {"words.safetensors", "model.safetensors", "tokenizer.json", "classifier.json"} | REPORTS
    )
    assert Classifier.open(out).classify("a lovely story", k=1)[0].label == "yes"


def test_the_same_seed_gives_the_same_files_and_folders_are_guarded(run, file, tmp_path):
    first, second = tmp_path / "one", tmp_path / "two"
    for out in (first, second):
        assert run("train", "text", file, "--out", out, *BAG)[0] == 0
    for name in MODEL:
        assert (first / name).read_bytes() == (second / name).read_bytes()
    code, _, said = run("train", "text", file, "--out", first, *BAG)
    assert code == 2 and "--overwrite" in said
    assert (
        run("train", "text", file, "--out", first, "--overwrite", "--table", "dense", *BAG)[0] == 0
    )
    assert (first / "words.safetensors").read_bytes() != (second / "words.safetensors").read_bytes()


def test_the_cache_changes_nothing(run, file, tmp_path):
    cache = tmp_path / "cache"
    words = (
        "--table",
        "anchor:anchors=4",
        "--set",
        "table.selection=frequency",
        "--set",
        "table.domain=cooccurrence",
        "--set",
        "vocabulary.min_cooccurrence=3",
        "--set",
        "table.lam=0.01",
    )
    for out, kept in (
        ("none", ()),
        ("first", ("--set", f"data.cache={cache}")),
        ("second", ("--set", f"data.cache={cache}")),
    ):
        assert run("train", "text", file, "--out", tmp_path / out, *words, *kept, *BAG)[0] == 0
    assert {path.name.partition("-")[0] for path in cache.iterdir()} == {"texts", "cooccurrence"}
    stored = {
        (tmp_path / out / "words.safetensors").read_bytes() for out in ("none", "first", "second")
    }
    assert len(stored) == 1


BAD_TEXTS = {
    "empty file": (b"", "empty"),
    "no texts": (b"label,text\n", "text"),
    "empty text": (b"label,text\nyes,good film\nno, \nyes,fine\n", "line 3"),
    "one class": (b"label,text\n" + b"yes,good film\n" * 20, "class"),
    "empty label": (b"label,text\nyes,good film\n,bad film\n", "label"),
    "undecodable": (b"label,text\nyes,good \xff\xfe film\nno,bad film\n", "data.encoding"),
    "one word": (b"label,text\n" + b"yes,film\nno,film\n" * 20, "word"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_bad_files_are_refused_and_leave_nothing(run, tmp_path, name):
    content, hint = BAD_TEXTS[name]
    (tmp_path / "bad.csv").write_bytes(content)
    code, printed, said = run(
        "train", "text", tmp_path / "bad.csv", "--out", tmp_path / "out", *BAG
    )
    assert (code, printed) == (2, "")
    last = said.strip().split("\n")[-1]
    assert last.startswith("error: ") and hint in last
    assert names(tmp_path) == {"bad.csv"}


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--label", "mood"), "mood"),
        (("--set", "vocabulary.long=error", "--set", "vocabulary.length=2"), "line 2"),
        (("--table", "anchors=10"), "spec"),
        (("--table", "dense", "--set", "table.nonzeros=5"), "nonzeros"),
        (("--table", "dense", "--set", "table.selection=magic"), "magic"),
        (("--set", "table.domain=astrology"), "astrology"),
        (("--model", "rnn"), "rnn"),
        (("--set", "storage.weights=int3"), "int3"),
        (("--resume",), "resume"),
        (("--test", "nothing.csv"), "nothing.csv"),
    ],
)
def test_bad_options_are_refused_and_leave_nothing(run, file, tmp_path, options, hint):
    code, printed, said = run("train", "text", file, "--out", tmp_path / "out", *BAG, *options)
    assert (code, printed) == (2, "") and hint in said
    assert names(tmp_path) == {file.name}


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--model", "awd", "--set", "model.layers=2"),
        ("--set", "model.softmax=sampled", "--set", "model.samples=5"),
    ],
)
def test_a_language_model_is_trained_stored_and_goes_on(run, corpus, tmp_path, options):
    out = tmp_path / "out"
    shared = (
        "--dim",
        "8",
        "--epochs",
        "2",
        "--set",
        "training.batch=4",
        "--set",
        "training.length=10",
        "--quiet",
    )
    code, printed, said = run(
        "train",
        "lm",
        corpus,
        "--out",
        out,
        "--table",
        "anchor:anchors=4,slots=2",
        *shared,
        *options,
    )
    assert code == 0, said
    assert names(out) == MODEL | REPORTS | {"language.json"}
    metrics = json.loads((out / "metrics.json").read_text())
    assert 1 < metrics["test"]["perplexity"] < 40
    assert f"perplexity: test {metrics['test']['perplexity']:.2f}" in printed
    code, printed, _ = run("continue", out, "a witty", "--words", "4", "--seed", "3")
    assert code == 0 and printed.startswith("a witty")
    assert LanguageModel.open(out).shape.dim == 8


def test_three_files_in_any_order(run, corpus, tmp_path):
    lines = corpus.read_text().split("\n")
    for name, some in (("train", lines[:240]), ("valid", lines[240:270]), ("test", lines[270:])):
        with gzip.open(tmp_path / f"my.{name}.txt.gz", "wt") as file:
            file.write("\n".join(some))
    files = [tmp_path / f"my.{name}.txt.gz" for name in ("test", "train", "valid")]
    shared = ("--dim", "8", "--epochs", "1", "--set", "training.batch=4", "--quiet")
    code, _, said = run(
        "train", "lm", *files, "--out", tmp_path / "out", "--table", "dense", *shared
    )
    assert code == 0 and "1,680 train, 210 validation, 210 test" in said


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"", "empty"),
        (b"word\n" * 50, "two different words"),
        (b"a b\xff c\n" * 9, "data.encoding"),
        (b"a b c\n", "lines"),
    ],
)
def test_bad_texts_of_language_models(run, tmp_path, content, hint):
    (tmp_path / "bad.txt").write_bytes(content)
    code, printed, said = run(
        "train", "lm", tmp_path / "bad.txt", "--out", tmp_path / "out", "--quiet"
    )
    assert (code, printed) == (2, "") and hint in said
    assert names(tmp_path) == {"bad.txt"}


def test_two_files_and_a_wrong_width_are_refused(run, corpus, tmp_path):
    assert run("train", "lm", corpus, corpus, "--out", tmp_path / "out", "--quiet")[0] == 2
    code, _, said = run(
        "train",
        "lm",
        corpus,
        "--out",
        tmp_path / "out",
        "--set",
        "model.hidden=9",
        "--dim",
        "8",
        "--quiet",
    )
    assert code == 2 and "hidden=9" in said
    assert names(tmp_path) == {corpus.name}
