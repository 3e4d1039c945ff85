"""Training steps of compact tables side by side with torch's embeddings: python benchmarks/train_step.py [part ...]

Parts: step, rows, memory, planted, softmax; all of them by default. Prints ratios of medians measured in one run, contenders
taking turns; absolute times are those of this machine at this moment. Results go to benchmarks/results/train_step.json and
train_step.txt, each part replacing what it wrote before.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

import featherbed as fb
from featherbed.kernels.threads import set_threads

RESULTS = Path(__file__).parent / "results"
THREADS = sorted({1, os.cpu_count()}, reverse=True)
BATCH, DIM, ANCHORS, SLOTS, SCAN = 65_536, 64, 256, 8, 16
RNG = np.random.default_rng(0)


class Page:
    """What one part prints and measures."""

    def __init__(self):
        self.lines, self.figures = [], {}

    def line(self, text=""):
        print(text, flush=True)
        self.lines.append(text)


class Zipf:
    """Ids by Zipf's law (exponent 1), popular ones anywhere in the table; every batch is fresh."""

    def __init__(self, rows):
        self.cumulated = np.cumsum(1 / np.arange(1, rows + 1))
        self.order = RNG.permutation(rows)

    def batch(self, count=BATCH):
        drawn = np.searchsorted(self.cumulated, RNG.random(count) * self.cumulated[-1])
        return torch.from_numpy(self.order[drawn])


class Contender:
    """A module and its optimizer; ``step(ids)`` is forward, backward by a given gradient, and the update."""

    def __init__(self, module, optimizer):
        self.module, self.optimizer = module, optimizer
        self.gradient = torch.randn(BATCH, DIM) * 1e-3

    def step(self, ids):
        self.optimizer.zero_grad()
        self.module(ids).backward(self.gradient)
        self.optimizer.step()

    def touch(self):
        """Write all of the optimizer's state once, as a long run does: the first write to a page faults."""
        for state in self.optimizer.state.values():
            for tensor in state.values():
                if isinstance(tensor, torch.Tensor):
                    tensor.add_(0)


def anchors(rows, rule=fb.Yogi, **settings):
    table = fb.AnchorTable(
        rows,
        DIM,
        anchors=ANCHORS,
        slots=SLOTS,
        scan_every=SCAN,
        init=fb.HalfNormal(0.1),
        **settings,
    )
    return Contender(
        table,
        rule(table.parameters(), lr=1e-2, penalties={table.transform: fb.NonNegativeL1(1e-6)}),
    )


def dense_rows(rows, optimizer, sparse):
    module = nn.Embedding(rows, DIM, sparse=sparse)
    return Contender(module, optimizer(module.parameters()))


class FusedTable:
    """FBGEMM's fused table on the CPU with row-wise Adagrad: the backward pass updates the rows."""

    def __init__(self, rows):
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        specs = [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)]
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            specs, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=1e-2
        )
        self.offsets, self.gradient = torch.arange(BATCH + 1), torch.randn(BATCH, DIM) * 1e-3

    def step(self, ids):
        self.module(ids, self.offsets).backward(self.gradient)

    def touch(self):
        for weight in self.module.split_embedding_weights():
            weight.normal_()
        for states in self.module.split_optimizer_states():
            for state in states:
                state.add_(0)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


def sparse_adam(parameters):
    return torch.optim.SparseAdam(parameters, lr=1e-3)


def use(threads):
    torch.set_num_threads(threads)
    set_threads(threads)


def take_turns(contenders, zipf, turns, warm=3):
    """Return the median wall and processor times of a step, in ms, of turns of ``SCAN`` steps (fewer for slow ones).

    Scans are in the mean. Processor times count where other work shares the machine.
    """
    spent = {name: [] for name in contenders}
    for contender, _ in contenders.values():
        for _ in range(warm):
            contender.step(zipf.batch())
        contender.touch()
    for _ in range(turns):
        for name, (contender, steps) in contenders.items():
            batches = [zipf.batch() for _ in range(steps)]
            time.sleep(0.02)
            contender.step(zipf.batch())  # wakes its threads, refills its caches
            start = time.perf_counter(), time.process_time()
            for ids in batches:
                contender.step(ids)
            end = time.perf_counter(), time.process_time()
            spent[name].append([(b - a) / steps * 1e3 for a, b in zip(start, end, strict=True)])
    return {name: np.median(times, axis=0).tolist() for name, times in spent.items()}


