"""Language models over any word table: an LSTM and an AWD-LSTM, with a tied or separate softmax.

A tied softmax scores every word in every step, so the rows of all words are computed once per step
(``AllRows``): inputs are looked up in them, the softmax multiplies with them, and the table has one
backward pass.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.apps.language.settings import DropoutSettings, LanguageSettings
from featherbed.errors import ArgumentError
from featherbed.losses import SampledSoftmax, tied_cross_entropy
from featherbed.ops import check_ids
from featherbed.sharing import SSE, bare
from featherbed.tables import DenseTable, Table

State = tuple[Any, ...]  # tensors, or tuples of them
# weights of an LSTM layer, gates i, f, g, o: [4h, in], [4h, h], [4h], [4h]
LayerWeights = tuple[Tensor, Tensor, Tensor, Tensor]


class AllRows(NamedTuple):
    """The rows of all words, values [V, d], or values [V, K] of atoms [K, d] if K is less than d.

    With atoms, rows are values @ atoms, and logits use h (T A)ᵀ = (h Aᵀ) Tᵀ, which takes K / d of
    the time.
    """

    values: Tensor
    atoms: Tensor | None = None

    @classmethod
    def of(cls, table: Table) -> AllRows:
        """Return the rows of a table, in the cheaper form."""
        if table.padding_idx is None and table.weighted_codes:
            codes = table.codes(torch.zeros(1, dtype=torch.int64, device=table.device))
            if len(cast(Tensor, codes.dictionary)) < table.embedding_dim:
                codes = table.codes(torch.arange(table.num_embeddings, device=table.device))
                return cls(cast(Tensor, codes.values), codes.dictionary)
        return cls(table.weight)

    def lookup(self, ids: Tensor) -> Tensor:  # int64 [...] -> [..., d]
        """Return the rows of ids."""
        rows = F.embedding(ids, self.values)
        return rows if self.atoms is None else rows @ self.atoms

    def _queries(self, hidden: Tensor) -> Tensor:  # [..., d] -> [..., d or K]
        return hidden if self.atoms is None else hidden @ self.atoms.T

    def logits(self, hidden: Tensor, bias: Tensor) -> Tensor:  # [..., d] -> [..., V]
        """Return hidden . row + bias of every word."""
        return F.linear(self._queries(hidden), self.values, bias)

    def loss(
        self, hidden: Tensor, bias: Tensor, targets: Tensor, precision: torch.dtype | None = None
    ) -> Tensor:  # [n, d], [V], int64 [n] -> []
        """Return the mean cross-entropy."""
        return tied_cross_entropy(self._queries(hidden), self.values, bias, targets, precision)


class NetworkOutput(NamedTuple):
    """The output [T, B, width] of a network, its state, and its penalty on the loss."""

    hidden: Tensor
    state: State
    penalty: Tensor | float = 0.0


class Losses(NamedTuple):
    """The mean cross-entropy, the same with the network's penalty, and the final state."""

    cross_entropy: Tensor
    total: Tensor
    state: State


