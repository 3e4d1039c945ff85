"""Hashing: ids share rows by hash functions."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from featherbed.checks import check_choice, check_integer
from featherbed.errors import ArgumentError
from featherbed.hashing import hash_codes
from featherbed.optim.lazy import RowParameter
from featherbed.packed.band import Band, Hash
from featherbed.tables.codes import Codes
from featherbed.tables.fitting import share_of_unit_rows, shared_atoms
from featherbed.tables.rows import empty_parameter, encode
from featherbed.tables.table import Table


class HashedTable(Table):
    """row(i) = Σ_j v_ij A[h_j(i)] with ``hashes`` hash functions into ``buckets`` shared rows.

    ``values="unit"`` is the hashing trick (one hash; Weinberger et al. 2009) or Bloom embeddings
    (several; Serrà and Karatzoglou 2017); ``values="learnt"``: hash embeddings with learned
    importance weights (Svenstrup et al. 2017). ``sparse``: gradients of these weights contain the
    rows of the batch only, for optimizers of this library.

    >>> import torch
    >>> HashedTable(1000, 16, buckets=50)(torch.tensor([3])).shape
    torch.Size([1, 16])
    """

    example: ClassVar[dict[str, Any]] = {"buckets": 6}
    weights = RowParameter()  # [V, k], learned values

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        buckets: int,
        hashes: int = 2,
        values: str = "unit",
        seed: int = 0,
        sparse: bool = False,
        padding_idx: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, sparse)
        check_choice("values", values, ("unit", "learnt"))
        check_integer("seed", seed, 0, 2**32 - 1)
        self.buckets = check_integer("buckets", buckets)
        self.hashes = check_integer("hashes", hashes)
        self.values, self.seed = values, seed
        self.atoms = empty_parameter((buckets, embedding_dim), dtype, device)  # [m, d]
        if values == "learnt":
            self.add_rows("weights", hashes, dtype, device)
        self.initialize(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw shared rows for composed rows of unit variance; learned weights start at 1."""
        self.atoms.normal_(0.0, share_of_unit_rows(self.hashes), generator=generator)
        if self.values == "learnt":
            self.weights.fill_(1.0)

    def get_extra_state(self) -> dict[str, int]:
        """Return the settings of the hash functions: others would give other rows."""
        return {"seed": self.seed}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Raise an error if the state has other hash functions."""
        if state["seed"] != self.seed:
            other = f"a HashedTable with seed={state['seed']}"
            raise ArgumentError(f"this state belongs to {other}, this one has seed={self.seed}")

    def codes(self, ids: Tensor) -> Codes:
        """The buckets of an id, and its learned weights."""
        found = hash_codes(ids, seed=self.seed, hashes=self.hashes, buckets=self.buckets)
        values = None if self.values == "unit" else self.row_values("weights", ids)
        return Codes(torch.stack(found, dim=-1), values, self.atoms)

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """Implicit codes: only learned weights are stored per row."""
        weights = None if self.values == "unit" else encode(self.weights, values)
        how, atoms = Hash(self.seed, self.hashes), encode(self.atoms, dictionary)
        return [Band(self.num_embeddings, how, weights, atoms)]

    def parameter_count(self) -> int:
        """m d, plus V k for learned weights."""
        return self.atoms.numel() + (0 if self.values == "unit" else self.weights.numel())

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Least squares for the shared rows, by conjugate gradients; the weights stay 1."""
        indices = self.codes(self.all_ids()).indices
        self.atoms.copy_(shared_atoms(matrix, indices, self.buckets, self.padding_idx, weights))
