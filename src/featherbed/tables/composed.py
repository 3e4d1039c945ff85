"""Composed codes: code vectors are summed or fed to a cell, then projected."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from featherbed.checks import check_integer
from featherbed.errors import ArgumentError
from featherbed.packed.band import Affine, Band
from featherbed.packed.codes import Fixed
from featherbed.packed.matrix import Matrix
from featherbed.tables.cells import CELLS, CodeCell
from featherbed.tables.coded import CodedTable
from featherbed.tables.codes import Codes
from featherbed.tables.norm import Normalise
from featherbed.tables.relax import short_repr
from featherbed.tables.rows import empty_parameter
from featherbed.tables.table import to_numpy

COMPOSERS = ("linear", *CELLS)


@dataclass(frozen=True)
class Composer:
    """How the code vectors of a row become the row.

    ``linear``: the mean or sum of the code vectors; ``mlp``: relu(mean W U + b); ``recurrent``: the
    cell of Chen, Min and Sun 2018, supplement, section 2; ``lstm``: an ordinary LSTM. A projection
    H [d', d] follows, except for a linear composer with d' = d.

    Args:
        kind: linear, mlp, recurrent or lstm.
        code_dim: width d' of the code vectors; d by default.
        pool: "mean" or "sum", for a linear composer.
        shared: one set of K code vectors for all parts.
        output_norm: batch normalization of the rows.

    >>> Composer("mlp", code_dim=8)
    Composer('mlp', code_dim=8)
    """

    kind: str = "linear"
    code_dim: int | None = None
    pool: str = "mean"
    shared: bool = False
    output_norm: bool = False

    def __post_init__(self) -> None:
        if self.kind not in COMPOSERS or self.pool not in ("mean", "sum"):
            raise ArgumentError(
                f"composer={self.kind!r}, pool={self.pool!r}: use one of {', '.join(COMPOSERS)}, "
                "and mean or sum"
            )
        if self.code_dim is not None:
            check_integer("code_dim", self.code_dim)

    def __repr__(self) -> str:
        return short_repr(self)


class ComposedTable(CodedTable):
    """A table of codes with rows f(W^1[c_1], ..., W^D[c_D]); subclasses define how codes are
    learned.

    f pools the code vectors or feeds them to a cell, projects if widths differ, and may normalize.
    """

    code_dim: int
    composer: Composer
    atoms: nn.Parameter  # [D * K, d'], [K, d'] when shared
    cell: CodeCell | None
    projection: nn.Parameter | None  # [d', d]
    bias: nn.Parameter | None  # [d]
    last: Normalise | None  # of the rows

    def add_composer(
        self,
        composer: Composer | str,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        """Register uninitialized code vectors, cell, projection and normalization."""
        if not isinstance(composer, Composer | str):
            raise ArgumentError(f"composer={composer!r}: give fb.Composer(...) or a name of one")
        self.composer = Composer(composer) if isinstance(composer, str) else composer
        self.code_dim, self.shared = (
            self.composer.code_dim or self.embedding_dim,
            self.composer.shared,
        )
        sets = 1 if self.shared else self.parts
        self.atoms = empty_parameter((sets * self.choices, self.code_dim), dtype, device)
        self.cell = None
        if self.composer.kind != "linear":
            self.cell = CELLS[self.composer.kind](self.code_dim, self.code_dim, dtype, device)
        self.projection = self.bias = None
        if self.cell is not None or self.code_dim != self.embedding_dim:
            self.projection = empty_parameter((self.code_dim, self.embedding_dim), dtype, device)
            self.bias = empty_parameter((self.embedding_dim,), dtype, device)
        self.last = None
        if self.composer.output_norm:
            self.last = Normalise(self.embedding_dim, learnt=True, dtype=dtype, device=device)

    @torch.no_grad()
    def reset_composer(self, generator: torch.Generator | None) -> None:
        """Initialize code vectors, cell and projection so that rows have about unit variance."""
        in_order = self.composer.kind in ("recurrent", "lstm")
        std = (
            1.0
            if in_order
            else math.sqrt(self.parts) ** (1 if self.composer.pool == "mean" else -1)
        )
        self.atoms.normal_(0.0, std, generator=generator)
        if self.cell is not None:
            self.cell.reset_parameters(generator)
        if self.projection is not None and self.bias is not None:
            self.projection.normal_(0.0, 1 / math.sqrt(self.code_dim), generator=generator)
            self.bias.zero_()
        if self.last is not None:
            self.last.reset_parameters()

    @property
    def dictionary(self) -> Tensor:  # [D, K, d']
        """The code vectors of every part."""
        return self.atoms.reshape(-1, self.choices, self.code_dim).expand(self.parts, -1, -1)

    def compose(
        self, vectors: Tensor
    ) -> Tensor:  # [..., D, d'] -> [..., d], before the last normalisation
        """Turn the selected code vectors into rows."""
        if self.cell is not None and self.cell.in_order:
            rows: Tensor = self.cell(vectors)
        else:
            rows = (
                vectors.sum(-2)
                if self.cell is None and self.composer.pool == "sum"
                else vectors.mean(-2)
            )
            rows = rows if self.cell is None else self.cell(rows)
        if self.projection is None or self.bias is None:
            return rows
        return rows @ self.projection + self.bias

    def codes(self, ids: Tensor) -> Codes:
        """Hard codes over the code vectors, then the composer."""
        codes = self.codes_of(ids)
        if self.cell is None:
            return self._linear_codes(codes)
        offset = 0 if self.shared else self.choices * torch.arange(self.parts, device=codes.device)

        def then(joined: Tensor) -> Tensor:
            rows = self.compose(joined.reshape(*joined.shape[:-1], self.parts, self.code_dim))
            return rows if self.last is None else self.last.settled(rows)

        return Codes(codes + offset, None, self.atoms, "concat", then)

    def _linear_codes(self, codes: Tensor) -> Codes:
        """Fold later stages into the code vectors: row = Σ_j A_j[c_j] + shift."""
        folded, shift = self._folded()
        count = self.parts * self.choices
        offset = self.choices * torch.arange(self.parts, device=codes.device)
        indices = torch.cat([codes + offset, torch.full_like(codes[..., :1], count)], dim=-1)
        return Codes(indices, None, torch.cat([folded, shift[None]]))

    def _folded(self) -> tuple[Tensor, Tensor]:  # [D * K, d], [d]
        atoms = self.dictionary.reshape(-1, self.code_dim)
        atoms = atoms / self.parts if self.composer.pool == "mean" else atoms
        shift = atoms.new_zeros(self.embedding_dim) if self.bias is None else self.bias
        atoms = atoms if self.projection is None else atoms @ self.projection
        if self.last is not None:
            scale, move = (part.to(atoms.dtype) for part in self.last.line())
            atoms, shift = atoms * scale, shift * scale + move
        return atoms, shift

    def choice_parameters(self) -> list[nn.Parameter]:
        """Return the code vectors."""
        return [self.atoms]

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """Store bit-packed codes and code vectors, without logits, normalization and guide."""
        if self.unique:
            self.make_unique()
        coded = Fixed.encode(
            to_numpy(self.codes_of()).astype("int64"), None, self.choices, parts=not self.shared
        )
        kind = dictionary if dictionary in ("float32", "float16") else "float16"
        if self.cell is None:
            folded, shift = self._folded()
            if (
                self.projection is None
                or self.atoms.shape[0] * (self.embedding_dim - self.code_dim) <= self.code_dim**2
            ):
                atoms = folded[: len(self.atoms)]
                bias = Affine(None, to_numpy(shift).copy()) if bool(shift.any()) else None
                return [
                    Band(
                        self.num_embeddings,
                        coded,
                        None,
                        Matrix.encode(to_numpy(atoms), dictionary),
                        affine=bias,
                    )
                ]
        scale, move = (1.0, 0.0) if self.last is None else self.last.line()
        assert self.projection is not None
        assert self.bias is not None
        affine = Affine(
            Matrix.encode(to_numpy(self.projection * scale), kind),
            to_numpy(self.bias * scale + move).copy(),
        )
        mean = self.composer.pool == "mean" if self.cell is None else not self.cell.in_order
        atoms = self.atoms / self.parts if mean else self.atoms
        stored = Matrix.encode(to_numpy(atoms), dictionary)
        cell = None if self.cell is None else self.cell.packed(kind)
        how = "concat" if self.cell is not None and self.cell.in_order else "sum"
        return [Band(self.num_embeddings, coded, None, stored, how, cell, affine)]

    def parameter_count(self) -> int:
        """Count code vectors and composer, K D d' + |f|; codes are bits (``code_bits``)."""
        composer = [
            self.projection,
            self.bias,
            *([] if self.cell is None else self.cell.parameters()),
        ]
        return self.atoms.numel() + sum(part.numel() for part in composer if part is not None)
