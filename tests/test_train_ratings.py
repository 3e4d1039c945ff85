"""``featherbed train ratings`` and ``recommend``: every option on a small file, what is left on disk, and bad input."""

import bz2
import gzip
import json
import lzma
import os
import re
import signal

import numpy as np
import polars as pl
import pytest
from safetensors.numpy import load_file

import featherbed as fb
from featherbed import cli
from featherbed.apps.recommender import graded as bayes
from featherbed.apps.recommender import model as loop
from featherbed.apps.recommender import train as fit
from featherbed.apps.recommender.data import load_split
from featherbed.apps.recommender.stream import StreamedFactorization
from featherbed.io.records import make_ratings, read_ratings

USERS, ITEMS = 60, 40
HEADER = "userId,movieId,rating,timestamp"
FILES = {
    *(
        "users.safetensors",
        "items.safetensors",
        "seen.safetensors",
        "split.safetensors",
        "recommender.json",
    ),
    *("metrics.json", "history.parquet", "report.html"),
}
EXACT = (
    "users.safetensors",
    "items.safetensors",
    "seen.safetensors",
    "recommender.json",
)  # the same bytes every time


def sets(*assignments):
    """Return the options that change settings."""
    return tuple(word for assignment in assignments for word in ("--set", assignment))


DENSE = ("--users", "dense", "--items", "dense", *sets("training.epochs=2"))
ANCHORS = sets("anchors.nonzeros=200", "training.epochs=4")


def made_rows():
    """(user, item, rating, time) with ratings 1 to 5, times in no order of users."""
    found = make_ratings(USERS, ITEMS, 1500, seed=0)
    values = np.clip(np.round(3.5 + 1.2 * (found.values - found.values.mean())), 1, 5)
    times = 978_300_000 + 60 * np.random.default_rng(0).permutation(len(values))
    return [
        (f"u{u}", f"i{i}", int(r), int(t))
        for u, i, r, t in zip(found.users, found.items, values, times, strict=True)
    ]


ROWS = made_rows()
LINES = [",".join(map(str, row)) for row in ROWS]


def write_csv(path, lines, header=HEADER):
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


@pytest.fixture
def file(tmp_path):
    return write_csv(tmp_path / "my ratings.csv", LINES)


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


@pytest.fixture
def train(run, tmp_path):
    """Train with d = 4 into a folder; return the folder and what was said."""

    def call(source, *words, out=tmp_path / "out", dim=4):
        code, printed, said = run("train", "ratings", source, "--dim", dim, "--out", out, *words)
        assert code == 0, said
        return out, printed + said

    return call


def names(folder):
    return {path.name for path in folder.iterdir()}


def metrics_of(folder):
    return json.loads((folder / "metrics.json").read_text())


def errors_of(folder, source):
    """Mean squared errors computed from nothing but the stored files, part by part."""
    ratings = read_ratings(source).ratings
    split = load_split(folder / "split.safetensors", ratings)
    users, items = fb.load(folder / "users.safetensors"), fb.load(folder / "items.safetensors")
    about = json.loads((folder / "recommender.json").read_text())
    found = {}
    for part in ("train", "validation", "test"):
        own = getattr(split, part)
        left = users.ids_of([ratings.user_keys[u] for u in own.users])
        right = items.ids_of([ratings.item_keys[i] for i in own.items])
        one, other = users[left].astype(np.float64), items[right].astype(np.float64)
        scores = about["mean"] + (one * other).sum(axis=1)
        if about["biases"] == "column":
            scores += one[:, 0] + other[:, 0] - one[:, 0] * other[:, 0]
        if about["biases"] == "apart":
            biases = load_file(folder / "biases.safetensors")
            scores += biases["users"][left] + biases["items"][right]
        found[part] = float(np.square(scores - own.values).mean())
    return found


