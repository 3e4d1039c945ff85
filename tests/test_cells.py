"""Cells of packed tables: equal to torch, stored and read back, searched, refused where they do not fit."""

import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import featherbed as fb
from featherbed.cli import app
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
from featherbed.packed.cells import KINDS, Cell
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable

STORED = ("float32", "float16", "int8")
ATOMS, ATOM = 6, 4  # atoms of a code, and their width


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def make_cell(kind, rng, atom=ATOM, width=5, stored="float32"):
    """A cell of numbers drawn from ``rng``; a recurrent one is as wide as its atoms."""
    width = atom if kind == "recurrent" else width
    rows, columns = (atom, width) if kind == "mlp" else (width, 4 * width)
    given = Matrix.encode(normal(rng, atom, columns), stored) if kind == "lstm" else None
    return Cell(
        kind, Matrix.encode(normal(rng, rows, columns), stored), normal(rng, columns), given
    )


def cell_band(kind, rows=40, stored="float32", seed=0):
    """A band of three codes a row: an mlp on sums with values, the others on atoms in order, recurrent ones in parts."""
    rng = np.random.default_rng(seed)
    parts = kind == "recurrent"
    values = normal(rng, rows, 3) if kind == "mlp" else None
    codes = Fixed.encode(rng.integers(0, ATOMS, (rows, 3)), values, ATOMS, "float32", parts)
    atoms = Matrix.encode(normal(rng, ATOMS * (3 if parts else 1), ATOM), "float32")
    cell = make_cell(kind, rng, stored=stored)
    affine = Affine(Matrix.encode(normal(rng, cell.width, 3), stored), normal(rng, 3))
    return Band(rows, codes, None, atoms, "sum" if kind == "mlp" else "concat", cell, affine)


def cell_table(kind, rows=40, stored="float32", seed=0):
    return PackedTable([cell_band(kind, rows, stored, seed)], 3, made_by={"table": "test"})


# --- torch says the same -----------------------------------------------------------------------------------------------


def torch_cell(cell, atoms):
    """The cell in torch; atoms [B, s, a], or [B, a] for an mlp."""
    weight, bias = torch.from_numpy(cell.weight.dense().copy()), torch.from_numpy(cell.bias.copy())
    x = torch.from_numpy(atoms)
    with torch.no_grad():
        if cell.kind == "mlp":
            layer = nn.Linear(*weight.shape)
            layer.weight.copy_(weight.T)
            layer.bias.copy_(bias)
            return torch.relu(layer(x)).numpy()
        if cell.kind == "lstm":
            layer = nn.LSTM(atoms.shape[2], cell.width, batch_first=True)
            layer.weight_ih_l0.copy_(torch.from_numpy(cell.input.dense().copy()).T)
            layer.weight_hh_l0.copy_(weight.T)
            layer.bias_ih_l0.copy_(bias * 0.25)  # torch has two biases and adds them
            layer.bias_hh_l0.copy_(bias * 0.75)
            return layer(x)[0].mean(1).numpy()
        return recurrent(x, weight, bias).numpy()


