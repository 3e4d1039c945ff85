"""Compression: every method within its bytes, figures that are what they say, bad input that says what to do."""

import json
import signal
import subprocess
import sys
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.checks import read_bytes
from featherbed.codecs import trial
from featherbed.codecs.codec import CodecJob
from featherbed.codecs.coding import AdditiveEncoder, decode, least_squares
from featherbed.codecs.principal import effective_rank
from featherbed.codecs.quality import QualityEvaluator, band_edges, overlap
from featherbed.codecs.registry import CODECS, codec_of
from featherbed.codecs.rows import WeightedRows
from featherbed.codecs.target import Target
from featherbed.codecs.trial import Effort, WorkMeter
from featherbed.packed.band import Affine, Band, Fixed
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable
from featherbed.report.page import as_bytes

NAMES = [
    *CODECS,
    "kd:parts=9,bits=5,composer=mlp",
    "kd:parts=9,bits=5,composer=recurrent",
    "kd:parts=9,bits=5,composer=lstm",
    "pq+norms",
    "opq+norms",
    "rq+norms",
    "layered+norms",
    "hot+layered",
    "hot+pq",
]
COMMAND = Path(sys.executable).parent / "featherbed"


def clustered(rows=1200, dim=16, seed=0):
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((40, dim))
    lengths = np.exp(0.3 * rng.standard_normal((rows, 1)))
    return (
        lengths * (centres[rng.integers(0, 40, rows)] + 0.4 * rng.standard_normal((rows, dim)))
    ).astype(np.float32)


def job_of(matrix, weights=None):
    rows = WeightedRows(matrix, weights)
    job = CodecJob(
        rows, (rows.weights / rows.lengths() ** 2).astype(np.float32), np.random.default_rng(0)
    )
    job.rank = effective_rank(job)
    return job


def relative(matrix, table):
    return float(((table[np.arange(len(matrix))] - matrix) ** 2).sum() / (matrix**2).sum())


def run(*words, **more):
    return subprocess.run(
        [COMMAND, *map(str, words)], capture_output=True, text=True, check=False, **more
    )


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch):
    """What is tested here holds whatever is compared: a few shapes and rounds do."""
    monkeypatch.setitem(trial.EFFORTS, "normal", Effort(3, 4, 1, 2, 2e9, 1.12, 1e15))


@pytest.fixture(scope="module")
def matrix():
    return clustered()


@pytest.mark.parametrize("name", NAMES)
def test_a_method_by_name_stays_within_its_bytes(matrix, name, tmp_path):
    weights = 1.0 / np.arange(1, len(matrix) + 1) if name.startswith("hot") else None
    budget = matrix.nbytes // 3
    small = fb.compress(matrix, budget=budget, method=name, weights=weights)
    path = tmp_path / "small.safetensors"
    small.save(path)
    assert path.stat().st_size <= budget
    assert path.stat().st_size == small.report.data["chosen"]["bytes"]
    assert small.made_by["method"] == name.split(":")[0]
    settings = small.report.data["chosen"]["settings"]
    assert codec_of(name)[0].size(*matrix.shape, **settings) == small.nbytes
    assert np.array_equal(fb.check(path)[[0, 7, 1199]], small[[0, 7, 1199]])
    assert relative(matrix, small) < 0.7
    if name.startswith(("int", "lowrank", "hot")):
        with pytest.raises(fb.ArgumentError, match="has codes"):
            small.codes_of([0])
    else:
        assert len(small.codes_of([0, 7])) == 2
    if name not in ("lowrank", "hash", "clusters", "int2"):
        assert relative(matrix, small) < 0.15


def test_the_docs_name_every_method_of_codes():
    section = (
        (Path(__file__).parent.parent / "docs" / "serving.md")
        .read_text()
        .split("## Codes")[1]
        .split("```")[0]
    )
    assert all(f"`{name}`" in section for name in CODECS if not name.startswith("int"))


