"""Which loops serve a look-up: compiled ones where numba is installed and the work is worth it, numpy otherwise.

``$FEATHERBED_KERNELS`` may say "numpy" or "numba"; by default small calls stay with numpy until numba has been loaded, so that
a command that looks up three rows does not wait for a compiler.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, FormatError, MissingExtra

VARIABLE = "FEATHERBED_KERNELS"
WORTH = 2048  # rows of one call that are worth loading the compiled loops for
GRAIN = 512  # rows a thread takes at a time
LINE = 64  # bytes of a cache line
_LOOKUP = "featherbed.kernels.lookup"
_AS_LOADED = ContextVar("as_loaded", default=False)


def kernels(rows: int) -> bool:
    """Whether compiled loops should serve this many rows."""
    wish = os.environ.get(VARIABLE, "auto")
    unloaded = wish == "auto" and _LOOKUP not in sys.modules
    if wish == "numpy" or (unloaded and (rows < WORTH or _AS_LOADED.get())):
        return False
    if wish not in ("auto", "numba"):
        raise ArgumentError(f"{VARIABLE}={wish!r}: use auto, numpy or numba")
    there = _jobs() is not None
    if not there and wish == "numba":
        raise MissingExtra("numba", "fast", f"{VARIABLE}=numba")
    return there


@contextlib.contextmanager
def as_loaded() -> Iterator[None]:
    """Within it no number of rows is worth loading the compiled loops: they take 100 MB of memory."""
    before = _AS_LOADED.set(True)
    try:
        yield
    finally:
        _AS_LOADED.reset(before)


@cache
def _jobs() -> dict[str, Any] | None:
    """Return every compiled job (or maker of jobs) by name; None without numba."""
    try:
        modules = [
            importlib.import_module(f"featherbed.kernels.{room}")
            for room in ("lookup", "stored", "scores")
        ]
    except ImportError:
        return None
    return {
        name: thing
        for module in modules
        for name, thing in vars(module).items()
        if name.endswith(("_rows", "_scores"))
    }


def _on_line(rows: int, columns: int) -> NDArray[np.float32]:
    """Return an empty matrix that starts on a cache line, so that no vector of it lies across two."""
    spare = np.empty(rows * columns + LINE // 4, dtype=np.float32)
    skip = -spare.ctypes.data % LINE // 4
    return spare[skip : skip + rows * columns].reshape(rows, columns)


def empty(rows: int, columns: int) -> NDArray[np.float32]:
    """Return an empty result; a large one starts on a cache line."""
    return np.empty((rows, columns), dtype=np.float32) if rows < WORTH else _on_line(rows, columns)


def on_line(matrix: NDArray[np.float32], most: int) -> NDArray[np.float32]:
    """Return the matrix, copied to where a cache line starts unless it is there already or larger than ``most`` bytes."""
    whole = np.ascontiguousarray(matrix)
    if whole.nbytes > most or whole.ctypes.data % LINE == 0:
        return whole
    copy = _on_line(*whole.shape)
    copy[:] = whole
    return copy


class Plan:
    """A compiled job with those of its arguments that never change; ``run`` adds the others and the result.

    ``shape`` makes the job for codes of one shape; it is compiled once and kept on disk.
    """

    def __init__(
        self, name: str, *arguments: NDArray[Any] | int, shape: tuple[int, ...] | None = None
    ) -> None:
        jobs = _jobs()
        assert jobs is not None
        self.job: int = jobs[name] if shape is None else jobs[name](*shape)
        self.held = arguments  # the block knows addresses only: these keep the arrays alive
        self.words = [word for argument in arguments for word in _words(argument)]
        self.share = importlib.import_module("featherbed.kernels.pool").run

    def run(self, out: NDArray[np.float32], *arguments: NDArray[Any] | int) -> None:
        """Run the job over the rows of ``out``; a code out of range is a FormatError."""
        words = self.words.copy()
        for argument in (*arguments, out):
            words += _words(argument)
        if not self.share(
            self.job, np.array(words, dtype=np.int64), len(out), GRAIN, (self, out, arguments)
        ):
            raise FormatError("a code is out of range: no atom stands behind it")


def _words(argument: NDArray[Any] | int) -> tuple[int, ...]:
    if isinstance(argument, int):
        return (argument,)
    return (argument.ctypes.data, *argument.shape)
