"""Vector arithmetic on rows given by address: scores, sums, optimizer steps.

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
LANES = (16, 8, 4, 1)  # elements updated at once; the narrower ones finish a row
NONE, NONNEGATIVE, L1 = 0, 1, 2  # penalties
YOGI, SGD, ADAM, ADAGRAD, PLAIN = range(5)  # rules; PLAIN is SGD without momentum
HELD, PENALIZED, EXEMPT = range(3)  # flags of entries; HELD ones stay zero


def _kind(width: int, real: Any = _F32) -> Any:
    return ir.VectorType(real, width)


def _load(builder: Any, address: Any, width: int, real: Any = _F32) -> Any:
    return builder.load(builder.inttoptr(address, _kind(width, real).as_pointer()), align=4)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def _splat(builder: Any, value: Any, width: int) -> Any:
    vector = ir.Constant(_kind(width, value.type), ir.Undefined)
    first = builder.insert_element(vector, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(
        first, vector, ir.Constant(ir.VectorType(_I32, width), [0] * width)
    )


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)


def _call(builder: Any, name: str, *values: Any) -> Any:
    """Call an LLVM intrinsic on vectors."""
    kind = values[0].type
    name = f"llvm.{name}.v{kind.count}f{32 if kind.element == _F32 else 64}"
    signature = ir.FunctionType(kind, [kind] * len(values))
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), values)


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


def _filled(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count)


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
        _store(builder, total, target)
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
        total = cgutils.alloca_once_value(builder, _filled(_kind(wide), 0.0))
        builder.store(_filled(_kind(wide), 0.0), total)
        with cgutils.for_range(builder, length) as loop:
            weight = _number(builder, weight_row, loop.index)
            row = _load(builder, builder.add(source, builder.mul(loop.index, distance)), wide)
            builder.store(
                _fused(builder, _splat(builder, weight, wide), row, builder.load(total)), total
            )
        _store(builder, builder.load(total), target)
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
            _store(builder, _fused(builder, weight, values, _load(builder, there, wide)), there)
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
            _store(builder, builder.fadd(kept, moved, flags=_FUSED), address)
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
    EXEMPT); 0: all are penalized. The reference are the rules of ``featherbed.optim.rules``.
    """
    variant = (rule.literal_value, kind.literal_value, metric.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *places, flag_bytes, length, numbers = arguments[3:]
        c = cgutils.unpack_tuple(builder, numbers, 9)
        done = cgutils.alloca_once_value(builder, ir.Constant(length.type, 0))
        builder.store(ir.Constant(length.type, 0), done)
        for lanes in LANES:
            wide = [_splat(builder, x, lanes) for x in c]
            _step_lanes(builder, length, done, places, flag_bytes, wide, variant)
        return context.get_dummy_value()

    real = types.UniTuple(c.dtype, 9)
    return types.void(rule, kind, metric, *[types.int64] * 6, real), generate


def _step_lanes(
    builder: Any,
    length: Any,
    done: Any,
    places: list[Any],
    flags: Any,
    c: list[Any],
    variant: tuple[int, int, int],
) -> None:
    """Emit the loop that updates as many elements at a time as ``c`` has, while they are left."""
    lanes, real = c[0].type.count, c[0].type.element
    test, body, leave = (builder.append_basic_block(name) for name in ("test", "body", "leave"))
    builder.branch(test)
    builder.position_at_end(test)
    start = builder.load(done)
    stop = builder.add(start, ir.Constant(length.type, lanes))
    builder.cbranch(builder.icmp_signed("<=", stop, length), body, leave)
    builder.position_at_end(body)
    offset = builder.mul(start, ir.Constant(start.type, 4 if real == _F32 else 8))
    p_place, *moments, g_place = (builder.add(place, offset) for place in places)
    rule, kind, metric = variant
    held = (rule not in (ADAGRAD, PLAIN), rule not in (SGD, PLAIN))  # moments the rule keeps
    m, v = (
        _load(builder, place, lanes, real) if there else None
        for place, there in zip(moments, held, strict=True)
    )
    p, g = (_load(builder, place, lanes, real) for place in (p_place, g_place))
    p, m, v, share = _advance(builder, rule, p, m, v, g, c)
    for value, place, there in zip((m, v), moments, held, strict=True):
        if there:
            _store(builder, value, place)
    threshold = builder.fmul(c[7], share) if metric else c[7]
    marked = builder.icmp_unsigned("!=", flags, ir.Constant(flags.type, 0))
    with builder.if_else(marked) as (some, every):
        with some:
            bytes_ = ir.VectorType(_I8, lanes)
            place = builder.inttoptr(builder.add(flags, start), bytes_.as_pointer())
            flag, zero = builder.load(place, align=1), _filled(p.type, 0.0)
            exempt = builder.icmp_unsigned("==", flag, _filled(bytes_, EXEMPT))
            own = _shrink(builder, kind, p, builder.select(exempt, zero, threshold))
            free = builder.icmp_unsigned("!=", flag, _filled(bytes_, HELD))
            _store(builder, builder.select(free, own, zero), p_place)
        with every:
            _store(builder, _shrink(builder, kind, p, threshold), p_place)
    builder.store(stop, done)
    builder.branch(test)
    builder.position_at_end(leave)


def _advance(builder: Any, rule: int, p: Any, m: Any, v: Any, g: Any, c: list[Any]) -> Any:
    """Emit a step; return p, m and v after it, and one over the preconditioner."""
    one = share = _filled(p.type, 1.0)
    g = _fused(builder, c[8], p, g)
    m = g if m is None else builder.fadd(builder.fmul(c[2], m), builder.fmul(c[3], g))
    p, moved = builder.fmul(c[0], p), builder.fmul(c[1], m)
    if v is not None:
        square = builder.fmul(g, g)
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
        scale = builder.fadd(builder.fdiv(root, c[6]) if rule == ADAM else root, c[5])
        share = builder.fdiv(one, scale)
        moved = builder.fmul(moved, share)
    return builder.fsub(p, moved), m, v, share


def _shrink(builder: Any, kind: int, p: Any, threshold: Any) -> Any:
    zero = _filled(p.type, 0.0)
    if kind == NONNEGATIVE:
        less = builder.fsub(p, threshold)
        return builder.select(builder.fcmp_ordered("<=", less, zero), zero, less)
    if kind == L1:
        less = builder.fsub(_call(builder, "fabs", p), threshold)
        size = builder.select(builder.fcmp_ordered("<=", less, zero), zero, less)
        return _call(builder, "copysign", size, p)
    return p
