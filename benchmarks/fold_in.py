"""How long a new user takes: folding in a history, ranking all items, and the whole process.

    python benchmarks/fold_in.py [--items 3706,100000] [--length 100] [--dim 64]

A ranking with graded rows of random numbers, 4 bits each, and a sequence model with such rows (2 blocks, 2 heads, int8 weights),
whose history has 200 items, all that it reads. The first call computes V'V of all items; the others are medians. Calls are
measured in CPU time of one thread, in a process that loads neither torch nor numba; whole processes, which can import neither,
in CPU seconds and in wall time, which other programs make longer. Limits: fold_in 2 ms at 100 items, a warm call of a sequence
model 10 ms, its process 700 ms. Results go to benchmarks/results/fold_in.json and fold_in.txt.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from featherbed.apps.recommender.serve import Confidence, Recommender, write_recommender
from featherbed.apps.sequences.serve import SequenceRecommender, SequenceShape, write_sequences
from featherbed.packed import Band, Every, Graded, Keys, PackedTable
from featherbed.version import __version__

RESULTS = Path(__file__).parent / "results"
USERS, BITS, CALLS, LENGTH, PROCESSES = 6040, 4, 200, 200, 11
PROCESS = "import sys; sys.modules['torch'] = sys.modules['numba'] = None; from featherbed.cli import main; main()"
COLUMNS = ("first call", "fold_in", "recommend_history", "process, CPU", "process, wall")


def rows(count, dim, rng):
    bits = np.full((1, dim), BITS, np.uint8)
    matrix = rng.standard_normal((count, dim), dtype=np.float32) / 4
    band = Band(count, Every(), values=Graded.round(matrix, bits, [count]))
    return PackedTable([band], dim, keys=Keys.of(map(str, range(count))))


def children():
    """Return the CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def milliseconds(function, clock=time.thread_time):
    start = clock()
    function()
    return 1e3 * (clock() - start)


def median(function):
    return statistics.median(milliseconds(function) for _ in range(CALLS))


def process(folder, history):
    """Return the median CPU and wall time of whole processes that print a list for a history."""
    command = [
        sys.executable,
        "-c",
        PROCESS,
        "recommend",
        str(folder),
        "--history",
        ",".join(history),
    ]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0 and len(first.stdout.splitlines()) == 11, first.stderr
    times = []
    for _ in range(PROCESSES):
        used = children()
        wall = milliseconds(
            lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True),
            time.perf_counter,
        )
        times.append((1e3 * (children() - used), wall))
    return [statistics.median(one) for one in zip(*times, strict=True)]


def ranking(folder, items, length, dim, rng):
    write_recommender(
        folder,
        rows(USERS, dim, rng),
        rows(items, dim, rng),
        mean=0.0,
        biases="none",
        seen=(np.zeros(USERS + 1, int), np.empty(0, int)),
        implicit=Confidence(4.0, 10.0, "log", 0.1),
    )
    model = Recommender.open(folder)
    names = [str(i) for i in rng.choice(items, length, replace=False)]
    history = [(name, 1.0) for name in names]
    first = milliseconds(lambda: model.fold_in(history))
    calls = (lambda: model.fold_in(history)), (lambda: model.recommend_history(history))
    return dict(zip(COLUMNS, (first, *map(median, calls), *process(folder, names)), strict=True))


def sequences(folder, items, dim, rng):
    shape = SequenceShape(items, dim, 0, LENGTH, layers=2, heads=2, inner=2 * dim)
    weights = {name: rng.normal(size=size) / 8 for name, size in shape.arrays().items()}
    write_sequences(folder, rows(items, dim, rng), weights, shape, repeats=False, precision="int8")
    model = SequenceRecommender.open(folder)
    history = [str(i) for i in rng.choice(items, LENGTH, replace=False)]
    first = milliseconds(lambda: model.recommend_history(history))
    warm = median(lambda: model.recommend_history(history))
    return dict(zip(COLUMNS, (first, None, warm, *process(folder, history)), strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", default="3706,100000")
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--dim", type=int, default=64)
    given = parser.parse_args()
    lines = [
        f"featherbed {__version__}, numpy {np.__version__}, {platform.machine()}, {os.cpu_count()} cores; d = {given.dim}, "
        f"histories of {given.length} (ranking) and {LENGTH} items (sequences), k = 10, in ms",
        " " * 26 + "".join(f"{name:>20}" for name in COLUMNS),
    ]
    figures, rng = {}, np.random.default_rng(0)
    for items in map(int, given.items.split(",")):
        with tempfile.TemporaryDirectory() as place:
            figures[f"ranking, {items:,} items"] = ranking(
                Path(place) / "ranking", items, given.length, given.dim, rng
            )
            figures[f"sequences, {items:,} items"] = sequences(
                Path(place) / "sequences", items, given.dim, rng
            )
    for name, found in figures.items():
        times = (found[column] for column in COLUMNS)
        lines.append(
            f"{name:<26}" + "".join(f"{'-' if t is None else f'{t:.2f}':>20}" for t in times)
        )
    (RESULTS / "fold_in.json").write_text(
        json.dumps({"figures": figures, "text": lines}, indent=1) + "\n"
    )
    (RESULTS / "fold_in.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
