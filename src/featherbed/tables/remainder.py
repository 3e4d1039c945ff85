"""Quotient and remainder: two small tables instead of a large one."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from featherbed.checks import check_choice, check_integer
from featherbed.packed.band import Band, Remainder
from featherbed.tables.codes import Codes
from featherbed.tables.fitting import quotient_remainder, share_of_unit_rows, shared_atoms
from featherbed.tables.rows import empty_parameter, encode
from featherbed.tables.table import Table


class RemainderTable(Table):
    """row(i) = Q[i // divisor] * R[i mod divisor], or their sum (Shi et al. 2020).

    No two ids share both parts. ``atoms`` holds Q, then R: ceil(V / divisor) + divisor rows, the
    fewest for divisor ≈ sqrt(V).

    >>> import torch
    >>> RemainderTable(1000, 16, divisor=32).atoms.shape
    torch.Size([64, 16])
    """

    example: ClassVar[dict[str, Any]] = {"divisor": 4}

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        divisor: int,
        combine: str = "product",
        padding_idx: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        check_choice("combine", combine, ("product", "sum"))
        self.divisor, self.combine = check_integer("divisor", divisor), combine
        self.quotients = -(-num_embeddings // divisor)
        shape = (self.quotients + divisor, embedding_dim)
        self.atoms = empty_parameter(shape, dtype, device)  # [V/r + r, d]
        self.initialize(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw both small tables so that composed rows have unit variance."""
        std = 1.0 if self.combine == "product" else share_of_unit_rows(2)
        self.atoms.normal_(0.0, std, generator=generator)

    def codes(self, ids: Tensor) -> Codes:
        """Quotient and remainder of the id."""
        quotient = torch.div(ids, self.divisor, rounding_mode="floor")
        indices = torch.stack([quotient, self.quotients + ids % self.divisor], dim=-1)
        return Codes(indices, None, self.atoms, self.combine)

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """Implicit codes: only the two small tables are stored."""
        how, atoms = Remainder(self.divisor), encode(self.atoms, dictionary)
        return [Band(self.num_embeddings, how, None, atoms, self.combine)]

    def parameter_count(self) -> int:
        """(ceil(V / divisor) + divisor) d."""
        return self.atoms.numel()

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Least squares: alternating for the product, conjugate gradients for the sum."""
        if self.combine == "product":
            self.atoms.copy_(quotient_remainder(matrix, self.divisor, weights=weights))
            return
        indices, count = self.codes(self.all_ids()).indices, len(self.atoms)
        self.atoms.copy_(shared_atoms(matrix, indices, count, self.padding_idx, weights))
