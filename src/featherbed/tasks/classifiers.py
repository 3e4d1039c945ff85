"""Classifiers of texts over any table: a convolutional net, and a bag of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.ops import check_ids
from featherbed.sharing.sse import SSE, bare
from featherbed.tables import AnchorTable, LowRankTable, MixtureTable, Table

TEXTS = 32  # whose windows are looked at together, so that they stay in the cache


def distinct_words(
    words: nn.Module, ids: Tensor
) -> tuple[Tensor, Tensor]:  # [...] -> [U], places [...]
    """Return the distinct ids of a batch, and which of them stands where.

    Ids are shared first where an SSE stands before the table. Of tables whose rows differ from one occurrence to the next while
    training (relaxed codes, noise) every occurrence counts.
    """
    table: Table = bare(words)
    ids = check_ids(words.share(ids) if isinstance(words, SSE) else ids, table.num_embeddings)
    if table.training and type(table).seen is not Table.seen:
        return ids.reshape(-1), torch.arange(ids.numel()).reshape(ids.shape)
    distinct, places = torch.unique(ids, return_inverse=True)
    return distinct, places


def times(table: Table, ids: Tensor, matrix: Tensor) -> Tensor:  # [U], [d, n] -> [U, n]
    """Return row(i) @ matrix: through the atoms where rows weigh a few of them all, which is much less work."""
    codes = (
        table.codes(ids) if isinstance(table, AnchorTable | MixtureTable | LowRankTable) else None
    )
    if (
        codes is None
        or codes.indices is not None
        or codes.values is None
        or codes.dictionary is None
    ):
        product: Tensor = table(ids) @ matrix
        return product
    return table.mask_padding(ids, codes.values) @ (codes.dictionary @ matrix)


class TextCNN(nn.Module):
    """Windows of words, the strongest of each filter, a linear layer (Kim 2014; Liang et al. 2021, Table 6).

        h_f = relu(b_f + max_t Σ_j w_fj · row(x_{t+j})),    logits = W dropout(h) + c

    The strongest window is the same before the relu and after it. What a filter says to a word does not depend on the text, so
    it is computed once for the distinct words of a batch; with anchors, whose rows are few, once for the anchors. Gradients run
    through the strongest windows only, as they do behind a maximum.

    >>> import featherbed as fb
    >>> model = TextCNN(fb.AnchorTable(100, 16, anchors=4, padding_idx=0), classes=3, channels=5)
    >>> model(torch.tensor([[5, 6, 7, 8, 9, 0, 0]])).shape
    torch.Size([1, 3])
    """

    def __init__(
        self,
        table: nn.Module,
        classes: int,
        widths: Sequence[int] = (3, 4, 5),
        channels: int = 100,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if not widths or min(widths) < 1 or channels < 1:
            raise ArgumentError(
                f"widths={tuple(widths)}, channels={channels}: give whole numbers of at least 1"
            )
        self.words, self.widths, self.channels = table, tuple(widths), channels
        dim = bare(table).embedding_dim
        self.windows = nn.ModuleList(nn.Conv1d(dim, channels, width) for width in self.widths)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(channels * len(self.widths), classes)

    def filters(self) -> Tensor:  # [d, Σ widths * channels]
        """Return all filters side by side: of each width, of each place in the window, the channels."""
        return torch.cat(
            [window.weight.permute(1, 2, 0).flatten(1) for window in self._windows()], dim=1
        )

    def _windows(self) -> list[nn.Conv1d]:
        return [window for window in self.windows if isinstance(window, nn.Conv1d)]

    def answers(
        self, ids: Tensor
    ) -> tuple[Tensor, Tensor]:  # [B, L] -> [U * Σ widths, channels], places [B, L]
        """Return what every place of every filter says to each distinct word, and which word stands where."""
        distinct, places = distinct_words(self.words, ids)
        said = times(bare(self.words), distinct, self.filters())
        return said.view(-1, self.channels), places

    @torch.no_grad()
    def strongest(
        self, said: Tensor, places: Tensor, first: int, width: int
    ) -> Tensor:  # [B, L] -> [B, channels]
        """Return where the strongest window of each channel begins."""
        count, found = places.shape[1] - width + 1, []
        for some in torch.split(places * sum(self.widths) + first, TEXTS):
            total = F.embedding(some[:, :count], said)
            for at in range(1, width):
                total += F.embedding(some[:, at : at + count] + at, said)
            found.append(total.max(dim=1).indices)
        return torch.cat(found)

    def features(self, ids: Tensor) -> Tensor:  # int64 [B, L] -> [B, channels * widths]
        """Return the strongest answer of every filter, after the relu."""
        longest = max(self.widths)
        if ids.shape[1] < longest:
            ids = F.pad(ids, (0, longest - ids.shape[1]), value=bare(self.words).padding_idx or 0)
        said, places = self.answers(ids)
        channel, first, at = torch.arange(self.channels)[:, None], 0, []
        for width in self.widths:
            steps = torch.arange(width)
            begin = self.strongest(said, places, first, width)[..., None]  # [B, channels, 1]
            words = places[:, None, :].expand(-1, self.channels, -1).gather(2, begin + steps)
            at.append(
                ((words * sum(self.widths) + first + steps) * self.channels + channel).flatten(1)
            )
            first += width
        index = torch.cat(at, dim=1)  # one gather: its gradient is as large as what was said
        answers = said.reshape(-1).gather(0, index.reshape(-1)).view(index.shape)
        parts = torch.split(answers, [self.channels * width for width in self.widths], dim=1)
        sums = [part.view(len(ids), self.channels, -1).sum(2) for part in parts]
        return (
            torch.cat(sums, dim=1)
            + torch.cat([cast(Tensor, window.bias) for window in self._windows()])
        ).relu()

    def forward(self, ids: Tensor) -> Tensor:  # int64 [B, L], padded -> [B, classes]
        """Return the logits of the classes."""
        logits: Tensor = self.output(self.dropout(self.features(ids)))
        return logits


class BagClassifier(nn.Module):
    """The mean of a text's rows, then a linear layer; with ``hidden`` a layer between, batch norms and relus.

        logits = W mean(rows) + c,    or    W relu(norm(U relu(norm(mean(rows))))) + c

    The second is the net that KD and DPQ codes were tried on. Padding does not count in the mean.

    >>> import featherbed as fb
    >>> model = BagClassifier(fb.DenseTable(100, 16, padding_idx=0), classes=3)
    >>> model(torch.tensor([[5, 6, 0], [7, 8, 9]])).shape, model.pooled(torch.tensor([5, 6, 7]), torch.tensor([0, 2])).shape
    (torch.Size([2, 3]), torch.Size([2, 3]))
    """

    def __init__(
        self, table: nn.Module, classes: int, dropout: float = 0.0, hidden: int | None = None
    ) -> None:
        super().__init__()
        if hidden is not None and hidden < 1:
            raise ArgumentError(
                f"hidden={hidden}: give a whole number of at least 1, or None for no layer between"
            )
        self.words, self.dropout = table, nn.Dropout(dropout)
        dim = bare(table).embedding_dim
        self.between = nn.Sequential()
        if hidden is not None:
            self.between = nn.Sequential(
                nn.BatchNorm1d(dim),
                nn.ReLU(),
                nn.Linear(dim, hidden),
                nn.BatchNorm1d(hidden),
                nn.ReLU(),
            )
        self.output = nn.Linear(dim if hidden is None else hidden, classes)

    def forward(self, ids: Tensor) -> Tensor:  # int64 [B, L], padded -> [B, classes]
        """Return the logits of the classes."""
        padding = bare(self.words).padding_idx
        there = torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding
        return self.pooled(ids[there], F.pad(there.sum(1).cumsum(0)[:-1], (1, 0)))

    def pooled(self, ids: Tensor, offsets: Tensor) -> Tensor:  # int64 [N], [B] -> [B, classes]
        """Return the logits of texts that lie one after another, each beginning at its offset."""
        distinct, places = distinct_words(self.words, ids)
        mean = F.embedding_bag(places, bare(self.words)(distinct), offsets, mode="mean")
        logits: Tensor = self.output(self.dropout(self.between(mean)))
        return logits


def check_dropout(dropout: float) -> float:
    """Return a share from 0 to below 1, or say what is wrong with it."""
    if isinstance(dropout, bool) or not (math.isfinite(dropout) and 0 <= dropout < 1):
        raise ArgumentError(f"dropout={dropout!r}: give a share from 0 to below 1")
    return float(dropout)
