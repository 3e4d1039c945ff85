"""Codes of rows over additive dictionaries: greedy start, coordinate descent, perturbation.

The cost of codes b is  Σ_m unary[m, b_m] + Σ_{m<q} pairs[m, b_m, q, b_q], which equals
||t - Σ_m C_m[b_m]||² up to a constant for  unary = ||C_m[k]||² - 2 t . C_m[k]  and
pairs = 2 C_m[k] . C_q[l]  (iterated conditional modes: Martinez et al. 2016, "Revisiting additive
quantization").
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.kernels.compiled import compiled, fast

Codes = NDArray[np.int32]
Floats = NDArray[np.float32]


@compiled
def _next(state: Any) -> Any:
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    state ^= state << np.uint64(17)
    return state


@fast
def _cheapest(unary: Floats, pairs: Floats, codes: Any, m: int, known: int, cost: Floats) -> int:
    """Return the best choice of part m for fixed choices of the other parts below ``known``."""
    choices = len(cost)
    for k in range(choices):
        cost[k] = unary[m, k]
    for q in range(known):
        if q != m:
            row = pairs[q, codes[q], m]
            for k in range(choices):
                cost[k] += row[k]
    best, least = 0, cost[0]
    for k in range(1, choices):
        if cost[k] < least:
            best, least = k, cost[k]
    return best


@compiled
def _total(unary: Floats, pairs: Floats, codes: Any) -> Any:
    total = np.float32(0)
    for m in range(len(codes)):
        total += unary[m, codes[m]]
        for q in range(m):
            total += pairs[q, codes[q], m, codes[m]]
    return total


@fast
def descend(
    unary: Floats,  # [n, M, K]
    pairs: Floats,  # [M, K, M, K]
    codes: Codes,  # [n, M], changed in place
    first: int,
    last: int,
    greedy: bool,
    tries: int,
    moves: int,
    sweeps: int,
    seed: int,
) -> None:
    """Improve the codes of rows first .. last - 1.

    Each try changes ``moves`` codes at random, descends, and is kept if it is better.
    """
    parts, choices = unary.shape[1], unary.shape[2]
    cost = np.empty(choices, np.float32)
    trial = np.empty(parts, np.int32)
    for i in range(first, last):
        best = codes[i]
        if greedy:
            for m in range(parts):
                best[m] = _cheapest(unary[i], pairs, best, m, m, cost)
        least = _total(unary[i], pairs, best)
        state = np.uint64(seed + 1) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(i + 1) * np.uint64(
            0xBF58476D1CE4E5B9
        )
        for attempt in range(tries):
            trial[:] = best
            if attempt > 0 or not greedy:
                for _ in range(moves):
                    state = _next(state)
                    m = int((state >> np.uint64(33)) % np.uint64(parts))
                    state = _next(state)
                    trial[m] = np.int32((state >> np.uint64(33)) % np.uint64(choices))
            for _ in range(sweeps):
                changed = False
                for m in range(parts):
                    found = _cheapest(unary[i], pairs, trial, m, parts, cost)
                    if found != trial[m]:
                        trial[m] = found
                        changed = True
                if not changed:
                    break
            total = _total(unary[i], pairs, trial)
            if total < least:
                least = total
                best[:] = trial


@compiled
def count_pairs(codes: Codes, weights: Floats, choices: int, out: NDArray[np.float64]) -> None:
    """Add the weighted co-occurrences of atoms [M K, M K], the lower triangle of the normal equations."""
    for i in range(len(codes)):
        for m in range(codes.shape[1]):
            a = m * choices + codes[i, m]
            for q in range(m + 1):
                out[a, q * choices + codes[i, q]] += weights[i]
