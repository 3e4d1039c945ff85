"""Rows from disk against a plain numpy memmap: python benchmarks/disk_rows.py [--size GB] [--folder F] [--kind float16|int8]

A generated table is written as a packed file (in a stream, removed at the end). Then each way of reading 8,192 random rows in
one call has a process of its own, in turns: the file's pages are dropped from the page cache, the process opens the file, makes
the call ("cold"), makes it again three times ("warm": a mapping then has all pages at hand), then for another batch.
Printed are medians over turns, the median of how many times faster than the memmap of the same turn, and the most memory the
process ever had (VmHWM): in all, and beyond what it had once everything was imported. At last batches are read with a stand-in
for a model between them, with and without ``prefetch``. Results go to benchmarks/results/disk_rows.json and disk_rows.txt.
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

RESULTS = Path(__file__).parent / "results"
BATCH, DIM, STEPS = 8192, 512, 6
WAYS = ("numpy memmap", "fb.load", "open_rows", "fb.DiskRows")
BLOCK = 1 << 14  # rows written at once


def write(path, kind, size):
    """Write a packed file of about ``size`` bytes, never more than a few blocks in memory."""
    from featherbed.packed.band import Band, Every
    from featherbed.packed.file import header_of
    from featherbed.packed.matrix import Matrix
    from featherbed.packed.table import PackedTable

    dtype = np.dtype(np.float16 if kind == "float16" else np.uint8)
    count = -(-size // (DIM * dtype.itemsize) // BLOCK) * BLOCK
    data = np.broadcast_to(np.zeros((), dtype), (count, DIM))
    scale = None if kind == "float16" else np.full(DIM, 0.01, np.float32)
    table = PackedTable([Band(count, Every(), Matrix(kind, data.shape, data, scale, 1))], DIM)
    header = header_of(table)
    rng = np.random.default_rng(0)
    blocks = [made(rng, kind).tobytes() for _ in range(4)]
    with path.open("wb") as file:
        file.write(header + (b"" if scale is None else scale.tobytes()))
        for number in range(count // BLOCK):
            file.write(blocks[number % len(blocks)])
        file.flush()
        os.fsync(file.fileno())


def made(rng, kind):
    if kind == "int8":
        return rng.integers(0, 256, size=(BLOCK, DIM), dtype=np.uint8)
    return rng.standard_normal((BLOCK, DIM), dtype=np.float32).astype(np.float16)


def drop(path):
    """Give the file's pages back: what is read next comes from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def memory(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def reader(way, given):
    """Import what a way needs; return a function that opens the file and returns the function that reads rows."""
    if way == "numpy memmap":

        def mapped():
            dtype = np.float16 if given.kind == "float16" else np.uint8
            rows = np.memmap(
                given.file, dtype=dtype, mode="r", offset=given.start, shape=(given.rows, DIM)
            )
            if given.kind == "float16":
                return lambda ids: rows[ids].astype(np.float32)
            scale = np.full(DIM, 0.01, np.float32)
            return lambda ids: (rows[ids].astype(np.float32) - np.float32(127.5)) * scale

        return mapped
    if way == "fb.DiskRows":
        import torch

        from featherbed.interop.disk import DiskRows

        def module():
            rows = DiskRows(given.file)
            return lambda ids: rows(torch.from_numpy(ids)).numpy()

        return module
    from featherbed.packed import disk, file

    def packed():
        rows = (file.load if way == "fb.load" else disk.open_rows)(given.file)
        return lambda ids: rows[ids]

    return packed


def timed(read, ids):
    start = time.perf_counter()
    rows = read(ids)
    return time.perf_counter() - start, float(rows.sum(dtype=np.float64))


def one_way(given):
    """In a process of its own: read cold, warm and on; print figures."""
    rng = np.random.default_rng(given.seed)
    batches = rng.integers(given.rows, size=(2, BATCH))
    opened = reader(given.way, given)
    before = memory("VmHWM")
    read = opened()
    cold, total = timed(read, batches[0])
    peak = memory("VmHWM")
    warm = statistics.median(timed(read, batches[0])[0] for _ in range(3))
    read(batches[1])
    figures = {
        "cold": cold,
        "warm": warm,
        "imports": before,
        "peak": peak,
        "peak_2": memory("VmHWM"),
        "sum": total,
    }
    print(json.dumps(figures))


def steps(given):
    """In a process of its own: STEPS cold batches with work between them, with or without prefetch; print seconds a step."""
    import torch

    from featherbed.interop.disk import DiskRows

    torch.set_num_threads(1)
    rng = np.random.default_rng(given.seed)
    batches = [torch.from_numpy(ids) for ids in rng.integers(given.rows, size=(STEPS, BATCH))]
    weight, rows = torch.randn(DIM, DIM), DiskRows(given.file)
    times = given.times  # products of the stand-in

    def work(found):
        if given.work == "elsewhere":
            time.sleep(given.pause)
        for _ in range(times if given.work == "here" else 0):
            found = found @ weight
        return found

    work(torch.randn(BATCH, DIM))
    start = time.perf_counter()
    if given.prefetch:
        rows.prefetch(batches[0])
    for number, ids in enumerate(batches):
        found = rows(ids)
        if given.prefetch and number + 1 < STEPS:
            rows.prefetch(batches[number + 1])
        work(found)
    print(json.dumps({"step": (time.perf_counter() - start) / STEPS}))