def test_what_is_left_on_disk(train, run, file, tmp_path):
    titles = tmp_path / "titles.csv"
    titles.write_text(
        "movieId,title,genres\n"
        + "".join(f'i{i},"Film {i}, The",Drama|War\n' for i in range(ITEMS - 2))
    )
    out, said = train(file, "--titles", titles, out=tmp_path / "made here" / "out")
    assert names(out) == FILES | {"titles.safetensors"}
    assert "(user = userId, item = movieId, rating = rating, time = timestamp)" in said
    metrics = metrics_of(out)
    assert {"train", "validation", "test", "nonzeros", "sizes"} <= set(metrics)
    assert metrics["test"]["mse"] == pytest.approx(errors_of(out, file)["test"], rel=1e-4)
    for side, count in (("users", USERS), ("items", ITEMS)):
        table, sizes = fb.load(out / f"{side}.safetensors"), metrics["sizes"][side]
        assert sizes["file"] + sizes["keys"] == (out / f"{side}.safetensors").stat().st_size
        assert table.rows == count
        assert {table.keys[id_] for id_ in range(count)} == {
            f"{side[0]}{id_}" for id_ in range(count)
        }
    history = pl.read_parquet(out / "history.parquet")
    assert len(history) == metrics["epochs"]
    assert history["validation_mse"].min() == pytest.approx(metrics["validation"]["mse"], rel=0.01)
    page = (out / "report.html").read_text()
    assert "plotly" in page.lower()
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="?https?:', page)
    code, printed, _ = run("recommend", out, "--user", "u3", "-k", "5", "--json")
    found = json.loads(printed)
    assert code == 0
    assert len(found) == 5
    for row in found:
        number = int(row["key"][1:])
        assert row["title"] == (f"Film {number}, The" if number < ITEMS - 2 else None)
    assert names(tmp_path) == {"my ratings.csv", "titles.csv", "made here"}


def test_recommended_items_are_the_best_by_the_stored_rows(train, run, file):
    out, _ = train(file, *DENSE)
    ratings = read_ratings(file).ratings
    own = load_split(out / "split.safetensors", ratings).train
    users, items = fb.load(out / "users.safetensors"), fb.load(out / "items.safetensors")
    mean = json.loads((out / "recommender.json").read_text())["mean"]
    row, rows = users[users.ids_of("u7")], items[np.arange(ITEMS)]
    scores = {
        items.keys[i]: mean + row[0] + rows[i, 0] + rows[i, 1:] @ row[1:] for i in range(ITEMS)
    }
    for user, item in zip(own.users, own.items, strict=True):
        if ratings.user_keys[user] == "u7":
            scores.pop(ratings.item_keys[item])
    best = sorted(scores, key=scores.get, reverse=True)[:4]
    found = json.loads(run("recommend", out, "--user", "u7", "-k", 4, "--json")[1])
    assert [row["key"] for row in found] == best
    assert np.allclose([row["score"] for row in found], [scores[key] for key in best], atol=1e-4)


def as_json_lines(rows):
    return "".join(
        json.dumps(dict(zip(("user", "item", "rating", "time"), row, strict=True))) + "\n"
        for row in rows
    ).encode()


FORMS = {
    "a.csv.gz": lambda text: gzip.compress(text),
    "a.csv.xz": lambda text: lzma.compress(text),
    "a.csv.bz2": lambda text: bz2.compress(text),
    "a.tsv": lambda text: text.replace(b",", b"\t"),
    "a.dat": lambda text: text.split(b"\n", 1)[1].replace(b",", b"::"),
    "a.jsonl": lambda _: as_json_lines(ROWS),
}


def test_every_form_of_file_gives_the_same_recommender(train, file, tmp_path):
    text = file.read_bytes()
    wanted = train(file)[0]
    for name, form in FORMS.items():
        (tmp_path / name).write_bytes(form(text))
    pl.DataFrame(
        ROWS, schema=["user_id", "item_id", "rating", "timestamp"], orient="row"
    ).write_parquet(tmp_path / "a.parquet")
    for name in (*FORMS, "a.parquet"):
        out, said = train(tmp_path / name, out=tmp_path / "other", dim=4)
        assert ("no header" in said) == (name == "a.dat")
        for stored in EXACT:
            assert (out / stored).read_bytes() == (wanted / stored).read_bytes(), name
        for path in out.iterdir():
            path.unlink()


def test_lines_that_cannot_be_used_are_counted_or_refused(train, run, tmp_path):
    broken = ["u2,i2,,6", "u3,i3,good,7", "u4,,3,8"]
    path = write_csv(tmp_path / "r.csv", [*broken, *LINES])
    out, said = train(path)
    assert "lines skipped: 2 missing, 1 unparsable" in said
    assert metrics_of(out)["train"]["ratings"] == int(len(ROWS) * 0.8)
    code, _, said = run(
        "train", "ratings", path, *sets("reading.strict=true"), "--out", tmp_path / "strict"
    )
    assert code == 2
    assert f"{path}, line 2: no rating" in said


