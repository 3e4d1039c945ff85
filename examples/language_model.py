"""A language model with one compact table for input and softmax: perplexity against bytes.

    python examples/language_model.py                text of a generated grammar
    python examples/language_model.py text.txt       your own: words separated by spaces

The table is tied: the same rows embed the words and score the next one. Plain rows, the same rows
rounded to int4, and rows over learned anchors, each with the bytes of its file.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn

import featherbed as fb
from featherbed.packed import file_size


def generated(words, count, seed=0):
    """Return text in which every word is followed by words of the next of ten groups, mostly."""
    rng = np.random.default_rng(seed)
    group, text = rng.integers(10, size=words), [0]
    members = [np.flatnonzero(group == number) for number in range(10)]
    for chance in rng.random(count - 1):
        follow = members[(group[text[-1]] + 1) % 10] if chance < 0.9 else np.arange(words)
        text.append(int(follow[int(len(follow) * rng.random() ** 2)]))
    return np.array(text)


class Model(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.cell = (
            table,
            nn.GRU(table.embedding_dim, table.embedding_dim, batch_first=True),
        )

    def loss(self, text):  # int64 [B, T]
        hidden, _ = self.cell(self.table(text[:, :-1]))
        weight, targets = self.table.weight, text[:, 1:].reshape(-1)
        return fb.tied_cross_entropy(hidden.reshape(-1, weight.shape[1]), weight, None, targets)


def train(model, optimizer, batches, epochs):
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            model.loss(batch).backward()
            optimizer.step()


@torch.no_grad()
def perplexity(model, batch):
    return float(model.loss(batch).exp())


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("file", type=Path, nargs="?")
parser.add_argument("--words", type=int, default=800, help="number of generated words")
parser.add_argument("--epochs", type=int, default=6)
given = parser.parse_args()
torch.manual_seed(0)
if given.file is None:
    text, rows = generated(given.words, 40_000), given.words
else:
    vocabulary = fb.Vocabulary.count([given.file.read_text().split()], min_count=2, shared=1)
    text, rows = vocabulary.ids(given.file.read_text().split()), len(vocabulary)
lines = torch.from_numpy(text[: len(text) // 21 * 21]).reshape(-1, 21)
test, batches = lines[-200:], lines[:-200].split(64)

dense = Model(fb.DenseTable(rows, 32, generator=torch.Generator().manual_seed(0)))
dense.table.scale_initial_rows(0.1)
train(dense, torch.optim.Adam(dense.parameters(), lr=5e-3), batches, given.epochs)
small = Model(fb.AnchorTable.from_dense(dense.table.weight.detach(), anchors=24, slots=3))
small.cell.load_state_dict(dense.cell.state_dict())
more = max(1, given.epochs // 2)  # both go on for as many epochs
train(dense, torch.optim.Adam(dense.parameters(), lr=2e-3), batches, more)
train(small, fb.Yogi(small.parameters(), lr=5e-3), batches, more)

rows = Model(fb.QuantizedTable.from_dense(dense.table.weight.detach(), bits=4))
rows.cell = dense.cell
packed = small.table.pack(values="int8", dictionary="int8")
for name, model, stored in (
    ("plain rows", dense, dense.table.pack()),
    ("int4 rows", rows, rows.table.pack()),
    ("24 anchors", small, packed),
):
    print(f"{name:<11} perplexity {perplexity(model, test):6.1f}  {file_size(stored):,} bytes")
