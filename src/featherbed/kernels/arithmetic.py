"""Vector arithmetic on float32 rows given by address: scores, sums, optimizer steps.

The compiler would vectorize plain loops over rows of a known width too, but only after checking that
no two rows overlap, which costs as much as the row. Products may be fused with sums, lanes are added
in a fixed order. Widths and similar integers, known when compiled, are the first arguments.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from featherbed.kernels.vectors import (
    F32,
    I8,
    I32,
    I64,
    constant,
    counter,
    floats_at,
    lanes_left,
    load,
    splat,
    store,
)

_FUSED = ("contract",)
LANES = (16, 4, 1)  # elements updated at once; the narrower ones finish a row
NONE, NONNEGATIVE, L1 = 0, 1, 2
YOGI, ADAM = 0, 2


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)


def _call(builder: Any, name: str, width: int, *values: Any) -> Any:
    """Call an LLVM intrinsic on vectors."""
    kind = ir.VectorType(F32, width)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * len(values)), f"llvm.{name}.v{width}f32"
    )
    return builder.call(function, values)


def _total(builder: Any, vector: Any, width: int) -> Any:
    """Add the lanes of a vector."""
    kind = ir.FunctionType(F32, [F32, ir.VectorType(F32, width)])
    function = cgutils.get_or_insert_function(
        builder.module, kind, f"llvm.vector.reduce.fadd.v{width}f32"
    )
    return builder.call(function, [ir.Constant(F32, -0.0), vector], fastmath=("reassoc",))


def _replace_first(builder: Any, vector: Any, value: Any) -> Any:
    return builder.insert_element(vector, value, ir.Constant(I32, 0))


def _first(builder: Any, vector: Any) -> Any:
    return builder.extract_element(vector, ir.Constant(I32, 0))


def _zeros(width: int) -> Any:
    return ir.Constant(ir.VectorType(F32, width), [0.0] * width)


def _number(builder: Any, row: Any, index: Any) -> Any:
    """Load one element of a row."""
    place = floats_at(builder, row, index)
    return builder.load(builder.inttoptr(place, F32.as_pointer()), align=4)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def score(typing_context: Any, width: Any, column: Any, left: Any, right: Any) -> Any:
    """Return left . right; with ``column`` 1 the first elements are added, not multiplied."""
    wide, added = width.literal_value, column.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        one, other = (load(builder, address, wide) for address in arguments[2:])
        products = builder.fmul(one, other)
        if added:
            products = _replace_first(
                builder, products, builder.fadd(_first(builder, one), _first(builder, other))
            )
        return _total(builder, products, wide)

    return types.float32(width, column, types.int64, types.int64), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_scaled(
    typing_context: Any,
    width: Any,
    column: Any,
    out: Any,
    row: Any,
    factor: Any,
) -> Any:
    """out += factor row; with ``column`` 1 the first element of the row counts as 1."""
    wide, ones = width.literal_value, column.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, source, number = arguments[2:]
        values = load(builder, source, wide)
        if ones:
            values = _replace_first(builder, values, ir.Constant(F32, 1.0))
        total = _fused(builder, splat(builder, number, wide), values, load(builder, target, wide))
        store(builder, total, target)
        return context.get_dummy_value()

    return types.void(width, column, types.int64, types.int64, types.float32), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def combine(
    typing_context: Any,
    width: Any,
    out: Any,
    weights: Any,
    rows: Any,
    count: Any,
    apart: Any,
) -> Any:
    """out = Σ_k weights[k] rows[k] over ``count`` rows, ``apart`` bytes from each other."""
    wide = width.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, weight_row, source, length, distance = arguments[1:]
        total = cgutils.alloca_once_value(builder, _zeros(wide))
        with cgutils.for_range(builder, length) as loop:
            weight = _number(builder, weight_row, loop.index)
            row = load(builder, builder.add(source, builder.mul(loop.index, distance)), wide)
            builder.store(
                _fused(builder, splat(builder, weight, wide), row, builder.load(total)), total
            )
        store(builder, builder.load(total), target)
        return context.get_dummy_value()

    return types.void(
        width, types.int64, types.int64, types.int64, types.int64, types.int64
    ), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_outer(typing_context: Any, width: Any, out: Any, weights: Any, row: Any, count: Any) -> Any:
    """out[k] += weights[k] row for ``count`` consecutive rows of ``out``."""
    wide = width.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, weight_row, source, length = arguments[1:]
        values = load(builder, source, wide)
        with cgutils.for_range(builder, length) as loop:
            weight = splat(builder, _number(builder, weight_row, loop.index), wide)
            there = builder.add(target, builder.mul(loop.index, ir.Constant(I64, 4 * wide)))
            store(builder, _fused(builder, weight, values, load(builder, there, wide)), there)
        return context.get_dummy_value()

    return types.void(width, types.int64, types.int64, types.int64, types.int64), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def descend(
    typing_context: Any,
    width: Any,
    column: Any,
    left: Any,
    right: Any,
    keeps: Any,
    moves: Any,
) -> Any:
    """left, right = keeps[0] left + moves[0] right, keeps[1] right + moves[1] left, simultaneously.

    With ``column`` 1 the first element of the row that is added counts as 1.
    """
    wide, ones = width.literal_value, column.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places, (keeps, moves) = (
            arguments[2:4],
            (cgutils.unpack_tuple(builder, pair, 2) for pair in arguments[4:]),
        )
        rows = [load(builder, address, wide) for address in places]
        added = [
            _replace_first(builder, row, ir.Constant(F32, 1.0)) if ones else row
            for row in reversed(rows)
        ]
        for address, row, other, keep, move in zip(places, rows, added, keeps, moves, strict=True):
            moved = builder.fmul(splat(builder, move, wide), other, flags=_FUSED)
            kept = builder.fmul(splat(builder, keep, wide), row, flags=_FUSED)
            store(builder, builder.fadd(kept, moved, flags=_FUSED), address)
        return context.get_dummy_value()

    pair = types.UniTuple(types.float32, 2)
    return types.void(width, column, types.int64, types.int64, pair, pair), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def step(
    typing_context: Any,
    rule: Any,
    kind: Any,
    metric: Any,
    p: Any,
    m: Any,
    v: Any,
    g: Any,
    kept: Any,
    count: Any,
    c: Any,
) -> Any:
    """Update ``count`` elements by a step of Yogi or Adam and the proximal step, in place.

    c: weight decay factor, learning rate, factors of the momentum and of the gradient in the new
    momentum, 1 - beta2, eps, correction, threshold, weight decay added to the gradient. ``kept``:
    the address of a byte for each element, 0 if the element stays at zero; or 0.
    """
    variant = (rule.literal_value, kind.literal_value, metric.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *places, kept_bytes, length, numbers = arguments[3:]
        c, done = cgutils.unpack_tuple(builder, numbers, 9), counter(builder, length)
        masked = builder.icmp_unsigned("!=", kept_bytes, ir.Constant(kept_bytes.type, 0))
        for lanes in LANES:
            wide = [splat(builder, x, lanes) for x in c]
            with lanes_left(builder, lanes, length, done) as start:
                here = [floats_at(builder, place, start) for place in places]
                values = [load(builder, address, lanes) for address in here]
                p, m, v = _step_vectors(builder, lanes, variant, values, wide)
                store(builder, m, here[1])
                store(builder, v, here[2])
                with builder.if_else(masked) as (some, every):
                    with some:
                        flags = load(builder, builder.add(kept_bytes, start), lanes, I8)
                        free = builder.icmp_unsigned("!=", flags, constant(0, flags))
                        store(builder, builder.select(free, p, _zeros(lanes)), here[0])
                    with every:
                        store(builder, p, here[0])
        return context.get_dummy_value()

    return types.void(
        rule, kind, metric, *[types.int64] * 6, types.UniTuple(types.float32, 9)
    ), generate


def _step_vectors(
    builder: Any, width: int, variant: tuple[int, int, int], values: list[Any], c: list[Any]
) -> list[Any]:
    """Emit the step; return p, m and v after it."""
    (rule, kind, metric), (p, m, v, g) = variant, values
    g = _fused(builder, c[8], p, g)
    m = builder.fadd(builder.fmul(c[2], m), builder.fmul(c[3], g))
    square, one = builder.fmul(g, g), ir.Constant(ir.VectorType(F32, width), [1.0] * width)
    if rule == YOGI:
        change = builder.fmul(c[4], square)
        less, more = builder.fsub(v, change), builder.fadd(v, change)
        above, below = (builder.fcmp_ordered(sign, v, square) for sign in (">", "<"))
        v = builder.select(above, less, builder.select(below, more, v))
        scale = builder.fadd(_call(builder, "sqrt", width, v), c[5])
    else:
        v = builder.fadd(v, builder.fmul(c[4], builder.fsub(square, v)))
        scale = builder.fadd(builder.fdiv(_call(builder, "sqrt", width, v), c[6]), c[5])
    share = builder.fdiv(one, scale)
    p = builder.fsub(builder.fmul(c[0], p), builder.fmul(builder.fmul(c[1], m), share))
    threshold = builder.fmul(c[7], share) if metric else c[7]
    return [_shrink(builder, width, kind, p, threshold), m, v]


def _shrink(builder: Any, width: int, kind: int, p: Any, threshold: Any) -> Any:
    if kind == NONNEGATIVE:
        less = builder.fsub(p, threshold)
        return builder.select(builder.fcmp_ordered("<=", less, _zeros(width)), _zeros(width), less)
    if kind == L1:
        less = builder.fsub(_call(builder, "fabs", width, p), threshold)
        size = builder.select(builder.fcmp_ordered("<=", less, _zeros(width)), _zeros(width), less)
        return _call(builder, "copysign", width, size, p)
    return p