@pytest.mark.parametrize(
    ("policy", "count", "said"),
    [
        ("last", 0, "last by time"),
        ("first", 0, "first by time"),
        ("mean", 0, "mean counts"),
        ("keep", 30, "all are kept"),
    ],
)
def test_pairs_rated_twice(policy, count, said, train, tmp_path):
    out, told = train(
        write_csv(tmp_path / "r.csv", LINES + LINES[:30]), *sets(f"reading.duplicates={policy}")
    )
    assert "30 ratings of pairs that were rated before" in told
    assert said in told
    assert "left out" not in told
    assert (
        sum(metrics_of(out)[part]["ratings"] for part in ("train", "validation", "test"))
        == len(ROWS) + count
    )


@pytest.mark.parametrize(
    "words",
    [
        ("time",),
        ("leave-out",),
        ("leave-out", *sets("split.leave=2")),
        ("time", *sets("split.known_only=true")),
    ],
)
def test_splits(words, train, file):
    out, said = train(file, "--split", *words)
    metrics = metrics_of(out)
    assert metrics["split"] == words[0]
    assert f"{words[0]} split" in said
    split = load_split(out / "split.safetensors", read_ratings(file).ratings)
    if words[0] == "time":
        assert split.train.times.max() <= split.validation.times.min() <= split.test.times.min()
        assert ("not seen in training" in said) == ("split.known_only=true" in words)
    else:
        leave = 2 if "split.leave=2" in words else 1
        assert set(np.bincount(split.test.users, minlength=USERS)) <= {0, leave}
    assert metrics["test"]["ratings"] == len(split.test)


def test_columns_by_name_and_by_number(train, tmp_path):
    swapped = [",".join((r, u, i)) for u, i, r, _ in (line.split(",") for line in LINES)]
    path = write_csv(tmp_path / "r.csv", swapped, "alpha,beta,gamma")
    out, said = train(
        path,
        *sets(
            "columns.user=beta",
            "columns.item=3",
            "columns.rating=alpha",
            "reading.low=1",
            "reading.high=5",
        ),
    )
    assert "(user = beta, item = gamma, rating = alpha)" in said
    assert "u0" in fb.load(out / "users.safetensors")


@pytest.mark.parametrize(
    "spec",
    [
        *(
            "anchor:anchors=4",
            "growinganchor:anchors=4",
            "lowrank:rank=2",
            "kd:parts=2,choices=4",
            "product:parts=2,choices=4",
        ),
        *(
            "hashed:buckets=20",
            "remainder:divisor=10",
            "selected:keep=20",
            "quantized:bits=4",
            "mixture:anchors=4",
        ),
        *("mixed:dims=[4,2]", "graded:bits=3", "banded:hot=10,tail='lowrank:rank=2'"),
    ],
)
def test_tables_of_every_kind(spec, train, run, file):
    out, _ = train(file, "--users", spec, "--items", "dense", *sets("training.epochs=1"))
    assert names(out) == FILES
    metrics = metrics_of(out)
    for part, error in errors_of(out, file).items():
        assert metrics[part]["mse"] == pytest.approx(error, rel=1e-4)
    assert (metrics["nonzeros"] is None) == ("anchor:" not in spec)
    assert fb.load(out / "users.safetensors").rows == USERS
    assert run("recommend", out, "--user", "u1")[0] == 0
    kind = type(
        fb.make_table(spec, USERS, 4, **({"counts": [1] * USERS} if needs_counts(spec) else {}))
    ).__name__
    assert kind in (out / "report.html").read_text()


def needs_counts(spec):
    return spec.split(":")[0] in ("selected", "mixed", "banded", "graded")


@pytest.mark.parametrize("biases", ["none", "column", "apart"])
def test_biases(biases, train, run, file):
    out, _ = train(file, *DENSE, *sets(f"table.biases={biases}", "table.mean=false"))
    assert names(out) == FILES | ({"biases.safetensors"} if biases == "apart" else set())
    assert metrics_of(out)["test"]["mse"] == pytest.approx(errors_of(out, file)["test"], rel=1e-4)
    assert json.loads((out / "recommender.json").read_text())["mean"] == 0
    assert run("recommend", out, "--user", "u1")[0] == 0


