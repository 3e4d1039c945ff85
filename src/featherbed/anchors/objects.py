"""Anchors that are objects: selected ids of a table."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from featherbed.anchors.given import documents_for, sklearn
from featherbed.anchors.random import HalfNormal
from featherbed.errors import ArgumentError


class ObjectAnchors(ABC):
    """Selects K of the V objects as anchors: ``choose`` selects, ``vectors`` gives atoms.

    An anchor object initially has weight 1 for itself and 0 for other anchors; other rows, and
    atoms without known vectors, are initialized as by ``fb.HalfNormal``, with ``transform_std``.
    """

    def __init__(self, transform_std: float | None = None) -> None:
        self.transform_std = HalfNormal(transform_std).transform_std

    @abstractmethod
    def choose(
        self, objects: int, count: int, generator: torch.Generator | None
    ) -> Tensor:  # -> int64 [K]
        """Return ``count`` distinct ids below ``objects``, the best anchors first."""

    def vectors(self, ids: Tensor, width: int) -> Tensor | None:  # noqa: ARG002 - some know - [K] -> [K, d]
        """Return initial atoms of these objects, None if unknown; zero rows are unknown."""
        return None

    def fill(
        self, atoms: Tensor, transform: Tensor, nonnegative: bool, generator: torch.Generator | None
    ) -> Tensor:
        """Fill atoms and transform; return the ids of the anchors [K]."""
        objects, count = len(transform), len(atoms)
        if count > objects:
            few = f"there are only {objects} objects that could be anchors"
            raise ArgumentError(f"anchors={count}: {few}; use fewer")
        HalfNormal(self.transform_std).fill(atoms, transform, nonnegative, generator)
        ids = self.choose(objects, count, generator)
        known = self.vectors(ids, atoms.shape[1])
        if known is not None:
            # an atom of zeros would give its weights no gradient
            there = known.any(dim=1).to(atoms.device)
            atoms[there] = known.to(atoms)[there]
        return ids

    def __repr__(self) -> str:
        """Show the arguments: data by name, other settings by value if not the default."""
        shown = []
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY:
                value = getattr(self, name)
                shown += [] if value == parameter.default else [f"{name}={value!r}"]
            elif name != "self":
                shown.append(name)
        return f"{type(self).__name__}({', '.join(shown)})"


def scores_for(name: str, scores: Any, objects: int) -> Tensor:  # -> float64 [V]
    """Return one finite number of at least 0 for each object, or raise an error."""
    try:
        found = torch.as_tensor(scores).detach().cpu().double()
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(
            f"{name} are {type(scores).__name__}: give one number for each of the {objects} objects"
        ) from None
    if found.shape != (objects,):
        raise ArgumentError(
            f"{name} have shape {tuple(found.shape)}; give one for each of the {objects} objects"
        )
    if not bool(torch.isfinite(found).all()) or bool((found < 0).any()):
        raise ArgumentError(
            f"{name} hold NaN, infinity or negative numbers: give how often each object occurs"
        )
    return found


def highest(scores: Tensor, count: int) -> Tensor:  # [V] -> int64 [K]
    """Return the ids of the highest scores in decreasing order; ties by lower id."""
    return torch.argsort(scores, descending=True, stable=True)[:count]


class Frequency(ObjectAnchors):
    """The most frequent objects are the anchors (Liang et al. 2021, section 2.1).

    Args:
        counts: number of occurrences of each object, [V].
        transform_std: standard deviation of the other rows' initial weights, as in
            ``fb.HalfNormal``.

    >>> import featherbed as fb
    >>> table = fb.AnchorTable(5, 4, anchors=2, init=Frequency([3, 9, 1, 7, 2]))
    >>> table.anchor_ids
    tensor([1, 3])
    >>> table.transform[1].tolist(), table.transform[3].tolist()
    ([1.0, 0.0], [0.0, 1.0])
    """

    def __init__(self, counts: Any, *, transform_std: float | None = None) -> None:
        super().__init__(transform_std)
        self.counts = counts

    def choose(self, objects: int, count: int, generator: torch.Generator | None) -> Tensor:  # noqa: ARG002 - nothing is drawn
        """Return the most frequent objects, in decreasing order."""
        return highest(scores_for("counts", self.counts, objects), count)


class TfIdf(ObjectAnchors):
    """The objects with the largest total TF-IDF are the anchors (Liang et al. 2021, section 2.1).

        score(w) = Σ_D c_Dw idf_w / ||c_D idf||_2,    idf_w = 1 + log((1 + n) / (1 + n_w))

    with the count c_Dw of w in document D, n documents and n_w documents with w: scikit-learn's
    TF-IDF with documents of length 1. Ties are broken by the lower id; objects in no document have
    score 0.

    Args:
        documents: counts as a scipy.sparse matrix [documents, V], or a list with an array of ids
            per document.
        transform_std: standard deviation of the other rows' initial weights, as in
            ``fb.HalfNormal``.

    >>> import featherbed as fb
    >>> documents = [[0, 1, 1], [0, 1, 1], [0, 2], [0, 3]]  # 1 is not everywhere
    >>> fb.AnchorTable(5, 4, anchors=3, init=TfIdf(documents)).anchor_ids
    tensor([1, 0, 2])
    """

    def __init__(self, documents: Any, *, transform_std: float | None = None) -> None:
        super().__init__(transform_std)
        self.documents = documents

    def choose(self, objects: int, count: int, generator: torch.Generator | None) -> Tensor:  # noqa: ARG002 - nothing is drawn
        """Return the highest scores in decreasing order."""
        counts = documents_for(self.documents, objects)
        weighted = sklearn("feature_extraction.text").TfidfTransformer().fit_transform(counts)
        scores = np.asarray(weighted.sum(axis=0), dtype=np.float64).reshape(-1)
        return highest(torch.from_numpy(scores), count)
