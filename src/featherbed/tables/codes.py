"""Codes, the composition of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from featherbed.compose import combine


@dataclass(frozen=True)
class Codes:
    """The composition of rows: ``row = then(combine(dictionary[indices], values))``.

    ``indices`` [..., s], None for all atoms; ``values`` [..., s], None for ones; ``dictionary`` [K,
    d], None if the values are the rows; ``then``: the following stages, or None.

    >>> import torch
    >>> Codes(torch.tensor([[0, 2]]), torch.tensor([[0.5, 2.0]]), torch.eye(3)).rows()
    tensor([[0.5000, 0.0000, 2.0000]])
    """

    indices: Tensor | None
    values: Tensor | None
    dictionary: Tensor | None
    combine: str = "sum"
    then: Callable[[Tensor], Tensor] | None = None

    def rows(self) -> Tensor:  # [..., d]
        """Compose the rows: the reference for every fast path."""
        if self.dictionary is None:
            assert self.values is not None
            return self.values
        if self.indices is None:
            assert self.values is not None
            return self.values @ self.dictionary
        rows: Tensor = combine(
            F.embedding(self.indices, self.dictionary), self.values, self.combine
        )
        return rows if self.then is None else self.then(rows)
