"""Atomic operations, calls by address and pauses for compiled loops that several threads share."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic  # type: ignore[untyped-decorator]
def call(typing_context: Any, function: Any, block: Any, start: Any, stop: Any) -> Any:
    """Call a compiled job by its address: function(block, start, stop) -> 1 on success."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64, _I64, _I64])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int64(*[types.int64] * 4), generate


@intrinsic  # type: ignore[untyped-decorator]
def atomic_load(typing_context: Any, address: Any) -> Any:
    """Read an int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.load_atomic(place, ordering="seq_cst", align=8)

    return types.int64(types.uintp), generate


def _read_modify_write(operation: str) -> Callable[..., Any]:
    """Return ``f(address, value)``, which changes an int64 and returns its value before."""

    @intrinsic  # type: ignore[untyped-decorator]
    def modify(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = builder.inttoptr(arguments[0], _I64.as_pointer())
            return builder.atomic_rmw(operation, place, arguments[1], "seq_cst")

        return types.int64(types.uintp, types.int64), generate

    function: Callable[..., Any] = modify
    return function


atomic_add = _read_modify_write("add")
atomic_swap = _read_modify_write("xchg")


@intrinsic  # type: ignore[untyped-decorator]
def atomic_decrement(typing_context: Any, address: Any, expected: Any) -> Any:
    """Subtract 1 from an int64 if it equals ``expected``; return 1 if it did."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        less = builder.sub(arguments[1], ir.Constant(_I64, 1))
        pair = builder.cmpxchg(place, arguments[1], less, "seq_cst")
        return builder.zext(builder.extract_value(pair, 1), _I64)

    return types.int64(types.uintp, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def pause(typing_context: Any) -> Any:
    """Pause for a moment in a waiting loop, so that the other hardware thread of the core runs."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind, name, values = [], "llvm.x86.sse2.pause", []
        elif platform.machine() in ("aarch64", "arm64"):
            kind, name, values = [_I32], "llvm.aarch64.hint", [ir.Constant(_I32, 1)]  # yield
        else:
            return context.get_dummy_value()
        signature = ir.FunctionType(ir.VoidType(), kind)
        builder.call(cgutils.get_or_insert_function(builder.module, signature, name), values)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def yield_core(typing_context: Any) -> Any:
    """Let another thread run on this core: it may be the one waited for."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.system() != "Windows":
            kind = ir.FunctionType(_I32, [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate
