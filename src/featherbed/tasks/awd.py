"""The AWD-LSTM: an LSTM held back by every kind of dropout there is, over any table.

Merity, Keskar and Socher 2017, "Regularizing and Optimizing LSTM Language Models". Their optimizer is ``fb.Averaged``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.tasks.word_model import Cell, Read, State, WordModel, check_share


def locked(rows: Tensor, share: float, training: bool) -> Tensor:  # [T, B, d] -> [T, B, d]
    """Drop a share of the features, the same at all places of a text (Gal and Ghahramani 2016).

    >>> out = locked(torch.ones(3, 1, 100), 0.5, True)
    >>> bool((out[0] == out[2]).all()), sorted(set(out.flatten().tolist()))
    (True, [0.0, 2.0])
    """
    if not training or not share:
        return rows
    mask = rows.new_empty(1, *rows.shape[1:]).bernoulli_(1 - share).div_(1 - share)
    return rows * mask


class AwdModel(WordModel):
    """words -> table -> LSTM layers under dropout -> logits, tied by default; the last layer is then as wide as the table.

    Dropped in training: whole words (``drop_words``), features of the rows (``drop_input``), of what goes from layer to layer
    (``drop_layers``) and of the output (``dropout``), each the same at all places of a text, and hidden-to-hidden weights
    (``drop_weights``, DropConnect of Wan et al. 2013). Added to the loss:

        ar mean(h̃²) + tar mean((h_t - h_(t-1))²)

    of the last layer's output h, h̃ after dropout.

    >>> import featherbed as fb
    >>> model = AwdModel(fb.AnchorTable(100, 16, anchors=8), hidden=24, layers=3)
    >>> [layer.hidden_size for layer in model.layers], model(torch.zeros(5, 2, dtype=torch.int64))[0].shape
    ([24, 24, 16], torch.Size([5, 2, 100]))
    """

    def __init__(
        self,
        words: nn.Module,
        *,
        hidden: int = 1150,
        layers: int = 3,
        tied: bool = True,
        samples: int | None = None,
        dropout: float = 0.4,
        drop_words: float = 0.1,
        drop_input: float = 0.4,
        drop_layers: float = 0.25,
        drop_weights: float = 0.5,
        ar: float = 2.0,
        tar: float = 1.0,
    ) -> None:
        for name, value in (("hidden", hidden), ("layers", layers)):
            if value < 1:
                raise ArgumentError(f"{name}={value}: give a whole number of at least 1")
        first = int(words.embedding_dim)  # type: ignore[arg-type]
        widths = [first, *[hidden] * (layers - 1), first if tied else hidden]
        super().__init__(words, width=widths[-1], tied=tied, samples=samples, drop_words=drop_words)
        self.layers = nn.ModuleList(nn.LSTM(a, b) for a, b in pairwise(widths))
        self.dropout, self.drop_input = (
            check_share("dropout", dropout),
            check_share("drop_input", drop_input),
        )
        self.drop_layers = check_share("drop_layers", drop_layers)
        self.drop_weights = check_share("drop_weights", drop_weights)
        self.ar, self.tar = ar, tar

    def cells(self) -> list[Cell]:
        """Return the weights of the layers."""
        return [cast(Cell, tuple(cast(nn.LSTM, layer).all_weights[0])) for layer in self.layers]

    def _run(
        self, rows: Tensor, cell: Cell, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run one layer with a share of its hidden-to-hidden weights left out."""
        into, across, *biases = cell
        if state is None:
            nothing = rows.new_zeros(1, rows.shape[1], across.shape[1])
            state = nothing, nothing
        weights = [into, F.dropout(across, self.drop_weights, self.training), *biases]
        out, hidden, memory = torch.lstm(
            rows, state, weights, True, 1, 0.0, self.training, False, False
        )
        return out, (hidden, memory)

    def read(self, rows: Tensor, state: State | None) -> Read:  # [T, B, d]
        """Run the layers, dropping what is to be dropped between them."""
        after: list[tuple[Tensor, Tensor]] = []
        out = locked(rows, self.drop_input, self.training)
        for number, cell in enumerate(self.cells()):
            if number:
                out = locked(out, self.drop_layers, self.training)
            out, ended = self._run(out, cell, None if state is None else state[number])
            after.append(ended)
        dropped = locked(out, self.dropout, self.training)
        added: Tensor | float = 0.0
        if self.training and self.ar:
            added = added + self.ar * dropped.square().mean()
        if self.training and self.tar and len(out) > 1:
            added = added + self.tar * (out[1:] - out[:-1]).square().mean()
        return Read(dropped, tuple(after), added)
