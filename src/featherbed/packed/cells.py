"""The cell stage of the composer: a small network on the combined atoms of a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featherbed.packed.matrix import Floats, Matrix

KINDS = ("mlp", "recurrent", "lstm")


@dataclass(eq=False)
class Cell:
    """A small network between combine and affine, with w = cell width.

    ``mlp``: y = relu(x weight + bias), x the combined atoms [n], weight [n, w].

    ``recurrent`` (Chen, Min and Sun 2018, supplement, section 2): atoms a_1, ..., a_s in order, of
    width w,

        (t, i, o) = σ(a_j + h weight_(t, i, o) + bias_(t, i, o))
        m = t m + i tanh(a_j + h weight_m + bias_m),   h = o tanh(m)

    with weight [w, 4 w] and bias [4 w] in the order t, i, o, m; y is the mean of h over the s
    steps, from h = m = 0.

    ``lstm``: as above with a_j input [a, 4 w] in place of a_j, and the gates in the order i, f, g,
    o of torch's LSTM.
    """

    kind: str
    weight: Matrix
    bias: Floats
    input: Matrix | None = None  # of an lstm: [atom width, 4 w]

    @property
    def width(self) -> int:
        """Width of the output."""
        return self.weight.shape[1] if self.kind == "mlp" else self.weight.shape[0]

    @property
    def step_width(self) -> int | None:
        """Width of an atom where atoms are taken one by one; None where all are taken at once."""
        if self.kind == "mlp":
            return None
        return self.weight.shape[0] if self.input is None else self.input.shape[0]

    def __call__(self, rows: Floats) -> Floats:  # [B, n] -> [B, w]
        """Apply the cell to combined atoms; those taken in order stand side by side."""
        if self.kind == "mlp":
            hidden: Floats = np.maximum(rows @ self.weight.dense() + self.bias, np.float32(0))
            return hidden
        step = self.step_width
        assert step is not None
        atoms = rows.reshape(len(rows), rows.shape[1] // step, step)
        weight = self.weight.dense()  # large ones are decoded anew
        given = None if self.input is None else self.input.dense()
        state, memory = np.zeros((2, len(rows), self.width), dtype=np.float32)
        total = np.zeros_like(state)
        for j in range(atoms.shape[1]):
            inputs = np.tile(atoms[:, j], 4) if given is None else atoms[:, j] @ given
            state, memory = self._step(inputs + (state @ weight + self.bias), memory)
            total += state
        mean: Floats = total / np.float32(atoms.shape[1])
        return mean

    def _step(self, gates: Floats, memory: Floats) -> tuple[Floats, Floats]:
        """Return state and memory [B, w] after a step with gates [B, 4 w]."""
        parts = np.split(gates, 4, axis=1)
        if self.kind == "recurrent":
            keep, take, show, fresh = parts
        else:
            take, keep, fresh, show = parts
        memory = sigmoid(keep) * memory + sigmoid(take) * np.tanh(fresh)
        return sigmoid(show) * np.tanh(memory), memory

    def arrays(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Yield every stored array by name."""
        for name, matrix in (("weight", self.weight), ("input", self.input)):
            if matrix is not None:
                yield from matrix.arrays(name)
        yield "bias", self.bias


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + e^-x), without overflow."""
    half: Floats = np.float32(0.5) * np.tanh(np.float32(0.5) * x) + np.float32(0.5)
    return half
