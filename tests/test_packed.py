"""The packed form and its file: storage kinds, layouts, keys, search; hostile files; killed writers."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import featherbed as fb
from featherbed import files as writing
from featherbed.packed import bits, file
from featherbed.packed.band import Affine, Band, Every, Fixed, Members, Ragged
from featherbed.packed.disk import open_rows
from featherbed.packed.inspect import report
from featherbed.packed.keys import Keys
from featherbed.packed.levels import ValueLevels
from featherbed.packed.matrix import KINDS, Graded, Matrix
from featherbed.packed.schema import describe
from featherbed.packed.table import PackedTable
from test_cells import cell_table

RNG = np.random.default_rng(0)


def sparse_anchor(rows=300, dim=8, anchors=12, share=0.7, seed=0):
    table = fb.AnchorTable(
        rows, dim, anchors=anchors, generator=torch.Generator().manual_seed(seed)
    )
    with torch.no_grad():
        table.transform *= (
            torch.rand(rows, anchors, generator=torch.Generator().manual_seed(1)) > share
        ).float() * 20
    return table


# --- building blocks ---------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 40), st.lists(st.integers(0, 32), min_size=1, max_size=5), st.integers(0, 1000)
)
@settings(max_examples=60, deadline=None)
def test_bit_fields_come_back(records, widths, seed):
    rng = np.random.default_rng(seed)
    fields = np.stack(
        [rng.integers(0, 2**w, size=records, dtype=np.uint64) for w in widths], axis=1
    ).astype(np.uint32)
    stream = bits.pack(fields, widths)
    assert len(stream) == bits.word_count(records, sum(widths))
    for column, width in enumerate(widths):
        start = np.arange(records) * sum(widths) + sum(widths[:column])
        assert np.array_equal(bits.unpack(stream, start, width), fields[:, column])


def test_bit_fields_refuse_what_does_not_fit():
    with pytest.raises(fb.ArgumentError, match="3 bits"):
        bits.pack(np.array([[8]], dtype=np.uint32), [3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scales", ["row", "column"])
def test_matrix_kinds_lose_what_they_should(kind, scales):
    matrix = RNG.normal(size=(500, 13)).astype(np.float32)
    stored = Matrix.encode(matrix, kind, scales)
    error = np.linalg.norm(stored.dense() - matrix) / np.linalg.norm(matrix)
    most = {
        "float32": 0.0,
        "float16": 5e-4,
        "int8": 0.01,
        "int4": 0.13,
        "int3": 0.25,
        "int2": 0.42,
    }[kind]
    assert error <= most
    assert stored.nbytes <= 500 * -(-13 * KINDS[kind] // 8) + 2000


def test_matrix_refuses_what_it_cannot_hold():
    with pytest.raises(fb.ArgumentError, match="65,504"):
        Matrix.encode(np.array([[1e6]], np.float32), "float16")
    with pytest.raises(fb.ArgumentError, match="finite"):
        Matrix.encode(np.array([[np.nan]], np.float32), "int8")
    assert not Matrix.encode(np.zeros((3, 4), np.float32), "int8").dense().max() > 1e-20


@given(st.integers(1, 2000), st.integers(0, 2000), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_member_bitmaps_rank(rows, some, seed):
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.permutation(rows)[: min(some, rows)])
    inside, rank = Members.of(chosen, rows).split(np.arange(rows))
    assert np.array_equal(np.flatnonzero(inside), chosen)
    assert np.array_equal(rank, np.cumsum(inside) - inside)


def test_levels_keep_zero_and_beat_even_steps():
    values = np.abs(RNG.normal(size=5000)) ** 3
    values[::7] = 0
    for kind in ("int8", "int4", "int3", "int2"):
        levels = ValueLevels.fit(values, kind)
        back = levels.decode(levels.encode(values))
        assert not back[::7].any()
        count = 2 ** KINDS[kind] - 1
        even = np.round(values / values.max() * count) / count * values.max()
        assert np.square(back - values).sum() < np.square(even - values).sum()


def test_layouts_hold_the_same_rows_and_auto_is_the_smallest():
    table = sparse_anchor()
    dense = table.weight.detach().numpy()
    sizes = {}
    for layout in ("fixed", "ragged", "all", "auto"):
        packed = table.pack(layout=layout)
        np.testing.assert_allclose(packed[:], dense, rtol=1e-5, atol=1e-6)
        sizes[layout] = packed.nbytes
    assert sizes["auto"] == min(sizes.values())
    assert isinstance(table.pack(layout="fixed").bands[0].codes, Fixed)
    assert isinstance(table.pack(layout="ragged").bands[0].codes, Ragged)


@pytest.mark.parametrize("layout", ["fixed", "ragged", "all"])
def test_fewer_bits_are_smaller_and_worse(layout):
    table = sparse_anchor(rows=2000)
    dense = table.weight.detach().numpy()
    sizes, errors = [], []
    for kind in ("float32", "float16", "int8", "int4"):
        packed = table.pack(values=kind, dictionary=kind, layout=layout)
        sizes.append(packed.nbytes)
        errors.append(np.linalg.norm(packed[:] - dense) / np.linalg.norm(dense))
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)
    assert errors[2] < 0.03


def test_ids_of_every_kind(tmp_path):
    packed = sparse_anchor().pack()
    rows = packed[:]
    assert rows.shape == (300, 8)
    assert np.array_equal(packed[5], rows[5])
    assert np.array_equal(packed[np.uint8(5)], rows[5])
    assert np.array_equal(packed[[[1, 2], [3, 4]]], rows[[[1, 2], [3, 4]]])
    assert np.array_equal(packed[2:9:3], rows[2:9:3])
    assert packed[[]].shape == (0, 8)
    assert len(list(packed)) == 300
    for bad, named in (([300], "300"), ([-1], "-1"), ([0.5], "float64"), (300, "299")):
        with pytest.raises(fb.IdError, match=named):
            packed[bad]
    for huge in (2**70, np.uint64(2**63)):
        with pytest.raises(fb.IdError, match=str(huge)):
            packed[huge]
    with pytest.raises(fb.UnknownKeyError, match="without keys"):
        packed["word"]
    assert 5 in packed
    assert 300 not in packed
    assert "word" not in packed


def test_search_is_exact_and_breaks_ties_by_id():
    packed = fb.DenseTable.from_dense(
        torch.tensor([[1.0, 0], [0, 1], [1, 0], [2, 0], [0, 0]])
    ).pack()
    ids, scores = packed.search([1.0, 0.0], k=3)
    assert (ids.tolist(), scores.tolist()) == ([3, 0, 2], [2.0, 1.0, 1.0])
    ids, scores = packed.search([[2.0, 0.0], [0.0, 3.0]], k=9, metric="cosine")
    assert ids.tolist() == [[0, 2, 3, 1, 4], [1, 0, 2, 3, 4]]
    assert scores[0].tolist() == [1, 1, 1, 0, 0]
    for call, named in (
        (lambda: packed.search([1.0], 2), "takes \\[2\\]"),
        (lambda: packed.search([1.0, 0], 0), "k=0"),
        (lambda: packed.search([1.0, 0], 2.0), "k=2.0"),
        (lambda: packed.search("word", 2), "vectors of 2"),
        (lambda: packed.search([1.0, 0], 1, metric="l2"), "dot or cosine"),
        (lambda: packed.logits(np.ones((1, 1, 2))), "shape"),
    ):
        with pytest.raises(fb.ArgumentError, match=named):
            call()


def test_search_never_holds_all_scores(monkeypatch):
    from featherbed.packed import search

    held = []
    real = search.score_block
    monkeypatch.setattr(search, "BLOCK_SCORES", 1 << 15)
    monkeypatch.setattr(
        search,
        "score_block",
        lambda t, s, start, out: (held.append(out.size), real(t, s, start, out)),
    )
    packed = sparse_anchor(rows=20_000).pack()
    queries = RNG.normal(size=(30, 8)).astype(np.float32)
    ids, scores = packed.search(queries, 10)
    assert max(held) <= 30 * 1100
    expected = queries @ packed[:].T
    np.testing.assert_allclose(scores, -np.sort(-expected, axis=1)[:, :10], rtol=1e-4, atol=1e-5)
    assert len(set(ids[0])) == 10


# --- keys --------------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.text(st.characters(codec="utf-8"), max_size=12), unique=True, min_size=1, max_size=60
    )
)
@settings(max_examples=60, deadline=None)
def test_keys_come_back(words):
    keys = Keys.of(words)
    keys.check()
    assert [keys[i] for i in range(len(keys))] == words
    if words:
        assert keys.find(words).tolist() == list(range(len(words)))
    absent = "x".join(words) + "!"
    with pytest.raises(fb.UnknownKeyError, match="no row has the key"):
        keys.find([absent])


def test_keys_with_equal_checksums_are_told_apart():
    import zlib

    first, second = "plumless", "buckeroo"  # a well-known pair with one CRC-32
    assert zlib.crc32(first.encode()) == zlib.crc32(second.encode())
    keys = Keys.of([first, second, "third"])
    keys.check()
    assert keys.find([second, first, "third"]).tolist() == [1, 0, 2]


def test_keys_are_refused_when_they_cannot_work(tmp_path):
    table = sparse_anchor()
    with pytest.raises(fb.ArgumentError, match="'a' is given to more than one"):
        fb.save(table, tmp_path / "t", keys=["a"] * 300)
    with pytest.raises(fb.ArgumentError, match="2 keys were given for 300"):
        fb.save(table, tmp_path / "t", keys=["a", "b"])
    with pytest.raises(fb.ArgumentError, match="strings"):
        fb.save(table, tmp_path / "t", keys=range(300))
    with pytest.raises(fb.ArgumentError, match="surrogate"):
        fb.save(table, tmp_path / "t", keys=["\ud800"])
    assert not list(tmp_path.iterdir())


def test_rows_by_key(tmp_path):
    table = sparse_anchor()
    fb.save(table, tmp_path / "t", keys=[f"wört {i}" for i in range(300)])
    packed = fb.load(tmp_path / "t")
    assert np.array_equal(packed["wört 7"], packed[7])
    assert np.array_equal(packed[["wört 7", "wört 0"]], packed[[7, 0]])
    assert np.array_equal(packed[np.array([["wört 1"]])], packed[[[1]]])
    assert np.array_equal(packed[[["wört 7"], ["wört 0"]]], packed[[[7], [0]]])
    assert np.array_equal(packed[np.array(["wört 7"], dtype=object)], packed[[7]])
    assert "wört 7" in packed
    with pytest.raises(KeyError, match="wört 300"):
        packed["wört 300"]
    with pytest.raises(fb.IdError, match="mixed"):
        packed[["wört 7", 7]]


# --- the file ----------------------------------------------------------------------------------------------------------


def graded_table():
    rng = np.random.default_rng(3)
    return graded_rows(rng, [10, 30, 60], rng.integers(1, 9, (3, 5)) * np.array([1, 1, 1, 1, 0]))


def graded_rows(rng, rows, bits):
    graded = Graded.round(
        rng.normal(size=(sum(rows), bits.shape[1])).astype(np.float32), bits, rows
    )
    return PackedTable(
        [Band(sum(rows), Every(), graded)], bits.shape[1], made_by={"table": "graded"}
    )


def forms_of_keys():
    """Keys of every form of version 3; two hashed ones share their bucket and fingerprint."""
    names, numbers = [f"k{i}" for i in range(93)], [str(i * i - 50) for i in range(80)]
    return {
        "hashes": Keys.of(["t49725", "t53292", *names[:88]], "hashed", shared=6),
        "texts": Keys.of(names, "text", shared=3),
        "numbers": Keys.of(numbers[::-1], "integer"),
        "rising": Keys.of(numbers, "integer"),
        "plain": Keys.of(fb.Vocabulary(names, shared=1, counts=np.arange(94))),
    }


def files(folder):
    fb.save(sparse_anchor(), folder / "ragged.safetensors", keys=[f"k{i}" for i in range(300)])
    fb.save(sparse_anchor().pack(values="int8", layout="fixed"), folder / "fixed.safetensors")
    fb.save(
        fb.SelectedTable(600, 4, keep=70, rest=3, counts=torch.arange(600) % 91),
        folder / "bands.safetensors",
    )
    fb.save(fb.QuantizedTable(50, 7, bits=3), folder / "levels.safetensors")
    fb.save(fb.DenseTable(3, 2), folder / "wide.safetensors", keys=["é", "ö", "x"])
    fb.save(fb.HashedTable(50, 4, buckets=9, values="learnt"), folder / "hashed.safetensors")
    for kind, stored in (("mlp", "float32"), ("recurrent", "int8"), ("lstm", "float16")):
        fb.save(cell_table(kind, stored=stored), folder / f"{kind}.safetensors")
    one = Band(
        4,
        Fixed.encode(np.zeros((4, 1), np.int64), None, 1),
        None,
        Matrix.encode(np.ones((1, 512)), "int2"),
        "product",
    )
    fb.save(PackedTable([one], 512), folder / "one.safetensors")
    fb.save(graded_table(), folder / "graded.safetensors")
    same = Fixed.encode(np.zeros((4, 4096), np.int64), None, 1)
    atom = Matrix.encode(np.ones((1, 512)), "int2")
    fb.save(PackedTable([Band(4, same, None, atom)], 512), folder / "same.safetensors")
    for name, keys in forms_of_keys().items():
        packed = fb.DenseTable(len(keys) + keys.shared, 2).pack()
        fb.save(packed, folder / f"key-{name}.safetensors", keys=keys)
    return sorted(folder.glob("*.safetensors"))


def test_the_container_is_plain_safetensors(tmp_path):
    for path in files(tmp_path):
        arrays = load_file(path)
        assert {name: array.nbytes for name, array in arrays.items()} == {
            name: size for name, size in fb.load(path).sizes_by_part().items() if name != "header"
        }
        assert sum(fb.load(path).sizes_by_part().values()) == path.stat().st_size


def test_saving_a_loaded_file_gives_the_same_bytes(tmp_path):
    for path in files(tmp_path):
        fb.load(path).save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == path.read_bytes()


def rewritten(path, target, change_meta=None, change_arrays=None):
    arrays = load_file(path)
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    meta = json.loads(header["__metadata__"]["featherbed"])
    if change_meta:
        change_meta(meta)
    if change_arrays:
        change_arrays(arrays)
    save_file(arrays, target, metadata={"format": "featherbed", "featherbed": json.dumps(meta)})
    return target


def put(name, value):
    def change(arrays):
        if value is None:
            del arrays[name]
        else:
            arrays[name] = value(arrays[name].copy()) if callable(value) else value

    return change


GONE = object()  # in the place of a value: the field itself is taken away


def meta(path, value):
    def change(fields):
        *way, last = path
        for step in way:
            fields = fields[step]
        fields[last] = value
        if value is GONE:
            del fields[last]

    return change


GRADES = ["bands", 0, "values", "grades"]
NESTED = json.loads('{"a":' * 40 + "1" + "}" * 40)
FLOATS = {"kind": "float32", "rows": 4, "columns": 5, "scale": None}
HOSTILE_META = {
    "wrong version": ("ragged", ["version"], 99, "version 99"),
    "version 4": ("graded", ["version"], 4, "version 4 is not known.*versions 1 to 3.*newer"),
    "version 0": ("ragged", ["version"], 0, "version 0 is not known.*versions 1 to 3.*export the table again"),
    "version 1.0": ("ragged", ["version"], 1.0, "version 1.0"),
    "version true": ("ragged", ["version"], True, "version True"),
    "rows beyond any file": ("ragged", ["rows"], 10**15, "rows"),
    "rows no bytes stand behind": ("hashed", ["rows"], 10**9, "bands hold|do not fit|rows"),
    "more rows than codes": ("ragged", ["bands", 0, "rows"], 299, "must be U32|the table says"),
    "negative rows": ("ragged", ["rows"], -5, "rows"),
    "text for a number": ("ragged", ["dim"], "8", "dim"),
    "another width": ("ragged", ["dim"], 9, "width"),
    "padding outside": ("ragged", ["padding_idx"], 300, "padding_idx"),
    "no bands": ("ragged", ["bands"], [], "1 to 64"),
    "too many bands": ("ragged", ["bands"], [{}] * 1000, "1 to 64"),
    "bands of text": ("ragged", ["bands"], ["b"], "object"),
    "unknown layout": ("ragged", ["bands", 0, "codes", "layout"], "pickle", "layout"),
    "codes without bits": ("fixed", ["bands", 0, "codes", "index_bits"], 0, "index_bits"),
    "unknown field": ("ragged", ["bands", 0, "rotation"], None, "does not know: rotation"),
    "unknown field of all": ("ragged", ["licence"], "none", "metadata has fields .* licence"),
    "unknown field of codes": ("ragged", ["bands", 0, "codes", "parts"], True, "does not know: parts"),
    "unknown field of a matrix": ("levels", ["bands", 0, "values", "zero"], 0, "does not know: zero"),
    "unknown field of a scale": ("levels", ["bands", 0, "values", "scale", "bits"], 8, "does not know: bits"),
    "unknown field of the affine stage": ("mlp", ["bands", 0, "affine", "relu"], True, "does not know: relu"),
    "cell left out": ("ragged", ["bands", 0, "cell"], GONE, "lacks the field 'cell'"),
    "plus left out": ("ragged", ["bands", 0, "plus"], GONE, "lacks the field 'plus'"),
    "norms left out": ("ragged", ["bands", 0, "norms"], GONE, "lacks the field 'norms'"),
    "made by nested objects": ("ragged", ["made_by"], NESTED, "nests more than 32"),
    "made by half a character": ("ragged", ["made_by"], {"table": "\ud800"}, "surrogates not allowed"),
    "made by text": ("ragged", ["made_by"], "me", "made_by must be an object, got str"),
    "unknown combine": ("ragged", ["bands", 0, "combine"], "exec", "combine"),
    "ragged product": ("ragged", ["bands", 0, "combine"], "product", "sum"),
    "unknown kind": ("ragged", ["bands", 0, "dictionary", "kind"], "int5", "kind"),
    "lying entries": ("ragged", ["bands", 0, "codes", "entries"], 5, "must be U32"),
    "huge entries": ("ragged", ["bands", 0, "codes", "entries"], 2**70, "entries"),
    "bits beyond 32": ("ragged", ["bands", 0, "codes", "index_bits"], 64, "index_bits"),
    "lying count": ("fixed", ["bands", 0, "codes", "count"], 100, "must be U32"),
    "zero count": ("fixed", ["bands", 0, "codes", "count"], 0, "count"),
    "parts that do not divide": ("fixed", ["bands", 0, "codes", "parts"], True, "parts|width|index_bits"),
    "scale missing": ("levels", ["bands", 0, "values", "scale"], None, "scale"),
    "scale of no axis": ("levels", ["bands", 0, "values", "scale", "axis"], 7, "axis"),
    "columns lying": ("levels", ["bands", 0, "values", "columns"], 500, "must be U8"),
    "members on the last": ("bands", ["bands", 1, "members"], True, "members|missing"),
    "members nowhere": ("bands", ["bands", 0, "members"], False, "every band but the last"),
    "band of no rows": ("bands", ["bands", 0, "rows"], 0, "stored|rows"),
    "no dictionary": ("bands", ["bands", 1, "dictionary"], None, "atoms"),
    "keys promised": ("fixed", ["keys"], True, "keys.text"),
    "keys denied": ("ragged", ["keys"], False, "no part"),
    "keys of text": ("ragged", ["keys"], "yes", "true or false"),
    "key form in version 2": ("key-hashes", ["version"], 2, "true or false"),
    "unknown key form": ("key-hashes", ["keys", "form"], "pickle", "must be one of plain, text"),
    "unknown field of keys": ("key-numbers", ["keys", "radix"], 10, "does not know: radix"),
    "key form left out": ("key-hashes", ["keys", "form"], GONE, "form must be one of"),
    "all rows shared": ("key-texts", ["keys", "shared"], 96, "from 1 to 95"),
    "shared rows denied": ("key-plain", ["keys", "shared"], GONE, "must be U32"),
    "more shared rows": ("key-hashes", ["keys", "shared"], 40, "must be U32"),
    "fingerprints of no bits": ("key-hashes", ["keys", "bits"], 0, "from 16 to 31"),
    "fingerprints of other bits": ("key-hashes", ["keys", "bits"], 31, "must be U32"),
    "seed of keys too large": ("key-hashes", ["keys", "seed"], 2**32, "seed"),
    "exceptions promised": ("key-hashes", ["keys", "exceptions"], 3, "must be U"),
    "exceptions beyond keys": ("key-hashes", ["keys", "exceptions"], 2**60, "exceptions"),
    "order of keys denied": ("key-hashes", ["keys", "order"], GONE, "no part"),
    "order of texts denied": ("key-texts", ["keys", "order"], False, "no part"),
    "order of keys promised": ("key-rising", ["keys", "order"], True, "'keys.order' is missing"),
    "numbers of 65 bits": ("key-numbers", ["keys", "bits"], 65, "from 0 to 64"),
    "numbers of other bits": ("key-numbers", ["keys", "bits"], 64, "must be U32"),
    "numbers from nowhere": ("key-numbers", ["keys", "low"], 2**63, "low must be an integer"),
    "counts denied": ("key-plain", ["keys", "counts"], GONE, "no part"),
    "counts promised": ("key-texts", ["keys", "counts"], True, "'keys.counts' is missing"),
    "counts of a number": ("key-plain", ["keys", "counts"], 94, "true or false"),
    "codes missing": ("ragged", ["bands", 0, "codes"], None, "codes"),
    "affine of nothing": ("fixed", ["bands", 0, "affine"], {"weight": None, "bias": True}, "missing"),
    "hash of huge seed": ("hashed", ["bands", 0, "codes", "seed"], 2**80, "seed"),
    "hash too often": ("hashed", ["bands", 0, "codes", "hashes"], 10**9, "hashes"),
    "atoms side by side without end": ("one", ["bands", 0, "codes", "count"], 4096, "product of 4096 atoms of width 512"),
    "cell of text": ("ragged", ["bands", 0, "cell"], "none", "cell must be an object, got str"),
    "unknown cell": ("mlp", ["bands", 0, "cell", "kind"], "gru", "must be one of mlp, recurrent, lstm, got 'gru'"),
    "unknown field of a cell": ("mlp", ["bands", 0, "cell", "activation"], "gelu", "does not know: activation"),
    "cell without a weight": ("mlp", ["bands", 0, "cell", "weight"], None, "mlp with weight null"),
    "cell without a kind": ("mlp", ["bands", 0, "cell", "kind"], GONE, "lacks the field 'kind'"),
    "cell denied": ("mlp", ["bands", 0, "cell"], None, "columns, rows have"),
    "cell promised": ("ragged", ["bands", 0, "cell"], {"kind": "mlp", "weight": FLOATS, "input": None}, "cell.weight' is miss"),
    "cell weight of huge rows": ("mlp", ["bands", 0, "cell", "weight", "rows"], 2**40, "must be F32 .1099511627776, 5."),
    "cell weight of no rows": ("lstm", ["bands", 0, "cell", "weight", "rows"], 0, "must be F16 .0, 20., the file has F16"),
    "cell weight of huge columns": ("mlp", ["bands", 0, "cell", "weight", "columns"], 2**40, "from 1 to 65536"),
    "cell weight without its scale": ("recurrent", ["bands", 0, "cell", "weight", "scale"], None, "quantized numbers have a scale"),
    "cell weight of another kind": ("mlp", ["bands", 0, "cell", "weight", "kind"], "float16", "must be F16"),
    "mlp with an input": ("mlp", ["bands", 0, "cell", "input"], FLOATS, "found mlp with weight given, input given"),
    "mlp called recurrent": ("mlp", ["bands", 0, "cell", "kind"], "recurrent", "found fixed codes combined by sum"),
    "mlp on other numbers": ("mlp", ["bands", 0, "combine"], "concat", "on 12 numbers .* takes a weight .12, 5., found .4, 5."),
    "recurrent called mlp": ("recurrent", ["bands", 0, "cell", "kind"], "mlp", "takes a weight .12, 16., found .4, 16."),
    "recurrent called lstm": ("recurrent", ["bands", 0, "cell", "kind"], "lstm", "input null"),
    "recurrent on a sum": ("recurrent", ["bands", 0, "combine"], "sum", "found fixed codes combined by sum"),
    "lstm on a product": ("lstm", ["bands", 0, "combine"], "product", "found fixed codes combined by product"),
    "lstm without an input": ("lstm", ["bands", 0, "cell", "input"], None, "found lstm with weight given, input null"),
    "lstm called recurrent": ("lstm", ["bands", 0, "cell", "kind"], "recurrent", "recurrent with weight given, input given"),
    "grades in version 1": ("graded", ["version"], 1, "lacks the field"),
    "grades of nine bits": ("graded", [*GRADES, 1], [30, "55595"], "5 digits from 0 to 8"),
    "grades of letters": ("graded", [*GRADES, 1], [30, "5555x"], "5 digits from 0 to 8"),
    "grades of other digits": ("graded", [*GRADES, 1], [30, "5555²"], "5 digits from 0 to 8"),
    "grades of too few columns": ("graded", [*GRADES, 1], [30, "5555"], "5 digits from 0 to 8"),
    "grades of a number": ("graded", [*GRADES, 1], [30, 55555], "5 digits from 0 to 8"),
    "grades of no rows": ("graded", [*GRADES, 1, 0], 0, "a grade is"),
    "grades of negative rows": ("graded", [*GRADES, 1, 0], -30, "a grade is"),
    "grades of half a row": ("graded", [*GRADES, 1, 0], 30.5, "a grade is"),
    "grades of true rows": ("graded", [*GRADES, 1, 0], True, "a grade is"),
    "grades that do not add up": ("graded", [*GRADES, 1, 0], 29, "hold 99 rows, the matrix has 100"),
    "grades without bits": ("graded", [*GRADES, 1], [30], "a grade is"),
    "grades of text": ("graded", [*GRADES], "all", "list of at most 64"),
    "grades left out": ("graded", [*GRADES], GONE, "list of at most 64"),
    "too many grades": ("graded", [*GRADES], [[1, "00000"]] * 100, "list of at most 64"),
    "grades without a scale": ("graded", ["bands", 0, "values", "scale"], None, "quantized numbers have a scale"),
    "grades with an axis": ("graded", ["bands", 0, "values", "scale", "axis"], 1, "does not know: axis"),
    "grades and another field": ("graded", ["bands", 0, "values", "bits"], 3, "does not know: bits"),
    "grades of more bits than there are": ("graded", [*GRADES, 2], [60, "88880"], "must be U8"),
    "grades of more scales than there are": ("graded", [*GRADES, 2], [60, "11111"], "must be F16"),
    "grades of huge rows": ("graded", ["bands", 0, "values", "rows"], 2**41, "from 0 to"),
    "grades as a dictionary": ("graded", ["bands", 0, "dictionary"], {"kind": "graded"}, "kind must be one of"),
    "lstm input of huge rows": ("lstm", ["bands", 0, "cell", "input", "rows"], 10**9, "must be F16 .1000000000, 20."),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_META)
def test_lying_metadata_is_refused(name, tmp_path):
    which, way, value, named = HOSTILE_META[name]
    source = {path.stem: path for path in files(tmp_path)}[which]
    bad = rewritten(source, tmp_path / "bad", change_meta=meta(way, value))
    with pytest.raises(fb.FormatError, match=named):
        fb.load(bad)


HOSTILE_CELLS = {  # which file, the cell it claims: kind, weight, input; what the error says
    "mlp on too many numbers": ("mlp", "mlp", (6, 5), None, "takes a weight .4, 5., found .6, 5."),
    "mlp of another width": ("mlp", "mlp", (4, 6), None, "takes 5 columns, rows have 6"),
    "recurrent of another width": ("recurrent", "recurrent", (5, 20), None, "takes a weight .4, 16., found .5, 20."),
    "recurrent of three gates": ("recurrent", "recurrent", (4, 12), None, "found .4, 12."),
    "recurrent on ragged codes": ("ragged", "recurrent", (8, 32), None, "found ragged codes combined by sum"),
    "recurrent on every atom": ("levels", "recurrent", (7, 28), None, "found every codes combined by sum"),
    "lstm on every atom": ("levels", "lstm", (2, 8), (7, 8), "found every codes combined by sum"),
    "lstm on ragged codes": ("ragged", "lstm", (2, 8), (8, 8), "found ragged codes combined by sum"),
    "lstm of other atoms": ("lstm", "lstm", (5, 20), (7, 20), "and .4, 20., found .5, 20. and an input .7, 20."),
    "lstm of three gates": ("lstm", "lstm", (5, 15), (4, 15), "found .5, 15. and an input .4, 15."),
    "lstm of two widths": ("lstm", "lstm", (5, 20), (4, 24), "found .5, 20. and an input .4, 24."),
}  # fmt: skip


def claim_cell(kind, weight, given):
    """Change metadata and arrays to those of a cell of zeros, whether it fits or not."""
    shapes = {"weight": weight, "input": given}
    matrices = {
        name: shape and {"kind": "float32", "rows": shape[0], "columns": shape[1], "scale": None}
        for name, shape in shapes.items()
    }

    def change_arrays(arrays):
        for name in [name for name in arrays if name.startswith("b0.cell.")]:
            del arrays[name]
        for name, shape in (shapes | {"bias": weight[1:]}).items():
            if shape is not None:
                arrays[f"b0.cell.{name}"] = np.zeros(shape, np.float32)

    return meta(["bands", 0, "cell"], {"kind": kind, **matrices}), change_arrays


@pytest.mark.parametrize("name", HOSTILE_CELLS)
def test_lying_cells_are_refused(name, tmp_path):
    which, *cell, named = HOSTILE_CELLS[name]
    source = {path.stem: path for path in files(tmp_path)}[which]
    bad = rewritten(source, tmp_path / "bad", *claim_cell(*cell))
    with pytest.raises(fb.FormatError, match=named):
        fb.load(bad)


def test_names_given_twice_are_refused(tmp_path):
    whole = files(tmp_path)[0].read_bytes()
    length = int.from_bytes(whole[:8], "little")
    for name in (rb"\"dim\":", rb'"format":'):
        at = whole.index(name)
        twice = whole[8:at] + whole[at : whole.index(b",", at) + 1] + whole[at : 8 + length]
        twice += b" " * (-len(twice) % 8)
        (tmp_path / "bad").write_bytes(
            len(twice).to_bytes(8, "little") + twice + whole[8 + length :]
        )
        with pytest.raises(fb.FormatError, match="occurs twice"):
            fb.load(tmp_path / "bad")


def test_settings_without_end_are_stored_as_words(tmp_path):
    one = Matrix.encode(np.ones((1, 2), np.float32), "float32")
    PackedTable([Band(1, Every(), one)], 2, made_by={"table": "t", "most": float("inf")}).save(
        tmp_path / "t"
    )
    assert fb.load(tmp_path / "t").made_by == {"table": "t", "most": "Infinity"}
    whole = (tmp_path / "t").read_bytes()
    (tmp_path / "bad").write_bytes(whole.replace(b'\\"Infinity\\"', b"  Infinity  "))
    with pytest.raises(fb.FormatError, match="Infinity is not JSON"):
        fb.load(tmp_path / "bad")


def test_a_large_table_on_few_atoms_is_refused(tmp_path):
    source = tmp_path / "hashed"
    fb.save(fb.HashedTable(50, 4, buckets=9), source)

    def change(fields):
        fields["rows"] = fields["bands"][0]["rows"] = 10**9

    with pytest.raises(fb.FormatError, match="may share them"):
        fb.load(rewritten(source, tmp_path / "bad", change_meta=change))


def last_up(array):
    array[-1] += 1
    return array


HOSTILE_ARRAYS = {
    "codes out of range": ("fixed", "b0.dictionary", lambda a: a[:9], "out of range"),
    "ragged codes out of range": ("ragged", "b0.dictionary", lambda a: a[:9], "out of range"),
    "directory too far": ("ragged", "b0.codes.directory", lambda a: a + np.uint32(10**6), "outside|directory|out of range"),
    "directory off by one": ("ragged", "b0.codes.directory", last_up, "directory|outside"),
    "counts that lie": ("ragged", "b0.codes.counts", lambda a: a * 0 + 0xFFFFFFFF, "outside|directory|out of range"),
    "members doubled": ("bands", "b0.members.bitmap", lambda a: a * 0 + 0xFFFFFFFF, "bitmap"),
    "members gone": ("bands", "b0.members.bitmap", lambda a: a * 0, "bitmap"),
    "totals that lie": ("bands", "b0.members.totals", lambda a: a + np.uint32(500), "bitmap|totals"),
    "keys twice": ("ragged", "keys.text", lambda a: np.concatenate([a[:2], a[:2], a[4:]]), "key"),
    "levels without zero": ("fixed", "b0.codes.levels", lambda a: a + np.float32(1), "level 0"),
    "keys inside a character": ("wide", "keys.ends", lambda a: np.array([1, *a[1:]], dtype=np.uint32), "key"),
    "keys that end too late": ("wide", "keys.ends", np.array([2, 2**64 - 1, 5], dtype=np.uint64), "key"),
    "keys out of order": ("ragged", "keys.ends", lambda a: a[::-1].copy(), "key"),
    "keys of another row": ("ragged", "keys.order", lambda a: a[::-1].copy(), "key"),
    "index beyond rows": ("ragged", "keys.order", lambda a: a + np.uint32(300), "key"),
    "checksums unsorted": ("ragged", "keys.checksums", lambda a: a[::-1].copy(), "key"),
    "cell of a missing bias": ("mlp", "b0.cell.bias", None, "'b0.cell.bias' is missing"),
    "cell of a missing scale": ("recurrent", "b0.cell.weight.scale", None, "'b0.cell.weight.scale' is missing"),
    "cell of a short bias": ("recurrent", "b0.cell.bias", lambda a: a[:4], "must be F32 .16., the file has F32 .4."),
    "cell of a half bias": ("lstm", "b0.cell.bias", lambda a: a.astype(np.float16), "the file has F16"),
    "cell of a square bias": ("mlp", "b0.cell.bias", lambda a: a[None], "the file has F32 .1, 5."),
    "cell with an array too many": ("mlp", "b0.cell.gate", np.ones(3, np.float32), "no part"),
    "grades of a short stream": ("graded", "b0.values", lambda a: a[:-1], "must be U8"),
    "grades of a long stream": ("graded", "b0.values", lambda a: np.append(a, np.uint8(0)), "must be U8"),
    "grades of words": ("graded", "b0.values", lambda a: a.astype(np.uint32), "must be U8"),
    "grades of too few scales": ("graded", "b0.values.scale", lambda a: a[:-1], "must be F16"),
    "grades of too many scales": ("graded", "b0.values.scale", lambda a: np.append(a, a), "must be F16"),
    "grades of infinite scales": ("graded", "b0.values.scale", lambda a: a * np.float16(np.inf), "not finite"),
    "grades of scales that are no numbers": ("graded", "b0.values.scale", lambda a: a * np.float16(np.nan), "not finite"),
    "counts of too few rows": ("key-plain", "keys.counts", lambda a: a[:-1], "must be U32"),
    "counts of fractions": ("key-plain", "keys.counts", lambda a: a.astype(np.float32), "must be U32"),
    "text not utf-8": ("ragged", "keys.text", lambda a: a * 0 + 255, "key"),
    "buckets of ones": ("key-hashes", "keys.buckets", lambda a: a * 0 + 0xFFFFFFFF, "buckets"),
    "buckets of nothing": ("key-hashes", "keys.buckets", lambda a: a * 0, "buckets"),
    "buckets beyond the keys": ("key-hashes", "keys.totals", lambda a: a + np.uint32(2**31), "buckets"),
    "buckets off by one": ("key-hashes", "keys.totals", last_up, "buckets"),
    "fingerprints that fall": ("key-hashes", "keys.fingerprints", lambda a: a * 0, "fingerprints"),
    "exceptions that fall": ("key-hashes", "keys.exceptions", lambda a: a[::-1].copy(), "exceptional"),
    "exceptions of 64 bits": ("key-hashes", "keys.exceptions", lambda a: a | np.uint64(2**63), "exceptional"),
    "rows of hashes twice": ("key-hashes", "keys.order", lambda a: a * 0, "name every row once"),
    "rows of hashes beyond": ("key-hashes", "keys.order", lambda a: a * 0 + 0xFFFFFFFF, "names row 127"),
    "blocks of noise": ("key-texts", "keys.text", lambda a: a ^ np.uint8(85), "inflated|is not 64 keys"),
    "blocks of a short text": ("key-texts", "keys.text", lambda a: a[:-4], "end of the text"),
    "blocks that end too late": ("key-texts", "keys.ends", lambda a: a + np.uint32(1000), "end of the text"),
    "blocks out of order": ("key-texts", "keys.ends", lambda a: a[::-1].copy(), "end of the text"),
    "blocks of other words": ("key-texts", "keys.dictionary", lambda a: a[::-1].copy(), "key"),
    "dictionary too large": ("key-texts", "keys.dictionary", np.zeros(32769, np.uint8), "32769 bytes"),
    "dictionary of rows": ("key-texts", "keys.dictionary", np.zeros((2, 2), np.uint8), "not flat"),
    "heads of other keys": ("key-texts", "keys.heads", lambda a: a + (a < 100), "key"),
    "heads without end": ("key-texts", "keys.heads", lambda a: a * 0 + 255, "first keys"),
    "heads missing": ("key-texts", "keys.heads", None, "'keys.heads' is missing"),
    "rows of texts twice": ("key-texts", "keys.order", lambda a: a * 0, "name every row once"),
    "rows in other blocks": ("key-texts", "keys.blocks", lambda a: ~a, "another block"),
    "numbers that fall": ("key-numbers", "keys.numbers", lambda a: ~a, "rise"),
    "numbers twice": ("key-rising", "keys.numbers", lambda a: ~a, "rise"),
    "rows of numbers twice": ("key-numbers", "keys.order", lambda a: a * 0, "name every row once"),
}  # fmt: skip


def widen(fields):
    fields["bands"][0]["codes"]["wide"] = True


def many_rows(fields):
    fields["rows"] = fields["bands"][0]["rows"] = 1 << 20


def second_block_at(entry):
    return lambda a: np.array([a[0], entry, *a[2:]], dtype=np.uint64)


def flip(word, bit):
    def change(array):
        array[word] ^= np.uint32(1 << bit)
        return array

    return change


HOSTILE_BOTH = {  # metadata and an array
    "block that ends at 2^63": ("ragged", widen, ("b0.codes.directory", second_block_at(2**63)), "directory"),
    "block that ends at 2^64 - 1": ("ragged", widen, ("b0.codes.directory", second_block_at(2**64 - 1)), "directory"),
    "one flipped bit of a count": ("ragged", None, ("b0.codes.counts", flip(3, 5)), "directory"),
    "work for nothing": ("same", many_rows, None, "products, a table"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_BOTH)
@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_lying_numbers_are_refused_by_every_use(name, engine, tmp_path, monkeypatch):
    monkeypatch.setenv("FEATHERBED_KERNELS", engine)
    which, change, array, named = HOSTILE_BOTH[name]
    source = {path.stem: path for path in files(tmp_path)}[which]
    bad = rewritten(source, tmp_path / "bad", change, array and put(*array))
    every = np.arange(300)
    for use in (
        lambda: fb.check(bad),
        lambda: fb.load(bad)[every],
        lambda: open_rows(bad)[every],
        lambda: fb.load(bad).logits(np.ones(8)),
        lambda: fb.load(bad).search(np.ones((2, 8)), 3, metric="cosine"),
        lambda: fb.load(bad).bag(every[None]),
    ):
        with pytest.raises(fb.FormatError, match=f"{named}|out of range"):
            use()
    with pytest.raises(fb.FormatError, match=f"{named}|out of range"):
        for id_ in every.tolist():
            fb.load(bad)[id_]


def test_rows_of_a_sound_block_are_found_whatever_the_others_say(tmp_path, monkeypatch):
    source = {path.stem: path for path in files(tmp_path)}["ragged"]
    bad = rewritten(source, tmp_path / "bad", None, put("b0.codes.counts", flip(3, 5)))
    for engine in ("numpy", "numba"):
        monkeypatch.setenv("FEATHERBED_KERNELS", engine)
        np.testing.assert_array_equal(fb.load(bad)[:16], fb.load(source)[:16])


def fewer_atoms(fields):
    for band in fields["bands"]:
        band["dictionary"]["rows"] = 9


@pytest.mark.parametrize("name", HOSTILE_ARRAYS)
@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_lying_arrays_are_found(name, engine, tmp_path, monkeypatch):
    monkeypatch.setenv("FEATHERBED_KERNELS", engine)
    which, array, change, named = HOSTILE_ARRAYS[name]
    source = {path.stem: path for path in files(tmp_path)}[which]

    shrink = fewer_atoms if array == "b0.dictionary" else None
    bad = rewritten(source, tmp_path / "bad", change_meta=shrink, change_arrays=put(array, change))
    with pytest.raises(fb.FormatError, match=named):
        fb.check(bad)
    exercise(bad)


def exercise(path):
    """Use a file in every way: only featherbed's own errors may come of it."""
    try:
        packed = fb.load(path)
    except fb.FormatError:
        return False
    for use in (
        lambda: fb.check(path),
        lambda: packed[np.arange(min(len(packed), 5000))],
        lambda: packed[len(packed) - 1],
        lambda: packed.search(np.ones(packed.dim), 3),
        lambda: packed["k1"],
        lambda: packed.keys and packed.keys[0],
        lambda: repr(packed),
    ):
        with (
            contextlib.suppress(fb.FeatherbedError),
            np.errstate(all="ignore"),
        ):  # values may well be NaN
            use()
    return True


