"""SSE in a custom training loop: rows with few ratings learn from each other.

A dot product of `nn.Embedding` rows, trained on few ratings. `fb.SSE` occasionally replaces an id
by another one in training; evaluation is unchanged.
"""

import argparse

import torch
from torch import nn

import featherbed as fb
from featherbed.io.records import make_ratings

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--ratings", type=int, default=12_000)
given = parser.parse_args()
parts = make_ratings(800, 400, given.ratings).split(0)
train, validation, test = (
    [
        torch.from_numpy(part.users.astype(int)),
        torch.from_numpy(part.items.astype(int)),
        torch.from_numpy(part.values),
    ]
    for part in parts
)

for p in (0.0, 0.02, 0.1):
    torch.manual_seed(0)
    users, items = nn.Embedding(800, 16), nn.Embedding(400, 16)
    for table in (users, items):
        nn.init.normal_(table.weight, 0.5, 0.1)
    model = nn.ModuleList([fb.SSE(users, p=p), fb.SSE(items, p=p)] if p else [users, items])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def error(data, model=model):
        ids, others, values = data
        return ((model[0](ids) * model[1](others)).sum(1) - values).square().mean()

    best = (float("inf"), 0.0, 0)
    for epoch in range(given.epochs):
        model.train()
        for batch in torch.randperm(len(train[2])).split(256):
            optimizer.zero_grad()
            error([part[batch] for part in train]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            best = min(best, (float(error(validation)), float(error(test)), epoch + 1))
    print(f"p = {p:<5} test MSE {best[1]:.4f} after {best[2]} epochs, the best on validation data")
