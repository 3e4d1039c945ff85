"""Choosing words by what a text tells of them: how often they occur, in which documents, near which others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featherbed.anchors import (
    FrequencyThenClusters,
    GroupLasso,
    KMeansPlusPlus,
    TfIdf,
    VocabularyDropout,
)
from featherbed.anchors.objects import Frequency, ObjectAnchors
from featherbed.errors import ArgumentError, DataError
from featherbed.graphs import Graph
from featherbed.tasks.data import find_data

CHOICES = (
    "random",
    "frequency",
    "tfidf",
    "kmeans-glove",
    "kmeans-cooccurrence",
    "frequency-clusters",
    "lasso",
    "vvd",
)
GLOVE = "glove.6B.50d.top60k.npz"
MARKS = "Ġ▁#"  # by which sub-words say where they stand in a word


@dataclass(frozen=True)
class Lexicon:
    """What choosing words may ask of a text.

    ``documents`` makes counts [documents, V], ``cooccurrence`` the counts of pairs [V, V] (scipy.sparse) or a graph of pairs
    that count already; ``related`` makes that graph itself, of pairs that meet so often, where it is kept in a cache;
    ``samples`` is the number of training examples, of which variational tables want to know.

    >>> Lexicon(("<pad>", "<unk>", "news"), np.array([0, 0, 9]), padding_idx=0).size
    3
    """

    words: Sequence[str]
    counts: NDArray[np.int64]  # [V]
    documents: Callable[[], Any] | None = None
    labels: NDArray[np.int64] | None = None  # [documents]
    cooccurrence: Callable[[], Any] | None = None
    padding_idx: int | None = None
    samples: int | None = None
    related: Callable[[int], Graph] | None = None

    @property
    def size(self) -> int:
        """V."""
        return len(self.words)


class Chosen(ObjectAnchors):
    """Words chosen before the table is made; atoms start at ``known`` [K, d] where that is given."""

    def __init__(self, ids: Tensor, known: Tensor | None, transform_std: float) -> None:
        super().__init__(transform_std)
        self.ids, self.known = ids, known

    def choose(self, objects: int, count: int, generator: torch.Generator | None) -> Tensor:  # noqa: ARG002 - all is chosen
        """Return them."""
        return self.ids

    def vectors(self, ids: Tensor, width: int) -> Tensor | None:  # noqa: ARG002 - known in the order of the ids
        """Return where their atoms start."""
        return self.known


def choose_words(
    by: str, lexicon: Lexicon, count: int, dim: int, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:  # -> [K], [K, d]
    """Return the words of a choice, best first, never the padding, and where their atoms start if that is known."""
    free = lexicon.size - (lexicon.padding_idx is not None)
    if not 1 <= count <= free:
        raise ArgumentError(
            f"{count} words are asked for: the vocabulary has {free:,} to choose among; ask for fewer"
        )
    if by == "random":
        order = torch.randperm(lexicon.size, generator=generator)
        return order[order != (-1 if lexicon.padding_idx is None else lexicon.padding_idx)][
            :count
        ], None
    candidates, chooser = chooser_of(by, lexicon)
    more = min(count + 1, len(candidates))  # one of them may be the padding
    local = chooser.choose(len(candidates), more, generator)
    local = local[
        candidates[local] != (-1 if lexicon.padding_idx is None else lexicon.padding_idx)
    ][:count]
    if len(local) < count:
        raise ArgumentError(
            f"by={by!r}: only {len(local):,} words have what it goes by, of {count:,} asked for; ask for fewer"
        )
    return candidates[local], chooser.vectors(local, dim)


def chooser_of(by: str, lexicon: Lexicon) -> tuple[Tensor, ObjectAnchors]:
    """Return the words a choice is made among and what makes it; vectors are known of some words only."""
    everyone = torch.arange(lexicon.size)
    match by:
        case "frequency":
            return everyone, Frequency(lexicon.counts)
        case "tfidf":
            return everyone, TfIdf(needed(by, "documents", lexicon.documents)())
        case "lasso" | "vvd":
            documents, labels = (
                needed(by, "documents", lexicon.documents),
                needed(by, "labels", lexicon.labels),
            )
            return everyone, (GroupLasso if by == "lasso" else VocabularyDropout)(
                documents(), labels
            )
        case "kmeans-cooccurrence":
            features = needed(by, "co-occurrence counts", lexicon.cooccurrence)()
            features = (
                (features.matrix if isinstance(features, Graph) else features)
                .astype(np.float64)
                .log1p()
            )
            known = np.flatnonzero(np.diff(features.tocsr().indptr))
            return torch.from_numpy(known), KMeansPlusPlus(features.tocsr()[known])
    known, vectors = glove_vectors(lexicon.words)
    if by == "kmeans-glove":
        return torch.from_numpy(known), KMeansPlusPlus(vectors)
    return torch.from_numpy(known), FrequencyThenClusters(lexicon.counts[known], vectors)


def needed(by: str, name: str, found: Any) -> Any:
    """Return what a choice needs, or say that there is none."""
    if found is None:
        raise ArgumentError(
            f"by={by!r} needs {name}, which this text does not have: take frequency or random"
        )
    return found


def glove_vectors(
    words: Sequence[str],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:  # -> ids [n], vectors [n, 50]
    """Return the words that GloVe knows and their vectors, each of length 1."""
    path = find_data("glove") / GLOVE
    try:
        with np.load(path, allow_pickle=False) as stored:
            places = {
                word: at for at, word in enumerate(stored["words"].item().decode().split("\n"))
            }
            vectors: NDArray[np.float32] = stored["vectors"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read as GloVe vectors: {error}") from None
    at = np.array([places.get(word.strip(MARKS).lower(), -1) for word in words])
    found: NDArray[np.int64] = np.flatnonzero(at >= 0)
    rows = vectors[at[found]].astype(np.float32)
    return found, rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(min=1e-12)


def shown(ids: Tensor, lexicon: Lexicon, most: int = 10) -> str:
    """Return the first words of a choice, for a note."""
    first = ", ".join(lexicon.words[int(i)] for i in ids[:most])
    return first if len(ids) <= most else f"{first} and {len(ids) - most:,} more"
