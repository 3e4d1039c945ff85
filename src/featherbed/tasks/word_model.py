"""What language models share: words in through any table, a softmax out through the same table (tied) or another.

A tied softmax scores every word in every step, so the rows of all words are made once a step (``AllRows``): positions look
theirs up in them, the softmax multiplies with them, and the table has one backward pass.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.losses import SampledSoftmax
from featherbed.losses.tied import tied_cross_entropy
from featherbed.ops import check_ids
from featherbed.sharing.sse import SSE, bare
from featherbed.tables import DenseTable
from featherbed.tables.table import Table

State = tuple[Any, ...]  # tensors, or tuples of them
Cell = tuple[
    Tensor, Tensor, Tensor, Tensor
]  # of one LSTM layer, gates i, f, g, o: [4h, in], [4h, h], [4h], [4h]


class AllRows(NamedTuple):
    """The rows of all words, values [V, d], or values [V, K] of atoms [K, d] where these are fewer than d.

    In the second case rows are values @ atoms, and logits go through the atoms: h (T A)ᵀ = (h Aᵀ) Tᵀ costs K / d of the time.
    """

    values: Tensor
    atoms: Tensor | None = None

    @classmethod
    def of(cls, table: Table) -> AllRows:
        """Make the rows of a table, by the way that costs least."""
        if table.padding_idx is None and not isinstance(table, DenseTable):
            codes = table.codes(torch.zeros(1, dtype=torch.int64, device=table.device))
            every = codes.indices is None and codes.then is None and codes.combine == "sum"
            if (
                every
                and codes.dictionary is not None
                and len(codes.dictionary) < table.embedding_dim
            ):
                codes = table.codes(torch.arange(table.num_embeddings, device=table.device))
                return cls(cast(Tensor, codes.values), codes.dictionary)
        return cls(table.weight)

    def take(self, ids: Tensor) -> Tensor:  # int64 [...] -> [..., d]
        """Look rows up."""
        rows = F.embedding(ids, self.values)
        return rows if self.atoms is None else rows @ self.atoms

    def queries(self, hidden: Tensor) -> Tensor:  # [..., d] -> [..., d or K]
        """Return what the values are multiplied with."""
        return hidden if self.atoms is None else hidden @ self.atoms.T

    def logits(self, hidden: Tensor, bias: Tensor) -> Tensor:  # [..., d] -> [..., V]
        """Return hidden . row + bias of every word."""
        return F.linear(self.queries(hidden), self.values, bias)

    def loss(
        self, hidden: Tensor, bias: Tensor, targets: Tensor, precision: torch.dtype | None = None
    ) -> Tensor:  # [n, d], [V], int64 [n] -> []
        """Return the mean cross-entropy."""
        return tied_cross_entropy(self.queries(hidden), self.values, bias, targets, precision)


class Read(NamedTuple):
    """What a net makes of rows: vectors [T, B, width] for the softmax, its state, and what it adds to the loss."""

    hidden: Tensor
    state: State
    added: Tensor | float = 0.0


class Losses(NamedTuple):
    """The mean cross-entropy, the same with what the net adds to it, and the state after the last word."""

    plain: Tensor
    whole: Tensor
    state: State


class WordModel(nn.Module):
    """What language models share: a net says in ``read`` what it makes of rows; the softmax is over all words.

    Args:
        words: a table, or ``fb.SSE`` over one.
        width: of the net's output; a tied softmax needs the table's.
        tied: whether the softmax scores by the rows of ``words``; otherwise by rows of its own.
        samples: the softmax of training sees so many sampled words (``fb.SampledSoftmax``); None: all. Evaluation sees all.
        drop_words: share of the words whose rows are dropped, everywhere in a batch (Gal and Ghahramani 2016).

    ``precision`` may be set to ``torch.bfloat16``: the products of the softmax are then rounded in training.
    """

    precision: torch.dtype | None = None

    def __init__(
        self,
        words: nn.Module,
        *,
        width: int,
        tied: bool = True,
        samples: int | None = None,
        drop_words: float = 0.0,
    ) -> None:
        super().__init__()
        table: Table = bare(words)
        if tied and width != table.embedding_dim:
            raise ArgumentError(
                f"a tied softmax needs hidden={table.embedding_dim}, the table's width; got hidden={width}"
            )
        if samples is not None and not 1 <= samples <= table.num_embeddings:
            raise ArgumentError(
                f"samples={samples}: give from 1 to {table.num_embeddings}, the number of words"
            )
        self.words, self.samples, self.drop_words = (
            words,
            samples,
            check_share("drop_words", drop_words),
        )
        self.output = None if tied else DenseTable(table.num_embeddings, width)
        if self.output is not None:
            nn.init.uniform_(self.output.weight, -(width**-0.5), width**-0.5)
        self.bias = nn.Parameter(torch.zeros(table.num_embeddings))

    @property
    def table(self) -> Table:
        """The table of the words."""
        found: Table = bare(self.words)
        return found

    @property
    def scored(self) -> Table:
        """The table whose rows the softmax scores by."""
        return self.table if self.output is None else self.output

    @abstractmethod
    def read(self, rows: Tensor, state: State | None) -> Read:  # [T, B, d]
        """Run the net over rows."""

    @abstractmethod
    def cells(self) -> list[Cell]:
        """Return the weights of the LSTM layers, for serving."""

    def all_rows(self) -> AllRows | None:
        """Return the rows the softmax scores by; None where few are sampled."""
        return None if self.samples is not None and self.training else AllRows.of(self.scored)

    def rows_of(
        self, ids: Tensor, everything: AllRows | None = None
    ) -> Tensor:  # int64 [T, B] -> [T, B, d]
        """Return the rows of ids as the net sees them, from those of all words if they are made already."""
        ids = check_ids(ids, self.table.num_embeddings)
        relaxed = self.training and type(self.table).seen is not Table.seen
        if everything is None or self.output is not None or relaxed:
            rows: Tensor = self.words(ids)
        else:
            rows = everything.take(self.words.share(ids) if isinstance(self.words, SSE) else ids)
        if not self.training or not self.drop_words:
            return rows
        kept = (
            rows.new_empty(self.table.num_embeddings)
            .bernoulli_(1 - self.drop_words)
            .div_(1 - self.drop_words)
        )
        return rows * kept[ids][..., None]

    def forward(
        self, ids: Tensor, state: State | None = None
    ) -> tuple[Tensor, State]:  # int64 [T, B] -> [T, B, V]
        """Return the logits of the next word at every place, and the net's state after the last."""
        everything = AllRows.of(self.scored)
        found = self.read(self.rows_of(ids, everything), state)
        return everything.logits(found.hidden, self.bias), found.state

    def losses(
        self,
        ids: Tensor,
        targets: Tensor,
        state: State | None = None,
        everything: AllRows | None = None,
    ) -> Losses:  # int64 [T, B] twice
        """Return the losses of predicting ``targets`` after ``ids``; ``everything`` are rows made before, in evaluation."""
        everything = self.all_rows() if everything is None else everything
        found = self.read(self.rows_of(ids, everything), state)
        if everything is None:
            assert self.samples is not None
            plain: Tensor = SampledSoftmax(self.scored, self.samples, bias=self.bias)(
                found.hidden, targets
            )
        else:
            rounded = self.precision if self.training else None
            plain = everything.loss(
                found.hidden.flatten(0, 1), self.bias, targets.flatten(), rounded
            )
        return Losses(plain, plain + found.added, found.state)


def check_share(name: str, value: float) -> float:
    """Return a share that may be dropped, or say that this one may not.

    >>> check_share("dropout", 0.4)
    0.4
    """
    if isinstance(value, bool) or not 0 <= value < 1:
        raise ArgumentError(f"{name}={value!r}: give a share of at least 0 and below 1")
    return value
