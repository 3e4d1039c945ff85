"""A click model whose 26 tables are stored in one file, 50 times smaller, and read by numpy.

    python examples/clicks.py                        generated rows in Criteo's format
    python examples/clicks.py train.txt --epochs 2   your own: label, 13 numbers, 26 categories, tab-separated

The last fifth of the rows is the test set. Plain rows are trained first; a pass over the training
rows measures how sensitive the loss is to each row of the tables, the bytes are divided accordingly,
and training continues for half an epoch with the compact rows.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from torch import nn

import featherbed as fb

NUMBERS, COLUMNS, DIM = 13, 26, 16


def generated(rows, seed=0):
    """Return lines in Criteo's format whose clicks follow from hidden vectors of the categories."""
    rng = np.random.default_rng(seed)
    sizes = np.round(np.geomspace(4, 4000, COLUMNS)).astype(int)
    hidden = [rng.normal(size=(size, 3)) / np.sqrt(COLUMNS) for size in sizes]
    ids = np.stack([(rng.random(rows) ** 3 * size).astype(int) for size in sizes], axis=1)
    total = sum(vectors[ids[:, column]] for column, vectors in enumerate(hidden))
    chance = 1 / (1 + np.exp(1.0 - 2.5 * total @ np.ones(3) - 1.5 * total[:, 0] * total[:, 1]))
    labels, numbers = rng.random(rows) < chance, rng.integers(0, 50, (rows, NUMBERS))
    for label, some, own in zip(labels, numbers, ids, strict=True):
        yield "\t".join([str(int(label)), *map(str, some), *(f"{number:08x}" for number in own)])


def read(path, rows):
    """Return categories [n, 26], numbers [n, 13] and labels [n], of a file or generated."""
    if path is None:
        lines = list(generated(rows))
    else:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
            lines = file.read().splitlines()
    cells = np.array([line.split("\t") for line in lines], dtype=object)
    numbers = np.array([[float(cell or 0) for cell in row] for row in cells[:, 1 : 1 + NUMBERS]])
    logs = np.log1p(np.maximum(numbers, 0))
    return cells[:, 1 + NUMBERS :], logs.astype(np.float32), cells[:, 0].astype(np.float32)


class Clicks(nn.Module):
    """DLRM (Naumov et al. 2019): dot products of all pairs of rows and the projected numbers."""

    def __init__(self, tables):
        super().__init__()
        self.tables = tables
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, DIM), nn.ReLU())
        self.top = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, 1))

    def score(self, rows, numbers):
        dense = self.bottom(numbers)
        every = torch.cat([dense[:, None], rows.reshape(len(rows), COLUMNS, DIM)], dim=1)
        first, second = torch.tril_indices(COLUMNS + 1, COLUMNS + 1, -1)
        dots = (every @ every.mT)[:, first, second]
        return self.top(torch.cat([dense, dots], dim=1))[:, 0]

    def loss(self, batch):
        ids, numbers, labels = batch
        scores = self.score(self.tables(ids), numbers)
        return nn.functional.binary_cross_entropy_with_logits(scores, labels)


def batches(data, size=512):
    return zip(*(part.split(size) for part in data), strict=True)


def train(model, data, epochs, lr):
    tables = fb.AdamW(model.tables.parameters(), lr=lr, weight_decay=0.0)
    others = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
    dense = torch.optim.Adam(others, lr=0.3 * lr)
    for _ in range(epochs):
        for batch in batches(data):
            tables.zero_grad()
            dense.zero_grad()
            model.loss(batch).backward()
            tables.step()
            dense.step()
    fb.settle(model)


def auc(scores, labels):
    """Return the probability that a click has a higher score than a row without one."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    clicks = labels.sum()
    return (ranks[labels == 1].sum() - clicks * (clicks + 1) / 2) / (
        clicks * (len(labels) - clicks)
    )


@torch.no_grad()
def measure(model, packed, test):
    """Return the AUC of a model whose rows come from a packed collection."""
    ids, numbers, labels = test
    rows = torch.from_numpy(packed[ids.numpy()])
    return auc(model.score(rows, numbers).numpy(), labels.numpy())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument(
        "--ratio", type=float, default=50, help="times fewer bytes than float32 rows"
    )
    parser.add_argument("--rows", type=int, default=40_000, help="number of generated rows")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("clicks.safetensors"))
    given = parser.parse_args()
    torch.manual_seed(0)
    words, numbers, labels = read(given.file, given.rows)
    cut = int(0.8 * len(labels))
    names = [f"C{number}" for number in range(1, COLUMNS + 1)]
    vocabularies = [
        fb.Vocabulary.count(words[:cut, column].tolist(), min_count=2, shared=2)
        for column in range(COLUMNS)
    ]
    columns = zip(names, vocabularies, strict=True)
    tables = fb.Collection.from_spec({n: (v, DIM, "dense:sparse=true") for n, v in columns})
    for table in tables.all_tables():
        table.scale_initial_rows(0.05)
    ids = tables.ids({name: words[:, column] for column, name in enumerate(names)})
    every = [ids, torch.from_numpy(numbers), torch.from_numpy(labels)]
    data, test = [part[:cut] for part in every], [part[cut:] for part in every]
    model = Clicks(tables)
    model.loss([part[:2] for part in data])  # the first call makes the lazy layer
    train(model, data, given.epochs, lr=0.02)
    plain = 4 * DIM * sum(len(vocabulary) for vocabulary in vocabularies)
    print(f"plain rows    AUC {measure(model, tables.pack(), test):.4f}   {plain:,} bytes")
    importance = tables.importance(batches(data), model.loss)
    model.tables = tables.compress(int(plain / given.ratio), importance)
    print(
        f"divided       AUC {measure(model, model.tables.pack(), test):.4f}   {model.tables.report}"
    )
    half = [part[cut // 2 :] for part in data]
    train(model, half, 1, lr=0.005)
    model.tables.save(given.out, keys="hashed")
    packed = fb.PackedCollection.load(given.out)  # numpy, memory-mapped, torch not needed
    keys = given.out.stat().st_size - packed.nbytes
    print(
        f"trained on    AUC {measure(model, packed, test):.4f}   {packed.nbytes:,} bytes of rows "
        f"and {keys:,} of keys and header in {given.out}"
    )
    first = {name: words[cut : cut + 1, column] for column, name in enumerate(names)}
    print(f"rows of {first['C1'][0]}, {first['C2'][0]}, ... by key: {packed[first].shape}")


if __name__ == "__main__":
    main()