def test_spans_near_the_end_of_all_numbers_are_refused(tmp_path, monkeypatch):
    source = tmp_path / "ragged"
    fb.save(sparse_anchor().pack(layout="ragged"), source)

    for far in (2**63 - 1, 2**63, 2**64 - 1, 2**40):
        change = put("b0.codes.directory", lambda a, far=far: np.full(len(a), far, dtype=np.uint64))
        bad = rewritten(source, tmp_path / "bad", change_meta=widen, change_arrays=change)
        for engine in ("numpy", "numba"):
            monkeypatch.setenv("FEATHERBED_KERNELS", engine)
            with pytest.raises(fb.FormatError):
                fb.check(bad)
            with pytest.raises(fb.FormatError):
                fb.load(bad)[[0]]
            with pytest.raises(fb.FormatError):
                fb.load(bad).logits(np.ones(8))
            exercise(bad)


def test_totals_that_lead_below_zero_are_refused(tmp_path, monkeypatch):
    from featherbed.packed.band import Identity

    rows = [Matrix.encode(np.ones((n, 2), np.float32), "float32") for n in (1, 1023)]
    hot = Band(1, Identity(), dictionary=rows[0], members=Members.of(np.array([700]), 1024))
    PackedTable([hot, Band(1023, Identity(), dictionary=rows[1])], 2).save(tmp_path / "t")
    for far in (2**32 - 1, 1500):
        change = put("b0.members.totals", np.array([0, far], dtype=np.uint32))
        bad = rewritten(tmp_path / "t", tmp_path / "bad", change_arrays=change)
        for engine in ("numpy", "numba"):
            monkeypatch.setenv("FEATHERBED_KERNELS", engine)
            for ids in ([600], 600):
                with pytest.raises(fb.FormatError, match="bitmap"):
                    fb.load(bad)[ids]


