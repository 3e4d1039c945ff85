"""Anchors by TF-IDF: objects that are frequent where they occur and do not occur everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from featherbed.anchors.given import documents_for, sklearn
from featherbed.anchors.objects import ObjectAnchors, highest


class TfIdf(ObjectAnchors):
    """The objects with the largest sum of TF-IDF over the documents are the anchors (Liang et al. 2021, section 2.1).

        score(w) = Σ_D c_Dw idf_w / ||c_D idf||_2,    idf_w = 1 + log((1 + n) / (1 + n_w))

    with c_Dw the count of w in document D, n documents and n_w of them with w: scikit-learn's TF-IDF, every document of
    length 1. Of equal scores the lower id comes first; objects in no document have the score 0.

    Args:
        documents: counts as a scipy.sparse matrix [documents, V], or a list with an array of ids for each document.
        transform_std: spread of the other rows' first weights, as in ``fb.HalfNormal``.

    >>> import featherbed as fb
    >>> documents = [[0, 1, 1], [0, 1, 1], [0, 2], [0, 3]]  # 1 is as frequent as 0, but not everywhere
    >>> fb.AnchorTable(5, 4, anchors=3, init=TfIdf(documents)).anchor_ids
    tensor([1, 0, 2])
    """

    def __init__(self, documents: Any, *, transform_std: float | None = None) -> None:
        super().__init__(transform_std)
        self.documents = documents

    def choose(self, objects: int, count: int, generator: torch.Generator | None) -> Tensor:  # noqa: ARG002 - nothing is drawn
        """Return the highest scores, highest first."""
        counts = documents_for(self.documents, objects)
        weighted = sklearn("feature_extraction.text").TfidfTransformer().fit_transform(counts)
        return highest(
            torch.from_numpy(np.asarray(weighted.sum(axis=0), dtype=np.float64).reshape(-1)), count
        )
