"""Matrices read from files: every format, mapped rather than read, and what is said about bad ones."""

import gzip
import json
import os
import pickle
import re
import struct
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

import featherbed as fb
from featherbed.errors import ArgumentError, DataError, MissingExtra
from featherbed.io import vectors
from featherbed.io.vectors import BFloat16Matrix, read_matrix

ROWS = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
KEYS = [f"word{i}" for i in range(7)]


def same(source, rows=ROWS, keys=None, name=None):
    assert tuple(source.matrix.shape) == rows.shape
    assert source.matrix.dtype == rows.dtype
    assert len(source.matrix) == len(rows)
    np.testing.assert_array_equal(source.matrix[:], rows)
    np.testing.assert_array_equal(source.matrix[2:4], rows[2:4])
    np.testing.assert_array_equal(source.matrix[np.array([5, 0, 5])], rows[[5, 0, 5]])
    assert source.keys == keys
    if name:
        assert source.name == name


def refused(path, *parts, kind=DataError, **settings):
    with pytest.raises(kind) as caught:
        read_matrix(path, **settings)
    for part in (path.name, *parts):
        assert part in str(caught.value)


def peak(work):
    tracemalloc.start()
    try:
        kept = work()
        return tracemalloc.get_traced_memory()[1], kept
    finally:
        tracemalloc.stop()


def glove(rows=ROWS, keys=KEYS):
    return "".join(
        f"{key} {' '.join(map(repr, row.tolist()))}\n" for key, row in zip(keys, rows, strict=True)
    )


def word2vec(rows=ROWS, keys=KEYS, newline=b"\n"):
    body = b"".join(
        key.encode() + b" " + row.astype("<f4").tobytes() + newline
        for key, row in zip(keys, rows, strict=True)
    )
    return f"{len(rows)} {rows.shape[1]}\n".encode() + body


# numpy


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_is_mapped(tmp_path, dtype, order):
    path = tmp_path / "m.npy"
    rows = np.asarray(ROWS, dtype=dtype, order=order)
    np.save(path, rows)
    source = read_matrix(str(path))
    same(source, rows, name="m.npy")
    assert isinstance(source.matrix, np.memmap)
    assert not source.matrix.flags.writeable


def test_a_big_npy_takes_no_memory(tmp_path):
    path = tmp_path / "big.npy"
    mapped = np.lib.format.open_memmap(
        path, mode="w+", dtype=np.float32, shape=(500_000, 100)
    )  # 200 MB, sparse on disk
    mapped[-1] = 3
    del mapped
    most, source = peak(lambda: read_matrix(path))
    assert most < 1_000_000
    assert source.matrix[-1:].sum() == 300


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npz(tmp_path, save, order):
    path = tmp_path / "m.npz"
    save(path, other=np.arange(3), vectors=np.asarray(ROWS, order=order), words=np.array(KEYS))
    source = read_matrix(path)
    same(source, keys=KEYS, name="m.npz:vectors")
    assert isinstance(source.matrix, np.memmap)
    in_place = source.matrix.filename is not None
    assert in_place == (save is np.savez)


@pytest.mark.parametrize(
    "text",
    ["\n".join(KEYS).encode(), "\n".join(KEYS), "\n".join(KEYS) + "\n", np.array(KEYS, dtype="S8")],
)
@pytest.mark.parametrize("name", ["words", "keys", "vocab", "tokens"])
def test_npz_keys(tmp_path, text, name):
    np.savez(tmp_path / "m.npz", **{name: np.array(text), "vectors": ROWS})
    same(read_matrix(tmp_path / "m.npz"), keys=KEYS, name="m.npz")


@pytest.mark.parametrize(
    ("keys", "counts"),
    [(KEYS[:5], "5 keys, 5 of them different"), ([*KEYS[:6], "word0"], "7 keys, 6 of")],
)
def test_npz_strings_that_name_no_rows(tmp_path, keys, counts):
    np.savez(tmp_path / "m.npz", words=np.array(keys), vectors=ROWS)
    with pytest.warns(UserWarning, match=f"{counts}.* for 7 rows: read without keys"):
        source = read_matrix(tmp_path / "m.npz")
    same(source)


def test_npz_floats_called_keys_are_a_matrix(tmp_path):
    np.savez(tmp_path / "m.npz", keys=ROWS)
    same(read_matrix(tmp_path / "m.npz"))


