"""The networks behind stored classifiers, in numpy: what is computed with the rows of a text's words.

    bag   x = mean of the rows of the words; with a norm relu(scale * x + shift)
    cnn   x = for each width w relu(b + max_t Σ_{j < w} W_j row(t + j)), t over the places of a text padded to its length
    then  L_n relu( ... relu(L_1 x + b_1) ... ) + b_n

A window of padding alone gives b, as it does in training: it takes part where the text leaves room for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.errors import ArgumentError, FormatError
from featherbed.packed.matrix import Floats
from featherbed.packed.table import PackedTable

MODELS = ("bag", "cnn")
MOST_WIDTH, MOST_LENGTH = 64, 1 << 20

Ids = NDArray[np.int64]
Weights = Mapping[str, NDArray[np.floating]]


class Shape(NamedTuple):
    """What a network is made of: ``widths`` and ``channels`` of a cnn, ``norm`` of a bag, ``hidden`` layers before the last."""

    kind: str
    dim: int
    classes: int
    length: int
    norm: bool = False
    widths: tuple[int, ...] = ()
    channels: int = 0
    hidden: tuple[int, ...] = ()

    def arrays(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by name.

        >>> Shape("bag", 8, 4, 100).arrays()
        {'layer0.weight': (4, 8), 'layer0.bias': (4,)}
        >>> list(Shape("cnn", 8, 4, 100, widths=(3, 5), channels=10).arrays().values())
        [(10, 24), (10,), (10, 40), (10,), (4, 20), (4,)]
        """
        found: dict[str, tuple[int, ...]] = {}
        for width in self.widths:
            found[f"width{width}.weight"] = (self.channels, width * self.dim)
            found[f"width{width}.bias"] = (self.channels,)
        if self.norm:
            found |= {"norm.scale": (self.dim,), "norm.shift": (self.dim,)}
        first = len(self.widths) * self.channels if self.kind == "cnn" else self.dim
        for number, (given, made) in enumerate(pairwise((first, *self.hidden, self.classes))):
            found |= {f"layer{number}.weight": (made, given), f"layer{number}.bias": (made,)}
        return found


def check_shape(shape: Shape, kind: type[ArgumentError] | type[FormatError]) -> None:
    """Refuse a network that is none: no model of that name, windows wider than a text, parts of the other kind."""
    if shape.kind not in MODELS:
        raise kind(f"kind={shape.kind!r}: use one of {', '.join(MODELS)}")
    if not 1 <= shape.length <= MOST_LENGTH:
        raise kind(f"length={shape.length}: give a whole number of words from 1 to {MOST_LENGTH:,}")
    if shape.kind == "bag" and (shape.widths or shape.channels):
        raise kind("a bag has no widths and no channels: they belong to a cnn")
    if shape.kind == "cnn" and (shape.norm or not shape.widths or not shape.channels):
        raise kind("a cnn has widths and channels, and no norm: that belongs to a bag")
    if len(set(shape.widths)) < len(shape.widths) or any(not 1 <= width <= shape.length for width in shape.widths):
        raise kind(f"widths={list(shape.widths)}: give different numbers of words, none above the length {shape.length}")


def scores(table: PackedTable, weights: Weights, shape: Shape, parts: list[Ids]) -> NDArray[np.float64]:  # [n, classes]
    """Return the logits of the classes for documents of word ids, none longer than ``shape.length``."""
    x = _windows(table, weights, shape, parts) if shape.kind == "cnn" else _means(table, weights, shape, parts)
    last = len(shape.hidden)
    for number in range(last + 1):
        x = x @ weights[f"layer{number}.weight"].T + weights[f"layer{number}.bias"]
        x = x if number == last else np.maximum(x, 0)
    return x.astype(np.float64)


def _means(table: PackedTable, weights: Weights, shape: Shape, parts: list[Ids]) -> NDArray[Any]:  # -> [n, d]
    offsets = np.cumsum([0, *map(len, parts)])
    x = table.bag(np.concatenate(parts), offsets, mode="mean", include_last_offset=True)
    return np.maximum(x * weights["norm.scale"] + weights["norm.shift"], 0) if shape.norm else x


