"""The networks that turn a row's code vectors into one: a hidden layer, the supplement's recurrent cell, an LSTM."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from featherbed.packed.cells import Cell
from featherbed.packed.matrix import Matrix
from featherbed.tables.table import new_parameter, normal, to_numpy


class CodeCell(nn.Module):
    """A cell of ``width`` numbers over code vectors of width ``code_dim``; ``in_order`` ones take them one after the other."""

    kind: str
    in_order = True

    def __init__(
        self, code_dim: int, width: int, generator: torch.Generator | None, **where: Any
    ) -> None:
        super().__init__()
        self.code_dim, self.width = code_dim, width
        rows = code_dim if self.kind == "mlp" else width
        columns = width if self.kind == "mlp" else 4 * width
        self.weight = new_parameter(
            (rows, columns), normal(1 / math.sqrt(rows), generator), **where
        )
        self.bias = new_parameter((columns,), torch.nn.init.zeros_, **where)

    def packed(self, kind: str) -> Cell:
        """Return the cell for the torch-free runtime, its matrices stored as ``kind``."""
        return Cell(
            self.kind,
            Matrix.encode(to_numpy(self.weight), kind),
            to_numpy(self.bias).copy(),
            self._input(kind),
        )

    def _input(self, kind: str) -> Matrix | None:  # noqa: ARG002 - for cells that have one
        return None


class MLPCell(CodeCell):
    """y = relu(x W + b), x the pooled code vectors.

    >>> MLPCell(4, 8, None, dtype=None, device=None)(torch.zeros(2, 4)).shape
    torch.Size([2, 8])
    """

    kind = "mlp"
    in_order = False

    def forward(self, pooled: Tensor) -> Tensor:  # [..., d'] -> [..., w]
        """Apply the layer."""
        return torch.relu(pooled @ self.weight + self.bias)


class RecurrentCell(CodeCell):
    """The cell of the supplement to Chen, Min and Sun 2018 (section 2): gates share the code vector, no input weights.

    t, i, o = σ(a_j + h U + b) each with U, b of its own;  m = t m + i tanh(a_j + h U_m + b_m);  h = o tanh(m);  y = mean_j h_j.

    >>> RecurrentCell(4, 4, None, dtype=None, device=None)(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 4])
    """

    kind = "recurrent"

    def seen(self, codes: Tensor) -> Tensor:  # [..., s, d'] -> [..., s, 4 w]
        """Return what the gates see of the code vectors."""
        return torch.cat([codes] * 4, dim=-1)

    def forward(self, codes: Tensor) -> Tensor:  # [..., s, d'] -> [..., w]
        """Read the code vectors in order, return the mean of the states."""
        seen = self.seen(codes) + self.bias
        state = memory = total = seen.new_zeros(*seen.shape[:-2], self.width)
        for step in seen.unbind(-2):
            keep, take, show, fresh = self.gates((step + state @ self.weight).chunk(4, dim=-1))
            memory = torch.sigmoid(keep) * memory + torch.sigmoid(take) * torch.tanh(fresh)
            state = torch.sigmoid(show) * torch.tanh(memory)
            total = total + state
        return total / codes.shape[-2]

    def gates(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return keep, take, show, fresh in this order."""
        return parts


class LSTMCell(RecurrentCell):
    """An ordinary LSTM over the code vectors (torch's equations and order of gates), y the mean of its outputs.

    >>> LSTMCell(4, 6, None, dtype=None, device=None)(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 6])
    """

    kind = "lstm"

    def __init__(
        self, code_dim: int, width: int, generator: torch.Generator | None, **where: Any
    ) -> None:
        super().__init__(code_dim, width, generator, **where)
        self.input = new_parameter(
            (code_dim, 4 * width), normal(1 / math.sqrt(code_dim), generator), **where
        )

    def seen(self, codes: Tensor) -> Tensor:  # [..., s, d'] -> [..., s, 4 w]
        """Return what the gates see of the code vectors."""
        return codes @ self.input

    def gates(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return keep, take, show, fresh from torch's order i, f, g, o."""
        take, keep, fresh, show = parts
        return keep, take, show, fresh

    def _input(self, kind: str) -> Matrix | None:
        return Matrix.encode(to_numpy(self.input), kind)


CELLS: dict[str, type[CodeCell]] = {"mlp": MLPCell, "recurrent": RecurrentCell, "lstm": LSTMCell}
