"""Anchor & Transform: every row is a sparse, non-negative mixture of a few anchors."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.anchors.random import AnchorInit, HalfNormal
from featherbed.errors import ArgumentError
from featherbed.packed.band import Band
from featherbed.packed.codes import sparse_layout
from featherbed.packed.matrix import Matrix
from featherbed.tables.codes import Codes
from featherbed.tables.fitting import low_rank, semi_nonnegative
from featherbed.tables.table import Table, positive, to_numpy


class AnchorTable(Table):
    """E = T A: a sparse transform T [V, K] over K anchors A [K, d].

    Liang et al. 2021 (ANT), equation 1: minimise task loss + lambda ||T||_1 over T >= 0. The penalty is the optimizer's
    business: ``fb.Yogi(parameters, penalties={table.transform: fb.NonNegativeL1(lam)})``. ``nonnegative`` decides how the
    transform starts and how ``from_dense`` fits it.

    >>> import torch
    >>> table = AnchorTable(1000, 16, anchors=8)
    >>> table.transform.shape, table.atoms.shape, table(torch.tensor([3])).shape
    (torch.Size([1000, 8]), torch.Size([8, 16]), torch.Size([1, 16]))
    """

    example: ClassVar[dict[str, Any]] = {"anchors": 5}

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        anchors: int,
        nonnegative: bool = True,
        padding_idx: int | None = None,
        init: AnchorInit | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.anchors = positive("anchors", anchors)
        self.nonnegative = nonnegative
        if init is not None and not hasattr(init, "fill"):
            raise ArgumentError(f"init={init!r}: give an object such as fb.HalfNormal() or fb.Xavier()")
        self.init: AnchorInit = HalfNormal() if init is None else init
        self.atoms = nn.Parameter(torch.empty(anchors, embedding_dim, dtype=dtype, device=device))  # [K, d]
        self.transform = nn.Parameter(torch.empty(num_embeddings, anchors, dtype=dtype, device=device))  # [V, K]
        with torch.no_grad():
            self.init.fill(self.atoms, self.transform, nonnegative, generator)

    def codes(self, ids: Tensor) -> Codes:
        """Every anchor, weighted by the row of the transform."""
        return Codes(None, F.embedding(ids, self.transform), self.atoms)

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """Sparse codes over the anchors, in the layout asked for or the smallest."""
        codes, left = sparse_layout(to_numpy(self.transform), layout, values)
        matrix = None if left is None else Matrix.encode(left, values)
        return [Band(self.num_embeddings, codes, matrix, Matrix.encode(to_numpy(self.atoms), dictionary))]

    def parameter_count(self) -> int:
        """nnz(T) + K d, as the paper's tables count."""
        return int(torch.count_nonzero(self.transform)) + self.atoms.numel()

    def fit_dense(self, matrix: Tensor) -> None:
        """Fit T A to the matrix: semi-non-negative factorisation, or truncated SVD where T may be negative."""
        fit = semi_nonnegative if self.nonnegative else low_rank
        transform, atoms = fit(matrix, self.anchors)
        self.transform.copy_(transform)
        self.atoms.copy_(atoms)
