"""The corpus: sound files of every table, method of compression, layout and kind of number.

``write_corpus(folder)`` writes them; ``small=True`` leaves out tables that take long to make or have
compiled loops of their own, for the test suite.
"""

import contextlib
import itertools
from pathlib import Path

import numpy as np
import torch

import featherbed as fb
from featherbed.codecs.registry import CODECS, WRAPPABLE
from featherbed.packed.band import (
    Affine,
    Band,
    Every,
    Fixed,
    Hash,
    Identity,
    Members,
    Ragged,
    Remainder,
)
from featherbed.packed.cells import Cell
from featherbed.packed.file import to_bytes
from featherbed.packed.hashed_keys import HashedKeys
from featherbed.packed.keys import FORMS, Keys
from featherbed.packed.matrix import KINDS, Graded, Matrix
from featherbed.packed.table import PackedTable
from featherbed.tables.spec import METHODS as TABLES
from featherbed.tables.spec import method_name

GOLDEN = Path(__file__).parent.parent / "golden"


def write_corpus(folder, small=False):
    """Write all files to ``folder``; return their paths, sorted."""
    for name, packed in packed_tables(small):
        (folder / f"{name}.safetensors").write_bytes(to_bytes(packed))
    for path in sorted(GOLDEN.glob("version*/*.safetensors")):
        (folder / f"golden-{path.stem}.safetensors").write_bytes(path.read_bytes())
    return sorted(folder.glob("*.safetensors"))


def packed_tables(small):
    """Yield every table of the corpus by name."""
    rng = np.random.default_rng(0)
    yield from layouts(rng, small)
    yield from anchors(small)
    yield from training_tables()
    if not small:
        yield from compressed(rng)


def matrix(rng, rows, columns, kind="float32", scales="row", scale_kind="float32"):
    values = rng.normal(size=(rows, columns)).astype(np.float32)
    return Matrix.encode(values, kind, scales, scale_kind)


def fixed(rng, rows, count, choices, kind=None, parts=False):
    values = None if kind is None else rng.normal(size=(rows, count)).astype(np.float32)
    indices = rng.integers(0, choices, (rows, count))
    return Fixed.encode(indices, values, choices, kind or "float32", parts)


def ragged(rng, rows, atoms, kind, most=4, wide=False):
    row_of = np.repeat(np.arange(rows), rng.integers(0, most + 1, rows))
    indices, values = rng.integers(0, atoms, len(row_of)), rng.normal(size=len(row_of))
    codes = Ragged.encode(rows, row_of, indices, values.astype(np.float32), atoms, kind)
    if wide:
        codes.directory = codes.directory.astype(np.uint64)
    return codes


def named(bands, dim, padding=None, keys=None):
    index = None if keys is None else Keys.of(keys)
    return PackedTable(bands, dim, padding_idx=padding, keys=index, made_by={"table": "fuzz"})


def layouts(rng, small):
    """Yield tables built part by part, with layouts and stages that no training table has."""
    yield from stored_rows(rng)
    yield from coded_rows(rng, small)
    yield from staged_rows(rng)
    yield from banded_rows(rng)
    yield from keyed_rows(rng)


def stored_rows(rng):
    for kind, scales in itertools.product(KINDS, ("row", "column")):
        rows = matrix(rng, 19, 37, kind, scales, "float16" if scales == "row" else "float32")
        yield f"stored-{kind}-{scales}", named([Band(19, Identity(), dictionary=rows)], 37)
    weighed = Band(17, Identity(), matrix(rng, 17, 1), matrix(rng, 17, 5, "int4"))
    yield "stored-weighed", named([weighed], 5, padding=16)
    for dictionary in (None, matrix(rng, 6, 9, "int3")):
        graded = Graded.round(
            rng.normal(size=(25, 6)), np.array([[8, 0, 3, 1, 7, 2], [1, 1, 0, 0, 4, 0]]), [9, 16]
        )
        name = "graded" if dictionary is None else "graded-on-atoms"
        band = Band(25, Every(), graded, dictionary)
        yield name, named([band], 6 if dictionary is None else 9, 3, map(str, range(25)))


