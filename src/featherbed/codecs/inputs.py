"""Conversion of arrays, tensors, modules, frames and lists to a matrix for ``fb.compress``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from featherbed.codecs.rows import tensor_array
from featherbed.errors import ArgumentError

ACCEPTED = (
    "a matrix [rows, columns] of floats: an array, a memory map, a tensor, an nn.Embedding "
    "or a list of rows"
)


def as_matrix(source: Any) -> tuple[Any, int | None]:
    """Return a matrix, and the padding id of a module whose padding row is zero.

    >>> as_matrix([[1.0, 2.0], [3.0, 4.0]])[0].shape
    (2, 2)
    """
    if isinstance(source, str | bytes | os.PathLike):
        path = os.fsdecode(source)
        missing = "" if Path(path).exists() else " (no such file)"
        raise ArgumentError(
            f"compress was given the path {path!r}{missing}: it takes {ACCEPTED}. "
            'For files: np.load(path, mmap_mode="r"), or the command featherbed compress'
        )
    if hasattr(source, "named_parameters"):
        return _module_weight(source)
    if hasattr(source, "detach"):
        return tensor_array(source), None
    if hasattr(source, "toarray"):
        raise ArgumentError(
            "compress was given a sparse matrix: it takes a dense one, such as matrix.toarray()"
        )
    if hasattr(source, "dtype") and isinstance(getattr(source, "shape", None), tuple):
        return source, None
    kind = "None" if source is None else f"a {type(source).__name__}"
    try:
        matrix = np.asarray(source)
    except (ValueError, TypeError, RuntimeError):
        raise ArgumentError(
            f"compress was given {kind} of rows that differ in length: it takes {ACCEPTED}"
        ) from None
    if matrix.ndim == 0 or matrix.dtype == object:
        raise ArgumentError(f"compress was given {kind}: it takes {ACCEPTED}")
    return matrix, None


def _module_weight(module: Any) -> tuple[Any, int | None]:
    """Return the weight of a torch module, and its padding id if that row is zero."""
    torch = sys.modules["torch"]  # imported, since there is a module
    with torch.no_grad():  # the weight of a compact table is computed
        weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        names = [name for name, parameter in module.named_parameters() if parameter.dim() == 2]
        advice = (
            f"its matrices are {', '.join(names[:5])}: give one of them"
            if names
            else "it holds no matrix"
        )
        raise ArgumentError(
            f"compress was given {type(module).__name__}, which has no weight [rows, columns] "
            f"of its own; {advice}"
        )
    padding = getattr(module, "padding_idx", None)
    matrix = tensor_array(weight)
    return matrix, padding if padding is not None and not matrix[padding].any() else None
