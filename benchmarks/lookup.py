"""Look-ups, logits and opening of packed tables against torch, side by side: python benchmarks/lookup.py [--json FILE]

Prints ratios of times measured in one run, interleaved: of each contender the time that a tenth of its calls do not exceed,
so that other programs on the machine disturb little; one thread is measured in CPU time. Absolute times are those
of this machine at this moment.
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

import numpy as np
import torch
from timing import race as race_at

import featherbed as fb
from featherbed.kernels.threads import set_threads
from featherbed.packed.band import Band, Every, Fixed, Identity, Ragged
from featherbed.packed.keys import Keys
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable

RNG = np.random.default_rng(0)
QUANTILE = 0.1  # of the times of a contender: what it takes when no other program has the cores
ATOMS, CODES = 256, 8


def normal(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


def codes(rows, atoms, count=CODES):
    return RNG.integers(atoms, size=(rows, count)), RNG.random((rows, count), dtype=np.float32)


def fixed(rows, dim, kind, atoms=ATOMS, dictionary="float32"):
    indices, values = codes(rows, atoms)
    layout = Fixed.encode(indices, values, atoms, kind)
    return PackedTable(
        [Band(rows, layout, None, Matrix.encode(normal(atoms, dim), dictionary))], dim
    )


def ragged(rows, dim, kind):
    indices, values = codes(rows, ATOMS)
    row_of = np.arange(rows).repeat(CODES)
    layout = Ragged.encode(rows, row_of, indices.reshape(-1), values.reshape(-1), ATOMS, kind)
    return PackedTable(
        [Band(rows, layout, None, Matrix.encode(normal(ATOMS, dim), "float32"))], dim
    )


def levels(matrix, kind):
    return PackedTable([Band(len(matrix), Every(), Matrix.encode(matrix, kind))], matrix.shape[1])


def floats(matrix, kind):
    return PackedTable(
        [Band(len(matrix), Identity(), dictionary=Matrix.encode(matrix, kind))], matrix.shape[1]
    )


def bytes_per_row(packed):
    stored = sum(
        a.nbytes
        for name, a in packed.arrays.items()
        if "stream" in name or "values" in name or "counts" in name
    )
    if isinstance(packed.bands[0].codes, Identity):
        stored = packed.arrays["b0.dictionary"].nbytes
    return stored / len(packed)


def batches(rows, size, law, count=200):
    if law == "uniform":
        return [RNG.integers(rows, size=size) for _ in range(count)]
    weights = 1.0 / np.arange(1, rows + 1)
    edges = np.cumsum(weights / weights.sum())
    scatter = RNG.permutation(rows)  # popular ids stand anywhere in the table
    return [
        scatter[np.minimum(np.searchsorted(edges, RNG.random(size)), rows - 1)]
        for _ in range(count)
    ]


def use(threads):
    torch.set_num_threads(threads)
    set_threads(threads)


def race(contenders, batches, **options):
    """Times of contenders: CPU time where one thread does all the work, else wall time."""
    alone = torch.get_num_threads() == 1
    clock = time.thread_time_ns if alone else time.perf_counter_ns
    return race_at(contenders, batches, quantile=QUANTILE, clock=clock, **options)


def main_layout(rows, results, counts):
    """The headline: 8 codes a row, u8 index and u8 weight, against the dense float32 table."""
    print(
        f"\nV = {rows:,}, {CODES} codes a row over {ATOMS} atoms, values int8, layout fixed: time over dense float32 gather"
    )
    print(
        f"{'d':>5}{'threads':>9}{'ids':>9}{'batch':>8}{'dense ns/row':>14}{'packed ns/row':>15}{'ratio':>8}"
    )
    for dim in (64, 128):
        packed = fixed(rows, dim, "int8")
        dense = torch.from_numpy(normal(rows, dim))
        for threads in counts:
            use(threads)
            for law in ("uniform", "zipf"):
                for size in (1, 512, 8192):
                    ids = [(b, torch.from_numpy(b)) for b in batches(rows, size, law)]
                    times = race(
                        {
                            "dense": lambda pair, dense=dense: torch.nn.functional.embedding(
                                pair[1], dense
                            ),
                            "packed": lambda pair, packed=packed: packed[pair[0]],
                        },
                        ids,
                    )
                    each = {name: spent / size for name, spent in times.items()}
                    ratio = each["packed"] / each["dense"]
                    print(
                        f"{dim:>5}{threads:>9}{law:>9}{size:>8}{each['dense']:>14.1f}{each['packed']:>15.1f}{ratio:>8.2f}"
                    )
                    key = f"fixed int8 d={dim} threads={threads} {law} batch={size}"
                    results[key] = {
                        "dense_ns": each["dense"],
                        "packed_ns": each["packed"],
                        "ratio": ratio,
                    }
        del dense, packed


def other_layouts(rows, results, threads):
    """Every other layout at d = 64, batch 8,192, uniform ids; and torch's quantised operators."""
    dim, size = 64, 8192
    use(threads)
    matrix = normal(rows, dim)
    dense = torch.from_numpy(matrix)
    ops = torch.ops.quantized
    byte, nibble = ops.embedding_bag_byte_prepack(dense), ops.embedding_bag_4bit_prepack(dense)
    offsets = torch.arange(size)
    tables = {
        "fixed int8": fixed(rows, dim, "int8"),
        "fixed int4": fixed(rows, dim, "int4"),
        "fixed float16": fixed(rows, dim, "float16"),
        "fixed float32": fixed(rows, dim, "float32"),
        "fixed int8, 500 atoms": fixed(rows, dim, "int8", atoms=500),
        "ragged int8": ragged(rows, dim, "int8"),
        "ragged float32": ragged(rows, dim, "float32"),
        "float16 rows": floats(matrix, "float16"),
        "int8 rows": levels(matrix, "int8"),
        "int4 rows": levels(matrix, "int4"),
        "int3 rows": levels(matrix, "int3"),
        "int2 rows": levels(matrix, "int2"),
    }
    contenders = {
        "dense float32 (torch)": lambda pair: torch.nn.functional.embedding(pair[1], dense),
        "int8 rows (torch)": lambda pair: ops.embedding_bag_byte_rowwise_offsets(
            byte, pair[1], offsets
        ),
        "int4 rows (torch)": lambda pair: ops.embedding_bag_4bit_rowwise_offsets(
            nibble, pair[1], offsets
        ),
    }
    contenders |= {name: lambda pair, table=table: table[pair[0]] for name, table in tables.items()}
    touched = {name: bytes_per_row(table) for name, table in tables.items()}
    touched |= {
        "dense float32 (torch)": 4 * dim,
        "int8 rows (torch)": byte.shape[1],
        "int4 rows (torch)": nibble.shape[1],
    }
    times = race(
        contenders, [(b, torch.from_numpy(b)) for b in batches(rows, size, "uniform")], bursts=9
    )
    print(f"\nother layouts, d = {dim}, batch {size:,}, uniform ids, threads: {threads}")
    print(f"{'layout':<26}{'bytes touched/row':>18}{'ns/row':>9}{'over dense':>12}")
    for name, spent in times.items():
        ratio = spent / times["dense float32 (torch)"]
        print(f"{name:<26}{touched[name]:>18.1f}{spent / size:>9.1f}{ratio:>12.2f}")
        results[f"layout {name}"] = {"bytes": touched[name], "ns": spent / size, "ratio": ratio}