def test_a_number_of_weights_and_shared_rows(train, file):
    out, said = train(
        file,
        *ANCHORS,
        *sets(
            "training.sse_users=0.1",
            "training.sse_items=0.05",
            "storage.weights=int8",
            "storage.dictionary=float16",
        ),
    )
    assert metrics_of(out)["nonzeros"] <= 200
    assert f"{metrics_of(out)['nonzeros']} weights" in said
    assert pl.read_parquet(out / "history.parquet")["nonzeros"][-1] == metrics_of(out)["nonzeros"]
    assert "Size by epoch" in (out / "report.html").read_text()
    assert metrics_of(out)["test"]["mse"] == pytest.approx(errors_of(out, file)["test"], rel=1e-4)


def test_the_number_of_anchors_is_found(train, file):
    out, _ = train(file, *sets("table.auto=true", "training.epochs=3"))
    assert metrics_of(out)["nonzeros"] > 0
    assert "anchors" in pl.read_parquet(out / "history.parquet").columns


@pytest.mark.parametrize(
    ("words", "most"),
    [(("--budget", "2KB"), 2000), (("--ratio", "1.5"), 4 * 16 * (USERS + ITEMS) / 1.5)],
)
def test_bytes(words, most, train, file):
    out, _ = train(file, *words, dim=16)
    metrics = metrics_of(out)
    assert metrics["sizes"]["file"] <= most
    assert metrics["test"]["mse"] == pytest.approx(errors_of(out, file)["test"], rel=1e-4)


@pytest.mark.parametrize(
    "words",
    [
        (),
        (*sets("anchors.nonzeros=200", "training.epochs=2", "training.sse_users=0.1"),),
    ],
)
def test_the_same_seed_gives_the_same_files(words, train, file, tmp_path):
    one, other = (train(file, *words, "--seed", 3, out=tmp_path / name)[0] for name in "ab")
    for name in EXACT:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    timed = {"seconds", "stages"}
    assert {k: v for k, v in metrics_of(one).items() if k not in timed} == {
        k: v for k, v in metrics_of(other).items() if k not in timed
    }
    histories = [pl.read_parquet(folder / "history.parquet") for folder in (one, other)]
    assert (
        histories[0]
        .drop("seconds", strict=False)
        .equals(histories[1].drop("seconds", strict=False))
    )
    third = train(file, *words, "--seed", 4, out=tmp_path / "c")[0]
    assert (third / EXACT[0]).read_bytes() != (one / EXACT[0]).read_bytes()


def after_epochs(monkeypatch, count, act, where=loop, name="train_epoch"):
    """Let ``act`` happen in the epoch after ``count`` whole ones."""
    whole, done = getattr(where, name), []

    def epoch(*given, **named):
        if len(done) == count:
            act()
        done.append(None)
        return whole(*given, **named)

    monkeypatch.setattr(where, name, epoch)


def control_c():
    os.kill(os.getpid(), signal.SIGINT)


def test_many_ratings_are_trained_in_passes(train, run, file, tmp_path, monkeypatch):
    monkeypatch.setattr(fit, "STREAM", 100)
    out, _ = train(file, *DENSE, *sets("storage.dictionary=int4"))
    for part, error in errors_of(out, file).items():
        assert metrics_of(out)[part]["mse"] == pytest.approx(error, rel=1e-4)
    after_epochs(monkeypatch, 1, control_c, StreamedFactorization, "train_epoch")
    stopped, said = train(file, *DENSE, out=tmp_path / "stopped")
    assert "interrupted" in said
    assert len(pl.read_parquet(stopped / "history.parquet")) == 1
    assert run("recommend", stopped, "--user", "u1")[0] == 0


