"""Full softmax over a sparse transform, without gradients of rows that stay zero."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.losses.candidates import check_hidden
from featherbed.ops import check_ids
from featherbed.optim.penalties import L1, NonNegativeL1, Penalty
from featherbed.tables.anchor import AnchorTable
from featherbed.tables.table import Table

ROUNDING = 1e-5  # by which a sum in another order may differ


class FullSoftmax(nn.Module):
    """Mean cross-entropy of hidden . row(id) over all rows of an AnchorTable, with a sparse
    gradient.

        gradient of T[v]:  g_v = Σ_i (softmax_iv - [v = y_i]) A h_i / n

    Under plain SGD and a nonnegative L1 prox a zero row of T stays zero iff -g_vk <= lam for every
    anchor k (Liang et al. 2021, appendix H, equation 35). It is left out of the row-sparse gradient
    if already the bound Σ_i |softmax_iv - [v = y_i]| max_k of the anchors' scores of the relevant
    sign is within lam, which takes n sums per row instead of n K products. With ``fb.SGD`` without
    momentum the result equals that of the full gradient, given one backward pass per step and an
    unscaled loss (clipping is fine); ``left_out`` counts the rows left out last.

    Args:
        table: an AnchorTable with sparse=True and without slots.
        penalty: the optimizer's penalty on ``table.transform``: fb.NonNegativeL1 or fb.L1.
        bias: nn.Parameter [V] added to the scores.

    >>> import featherbed as fb
    >>> table = fb.AnchorTable(100, 8, anchors=4, sparse=True)
    >>> penalty = fb.NonNegativeL1(1e-3)
    >>> loss = FullSoftmax(table, penalty)
    >>> optimizer = fb.SGD(table.parameters(), lr=0.1, penalties={table.transform: penalty})
    >>> loss(torch.randn(3, 8), torch.tensor([1, 2, 3])).backward(); optimizer.step()
    """

    bias: nn.Parameter | None

    def __init__(
        self, table: AnchorTable, penalty: Penalty, bias: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        factored = isinstance(table, Table) and table.has_anchors and table.factors is not None
        if not factored or not table.sparse:
            raise ArgumentError(
                f"{table!r}: give an fb.AnchorTable(..., sparse=True) without slots"
            )
        if not isinstance(penalty, NonNegativeL1 | L1):
            raise ArgumentError(
                f"penalty={penalty!r}: rows are spared by fb.NonNegativeL1 or fb.L1"
            )
        if bias is not None and bias.shape != (table.num_embeddings,):
            raise ArgumentError(
                f"bias has shape {tuple(bias.shape)}: give one number for each of "
                f"{table.num_embeddings} ids"
            )
        self.table, self.penalty = table, penalty
        self.register_parameter("bias", bias)
        self.left_out = 0

    def forward(
        self, hidden: Tensor, targets: Tensor, inputs: Tensor | None = None
    ) -> Tensor:  # [..., d], integer [...] -> []
        """Return the mean loss over all positions; rows of ``inputs`` (looked up in this step) are
        kept.
        """
        check_hidden(hidden, targets, self.table.embedding_dim)
        wanted = check_ids(targets.reshape(-1), self.table.num_embeddings)
        flat = hidden.reshape(-1, self.table.embedding_dim)
        if self.table.padding_idx is not None or not torch.is_grad_enabled():
            logits = self.table.logits(flat)
        else:
            scores = flat @ self.table.atoms.to(flat.dtype).T
            logits = cast(Tensor, _Scores.apply(self.table.transform, scores, self, inputs))  # type: ignore[no-untyped-call]
        return F.cross_entropy(logits if self.bias is None else logits + self.bias, wanted)


class _Scores(torch.autograd.Function):
    """Anchor scores [n, K] -> logits [n, V] = scores Tᵀ, with a row-sparse gradient of T."""

    @staticmethod
    def forward(
        ctx: Any, transform: Tensor, scores: Tensor, loss: FullSoftmax, inputs: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(transform, scores, inputs)
        ctx.loss = loss
        return scores @ transform.to(scores.dtype).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,) = gradients  # [n, V]
        transform, scores, inputs = ctx.saved_tensors
        loss = cast(FullSoftmax, ctx.loss)
        before = loss.table.transform.grad
        if before is not None and bool(
            before._values().any() if before.is_sparse else before.any()
        ):
            raise ArgumentError(
                "the transform has a gradient already: rows are spared by the gradient of one "
                "backward pass a step; use "
                "F.cross_entropy(table.logits(hidden), targets) where gradients add up"
            )
        most = _most(gradient, scores, loss.penalty) * (1 + ROUNDING)
        kept = (transform != 0).any(1) | (most > loss.penalty.lam)
        if loss.penalty.exempt is not None:
            kept[loss.penalty.exempt.places(None)[0]] = True  # entries that nothing sets back
        if inputs is not None:
            kept[inputs.reshape(-1)] = True
        ids = kept.nonzero()[:, 0]
        loss.left_out = len(transform) - len(ids)
        rows = gradient[:, ids].T @ scores
        sparse = torch.sparse_coo_tensor(
            ids[None], rows.to(transform.dtype), transform.shape, check_invariants=False
        )
        return sparse, gradient @ transform.to(gradient.dtype), None, None


def _most(gradient: Tensor, scores: Tensor, penalty: Penalty) -> Tensor:  # [n, V], [n, K] -> [V]
    """Return a bound on the increase (nonnegative) or change (L1) of any weight of each row."""
    if isinstance(penalty, L1):
        return gradient.abs().T @ scores.abs().amax(1)
    high, low = scores.amax(1).clamp(min=0), (-scores).amax(1).clamp(min=0)
    return gradient.clamp(min=0).T @ low + (-gradient).clamp(min=0).T @ high
