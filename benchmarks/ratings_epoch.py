"""What an epoch of MovieLens-1M costs with anchors, and with dense rows: python benchmarks/ratings_epoch.py

Dense: nn.Embedding and torch.optim.Adam in the usual loop. Anchors: 16 a side, Yogi, a prox at every step, as ``train
ratings`` runs it. d = 16, 80 % of the ratings, biases in the first column of both. Epochs take turns; the figures are ratios
of medians, and medians of the ratios within a turn. Results go to benchmarks/results/ratings_epoch.json and .txt. One pass
over as many generated ratings as given (python benchmarks/ratings_epoch.py 50) millions is measured besides.
"""

import json
import os
import platform
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import featherbed as fb
from featherbed.apps.recommender import fused
from featherbed.apps.recommender import model as ratings
from featherbed.apps.recommender.stream import StreamedFactorization
from featherbed.io.opening import find_data
from featherbed.io.records import Ratings, read_movielens
from featherbed.kernels.threads import set_threads

RESULTS = Path(__file__).parent / "results"
DIM, ANCHORS, LAM, TURNS = 16, 16, 2e-6, 7
BATCHES = (1024, 16_384)


class Dense(nn.Module):
    """score(u, i) = mean + U[u]_0 + V[i]_0 + sum_{k >= 1} U[u]_k V[i]_k, with nn.Embedding."""

    def __init__(self, users, items, mean):
        super().__init__()
        self.users, self.items, self.mean = nn.Embedding(users, DIM), nn.Embedding(items, DIM), mean
        for side in (self.users, self.items):
            nn.init.normal_(side.weight, 0.0, 0.1)

    def forward(self, users, items):
        left, right = self.users(users), self.items(items)
        return (left[:, 1:] * right[:, 1:]).sum(-1) + left[:, 0] + right[:, 0] + self.mean


def dense(train):
    """Return the epoch of dense rows: the usual loop."""
    model = Dense(train.num_users, train.num_items, float(train.values.mean()))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    users, items, values = ratings.to_tensors(train)

    def epoch(batch):
        for index in torch.split(torch.randperm(len(values)), batch):
            optimizer.zero_grad()
            loss = F.mse_loss(model(users[index], items[index]), values[index])
            loss.backward()
            optimizer.step()

    return epoch


def anchored(train, run):
    """Return the epoch of anchors, by the compiled loops or by autograd."""
    tables = [fb.AnchorTable(n, DIM, anchors=ANCHORS) for n in (train.num_users, train.num_items)]
    model = ratings.MatrixFactorization(*tables, mean=float(train.values.mean()), biases="column")
    penalties = {table.transform: fb.NonNegativeL1(LAM) for table in tables}
    optimizer = fb.Yogi(model.parameters(), lr=1e-2, penalties=penalties)
    assert fused.supports(model, optimizer)
    triples, generator = ratings.to_tensors(train), torch.Generator().manual_seed(0)
    return lambda batch: run(model, optimizer, triples, batch, generator)


def take_turns(contenders, batch):
    """Return the seconds of each epoch, [TURNS] for each contender; the first turn is not counted."""
    spent = {name: [] for name in contenders}
    for turn in range(TURNS + 1):
        order = list(contenders) if turn % 2 else list(reversed(contenders))
        for name in order:
            start = time.perf_counter()
            contenders[name](batch)
            spent[name].append(time.perf_counter() - start)
    return {name: np.array(times[1:]) for name, times in spent.items()}


def one_pass(millions, line):
    """Return the figures of a pass over generated ratings: 10 million users, a million items, by a power law."""
    rng, users, items, count = np.random.default_rng(0), 10_000_000, 1_000_000, int(millions * 1e6)
    u = (rng.random(count, dtype=np.float32) * users).astype(np.int32)
    i = (rng.random(count, dtype=np.float32) ** 3 * items).astype(np.int32)
    values = rng.integers(1, 6, count).astype(np.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    train = Ratings(u, i, values, range(users), range(items))
    figures = {}
    for threads in (1, 2):
        set_threads(threads)
        start = time.perf_counter()
        passes = StreamedFactorization(users, items, DIM, mean=3.0)
        made = time.perf_counter() - start
        start = time.perf_counter()
        passes.train_epoch(train)
        spent = time.perf_counter() - start
        figures[f"threads={threads}"] = {
            "seconds_to_make": made,
            "seconds": spent,
            "ratings_a_second": count / spent,
        }
        line(
            f"a pass over {millions:g} M ratings, 11 M rows, {threads} threads: {count / spent / 1e6:.2f} M ratings/s"
        )
    held = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    line(
        f"memory besides the ratings, at most: {held:.2f} GB (rows: {4 * DIM * (users + items) / 2**30:.2f} GB)"
    )
    return {**figures, "gigabytes": held}


def main():
    lines, figures = [], {}

    def line(text):
        print(text, flush=True)
        lines.append(text)

    line(
        f"featherbed {fb.__version__}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    )
    line(f"load of the machine before: {os.getloadavg()[0]:.1f}")
    train = read_movielens(find_data("ml-1m")).split(0)[0]
    line(f"an epoch of {len(train):,} ratings, d = {DIM}, {ANCHORS} anchors a side")
    line(
        f"{'threads':>8}{'batch':>8}  {'':<26}{'s an epoch':>10}{'of dense':>10}{'in a turn':>11}{'M ratings/s':>13}"
    )
    for threads in (1, 2):
        torch.set_num_threads(threads)
        set_threads(threads)
        for batch in BATCHES:
            contenders = {
                "dense, Adam": dense(train),
                "anchors, Yogi, prox": anchored(train, ratings.train_epoch),
            }
            times = take_turns(contenders, batch)
            base = times["dense, Adam"]
            for name, spent in times.items():
                found = {
                    "seconds": float(np.median(spent)),
                    "of_dense": float(np.median(spent) / np.median(base)),
                }
                found["of_dense_in_turns"] = float(np.median(spent / base))
                figures[f"{name}, threads={threads}, batch={batch}"] = found
                line(
                    f"{threads:>8}{batch:>8}  {name:<26}{found['seconds']:>10.3f}{found['of_dense']:>10.2f}"
                    f"{found['of_dense_in_turns']:>11.2f}{len(train) / found['seconds'] / 1e6:>13.2f}"
                )
    if len(sys.argv) > 1:
        figures["pass"] = one_pass(float(sys.argv[1]), line)
    RESULTS.mkdir(exist_ok=True)
    settings = {"dim": DIM, "anchors": ANCHORS, "lam": LAM, "turns": TURNS, "ratings": len(train)}
    stored = {
        "versions": lines[0],
        "settings": settings,
        "load": os.getloadavg(),
        "lines": lines,
        "figures": figures,
    }
    (RESULTS / "ratings_epoch.json").write_text(json.dumps(stored, indent=1) + "\n")
    (RESULTS / "ratings_epoch.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
