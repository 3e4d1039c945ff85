"""A recommender that stores biases only says so; so does one worse than biases alone."""

import json

import numpy as np
import pytest

import featherbed as fb
from featherbed import cli
from featherbed.apps.recommender.serve import Recommender, write_recommender
from featherbed.errors import ArgumentError
from featherbed.io.records import make_ratings
from featherbed.packed.band import Band, Every
from featherbed.packed.inspect import as_text, report
from featherbed.packed.matrix import Graded
from featherbed.packed.table import PackedTable

KEYS = ["a", "b", "c", "d"]


def graded(digits, rows=4, **more):
    """A table of graded rows with these bits by column."""
    bits = np.array([[int(digit) for digit in digits]])
    values = np.random.default_rng(0).normal(size=(rows, len(digits))).astype(np.float32)
    found = Graded.round(values, bits, [rows])
    return PackedTable([Band(rows, Every(), values=found)], len(digits), **more)


def keyed(digits):
    return graded(digits, keys=fb.packed.keys.Keys.of(KEYS))


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process; return exit code, standard output, standard error."""

    def call(*words):
        monkeypatch.setattr("sys.argv", ["featherbed", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return call


def test_columns_that_hold_something():
    assert graded("2010").columns_with_bits().tolist() == [True, False, True, False]
    assert fb.DenseTable(3, 2).pack().columns_with_bits() is None
    rows = np.zeros((10_000, 3), np.float32)
    rows[9_999, 2] = 1
    assert fb.DenseTable.from_dense(rows).pack().nonzero_columns().tolist() == [False, False, True]


def test_directions_of_one_column_are_refused():
    for digits in ("4000", "0000"):
        table = graded(digits)
        with pytest.raises(ArgumentError, match=r"cosine cannot tell .* have zero bits"):
            table.search(table[0], 2, metric="cosine")
        assert len(table.search(table[0], 2, metric="dot")[0]) == 2
    for table in (graded("4400"), graded("4")):
        assert len(table.search(table[0], 2, metric="cosine")[0]) == 2


def test_a_recommender_of_biases_only(tmp_path, run):
    seen = np.arange(5), np.arange(4)
    write_recommender(tmp_path, keyed("4000"), keyed("4000"), mean=3.0, biases="column", seen=seen)
    recommender = Recommender.open(tmp_path)
    assert recommender.factors == 0
    with pytest.raises(ArgumentError, match="stores no factors, only biases"):
        recommender.similar("a")
    code, out, err = run("search", tmp_path / "items.safetensors", "a")
    assert (code, out) == (2, "")
    assert "a recommender without factors stores biases only" in err
    code, out, err = run("recommend", tmp_path, "--user", "b", "-k", "2")
    assert code == 0
    assert len(out.splitlines()) == 3
    assert "note: this recommender stores no factors" in err
    text = run("inspect", tmp_path / "items.safetensors")[1]
    assert "rows of width 4 (1 of 4 columns stored, the others have zero bits)" in text


def test_factors_that_one_side_lacks_are_none(tmp_path):
    seen = np.zeros(5, np.int64), np.zeros(0, np.int64)
    write_recommender(tmp_path, keyed("4000"), keyed("4220"), mean=3.0, biases="column", seen=seen)
    assert Recommender.open(tmp_path).factors == 0
    write_recommender(tmp_path, keyed("4020"), keyed("4220"), mean=3.0, biases="column", seen=seen)
    assert Recommender.open(tmp_path).factors == 1
    assert len(Recommender.open(tmp_path).similar("a", 2)) == 2


def noise_file(path):
    """Ratings that are biases and noise: no factor is worth a bit."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(150, size=900), rng.integers(100, size=900)
    values = 3 + rng.normal(size=150)[users] + 0.5 * rng.normal(size=100)[items]
    values += 1.5 * rng.normal(size=900)
    lines = [f"u{u},i{i},{r:.2f}" for u, i, r in zip(users, items, values, strict=True)]
    path.write_text("\n".join(["user,item,rating", *lines]))
    return path


