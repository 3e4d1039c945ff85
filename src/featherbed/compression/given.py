"""What people hand to ``fb.compress``, as a matrix: arrays, tensors, modules that hold a weight, frames, lists of rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from featherbed.codecs.rows import tensor_array
from featherbed.errors import ArgumentError

ACCEPTED = "a matrix [rows, columns] of floats: an array, a memory map, a tensor, an nn.Embedding or a list of rows"


def matrix_of(given: Any) -> tuple[Any, int | None]:
    """Return the matrix (a module stands for its weight), and the padding row of a module where it is zero.

    >>> matrix_of([[1.0, 2.0], [3.0, 4.0]])[0].shape
    (2, 2)
    """
    if isinstance(given, str | bytes | os.PathLike):
        path = os.fsdecode(given)
        there = "" if Path(path).exists() else " (no such file)"
        advice = 'For files: np.load(path, mmap_mode="r"), or the command featherbed compress'
        raise ArgumentError(
            f"compress was given the path {path!r}{there}: it takes {ACCEPTED}. {advice}"
        )
    if hasattr(given, "named_parameters"):
        return _weight_of(given)
    if hasattr(given, "detach"):
        return tensor_array(given), None
    if hasattr(given, "toarray"):
        raise ArgumentError(
            "compress was given a sparse matrix: it takes a dense one, such as matrix.toarray()"
        )
    if hasattr(given, "dtype") and isinstance(getattr(given, "shape", None), tuple):
        return given, None
    try:
        found = np.asarray(given)
    except (ValueError, TypeError, RuntimeError):
        raise ArgumentError(
            f"compress was given {_kind(given)} of rows that differ in length: it takes {ACCEPTED}"
        ) from None
    if found.ndim == 0 or found.dtype == object:
        raise ArgumentError(f"compress was given {_kind(given)}: it takes {ACCEPTED}")
    return found, None


def _kind(given: Any) -> str:
    return "None" if given is None else f"a {type(given).__name__}"


def _weight_of(module: Any) -> tuple[Any, int | None]:
    """Return the weight of a torch module, and its padding row; one that is not zero is a row like others."""
    import torch

    with torch.no_grad():  # the weight of a compact table is computed
        weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        names = [name for name, parameter in module.named_parameters() if parameter.dim() == 2]
        held = (
            f"its matrices are {', '.join(names[:5])}: give one of them"
            if names
            else "it holds no matrix"
        )
        raise ArgumentError(
            f"compress was given {type(module).__name__}, which has no weight [rows, columns] of its own; {held}"
        )
    padding = getattr(module, "padding_idx", None)
    matrix = tensor_array(weight)
    return matrix, padding if padding is not None and not matrix[padding].any() else None