@pytest.mark.parametrize("name", ["pq", "opq", "rq", "lsq", "layered", "clusters", "ksvd"])
def test_refinement_lowers_the_error(matrix, name):
    method = CODECS[name]
    settings = method.settings(*matrix.shape, 12_000, 16)[0]
    fit = method.fit(job_of(matrix), **settings)

    def weighted_error():  # what a fit makes small: each row's error relative to its length
        gap = PackedTable(fit.bands(), 16)[np.arange(len(matrix))] - matrix
        return float(((gap**2).sum(1) / (matrix**2).sum(1)).mean())

    before = weighted_error()
    fit.refine(6)
    assert fit.refinable
    assert weighted_error() < before * 1.002


def test_more_bytes_are_never_worse_by_much(matrix):
    errors = [
        relative(matrix, fb.compress(matrix, ratio=ratio, method="layered")) for ratio in (3, 5, 8)
    ]
    assert errors[0] < errors[1] < errors[2]


@pytest.mark.parametrize("parts", [1, 3])
def test_codes_are_the_best_there_are(parts):
    rng = np.random.default_rng(0)
    atoms = rng.standard_normal((parts, 4, 5)).astype(np.float32)
    rows = rng.standard_normal((60, 5)).astype(np.float32)
    every = np.array(list(product(range(4), repeat=parts)))
    best = ((rows[:, None] - decode(every, atoms)[None]) ** 2).sum(2).min(1)
    found = ((rows - decode(AdditiveEncoder(atoms)(rows, tries=200), atoms)) ** 2).sum(1)
    assert np.allclose(found, best, atol=1e-4)


@pytest.mark.parametrize("parts", [1, 2])
def test_atoms_solve_the_weighted_normal_equations(parts):
    rng = np.random.default_rng(0)
    rows, codes = (
        rng.standard_normal((300, 4)).astype(np.float32),
        rng.integers(0, 8, (300, parts)).astype(np.int32),
    )
    weights = rng.random(300).astype(np.float32)
    atoms = least_squares(codes, rows, weights, 8)
    hot = np.zeros((300, 16))
    for part in range(parts):
        hot[np.arange(300), 8 * part + codes[:, part]] = 1
    scale = np.sqrt(weights)[:, None]
    best = hot @ np.linalg.lstsq(hot * scale, rows * scale, rcond=None)[0]
    assert np.allclose(decode(codes, atoms), best, atol=2e-2)


def test_layers_add_up_and_lengths_multiply(tmp_path):
    rng = np.random.default_rng(0)

    def stored(*shape):
        return Matrix.encode(rng.standard_normal(shape).astype(np.float32), "float32")

    first, second = rng.integers(0, 8, (50, 3)), rng.integers(0, 4, (50, 2))
    atoms, shared, weight, norms, bias = (
        stored(24, 6),
        stored(4, 3),
        stored(6, 5),
        stored(50, 1),
        stored(1, 5).dense()[0],
    )
    plus = Band(50, Fixed.encode(second, None, 4), dictionary=shared, combine="concat")
    band = Band(
        50,
        Fixed.encode(first, None, 8, parts=True),
        dictionary=atoms,
        affine=Affine(weight, bias, norms),
        plus=plus,
    )
    inside = sum(atoms.dense()[8 * j + first[:, j]] for j in range(3)) + shared.dense()[
        second
    ].reshape(50, 6)
    want = (inside @ weight.dense() + bias) * norms.dense()
    table = PackedTable([band], 5)
    table.save(tmp_path / "t.safetensors")
    again = fb.check(tmp_path / "t.safetensors")
    for one in (table, again):
        assert np.allclose(one[np.arange(50)], want, atol=1e-5)
        assert np.allclose(one.logits(want[:3]), want[:3] @ want.T, atol=1e-4)
    assert "plus fixed codes" in run("inspect", tmp_path / "t.safetensors").stdout


