"""Saving keeps what belongs to the file it replaces, names it in errors, and leaves no litter."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import featherbed as fb
from featherbed import files as writing
from featherbed.apps.pipeline import _temporary_workplace, move_files
from featherbed.files import exclusive, remove_stale, replacing, temporary_folder
from featherbed.packed.band import Band, Identity
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable


def small(value=1.0, rows=4):
    matrix = np.full((rows, 8), value, np.float32)
    return PackedTable([Band(rows, Identity(), dictionary=Matrix.encode(matrix, "float32"))], 8)


@pytest.fixture(params=["nameless", "named"])
def way(request, monkeypatch):
    """Write through a nameless file, and as on systems that have none."""
    if request.param == "named":
        monkeypatch.setattr(writing, "_nameless", lambda folder: None)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bits", [0o600, 0o640, 0o444])
def test_an_existing_file_keeps_its_mode(tmp_path, bits):
    path = tmp_path / "t"
    small().save(path)
    path.chmod(bits)
    small(2.0).save(path)
    assert mode(path) == bits
    assert fb.load(path)[0][0] == 2


@pytest.mark.usefixtures("way")
def test_a_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "real").mkdir()
    link, target = tmp_path / "link", tmp_path / "real" / "t"
    link.symlink_to("real/t")
    for value in (1.0, 2.0):  # the target does not exist at first
        small(value).save(link)
        assert link.is_symlink()
        assert not target.is_symlink()
        assert fb.load(target)[0][0] == value
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "real", "t"]


def test_links_to_themselves_and_pipes_are_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(FileExistsError, match="leads to itself"):
        small().save(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="device or pipe"):
        small().save(tmp_path / "pipe")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("length", [252, 255])
def test_the_longest_names_work(tmp_path, length):
    path = tmp_path / ("n" * length)
    small().save(path)
    small(2.0).save(path)
    assert fb.load(path)[0][0] == 2
    assert len(list(tmp_path.iterdir())) == 1


FULL = """
import resource, signal, sys
import numpy as np
from featherbed.packed.band import Band
from featherbed.packed.band import Identity
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
rows = Matrix.encode(np.ones((4000, 8), np.float32), "float32")
try:
    PackedTable([Band(4000, Identity(), dictionary=rows)], 8).save(sys.argv[1])
except OSError as error:
    print(type(error).__name__, error.filename, error.strerror)
"""


def test_a_disk_that_is_full_is_told_with_the_path(tmp_path):
    path = tmp_path / "t"
    run = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["OSError", str(path), "File", "too", "large"]
    assert not list(tmp_path.iterdir())


HOLDER = """
import sys, time
from pathlib import Path
from featherbed import files as writing
writing._nameless = lambda folder: None
with writing.temporary_folder(Path(sys.argv[1])) as folder:
    (folder / "part").write_text("half")
    with writing.replacing(Path(sys.argv[1]) / "t"):
        print("ready", flush=True)
        time.sleep(100)
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_process_leaves_is_removed_and_what_a_running_one_writes_is_not(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"ready\n"
    (tmp_path / ".featherbed-settings").write_text("not a temporary file")
    before = names(tmp_path)
    assert len(before) == 3
    remove_stale(tmp_path)
    assert names(tmp_path) == before
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert names(tmp_path) == before
    remove_stale(tmp_path)
    assert names(tmp_path) == [".featherbed-settings"]


def test_without_locks_nothing_is_removed_and_writing_works(tmp_path, monkeypatch):
    monkeypatch.setattr("featherbed.files.fcntl", None)
    (tmp_path / ".featherbed-abcdefgh.tmp").mkdir()
    remove_stale(tmp_path)
    small().save(tmp_path / "t")
    with temporary_folder(tmp_path) as folder:
        assert folder.is_dir()
    assert names(tmp_path) == [".featherbed-abcdefgh.tmp", "t"]


def test_a_lock_is_waited_for_and_given_up_after_a_while(tmp_path):
    path, order = tmp_path / "lock", []

    def hold():
        with exclusive(path):
            entered.set()
            time.sleep(0.1)
            order.append("first")

    entered = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    with exclusive(path):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
    with exclusive(path), exclusive(path, seconds=0.01):
        order.append("without")
    assert order[-1] == "without"


def test_training_removes_what_a_killed_run_left(tmp_path):
    out = tmp_path / "out"
    for folder in (tmp_path, out, out / "checkpoints", out / "checkpoints" / "stage"):
        folder.mkdir(exist_ok=True)
        (folder / ".featherbed-abcdefgh.tmp").mkdir()
        (folder / ".featherbed-abcdefgh.tmp" / "part").touch()
        (folder / ".featherbed-0123456789ab.tmp").touch()
    with _temporary_workplace(out) as place:
        assert [path.name for path in out.iterdir()] != []
        assert not [path for path in tmp_path.rglob(".featherbed-*") if path != place]
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*")) == [
        "checkpoints",
        "checkpoints/stage",
    ]


def test_files_of_a_model_that_is_replaced_keep_their_modes(tmp_path):
    made, out = tmp_path / "made", tmp_path / "out"
    for folder in (made, out):
        folder.mkdir()
        for name in ("mark.json", "rows"):
            (folder / name).write_text(folder.name)
            (folder / name).chmod(0o600 if folder is out else 0o644)
    move_files(made, out, "mark.json")
    assert {path.read_text() for path in out.iterdir()} == {"made"}
    assert {mode(path) for path in out.iterdir()} == {0o600}


# Reading a file whole


def test_a_file_read_into_memory_outlives_its_truncation(tmp_path):
    path = tmp_path / "t"
    table = small(3.0, rows=1000)
    fb.save(table, path, keys=map(str, range(1000)))
    whole = fb.load(path, mmap=False)
    path.write_bytes(b"")
    assert np.array_equal(whole[:], table[:])
    assert whole["999"][0] == 3
    array = next(iter(whole.arrays.values()))
    assert not array.flags.writeable
    with pytest.raises(fb.ArgumentError, match="mmap='no'"):
        fb.load(path, mmap="no")


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_a_truncated_file_is_refused_when_it_is_read_whole(tmp_path, cut):
    path = tmp_path / "t"
    small().save(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(fb.FormatError):
        fb.load(path, mmap=False)


def test_an_error_within_a_write_keeps_its_own_path(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "t"):
        (tmp_path / "other").open()
    assert caught.value.filename == str(tmp_path / "other")
    assert not list(tmp_path.iterdir())
