"""Tables divided among 1, 2 and 4 processes: memory and messages, against docs/scale.md.

    python benchmarks/processes.py [--rows 500003]
    python benchmarks/processes.py --fused
    python benchmarks/processes.py --ratings ratings.dat [--folder DIR]

For every table and number of processes: the growth of a process (resident bytes after some steps,
less those of a process with a small table), the bytes of its parameters and optimizer state, the
collectives of a step (torch's profiler) and the bytes that its all-to-alls send to other processes.
``--fused`` compares fb.Adagrad on the rows of one process with FBGEMM's fused Adagrad. ``--ratings``
trains a recommender of MovieLens-1M in one process and in two, with three seeds (splits, initial
values and orders); runs that are already in the folder are not repeated.
"""

import argparse
import ctypes
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads must not occupy a core

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import featherbed as fb

RESULTS = Path(__file__).parent / "results"
DIM, BATCH, SMALL, WORLDS = 64, 4096, 1000, (1, 2, 4)
ANCHORS, MANY, SLOTS = 32, 500, 8
TABLES = {
    "anchor": lambda rows: fb.AnchorTable(rows, DIM, anchors=ANCHORS, sparse=True),
    "slots": lambda rows: fb.AnchorTable(rows, DIM, anchors=MANY, slots=SLOTS),
    "dense": lambda rows: fb.DenseTable(rows, DIM, sparse=True),
}
CASES = (("anchor", "rows"), ("anchor", "codes"), ("slots", "rows"), ("dense", "rows"))