def test_a_row_may_not_claim_the_entries_of_others(tmp_path, monkeypatch):
    source = tmp_path / "t"
    fb.save(sparse_anchor().pack(layout="ragged"), source)
    bad = rewritten(
        source, tmp_path / "bad", change_arrays=put("b0.codes.directory", lambda a: a * 0)
    )
    for engine in ("numpy", "numba"):
        monkeypatch.setenv("FEATHERBED_KERNELS", engine)
        with pytest.raises(fb.FormatError):
            fb.load(bad)[[0]]


def test_what_could_not_be_read_is_not_written(tmp_path):
    fb.save(fb.SelectedTable(1_200_000, 2, keep=10), tmp_path / "large vocabulary")
    assert len(fb.load(tmp_path / "large vocabulary")) == 1_200_000
    with pytest.raises(fb.ArgumentError, match="cannot be stored"):
        fb.save(fb.HashedTable(1_100_000, 2, buckets=1, hashes=1), tmp_path / "t")
    with pytest.raises(fb.ArgumentError, match="cannot be stored"):
        fb.save(fb.HashedTable(50, 2, buckets=5, hashes=300), tmp_path / "t")
    many = fb.AnchorTable(3, 2, anchors=5000)
    with pytest.raises(fb.ArgumentError, match="4096 is the most"):
        many.pack(layout="fixed")
    fb.save(many, tmp_path / "many")
    assert not (tmp_path / "t").exists()


