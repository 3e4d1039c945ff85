"""Compiled loops of training: distinct ids, and rows that are settled and updated lazily.

The arguments of jobs are described in ``featherbed.kernels.memory``. NaN stays NaN. Every loop gives
the same result for the same number of threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from featherbed.kernels.compiled import Job, compiled
from featherbed.kernels.memory import matrix, vector, words
from featherbed.kernels.vectors import prefetch

AHEAD = 16  # rows between the prefetch of a row and its use
NONE, NONNEGATIVE, L1 = 0, 1, 2
YOGI, SGD, ADAM, ADAGRAD = 0, 1, 2, 3
DECAY, MOVE, THRESHOLD, DEBT, FALL, TAIL, ODD = range(7)  # columns of a history


@compiled
def find_distinct(ids: Any, room: Any, distinct: Any, index: Any) -> Any:
    """Number the distinct ids in order of appearance, distinct[index[i]] = ids[i]; return their number.

    ``room`` [a power of two, at least twice the ids] is filled with -1.
    """
    mask, found = np.uint64(len(room) - 1), 0
    for i in range(len(ids)):
        at = (np.uint64(ids[i]) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)
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
def group(index: Any, starts: Any, order: Any) -> None:
    """Sort places by number, stably: order[starts[u] : starts[u + 1]] are the i with index[i] = u."""
    for u in range(len(starts)):
        starts[u] = 0
    for i in range(len(index)):
        starts[index[i] + 1] += 1
    for u in range(1, len(starts)):
        starts[u] += starts[u - 1]
    for i in range(len(index)):
        u = index[i]
        order[starts[u]] = i
        starts[u] += 1
    for u in range(len(starts) - 1, 0, -1):
        starts[u] = starts[u - 1]
    starts[0] = 0


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
    p: Any,
    m: Any,
    divisor: Any,
    measure: Any,
    kind: Any,
    at: Any,
    end: Any,
    reach: Any,
    past: Any,
    powers: Any,
) -> Any:
    """Replay the steps from place ``at`` on one by one while momentum matters; the rest at once."""
    x, stop = np.float64(p), min(end, at + reach)
    for i in range(at + 1, stop + 1):
        x = past[i, DECAY] * x - past[i, MOVE] * powers[i - at] * m / divisor
        x = _shrink(kind, x, past[i, THRESHOLD] / measure)
    if stop < end:
        fallen = np.exp(past[end, FALL] - past[stop, FALL])
        x = _shrink(kind, x * fallen, (past[end, DEBT] - past[stop, DEBT] * fallen) / measure)
    return x


@cache
def catch_up(real: Any, fixed: int, kind: int, moving: bool, scaled: bool, metric: bool) -> Any:
    """Return ``f(p, m, v, eps, at, end, reach, past, powers, out)``: a row after the steps it missed.

    They are applied at once where that is exact. ``fixed``: the width of rows if it is known when
    compiled, so that a row is one vector; 0 for any width. A one-sided shrinkage clips at zero at
    every step. Applied at once it clips only at the end, which is the same if the row rises before
    it falls, but not the other way round: ``ODD`` counts the steps that could make it so.
    """
    one, nought = real(1), real(0)

    @compiled
    def row(
        p: Any,
        m: Any,
        v: Any,
        eps: Any,
        at: Any,
        end: Any,
        reach: Any,
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
                out[j] = _step_by_step(
                    p[j], m[j], s, s if metric else one, kind, at, end, reach, past, powers
                )
            return
        for j in range(width):
            share = one / (np.sqrt(v[j]) + eps) if scaled else one
            moved = p[j] * keep
            if moving:
                moved -= drift * m[j] * share
            out[j] = _shrink(kind, moved, owed * share if metric else owed)

    return row


@cache
def settle(real: Any, fixed: int, kind: int, moving: bool, scaled: bool, metric: bool) -> Job:
    """Compile the job that settles rows (applies the steps they missed), in place or in ``out``."""
    row_of, nought = catch_up(real, fixed, kind, moving, scaled, metric), real(0)
    size = real(0).itemsize

    @Job
    def rows(address: Any, start: Any, stop: Any) -> Any:
        block = words(address)
        weight, ids = matrix(block, 0, real), vector(block, 3, np.int64)
        stamps = vector(block, 5, np.int32)
        momentum, second = matrix(block, 7, real), matrix(block, 10, real)
        out, past = matrix(block, 13, real), matrix(block, 16, np.float64)
        powers = vector(block, 19, np.float64)
        eps, write, begin = real(vector(block, 21, np.float64)[0]), block[23], block[24]
        now = block[25]
        width, end, reach = fixed or weight.shape[1], now - begin, len(powers) - 1
        for u in range(start, stop):
            if u + AHEAD < stop:
                soon = np.uint64(ids[u + AHEAD])
                prefetch(np.uint64(weight.ctypes.data) + soon * np.uint64(size * width))
                prefetch(np.uint64(stamps.ctypes.data) + soon * np.uint64(4))
                if moving:
                    prefetch(
                        np.uint64(momentum.ctypes.data) + soon * np.uint64(size * momentum.shape[1])
                    )
                if scaled:
                    prefetch(
                        np.uint64(second.ctypes.data) + soon * np.uint64(size * second.shape[1])
                    )
            r = ids[u]
            at = stamps[r] - begin
            if write:
                if at < end:
                    row_of(
                        weight[r],
                        momentum[r],
                        second[r],
                        eps,
                        at,
                        end,
                        reach,
                        past,
                        powers,
                        weight[r],
                    )
                    if moving:
                        left = real(powers[end - at]) if end - at <= reach else nought
                        for j in range(width):
                            momentum[r, j] *= left
                    stamps[r] = now
            elif at < end:
                row_of(weight[r], momentum[r], second[r], eps, at, end, reach, past, powers, out[u])
            else:
                for j in range(width):
                    out[u, j] = weight[r, j]
        return np.int64(1)

    return rows


@compiled
def _advance(rule: Any, p: Any, m: Any, v: Any, g: Any, c: Any) -> Any:
    """Return an element after a step, its moments and one over its preconditioner.

    c: weight decay factor, learning rate, factors of the momentum and of the gradient in the new
    momentum, 1 - beta2, eps, correction.
    """
    if rule == YOGI:
        m = c[2] * m + c[3] * g
        square = g * g
        if v > square:
            v -= c[4] * square
        elif v < square:
            v += c[4] * square
        share = c[6] / (np.sqrt(v) + c[5])
        return c[0] * p - c[1] * m * share, m, v, share
    if rule == ADAM:
        m = c[2] * m + c[3] * g
        v += c[4] * (g * g - v)
        share = np.float32(1) / (np.sqrt(v) / c[6] + c[5])
        return c[0] * p - c[1] * m * share, m, v, share
    if rule == ADAGRAD:
        v += g * g
        share = c[6] / (np.sqrt(v) + c[5])
        return c[0] * p - c[1] * g * share, m, v, share
    m = c[2] * m + c[3] * g
    return c[0] * p - c[1] * m, m, v, c[6]


@cache
def update(real: Any, fixed: int, rule: int, kind: int, moving: bool, metric: bool) -> Job:
    """Compile the job that settles rows, updates them by their gradients and shrinks them."""
    scaled, holds_m = rule != SGD, rule in (YOGI, ADAM) or moving
    row_of, nought = catch_up(real, fixed, kind, moving, rule == YOGI, metric), real(0)
    size = real(0).itemsize

    @Job
    def rows(address: Any, start: Any, stop: Any) -> Any:
        block = words(address)
        weight, ids = matrix(block, 0, real), vector(block, 3, np.int64)
        stamps = vector(block, 5, np.int32)
        momentum, second = matrix(block, 7, real), matrix(block, 10, real)
        gradient, past = matrix(block, 13, real), matrix(block, 16, np.float64)
        powers = vector(block, 19, np.float64)
        numbers, begin, now, stamp = vector(block, 21, np.float64), block[23], block[24], block[25]
        width, end, reach = fixed or weight.shape[1], now - begin, len(powers) - 1
        c = (
            real(numbers[0]), real(numbers[1]), real(numbers[2]), real(numbers[3]),
            real(numbers[4]), real(numbers[5]), real(numbers[6]),
        )  # fmt: skip
        threshold = real(numbers[7])
        for u in range(start, stop):
            if u + AHEAD < stop:
                soon = np.uint64(ids[u + AHEAD])
                prefetch(np.uint64(weight.ctypes.data) + soon * np.uint64(size * width))
                prefetch(np.uint64(stamps.ctypes.data) + soon * np.uint64(4))
                if holds_m:
                    prefetch(
                        np.uint64(momentum.ctypes.data) + soon * np.uint64(size * momentum.shape[1])
                    )
                if scaled:
                    prefetch(
                        np.uint64(second.ctypes.data) + soon * np.uint64(size * second.shape[1])
                    )
            r = ids[u]
            at = stamps[r] - begin
            if at < end:
                row_of(
                    weight[r], momentum[r], second[r], c[5], at, end, reach, past, powers, weight[r]
                )
                if moving:
                    left = real(powers[end - at]) if end - at <= reach else nought
                    for j in range(width):
                        momentum[r, j] *= left
            for j in range(width):
                m = momentum[r, j] if holds_m else nought
                v = second[r, j] if scaled else nought
                p, m, v, share = _advance(rule, weight[r, j], m, v, gradient[u, j], c)
                if holds_m:
                    momentum[r, j] = m
                if scaled:
                    second[r, j] = v
                weight[r, j] = _shrink(kind, p, threshold * share if metric else threshold)
            stamps[r] = stamp
        return np.int64(1)

    return rows


@compiled
def _add_group(rows: Any, order: Any, first: Any, last: Any, out: Any) -> None:
    one = rows[order[first]]
    for k in range(len(out)):
        out[k] = one[k]
    for i in range(first + 1, last):
        one = rows[order[i]]
        for k in range(len(out)):
            out[k] += one[k]


@Job
def sum_groups(address: Any, start: Any, stop: Any) -> Any:
    """out[u] = Σ of the rows of its group, in order."""
    block = words(address)
    rows, order = matrix(block, 0, np.float32), vector(block, 3, np.int32)
    starts = vector(block, 5, np.int32)
    out = matrix(block, 7, np.float32)
    for u in range(start, stop):
        _add_group(rows, order, starts[u], starts[u + 1], out[u])
    return np.int64(1)
