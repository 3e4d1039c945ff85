"""LLVM intrinsics for compiled loops: vector sums, stored rows, and memory by address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

F32, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
LANES = (32, 8, 1)  # floats processed at once; the narrower ones finish a row


def load(builder: Any, address: Any, lanes: int, kind: Any = F32) -> Any:
    """Emit the load of a vector at an address; vectors need no alignment."""
    place = builder.inttoptr(address, ir.VectorType(kind, lanes).as_pointer())
    return builder.load(place, align=1 if kind is I8 else 2 if kind is I16 else 4)


def store(builder: Any, value: Any, address: Any) -> None:
    """Emit the store of a vector of four-byte elements at an address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def splat(builder: Any, value: Any, lanes: int) -> Any:
    """Emit a vector of equal elements."""
    vector = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(vector, value, ir.Constant(I32, 0))
    return shuffle(builder, first, vector, [0] * lanes)


def shuffle(builder: Any, one: Any, other: Any, order: list[int]) -> Any:
    """Emit a vector of elements of two others, by their number."""
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, len(order)), order))


def constant(value: Any, like: Any) -> Any:
    """Return a constant vector of equal elements, of the type of ``like``."""
    return ir.Constant(like.type, [value] * like.type.count)


@contextmanager
def lanes_left(builder: Any, lanes: int, length: Any, done: Any) -> Iterator[Any]:
    """Emit a loop that takes ``lanes`` elements at a time while that many of ``length`` are left.

    Yields the number of the first of them; ``done`` is the variable that counts them.
    """
    test, body, leave = (builder.append_basic_block(name) for name in ("test", "body", "leave"))
    builder.branch(test)
    builder.position_at_end(test)
    start = builder.load(done)
    stop = builder.add(start, ir.Constant(length.type, lanes))
    builder.cbranch(builder.icmp_signed("<=", stop, length), body, leave)
    builder.position_at_end(body)
    yield start
    builder.store(stop, done)
    builder.branch(test)
    builder.position_at_end(leave)


def counter(builder: Any, length: Any) -> Any:
    """Emit a variable of the type of ``length`` that is set to 0."""
    return cgutils.alloca_once_value(builder, ir.Constant(length.type, 0))


def floats_at(builder: Any, address: Any, start: Any) -> Any:
    """Emit the address of element ``start`` of a float32 row."""
    return builder.add(address, builder.mul(start, ir.Constant(start.type, 4)))


