"""Selection of words, as anchors or to be kept: by frequency, TF-IDF, clusters or labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featherbed.anchors import (
    Coreset,
    Frequency,
    FrequencyThenClusters,
    GroupLasso,
    KMeansPlusPlus,
    ObjectAnchors,
    TfIdf,
    VocabularyDropout,
)
from featherbed.errors import ArgumentError, DataError
from featherbed.graphs import Graph
from featherbed.io.opening import find_data

GLOVE = "glove.6B.50d.top60k.npz"
SUBWORD_MARKS = "Ġ▁#"  # of tokenizers, at the start or end of a subword


@dataclass(frozen=True)
class Lexicon:
    """The vocabulary of a training text, and statistics that selections ask for.

    ``documents`` returns counts [documents, V], ``cooccurrence`` counts of pairs [V, V] (both
    scipy.sparse), ``related`` a graph of the pairs that co-occur often enough; ``samples`` is the
    number of training examples.

    >>> int(Lexicon(("<pad>", "<unk>", "news"), np.array([0, 0, 9]), padding_idx=0).counts.sum())
    9
    """

    words: Sequence[str]
    counts: NDArray[np.int64]  # [V]
    documents: Callable[[], Any] | None = None
    labels: NDArray[np.int64] | None = None  # [documents]
    cooccurrence: Callable[[], Any] | None = None
    related: Callable[[], Graph] | None = None
    padding_idx: int | None = None
    samples: int | None = None

    def show(self, ids: Tensor, limit: int = 10) -> str:
        """Return the first of some words, for a note."""
        first = ", ".join(self.words[int(i)] for i in ids[:limit])
        return first if len(ids) <= limit else f"{first} and {len(ids) - limit:,} more"


class WordAnchors(ObjectAnchors):
    """Anchors at given words; atoms start at ``rows`` [K, d] if given."""

    def __init__(self, ids: Tensor, rows: Tensor | None, transform_std: float) -> None:
        super().__init__(transform_std)
        self.ids, self.rows = ids, rows

    def choose(self, *_: object) -> Tensor:
        """Return the ids of the words."""
        return self.ids

    def vectors(self, *_: object) -> Tensor | None:
        """Return the initial atoms."""
        return self.rows


def select_words(
    selection: str, lexicon: Lexicon, count: int, dim: int, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:  # -> [K], [K, d]
    """Return the selected words, best first, without padding, and their initial atoms if known."""
    padding = -1 if lexicon.padding_idx is None else lexicon.padding_idx
    available = len(lexicon.words) - (padding >= 0)
    if not 1 <= count <= available:
        raise ArgumentError(
            f"{count} words are to be selected, the vocabulary has {available:,}: select fewer"
        )
    if selection == "random":
        order = torch.randperm(len(lexicon.words), generator=generator)
        return order[order != padding][:count], None
    candidates, selector = _selector(selection, lexicon)
    order = selector.choose(len(candidates), min(count + 1, len(candidates)), generator)
    order = order[candidates[order] != padding][:count]
    if len(order) < count:
        raise ArgumentError(
            f"selection={selection}: only {len(order):,} words have the statistics or vectors it "
            f"needs, {count:,} are to be selected; select fewer"
        )
    return candidates[order], selector.vectors(order, dim)


def _selector(selection: str, lexicon: Lexicon) -> tuple[Tensor, ObjectAnchors]:
    """Return the candidate words and the object that selects among them."""
    everything = torch.arange(len(lexicon.words))
    match selection:
        case "frequency":
            return everything, Frequency(lexicon.counts)
        case "tfidf":
            return everything, TfIdf(require(selection, "documents", lexicon.documents)())
        case "lasso" | "vvd":
            documents = require(selection, "documents", lexicon.documents)
            labels = require(selection, "labels", lexicon.labels)
            method = GroupLasso if selection == "lasso" else VocabularyDropout
            return everything, method(documents(), labels)
        case "kmeans-cooccurrence" | "coreset":
            counts = require(selection, "co-occurrence counts", lexicon.cooccurrence)()
            features = counts.astype(np.float64).log1p().tocsr()
            known = np.flatnonzero(np.diff(features.indptr))
            clusters = Coreset if selection == "coreset" else KMeansPlusPlus
            return torch.from_numpy(known), clusters(features[known])
    known, vectors = glove_vectors(lexicon.words)
    if selection == "kmeans-glove":
        return torch.from_numpy(known), KMeansPlusPlus(vectors)
    return torch.from_numpy(known), FrequencyThenClusters(lexicon.counts[known], vectors)


def require(selection: str, name: str, value: Any) -> Any:
    """Return a statistic, or raise ``ArgumentError`` if the text has none."""
    if value is None:
        raise ArgumentError(
            f"selection={selection} needs {name}, which this text does not have: "
            "use frequency or random"
        )
    return value


def glove_vectors(
    words: Sequence[str],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:  # -> ids [n], vectors [n, 50]
    """Return the ids of the words that GloVe knows, and their vectors, normalized."""
    path = find_data("glove") / GLOVE
    try:
        with np.load(path, allow_pickle=False) as stored:
            known = stored["words"].item().decode().split("\n")
            vectors: NDArray[np.float32] = stored["vectors"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read as GloVe vectors: {error}") from None
    row_of = {word: row for row, word in enumerate(known)}
    rows = np.array([row_of.get(word.strip(SUBWORD_MARKS).lower(), -1) for word in words])
    ids: NDArray[np.int64] = np.flatnonzero(rows >= 0)
    found = vectors[rows[ids]].astype(np.float32)
    return ids, found / np.linalg.norm(found, axis=1, keepdims=True).clip(min=1e-12)
