"""The choice between compiled loops and numpy for look-ups and scores.

``$FEATHERBED_KERNELS`` may be "numpy" or "numba"; by default small calls use numpy until numba has
been loaded, so that a command that looks up three rows does not wait for a compiler. Thousands of
look-ups of one row each load it too (``featherbed.packed.table``).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, FormatError, MissingExtra

VARIABLE = "FEATHERBED_KERNELS"
WORTH = 2048  # rows of one call from which on the compiled loops are loaded
GRAIN = 512  # rows a thread takes at a time
LINE = 64  # bytes of a cache line
STRIP = 32  # columns
NEAR, FAR = 40 << 10, 64 << 10  # bytes of a strip in the nearest cache, and of atoms worth strips
_LOOKUP, _SCORES = "featherbed.kernels.lookup", "featherbed.kernels.scores"
_AS_LOADED = ContextVar("as_loaded", default=False)
_GENERIC = ContextVar("generic", default=False)


def kernels(rows: int) -> bool:
    """Return whether to use compiled loops for a call of ``rows`` rows."""
    mode = os.environ.get(VARIABLE, "auto")
    unloaded = mode == "auto" and _LOOKUP not in sys.modules
    if mode == "numpy" or (unloaded and (rows < WORTH or _AS_LOADED.get())):
        return False
    if mode not in ("auto", "numba"):
        raise ArgumentError(f"{VARIABLE}={mode!r}: use auto, numpy or numba")
    installed = _jobs() is not None
    if not installed and mode == "numba":
        raise MissingExtra("numba", "fast", f"{VARIABLE}=numba")
    return installed


@contextlib.contextmanager
def _within(switch: ContextVar[bool]) -> Iterator[None]:
    before = switch.set(True)
    try:
        yield
    finally:
        switch.reset(before)


def as_loaded() -> AbstractContextManager[None]:
    """Do not load the compiled loops in this context: they take 100 MB of memory."""
    return _within(_AS_LOADED)


def generic_loops() -> AbstractContextManager[None]:
    """Compile no loops for codes of one shape in this context: it takes seconds for each."""
    return _within(_GENERIC)


def shaped_loops() -> bool:
    """Return whether loops are compiled for codes of one shape."""
    return not _GENERIC.get()


@cache
def _jobs() -> dict[str, Any] | None:
    """Return every compiled job, or function that makes one, by name; None without numba."""
    try:
        modules = [importlib.import_module(name) for name in (_LOOKUP, _SCORES)]
    except ImportError:
        return None
    return {
        name: thing
        for module in modules
        for name, thing in vars(module).items()
        if name.endswith(("_rows", "_scores"))
    }


def _on_line(rows: int, columns: int) -> NDArray[np.float32]:
    """Return an empty matrix that starts on a cache line."""
    spare = np.empty(rows * columns + LINE // 4, dtype=np.float32)
    skip = -spare.ctypes.data % LINE // 4
    return spare[skip : skip + rows * columns].reshape(rows, columns)


def empty(rows: int, columns: int) -> NDArray[np.float32]:
    """Return an empty result; a large one starts on a cache line."""
    return np.empty((rows, columns), dtype=np.float32) if rows < WORTH else _on_line(rows, columns)


def on_line(matrix: NDArray[np.float32], most: int) -> NDArray[np.float32]:
    """Return a matrix that starts on a cache line, copied if need be; as it is above ``most``
    bytes."""
    whole = np.ascontiguousarray(matrix)
    if whole.nbytes > most or whole.ctypes.data % LINE == 0:
        return whole
    copy = _on_line(*whole.shape)
    copy[:] = whole
    return copy


def in_strips(atoms: NDArray[np.float32], most: int) -> NDArray[np.float32]:
    """Return atoms [K, d] as strips of columns [n K, d / n], one below the other.

    A strip stays in the nearest cache of a core. Atoms that do so whole, or that no strip brings
    there, are one strip (see ``on_line``).
    """
    count, width = atoms.shape
    if atoms.nbytes <= FAR or width % STRIP or 4 * count * STRIP > NEAR:
        return on_line(atoms, most)
    strips = _on_line(width // STRIP * count, STRIP)
    strips[:] = atoms.reshape(count, -1, STRIP).swapaxes(0, 1).reshape(-1, STRIP)
    return strips


class Plan:
    """A compiled job with its constant arguments; ``run`` adds the others and the result.

    With ``shape`` the job is compiled for codes of one shape, once, and cached on disk.
    """

    def __init__(
        self, name: str, *arguments: NDArray[Any] | int, shape: tuple[int, ...] | None = None
    ) -> None:
        jobs = _jobs()
        assert jobs is not None
        self.job: Any = jobs[name] if shape is None else jobs[name](*shape)
        self.arguments = arguments  # the block holds addresses only: this keeps the arrays alive
        words = [word for argument in arguments for word in _words(argument)]
        self.words = np.array(words, dtype=np.int64)
        threads = importlib.import_module("featherbed.kernels.threads")
        self.run_job, self.run_row, self.run_few = threads.run, threads.run_row, threads.run_few

    def run(self, out: NDArray[np.float32], *arguments: NDArray[Any] | int) -> None:
        """Run the job over the rows of ``out``."""
        if len(out) < 2 * GRAIN and len(arguments) == 1 and not isinstance(arguments[0], int):
            self._check(self.run_few(self.job.address, self.words, arguments[0], out) == 1)
            return
        words = [word for argument in (*arguments, out) for word in _words(argument)]
        block = np.append(self.words, words)
        self._check(self.run_job(self.job, block, len(out), GRAIN, (self, out, arguments)))

    def row(self, columns: int, position: int) -> NDArray[np.float32]:  # [columns]
        """Return one row of a look-up: the job takes positions, then the result."""
        out = np.empty(columns, dtype=np.float32)
        self._check(self.run_row(self.job.address, self.words, position, out) == 1)
        return out

    def _check(self, good: bool) -> None:
        if not good:
            raise FormatError("a code is out of range: it names an atom that does not exist")


def _words(argument: NDArray[Any] | int) -> tuple[int, ...]:
    if isinstance(argument, int):
        return (argument,)
    return (argument.ctypes.data, *argument.shape)