def row_sum(count: int, add: bool) -> Callable[..., None]:
    """Return ``f(out, atoms, weights, width)``: out = Σ_j weights[j] * atoms[j] (``add``: out +=).

    ``out`` and the ``count`` atoms are addresses of float32 rows of ``width`` elements. The compiler
    would vectorize a plain loop too, but only after checking that the result overlaps no atom, which
    costs as much as the sum of eight atoms. Products and sums are rounded one by one, as in numpy:
    no fused multiply-add.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def sum_rows(typing_context: Any, out: Any, atoms: Any, weights: Any, width: Any) -> Any:
        rows, factors = (types.UniTuple(kind, count) for kind in (types.uintp, types.float32))
        signature = types.void(types.uintp, rows, factors, types.intp)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            target, *tuples, length = arguments
            addresses, numbers = (cgutils.unpack_tuple(builder, one, count) for one in tuples)
            done = counter(builder, length)
            for lanes in LANES:
                wide = [splat(builder, weight, lanes) for weight in numbers]
                with lanes_left(builder, lanes, length, done) as start:
                    there = floats_at(builder, target, start)
                    total = load(builder, there, lanes) if add else None
                    for address, weight in zip(addresses, wide, strict=True):
                        atom = load(builder, floats_at(builder, address, start), lanes)
                        part = builder.fmul(atom, weight)
                        total = part if total is None else builder.fadd(total, part)
                    store(builder, total, there)
            return context.get_dummy_value()

        return signature, generate

    made: Callable[..., None] = sum_rows
    return made


# pairwise sums of two vectors: lanes of the first summand, and of the second
_FOLDS = (([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
          ([0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]),
          ([0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]))  # fmt: skip


@intrinsic  # type: ignore[untyped-decorator]
def eight_slots(
    typing_context: Any, out: Any, row: Any, atoms: Any, sums: Any, weights: Any, width: Any
) -> Any:
    """out[j] = row . atoms[j] and sums[j] += weights[j] * row for eight slots, in one pass.

    All are float32 rows given by address. Returns the number of elements processed, a multiple of
    eight: the caller adds the others. Dot products are added lane by lane, then across lanes: a
    fixed order, but not that of numpy.
    """
    rows, factors = (types.UniTuple(kind, 8) for kind in (types.uintp, types.float32))
    signature = types.intp(types.uintp, types.uintp, rows, rows, factors, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, row_address, *tuples, length = arguments
        slots = [*zip(*(cgutils.unpack_tuple(builder, part, 8) for part in tuples), strict=True)]
        done, fused, totals = counter(builder, length), ("contract",), []
        for lanes in (16, 8):
            zero = ir.Constant(ir.VectorType(F32, lanes), [0.0] * lanes)
            places = [cgutils.alloca_once_value(builder, zero) for _ in slots]
            factors = [splat(builder, factor, lanes) for _, _, factor in slots]
            with lanes_left(builder, lanes, length, done) as start:
                mine = load(builder, floats_at(builder, row_address, start), lanes)
                for (atom, into, _), place, factor in zip(slots, places, factors, strict=True):
                    one = load(builder, floats_at(builder, atom, start), lanes)
                    product = builder.fmul(mine, one, flags=fused)
                    builder.store(builder.fadd(builder.load(place), product, flags=fused), place)
                    there = floats_at(builder, into, start)
                    added = builder.fmul(factor, mine)
                    store(builder, builder.fadd(load(builder, there, lanes), added), there)
            totals.append([builder.load(place) for place in places])
        halves = ([*range(8)], [*range(8, 16)])
        parts = [
            builder.fadd(
                builder.fadd(*(shuffle(builder, wide, wide, half) for half in halves)), one
            )
            for wide, one in zip(*totals, strict=True)
        ]
        for orders in _FOLDS:
            parts = [
                builder.fadd(*(shuffle(builder, one, other, order) for order in orders))
                for one, other in zip(parts[::2], parts[1::2], strict=True)
            ]
        store(builder, parts[0], target)
        return builder.load(done)

    return signature, generate


def level_row(bits: int) -> Callable[..., int]:
    """Return ``f(out, source, middle, scale, by_column, width)``: out = scale * (level - middle).

    Levels have 8, 4, 3 or 2 bits. ``scale`` is the address of a number, or with ``by_column`` of one
    for each element. It returns the number of elements processed, a multiple of eight.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def decode(
        typing_context: Any,
        out: Any,
        source: Any,
        middle: Any,
        scale: Any,
        by_column: Any,
        width: Any,
    ) -> Any:
        signature = types.intp(
            types.uintp, types.uintp, types.float32, types.uintp, types.boolean, types.intp
        )

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            target, packed, centre, factors, columns, length = arguments
            done = counter(builder, length)
            same = builder.load(builder.inttoptr(factors, F32.as_pointer()), align=4)
            for lanes in LANES[:-1]:
                with lanes_left(builder, lanes, length, done) as start:
                    size = ir.Constant(start.type, bits)
                    first = builder.lshr(builder.mul(start, size), ir.Constant(start.type, 3))
                    levels = _levels(builder, bits, builder.add(packed, first), lanes)
                    row = builder.sitofp(levels, ir.VectorType(F32, lanes))
                    scales = cgutils.alloca_once_value(builder, splat(builder, same, lanes))
                    with builder.if_then(columns):
                        own = load(builder, floats_at(builder, factors, start), lanes)
                        builder.store(own, scales)
                    row = builder.fmul(
                        builder.fsub(row, splat(builder, centre, lanes)), builder.load(scales)
                    )
                    store(builder, row, floats_at(builder, target, start))
            return builder.load(done)

        return signature, generate

    made: Callable[..., int] = decode
    return made


