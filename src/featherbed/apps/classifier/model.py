"""Networks that classify texts over any word table: a CNN, and the mean of a text's rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.apps.classifier.data import ClassifierModelSettings, Documents
from featherbed.errors import ArgumentError
from featherbed.ops import check_ids
from featherbed.sharing import SSE
from featherbed.tables import Table

BLOCK = 32  # texts whose windows are compared together, so that they stay in the cache


class TextNetwork(nn.Module):
    """A network over the rows of a text's words; ``words`` is a table, or ``fb.SSE`` over one."""

    kind: str
    widths: tuple[int, ...] = ()
    output: nn.Linear

    words: Table | SSE

    def __init__(self, words: Table | SSE) -> None:
        super().__init__()
        self.words = words

    @property
    def table(self) -> Table:
        """The word table."""
        return cast(Table, self.words.table) if isinstance(self.words, SSE) else self.words

    @abstractmethod
    def logits(self, documents: Documents, index: NDArray[np.int64], length: int) -> Tensor:
        """Return the logits [B, classes] of the texts at ``index``."""

    @abstractmethod
    def own_arrays(self) -> dict[str, Tensor]:
        """Return the weights before the last layer, named as ``ClassifierShape`` names them."""

    @torch.no_grad()
    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return the weights besides the table, as ``write_classifier`` takes them."""
        arrays = self.own_arrays()
        last = sum(name.endswith(".weight") and name.startswith("layer") for name in arrays)
        arrays |= {f"layer{last}.weight": self.output.weight, f"layer{last}.bias": self.output.bias}
        return {name: value.detach().float().numpy().copy() for name, value in arrays.items()}

    def distinct_words(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # [...] -> [U], index [...]
        """Return the distinct ids of a batch, shared by SSE first, and the index of each word.

        With tables whose rows differ between occurrences in training (relaxed codes, noise), every
        occurrence counts.
        """
        shared = self.words.share(ids) if isinstance(self.words, SSE) else ids
        ids = check_ids(shared, self.table.num_embeddings)
        if self.table.training and self.table.relaxes_rows:
            return ids.reshape(-1), torch.arange(ids.numel()).reshape(ids.shape)
        distinct, index = torch.unique(ids, return_inverse=True)
        return distinct, index


def rows_times(table: Table, ids: Tensor, matrix: Tensor) -> Tensor:  # [U], [d, n] -> [U, n]
    """Return row(i) @ matrix, through the atoms where every row weighs all of them."""
    if not table.weighted_codes:
        product: Tensor = table(ids) @ matrix
        return product
    codes = table.codes(ids)
    values, atoms = cast(Tensor, codes.values), cast(Tensor, codes.dictionary)
    return table.mask_padding(ids, values) @ (atoms @ matrix)


class TextCNN(TextNetwork):
    """Convolutions over words, max pooling, a linear layer (Kim 2014; Liang et al. 2021, Table 6).

        h_f = relu(b_f + max_t Σ_j w_fj · row(x_{t+j})),    logits = W dropout(h) + c

    The maximum is the same before and after the relu. The product of a filter and a row does not
    depend on the text, so it is computed once for the distinct words of a batch; with anchors, once
    for the anchors. Gradients pass through the maximal windows only.

    >>> import featherbed as fb
    >>> model = TextCNN(fb.AnchorTable(100, 16, anchors=4, padding_idx=0), classes=3, channels=5)
    >>> model(torch.tensor([[5, 6, 7, 8, 9, 0, 0]])).shape
    torch.Size([1, 3])
    """

    kind = "cnn"

    def __init__(
        self,
        words: Table | SSE,
        classes: int,
        widths: Sequence[int] = (3, 4, 5),
        channels: int = 100,
        dropout: float = 0.5,
    ) -> None:
        super().__init__(words)
        if not widths or min(widths) < 1 or channels < 1:
            raise ArgumentError(
                f"widths={tuple(widths)}, channels={channels}: give whole numbers of at least 1"
            )
        self.widths, self.channels = tuple(widths), channels
        dim = self.table.embedding_dim
        self.windows = nn.ModuleList(nn.Conv1d(dim, channels, width) for width in self.widths)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(channels * len(self.widths), classes)

    def _convolutions(self) -> list[nn.Conv1d]:
        return [cast(nn.Conv1d, window) for window in self.windows]

    def products(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # [B, L] -> [U, n], index [B, L]
        """Return the product of each distinct word with each filter position, and word indices.

        The first result is [U * Σ widths, channels]: for each word, the positions of each width.
        """
        distinct, index = self.distinct_words(ids)
        filters = [window.weight.permute(1, 2, 0).flatten(1) for window in self._convolutions()]
        products = rows_times(self.table, distinct, torch.cat(filters, dim=1))
        return products.view(-1, self.channels), index

    @torch.no_grad()
    def best_windows(
        self, products: Tensor, index: Tensor, first: int, width: int
    ) -> Tensor:  # [B, L] -> [B, channels]
        """Return the start of the maximal window of each channel."""
        count, starts = index.shape[1] - width + 1, []
        for block in torch.split(index * sum(self.widths) + first, BLOCK):
            total = F.embedding(block[:, :count], products)
            for at in range(1, width):
                total += F.embedding(block[:, at : at + count] + at, products)
            starts.append(total.max(dim=1).indices)
        return torch.cat(starts)

    def features(self, ids: Tensor) -> Tensor:  # int64 [B, L] -> [B, channels * widths]
        """Return the maximum of every filter, after the relu."""
        widest = max(self.widths)
        if ids.shape[1] < widest:
            ids = F.pad(ids, (0, widest - ids.shape[1]), value=self.table.padding_idx or 0)
        products, index = self.products(ids)
        channel, first, positions = torch.arange(self.channels)[:, None], 0, []
        for width in self.widths:
            steps = torch.arange(width)
            start = self.best_windows(products, index, first, width)[..., None]  # [B, channels, 1]
            words = index[:, None, :].expand(-1, self.channels, -1).gather(2, start + steps)
            row = words * sum(self.widths) + first + steps
            positions.append((row * self.channels + channel).flatten(1))
            first += width
        gathered = torch.cat(positions, dim=1)  # one gather, so that its gradient is made once
        maxima = products.reshape(-1).gather(0, gathered.reshape(-1)).view(gathered.shape)
        parts = torch.split(maxima, [self.channels * width for width in self.widths], dim=1)
        sums = [part.view(len(ids), self.channels, -1).sum(2) for part in parts]
        biases = [cast(Tensor, window.bias) for window in self._convolutions()]
        return (torch.cat(sums, dim=1) + torch.cat(biases)).relu()

    def forward(self, ids: Tensor) -> Tensor:  # int64 [B, L], padded -> [B, classes]
        """Return the logits of the classes."""
        logits: Tensor = self.output(self.dropout(self.features(ids)))
        return logits

    def logits(self, documents: Documents, index: NDArray[np.int64], length: int) -> Tensor:
        """Return the logits [B, classes] of the texts at ``index``, padded up to ``length``."""
        widest = max(self.widths)
        ids = documents.padded(index, minimum=widest, extra=widest, length=length)
        logits: Tensor = self(torch.from_numpy(ids))
        return logits

    def own_arrays(self) -> dict[str, Tensor]:
        """Return the filters [channels, width * d] and their biases."""
        arrays: dict[str, Tensor] = {}
        for width, window in zip(self.widths, self._convolutions(), strict=True):
            arrays[f"width{width}.weight"] = window.weight.permute(0, 2, 1).flatten(1)
            arrays[f"width{width}.bias"] = cast(Tensor, window.bias)
        return arrays


class BagOfWords(TextNetwork):
    """The mean of a text's rows and a linear layer, with ``hidden`` a layer and norms between.

        logits = W mean(rows) + c,    or    W relu(norm(U relu(norm(mean(rows))))) + c

    The second is the network of the KD and DPQ papers. Padding does not count in the mean.

    >>> import featherbed as fb
    >>> model = BagOfWords(fb.DenseTable(100, 16, padding_idx=0), classes=3)
    >>> model(torch.tensor([[5, 6, 0], [7, 8, 9]])).shape
    torch.Size([2, 3])
    >>> model.pooled(torch.tensor([5, 6, 7]), torch.tensor([0, 2])).shape
    torch.Size([2, 3])
    """

    kind = "bag"

    def __init__(
        self, words: Table | SSE, classes: int, dropout: float = 0.0, hidden: int | None = None
    ) -> None:
        super().__init__(words)
        if hidden is not None and hidden < 1:
            raise ArgumentError(
                f"hidden={hidden}: give a whole number of at least 1, or None for no hidden layer"
            )
        dim = self.table.embedding_dim
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Sequential()
        if hidden is not None:
            self.hidden = nn.Sequential(
                nn.BatchNorm1d(dim),
                nn.ReLU(),
                nn.Linear(dim, hidden),
                nn.BatchNorm1d(hidden),
                nn.ReLU(),
            )
        self.output = nn.Linear(dim if hidden is None else hidden, classes)

    def forward(self, ids: Tensor) -> Tensor:  # int64 [B, L], padded -> [B, classes]
        """Return the logits of the classes."""
        padding = self.table.padding_idx
        is_word = torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding
        return self.pooled(ids[is_word], F.pad(is_word.sum(1).cumsum(0)[:-1], (1, 0)))

    def pooled(self, ids: Tensor, offsets: Tensor) -> Tensor:  # int64 [N], [B] -> [B, classes]
        """Return the logits of concatenated texts, each starting at its offset."""
        distinct, index = self.distinct_words(ids)
        mean = F.embedding_bag(index, self.table(distinct), offsets, mode="mean")
        logits: Tensor = self.output(self.dropout(self.hidden(mean)))
        return logits

    def logits(
        self,
        documents: Documents,
        index: NDArray[np.int64],
        length: int,  # noqa: ARG002
    ) -> Tensor:
        """Return the logits [B, classes] of the texts at ``index``."""
        ids, offsets = documents.bags(index)
        return self.pooled(torch.from_numpy(ids), torch.from_numpy(offsets))

    def own_arrays(self) -> dict[str, Tensor]:
        """Return the first norm and the hidden layer, with the second norm folded into it."""
        if not len(self.hidden):
            return {}
        first, _, layer, second, _ = cast(Any, self.hidden)
        scale, shift = _fold_norm(first)
        factor, offset = _fold_norm(second)
        return {
            "norm.scale": scale,
            "norm.shift": shift,
            "layer0.weight": layer.weight * factor[:, None],
            "layer0.bias": layer.bias * factor + offset,
        }


def _fold_norm(norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:  # -> [d], [d]
    """Return scale and shift of a batch norm in evaluation."""
    scale = norm.weight / torch.sqrt(cast(Tensor, norm.running_var) + norm.eps)
    return scale, norm.bias - scale * cast(Tensor, norm.running_mean)


def build_network(
    settings: ClassifierModelSettings, words: Table | SSE, classes: int
) -> TextNetwork:
    """Build the network from its settings."""
    if settings.kind == "cnn":
        return TextCNN(words, classes, settings.widths, settings.channels, settings.dropout)
    return BagOfWords(words, classes, settings.dropout, settings.hidden)
