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

    ``out`` and the ``count`` atoms are addresses of float32 rows of ``width`` elements. The
    compiler would vectorize a plain loop too, but only after checking that the result overlaps no
    atom, which costs as much as the sum of eight atoms. Products and sums are rounded one by one,
    as in numpy: no fused multiply-add.
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


def _sum_of(builder: Any, vector: Any) -> Any:
    """Emit the sum of the elements of a vector: halves are added until one is left."""
    while isinstance(vector.type, ir.VectorType):
        count = vector.type.count // 2
        if count > 1:
            low, high = [*range(count)], [*range(count, 2 * count)]
            halves = [shuffle(builder, vector, vector, half) for half in (low, high)]
        else:
            halves = [builder.extract_element(vector, ir.Constant(I32, k)) for k in (0, 1)]
        vector = builder.fadd(*halves)
    return vector


@intrinsic  # type: ignore[untyped-decorator]
def by_atom(
    typing_context: Any,
    atom: Any,
    total: Any,
    rows: Any,
    places: Any,
    pairs: Any,
    count: Any,
    weights: Any,
    dots: Any,
    width: Any,
) -> Any:
    """total += Σ_i weights[pairs[i]] * rows[places[i]], dots[pairs[i]] += atom . rows[places[i]].

    For the ``count`` > 0 pairs of a row and one atom, which stays in registers with its sum. All
    but ``count`` and ``width`` are addresses, places and pairs int32. Products and sums of
    ``total`` are rounded one by one, in order. Returns the number of elements processed, a multiple
    of eight: the caller adds the others.
    """
    address = types.uintp
    signature = types.intp(*[address] * 5, types.intp, address, address, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        atom, total, rows, places, pairs, count, weights, dots, length = arguments
        done, size = counter(builder, length), floats_at(builder, ir.Constant(I64, 0), length)

        def integer_at(start: Any, number: Any) -> Any:
            place = builder.inttoptr(floats_at(builder, start, number), I32.as_pointer())
            return builder.zext(builder.load(place), I64)

        for lanes in (64, 16, 8):
            with lanes_left(builder, lanes, length, done) as start:
                mine = load(builder, floats_at(builder, atom, start), lanes)
                there, first = floats_at(builder, total, start), floats_at(builder, rows, start)
                begin, before = load(builder, there, lanes), builder.block
                loop, leave = (builder.append_basic_block(name) for name in ("pairs", "sum"))
                builder.branch(loop)
                builder.position_at_end(loop)
                number, so_far = builder.phi(I64), builder.phi(begin.type)
                number.add_incoming(ir.Constant(I64, 0), before)
                so_far.add_incoming(begin, before)
                pair, place = integer_at(pairs, number), integer_at(places, number)
                row = load(builder, builder.add(first, builder.mul(place, size)), lanes)
                weight, dot = (
                    builder.inttoptr(floats_at(builder, start, pair), F32.as_pointer())
                    for start in (weights, dots)
                )
                part = builder.fmul(splat(builder, builder.load(weight), lanes), row)
                added, following = builder.fadd(so_far, part), builder.add(number, I64(1))
                product = _sum_of(builder, builder.fmul(mine, row))
                builder.store(builder.fadd(builder.load(dot), product), dot)
                number.add_incoming(following, loop)
                so_far.add_incoming(added, loop)
                builder.cbranch(builder.icmp_signed("<", following, count), loop, leave)
                builder.position_at_end(leave)
                store(builder, added, there)
        return builder.load(done)

    return signature, generate


def level_row(bits: int) -> Callable[..., int]:
    """Return ``f(out, source, middle, scale, by_column, width)``: out = scale * (level - middle).

    Levels have 8, 4, 3 or 2 bits. ``scale`` is the address of a number, or with ``by_column`` of
    one for each element. It returns the number of elements processed, a multiple of eight.
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
            target, packed, center, factors, columns, length = arguments
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
                        builder.fsub(row, splat(builder, center, lanes)), builder.load(scales)
                    )
                    store(builder, row, floats_at(builder, target, start))
            return builder.load(done)

        return signature, generate

    made: Callable[..., int] = decode
    return made


def _levels(builder: Any, bits: int, source: Any, lanes: int) -> Any:
    """Emit the load of levels as int32; eight levels below 8 bits are one word of ``bits``
    bytes."""
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