def test_a_big_compressed_npz_is_unpacked_in_blocks(tmp_path):
    path = tmp_path / "m.npz"
    np.savez_compressed(path, vectors=np.zeros((100_000, 100), np.float32))  # 40 MB
    most, source = peak(lambda: read_matrix(path))
    assert most < 8_000_000
    assert source.matrix.shape == (100_000, 100)


def test_the_glove_set(data):
    path = data / "glove" / "glove.6B.50d.top60k.npz"
    if not path.is_file():
        pytest.skip("no GloVe in the data folder")
    source = read_matrix(path)
    assert source.matrix.shape == (60_000, 50)
    assert len(source.keys) == 60_000
    assert source.keys[0] == "the"
    np.testing.assert_array_equal(source.matrix[10:20], np.load(path)["vectors"][10:20])


def test_objects_are_not_unpickled(tmp_path):
    np.save(
        tmp_path / "m.npy", np.array([[Trap(tmp_path / "sprung")]], dtype=object), allow_pickle=True
    )
    refused(tmp_path / "m.npy", "is of type object", "float32")
    np.savez(tmp_path / "m.npz", vectors=ROWS, words=np.array(KEYS, dtype=object))
    same(read_matrix(tmp_path / "m.npz"))
    assert not (tmp_path / "sprung").exists()


def test_damaged_numpy_files(tmp_path):
    np.save(tmp_path / "m.npy", ROWS)
    (tmp_path / "short.npy").write_bytes((tmp_path / "m.npy").read_bytes()[:-5])
    refused(tmp_path / "short.npy", "truncated: 112 bytes of numbers expected, 107 found")
    (tmp_path / "none.npy").write_bytes(b"hello, this is no array")
    refused(tmp_path / "none.npy", "valid .npy array")
    (tmp_path / "header.npy").write_bytes(
        (tmp_path / "m.npy").read_bytes().replace(b"descr", b"decsr")
    )
    refused(tmp_path / "header.npy", "valid .npy array")
    (tmp_path / "none.npz").write_bytes(b"PK\x03\x04 and nothing more")
    refused(tmp_path / "none.npz", "not a complete .npz archive")
    np.savez_compressed(tmp_path / "m.npz", vectors=ROWS)
    packed = bytearray((tmp_path / "m.npz").read_bytes())
    packed[180] ^= 0xFF
    (tmp_path / "bad.npz").write_bytes(packed)
    refused(tmp_path / "bad.npz", "not a complete .npz archive")


def test_an_npz_member_that_lies_about_its_shape(tmp_path):
    np.save(tmp_path / "m.npy", ROWS)
    lie = (tmp_path / "m.npy").read_bytes().replace(b"(7, 4)", b"(9, 4)")
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "m.npz", "w", method) as archive:
            archive.writestr("vectors.npy", lie)
        refused(tmp_path / "m.npz", "truncated: 144 bytes of numbers expected, 112 found")


# safetensors


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_safetensors(tmp_path, dtype):
    path = tmp_path / "m.safetensors"
    save_file({"bias": np.zeros(4, np.float32), "weight": ROWS.astype(dtype)}, path)
    source = read_matrix(path)
    same(source, ROWS.astype(dtype), name="m.safetensors:weight")
    assert isinstance(source.matrix, np.memmap)


def test_safetensors_bfloat16(tmp_path):
    path = tmp_path / "m.safetensors"
    half = torch.tensor(ROWS).bfloat16()
    save_tensors({"weight": half}, path)
    source = read_matrix(path)
    same(source, half.float().numpy(), name="m.safetensors")
    assert isinstance(source.matrix, BFloat16Matrix)
    assert isinstance(source.matrix.bits, np.memmap)
    np.testing.assert_array_equal(source.matrix[3], half[3].float().numpy())


def test_a_big_bfloat16_converts_only_what_is_asked_for(tmp_path):
    path = tmp_path / "m.safetensors"
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [500_000, 100], "data_offsets": [0, 100_000_000]}}
    ).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 100_000_000)
    most, rows = peak(lambda: read_matrix(path).matrix[400_000:400_010])
    assert most < 1_000_000
    assert rows.shape == (10, 100)


def test_packed_files_are_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    fb.save(fb.DenseTable(5, 4), path)
    refused(path, "compressed already", "fb.load")


def test_damaged_safetensors(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"weight": ROWS}, path)
    path.write_bytes(path.read_bytes()[:-3])
    refused(path, "not a valid safetensors file")
    save_file({"weight": np.zeros((3, 4), np.int8)}, path)
    refused(path, "the array 'weight' holds integers (int8)", "probably codes", "float matrix")


