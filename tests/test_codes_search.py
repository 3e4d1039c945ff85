"""Scores through codes, the best rows without sorting them all, and search on the codes themselves, against brute force."""

from dataclasses import replace

import numpy as np
import pytest

import featherbed as fb
from featherbed.packed import search
from featherbed.packed.band import Affine, Band, Every, Fixed, Identity, Members, Ragged
from featherbed.packed.cells import Cell
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable

RNG = np.random.default_rng(3)
V, S, K, W = 900, 6, 5, 2  # few choices: many ties


def matrix(rows, columns, kind="float32"):
    return Matrix.encode(RNG.normal(size=(rows, columns)), kind)


def coded(choices=K, count=S, parts=True, padding=None, rows=V, atoms=None):
    codes = Fixed.encode(RNG.integers(choices, size=(rows, count)), None, choices, parts=parts)
    atoms = (
        matrix(choices * (count if parts else 1), W)
        if atoms is None
        else Matrix.encode(atoms, "float32")
    )
    return PackedTable([Band(rows, codes, None, atoms, "concat")], count * W, padding_idx=padding)


def two_bands(padding=None):
    codes = RNG.integers(K, size=(V, S))
    hot = np.sort(RNG.permutation(V)[:300])
    cold = np.setdiff1d(np.arange(V), hot)
    bands = [
        Band(
            len(own),
            Fixed.encode(codes[own], None, K, parts=True),
            None,
            matrix(S * K, W),
            "concat",
            members=members,
        )
        for own, members in ((hot, Members.of(hot, V)), (cold, None))
    ]
    return PackedTable(bands, S * W, padding_idx=padding), codes


@pytest.fixture(params=["numpy", "numba"])
def engine(request, monkeypatch):
    monkeypatch.setenv("FEATHERBED_KERNELS", request.param)
    return request.param