def step(page):
    """A full step at V = 1e6: ours against sparse and dense Adam over dense rows."""
    rows, zipf = 1_000_000, Zipf(1_000_000)
    distinct = statistics.median(len(zipf.batch().unique()) for _ in range(5))
    page.line(
        f"a full step, V = {rows:,}, batch {BATCH:,} ({distinct:,.0f} distinct), d = {DIM}, {ANCHORS} anchors, {SLOTS} slots"
    )
    page.line(
        f"{'threads':>8}  {'':<44}{'ms':>8}{'CPU ms':>8}{'ours is faster by':>19}{'in CPU time':>13}"
    )
    for threads in THREADS:
        use(threads)
        contenders = {
            "ours: slots, Yogi, lazy prox, scans": (anchors(rows), SCAN),
            "ours: slots, SGD, lazy prox, scans": (anchors(rows, fb.SGD), SCAN),
            "nn.Embedding(sparse=True) + SparseAdam": (dense_rows(rows, sparse_adam, True), 4),
            "nn.Embedding + Adam(fused=True)": (dense_rows(rows, adam, False), 2),
        }
        if find_spec("fbgemm_gpu"):
            contenders["FBGEMM's fused table, row-wise Adagrad"] = (FusedTable(rows), 4)
        times = take_turns(contenders, zipf, 9)
        ours, own = next(iter(times.values()))
        for name, (spent, busy) in times.items():
            page.line(
                f"{threads:>8}  {name:<44}{spent:>8.1f}{busy:>8.1f}{spent / ours:>18.2f}x{busy / own:>12.2f}x"
            )
            page.figures[f"{name}, threads={threads}"] = {
                "ms": spent,
                "cpu_ms": busy,
                "ours_faster": spent / ours,
                "ours_faster_in_cpu_time": busy / own,
            }
    limit(page, distinct)


def limit(page, distinct):
    """Print what the step moves against what this machine moves."""
    source, target = torch.ones(1 << 25), torch.empty(1 << 25)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    bandwidth = 2 * source.nbytes / statistics.median(times)
    rows = (
        BATCH * DIM * 4 * 2 + distinct * DIM * 4 * 2
    )  # rows out and their gradients in; composed rows there and back
    state = (
        distinct * 64 * (4 + 2 * 4)
    )  # lines of values, both moments and stamps: read by the look-up, read and written by the step
    least = (rows + state) / bandwidth * 1e3
    page.line(
        f"limit: {rows + state:,.0f} bytes a step at {bandwidth / 1e9:.1f} GB/s (copy of 128 MB) are {least:.1f} ms"
    )
    page.figures["limit"] = {"bytes": rows + state, "bandwidth": bandwidth, "ms": least}


def rows(page):
    """Time for each distinct row, by the size of the table."""
    use(THREADS[0])
    sizes = (100_000, 1_000_000, 10_000_000)
    made = {size: (anchors(size), Zipf(size)) for size in sizes}
    spent = {size: [] for size in sizes}
    for turn in range(8):
        for size, (contender, zipf) in made.items():
            batches = [zipf.batch() for _ in range(SCAN)]
            distinct = sum(len(ids.unique()) for ids in batches)
            contender.step(batches[0])
            start = time.perf_counter(), time.process_time()
            for ids in batches:
                contender.step(ids)
            end = time.perf_counter(), time.process_time()
            if turn:
                spent[size].append(
                    [(b - a) / distinct * 1e9 for a, b in zip(start, end, strict=True)]
                )
    page.line("time for each distinct row")
    base = np.median(spent[sizes[0]], axis=0)
    for size in sizes:
        each = np.median(spent[size], axis=0)
        ratio = each / base
        page.line(
            f"  V = {size:>10,}: {each[0]:>6.0f} ns, {ratio[0]:.2f} times that at {sizes[0]:,}; "
            f"CPU {each[1]:.0f} ns, {ratio[1]:.2f} times"
        )
        page.figures[f"V={size}"] = {
            "ns": each[0],
            "ratio": ratio[0],
            "cpu_ns": each[1],
            "cpu_ratio": ratio[1],
        }


def peak(which, size):
    """Train three steps in this process; return the bytes it held at most."""
    use(os.cpu_count())
    contender = anchors(size) if which == "slots" else dense_rows(size, torch.optim.Adam, False)
    for _ in range(3):
        contender.step(torch.randint(size, (BATCH,)))
    status = Path(
        "/proc/self/status"
    ).read_text()  # getrusage would count what the parent process held when it forked
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def memory(page, size=10_000_000):
    """Peak memory of training, each in a process of its own."""
    found = {}
    for which in ("slots", "dense"):
        code = f"import train_step; print(train_step.peak({which!r}, {size}))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
        found[which] = int(done.stdout)
    share = found["slots"] / found["dense"]
    page.line(f"peak memory of training, V = {size:,}, d = {DIM} (whole processes)")
    page.line(
        f"  slots = {SLOTS}, Yogi: {found['slots'] / 1e9:.2f} GB; "
        f"nn.Embedding + Adam: {found['dense'] / 1e9:.2f} GB; {share:.1%}"
    )
    page.figures = {**found, "share": share}


