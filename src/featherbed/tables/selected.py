"""Vocabulary selection: frequent ids have their own rows, the others share rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from featherbed.checks import check_integer
from featherbed.errors import ArgumentError
from featherbed.hashing import hash_ids
from featherbed.packed.band import Band, Hash, Identity, Members
from featherbed.tables.codes import Codes
from featherbed.tables.dense import DenseTable
from featherbed.tables.fitting import shared_atoms
from featherbed.tables.parted import most_popular
from featherbed.tables.rows import empty_parameter, encode
from featherbed.tables.table import Table


class SelectedTable(Table):
    """The ``keep`` most frequent ids have their own rows; other ids share ``rest`` rows by hash.

    By ``counts`` [V], by default the first ids are the most frequent. ``rest=1`` is the usual
    "unknown" row.

    >>> import torch
    >>> table = SelectedTable(1000, 16, keep=100, counts=torch.arange(1000))
    >>> bool((table(torch.tensor([0])) == table(torch.tensor([1]))).all())
    True
    """

    example: ClassVar[dict[str, Any]] = {"keep": 7}
    selects_rows: ClassVar[bool] = True
    rows_alike: ClassVar[bool] = False
    index: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        keep: int,
        counts: Tensor | None = None,
        rest: int = 1,
        padding_idx: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.keep, self.rest = check_integer("keep", keep), check_integer("rest", rest)
        if keep > num_embeddings:
            raise ArgumentError(f"keep={keep}: there are only {num_embeddings} ids to keep")
        kept = most_popular(self.num_embeddings, counts)[0][: self.keep]
        self.atoms = empty_parameter(
            (keep + rest, embedding_dim), dtype, device
        )  # [keep + rest, d]
        index = self.keep + hash_ids(torch.arange(num_embeddings, device="cpu"), 0, self.rest)
        index[kept.sort().values] = torch.arange(self.keep, device="cpu")
        self.register_fixed("index", index)  # [V]
        self.initialize(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw rows from N(0, 1)."""
        self.atoms.normal_(0.0, 1.0, generator=generator)

    def codes(self, ids: Tensor) -> Codes:
        """The id's own row or its shared row."""
        return Codes(self.index[ids][..., None], None, self.atoms)

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """Two bands: kept rows with a bitmap, hashed rows for the others."""
        kept = np.flatnonzero(self.index.cpu().numpy() < self.keep)
        members = Members.of(kept, self.num_embeddings)
        own, shared = (encode(part, dictionary) for part in self.atoms.tensor_split([self.keep]))
        hot = Band(self.keep, Identity(), dictionary=own, members=members)
        return [hot, Band(self.num_embeddings - self.keep, Hash(0, 1), None, shared)]

    def parameter_count(self) -> int:
        """(keep + rest) d."""
        return self.atoms.numel()

    @classmethod
    def settings_for(
        cls, parameters: float, rows: int, dim: int, settings: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Return ``keep``."""
        return {"keep": max(1, round(parameters / dim) - int(settings.get("rest", 1)))}

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Copy the kept rows; a shared row is the mean of the rows that share it."""
        indices, count = self.index[:, None], len(self.atoms)
        self.atoms.copy_(shared_atoms(matrix, indices, count, self.padding_idx, weights))


def selected_rows(table: DenseTable) -> SelectedTable:
    """Return a table with the nonzero rows, and one zero row for all others (after a group lasso).

    >>> import torch, featherbed as fb
    >>> dense = fb.DenseTable.from_dense(torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]))
    >>> selected_rows(dense)
    SelectedTable(3, 2, keep=1, rest=1)
    """
    if not isinstance(table, DenseTable):
        raise ArgumentError(f"selected_rows takes a DenseTable, got {type(table).__name__}")
    rows = table.weight.detach()
    used = rows.any(1)
    keep = max(1, int(used.sum()))
    return SelectedTable.from_dense(
        rows, keep=keep, counts=used.long(), padding_idx=table.padding_idx
    )