def test_control_c_leaves_a_recommender_and_resume_goes_on(train, run, file, tmp_path, monkeypatch):
    whole = train(file, *ANCHORS, out=tmp_path / "whole")[0]
    with monkeypatch.context() as patch:
        after_epochs(patch, 2, control_c)
        out, said = train(file, *ANCHORS)
    assert "interrupted" in said
    assert metrics_of(out)["interrupted"]
    assert names(out) == FILES | {"checkpoints"}
    assert run("recommend", out, "--user", "u1", "-k", "3")[0] == 0
    assert "interrupted" in (out / "report.html").read_text()
    code, _, said = run("train", "ratings", file, "--dim", 4, "--out", out, *ANCHORS)
    assert code == 2
    assert "--resume" in said
    train(file, *ANCHORS, "--resume")
    assert not metrics_of(out)["interrupted"]
    assert names(out) == FILES
    assert len(pl.read_parquet(out / "history.parquet")) == 4
    for name in EXACT:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


def test_control_c_in_the_first_epoch(train, run, file, monkeypatch):
    after_epochs(monkeypatch, 0, control_c)
    out, said = train(file, *ANCHORS)
    assert "not one epoch was finished" in said
    assert run("recommend", out, "--user", "u1", "-k", "3")[0] == 0


def test_control_c_while_levels_are_chosen(train, run, file, monkeypatch):
    after_epochs(monkeypatch, 2, control_c, bayes, "_round")
    out, said = train(file)
    assert "interrupted" in said
    assert "--resume" not in said
    assert len(pl.read_parquet(out / "history.parquet").filter(pl.col("stage") == "rows")) == 3
    assert metrics_of(out)["test"]["mse"] == pytest.approx(errors_of(out, file)["test"], rel=1e-4)
    assert run("recommend", out, "--user", "u1", "-k", "3")[0] == 0


def crash():
    raise SystemError("the machine went down")


def test_a_run_that_died_goes_on_where_it_was(train, run, file, tmp_path, monkeypatch):
    whole, out = train(file, *ANCHORS, out=tmp_path / "whole")[0], tmp_path / "out"
    with monkeypatch.context() as patch:
        after_epochs(patch, 2, crash)
        with pytest.raises(SystemError):
            train(file, *ANCHORS)
    assert names(out) == {"checkpoints"}
    code, _, said = run("recommend", out, "--user", "u1")
    assert code == 2
    assert "holds no recommender" in said
    for words, changed in (
        (("--seed", 5), "seed"),
        (sets("anchors.lam=1e-3"), "anchors.lam"),
        (("--split", "time"), "split"),
    ):
        code, _, said = run(
            "train", "ratings", file, "--dim", 4, "--out", out, *ANCHORS, "--resume", *words
        )
        assert code == 2
        assert f"checkpoints of other {changed}" in said
    train(file, *ANCHORS, "--resume")
    for name in EXACT:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_folder_that_is_there(train, run, file, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    train(file)
    before = (out / "users.safetensors").read_bytes()
    code, _, said = run("train", "ratings", file, "--dim", 4, "--out", out, "--seed", 1)
    assert code == 2
    assert "holds a recommender already" in said
    assert (out / "users.safetensors").read_bytes() == before
    train(file, "--seed", 1, "--overwrite")
    assert (out / "users.safetensors").read_bytes() != before
    assert (out / "notes.txt").read_text() == "mine"


def one_column(place, word):
    return [
        ",".join(word if at == place else cell for at, cell in enumerate(line.split(",")))
        for line in LINES
    ]


BAD_FILES = {
    "an empty file": ("", "is empty"),
    "a header alone": (HEADER + "\n", "no usable line"),
    "one user": ("\n".join([HEADER, *one_column(0, "u1")]), "one user only"),
    "one item": ("\n".join([HEADER, *one_column(1, "i1")]), "one item only"),
    "NaN throughout": ("\n".join([HEADER, *one_column(2, "nan")]), "line 2: rating 'nan' is not"),
    "an absurd rating": (
        "\n".join([HEADER, *LINES, "u1,i1,1e26,9"]),
        f"line {len(LINES) + 2}: rating '1e26' is",
    ),
    "ratings all equal": (
        "\n".join([HEADER, *one_column(2, "1")]),
        "every rating is 1, so there is nothing to predict",
    ),
    "two ratings": (f"{HEADER}\na,x,1,1\nb,y,2,2\n", "too few"),
    "no ratings": (
        "user,item\n" + "\n".join(line.rsplit(",", 2)[0] for line in LINES),
        "no column for rating",
    ),
    "zero bytes": ("\0\1\2" * 100, "is no text"),
}


def assert_refused(answer, folder, before, words):
    code, printed, said = answer
    assert code == 2, said
    assert printed == ""
    lines = said.strip().splitlines()
    assert lines[-1].startswith("error: ")
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert words in lines[-1]
    assert names(folder) == before


@pytest.mark.parametrize("what", BAD_FILES)
def test_files_that_cannot_be_learnt_from(what, run, tmp_path):
    text, words = BAD_FILES[what]
    (tmp_path / "r.csv").write_text(text)
    answer = run("train", "ratings", tmp_path / "r.csv", "--out", tmp_path / "deep" / "out")
    assert_refused(answer, tmp_path, {"r.csv"}, words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--set reading.low=2", "rating 1 is below 2"),
        ("--set reading.high=4", "rating 5 is above 4"),
        ("--set reading.high=nan", "give a finite number"),
        ("--set reading.low=5 --set reading.high=1", "low must not be above high"),
        ("--set reading.duplicates=refuse", "are rated more than once"),
        ("--set reading.duplicates=some", "use one of last"),
        ("--split other", "use one of random"),
        ("--split leave-out --set split.leave=100", "too few"),
        ("--set columns.user=nope", "no column 'nope'"),
        ("--titles nosuch.csv", "nosuch.csv: no such file"),
        ("--users nosuch", "is no table"),
        ("--users anchor", "needs anchors="),
        ("--users dense --set table.biases=some", "use one of none"),
        ("--users dense --set anchors.nonzeros=30 --items dense", "has anchors"),
        ("--set anchors.nonzeros=1000000", "only"),
        ("--users dense --budget 1KB", "leave one of them out"),
        ("--set training.epochs=3", "leave one of them out"),
        ("--budget 1KB --ratio 3", "not both"),
        ("--budget 10", "headers"),
        ("--budget lots", "give bytes"),
        ("--ratio nan", "above 0"),
        ("--users dense --set training.lr=nan", "above 0"),
        ("--users dense --set storage.weights=int99", "storage kind"),
        ("--users dense --set storage.dictionary=int99", "storage kind"),
        ("--users anchor:anchors=4 --set training.lr=1e20", "lower the learning rate"),
        ("--set anchors.lambda1=3 --users dense", "table.auto"),
        ("--set table.auto=true --users dense", "growinganchor"),
        ("--resume", "no checkpoints"),
    ],
)
def test_options_that_cannot_be_met(options, words, run, tmp_path):
    write_csv(tmp_path / "r.csv", LINES + LINES[:3])
    answer = run(
        "train",
        "ratings",
        tmp_path / "r.csv",
        "--dim",
        4,
        "--out",
        tmp_path / "out",
        *options.split(),
    )
    assert_refused(answer, tmp_path, {"r.csv"}, words)


