"""Matrices of very small, very large and mixed numbers: compressed as well as at scale 1, or refused by name."""

import numpy as np
import pytest

import featherbed as fb

for package in ("faiss", "scipy"):
    pytest.importorskip(package, reason="compression: pip install featherbed[compress]")

RNG = np.random.default_rng(0)
ROWS, DIM = 600, 16
MATRIX = RNG.standard_normal((8, DIM))[RNG.integers(0, 8, ROWS)]
MATRIX = (MATRIX + 0.4 * RNG.standard_normal((ROWS, DIM))).astype(np.float32)
CODECS = (
    "int8",
    "int4",
    "int2",
    "lowrank:rank=8",
    "pq:parts=4,bits=4",
    "opq:parts=4,bits=4",
    "rq:codes=2,bits=4",
    "lsq:codes=2,bits=4",
    "layered:codes=2,bits=4,blocks=2,block_bits=4",
    "kd:parts=2,bits=4",
    "kd:parts=2,bits=4,composer=mlp",
    "ksvd:anchors=16,codes=2",
    "hash:anchors=16,codes=2",
    "hash+ksvd:anchors=16,codes=2",
    "anchors:anchors=16,codes=2",
    "clusters:clusters=16",
    "pq+norms:parts=4,bits=4",
    "layered+norms:codes=2,bits=4,blocks=0",
    "hot+opq:parts=4,bits=4",
)


def compress(matrix, method, **settings):
    weights = "zipf" if method.startswith("hot") else None
    settings = {"ratio": 2, "measure": "error"} | settings
    return fb.compress(matrix, method=method, weights=weights, **settings)


def error(table, matrix):
    exact = matrix.astype(np.float64)
    return float(((table[:] - exact) ** 2).sum() / (exact**2).sum())


@pytest.fixture(scope="module")
def plain():
    """Return the error of every method at scale 1, computed once."""
    found = {}

    def of(method):
        if method not in found:
            found[method] = error(compress(MATRIX, method), MATRIX)
        return found[method]

    return of


@pytest.mark.parametrize("method", CODECS)
def test_small_numbers_are_compressed_as_well_as_others(method, plain):
    matrix = (MATRIX * np.float64(1e-20)).astype(np.float32)
    table = compress(matrix, method)
    assert np.isfinite(table[:]).all()
    assert error(table, matrix) < 2 * plain(method) + 1e-3
    reported = table.report.quality["error"]
    assert reported == pytest.approx(error(table, matrix), rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("scale", [1e-35, 1e-30, 1e6, 1e13])
@pytest.mark.parametrize("method", ["int8", "lowrank:rank=8", "opq:parts=4,bits=4"])
def test_numbers_of_any_size(method, scale, plain):
    matrix = (MATRIX * np.float64(scale)).astype(np.float32)
    assert error(compress(matrix, method, measure="recall"), matrix) < 2 * plain(method) + 1e-3


@pytest.mark.parametrize("method", CODECS)
def test_one_large_row_among_small_ones(method):
    matrix = MATRIX * np.float32(1e-6)
    matrix[7] = MATRIX[7] * np.float32(1e6)
    table = compress(matrix, method)
    assert np.isfinite(table[:]).all()
    assert error(table, matrix) < 0.5


@pytest.mark.parametrize("measure", ["recall", "error"])
def test_rows_of_every_size(measure):
    matrix = (MATRIX * 10.0 ** np.linspace(-12, 12, ROWS)[:, None]).astype(np.float32)
    table = compress(matrix, "int4", measure=measure)
    sizes = np.linalg.norm(matrix.astype(np.float64), axis=1)
    apart = np.linalg.norm(table[:] - matrix.astype(np.float64), axis=1)
    assert np.median(apart / sizes) < 0.2, "every row has a scale of its own"


@pytest.mark.parametrize("scale", [1e20, 1e30])
@pytest.mark.parametrize("method", ["int8", "lowrank", "auto"])
def test_numbers_too_large_to_compute_with_are_refused(method, scale):
    matrix = (MATRIX * np.float64(scale)).astype(np.float32)
    with pytest.raises(fb.DataError, match="scale the matrix down"):
        fb.compress(matrix, ratio=2, method=method)


def test_tables_of_small_numbers_are_searched_and_saved(tmp_path):
    matrix = (MATRIX * np.float64(1e-15)).astype(np.float32)
    table = compress(matrix, "opq:parts=4,bits=4", keys=map(str, range(ROWS)))
    table.save(tmp_path / "t")
    again = fb.check(tmp_path / "t")
    assert np.array_equal(again[:], table[:])
    assert again["7"].shape == (DIM,)
    assert table.nbytes <= MATRIX.nbytes / 2
