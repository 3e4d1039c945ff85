"""Rows as a few atoms with values, and as their cluster's centroid: sizes, errors, and what each method promises."""

from dataclasses import replace

import numpy as np
import pytest

import featherbed as fb
from featherbed.codecs import sparse
from featherbed.codecs.clusters import ClusterCodec
from featherbed.codecs.codec import CodecJob
from featherbed.codecs.pursuit import SparseCoder, decode
from featherbed.codecs.rows import WeightedRows
from featherbed.codecs.sparse import SparseCodec
from featherbed.packed.table import PackedTable

NAMES = ("ksvd", "hash", "hash+ksvd", "anchors")
SMALL = {"anchors": 64, "codes": 4, "values": "int8", "kind": "int8"}


def clustered(rows=1500, dim=20, centres=30, seed=0):
    generator = np.random.default_rng(seed)
    points = generator.standard_normal((centres, dim)) + 0.3
    noise = 0.4 * generator.standard_normal((rows, dim))
    return (points[generator.integers(centres, size=rows)] + noise).astype(np.float32)


def job(matrix, importance=None, seed=0):
    importance = np.ones(len(matrix), np.float32) if importance is None else importance
    return CodecJob(WeightedRows(matrix), importance, np.random.default_rng(seed), matrix.shape[1])


def packed(fit, dim):
    return PackedTable(fit.bands(), dim)


def error(fit, matrix, weights=None):
    left = packed(fit, matrix.shape[1]).block(0, len(matrix)) - matrix
    weights = np.ones(len(matrix)) if weights is None else weights
    return float(
        (weights @ (left.astype(np.float64) ** 2)).sum()
        / (weights @ (matrix.astype(np.float64) ** 2)).sum()
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "settings",
    [
        SMALL,
        {"anchors": 50, "codes": 3, "values": "int4", "kind": "float16"},
        {"anchors": 33, "codes": 1, "values": "float16", "kind": "int8"},
    ],
)
def test_the_size_is_exact(name, settings):
    matrix = clustered(701, 19)
    method = SparseCodec(name)
    assert packed(method.fit(job(matrix), **settings), 19).nbytes == method.size(
        701, 19, **settings
    )


@pytest.mark.parametrize("kind", ["int8", "float16"])
@pytest.mark.parametrize("count", [2, 37, 256])
@pytest.mark.parametrize("unit", [1.0, 1e-5])
def test_the_size_of_clusters_is_exact(kind, count, unit):
    matrix = clustered(701, 19) * np.float32(unit)
    matrix[:5] = 0  # a centroid of zeros keeps the scales of the others narrow
    method = ClusterCodec()
    fit = method.fit(job(matrix), clusters=count, kind=kind)
    assert packed(fit, 19).nbytes == method.size(701, 19, clusters=count, kind=kind)
    assert error(fit, matrix) < {2: 1.0, 37: 0.25, 256: 0.2}[count]


@pytest.mark.parametrize("method", [*map(SparseCodec, NAMES), ClusterCodec()], ids=lambda m: m.name)
def test_settings_fit_and_use_the_budget(method):
    for budget in (20_000, 60_000, 400_000):
        found = method.settings(5000, 40, budget, 40)
        assert found
        assert all(method.size(5000, 40, **s) <= budget for s in found)
        more = "clusters" if method.name == "clusters" else "codes"
        for anchors in {
            s.get("anchors") for s in found
        }:  # of the same dictionary, the most codes first
            counts = [s[more] for s in found if s.get("anchors") == anchors]
            assert counts == sorted(counts, reverse=True)
        for s in found:
            most = 2500 if more == "clusters" else 40
            assert s[more] == most or method.size(5000, 40, **s | {more: s[more] + 1}) > budget
    assert method.settings(5000, 40, 300, 40) == []
    assert all(s.get("anchors", 0) <= 300 for s in method.settings(600, 40, 10**6, 40))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("values", ["int8", "int4", "float16"])
def test_sparse_codes_beat_one_atom_a_row(name, values):
    matrix = clustered()
    nearest = error(ClusterCodec().fit(job(matrix), clusters=64, kind="float16"), matrix)
    assert error(SparseCodec(name).fit(job(matrix), **SMALL | {"values": values}), matrix) < nearest


def test_clusters_beat_the_mean():
    matrix = clustered()
    trivial = float(((matrix - matrix.mean(0)) ** 2).sum() / (matrix**2).sum())
    assert error(ClusterCodec().fit(job(matrix), clusters=60, kind="int8"), matrix) < 0.25 * trivial


