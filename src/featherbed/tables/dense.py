"""The dense table: one row stored for every id."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.optim.lazy import RowParameter
from featherbed.packed.band import Band, Identity
from featherbed.packed.table import PackedTable
from featherbed.tables.codes import Codes
from featherbed.tables.fitting import row_weights
from featherbed.tables.rows import encode
from featherbed.tables.table import Table


class DenseTable(Table):
    """An ordinary embedding: row(i) = E[i].

    The baseline of every comparison; it loads the ``weight`` of an nn.Embedding and packs to any
    precision. ``sparse``: gradients contain the rows of the batch only, for optimizers of this
    library.

    >>> import torch
    >>> DenseTable(10, 4)(torch.tensor([1, 2])).shape
    torch.Size([2, 4])
    """

    is_dense: ClassVar[bool] = True
    row_tensors = ("weight",)
    weight = RowParameter()  # [V, d]
    old_names: ClassVar[dict[str, str]] = {"rows.weight": "weight"}

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
        super().__init__(num_embeddings, embedding_dim, padding_idx, sparse)
        self.add_rows("weight", embedding_dim, dtype, device)
        self.initialize(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw rows from N(0, 1); the padding row is zero."""
        self.weight.normal_(0.0, 1.0, generator=generator)
        if self.padding_idx is not None:
            self.weight[self.padding_idx] = 0

    def codes(self, ids: Tensor) -> Codes:
        """Row i is atom i of a dictionary of V atoms."""
        return Codes(ids[..., None], None, self.weight)

    def lookup(self, ids: Tensor) -> Tensor:
        """Gather rows; the padding row has no gradient."""
        return self.mask_padding(ids, self.row_values("weight", ids))

    def mask_padding(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return rows without gradient for padding ids, which may be nonzero as in torch."""
        if self.padding_idx is None:
            return rows
        return torch.where((ids == self.padding_idx)[..., None], rows.detach(), rows)

    def without_padding(self, matrix: Tensor) -> Tensor:  # [V, d]
        """Return the matrix unchanged."""
        return matrix

    def dense_rows(self) -> Tensor:  # [V, d]
        """Return the parameter."""
        return self.weight

    def logits(self, hidden: Tensor) -> Tensor:  # [..., d] -> [..., V]
        """Multiply with the rows; the padding row has no gradient."""
        if hidden.shape[-1] != self.embedding_dim:
            return super().logits(hidden)  # which raises the error
        rows = self.weight.to(hidden.dtype)
        scores = F.linear(hidden, rows)
        if self.padding_idx is None:
            return scores
        constant = F.linear(hidden, rows[self.padding_idx].detach()[None])
        return torch.where(self.all_ids() == self.padding_idx, constant, scores)

    def pack(
        self, values: str = "float32", dictionary: str = "float32", layout: str = "auto"
    ) -> PackedTable:
        """Return the packed form; raise an error if the padding row is not zero."""
        padding = self.padding_idx
        if padding is not None and bool(self.weight[padding].detach().any()):
            raise ArgumentError(
                f"the padding row {padding} is not zero, as it is in a packed table: set it to "
                "zero (table.weight.data[table.padding_idx] = 0), or make the table without "
                "padding_idx"
            )
        return super().pack(values, dictionary, layout)

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """One band of dense rows."""
        rows = encode(self.weight, dictionary)
        return [Band(self.num_embeddings, Identity(), dictionary=rows)]

    def parameter_count(self) -> int:
        """V d."""
        return self.num_embeddings * self.embedding_dim

    @property
    def penalized_rows(self) -> tuple[nn.Parameter, ...]:
        """``weight``."""
        return (self.weight,)

    @property
    def factors(self) -> tuple[nn.Parameter, nn.Parameter | None] | None:
        """(weight, None)."""
        return (self.weight, None) if "factors" in vars(type(self)) else None

    def pruned(self) -> Table:
        """Return ``fb.selected_rows(self)`` if rows are zero, otherwise this table."""
        from featherbed.tables.selected import selected_rows

        some = self.pruned_parameter_count() < self.parameter_count()
        return selected_rows(self) if some else self

    def pruned_parameter_count(self) -> int:
        """Count the rows that are not zero (and the padding row), times d."""
        empty = (self.weight.detach() == 0).all(1)
        if self.padding_idx is not None:
            empty[self.padding_idx] = False
        return int((~empty).sum()) * self.embedding_dim

    @torch.no_grad()
    def scale_initial_rows(self, std: float) -> None:
        """Scale the rows to the standard deviation ``std``."""
        self.fit_dense(self.weight.detach() * (std / float(self.weight.std())))

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Copy the matrix."""
        row_weights(weights, matrix)  # only checked: every row is kept as it is
        self.weight.copy_(matrix)
