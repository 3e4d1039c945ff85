"""Missing extras: found before work starts, with the command that installs them."""

import sys

import pytest

from featherbed import cli
from featherbed.apps.recommender import train_recommender
from featherbed.checks import TRAINING, require
from featherbed.errors import MissingExtra


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*words):
        monkeypatch.setattr("sys.argv", ["featherbed", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, *capsys.readouterr()

    return call


def test_all_that_is_missing_is_named_once(monkeypatch):
    require("this", TRAINING)
    for module in ("torch", "plotly", "sklearn"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra) as found:
        require("this", TRAINING, {"train": ["sklearn", "torch"]})
    assert str(found.value) == (
        'this needs torch and scikit-learn and plotly: pip install "featherbed[train,view]"'
    )


NOTHING = "nothing-there"
COMMANDS = {
    "ratings": ("plotly", ["train", "ratings", NOTHING, "--out", "o"], "view"),
    "text": ("plotly", ["train", "text", NOTHING, "--out", "o"], "view"),
    "pieces": (
        "tokenizers",
        ["train", "text", NOTHING, "--out", "o", "--set", "vocabulary.subwords=300"],
        "text",
    ),
    "choice": (
        "sklearn",
        ["train", "text", NOTHING, "--out", "o", "--set", "table.selection=tfidf"],
        "train",
    ),
    "lm": ("plotly", ["train", "lm", NOTHING, "--out", "o"], "view"),
    "lm, polars": ("polars", ["train", "lm", NOTHING, "--out", "o"], "train"),
    "compress": ("faiss", ["compress", NOTHING, "--out", "o", "--ratio", "4"], "compress"),
    "report": (
        "plotly",
        ["compress", NOTHING, "--out", "o", "--ratio", "4", "--report", "r.html"],
        "view",
    ),
    "kd": ("torch", ["compress", NOTHING, "--out", "o", "--ratio", "4", "--method", "kd"], "train"),
    "demo": ("numba", ["demo"], "train"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_look_before_they_read(name, run, monkeypatch, tmp_path):
    """The file is not even there: a complaint about the package shows that nothing was read."""
    package, words, extra = COMMANDS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    shown = {"sklearn": "scikit-learn"}.get(package, package)
    assert f'needs {shown}: pip install "featherbed[{extra}]"' in err
    assert not list(tmp_path.iterdir())


def test_a_folder_of_a_model_needs_transformers(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = run("compress", tmp_path, "--out", tmp_path / "o", "--ratio", "4")
    assert code == 2
    assert 'needs transformers: pip install "featherbed[hf]"' in err


def test_jobs_in_python_look_before_they_read(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MissingExtra, match="training a recommender needs plotly"):
        train_recommender(tmp_path / NOTHING, tmp_path / "o")


def test_tables_of_codes_need_faiss(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "faiss", None)
    settings = {"table.users": "product:parts=2,choices=4"}
    with pytest.raises(MissingExtra, match=r"needs faiss: .*\[compress\]"):
        train_recommender(tmp_path / NOTHING, tmp_path / "o", settings)
    with pytest.raises(Exception, match="no such file"):
        train_recommender(tmp_path / NOTHING, tmp_path / "o")
