"""Packed tables as ONNX models: onnxruntime gives the rows that numpy gives, from files about as small."""

import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.errors import ArgumentError, FormatError, MissingExtra
from featherbed.interop.onnx import export as exporter
from featherbed.interop.onnx import graph as fields
from featherbed.interop.onnx import rows
from featherbed.interop.onnx.export import to_onnx
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
from featherbed.packed.matrix import KINDS, Graded, Matrix
from featherbed.packed.table import PackedTable
from featherbed.tables.spec import METHODS, method_name

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

RNG = np.random.default_rng(1)
GOLDEN = sorted((Path(__file__).parent / "golden").glob("version*/*.safetensors"))
V = 70


def session(model):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    given = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def run(model, ids):
    return session(model).run(["rows"], {"ids": np.asarray(ids, dtype=np.int64)})[0]


def check(packed, ids=None, **settings):
    """Compare all rows, and none, with those of the packed table; return the model."""
    model = to_onnx(packed, **settings)
    onnx.checker.check_model(model, full_check=True)
    asked = np.arange(len(packed)) if ids is None else ids
    asked = RNG.permutation(asked)
    wanted, opened = packed[asked], session(model)
    (found,) = opened.run(["rows"], {"ids": asked})
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())
    assert opened.run(["rows"], {"ids": asked[:0]})[0].shape == (0, packed.dim)
    return model


def matrix(count, columns, kind="float32", scales="row", scale_kind="float32"):
    return Matrix.encode(RNG.normal(size=(count, columns)), kind, scales, scale_kind)


def codes(count, choices, kind=None, parts=False, rows=V):
    values = None if kind is None else RNG.normal(size=(rows, count))
    return Fixed.encode(
        RNG.integers(0, choices, (rows, count)), values, choices, kind or "float32", parts
    )


