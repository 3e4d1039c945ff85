"""This checkout against another one, side by side: python benchmarks/against.py OTHER [case ...]

OTHER is the root of another checkout (``git worktree add ../before COMMIT``). Each version runs in a process of its own; they
take turns in short bursts, so that a busy machine is busy for both. Printed are ratios of medians of this one run (below 1:
this checkout is faster), of CPU seconds and of wall time. Results go to benchmarks/results/against.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
BURSTS, CALLS = 31, 6


def packed_cases(fb, np):
    """Return look-ups and scores of packed tables: name -> function of a number."""
    import torch

    rng = np.random.default_rng(0)
    rows, dim = 200_000, 64
    generator = torch.Generator().manual_seed(0)
    anchor = fb.AnchorTable(rows, dim, anchors=256, slots=8, generator=generator)
    with torch.no_grad():
        anchor.transform.mul_(torch.rand(rows, 8, generator=generator) > 0.4)
    dense = fb.DenseTable(rows, dim, generator=generator)
    tables = {
        "ragged": anchor.pack(values="int8", layout="ragged"),
        "fixed": anchor.pack(values="int8", layout="fixed"),
        "float32": dense.pack(),
        "float16": dense.pack(dictionary="float16"),
        "int4": fb.QuantizedTable.from_dense(dense.weight.detach()[:50_000], bits=4).pack(),
    }
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, table in tables.items():
            path = Path(folder) / f"{name}.safetensors"
            fb.save(table, path)
            loaded = fb.load(path)
            batches = rng.integers(len(loaded), size=(16, 8192))
            query = rng.standard_normal((1, dim)).astype(np.float32)
            found[f"lookup {name}"] = lambda n, t=loaded, b=batches: t[b[n % 16]]
            found[f"one row {name}"] = lambda n, t=loaded: [t[i] for i in range(n, n + 200)]
            if name in ("ragged", "fixed", "float32"):
                found[f"search {name}"] = lambda _, t=loaded, q=query: t.search(q, k=10)
    return found


def training_cases(fb, np):
    """Return training steps: forward, backward by a given gradient, update."""
    import torch

    rng = np.random.default_rng(1)
    rows, dim, batch = 500_000, 64, 16_384
    order = rng.permutation(rows)
    cumulated = np.cumsum(1 / np.arange(1, rows + 1))
    drawn = np.searchsorted(cumulated, rng.random((16, batch)) * cumulated[-1])
    batches = [torch.from_numpy(order[ids]) for ids in drawn]
    gradient = torch.randn(batch, dim, generator=torch.Generator().manual_seed(0)) * 1e-3

    def stepping(table, optimizer):
        def step(number):
            optimizer.zero_grad()
            table(batches[number % 16]).backward(gradient)
            optimizer.step()

        return step

    slots = fb.AnchorTable(rows, dim, anchors=256, slots=8)
    dense = fb.DenseTable(rows, dim, sparse=True)
    plain = fb.AnchorTable(20_000, dim, anchors=64)
    small = [ids % 20_000 for ids in batches]
    penalty = {slots.transform: fb.NonNegativeL1(1e-5)}
    yogi = fb.Yogi(plain.parameters(), penalties={plain.transform: fb.NonNegativeL1(1e-5)})

    def dense_gradients(number):
        yogi.zero_grad()
        plain(small[number % 16]).backward(gradient)
        yogi.step()

    return {
        "step slots yogi": stepping(slots, fb.Yogi(slots.parameters(), penalties=penalty)),
        "step dense adamw": stepping(dense, fb.AdamW(dense.parameters())),
        "step dense gradients": dense_gradients,
        "bag slots": lambda n: slots.bag(batches[n % 16].reshape(-1, 8)),
    }


def serve_bursts():
    """Run bursts as asked on standard input: {"case": name, "first": n} -> [CPU seconds, wall seconds]."""
    import numpy as np

    import featherbed as fb

    cases = packed_cases(fb, np) | training_cases(fb, np)
    for call in cases.values():
        call(0)
    print(json.dumps([*cases]), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        call, first = cases[asked["case"]], asked["first"]
        call(first)
        cpu, wall = time.process_time(), time.perf_counter()
        for number in range(first + 1, first + 1 + CALLS):
            call(number)
        print(json.dumps([time.process_time() - cpu, time.perf_counter() - wall]), flush=True)


class Version:
    """One checkout, in a process of its own."""

    def __init__(self, root):
        environment = {**os.environ, "PYTHONPATH": str(Path(root) / "src")}
        command = [sys.executable, str(HERE / "against.py"), "--serve"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )
        self.cases = json.loads(self.process.stdout.readline())
        self.environment = environment

    def burst(self, case, first):
        self.process.stdin.write(json.dumps({"case": case, "first": first}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def command(self, arguments):
        """Return CPU and wall seconds of a whole process."""
        wall, before = time.perf_counter(), os.times()
        subprocess.run(
            [sys.executable, *arguments],
            env=self.environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        after = os.times()
        spent = (
            after.children_user
            - before.children_user
            + after.children_system
            - before.children_system
        )
        return [spent, time.perf_counter() - wall]


def compare(versions, measure):
    """Return the medians of [CPU, wall] of both versions, which take turns."""
    spent = [[], []]
    for turn in range(BURSTS):
        for which in (0, 1) if turn % 2 else (1, 0):
            spent[which].append(measure(versions[which], turn))
    return [[statistics.median(part) for part in zip(*one, strict=True)] for one in spent]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", nargs="?")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve_bursts()
        return
    versions = [Version(HERE.parent), Version(given.other)]
    results = {}
    measures = {
        case: (lambda version, turn, case=case: version.burst(case, turn * (CALLS + 1)))
        for case in versions[0].cases
    }
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/table.safetensors"
        make = f"import featherbed as fb; fb.save(fb.DenseTable(1000, 16), {path!r})"
        subprocess.run([sys.executable, "-c", make], check=True, env=versions[0].environment)
        lookup = ["-c", "from featherbed.cli import main; main()", "lookup", path, "3"]
        measures["featherbed lookup"] = lambda version, _: version.command(lookup)
        measures["import featherbed"] = lambda version, _: version.command(
            ["-c", "import featherbed"]
        )
        print(
            f"{'case':<24} {'CPU ratio':>10} {'wall ratio':>11} {'CPU ms here':>12} {'CPU ms other':>13}"
        )
        for case, measure in measures.items():
            if given.cases and not any(part in case for part in given.cases):
                continue
            here, other = compare(versions, measure)
            results[case] = {"cpu": here[0] / other[0], "wall": here[1] / other[1]}
            times = f"{1e3 * here[0]:>12.2f} {1e3 * other[0]:>13.2f}"
            print(
                f"{case:<24} {here[0] / other[0]:>10.3f} {here[1] / other[1]:>11.3f} {times}",
                flush=True,
            )
    (HERE / "results" / "against.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