def _windows(table: PackedTable, weights: Weights, shape: Shape, parts: list[Ids]) -> NDArray[Any]:  # -> [n, widths * channels]
    """Convolve all documents in one go: each is followed by zero rows, so that no window reaches into the next."""
    dim, most = shape.dim, max(shape.widths)
    lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
    ends = np.cumsum(lengths + most)
    starts = ends - lengths - most
    count = int(ends[-1])
    rows = np.zeros((count + most, dim), dtype=np.float32)
    places = np.arange(int(lengths.sum())) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    rows[places] = table[np.concatenate(parts)]
    found = []
    for width in shape.widths:
        weight = weights[f"width{width}.weight"]
        sums = np.zeros((count, shape.channels), dtype=np.float32)
        for at in range(width):
            sums += rows[at : at + count] @ weight[:, at * dim : (at + 1) * dim].T
        last = starts + np.minimum(lengths, shape.length - width)  # a window that begins at a text's end sees only zeros
        best = np.maximum.reduceat(sums, np.stack([starts, last + 1], axis=1).reshape(-1), axis=0)[::2]
        found.append(np.maximum(best + weights[f"width{width}.bias"], 0))
    return np.concatenate(found, axis=1)


def arrays_of(state: Mapping[str, ArrayLike], eps: float = 1e-5) -> dict[str, Floats]:
    """Return the weights of a trained classifier as they are stored, from its ``state_dict()`` as numpy arrays.

    Filters [channels, d, w] become [channels, w * d]; a batch norm behind a linear layer is folded into it; the table's own
    entries are left out. Widths of a cnn: ``widths_of`` the same.

    >>> state = {"windows.0.weight": np.ones((5, 8, 3)), "windows.0.bias": np.zeros(5)}
    >>> state |= {"output.weight": np.ones((2, 5)), "output.bias": np.zeros(2), "words.rows": np.ones((9, 8))}
    >>> {name: array.shape for name, array in arrays_of(state).items()}
    {'width3.weight': (5, 24), 'width3.bias': (5,), 'layer0.weight': (2, 5), 'layer0.bias': (2,)}
    """
    given = {name: np.asarray(array, dtype=np.float64) for name, array in state.items() if not name.startswith("words.")}
    found: dict[str, NDArray[np.float64]] = {}
    for number, width in enumerate(widths_of(state)):
        found[f"width{width}.weight"] = (
            given[f"windows.{number}.weight"].transpose(0, 2, 1).reshape(len(given[f"windows.{number}.bias"]), -1)
        )
        found[f"width{width}.bias"] = given[f"windows.{number}.bias"]
    layer = 0
    if "between.0.weight" in given:
        found["norm.scale"], found["norm.shift"] = _norm(given, "between.0", eps)
        scale, shift = _norm(given, "between.3", eps)
        found["layer0.weight"] = given["between.2.weight"] * scale[:, None]
        found["layer0.bias"] = given["between.2.bias"] * scale + shift
        layer = 1
    found |= {f"layer{layer}.weight": given["output.weight"], f"layer{layer}.bias": given["output.bias"]}
    return {name: array.astype(np.float32) for name, array in found.items()}


def widths_of(state: Mapping[str, ArrayLike]) -> tuple[int, ...]:
    """Return how many words the windows of a cnn hold; of a bag, ().

    >>> widths_of({"windows.0.weight": np.ones((5, 8, 3)), "windows.1.weight": np.ones((5, 8, 4))})
    (3, 4)
    """
    count = sum(name.startswith("windows.") and name.endswith(".weight") for name in state)
    return tuple(np.shape(state[f"windows.{number}.weight"])[2] for number in range(count))


def _norm(state: Mapping[str, NDArray[np.float64]], name: str, eps: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return scale and shift of a batch norm as it acts when serving: g (x - mean) / sqrt(var + eps) + b."""
    scale = state[f"{name}.weight"] / np.sqrt(state[f"{name}.running_var"] + eps)
    return scale, state[f"{name}.bias"] - state[f"{name}.running_mean"] * scale
