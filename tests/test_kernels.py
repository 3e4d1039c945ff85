"""Compiled loops against numpy: the same rows and scores, from many threads, after a fork, with numba absent."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import featherbed as fb
from featherbed.kernels import threads
from featherbed.kernels.codes import fields
from featherbed.packed import bits
from featherbed.packed.band import (
    Affine,
    Band,
    Every,
    Fixed,
    Hash,
    Identity,
    Members,
    Ragged,
    Remainder,
)
from featherbed.packed.cells import Cell
from featherbed.packed.engine import WORTH
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable

RNG = np.random.default_rng(0)
V, K, D = 700, 37, 10


def matrix(rows, columns, kind="float32", scales="row"):
    return Matrix.encode(RNG.normal(size=(rows, columns)).astype(np.float32), kind, scales)


def fixed(kind, count=5, choices=K, parts=False):
    values = None if kind is None else RNG.normal(size=(V, count))
    return Fixed.encode(
        RNG.integers(choices, size=(V, count)), values, choices, kind or "float32", parts
    )


def ragged(kind):
    counts = RNG.integers(0, 9, size=V)
    row_of = np.repeat(np.arange(V), counts)
    return Ragged.encode(
        V, row_of, RNG.integers(K, size=len(row_of)), RNG.normal(size=len(row_of)), K, kind
    )


LAYOUTS = {
    "float32 rows": lambda: [Band(V, Identity(), dictionary=matrix(V, D))],
    "float16 rows": lambda: [Band(V, Identity(), dictionary=matrix(V, D, "float16"))],
    "dense values": lambda: [Band(V, Every(), matrix(V, K, "int8"), matrix(K, D))],
    "hash": lambda: [Band(V, Hash(3, 4), None, matrix(K, D))],
    "hash weighted": lambda: [Band(V, Hash(3, 4), matrix(V, 4), matrix(K, D))],
    "remainder sum": lambda: [Band(V, Remainder(20), None, matrix(55, D))],
    "remainder product": lambda: [Band(V, Remainder(20), None, matrix(55, D), "product")],
    "bytes": lambda: [Band(V, fixed("int8", 8, 256), None, matrix(256, D))],
    "bytes few": lambda: [Band(V, fixed("int8", 3, 200), None, matrix(200, D, "float16"))],
    "one code": lambda: [Band(V, fixed(None, 1), None, matrix(K, D))],
    "parts sum": lambda: [Band(V, fixed(None, 6, 8, parts=True), None, matrix(48, D))],
    "parts concat": lambda: [Band(V, fixed(None, 6, 8, parts=True), None, matrix(48, D), "concat")],
    "concat bytes parts": lambda: [Band(V, fixed(None, 16, 256, parts=True), None, matrix(4096, 8), "concat")],
    "concat bytes shared": lambda: [Band(V, fixed(None, 9, 256), None, matrix(256, 3, "float16"), "concat")],
    "concat bytes few": lambda: [Band(V, fixed(None, 3, 200, parts=True), None, matrix(600, 33), "concat")],
    "concat six bits": lambda: [Band(V, fixed(None, 5, K, parts=True), None, matrix(5 * K, 7, "int8"), "concat")],
    "concat nine bits": lambda: [Band(V, fixed(None, 7, 500), None, matrix(500, 1), "concat")],
    "concat wide": lambda: [Band(V, fixed(None, 2), None, matrix(K, 40), "concat")],
    "concat one choice": lambda: [Band(V, fixed(None, 3, 1, parts=True), None, matrix(3, 5), "concat")],
    "concat weighted": lambda: [Band(V, fixed("int8", 5), None, matrix(K, 7), "concat")],
    "concat weighted parts": lambda: [Band(V, fixed("float16", 5, 8, parts=True), None, matrix(40, 2), "concat")],
    "rotated": lambda: [Band(V, fixed(None, 5, 16, parts=True), None, matrix(80, 2), "concat", affine=turn())],
    "layered": lambda: [layered()],
    "layered norms": lambda: [layered(norms=matrix(V, 1, "int8", "column"))],
    "layered rows": lambda: [layered(plus=Band(V, Every(), matrix(V, D, "int4")))],
    "recurrent": lambda: [Band(V, fixed(None, 3, 8, parts=True), None, matrix(24, D), "concat", cell=cell())],
    "affine": lambda: [Band(V, fixed("int4"), None, matrix(K, 7), affine=Affine(matrix(7, D), np.arange(D, dtype=np.float32)))],
    "bias": lambda: [Band(V, fixed("int4"), None, matrix(K, D), affine=Affine(None, np.ones(D, np.float32)))],
    "bands": lambda: [
        Band(90, Identity(), dictionary=matrix(90, D), members=Members.of(RNG.permutation(V)[:90], V)),
        Band(110, fixed_of(110), None, matrix(K, D), members=Members.of(RNG.permutation(V - 90)[:110], V - 90)),
        Band(V - 200, Hash(1, 2), None, matrix(K, D)),
    ],
}  # fmt: skip
for kind in ("float32", "float16", "int8", "int4", "int3", "int2"):
    LAYOUTS[f"fixed {kind}"] = lambda kind=kind: [Band(V, fixed(kind), None, matrix(K, D))]
    LAYOUTS[f"ragged {kind}"] = lambda kind=kind: [Band(V, ragged(kind), None, matrix(K, D))]
for kind in ("int8", "int4", "int3", "int2"):
    for scales in ("row", "column"):
        LAYOUTS[f"{kind} by {scales}"] = lambda kind=kind, scales=scales: [
            Band(V, Every(), matrix(V, D, kind, scales))
        ]


def turn():
    return Affine(matrix(D, D), np.arange(D, dtype=np.float32))


def layered(plus=None, norms=None):
    blocks = Band(V, fixed(None, 5, 16), None, matrix(16, 2, "int8", "column"), "concat")
    summed = fixed(None, 6, 8, parts=True)
    return Band(
        V,
        summed,
        None,
        matrix(48, D),
        affine=replace(turn(), norms=norms),
        plus=blocks if plus is None else plus,
    )


def cell():
    return Cell("recurrent", matrix(D, 4 * D), np.zeros(4 * D, np.float32))


def fixed_of(rows):
    return Fixed.encode(RNG.integers(K, size=(rows, 3)), RNG.normal(size=(rows, 3)), K, "int8")


def table(name, padding=None):
    bands = LAYOUTS[name]()
    first, width = bands[0], D
    if first.combine == "concat" and first.cell is None:
        width = first.codes.count * first.dictionary.shape[1]
    return PackedTable(bands, width, padding_idx=padding)


@pytest.fixture
def engine(monkeypatch):
    return lambda name: monkeypatch.setenv("FEATHERBED_KERNELS", name)


def close(mine, theirs):  # a matrix product adds in another order for another number of rows
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_loops_give_the_rows_of_numpy(name, engine, tmp_path):
    packed = table(name, padding=11)
    products = (
        "dense values",
        "affine",
        "rotated",
        "layered",
        "layered norms",
        "layered rows",
        "recurrent",
    )
    same = close if name in products else np.testing.assert_array_equal
    ids = np.concatenate([RNG.integers(V, size=3000), [0, V - 1, 11]])
    queries = RNG.normal(size=(3, packed.dim)).astype(np.float32)
    engine("numpy")
    rows, scores, best = (
        packed[ids],
        packed.logits(queries),
        packed.search(queries, 7, metric="cosine"),
    )
    packed.save(tmp_path / "t.safetensors")
    fb.check(tmp_path / "t.safetensors")
    for other in (packed, fb.load(tmp_path / "t.safetensors")):
        engine("numba")
        same(other[ids], rows)
        np.testing.assert_allclose(other.logits(queries), scores, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            other.search(queries, 7, metric="cosine")[1], best[1], rtol=1e-5, atol=1e-5
        )
        np.testing.assert_allclose(other.logits(queries[0]), scores[0], rtol=1e-5, atol=1e-5)
        for one in (0, 11, V - 1):
            same(other[one], rows[list(ids).index(one)])
        assert other[[]].shape == (0, packed.dim)
    np.testing.assert_allclose(scores, queries @ packed[:].T, rtol=1e-4, atol=1e-4)


def test_bit_fields_are_read_several_at_a_time():
    for width in (1, 3, 7, 8, 9, 14, 15, 16, 20, 28, 29, 32):
        for count in (1, 4, 7, 8, 13, 16):
            for lead in (1, 6, 8):
                known = RNG.integers(2**width, size=(1, count), dtype=np.uint64).astype(np.uint32)
                record = np.concatenate([np.ones((1, 1), dtype=np.uint32), known], axis=1)
                stream = bits.pack(record, [lead] + count * [width])
                out = np.zeros(count + 1, dtype=np.uint32)
                fields(out, 1, np.uint64(stream.ctypes.data), lead, width, width, count)
                assert np.array_equal(out[1:], known[0]), (width, count, lead)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kernels", ["numpy", "numba"])
def test_one_row_is_the_row_of_a_batch_of_one(name, kernels, engine):
    engine(kernels)
    packed = table(name, padding=11)
    for one in (0, 3, 11, V - 1):
        expected = packed[[one]][0]
        for found in (packed[one], packed[np.int64(one)]):
            np.testing.assert_array_equal(found, expected)
            assert found.dtype == np.float32 and found.flags.writeable
    packed[3][:] = 7  # a result is the caller's own
    np.testing.assert_array_equal(packed[3], packed[[3]][0])
    twin = pickle.loads(pickle.dumps(packed))  # a table that has been used
    np.testing.assert_array_equal(twin[3], packed[3])
    for wrong in (-1, V):
        with pytest.raises(fb.IdError, match=str(wrong)):
            packed[wrong]


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
def test_one_row_with_a_code_out_of_range_is_an_error(kernels, engine):
    engine(kernels)
    for codes in (Fixed.encode(np.full((4, 3), 255), None, 256), ragged("int8")):
        packed = PackedTable([Band(codes.rows, codes, None, matrix(20, D))], D)
        with pytest.raises(fb.FormatError, match="out of range"):
            for one in range(codes.rows):
                packed[one]


def test_rows_looked_up_one_by_one_load_the_compiled_loops_in_the_end(monkeypatch):
    monkeypatch.delenv("FEATHERBED_KERNELS", raising=False)
    monkeypatch.setattr("featherbed.packed.table.CALLS", 4)
    monkeypatch.setattr("featherbed.packed.table.LOADING", 8)
    asked = []
    monkeypatch.setattr("featherbed.packed.engine.kernels", lambda rows: bool(asked.append(rows)))
    packed = table("bytes")
    for _ in range(4 * 10):
        packed[3]
    assert asked == [1] * 8 + [WORTH] * 2


@pytest.mark.parametrize("kind", ["float16", "int8", "int4", "int3", "int2"])
@pytest.mark.parametrize("width", [31, 40, 77])
def test_wide_stored_rows_equal_those_of_numpy(kind, width, engine):
    wide = RNG.normal(size=(90, width)).astype(np.float32)
    if kind == "float16":
        wide[:5] = np.array([[1e-7], [-1e-7], [np.inf], [-np.inf], [np.nan]])
    stored = [Matrix.encode(wide, kind)]
    stored += [] if kind == "float16" else [Matrix.encode(wide, kind, "column")]
    for values in stored:
        packed = PackedTable([Band(90, Every(), values)], width)
        ids = RNG.integers(90, size=200)
        engine("numpy")
        expected = packed[ids]
        engine("numba")
        np.testing.assert_array_equal(packed[ids], expected)


@pytest.mark.parametrize("kind", ["int8", "int4", "int3", "int2"])
@pytest.mark.parametrize("scales", ["row", "column"])
def test_levels_of_every_width(kind, scales, engine):
    for width in (
        1,
        5,
        31,
        32,
        33,
        64,
        100,
    ):  # 32 levels are decoded at a time, the rest one by one
        stored = matrix(50, width, kind, scales)
        ids = RNG.integers(50, size=300)
        engine("numpy")
        rows = stored.rows(ids)
        engine("numba")
        np.testing.assert_array_equal(stored.rows(ids), rows)


def test_bags_equal_torch_in_both_engines(engine):
    packed = table("bytes", padding=11)
    dense = torch.from_numpy(packed[:])
    ids = np.concatenate([RNG.integers(V, size=5000), [11, 11, 0]])
    cuts = np.sort(np.concatenate([[0, 0, 700, 700], RNG.integers(len(ids), size=900)]))
    weights = RNG.random(len(ids), dtype=np.float32)
    for name in ("numpy", "numba"):
        engine(name)
        for mode in ("sum", "mean"):
            expected = F.embedding_bag(
                torch.from_numpy(ids), dense, torch.from_numpy(cuts), mode=mode, padding_idx=11
            )
            close(packed.bag(ids, cuts, mode=mode), expected.numpy())
            flat = RNG.integers(V, size=(40, 100))
            expected = F.embedding_bag(torch.from_numpy(flat), dense, mode=mode, padding_idx=11)
            close(packed.bag(flat, mode=mode), expected.numpy())
        last = np.append(cuts, len(ids))
        factors = torch.from_numpy(weights)
        expected = F.embedding_bag(
            torch.from_numpy(ids),
            dense,
            torch.from_numpy(cuts),
            mode="sum",
            per_sample_weights=factors,
        )
        close(packed.bag(ids, last, weights, include_last_offset=True), expected.numpy())
        assert packed.bag(ids[:0], [0, 0]).shape == (2, D)
    packed._chunk = 300  # bags that reach over several pieces
    close(packed.bag(ids, cuts, weights), expected.numpy())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([1, 2],), "1-D ids with offsets"),
        (([1, 2], [1]), "start at 0"),
        (([1, 2], [0, 5]), "start at 0"),
        (([1, 2], [0.0]), "integers"),
        (([1, 2], [0], [1.0]), "shape of the ids"),
    ],
)
def test_bad_bags_are_refused(arguments, named):
    with pytest.raises(fb.ArgumentError, match=named):
        table("bytes").bag(*arguments)
    with pytest.raises(fb.ArgumentError, match="sum or mean"):
        table("bytes").bag([[1]], mode="max")


def test_out_of_range_codes_are_found_by_both(engine):
    for codes in (fixed("int8", 8, 256), fixed("int4"), ragged("int8")):
        packed = PackedTable([Band(V, codes, None, matrix(20, D))], D)
        for name in ("numpy", "numba"):
            engine(name)
            with pytest.raises(fb.FormatError, match="out of range"):
                packed[np.arange(V)]
            with pytest.raises(fb.FormatError, match="out of range"):
                packed.logits(np.ones(D))


@pytest.mark.parametrize("parts", [True, False])
def test_out_of_range_codes_laid_side_by_side_are_found_by_both(parts, engine):
    packed = PackedTable(
        [Band(V, fixed(None, 4, 32, parts=parts), None, matrix(80 if parts else 20, 3), "concat")],
        12,
    )
    for name in ("numpy", "numba"):
        engine(name)
        for call in (
            lambda: packed[np.arange(V)],
            lambda: packed.logits(np.ones(12)),
            lambda: packed.codes_of(np.arange(V)),
        ):
            with pytest.raises(fb.FormatError, match="out of range"):
                call()


def test_eight_threads_at_once(engine):
    engine("numba")
    packed = table("bytes")
    expected = packed[:]
    threads.set_threads(3)
    try:
        with ThreadPoolExecutor(8) as many:
            for ids, rows in many.map(
                lambda _: (i := RNG.integers(V, size=5000), packed[i]), range(200)
            ):
                np.testing.assert_array_equal(rows, expected[ids])
    finally:
        threads.set_threads(None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork(engine):
    engine("numba")
    threads.set_threads(2)
    packed = table("bytes")
    ids = RNG.integers(V, size=9000)
    expected = packed[ids]  # the pool has threads now; the child has none of them
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # a child that hangs ends, and the test fails: nobody waits for ever
        try:
            os.write(writing, b"1" if np.array_equal(packed[ids], expected) else b"0")
        finally:
            os._exit(0)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"1"
    finally:
        os.waitpid(child, 0)
        os.close(reading)
        threads.set_threads(None)
    np.testing.assert_array_equal(packed[ids], expected)


def test_workers_do_not_pile_up_wake_up_calls(engine):
    engine("numba")
    threads.set_threads(2)
    packed = table("bytes")
    ids = RNG.integers(V, size=4096)
    packed[ids]
    for _ in range(600):
        packed[ids]
        end = time.perf_counter() + 0.0004  # about when the worker goes to sleep
        while time.perf_counter() < end:
            pass
    time.sleep(0.05)
    assert threads._workers.queue[threads.ASLEEP] <= 1
    assert threads._workers.wake._value <= 1
    threads.set_threads(None)


def test_an_interrupt_between_opening_and_finishing_leaves_no_open_queue(engine, monkeypatch):
    engine("numba")
    threads.set_threads(2)
    packed = table("bytes")
    ids = RNG.integers(V, size=60_000)
    expected = packed[ids]
    time.sleep(0.05)  # the worker sleeps: the next call has to wake it

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threads._workers, "current_core", interrupted)
        with pytest.raises(KeyboardInterrupt):
            packed[ids]
    assert threads._workers.queue[threads.OPEN] == 0
    np.testing.assert_array_equal(packed[ids], expected)
    threads.set_threads(None)


def test_numpy_adds_codes_in_order(engine):
    codes = Fixed.encode(RNG.integers(K, size=(V, 64)), RNG.normal(size=(V, 64)), K, "float32")
    packed = PackedTable([Band(V, codes, None, matrix(K, 1))], 1)
    engine("numpy")
    rows = packed[:]
    engine("numba")
    np.testing.assert_array_equal(packed[:], rows)


def test_threads_follow_the_setting(monkeypatch):
    monkeypatch.setenv("FEATHERBED_THREADS", "5")
    threads.set_threads(None)
    assert threads.thread_count() == 5
    monkeypatch.delenv("FEATHERBED_THREADS")
    threads.set_threads(None)
    assert threads.thread_count() == len(os.sched_getaffinity(0))


def test_workers_end(engine):
    engine("numba")
    packed = table("bytes")
    ids = RNG.integers(V, size=9000)
    expected = packed[ids]
    for count in (4, 1, 3, 2):
        threads.set_threads(count)
        np.testing.assert_array_equal(packed[ids], expected)
        time.sleep(0.01)  # asleep by now: the next look-up has to wake them
        np.testing.assert_array_equal(packed[ids], expected)
    threads.set_threads(None)
    deadline = time.monotonic() + 60
    while (
        any(thread.name.startswith("featherbed") for thread in threading.enumerate())
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("featherbed")
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_copies_of_a_used_table_stand_alone(name, engine):
    engine("numba")
    packed = table(name)
    ids = RNG.integers(V, size=3000)
    expected = packed[ids]
    for twin in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        for band in packed.bands:  # the copy must not look here any more
            for _, array in band.arrays():
                assert not any(
                    np.shares_memory(array, other) for b in twin.bands for _, other in b.arrays()
                )
            assert "_plan" not in next(iter(twin.bands)).__dict__
        close(twin[ids], expected)


def test_a_used_table_survives_the_way_to_another_process(engine, tmp_path):
    engine("numba")
    packed = table("bytes")
    expected = packed[np.arange(V).repeat(10)]
    (tmp_path / "p").write_bytes(pickle.dumps(packed))
    code = (
        "import pickle, sys, numpy as np\n"
        "packed = pickle.load(open(sys.argv[1], 'rb')); print(packed[np.arange(len(packed)).repeat(10)].sum())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "p"], capture_output=True, text=True, check=True
    )
    assert float(found.stdout) == pytest.approx(float(expected.sum()), rel=1e-4)


def test_a_bad_number_of_threads_is_refused(monkeypatch):
    monkeypatch.setenv("FEATHERBED_THREADS", "zero")
    monkeypatch.setattr(threads, "_threads", None)  # as before anyone has asked
    with pytest.raises(fb.ArgumentError, match="'zero'"):
        threads.thread_count()


def test_an_unknown_engine_is_refused(engine):
    engine("cuda")
    with pytest.raises(fb.ArgumentError, match="auto, numpy or numba"):
        table("bytes")[[1]]


WITHOUT = """
import sys
for name in {missing!r}:
    sys.modules[name] = None
