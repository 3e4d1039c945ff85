"""Looking inside packed tables: against loops over the dense transform, and on what films people watch."""

import itertools
import json
import tracemalloc

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.errors import ArgumentError
from featherbed.io.opening import read_lines
from featherbed.io.records import read_movielens
from featherbed.packed import inspect as anchor_weights
from featherbed.packed.band import Band, Entries, Every, Ragged
from featherbed.packed.keys import Keys
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable
from featherbed.tables.mixture import MixtureTable

LAYOUTS = ("ragged", "fixed", "all")


def sparse(rows=90, anchors=7, share=0.3, seed=0, signed=False):  # -> float32 [V, K]
    rng = np.random.default_rng(seed)
    values = (
        rng.normal(size=(rows, anchors)) if signed else rng.integers(1, 12, size=(rows, anchors))
    )
    found = np.where(rng.random((rows, anchors)) < share, values, 0).astype(np.float32)
    found[[3, rows // 2]] = 0
    return found


def packed_of(transform, layout, kind="float32", **more):
    codes, left = Entries.of(transform).layout(layout, kind)
    atoms = Matrix.encode(np.random.default_rng(1).normal(size=(transform.shape[1], 5)), "float32")
    values = None if left is None else Matrix.encode(left, kind)
    return PackedTable([Band(len(transform), codes, values, atoms)], 5, **more)


def ranked(transform, skip=()):
    """Every entry that is not 0, largest first, then by id, then by anchor."""
    found = [
        (-abs(float(w)), i, k, float(w))
        for (i, k), w in np.ndenumerate(transform)
        if w and (i, k) not in skip
    ]
    return [(i, k, w) for _, i, k, w in sorted(found)]


def plain(entries):
    return [(entry.id, entry.anchor, entry.weight) for entry in entries]


@pytest.mark.parametrize(
    ("layout", "signed", "block"), list(itertools.product(LAYOUTS, (False, True), (64, 1 << 18)))
)
def test_objects_and_pairs_are_those_of_the_dense_transform(layout, signed, block, monkeypatch):
    monkeypatch.setattr(anchor_weights, "HELD", block)
    transform = sparse(signed=signed)
    packed = packed_of(transform, layout)
    for anchor, count in itertools.product(range(7), (1, 4, 1000)):
        expected = [entry for entry in ranked(transform) if entry[1] == anchor][:count]
        assert plain(anchor_weights.objects_of(packed, anchor, count)) == expected
    for count in (1, 10, 10_000):
        assert plain(anchor_weights.largest_pairs(packed, count)) == ranked(transform)[:count]
    own = np.array([5, 8, -1, 40, 41, -1, 3])
    expected = ranked(transform, skip={(int(i), k) for k, i in enumerate(own)})
    assert plain(anchor_weights.largest_pairs(packed, 50, anchor_ids=own)) == expected[:50]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_rows_and_clusters_are_those_of_the_dense_transform(layout, monkeypatch):
    monkeypatch.setattr(anchor_weights, "HELD", 64)
    transform = sparse(share=0.15)
    packed = packed_of(transform, layout)
    empty = np.flatnonzero(~transform.any(1))
    assert len(empty) > 2
    counts = np.where(np.arange(90) % 3 == 0, 1, 10)
    found = anchor_weights.zero_rows(packed, counts)
    assert found.ids.tolist() == empty.tolist()
    assert found.counts.tolist() == counts[empty].tolist()
    assert found.once == np.mean(empty % 3 == 0)
    assert found.objects == 90
    assert anchor_weights.zero_rows(packed).once is None
    expected = np.where(transform.any(1), transform.argmax(1), -1)
    assert anchor_weights.clusters_of(packed).tolist() == expected.tolist()


def test_a_table_without_a_weight_has_only_zero_rows():
    packed = packed_of(np.zeros((5, 3), np.float32), "ragged")
    assert anchor_weights.zero_rows(packed, np.ones(5)).once == 1.0
    assert anchor_weights.objects_of(packed, 0) == anchor_weights.largest_pairs(packed) == []
    assert anchor_weights.clusters_of(packed).tolist() == [-1] * 5
    full = packed_of(np.ones((5, 3), np.float32), "ragged")
    assert anchor_weights.zero_rows(full, np.ones(5)).once is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_low_bit_weights_keep_zero_rows(layout):
    transform = sparse(anchors=4)
    packed = packed_of(transform, layout, "int8")
    assert (
        anchor_weights.zero_rows(packed).ids.tolist() == np.flatnonzero(~transform.any(1)).tolist()
    )
    best = anchor_weights.objects_of(packed, 2, 1)[0]
    assert transform[best.id, 2] == transform[:, 2].max()


def test_the_padding_row_is_no_object():
    transform = sparse()
    transform[0] = 100
    for layout in LAYOUTS:
        packed = packed_of(transform, layout, padding_idx=0)
        assert anchor_weights.largest_pairs(packed, 1)[0].id != 0
        assert anchor_weights.clusters_of(packed)[0] == -1
        assert anchor_weights.zero_rows(packed).objects == 89
        assert (
            anchor_weights.zero_rows(packed_of(transform, layout, padding_idx=3))
            .ids.tolist()
            .count(3)
            == 0
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_sums_of_a_softmax_mixture_are_no_anchors(layout, tmp_path):
    table = MixtureTable(60, 5, anchors=(4, 3), generator=torch.Generator().manual_seed(0))
    transform = sparse(60, 7)
    transform[(transform != 0)[:, 4:].all(1), 4] = (
        0  # a set without a zero would count from its smallest weight
    )
    with torch.no_grad():
        table.transform.copy_(torch.from_numpy(transform))
    fb.save(table.pack(layout=layout), tmp_path / "mixed.safetensors")
    packed = fb.load(tmp_path / "mixed.safetensors")
    assert (anchor_weights.anchor_count(packed), packed.bands[0].atoms) == (7, 9)
    assert (
        anchor_weights.zero_rows(packed).ids.tolist() == np.flatnonzero(~transform.any(1)).tolist()
    )
    beyond = []  # what an anchor has beyond the share of one with weight 0
    for part in (transform[:, :4], transform[:, 4:]):
        powers = np.exp(part.astype(np.float64))
        beyond.append((powers - 1) / powers.sum(1, keepdims=True))
    expected = np.concatenate(beyond, axis=1)
    found = anchor_weights.largest_pairs(packed, 1000)
    assert len(found) == np.count_nonzero(transform)
    for entry in found:
        np.testing.assert_allclose(entry.weight, expected[entry.id, entry.anchor], rtol=1e-5)
    linear = MixtureTable(60, 5, anchors=(4, 3), combine="linear").pack()
    assert anchor_weights.anchor_count(linear) == 7


def purity_by_loops(clusters, groups):
    total = good = 0
    for cluster in set(clusters) - {-1}:
        members = [set(g) for c, g in zip(clusters, groups, strict=True) if c == cluster and g]
        total += len(members)
        good += max((sum(name in g for g in members) for name in set().union(*members)), default=0)
    return good / total


def test_purity_counts_objects_of_several_groups():
    rng = np.random.default_rng(4)
    names = np.array(["drama", "comedy", "crime", "war"])
    groups = [list(names[rng.random(4) < 0.4]) for _ in range(90)]
    packed = packed_of(sparse(share=0.15), "ragged")
    clusters = anchor_weights.clusters_of(packed).tolist()
    found = anchor_weights.purity(packed, groups)
    assert found.share == pytest.approx(purity_by_loops(clusters, groups))
    kept = [g for c, g in zip(clusters, groups, strict=True) if c >= 0 and g]
    assert found.objects == len(kept) < 90
    assert found.baseline == pytest.approx(
        max(sum(n in g for g in kept) for n in names) / len(kept)
    )
    assert found.baseline <= found.share
    assert sum(size for _, _, size in found.majority.values()) == found.objects
    assert anchor_weights.purity([0, 0, 1], ["ab", "ab", "ba"]).share == 1.0, "a word is one group"
    assert anchor_weights.purity([0, 0, 1], [7, 8, None]).share == 0.5
    assert anchor_weights.purity(np.array([2, 2]), [("x", "x", "y"), "y"]).majority == {
        2: ("y", 2, 2)
    }


def test_planted_clusters_are_found():
    tensors = torch.Generator().manual_seed(0)
    groups = torch.arange(200) % 4
    rows = torch.eye(8)[groups] + 0.05 * torch.randn(200, 8, generator=tensors)
    packed = fb.AnchorTable.from_dense(rows, anchors=4).pack()
    assert anchor_weights.purity(packed, groups.tolist()).share > 0.97


def test_films_cluster_by_genre(data):
    sparse_linalg = pytest.importorskip("scipy.sparse.linalg")
    matrices = pytest.importorskip("scipy.sparse")
    ratings = read_movielens(data / "ml-1m")
    genre_of = dict(
        (line.rstrip("\n").split("::"))[::2]
        for line in read_lines(data / "ml-1m" / "movies.dat", "latin-1")
    )
    genres = [genre_of[key].split("|") for key in ratings.item_keys]
    seen = np.bincount(ratings.items)
    weight = 1 / np.sqrt(seen[ratings.items])
    watched = matrices.csr_matrix((weight, (ratings.items, ratings.users)))
    left, sizes, _ = sparse_linalg.svds(watched, k=16, random_state=0)
    packed = fb.AnchorTable.from_dense(
        torch.from_numpy((left * sizes).astype(np.float32)), anchors=15
    ).pack()
    found = anchor_weights.purity(packed, genres)
    shuffled = anchor_weights.purity(
        np.random.default_rng(0).permutation(anchor_weights.clusters_of(packed)), genres
    )
    assert found.objects == 3706
    assert shuffled.share < 0.45
    assert found.baseline == pytest.approx(0.403, abs=5e-4)
    assert found.share > 0.55


def many(rows, anchors, each):
    """A table of many rows with ``each`` weights a row, made without the dense transform."""
    rng = np.random.default_rng(0)
    row_of = np.repeat(np.arange(rows), each)
    indices = rng.integers(anchors // each, size=rows * each) + np.tile(np.arange(each), rows) * (
        anchors // each
    )
    codes = Ragged.encode(rows, row_of, indices, rng.random(rows * each), anchors, "float16")
    return PackedTable(
        [Band(rows, codes, dictionary=Matrix.encode(np.ones((anchors, 16)), "float32"))], 16
    )


def dense_values(rows, anchors):
    values = np.random.default_rng(0).random((rows, anchors), dtype=np.float32)
    atoms = Matrix.encode(np.ones((anchors, 16)), "float32")
    return PackedTable([Band(rows, Every(), Matrix.encode(values, "float32"), atoms)], 16)


@pytest.mark.parametrize(
    "make", [lambda v: many(v, 1000, 4), lambda v: dense_values(v, 40)], ids=["ragged", "all"]
)
def test_many_rows_are_read_in_blocks(make):
    few, packed = make(20_000), make(200_000)
    for look in (
        lambda packed: anchor_weights.objects_of(packed, 7, 10),
        lambda packed: anchor_weights.largest_pairs(packed, 20),
        lambda packed: anchor_weights.zero_rows(packed),
        lambda packed: anchor_weights.clusters_of(packed),
        lambda packed: anchor_weights.anchors_report(packed),
    ):
        look(few)  # what is imported and compiled at first is not counted
        tracemalloc.start()
        look(packed)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 24 << 20, "the dense transform would take 800 or 32 MB, in float32"


def test_the_report_holds_it_all_as_text_and_as_data(tmp_path):
    transform = sparse()
    names = [f"film {i}" for i in range(90)]
    path = tmp_path / "films.safetensors"
    packed_of(transform, "ragged", keys=Keys.of(names)).save(path)
    packed = fb.load(path)
    found = anchor_weights.anchors_report(packed, anchors=3, count=2, pairs=4, counts=np.arange(90))
    again = json.loads(json.dumps(found))
    assert again == found
    assert found["anchors"] == 7
    assert [one["anchor"] for one in found["objects"]] == [0, 1, 2]
    assert found["objects"][1]["induces"] == [
        entry._asdict() for entry in anchor_weights.objects_of(packed, 1, 2)
    ]
    assert found["pairs"] == [entry._asdict() for entry in anchor_weights.largest_pairs(packed, 4)]
    assert found["zero_rows"]["first"][0] == {"id": 3, "key": "film 3", "count": 3}
    text = anchor_weights.anchors_text(found)
    best = anchor_weights.objects_of(packed, 1, 1)[0]
    assert f"{best.key} ({best.weight:.3g})" in text
    assert f"zero rows   {found['zero_rows']['rows']} of 90, 0% of them" in text
    assert "film 3 (3)" in text
    without = anchor_weights.anchors_text(
        anchor_weights.anchors_report(packed_of(transform, "fixed"), anchors=50)
    )
    assert without.count("\n") == 7 + 20 + 3
    assert "occur once" not in without


@pytest.mark.parametrize(
    "make",
    [
        lambda: fb.DenseTable(20, 4),
        lambda: fb.HashedTable(20, 4, buckets=5),
        lambda: fb.KDTable(20, 4, parts=2, choices=4),
        lambda: fb.SelectedTable(20, 4, keep=5),
        lambda: fb.QuantizedTable(20, 4, bits=8),
    ],
    ids=["dense", "hashed", "kd", "selected", "quantized"],
)
def test_tables_without_weights_are_refused(make):
    packed = make().pack()
    for look in (
        anchor_weights.largest_pairs,
        anchor_weights.zero_rows,
        anchor_weights.clusters_of,
        anchor_weights.anchors_report,
    ):
        with pytest.raises(ArgumentError, match=r"Table \(.*\) has no weights over anchors"):
            look(packed)


def test_bad_arguments_are_named():
    packed = packed_of(sparse(), "ragged")
    for call, said in (
        (lambda: anchor_weights.objects_of(packed, 7), "anchor=7"),
        (lambda: anchor_weights.objects_of(packed, -1), "anchor=-1"),
        (lambda: anchor_weights.objects_of(packed, True), "anchor=True"),
        (lambda: anchor_weights.objects_of(packed, 0, 0), "count=0"),
        (lambda: anchor_weights.largest_pairs(packed, 1.5), "count=1.5"),
        (lambda: anchor_weights.largest_pairs(packed, anchor_ids=[1, 2]), "each of the 7 anchors"),
        (lambda: anchor_weights.largest_pairs(packed, anchor_ids=[0.5] * 7), "dtype float64"),
        (lambda: anchor_weights.zero_rows(packed, [1, 2]), r"shape \(2,\)"),
        (lambda: anchor_weights.purity(packed, ["a"]), "1 groups"),
        (lambda: anchor_weights.purity([0.5], ["a"]), "one of both"),
        (lambda: anchor_weights.purity([-1, 0], ["a", []]), "no object has both"),
        (lambda: anchor_weights.anchors_report(packed, anchors=0), "anchors=0"),
    ):
        with pytest.raises(ArgumentError, match=said):
            call()


def test_a_table_that_is_not_packed_is_refused():
    with pytest.raises(fb.ArgumentError, match="packed table"):
        fb.objects_of(fb.AnchorTable(9, 4, anchors=2), 1)


def test_inspect_with_counts_groups_and_prices(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from featherbed.cli import app

    monkeypatch.chdir(tmp_path)
    table = fb.AnchorTable(4, 3, anchors=2)
    with torch.no_grad():
        table.transform.copy_(torch.tensor([[1.0, 0.0], [2.0, 0.5], [0.0, 1.0], [0.0, 0.0]]))
    fb.save(table, "t.safetensors")
    (tmp_path / "counts.txt").write_text("5\n4\n3\n1\n")
    (tmp_path / "groups.txt").write_text("drama\ndrama|crime\ncrime\n\n")
    prices = ["--loss", "0.5", "--lambda1", "0.1", "--lambda2", "0.01"]
    command = [
        "inspect",
        "t.safetensors",
        "--anchors",
        "--counts",
        "counts.txt",
        "--groups",
        "groups.txt",
        *prices,
    ]
    text = CliRunner().invoke(app, command).output
    assert "100.0% of rows" in text and "3 (1)" in text
    assert "0.72 = 0.5 + 0.01 x 4 + (0.1 - 0.01) x 2" in text
    data = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)["inside"]
    assert data["objective"]["value"] == pytest.approx(0.5 + 0.04 + 0.18)
    for wrong in (["--loss", "1"], ["--counts", "groups.txt"], [*prices[:4], "--lambda2", "0.2"]):
        assert isinstance(
            CliRunner().invoke(app, [*command[:3], *wrong]).exception, fb.FeatherbedError
        )
    assert isinstance(
        CliRunner().invoke(app, ["inspect", "t.safetensors", *prices]).exception, ArgumentError
    )
