"""Write the golden files of every format version, each with its rows beside it: python tests/golden/make.py

A version that is frozen is read for ever, so its files are never made again: a folder that is there is left alone.
"""

import json
from pathlib import Path

import numpy as np
import torch

import featherbed as fb
from featherbed.packed.band import Affine, Band, Every, Fixed, Ragged
from featherbed.packed.cells import Cell
from featherbed.packed.hashed_keys import HashedKeys
from featherbed.packed.keys import Keys
from featherbed.packed.matrix import Graded, Matrix
from featherbed.packed.table import PackedTable

HERE = Path(__file__).parent
ROWS = 20


def seed(number):
    return torch.Generator().manual_seed(number)


def matrix(rng, rows, columns, kind="float32", scales="row", scale_kind="float32"):
    return Matrix.encode(
        rng.normal(size=(rows, columns)).astype(np.float32), kind, scales, scale_kind
    )


def vector(rng, length):
    return rng.normal(size=length).astype(np.float32)


def fixed(rng, count, choices, kind=None, parts=False):
    values = None if kind is None else rng.normal(size=(ROWS, count)).astype(np.float32)
    return Fixed.encode(
        rng.integers(0, choices, (ROWS, count)), values, choices, kind or "float32", parts
    )


def wide(rng):
    """Ragged codes with a directory of 64 bits, which a writer makes of 2^32 codes and more."""
    counts = rng.integers(0, 4, ROWS)
    row_of = np.repeat(np.arange(ROWS), counts)
    codes = Ragged.encode(
        ROWS, row_of, rng.integers(0, 5, len(row_of)), vector(rng, len(row_of)), 5, "int4"
    )
    codes.directory = codes.directory.astype(np.uint64)
    return [Band(ROWS, codes, None, matrix(rng, 5, 4, "int4", scale_kind="float16"))]


def concat(rng):
    return [Band(ROWS, fixed(rng, 3, 5, parts=True), None, matrix(rng, 15, 2), "concat")]


def layered(rng):
    plus = Band(
        ROWS,
        fixed(rng, 2, 8, parts=True),
        None,
        matrix(rng, 16, 3, "int2"),
        "concat",
        affine=Affine(norms=matrix(rng, ROWS, 1)),
    )
    affine = Affine(matrix(rng, 6, 4, "float16"), vector(rng, 4))
    affine.norms = matrix(rng, ROWS, 1, "int8", "column")
    return [
        Band(
            ROWS,
            fixed(rng, 2, 7, "float16"),
            None,
            matrix(rng, 7, 6),
            affine=affine,
            plus=plus,
        )
    ]


def mlp(rng):
    cell = Cell("mlp", matrix(rng, 5, 6, "int8", scale_kind="float16"), vector(rng, 6))
    return [
        Band(
            ROWS,
            fixed(rng, 3, 8, "int3"),
            None,
            matrix(rng, 8, 5),
            cell=cell,
            affine=Affine(matrix(rng, 6, 4)),
        )
    ]


def recurrent(rng):
    cell = Cell("recurrent", matrix(rng, 4, 16, "float16"), vector(rng, 16))
    return [Band(ROWS, fixed(rng, 3, 6, parts=True), None, matrix(rng, 18, 4), "concat", cell)]


def lstm(rng):
    cell = Cell("lstm", matrix(rng, 4, 16), vector(rng, 16), matrix(rng, 3, 16, "int4", "column"))
    plus = Band(ROWS, Every(), matrix(rng, ROWS, 2), matrix(rng, 2, 4))
    return [
        Band(ROWS, fixed(rng, 4, 9, "float32"), None, matrix(rng, 9, 3), "concat", cell, plus=plus)
    ]


def grades(rng):
    """Bits of every width, rows without any, and a stream that ends within a byte."""
    bits = np.array([[8, 7, 6, 5], [4, 3, 2, 1], [1, 0, 2, 0], [0, 0, 0, 0]])
    return [Band(ROWS, Every(), Graded.round(rng.normal(size=(ROWS, 4)), bits, [3, 5, 9, 3]))]


