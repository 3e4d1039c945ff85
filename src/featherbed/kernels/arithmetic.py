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

_F32, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FUSED = ("contract",)
LANES = (16, 4, 1)  # elements updated at once; the narrower ones finish a row
NONE, NONNEGATIVE, L1 = 0, 1, 2
YOGI, ADAM = 0, 2


def _kind(width: int) -> Any:
    return ir.VectorType(_F32, width)


def _load(builder: Any, address: Any, width: int) -> Any:
    return builder.load(builder.inttoptr(address, _kind(width).as_pointer()), align=4)


def _store(builder: Any, value: Any, address: Any, width: int) -> None:
    builder.store(value, builder.inttoptr(address, _kind(width).as_pointer()), align=4)


def _splat(builder: Any, value: Any, width: int) -> Any:
    vector = ir.Constant(_kind(width), ir.Undefined)
    first = builder.insert_element(vector, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(
        first, vector, ir.Constant(ir.VectorType(_I32, width), [0] * width)
    )


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)


def _call(builder: Any, name: str, width: int, *values: Any) -> Any:
    """Call an LLVM intrinsic on vectors."""
    kind = _kind(width)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * len(values)), f"llvm.{name}.v{width}f32"
    )
    return builder.call(function, values)


def _total(builder: Any, vector: Any, width: int) -> Any:
    """Add the lanes of a vector."""
    kind = ir.FunctionType(_F32, [_F32, _kind(width)])
    function = cgutils.get_or_insert_function(
        builder.module, kind, f"llvm.vector.reduce.fadd.v{width}f32"
    )
    return builder.call(function, [ir.Constant(_F32, -0.0), vector], fastmath=("reassoc",))


def _replace_first(builder: Any, vector: Any, value: Any) -> Any:
    return builder.insert_element(vector, value, ir.Constant(_I32, 0))


def _first(builder: Any, vector: Any) -> Any:
    return builder.extract_element(vector, ir.Constant(_I32, 0))


def _zeros(width: int) -> Any:
    return ir.Constant(_kind(width), [0.0] * width)


def _number(builder: Any, row: Any, index: Any) -> Any:
    """Load one element of a row."""
    place = builder.add(row, builder.mul(index, ir.Constant(_I64, 4)))
    return builder.load(builder.inttoptr(place, _F32.as_pointer()), align=4)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def score(typing_context: Any, width: Any, column: Any, left: Any, right: Any) -> Any:
    """Return left . right; with ``column`` 1 the first elements are added, not multiplied."""
    wide, added = width.literal_value, column.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        one, other = (_load(builder, address, wide) for address in arguments[2:])
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
        values = _load(builder, source, wide)
        if ones:
            values = _replace_first(builder, values, ir.Constant(_F32, 1.0))
        total = _fused(builder, _splat(builder, number, wide), values, _load(builder, target, wide))
        _store(builder, total, target, wide)
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
        builder.store(_zeros(wide), total)
        with cgutils.for_range(builder, length) as loop:
            weight = _number(builder, weight_row, loop.index)
            row = _load(builder, builder.add(source, builder.mul(loop.index, distance)), wide)
            builder.store(
                _fused(builder, _splat(builder, weight, wide), row, builder.load(total)), total
            )
        _store(builder, builder.load(total), target, wide)
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
        values = _load(builder, source, wide)
        with cgutils.for_range(builder, length) as loop:
            weight = _splat(builder, _number(builder, weight_row, loop.index), wide)
            there = builder.add(target, builder.mul(loop.index, ir.Constant(_I64, 4 * wide)))
            _store(
                builder, _fused(builder, weight, values, _load(builder, there, wide)), there, wide
            )
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
        rows = [_load(builder, address, wide) for address in places]
        added = [
            _replace_first(builder, row, ir.Constant(_F32, 1.0)) if ones else row
            for row in reversed(rows)
        ]
        for address, row, other, keep, move in zip(places, rows, added, keeps, moves, strict=True):
            moved = builder.fmul(_splat(builder, move, wide), other, flags=_FUSED)
            kept = builder.fmul(_splat(builder, keep, wide), row, flags=_FUSED)
            _store(builder, builder.fadd(kept, moved, flags=_FUSED), address, wide)
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
        c = cgutils.unpack_tuple(builder, numbers, 9)
        done = cgutils.alloca_once_value(builder, ir.Constant(length.type, 0))
        builder.store(ir.Constant(length.type, 0), done)
        for lanes in LANES:
            _step_lanes(
                builder,
                lanes,
                length,
                done,
                places,
                kept_bytes,
                [_splat(builder, x, lanes) for x in c],
                variant,
            )
        return context.get_dummy_value()

    return types.void(
        rule, kind, metric, *[types.int64] * 6, types.UniTuple(types.float32, 9)
    ), generate


def _step_lanes(
    builder: Any,
    lanes: int,
    length: Any,
    done: Any,
    places: list[Any],
    kept: Any,
    c: list[Any],
    variant: tuple[int, int, int],
) -> None:
    """Emit the loop that updates ``lanes`` elements at a time while that many are left."""
    test, body, leave = (builder.append_basic_block(name) for name in ("test", "body", "leave"))
    builder.branch(test)
    builder.position_at_end(test)
    start = builder.load(done)
    stop = builder.add(start, ir.Constant(length.type, lanes))
    builder.cbranch(builder.icmp_signed("<=", stop, length), body, leave)
    builder.position_at_end(body)
    here = [builder.add(place, builder.mul(start, ir.Constant(start.type, 4))) for place in places]
    p, m, v = _step_vectors(
        builder, lanes, variant, [_load(builder, address, lanes) for address in here], c
    )
    _store(builder, m, here[1], lanes)
    _store(builder, v, here[2], lanes)
    masked = builder.icmp_unsigned("!=", kept, ir.Constant(kept.type, 0))
    with builder.if_else(masked) as (some, every):
        with some:
            mask = ir.VectorType(_I8, lanes)
            flags = builder.load(
                builder.inttoptr(builder.add(kept, start), mask.as_pointer()), align=1
            )
            free = builder.icmp_unsigned("!=", flags, ir.Constant(mask, [0] * lanes))
            _store(builder, builder.select(free, p, _zeros(lanes)), here[0], lanes)
        with every:
            _store(builder, p, here[0], lanes)
    builder.store(stop, done)
    builder.branch(test)
    builder.position_at_end(leave)


def _step_vectors(
    builder: Any, width: int, variant: tuple[int, int, int], values: list[Any], c: list[Any]
) -> list[Any]:
    """Emit the step; return p, m and v after it."""
    (rule, kind, metric), (p, m, v, g) = variant, values
    g = _fused(builder, c[8], p, g)
    m = builder.fadd(builder.fmul(c[2], m), builder.fmul(c[3], g))
    square, one = builder.fmul(g, g), ir.Constant(_kind(width), [1.0] * width)
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
