"""What threads that share work need in compiled loops: words they all change, jobs by address, ways to wait."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic  # type: ignore[untyped-decorator]
def call(typing_context: Any, function: Any, block: Any, start: Any, stop: Any) -> Any:
    """Call a compiled job by its address: function(block, start, stop) -> 1 if all went well."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64, _I64, _I64])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def shared_load(typing_context: Any, address: Any) -> Any:
    """Read an int64 that other threads change."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.load_atomic(place, ordering="seq_cst", align=8)

    return types.int64(types.uintp), generate


@intrinsic  # type: ignore[untyped-decorator]
def breathe(typing_context: Any) -> Any:
    """Let the other thread of a core have it for a moment: what a waiting loop should do at every turn."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(
                cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), []
            )
        elif platform.machine() in ("aarch64", "arm64"):
            kind = ir.FunctionType(ir.VoidType(), [_I32])
            hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(hint, [ir.Constant(_I32, 1)])  # yield
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def give_way(typing_context: Any) -> Any:
    """Let another thread that waits for this core run: the one waited for may be it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.system() != "Windows":
            builder.call(
                cgutils.get_or_insert_function(
                    builder.module, ir.FunctionType(_I32, []), "sched_yield"
                ),
                [],
            )
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def shared_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to an int64 that other threads change; return what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.uintp, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def shared_take(typing_context: Any, address: Any, seen: Any) -> Any:
    """Take one off an int64 that other threads change, if it still is what was seen; return 1 if it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        less = builder.sub(arguments[1], ir.Constant(_I64, 1))
        pair = builder.cmpxchg(place, arguments[1], less, "seq_cst")
        return builder.zext(builder.extract_value(pair, 1), _I64)

    return types.int64(types.uintp, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def shared_swap(typing_context: Any, address: Any, value: Any) -> Any:
    """Set an int64 that other threads change; return what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("xchg", place, arguments[1], "seq_cst")

    return types.int64(types.uintp, types.int64), generate
