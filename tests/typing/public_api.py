"""The public names as a user's own program sees them; `mypy --strict` checks this file from outside.

Run by `make check` on the sources and by `make release-check` on the installed wheel. Nothing here
is executed.
"""

from typing import assert_type

import numpy as np
import torch
from numpy.typing import NDArray

import featherbed as fb


def train(ids: torch.Tensor) -> fb.PackedTable:
    table = fb.AnchorTable(1000, 16, anchors=8, padding_idx=0)
    assert_type(table.transform, torch.nn.Parameter)
    penalties: dict[torch.nn.Parameter, fb.NonNegativeL1] = {
        table.transform: fb.NonNegativeL1(1e-5)
    }
    optimizer = fb.Yogi(table.parameters(), lr=1e-2, penalties=dict(penalties))
    loss = (table(ids) - 1).square().mean() + fb.auxiliary_loss(table)
    loss.backward()
    optimizer.step()
    sizes = table.sizes(optimizer)
    assert_type(sizes.file, int)
    fb.save(table, "table.safetensors")
    return table.pack(values="int8", dictionary="float16")


def serve(path: str) -> tuple[NDArray[np.float32], list[str]]:
    packed = fb.load(path)
    assert_type(packed, fb.PackedTable)
    rows = packed[[3, 17]]
    found, scores = packed.search(rows, k=5)
    print(found.shape, scores.shape, packed.dim, packed.nbytes, len(packed))
    names = [packed.name_of(3) or "?"]
    return rows, names


def shrink(matrix: NDArray[np.float32], model: torch.nn.Module) -> float:
    small = fb.compress(matrix, ratio=16, effort="quick")
    small.save("small.safetensors")
    for result in fb.compress_model(model, ratio=8, rest="int8"):
        print(result)
    for swap in fb.replace_embeddings(torch.nn.Sequential(torch.nn.Embedding(9, 4)), "dense"):
        print(swap)
    return float(small.report.quality["recall"])


def recommend(folder: str) -> list[str | None]:
    recommender = fb.Recommender.open(folder)
    return [item.title for item in recommender.recommend("7", k=5)]


def refused() -> None:
    try:
        fb.load("nothing")
    except fb.MissingFileError as error:
        assert isinstance(error, fb.FeatherbedError)
