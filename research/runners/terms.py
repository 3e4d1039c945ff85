"""Anchors with further terms of the loss: orthogonal anchors, unrelated pairs (appendices E, F)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import featherbed.tables.spec as specs
from featherbed.losses import negative_pairs, orthogonality
from featherbed.tables import AnchorTable


class AnchorTermsTable(AnchorTable):
    """Anchors whose loss has ``orthogonal`` Σ |a_i . a_j| + ``negatives`` mean |t_u| . |t_v|.

    The mean is over ``pairs`` pairs of words, drawn anew in every step; almost no two words of a
    large vocabulary are related, so all pairs stand for the unrelated ones.

    >>> table = AnchorTermsTable(100, 8, anchors=4, orthogonal=0.1, negatives=1.0)
    >>> float(table.auxiliary().detach()) > 0, table.eval().auxiliary()
    (True, None)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        anchors: int,
        orthogonal: float = 0.0,
        negatives: float = 0.0,
        pairs: int = 1000,
        padding_idx: int | None = None,
        init: Any = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            anchors=anchors,
            padding_idx=padding_idx,
            init=init,
            generator=generator,
        )
        self.orthogonal, self.negatives, self.pairs = orthogonal, negatives, pairs

    def auxiliary(self) -> Tensor | None:
        """Return both terms; None outside of training."""
        if not self.training:
            return None
        total = self.orthogonal * orthogonality(self)
        if self.negatives:
            pairs = torch.randint(self.num_embeddings, (self.pairs, 2))
            total = total + self.negatives * negative_pairs(self, pairs) / self.pairs
        return total


@contextmanager
def known_to_specs() -> Iterator[None]:
    """Let specs name the table of this module, ``anchorterms``, inside the block.

    >>> with known_to_specs():
    ...     specs.parse_spec("anchorterms:anchors=5,orthogonal=0.1")[0].__name__
    'AnchorTermsTable'
    """
    with patch.object(specs, "METHODS", (*specs.METHODS, AnchorTermsTable)):
        yield
