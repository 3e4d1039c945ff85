"""Exempt: (object, anchor) entries of a transform that are not penalized."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from featherbed.errors import ArgumentError


class HasSupport(Protocol):
    """A table with a transform and, with slots, the anchors of its entries."""

    transform: Any  # [V, K] or [V, s]
    support: Any  # int [V, s] or None


class Exempt:
    """1 - S(G) of Liang et al. 2021 (appendix F), stored sparse: the related anchors of each
    object.

    Created by ``table.related(graph)`` for ``fb.NonNegativeL1(lam, exempt=...)``.

    >>> import featherbed as fb
    >>> table = fb.AnchorTable(4, 2, anchors=2, init=fb.Frequency([5, 1, 1, 4]))  # anchors 0, 3
    >>> exempt = Exempt(table, torch.tensor([[1, 0], [2, 1]]), 2)
    >>> exempt.places(None)
    (tensor([1, 2]), tensor([0, 1]))
    """

    # pairs: int64 [n, 2] of objects and anchors
    def __init__(self, table: HasSupport, pairs: Tensor, anchors: int) -> None:
        self.table, self.anchors, self.rows = table, anchors, len(table.transform)
        keys = torch.unique(pairs[:, 0].long() * anchors + pairs[:, 1].long())
        self.columns = keys % anchors  # of object i: those from starts[i] to starts[i + 1]
        self.starts = torch.searchsorted(keys, torch.arange(self.rows + 1) * anchors)
        self._keys = keys

    def __len__(self) -> int:
        return len(self.columns)

    def places(self, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the positions of exempt entries among the rows ``ids`` of the transform (None:
        all).
        """
        rows = torch.arange(self.rows) if ids is None else ids.cpu()
        begin = self.starts[rows]
        counts = self.starts[rows + 1] - begin
        at = torch.repeat_interleave(counts)  # which of the rows each entry belongs to
        within = torch.arange(len(at)) - (counts.cumsum(0) - counts)[at]
        columns = self.columns[begin[at] + within]
        support = self.table.support
        if support is not None:
            same = support[rows[at]].cpu().long() == columns[:, None]
            entry, columns = same.nonzero(as_tuple=True)
            at = at[entry]
        # rows that are settled must not settle the whole parameter
        device = self.table.transform.device if ids is None else ids.device
        return at.to(device), columns.to(device)

    def holds(self, ids: Tensor, atoms: Tensor) -> Tensor:  # [n], [n] -> bool [n]
        """Return whether pairs of objects and anchors are exempt."""
        keys = (ids.long() * self.anchors + atoms.long()).cpu()
        return torch.isin(keys, self._keys).to(ids.device)

    def check(self, parameter: Tensor) -> None:
        """Raise an error if the parameter belongs to another table."""
        if parameter is not self.table.transform:
            raise ArgumentError(
                "exempt entries are of another table's transform "
                f"{tuple(self.table.transform.shape)} than the penalized "
                f"parameter {tuple(parameter.shape)}: use related() of the table that is penalized"
            )

    def __repr__(self) -> str:
        return f"<{len(self):,} of {self.rows:,} x {self.anchors:,} entries>"
