"""Softmax cross-entropy over all rows, in blocks of positions or with a sparse gradient."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.ops import check_ids
from featherbed.optim import L1, NonNegativeL1, Penalty
from featherbed.tables.anchor import AnchorTable
from featherbed.tables.table import Table

BLOCK = 1 << 22  # scores held at once
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
        self.table, self.penalty = table, penalty
        self.register_parameter("bias", check_bias(bias, table.num_embeddings))
        self.left_out = 0

    def forward(
        self, hidden: Tensor, targets: Tensor, inputs: Tensor | None = None
    ) -> Tensor:  # [..., d], integer [...] -> []
        """Return the mean loss over all positions; rows of ``inputs`` (looked up in this step) are
        kept.
        """
        flat, wanted = check_hidden(hidden, targets, self.table)
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
        if before is not None and bool((before._values() if before.is_sparse else before).any()):
            raise ArgumentError(
                "the transform has a gradient already: rows are spared by the gradient of one "
                "backward pass a step; use F.cross_entropy(table.logits(hidden), targets) where "
                "gradients add up"
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


def tied_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    precision: torch.dtype | None = None,
) -> Tensor:
    """Return the mean cross-entropy of hidden . row(id) + bias(id): [n, d], [V, d], [V], int [n] ->
    [].

        loss = mean_i ( log Σ_v exp(h_i . w_v + b_v) - h_i . w_(y_i) - b_(y_i) )

    Equal to ``F.cross_entropy(hidden @ weight.T + bias, targets)``, but blocks of positions are
    scored, normalized and turned into gradients while they are in the processor's cache: memory is
    O(block + V d) instead of O(n V). ``weight`` may be computed, such as ``table.weight`` of a
    compact table. ``precision=torch.bfloat16`` rounds the factors of the three matrix products,
    about twice as fast on processors with native support.

    >>> hidden, weight = torch.randn(5, 3), torch.randn(7, 3)
    >>> targets = torch.tensor([0, 6, 2, 2, 1])
    >>> loss = tied_cross_entropy(hidden, weight, None, targets)
    >>> bool(torch.isclose(loss, torch.nn.functional.cross_entropy(hidden @ weight.T, targets)))
    True
    """
    matrices = hidden.dim() == weight.dim() == 2 and hidden.shape[1] == weight.shape[1]
    if not matrices or targets.shape != hidden.shape[:1]:
        shapes = ", ".join(str(tuple(one.shape)) for one in (hidden, weight, targets))
        raise ArgumentError(
            f"hidden, weight and targets have shapes {shapes}: give [n, d], [V, d] and [n]"
        )
    if not len(hidden):
        raise ArgumentError("there are no positions: the mean of no losses is not defined")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(
            f"bias has shape {tuple(bias.shape)}: give one number for each of {len(weight)} rows"
        )
    targets = check_ids(targets, len(weight))
    given = [one for one in (hidden, weight, bias) if one is not None]
    needed = torch.is_grad_enabled() and any(one.requires_grad for one in given)
    return cast(Tensor, _TiedLoss.apply(hidden, weight, bias, targets, needed, precision))  # type: ignore[no-untyped-call]


class _TiedLoss(torch.autograd.Function):
    """Loss and gradients in one pass: gradients of a mean are known up to a factor."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        needed: bool,
        precision: torch.dtype | None,
    ) -> Tensor:
        count, kind = len(hidden), hidden.dtype if precision is None else precision
        total = hidden.new_zeros((), dtype=torch.float64)
        slopes = [torch.zeros_like(one) for one in (hidden, weight, bias) if one is not None]
        block = max(1, BLOCK // len(weight))
        given, rows = hidden.to(kind), weight.to(kind)
        for start in range(0, count, block):
            part, wanted = given[start : start + block], targets[start : start + block, None]
            scores = (part @ rows.T).to(hidden.dtype)
            if bias is not None:
                scores += bias
            scores -= scores.amax(1, keepdim=True)
            total -= scores.gather(1, wanted).sum(dtype=torch.float64)
            sums = scores.exp_().sum(1, keepdim=True)
            total += sums.log().sum(dtype=torch.float64)
            if needed:
                scores *= 1 / (count * sums)  # softmax / n
                scores.scatter_add_(1, wanted, scores.new_full(wanted.shape, -1 / count))
                rounded = scores.to(kind)
                slopes[0][start : start + block] = rounded @ rows
                slopes[1] += rounded.T @ part
                if bias is not None:
                    slopes[2] += scores.sum(0)
        ctx.save_for_backward(*slopes)
        return (total / count).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        given = [slope * gradient for slope in ctx.saved_tensors]
        return *given, *[None] * (6 - len(given))


def check_hidden(hidden: Tensor, targets: Tensor, table: Table) -> tuple[Tensor, Tensor]:
    """Return hidden vectors [n, d] and targets [n] that match, or raise an error."""
    width = table.embedding_dim
    if not hidden.is_floating_point():
        raise ArgumentError(
            f"hidden has dtype {hidden.dtype}: give floating-point vectors [..., {width}]"
        )
    if hidden.dim() == 0 or hidden.shape[-1] != width:
        raise ArgumentError(
            f"hidden has shape {tuple(hidden.shape)}, the rows have width {width}: give [..., "
            f"{width}]"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ArgumentError(
            f"targets have shape {tuple(targets.shape)}, hidden has {tuple(hidden.shape)}: "
            f"give one target for each hidden vector, shape {tuple(hidden.shape[:-1])}"
        )
    if not targets.numel():
        raise ArgumentError(
            f"targets of shape {tuple(targets.shape)} are empty: no mean is taken of nothing, skip "
            "the batch"
        )
    return hidden.reshape(-1, width), check_ids(targets.reshape(-1), table.num_embeddings)


def check_bias(bias: nn.Parameter | None, rows: int) -> nn.Parameter | None:
    """Return a bias with one number for each row, or raise an error."""
    if bias is not None and (not isinstance(bias, nn.Parameter) or bias.shape != (rows,)):
        kind = type(bias).__name__
        given = f"shape {tuple(bias.shape)}" if isinstance(bias, nn.Parameter) else kind
        raise ArgumentError(
            f"bias is one number for each id, nn.Parameter(torch.zeros({rows})), got {given}"
        )
    return bias
