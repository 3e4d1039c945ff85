"""A training step of 26 columns side by side: python benchmarks/collection.py [--steps N]

Contenders take turns on the same batches: one fb.Collection (anchor tables with slots, Yogi and the
lazy proximal step), 26 nn.EmbeddingBag(sparse=True) with SparseAdam, and FBGEMM's fused CPU kernel
with row-wise Adagrad where it is installed. Column sizes are Criteo's, scaled to a million rows.
Prints CPU and wall seconds of a step (medians, and a sixteenth of what a scan of slots adds: one is
due every 16 steps) and their ratios; results go to
benchmarks/results/collection.json.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import featherbed as fb
from research.sources.clicks import GeneratedClicks, scaled_cardinalities

DIM, BATCH, ROWS, SCAN = 16, 8192, 1_000_000, 16
SPEC = "anchor:anchors=256,slots=8,init=halfnormal(transform_std=0.1)"


class Bags(nn.Module):
    """A bag of its own for every column."""

    def __init__(self, sizes):
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(size, DIM, mode="sum", sparse=True) for size in sizes
        )

    def forward(self, ids):
        columns = ids.T.contiguous()
        return torch.cat([b(c[:, None]) for b, c in zip(self.bags, columns, strict=True)], dim=1)


class Step:
    """A module and its optimizer."""

    def __init__(self, module, optimizer):
        self.module, self.optimizer = module, optimizer

    def __call__(self, ids, gradient):
        self.optimizer.zero_grad()
        self.module(ids).backward(gradient)
        self.optimizer.step()

    def touch(self):
        """Write all of the optimizer's state once, as a long run does: the first write to a page
        faults.
        """
        for state in self.optimizer.state.values():
            for tensor in state.values():
                if isinstance(tensor, torch.Tensor):
                    tensor.add_(0)


class Fused:
    """FBGEMM's table-batched embedding, which steps in its backward pass."""

    def __init__(self, sizes):
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        specs = [(size, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for size in sizes]
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            specs, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.01
        )
        self.offsets = torch.arange(len(sizes) * BATCH + 1)

    def __call__(self, ids, gradient):
        self.module(ids.T.reshape(-1), self.offsets).backward(gradient)

    def touch(self):
        for weight in self.module.split_embedding_weights():
            weight.normal_()
        for states in self.module.split_optimizer_states():
            for state in states:
                state.add_(0)


def contenders(sizes):
    columns = {str(number): (size, DIM, SPEC) for number, size in enumerate(sizes)}
    ours = fb.Collection.from_spec(columns)
    penalties = {parameter: fb.NonNegativeL1(1e-6) for parameter in ours.penalized}
    bags = Bags(sizes)
    found = {
        "fb.Collection": Step(ours, fb.Yogi(ours.parameters(), lr=1e-2, penalties=penalties)),
        "26 EmbeddingBag + SparseAdam": Step(bags, torch.optim.SparseAdam(bags.parameters())),
    }
    try:
        found["FBGEMM fused, row-wise Adagrad"] = Fused(sizes)
    except ImportError:
        print("FBGEMM is not installed")
    return found


def with_scans(times):
    """Return the median time of a step, and its share of a scan: that of every 16th step."""
    plain = statistics.median(t for number, t in enumerate(times, 1) if number % SCAN)
    return plain + (statistics.median(times[SCAN - 1 :: SCAN]) - plain) / SCAN


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=32, help="measured, a multiple of 16")
    steps = parser.parse_args().steps
    sizes = scaled_cardinalities(ROWS)
    log = GeneratedClicks(10_000_000, sizes)
    batches = [
        torch.from_numpy(log.read(n * BATCH, (n + 1) * BATCH).ids) for n in range(steps + SCAN)
    ]
    gradient = torch.randn(BATCH, len(sizes) * DIM) * 1e-3
    found = contenders(sizes)
    times = {name: [] for name in found}
    for number, ids in enumerate(batches):
        for name, step in found.items():
            wall, cpu = time.perf_counter(), time.process_time()
            step(ids, gradient)
            if number == 0:
                step.touch()
            if number >= SCAN:
                times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    result = {
        name: {
            "cpu": with_scans([cpu for cpu, _ in taken]),
            "wall": with_scans([wall for _, wall in taken]),
        }
        for name, taken in times.items()
    }
    ours = result["fb.Collection"]
    for name, taken in result.items():
        ratio = {kind: taken[kind] / ours[kind] for kind in taken}
        print(
            f"{name:32s} CPU {1000 * taken['cpu']:6.1f} ms ({ratio['cpu']:4.2f}x)   "
            f"wall {1000 * taken['wall']:6.1f} ms ({ratio['wall']:4.2f}x)"
        )
    path = Path(__file__).parent / "results" / "collection.json"
    path.write_text(json.dumps({"steps": steps, "batch": BATCH, "rows": ROWS} | result, indent=1))


if __name__ == "__main__":
    main()