def test_few_bytes_cannot_ask_for_much_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("FEATHERBED_KERNELS", "numpy")
    nothing = Fixed.encode(np.zeros((4, 1), np.int64), None, 1)
    PackedTable(
        [Band(4, nothing, None, Matrix.encode(np.ones((1, 4), np.float32), "float32"))], 4
    ).save(tmp_path / "t")

    def huge(fields):
        fields["rows"] = fields["bands"][0]["rows"] = 2**40

    with pytest.raises(fb.FormatError, match="may share them"):
        fb.load(rewritten(tmp_path / "t", tmp_path / "bad", change_meta=huge))
    wide = Fixed.encode(np.zeros((4, 4096), np.int64), None, 1)
    atom = Matrix.encode(np.ones((1, 2**16), np.float32), "int2")
    packed = PackedTable([Band(4, wide, None, atom)], 2**16)
    tracemalloc.start()
    assert packed[[0, 1]].shape == (2, 2**16)
    assert tracemalloc.get_traced_memory()[1] < 200e6
    tracemalloc.stop()


def test_a_file_replaced_while_it_is_opened_is_read_whole(tmp_path, monkeypatch):
    old, new = (fb.DenseTable.from_dense(torch.full((n, 4), float(n))).pack() for n in (5, 9))
    path = tmp_path / "t"
    old.save(path)
    real, calls = file._read_file_header, []

    def replace_meanwhile(*arguments):
        found = real(*arguments)
        if not calls:
            calls.append(1)
            new.save(path)
        return found

    monkeypatch.setattr(file, "_read_file_header", replace_meanwhile)
    assert fb.load(path)[:].tolist() == [[9.0] * 4] * 9


