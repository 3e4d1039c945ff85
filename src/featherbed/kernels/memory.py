"""Arrays by address, for jobs that get theirs as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from featherbed.kernels.compiled import compiled
from featherbed.kernels.vectors import pointer


@compiled
def integers(address: Any, length: Any) -> Any:
    """Return the int32 array at an address."""
    return carray(pointer(np.uint64(address)), length, np.int32)


@compiled
def floats(address: Any, length: Any) -> Any:
    """Return the float32 array at an address."""
    return carray(pointer(np.uint64(address)), length, np.float32)
