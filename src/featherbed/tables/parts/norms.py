"""Batch normalization of the last axis, with an affine form for evaluation and export."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOMENTUM = 0.1
EPS = 1e-5


class Normalise(nn.Module):
    """y = (x - mean) / sqrt(var + eps), with learned scale and shift if ``learnt``.

    Statistics are those of the batch in training, running ones in evaluation.

    >>> Normalise(3, learnt=False).settled(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """

    mean: Tensor
    var: Tensor

    def __init__(
        self,
        width: int,
        *,
        learnt: bool,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        where: dict[str, Any] = {"dtype": wide, "device": device}
        self.register_buffer("mean", torch.empty(width, **where))
        self.register_buffer("var", torch.empty(width, **where))
        self.scale = nn.Parameter(torch.empty(width, **where)) if learnt else None
        self.shift = nn.Parameter(torch.empty(width, **where)) if learnt else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, mean: Tensor | float = 0.0, var: Tensor | float = 1.0) -> None:
        """Set the statistics; reset scale to 1 and shift to 0."""
        self.mean.copy_(torch.as_tensor(mean))
        self.var.copy_(torch.as_tensor(var))
        if self.scale is not None and self.shift is not None:
            self.scale.fill_(1.0)
            self.shift.zero_()

    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        """Normalize by the batch and update running statistics; a single vector uses the latter."""
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) < 2:
            return self.settled(x)
        wide = flat.to(self.mean.dtype)
        found = F.batch_norm(wide, self.mean, self.var, self.scale, self.shift, True, MOMENTUM, EPS)
        return found.reshape(x.shape).to(x.dtype)

    def line(self) -> tuple[Tensor, Tensor]:  # [width], [width]
        """Return the evaluation form y = x * scale + shift."""
        scale = (self.var + EPS).rsqrt()
        scale = scale if self.scale is None else scale * self.scale
        move = -self.mean * scale
        return scale, move if self.shift is None else move + self.shift

    def settled(self, x: Tensor) -> Tensor:  # [..., width]
        """Normalise by the running statistics."""
        scale, move = self.line()
        return (x.to(scale.dtype) * scale + move).to(x.dtype)

    def reset(self) -> None:
        """Make the evaluation form the identity."""
        self.reset_parameters(var=1.0 - EPS)

    def settle(self, rows: Tensor) -> None:  # [n, width]
        """Set the statistics to those of all rows; reset scale and shift."""
        wide = rows.detach().to(self.mean.dtype)
        self.reset_parameters(wide.mean(0), wide.var(0, unbiased=False).clamp(min=1e-4))

    def undo(self, y: Tensor) -> Tensor:  # [..., width]
        """Return x whose normalized form is y."""
        scale, move = self.line()
        return ((y.to(scale.dtype) - move) / scale).to(y.dtype)