def test_folders_that_cannot_be_written(run, file, tmp_path):
    for out, words in ((file, "is a file"), (file / "out", "cannot be written")):
        answer = run("train", "ratings", file, "--out", out)
        assert_refused(answer, tmp_path, {file.name}, words)


def test_a_batch_larger_than_the_ratings(train, file):
    assert (
        metrics_of(
            train(
                file,
                "--users",
                "dense",
                *sets("training.epochs=1", f"training.batch={10**12}"),
            )[0]
        )["epochs"]
        == 1
    )


def test_users_that_are_not_there(train, run, file):
    out, _ = train(file)
    code, printed, said = run("recommend", out, "--user", "u700")
    assert (code, printed) == (2, "")
    assert said.startswith("error: no user has the key 'u700'")
    assert run("recommend", out, "--user", "u1", "-k", "0")[0] == 2
    code, printed, said = run("recommend", out, "--user", "u1", "-k", "1000", "--all")
    assert code == 0
    assert len(printed.splitlines()) == 1 + ITEMS
    assert f"only {ITEMS} items" in said


def test_movielens_100k(train, run, data, tmp_path):
    folder = data / "ml-100k"
    if not (folder / "u.data.gz").exists():
        pytest.skip("no ml-100k in the data folder")
    out, said = train(folder / "u.data.gz", "--titles", folder / "u.item.gz", dim=8)
    assert (
        "100,000 ratings of 1,682 items by 943 users (user = 1, item = 2, rating = 3, time = 4)"
        in said
    )
    assert metrics_of(out)["test"]["mse"] < 0.9
    assert "(19" in run("recommend", out, "--user", "196", "-k", "3")[1]
