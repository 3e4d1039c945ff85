"""The examples run, on real data where there is some."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_word_vectors_are_compressed_and_served_by_numpy(data, tmp_path):
    words = ["--rows", "8000", "--ratio", "10", "--method", "layered", "--out", tmp_path]
    command = [sys.executable, EXAMPLES / "word_vectors.py", *words]
    env = {"FEATHERBED_DATA": str(data), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    near = next(line for line in done.stdout.splitlines() if line.startswith("seven"))
    assert {"six", "eight", "nine"} & set(near.replace(",", "").split())
    assert "EN-WS-353-ALL" in done.stdout
    dense, keys = 8000 * 50 * 4, 8000 * 20
    assert (tmp_path / "glove.safetensors").stat().st_size < dense / 10 + keys
    assert (tmp_path / "glove.html").read_text().startswith("<!doctype html>")