# torch


def mapped_files():
    return Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("ending", [".pt", ".pth", ".bin", ".ckpt", ""])
def test_checkpoints(tmp_path, ending):
    path = tmp_path / f"checkpoint{ending}"
    weights = torch.nn.Embedding.from_pretrained(torch.tensor(ROWS)).state_dict()
    torch.save({"epoch": 3, "model": {"state_dict": weights, "steps": torch.arange(3)}}, path)
    source = read_matrix(path)
    same(source, name=f"{path.name}:model.state_dict.weight")
    if sys.platform == "linux":
        assert str(path) in mapped_files()


def test_a_lone_tensor_a_view_and_an_old_checkpoint(tmp_path):
    torch.save(torch.nn.Parameter(torch.tensor(ROWS)), tmp_path / "m.pt")
    same(read_matrix(tmp_path / "m.pt"), name="m.pt")
    torch.save({"w": torch.tensor(ROWS.T.copy()).T}, tmp_path / "m.pt")
    same(read_matrix(tmp_path / "m.pt"), name="m.pt")
    torch.save({"w": torch.tensor(ROWS)}, tmp_path / "old", _use_new_zipfile_serialization=False)
    same(read_matrix(tmp_path / "old"))


def test_checkpoint_bfloat16(tmp_path):
    half = torch.tensor(ROWS).bfloat16()
    torch.save({"w": half}, tmp_path / "m.pt")
    source = read_matrix(tmp_path / "m.pt")
    same(source, half.float().numpy())
    assert isinstance(source.matrix, BFloat16Matrix)


def test_a_checkpoint_that_holds_itself(tmp_path):
    circle = {"w": torch.tensor(ROWS)}
    circle["again"] = circle
    torch.save(circle, tmp_path / "m.pt")
    same(read_matrix(tmp_path / "m.pt"))


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("ending", [".pt", ".bin", ""])
def test_pickled_code_is_refused_and_not_run(tmp_path, ending):
    path = tmp_path / f"evil{ending}"
    torch.save({"w": torch.tensor(ROWS), "trap": Trap(tmp_path / "sprung")}, path)
    refused(path, "more than weights", "torch.save(model.state_dict(), path)")
    path.write_bytes(pickle.dumps(Trap(tmp_path / "sprung"), 2))
    refused(path, "more than weights")
    assert not (tmp_path / "sprung").exists()


def test_a_saved_module_and_a_cut_checkpoint(tmp_path):
    torch.save(torch.nn.Embedding(3, 4), tmp_path / "m.pt")
    refused(tmp_path / "m.pt", "more than weights")
    torch.save({"w": torch.tensor(ROWS)}, tmp_path / "m.pt")
    (tmp_path / "m.pt").write_bytes((tmp_path / "m.pt").read_bytes()[:-40])
    refused(tmp_path / "m.pt", "download or save it again")


def test_checkpoints_without_a_plain_matrix(tmp_path):
    torch.save({"w": torch.tensor(ROWS).to_sparse()}, tmp_path / "m.pt")
    refused(tmp_path / "m.pt", "'w' is of type torch.sparse_coo")
    torch.save({"epoch": 3}, tmp_path / "m.pt")
    refused(tmp_path / "m.pt", "holds no matrix of floats, but nothing")


@pytest.mark.parametrize(
    ("package", "ending", "extra"), [("torch", ".pt", "train"), ("pyarrow", ".parquet", "compress")]
)
def test_missing_packages(tmp_path, monkeypatch, package, ending, extra):
    (tmp_path / f"m{ending}").write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, package, None)
    refused(tmp_path / f"m{ending}", f'pip install "featherbed[{extra}]"', kind=MissingExtra)


# text


@pytest.mark.parametrize("name", ["m.txt", "m.vec", "m.w2v", "m", "m.txt.gz", "m.gz"])
@pytest.mark.parametrize("header", ["", "7 4\n"])
@pytest.mark.parametrize("end", ["\n", " \n", "\r\n"])
def test_text(tmp_path, name, header, end):
    text = (header + glove()).replace("\n", end).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    source = read_matrix(tmp_path / name)
    same(source, keys=KEYS, name=name)
    assert isinstance(source.matrix, np.memmap)


