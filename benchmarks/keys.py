"""Bytes and look-up times of every form of keys.

    python benchmarks/keys.py [--keys 10000000] [--forms plain,text,hashed,reordered,integer]

Two sets of keys: the 6,040 users and 3,706 items of MovieLens-1M (of which the keys are numbers; from
$FEATHERBED_DATA, otherwise left out) and generated names "item-...", or for the form "integer" their numbers, in random
order. Files are written and memory-mapped; a look-up is one call with 8,192 random keys of the table (median of 21), or
``packed["key"]`` on a float32 table of width 16. Times are CPU seconds of one thread, with numpy alone.
Results go to benchmarks/results/keys.json and keys.txt.
"""

import argparse
import gzip
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

os.environ["FEATHERBED_KERNELS"] = "numpy"

import featherbed as fb
from featherbed.packed.band import Band, Every
from featherbed.packed.hashed_keys import HashedKeys
from featherbed.packed.keys import IntegerKeys, Keys, TextKeys
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable

RESULTS = Path(__file__).parent / "results"
BATCH, CALLS, SINGLE, DIM = 8192, 21, 2000, 16
FORMS = ("plain", "text", "hashed", "reordered", "integer")
LIMITS = "hashed 2 + log2(V) / 8 + 0.7 bytes a key, reordered 3, 8,192 keys 5 ms, row 10 us"


def movielens():
    """Return the keys of users and of items as numbers in rising order; None without the data."""
    path = Path(os.environ.get("FEATHERBED_DATA", ".")) / "ml-1m" / "ratings.dat.gz"
    if not path.is_file():
        return None
    with gzip.open(path, "rt") as lines:
        pairs = [line.split("::")[:2] for line in lines]
    return [np.unique([int(pair[side]) for pair in pairs]) for side in (0, 1)]


def generated(count):
    """Return different numbers of up to ten digits in random order."""
    return np.random.default_rng(0).permutation(count) * 997 + 1


def named(numbers):
    """Return the keys "item-..." of numbers."""
    digits = np.char.add(b"item-", numbers.astype("S20")).view(np.uint8).reshape(len(numbers), -1)
    return TextKeys(digits[digits != 0], np.cumsum(np.count_nonzero(digits, axis=1)))


def build(names, form):
    """Return the index of keys in a form."""
    return HashedKeys.build(names, order=False) if form == "reordered" else Keys.of(names, form)


def median(calls):
    """Return the median CPU seconds of calls."""
    times = []
    for call in calls:
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


def measure(names, form, folder):
    """Return the figures of one form of keys."""
    start, wall = time.process_time(), time.perf_counter()
    index = build(names, form)
    figures = {"built": time.process_time() - start, "built wall": time.perf_counter() - wall}
    count, path = len(index), folder / "keys.safetensors"
    figures["bytes"] = sum(array.nbytes for array in index.arrays.values())
    figures["bytes a key"] = figures["bytes"] / count
    if form == "text":
        stored = ("keys.order", "keys.blocks", "keys.ends")
        figures["index bytes a key"] = (
            sum(index.arrays[n].nbytes for n in stored if n in index.arrays) / count
        )
    rows = Matrix.encode(np.zeros((count, DIM), np.float32), "float32")
    PackedTable([Band(count, Every(), values=rows)], DIM, keys=index).save(path)
    packed, chance = fb.load(path), np.random.default_rng(1)
    batches = [[names[int(i)] for i in chance.integers(count, size=BATCH)] for _ in range(CALLS)]
    figures["look-up"] = median(lambda b=batch: packed.ids(b) for batch in batches)
    some = [name for batch in batches for name in batch][:SINGLE]
    figures["id"] = median(lambda n=name: packed.ids(n) for name in some)
    figures["row"] = median(lambda n=name: packed[n] for name in some)
    if form in ("hashed", "reordered"):
        others = [f"other-{i}" for i in range(1 << 20)]
        figures["false positives"] = int(np.count_nonzero(packed.ids(others) >= 0))
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keys", type=int, default=10_000_000, help="Number of generated keys.")
    parser.add_argument("--forms", default=",".join(FORMS))
    chosen = parser.parse_args()
    sets, forms = {}, chosen.forms.split(",")
    if (numbers := movielens()) is not None:
        sets |= dict(zip(("MovieLens-1M users", "MovieLens-1M items"), numbers, strict=True))
    sets["generated"] = generated(chosen.keys)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for title, numbers in sets.items():
            for form in forms:
                plain = title != "generated" or form == "integer"
                names = IntegerKeys(numbers) if plain else named(numbers)
                figures[f"{title}, {form}"] = {"keys": len(names)} | measure(
                    names, form, Path(folder)
                )
                print(title, form, figures[f"{title}, {form}"], flush=True)
    about = {
        "featherbed": fb.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    (RESULTS / "keys.json").write_text(
        json.dumps({"figures": figures, "about": about}, indent=1) + "\n"
    )
    machine = f"{platform.machine()}, {os.cpu_count()} cores; CPU time, numpy alone"
    lines = [f"featherbed {fb.__version__}, numpy {np.__version__}, {machine}", f"limits: {LIMITS}"]
    heads = ("keys", "bytes", "a key", "built (s)", f"{BATCH:,} (ms)", "id (us)", "row (us)")
    lines.append(f"{'':30}" + "".join(f"{head:>13}" for head in heads))
    for name, found in figures.items():
        cells = (
            f"{found['keys']:,}",
            f"{found['bytes']:,}",
            f"{found['bytes a key']:.2f}",
            f"{found['built']:.2f}",
        )
        times = (
            f"{found['look-up'] * 1e3:.2f}",
            f"{found['id'] * 1e6:.1f}",
            f"{found['row'] * 1e6:.1f}",
        )
        lines.append(f"{name:30}" + "".join(f"{cell:>13}" for cell in cells + times))
    (RESULTS / "keys.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