def test_training_says_that_it_stored_no_factors(tmp_path, run):
    source, out = noise_file(tmp_path / "r.csv"), tmp_path / "out"
    code, printed, _ = run("train", "ratings", source, "--out", out)
    assert code == 0
    assert "stored no factors: the ratings do not support any within this budget" in printed
    assert "every user gets the same list" in printed
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["factors"] == 0
    page = (out / "report.html").read_text()
    assert "biases only: no factors are stored" in page
    assert "Stored no factors: the ratings do not support any" in page
    assert "rows of width" not in page
    with pytest.raises(ArgumentError, match="no factors"):
        Recommender.open(out).similar("i1")


@pytest.mark.parametrize(
    "words",
    [
        [
            "--users",
            "dense",
            "--items",
            "dense",
            "--set",
            "training.epochs=4",
            "--set",
            "table.mean=false",
        ],
        ["--set", "anchors.nonzeros=40", "--set", "training.epochs=3"],
        ("--budget", "920", "--dim", "4"),
    ],
)
def test_a_model_worse_than_biases_says_so_at_the_end(words, tmp_path, run):
    source, out = noise_file(tmp_path / "r.csv"), tmp_path / "out"
    code, printed, err = run("train", "ratings", source, "--out", out, *words)
    assert code == 0, err
    metrics = json.loads((out / "metrics.json").read_text())
    worse = metrics["test"]["mse"] > metrics["baselines"]["biases"]
    assert worse
    assert printed.splitlines()[-1].startswith("worse than biases alone: test MSE")
    assert "Worse than biases alone" in (out / "report.html").read_text()


def test_a_good_model_is_not_called_worse(tmp_path, run):
    found = make_ratings(200, 100, 6000)
    lines = [
        f"{u},{i},{r:.2f}" for u, i, r in zip(found.users, found.items, found.values, strict=True)
    ]
    (tmp_path / "r.csv").write_text("\n".join(["user,item,rating", *lines]))
    _, printed, _ = run("train", "ratings", tmp_path / "r.csv", "--out", tmp_path / "out")
    assert "worse than" not in printed
    assert "no factors" not in printed
    assert "biases alone have" in printed.splitlines()[0]


def test_headlines_count_all_files(tmp_path, run):
    found = make_ratings(200, 100, 6000)
    lines = [
        f"user{u},item{i},{r:.2f}"
        for u, i, r in zip(found.users, found.items, found.values, strict=True)
    ]
    (tmp_path / "r.csv").write_text("\n".join(["user,item,rating", *lines]))
    out = tmp_path / "out"
    _, printed, _ = run("train", "ratings", tmp_path / "r.csv", "--out", out)
    needed = ("users.safetensors", "items.safetensors", "seen.safetensors", "recommender.json")
    whole = sum((out / name).stat().st_size for name in needed)
    sizes = json.loads((out / "metrics.json").read_text())["sizes"]
    assert sizes["whole"] == whole
    assert sizes["float32_whole"] == whole - sizes["file"] + 4 * 300 * 16
    line = printed.splitlines()[1]
    assert line.startswith(f"{whole:,} bytes in all, ")
    assert f"than {sizes['float32_whole']:,} with float32 rows" in line
    assert f"tables {sizes['file']:,}, keys {sizes['keys']:,}, rated items " in line


def test_inspect_compares_the_whole_file(tmp_path):
    path = tmp_path / "t.safetensors"
    fb.save(
        fb.DenseTable(50, 4).pack(dictionary="int4"), path, keys=[f"word{i}" for i in range(50)]
    )
    found = report(path)
    sizes = found["bytes"]
    assert found["smaller"]["file"] == (800 + sizes["keys"]) / path.stat().st_size
    text = as_text(found)
    assert f"file        {path.stat().st_size:,} bytes, " in text
    assert f"than {800 + sizes['keys']:,} as float32 with the same keys" in text
    assert f"  keys      {sizes['keys']:,} bytes" in text
