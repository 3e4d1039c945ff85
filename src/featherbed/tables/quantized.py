"""Low-bit rows: elements rounded to a few levels, during training or after it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from featherbed.checks import check_choice
from featherbed.codecs.integer import choose_scales
from featherbed.errors import ArgumentError
from featherbed.optim.lazy import RowParameter
from featherbed.packed.band import Band, Every
from featherbed.packed.matrix import Matrix, pack_levels
from featherbed.tables.codes import Codes
from featherbed.tables.fitting import levels_of, rounded_rows, row_weights
from featherbed.tables.rows import empty_parameter, to_numpy
from featherbed.tables.table import Table


class QuantizedTable(Table):
    """row(i) = s (q - (2^b - 1)/2), q = clip(round(rows/s + (2^b - 1)/2), 0, 2^b - 1), with b bits.

    The scale s is per row or column. Trained with straight-through rounding and learned scales
    (Esser et al. 2020, LSQ); unlike LSQ, gradients pass the clipping too. ``from_dense`` quantizes
    after training, with scales chosen by squared error. The float ``rows`` exist in training only;
    the packed file holds levels and scales. ``sparse``: gradients of rows and their scales contain
    the rows of the batch only, for optimizers of this library.

    >>> import torch
    >>> table = QuantizedTable.from_dense(torch.randn(1000, 16), bits=4)
    >>> table.sizes().ratio > 5
    True
    """

    example: ClassVar[dict[str, Any]] = {"bits": 4}
    rows, scale = RowParameter(), RowParameter()  # [V, d], [V, 1] or [1, d]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        bits: int = 8,
        scales: str = "row",
        sparse: bool = False,
        padding_idx: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, sparse)
        if not isinstance(bits, int) or bits not in (8, 4, 3, 2):
            raise ArgumentError(f"bits={bits!r}: rows are stored in 8, 4, 3 or 2 bits")
        check_choice("scales", scales, ("row", "column"))
        self.bits, self.scales = bits, scales
        self.add_rows("rows", embedding_dim, dtype, device)
        if scales == "row":
            self.add_rows("scale", 1, dtype, device)
        else:
            self.register_parameter("scale", empty_parameter((1, embedding_dim), dtype, device))
        self.initialize(generator)

    @property
    def row_tensors(self) -> tuple[str, ...]:  # type: ignore[override]
        """Rows, and their scales if each has one."""
        return ("rows", "scale") if self.scales == "row" else ("rows",)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw rows from N(0, 1) and choose their scales."""
        self.rows.normal_(0.0, 1.0, generator=generator)
        self.fit_dense(self.rows.detach().clone())

    def codes(self, ids: Tensor) -> Codes:
        """The values are the row: levels times scale, with straight-through rounding."""
        scale = self.row_values("scale", ids) if self.scales == "row" else self.scale[0]
        rows = self.row_values("rows", ids)
        return Codes(None, rounded_rows(rows, scale, 2**self.bits - 1), None)

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """Packed levels with their scales."""
        levels = levels_of(self.rows, self.scale, 2**self.bits - 1)
        shape = (self.num_embeddings, self.embedding_dim)
        scale, axis = to_numpy(self.scale).reshape(-1), 0 if self.scales == "row" else 1
        stored = Matrix(f"int{self.bits}", shape, pack_levels(levels, self.bits), scale, axis)
        return [Band(self.num_embeddings, Every(), stored)]

    def parameter_count(self) -> int:
        """V d levels and the scales."""
        return self.rows.numel() + self.scale.numel()

    @torch.no_grad()
    def scale_initial_rows(self, std: float) -> None:
        """Scale the rows to the standard deviation ``std``; scales follow."""
        self.fit_dense(self.rows.detach() * (std / float(self.rows.std())))

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Keep the matrix; choose scales by (in columns, weighted) squared error."""
        self.rows.copy_(matrix)
        given = row_weights(weights, matrix)
        found = choose_scales(to_numpy(matrix), self.bits, self.scales, given)
        scale = torch.from_numpy(found).to(self.scale)
        self.scale.copy_(scale[:, None] if self.scales == "row" else scale[None, :])
