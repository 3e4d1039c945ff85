"""Arguments of compiled jobs.

The arguments of a job are a block, an array of int64: an integer stands for itself, an array for
its address followed by its shape, in the order the first lines of the job read them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from featherbed.kernels.compiled import compiled
from featherbed.kernels.vectors import pointer

WORDS = 64  # of a block, at most


@compiled
def words(address: Any) -> Any:
    """Return the block at an address."""
    return carray(pointer(np.uint64(address)), WORDS, np.int64)


@compiled
def vector(block: Any, at: Any, kind: Any) -> Any:
    """Return the one-dimensional array given by words ``at`` and ``at + 1`` of a block."""
    return carray(pointer(np.uint64(block[at])), block[at + 1], kind)


@compiled
def matrix(block: Any, at: Any, kind: Any) -> Any:
    """Return the two-dimensional array given by words ``at`` to ``at + 2`` of a block."""
    return carray(pointer(np.uint64(block[at])), (block[at + 1], block[at + 2]), kind)


@compiled
def integers(address: Any, length: Any) -> Any:
    """Return the int32 array at an address."""
    return carray(pointer(np.uint64(address)), length, np.int32)


@compiled
def floats(address: Any, length: Any) -> Any:
    """Return the float32 array at an address."""
    return carray(pointer(np.uint64(address)), length, np.float32)


@compiled
def doubles(address: Any, length: Any) -> Any:
    """Return the float64 array at an address."""
    return carray(pointer(np.uint64(address)), length, np.float64)
