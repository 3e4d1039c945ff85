"""Additive codes: row ≈ Σ_m C_m[b_m]. Codes by coordinate descent, dictionaries by least squares, in turns."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from featherbed.codecs.kmeans import Codes, Floats, enough, kmeans, nearest, sums_by_code

HELD = 1 << 24  # costs held at once, floats
RIDGE = 1e-3  # of the mean weight of an atom: keeps atoms nobody uses where they cost nothing


def threads() -> int:
    """Return how many threads this process may use."""
    return (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    )


def decode(codes: Codes, atoms: Floats) -> Floats:  # [n, M], [M, K, d] -> [n, d]
    """Add up the atoms of rows."""
    rows: Floats = atoms[0][codes[:, 0]]
    for m in range(1, len(atoms)):
        rows += atoms[m][codes[:, m]]
    return rows


class Encoder:
    """Finds the codes of rows over given atoms [M, K, d].

    >>> atoms = np.array([[[0, 0], [4, 0]], [[0, 0], [0, 1]]], dtype=np.float32)
    >>> Encoder(atoms)(np.array([[4, 1], [0, 1]], dtype=np.float32)).tolist()
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
    ) -> Codes:  # [n, d] -> [n, M]
        """Return codes of rows, found from the given ones on, or from nothing."""
        from featherbed.kernels.descent import descend

        if self.parts == 1:
            return nearest(rows, self.flat)[:, None]
        greedy = codes is None
        found = np.zeros((len(rows), self.parts), dtype=np.int32) if codes is None else codes.copy()
        for start in range(0, len(rows), self.step):
            part = rows[start : start + self.step]
            unary = (self.squares - 2 * part @ self.flat.T).reshape(
                len(part), self.parts, self.choices
            )
            block = found[start : start + self.step]

            def job(
                first: int,
                last: int,
                unary: Floats = unary,
                block: Codes = block,
                seed: int = seed + start,
            ) -> None:
                descend(
                    unary,
                    self.pairs,
                    block,
                    first,
                    last,
                    greedy,
                    tries,
                    min(2, self.parts),
                    4,
                    seed,
                )

            in_threads(job, len(part), threads())
        return found


def least_squares(
    codes: Codes, rows: Floats, weights: Floats, choices: int
) -> Floats:  # -> [M, K, d]
    """Return the dictionaries that come nearest to rows with given codes: argmin_C Σ_i w_i ||x_i - Σ_m C_m[b_im]||²."""
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


def residual_start(
    rows: Floats, parts: int, bits: int, seed: int, beam: int = 8
) -> Floats:  # [n, d] -> [M, K, d]
    """Learn codebooks one after the other, each on what beam search over the ones before it leaves (faiss): to start from."""
    import faiss

    if parts == 1:
        return kmeans(rows, 1 << bits, seed)[None]
    rows = enough(rows, max(1 << bits, rows.shape[1]))
    quantiser = faiss.ResidualQuantizer(rows.shape[1], parts, bits)
    quantiser.cp.niter, quantiser.cp.seed, quantiser.max_beam_size = 10, seed + 1, beam
    quantiser.cp.min_points_per_centroid = 1
    quantiser.train(np.ascontiguousarray(rows))
    atoms: Floats = (
        faiss.vector_to_array(quantiser.codebooks).reshape(parts, 1 << bits, rows.shape[1]).copy()
    )
    return atoms


def learn_additive(
    rows: Floats,
    parts: int,
    choices: int,
    seed: int,
    rounds: int = 8,
    weights: Floats | None = None,
) -> tuple[Floats, Codes]:  # [n, d] -> atoms [M, K, d], codes [n, M]
    """Learn additive codes of rows: a stage-by-stage start, then dictionaries by least squares and codes by descent in turns.

    >>> rows = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
    >>> atoms, codes = learn_additive(rows, 3, 8, seed=0)
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
    codes = Encoder(atoms)(rows, seed=seed)
    for number in range(rounds):
        atoms = least_squares(codes, rows, known, choices)
        codes = Encoder(atoms)(rows, codes, seed=seed + number)
    return atoms, codes


def learn_shared(
    rows: Floats,
    parts: int,
    choices: int,
    seed: int,
    rounds: int = 8,
    weights: Floats | None = None,
) -> tuple[Floats, Codes]:
    """Learn additive codes whose parts all choose among the same atoms: [n, d] -> atoms [1, K, d], codes [n, M].

    >>> rows = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
    >>> atoms, codes = learn_shared(rows, 3, 8, seed=0)
    >>> atoms.shape, float(((rows - atoms[0][codes].sum(1)) ** 2).mean()) < 0.6
    ((1, 8, 4), True)
    """
    from scipy.linalg import solve

    generator = np.random.default_rng(seed)
    near = kmeans(rows, choices, seed)
    atoms = (near * generator.uniform(0.3, 1.0, (choices, 1))).astype(np.float32)[None]
    codes: Codes | None = None
    for number in range(rounds + 4):
        codes = Encoder(np.repeat(atoms, parts, axis=0))(rows, codes, seed=seed + number)
        counts = np.stack([np.bincount(row, minlength=choices) for row in codes]).astype(np.float64)
        weighted = counts if weights is None else counts * weights[:, None]
        gram = weighted.T @ counts
        gram[np.diag_indices(choices)] += RIDGE * gram.diagonal().mean()
        atoms = solve(gram, weighted.T @ rows, assume_a="pos").astype(np.float32)[None]
    codes = Encoder(np.repeat(atoms, parts, axis=0))(rows, codes, seed=seed)
    return atoms, codes


def in_threads(job: Any, count: int, threads: int) -> None:
    """Call job(first, last) on ``threads`` even stretches of 0 .. count - 1 at once."""
    if threads <= 1 or count < 2 * threads:
        job(0, count)
        return
    cuts = np.linspace(0, count, 4 * threads + 1).astype(int).tolist()
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(job, a, b) for a, b in pairwise(cuts)]:
            done.result()
