"""Cells that turn the code vectors of a row into one vector: MLP, recurrent cell, LSTM."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from featherbed.codecs.kd import run_cell
from featherbed.packed.cells import Cell
from featherbed.packed.matrix import Matrix
from featherbed.tables.rows import empty_parameter
from featherbed.tables.table import to_numpy


class CodeCell(nn.Module):
    """A cell of ``width`` units over code vectors of width ``code_dim``, read in sequence if
    ``in_order``.

    Parameters are uninitialized until ``reset_parameters``, which the table calls.
    """

    kind: str
    in_order = True

    def __init__(
        self,
        code_dim: int,
        width: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.code_dim, self.width = code_dim, width
        rows = code_dim if self.kind == "mlp" else width
        columns = width if self.kind == "mlp" else 4 * width
        self.weight = empty_parameter((rows, columns), dtype, device)
        self.bias = empty_parameter((columns,), dtype, device)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw weights of unit gain; the bias is zero."""
        self.weight.normal_(0.0, 1 / math.sqrt(self.weight.shape[0]), generator=generator)
        self.bias.zero_()

    def packed(self, kind: str) -> Cell:
        """Return the cell for the torch-free runtime, its matrices stored as ``kind``."""
        return Cell(
            self.kind,
            Matrix.encode(to_numpy(self.weight), kind),
            to_numpy(self.bias).copy(),
            self._input(kind),
        )

    def _input(self, kind: str) -> Matrix | None:
        return None


class MLPCell(CodeCell):
    """y = relu(x W + b), x the pooled code vectors.

    >>> MLPCell(4, 8)(torch.zeros(2, 4)).shape
    torch.Size([2, 8])
    """

    kind = "mlp"
    in_order = False

    def forward(self, pooled: Tensor) -> Tensor:  # [..., d'] -> [..., w]
        """Apply the layer."""
        return torch.relu(pooled @ self.weight + self.bias)


class RecurrentCell(CodeCell):
    """The cell of Chen, Min and Sun 2018, supplement, section 2: no input weights.

        t, i, o = σ(a_j + h U + b) (each with its own U, b),  m = t m + i tanh(a_j + h U_m + b_m),
        h = o tanh(m),  y = mean_j h_j

    >>> RecurrentCell(4, 4)(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 4])
    """

    kind = "recurrent"

    def forward(self, codes: Tensor) -> Tensor:  # [..., s, d'] -> [..., w]
        """Read the code vectors in order; return the mean state."""
        states: Tensor = run_cell(self.kind, codes, self.weight, self.bias)
        return states


class LSTMCell(RecurrentCell):
    """An LSTM over the code vectors (torch's equations and gate order); y is the mean of its
    outputs.

    >>> LSTMCell(4, 6)(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 6])
    """

    kind = "lstm"

    def __init__(
        self,
        code_dim: int,
        width: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(code_dim, width, dtype, device)
        self.input = empty_parameter((code_dim, 4 * width), dtype, device)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw weights of unit gain; the bias is zero."""
        super().reset_parameters(generator)
        self.input.normal_(0.0, 1 / math.sqrt(self.code_dim), generator=generator)

    def forward(self, codes: Tensor) -> Tensor:  # [..., s, d'] -> [..., w]
        """Read the code vectors in order; return the mean state."""
        states: Tensor = run_cell(self.kind, codes, self.weight, self.bias, self.input)
        return states

    def _input(self, kind: str) -> Matrix | None:
        return Matrix.encode(to_numpy(self.input), kind)


CELLS: dict[str, type[CodeCell]] = {"mlp": MLPCell, "recurrent": RecurrentCell, "lstm": LSTMCell}