def test_pursuit_finds_planted_codes():
    generator = np.random.default_rng(1)
    atoms = generator.standard_normal((64, 48)).astype(np.float32)
    atoms *= generator.uniform(0.2, 5, (64, 1)).astype(np.float32)
    chosen = np.argsort(generator.random((300, 64)), axis=1)[:, :3].astype(np.int32)
    values = (generator.choice([-1, 1], (300, 3)) * generator.uniform(1, 2, (300, 3))).astype(
        np.float32
    )
    values /= np.linalg.norm(atoms[chosen], axis=2)
    found, got = SparseCoder(atoms, 3, "ksvd")(decode(chosen, values, atoms))
    same = np.sort(found, axis=1) == np.sort(chosen, axis=1)
    assert same.all(axis=1).mean() > 0.97  # greedy choices may err where atoms are alike
    right = same.all(axis=1)
    order, given = np.argsort(found, axis=1), np.argsort(chosen, axis=1)
    np.testing.assert_allclose(
        np.take_along_axis(got, order, 1)[right],
        np.take_along_axis(values, given, 1)[right],
        rtol=2e-3,
        atol=1e-4,
    )


def test_pursuit_is_that_of_the_definition():
    rows, atoms = clustered(40, 12), clustered(30, 12, seed=5)
    found, values = SparseCoder(atoms, 5, "ksvd")(rows)
    for row, picked, given in zip(rows.astype(np.float64), found, values, strict=True):
        left, taken = row, []
        for _ in range(5):
            match = np.abs(atoms @ left) / np.linalg.norm(atoms, axis=1)
            match[taken] = -1
            taken.append(int(match.argmax()))
            best = np.linalg.lstsq(atoms[taken].T.astype(np.float64), row, rcond=None)[0]
            left = row - best @ atoms[taken]
        assert picked.tolist() == taken
        np.testing.assert_allclose(given @ atoms[picked], best @ atoms[taken], atol=2e-3)


def test_values_of_chosen_anchors_are_the_best_not_negative_ones():
    from scipy.optimize import nnls

    rows, atoms = clustered(60, 12), clustered(30, 12, seed=5)
    found, values = SparseCoder(atoms, 5, "anchors")(rows)
    for row, picked, given in zip(rows, found, values, strict=True):
        least = nnls(atoms[picked].T.astype(np.float64), row.astype(np.float64))[1]
        assert np.linalg.norm(row - given @ atoms[picked]) < 1.01 * least + 1e-3


@pytest.mark.parametrize("values", ["int8", "int4", "float16"])
def test_values_of_anchors_are_not_negative(values):
    band = SparseCodec("anchors").fit(job(clustered()), **SMALL | {"values": values}).bands()[0]
    stored = band.fetch(np.arange(1500), np.arange(1500))[1]
    assert stored.min() >= 0
    assert stored.max() > 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("codes", [4, 24])
def test_no_atom_comes_twice(name, codes):
    matrix = clustered()
    matrix[:3] = 0
    band = SparseCodec(name).fit(job(matrix), **SMALL | {"codes": codes}).bands()[0]
    indices = np.sort(band.fetch(np.arange(1500), np.arange(1500))[0], axis=1)
    assert (np.diff(indices, axis=1) > 0).all()


@pytest.mark.parametrize("how", ["ksvd", "anchors"])
def test_more_codes_are_never_worse(how):
    rows, atoms = clustered(), clustered(64, seed=3)
    lost = []
    for codes in range(1, 25):
        left = rows - decode(*SparseCoder(atoms, codes, how)(rows), atoms)
        lost.append(np.einsum("nd,nd->n", left, left))
    assert (np.diff([row.sum() for row in lost]) <= 1e-3 * lost[0].sum()).all()
    if how == "ksvd":
        assert (np.diff(lost, axis=0) <= 1e-2).all()
        assert lost[-1].max() < 1e-2  # more atoms than columns


@pytest.mark.parametrize("name", NAMES)
def test_more_codes_lower_the_error_of_a_fit(name):
    errors = [
        error(SparseCodec(name).fit(job(clustered()), **SMALL | {"codes": codes}), clustered())
        for codes in (1, 3, 8)
    ]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("method", [*map(SparseCodec, NAMES), ClusterCodec()], ids=lambda m: m.name)
def test_refining_lowers_the_weighted_error(method):
    matrix = clustered()
    weights = np.random.default_rng(2).pareto(1.5, len(matrix)).astype(np.float32) + 0.1
    settings = {"clusters": 64, "kind": "int8"} if method.name == "clusters" else SMALL
    fit = method.fit(job(matrix, weights), **settings)
    before = error(fit, matrix, weights)
    fit.refine(5)
    assert fit.refinable
    assert error(fit, matrix, weights) <= 1.002 * before
    assert packed(fit, 20).nbytes == method.size(1500, 20, **settings)