def test_hostile_layers_are_refused(tmp_path):
    from featherbed.packed.schema import describe, rebuild

    plus = Band(
        5,
        Fixed.encode(np.zeros((5, 1), int), None, 4),
        dictionary=Matrix.encode(np.ones((4, 3)), "float32"),
    )
    table = PackedTable(
        [
            Band(
                5,
                Fixed.encode(np.zeros((5, 1), int), None, 4),
                dictionary=Matrix.encode(np.ones((4, 3)), "float32"),
                plus=plus,
            )
        ],
        3,
    )

    def broken(change):
        meta = json.loads(json.dumps(describe(table)))
        change(meta["bands"][0])
        with pytest.raises(fb.FormatError):
            rebuild(
                meta,
                lambda name, kind, shape: np.zeros(
                    shape, {"U32": np.uint32, "F32": np.float32}[kind]
                ),
            )

    broken(lambda band: band["plus"].update(rows=4))
    broken(lambda band: band["plus"].update(members=True))
    broken(lambda band: band["plus"]["dictionary"].update(columns=2))
    broken(
        lambda band: band.update(norms={"kind": "float32", "rows": 5, "columns": 2, "scale": None})
    )

    def nest(band):
        for _ in range(12):
            band["plus"]["plus"] = json.loads(json.dumps(band["plus"]))
            band = band["plus"]

    broken(nest)


def test_recall_is_what_it_says():
    rows = clustered(300, 8)
    judge = QualityEvaluator(WeightedRows(rows), np.random.default_rng(0), queries=300)
    other = rows + 0.3 * np.random.default_rng(1).standard_normal(rows.shape).astype(np.float32)

    def nearest(x):
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        scores = x @ x.T
        np.fill_diagonal(scores, -np.inf)
        return np.argsort(-scores, axis=1)[:, :10]

    want = np.mean(
        [len(set(a) & set(b)) / 10 for a, b in zip(nearest(rows), nearest(other), strict=True)]
    )
    found = judge(lambda ids: other[ids])
    assert found["recall"] == pytest.approx(want, abs=1e-9)
    assert found["error"] == pytest.approx(((rows - other) ** 2).sum() / (rows**2).sum(), rel=1e-4)
    assert judge(lambda ids: rows[ids])["recall"] == 1
    assert overlap(
        rows, rows @ np.random.default_rng(2).standard_normal((8, 8)).astype(np.float32)
    ) == pytest.approx(1, abs=1e-4)
    assert (
        overlap(rows, np.random.default_rng(3).standard_normal(rows.shape).astype(np.float32)) < 0.2
    )


@pytest.mark.parametrize("count", [1, 7, 99, 60_000, 10**6])
def test_bands_cover_every_rank_once(count):
    edges = band_edges(count)
    assert edges[0][0] == 0
    assert edges[-1][1] == count
    assert all(a[1] == b[0] for a, b in pairwise(edges))


def test_auto_keeps_the_curve_and_the_budget(matrix, tmp_path):
    small = fb.compress(matrix, ratio=4, keys=[f"w{i}" for i in range(len(matrix))], generator=3)
    report = small.report.data
    chosen = [point for point in report["curve"] if point["chosen"]]
    assert len(chosen) == 1
    assert {point["stage"] for point in report["curve"]} >= {"sample"}
    assert len({point["method"] for point in report["curve"]}) >= 6
    assert sum(report["parts"].values()) == report["chosen"]["bytes"] <= matrix.nbytes // 4
    assert chosen[0]["error"] <= 1.12 * min(point["error"] for point in report["curve"])
    assert report["quality"]["recall"] == chosen[0]["recall"]
    assert small["w3"].shape == (16,)
    for name in ("report.html", "report.json", "report.txt"):
        small.report.save(tmp_path / name)
    assert json.loads((tmp_path / "report.json").read_text())["measure"] == "recall"
    assert "with keys: " in (tmp_path / "report.txt").read_text()
    again = fb.compress(matrix, ratio=4, generator=3)
    assert np.array_equal(again[np.arange(50)], small[np.arange(50)]), (
        "the same seed gives the same table"
    )


