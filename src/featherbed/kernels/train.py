"""Compiled loops of training: distinct ids, and rows that are settled and updated lazily.

The arguments of jobs are described in ``featherbed.kernels.memory``. NaN stays NaN. Every loop
gives the same result for the same number of threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from featherbed.kernels.arithmetic import (
    ADAGRAD,
    ADAM,
    EXEMPT,
    HELD,
    L1,
    NONE,
    NONNEGATIVE,
    PENALIZED,
    YOGI,
    step,
)
from featherbed.kernels.compiled import Job, compiled
from featherbed.kernels.memory import matrix, vector, words
from featherbed.kernels.vectors import prefetch, row_sum

AHEAD = 16  # rows between the prefetch of a row and its use
STRIP = 16  # columns, a cache line
_set1, _add1 = row_sum(1, add=False), row_sum(1, add=True)
DECAY, MOVE, THRESHOLD, DEBT, FALL, TAIL, ODD = range(7)  # columns of a history


@compiled
def find_distinct(ids: Any, room: Any, distinct: Any, index: Any) -> Any:
    """Number the distinct ids in order of appearance, distinct[index[i]] = ids[i]; return their
    number.

    ``room`` [a power of two, at least twice the ids] is overwritten.
    """
    mask, found, factor = np.uint64(len(room) - 1), 0, np.uint64(0x9E3779B97F4A7C15)
    room[:] = -1
    for i in range(len(ids)):
        if i + AHEAD < len(ids):
            soon = ((np.uint64(ids[i + AHEAD]) * factor) >> np.uint64(20)) & mask
            prefetch(np.uint64(room.ctypes.data) + soon * np.uint64(4))
        at = (np.uint64(ids[i]) * factor) >> np.uint64(20)
        while True:
            at &= mask
            number = room[at]
            if number < 0:
                room[at] = found
                distinct[found] = ids[i]
                index[i] = found
                found += 1
                break
            if distinct[number] == ids[i]:
                index[i] = number
                break
            at += np.uint64(1)
    return found


@compiled
def _shrink(kind: Any, x: Any, threshold: Any) -> Any:
    if kind == NONNEGATIVE:
        y = x - threshold
        return y if not y <= 0 else y - y
    if kind == L1:
        y = abs(x) - threshold
        if y <= 0:
            return y - y
        return y if x > 0 else -y
    return x


@compiled
def _step_by_step(
    p: Any, m: Any, scales: Any, kind: Any, at: Any, end: Any, past: Any, powers: Any
) -> Any:
    """Replay the steps from place ``at`` on one by one while momentum matters; the rest at once.

    ``scales``: the divisors of momentum and of thresholds, and a factor of thresholds.
    """
    x, stop, (divisor, measure, free) = np.float64(p), min(end, at + len(powers) - 1), scales
    for i in range(at + 1, stop + 1):
        x = past[i, DECAY] * x - past[i, MOVE] * powers[i - at] * m / divisor
        x = _shrink(kind, x, past[i, THRESHOLD] / measure * free)
    if stop < end:
        fallen = np.exp(past[end, FALL] - past[stop, FALL])
        owed = past[end, DEBT] - past[stop, DEBT] * fallen
        x = _shrink(kind, x * fallen, owed / measure * free)
    return x


@compiled
def _at(rows: Any, r: Any) -> Any:
    """Return the address of a row."""
    return np.int64(rows.ctypes.data) + np.int64(r) * np.int64(rows.shape[1] * rows.itemsize)


@compiled
def _scale(row: Any, factor: Any, width: Any) -> None:
    for j in range(width):
        row[j] *= factor


@compiled
def _mark(flags: Any, r: Any, kept: Any, starts: Any, columns: Any, support: Any) -> None:
    """Write the flags of the entries of row r: HELD, PENALIZED or EXEMPT.

    ``columns[starts[r] : starts[r + 1]]`` are the exempt anchors of a row, ``support`` [V, s] the
    anchors of its entries (empty: entry k belongs to anchor k).
    """
    for j in range(len(flags)):
        flags[j] = kept[r, j] if len(kept) > 0 else PENALIZED
    if len(starts) == 0:
        return
    for anchor in columns[starts[r] : starts[r + 1]]:
        if len(support) == 0:
            flags[anchor] = EXEMPT if flags[anchor] != HELD else HELD
        else:
            for j in range(len(flags)):
                if support[r, j] == anchor and flags[j] != HELD:
                    flags[j] = EXEMPT


class Variant(NamedTuple):
    """The combination of settings that a loop over rows is compiled for."""

    real: Any  # type of the elements
    width: int  # of rows, so that a row is one vector; 0: any
    rule: int | None  # of the optimizer; None: rows are settled only
    kind: int  # of the penalty
    moving: bool  # rows without a gradient move by their momentum
    scaled: bool  # divided by sqrt(v) + eps
    metric: bool  # and so are thresholds
    support: Any = None  # type of the support, if there are flags of entries; None: there are none


@cache
def catch_up(variant: Variant) -> Any:
    """Return ``f(p, m, v, flags, eps, at, end, past, powers, out)``: a row after the steps it
    missed.

    They are applied at once where that is exact. A one-sided shrinkage clips at zero at every step.
    Applied at once it clips only at the end, which is the same if the row rises before it falls,
    but not the other way round: ``ODD`` counts the steps that could make it so.
    """
    real, fixed, _, kind, moving, scaled, metric, support = variant
    one, nought, marked = real(1), real(0), support is not None

    @compiled
    def row(
        p: Any,
        m: Any,
        v: Any,
        flags: Any,
        eps: Any,
        at: Any,
        end: Any,
        past: Any,
        powers: Any,
        out: Any,
    ) -> None:
        fallen = (
            np.exp(past[end, FALL] - past[at, FALL]) if past[end, FALL] != past[at, FALL] else 1.0
        )
        owed = real(past[end, DEBT] - past[at, DEBT] * fallen)
        drift, keep = real(past[at, TAIL]), real(fallen)
        width, apart = fixed or len(out), kind == L1 or past[end, ODD] != past[at, ODD]
        if moving and kind == NONNEGATIVE:
            for j in range(width):
                apart |= p[j] < nought
        if moving and apart:
            for j in range(width):
                s = np.sqrt(v[j]) + eps if scaled else one
                free = one if not marked or flags[j] == PENALIZED else nought
                scales = s, s if metric else one, free
                out[j] = _step_by_step(p[j], m[j], scales, kind, at, end, past, powers)
        else:
            for j in range(width):
                share = one / (np.sqrt(v[j]) + eps) if scaled else one
                moved = p[j] * keep
                if moving:
                    moved -= drift * m[j] * share
                threshold = owed * share if metric else owed
                if marked:
                    threshold = threshold if flags[j] == PENALIZED else nought
                out[j] = _shrink(kind, moved, threshold)
        if marked:
            for j in range(width):
                out[j] = out[j] if flags[j] != HELD else nought

    return row


@cache
def _fetch(first: bool, second: bool) -> Any:
    """Return ``f(weight, m, v, stamps, r)``, which prefetches a row and the moments it has."""

    @compiled
    def fetch(weight: Any, m: Any, v: Any, stamps: Any, r: Any) -> None:
        prefetch(np.uint64(_at(weight, r)))
        prefetch(np.uint64(stamps.ctypes.data) + np.uint64(r) * np.uint64(4))
        if first:
            prefetch(np.uint64(_at(m, r)))
        if second:
            prefetch(np.uint64(_at(v, r)))

    return fetch


@cache
def update(variant: Variant) -> Job:
    """Compile the job that settles rows (applies the steps they missed) and updates them.

    With a rule rows are stepped by their gradients and shrunk. Without one they are settled in
    place or, if ``out`` is given, there.
    """
    real, fixed, rule, kind, moving, scaled, metric, support = variant
    row_of, nought = catch_up(variant), real(0)
    fetch = _fetch(moving or rule == ADAM, scaled or rule in (YOGI, ADAM, ADAGRAD))
    marked, steps, measured = support is not None, rule is not None, int(metric)
    number, slot_type = rule if steps else NONE, support or np.int32

    @Job
    def rows(address: Any, start: Any, stop: Any) -> Any:
        block = words(address)
        weight, ids = matrix(block, 0, real), vector(block, 3, np.int64)
        stamps = vector(block, 5, np.int32)
        momentum, second = matrix(block, 7, real), matrix(block, 10, real)
        given, past = matrix(block, 13, real), matrix(block, 16, np.float64)  # gradients, or out
        powers, numbers = vector(block, 19, np.float64), vector(block, 21, np.float64)
        begin, now, stamp = block[23], block[24], block[25]
        kept, starts = matrix(block, 26, np.uint8), vector(block, 29, np.int64)
        columns, slots = vector(block, 31, np.int64), matrix(block, 33, slot_type)
        width, end, reading = fixed or weight.shape[1], now - begin, not steps and len(given) > 0
        c = (
            real(numbers[0]), real(numbers[1]), real(numbers[2]), real(numbers[3]),
            real(numbers[4]), real(numbers[5]), real(numbers[6]), real(numbers[7]),
            real(numbers[8]),
        )  # fmt: skip
        flags, marks = np.empty(width if marked else 1, np.uint8), np.int64(0)
        if marked:
            marks = np.int64(flags.ctypes.data)
        for u in range(start, stop):
            if u + AHEAD < stop:
                fetch(weight, momentum, second, stamps, ids[u + AHEAD])
            r = ids[u]
            at, into = stamps[r] - begin, given[u] if reading else weight[r]
            if marked:
                _mark(flags, r, kept, starts, columns, slots)
            if at < end:
                m, v = momentum[r], second[r]
                row_of(weight[r], m, v, flags, c[5], at, end, past, powers, into)
                if moving and not reading:
                    left = real(powers[end - at]) if end - at < len(powers) else nought
                    _scale(m, left, width)
            elif reading:
                for j in range(width):
                    into[j] = weight[r, j]
            if steps:
                moments = _at(momentum, r), _at(second, r)
                here, slope = _at(weight, r), _at(given, u)
                step(number, kind, measured, here, moments[0], moments[1], slope, marks, width, c)
            if not reading:
                stamps[r] = stamp
        return np.int64(1)

    return rows


@Job
def sum_rows(address: Any, start: Any, stop: Any) -> Any:
    """out[index[i]] = Σ weights[i] * rows[owner[i]], in order; each row is read once, one after
    the other, while those of ``index`` in order of appearance are written likewise.

    Strips ``start`` to ``stop`` of ``STRIP`` columns. Without ``weights`` these are 1, without
    ``owner`` the rows are those of i.
    """
    block = words(address)
    rows, index = matrix(block, 0, np.float32), vector(block, 3, np.int32)
    owner, weights = vector(block, 5, np.int64), vector(block, 7, np.float32)
    out = matrix(block, 9, np.float32)
    size, skipped = np.uint64(4 * rows.shape[1]), np.uint64(4 * STRIP * start)
    width = min(STRIP * stop, rows.shape[1]) - STRIP * start
    source, target = np.uint64(rows.ctypes.data) + skipped, np.uint64(out.ctypes.data) + skipped
    newest, factor, lines = np.int64(-1), np.float32(1), min(4, (4 * width + 63) // 64)
    for i in range(len(index)):
        if i + AHEAD < len(index):
            soon = target + np.uint64(index[i + AHEAD]) * size
            for line in range(lines):
                prefetch(soon + np.uint64(64 * line))
        u, row = np.int64(index[i]), np.int64(owner[i]) if len(owner) > 0 else np.int64(i)
        if len(weights) > 0:
            factor = weights[i]
        here, there = (source + np.uint64(row) * size,), target + np.uint64(u) * size
        if u > newest:
            for hole in range(newest + 1, u):  # written later
                _set1(target + np.uint64(hole) * size, here, (np.float32(0),), width)
            newest = u
            _set1(there, here, (factor,), width)
        else:
            _add1(there, here, (factor,), width)
    return np.int64(1)