def logits(results):
    """One query against all rows: through the atoms, and by the dense matrix."""
    use(os.cpu_count())
    rows, dim, atoms = 267_735, 400, 500
    dense = torch.from_numpy(normal(rows, dim))
    print(f"\nlogits of one query, V = {rows:,}, d = {dim}, {CODES} codes a row, K = {atoms}")
    for kind in ("int8", "float16", "float32"):
        packed = fixed(rows, dim, kind, atoms=atoms)
        queries = [normal(dim) for _ in range(50)]
        times = race(
            {
                "dense": lambda q: torch.mv(dense, torch.from_numpy(q)),
                "packed": lambda q, packed=packed: packed.logits(q),
            },
            queries,
            bursts=7,
            burst=5,
        )
        gain = times["dense"] / times["packed"]
        print(
            f"  values {kind}: dense {times['dense'] / 1e6:.2f} ms, packed {times['packed'] / 1e6:.2f} ms: {gain:.1f}x faster"
        )
        results[f"logits {kind}"] = {
            "dense_ms": times["dense"] / 1e6,
            "packed_ms": times["packed"] / 1e6,
            "faster": gain,
        }


OPEN = """
import sys, time
import featherbed as fb
from featherbed.packed import file
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before, start = resident(), time.perf_counter()
packed = fb.load(sys.argv[1])
print((time.perf_counter() - start) * 1e3, (resident() - before) / 1e6, len(packed))
"""


