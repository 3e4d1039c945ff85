"""Vector arithmetic on rows given by address: scores, sums, optimizer steps.

The compiler would vectorize plain loops over rows of a known width too, but only after checking
that no two rows overlap, which costs as much as the row. Products may be fused with sums, lanes are
added in a fixed order. Widths and similar integers, known when compiled, are the first arguments.
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
LANES = (16, 8, 4, 1)  # elements updated at once; the narrower ones finish a row
NONE, NONNEGATIVE, L1 = 0, 1, 2  # penalties
YOGI, SGD, ADAM, ADAGRAD, PLAIN = range(5)  # rules; PLAIN is SGD without momentum
HELD, PENALIZED, EXEMPT = range(3)  # flags of entries; HELD ones stay zero


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)


def _call(builder: Any, name: str, *values: Any) -> Any:
    """Call an LLVM intrinsic on vectors."""
    kind = values[0].type
    name = f"llvm.{name}.v{kind.count}f{32 if kind.element == F32 else 64}"
    signature = ir.FunctionType(kind, [kind] * len(values))
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), values)


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
    typing_context: Any, width: Any, column: Any, out: Any, row: Any, factor: Any
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
    typing_context: Any, width: Any, out: Any, weights: Any, rows: Any, count: Any, apart: Any
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
    typing_context: Any, width: Any, column: Any, left: Any, right: Any, keeps: Any, moves: Any
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
    flags: Any,
    count: Any,
    c: Any,
) -> Any:
    """Update ``count`` elements by a step of a rule and the proximal step, in place.

    c, whose type is that of the elements: weight decay factor, learning rate, factors of the
    momentum and of the gradient in the new momentum, 1 - beta2, eps, correction, threshold, weight
    decay added to the gradient. ``flags``: the address of a byte for each element (HELD, PENALIZED,
    EXEMPT); 0: all are penalized. The reference are the rules of
    ``featherbed.optim.row_optimizer``.
    """
    variant = (rule.literal_value, kind.literal_value, metric.literal_value)
    numbers = types.UniTuple(c.dtype, 9)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *places, flag_bytes, length, coefficients = arguments[3:]
        given, done = cgutils.unpack_tuple(builder, coefficients, 9), counter(builder, length)
        for lanes in LANES:
            wide = [splat(builder, x, lanes) for x in given]
            with lanes_left(builder, lanes, length, done) as start:
                _step_vectors(builder, variant, places, flag_bytes, start, wide)
        return context.get_dummy_value()

    return types.void(rule, kind, metric, *[types.int64] * 6, numbers), generate


def _step_vectors(
    builder: Any,
    variant: tuple[int, int, int],
    places: list[Any],
    flags: Any,
    start: Any,
    c: list[Any],
) -> None:
    """Emit the step of as many elements as ``c`` has lanes, from element ``start`` on."""
    (rule, kind, metric), lanes, real = variant, c[0].type.count, c[0].type.element
    offset = builder.mul(start, ir.Constant(start.type, 4 if real == F32 else 8))
    here = [builder.add(place, offset) for place in places]
    held = (True, rule not in (ADAGRAD, PLAIN), rule not in (SGD, PLAIN), True)
    p, m, v, g = (
        load(builder, place if there else here[0], lanes, real)
        for place, there in zip(here, held, strict=True)
    )  # moments the rule does not hold are never used
    p, m, v, share = _advance(builder, rule, p, m, v, g, c)
    for value, place, there in zip((m, v), here[1:3], held[1:3], strict=True):
        if there:
            store(builder, value, place)
    threshold = builder.fmul(c[7], share) if metric else c[7]
    marked = builder.icmp_unsigned("!=", flags, ir.Constant(flags.type, 0))
    with builder.if_else(marked) as (some, every):
        with some:
            flag, zero = load(builder, builder.add(flags, start), lanes, I8), constant(0.0, p)
            exempt = builder.icmp_unsigned("==", flag, constant(EXEMPT, flag))
            own = _shrink(builder, kind, p, builder.select(exempt, zero, threshold))
            free = builder.icmp_unsigned("!=", flag, constant(HELD, flag))
            store(builder, builder.select(free, own, zero), here[0])
        with every:
            store(builder, _shrink(builder, kind, p, threshold), here[0])


def _advance(builder: Any, rule: int, p: Any, m: Any, v: Any, g: Any, c: list[Any]) -> Any:
    """Emit a step; return p, m and v after it, and one over the preconditioner."""
    g = _fused(builder, c[8], p, g)
    m = builder.fadd(builder.fmul(c[2], m), builder.fmul(c[3], g))
    p, square, one = builder.fmul(c[0], p), builder.fmul(g, g), constant(1.0, p)
    if rule in (SGD, PLAIN):
        return builder.fsub(p, builder.fmul(c[1], g if rule == PLAIN else m)), m, v, one
    if rule == YOGI:
        change = builder.fmul(c[4], square)
        less, more = builder.fsub(v, change), builder.fadd(v, change)
        above, below = (builder.fcmp_ordered(sign, v, square) for sign in (">", "<"))
        v = builder.select(above, less, builder.select(below, more, v))
    elif rule == ADAM:
        v = builder.fadd(v, builder.fmul(c[4], builder.fsub(square, v)))
    else:
        v = builder.fadd(v, square)
    root = _call(builder, "sqrt", v)
    share = builder.fdiv(
        one, builder.fadd(builder.fdiv(root, c[6]) if rule == ADAM else root, c[5])
    )
    moved = builder.fmul(builder.fmul(c[1], g if rule == ADAGRAD else m), share)
    return builder.fsub(p, moved), m, v, share


def _shrink(builder: Any, kind: int, p: Any, threshold: Any) -> Any:
    zero = constant(0.0, p)
    if kind == NONNEGATIVE:
        less = builder.fsub(p, threshold)
        return builder.select(builder.fcmp_ordered("<=", less, zero), zero, less)
    if kind == L1:
        less = builder.fsub(_call(builder, "fabs", p), threshold)
        size = builder.select(builder.fcmp_ordered("<=", less, zero), zero, less)
        return _call(builder, "copysign", size, p)
    return p