def best(scores, k):
    """The oracle: sort everything, ties by the smaller id, what is not a number last."""
    low = np.where(np.isnan(scores), -np.inf, scores)
    order = np.argsort(-low, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(low, order, 1)


@pytest.fixture(params=[None, 64])
def short_blocks(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(search, "BLOCK_ROWS", request.param)


@pytest.mark.parametrize("k", [1, 7, V - 1, V, 3 * V])
@pytest.mark.parametrize("metric", ["dot", "cosine"])
@pytest.mark.parametrize("padding", [None, 5])
def test_search_equals_sorting_all_scores(k, metric, padding, engine, short_blocks):
    packed = coded(
        padding=padding, atoms=RNG.integers(-1, 2, size=(S * K, W))
    )  # small whole numbers: many ties
    queries = RNG.integers(-2, 3, size=(4, S * W)).astype(np.float32)
    queries[3] = 0  # every score is a tie
    for asked in (
        queries,
        queries[1:2],
    ):  # the products behind the scores of one query and of four may round otherwise
        scores = packed.logits(asked)
        if metric == "cosine":
            scale = np.sqrt(np.einsum("nd,nd->n", asked, asked))[:, None]
            scores = packed.logits(asked / np.where(scale == 0, 1, scale)) / search.norms(packed)
        ids, found = packed.search(asked, k, metric=metric)
        expected = best(scores, k)
        np.testing.assert_array_equal(ids, expected[0])
        np.testing.assert_array_equal(found, expected[1])
    one = packed.search(queries[1], k, metric=metric)
    np.testing.assert_array_equal(one[0], ids[0])
    np.testing.assert_array_equal(one[1], found[0])
    assert packed.search(queries[:0], k, metric=metric)[0].shape == (0, min(k, V))


@pytest.mark.parametrize("k", [1, 20, 899, 2000])
def test_search_over_rows_that_are_not_numbers(k, engine, short_blocks):
    rows = RNG.integers(-2, 3, size=(V, 3)).astype(np.float32)
    rows[::7] = np.nan
    rows[:70] = np.nan  # the whole first block
    rows[100], rows[300] = np.inf, -np.inf
    packed = PackedTable([Band(V, Identity(), dictionary=Matrix.encode(rows, "float32"))], 3)
    queries = np.array([[1, 2, 3], [1, 1, 1]], dtype=np.float32)
    with np.errstate(invalid="ignore"):
        expected = best(packed.logits(queries), k)
        ids, scores = packed.search(queries, k)
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_array_equal(scores, expected[1])


def test_many_queries_and_rising_scores(engine):
    rows = (
        np.arange(40_000, dtype=np.float32)[:, None] // 3
    )  # every block holds better rows than those before
    packed = PackedTable(
        [Band(len(rows), Identity(), dictionary=Matrix.encode(rows, "float32"))], 1
    )
    ids, _ = packed.search(np.array([[1.0], [-1.0]] * 100), 4)
    assert ids[0].tolist() == [39999, 39996, 39997, 39998]
    assert ids[1].tolist() == [0, 1, 2, 3]
    assert (ids[::2] == ids[0]).all()


def layers():
    """Bands that score through codes, and bands that must not."""
    turn = Affine(matrix(S * W, 11), RNG.normal(size=11).astype(np.float32))
    own = Fixed.encode(RNG.integers(K, size=(V, 4)), None, K, parts=True)
    blocks = Band(
        V, Fixed.encode(RNG.integers(9, size=(V, S)), None, 9), None, matrix(9, W, "int8"), "concat"
    )
    row_of = np.repeat(np.arange(V), 2)
    ragged = Ragged.encode(
        V, row_of, RNG.integers(K, size=2 * V), RNG.normal(size=2 * V), K, "int8"
    )
    weighted = Fixed.encode(RNG.integers(K, size=(V, S)), RNG.normal(size=(V, S)), K, "float16")
    norms = Matrix.encode(RNG.random((V, 1)) + 0.5, "float16")
    cell = Cell("mlp", matrix(S * W, S * W), np.zeros(S * W, np.float32))
    through = {
        "blocks": blocks,
        "layered": Band(V, own, None, matrix(4 * K, S * W), affine=turn, plus=blocks),
        "layered with lengths": Band(
            V, own, None, matrix(4 * K, S * W), affine=replace(turn, norms=norms), plus=blocks
        ),
        "ragged and blocks": Band(V, ragged, None, matrix(K, S * W), plus=blocks),
        "weighted blocks": Band(
            V, weighted, None, matrix(K, W), "concat", affine=Affine(norms=norms)
        ),
    }
    through["three layers"] = Band(
        V,
        own,
        None,
        matrix(4 * K, S * W),
        plus=through["ragged and blocks"],
        affine=Affine(norms=norms),
    )
    celled = Band(V, blocks.codes, None, blocks.dictionary, "concat", cell=cell)
    rows = {
        "a cell": celled,
        "a cell below": Band(V, own, None, matrix(4 * K, S * W), plus=celled),
        "product": Band(V, own, None, matrix(4 * K, S * W), "product"),
        "rows below": Band(
            V, own, None, matrix(4 * K, S * W), plus=Band(V, Every(), matrix(V, S * W, "int8"))
        ),
    }
    return [(name, band, True) for name, band in through.items()] + [
        (name, band, False) for name, band in rows.items()
    ]


@pytest.mark.parametrize(
    ("name", "band", "coded_"), layers(), ids=lambda x: x if isinstance(x, str) else ""
)
def test_layers_score_as_their_rows_do(name, band, coded_, engine, monkeypatch):
    dim = 11 if band.affine and band.affine.weight else S * W
    packed = PackedTable([band], dim, padding_idx=7)
    queries = RNG.normal(size=(3, dim)).astype(np.float32)
    expected = queries @ packed[:].T
    scorer = search.Scorer(band, queries)
    assert scorer.compiled == coded_
    if coded_:  # then no row may be composed
        monkeypatch.setattr(Band, "own_rows", lambda *_: pytest.fail("rows were composed"))
    np.testing.assert_allclose(packed.logits(queries), expected, rtol=1e-4, atol=1e-4)
    ids, scores = packed.search(queries, 12)
    np.testing.assert_allclose(scores, best(expected, 12)[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(expected, ids, 1), scores, rtol=1e-4, atol=1e-4)


# codes


SHAPES = {
    "bytes": {"choices": 256, "count": 16},
    "bytes and more": {"choices": 256, "count": 11},
    "bytes shared": {"choices": 200, "count": 8, "parts": False},
    "three bits": {},
    "nine bits": {"choices": 300, "count": 3},
    "one choice": {"choices": 1, "count": 2},
}


def stored(packed):
    codes, band = packed.bands[0].codes, packed.bands[0]
    indices, _ = codes.fetch(np.arange(len(packed)), band.atoms)
    return indices - np.arange(codes.count) * codes.stride(band.atoms)


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_of_rows(shape, engine):
    packed = coded(**SHAPES[shape])
    codes = stored(packed)
    ids = RNG.integers(V, size=(7, 9))
    assert packed.codes_of(ids).dtype == np.int64
    np.testing.assert_array_equal(packed.codes_of(ids), codes[ids])
    np.testing.assert_array_equal(packed.codes_of(3), codes[3])
    assert packed.codes_of([]).shape == (0, codes.shape[1])
    packed._chunk = 10
    np.testing.assert_array_equal(packed.codes_of(ids), codes[ids])
    with pytest.raises(fb.IdError, match="900"):
        packed.codes_of(V)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_with_a_prefix(shape, engine):
    packed = coded(**SHAPES[shape])
    codes = stored(packed)
    for j in range(codes.shape[1] + 1):
        prefix = codes[17, :j]
        np.testing.assert_array_equal(
            packed.rows_with(prefix), np.flatnonzero((codes[:, :j] == prefix).all(1))
        )
    padded = PackedTable(packed.bands, packed.dim, padding_idx=17)
    assert 17 not in padded.rows_with(codes[17])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("k", [1, 10, V + 5])
def test_hamming_search(shape, padding, k, engine, short_blocks):
    packed = coded(**SHAPES[shape], padding=padding)
    codes = stored(packed)
    wanted = codes[[3, 4, 80]].copy()
    wanted[2, 0] = 0
    distances = (codes[None] != wanted[:, None]).sum(-1)
    order = np.argsort(distances, axis=1, kind="stable")
    if padding is not None:
        order = np.stack([row[row != padding] for row in order])
    ids, found = packed.near_codes(wanted, k)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(ids, order[:, :k])
    np.testing.assert_array_equal(found, np.take_along_axis(distances, order[:, :k], 1))
    np.testing.assert_array_equal(packed.near_codes(wanted[1], k)[0], order[1, :k])


def test_codes_with_values_and_layers(engine):
    codes = RNG.integers(K, size=(V, S))
    weighted = Fixed.encode(codes, RNG.normal(size=(V, S)), K, "int8")
    below = Band(
        V, Fixed.encode(RNG.integers(9, size=(V, 3)), None, 9), None, matrix(9, 2), "concat"
    )
    packed = PackedTable([Band(V, weighted, None, matrix(K, 6), plus=below)], 6)
    np.testing.assert_array_equal(packed.codes_of(np.arange(V)), codes)
    ids, distances = packed.near_codes(codes[5], 30)
    expected = (codes != codes[5]).sum(1)
    np.testing.assert_array_equal(ids, np.argsort(expected, kind="stable")[:30])
    np.testing.assert_array_equal(distances, np.sort(expected)[:30])


@pytest.mark.parametrize("padding", [None, 4])
def test_codes_of_several_bands(padding, engine):
    packed, codes = two_bands(padding)
    np.testing.assert_array_equal(packed.codes_of(np.arange(V)), codes)
    others = np.arange(V) if padding is None else np.delete(np.arange(V), padding)
    np.testing.assert_array_equal(
        packed.rows_with(codes[8, :2]), others[(codes[others, :2] == codes[8, :2]).all(1)]
    )
    ids, distances = packed.near_codes(codes[[8, 9]], 25)
    for row, own in enumerate((8, 9)):
        expected = (codes[others] != codes[own]).sum(1)
        np.testing.assert_array_equal(ids[row], others[np.argsort(expected, kind="stable")[:25]])
        np.testing.assert_array_equal(distances[row], np.sort(expected)[:25])


@pytest.mark.parametrize("metric", ["dot", "cosine"])
@pytest.mark.parametrize("padding", [None, 4])
def test_recall_of_codes(metric, padding, engine):
    packed = coded(choices=3, padding=padding)
    own, shares = np.array([0, 9, 40, 41]), []
    for id_ in own:
        left_out = [id_] if padding is None else [id_, padding]
        exact = packed.search(packed[id_], V, metric=metric)[0]
        close = packed.near_codes(packed.codes_of(id_), V)[0]
        first, second = (row[~np.isin(row, left_out)][:6] for row in (exact, close))
        shares.append(len(set(first) & set(second)) / 6)
    assert packed.code_recall(own, k=6, metric=metric) == pytest.approx(np.mean(shares))
    assert packed.code_recall(own, k=2 * V, metric=metric) == 1


def test_keys_name_rows_here_too(tmp_path):
    packed = coded(rows=20)
    fb.save(packed, tmp_path / "t.safetensors", keys=[f"k{i}" for i in range(20)])
    loaded = fb.load(tmp_path / "t.safetensors")
    np.testing.assert_array_equal(loaded.codes_of(["k3", "k4"]), packed.codes_of([3, 4]))
    assert loaded.code_recall(["k3"], 4) == packed.code_recall([3], 4)


def test_what_has_no_codes_says_so():
    dense = PackedTable([Band(4, Identity(), dictionary=matrix(4, 2))], 2)
    calls = [
        lambda: dense.codes_of(0),
        lambda: dense.rows_with([0]),
        lambda: dense.near_codes([0]),
        lambda: dense.code_recall([0]),
    ]
    for call in calls:
        with pytest.raises(fb.ArgumentError, match=r"identity.*'fixed'"):
            call()
    bands = [
        Band(
            2,
            Fixed.encode(np.zeros((2, 3), int), None, 2),
            None,
            matrix(2, 2),
            members=Members.of(np.array([0, 1]), 4),
        ),
        Band(2, Fixed.encode(np.zeros((2, 2), int), None, 2), None, matrix(2, 2)),
    ]
    with pytest.raises(fb.ArgumentError, match="2 and 3 codes"):
        PackedTable(bands, 2).codes_of(0)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda packed: packed.near_codes([0, 1]), r"takes \[6\] or \[n, 6\]"),
        (lambda packed: packed.near_codes([[[0] * 6]]), r"takes \[6\] or \[n, 6\]"),
        (lambda packed: packed.near_codes([0] * 7), "a row of this table has 6"),
        (lambda packed: packed.near_codes([0] * 5 + [5]), "0 to 4"),
        (lambda packed: packed.near_codes([0] * 5 + [-1]), "code -1"),
        (lambda packed: packed.near_codes([0.5] * 6), "integers"),
        (lambda packed: packed.near_codes([0] * 6, 0), "k=0"),
        (lambda packed: packed.rows_with(0), "a row of this table has 6"),
        (lambda packed: packed.rows_with([[0]]), r"\[j\]"),
        (lambda packed: packed.code_recall([]), "at least one id"),
        (lambda packed: packed.code_recall([0], metric="l2"), "dot or cosine"),
    ],
)
def test_bad_codes_are_refused(call, named):
    with pytest.raises(fb.ArgumentError, match=named):
        call(coded())
