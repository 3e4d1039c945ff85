"""Codes of rows over additive dictionaries: greedy start, coordinate descent, perturbation.

The cost of codes b is  Σ_m unary[m, b_m] + Σ_{m<q} pairs[m, b_m, q, b_q], which equals
||t - Σ_m C_m[b_m]||² up to a constant for  unary = ||C_m[k]||² - 2 t . C_m[k]  and
pairs = 2 C_m[k] . C_q[l]  (iterated conditional modes: Martinez et al. 2016, "Revisiting additive
quantization"). A table of the cost of every choice, given the codes of the other parts, is kept for
the current row and updated only where a code changes.
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
def _cheapest(costs: Floats) -> int:
    """Return the first index of the smallest cost."""
    least = costs[0]
    for k in range(1, len(costs)):
        least = min(least, costs[k])
    best = 0
    while costs[best] != least:
        best += 1
    return best


@fast
def _swap(costs: Floats, fresh: Floats, old: Floats) -> None:
    for j in range(len(costs)):
        costs[j] += fresh[j] - old[j]


@fast
def _descend_row(costs: Floats, pairs: Floats, codes: Any, sweeps: int) -> Any:
    """Take the cheapest choice of part after part until none changes; return the change of cost."""
    parts, change = len(codes), np.float32(0)
    choices = len(costs) // parts
    unchanged = m = 0
    for _ in range(sweeps * parts):
        begin = m * choices
        part = costs[begin : begin + choices]
        old, best = codes[m], _cheapest(part)
        unchanged += 1
        if part[best] < part[old]:
            change += part[best] - part[old]
            _swap(costs, pairs[begin + best], pairs[begin + old])
            codes[m] = best
            unchanged = 1
        if unchanged == parts:
            break
        m = m + 1 if m + 1 < parts else 0
    return change


@fast
def descend(
    unary: Floats,  # [n, M K]
    pairs: Floats,  # [M K, M K], 0 within a part
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
    parts, width = codes.shape[1], unary.shape[1]
    choices = width // parts
    known, costs = np.empty(width, np.float32), np.empty(width, np.float32)
    trial = np.empty(parts, np.int32)
    for i in range(first, last):
        best = codes[i]
        known[:] = unary[i]
        for m in range(parts):
            begin = m * choices
            if greedy:
                best[m] = _cheapest(known[begin : begin + choices])
            fresh = pairs[begin + best[m]]
            for j in range(width):
                known[j] += fresh[j]
        state = np.uint64(seed + 1) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(i + 1) * np.uint64(
            0xBF58476D1CE4E5B9
        )
        for attempt in range(tries):
            costs[:] = known
            trial[:] = best
            change = np.float32(0)
            if attempt > 0 or not greedy:
                for _ in range(moves):
                    state = _next(state)
                    m = int((state >> np.uint64(33)) % np.uint64(parts))
                    state = _next(state)
                    drawn = int((state >> np.uint64(33)) % np.uint64(choices))
                    begin, old = m * choices, trial[m]
                    if drawn != old:
                        change += costs[begin + drawn] - costs[begin + old]
                        _swap(costs, pairs[begin + drawn], pairs[begin + old])
                        trial[m] = drawn
            change += _descend_row(costs, pairs, trial, sweeps)
            if change < 0:
                best[:] = trial
                known[:] = costs


@compiled
def sum_rows(
    codes: Codes,  # [n, M]
    rows: Floats,  # [n, d]
    weights: Floats,  # [n]
    choices: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the weighted sum [M K, d] of the rows of each atom and its weight [M K]."""
    sums = np.zeros((codes.shape[1] * choices, rows.shape[1]))
    totals = np.zeros(codes.shape[1] * choices)
    for i in range(len(codes)):
        for m in range(codes.shape[1]):
            atom = m * choices + codes[i, m]
            totals[atom] += weights[i]
            for a in range(rows.shape[1]):
                sums[atom, a] += weights[i] * rows[i, a]
    return sums, totals


@compiled
def count_pairs(codes: Codes, weights: Floats, choices: int, out: Floats) -> None:
    """Add the weighted co-occurrences of atoms [M K, M K], the lower triangle of the normal
    equations."""
    for i in range(len(codes)):
        for m in range(codes.shape[1]):
            a = m * choices + codes[i, m]
            for q in range(m + 1):
                out[a, q * choices + codes[i, q]] += weights[i]
