"""How loops are compiled: without the GIL, kept on disk where a folder can be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import cfunc, njit

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a function that other compiled functions call."""
    try:
        made: F = njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder to cache in
        made = njit(nogil=True)(function)
    return made


def fast(function: F) -> F:
    """Compile a function of finite numbers whose sums may be taken in any order."""
    try:
        made: F = njit(nogil=True, cache=True, fastmath=True)(function)
    except RuntimeError:
        made = njit(nogil=True, fastmath=True)(function)
    return made


def job(function: Callable[[Any, Any, Any], Any]) -> int:
    """Compile ``function(block, start, stop)`` to a job any thread can run without Python; return its address."""
    try:
        made = cfunc("int64(int64, int64, int64)", cache=True)(function)
    except RuntimeError:
        made = cfunc("int64(int64, int64, int64)")(function)
    _kept.append(made)
    return int(made.address)


_kept: list[Any] = []  # a job's machine code lives as long as the object that made it
