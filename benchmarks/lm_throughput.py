"""Training throughput of a language model by the table of its words: python benchmarks/lm_throughput.py [--turns N] [--cpu]

A tied LSTM (2 x 200, 10,000 words, 20 x 35 words a step, AdamW, full softmax), with dense rows and with compact tables.
Contenders take turns of 16 steps, so that the scans of tables with slots are in the mean; printed are medians, and the median
over turns of the ratio to dense rows in the same turn. "plain torch" is nn.Embedding, F.cross_entropy and a fused AdamW: what
one would write without this library. Results go to benchmarks/results/lm_throughput.json and lm_throughput.txt.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import featherbed as fb
from featherbed.apps.language.model import LSTMModel
from featherbed.apps.language.train import detach
from featherbed.apps.words import Lexicon, WordTableSettings, build_word_table
from featherbed.kernels.threads import set_threads

RESULTS = Path(__file__).parent / "results"
WORDS, DIM, LENGTH, COLUMNS, STEPS = 10_000, 200, 35, 20, 16
TABLES = {
    "dense": "dense",
    "500 anchors, 8 slots": "anchor:anchors=500,slots=8",
    "500 anchors, 16 slots": "anchor:anchors=500,slots=16",
    "100 anchors": "anchor:anchors=100",
    "KD codes 32 x 32": "kd:choices=32,parts=32",
    "low rank 20": "lowrank:rank=20",
    "hashed, 1,000 buckets": "hashed:buckets=1000",
    "selected, 3,000 words": "selected:keep=3000",
}


class Plain(nn.Module):
    """The dense tied model in torch alone."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM)
        nn.init.normal_(self.words.weight, 0.0, 0.1)
        self.lstm = nn.LSTM(DIM, DIM, 2, dropout=0.2)
        self.dropout, self.bias = nn.Dropout(0.2), nn.Parameter(torch.zeros(WORDS))

    def step(self, text, state):
        hidden, state = self.lstm(self.dropout(self.words(text[:-1])), state)
        logits = F.linear(self.dropout(hidden), self.words.weight, self.bias)
        return F.cross_entropy(logits.flatten(0, 1), text[1:].flatten()), state


class Contender:
    """A model, its optimizer and the state it is in; ``step(text)`` is a step of training."""

    def __init__(self, spec, counts):
        torch.manual_seed(0)
        self.state = None
        if spec is None:
            self.model = Plain()
            self.clip, self.parameters = torch.nn.utils.clip_grad_norm_, [*self.model.parameters()]
            self.optimizer = torch.optim.AdamW(self.parameters, lr=3e-3, fused=True)
            self.losses = self.model.step
            return
        lam = 1e-6 if spec.startswith("anchor") else 0.0
        settings = WordTableSettings(spec=spec, dim=DIM, lam=lam)
        lexicon = Lexicon([str(n) for n in range(WORDS)], counts)
        words = build_word_table(settings, lexicon, 0)
        self.model = LSTMModel(words.module, hidden=DIM)
        codes, self.parameters = fb.split_codes(self.model)
        self.optimizer = fb.AdamW(self.parameters, lr=3e-3, penalties=words.penalties)
        if codes:
            self.optimizer = fb.Several(self.optimizer, fb.AdamW(codes, lr=3e-3))
        self.clip = fb.clip_grad_norm_

    def losses(self, text, state):
        found = self.model.losses(text[:-1], text[1:], state)
        return found.total + fb.auxiliary_loss(self.model), found.state

    def step(self, text):
        self.optimizer.zero_grad()
        loss, state = self.losses(text, detach(self.state))
        loss.backward()
        self.clip(self.parameters, 0.25)
        self.optimizer.step()
        self.state = state


def measure(contenders, batch, turns, clock):
    """Return the seconds a step takes in every turn, for each contender."""
    spent = {name: [] for name in contenders}
    for contender in contenders.values():
        for _ in range(2):
            contender.step(batch())
    for turn in range(turns):
        names = [*contenders] if turn % 2 == 0 else [*contenders][::-1]
        for name in names:
            texts = [batch() for _ in range(STEPS)]
            time.sleep(0.02)
            start = clock()
            for text in texts:
                contenders[name].step(text)
            spent[name].append((clock() - start) / STEPS)
    return spent


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--only", nargs="*", help="begin with these words")
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="processor time, for a machine that others use; one thread",
    )
    parser.add_argument(
        "--no-write", action="store_true", help="print, and leave the stored results alone"
    )
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    chances = 1 / np.arange(1, WORDS + 1)
    cumulated = np.cumsum(chances / chances.sum())
    counts = np.maximum(1, (900_000 * chances / chances.sum()).astype(np.int64))

    def batch():
        drawn = np.searchsorted(cumulated, rng.random((LENGTH + 1, COLUMNS)))
        return torch.from_numpy(drawn.clip(max=WORDS - 1).astype(np.int64))

    versions = f"featherbed {fb.__version__}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    lines, figures = [versions], {"versions": versions}
    print(versions)
    for threads in given.threads:
        torch.set_num_threads(threads)
        set_threads(threads)
        wanted = {
            n: s
            for n, s in TABLES.items()
            if given.only is None or n == "dense" or n.startswith(tuple(given.only))
        }
        contenders = {"plain torch": Contender(None, counts)} | {
            n: Contender(s, counts) for n, s in wanted.items()
        }
        spent = measure(
            contenders, batch, given.turns, time.process_time if given.cpu else time.perf_counter
        )
        lines += [
            "",
            f"{threads} thread{'s' * (threads > 1)}: words a second, and how many times those of dense rows",
        ]
        for name, times in spent.items():
            ratios = [a / b for a, b in zip(spent["dense"], times, strict=True)]
            plain = [a / b for a, b in zip(spent["plain torch"], times, strict=True)]
            speed, ratio = LENGTH * COLUMNS / statistics.median(times), statistics.median(ratios)
            against = statistics.median(plain)
            lines.append(f"  {name:<24}{speed:>9,.0f}{ratio:>8.2f}  ({against:.2f} of plain torch)")
            figures[f"{name}, {threads}"] = {
                "words_per_second": speed,
                "to_dense": ratio,
                "to_plain_torch": against,
            }
        print("\n".join(lines[-len(spent) - 2 :]), flush=True)
    if not given.no_write:
        (RESULTS / "lm_throughput.json").write_text(json.dumps(figures, indent=1) + "\n")
        (RESULTS / "lm_throughput.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
