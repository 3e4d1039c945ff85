"""Spinning workers against a plain thread pool: python benchmarks/threads.py [case ...]

Compiled jobs are shared by worker threads that spin for half a millisecond after a job
(``featherbed.kernels.threads``). The contender is the simplest pool that could replace them: Python
threads that wait on a queue and call the job without the GIL. Both take turns in short bursts in
one process. Results go to benchmarks/results/threads.json.
"""

import ctypes
import json
import statistics
import sys
import time
from functools import cache
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

import numpy as np
import torch

import featherbed as fb
from featherbed.kernels import threads

TURNS, BURST, PAUSE = 30, 8, 0.005
PIECES = 4  # of a job, for each thread
RESULTS = Path(__file__).parent / "results" / "threads.json"


class Task:
    """One job, cut into pieces that the calling thread and workers take."""

    def __init__(self, function, block, rows, step, held):
        self.function, self.address, self.rows, self.step = function, block.ctypes.data, rows, step
        self.arguments = (block, held)
        self.starts = iter(range(0, rows, step))
        self.pieces, self.finished = -(-rows // step), count(1)
        self.good, self.done = True, Lock()
        self.done.acquire()

    def run(self):
        for start in self.starts:
            if self.function(self.address, start, min(start + self.step, self.rows)) != 1:
                self.good = False
            if next(self.finished) == self.pieces:
                self.done.release()


@cache
def function_at(address):
    return ctypes.CFUNCTYPE(*[ctypes.c_int64] * 4)(address)


@cache
def workers():
    def work():
        while True:
            tasks.get().run()

    tasks = SimpleQueue()
    for _ in range(threads.threads() - 1):
        Thread(target=work, daemon=True).start()
    return tasks


def run_in_plain_pool(job, block, rows, grain, held=None):
    function, number = function_at(job), threads.threads()
    if rows < 2 * grain or number == 1:
        return function(block.ctypes.data, 0, rows) == 1
    task = Task(function, block, rows, max(grain, -(-rows // (PIECES * number))), held)
    for _ in range(min(number, task.pieces) - 1):
        workers().put(task)
    task.run()
    task.done.acquire()
    return task.good


def cases():
    rng, rows, dim = np.random.default_rng(0), 200_000, 64
    generator = torch.Generator().manual_seed(0)
    anchor = fb.AnchorTable(rows, dim, anchors=256, slots=8, generator=generator)
    tables = {
        "fixed": anchor.pack(values="int8", layout="fixed"),
        "ragged": anchor.pack(values="int8", layout="ragged"),
        "float32": fb.DenseTable(rows, dim, generator=generator).pack(),
    }
    found = {}
    for name, table in tables.items():
        for size in (2048, 8192, 65_536):
            ids = rng.integers(rows, size=(16, size))
            found[f"lookup {name} {size}"] = lambda n, t=table, i=ids: t[i[n % 16]]
        query = rng.standard_normal((1, dim)).astype(np.float32)
        found[f"search {name}"] = lambda _, t=table, q=query: t.search(q, k=10)
    table = fb.AnchorTable(500_000, dim, anchors=256, slots=8)
    optimizer = fb.Yogi(table.parameters(), penalties={table.transform: fb.NonNegativeL1(1e-5)})
    for size in (2048, 16_384):
        batches = torch.from_numpy(rng.integers(500_000, size=(16, size)))
        gradient = torch.randn(size, dim, generator=generator) * 1e-3

        def step(number, batches=batches, gradient=gradient):
            optimizer.zero_grad()
            table(batches[number % 16]).backward(gradient)
            optimizer.step()

        found[f"training step {size}"] = step
    return found


def main():
    spinning, current = threads.run, [threads.run]
    threads.run = lambda *arguments: current[0](*arguments)  # before any plan is made
    contenders = {"spinning": spinning, "plain": run_in_plain_pool}
    results = {}
    for name, function in cases().items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        times = {contender: [] for contender in contenders}
        for turn in range(TURNS):
            for contender in list(contenders)[:: 1 if turn % 2 else -1]:
                current[0] = contenders[contender]
                time.sleep(PAUSE)
                for call in range(BURST):
                    start = time.perf_counter()
                    function(turn * BURST + call)
                    if call > 1:
                        times[contender].append(time.perf_counter() - start)
        medians = {contender: 1e6 * statistics.median(t) for contender, t in times.items()}
        results[name] = {key: round(value, 1) for key, value in medians.items()}
        ratio = medians["plain"] / medians["spinning"]
        print(f"{name:24}", *(f"{k} {v:9.0f} µs" for k, v in medians.items()), f"{ratio:5.2f}")
    if not sys.argv[1:]:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
