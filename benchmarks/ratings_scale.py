"""Many ratings through `featherbed train ratings`: seconds, ratings a second and memory of the whole command.

    python benchmarks/ratings_scale.py [--ratings 50000000] [--users 10000000] [--items 1000000] [--folder DIR]

The file is generated once (about 27 bytes a rating); one epoch of plain rows, d = 16, every stage of the command included:
reading, splitting, training, measuring, writing files and report.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

RESULTS = Path(__file__).parent / "results"
BLOCK = 5_000_000


def generate(path, ratings, users, items, seed=0):
    """Write `user,item,rating,timestamp`: every user and item occurs, popularity of items is Zipf's, tastes are planted."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, items + 1) ** 0.8
    edges = np.cumsum(weights / weights.sum())
    names = rng.permutation(items)
    level = (
        rng.normal(0, 0.4, users).astype(np.float32),
        rng.normal(0, 0.4, items).astype(np.float32),
    )
    taste = rng.integers(0, 8, users, dtype=np.uint8), rng.integers(0, 8, items, dtype=np.uint8)
    with path.open("wb") as file:
        for start in range(0, ratings, BLOCK):
            count = min(BLOCK, ratings - start)
            who = rng.integers(users, size=count)
            what = names[np.searchsorted(edges, rng.random(count)).clip(max=items - 1)]
            who[: max(0, min(count, users - start))] = np.arange(
                start, max(start, min(users, start + count))
            )
            last = ratings - start - items  # the last ratings name every item once
            if last < count:
                first = max(0, last)
                what[first:] = np.arange(items)[first - last : count - last]
            liked = np.where(taste[0][who] == taste[1][what], 0.8, -0.1)
            values = 3.5 + level[0][who] + level[1][what] + liked + rng.normal(0, 0.6, count)
            stars = np.clip(np.round(values * 2) / 2, 0.5, 5.0)
            times = 1_000_000_000 + np.arange(start, start + count)
            frame = pl.DataFrame(
                {
                    "userId": who * 3 + 7,
                    "movieId": what * 2 + 1,
                    "rating": stars,
                    "timestamp": times,
                }
            )
            frame.write_csv(file, include_header=start == 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ratings", type=int, default=50_000_000)
    parser.add_argument("--users", type=int, default=10_000_000)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp())
    source, out = folder / "ratings.csv", folder / "out"
    if not source.exists():
        generate(source, given.ratings, given.users, given.items)
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "featherbed.cli",
        "train",
        "ratings",
        str(source),
        "--users",
        "dense",
        "--items",
        "dense",
    ]
    begun = time.perf_counter()
    log = subprocess.run(
        [*command, "--set", "training.epochs=1", "--out", str(out), "--quiet"],
        check=True,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    metrics = json.loads((out / "metrics.json").read_text())
    found = {
        "ratings": given.ratings,
        "users": metrics["sizes"]["users"]["float32"] // 64,
        "items": metrics["sizes"]["items"]["float32"] // 64,
        "bytes": source.stat().st_size,
        "seconds": seconds,
        "ratings_a_second": given.ratings / seconds,
        "peak_bytes": peak,
        "test_mse": metrics["test"]["mse"],
        "stages": metrics.get("stages"),
        "cores": os.cpu_count(),
    }
    lines = [
        f"{name:18} {value:,.4g}" if isinstance(value, float) else f"{name:18} {value}"
        for name, value in found.items()
    ]
    print("\n".join(lines), log.stdout, log.stderr, sep="\n")
    if given.ratings == 50_000_000:
        (RESULTS / "ratings_scale.json").write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / "ratings_scale.txt").write_text("\n".join(lines) + "\n")
    if given.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
