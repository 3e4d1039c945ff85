"""Checked inputs for the selection of anchors: documents, features, labels, generators."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featherbed.errors import ArgumentError, MissingExtra


def sklearn(module: str) -> Any:
    """Return a module of scikit-learn, or raise ``MissingExtra``."""
    return _imported(f"sklearn.{module}", "scikit-learn")


def _imported(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise MissingExtra(package, "train", "choosing these anchors") from None


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw a seed for numpy and scikit-learn from a torch generator."""
    device = None if generator is None else generator.device
    return int(torch.randint(2**31 - 1, (), generator=generator, device=device))


def documents_for(documents: Any, objects: int) -> Any:  # -> scipy CSR float64 [n, V]
    """Return the count of each object in each document."""
    sparse = _imported("scipy.sparse", "scipy")
    if sparse.issparse(documents):
        counts = documents.tocsr().astype(np.float64)
        if counts.ndim != 2 or counts.shape[1] != objects:
            raise ArgumentError(
                f"documents have shape {counts.shape}; give counts [documents, {objects}], a "
                "column an object"
            )
    elif isinstance(documents, str | np.ndarray | Tensor) or not isinstance(documents, Iterable):
        raise ArgumentError(
            f"documents are {type(documents).__name__}: give counts (scipy.sparse, [documents, V]) "
            "or a list of id arrays"
        )
    else:
        lists = [_ids(number, document, objects) for number, document in enumerate(documents)]
        ids = np.concatenate([np.empty(0, dtype=np.int64), *lists])
        starts = np.cumsum([0, *map(len, lists)])
        counts = sparse.csr_array((np.ones(len(ids)), ids, starts), shape=(len(lists), objects))
    counts.sum_duplicates()
    if not bool(np.isfinite(counts.data).all()) or bool((counts.data < 0).any()):
        raise ArgumentError(
            "documents hold NaN, infinity or negative counts: give how often each object occurs"
        )
    counts.eliminate_zeros()
    if counts.nnz == 0:
        none = f"none of the {counts.shape[0]} documents holds an object"
        raise ArgumentError(f"{none}: there is nothing to choose by")
    return counts


def _ids(number: int, document: Any, objects: int) -> NDArray[np.int64]:
    ids = _array(f"document {number}", document)
    if ids.size == 0:
        return np.empty(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ArgumentError(
            f"document {number} is {ids.dtype} of shape {ids.shape}: give the ids of its objects, "
            "[n]"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= objects:
        raise ArgumentError(
            f"document {number} holds ids from {ids.min()} to {ids.max()}: they are 0 to "
            f"{objects - 1}"
        )
    found: NDArray[np.int64] = ids.astype(np.int64)
    return found


def labels_for(labels: Any, documents: int) -> tuple[NDArray[np.int64], int]:  # -> [n], classes
    """Return the class of each document, from 0, and the number of classes."""
    given = _array("labels", labels)
    if given.shape != (documents,):
        raise ArgumentError(
            f"labels have shape {given.shape}; give one for each of the {documents} documents"
        )
    if given.dtype.kind == "f" and not bool(np.isfinite(given).all()):
        raise ArgumentError("labels hold NaN or infinity: give the class of each document")
    classes, found = np.unique(given, return_inverse=True)
    if len(classes) < 2:
        raise ArgumentError(
            f"all {documents} labels are {given[0]!r}: nothing tells words apart with one class"
        )
    return found.astype(np.int64), len(classes)


def as_features(features: Any) -> Any:  # -> floats [V, f], an array or scipy CSR
    """Return the features of each object as float32 or float64."""
    found = features.tocsr() if hasattr(features, "tocsr") else _array("features", features)
    if found.ndim != 2 or 0 in found.shape:
        raise ArgumentError(
            f"features have shape {found.shape}; give a row for each object, [V, f]"
        )
    if found.dtype.kind not in "fiub":
        raise ArgumentError(f"features are {found.dtype}: give numbers")
    if found.dtype not in (np.float32, np.float64):
        found = found.astype(np.float32 if found.dtype == np.float16 else np.float64)
    values = found if isinstance(found, np.ndarray) else found.data
    # the squares of distances must be numbers
    largest = np.sqrt(np.finfo(values.dtype).max / found.shape[1]) / 4
    if values.size and not bool(np.abs(values).max() < largest):
        raise ArgumentError(
            f"features hold NaN, infinity or numbers beyond {largest:.0e}, whose squares overflow: "
            "clean them"
        )
    return found


def _array(name: str, given: Any) -> NDArray[Any]:
    if isinstance(given, Tensor):
        given = given.detach().cpu()
        return np.asarray(given.float() if given.dtype == torch.bfloat16 else given)
    try:
        return np.asarray(given)
    except ValueError:
        raise ArgumentError(f"{name}: lists of different lengths are no array") from None


def dense_rows(features: Any, ids: NDArray[np.int64]) -> NDArray[Any]:  # [V, f], [K] -> [K, f]
    """Return the features of some objects as an array."""
    rows = features[ids]
    found: NDArray[Any] = rows if isinstance(rows, np.ndarray) else rows.toarray()
    return found