class RecurrentModel(nn.Module):
    """A recurrent language model; subclasses implement the network in ``run``.

    Args:
        words: a table, or ``fb.SSE`` over one.
        width: width of the network's output; a tied softmax needs the table's.
        tied: whether the softmax scores with the rows of ``words``, or with rows of its own.
        samples: number of sampled words of the softmax in training (``fb.SampledSoftmax``); None,
            and evaluation, use all.
        word_dropout: fraction of words whose rows are dropped throughout a batch (Gal and
            Ghahramani 2016).

    ``precision`` may be set to ``torch.bfloat16`` for the products of the softmax in training.
    """

    precision: torch.dtype | None = None

    def __init__(
        self,
        words: nn.Module,
        *,
        width: int,
        tied: bool = True,
        samples: int | None = None,
        word_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        table: Table = bare(words)
        if tied and width != table.embedding_dim:
            raise ArgumentError(
                f"hidden={width}: a tied softmax needs hidden={table.embedding_dim}, the table's "
                "width"
            )
        if samples is not None and not 1 <= samples <= table.num_embeddings:
            raise ArgumentError(
                f"samples={samples}: give from 1 to {table.num_embeddings}, the number of words"
            )
        if not 0 <= word_dropout < 1:
            raise ArgumentError(
                f"word_dropout={word_dropout}: give a fraction of at least 0 and below 1"
            )
        self.words, self.samples, self.word_dropout = words, samples, word_dropout
        self.output = None if tied else DenseTable(table.num_embeddings, width)
        if self.output is not None:
            nn.init.uniform_(self.output.weight, -(width**-0.5), width**-0.5)
        self.bias = nn.Parameter(torch.zeros(table.num_embeddings))

    @property
    def table(self) -> Table:
        """The word table."""
        table: Table = bare(self.words)
        return table

    @property
    def output_table(self) -> Table:
        """The table whose rows the softmax scores with."""
        return self.table if self.output is None else self.output

    @abstractmethod
    def run(self, rows: Tensor, state: State | None) -> NetworkOutput:  # [T, B, d]
        """Run the network over rows."""

    @abstractmethod
    def layer_weights(self) -> list[LayerWeights]:
        """Return the weights of the LSTM layers, for serving."""

    def all_rows(self) -> AllRows | None:
        """Return the rows that the softmax scores with; None if it samples words."""
        is_sampled = self.samples is not None and self.training
        return None if is_sampled else AllRows.of(self.output_table)

    def input_rows(
        self, ids: Tensor, all_rows: AllRows | None = None
    ) -> Tensor:  # int64 [T, B] -> [T, B, d]
        """Return the rows of ids as the network reads them, from ``all_rows`` where possible."""
        ids = check_ids(ids, self.table.num_embeddings)
        is_relaxed = self.training and self.table.relaxes_rows
        if all_rows is None or self.output is not None or is_relaxed:
            rows: Tensor = self.words(ids)
        else:
            rows = all_rows.lookup(self.words.share(ids) if isinstance(self.words, SSE) else ids)
        if not self.training or not self.word_dropout:
            return rows
        keep = 1 - self.word_dropout
        kept = rows.new_empty(self.table.num_embeddings).bernoulli_(keep).div_(keep)
        return rows * kept[ids][..., None]

    def forward(
        self, ids: Tensor, state: State | None = None
    ) -> tuple[Tensor, State]:  # int64 [T, B] -> [T, B, V]
        """Return the logits of the next word at every position, and the final state."""
        all_rows = AllRows.of(self.output_table)
        output = self.run(self.input_rows(ids, all_rows), state)
        return all_rows.logits(output.hidden, self.bias), output.state

    def losses(
        self,
        ids: Tensor,
        targets: Tensor,
        state: State | None = None,
        all_rows: AllRows | None = None,
    ) -> Losses:  # int64 [T, B] twice
        """Return the losses of predicting ``targets`` after ``ids``."""
        all_rows = self.all_rows() if all_rows is None else all_rows
        output = self.run(self.input_rows(ids, all_rows), state)
        if all_rows is None:
            assert self.samples is not None
            softmax = SampledSoftmax(self.output_table, self.samples, bias=self.bias)
            loss: Tensor = softmax(output.hidden, targets)
        else:
            precision = self.precision if self.training else None
            hidden = output.hidden.flatten(0, 1)
            loss = all_rows.loss(hidden, self.bias, targets.flatten(), precision)
        return Losses(loss, loss + output.penalty, output.state)


class LSTMModel(RecurrentModel):
    """An LSTM with dropout before and after it.

    >>> import featherbed as fb
    >>> model = LSTMModel(fb.AnchorTable(100, 16, anchors=8), hidden=16)
    >>> model(torch.zeros(5, 2, dtype=torch.int64))[0].shape
    torch.Size([5, 2, 100])
    """

    def __init__(
        self,
        words: nn.Module,
        *,
        hidden: int = 200,
        layers: int = 2,
        tied: bool = True,
        samples: int | None = None,
        dropout: float = 0.2,
        word_dropout: float = 0.0,
    ) -> None:
        super().__init__(words, width=hidden, tied=tied, samples=samples, word_dropout=word_dropout)
        between = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(self.table.embedding_dim, hidden, layers, dropout=between)
        self.dropout = nn.Dropout(dropout)

    def run(self, rows: Tensor, state: State | None) -> NetworkOutput:
        """Dropout, LSTM, dropout."""
        hidden, state = self.lstm(self.dropout(rows), state)
        return NetworkOutput(self.dropout(hidden), state)

    def layer_weights(self) -> list[LayerWeights]:
        """Return the weights of the LSTM layers."""
        return [cast(LayerWeights, tuple(layer)) for layer in self.lstm.all_weights]


class AWDLSTMModel(RecurrentModel):
    """An AWD-LSTM (Merity, Keskar and Socher 2017); with a tied softmax the last layer has width d.

    Dropout applies to words, features of rows, features between layers and of the output (the same
    at all positions of a text), and hidden-to-hidden weights (DropConnect, Wan et al. 2013). The
    penalty of the last layer's output h, h̃ after dropout, is

        ar mean(h̃²) + tar mean((h_t - h_(t-1))²).

    Their optimizer is ``fb.Averaged``.

    >>> import featherbed as fb
    >>> model = AWDLSTMModel(fb.AnchorTable(100, 16, anchors=8), hidden=24, layers=3)
    >>> [layer.hidden_size for layer in model.layers]
    [24, 24, 16]
    >>> model(torch.zeros(5, 2, dtype=torch.int64))[0].shape
    torch.Size([5, 2, 100])
    """

    def __init__(
        self,
        words: nn.Module,
        *,
        hidden: int = 1150,
        layers: int = 3,
        tied: bool = True,
        samples: int | None = None,
        dropout: DropoutSettings | None = None,
    ) -> None:
        for name, value in (("hidden", hidden), ("layers", layers)):
            if value < 1:
                raise ArgumentError(f"{name}={value}: give a whole number of at least 1")
        rates = dropout or DropoutSettings(output=0.4, words=0.1)
        dim = bare(words).embedding_dim
        widths = [dim, *[hidden] * (layers - 1), dim if tied else hidden]
        super().__init__(
            words, width=widths[-1], tied=tied, samples=samples, word_dropout=rates.words
        )
        self.layers = nn.ModuleList(nn.LSTM(a, b) for a, b in pairwise(widths))
        self.rates = rates

    def layer_weights(self) -> list[LayerWeights]:
        """Return the weights of the LSTM layers."""
        layers = [cast(nn.LSTM, layer) for layer in self.layers]
        return [cast(LayerWeights, tuple(layer.all_weights[0])) for layer in layers]

    def _run_layer(
        self, rows: Tensor, layer: LayerWeights, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run one layer with dropout of its hidden-to-hidden weights."""
        inputs, recurrent, *biases = layer
        if state is None:
            zeros = rows.new_zeros(1, rows.shape[1], recurrent.shape[1])
            state = zeros, zeros
        weights = [inputs, F.dropout(recurrent, self.rates.weights, self.training), *biases]
        out, hidden, memory = torch.lstm(
            rows, state, weights, True, 1, 0.0, self.training, False, False
        )
        return out, (hidden, memory)

    def run(self, rows: Tensor, state: State | None) -> NetworkOutput:  # [T, B, d]
        """Run the layers with dropout between them."""
        rates, states = self.rates, list[tuple[Tensor, Tensor]]()
        out = locked_dropout(rows, rates.input, self.training)
        for number, layer in enumerate(self.layer_weights()):
            if number:
                out = locked_dropout(out, rates.layers, self.training)
            out, final = self._run_layer(out, layer, None if state is None else state[number])
            states.append(final)
        dropped = locked_dropout(out, rates.output, self.training)
        penalty: Tensor | float = 0.0
        if self.training and rates.ar:
            penalty = penalty + rates.ar * dropped.square().mean()
        if self.training and rates.tar and len(out) > 1:
            penalty = penalty + rates.tar * (out[1:] - out[:-1]).square().mean()
        return NetworkOutput(dropped, tuple(states), penalty)


def locked_dropout(rows: Tensor, rate: float, training: bool) -> Tensor:  # [T, B, d] -> [T, B, d]
    """Drop features, the same at all positions of a text (Gal and Ghahramani 2016).

    >>> out = locked_dropout(torch.ones(3, 1, 100), 0.5, True)
    >>> bool((out[0] == out[2]).all()), sorted(set(out.flatten().tolist()))
    (True, [0.0, 2.0])
    """
    if not training or not rate:
        return rows
    mask = rows.new_empty(1, *rows.shape[1:]).bernoulli_(1 - rate).div_(1 - rate)
    return rows * mask


def build_model(settings: LanguageSettings, words: nn.Module, seed: int) -> RecurrentModel:
    """Build the model from its settings."""
    torch.manual_seed(seed)  # torch initializes layers from its global generator
    network, dropout, count = settings.model, settings.dropout, bare(words).num_embeddings
    samples = min(network.samples, count) if network.softmax == "sampled" else None
    shared: dict[str, Any] = {"hidden": settings.width, "layers": network.layers}
    shared |= {"tied": network.tied, "samples": samples}
    if network.kind == "lstm":
        model: RecurrentModel = LSTMModel(
            words, **shared, dropout=dropout.output, word_dropout=dropout.words
        )
    else:
        model = AWDLSTMModel(words, **shared, dropout=dropout)
    model.precision = torch.bfloat16 if network.precision == "bfloat16" else None
    return model
