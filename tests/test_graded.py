"""Graded rows: bits by run of rows and by column, in memory, in files and as a table."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featherbed as fb
from featherbed.codecs.graded import LEFT, allocate_bits, grade_ends
from featherbed.packed.band import Affine, Band, Every
from featherbed.packed.inspect import as_text, file_size, report
from featherbed.packed.matrix import Graded, Matrix, stream_bytes
from featherbed.packed.schema import describe, rebuild
from featherbed.packed.table import PackedTable
from featherbed.tables.graded import GradedTable
from featherbed.testing import check_table

RNG = np.random.default_rng(0)


def some(seed, most_rows=40):
    """Return levels, bits, rows and scales of a few grades, and the matrix they stand for."""
    rng = np.random.default_rng(seed)
    grades, columns = rng.integers(1, 6), rng.integers(1, 9)
    bits, rows = rng.integers(0, 9, (grades, columns)), rng.integers(1, most_rows, grades).tolist()
    of = np.repeat(np.arange(grades), rows)
    levels = (rng.integers(0, 256, (sum(rows), columns)) % (1 << bits)[of]).astype(np.uint8)
    scales = rng.uniform(0.5, 2, bits.shape).astype(np.float16).astype(np.float32)
    matrix = np.where(bits[of] > 0, scales[of] * (levels - ((1 << bits[of]) - 1) / 2), 0).astype(
        np.float32
    )
    return levels, bits, rows, scales, matrix


def table_of(graded, **more):
    return PackedTable([Band(graded.shape[0], Every(), graded)], graded.shape[1], **more)


@given(st.integers(0, 10_000))
@settings(max_examples=80, deadline=None)
def test_levels_come_back_whole_and_row_by_row(seed):
    levels, bits, rows, scales, matrix = some(seed)
    graded = Graded.encode(levels, bits, rows, scales)
    index = np.random.default_rng(seed).integers(0, len(matrix), 3)
    assert np.array_equal(
        graded._decode(index), matrix[index]
    )  # at random, before anything is kept
    assert np.array_equal(graded.rows(index), matrix[index])
    assert np.array_equal(graded.rows(slice(1, None, 2)), matrix[1::2])
    assert np.array_equal(graded.dense(), matrix)
    assert (
        len(graded.data)
        == stream_bytes(graded.grades)
        == -(-int(bits.sum(1) @ np.array(rows)) // 8)
    )
    assert len(graded.scale) == np.count_nonzero(bits)


def test_levels_may_come_grade_by_grade():
    levels, bits, rows, scales, _ = some(3)
    parts = np.split(levels, np.cumsum(rows)[:-1])
    assert np.array_equal(
        Graded.encode(parts, bits, rows, scales).data,
        Graded.encode(levels, bits, rows, scales).data,
    )


def test_few_rows_are_decoded_alone_and_many_are_kept():
    graded = Graded.round(RNG.normal(size=(1000, 4)), np.full((2, 4), 3), [400, 600])
    graded.rows(np.arange(20))
    assert graded._decoded is None
    graded.rows(np.arange(200))
    assert graded._decoded is not None
    assert graded.__getstate__()["_decoded"] is None


def test_long_streams_are_packed_in_parts(monkeypatch):
    from featherbed.packed import matrix as module

    levels, bits, rows, scales, matrix = some(5, most_rows=200)
    whole = Graded.encode(levels, bits, rows, scales)
    monkeypatch.setattr(module, "DECODED", 64)
    parts = Graded.encode(levels, bits, rows, scales)
    assert np.array_equal(parts.data, whole.data)
    assert np.array_equal(parts.dense(), matrix)


@pytest.mark.parametrize("width", range(1, 9))
def test_rounding_leaves_what_even_steps_must(width):
    matrix = np.random.default_rng(width).normal(size=(20_000, 2)).astype(np.float32)
    left = np.square(Graded.round(matrix, np.full((1, 2), width), [20_000]).dense() - matrix).mean()
    assert 0.8 * LEFT[width] < left < 1.05 * LEFT[width]


def test_scales_belong_to_their_grade_and_column():
    matrix = np.concatenate([RNG.normal(size=(500, 3)), 100 * RNG.normal(size=(500, 3))]).astype(
        np.float32
    )
    matrix[:, 2] /= 1000
    back = Graded.round(matrix, np.full((2, 3), 4), [500, 500]).dense()
    left = [
        np.square(back[s, k] - matrix[s, k]).mean() / matrix[s, k].var()
        for s in (slice(500), slice(500, None))
        for k in range(3)
    ]
    assert max(left) < 0.015


def test_scales_too_small_for_float16_stay_float32():
    matrix = RNG.normal(size=(50, 2)).astype(np.float32)
    tiny = Graded.round(matrix * 1e-6, np.full((1, 2), 8), [50])
    assert tiny.scale.dtype == np.float32
    np.testing.assert_allclose(tiny.dense() * 1e6, matrix, atol=0.02)
    assert Graded.round(matrix, np.full((1, 2), 8), [50]).scale.dtype == np.float16


def test_what_cannot_be_is_refused():
    levels, ones = np.zeros((3, 2), np.uint8), np.ones((1, 2))
    for arguments, named in (
        ((levels, np.full((1, 2), 9), [3], ones), "0 to 8"),
        ((levels, np.full((1, 2), -1), [3], ones), "0 to 8"),
        ((levels, np.full((1, 2), 1.5), [3], ones), "integers"),
        ((levels, np.full((1, 2), 2), [4], ones), "4 rows of 2 columns"),
        ((levels, np.full((1, 2), 2), [3, 1], ones), "each of at most 64"),
        ((levels, np.full((2, 2), 2), [3, 0], ones), "at least 1"),
        ((levels, np.full((65, 2), 2), [1] * 65, ones), "64"),
        ((levels + 4, np.full((1, 2), 2), [3], ones), "larger than its bits"),
        ((levels, np.full((1, 2), 2), [3], ones * np.nan), "finite"),
        ((levels, np.full((1, 2), 2), [3], ones[0]), "scales"),
    ):
        with pytest.raises(fb.ArgumentError, match=named):
            Graded.encode(*arguments)
    with pytest.raises(fb.ArgumentError, match="float16 or float32"):
        Graded.encode(levels, np.full((1, 2), 2), [3], ones, "int8")
    with pytest.raises(fb.ArgumentError, match="finite"):
        Graded.round(np.full((3, 2), np.inf), np.full((1, 2), 2), [3])


# --- the file ----------------------------------------------------------------------------------------------------------


def metadata(path):
    whole = path.read_bytes()
    return json.loads(
        json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]["featherbed"]
    )


def test_files_of_graded_rows_are_version_2_and_short(tmp_path):
    levels, bits, rows, scales, matrix = some(7)
    packed = table_of(Graded.encode(levels, bits, rows, scales), padding_idx=0)
    fb.save(packed, tmp_path / "t")
    fields = metadata(tmp_path / "t")
    assert fields["version"] == 2
    assert set(fields["bands"][0]) == {
        "rows",
        "codes",
        "values",
        "combine",
    }  # what is null or false is left out
    assert fields["padding_idx"] == 0
    loaded = fb.check(tmp_path / "t")
    matrix[0] = 0
    assert np.array_equal(loaded[:], matrix)
    np.testing.assert_allclose(
        loaded.logits(np.ones(matrix.shape[1])), matrix.sum(1), rtol=1e-5, atol=1e-4
    )
    assert describe(loaded) == describe(packed)
    fb.save(fb.DenseTable(4, 2), tmp_path / "other")
    assert metadata(tmp_path / "other")["version"] == 1


def test_version_1_holds_no_grades():
    levels, bits, rows, scales, _ = some(7)
    packed = table_of(Graded.encode(levels, bits, rows, scales))
    whole = describe(packed)
    rebuild(whole, lambda name, *_: packed.arrays[name])
    with pytest.raises(fb.FormatError, match="version is 1: graded rows came with version 2"):
        rebuild(whole | {"version": 1}, lambda name, *_: packed.arrays[name])


def test_the_example_of_the_specification():
    scales = np.ones(3, np.float16)
    graded = Graded((2, 2), ((1, "21"), (1, "10")), np.array([11], np.uint8), scales)
    assert graded.dense().tolist() == [[1.5, -0.5], [0.5, 0.0]]


def test_graded_values_go_with_a_rotation_a_layer_and_members(tmp_path):
    first, second = (
        Graded.round(RNG.normal(size=(30, 4)), RNG.integers(0, 5, (2, 4)), [10, 20])
        for _ in range(2)
    )
    turn = Matrix.encode(np.linalg.qr(RNG.normal(size=(4, 4)))[0], "float16")
    band = Band(
        30,
        Every(),
        first,
        affine=Affine(turn, np.ones(4, np.float32)),
        plus=Band(30, Every(), second),
    )
    fb.save(PackedTable([band], 4), tmp_path / "t")
    expected = (first.dense() + second.dense()) @ turn.dense() + 1
    np.testing.assert_allclose(fb.check(tmp_path / "t")[:], expected, rtol=1e-5, atol=1e-5)


def test_file_size_is_known_before_writing(tmp_path):
    levels, bits, rows, scales, _ = some(11)
    tables = [
        table_of(Graded.encode(levels, bits, rows, scales)),
        fb.AnchorTable(300, 4, anchors=3).pack(),
    ]
    for packed in tables:
        fb.save(packed, tmp_path / "t")
        bare = (tmp_path / "t").stat().st_size
        with_keys = fb.save(packed, tmp_path / "t", keys=[f"k{i}" for i in range(len(packed))])
        assert file_size(packed) == file_size(packed, keys=True) == file_size(with_keys) == bare
        assert file_size(with_keys, keys=True) == (tmp_path / "t").stat().st_size > bare


def test_rows_without_bits_take_no_bytes(tmp_path):
    nothing = Graded.encode(np.zeros((9, 2), np.uint8), np.zeros((1, 2), int), [9], np.ones((1, 2)))
    assert nothing.nbytes == 0
    fb.save(table_of(nothing), tmp_path / "t")
    assert not fb.check(tmp_path / "t")[:].any()
    many = Graded((2**21, 2), ((2**21, "00"),), np.empty(0, np.uint8), np.empty(0, np.float16))
    with pytest.raises(fb.ArgumentError, match="cannot be stored"):
        fb.save(table_of(many), tmp_path / "t")


def test_inspect_tells_the_grades(tmp_path):
    graded = Graded.round(RNG.normal(size=(1200, 3)), np.array([[5, 4, 2], [3, 1, 0]]), [200, 1000])
    fb.save(table_of(graded), tmp_path / "t")
    text = as_text(report(tmp_path / "t"))
    assert "version 2" in text
    assert "200 rows of  11 bits: 542" in text
    assert "1,000 rows of   4 bits: 310" in text


# --- the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more", [{"bits": 3, "grades": 3}, {"bits": 1.3, "grades": 9, "sparse": True}]
)
def test_the_table_is_one(more):
    check_table(lambda **settings: GradedTable(50, 8, **more, **settings))


def test_the_spec_makes_one():
    table = fb.make_table("graded:bits=2.5,grades=3", 700, 8)
    assert isinstance(table, GradedTable)
    assert table.grade_rows == [100, 200, 400]


def test_bits_are_within_the_budget_and_go_where_they_save_most():
    counts = 1000 / torch.arange(1, 1001)
    matrix = torch.randn(
        1000, 8, generator=torch.Generator().manual_seed(0)
    ) * 2.0 ** -torch.arange(8)
    table = GradedTable.from_dense(matrix, bits=2, grades=4, counts=counts)
    spent = int(table.widths.sum(axis=1) @ np.array(table.grade_rows))
    assert 0.97 * 16_000 < spent <= 16_000
    assert (np.diff(table.widths.astype(int), axis=1) <= 0).all()  # wide columns first
    assert (np.diff(table.widths.astype(int), axis=0) <= 0).all()  # rows that occur often first
    even = fb.QuantizedTable.from_dense(matrix, bits=2, scales="column")
    errors = [(counts[:, None] * (t.weight - matrix).square()).sum() for t in (table, even)]
    assert errors[0] < 0.1 * errors[1]


def test_allotting_is_the_best_of_all_ways():
    rng = np.random.default_rng(4)
    spread = rng.uniform(0, 4, (2, 2))
    found = allocate_bits(spread.reshape(-1), np.ones(spread.size, int), 9).reshape(spread.shape)
    ways = [np.array(way).reshape(2, 2) for way in np.ndindex(9, 9, 9, 9) if sum(way) <= 9]
    best = min(float((spread * LEFT[way]).sum()) for way in ways)
    assert float((spread * LEFT[found]).sum()) == pytest.approx(best)


def test_grades_double():
    assert grade_ends(6, 3) == [1, 3, 6]
    assert grade_ends(3, 64) == [1, 2, 3]
    assert grade_ends(1, 1) == [1]


def test_training_moves_rows_and_scales():
    target = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    table = GradedTable(64, 4, bits=3, grades=2, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.Adam(table.parameters(), lr=0.05)
    ids, losses = torch.arange(64), []
    for _ in range(150):
        loss = (table(ids) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 < losses[0]
    np.testing.assert_allclose(table.pack()[:], table.weight.detach().numpy(), rtol=1e-5, atol=1e-6)
    half = table.pack(values="float16")
    assert half.nbytes < table.pack().nbytes
    np.testing.assert_allclose(half[:], table.weight.detach().numpy(), rtol=2e-3)


def test_columns_without_bits_give_nothing_and_learn_nothing():
    matrix = torch.randn(100, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1.0, 1.0, 1e-6]
    )
    table = GradedTable.from_dense(matrix, bits=2, grades=1)
    assert table.widths[0, 2] == 0
    rows = table(torch.arange(100))
    assert not rows[:, 2].any()
    rows.sum().backward()
    assert not table.rows.grad[:, 2].any()
    assert table.parameter_count() == 2 * 101


def test_settings_are_refused_by_name():
    for wrong, named in (
        ({"bits": 0}, "bits=0"),
        ({"bits": 9}, "bits=9"),
        ({"bits": "44"}, "bits='44'"),
        ({"grades": 0}, "grades=0"),
        ({"grades": 65}, "64 is the most"),
        ({"counts": torch.ones(3)}, "one for each row"),
        ({"counts": -torch.ones(10)}, "at least 0"),
    ):
        with pytest.raises(fb.ArgumentError, match=named):
            GradedTable(10, 2, **wrong)
    table = GradedTable(10, 2)
    with torch.no_grad():
        table.rows[3, 1] = float("nan")
    with pytest.raises(fb.ArgumentError, match="diverged"):
        table.pack()
