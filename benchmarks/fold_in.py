"""How long a new user of a ranking takes: folding in a history, and ranking all items for it.

    python benchmarks/fold_in.py [--items 3706,100000] [--length 100] [--dim 64]

Graded rows of random numbers, 4 bits each. The first call computes V'V of all items; the others are medians of wall time in a
process that loads neither torch nor numba. Results go to benchmarks/results/fold_in.txt.
"""

import argparse
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from featherbed.apps.recommender.serve import Confidence, Recommender, write_recommender
from featherbed.packed import Band, Every, Graded, Keys, PackedTable
from featherbed.version import __version__

RESULT = Path(__file__).parent / "results" / "fold_in.txt"
USERS, BITS, CALLS = 6040, 4, 200


def rows(count, dim, rng):
    bits = np.full((1, dim), BITS, np.uint8)
    matrix = rng.standard_normal((count, dim), dtype=np.float32) / 4
    band = Band(count, Every(), values=Graded.round(matrix, bits, [count]))
    return PackedTable([band], dim, keys=Keys.of(map(str, range(count))))


def milliseconds(function):
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


def measure(items, length, dim):
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
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
        history = [(str(i), 1.0) for i in rng.choice(items, length, replace=False)]
        first = milliseconds(lambda: model.fold_in(history))
        calls = (lambda: model.fold_in(history)), (lambda: model.recommend_history(history))
        medians = [statistics.median(milliseconds(one) for _ in range(CALLS)) for one in calls]
    return first, *medians


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", default="3706,100000")
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--dim", type=int, default=64)
    given = parser.parse_args()
    lines = [
        f"featherbed {__version__}, numpy {np.__version__}, {platform.machine()}; d = {given.dim}, "
        f"history of {given.length} items, k = 10, in ms",
        f"{'':<16}{'first fold_in':>16}{'fold_in':>12}{'recommend_history':>20}",
    ]
    for items in map(int, given.items.split(",")):
        found = measure(items, given.length, given.dim)
        lines.append(f"{items:>10,} items{found[0]:>16.2f}{found[1]:>12.2f}{found[2]:>20.2f}")
    RESULT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