def coded_rows(rng, small):
    for kind in (None, "int4") if small else (None, *KINDS):
        codes = fixed(rng, 33, 3, 11, kind)
        yield f"fixed-{kind}", named([Band(33, codes, None, matrix(rng, 11, 6))], 6)
    for kind in KINDS:
        codes = ragged(rng, 37, 9, kind, wide=kind in ("int8", "float32", "int2"))
        keys = [f"word {i}" for i in range(37)] if kind == "int4" else None
        yield f"ragged-{kind}", named([Band(37, codes, None, matrix(rng, 9, 6))], 6, None, keys)
    codes = ragged(rng, 1100, 50, "int8", most=20)
    yield "ragged-long", named([Band(1100, codes, None, matrix(rng, 50, 3, "float16"))], 3)
    bytewise = fixed(rng, 1100, 8, 200, "int8")
    yield "bytewise", named([Band(1100, bytewise, None, matrix(rng, 200, 4, "int8"))], 4)
    for parts, kind in itertools.product((False, True), (None,) if small else (None, "int4")):
        codes = fixed(rng, 21, 4, 8, kind, parts)
        for combine in ("sum", "product", "concat"):
            band = Band(21, codes, None, matrix(rng, 32 if parts else 8, 5), combine)
            name = f"{combine}-{'parts' if parts else 'shared'}-{kind}"
            yield name, named([band], 20 if combine == "concat" else 5)
    one = fixed(rng, 5, 2, 1)
    yield "no-bits", named([Band(5, one, None, matrix(rng, 1, 4))], 4)
    for combine in ("sum", "product", "concat"):
        for codes, count in ((Hash(3, 2), 2), (Remainder(7), 2)):
            band = Band(45, codes, matrix(rng, 45, count), matrix(rng, 15, 4), combine)
            name = f"{type(codes).__name__.lower()}-{combine}"
            yield name, named([band], 8 if combine == "concat" else 4)
    yield "hash-alone", named([Band(700, Hash(0, 3), None, matrix(rng, 9, 4, "int8"))], 4, 5)


def staged_rows(rng):
    affine = Affine(matrix(rng, 6, 5, "float16"), rng.normal(size=5).astype(np.float32))
    plus = Band(
        20,
        fixed(rng, 20, 2, 4, parts=True),
        None,
        matrix(rng, 8, 3),
        "concat",
        affine=Affine(norms=matrix(rng, 20, 1)),
    )
    last = Band(20, ragged(rng, 20, 5, "int2"), None, matrix(rng, 5, 6))
    plus.plus = last
    band = Band(20, fixed(rng, 20, 3, 7, "int3"), None, matrix(rng, 7, 6), affine=affine, plus=plus)
    affine.norms = matrix(rng, 20, 1, "int8", "column")
    yield "layers", named([band], 5, 0, [f"é{i}" for i in range(20)])
    bias = Affine(None, rng.normal(size=6).astype(np.float32))
    band = Band(40, ragged(rng, 40, 5, "float16"), None, matrix(rng, 5, 6), affine=bias)
    bias.norms = matrix(rng, 40, 1)
    yield "ragged-norms", named([band], 6)
    for kind in ("mlp", "recurrent", "lstm"):
        codes = fixed(rng, 18, 3, 6, parts=True)
        wide = {"mlp": (12, 5), "recurrent": (4, 16), "lstm": (5, 20)}[kind]
        given = matrix(rng, 4, 20, "int4") if kind == "lstm" else None
        bias = rng.normal(size=wide[1]).astype(np.float32)
        cell = Cell(kind, matrix(rng, *wide, "int8"), bias, given)
        yield (
            f"cell-{kind}",
            named([Band(18, codes, None, matrix(rng, 18, 4), "concat", cell)], cell.width),
        )


