"""Batch normalization of the last axis, with an affine form for evaluation and export."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.optim.processes import total

MOMENTUM = 0.1
EPS = 1e-5


class Summed(torch.autograd.Function):
    """The sum over processes; its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        """Return the sum."""
        ctx.group = group
        return total(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradients."""
        return total(gradients[0], ctx.group), None


class Normalize(nn.Module):
    """y = (x - mean) / sqrt(var + eps), with learned scale and shift if ``learned``.

    Statistics are those of the batch in training, running ones in evaluation; with a process
    ``group`` those of the batches of all its processes.

    >>> Normalize(3, learned=False).settled(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """

    mean: Tensor
    var: Tensor
    group: Any = None

    def __init__(
        self,
        width: int,
        *,
        learned: bool,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        where: dict[str, Any] = {"dtype": wide, "device": device}
        self.register_buffer("mean", torch.empty(width, **where))
        self.register_buffer("var", torch.empty(width, **where))
        self.scale = nn.Parameter(torch.empty(width, **where)) if learned else None
        self.shift = nn.Parameter(torch.empty(width, **where)) if learned else None
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
        if self.group is not None:
            return self._over_processes(flat.to(self.mean.dtype)).reshape(x.shape).to(x.dtype)
        if len(flat) < 2:
            return self.settled(x)
        wide = flat.to(self.mean.dtype)
        found = F.batch_norm(wide, self.mean, self.var, self.scale, self.shift, True, MOMENTUM, EPS)
        return found.reshape(x.shape).to(x.dtype)

    def _over_processes(self, flat: Tensor) -> Tensor:  # [n, width], n may be 0
        count = total(torch.tensor(float(len(flat))), self.group)
        if count < 2:
            return self.settled(flat)
        mean = Summed.apply(flat.sum(0), self.group) / count  # type: ignore[no-untyped-call]
        around = flat - mean
        var = Summed.apply(around.square().sum(0), self.group) / count  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self.mean.lerp_(mean.detach(), MOMENTUM)
            self.var.lerp_(var.detach() * count / (count - 1), MOMENTUM)
        found: Tensor = around * (var + EPS).rsqrt()
        if self.scale is None or self.shift is None:
            return found
        return found * self.scale + self.shift

    def line(self) -> tuple[Tensor, Tensor]:  # [width], [width]
        """Return the evaluation form y = x * scale + shift."""
        scale = (self.var + EPS).rsqrt()
        scale = scale if self.scale is None else scale * self.scale
        move = -self.mean * scale
        return scale, move if self.shift is None else move + self.shift

    def settled(self, x: Tensor) -> Tensor:  # [..., width]
        """Normalize by the running statistics."""
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
