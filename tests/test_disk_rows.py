"""Rows from disk: those of ``fb.load`` for every layout, read ahead or not, from threads and processes, in little memory."""

import copy
import gc
import os
import pickle
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import featherbed as fb
from featherbed.interop.disk import DiskRows
from featherbed.packed import disk
from featherbed.packed.band import Band, Every, Fixed, Ragged
from featherbed.packed.disk import RowFile, open_rows
from featherbed.packed.matrix import Graded, Matrix
from featherbed.packed.table import PackedTable
from test_kernels import LAYOUTS, V, table

RNG = np.random.default_rng(0)
FOLDER = Path(__file__).parent


@pytest.fixture
def path(tmp_path):
    """A file of 700 rows of ten int4 levels."""
    path = tmp_path / "rows.safetensors"
    table("int4 by row", padding=11).save(path)
    return path


def saved(packed, folder):
    packed.save(folder / "t.safetensors")
    return folder / "t.safetensors"


def batches():
    return [
        np.empty(0, dtype=np.int64),
        np.array([5]),
        np.array([V - 1, 0, 0, V - 1]),
        np.arange(V),
        RNG.integers(V, size=40),
        RNG.integers(V, size=3000).reshape(30, 100),
    ]


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_those_of_a_mapped_file(name, kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("FEATHERBED_KERNELS", kernels)
    path = saved(table(name, padding=11), tmp_path)
    mapped, rows = fb.load(path), open_rows(path)
    for ids in batches():
        np.testing.assert_array_equal(rows[ids], mapped[ids], strict=True)


def test_graded_rows(tmp_path):
    values = Graded.round(RNG.normal(size=(60, 3)), np.array([[3, 2, 1], [1, 0, 0]]), [20, 40])
    path = saved(PackedTable([Band(60, Every(), values)], 3), tmp_path)
    ids = RNG.integers(60, size=90)
    np.testing.assert_array_equal(open_rows(path)[ids], fb.load(path)[ids])


@pytest.mark.parametrize("name", ["fixed int3", "ragged int8", "bands", "float16 rows"])
def test_a_look_up_in_pieces(name, tmp_path, monkeypatch):
    """More rows than are composed at once, more reads than are announced at once, and nothing cached."""
    monkeypatch.setattr(disk, "WINDOW", 3)
    monkeypatch.setattr(RowFile, "_cached", lambda *_: 0)
    path = saved(table(name), tmp_path)
    mapped, rows = fb.load(path), open_rows(path)
    mapped._chunk = rows._chunk = 64
    ids = RNG.integers(V, size=500)
    np.testing.assert_array_equal(rows[ids], mapped[ids])


@pytest.mark.parametrize("name", ["int8 by row", "ragged int4"])
def test_a_system_that_can_neither_announce_nor_refuse_to_wait(name, tmp_path, monkeypatch):
    path = saved(table(name), tmp_path)
    for missing in ("posix_fadvise", "RWF_NOWAIT"):
        monkeypatch.delattr(os, missing, raising=False)
    ids = RNG.integers(V, size=50)
    np.testing.assert_array_equal(open_rows(path)[ids], fb.load(path)[ids])


def test_each_row_is_read_once_neighbours_together_in_the_order_of_the_file(tmp_path, monkeypatch):
    path = saved(table("float32 rows"), tmp_path)
    rows, seen = open_rows(path), []
    fill = RowFile._fill
    monkeypatch.setattr(
        RowFile, "_fill", lambda self, view, pieces: (seen.append(pieces), fill(self, view, pieces))
    )
    rows[[9, 3, 9, 4, 5, 600]]
    start = path.stat().st_size - V * 40
    assert seen == [[(start + 120, 0, 120), (start + 360, 120, 160), (start + 24000, 160, 200)]]


def test_module(path):
    rows, mapped = DiskRows(path), fb.load(path)
    ids = torch.from_numpy(RNG.integers(V, size=(4, 3, 7)))
    found = rows(ids)
    assert found.dtype == torch.float32 and found.shape == (4, 3, 7, 10) and not found.requires_grad
    np.testing.assert_array_equal(found, mapped[ids.numpy()])
    np.testing.assert_array_equal(rows(ids.to(torch.int32)), found)
    assert (rows.num_embeddings, rows.embedding_dim, rows.padding_idx) == (V, 10, 11)
    assert not rows(torch.tensor(11)).any() and rows(torch.tensor(12)).any()
    assert rows(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, 10)
    assert not list(rows.parameters()) and not rows.state_dict()
    assert repr(rows) == "DiskRows(700, 10, 'rows.safetensors')"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes(path, dtype):
    ids = torch.arange(50)
    rows = DiskRows(path, dtype=dtype)
    rows.prefetch(ids)
    for _ in range(2):
        assert torch.equal(rows(ids), DiskRows(path)(ids).to(dtype))


def test_prefetched_rows_are_waited_for_and_used_once(path, monkeypatch):
    rows, calls, go = DiskRows(path), [], threading.Event()
    read = rows._read

    def slow(ids):
        calls.append(threading.current_thread().name)
        if calls[-1] != threading.main_thread().name:
            assert go.wait(10)
        return read(ids)

    monkeypatch.setattr(rows, "_read", slow)
    ids, other = torch.tensor([[3, 11, 3]]), torch.tensor([4])
    rows.prefetch(ids)
    rows.prefetch(ids)
    np.testing.assert_array_equal(
        rows(other), fb.load(path)[[4]]
    )  # does not wait for what it did not ask for
    threading.Timer(0.05, go.set).start()
    np.testing.assert_array_equal(rows(ids), fb.load(path)[ids.numpy()])
    assert (
        len(calls) == 2
        and calls[0].startswith("featherbed-rows")
        and calls[1] == threading.main_thread().name
    )
    rows(ids)
    assert calls[2:] == [threading.main_thread().name]


def test_no_more_batches_are_held_than_asked_for(path):
    rows = DiskRows(path, ahead=2)
    for start in range(5):
        rows.prefetch(torch.arange(start, start + 3))
    assert len(rows._prefetcher._batches) == 2
    for start in range(5):
        np.testing.assert_array_equal(
            rows(torch.arange(start, start + 3)), fb.load(path)[start : start + 3]
        )
    assert not rows._prefetcher._batches


def test_many_threads(path):
    rows, expected = DiskRows(path), fb.load(path)[:]

    def one(number):
        ids = torch.from_numpy(np.random.default_rng(number).integers(V, size=(20, 30)))
        if number % 2:
            rows.prefetch(ids)
        return ids.numpy(), rows(ids).numpy()

    with ThreadPoolExecutor(8) as many:
        for ids, found in many.map(one, range(100)):
            np.testing.assert_array_equal(found, expected[ids])


def test_copies_open_the_file_again(path):
    rows = DiskRows(path, dtype=torch.bfloat16)
    rows.prefetch(torch.tensor([1]))
    written = pickle.dumps(rows)
    assert len(written) < 2000
    for other in (copy.deepcopy(rows), pickle.loads(written)):
        assert other.packed is not rows.packed and other.dtype == torch.bfloat16
        assert torch.equal(other(torch.arange(V)), rows(torch.arange(V)))
    path.unlink()
    assert torch.equal(
        rows(torch.tensor([1])), DiskRows.forward(rows, torch.tensor([1]))
    )  # an open file stays
    with pytest.raises(FileNotFoundError, match="no such file"):
        pickle.loads(written)


class Items(torch.utils.data.Dataset):
    """Rows as a data set, so that worker processes read them."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return 12

    def __getitem__(self, at):
        ids = torch.tensor([at, 2 * at])
        self.rows.prefetch(ids)
        return self.rows(ids)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_worker_processes(path):
    rows = DiskRows(path)
    rows.prefetch(
        torch.tensor([0, 0])
    )  # the parent's thread, and a batch that no child will ever be given
    loader = DataLoader(
        Items(rows), batch_size=12, num_workers=1, multiprocessing_context="fork", timeout=60
    )
    (found,) = loader
    np.testing.assert_array_equal(found, fb.load(path)[[[i, 2 * i] for i in range(12)]])


def test_a_closed_table_leaves_no_open_file(path):
    rows = DiskRows(path)
    rows.prefetch(torch.tensor([1]))
    rows(torch.tensor([1]))
    descriptor = rows.packed.bands[0].source.descriptor
    os.fstat(descriptor)
    del rows
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_bags(path):
    rows, mapped = DiskRows(path), fb.load(path)
    ids, weights = torch.from_numpy(RNG.integers(V, size=(5, 4))), torch.rand(5, 4)
    np.testing.assert_array_equal(rows.bag(ids, mode="mean"), mapped.bag(ids.numpy(), mode="mean"))
    expected = mapped.bag(ids.numpy(), per_sample_weights=weights.numpy())
    np.testing.assert_array_equal(rows.bag(ids, per_sample_weights=weights), expected)
    starts = torch.tensor([0, 3, 3])
    np.testing.assert_array_equal(
        rows.bag(ids.reshape(-1), starts), mapped.bag(ids.numpy().reshape(-1), starts.numpy())
    )
    with pytest.raises(fb.ArgumentError, match="gradient"):
        rows.bag(ids, per_sample_weights=weights.requires_grad_())


def test_it_stands_in_a_model(path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.out = DiskRows(path), torch.nn.Linear(10, 2)

        def forward(self, ids):
            return self.out(self.rows(ids))

    model, ids = Model(), torch.tensor([[1, 2], [3, 4]])
    model(ids).sum().backward()
    assert model.out.weight.grad.abs().sum() > 0
    assert sorted(model.state_dict()) == ["out.bias", "out.weight"]
    other = Model()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids), model(ids))
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(ids), model(ids))


@pytest.mark.parametrize(
    "ids", [torch.tensor([0, V]), torch.tensor([-1]), torch.tensor([1.0]), [1, 2]]
)
def test_bad_ids(path, ids):
    rows = DiskRows(path)
    for call in (rows, rows.prefetch, rows.bag):
        with pytest.raises(fb.IdError, match=r"ids|id "):
            call(ids)


def test_bad_settings(path):
    with pytest.raises(fb.ArgumentError, match=r"dtype=torch\.int64"):
        DiskRows(path, dtype=torch.int64)
    with pytest.raises(fb.ArgumentError, match="ahead=0"):
        DiskRows(path, ahead=0)


def test_bad_files(path, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        DiskRows(tmp_path / "nowhere.safetensors")
    with pytest.raises(IsADirectoryError, match="folder"):
        DiskRows(tmp_path)
    for name, message in (
        ("somebody-else-s", "not written by featherbed"),
        ("truncated", "safetensors"),
    ):
        shutil.copy(FOLDER / "hostile" / f"{name}.safetensors", tmp_path / "bad.safetensors")
        with pytest.raises(fb.FormatError, match=message):
            DiskRows(tmp_path / "bad.safetensors")


def test_a_file_cut_short_after_it_was_opened(path):
    rows = DiskRows(path)
    os.truncate(path, path.stat().st_size - 100)
    rows.prefetch(torch.tensor([V - 1]))
    for _ in range(2):
        with pytest.raises(fb.FormatError, match="truncated"):
            rows(torch.tensor([V - 1]))


def test_a_file_replaced_while_it_is_opened(path, tmp_path, monkeypatch):
    newer, opened = tmp_path / "newer.safetensors", []
    table("int8 by row").save(newer)
    expected = fb.load(newer)[:]

    def late(given):
        opened.append(fb.load(given))
        if len(opened) == 1:
            newer.replace(path)
        return opened[-1]

    monkeypatch.setattr(disk, "load", late)
    np.testing.assert_array_equal(open_rows(path)[:], expected)
    assert len(opened) == 2


def test_codes_that_lie(tmp_path, monkeypatch):
    monkeypatch.setenv("FEATHERBED_KERNELS", "numpy")
    codes = Fixed.encode(RNG.integers(7, size=(40, 3)), None, 8)
    lying = PackedTable(
        [Band(40, codes, None, Matrix.encode(RNG.normal(size=(7, 2)), "float32"))], 2
    )
    lying.bands[0].codes.stream[:] = 2**32 - 1
    with pytest.raises(fb.FormatError, match="out of range"):
        open_rows(saved(lying, tmp_path))[[1, 2]]
    at = np.repeat(np.arange(40), 2)
    ragged = Ragged.encode(40, at, RNG.integers(7, size=80), RNG.normal(size=80), 7, "int8")
    ragged.directory[1] = 79
    lying = PackedTable(
        [Band(40, ragged, None, Matrix.encode(RNG.normal(size=(7, 2)), "float32"))], 2
    )
    with pytest.raises(fb.FormatError, match="directory"):
        open_rows(saved(lying, tmp_path))[[17, 20]]


MEASURE = """
import sys
import numpy as np
from featherbed.packed.disk import open_rows

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

rows = open_rows(sys.argv[1])
ids = np.random.default_rng(0).integers(len(rows), size=(4, 8192))
rows[ids[0][:10]]
before = peak()
for batch in ids:
    rows[batch]
print(peak() - before, "numba" in sys.modules)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_follows_the_rows_asked_for_not_the_file(tmp_path):
    levels = np.zeros(
        (1 << 21, 64), dtype=np.uint8
    )  # 128 MB in the file; every page of it is cached
    packed = PackedTable(
        [
            Band(
                1 << 21,
                Every(),
                Matrix("int8", levels.shape, levels, np.ones(64, np.float32), axis=1),
            )
        ],
        64,
    )
    path = saved(packed, tmp_path)
    found = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True
    )
    grown, numba = found.stdout.split()
    assert float(grown) < 30 and numba == "False"
