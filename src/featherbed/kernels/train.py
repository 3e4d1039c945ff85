"""Compiled loops of training: distinct ids, rows brought up to date, rows composed from slots and their gradients, row updates.

Blocks are as in ``featherbed.kernels.lookup``. Nothing is assumed of the numbers: NaN
stays NaN. Every loop gives the same result for the same number of threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray

from featherbed.kernels.compiled import compiled, job
from featherbed.kernels.vectors import pointer, prefetch

AHEAD = 16  # rows between asking for a row and reading it
WORDS = 64  # of a block
NONE, NONNEGATIVE, L1 = 0, 1, 2
YOGI, SGD, ADAM, ADAGRAD = 0, 1, 2, 3
DECAY, MOVE, THRESHOLD, DEBT, FALL, TAIL, ODD = range(7)  # columns of a history


@compiled
def _block(address: Any) -> Any:
    return carray(pointer(np.uint64(address)), WORDS, np.int64)


@compiled
def _flat(block: Any, at: Any, kind: Any) -> Any:
    return carray(pointer(np.uint64(block[at])), block[at + 1], kind)


@compiled
def _grid(block: Any, at: Any, kind: Any) -> Any:
    return carray(pointer(np.uint64(block[at])), (block[at + 1], block[at + 2]), kind)


@compiled
def find_distinct(ids: Any, room: Any, distinct: Any, index: Any) -> Any:
    """Number the distinct ids in the order they appear: distinct[index[i]] = ids[i]; return how many.

    ``room`` [a power of two, at least twice the ids] is filled with -1.
    """
    mask, found = np.uint64(len(room) - 1), 0
    for i in range(len(ids)):
        at = (np.uint64(ids[i]) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)
        while True:
            at &= mask
            held = room[at]
            if held < 0:
                room[at] = found
                distinct[found] = ids[i]
                index[i] = found
                found += 1
                break
            if distinct[held] == ids[i]:
                index[i] = held
                break
            at += np.uint64(1)
    return found


@compiled
def group(index: Any, starts: Any, order: Any) -> None:
    """Sort places by number, first come first: order[starts[u] : starts[u + 1]] are the i with index[i] = u."""
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
    """Return ``f(p, m, v, eps, at, end, reach, past, powers, out)``: a row after what it missed, at once where that is exact.

    ``fixed``: the width of rows where it is known when compiled, so that a row is one vector; 0 for any width.
    A one-sided shrinkage clips at zero at every step. Taken at once it clips only at the end, which is the same while the row
    falls after it has risen, never the other way round: ``odd`` counts the steps that could make it so.
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
def settle(real: Any, fixed: int, kind: int, moving: bool, scaled: bool, metric: bool) -> int:
    """Make the job that brings rows up to date, in place or in ``out``."""
    row_of, nought, size = (
        catch_up(real, fixed, kind, moving, scaled, metric),
        real(0),
        real(0).itemsize,
    )

    @job
    def rows(address: Any, start: Any, stop: Any) -> Any:
        block = _block(address)
        weight, ids, stamps = (
            _grid(block, 0, real),
            _flat(block, 3, np.int64),
            _flat(block, 5, np.int32),
        )
        momentum, second = _grid(block, 7, real), _grid(block, 10, real)
        out, past, powers = (
            _grid(block, 13, real),
            _grid(block, 16, np.float64),
            _flat(block, 19, np.float64),
        )
        eps, write, begin, now = (
            real(_flat(block, 21, np.float64)[0]),
            block[23],
            block[24],
            block[25],
        )
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

    c: decay, rate, what is kept and added of the momentum, 1 - beta2, eps, correction.
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
def update(real: Any, fixed: int, rule: int, kind: int, moving: bool, metric: bool) -> int:
    """Make the job that brings rows up to date, steps them by their gradients and shrinks them, in one pass."""
    scaled, holds_m = rule != SGD, rule in (YOGI, ADAM) or moving
    row_of, nought, size = (
        catch_up(real, fixed, kind, moving, rule == YOGI, metric),
        real(0),
        real(0).itemsize,
    )

    @job
    def rows(address: Any, start: Any, stop: Any) -> Any:
        block = _block(address)
        weight, ids, stamps = (
            _grid(block, 0, real),
            _flat(block, 3, np.int64),
            _flat(block, 5, np.int32),
        )
        momentum, second = _grid(block, 7, real), _grid(block, 10, real)
        gradient, past, powers = (
            _grid(block, 13, real),
            _grid(block, 16, np.float64),
            _flat(block, 19, np.float64),
        )
        numbers, begin, now, stamp = _flat(block, 21, np.float64), block[23], block[24], block[25]
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


@job
def sum_groups(address: Any, start: Any, stop: Any) -> Any:
    """out[u] = Σ of the rows of its group, in order."""
    block = _block(address)
    rows, order, starts = (
        _grid(block, 0, np.float32),
        _flat(block, 3, np.int32),
        _flat(block, 5, np.int32),
    )
    out = _grid(block, 7, np.float32)
    for u in range(start, stop):
        _add_group(rows, order, starts[u], starts[u + 1], out[u])
    return np.int64(1)
