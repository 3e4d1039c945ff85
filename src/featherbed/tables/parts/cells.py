"""Cells that turn the code vectors of a row into one vector: MLP, recurrent cell, LSTM."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from featherbed.codecs.kd import run_cell
from featherbed.packed.cells import Cell
from featherbed.packed.matrix import Matrix
from featherbed.tables.rows import empty_parameter, to_numpy

CELLS = ("mlp", "recurrent", "lstm")


class CodeCell(nn.Module):
    """A cell of ``width`` units over code vectors of width ``code_dim``.

        mlp:        y = relu(x W + b), x the pooled code vectors
        recurrent:  t, i, o = σ(a_j + h U + b) (each with its own U, b),
                    m = t m + i tanh(a_j + h U_m + b_m),  h = o tanh(m),  y = mean_j h_j
        lstm:       torch's LSTM over the code vectors, y is the mean of its outputs

    ``recurrent`` is the cell of Chen, Min and Sun 2018, supplement, section 2: no input weights.
    Parameters are uninitialized until ``reset_parameters``, which the table calls.

    >>> CodeCell("mlp", 4, 8)(torch.zeros(2, 4)).shape
    torch.Size([2, 8])
    >>> CodeCell("lstm", 4, 6)(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 6])
    """

    def __init__(
        self,
        kind: str,
        code_dim: int,
        width: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        rows, columns = (width, 4 * width) if self.in_order else (code_dim, width)
        self.weight = empty_parameter((rows, columns), dtype, device)
        self.bias = empty_parameter((columns,), dtype, device)
        inputs = empty_parameter((code_dim, columns), dtype, device) if kind == "lstm" else None
        self.register_parameter("input", inputs)
        self.input: nn.Parameter | None

    @property
    def in_order(self) -> bool:
        """Whether the cell reads the code vectors one after the other, or their pooled vector."""
        return self.kind != "mlp"

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw weights of unit gain; the bias is zero."""
        for weight in (self.weight, self.input):
            if weight is not None:
                weight.normal_(0.0, 1 / math.sqrt(weight.shape[0]), generator=generator)
        self.bias.zero_()

    def forward(self, codes: Tensor) -> Tensor:  # [..., s, d'] (mlp: [..., d']) -> [..., w]
        """Return the mean state after the code vectors; an MLP's output for the pooled vector."""
        if not self.in_order:
            return torch.relu(codes @ self.weight + self.bias)
        states: Tensor = run_cell(self.kind, codes, self.weight, self.bias, self.input)
        return states

    def packed(self, kind: str) -> Cell:
        """Return the cell for the torch-free runtime, its matrices stored as ``kind``."""
        inputs = None if self.input is None else Matrix.encode(to_numpy(self.input), kind)
        weight = Matrix.encode(to_numpy(self.weight), kind)
        return Cell(self.kind, weight, to_numpy(self.bias).copy(), inputs)
