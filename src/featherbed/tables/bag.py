"""Bag: a table with the call of nn.EmbeddingBag."""

from __future__ import annotations

from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.packed.table import PackedTable
from featherbed.tables.table import Table


class Bag(nn.Module):
    """nn.EmbeddingBag's call over any table: r_b = Σ_i w_i row(i), or the mean.

    >>> import torch, featherbed as fb
    >>> bag = fb.Bag(fb.AnchorTable(1000, 16, anchors=8), mode="mean")
    >>> bag(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3])).shape
    torch.Size([2, 16])
    """

    def __init__(
        self,
        table: Table,
        mode: str = "sum",
        include_last_offset: bool = False,
        max_norm: float | None = None,
    ) -> None:
        super().__init__()
        if mode not in ("sum", "mean"):
            raise ArgumentError(
                f"mode={mode!r}: bags over compact tables are pooled by sum or mean"
            )
        if max_norm is not None:
            raise ArgumentError(
                "max_norm rewrites rows in place; compact tables share them, so it is not supported"
            )
        self.table = table
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: Tensor,  # noqa: A002 - nn.EmbeddingBag's name for it; [B, n], or [N] with offsets
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:  # [B, d]
        """Pool the rows of each bag."""
        return self.table.bag(
            input,
            offsets,
            per_sample_weights,
            mode=self.mode,
            include_last_offset=self.include_last_offset,
        )

    def pack(
        self, values: str = "float32", dictionary: str = "float32", layout: str = "auto"
    ) -> PackedTable:
        """Return the packed form of the table (see Table.pack); PackedTable.bag pools its rows."""
        return self.table.pack(values, dictionary, layout)

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"mode={self.mode!r}, include_last_offset={self.include_last_offset}"