def banded_rows(rng):
    hot = Band(40, Identity(), dictionary=matrix(rng, 40, 4, "int8"))
    hot.members = Members.of(rng.permutation(1200)[:40], 1200)
    middle = Band(600, fixed(rng, 600, 2, 16, "int4"), None, matrix(rng, 16, 4))
    middle.members = Members.of(rng.permutation(1160)[:600], 1160)
    tail = Band(560, ragged(rng, 560, 6, "int3"), None, matrix(rng, 6, 4))
    yield "bands", named([hot, middle, tail], 4, 7, [f"k{i}" for i in range(1200)])
    first = Band(10, fixed(rng, 10, 4, 8, parts=True), None, matrix(rng, 32, 2), "concat")
    first.members = Members.of(np.arange(0, 30, 3), 30)
    second = Band(20, fixed(rng, 20, 4, 8, parts=True), None, matrix(rng, 32, 2), "concat")
    yield "bands-of-codes", named([first, second], 8)


def keyed_rows(rng):
    """Yield every form of keys, rows in their order and not, with and without shared rows."""
    names = [str(number) for number in rng.permutation(9 * np.arange(-30, 70))]
    for form, shared in itertools.product(FORMS, (0, 4)):
        for order, keys in (("mixed", names), ("rising", sorted(names, key=int))):
            sort = form == "text" and order == "rising"
            index = Keys.of(sorted(keys) if sort else keys, form, shared=shared)
            rows = matrix(rng, len(names) + shared, 3, "int8")
            packed = named([Band(len(names) + shared, Identity(), dictionary=rows)], 3)
            yield f"keys-{form}-{order}-{shared}", packed.replace(keys=index)
    rows = matrix(rng, 100, 3)
    alike = ["t49725", "t53292", *names[:88]]  # two of one bucket and fingerprint among 90 keys
    for keys in (
        HashedKeys.build(names, bits=29, order=False),
        Keys.of(alike, "hashed", shared=10),
    ):
        packed = named([Band(100, Identity(), dictionary=rows)], 3).replace(keys=keys)
        yield f"keys-hashed-{keys.bits}", packed


def anchors(small):
    """Yield the three layouts of sparse weights, in every kind of number and dictionary."""
    table = fb.AnchorTable(40, 8, anchors=12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        table.transform *= torch.rand(40, 12, generator=torch.Generator().manual_seed(1)) > 0.7
    kinds = ("float32", "int8") if small else tuple(KINDS)
    for layout, values, dictionary in itertools.product(("fixed", "ragged", "all"), kinds, kinds):
        yield (
            f"anchor-{layout}-{values}-{dictionary}",
            table.pack(values=values, dictionary=dictionary, layout=layout),
        )


def training_tables():
    """Yield every table class with its example settings."""
    for table in TABLES:
        made = table(50, 8, **table.example, generator=torch.Generator().manual_seed(2))
        with contextlib.suppress(fb.NotPackable):
            yield f"table-{method_name(table)}", made.eval().pack()


def compressed(rng):
    """Yield the tables that every method of ``fb.compress`` makes of a small matrix."""
    names = [
        *CODECS,
        *(f"{name}+norms" for name in WRAPPABLE),
        *(f"hot+{name}" for name in WRAPPABLE),
    ]
    for name in names:
        for rows, dim, ratio in ((300, 16, 2), (300, 16, 1.3), (800, 32, 4)):
            dense = (rng.normal(size=(rows, 6)) @ rng.normal(size=(6, dim))).astype(np.float32)
            weights = 1.0 / np.arange(1, rows + 1)
            try:
                packed = fb.compress(dense, ratio=ratio, method=name, weights=weights, generator=0)
            except fb.FeatherbedError:  # too small a matrix for this method
                continue
            yield f"compress-{name.replace('+', '-')}", packed
            break