def expected(name, wire, rows, world):
    """Return the bytes of docs/scale.md: held, ids sent, rows or gradients sent, atoms."""
    width = {"anchor": ANCHORS, "slots": SLOTS, "dense": DIM}[name]
    atoms = {"anchor": ANCHORS, "slots": MANY, "dense": 0}[name]
    support = 2 * SLOTS if name == "slots" else 0
    held = (12 * width + support + 4) * -(-rows // world) + 12 * atoms * DIM
    sent = BATCH * (1 - 1 / world)
    return {
        "held": held,
        "ids": 8 * sent,
        "rows": 4 * (ANCHORS if wire == "codes" else DIM) * sent,
        "atoms": 4 * atoms * DIM,
    }


def resident():
    """Return the resident bytes of this process, less files and what malloc keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Sent:
    """Counts what all-to-alls send to other processes, by the dtype of the elements."""

    def __init__(self, rank):
        self.rank, self.bytes, self.inner = rank, [], dist.all_to_all_single

    def __call__(self, output, input, output_split_sizes=None, input_split_sizes=None, **how):  # noqa: A002
        world = dist.get_world_size()
        splits = input_split_sizes or [len(input) // world] * world
        away = (sum(splits) - splits[self.rank]) * input[:1].numel() * input.element_size()
        self.bytes.append((str(input.dtype).removeprefix("torch."), away))
        return self.inner(output, input, output_split_sizes, input_split_sizes, **how)


def model_of(name, wire, rows):
    with torch.device("meta"):
        model = nn.Sequential(TABLES[name](rows))
    model.append(nn.Linear(DIM, 1))
    model = fb.distributed.shard(model, sharding="row_wise", wire=wire)
    return model, fb.Yogi(model.parameters())


def steps(model, optimizer, rows, count):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randint(rows, (BATCH,))).square().mean().backward()
        optimizer.step()


def work(rank, world, folder, name, wire, rows):
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting-{name}-{wire}-{world}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    torch.manual_seed(rank)
    small = model_of(name, wire, SMALL)
    steps(*small, SMALL, 3)
    before = resident()
    model, optimizer = model_of(name, wire, rows)
    steps(model, optimizer, rows, 3)
    grown = resident() - before
    table = model.module[0].shard
    state = [v for p in table.parameters() for v in optimizer.state[p].values()]
    held = [*table.parameters(), *table.buffers(), *(v for v in state if torch.is_tensor(v))]
    row_count = len(next(iter(table._parameters.values()))) if name == "dense" else None
    row_count = row_count or len(table._parameters["transform"])
    bytes_held = sum(tensor.nbytes for tensor in held) + 4 * row_count  # and a stamp for each row
    dist.all_to_all_single = sent = Sent(rank)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        steps(model, optimizer, rows, 1)
    dist.all_to_all_single = sent.inner
    collectives = Counter(event.name for event in profile.events() if "gloo:" in event.name)
    found = {"grown": grown, "held": bytes_held, "collectives": dict(collectives)}
    found |= {"sent": sent.bytes}
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    dist.barrier()  # nobody leaves while another still talks to it
    dist.destroy_process_group()


def measure(name, wire, rows, world):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (world, folder, name, wire, rows), nprocs=world)
        each = [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(world)]

    def sent(kind, place):  # forward first, backward last; nothing is sent by one process
        found = [[0, *(b for k, b in one["sent"] if k == kind)] for one in each]
        return sum(max(b) if place is None else (b[1:] or b)[place] for b in found) / world

    return {
        "table": name,
        "wire": wire,
        "processes": world,
        "resident": max(one["grown"] for one in each),
        "held": max(one["held"] for one in each),
        "ids": sent("int64", None),
        "rows": sent("float32", 0),
        "gradients": sent("float32", -1),
        "collectives": each[0]["collectives"],
        "expected": expected(name, wire, rows, world),
    }


def timed(step, seconds=8):
    """Return the seconds and the processor's seconds of a step."""
    for _ in range(3):
        step()
    begun, used, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - begun < seconds:
        step()
        count += 1
    return (time.perf_counter() - begun) / count, (time.process_time() - used) / count


def compare_fused(rows, batch=65_536):
    """Return the times of a step: FBGEMM's look-up with fused Adagrad, and a table with fb.Adagrad."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    draw = torch.Generator().manual_seed(0)
    batches = [(torch.rand(batch, generator=draw) ** 3 * rows).long() for _ in range(8)]
    ends, found, number = torch.arange(batch + 1), {}, iter(range(1 << 60))
    for kind in ("EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"):
        fused = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            pooling_mode=PoolingMode.NONE,
            optimizer=EmbOptimType[kind],
            learning_rate=0.05,
        )
        for weight in fused.split_embedding_weights():
            weight.normal_(0, 0.1)
        step = lambda: fused(batches[next(number) % 8], ends).square().sum().backward()  # noqa: E731, B023
        found[f"FBGEMM {kind}"] = timed(step)
    table = fb.DenseTable(rows, DIM, sparse=True)
    for how in ("without penalty", "with L1"):
        penalties = {} if how == "without penalty" else {table.weight: fb.L1(1e-5)}
        optimizer = fb.Adagrad(table.parameters(), lr=0.05, penalties=penalties)

        def ours(optimizer=optimizer):
            optimizer.zero_grad()
            table(batches[next(number) % 8]).square().sum().backward()
            optimizer.step()

        found[f"fb.Adagrad {how}"] = timed(ours)
    return {name: {"seconds": wall, "cpu": cpu} for name, (wall, cpu) in found.items()}


OPTIONS = ["--users", "anchor:anchors=16", "--items", "anchor:anchors=16"]
OPTIONS += ["--set", "anchors.nonzeros=50000", "--set", "training.epochs=8"]


def compare_ratings(source, folder, seeds=3):
    """Return the test errors of one process and of two, and what tells whether they differ."""
    errors = {1: [], 2: []}
    for seed in range(seeds):
        for world, found in errors.items():
            out = folder / f"ratings-{seed}-{world}"
            start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
            train = ["-m", "featherbed", "train", "ratings", str(source), *OPTIONS]
            if not (out / "metrics.json").exists():
                command = [*start, *train, "--seed", str(seed), "--out", str(out), "--quiet"]
                subprocess.run(command, check=True)
            found.append(json.loads((out / "metrics.json").read_text())["test"]["mse"])
    one, two = (np.array(errors[world]) for world in (1, 2))
    return {
        "options": OPTIONS,
        "one_process": errors[1],
        "two_processes": errors[2],
        "largest_difference": float(abs(two - one).max()),
        "standard_error_over_seeds": float(one.std(ddof=1) / seeds**0.5),
    }


def keep(name, found):
    """Write a record and print it."""
    text = json.dumps(found, indent=1)
    (RESULTS / name).write_text(text + "\n")
    print(text)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=500_003)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--ratings", type=Path)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.fused:
        found = {"rows": 1_000_000, "dim": DIM, "steps": compare_fused(1_000_000)}
        keep("processes_fused.json", found)
    elif given.ratings:
        with tempfile.TemporaryDirectory() as fresh:
            found = compare_ratings(given.ratings, given.folder or Path(fresh))
        keep("processes_ratings.json", found)
    else:
        runs = [measure(*case, given.rows, world) for case in CASES for world in WORLDS]
        found = {"rows": given.rows, "dim": DIM, "batch": BATCH, "runs": runs}
        keep("processes.json", found)


if __name__ == "__main__":
    main()
