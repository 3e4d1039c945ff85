"""Weights of rows from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from featherbed.errors import DataError


def read_weights(path: Path) -> Any:
    """Read one weight per row from a .npy array or a text file with one number per line.

    The word zipf instead of a file stands for the weights 1 / (i + 1).

    >>> path = getfixture("tmp_path") / "counts.txt"
    >>> _ = path.write_text("3\\n1\\n")
    >>> read_weights(path).tolist()
    [3.0, 1.0]
    """
    if str(path) == "zipf":
        return "zipf"
    try:
        found = np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.loadtxt(path, ndmin=1)
    except ValueError as error:
        why = str(error)[:120]
        raise DataError(
            f"{path.name}: weights are a .npy array or a text file of one number a line ({why})"
        ) from None
    return found
