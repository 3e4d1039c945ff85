"""LLVM intrinsics for compiled loops: vector sums, and memory by address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = (32, 8, 1)  # floats processed at once; the narrower ones finish a row
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


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
            out_address, atom_tuple, weight_tuple, length = arguments
            atom_addresses = cgutils.unpack_tuple(builder, atom_tuple, count)
            weight_values = cgutils.unpack_tuple(builder, weight_tuple, count)
            done = cgutils.alloca_once_value(builder, ir.Constant(length.type, 0))
            for lanes in LANES:
                _loop(builder, lanes, length, done, out_address, atom_addresses, weight_values, add)
            return context.get_dummy_value()

        return signature, generate

    made: Callable[..., None] = sum_rows
    return made


def _loop(
    builder: Any, lanes: int, length: Any, done: Any, out: Any, atoms: Any, weights: Any, add: bool
) -> None:
    """Emit the loop that processes ``lanes`` floats at a time while that many are left."""
    kind = ir.FloatType() if lanes == 1 else ir.VectorType(ir.FloatType(), lanes)
    wide = [_splat(builder, weight, lanes) for weight in weights]
    test, body, leave = (builder.append_basic_block(name) for name in ("test", "body", "leave"))
    builder.branch(test)
    builder.position_at_end(test)
    start = builder.load(done)
    stop = builder.add(start, ir.Constant(length.type, lanes))
    builder.cbranch(builder.icmp_signed("<=", stop, length), body, leave)
    builder.position_at_end(body)
    offset = builder.mul(start, ir.Constant(start.type, 4))

    def at(address: Any) -> Any:
        return builder.inttoptr(builder.add(address, offset), kind.as_pointer())

    total = builder.load(at(out), align=4) if add else None
    for address, weight in zip(atoms, wide, strict=True):
        part = builder.fmul(builder.load(at(address), align=4), weight)
        total = part if total is None else builder.fadd(total, part)
    builder.store(total, at(out), align=4)
    builder.store(stop, done)
    builder.branch(test)
    builder.position_at_end(leave)


_LANES8 = ir.VectorType(ir.FloatType(), 8)
# pairwise sums of two vectors: lanes of the first summand, and of the second
_FOLDS = (([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
          ([0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]),
          ([0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]))  # fmt: skip


@intrinsic  # type: ignore[untyped-decorator]
def eight_dots(typing_context: Any, out: Any, row: Any, atoms: Any, width: Any) -> Any:
    """out[j] = row . atoms[j] for eight atoms, all float32 rows given by address.

    Returns the number of elements processed, a multiple of eight: the caller adds the others. Sums
    go lane by lane, then across lanes: a fixed order, but not that of numpy.
    """
    signature = types.intp(types.uintp, types.uintp, types.UniTuple(types.uintp, 8), types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, row_address, atom_tuple, length = arguments
        addresses = cgutils.unpack_tuple(builder, atom_tuple, 8)
        zero = ir.Constant(_LANES8, [0.0] * 8)
        done = cgutils.alloca_once_value(builder, ir.Constant(length.type, 0))
        sums = [cgutils.alloca_once_value(builder, zero) for _ in addresses]
        for place in sums:
            builder.store(zero, place)
        test, body, leave = (builder.append_basic_block(name) for name in ("test", "body", "leave"))
        builder.branch(test)
        builder.position_at_end(test)
        start = builder.load(done)
        stop = builder.add(start, ir.Constant(length.type, 8))
        builder.cbranch(builder.icmp_signed("<=", stop, length), body, leave)
        builder.position_at_end(body)
        offset = builder.mul(start, ir.Constant(start.type, 4))

        def at(address: Any) -> Any:
            return builder.load(
                builder.inttoptr(builder.add(address, offset), _LANES8.as_pointer()), align=4
            )

        mine, fused = at(row_address), ("contract",)
        for address, place in zip(addresses, sums, strict=True):
            product = builder.fmul(mine, at(address), flags=fused)
            builder.store(builder.fadd(builder.load(place), product, flags=fused), place)
        builder.store(stop, done)
        builder.branch(test)
        builder.position_at_end(leave)
        parts = [builder.load(place) for place in sums]
        for low, high in _FOLDS:
            parts = [
                _folded(builder, one, other, low, high)
                for one, other in zip(parts[::2], parts[1::2], strict=True)
            ]
        builder.store(parts[0], builder.inttoptr(target, _LANES8.as_pointer()), align=4)
        return builder.load(done)

    return signature, generate


def _folded(builder: Any, one: Any, other: Any, low: list[int], high: list[int]) -> Any:
    order = ir.VectorType(_I32, 8)
    halves = (
        builder.shuffle_vector(one, other, ir.Constant(order, lanes)) for lanes in (low, high)
    )
    return builder.fadd(*halves)


def level_row(bits: int, by_column: bool) -> Callable[..., int]:
    """Return ``f(out, source, middle, scale, width)``: out = scale * (level - middle).

    Levels have 8 or 4 bits. ``scale`` is a number, or with ``by_column`` the address of one for each
    element. It returns the number of elements processed, a multiple of 32.
    """
    wide = ir.VectorType(ir.FloatType(), 32)

    @intrinsic  # type: ignore[untyped-decorator]
    def decode(
        typing_context: Any,
        out: Any,
        source: Any,
        middle: Any,
        scale: Any,
        width: Any,
    ) -> Any:
        factor = types.uintp if by_column else types.float32
        signature = types.intp(types.uintp, types.uintp, types.float32, factor, types.intp)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            target, packed, centre, factors, length = arguments
            done = cgutils.alloca_once_value(builder, ir.Constant(length.type, 0))
            centres = _splat(builder, centre, 32)
            same = None if by_column else _splat(builder, factors, 32)
            test, body, leave = (
                builder.append_basic_block(name) for name in ("test", "body", "leave")
            )
            builder.branch(test)
            builder.position_at_end(test)
            start = builder.load(done)
            stop = builder.add(start, ir.Constant(length.type, 32))
            builder.cbranch(builder.icmp_signed("<=", stop, length), body, leave)
            builder.position_at_end(body)
            offset = builder.mul(start, ir.Constant(start.type, 4))

            def floats(address: Any) -> Any:
                return builder.inttoptr(builder.add(address, offset), wide.as_pointer())

            levels = builder.uitofp(_levels(builder, bits, packed, start), wide)
            factor_row = builder.load(floats(factors), align=4) if same is None else same
            builder.store(
                builder.fmul(builder.fsub(levels, centres), factor_row), floats(target), align=4
            )
            builder.store(stop, done)
            builder.branch(test)
            builder.position_at_end(leave)
            return builder.load(done)

        return signature, generate

    made: Callable[..., int] = decode
    return made


def _levels(builder: Any, bits: int, source: Any, start: Any) -> Any:
    """Emit the load of 32 levels from element ``start`` on, as 32 bytes."""
    count = 32 * bits // 8
    place = builder.add(
        source, start if bits == 8 else builder.lshr(start, ir.Constant(start.type, 1))
    )
    kind = ir.VectorType(_I8, count)
    packed = builder.load(builder.inttoptr(place, kind.as_pointer()), align=1)
    if bits == 8:
        return packed
    low = builder.and_(packed, ir.Constant(kind, [15] * count))
    high = builder.lshr(packed, ir.Constant(kind, [4] * count))
    order = [half * count + at for at in range(count) for half in (0, 1)]  # low, high, low, ...
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, 32), order))


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    if lanes == 1:
        return value
    vector = ir.Constant(ir.VectorType(ir.FloatType(), lanes), ir.Undefined)
    first = builder.insert_element(vector, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(
        first, vector, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    )


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, address: Any) -> Any:
    """Prefetch the cache line at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        flags = [ir.Constant(_I32, flag) for flag in (0, 3, 1)]  # read, keep in all caches, data
        builder.call(function, [builder.inttoptr(arguments[0], _I8.as_pointer()), *flags])
        return context.get_dummy_value()

    return types.void(types.uintp), generate


@intrinsic  # type: ignore[untyped-decorator]
def copy(typing_context: Any, out: Any, source: Any, size: Any) -> Any:
    """Copy bytes from one address to another; a constant size becomes a few vector moves."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(
            ir.VoidType(), [_I8.as_pointer(), _I8.as_pointer(), _I64, ir.IntType(1)]
        )
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.memcpy.p0.p0.i64")
        places = [builder.inttoptr(address, _I8.as_pointer()) for address in arguments[:2]]
        builder.call(function, [*places, arguments[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_word(typing_context: Any, address: Any) -> Any:
    """Read the eight bytes at any address, aligned or not."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _I64.as_pointer()), align=1)

    return types.uint64(types.uintp), generate


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
        return builder.inttoptr(arguments[0], _I8.as_pointer())

    return types.voidptr(types.uintp), generate
