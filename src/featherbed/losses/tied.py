"""Softmax cross-entropy over all rows in blocks of positions, without storing all logits."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from featherbed.errors import ArgumentError
from featherbed.ops import check_ids

BLOCK = 1 << 22  # scores held at once


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
    if (
        hidden.dim() != 2
        or weight.dim() != 2
        or hidden.shape[1] != weight.shape[1]
        or targets.shape != hidden.shape[:1]
    ):
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
    needed = torch.is_grad_enabled() and any(
        one is not None and one.requires_grad for one in (hidden, weight, bias)
    )
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
        slopes = [
            torch.empty_like(hidden),
            torch.zeros_like(weight),
            None if bias is None else torch.zeros_like(bias),
        ]
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
                _add(slopes, start, scores, part, rows)
        ctx.save_for_backward(*slopes)
        return (total / count).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        given = [None if slope is None else slope * gradient for slope in ctx.saved_tensors]
        return *given, None, None, None


def _add(
    slopes: list[Tensor | None], start: int, scores: Tensor, part: Tensor, weight: Tensor
) -> None:
    """Accumulate the gradients of a block, whose scores now hold those of the loss."""
    hidden, rows, bias = slopes
    assert hidden is not None
    assert rows is not None
    rounded = scores.to(part.dtype)
    hidden[start : start + len(part)] = rounded @ weight
    rows += rounded.T @ part
    if bias is not None:
        bias += scores.sum(0)
