"""Low rank: every row is a linear combination of the same r atoms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from featherbed.checks import check_integer
from featherbed.optim.lazy import RowParameter
from featherbed.packed.band import Band, Every
from featherbed.tables.codes import Codes
from featherbed.tables.fitting import low_rank, share_of_unit_rows
from featherbed.tables.rows import empty_parameter, encode
from featherbed.tables.table import Table


class LowRankTable(Table):
    """E = B A with B [V, r] and A [r, d].

    ``sparse``: gradients of B contain the rows of the batch only, for optimizers of this library.

    >>> import torch
    >>> LowRankTable(1000, 16, rank=4)(torch.tensor([3])).shape
    torch.Size([1, 16])
    """

    example: ClassVar[dict[str, Any]] = {"rank": 3}
    row_tensors = ("coefficients",)
    old_names: ClassVar[dict[str, str]] = {"values.weight": "coefficients"}
    coefficients = RowParameter()  # [V, r]

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
        super().__init__(num_embeddings, embedding_dim, padding_idx, sparse)
        self.rank = check_integer("rank", rank)
        self.add_rows("coefficients", rank, dtype, device)
        self.atoms = empty_parameter((rank, embedding_dim), dtype, device)  # [r, d]
        self.initialize(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw B from N(0, 1) and A so that rows have unit variance."""
        self.coefficients.normal_(0.0, 1.0, generator=generator)
        self.atoms.normal_(0.0, share_of_unit_rows(self.rank), generator=generator)

    def codes(self, ids: Tensor) -> Codes:
        """All atoms weighted by the row of B."""
        return Codes(None, self.row_values("coefficients", ids), self.atoms)

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """Dense values over the atoms."""
        stored, atoms = encode(self.coefficients, values), encode(self.atoms, dictionary)
        return [Band(self.num_embeddings, Every(), stored, atoms)]

    def parameter_count(self) -> int:
        """V r + r d."""
        return self.coefficients.numel() + self.atoms.numel()

    @property
    def weighted_codes(self) -> bool:
        """True: every atom has a coefficient."""
        return True

    @classmethod
    def settings_for(
        cls, parameters: float, rows: int, dim: int, settings: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Return ``rank``."""
        return {"rank": max(1, round(parameters / (rows + dim)))}

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Truncated SVD of weighted rows, the best of its rank (Eckart and Young 1936)."""
        values, atoms = low_rank(matrix, self.rank, weights)
        self.coefficients.copy_(values)
        self.atoms.copy_(atoms)