def turned(rng):
    """Graded rows on a dictionary, a layer of graded rows with float32 scales, a rotation, a padding row."""
    first = Graded.round(rng.normal(size=(ROWS, 3)), np.array([[5, 3, 1], [3, 1, 0]]), [7, 13])
    second = Graded.round(rng.normal(size=(ROWS, 4)), np.array([[2, 0, 0, 4]]), [ROWS], "float32")
    affine = Affine(matrix(rng, 4, 4, "float16"), vector(rng, 4))
    return [
        Band(
            ROWS,
            Every(),
            first,
            matrix(rng, 3, 4, "int8"),
            affine=affine,
            plus=Band(ROWS, Every(), second),
        )
    ]


def version1():
    anchors = fb.AnchorTable(ROWS, 4, anchors=6, generator=seed(0))
    with torch.no_grad():
        anchors.transform *= torch.rand(ROWS, 6, generator=seed(1)) > 0.6
    kept = {"keep": 5, "rest": 2, "counts": torch.arange(ROWS) % 7}
    tables = {
        "ragged": anchors.pack(layout="ragged"),
        "fixed": anchors.pack(values="int8", dictionary="float16", layout="fixed"),
        "every": fb.LowRankTable(ROWS, 4, rank=2, padding_idx=3, generator=seed(2)).pack(),
        "identity": fb.DenseTable(ROWS, 4, generator=seed(3)).pack(dictionary="float16"),
        "levels": fb.QuantizedTable(ROWS, 5, bits=3, scales="column", generator=seed(4)).pack(),
        "hashed": fb.HashedTable(ROWS, 4, buckets=7, values="learnt", generator=seed(5)).pack(),
        "remainder": fb.RemainderTable(ROWS, 4, divisor=6, generator=seed(6)).pack(),
        "bands": fb.SelectedTable(ROWS, 4, **kept, generator=seed(7)).pack(),
    }
    for number, make in enumerate((wide, concat, layered, mlp, recurrent, lstm)):
        bands = make(np.random.default_rng(number))
        dim = 6 if make is concat else 4
        tables[make.__name__] = PackedTable(bands, dim, made_by={"table": make.__name__})
    return tables


def version2():
    tables = {}
    for number, make in enumerate((grades, turned)):
        padding = 5 if make is turned else None
        bands = make(np.random.default_rng(100 + number))
        tables[make.__name__] = PackedTable(
            bands, 4, padding_idx=padding, made_by={"table": make.__name__}
        )
    return tables


def version3():
    names, numbers = [f"key {i}" for i in range(ROWS)], [str(7 * i * i - 90) for i in range(ROWS)]
    alike = ["t20805", "t33868"]  # of one bucket and fingerprint among 20 keys
    keys = {
        "hashed-keys": Keys.of([*alike, *names[2:]], "hashed"),
        "reordered-keys": HashedKeys.build(names[:17], bits=20, order=False),
        "text-keys": Keys.of([*names[1:], "é" * 140], "text"),
        "sorted-keys": Keys.of(sorted(names[:18]), "text", shared=2),
        "integer-keys": Keys.of(numbers[::-1], "integer"),
        "rising-keys": Keys.of(numbers[:19], "integer", shared=1),
        "shared-keys": Keys.of(names[:15], shared=5),
    }
    keys["reordered-keys"].shared = 3
    keys["shared-keys"].counts = np.arange(ROWS, dtype=np.uint32)
    keys["text-keys"].counts = np.arange(ROWS, dtype=np.uint64) << np.uint64(40)
    dense = fb.DenseTable(ROWS, 2, generator=seed(8)).pack(dictionary="float16")
    return {name: dense.replace(keys=index) for name, index in keys.items()}


def words():
    """Keys, with and without rows of their own."""
    known = [f"key {i}" for i in range(25)] + [str(7 * i * i - 90) for i in range(ROWS)]
    return [*known, "t20805", "t33868", "-91", "01", "", "é" * 140]


def main():
    for make in (version1, version2, version3):
        folder = HERE / make.__name__
        if folder.exists():
            print(f"{folder} is there: the files of a version are made once")
            continue
        folder.mkdir()
        for name, packed in make().items():
            named = name in ("ragged", "grades")
            if make is version3:
                found = dict(zip(words(), packed.ids(words()).tolist(), strict=True))
                (folder / f"{name}.ids.json").write_text(json.dumps(found) + "\n")
            fb.save(
                packed,
                folder / f"{name}.safetensors",
                keys=[f"key {i}" for i in range(ROWS)] if named else None,
            )
            (folder / f"{name}.json").write_text(json.dumps(packed[:].tolist()) + "\n")


if __name__ == "__main__":
    main()
