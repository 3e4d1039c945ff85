"""Anchors by TF-IDF: objects frequent in some documents but not in all."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from featherbed.anchors.given import documents_for, sklearn
from featherbed.anchors.objects import ObjectAnchors, highest


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
        return highest(
            torch.from_numpy(np.asarray(weighted.sum(axis=0), dtype=np.float64).reshape(-1)), count
        )