def planted(page, size=20_000, atoms=64, dim=32, steps=3000):
    """A table of 3 planted weights a row: slots from a random support against dense rows, the anchors known."""
    use(1)
    page.line(
        f"planted: V = {size:,}, {atoms} anchors, 3 weights a row, d = {dim}; {steps} steps of 4,096 rows"
    )
    for slots in (SLOTS, None):
        generator = torch.Generator().manual_seed(0)
        known = torch.randn(atoms, dim, generator=generator) / dim**0.5
        support = torch.stack([torch.randperm(atoms, generator=generator)[:3] for _ in range(size)])
        true = torch.zeros(size, atoms).scatter_(
            1, support, 0.5 + torch.rand(size, 3, generator=generator)
        )
        target = true @ known
        table = fb.AnchorTable(
            size,
            dim,
            anchors=atoms,
            slots=slots,
            sparse=True,
            init=fb.HalfNormal(0.1),
            generator=generator,
        )
        table.atoms.data.copy_(known)
        table.atoms.requires_grad_(False)
        held = table.transform
        optimizer = fb.Yogi([held], lr=0.01, penalties={held: fb.NonNegativeL1(1e-4)})
        for number in range(steps):
            optimizer.param_groups[0]["lr"] = 0.01 * min(1.0, 2 * (1 - number / steps))
            ids = torch.randint(size, (4096,), generator=generator)
            optimizer.zero_grad()
            ((table(ids) - target[ids]).square().sum(1).mean() * 40).backward()
            optimizer.step()
        values = table.transform.detach()
        dense = (
            values
            if slots is None
            else torch.zeros(size, atoms).scatter_(1, table.support.long(), values)
        )
        error = float((table.weight.detach() - target).square().sum() / target.square().sum())
        found = float(((dense > 0.05) & (true > 0)).sum() / (true > 0).sum())
        name = "dense rows" if slots is None else f"{slots} slots"
        page.line(
            f"  {name:<12}{found:>7.1%} of the planted pairs, relative error {error:.5f}, "
            f"{float((dense != 0).sum()) / size:.2f} weights a row"
        )
        page.figures[name] = {"found": found, "error": error}


def softmax(page):
    """A step of sampled softmax: time for each distinct row, by the size of the table."""
    use(os.cpu_count())
    sizes, positions, samples = (100_000, 1_000_000), 512, 16_384
    made, spent = {}, {size: [] for size in sizes}
    for size in sizes:
        contender = anchors(size)
        loss = fb.SampledSoftmax(
            contender.module, samples, fb.Uniform(size, generator=torch.Generator().manual_seed(0))
        )
        made[size] = contender, loss, Zipf(size)
    hidden = torch.randn(positions, DIM)
    for turn in range(9):
        for size, (contender, loss, zipf) in made.items():
            batches = [zipf.batch(positions) for _ in range(4)]
            touched = 4 * samples + sum(len(ids.unique()) for ids in batches)
            start = time.perf_counter()
            for ids in batches:
                contender.optimizer.zero_grad()
                loss(hidden, ids).backward()
                contender.optimizer.step()
            if turn:
                spent[size].append((time.perf_counter() - start) / touched * 1e9)
    small, large = (statistics.median(spent[size]) for size in sizes)
    page.line(
        f"sampled softmax, {positions:,} positions, {samples:,} samples: {small:.0f} ns a distinct row at V = {sizes[0]:,}, "
        f"{large:.0f} ns at {sizes[1]:,}: {large / small:.2f} times"
    )
    page.figures = {"small_ns": small, "large_ns": large, "ratio": large / small}


PARTS = {"step": step, "rows": rows, "memory": memory, "planted": planted, "softmax": softmax}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument(
        "--threads", type=int, nargs="*", default=THREADS, help="of parts step, rows"
    )
    given = parser.parse_args()
    THREADS[:] = given.threads
    stored = RESULTS / "train_step.json"
    results = json.loads(stored.read_text()) if stored.exists() else {}
    versions = f"featherbed {fb.__version__}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    print(versions)
    for name in given.parts or PARTS:
        page = Page()
        PARTS[name](page)
        results[name] = {"versions": versions, "lines": page.lines, "figures": page.figures}
        RESULTS.mkdir(exist_ok=True)
        stored.write_text(json.dumps(results, indent=1) + "\n")
        text = [line for part in results.values() for line in ["", *part["lines"]]]
        (RESULTS / "train_step.txt").write_text("\n".join([versions, *text]) + "\n")


if __name__ == "__main__":
    main()
