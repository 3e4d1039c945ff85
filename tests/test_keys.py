"""Keys of every form: they come back, unknown ones are told apart, sizes hold."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featherbed as fb
from featherbed.hashing import hash_key, hash_keys
from featherbed.packed import coded_keys, hashed_keys
from featherbed.packed.hashed_keys import HashedKeys
from featherbed.packed.keys import FORMS, IntegerKeys, Keys, TextKeys
from featherbed.packed.schema import describe

GOLDEN = sorted((Path(__file__).parent / "golden").glob("version3/*.safetensors"))
TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=12), unique=True, min_size=1)
NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, min_size=1)


def nbytes(keys):
    return sum(array.nbytes for array in keys.arrays.values())


def table_of(keys, dim=3):
    rows = torch.arange((len(keys) + keys.shared) * dim).reshape(-1, dim).float()
    return fb.DenseTable.from_dense(rows).pack().replace(keys=keys)


def check_index(keys, names):
    keys.check()
    rows = keys.find(names)
    assert rows.tolist() == [keys.id_of(name) for name in names]
    assert len(keys) == len(names)
    if keys.form != "hashed":
        assert [keys[i] for i in range(len(names))] == list(keys) == names
        with pytest.raises(IndexError):
            keys[len(names)]
    return rows.tolist()


@pytest.mark.parametrize("form", ["plain", "text", "hashed"])
@given(TEXTS, st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_texts_come_back(form, names, shared):
    keys = Keys.of(names, form, shared=shared)
    assert check_index(keys, names) == list(range(len(names)))
    absent = ["x".join(names) + "!", "y" * 70]
    expected = (
        [-1, -1]
        if not shared
        else [len(names) + shared * (hash_key(k.encode(), 0) >> 31) // 2**32 for k in absent]
    )
    if form != "hashed":
        assert keys.ids(absent).tolist() == expected == [keys.id_of(key) for key in absent]


@given(NUMBERS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_integers_come_back(numbers, rising):
    numbers = sorted(numbers) if rising else numbers
    names = list(map(str, numbers))
    keys = Keys.of(names, "integer")
    assert check_index(keys, names) == list(range(len(names)))
    same = Keys.of(IntegerKeys(np.array(numbers)), "integer")
    assert all(np.array_equal(same.arrays[name], array) for name, array in keys.arrays.items())
    others = ["x", "", "-", "007", "-0", "+1", "1_0", "²", "1" * 30, str(2**63), str(-(2**63) - 1)]
    assert keys.ids(others).tolist() == [-1] * len(others) == [keys.id_of(key) for key in others]
    near = {number + step for number in numbers for step in (-1, 1)} - set(numbers)
    assert set(keys.ids(list(map(str, near))).tolist()) <= {-1}


@given(TEXTS)
@settings(max_examples=40, deadline=None)
def test_rows_may_be_reordered(names):
    keys = HashedKeys.build(names, bits=20, order=False)
    assert sorted(check_index(keys, names)) == list(range(len(names)))
    assert "keys.order" not in keys.arrays


@given(st.lists(st.binary(max_size=150), min_size=1), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_keys_are_hashed_alike_one_by_one_and_together(raw, seed):
    ends = np.cumsum([len(key) for key in raw])
    found = hash_keys(np.frombuffer(b"".join(raw), np.uint8), ends, seed)
    assert found.tolist() == [hash_key(key, seed) for key in raw]


def test_hashes_do_not_depend_on_blocks(monkeypatch):
    keys = TextKeys.of([f"word {i}" * (i % 12) for i in range(500)])
    whole = hash_keys(*keys.utf8(), 3)
    monkeypatch.setattr("featherbed.hashing._KEYS", 7)
    assert np.array_equal(hash_keys(*keys.utf8(), 3), whole)


def test_exceptions_are_found_by_their_whole_hash():
    alike = ["t49725", "t53292"]  # one bucket and one fingerprint among 90 keys
    names = [f"k{i}" for i in range(44)] + alike + [f"k{i}" for i in range(44, 88)]
    for order in (True, False):
        keys = HashedKeys.build(names, order=order)
        assert len(keys.exceptions) == 2
        rows = check_index(keys, names)
        assert rows == list(range(90)) if order else sorted(rows) == list(range(90))


def test_seeds_are_tried_until_one_serves(monkeypatch):
    names = [f"k{i}" for i in range(300)]
    crowded = HashedKeys.build(names)
    fullest = int(np.diff(crowded.totals, append=300).max())
    monkeypatch.setattr(hashed_keys, "MOST_IN_GROUP", fullest - 1)
    keys = HashedKeys.build(names)
    assert crowded.seed == 0 < keys.seed
    assert check_index(keys, names) == list(range(300))
    monkeypatch.setattr(hashed_keys, "MOST_IN_GROUP", 2)
    with pytest.raises(fb.ArgumentError, match="no seed below 64"):
        HashedKeys.build(names)


@pytest.mark.parametrize("count", [100, 4097, 33000, 66000])
def test_sizes_hold(count):
    names = [f"item {i * 7919 % 1000003}" for i in range(count)]
    bits = 16 + 5.6 + np.log2(count)
    spare = 8 * 4 * 6  # the spare words of three streams
    assert 8 * nbytes(Keys.of(names, "hashed")) <= count * bits + spare
    assert nbytes(HashedKeys.build(names, order=False)) <= 3 * count + spare
    text = Keys.of(names, "text")
    index = sum(text.arrays[name].nbytes for name in ("keys.order", "keys.blocks", "keys.ends"))
    assert index <= 6 * count
    assert nbytes(text) - index < 0.5 * len("".join(names))
    dense = Keys.of(list(map(str, range(7, 7 + count))), "integer")
    assert nbytes(dense) == 8


def test_false_positives_are_as_rare_as_the_file_says():
    keys = Keys.of([f"known {i}" for i in range(5000)], "hashed")
    found = keys.ids([f"unknown {i}" for i in range(1 << 20)])
    assert keys.false_positive_rate == 2**-16
    assert 2 <= np.count_nonzero(found >= 0) <= 36  # 16 expected, standard deviation 4


def test_blocks_of_text_in_memory_are_limited(monkeypatch):
    names = [f"key {i:05}" for i in range(1000)]
    monkeypatch.setattr(coded_keys, "CACHED", 3)
    keys = Keys.of(names, "text")
    assert check_index(keys, names) == list(range(1000))
    assert len(keys._inflated) <= 3


@pytest.mark.parametrize("form", FORMS)
def test_files_keep_their_form(form, tmp_path):
    names, path = [str(i * i) for i in range(150)], tmp_path / "t.safetensors"
    packed = table_of(Keys.of(names[::-1]))
    fb.save(packed, path, keys=form)
    found = fb.check(path)
    assert (found.keys.form, describe(found)["version"]) == (form, 1 if form == "plain" else 3)
    assert np.array_equal(found["49"], packed["49"])
    assert np.array_equal(found[names], packed[names])
    assert (found.name_of(3), packed.name_of(3)) == (
        None if form == "hashed" else packed.keys[3],
        packed.keys[3],
    )
    found.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_files_find_their_keys_for_ever(path):
    expected = json.loads(path.with_suffix(".ids.json").read_text())
    packed = fb.load(path)
    assert packed.ids(list(expected)).tolist() == list(expected.values())
    assert [packed.ids(key) for key in expected] == list(expected.values())
    assert set(expected.values()) >= set(range(len(packed.keys) - 3))


def test_golden_files_show_every_form_of_keys():
    keys = [fb.load(path).keys for path in GOLDEN]
    assert {index.form for index in keys} == set(FORMS)
    for form in ("text", "hashed", "integer"):
        assert {index.order is None for index in keys if index.form == form} == {True, False}
    assert {len(index.exceptions) for index in keys if index.form == "hashed"} == {0, 2}
    assert {index.shared > 0 for index in keys} == {True, False}
    counts = {0 if index.counts is None else index.counts.itemsize for index in keys}
    assert counts == {0, 4, 8}


# --- unknown keys --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["plain", "text", "hashed"])
def test_unknown_keys(form):
    packed = table_of(Keys.of(["tea", "rum", "ale"], form))
    batch = [["ale", "gin"], ["tea", "gin"]]
    assert packed.ids(batch).tolist() == [[2, -1], [0, -1]]
    assert (packed.ids("rum"), packed.ids("gin")) == (1, -1)
    for default, row in (("zeros", [0, 0, 0]), ("mean", [3, 4, 5]), ([1, 2, 3], [1, 2, 3])):
        assert packed.get(batch, default=default).tolist() == [[[6, 7, 8], row], [[0, 1, 2], row]]
        assert packed.get("gin", default=default).tolist() == row
    assert packed.get("rum").tolist() == [3, 4, 5]
    assert ("rum" in packed, "gin" in packed) == (True, False)
    with pytest.raises(fb.UnknownKeyError, match=r"^no row has the key 'gin'$"):
        packed["gin"]
    with pytest.raises(
        fb.UnknownKeyError, match=r"^3 of 4 keys have no row: 'gin', 'sake'; packed\.get"
    ):
        packed[["gin", "tea", "sake", "gin"]]


def test_an_error_names_a_limited_number_of_keys():
    packed = table_of(Keys.of(["tea"]))
    with pytest.raises(fb.UnknownKeyError, match="'no 9' and 990 more") as found:
        packed[[f"no {i}" for i in range(1000)]]
    assert len(str(found.value)) < 300
    assert found.value.keys == tuple(f"no {i}" for i in range(1000))
    with pytest.raises(fb.UnknownKeyError) as found:
        packed[["x" * 10_000, "tea"]]
    assert len(str(found.value)) < 300


@pytest.mark.parametrize("default", ["median", [1, 2], [[1, 2, 3]], None, ["a", "b", "c"]])
def test_a_default_that_is_no_row_is_refused(default):
    with pytest.raises(fb.ArgumentError, match='use "zeros", "mean" or a row of 3 numbers'):
        table_of(Keys.of(["tea"])).get(["gin"], default=default)


def test_a_table_without_keys_says_so():
    packed = fb.DenseTable(3, 2).pack()
    for use in (packed.ids, packed.get, packed.ids_of):
        with pytest.raises(fb.UnknownKeyError, match="without keys"):
            use("tea")


@pytest.mark.parametrize("form", FORMS)
def test_other_keys_share_rows(form, tmp_path):
    names = [str(i) for i in range(200)]
    packed = table_of(Keys.of(names, form, shared=4))
    fb.save(packed, tmp_path / "t")
    found = fb.check(tmp_path / "t")
    others = [f"other {i}" for i in range(400)]
    ids = found.ids(others)
    assert found.ids(names).tolist() == list(range(200))
    assert set(ids.tolist()) == {200, 201, 202, 203}
    assert ids.tolist() == [found.ids(key) for key in others] == packed.ids(others).tolist()
    assert np.array_equal(found[others], packed[ids])
    assert ("7" in found, "other 7" in found) == (True, False)
    assert describe(found)["version"] == 3
    assert (
        fb.save(found, tmp_path / "t", keys="plain").keys.shared == 4 if form != "hashed" else True
    )


# --- what cannot work ------------------------------------------------------------------------------


def test_keys_that_cannot_be_stored_are_refused(tmp_path):
    packed = table_of(Keys.of(["tea", "rum"]))
    for form in ("text", "hashed"):
        with pytest.raises(fb.ArgumentError, match="'a' is given to more than one row"):
            Keys.of(["b", "a", "a"], form)
        with pytest.raises(fb.ArgumentError, match="0 keys"):
            Keys.of([], form)
    with pytest.raises(fb.ArgumentError, match="'5' is given to more than one row"):
        Keys.of(["5", "3", "5"], "integer")
    with pytest.raises(fb.ArgumentError, match="'tea' is not an integer"):
        fb.save(packed, tmp_path / "t", keys="integer")
    with pytest.raises(fb.ArgumentError, match="1001 bytes cannot be compressed, 1000 is the most"):
        Keys.of(["x" * 1001], "text")
    with pytest.raises(fb.ArgumentError, match="16 to 31 bits"):
        HashedKeys.build(["a"], bits=8)
    with pytest.raises(fb.ArgumentError, match="use one of plain, text, integer, hashed"):
        Keys.of(["a"], "huffman")
    with pytest.raises(fb.ArgumentError, match="this one has none: give"):
        fb.save(fb.DenseTable(2, 2), tmp_path / "t", keys="hashed")
    with pytest.raises(fb.ArgumentError, match="2 keys and 1 shared rows were given for 2 rows"):
        fb.save(packed, tmp_path / "t", keys=Keys.of(["a", "b"], shared=1))
    with pytest.raises(fb.ArgumentError, match="hashed keys have no text"):
        Keys.of(["a"], "hashed")[0]
    with pytest.raises(fb.ArgumentError, match="hashed keys have no text"):
        Keys.of(Keys.of(["a"], "hashed"), "text")
    for shared in (-1, True, 2.5):
        with pytest.raises(fb.ArgumentError, match="shared"):
            Keys.of(["a"], shared=shared)
    assert not list(tmp_path.iterdir())


def test_a_block_that_inflates_without_end_is_refused():
    import zlib

    keys = Keys.of([f"key {i}" for i in range(64)], "text")
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=keys.dictionary.tobytes())
    bomb = deflater.compress(bytes(1 << 26)) + deflater.flush()
    keys.text, keys.ends = np.frombuffer(bomb, np.uint8), np.array([len(bomb)], np.uint32)
    for use in (lambda: keys[0], lambda: keys.find(["key 1"]), keys.check):
        with pytest.raises(fb.FormatError, match="block 0 of the keys is not 64 keys"):
            use()


# --- vocabularies ----------------------------------------------------------------------------------

CLICKS = [
    ["c", "b", "b"],
    np.array(["a", "b"]),
    "d",
    iter(["a", "c", "e"]),
    7,
    np.array([7, 7, 70]),
]


def test_a_vocabulary_counts_a_stream():
    vocabulary = fb.Vocabulary.count(CLICKS, min_count=2, special=["<pad>", "e"], shared=2)
    assert vocabulary.keys == ("<pad>", "e", "7", "b", "a", "c")
    assert len(vocabulary) == 8
    assert vocabulary.counts[:6].tolist() == [0, 1, 3, 3, 2, 2]
    assert vocabulary.counts.sum() == 13
    rows = vocabulary.ids([["b", "70"], ["d", "a"]])
    assert (rows[0, 0], rows[1, 1]) == (3, 4)
    assert vocabulary.counts[rows[0, 1]] >= 1 <= vocabulary.counts[rows[1, 0]]
    assert vocabulary.ids(np.array([7, 70])).tolist() == [2, rows[0, 1]]
    assert vocabulary.ids(torch.tensor([7])).tolist() == [2] == [vocabulary.ids(7)]
    assert ("b" in vocabulary, "d" in vocabulary) == (True, False)


def test_a_vocabulary_has_at_most_the_given_keys():
    vocabulary = fb.Vocabulary.count(CLICKS, most=3, special=["<unk>"])
    assert vocabulary.keys == ("<unk>", "7", "b")
    assert vocabulary.ids(["a", "b", "never"]).tolist() == [-1, 2, -1]
    assert vocabulary.ids(["a", "b"], default=0).tolist() == [0, 2]
    assert vocabulary.counts.tolist() == [0, 3, 3]


@pytest.mark.parametrize("form", ["plain", "text", "hashed"])
def test_a_vocabulary_is_saved_in_the_file_of_its_table(form, tmp_path):
    vocabulary = fb.Vocabulary.count(CLICKS, min_count=2, shared=3)
    table = fb.DenseTable(len(vocabulary), 4)
    fb.save(table, tmp_path / "t", keys=Keys.of(vocabulary, form))
    again = fb.Vocabulary(fb.check(tmp_path / "t").keys)
    keys = ["a", "b", "7", "d", "never", "70"]
    assert again.ids(keys).tolist() == vocabulary.ids(keys).tolist()
    assert again.ids([7]).tolist() == vocabulary.ids([7]).tolist()
    assert again.counts.tolist() == vocabulary.counts.tolist()
    assert (len(again), repr(again)) == (len(vocabulary), repr(vocabulary))
    if form != "hashed":
        assert list(again) == list(vocabulary)
        assert Keys.of(again).ids(keys).tolist() == vocabulary.ids(keys).tolist()
    fb.save(fb.load(tmp_path / "t"), tmp_path / "u", keys="hashed")
    assert fb.load(tmp_path / "u").keys.counts.tolist() == vocabulary.counts.tolist()


def test_a_vocabulary_finds_rows_of_its_own_only():
    for keys in (["tea", "rum"], Keys.of(["tea", "rum"], "hashed", shared=2)):
        vocabulary = fb.Vocabulary(keys, shared=2)
        assert (vocabulary.find("rum"), vocabulary.find("ale")) == (1, None)


def test_a_vocabulary_that_cannot_work_is_refused(tmp_path):
    with pytest.raises(fb.ArgumentError, match="more than one row"):
        fb.Vocabulary(["a", "a"])
    with pytest.raises(fb.ArgumentError, match="give one for each of 3 rows"):
        fb.Vocabulary(["a", "b"], shared=1, counts=np.ones(2))
    with pytest.raises(fb.ArgumentError, match=r"keys are strings, got float 2\.5"):
        fb.Vocabulary.count([2.5, 2.5], min_count=2)
    for stream in (["a", None], [["a", 2.5]], [b"a"], [["a", b"b"]]):
        with pytest.raises(fb.ArgumentError, match=r"keys are strings, got (NoneType|float|bytes)"):
            fb.Vocabulary.count(stream)
    for text in ("tea", b"tea"):  # whose letters are no keys
        with pytest.raises(fb.ArgumentError, match="tea': give a list of keys"):
            fb.Vocabulary.count(text)
        with pytest.raises(fb.ArgumentError, match="tea': give a list of keys"):
            fb.Vocabulary(text)
    with pytest.raises(fb.ArgumentError, match="min_count"):
        fb.Vocabulary.count(["a"], min_count=0)
    with pytest.raises(fb.ArgumentError, match="1 keys and 2 shared rows were given for 2 rows"):
        fb.save(fb.DenseTable(2, 2), tmp_path / "t", keys=fb.Vocabulary(["a"], shared=2))
