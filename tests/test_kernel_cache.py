"""Compiled loops on disk: several processes that start on an empty cache get their own code each."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="compiled loops: pip install featherbed[fast]")

from featherbed.kernels.compiled import CacheFiles

MODULE = """
import sys

from featherbed.kernels import compiled as kernels
from featherbed.kernels.compiled import CacheFiles, Job, compiled


def make(number):
    @compiled
    def plus(x):
        return x + number

    return plus


def run(numbers):
    for number in numbers:
        assert make(number)(1) == 1 + number, f"the code of another function was loaded for {number}"
        assert make(number)(0.5) == 0.5 + number


def count(block, start, stop):
    return stop - start


if __name__ == "__main__":
    print("ready", flush=True)
    sys.stdin.readline()
    numbers = [int(word) for word in sys.argv[1:]]
    run(numbers)
    assert Job(count).address > 0
    assert {type(one._cache._cache_file) for one in (make(1), *kernels._kept)} == {CacheFiles}
    print("sound")
"""


def start(folder, numbers):
    return subprocess.Popen(
        [sys.executable, str(folder / "loops.py"), *map(str, numbers)],
        env=os.environ | {"NUMBA_CACHE_DIR": str(folder / "cache")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes):
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        said, errors = process.communicate()
        assert said == "sound\n", errors


def test_several_processes_on_a_cold_cache_get_their_own_code(tmp_path):
    (tmp_path / "loops.py").write_text(MODULE)
    numbers = [1, 2, 3]
    finish([start(tmp_path, [number]) for number in numbers])
    indexes = list((tmp_path / "cache").rglob("*.nbi"))
    assert indexes
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.nb?")}
    finish([start(tmp_path, numbers)])  # all are in the cache now, and each is what it should be
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.nb?")}
    assert after == before, "no entry was lost, so that nothing had to be compiled again"


def test_no_moment_shows_the_code_of_another_version(tmp_path):
    seen = []

    class Watched(CacheFiles):
        def _save_index(self, overloads):
            super()._save_index(overloads)
            seen.append(CacheFiles(str(tmp_path), "rows", stamp=2).load("key"))

    CacheFiles(str(tmp_path), "rows", stamp=1).save("key", "code of the old source")
    Watched(str(tmp_path), "rows", stamp=2).save("key", "code of the new source")
    assert seen == ["code of the new source"]
    assert len(list(tmp_path.glob("*.nbc"))) == 1, "what no index names is removed"


def test_a_damaged_cache_is_compiled_again(tmp_path):
    (tmp_path / "loops.py").write_text(MODULE)
    finish([start(tmp_path, [7])])
    for number, path in enumerate(sorted((tmp_path / "cache").rglob("*.nb?"))):
        path.write_bytes(path.read_bytes()[: path.stat().st_size * (number % 2) // 2])
    finish([start(tmp_path, [7])])


def test_without_locks_the_code_is_still_the_right_one(tmp_path):
    text = MODULE.replace("import sys\n", "import sys\n\nimport featherbed.files\n", 1)
    text = text.replace("def make(", "featherbed.files.fcntl = None\n\n\ndef make(", 1)
    (tmp_path / "loops.py").write_text(text)
    finish([start(tmp_path, [number]) for number in (1, 2)])
    finish([start(tmp_path, [1, 2])])