@pytest.mark.parametrize("method", [*map(SparseCodec, NAMES), ClusterCodec()], ids=lambda m: m.name)
def test_importance_moves_the_error_to_rows_that_count_less(method):
    matrix = clustered(centres=200)
    weights = np.where(np.arange(1500) < 150, 100, 1).astype(np.float32)
    settings = {"clusters": 64, "kind": "int8"} if method.name == "clusters" else SMALL
    lost = []
    for importance in (None, weights):
        fit = method.fit(job(matrix, importance), **settings)
        fit.refine(3)
        lost.append(error(fit, matrix, weights))
    assert lost[1] < 0.9 * lost[0]


def test_rounding_with_the_others_in_view_beats_rounding_each_value():
    rows, atoms = clustered(), clustered(64, seed=3)
    coder = SparseCoder(atoms, 6, "ksvd")
    chosen, values = coder(rows)
    levels = sparse.ValueLevels.fit(values, "int4")
    plain = levels.decode(levels.encode(values))
    together = coder.round(rows, chosen, values, levels)
    assert np.isin(together, levels.table).all()
    lost = [((rows - decode(chosen, v, atoms)) ** 2).sum() for v in (values, together, plain)]
    assert lost[0] <= lost[1] < lost[2]


def test_what_is_learnt_on_a_sample_codes_all_rows():
    matrix = clustered()
    whole = [error(SparseCodec(name).fit(job(matrix), **SMALL), matrix) for name in NAMES]
    whole.append(error(ClusterCodec().fit(job(matrix), clusters=32, kind="int8"), matrix))
    told = []
    for name, known in zip(NAMES, whole[:4], strict=True):
        work = replace(job(matrix), training_rows=700)
        work.progress = lambda what, share: told.append((what, share))
        assert error(SparseCodec(name).fit(work, **SMALL), matrix) < 1.5 * known
    assert ("coding", 0.0) in told
    assert (
        error(
            ClusterCodec().fit(replace(job(matrix), training_rows=700), clusters=32, kind="int8"),
            matrix,
        )
        < 1.5 * whole[4]
    )


def test_equal_rows_have_equal_clusters():
    matrix = clustered(400)
    matrix = np.concatenate([matrix, matrix[::-1]])
    fit = ClusterCodec().fit(job(matrix), clusters=50, kind="float16")
    for _ in range(2):
        band = fit.bands()[0]
        found = band.fetch(np.arange(800), np.arange(800))[0][:, 0]
        np.testing.assert_array_equal(found[:400], found[:399:-1])
        fit.refine(2)


@pytest.mark.parametrize("method", [*map(SparseCodec, NAMES), ClusterCodec()], ids=lambda m: m.name)
def test_hard_matrices(method):
    settings = (
        {"clusters": 16, "kind": "int8"} if method.name == "clusters" else SMALL | {"anchors": 16}
    )
    alike = np.repeat(clustered(3, 8), 40, axis=0)
    for matrix in (
        np.zeros((100, 8), np.float32),
        np.full((100, 8), 3, np.float32),
        alike,
        alike * 1e4,
        clustered(100, 1),
    ):
        fit = method.fit(
            job(matrix),
            **settings | ({"codes": 1} if matrix.shape[1] == 1 and "codes" in settings else {}),
        )
        fit.refine(2)
        rows = packed(fit, matrix.shape[1]).block(0, len(matrix))
        assert np.isfinite(rows).all()
        assert (
            np.abs(rows - matrix).max() <= 0.02 * np.abs(matrix).max() + 1e-6
            or matrix.shape[1] == 1
        )


@pytest.mark.parametrize("method", [*map(SparseCodec, NAMES), ClusterCodec()], ids=lambda m: m.name)
def test_saved_and_loaded(method, tmp_path):
    matrix = clustered()
    settings = {"clusters": 64, "kind": "int8"} if method.name == "clusters" else SMALL
    table = packed(method.fit(job(matrix), **settings), 20)
    fb.save(table, tmp_path / "t.feather")
    loaded = fb.load(tmp_path / "t.feather")
    np.testing.assert_array_equal(loaded[np.arange(1500)], table[np.arange(1500)])
    assert loaded.nbytes == table.nbytes


def test_the_published_setting_on_glove(data):
    path = data / "glove" / "glove.6B.50d.top60k.npz"
    if not path.is_file():
        pytest.skip("no GloVe in the data folder")
    matrix = np.load(path)["vectors"][:5000].astype(np.float32)
    settings = {"anchors": 500, "codes": 10, "values": "int8", "kind": "float16"}
    found = {name: error(SparseCodec(name).fit(job(matrix), **settings), matrix) for name in NAMES}
    for name, most in {"ksvd": 0.025, "hash": 0.165, "hash+ksvd": 0.028, "anchors": 0.036}.items():
        assert found[name] < most, found