@pytest.mark.parametrize("header", ["", "7 4\n"])
def test_keys_with_spaces_and_odd_characters(tmp_path, header):
    keys = [". . .", "at name@domain.com", "São Paulo", "a\u00a0b", "\x85", "12", "😀"]
    (tmp_path / "m.txt").write_text(header + glove(keys=keys), newline="\n")
    same(read_matrix(tmp_path / "m.txt"), keys=keys)


def test_keys_that_are_not_utf8(tmp_path):
    (tmp_path / "m.txt").write_bytes(b"a\xff 1 2\na\xfe 3 4\n")
    assert read_matrix(tmp_path / "m.txt").keys == ["a\\xff", "a\\xfe"]


def test_later_duplicates_are_dropped_with_one_warning(tmp_path):
    (tmp_path / "m.txt").write_text("3 2\na 1 2\na 3 4\nb 5 6\n")
    (tmp_path / "m.bin").write_bytes(
        word2vec(np.float32([[1, 2], [3, 4], [5, 6]]), ["a", "a", "b"])
    )
    for name in ("m.txt", "m.bin"):
        with pytest.warns(
            UserWarning, match=f"{name}: dropped 1 rows with duplicate keys"
        ) as caught:
            source = read_matrix(tmp_path / name)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        same_small = source.matrix[:].tolist()
        assert (same_small, source.keys) == ([[1, 2], [5, 6]], ["a", "b"])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "a 1 2 3\nb 1 x 3\n",
            ("line 2", "a key and 3 numbers", "found 'x' in a line of 4 fields"),
        ),
        (
            "a 1 2 3\nb 1 2\n",
            ("line 2", "a key and 3 numbers", "found 'b 1 2' in a line of 3 fields"),
        ),
        ("a 1 2 3\n\nb  2 3\n", ("line 3", "found '' in a line of 4 fields")),
        ("2 3\na 1 2 3\nb 1 2\n", ("line 3", "a key and 3 numbers")),
        ("a 1 oops 3\nb 1 2 3\n", ("line 1", "found 'oops'")),
        ("3 2\na 1 2\nb 1 2\n", ("holds 2 of the 3 rows", "incomplete")),
        ("1 2\na 1 2\nb 1 2\n", ("holds 2 of the 1 rows",)),
        ("0 2\n", ("says 0 rows of 2 numbers",)),
        ("2 0\na\nb\n", ("says 2 rows of 0 numbers",)),
        ("5 99999999\na 1\n", ("says 5 rows of 99999999 numbers",)),
        ("key\tvalue\n", ("line 1", "separated by single spaces", "key\\tvalue")),
        ("\n\n", ("line 1", "separated by single spaces")),
    ],
)
def test_bad_text(tmp_path, text, parts):
    (tmp_path / "m.txt").write_text(text)
    refused(tmp_path / "m.txt", *parts)


def test_big_text_is_read_in_blocks(tmp_path):
    line = " ".join(["0.125"] * 400)
    with (tmp_path / "m.txt").open("w") as file:
        file.writelines(f"{i} {line}\n" for i in range(3000))
    most, source = peak(lambda: read_matrix(tmp_path / "m.txt"))
    assert most < 1_500_000  # of which the keys are a third; the matrix has 4.8 MB
    assert source.matrix.shape == (3000, 400)
    assert (source.matrix[2999:] == 0.125).all()


def test_cut_gzip(tmp_path):
    (tmp_path / "m.txt.gz").write_bytes(gzip.compress(glove().encode())[:-20])
    refused(tmp_path / "m.txt.gz", "not a complete gzip file", "download it again")
    np.save(tmp_path / "m.npy", ROWS)
    (tmp_path / "m.npy.gz").write_bytes(gzip.compress((tmp_path / "m.npy").read_bytes()))
    refused(tmp_path / "m.npy.gz", "gzipped npy file", "unpack it first")


# word2vec's binary form


@pytest.mark.parametrize("name", ["m.bin", "m.w2v", "m", "m.bin.gz"])
@pytest.mark.parametrize("newline", [b"\n", b""])
def test_binary(tmp_path, name, newline):
    raw = word2vec(newline=newline)
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    source = read_matrix(tmp_path / name)
    same(source, keys=KEYS, name=name)
    assert isinstance(source.matrix, np.memmap)


def test_binary_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(vectors, "BLOCK", 13)
    (tmp_path / "m.bin").write_bytes(word2vec())
    same(read_matrix(tmp_path / "m.bin"), keys=KEYS)


