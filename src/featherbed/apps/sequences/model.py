"""SASRec and SSE-PT: a causal transformer over the items of a user, over any item table.

    x_0 = p_0,  x_t = sqrt(d) row(i_t) + p_t          (SSE-PT: beside it sqrt(u) row(user))
    x <- x + attention(norm(x)),  x <- x + W2 relu(W1 norm(x) + b1) + b2       layer by layer
    logits after t items = norm(x_t)[:d] . row(v) for all items v

Kang and McAuley (2018) with a softmax over all items instead of one negative item, Wu et al. (2020)
for users. The first position has no item: it predicts the first item of a history. Input ids and
targets are replaced (SSE) independently, after the sequence is built. In the softmax a user's part
of an output, as published, would be the same for all items, so it is left out.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.apps.sequences.settings import TransformerSettings
from featherbed.losses import SampledSoftmax, tied_cross_entropy
from featherbed.sharing import SSE
from featherbed.tables import DenseTable, Table


class AttentionBlock(nn.Module):
    """Attention to earlier positions, then a feed-forward layer, each on normalized input."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # [B, L, w] -> [B, L, w]
        """Return the output of every position."""
        count, length, width = x.shape
        parts = self.attention(self.norm1(x)).view(count, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).reshape(count, length, width)))
        found: Tensor = x + self.dropout(self.contract(F.relu(self.expand(self.norm2(x)))))
        return found


class SequenceModel(nn.Module):
    """SASRec over an item table, with ``users`` SSE-PT.

    Args:
        inputs: the item table as the model reads it: ``fb.SSE`` over it.
        targets: the same table, whose ``share`` replaces targets.
        settings: of the transformer.
        users: a table of users, or ``fb.SSE`` over one.
        samples: number of sampled items of the softmax in training; None uses all.

    >>> import featherbed as fb
    >>> items = fb.DenseTable(50, 8)
    >>> model = SequenceModel(fb.SSE(items, 0.1), fb.SSE(items, 0.0), TransformerSettings(length=9))
    >>> model.scores(torch.zeros(2, 5, dtype=torch.int64), torch.tensor([5, 3])).shape
    torch.Size([2, 50])
    """

    def __init__(
        self,
        inputs: SSE,
        targets: SSE,
        settings: TransformerSettings,
        *,
        users: nn.Module | None = None,
        samples: int | None = None,
    ) -> None:
        super().__init__()
        table: Table = inputs.table  # type: ignore[assignment]
        self.inputs, self.targets, self.users, self.samples = inputs, targets, users, samples
        width = table.embedding_dim + (0 if users is None else int(users.embedding_dim))  # type: ignore[arg-type]
        self.positions = nn.Parameter(torch.zeros(settings.length + 1, width))
        inner = settings.inner * width
        self.blocks = nn.ModuleList(
            AttentionBlock(width, settings.heads, inner, settings.dropout)
            for _ in range(settings.layers)
        )
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(settings.dropout)

    @property
    def table(self) -> Table:
        """The item table."""
        table: Table = self.inputs.table  # type: ignore[assignment]
        return table

    def initialize(self, generator: torch.Generator) -> None:
        """Draw the weights of the transformer: N(0, 0.02²), Xavier for matrices."""
        nn.init.normal_(self.positions, std=0.02, generator=generator)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, generator=generator)
                nn.init.zeros_(module.bias)

    def hidden(
        self, ids: Tensor, users: Tensor | None = None, rows: Tensor | None = None
    ) -> Tensor:  # int64 [B, L - 1], [B], [V, d] -> [B, L, d]
        """Return the outputs before the first item and after every item.

        ``rows`` are the rows of all items, if they are known; without ``users`` every user has the
        mean row.
        """
        shared = self.inputs.share(ids)
        relaxed = self.training and self.table.relaxes_rows
        x = self.table(shared) if rows is None or relaxed else F.embedding(shared, rows)
        x = F.pad(x * math.sqrt(self.table.embedding_dim), (0, 0, 1, 0))  # nothing before the first
        if self.users is not None:
            own = self.user_rows(users, len(ids))[:, None].expand(-1, x.shape[1], -1)
            x = torch.cat([x, own * math.sqrt(own.shape[-1])], dim=-1)
        x = self.dropout(x + self.positions[: x.shape[1]])
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.norm(x)[..., : self.table.embedding_dim]
        return found

    def user_rows(self, users: Tensor | None, count: int) -> Tensor:  # int64 [B] -> [B, u]
        """Return the rows of users, or ``count`` times the mean row."""
        assert self.users is not None
        if users is not None:
            rows: Tensor = self.users(users)
            return rows
        mean: Tensor = self.users.weight.mean(0)  # type: ignore[operator]
        return mean.expand(count, -1)

    def loss(
        self, targets: Tensor, lengths: Tensor, users: Tensor | None = None
    ) -> Tensor:  # int64 [B, L], [B], [B] -> []
        """Return the mean cross-entropy of the items of windows, each from those before it."""
        rows = None if self.samples is not None else self.table.weight
        hidden = self.hidden(targets[:, :-1], users, rows)
        real = torch.arange(targets.shape[1]) < lengths[:, None]
        wanted = self.targets.share(targets)[real]
        if rows is not None:
            return tied_cross_entropy(hidden[real], rows, None, wanted)
        assert self.samples is not None
        loss: Tensor = SampledSoftmax(self.table, self.samples)(hidden[real], wanted)
        return loss

    def scores(
        self,
        ids: Tensor,
        lengths: Tensor,
        users: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:  # int64 [B, n], [B], [B], [V, d] -> [B, V]
        """Return the logits of the item after the first ``lengths`` items of each row."""
        hidden = self.hidden(ids, users, rows)
        return self.table.logits(hidden[torch.arange(len(ids)), lengths])


def build_model(
    settings: TransformerSettings,
    inputs: SSE,
    targets: SSE,
    users: nn.Module | None,
    samples: int | None,
    generator: torch.Generator,
) -> SequenceModel:
    """Return a model with initial weights."""
    model = SequenceModel(inputs, targets, settings, users=users, samples=samples)
    model.initialize(generator)
    return model


def build_users(count: int, width: int, p: float, generator: torch.Generator) -> SSE:
    """Return a table of users with SSE."""
    table = DenseTable(count, width, generator=generator)
    table.scale_initial_rows(width**-0.5)
    return SSE(table, p, generator=generator)