import numpy as np, featherbed as fb
packed = fb.load({path!r})
rows = packed[np.arange(len(packed)).repeat(20)]
fb.check({path!r})
packed.logits(rows[0]); packed.search(rows[0], 3); packed["k1"]
from typer.testing import CliRunner
from featherbed.cli import app
for verb, *rest in (["inspect"], ["lookup", "3"], ["lookup", "k3"], ["search", "k3"], ["check"]):
    words = [verb, {path!r}, *rest]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, (words, result.output, result.exception)
print(float(rows.sum()))
"""


@pytest.mark.parametrize("missing", [["torch"], ["numba"], ["torch", "numba"]], ids="-".join)
def test_works_where_torch_and_numba_cannot_be_imported(missing, tmp_path):
    packed = table("bytes")
    path = tmp_path / "t.safetensors"
    fb.save(packed, path, keys=[f"k{i}" for i in range(V)])
    code = WITHOUT.format(missing=missing, path=str(path))
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert float(found.stdout) == pytest.approx(
        float(packed[np.arange(V).repeat(20)].sum()), rel=1e-5
    )


@pytest.mark.parametrize("anchor", [-1, 9, 30_000])
def test_slots_of_anchors_that_do_not_exist_are_refused(anchor):
    table = fb.AnchorTable(50, 8, anchors=9, slots=3)
    support = torch.full_like(table.support, anchor, dtype=torch.int16)
    table.load_state_dict(table.state_dict() | {"support": support})
    if anchor > 127:  # as kept in one byte
        table.support = support
    with pytest.raises(fb.ArgumentError, match="support names anchor"):
        table(torch.arange(50))


def test_sparse_gradients_of_rows_that_do_not_exist_are_refused():
    table = fb.DenseTable(50, 8, sparse=True)
    optimizer = fb.AdamW(table.parameters())
    table(torch.arange(3)).sum().backward()
    parameter = next(table.parameters())
    indices, values = torch.tensor([[4, 10**6]]), torch.ones(2, 8)
    parameter.grad = torch.sparse_coo_tensor(indices, values, (50, 8), check_invariants=False)
    with pytest.raises(fb.IdError, match="ids go from 0 to 49"):
        optimizer.step()
