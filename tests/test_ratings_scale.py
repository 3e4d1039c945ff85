"""The benchmark at Amazon's size, in small: killed by SIGKILL and continued, it writes the same bytes."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "ratings_scale.py"
SIZE = {"users": 900, "items": 700, "ratings": 20_000}
KILLED = """
import os, signal, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from test_ratings_scale import SIZE, small_benchmark
from pathlib import Path
scale, written = small_benchmark(), []
write = scale.write_state
def write_and_die(*given):
    if len(written) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(given)
    write(*given)
scale.write_state = write_and_die
scale.stages(SIZE, Path(sys.argv[2]), quiet=True)
"""


def small_benchmark():
    spec = importlib.util.spec_from_file_location("ratings_scale", SCRIPT)
    scale = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scale)
    scale.CHUNK, scale.SEGMENT, scale.BATCH, scale.ROWS = 1000, 4, 512, 300
    return scale


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return small_benchmark().stages(SIZE, folder, quiet=True), folder


@pytest.mark.parametrize("states", [1, 4])  # in the passes of plain rows, in those with slots
def test_a_killed_run_continues_to_the_same_bytes(whole, tmp_path, states):
    command = [sys.executable, "-c", KILLED, __file__, str(tmp_path), str(states)]
    done = subprocess.run(command, check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    found = small_benchmark().stages(SIZE, tmp_path, quiet=True)
    assert found["sha256"] == whole[0]["sha256"]
    for path in whole[1].glob("*.safetensors"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_ratings_are_drawn_again_from_their_number():
    scale = small_benchmark()
    first, again = (scale.ratings_of([3, 4], SIZE) for _ in range(2))
    assert (first.users == again.users).all() and (first.values == again.values).all()
    assert not (first.users[:1000] == first.users[1000:]).all()
    assert first.users.max() < SIZE["users"] and first.items.max() < SIZE["items"]


def test_plain_rows_learn(whole):
    assert whole[0]["Plain_mse"] < whole[0]["mse_of_the_mean"]