@pytest.mark.parametrize("number", [b"1e999", b"8.0", b"true", b'"8"', b"[8]", b"null", b"-8"])
def test_numbers_of_a_header_are_whole(number, tmp_path):
    whole = files(tmp_path)[0].read_bytes()
    length = int.from_bytes(whole[:8], "little")
    text = whole[8 : 8 + length].replace(b'"data_offsets":[0,', b'"data_offsets":[' + number + b",")
    text += b" " * (-len(text) % 8)
    with pytest.raises(fb.FormatError, match="integers of at least 0"):
        file.from_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])


def test_scores_of_infinite_atoms_are_those_of_their_rows(monkeypatch):
    table = sparse_anchor()
    with torch.no_grad():
        table.atoms[0] = float("inf")
        table.transform[:, 0] = 0
        table.transform[7, 0] = 1.0
    for engine in ("numpy", "numba"):
        monkeypatch.setenv("FEATHERBED_KERNELS", engine)
        scores = table.pack(layout="ragged").logits(np.ones(8))
        assert np.isinf(scores[7])
        assert np.isfinite(np.delete(scores, 7)).all()


def test_scores_of_few_rows_on_many_atoms_take_little_memory():
    codes = Fixed.encode(RNG.integers(0, 2**16, (3, 128)), None, 2**16)
    atoms = Matrix.encode(RNG.normal(size=(2**16, 1)), "int8")
    packed = PackedTable([Band(3, codes, None, atoms, "concat")], 128)
    query, rows = np.ones(128, np.float32), packed[:]
    tracemalloc.start()
    scores = packed.logits(query)
    assert (
        tracemalloc.get_traced_memory()[1] < 10e6
    )  # 34 MB as scores of every choice of every part
    tracemalloc.stop()
    np.testing.assert_allclose(scores, rows @ query, rtol=1e-5)


