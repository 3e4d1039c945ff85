"""What all competitors share: ratings, the settings of the loop, packed tables in every precision, their size and error."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from featherbed.io.records import Ratings
from featherbed.packed.band import Fixed, Hash, Identity, Remainder
from featherbed.packed.inspect import file_size
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable


@dataclass(frozen=True)
class Task:
    """Training and validation ratings, ids in falling order of training counts, and the loop all methods share."""

    train: Ratings
    validation: Ratings
    epochs: int
    batch: int
    patience: int
    seed: int
    kinds: tuple[str, ...]

    @property
    def shape(self):
        return self.train.num_users, self.train.num_items

    @property
    def mean(self):
        return float(self.train.values.mean(dtype=np.float64))

    @property
    def counts(self):
        sides = ((self.train.users, self.shape[0]), (self.train.items, self.shape[1]))
        return [torch.from_numpy(np.bincount(ids, minlength=rows)) for ids, rows in sides]

    @property
    def generator(self):
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True)
class Stored:
    """Both tables in one precision."""

    kind: str
    users: PackedTable
    items: PackedTable
    mean: float
    parameters: int

    @property
    def bytes(self):
        return file_size(self.users) + file_size(self.items)

    def error(self, part):
        users, items = self.users[:], self.items[:]
        left, right = users[part.users], items[part.items]
        scores = (
            np.einsum("nk,nk->n", left[:, 1:], right[:, 1:])
            + left[:, 0]
            + right[:, 0]
            + np.float32(self.mean)
        )
        return float(np.square(scores - part.values, dtype=np.float64).mean())


def by_popularity(train, *parts):
    """Number users and items anew in falling order of training counts, in all parts."""
    orders = [
        np.argsort(-np.bincount(ids, minlength=rows), kind="stable")
        for ids, rows in ((train.users, train.num_users), (train.items, train.num_items))
    ]
    ranks = [np.argsort(order) for order in orders]
    keys = [
        [names[i] for i in order]
        for names, order in zip((train.user_keys, train.item_keys), orders, strict=True)
    ]
    return [
        Ratings(ranks[0][part.users], ranks[1][part.items], part.values, *keys)
        for part in (train, *parts)
    ]


def restored(matrix, kind):
    """Store a matrix as ``kind`` with a scale for each column; what is in levels already stays."""
    if matrix is None or matrix.kind.startswith(("int", "graded")):
        return matrix
    return Matrix.encode(matrix.dense(), kind, "column", "float16")


def packed(table, kind):
    """Pack a table in the smaller of its layouts: rows and weights as ``kind``, anchors and projections as float16.

    float32 is float32 throughout; the code vectors of codes without weights go down to int8.
    """
    exact = table.pack(layout="all")
    return min(
        (in_layout(table.pack(values=kind), exact, kind), in_layout(exact, exact, kind)),
        key=file_size,
    )


def in_layout(like, exact, kind):
    """Store the exact values as ``kind`` in the layout of ``like``."""
    bands = []
    for low, full in zip(like.bands, exact.bands, strict=True):
        values = None if low.values is None else restored(full.values, kind)
        if isinstance(low.codes, Identity | Hash | Remainder) or kind == "float32":
            atoms = kind
        else:
            coded = isinstance(low.codes, Fixed) and low.codes.levels is None
            atoms = "int8" if coded and kind != "float16" else "float16"
        bands.append(replace(low, values=values, dictionary=restored(full.dictionary, atoms)))
    return PackedTable(bands, like.dim)


def in_all_kinds(task, users, items, kinds=None, parameters=None):
    count = users.parameter_count() + items.parameter_count() if parameters is None else parameters
    kinds = task.kinds if kinds is None else kinds
    return [
        Stored(kind, packed(users, kind), packed(items, kind), task.mean, count) for kind in kinds
    ]
