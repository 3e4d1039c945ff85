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
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, FormatError
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
    if len(set(shape.widths)) < len(shape.widths) or any(
        not 1 <= width <= shape.length for width in shape.widths
    ):
        raise kind(
            f"widths={list(shape.widths)}: give different numbers of words, none above the length {shape.length}"
        )


def scores(
    table: PackedTable, weights: Weights, shape: Shape, parts: list[Ids]
) -> NDArray[np.float64]:  # [n, classes]
    """Return the logits of the classes for documents of word ids, none longer than ``shape.length``."""
    x = (
        _windows(table, weights, shape, parts)
        if shape.kind == "cnn"
        else _means(table, weights, shape, parts)
    )
    last = len(shape.hidden)
    for number in range(last + 1):
        x = x @ weights[f"layer{number}.weight"].T + weights[f"layer{number}.bias"]
        x = x if number == last else np.maximum(x, 0)
    return x.astype(np.float64)


def _means(
    table: PackedTable, weights: Weights, shape: Shape, parts: list[Ids]
) -> NDArray[Any]:  # -> [n, d]
    offsets = np.cumsum([0, *map(len, parts)])
    x = table.bag(np.concatenate(parts), offsets, mode="mean", include_last_offset=True)
    return np.maximum(x * weights["norm.scale"] + weights["norm.shift"], 0) if shape.norm else x


def _windows(
    table: PackedTable, weights: Weights, shape: Shape, parts: list[Ids]
) -> NDArray[Any]:  # -> [n, widths * channels]
    """Convolve all documents in one go: each is followed by zero rows, so that no window reaches into the next."""
    dim, most = shape.dim, max(shape.widths)
    lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
    ends = np.cumsum(lengths + most)
    starts = ends - lengths - most
    count = int(ends[-1])
    rows = np.zeros((count + most, dim), dtype=np.float32)
    places = np.arange(int(lengths.sum())) + np.repeat(
        starts - np.cumsum(lengths) + lengths, lengths
    )
    rows[places] = table[np.concatenate(parts)]
    found = []
    for width in shape.widths:
        weight = weights[f"width{width}.weight"]
        sums = np.zeros((count, shape.channels), dtype=np.float32)
        for at in range(width):
            sums += rows[at : at + count] @ weight[:, at * dim : (at + 1) * dim].T
        last = starts + np.minimum(
            lengths, shape.length - width
        )  # a window that begins at a text's end sees only zeros
        best = np.maximum.reduceat(sums, np.stack([starts, last + 1], axis=1).reshape(-1), axis=0)[
            ::2
        ]
        found.append(np.maximum(best + weights[f"width{width}.bias"], 0))
    return np.concatenate(found, axis=1)