def test_a_report_of_many_codes_takes_little_memory(tmp_path):
    codes = Fixed.encode(RNG.integers(0, 2, (2000, 4096)), None, 2)
    packed = PackedTable([Band(2000, codes, None, Matrix.encode(np.ones((2, 3)), "float32"))], 3)
    packed.save(tmp_path / "t")
    tracemalloc.start()
    assert report(tmp_path / "t")["bands"][0]["codes_per_row"] == {"4096": 1024}
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


def test_infinite_atoms_stay_where_they_are_used(monkeypatch):
    table = sparse_anchor()
    with torch.no_grad():
        table.atoms[0] = float("inf")
        table.transform[:, 0] = 0
        table.transform[7, 0] = 1.0
    for engine in ("numpy", "numba"):
        monkeypatch.setenv("FEATHERBED_KERNELS", engine)
        rows = table.pack(layout="ragged")[:]
        assert np.isinf(rows[7]).all()
        assert np.isfinite(np.delete(rows, 7, axis=0)).all()


def test_values_too_large_for_float16_are_refused():
    table = sparse_anchor()
    with torch.no_grad():
        table.transform[3, 3] = 1e6
    for layout in ("fixed", "ragged", "all"):
        with pytest.raises(fb.ArgumentError, match="65,504"):
            table.pack(values="float16", layout=layout)
    with torch.no_grad():
        table.transform[3, 3] = float("nan")
    for layout in ("fixed", "ragged", "all"):
        with pytest.raises(fb.ArgumentError, match="finite"):
            table.pack(values="int2", layout=layout)


