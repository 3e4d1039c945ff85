"""Rows by onnxruntime and by fb.load, of the same table: python benchmarks/onnx_rows.py [--rounds N]

GloVe (60,000 x 50; FEATHERBED_DATA) compressed by int4 and by layered codes, written as packed files and as ONNX models. The
two take turns; printed are medians of CPU microseconds a call (one thread), and bytes. Results go to
benchmarks/results/onnx_rows.json and onnx_rows.txt.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime

import featherbed as fb
from featherbed.io.opening import find_data

RESULTS = Path(__file__).parent / "results"
TABLES = {"int4": {"ratio": 7.4, "method": "int4"}, "layered": {"ratio": 8, "method": "layered"}}
BATCHES = (1, 64, 4096)


def medians(calls, count, rounds):
    """Return the median CPU microseconds of each call, the calls taking turns."""
    repeats = max(5, 2000 // count)
    found = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begun = time.process_time()
            for _ in range(repeats):
                call()
            found[name].append((time.process_time() - begun) / repeats * 1e6)
    return {name: float(np.median(times)) for name, times in found.items()}


def measure(name, table, folder, blocks, rounds):
    """Return sizes, times and the largest difference of rows."""
    packed, model = folder / f"{name}.safetensors", folder / f"{name}.onnx"
    table.save(packed)
    fb.to_onnx(table, model, blocks=blocks)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session, loaded = onnxruntime.InferenceSession(model, options), fb.load(packed)
    every = np.arange(len(loaded))
    apart = float(np.abs(session.run(None, {"ids": every})[0] - loaded[every]).max())
    found = {
        "table": name,
        "blocks": blocks,
        "packed": packed.stat().st_size,
        "onnx": model.stat().st_size,
        "apart": apart,
    }
    for count in BATCHES:
        ids = np.random.default_rng(count).integers(0, len(loaded), count)
        calls = {
            "onnxruntime": lambda ids=ids: session.run(None, {"ids": ids}),
            "load": lambda ids=ids: loaded[ids],
        }
        found[f"ids_{count}"] = medians(calls, count, rounds)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    given = parser.parse_args()
    os.environ.setdefault("FEATHERBED_THREADS", "1")
    with np.load(find_data("glove") / "glove.6B.50d.top60k.npz") as stored:
        matrix = stored["vectors"].astype(np.float32)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, asked in TABLES.items():
            table = fb.compress(matrix, **asked)
            both = (False, True) if name == "int4" else (False,)
            rows += [measure(name, table, Path(folder), blocks, given.rounds) for blocks in both]
    lines = [
        f"{'table':<22}{'packed':>11}{'.onnx':>11}"
        + "".join(f"{f'{n} ids: onnx / load':>26}" for n in BATCHES)
    ]
    for row in rows:
        times = [row[f"ids_{count}"] for count in BATCHES]
        shown = "".join(f"{one['onnxruntime']:>17.1f} / {one['load']:>6.1f}" for one in times)
        lines.append(
            f"{row['table'] + (', blocks' if row['blocks'] else ''):<22}{row['packed']:>11,}{row['onnx']:>11,}{shown}"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    about = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "onnxruntime": onnxruntime.__version__,
        "rounds": given.rounds,
    }
    (RESULTS / "onnx_rows.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    (RESULTS / "onnx_rows.txt").write_text(text)


if __name__ == "__main__":
    main()