def child(given, path, start, rows, **more):
    command = [
        sys.executable,
        __file__,
        "--file",
        str(path),
        "--start",
        str(start),
        "--rows",
        str(rows),
        "--kind",
        given.kind,
    ]
    command += [part for name, value in more.items() for part in (f"--{name}", str(value))]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def compare(given, path, start, rows):
    """Return the lines and figures of all ways, in turns."""
    found = {way: [] for way in WAYS}
    for turn in range(given.turns):
        for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
            drop(path)
            found[way].append(child(given, path, start, rows, way=way, seed=turn))
        sums = {round(found[way][turn]["sum"], 2) for way in WAYS}
        assert len(sums) == 1, f"the ways do not agree: {sums}"
    title = "8,192 random rows in one call"
    lines = [
        "",
        f"{title:<32}{'cold ms':>9}{'x':>6}{'warm ms':>9}{'x':>6}{'MB in all':>11}{'beyond imports':>16}{'2 batches':>11}",
    ]
    figures, base = {}, found["numpy memmap"]
    for way, turns in found.items():

        def middle(value, turns=turns):
            return statistics.median(value(at, turn) for at, turn in enumerate(turns))

        cold, warm = middle(lambda _, t: t["cold"]), middle(lambda _, t: t["warm"])
        ratios = (
            middle(lambda at, t: base[at]["cold"] / t["cold"]),
            middle(lambda at, t: base[at]["warm"] / t["warm"]),
        )
        peak, most, imports = (
            max(turn[name] for turn in turns) for name in ("peak", "peak_2", "imports")
        )
        grown = max(turn["peak"] - turn["imports"] for turn in turns)
        grown_2 = max(turn["peak_2"] - turn["imports"] for turn in turns)
        line = f"  {way:<30}{1e3 * cold:>9.0f}{ratios[0]:>6.1f}{1e3 * warm:>9.1f}{ratios[1]:>6.1f}"
        lines.append(f"{line}{peak:>11.0f}{grown:>16.0f}{grown_2:>11.0f}")
        figures[way] = {
            "cold_seconds": cold,
            "warm_seconds": warm,
            "times_faster_cold": ratios[0],
            "times_faster_warm": ratios[1],
            "imports_mb": imports,
            "peak_mb": peak,
            "beyond_imports_mb": grown,
            "peak_mb_two_batches": most,
            "beyond_imports_mb_two_batches": grown_2,
        }
    return lines, figures


def ahead(given, path, start, rows):
    """Return the lines and figures of batches read ahead or not, with work elsewhere (a pause) or on this processor."""
    lines, figures = (
        [
            "",
            "ms a step: a cold batch of 8,192 rows, then work; not read ahead, read ahead, and the ratio",
        ],
        {},
    )
    for work in ("none", "elsewhere", "here"):
        spent = {0: [], 1: []}
        for turn in range(given.turns):
            for prefetch in (0, 1) if turn % 2 == 0 else (1, 0):
                drop(path)
                more = {
                    "work": work,
                    "prefetch": prefetch,
                    "seed": 100 + turn,
                    "pause": given.pause,
                    "times": given.times,
                }
                spent[prefetch].append(child(given, path, start, rows, **more)["step"])
        plain, early = (1e3 * statistics.median(spent[way]) for way in (0, 1))
        ratio = statistics.median(a / b for a, b in zip(spent[0], spent[1], strict=True))
        words = {
            "none": "no work",
            "elsewhere": f"a pause of {1e3 * given.pause:.0f} ms",
            "here": f"{given.times} products, one thread",
        }
        lines.append(f"  {words[work]:<30}{plain:>9.0f}{early:>9.0f}{ratio:>6.2f}")
        figures[f"work {work}"] = {
            "step_seconds": plain / 1e3,
            "step_seconds_ahead": early / 1e3,
            "times_faster": ratio,
        }
    return lines, figures


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=20, help="gigabytes of the file")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where to write it (the system's folder for temporary files otherwise)",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="a file to write and leave, or to read if it is there (of the same --kind)",
    )
    parser.add_argument("--kind", choices=("float16", "int8"), default="float16")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--pause", type=float, default=0.15, help="seconds a batch is worked on elsewhere"
    )
    parser.add_argument(
        "--times",
        type=int,
        default=6,
        help=f"products [{BATCH}, {DIM}] x [{DIM}, {DIM}] a batch is worth here",
    )
    parser.add_argument(
        "--no-write", action="store_true", help="print, and leave the stored results alone"
    )
    for name, kind in (
        ("file", str),
        ("start", int),
        ("rows", int),
        ("way", str),
        ("seed", int),
        ("work", str),
        ("prefetch", int),
    ):
        parser.add_argument(
            f"--{name}", type=kind, help=argparse.SUPPRESS
        )  # of the processes this one starts
    return parser.parse_args()


def main():
    given = arguments()
    if given.file:
        return one_way(given) if given.way else steps(given)
    import featherbed as fb

    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = given.keep or Path(folder) / "rows.safetensors"
        if not path.exists():
            write(path, given.kind, int(given.size * 1e9))
        rows = len(fb.load(path))
        start = path.stat().st_size - rows * DIM * (2 if given.kind == "float16" else 1)
        first = f"featherbed {fb.__version__}, numpy {np.__version__}, {platform.machine()}, {os.cpu_count()} cores; "
        lines = [
            f"{first}{rows:,} rows of {DIM} {given.kind} numbers, {path.stat().st_size / 1e9:.1f} GB, {given.turns} turns"
        ]
        figures = {"versions": lines[0]}
        print(lines[0], flush=True)
        for part in (compare, ahead):
            more, found = part(given, path, start, rows)
            print("\n".join(more), flush=True)
            lines, figures = lines + more, figures | found
    if not given.no_write:
        (RESULTS / "disk_rows.json").write_text(json.dumps(figures, indent=1) + "\n")
        (RESULTS / "disk_rows.txt").write_text("\n".join(lines) + "\n")
    return None


if __name__ == "__main__":
    main()
