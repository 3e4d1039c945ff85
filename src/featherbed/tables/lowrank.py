"""Low rank: every row is a mixture of the same r atoms."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from featherbed.packed.band import Band
from featherbed.packed.codes import Every
from featherbed.packed.matrix import Matrix
from featherbed.rows import HeldRows, new_rows, row_parameter
from featherbed.tables.codes import Codes
from featherbed.tables.fitting import low_rank, scales_of, share_of_unit_rows
from featherbed.tables.table import Table, new_parameter, normal, positive, to_numpy


class LowRankTable(Table):
    """E = B A with B [V, r] and A [r, d].

    ``sparse``: gradients of B hold the rows of the batch only, for optimizers of this library.

    >>> import torch
    >>> LowRankTable(1000, 16, rank=4)(torch.tensor([3])).shape
    torch.Size([1, 16])
    """

    example: ClassVar[dict[str, Any]] = {"rank": 3}
    values = HeldRows()  # [V, r]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        rank: int,
        sparse: bool = False,
        padding_idx: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.rank = positive("rank", rank)
        self.sparse = bool(sparse)
        self.values = new_rows(
            new_parameter(
                (num_embeddings, rank), normal(1.0, generator), dtype=dtype, device=device
            ),
            self.sparse,
        )
        spread = normal(share_of_unit_rows(rank), generator)
        self.atoms = new_parameter(
            (rank, embedding_dim), spread, dtype=dtype, device=device
        )  # [r, d]

    def codes(self, ids: Tensor) -> Codes:
        """Every atom, weighted by the row of B."""
        return Codes(None, row_parameter(self, "values")(ids), self.atoms)

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:  # noqa: ARG002 - its values are dense
        """Dense values over the atoms."""
        stored = Matrix.encode(to_numpy(self.values), values)
        return [
            Band(
                self.num_embeddings,
                Every(),
                stored,
                Matrix.encode(to_numpy(self.atoms), dictionary),
            )
        ]

    def parameter_count(self) -> int:
        """V r + r d."""
        return self.values.numel() + self.atoms.numel()

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Truncated SVD: the best of its rank (Eckart and Young 1936), also where rows are weighed by ``weights``."""
        root = scales_of(weights, matrix)
        values, atoms = low_rank(matrix if root is None else matrix * root, self.rank)
        self.values.copy_(values if root is None else values / root)
        self.atoms.copy_(atoms)