def _levels(builder: Any, bits: int, source: Any, lanes: int) -> Any:
    """Emit the load of levels as int32; eight levels below 8 bits are one word of ``bits`` bytes."""
    packed = load(builder, source, lanes * bits // 8, I8)
    if bits == 8:
        return builder.zext(packed, ir.VectorType(I32, lanes))
    groups, nought = lanes // 8, packed.type.count  # the first byte of the zeros
    order = [g * bits + b if b < bits else nought for g in range(groups) for b in range(4)]
    zeros = ir.Constant(packed.type, [0] * nought)
    words = builder.bitcast(shuffle(builder, packed, zeros, order), ir.VectorType(I32, groups))
    wide = shuffle(builder, words, words, [lane // 8 for lane in range(lanes)])
    shifts = ir.Constant(wide.type, [bits * (lane % 8) for lane in range(lanes)])
    return builder.and_(builder.lshr(wide, shifts), constant((1 << bits) - 1, wide))


@intrinsic  # type: ignore[untyped-decorator]
def half_row(typing_context: Any, out: Any, source: Any, width: Any) -> Any:
    """Convert float16 elements at ``source`` to float32, as ``featherbed.kernels.codes.half`` does.

    Returns the number of elements processed, a multiple of eight.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, packed, length = arguments
        done = counter(builder, length)
        for lanes in LANES[:-1]:
            with lanes_left(builder, lanes, length, done) as start:
                place = builder.add(packed, builder.mul(start, ir.Constant(start.type, 2)))
                raw = builder.zext(load(builder, place, lanes, I16), ir.VectorType(I32, lanes))

                def bits(mask: int, shift: int, raw: Any = raw) -> Any:
                    part = builder.and_(raw, constant(mask, raw))
                    return builder.shl(part, constant(shift, raw))

                size, floats = bits(0x7FFF, 13), ir.VectorType(F32, lanes)
                scaled = builder.bitcast(size, floats)
                scaled = builder.fmul(scaled, constant(2.0**112, scaled))
                endless = builder.or_(size, constant(0x7F800000, size))
                found = builder.select(
                    builder.icmp_unsigned(">=", size, constant(0x0F800000, size)),
                    endless,
                    builder.bitcast(scaled, raw.type),
                )
                row = builder.bitcast(builder.or_(found, bits(0x8000, 16)), floats)
                store(builder, row, floats_at(builder, target, start))
        return builder.load(done)

    return types.intp(types.uintp, types.uintp, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, address: Any) -> Any:
    """Prefetch the cache line at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        flags = [ir.Constant(I32, flag) for flag in (0, 3, 1)]  # read, keep in all caches, data
        builder.call(function, [builder.inttoptr(arguments[0], I8.as_pointer()), *flags])
        return context.get_dummy_value()

    return types.void(types.uintp), generate


@intrinsic  # type: ignore[untyped-decorator]
def copy(typing_context: Any, out: Any, source: Any, size: Any) -> Any:
    """Copy bytes from one address to another; a constant size becomes a few vector moves."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(
            ir.VoidType(), [I8.as_pointer(), I8.as_pointer(), I64, ir.IntType(1)]
        )
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.memcpy.p0.p0.i64")
        places = [builder.inttoptr(address, I8.as_pointer()) for address in arguments[:2]]
        builder.call(function, [*places, arguments[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_word(typing_context: Any, address: Any) -> Any:
    """Read the eight bytes at any address, aligned or not."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], I64.as_pointer()), align=1)

    return types.uint64(types.uintp), generate


def bit_fields(lanes: int, words: int) -> Callable[..., None]:
    """Return ``f(out, source, bit, stride, mask)``: ``lanes`` bit fields, as uint32 at ``out``.

    Field i begins at ``bit`` + i * ``stride`` of the stream at ``source``. They are read from
    ``words`` words of eight bytes, each of which begins at the byte of its first field.
    """
    each = lanes // words

    @intrinsic  # type: ignore[untyped-decorator]
    def read(typing_context: Any, out: Any, source: Any, bit: Any, stride: Any, mask: Any) -> Any:
        signature = types.void(types.uintp, types.uintp, types.int64, types.int64, types.uint64)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            target, packed, first, step, low = arguments
            parts = []
            for word in range(words):
                start = builder.add(first, builder.mul(step, ir.Constant(I64, word * each)))
                place = builder.add(packed, builder.lshr(start, ir.Constant(I64, 3)))
                known = builder.load(builder.inttoptr(place, I64.as_pointer()), align=1)
                offset = builder.and_(start, ir.Constant(I64, 7))
                parts.append((splat(builder, known, each), splat(builder, offset, each)))
            while len(parts) > 1:
                order = [*range(2 * parts[0][0].type.count)]
                parts = [
                    tuple(shuffle(builder, *pair, order) for pair in zip(*two, strict=True))
                    for two in zip(parts[::2], parts[1::2], strict=True)
                ]
            known, offsets = parts[0]
            places = ir.Constant(known.type, [lane % each for lane in range(lanes)])
            offsets = builder.add(offsets, builder.mul(splat(builder, step, lanes), places))
            found = builder.and_(builder.lshr(known, offsets), splat(builder, low, lanes))
            found = builder.trunc(found, ir.VectorType(I32, lanes))
            store(builder, found, target)
            return context.get_dummy_value()

        return signature, generate

    made: Callable[..., None] = read
    return made


@intrinsic  # type: ignore[untyped-decorator]
def bit_count(typing_context: Any, word: Any) -> Any:
    """Return the number of bits that are set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing_context: Any, address: Any) -> Any:
    """Return an address as a pointer for numba.carray."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], I8.as_pointer())

    return types.voidptr(types.uintp), generate
