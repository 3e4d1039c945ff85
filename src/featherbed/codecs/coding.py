"""k-means, and additive codes: row ≈ Σ_m C_m[b_m], by coordinate descent and least squares in
turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Codes = NDArray[np.int32]
HELD = 1 << 19  # costs of a block of rows, floats: they stay in the cache of a core
RIDGE = 1e-3  # of the mean weight of an atom: keeps unused atoms bounded
TRIES = 4  # perturbations of the codes of a row in each round
MOVES = 3  # codes that a perturbation changes
SWEEPS = 4


def kmeans(
    rows: Floats, choices: int, seed: int, rounds: int = 10, restarts: int = 1, most: int = 256
) -> Floats:
    """Return ``choices`` centroids [K, d] of rows [n, d] by faiss, the best of ``restarts`` runs.

    At most ``most`` rows per centroid are used. Fewer rows than centroids are repeated with a
    little noise.
    """
    import faiss

    if len(rows) < choices:
        noise = np.random.default_rng(seed).standard_normal((choices, rows.shape[1]))
        scale, repeated = np.float32(1e-3 * rows.std()), rows[np.arange(choices) % len(rows)]
        noisy: Floats = repeated + scale * noise.astype(np.float32)
        return noisy
    options = {"niter": rounds, "seed": seed + 1, "nredo": restarts}
    limits = {"min_points_per_centroid": 1, "max_points_per_centroid": most}
    means = faiss.Kmeans(rows.shape[1], choices, **options, **limits)
    means.train(np.ascontiguousarray(rows))
    centroids: Floats = np.asarray(means.centroids, dtype=np.float32).reshape(choices, -1).copy()
    return centroids


def nearest(rows: Floats, centroids: Floats) -> Codes:  # [n, d], [K, d] -> [n]
    """Return the nearest centroid of each row."""
    import faiss

    index = faiss.IndexFlatL2(rows.shape[1])
    index.add(np.ascontiguousarray(centroids))
    found: Codes = index.search(np.ascontiguousarray(rows), 1)[1][:, 0].astype(np.int32)
    return found


def move_centroids(
    centroids: Floats,  # [K, d]
    codes: Codes,  # [n]
    rows: Floats,  # [n, d]
    weights: Floats,  # [n]
) -> Floats:
    """Return the weighted mean of the rows of each centroid; one without rows stays."""
    from featherbed.kernels.descent import sum_rows

    sums, totals = sum_rows(codes[:, None], rows, weights, len(centroids))
    moved, used = centroids.copy(), totals > 0
    moved[used] = sums[used] / totals[used, None]
    return moved


def enough(rows: Floats, count: int) -> Floats:  # [n, d] -> [m, d], m >= count
    """Return rows, repeated to at least ``count``: faiss needs as many as centroids and columns.

    >>> enough(np.ones((2, 3), dtype=np.float32), 3).shape
    (4, 3)
    """
    return rows if len(rows) >= count else np.concatenate([rows] * -(-count // len(rows)))


def decode(codes: Codes, atoms: Floats) -> Floats:  # [n, M], [M, K, d] -> [n, d]
    """Add up the atoms of rows."""
    rows: Floats = atoms[0][codes[:, 0]]
    for m in range(1, len(atoms)):
        rows += atoms[m][codes[:, m]]
    return rows


def mean_square(rows: Floats, weights: Floats) -> float:  # [n, d], [n]
    """Return Σ_i w_i ||x_i||² / Σ_i w_i."""
    squares = np.einsum("nd,nd->n", rows, rows)
    return float(weights @ squares.astype(np.float64) / max(weights.sum(dtype=np.float64), 1e-300))


class AdditiveEncoder:
    """Finds the codes of rows over given atoms [M, K, d].

    >>> atoms = np.array([[[0, 0], [4, 0]], [[0, 0], [0, 1]]], dtype=np.float32)
    >>> AdditiveEncoder(atoms)(np.array([[4, 1], [0, 1]], dtype=np.float32)).tolist()
    [[1, 1], [0, 1]]
    """

    def __init__(self, atoms: Floats) -> None:
        self.parts, choices, dim = atoms.shape
        self.flat = np.ascontiguousarray(atoms.reshape(-1, dim))
        if self.parts > 1:
            self.pairs = 2 * self.flat @ self.flat.T
            for begin in range(0, len(self.flat), choices):
                self.pairs[begin : begin + choices, begin : begin + choices] = 0
            self.linear = np.ascontiguousarray(-2 * self.flat.T)
        self.squares = np.einsum("kd,kd->k", self.flat, self.flat)
        self.step = max(64, HELD // len(self.flat))

    def __call__(
        self, rows: Floats, codes: Codes | None = None, tries: int = TRIES, seed: int = 0
    ) -> Codes:
        """Return codes [n, M] of rows [n, d], starting from the given ones or greedily."""
        from featherbed.kernels.descent import descend

        if self.parts == 1:
            return nearest(rows, self.flat)[:, None]
        greedy, moves = codes is None, min(MOVES, self.parts)
        found = np.zeros((len(rows), self.parts), dtype=np.int32) if codes is None else codes.copy()

        def encode(start: int) -> None:
            unary = rows[start : start + self.step] @ self.linear
            unary += self.squares
            block = found[start : start + self.step]
            options = (greedy, tries, moves, SWEEPS, seed + start)
            descend(unary, self.pairs, block, 0, len(block), *options)

        in_threads(encode, range(0, len(rows), self.step))
        return found


def least_squares(codes: Codes, rows: Floats, weights: Floats, choices: int) -> Floats:
    """Return the dictionaries [M, K, d] of given codes: argmin_C Σ_i w_i ||x_i - Σ_m
    C_m[b_im]||²."""
    from scipy.linalg import cho_factor, cho_solve

    from featherbed.kernels.descent import count_pairs, sum_rows

    parts = codes.shape[1]
    sums, totals = sum_rows(codes, rows, weights, choices)
    totals += RIDGE * max(float(totals.mean()), 1e-12)
    if parts == 1:
        means: Floats = (sums / totals[:, None]).astype(np.float32)
        return means[None]
    gram = np.zeros((len(totals), len(totals)), dtype=np.float32)
    count_pairs(codes, weights, choices, gram)
    gram[np.diag_indices_from(gram)] = totals
    scale = 1 / np.sqrt(totals)  # a diagonal of ones: float32 is then precise enough
    gram *= scale.astype(np.float32)[:, None]
    gram *= scale.astype(np.float32)
    factor = cho_factor(gram, lower=True, overwrite_a=True, check_finite=False)
    right = (sums * scale[:, None]).astype(np.float32)
    atoms: Floats = cho_solve(factor, right, overwrite_b=True, check_finite=False)
    return (atoms * scale[:, None]).astype(np.float32).reshape(parts, choices, -1)


class ResidualStages:
    """Dictionaries fitted stage by stage, each by k-means to the residual of those before.

    They start the fits of additive codes; ``errors`` [stages + 1] is the residual after each stage,
    as a share of the weighted squares of the rows: ``expected`` of the errors of the first ``seen``
    rows, to which dictionaries are fitted, and of the others.
    """

    def __init__(
        self,
        rows: Floats,
        weights: Floats,
        choices: int,
        seed: int,
        seen: int,
        expected: Callable[[float, float], float],
    ) -> None:
        self.left, self.weights, self.choices, self.seed = rows, weights, choices, seed
        self.seen, self.expected = seen, expected
        self.whole = mean_square(rows, weights)
        self.stages: list[Floats] = []
        self.errors = [1.0]

    def atoms(self, count: int) -> Floats:  # -> [count, K, d]
        """Return the dictionaries of the first ``count`` stages."""
        while len(self.stages) < count:
            rounds, most = 6, 128 if self.choices <= 256 else 64
            seed = self.seed + len(self.stages)
            atoms = kmeans(self.left[: self.seen], self.choices, seed, rounds, most=most)
            self.left = self.left - atoms[nearest(self.left, atoms)]
            self.stages.append(atoms)
            seen, unseen = (
                mean_square(self.left[part], self.weights[part]) / max(self.whole, 1e-30)
                for part in (slice(self.seen), slice(self.seen, None))
            )
            self.errors.append(self.expected(seen, unseen))
        return np.stack(self.stages[:count])


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
    atoms = ResidualStages(rows, known, choices, seed, len(rows), max).atoms(parts)
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


def in_threads(job: Callable[[int], None], starts: range) -> None:
    """Call ``job`` for the first row of every block, in as many threads as there are cores."""
    from featherbed.kernels.threads import cores

    threads = min(cores(), len(starts))
    if threads <= 1:
        for start in starts:
            job(start)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(job, starts):
            pass


@contextmanager
def single_blas_thread() -> Iterator[None]:
    """Multiply matrices in the calling thread alone.

    The threads of OpenBLAS spin for a tenth of a second after every product and take the cores from
    the threads that search codes. faiss waits passively and keeps its threads.
    """
    from threadpoolctl import ThreadpoolController

    with ThreadpoolController().select(threading_layer="pthreads").limit(limits=1):
        yield
