"""Loss terms for anchor tables: negative pairs and orthogonal anchors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from featherbed.errors import ArgumentError
from featherbed.ops import check_ids
from featherbed.tables.anchor import AnchorTable


def _of_anchors(table: Any) -> Any:
    if not getattr(table, "sparse_codes", False):
        raise ArgumentError(f"{table!r}: give a table of anchors, such as fb.AnchorTable")
    return table


def negative_pairs(table: AnchorTable, pairs: Any) -> Tensor:  # integer [n, 2] -> []
    """Return Σ over unrelated pairs (u, v) of |t_u| . |t_v|, the overlap of their transform rows.

    Liang et al. 2021, appendix F. ``pairs`` are non-edges of a graph, all or sampled
    (``graph.non_edges(count, seed)``); add the term to the loss with a weight.

    >>> import featherbed as fb
    >>> table = fb.AnchorTable(3, 4, anchors=2, init=fb.Frequency([2, 1, 0]))
    >>> float(negative_pairs(table, [[0, 1]]).detach())  # two anchors have nothing in common
    0.0
    """
    table = _of_anchors(table)
    try:
        ids = torch.as_tensor(pairs)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError("pairs make no array: give two ids for each, [n, 2]") from None
    if ids.dim() != 2 or ids.shape[1] != 2:
        raise ArgumentError(f"pairs have shape {tuple(ids.shape)}: give two ids for each, [n, 2]")
    codes = table.codes(check_ids(ids.to(table.device), table.num_embeddings))
    assert codes.values is not None
    first, second = codes.values.abs().unbind(1)  # [n, K] or [n, s]
    if codes.indices is None:
        return (first * second).sum()
    one, other = codes.indices.unbind(1)
    same = one[:, :, None] == other[:, None, :]
    return torch.einsum("ni,nij,nj->", first, same.to(first.dtype), second)


def orthogonality(table: AnchorTable) -> Tensor:  # -> []
    """Return Σ over i != j of |a_i . a_j|, zero for orthogonal anchors.

    Liang et al. 2021, appendix E: a loss term that prevents redundant anchors.

    >>> import featherbed as fb
    >>> table = fb.AnchorTable(10, 2, anchors=2)
    >>> with torch.no_grad():
    ...     _ = table.atoms.copy_(torch.tensor([[1.0, 1.0], [2.0, 0.0]]))
    >>> float(orthogonality(table).detach())
    4.0
    """
    gram = _of_anchors(table).atoms @ table.atoms.T
    total: Tensor = gram.abs().sum() - gram.diagonal().abs().sum()
    return total
