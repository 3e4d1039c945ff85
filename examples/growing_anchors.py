"""NBANT: a table that finds its number of anchors in training.

The target rows are mixtures of 8 atoms. From 3 anchors, and from 20, growth should end near 8: an
anchor costs lambda1 - lambda2, and a ninth one reduces the loss by less than that.
"""

import argparse

import torch

import featherbed as fb

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=45)
given = parser.parse_args()
generator = torch.Generator().manual_seed(0)
weights = torch.rand(600, 8, generator=generator) * (torch.rand(600, 8, generator=generator) < 0.3)
target = weights @ torch.randn(8, 16, generator=generator)

for start in (3, 20):
    init = fb.HalfNormal(0.1)
    table = fb.GrowingAnchorTable(600, 16, anchors=start, init=init, generator=generator)
    penalty = {table.transform: fb.NonNegativeL1(1e-4)}
    optimizer = fb.Yogi(table.parameters(), lr=3e-2, penalties=penalty)
    growth = fb.Growth([table], optimizer, lambda1=0.05, lambda2=1e-5)

    def objective(table=table):
        with torch.no_grad():
            return float((table.weight - target).square().sum(1).mean())

    path = [start]
    for _ in range(given.epochs):
        for ids in torch.randperm(600, generator=generator).split(60):
            optimizer.zero_grad()
            (table(ids) - target[ids]).square().sum(1).mean().backward()
            optimizer.step()
        growth.step(objective)
        path += [table.anchor_count] if table.anchor_count != path[-1] else []
    print(f"from {start:>2}: {' '.join(map(str, path))} anchors, loss {objective():.4f}")