def recurrent(x, weight, bias):
    """The supplement's formulas, gate by gate."""
    w = x.shape[2]
    h, m = torch.zeros(len(x), w), torch.zeros(len(x), w)
    states = []
    for j in range(x.shape[1]):
        a = x[:, j]
        t = torch.sigmoid(a + h @ weight[:, :w] + bias[:w])
        i = torch.sigmoid(a + h @ weight[:, w : 2 * w] + bias[w : 2 * w])
        o = torch.sigmoid(a + h @ weight[:, 2 * w : 3 * w] + bias[2 * w : 3 * w])
        m = t * m + i * torch.tanh(a + h @ weight[:, 3 * w :] + bias[3 * w :])
        h = o * torch.tanh(m)
        states.append(h)
    return torch.stack(states).mean(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_cells_equal_torch(kind, count):
    rng = np.random.default_rng(count)
    cell, atoms = make_cell(kind, rng), normal(rng, 30, count, ATOM) * 2
    atoms = atoms[:, 0] if kind == "mlp" else atoms
    found = cell(atoms.reshape(30, -1))
    assert found.dtype == np.float32
    assert found.shape == (30, cell.width)
    np.testing.assert_allclose(found, torch_cell(cell, atoms), rtol=1e-5, atol=1e-6)


def dense_rows(band):
    """The rows of a band of fixed codes by torch, from its parts alone."""
    everything = np.arange(band.rows)
    indices, values = band.codes.fetch(everything, band.atoms)
    atoms = band.dictionary.dense()[indices] * (1 if values is None else values[:, :, None])
    rows = torch_cell(band.cell, atoms.sum(1) if band.combine == "sum" else atoms)
    return rows @ band.affine.weight.dense() + band.affine.bias


def test_cells_stand_large_numbers():
    for kind in KINDS:
        cell = make_cell(kind, np.random.default_rng(0))
        with np.errstate(over="raise", invalid="raise"):
            assert np.isfinite(
                cell(np.full((2, ATOM), 1e6, np.float32) * np.array([[1], [-1]], np.float32))
            ).all()


# --- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_tables_with_cells_come_back(kind, stored, engine, tmp_path, monkeypatch):
    monkeypatch.setenv("FEATHERBED_KERNELS", engine)
    table = cell_table(kind, stored=stored)
    fb.save(table, tmp_path / "t", keys=[f"k{i}" for i in range(40)])
    again = fb.check(tmp_path / "t")
    np.testing.assert_array_equal(again[:], table[:])
    np.testing.assert_allclose(again[:], dense_rows(table.bands[0]), rtol=1e-4, atol=1e-5)
    found = again.bands[0].cell
    assert (found.kind, found.weight.kind, found.width) == (kind, stored, table.bands[0].cell.width)
    assert again[[]].shape == (0, 3)
    np.testing.assert_allclose(again["k7"], again[7], rtol=1e-6)
    again.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "t").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_scores_and_search_equal_the_dense_rows(kind, engine, tmp_path, monkeypatch):
    monkeypatch.setenv("FEATHERBED_KERNELS", engine)
    rng = np.random.default_rng(3)
    few = Band(
        5,
        Identity(),
        None,
        Matrix.encode(normal(rng, 5, 3), "float32"),
        members=Members.of(np.arange(2, 45, 9), 45),
    )
    PackedTable([few, cell_band(kind)], 3, padding_idx=7).save(tmp_path / "t")
    packed = fb.check(tmp_path / "t")
    rows = np.empty((45, 3), np.float32)
    rows[2:45:9] = few.dictionary.dense()
    rows[np.setdiff1d(np.arange(45), np.arange(2, 45, 9))] = dense_rows(packed.bands[1])
    rows[7] = 0
    queries = normal(rng, 4, 3)
    np.testing.assert_allclose(packed.logits(queries), queries @ rows.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(packed.logits(queries[0]), queries[0] @ rows.T, rtol=1e-4, atol=1e-5)
    ids, scores = packed.search(queries, 6)
    np.testing.assert_allclose(
        scores, -np.sort(-(queries @ rows.T), axis=1)[:, :6], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        np.take_along_axis(queries @ rows.T, ids, 1), scores, rtol=1e-4, atol=1e-5
    )
    lengths = np.linalg.norm(rows, axis=1)
    cosines = (
        queries @ rows.T / np.where(lengths, lengths, 1) / np.linalg.norm(queries, axis=1)[:, None]
    )
    scores = packed.search(queries, 6, metric="cosine")[1]
    np.testing.assert_allclose(scores, -np.sort(-cosines, axis=1)[:, :6], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        packed.bag([[2, 7, 9], [0, 1, 44]]),
        rows[[[2, 7, 9], [0, 1, 44]]].sum(1),
        rtol=1e-4,
        atol=1e-5,
    )


def test_cells_stand_on_every_layout_they_fit(tmp_path):
    rng = np.random.default_rng(4)
    ones = Fixed.encode(rng.integers(0, ATOMS, (9, 2)), None, ATOMS)
    row_of, indices = np.repeat(np.arange(9), 2), rng.integers(0, ATOMS, 18)
    ragged = Ragged.encode(9, row_of, indices, normal(rng, 18), ATOMS, "float32")
    values = Matrix.encode(normal(rng, 9, ATOMS), "float32")
    fits = [
        *((kind, ones, None, "concat") for kind in ("recurrent", "lstm")),
        *((kind, Hash(1, 3), None, "concat") for kind in ("recurrent", "lstm")),
        *((kind, Remainder(3), None, "concat") for kind in ("recurrent", "lstm")),
        ("lstm", Identity(), None, "concat"),
        *(("mlp", ones, None, combine) for combine in ("sum", "product", "concat")),
        ("mlp", ragged, None, "sum"),
        ("mlp", Every(), values, "sum"),
    ]
    for kind, codes, weights, combine in fits:
        atoms = Matrix.encode(
            normal(rng, 9 if isinstance(codes, Identity) else ATOMS, ATOM), "float32"
        )
        bare = Band(9, codes, weights, atoms, combine)
        cell = make_cell(kind, rng, ATOM * (2 if (kind, combine) == ("mlp", "concat") else 1))
        plus = Band(9, Identity(), None, Matrix.encode(normal(rng, 9, cell.width), "float16"))
        norms = Matrix.encode(normal(rng, 9, 1), "float32")
        band = Band(9, codes, weights, atoms, combine, cell, Affine(norms=norms), plus=plus)
        PackedTable([band], cell.width).save(tmp_path / "t")
        ids = np.arange(9)
        expected = (cell(bare.own_rows(ids, ids)) + plus.dictionary.dense()) * norms.dense()
        packed = fb.check(tmp_path / "t")
        np.testing.assert_allclose(packed[:], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            packed.logits(np.ones(cell.width)), expected.sum(1), rtol=1e-4, atol=1e-5
        )


def test_inspect_names_the_cell(tmp_path):
    for kind, shape in (("mlp", "4 x 5"), ("recurrent", "4 x 16"), ("lstm", "5 x 20")):
        cell_table(kind, stored="int8").save(tmp_path / "t")
        text = CliRunner().invoke(app, ["inspect", str(tmp_path / "t")]).output
        assert (
            f"cell {kind} to width {shape[-1] if kind == 'mlp' else shape[0]}, weight {shape} in int8"
            in text
        )
        found = json.loads(
            CliRunner().invoke(app, ["inspect", str(tmp_path / "t"), "--json"]).output
        )
        assert found["bands"][0]["cell"]["kind"] == kind
        assert sum(found["parts"].values()) == (tmp_path / "t").stat().st_size
    fb.save(fb.DenseTable(3, 2), tmp_path / "t")
    assert "  cell" not in CliRunner().invoke(app, ["inspect", str(tmp_path / "t")]).output


def test_cells_need_no_torch(tmp_path):
    for kind in KINDS:
        cell_table(kind, stored="float16").save(tmp_path / f"{kind}.safetensors")
    code = (
        "import sys, pathlib; sys.modules['torch'] = None\nimport featherbed as fb\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).glob('*.safetensors')):\n"
        "    table = fb.check(path); print(path.stem, *table[3].tolist(), table.search(table[3], 1)[0][0])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[0] for line in shown.splitlines()] == sorted(KINDS)
    for line in shown.splitlines():
        kind, *numbers, best = line.split()
        table = cell_table(kind, stored="float16")
        np.testing.assert_allclose([float(n) for n in numbers], table[3], rtol=1e-5, atol=1e-6)
        assert int(best) == int(np.argmax(table[:] @ table[3]))


# --- what does not fit -------------------------------------------------------------------------------------------------


def test_cells_that_do_not_fit_are_not_written(tmp_path):
    def refuse(kind, named, change):
        band = cell_band(kind)
        change(band)
        with pytest.raises(fb.ArgumentError, match=f"cannot be stored: .*{named}"):
            PackedTable([band], 3).save(tmp_path / "t")
        assert not (tmp_path / "t").exists()

    wide = Matrix.encode(np.zeros((ATOM + 1, 24), np.float32), "float32")
    for kind in KINDS:
        refuse(kind, "found", lambda band: setattr(band.cell, "weight", wide))
        refuse(kind, "F32", lambda band: setattr(band.cell, "bias", np.zeros(3, np.float32)))
        refuse(kind, "kind must be one of", lambda band: setattr(band.cell, "kind", "gru"))
    for kind in ("mlp", "recurrent"):
        refuse(kind, "only an lstm has an input", lambda band: setattr(band.cell, "input", wide))
    refuse("lstm", "input null", lambda band: setattr(band.cell, "input", None))
    refuse("lstm", r"an input \[5, 24\]", lambda band: setattr(band.cell, "input", wide))
    for kind in ("recurrent", "lstm"):
        refuse(
            kind, "found fixed codes combined by sum", lambda band: setattr(band, "combine", "sum")
        )


def test_few_bytes_cannot_make_a_cell_hold_much(tmp_path, monkeypatch):
    """One atom, chosen again and again by codes of no bits: what is held for a row is bounded by the format."""
    monkeypatch.setenv("FEATHERBED_KERNELS", "numpy")
    rng = np.random.default_rng(5)

    def table(count, atom, width):
        rows = 20 if count > 3 else 2000  # more would take more work than so few bytes may ask for
        codes = Fixed.encode(np.zeros((rows, count), np.int64), None, 1)
        cell = make_cell("lstm", rng, atom, width, "int2")
        return PackedTable(
            [Band(rows, codes, None, Matrix.encode(normal(rng, 1, atom), "int2"), "concat", cell)],
            width,
        )

    with pytest.raises(fb.ArgumentError, match="4096 atoms of width 257"):
        table(4096, 257, 1).save(tmp_path / "t")
    for count, atom, width in ((4096, 256, 2), (16, 2**16, 1), (3, 1, 700)):
        packed = table(count, atom, width)
        packed.save(tmp_path / "t")
        packed = fb.load(tmp_path / "t")
        tracemalloc.start()
        assert packed[:].shape[1] == width
        assert tracemalloc.get_traced_memory()[1] < 150e6
        tracemalloc.stop()