def operators(model):
    return {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_part_of_the_format(path, blocks):
    packed = fb.load(path)
    opened = session(check(packed, blocks=blocks))
    for wrong in (-1, len(packed), len(packed) + 100_000, 2**62, -(2**63)):
        with pytest.raises(Exception, match="out of data bounds"):
            opened.run(None, {"ids": np.array([0, wrong])})


@pytest.mark.parametrize("method", METHODS, ids=method_name)
def test_every_table(method):
    table = method(50, 8, **method.example)
    try:
        packed = table.pack()
    except fb.NotPackable:
        with pytest.raises(fb.NotPackable):
            to_onnx(table)
        return
    check(packed)


@pytest.mark.parametrize("scales", ["row", "column"])
@pytest.mark.parametrize("columns", [1, 5, 16, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_matrices(kind, columns, scales):
    values = matrix(V, columns, kind, scales, "float16")
    wanted = values.rows(np.arange(V))
    for blocks in (False, True):
        model = to_onnx(PackedTable([Band(V, Every(), values)], columns), blocks=blocks)
        found = run(model, np.arange(V))
        special = (
            blocks and scales == "row" and (kind == "int8" or (kind == "int4" and columns % 2 == 0))
        )
        assert ("GatherBlockQuantized" in operators(model)) == special
        if special:
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("choices", [1, 2, 3, 8, 13, 60, 100, 256, 300, 5000, 70_000])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_fixed_codes(choices, count):
    check(PackedTable([Band(V, codes(count, choices), dictionary=matrix(choices, 4))], 4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("combine", ["sum", "product", "concat"])
def test_values_of_fixed_codes(kind, combine):
    band = Band(V, codes(3, 9, kind), dictionary=matrix(9, 4, "int8"), combine=combine)
    check(PackedTable([band], 12 if combine == "concat" else 4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [0, 1, 20])
def test_ragged_codes(kind, most):
    counts = RNG.integers(0, most + 1, V)
    counts[:5] = 0
    row_of = np.repeat(np.arange(V), counts)
    ragged = Ragged.encode(
        V, row_of, RNG.integers(0, 37, len(row_of)), RNG.normal(size=len(row_of)), 37, kind
    )
    model = check(PackedTable([Band(V, ragged, dictionary=matrix(37, 4))], 4))
    assert not run(model, [0, 3]).any()


@pytest.mark.parametrize(
    ("codes", "atoms", "combine"),
    [
        (Hash(0, 1), 1, "sum"),
        (Hash(7, 3), 11, "concat"),
        (Hash(2**32 - 1, 2), 2**16 + 1, "sum"),
        (Remainder(9), 17, "product"),
    ],
)
def test_codes_taken_of_the_id(codes, atoms, combine):
    count = 2 if isinstance(codes, Remainder) else codes.hashes
    values = matrix(V, count, "int8")
    check(
        PackedTable(
            [Band(V, codes, values, matrix(atoms, 3), combine)],
            3 * count if combine == "concat" else 3,
        )
    )


def test_hashes_of_large_ids():
    count = 2**31 + 12_345  # what a table without anything stored for a row may have
    packed = PackedTable([Band(count, Hash(3, 2), dictionary=matrix(4096, 3))], 3)
    ids = RNG.integers(0, count, 2000)
    check(packed, np.append(ids, [0, count - 1]))


def test_layers_affine_and_lengths():
    plus = Band(V, Every(), matrix(V, 6, "int4"), affine=Affine(norms=matrix(V, 1, "float16")))
    bias = RNG.normal(size=5).astype(np.float32)
    affine = Affine(matrix(6, 5, "int8"), bias, matrix(V, 1, "int8"))
    first = Band(
        V,
        codes(3, 9),
        dictionary=matrix(9, 6, "int3", "column"),
        affine=affine,
        plus=plus,
    )
    check(PackedTable([first], 5, padding_idx=7))


def test_bands_of_many_ids():
    total = 3000
    kept = np.sort(RNG.choice(total, 900, replace=False))
    second = np.sort(RNG.choice(total - 900, 40, replace=False))
    bands = [
        Band(900, Every(), matrix(900, 4, "int4"), members=Members.of(kept, total)),
        Band(
            0,
            Identity(),
            dictionary=matrix(0, 4),
            members=Members.of(np.array([], dtype=np.int64), total - 900),
        ),
        Band(40, Identity(), dictionary=matrix(40, 4), members=Members.of(second, total - 900)),
        Band(total - 940, Hash(0, 2), dictionary=matrix(30, 4)),
    ]
    packed = PackedTable(bands, 4, padding_idx=int(kept[3]))
    model = check(packed)
    assert not run(model, [kept[3]]).any()
    np.testing.assert_array_equal(run(model, kept[5:9]), packed[kept[5:9]])  # all of one band
    with pytest.raises(Exception, match="out of data bounds"):
        run(model, [total])


def test_graded_rows_beside_other_bands():
    graded = Graded.round(RNG.normal(size=(V, 9)), RNG.integers(0, 9, (3, 9)), [10, 20, V - 30])
    check(PackedTable([Band(V, Every(), graded)], 9))
    nothing = Graded.round(RNG.normal(size=(V, 9)), np.zeros((1, 9), dtype=int), [V])
    check(PackedTable([Band(V, Every(), nothing, plus=Band(V, Every(), graded))], 9))


def test_a_dictionary_too_large_to_keep(monkeypatch):
    monkeypatch.setattr(rows, "keeps_decoded", lambda dictionary: False)
    packed = PackedTable([Band(V, codes(3, 40, "int4"), dictionary=matrix(40, 5, "int3"))], 5)
    check(packed)
    assert run(to_onnx(packed, rank=2), np.zeros((0, 3))).shape == (0, 3, 5)


@pytest.mark.parametrize("rank", [0, 1, 2, 3, None])
def test_ids_of_any_shape(rank):
    packed = fb.load(GOLDEN[0])
    model = to_onnx(packed, rank=rank)
    shapes = {0: [()], 1: [(4,), (0,)], 2: [(2, 3), (0, 3), (2, 0)], 3: [(2, 1, 3), (2, 0, 3)]}
    for shape in chain.from_iterable(shapes.values()) if rank is None else shapes[rank]:
        ids = RNG.integers(0, len(packed), shape)
        np.testing.assert_allclose(run(model, ids), packed[ids], rtol=1e-6)
    if rank is not None:
        onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize("opset", [18, 21, 23])
def test_operator_sets(opset):
    for path in GOLDEN:
        model = check(fb.load(path), opset=opset)
        assert [entry.version for entry in model.opset_import if entry.domain == ""] == [opset]


def test_the_reference_of_onnx_agrees():
    from onnx.reference import ReferenceEvaluator

    packed = PackedTable([Band(V, codes(3, 9, "int3"), dictionary=matrix(9, 4, "int4"))], 4)
    (found,) = ReferenceEvaluator(to_onnx(packed)).run(None, {"ids": np.arange(V)})
    np.testing.assert_allclose(found, packed[:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        *(lambda kind=kind: Band(9000, Every(), matrix(9000, 48, kind)) for kind in KINDS),
        lambda: Band(9000, codes(5, 100, "int3", rows=9000), dictionary=matrix(100, 8)),
        lambda: Band(
            9000, codes(8, 256, rows=9000, parts=True), dictionary=matrix(2048, 2), combine="concat"
        ),
        lambda: Band(9000, codes(1, 5000, rows=9000), dictionary=matrix(5000, 4, "int8")),
        lambda: Band(
            9000,
            Every(),
            Graded.round(
                RNG.normal(size=(9000, 12)), np.array([[3] * 12, [1, 2] * 6]), [4000, 5000]
            ),
        ),
    ],
)
def test_models_are_as_small_as_packed_files(make, tmp_path):
    band = make()
    width = (
        band.values.shape[1]
        if band.dictionary is None
        else band.dictionary.shape[1] * (8 if band.combine == "concat" else 1)
    )
    packed = PackedTable([band], width)
    packed.save(tmp_path / "table.safetensors")
    to_onnx(tmp_path / "table.safetensors", tmp_path / "table.onnx")
    assert (tmp_path / "table.onnx").stat().st_size < 1.06 * (
        tmp_path / "table.safetensors"
    ).stat().st_size + 4000


def test_numbers_in_planes_and_streams_stay_what_they_are(monkeypatch):
    monkeypatch.setattr(fields, "CHUNK", 96)
    for bits in range(1, 33):
        numbers = RNG.integers(0, 2**bits, (101, 3), dtype=np.uint64).astype(np.uint32)
        stream = fields.to_stream(101, 3, bits, lambda start, stop, of=numbers: of[start:stop])
        np.testing.assert_array_equal(
            fb.packed.bits.unpack(stream, np.arange(303) * bits, bits), numbers.reshape(-1)
        )
        whole = fields.planes(101, 3, bits, lambda start, stop, of=numbers: of[start:stop])
        assert whole.shape == (101, fields.plane_bytes(bits, 3))
        assert sum(part for part, _ in fields.parts_of(bits)) == bits


def test_a_training_table_and_a_file(tmp_path):
    table = fb.DenseTable.from_dense(torch.eye(4))
    fb.save(table, tmp_path / "t.safetensors", keys=list("abcd"))
    for given in (table, tmp_path / "t.safetensors", str(tmp_path / "t.safetensors")):
        model = to_onnx(given, tmp_path / "t.onnx")
        assert run(tmp_path / "t.onnx", [2]).tolist() == [[0, 0, 1, 0]]
        assert (tmp_path / "t.onnx").read_bytes() == model.SerializeToString()


def test_large_arrays_go_to_a_file_of_their_own(tmp_path, monkeypatch):
    packed = PackedTable([Band(900, Every(), matrix(900, 48, "int4"))], 48)
    small = PackedTable([Band(900, Every(), matrix(900, 48, "int4"))], 48)
    monkeypatch.setattr(exporter, "MAX_INLINE", 1000)
    path = tmp_path / "table.onnx"
    to_onnx(small, path)
    first = set(tmp_path.iterdir())
    to_onnx(packed, path)
    assert path.stat().st_size < 4000
    np.testing.assert_array_equal(run(path, np.arange(900)), packed[:])
    onnx.checker.check_model(str(path))
    assert len(first) == 2
    assert (
        len(set(tmp_path.iterdir()) - first) == 1
    )  # the data of the new model; that of the old one is left alone
    with pytest.raises(ArgumentError, match="give a path"):
        to_onnx(packed)


def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "table.onnx"
    path.write_text("old")
    packed = fb.load(GOLDEN[0])
    monkeypatch.setattr(
        exporter.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left"))
    )
    with pytest.raises(OSError, match="no space"):
        to_onnx(packed, path)
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["table.onnx"]


def test_bad_settings_say_what_to_do(tmp_path):
    packed = fb.load(GOLDEN[0])
    with pytest.raises(ArgumentError, match="opset=17: give a whole number from 18"):
        to_onnx(packed, opset=17)
    with pytest.raises(ArgumentError, match="rank=-1"):
        to_onnx(packed, rank=-1)
    with pytest.raises(ArgumentError, match="ndarray has no packed form"):
        to_onnx(np.eye(3))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        to_onnx(packed, tmp_path / "nowhere" / "table.onnx")


def test_codes_out_of_range_are_found_before_anything_is_written(tmp_path):
    wrong = Band(V, codes(2, 100), dictionary=matrix(60, 4))
    wrong.codes.index_bits = 7
    with pytest.raises(FormatError, match="out of range"):
        to_onnx(PackedTable([wrong], 4), tmp_path / "table.onnx")
    assert not list(tmp_path.iterdir())


def test_without_onnx_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtra, match=r"featherbed\[onnx\]"):
        to_onnx(fb.load(GOLDEN[0]))


@pytest.mark.parametrize(
    "method",
    ["int3", "lowrank", "pq", "opq", "layered", "ksvd", "hash", "clusters", "hot+pq", "rq+norms"],
)
def test_what_compression_makes(method):
    pytest.importorskip("faiss")
    dense = RNG.normal(size=(600, 16)).astype(np.float32)
    check(fb.compress(dense, ratio=3 if method != "int3" else 6, method=method, generator=0))
