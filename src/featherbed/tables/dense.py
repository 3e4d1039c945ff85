"""The dense table: one row stored for every id."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from featherbed.packed.band import Band
from featherbed.packed.codes import Identity
from featherbed.packed.matrix import Matrix
from featherbed.rows import HeldRows, new_rows, row_parameter
from featherbed.tables.codes import Codes
from featherbed.tables.table import Table, new_parameter, normal, to_numpy


class DenseTable(Table):
    """nn.Embedding in featherbed's clothes: row(i) = E[i].

    The yardstick of every comparison, and a step on the way: it loads an nn.Embedding's ``weight`` and packs to any
    precision. ``sparse``: gradients hold the rows of the batch only, for optimizers of this library.

    >>> import torch
    >>> DenseTable(10, 4)(torch.tensor([1, 2])).shape
    torch.Size([2, 4])
    """

    rows = HeldRows()  # [V, d]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        sparse: bool = False,
        padding_idx: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        shape = (num_embeddings, embedding_dim)
        self.sparse = bool(sparse)
        self.rows = new_rows(
            new_parameter(shape, normal(1.0, generator), dtype=dtype, device=device), self.sparse
        )
        if self.padding_idx is not None:
            with torch.no_grad():
                self.rows[self.padding_idx] = 0

    def codes(self, ids: Tensor) -> Codes:
        """Row i is atom i of a dictionary of V atoms."""
        return Codes(ids[..., None], None, self.rows)

    def lookup(self, ids: Tensor) -> Tensor:
        """Gather."""
        if self.sparse:
            return self.mask_padding(ids, row_parameter(self, "rows")(ids))
        return F.embedding(ids, self.rows, padding_idx=self.padding_idx)

    @property
    def weight(self) -> Tensor:
        """The rows themselves."""
        return self.rows

    def logits(self, hidden: Tensor) -> Tensor:  # [..., d] -> [..., V]
        """Multiply with the rows; the padding row scores 0 and learns nothing."""
        if hidden.shape[-1] != self.embedding_dim:
            return super().logits(hidden)  # which says what is wrong
        scores = F.linear(hidden, self.rows.to(hidden.dtype))
        if self.padding_idx is None:
            return scores
        return scores.masked_fill(
            torch.arange(self.num_embeddings, device=scores.device) == self.padding_idx, 0.0
        )

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:  # noqa: ARG002 - it has no values
        """One band of stored rows."""
        return [
            Band(
                self.num_embeddings,
                Identity(),
                dictionary=Matrix.encode(to_numpy(self.rows), dictionary),
            )
        ]

    def parameter_count(self) -> int:
        """V d."""
        return self.num_embeddings * self.embedding_dim

    def fit_dense(self, matrix: Tensor) -> None:
        """Copy."""
        self.rows.copy_(matrix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        held = prefix + "rows.weight"
        if prefix + "weight" in state_dict and held not in state_dict:
            state_dict[held] = state_dict.pop(prefix + "weight")
        rows = state_dict.get(held)
        if (
            self.padding_idx is not None
            and rows is not None
            and rows.shape == self.rows.shape
            and rows[self.padding_idx].any()
        ):
            state_dict[held] = rows.clone()
            state_dict[held][self.padding_idx] = (
                0  # torch allows another row there, a table does not
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)
