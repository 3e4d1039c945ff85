"""Additive codes: row ≈ Σ_m C_m[b_m]. Codes by coordinate descent, dictionaries by least squares, in turns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from featherbed.codecs.kmeans import Codes, Floats, enough, kmeans, nearest, sums_by_code

HELD = 1 << 24  # costs held at once, floats
RIDGE = 1e-3  # of the mean weight of an atom: keeps unused atoms bounded


def decode(codes: Codes, atoms: Floats) -> Floats:  # [n, M], [M, K, d] -> [n, d]
    """Add up the atoms of rows."""
    rows: Floats = atoms[0][codes[:, 0]]
    for m in range(1, len(atoms)):
        rows += atoms[m][codes[:, m]]
    return rows


class AdditiveEncoder:
    """Finds the codes of rows over given atoms [M, K, d].

    >>> atoms = np.array([[[0, 0], [4, 0]], [[0, 0], [0, 1]]], dtype=np.float32)
    >>> AdditiveEncoder(atoms)(np.array([[4, 1], [0, 1]], dtype=np.float32)).tolist()
    [[1, 1], [0, 1]]
    """

    def __init__(self, atoms: Floats) -> None:
        self.parts, self.choices, dim = atoms.shape
        self.flat = np.ascontiguousarray(atoms.reshape(-1, dim))
        shape = (self.parts, self.choices, self.parts, self.choices)
        if self.parts > 1:
            self.pairs = np.ascontiguousarray((2 * self.flat @ self.flat.T).reshape(shape))
        self.squares = np.einsum("kd,kd->k", self.flat, self.flat)
        self.step = max(64, HELD // len(self.flat))

    def __call__(
        self, rows: Floats, codes: Codes | None = None, tries: int = 3, seed: int = 0
    ) -> Codes:
        """Return codes [n, M] of rows [n, d], starting from the given ones or greedily."""
        from featherbed.kernels.descent import descend
        from featherbed.kernels.threads import cores

        if self.parts == 1:
            return nearest(rows, self.flat)[:, None]
        greedy = codes is None
        found = np.zeros((len(rows), self.parts), dtype=np.int32) if codes is None else codes.copy()
        for start in range(0, len(rows), self.step):
            part = rows[start : start + self.step]
            unary = self.squares - 2 * part @ self.flat.T
            unary = unary.reshape(len(part), self.parts, self.choices)
            arrays = (unary, self.pairs, found[start : start + self.step])
            options = (greedy, tries, min(2, self.parts), 4, seed + start)
            in_threads(descend, arrays, options, len(part), cores())
        return found


def least_squares(codes: Codes, rows: Floats, weights: Floats, choices: int) -> Floats:
    """Return the dictionaries [M, K, d] of given codes: argmin_C Σ_i w_i ||x_i - Σ_m C_m[b_im]||²."""
    from scipy.linalg import solve

    from featherbed.kernels.descent import count_pairs

    parts = codes.shape[1]
    if parts == 1:
        totals = np.bincount(codes[:, 0], weights, choices)
        sums = sums_by_code(codes[:, 0], rows, weights, choices)
        means: Floats = (sums / (totals + RIDGE * totals.mean())[:, None]).astype(np.float32)
        return means[None]
    gram = np.zeros((parts * choices, parts * choices))
    count_pairs(codes, weights, choices, gram)
    gram += np.tril(gram, -1).T
    diagonal: Any = np.diag_indices_from(gram)
    gram[diagonal] += RIDGE * max(float(gram[diagonal].mean()), 1e-12)
    right = np.concatenate(
        [sums_by_code(codes[:, m], rows, weights, choices) for m in range(parts)]
    )
    atoms: Floats = solve(gram, right, assume_a="pos").astype(np.float32)
    return atoms.reshape(parts, choices, -1)


def residual_start(rows: Floats, parts: int, bits: int, seed: int, beam: int = 8) -> Floats:
    """Return initial dictionaries [M, K, d], each fitted to the residual of those before (faiss)."""
    import faiss

    if parts == 1:
        return kmeans(rows, 1 << bits, seed)[None]
    rows = enough(rows, max(1 << bits, rows.shape[1]))
    quantizer = faiss.ResidualQuantizer(rows.shape[1], parts, bits)
    quantizer.cp.niter, quantizer.cp.seed, quantizer.max_beam_size = 10, seed + 1, beam
    quantizer.cp.min_points_per_centroid = 1
    quantizer.train(np.ascontiguousarray(rows))
    codebooks = faiss.vector_to_array(quantizer.codebooks)
    atoms: Floats = codebooks.reshape(parts, 1 << bits, rows.shape[1]).copy()
    return atoms


def fit_additive(
    rows: Floats,
    parts: int,
    choices: int,
    seed: int,
    rounds: int = 8,
    weights: Floats | None = None,
) -> tuple[Floats, Codes]:
    """Return atoms [M, K, d] and additive codes [n, M] of rows [n, d].

    Initial dictionaries are fitted stage by stage; then dictionaries by least squares and codes by
    coordinate descent alternate.

    >>> rows = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
    >>> atoms, codes = fit_additive(rows, 3, 8, seed=0)
    >>> float(((rows - decode(codes, atoms)) ** 2).mean()) < 0.2
    True
    """
    known = np.ones(len(rows), dtype=np.float32) if weights is None else weights
    if choices & (choices - 1) == 0:
        atoms = residual_start(rows, parts, choices.bit_length() - 1, seed)
    else:
        left, stages = rows, []
        for part in range(parts):
            stages.append(kmeans(left, choices, seed + part))
            left = left - stages[-1][nearest(left, stages[-1])]
        atoms = np.stack(stages)
    codes = AdditiveEncoder(atoms)(rows, seed=seed)
    for number in range(rounds):
        atoms = least_squares(codes, rows, known, choices)
        codes = AdditiveEncoder(atoms)(rows, codes, seed=seed + number)
    return atoms, codes


def fit_shared(
    rows: Floats,
    parts: int,
    choices: int,
    seed: int,
    rounds: int = 8,
    weights: Floats | None = None,
) -> tuple[Floats, Codes]:
    """Return atoms [1, K, d] that all parts share, and additive codes [n, M] of rows [n, d].

    >>> rows = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
    >>> atoms, codes = fit_shared(rows, 3, 8, seed=0)
    >>> atoms.shape, float(((rows - atoms[0][codes].sum(1)) ** 2).mean()) < 0.6
    ((1, 8, 4), True)
    """
    from scipy.linalg import solve

    generator = np.random.default_rng(seed)
    near = kmeans(rows, choices, seed)
    atoms = (near * generator.uniform(0.3, 1.0, (choices, 1))).astype(np.float32)[None]
    codes: Codes | None = None
    for number in range(rounds + 4):
        codes = AdditiveEncoder(np.repeat(atoms, parts, axis=0))(rows, codes, seed=seed + number)
        counts = np.stack([np.bincount(row, minlength=choices) for row in codes]).astype(np.float64)
        weighted = counts if weights is None else counts * weights[:, None]
        gram = weighted.T @ counts
        gram[np.diag_indices(choices)] += RIDGE * gram.diagonal().mean()
        atoms = solve(gram, weighted.T @ rows, assume_a="pos").astype(np.float32)[None]
    codes = AdditiveEncoder(np.repeat(atoms, parts, axis=0))(rows, codes, seed=seed)
    return atoms, codes


def in_threads(
    job: Any, arrays: tuple[Any, ...], options: tuple[Any, ...], count: int, threads: int
) -> None:
    """Call job(*arrays, first, last, *options) on even ranges of 0 .. count - 1, in threads."""
    if threads <= 1 or count < 2 * threads:
        job(*arrays, 0, count, *options)
        return
    cuts = np.linspace(0, count, 4 * threads + 1).astype(int).tolist()
    with ThreadPoolExecutor(threads) as pool:
        calls = [pool.submit(partial(job, *arrays), a, b, *options) for a, b in pairwise(cuts)]
        for call in calls:
            call.result()
