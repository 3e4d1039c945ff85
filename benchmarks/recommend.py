"""How long a recommendation takes: opening, a warm call, and the whole process ``featherbed recommend``.

    python benchmarks/recommend.py [FOLDER] [--shapes 3706,1000000] [--processes 11]

Without a FOLDER it makes recommenders of random tables, of the shape of MovieLens-1M (6,040 users, 3,706 items, d = 16, 132
items seen by a user) and of a million items, in four kinds: float32 rows, int4 rows, anchors (16, about 4 a row), product codes
(4 parts x 256). Warm calls are medians, with numpy alone and with compiled loops; the process can import neither torch nor
numba. Results go to benchmarks/results/recommend.json and recommend.txt.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import featherbed as fb
from featherbed.apps.recommender.serve import Recommender, write_recommender
from featherbed.packed.band import Band, Entries, Every, Fixed
from featherbed.packed.keys import Keys
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable

RESULTS = Path(__file__).parent / "results"
DIM, USERS, SEEN, ANCHORS = 16, 6040, 132, 16
PROCESS = "import sys; sys.modules['torch'] = sys.modules['numba'] = None; from featherbed.cli import main; main()"
ENGINE = "FEATHERBED_KERNELS"


def tables(kind, rows, rng):
    """Return a packed table of random rows, with keys."""
    keys = Keys.of(map(str, range(1, rows + 1)))
    normal = rng.standard_normal((rows, DIM), dtype=np.float32) / 4
    if kind in ("float32 rows", "int4 rows"):
        stored = Matrix.encode(
            normal, kind.split()[0], **({} if kind.startswith("float") else {"scales": "column"})
        )
        band = Band(rows, Every(), values=stored)
    elif kind == "anchors":
        weights = np.maximum(rng.standard_normal((rows, ANCHORS), dtype=np.float32) - 0.7, 0)
        atoms = Matrix.encode(rng.standard_normal((ANCHORS, DIM), dtype=np.float32), "float32")
        codes, values = Entries.of(weights).layout("ragged", "float32")
        assert values is None
        band = Band(rows, codes, dictionary=atoms)
    else:
        codes = Fixed.encode(rng.integers(256, size=(rows, 4)), None, 256, parts=True)
        band = Band(
            rows,
            codes,
            None,
            Matrix.encode(rng.standard_normal((4 * 256, DIM // 4), dtype=np.float32), "float32"),
            "concat",
        )
    return PackedTable([band], DIM, keys=keys)


def make(folder, kind, items, seed=0):
    rng = np.random.default_rng(seed)
    offsets = np.arange(USERS + 1) * SEEN
    seen = np.sort(rng.integers(items, size=(USERS, SEEN)), axis=1).reshape(-1)
    titles = [f"Title of item {i} (1999)" for i in range(items)]
    both = tables(kind, USERS, rng), tables(kind, items, rng)
    write_recommender(
        folder,
        *both,
        mean=3.58,
        biases="column",
        seen=(offsets, seen),
        titles=titles,
        about={"kind": kind},
    )


def milliseconds(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return 1e3 * (time.perf_counter() - start)


def warm(recommender, users, engine):
    os.environ[ENGINE] = engine
    try:
        recommender.recommend(users[0])
        return statistics.median(milliseconds(recommender.recommend, user) for user in users)
    except fb.MissingExtra:
        return None
    finally:
        del os.environ[ENGINE]


def process(folder, user, runs):
    """Return the median time of whole processes that can import neither torch nor numba."""
    command = [sys.executable, "-c", PROCESS, "recommend", str(folder), "--user", user, "-k", "10"]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.splitlines()) == 11, first.stdout
    quiet = {"stdout": subprocess.DEVNULL, "check": True}
    return statistics.median(
        milliseconds(lambda: subprocess.run(command, **quiet)) for _ in range(runs)
    )


def measure(folder, runs, calls=200):
    opening = milliseconds(Recommender.open, folder)
    recommender = Recommender.open(folder)
    keys = recommender.users.keys
    users = [
        keys[int(i)]
        for i in np.random.default_rng(1).integers(
            len(keys), size=calls if recommender.about.items < 10**5 else 20
        )
    ]
    found = {"open": opening}
    found |= {f"warm {engine}": warm(recommender, users, engine) for engine in ("numpy", "numba")}
    names = ("users", "items", "seen", "titles")
    found["KB"] = {
        n: (folder / f"{n}.safetensors").stat().st_size / 1000
        for n in names
        if (folder / f"{n}.safetensors").exists()
    }
    return found | {"process": process(folder, users[0], runs)}


def line(name, found):
    times = (found[what] for what in ("open", "warm numpy", "warm numba", "process"))
    return f"{name:<34}{found['KB']['items']:>11,.0f}" + "".join(
        f"{'-' if t is None else f'{t:.2f}':>12}" for t in times
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--shapes", default="3706,1000000", help="numbers of items")
    parser.add_argument("--processes", type=int, default=11)
    given = parser.parse_args()
    lines = [
        f"featherbed {fb.__version__}, numpy {np.__version__}, {platform.machine()}, {os.cpu_count()} cores; k = 10, in ms",
        f"{'':<34}{'items (KB)':>11}{'open':>12}{'warm numpy':>12}{'warm numba':>12}{'process':>12}",
    ]
    figures = {}

    def note(name, folder):
        figures[name] = measure(folder, given.processes)
        lines.append(line(name, figures[name]))
        print("\n".join(lines) if len(figures) == 1 else lines[-1], flush=True)

    if given.folder is not None:
        note(given.folder.name, given.folder)
        return
    for items in map(int, given.shapes.split(",")):
        for kind in ("float32 rows", "int4 rows", "anchors", "product codes"):
            with tempfile.TemporaryDirectory() as folder:
                make(Path(folder), kind, items)
                note(f"{items:,} items, {kind}", Path(folder))
    (RESULTS / "recommend.json").write_text(
        json.dumps({"figures": figures, "text": lines}, indent=1) + "\n"
    )
    (RESULTS / "recommend.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
