"""Look-ups, logits and opening of packed tables against torch, side by side: python benchmarks/lookup.py [--json FILE]

Prints ratios of medians measured in one run. Absolute times are those of this machine at this moment.
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
import torch
from timing import race

import featherbed as fb
from featherbed.kernels.threads import set_threads
from featherbed.packed.band import Band, Every, Fixed, Identity, Ragged
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable

RNG = np.random.default_rng(0)
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


def main_layout(rows, results):
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
        for threads in (1, os.cpu_count()):
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


def other_layouts(rows, results):
    """Every other layout at d = 64, batch 8,192, uniform ids, all threads; and torch's quantised operators."""
    dim, size = 64, 8192
    use(os.cpu_count())
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
    print(f"\nother layouts, d = {dim}, batch {size:,}, uniform ids, {os.cpu_count()} threads")
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


def command(results):
    """The whole process ``featherbed lookup FILE 3`` on the numpy path."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.safetensors"
        fixed(100_000, 64, "int8").save(path)
        program = Path(sys.executable).with_name("featherbed")
        times = []
        for _ in range(11):
            start = time.perf_counter()
            subprocess.run([program, "lookup", path, "3"], capture_output=True, check=True)
            times.append((time.perf_counter() - start) * 1e3)
    print(
        f"featherbed lookup FILE 3, whole process: {statistics.median(times):.0f} ms (fastest {min(times):.0f})"
    )
    results["command"] = {"median_ms": statistics.median(times), "fastest_ms": min(times)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(
        f"featherbed {fb.__version__}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    )
    results = {}
    fixed(10_000, 64, "int8")[
        np.arange(10_000)
    ]  # loads the compiled loops: small calls would stay with numpy until then
    main_layout(arguments.rows, results)
    other_layouts(arguments.rows, results)
    logits(results)
    opening(results)
    command(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