def test_rows_that_are_no_numbers_are_found_last():
    rows = torch.full((1003, 2), float("nan"))
    rows[[5, 500, 900]] = torch.tensor([[1.0, 0], [3.0, 0], [2.0, 0]])
    table = fb.DenseTable(1003, 2)
    table.load_state_dict({"rows.weight": rows})
    ids, scores = table.pack().search([1.0, 0.0], k=5)
    assert ids[:3].tolist() == [500, 900, 5]
    assert scores[3:].tolist() == [-np.inf, -np.inf]


def test_truncated_files_are_refused(tmp_path):
    for path in files(tmp_path):
        whole = path.read_bytes()
        for length in {0, 1, 7, 8, 9, 60, len(whole) // 2, len(whole) - 1}:
            (tmp_path / "cut").write_bytes(whole[:length])
            with pytest.raises(fb.FormatError):
                fb.load(tmp_path / "cut")
        (tmp_path / "long").write_bytes(whole + b"\0")
        with pytest.raises(fb.FormatError):
            fb.load(tmp_path / "long")


def container(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def area(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


HOSTILE_BYTES = {
    "no header": b"",
    "header of 2^60 bytes": (2**60).to_bytes(8, "little") + b"{}",
    "header of 20 MB": (20 << 20).to_bytes(8, "little") + b" " * (20 << 20),
    "not JSON": container(b"{nonsense}"),
    "a list": container(b"[1, 2]"),
    "deep nesting": container(b"[" * 100_000),
    "pickle": b"\x80\x04\x95" + b"x" * 100,
    "overlapping": container({"a": area("U8", [8], 0, 8), "b": area("U8", [8], 4, 12)}, b"\0" * 12),
    "hole": container({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, b"\0" * 8),
    "beyond the end": container({"a": {"dtype": "U8", "shape": [400], "data_offsets": [0, 400]}}, b"\0" * 8),
    "negative offsets": container({"a": {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]}}, b"\0" * 8),
    "overflowing shape": container({"a": {"dtype": "U8", "shape": [2**62, 2**62], "data_offsets": [0, 8]}}, b"\0" * 8),
    "somebody else's": container({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}, b"\0" * 8),
    "metadata not JSON": container({"__metadata__": {"featherbed": "{"}}),
    "metadata deep": container({"__metadata__": {"featherbed": "[" * 50_000}}),
    "metadata a number": container({"__metadata__": {"featherbed": "7"}}),
    "offset of 1e999": container(b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,1e999]}}', b"\0" * 8),
    "offset of a fraction": container(b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8.0]}}', b"\0" * 8),
    "shape of a fraction": container(b'{"a":{"dtype":"U8","shape":[8.0],"data_offsets":[0,8]}}', b"\0" * 8),
    "shape of true": container(b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', b"\0"),
    "entry of text": container({"a": "U8"}, b"\0" * 8),
    "metadata of a list": container({"__metadata__": ["featherbed"]}),
    "header in UTF-16": container('{"__metadata__":{}}'.encode("utf-16")),
    "metadata huge number": container({"__metadata__": {"featherbed": '{"version": 1, "rows": 1e999}'}}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_BYTES)
def test_hostile_bytes_are_refused_quickly(name, tmp_path):
    (tmp_path / "bad").write_bytes(HOSTILE_BYTES[name])
    start = time.thread_time()  # not the clock: others may need the core
    with pytest.raises(fb.FormatError):
        fb.load(tmp_path / "bad")
    assert time.thread_time() - start < 5
    with pytest.raises(fb.FormatError):
        file.from_bytes(HOSTILE_BYTES[name])


HOSTILE = sorted((Path(__file__).parent / "hostile").glob("*.safetensors"))


@pytest.mark.parametrize("path", HOSTILE, ids=lambda path: path.stem)
def test_the_hostile_folder_is_refused(path):
    with pytest.raises(fb.FormatError):
        fb.check(path)
    exercise(path)


def test_the_hostile_folder_is_complete():
    assert len(HOSTILE) > 180


def test_ten_thousand_mutations(tmp_path):
    sources = [path.read_bytes() for path in files(tmp_path)]
    chance = random.Random(0)
    target, opened = tmp_path / "mutant", 0
    for number in range(10_000):
        data = bytearray(chance.choice(sources))
        length = int.from_bytes(data[:8], "little")
        for _ in range(chance.randint(1, 4)):
            zone = 8 + length if chance.random() < 0.4 else len(data)
            data[chance.randrange(zone)] = chance.choice((0, 255, 48, 57, chance.randrange(256)))
        target.write_bytes(data)
        try:
            opened += exercise(target)
        except Exception as error:
            raise AssertionError(f"mutant {number}: {error!r}") from error
    assert opened > 1000  # a good part gets past the header and is really used


@given(st.binary(max_size=400), st.integers(0, 5000))
@settings(max_examples=150, deadline=None)
def test_spliced_files_raise_only_format_errors(tmp_path_factory, junk, at):
    folder = tmp_path_factory.getbasetemp() / "splice"
    if not folder.exists():
        folder.mkdir()
        fb.save(sparse_anchor(), folder / "source", keys=[f"k{i}" for i in range(300)])
    whole = (folder / "source").read_bytes()
    (folder / "bad").write_bytes(whole[:at] + junk + whole[at + len(junk) :])
    exercise(folder / "bad")


# --- writing -----------------------------------------------------------------------------------------------------------

WRITER = """
import sys, numpy as np, featherbed as fb
from featherbed.packed.band import Band
from featherbed.packed.band import Identity
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable
table = PackedTable([Band(40_000, Identity(), dictionary=Matrix.encode(np.full((40_000, 64), 2.0, np.float32), "float32"))], 64)
print("ready", flush=True)
while True:
    table.save(sys.argv[1])
"""


def test_killed_writers_leave_the_old_file_or_the_new(tmp_path):
    path = tmp_path / "folder" / "table.safetensors"
    path.parent.mkdir()
    old = fb.DenseTable.from_dense(torch.ones(40_000, 64)).pack()
    chance = random.Random(1)
    seen, named = set(), 0
    for turn in range(50):
        begun = time.perf_counter()
        old.save(path)
        before, pace = path.stat().st_mtime_ns, time.perf_counter() - begun
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout.readline() == b"ready\n"
        if (
            turn == 0
        ):  # once after a rename, however slow the machine is; the others anywhere in the first writes
            while path.stat().st_mtime_ns == before:
                assert writer.poll() is None
                time.sleep(0.001)
        time.sleep(chance.uniform(0, 3 * pace))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        rows = fb.check(path)[:]
        assert rows.min() == rows.max()
        seen.add(float(rows.max()))
        assert 2.0 in seen  # the first was killed after a rename
        for other in set(path.parent.iterdir()) - {
            path
        }:  # in the instant in which a whole file has a name, and not yet its own
            assert fb.check(other)[:].min() == 2.0
            other.unlink()
            named += 1
    assert seen <= {1.0, 2.0}
    assert named < 10, "what is being written has no name, so that nothing is left of it"


def test_a_failing_write_leaves_nothing(tmp_path, monkeypatch):
    packed = sparse_anchor().pack()
    path = tmp_path / "t"
    packed.save(path)
    before = path.read_bytes()
    for nameless in (True, False):
        if not nameless:
            monkeypatch.setattr(writing, "_nameless", lambda folder: None)
        monkeypatch.setattr(
            file, "header_for", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            packed.save(path)
        monkeypatch.undo() if nameless else None
        assert [p.name for p in tmp_path.iterdir()] == ["t"]
        assert path.read_bytes() == before


def test_writing_works_without_nameless_files(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_nameless", lambda folder: None)
    packed = sparse_anchor().pack()
    packed.save(tmp_path / "t")
    assert np.array_equal(fb.load(tmp_path / "t")[:], packed[:])
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_writes_say_where_they_cannot_go(tmp_path):
    packed = sparse_anchor().pack()
    with pytest.raises(IsADirectoryError, match="is a folder"):
        packed.save(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        packed.save(tmp_path / "nowhere" / "t")
    with pytest.raises(FileNotFoundError, match="no such file"):
        fb.load(tmp_path / "nothing")


def test_files_get_ordinary_permissions(tmp_path):
    sparse_anchor().pack().save(tmp_path / "t")
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "t").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_opening_reads_the_header_only(tmp_path):
    path = tmp_path / "large"
    packed = fb.DenseTable.from_dense(torch.zeros(250_000, 100)).pack()
    packed.save(path)
    assert path.stat().st_size > 10**8
    code = (
        "import sys, featherbed as fb\nfrom featherbed.packed import file\n"
        "size = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "before = size(); packed = fb.load(sys.argv[1]); print(size() - before)"
    )
    grown = int(
        subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
        ).stdout
    )
    assert grown < 20e6


GOLDEN = sorted((Path(__file__).parent / "golden").glob("version*/*.safetensors"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_golden_files_give_their_rows_for_ever(path, engine, monkeypatch):
    monkeypatch.setenv("FEATHERBED_KERNELS", engine)
    rows = np.array(json.loads(path.with_suffix(".json").read_text()), dtype=np.float32)
    packed = fb.check(path)
    products = [
        band for band in packed.bands if isinstance(band.codes, Every) or band.affine or band.cell
    ]
    if products:  # their order is not specified: what cancels is as exact as the largest numbers, on any machine
        np.testing.assert_allclose(packed[:], rows, rtol=0, atol=1e-6 * np.abs(rows).max())
    else:
        np.testing.assert_array_equal(packed[:], rows)
    one_by_one = np.stack([packed[id_] for id_ in range(len(packed))])
    np.testing.assert_allclose(one_by_one, packed[:], rtol=0, atol=1e-6 * np.abs(rows).max())


def test_golden_files_show_every_part_of_the_format():
    bands = [layer for path in GOLDEN for band in fb.load(path).bands for layer in band.layers]
    assert {type(band.codes).__name__ for band in bands} == {
        "Identity",
        "Hash",
        "Remainder",
        "Every",
        "Fixed",
        "Ragged",
    }
    assert {band.combine for band in bands} == {"sum", "product", "concat"}
    assert {band.cell and band.cell.kind for band in bands} == {None, "mlp", "recurrent", "lstm"}
    stored = [
        m
        for band in bands
        for m in (band.dictionary, band.values, band.norms, band.cell and band.cell.weight)
        if m
    ]
    graded = [matrix for matrix in stored if isinstance(matrix, Graded)]
    assert {matrix.scale.dtype.name for matrix in graded} == {"float32", "float16"}
    assert {int(digit) for matrix in graded for _, text in matrix.grades for digit in text} == set(
        range(9)
    )
    assert {path.parent.name[-1]: describe(fb.load(path))["version"] for path in GOLDEN} == {
        "1": 1,
        "2": 2,
        "3": 3,
    }
    stored = [matrix for matrix in stored if isinstance(matrix, Matrix)]
    assert {matrix.kind for matrix in stored} == set(KINDS)
    assert {matrix.scale.dtype.name for matrix in stored if matrix.scale is not None} == {
        "float32",
        "float16",
    }
    assert {matrix.axis for matrix in stored if matrix.scale is not None} == {0, 1}
    for part in ("values", "dictionary", "affine", "members", "norms", "plus"):
        assert {getattr(band, part) is None for band in bands} == {True, False}
    assert {band.codes.directory.itemsize for band in bands if isinstance(band.codes, Ragged)} == {
        4,
        8,
    }
    assert {band.codes.parts for band in bands if isinstance(band.codes, Fixed)} == {True, False}
    assert {path.stat().st_size < 5000 for path in GOLDEN} == {True}


@pytest.mark.parametrize("width", [3, 40, 300])
def test_projections_in_blocks_are_those_of_the_whole(width):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3000, 24)).astype(np.float32)
    weight = rng.normal(size=(24, width)).astype(np.float32)
    values, dictionary = (Matrix.encode(matrix, "float32") for matrix in (rows, weight))
    packed = PackedTable([Band(3000, Every(), values, dictionary)], width)
    np.testing.assert_allclose(packed[np.arange(3000)], rows @ weight, rtol=1e-5, atol=1e-5)
    rotated = Band(3000, Every(), values, affine=Affine(dictionary))
    np.testing.assert_array_equal(PackedTable([rotated], width)[:], packed[:])