def opening(results):
    """Opening a file of 1 GB."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.safetensors"
        floats(normal(2_000_000, 125), "float32").save(path)
        size = path.stat().st_size / 1e9
        runs = [
            [
                float(x)
                for x in subprocess.run(
                    [sys.executable, "-c", OPEN, path], capture_output=True, text=True, check=True
                ).stdout.split()
            ]
            for _ in range(5)
        ]
    spent, grown = (statistics.median(run[i] for run in runs) for i in (0, 1))
    print(f"\nopening {size:.2f} GB: {spent:.1f} ms, {grown:.1f} MB more resident memory")
    results["opening"] = {"gigabytes": size, "ms": spent, "resident_mb": grown}


def one_row(results):
    """One row by id and by key, by numpy alone and by compiled loops, beside torch on one id."""
    use(1)
    rows, dim = 100_000, 64
    matrix = normal(rows, dim)
    dense = torch.nn.Embedding.from_pretrained(torch.from_numpy(matrix))
    coded = fixed(rows, dim, "int8")
    tables = {
        "fixed int8": coded,
        "ragged int8": ragged(rows, dim, "int8"),
        "float16 rows": floats(matrix, "float16"),
        "int8 rows": levels(matrix, "int8"),
        "int2 rows": levels(matrix, "int2"),
        "by key": coded.replace(keys=Keys.of(f"word{i}" for i in range(rows))),
    }
    ids = [(int(i), f"word{i}", torch.tensor(int(i))) for i in RNG.integers(rows, size=400)]
    print(f"\none row, V = {rows:,}, d = {dim}: microseconds, and time over torch's embedding")
    for engine in ("numpy", "numba"):
        os.environ["FEATHERBED_KERNELS"] = engine
        contenders = {"torch": lambda one: dense(one[2])}
        for name, table in tables.items():
            which = 1 if name == "by key" else 0
            fresh = table.replace()  # the way rows are read is chosen anew
            contenders[name] = lambda one, fresh=fresh, which=which: fresh[one[which]]
        times = race(contenders, ids, bursts=9, burst=50)
        for name, spent in times.items():
            ratio = spent / times["torch"]
            print(f"  {engine}  {name:<14}{spent / 1e3:>8.2f} us{ratio:>8.2f}")
            results[f"one row {name}, {engine}"] = {"us": spent / 1e3, "ratio": ratio}
    del os.environ["FEATHERBED_KERNELS"]


FIRST = """
import sys, time
import numpy as np
import featherbed as fb
packed = fb.load(sys.argv[1])
start = time.process_time()
packed[np.arange(4096)]
print(time.process_time() - start)
"""


def spend(arguments, **environment):
    """Wall and CPU milliseconds of a process, and what it printed."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        arguments, capture_output=True, text=True, check=True, env=os.environ | environment
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall * 1e3, cpu * 1e3, done.stdout


def command(results):
    """The whole process ``featherbed lookup FILE 3``, beside a process that imports numpy only."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.safetensors"
        fixed(100_000, 64, "int8").save(path)
        lookup = [sys.executable, "-m", "featherbed.cli", "lookup", str(path), "3"]
        cache = {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "PYTHONDONTWRITEBYTECODE": ""}
        pairs = [
            (spend(lookup, **cache), spend([sys.executable, "-c", "import numpy"], **cache))
            for _ in range(12)
        ][1:]  # the first process writes the bytecode
        found = {
            f"{name}_{kind}_ms": statistics.median(pair[which][at] for pair in pairs)
            for which, name in enumerate(("lookup", "numpy"))
            for at, kind in enumerate(("wall", "cpu"))
        }
        ratio = found["lookup_cpu_ms"] / found["numpy_cpu_ms"]
        print(
            f"\nfeatherbed lookup FILE 3, whole process: {found['lookup_wall_ms']:.0f} ms "
            f"({found['lookup_cpu_ms']:.0f} ms CPU), {ratio:.2f} times a process that imports numpy "
            f"({found['numpy_wall_ms']:.0f} ms, {found['numpy_cpu_ms']:.0f} ms CPU)"
        )
        results["command"] = found | {"ratio": ratio}
        first = [sys.executable, "-c", FIRST, str(path)]
        cold, warm = (
            float(spend(first, NUMBA_CACHE_DIR=f"{folder}/code")[2]) for _ in ("cold", "warm")
        )
    print(
        f"first look-up of 4,096 rows: {cold:.2f} s CPU on a cold cache, {warm:.2f} s on a warm one"
    )
    results["first look-up"] = {"cold_cpu_s": cold, "warm_cpu_s": warm}


LIMITS = {  # figure: result, field, limit
    "one row by id, compiled, us": ("one row fixed int8, numba", "us", 6.0),
    "one row by id, numpy, us": ("one row fixed int8, numpy", "us", 6.0),
    "one row by key, compiled, us": ("one row by key, numba", "us", 10.0),
    "one row by key, numpy, us": ("one row by key, numpy", "us", 10.0),
    "ragged int8 over dense": ("layout ragged int8", "ratio", 1.4),
    "float16 rows over dense": ("layout float16 rows", "ratio", 1.0),
    "int2 rows over dense": ("layout int2 rows", "ratio", 1.2),
    "fixed int8, d = 128, uniform": (
        "fixed int8 d=128 threads={} uniform batch=8192",
        "ratio",
        0.75,
    ),
    "fixed int8, d = 128, Zipf": ("fixed int8 d=128 threads={} zipf batch=8192", "ratio", 0.9),
    "featherbed lookup FILE 3, ms": ("command", "lookup_wall_ms", 220.0),
}


def summary(results):
    """Every figure with a limit."""
    print(f"\n{'figure':<34}{'measured':>10}{'limit':>8}")
    for name, (key, field, limit) in LIMITS.items():
        found = results[key.format(max(results["threads"]))][field]
        print(f"{name:<34}{found:>10.2f}{limit:>8.2f}{'' if found <= limit else '  above'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count()}))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(
        f"featherbed {fb.__version__}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    )
    results = {}
    fixed(10_000, 64, "int8")[
        np.arange(10_000)
    ]  # loads the compiled loops: small calls would stay with numpy until then
    results["threads"] = arguments.threads
    main_layout(arguments.rows, results, arguments.threads)
    other_layouts(arguments.rows, results, max(arguments.threads))
    logits(results)
    one_row(results)
    opening(results)
    command(results)
    summary(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
