"""Rows of a matrix factorization in closed form: the normal equations of each row.

They are solved exactly, or over the levels of quantized rows. A row x of one side has ratings r
with rows y of the other. With the biases in the first columns, f = (1, y_1, ..) and t = r - y_0,
the expected squared error of x over the posterior of y is

    x' A x - 2 b' x + c,   A = Σ E[f f'],   b = Σ E[f t],   c = Σ E[t²].

``moments`` hold E[f f'] (lower triangle, row by row), ``cross`` E[f y_0]: the parts without r.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.kernels.compiled import compiled, fast


@fast
def gather(
    starts: Any,
    others: Any,
    values: Any,
    rows: Any,
    moments: Any,
    cross: Any,
    row: int,
    system: Any,
    right: Any,
) -> float:
    """Write the normal equations of one row to ``system`` [T] and ``right`` [d]; return c."""
    dim, size = rows.shape[1], moments.shape[1]
    system[:] = 0.0
    right[:] = 0.0
    rest = 0.0
    for place in range(starts[row], starts[row + 1]):
        other, value = others[place], values[place]
        for k in range(size):
            system[k] += moments[other, k]
        right[0] += value - rows[other, 0]
        for k in range(1, dim):
            right[k] += value * rows[other, k] - cross[other, k]
        rest += value * value - 2.0 * value * rows[other, 0] + cross[other, 0]
    return rest


@compiled
def _factor(lower: Any) -> None:
    """Replace a positive definite matrix [d, d] (lower triangle) by its Cholesky factor."""
    for j in range(len(lower)):
        for i in range(j, len(lower)):
            total = lower[i, j]
            for k in range(j):
                total -= lower[i, k] * lower[j, k]
            lower[i, j] = np.sqrt(total) if i == j else total / lower[j, j]


@compiled
def _invert(lower: Any, inverse: Any) -> None:
    """Write the inverse of the matrix of a Cholesky factor, which is overwritten by it too."""
    dim = len(lower)
    for j in range(dim):  # the factor's own inverse first
        inverse[j, j] = 1.0 / lower[j, j]
        for i in range(j + 1, dim):
            total = 0.0
            for k in range(j, i):
                total -= lower[i, k] * inverse[k, j]
            inverse[i, j] = total / lower[i, i]
    for i in range(dim):
        for j in range(i + 1):
            total = 0.0
            for k in range(i, dim):
                total += inverse[k, i] * inverse[k, j]
            lower[i, j] = total
    for i in range(dim):
        for j in range(i + 1):
            inverse[i, j] = inverse[j, i] = lower[i, j]


@compiled
def solve_rows(
    starts: Any,  # int64 [V+1]
    others: Any,  # int32 [N]
    values: Any,  # float64 [N], centered
    rows: Any,  # float64 [W, d], the other side
    moments: Any,  # float64 [W, T]
    cross: Any,  # float64 [W, d]
    precision: Any,  # float64 [d], the prior's
    noise: float,
    first: int,
    last: int,
    means: Any,  # float64 [V, d], written
    covariances: Any,  # float64 [V, T], written
) -> float:
    """Write posterior means and covariances of rows first .. last - 1; return the expected
    error."""
    dim, size = rows.shape[1], moments.shape[1]
    system, right = np.empty(size), np.empty(dim)
    lower, inverse = np.empty((dim, dim)), np.empty((dim, dim))
    total = 0.0
    for row in range(first, last):
        total += gather(starts, others, values, rows, moments, cross, row, system, right)
        place = 0
        for i in range(dim):
            for j in range(i + 1):
                lower[i, j] = system[place] / noise
                place += 1
            lower[i, i] += precision[i]
        _factor(lower)
        _invert(lower, inverse)
        for i in range(dim):
            found = 0.0
            for j in range(dim):
                found += inverse[i, j] * right[j]
            means[row, i] = found / noise
        place = 0
        for i in range(dim):
            total -= 2.0 * means[row, i] * right[i]
            for j in range(i + 1):
                covariances[row, place] = inverse[i, j]
                second = means[row, i] * means[row, j] + inverse[i, j]
                total += system[place] * (second if i == j else 2.0 * second)
                place += 1
    return total


@fast
def _descend(
    system: Any, right: Any, bits: Any, scale: Any, levels: Any, row: Any, slope: Any, sweeps: int
) -> None:
    """Minimize x' A x - 2 b' x over the levels of one row by coordinate descent; update ``row``."""
    dim = len(row)
    for i in range(dim):
        slope[i] = right[i]
        for j in range(dim):
            slope[i] -= system[i, j] * row[j]
    for _ in range(sweeps):
        moved = False
        for k in range(dim):
            if bits[k] == 0 or scale[k] <= 0.0:
                continue
            top = (1 << bits[k]) - 1
            best = (row[k] + slope[k] / system[k, k]) / scale[k] + 0.5 * top
            level = min(max(int(np.floor(best + 0.5)), 0), top)
            if level != levels[k]:
                change = scale[k] * (level - levels[k])
                levels[k] = level
                row[k] += change
                for j in range(dim):
                    slope[j] -= change * system[k, j]
                moved = True
        if not moved:
            break


@compiled
def choose_levels(
    starts: Any,
    others: Any,
    values: Any,
    rows: Any,  # float64 [W, d], the other side
    moments: Any,
    cross: Any,
    ridge: Any,  # float64 [d]: noise times the prior's precision
    bits: Any,  # uint8 [G, d]
    scales: Any,  # float64 [G, d]
    grades: Any,  # int64 [V]: the grade of each row
    sweeps: int,
    first: int,
    last: int,
    levels: Any,  # uint8 [V, d], improved
    grams: Any,  # float64 [G, d, d], added to
    rights: Any,  # float64 [G, d], added to
) -> None:
    """Improve the levels of rows first .. last - 1; add the normal equations of their scales."""
    dim, size = rows.shape[1], moments.shape[1]
    packed, right, slope = np.empty(size), np.empty(dim), np.empty(dim)
    system, row, centered = np.empty((dim, dim)), np.empty(dim), np.empty(dim)
    for number in range(first, last):
        gather(starts, others, values, rows, moments, cross, number, packed, right)
        place = 0
        for i in range(dim):
            for j in range(i + 1):
                system[i, j] = system[j, i] = packed[place]
                place += 1
            system[i, i] += ridge[i]
        grade = grades[number]
        for k in range(dim):
            centered[k] = levels[number, k] - 0.5 * ((1 << bits[grade, k]) - 1)
            row[k] = scales[grade, k] * centered[k]
        _descend(system, right, bits[grade], scales[grade], levels[number], row, slope, sweeps)
        for k in range(dim):
            centered[k] = (
                levels[number, k] - 0.5 * ((1 << bits[grade, k]) - 1) if bits[grade, k] > 0 else 0.0
            )
        for i in range(dim):
            rights[grade, i] += right[i] * centered[i]
            for j in range(dim):
                grams[grade, i, j] += system[i, j] * centered[i] * centered[j]
