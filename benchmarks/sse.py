"""What sharing ids costs a training step: python benchmarks/sse.py

nn.Embedding(sparse=True) with SparseAdam as it is, behind SSE-SE and behind SSE-Graph, taking turns in one run; the figures
are ratios of medians ("overhead") and medians of the ratios within a turn ("in a turn", which a busy machine disturbs less);
absolute times are those of this machine at this moment. Results go to benchmarks/results/sse.json and sse.txt.
"""

import json
import os
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import featherbed as fb

RESULTS = Path(__file__).parent / "results"
ROWS, DIM, BATCH, EDGES, P, RHO = 1_000_000, 64, 65_536, 20_000_000, 0.01, 10.0
WARM, TURNS = 3, 90
LIMITS = {"SSE-SE": 0.10, "SSE-Graph": 0.20}
RNG = np.random.default_rng(0)


class Zipf:
    """Ids by Zipf's law (exponent 1), popular ones anywhere in the table."""

    def __init__(self):
        self.cumulated = np.cumsum(1 / np.arange(1, ROWS + 1))
        self.order = RNG.permutation(ROWS)

    def draw(self, count):
        return self.order[np.searchsorted(self.cumulated, RNG.random(count) * self.cumulated[-1])]


def popular_graph(zipf):
    """Edges from anywhere to popular ids: the lists of ids that batches are full of are the longest."""
    pairs = np.empty((0, 2), dtype=np.int32)
    while len(pairs) < EDGES:  # pairs that come again are one edge
        count = EDGES - len(pairs) + EDGES // 10
        more = np.stack([RNG.integers(ROWS, size=count), zipf.draw(count)], axis=1).astype(np.int32)
        more = more[more[:, 0] != more[:, 1]]
        more.sort(axis=1)
        both = np.concatenate([pairs, more])
        keys = np.unique(both[:, 0].astype(np.int64) * ROWS + both[:, 1])
        pairs = np.stack(np.divmod(keys, ROWS), axis=1).astype(np.int32)
    return fb.Graph.from_edges(ROWS, RNG.permutation(pairs)[:EDGES])


class Contender:
    """An embedding and its optimizer; ``step(ids)`` is forward, backward by a given gradient, and the update."""

    def __init__(self, wrap):
        table = nn.Embedding(ROWS, DIM, sparse=True)
        self.module = wrap(table)
        self.optimizer = torch.optim.SparseAdam(table.parameters(), lr=1e-3)
        self.gradient = torch.randn(BATCH, DIM) * 1e-3

    def step(self, ids):
        self.optimizer.zero_grad()
        self.module(ids).backward(self.gradient)
        self.optimizer.step()


def take_turns(contenders, zipf):
    """Return the time of each step in ms, [TURNS] for each contender; in a turn all take the same batch, in changing order."""
    spent = {name: [] for name in contenders}
    for turn in range(WARM + TURNS):
        ids = torch.from_numpy(zipf.draw(BATCH))
        order = list(contenders)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            start = time.perf_counter()
            contenders[name].step(ids)
            spent[name].append((time.perf_counter() - start) * 1e3)
    return {name: np.array(times[WARM:]) for name, times in spent.items()}


def share_alone(sse, zipf):
    """Return the median time of the draws alone, in ms."""
    times = []
    for _ in range(40):
        ids = torch.from_numpy(zipf.draw(BATCH))
        start = time.perf_counter()
        sse.share(ids)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main():
    lines, figures = [], {}

    def line(text):
        print(text, flush=True)
        lines.append(text)

    line(
        f"featherbed {fb.__version__}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    )
    zipf = Zipf()
    graph = popular_graph(zipf)
    line(
        f"a step of nn.Embedding(sparse=True) + SparseAdam, V = {ROWS:,}, d = {DIM}, batch {BATCH:,} by Zipf's law, p = {P}"
    )
    line(f"graph: {graph.edges:,} edges, the longest list {graph.degrees.max():,}, rho = {RHO:g}")
    line(f"load of the machine before: {os.getloadavg()[0]:.1f}")
    line(
        f"{'threads':>8}  {'':<12}{'ms a step':>10}{'overhead':>10}{'in a turn':>11}{'limit':>7}{'draws alone, ms':>17}"
    )
    contenders = {
        "without": Contender(lambda table: table),
        "SSE-SE": Contender(lambda table: fb.SSE(table, P)),
        "SSE-Graph": Contender(lambda table: fb.SSE(table, P, graph=graph, rho=RHO)),
    }
    for threads in (1, 2):
        torch.set_num_threads(threads)
        times = take_turns(contenders, zipf)
        base = times["without"]
        for name, spent in times.items():
            found = {
                "ms": float(np.median(spent)),
                "overhead": float(np.median(spent) / np.median(base) - 1),
            }
            text = f"{threads:>8}  {name:<12}{found['ms']:>10.1f}"
            if name in LIMITS:
                found["draws_ms"] = share_alone(contenders[name].module, zipf)
                found["overhead_within_turns"] = float(np.median(spent / base) - 1)
                text += f"{found['overhead']:>10.1%}{found['overhead_within_turns']:>11.1%}{LIMITS[name]:>7.0%}"
                text += f"{found['draws_ms']:>17.2f}"
            line(text)
            figures[f"{name}, threads={threads}"] = found
    RESULTS.mkdir(exist_ok=True)
    settings = {
        "rows": ROWS,
        "dim": DIM,
        "batch": BATCH,
        "edges": EDGES,
        "p": P,
        "rho": RHO,
        "turns": TURNS,
    }
    stored = {
        "versions": lines[0],
        "settings": settings,
        "load": os.getloadavg(),
        "lines": lines,
        "figures": figures,
    }
    (RESULTS / "sse.json").write_text(json.dumps(stored, indent=1) + "\n")
    (RESULTS / "sse.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