@pytest.mark.parametrize("finalists", [1, 2])
def test_a_sample_stands_for_a_large_matrix(monkeypatch, finalists):
    monkeypatch.setattr(trial, "CodecJob", partial(CodecJob, training_rows=3000))
    monkeypatch.setitem(trial.EFFORTS, "normal", Effort(2, 4, finalists, 2, 2e9, 1.12, 1e15))
    monkeypatch.setattr(trial, "SAMPLE_ROWS", 2000)
    matrix = clustered(7000)
    told = []
    small = fb.compress(
        matrix, ratio=8, tell=lambda what, share: told.append((what.split(":")[0], share))
    )
    stages = [point["stage"] for point in small.report.data["curve"]]
    assert stages.count("refined") == finalists
    assert stages.count("sample") > 4
    assert small.report.quality["recall"] > 0.4
    assert all(0 <= share <= 1 for _, share in told)
    assert [what for what, _ in told][-1] == "measuring"
    assert told[-1][1] > 0.5


def test_effort_and_minutes():
    matrix = np.random.default_rng(0).standard_normal((1200, 32)).astype(np.float32)
    tables = {effort: fb.compress(matrix, ratio=6, effort=effort) for effort in ("quick", "normal")}
    counts = {name: len(table.report.data["curve"]) for name, table in tables.items()}
    assert counts["quick"] < counts["normal"]
    assert tables["quick"].report.quality["error"] < 1.2 * tables["normal"].report.quality["error"]
    hasty = fb.compress(matrix, ratio=6, minutes=1e-9)
    assert [point["stage"] for point in hasty.report.data["curve"]].count("sample") == 1
    assert "minutes=1e-09" in hasty.report.data["command"]
    for given, message in (
        ({"effort": "much"}, "quick, normal, best"),
        ({"minutes": 0}, "a number above 0"),
        ({"minutes": "2"}, "a number above 0"),
    ):
        with pytest.raises(fb.ArgumentError, match=message):
            fb.compress(matrix, ratio=6, **given)


def test_stages_predict_the_order_of_shapes(matrix):
    job, method = job_of(matrix), CODECS["layered"]
    listed = method.settings(*matrix.shape, 12_000, 16)
    ordered = method.order(job, listed)
    predicted = [method.predict(job, **settings) for settings in ordered]
    assert min(predicted) == predicted[0]
    errors = job.stages(5).errors
    assert all(after < before for before, after in pairwise(errors))

    def error(settings):
        gap = PackedTable(method.fit(job, **settings).bands(), 16)[:] - matrix
        return float(((gap**2).sum(1) / (matrix**2).sum(1)).mean())

    assert error(ordered[0]) < error(ordered[-1])


def test_quality_is_reached_with_few_bytes(matrix):
    good = fb.compress(matrix, quality="error:0.05")
    assert good.report.quality["error"] <= 0.05
    looser = fb.compress(matrix, quality="error:0.2")
    assert looser.report.quality["error"] <= 0.2
    assert looser.nbytes < good.nbytes
    with pytest.raises(fb.ArgumentError, match="out of reach"):
        fb.compress(matrix, quality="recall:0.99999", method="int2")


def test_weights_keep_what_is_used(matrix):
    weights = 1.0 / np.arange(1, len(matrix) + 1)[::-1]  # the last rows are used most
    plain = fb.compress(matrix, ratio=8, method="clusters")
    given = fb.compress(matrix, ratio=8, method="hot+clusters", weights=weights)
    used = np.arange(len(matrix))[-given.made_by["hot"] :]

    def error(table):
        return ((table[used] - matrix[used]) ** 2).sum() / (matrix[used] ** 2).sum()

    assert error(given) < 0.1 * error(plain)
    assert given.report.quality["weighted_error"] < given.report.quality["error"]
    assert "weighted_recall" in given.report.quality


def test_targets_are_read():
    assert Target.of("600KB", None, None, 1).budget == 600_000
    assert read_bytes("1.5 MiB") == 3 << 19
    for bad in ("much", "-3", "3XB", 0, True):
        with pytest.raises(fb.ArgumentError, match="budget"):
            read_bytes(bad)
    for given in (
        {"quality": "recall"},
        {"quality": "recall:2"},
        {"quality": "speed:0.5"},
        {"ratio": 0.5},
        {"ratio": float("nan")},
    ):
        with pytest.raises(fb.ArgumentError):
            Target.of(**({"budget": None, "ratio": None, "quality": None} | given), dense=100)


