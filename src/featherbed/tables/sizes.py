"""The four sizes of a table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from featherbed.optim.lazy import lazy_rows


@dataclass(frozen=True)
class Sizes:
    """Bytes of the file, resident in serving and in training, and parameters as in the paper.

    >>> Sizes(file=1000, resident=900, training=None, parameters=250, dense=8000).ratio
    8.0
    """

    file: int
    resident: int
    training: int | None
    parameters: int
    dense: int  # bytes of the dense float32 table
    # N D log2 K of learned codes, as their papers count (packed: ceil(log2 K) bits a code)
    code_bits: float | None = None

    @property
    def ratio(self) -> float:
        """Size of the dense table in float32, relative to the file."""
        return self.dense / self.file

    @property
    def ratio_fp16(self) -> float:
        """Size of the dense table in float16, relative to the file."""
        return self.ratio / 2


def measure(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters, gradients, buffers and optimizer state (after a step).

    Row-sparse gradients and the records of lazily updated rows count with their own size.
    """
    total = sum(buffer.nbytes for buffer in module.buffers())
    for parameter in module.parameters():
        lazy = lazy_rows(parameter)
        if lazy is not None and lazy.bound_to(optimizer):
            total += lazy.stamps.nbytes
        grad = parameter.grad
        if grad is not None and grad.is_sparse:
            total += parameter.nbytes + grad._values().nbytes + grad._indices().nbytes
        else:
            total += parameter.nbytes * (2 if parameter.requires_grad else 1)
        state = optimizer.state.get(parameter, {})
        total += sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    return total