def test_damaged_binary(tmp_path):
    raw = word2vec()
    (tmp_path / "m.bin").write_bytes(raw[: len(raw) // 2])
    refused(tmp_path / "m.bin", "holds 3 of 7 rows", "probably incomplete")
    (tmp_path / "m.bin").write_bytes(b"9 2\na " + struct.pack("<2f", 1, 2) + b"x" * (3 << 20))
    refused(tmp_path / "m.bin", "no key of row 1", "damaged")
    (tmp_path / "m.bin").write_bytes(b"\x89HDF\r\n\x1a\n\0\0\0")
    refused(tmp_path / "m.bin", "has an unknown format", "word2vec text and binary", ".safetensors")


# Parquet


@pytest.fixture
def parquet(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def write(columns, **settings):
        pq.write_table(pa.table(columns), tmp_path / "m.parquet", **settings)
        return tmp_path / "m.parquet"

    write.pa = pa
    return write


@pytest.mark.parametrize("kind", ["list_", "large_list", "fixed"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_parquet_lists(parquet, kind, dtype, monkeypatch):
    monkeypatch.setattr(vectors, "BLOCK", 12)  # three rows at once
    pa = parquet.pa
    inner = pa.from_numpy_dtype(dtype)
    listed = pa.list_(inner, 4) if kind == "fixed" else getattr(pa, kind)(inner)
    column = pa.array(list(ROWS.astype(dtype)), listed)
    source = read_matrix(
        parquet(
            {"id": list(range(7)), "word": KEYS, "vector": column, "score": ROWS[:, 0]},
            row_group_size=5,
        )
    )
    same(source, ROWS.astype(dtype), keys=KEYS, name="m.parquet:vector")
    assert isinstance(source.matrix, np.memmap)


def test_parquet_columns(parquet):
    columns = {f"x{i}": ROWS[:, i] for i in range(4)}
    same(read_matrix(parquet(columns)), name="m.parquet")
    same(
        read_matrix(parquet({"word": KEYS, "id": list(range(7)), **columns})),
        keys=KEYS,
        name="m.parquet",
    )
    mixed = {"x0": ROWS[:, 0].astype(np.float64), **{f"x{i}": ROWS[:, i] for i in range(1, 4)}}
    same(read_matrix(parquet({"a": KEYS, "b": KEYS, **mixed})), ROWS.astype(np.float64))


def test_parquet_keys_that_repeat(parquet):
    path = parquet({"genre": ["x"] * 7, "vector": list(ROWS)})
    with pytest.warns(
        UserWarning, match="7 keys, 1 of them different, for 7 rows: read without keys"
    ):
        same(read_matrix(path))


def test_bad_parquet(parquet, tmp_path):
    refused(parquet({"v": [[1.0, 2.0], [3.0]]}), "row 1 of 'v' holds 1 numbers, the first one 2")
    refused(parquet({"v": [[1.0, 2.0], None]}), "row 1 of 'v' holds nothing")
    refused(parquet({"v": [[1.0, 2.0], [3.0, None]]}), "a number is missing (null) in rows 0 to 1")
    refused(parquet({"a": [1.0, None], "b": [1.0, 2.0]}), "a number is missing (null)")
    refused(
        parquet({"v": [[1.0]], "w": [[2.0]]}),
        "holds 2 matrices: v (1 x 1 float64), w (1 x 1 float64)",
        "--array NAME",
    )
    assert read_matrix(parquet({"v": [[1.0]], "w": [[2.0]]}), array="w").matrix[:].tolist() == [
        [2.0]
    ]
    refused(parquet({"a": [1, 2], "word": ["x", "y"]}), "'a' holds integers (int64)")
    refused(parquet({"v": [[1, 2]]}), "'v' holds integers (int64)")
    refused(parquet({"a": [1.0], "b": [2.0]}), "'a' has the shape (1,)", array="a")
    refused(parquet({"a": np.zeros(0), "b": np.zeros(0)}), "has the shape (0, 2)")
    raw = parquet({"v": list(ROWS)}).read_bytes()
    (tmp_path / "m.parquet").write_bytes(raw[:-9])
    refused(tmp_path / "m.parquet", "not a complete Parquet file")


# what all formats share


def test_several_candidates(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a.weight": ROWS, "b.weight": ROWS[:3].astype(np.float16), "bias": ROWS[0]}, path)
    refused(
        path,
        "holds 2 matrices",
        "a.weight (7 x 4 float32)",
        "b.weight (3 x 4 float16)",
        "--array NAME (array= in Python)",
    )
    same(read_matrix(path, array="a.weight"), name="m.safetensors:a.weight")
    refused(path, "no array 'c'", "a.weight (7 x 4 float32)", array="c")
    refused(path, "'bias' has the shape (4,)", "give a matrix", array="bias")


@pytest.mark.parametrize(
    "save",
    [np.savez, lambda path, **a: torch.save({k: torch.tensor(v) for k, v in a.items()}, path)],
)
def test_many_candidates_are_cut_to_twelve(tmp_path, save):
    path = tmp_path / ("m.npz" if save is np.savez else "m.pt")
    save(path, **{f"layer{i:02}": ROWS for i in range(15)})
    refused(
        path, "holds 15 matrices", "layer00 (7 x 4 float32)", "layer11 (7 x 4 float32) and 3 more"
    )
    same(read_matrix(path, array="layer14"), name=f"{path.name}:layer14")


def test_no_candidate_says_what_there_is(tmp_path):
    np.savez(tmp_path / "m.npz", ids=np.arange(3), scale=np.float32(2))
    refused(
        tmp_path / "m.npz",
        "holds no matrix of floats, but ids (3 int64), scale (scalar float32)",
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((3, 4), np.int8), "holds integers (int8), probably codes"),
        (np.zeros((3, 4), np.uint8), "holds integers (uint8)"),
        (np.zeros((3, 4), bool), "is of type bool"),
        (np.zeros((3, 4), np.complex64), "is of type complex64"),
        (np.zeros(4, np.float32), "has the shape (4,)"),
        (np.zeros((2, 3, 4), np.float32), "has the shape (2, 3, 4)"),
        (np.zeros((0, 4), np.float32), "has the shape (0, 4)"),
        (np.zeros((4, 0), np.float32), "has the shape (4, 0)"),
    ],
)
def test_what_is_no_matrix(tmp_path, rows, message):
    np.save(tmp_path / "m.npy", rows)
    refused(tmp_path / "m.npy", message)
    np.savez(tmp_path / "m.npz", m=rows)
    refused(tmp_path / "m.npz", f"the array 'm' {message}")
    torch.save({"m": torch.tensor(rows)}, tmp_path / "m.pt")
    refused(tmp_path / "m.pt", f"the array 'm' {message}")


def test_files_that_are_none(tmp_path):
    refused(tmp_path, "is a folder", kind=IsADirectoryError)
    refused(tmp_path / "absent.npy", "no such file", kind=FileNotFoundError)
    for name in ("m.npy", "m.txt", "m.bin", "m.parquet", "m.pt"):
        (tmp_path / name).touch()
        refused(tmp_path / name, "is empty")


@pytest.mark.parametrize("name", ["m.npy", "m.txt", "m.bin"])
def test_array_where_there_are_no_names(tmp_path, name):
    np.save(tmp_path / "m.npy", ROWS)
    (tmp_path / "m.txt").write_text(glove())
    (tmp_path / "m.bin").write_bytes(word2vec())
    refused(tmp_path / name, "array='w' was given", "leave it out", kind=ArgumentError, array="w")


@pytest.mark.parametrize("name", ["m.npy", "m.npz", "m.safetensors", "m.parquet", "m.pt"])
def test_content_tells_where_the_ending_does_not(tmp_path, name, parquet):
    np.save(tmp_path / "m.npy", ROWS)
    np.savez(tmp_path / "m.npz", w=ROWS)
    save_file({"w": ROWS}, tmp_path / "m.safetensors")
    torch.save({"w": torch.tensor(ROWS)}, tmp_path / "m.pt")
    parquet({"w": list(ROWS)})
    (tmp_path / "nameless").write_bytes((tmp_path / name).read_bytes())
    same(read_matrix(tmp_path / "nameless"), name="nameless")


def test_a_full_temporary_folder_says_what_to_set(tmp_path, monkeypatch):
    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return False

        def writelines(self, blocks):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(vectors.tempfile, "TemporaryFile", Full)
    (tmp_path / "m.txt").write_text(glove())
    with pytest.raises(OSError, match=re.escape("set TMPDIR to a folder on a larger disk")):
        read_matrix(tmp_path / "m.txt")


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(vectors.tempfile, "tempdir", str(tmp_path / "spool"))
    (tmp_path / "spool").mkdir()
    (tmp_path / "m.txt").write_text(glove())
    source = read_matrix(tmp_path / "m.txt")
    assert list((tmp_path / "spool").iterdir()) == []
    same(source, keys=KEYS)