BAD = {
    "nan": (lambda x: x.__setitem__((5, 3), np.nan), "row 5 is not finite"),
    "infinite": (lambda x: x.__setitem__((7, 0), np.inf), "row 7 is not finite"),
    "zeros": (lambda x: x.__setitem__([0, 9], 0), "rows 0, 9 are all zero"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_rows_are_named(matrix, what, tmp_path):
    change, message = BAD[what]
    bad = matrix.copy()
    change(bad)
    with pytest.raises(fb.DataError, match=message):
        fb.compress(bad, ratio=4)
    np.save(tmp_path / "bad.npy", bad)
    done = run(
        "compress", tmp_path / "bad.npy", "--ratio", "4", "--out", tmp_path / "out.safetensors"
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.npy"]


def test_bad_arguments_are_named(matrix):
    for given, message in (
        ({}, "exactly one of"),
        ({"ratio": 4, "budget": "1KB"}, "exactly one of"),
        ({"ratio": 4, "method": "magic"}, "layered"),
        ({"ratio": 4, "method": "rq:speed=3"}, "has no setting 'speed'"),
        ({"ratio": 4, "method": "pq:parts=0"}, "from 1 to"),
        ({"ratio": 4, "method": "pq:parts=2.5"}, "give an integer"),
        ({"ratio": 4, "method": "kd:parts=-1"}, "from 1 to"),
        ({"ratio": 4, "method": "kd:composer=foo"}, "linear, lstm, mlp, recurrent"),
        ({"ratio": 4, "method": "int8:scales=foo"}, "column, row"),
        ({"ratio": 4, "method": "pq:parts=8,parts=4"}, "twice"),
        ({"ratio": 4, "method": None}, "name"),
        ({"ratio": 4, "weights": "often"}, "zipf"),
        ({"ratio": 4, "weights": [1, 2]}, "weights have shape"),
        ({"ratio": 4, "keys": ["a"]}, "1 keys"),
        ({"budget": 200}, "the smallest possible takes"),
        ({"ratio": 4, "words": ["x.txt"]}, "keys"),
        ({"ratio": 4, "generator": "x"}, "generator"),
        ({"ratio": 4, "padding_idx": 9999}, "padding_idx"),
    ):
        with pytest.raises(fb.FeatherbedError, match=message):
            fb.compress(matrix, **given)
    with pytest.raises(fb.DataError, match="scale the matrix down"):
        fb.compress(matrix * np.float32(1e30), ratio=4)
    for bad in (np.zeros((0, 4), np.float32), np.zeros((4, 0), np.float32)):
        with pytest.raises(fb.DataError, match="empty"):
            fb.compress(bad, ratio=2)
    with pytest.raises(fb.ArgumentError, match="shape"):
        fb.compress(np.ones(5, np.float32), ratio=2)
    with pytest.raises(fb.ArgumentError, match="floating"):
        fb.compress(np.ones((5, 5), int), ratio=2)


@pytest.mark.parametrize("shape", [(1, 8), (5, 64), (40, 64), (40, 256)], ids=str)
def test_few_rows_and_wide_ones(shape):
    matrix = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    small = fb.compress(matrix, budget=matrix.nbytes // 2 + 4000)
    assert small.report.quality["error"] < 0.1
    for name in ("opq", "rq", "lsq", "kd", "layered"):
        try:
            named = fb.compress(matrix, budget=matrix.nbytes // 2 + 6000, method=name)
        except fb.ArgumentError as error:
            assert "too small a matrix" in str(error)
        else:
            assert relative(matrix, named) < 0.1


def test_what_can_be_given(matrix):
    plain = fb.compress(matrix, ratio=3, method="int8")
    tensor = torch.from_numpy(matrix)
    layer = torch.nn.Embedding.from_pretrained(tensor)
    for given in (
        layer,
        torch.nn.Parameter(tensor),
        tensor.clone().requires_grad_(),
        matrix.tolist(),
        fb.DenseTable.from_dense(tensor),
    ):
        assert np.array_equal(fb.compress(given, ratio=3, method="int8")[:], plain[:])
    padded = torch.nn.Embedding(300, 16, padding_idx=7)
    small = fb.compress(padded, ratio=1, method="int8")
    assert small.padding_idx == 7
    assert not small[7].any()
    padded.weight.data[7] = 1.0  # nn.Embedding gives this row as it is
    assert fb.compress(padded, ratio=1, method="int8")[7].any()


def test_what_cannot_be_given_is_named(tmp_path):
    np.save(tmp_path / "there.npy", np.ones((3, 3), np.float32))
    for given, message in (
        ("a.npy", r"the path 'a.npy' \(no such file\).*np.load"),
        (tmp_path / "there.npy", "there.npy': it takes a matrix"),
        (None, "given None: it takes a matrix"),
        ([[1.0, 2.0], [3.0]], "differ in length"),
        ([[1, 2], [3, 4]], "astype"),
        ({"a": 1}, "a dict: it takes"),
        (torch.nn.ReLU(), "ReLU.*no matrix"),
        (torch.nn.Sequential(torch.nn.Embedding(5, 3)), "its matrices are 0.weight"),
        (torch.eye(3).to_sparse(), "cannot read this tensor"),
        (torch.empty(3, 3, device="meta"), "cannot read this tensor"),
    ):
        for weights in (None, "zipf"):
            with pytest.raises(fb.ArgumentError, match=message):
                fb.compress(given, ratio=2, weights=weights)
    for weights in (["a"] * 9, {"a": 1}):
        with pytest.raises(fb.ArgumentError, match="one number for each row"):
            fb.compress(np.ones((9, 3), np.float32), ratio=2, weights=weights)


def test_settings_that_do_not_go_together(matrix, tmp_path):
    np.save(tmp_path / "m.npy", matrix)
    for method, message in (
        ("pq:width=3", "leave it out"),
        ("pq+norms:parts=3", "do not fit 16 columns"),
        ("hot+opq:parts=3", "do not fit 16 columns"),
        ("hot+kd:hot=1200", "leave some for the tail"),
        ("lowrank:rank=17", "at most that rank"),
        ("layered:blocks=99", "at most 16 blocks"),
        ("layered:blocks=4,block_bits=0", "leave it out"),
        ("ksvd:anchors=4,codes=5", "leave it out"),
    ):
        with pytest.raises(fb.ArgumentError, match=message):
            fb.compress(matrix, ratio=2, method=method)
    for method in (
        "kd:parts=0,bits=6",
        "kd:parts=6,bits=99",
        "kd:composer=foo",
        "kd:choices=4",
        "hot+opq:parts=3",
        "product",
    ):
        done = run(
            "compress",
            tmp_path / "m.npy",
            "--ratio",
            "4",
            "--method",
            method,
            "--out",
            tmp_path / "o.safetensors",
            "--quiet",
        )
        assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, ""), (
            method,
            done.stderr,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["m.npy"]
    assert (
        fb.compress(matrix, ratio=3, method="kd: parts=4, bits=5").made_by["composer"] == "linear"
    )
    assert fb.compress(matrix, ratio=3, method="layered+norms:blocks=5").made_by["width"] % 5 == 0


def test_the_padding_row_stays_zero(matrix):
    padded = matrix.copy()
    padded[4] = 0
    small = fb.compress(padded, ratio=4, method="pq", padding_idx=4)
    assert not small[4].any()
    assert small[5].any()


def test_settings_that_are_asked_for(matrix):
    small = fb.compress(matrix, budget=60_000, method="rq:codes=3,bits=5")
    assert small.made_by["codes"] == 3
    assert small.made_by["bits"] == 5
    small = fb.compress(matrix, ratio=4, method="rq:codes=6")
    assert small.nbytes > matrix.nbytes / 8, "what is not asked for follows from the bytes"
    with pytest.raises(fb.ArgumentError, match="bytes"):
        fb.compress(matrix, budget=10_000, method="rq:codes=30,bits=8")


def test_the_command_and_the_gate(matrix, tmp_path):
    np.save(tmp_path / "m.npy", matrix)
    out, page = tmp_path / "m.safetensors", tmp_path / "m.html"
    done = run(
        "compress",
        tmp_path / "m.npy",
        "--ratio",
        "8",
        "--out",
        out,
        "--report",
        page,
        "--method",
        "int4",
    )
    assert done.returncode == 2, "int4 rows take an eighth, and their scales more"
    assert "bytes" in done.stderr
    done = run(
        "compress",
        tmp_path / "m.npy",
        "--ratio",
        "4",
        "--out",
        out,
        "--report",
        page,
        "--method",
        "layered",
    )
    assert done.returncode == 0, done.stderr
    assert out.stat().st_size <= matrix.nbytes // 4
    assert done.stdout.rstrip().endswith(f"written     {out}, {page}")
    assert "<html" in page.read_text()
    floor = json.loads(
        run("gate", out, "--against", tmp_path / "m.npy", "--recall", "0", "--json").stdout
    )["recall"]
    assert (
        run(
            "gate", out, "--against", tmp_path / "m.npy", "--recall", round(floor - 0.01, 3)
        ).returncode
        == 0
    )
    failed = run("gate", out, "--against", tmp_path / "m.npy", "--recall", round(floor + 0.01, 3))
    assert failed.returncode == 1
    assert "below" in failed.stderr
    assert run("gate", out, "--against", tmp_path / "m.npy").returncode == 2
    np.save(tmp_path / "other.npy", matrix[:, :3])
    assert run("gate", out, "--against", tmp_path / "other.npy", "--recall", "0.1").returncode == 2
    assert run("compress", tmp_path / "m.npy", "--out", out).returncode == 2
    for report, what in (
        (tmp_path / "m.pdf", "a report is .html, .json or .txt"),
        (out, "a report is .html, .json or .txt"),
    ):
        done = run("compress", tmp_path / "m.npy", "--ratio", "4", "--out", out, "--report", report)
        assert (done.returncode, done.stderr) == (2, f"error: {report}: {what}\n")
    assert (
        run(
            "compress", tmp_path / "m.npy", "--ratio", "4", "--budget", "9KB", "--out", out
        ).returncode
        == 2
    )


def test_the_headline_counts_the_keys(matrix, tmp_path):
    lines = (f"word{i} {' '.join(map(str, row))}" for i, row in enumerate(matrix.tolist()))
    (tmp_path / "m.txt").write_text("\n".join(lines) + "\n")
    out = tmp_path / "m.safetensors"
    done = run(
        "compress",
        tmp_path / "m.txt",
        "--ratio",
        "4",
        "--method",
        "int4",
        "--out",
        out,
        "--report",
        tmp_path / "m.json",
    )
    assert done.returncode == 0, done.stderr
    chosen = json.loads((tmp_path / "m.json").read_text())["chosen"]
    assert chosen["bytes"] + chosen["keys"] == out.stat().st_size
    assert chosen["keys"] > 8 * len(matrix) / 2
    headline = done.stdout.splitlines()[1]
    assert f"-> {as_bytes(out.stat().st_size)}, " in headline
    assert " with keys: " in headline
    dense = 4 * matrix.size + chosen["keys"]
    assert f"{dense / out.stat().st_size:,.1f} times smaller" in headline
    assert f"; keys {as_bytes(chosen['keys'])}" in done.stdout
    same = ("--out", out, "--report", tmp_path / "m.txt")
    done = run("compress", tmp_path / "m.txt", "--ratio", "4", "--method", "int4", *same)
    assert done.returncode == 2
    assert "write the report elsewhere" in done.stderr
    assert (tmp_path / "m.txt").read_text().startswith("word0 ")


def test_the_time_left_follows_the_pace():
    now, told = [0.0], []
    meter = WorkMeter(lambda what, share: told.append((what, share)), 0.0, lambda: now[0])
    with meter.step("reading", "measuring", 1e7):
        now[0] = 1.0
    meter.left = {"layered": 600e9, "pq": 20e9}
    for number in range(3):
        with meter.step(f"part {number}", "layered", 200e9, reports=number == 2):
            now[0] += 10
            meter.report_share("refining", 0.5)
            now[0] += 10
    with meter.step("last", "pq", 20e9):
        pass
    assert [what for what, _ in told] == ["reading", "part 0", "part 1", "part 2", "part 2", "last"]
    assert told[0][1] == 0, "nothing is known without a plan"
    found = [
        now_ * (1 - share) / share
        for (_, share), now_ in zip(told[1:], (1, 21, 41, 51, 61), strict=True)
    ]
    assert found[0] == pytest.approx(31, abs=0.1), (
        "before anything is measured, a second for every 2e10"
    )
    assert found[1] == pytest.approx(20 * 21 / 11 + 1, abs=0.1), "then by the pace measured"
    assert 10 < found[3] < 12, "and by what a step tells itself"
    assert found[4] == pytest.approx(1)


INTERRUPTED = """
import os, signal, sys
from featherbed.cli import main
from featherbed.codecs.trial import WorkMeter
name, left = sys.argv.pop(1), [int(sys.argv.pop(1))]
owner = {"step": WorkMeter, "fsync": os}[name]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored by what runs in the background
work = getattr(owner, name)
def interrupted(*given, **settings):
    left[0] -= 1
    if left[0] == 0:
        print("now", flush=True)
        signal.raise_signal(signal.SIGINT)
    return work(*given, **settings)
setattr(owner, name, interrupted)
main()
"""


@pytest.mark.parametrize(
    ("moment", "code"),
    [(("step", 1), -signal.SIGINT), (("step", 6), -signal.SIGINT), (("fsync", 1), 130)],
    ids=["at once", "at once, later", "while writing"],
)
def test_interrupted_it_leaves_no_file(moment, code, matrix, tmp_path):
    np.save(tmp_path / "m.npy", matrix)
    words = ["compress", tmp_path / "m.npy", "--ratio", "8", "--out", tmp_path / "out.safetensors"]
    command = [sys.executable, "-c", INTERRUPTED, *map(str, [*moment, *words])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "now" in done.stdout.split(), "it must come this far"
    assert done.returncode == code, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m.npy"]


def test_glove_to_a_twentieth(data):
    with np.load(data / "glove" / "glove.6B.50d.top60k.npz") as file:
        vectors = file["vectors"][:8000]
    small = fb.compress(vectors, ratio=8, method="layered")
    assert small.report.quality["recall"] > 0.6
    assert small.report.data["chosen"]["bytes"] <= vectors.nbytes // 8


@pytest.mark.parametrize(
    ("settings", "call"),
    [
        ({"ratio": 3, "method": "int4"}, "ratio=3, method='int4'"),
        ({"budget": "9KB", "method": "int4"}, "budget='9KB', method='int4'"),
        (
            {"quality": "error:0.2", "method": "int4", "padding_idx": 0},
            "quality='error:0.2', method='int4', padding_idx=0",
        ),
        (
            {"ratio": 3, "method": "int4", "measure": "error", "weights": "zipf", "generator": 3},
            "ratio=3, method='int4', measure='error', weights='zipf', generator=3",
        ),
    ],
)
def test_the_report_repeats_all_that_was_asked_for(settings, call):
    rows = np.random.default_rng(0).standard_normal((600, 16)).astype(np.float32)
    rows[0] = 0 if "padding_idx" in settings else 1
    table = fb.compress(rows, **settings)
    command = table.report.data["command"]
    assert command == f"featherbed.compress(matrix, {call})"
    assert (f"command     {command}" in str(table.report)) == (len(command) <= 88)
    again = eval(command, {"featherbed": fb, "matrix": rows})
    assert np.array_equal(again[:], table[:])


def test_small_matrices_of_steep_spectra_get_codes_of_few_bits():
    rows = np.random.default_rng(0).standard_normal((2500, 40)) / np.arange(1, 41)
    found = fb.compress(rows.astype(np.float32), ratio=16)
    stages = fb.compress(rows.astype(np.float32), ratio=16, method="rq")
    assert found.made_by["bits"] < 7  # the dictionaries of more bits would take half of the bytes
    assert found.report.quality["recall"] > stages.report.quality["recall"] - 0.02
    assert found.bands[0].affine is None  # nor is there a basis where nothing needs one
