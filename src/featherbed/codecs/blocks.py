"""Rows in blocks of columns over one small dictionary, frequent rows in narrower blocks.

For vectors whose coordinates may be rotated, such as those of a static encoder: only their inner
products count. Rows of norm 1 are turned so that every block of columns holds as much of the large
principal components as of the small ones (balanced allocation: Ge et al. 2013, "Optimized Product
Quantization"); blocks then have the same distribution, and one dictionary S serves them all:

    row = norm [S[k_1], ..., S[k_n]]

The rows of largest weight have blocks of fewer columns, which is more bits.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from featherbed.codecs.codec import ProgressCallback, matrix_size, no_progress, stream_size
from featherbed.codecs.coding import kmeans, nearest
from featherbed.codecs.rows import Floats, WeightedRows
from featherbed.errors import ArgumentError
from featherbed.packed.band import Affine, Band, Fixed, Members
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable

ACROSS = (2, 4, 8)  # columns of a block
BITS = (6, 8, 10, 12)  # of its code
POINTS, FEW_POINTS = 64, 24  # blocks for each atom to which a dictionary is fitted, and a trial
TRIAL_ROWS = 4096  # rows by which forms are compared
LARGEST = 6e4  # norm that is stored as float16
HEADER = 2200  # bytes of a file besides its arrays, at most
IMPORTANCE = 0.75  # power of the weights: between one for texts and none for words
# the order of eight strata of components, the largest first, by which blocks of 2, 4 and 8 columns
# hold large and small ones alike
STRATA = (0, 7, 3, 4, 1, 6, 2, 5)


class Blocks(NamedTuple):
    """How some rows are stored: the columns of a block, and the bits of its code."""

    across: int
    bits: int

    def size(self, rows: int, dim: int) -> int:
        """Return the bytes of the arrays."""
        codes = stream_size(rows, dim // self.across * self.bits)
        return codes + 2 * rows + matrix_size("int8", 1 << self.bits, self.across, "column", 4)


def compress_blocks(
    matrix: Floats,  # [V, d]
    budget: int,
    weights: Any = None,
    *,
    generator: np.random.Generator | int | None = None,
    tell: ProgressCallback = no_progress,
) -> PackedTable:
    """Return a table of the rows, turned, of at most ``budget`` bytes; no row may be zero.

    ``weights`` are frequencies of rows, by default 1 / (i + 1).

    >>> rows = np.random.default_rng(0).standard_normal((900, 16)).astype(np.float32)
    >>> table = compress_blocks(rows, 9_000)
    >>> errors = (table.block(0, 900) @ table[7] - rows @ rows[7]) / np.square(rows[7]).sum()
    >>> table.nbytes <= 9_000, float(np.abs(errors).mean()) < 0.2
    (True, True)
    """
    rows = WeightedRows(matrix, "zipf" if weights is None else weights)
    order = np.argsort(-rows.weights, kind="stable")
    importance = rows.weights[order] ** IMPORTANCE
    generator, norms = np.random.default_rng(generator or 0), rows.lengths()
    seed = int(generator.integers(1 << 30))
    turned: Floats = matrix / norms[:, None]
    if rows.dim % 8:
        raise ArgumentError(f"blocks: {rows.dim} columns: give a multiple of 8")
    turned = np.dot(turned, balanced_axes(turned, rows.weights**IMPORTANCE, generator))
    sample: Floats = turned[generator.permutation(rows.count)[:TRIAL_ROWS]]
    losses = {}
    for form in (Blocks(across, bits) for across in ACROSS for bits in BITS):
        tell(f"comparing: {form.bits} bits for {form.across} columns", 0.0)
        if form.bits < 6 * form.across and sample.size // form.across >= 8 << form.bits:
            losses[form] = trial_loss(sample, form, seed)
    cut, *forms = share_bits(losses, importance, rows.dim, budget - HEADER)
    bands: list[Band] = []
    for form, ids in zip(forms, (np.sort(order[:cut]), np.sort(order[cut:])), strict=True):
        if len(ids):
            tell(f"{form.bits} bits for {form.across} columns of {len(ids):,} rows", 0.5)
            members = Members.of(ids, rows.count) if len(ids) < rows.count and not bands else None
            bands.append(code_blocks(turned[ids], norms[ids], form, members, seed))
    return PackedTable(bands, rows.dim, made_by={"table": "compress", "method": "blocks"})


def trial_loss(sample: Floats, form: Blocks, seed: int) -> float:
    """Return the error of rows of norm 1 in a form whose dictionary was fitted to other rows."""
    pieces = np.ascontiguousarray(sample).reshape(-1, form.across)
    half = len(pieces) // 2
    centroids = kmeans(pieces[:half], 1 << form.bits, seed, rounds=6, most=FEW_POINTS)
    found = centroids[nearest(pieces[half:], centroids)]
    return float(np.square(found - pieces[half:]).sum() / np.square(pieces[half:]).sum())


def share_bits(
    losses: dict[Blocks, float], importance: Floats, dim: int, budget: int
) -> tuple[int, Blocks, Blocks]:
    """Return the number of rows in the first form and both forms, of the least expected loss."""
    rows = len(importance)
    total = np.concatenate([[0.0], np.cumsum(importance, dtype=np.float64)])
    best: tuple[float, int, Blocks, Blocks] | None = None
    for first, second in [*permutations(losses, 2), *((form, form) for form in losses)]:
        more = (first.size(rows, dim) - first.size(0, dim)) / rows  # bytes of a row
        less = (second.size(rows, dim) - second.size(0, dim)) / rows
        fixed = second.size(0, dim)
        if first != second:  # with the bitmap of the members
            fixed += first.size(0, dim) + rows // 7 + 200
        left = budget - fixed - rows * less
        if left < 0 or (first != second and more <= less):
            continue
        cut = 0 if first == second else min(rows, int(left / (more - less)))
        loss = total[cut] * losses[first] + (total[-1] - total[cut]) * losses[second]
        if best is None or loss < best[0]:
            best = (float(loss), cut, first, second)
    if best is None:
        raise ArgumentError(
            f"blocks: nothing fits {rows:,} x {dim} into {budget + HEADER:,} bytes: give more, or "
            "another method"
        )
    return best[1:]


def balanced_axes(rows: Floats, weights: Floats, generator: np.random.Generator) -> Floats:
    """Return orthogonal columns [d, d] by which all blocks of turned rows have the same spread."""
    _, axes = np.linalg.eigh((rows * weights[:, None]).T @ rows)
    strata = []
    for part in np.split(axes[:, ::-1], 8, axis=1):
        rotation, _ = np.linalg.qr(generator.standard_normal((part.shape[1],) * 2))
        strata.append(part @ rotation)
    mixed = np.stack([strata[number] for number in STRATA], axis=2)
    return np.asarray(mixed.reshape(axes.shape), dtype=np.float32)


def code_blocks(
    rows: Floats, norms: Floats, form: Blocks, members: Members | None, seed: int
) -> Band:
    """Return a band of rows of norm 1 and their norms."""
    pieces = np.ascontiguousarray(rows).reshape(-1, form.across)
    centroids = kmeans(pieces, 1 << form.bits, seed, rounds=20, most=POINTS)
    shared = Matrix.encode(centroids, "int8", "column")
    codes = nearest(pieces, shared.dense()).reshape(len(rows), -1)
    kind = "float16" if norms.max() < LARGEST else "float32"
    return Band(
        len(rows),
        Fixed.encode(codes, None, 1 << form.bits),
        dictionary=shared,
        combine="concat",
        affine=Affine(norms=Matrix.encode(norms[:, None], kind)),
        members=members,
    )
