"""KD codes: a row is composed from D learned choices among K code vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.checks import check_integer
from featherbed.codecs.kd import KDFit
from featherbed.errors import ArgumentError
from featherbed.optim.lazy import RowParameter
from featherbed.packed.band import Affine, Band, Fixed
from featherbed.tables.coded import CodedTable
from featherbed.tables.codes import Codes
from featherbed.tables.fitting import codec_job
from featherbed.tables.parts.cells import CELLS, CodeCell
from featherbed.tables.parts.guides import Guidance, Guide, Online, Pretrained
from featherbed.tables.parts.norms import Normalize
from featherbed.tables.parts.relaxations import Softmax, StraightThrough, short_repr
from featherbed.tables.rows import empty_parameter, encode, to_numpy

COMPOSERS = ("linear", *CELLS)
ROUNDS = 8  # of refinement of a fit: least squares and codes in turns
MARGIN = 4.0  # by which the logit of an assigned choice stands above the others


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


class KDTable(CodedTable):
    """row = f(W^1[c_1], ..., W^D[c_D]), c_j = argmax_k π_jk, with learned codes c and a composer f.

    In training the one-hot codes are relaxed (``relax``) and may be taught by a ``guide``; both add
    to the loss through ``fb.auxiliary_loss(model)``. In evaluation, ``weight`` and ``logits`` codes
    are hard. Chen, Min and Sun 2018, "Learning K-way D-dimensional Discrete Codes for Compact
    Embedding Representations".

    Args:
        choices, parts: K and D. Rows take N D log2 K bits.
        composer: an ``fb.Composer`` (kind, width of code vectors, pooling, sharing, output
            normalization) or its kind: linear, mlp, recurrent or lstm.
        relax: ``fb.StraightThrough()`` or ``fb.Softmax()``, with temperature, entropy weight,
            Gumbel noise and normalization of code logits.
        guide: ``fb.Online()`` or ``fb.Pretrained(matrix)``; dropped by ``pack``.
        unique: no two rows share a code; enforced by ``pack``.
        sparse: row-sparse gradients of the code logits, for optimizers of this library or
            ``torch.optim.SparseAdam``.

    >>> table = KDTable(1000, 16, choices=8, parts=6)
    >>> table(torch.tensor([3, 17])).shape, round(table.code_bits() / 8)
    (torch.Size([2, 16]), 2250)
    """

    example: ClassVar[dict[str, Any]] = {"choices": 4, "parts": 5}
    groups: ClassVar[dict[str, Any]] = {"composer": Composer(), "relax": StraightThrough()}
    code_logits = RowParameter()  # [V, D K]
    atoms: nn.Parameter  # [D * K, d'], [K, d'] when shared
    cell: CodeCell | None
    projection: nn.Parameter | None  # [d', d]
    bias: nn.Parameter | None  # [d]
    last: Normalize | None  # of the rows
    steps: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        choices: int,
        parts: int,
        composer: Composer | str = "linear",
        relax: Softmax | None = None,
        guide: Guide | None = None,
        unique: bool = False,
        sparse: bool = False,
        padding_idx: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, parts, choices, padding_idx, sparse, unique)
        self.relax: Softmax = StraightThrough() if relax is None else relax
        if not isinstance(self.relax, Softmax):
            raise ArgumentError(f"relax={relax!r}: give fb.StraightThrough(...) or fb.Softmax(...)")
        if not isinstance(guide, Online | Pretrained | None):
            shown = repr(guide) if isinstance(guide, str) else type(guide).__name__
            raise ArgumentError(f"guide={shown}: give fb.Online(...) or fb.Pretrained(matrix, ...)")
        self.guide = guide
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        self.add_rows("code_logits", self.parts * self.choices, **where)
        self._add_composer(composer, **where)
        self.norm: Normalize | None = None
        if self.relax.logit_norm:
            learned = not self.relax.schedule.falls
            self.norm = Normalize(self.choices, learned=learned, **where)
        self.guidance: Guidance | None = None
        if guide is not None:
            shape = num_embeddings, embedding_dim, self.parts, self.choices
            self.guidance = guide.module(*shape, **where)
        self.register_buffer("steps", torch.empty((), dtype=torch.int64, device=device))
        self.initialize(generator)

    def _add_composer(self, composer: Any, **where: Any) -> None:
        """Register uninitialized code vectors, cell, projection and normalization."""
        if not isinstance(composer, Composer | str):
            raise ArgumentError(f"composer={composer!r}: give fb.Composer(...) or a name of one")
        self.composer = Composer(composer) if isinstance(composer, str) else composer
        self.code_dim = width = self.composer.code_dim or self.embedding_dim
        self.shared = self.composer.shared
        self.atoms = empty_parameter(
            ((1 if self.shared else self.parts) * self.choices, width), **where
        )
        self.cell = self.projection = self.bias = self.last = None
        if self.composer.kind != "linear":
            self.cell = CodeCell(self.composer.kind, width, width, **where)
        if self.cell is not None or width != self.embedding_dim:
            self.projection = empty_parameter((width, self.embedding_dim), **where)
            self.bias = empty_parameter((self.embedding_dim,), **where)
        if self.composer.output_norm:
            self.last = Normalize(self.embedding_dim, learned=True, **where)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw code logits from N(0, 1), and the composer for rows of about unit variance."""
        self.code_logits.normal_(0.0, 1.0, generator=generator)
        std = math.sqrt(self.parts) ** (1 if self.composer.pool == "mean" else -1)
        in_order = self.cell is not None and self.cell.in_order
        self.atoms.normal_(0.0, 1.0 if in_order else std, generator=generator)
        if self.cell is not None:
            self.cell.reset_parameters(generator)
        if self.projection is not None and self.bias is not None:
            self.projection.normal_(0.0, 1 / math.sqrt(self.code_dim), generator=generator)
            self.bias.zero_()
        for norm in (self.last, self.norm):
            if norm is not None:
                norm.reset_parameters()
        if self.guidance is not None:
            self.guidance.reset_parameters(generator)
        self.steps.zero_()
        if self.unique:
            self.make_unique()

    @property
    def row_tensors(self) -> tuple[str, ...]:  # type: ignore[override]
        """The code logits, unless a guide, an entropy or unique codes join the rows."""
        joined = self.guidance is not None or self.relax.entropy or self.unique
        return () if joined else ("code_logits",)

    @property
    def dictionary(self) -> Tensor:  # [D, K, d']
        """The code vectors of every part."""
        return self.atoms.reshape(-1, self.choices, self.code_dim).expand(self.parts, -1, -1)

    def compose(self, vectors: Tensor) -> Tensor:  # [..., D, d'] -> [..., d]
        """Turn the selected code vectors into rows, before the normalization of rows."""
        if self.cell is None:
            rows = vectors.sum(-2) if self.composer.pool == "sum" else vectors.mean(-2)
        else:
            rows = self.cell(vectors if self.cell.in_order else vectors.mean(-2))
        if self.projection is None or self.bias is None:
            return rows
        return rows @ self.projection + self.bias

    def _logits(self, ids: Tensor) -> Tensor:  # [...] -> [..., D, K], float32 at least
        found: Tensor = self.row_values("code_logits", ids)
        wide = torch.promote_types(found.dtype, torch.float32)
        return found.to(wide).reshape(*ids.shape, self.parts, self.choices)

    def responses(self, ids: Tensor) -> Tensor:  # [n] -> [n, D, K]
        """Return the code logits, normalized by running statistics."""
        logits = self._logits(ids)
        return logits if self.norm is None else self.norm.settled(logits)

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

    def training_rows(self, ids: Tensor) -> Tensor:  # int64 [...] -> [..., d]
        """Return rows; in training with relaxed codes, mixed with the guide's rows."""
        if not self.training:
            return self.lookup(ids)
        with torch.no_grad():
            self.steps += 1
        with torch.autocast(ids.device.type, enabled=False):
            plain = self._logits(ids)
            logits = plain if self.norm is None else self.norm(plain)
            rows, entropy = self._relaxed(logits)
            if self.relax.entropy:
                self.add_loss(self.relax.entropy * entropy)
            if self.guidance is not None:
                composed = self.guidance.loss(ids, rows, logits, lambda own: self._relaxed(own)[0])
                self.add_loss(composed)
                rows = self.guidance.mix(ids, rows)
        return self.mask_padding(ids, rows)

    def _relaxed(self, logits: Tensor) -> tuple[Tensor, Tensor]:  # [..., D, K] -> [..., d], entropy
        weights, entropy = self.relax(logits, self.steps)
        vectors = torch.einsum("...jk,jkd->...jd", weights.to(self.dtype), self.dictionary)
        rows = self.compose(vectors)
        return (rows if self.last is None else self.last(rows)), entropy

    def assign(self, ids: Tensor, codes: Tensor) -> None:  # [n], [n, D]
        """Assign codes to rows: their logits, normalized too, exceed the others by a margin."""
        with torch.no_grad():
            hot = MARGIN * F.one_hot(codes, self.choices).to(self.code_logits.dtype)
            whole = len(ids) == self.num_embeddings
            if self.norm is not None and whole:
                self.norm.settle(hot.reshape(-1, self.choices))
            elif self.norm is not None:
                hot = self.norm.undo(hot)
            self.code_logits[ids] = hot.reshape(len(ids), -1).to(self.code_logits.dtype)

    def choice_parameters(self) -> list[nn.Parameter]:
        """Return the code vectors."""
        return [self.atoms]

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """Store bit-packed codes and code vectors, without logits, normalization and guide."""
        if self.unique:
            self.make_unique()
        coded = Fixed.encode(
            self.codes_of().cpu().numpy(), None, self.choices, parts=not self.shared
        )
        wider = self.atoms.shape[0] * (self.embedding_dim - self.code_dim) > self.code_dim**2
        if self.cell is None and (self.projection is None or not wider):
            folded, shift = self._folded()
            atoms = encode(folded[: len(self.atoms)], dictionary)
            bias = Affine(None, to_numpy(shift).copy()) if bool(shift.any()) else None
            return [Band(self.num_embeddings, coded, None, atoms, affine=bias)]
        scale, move = (1.0, 0.0) if self.last is None else self.last.line()
        assert self.projection is not None
        assert self.bias is not None
        kind = dictionary if dictionary in ("float32", "float16") else "float16"
        last = to_numpy(self.bias * scale + move).copy()
        affine = Affine(encode(self.projection * scale, kind), last)
        in_order = self.cell is not None and self.cell.in_order
        mean = not in_order and (self.cell is not None or self.composer.pool == "mean")
        stored = encode(self.atoms / self.parts if mean else self.atoms, dictionary)
        cell = None if self.cell is None else self.cell.packed(kind)
        how = "concat" if in_order else "sum"
        return [Band(self.num_embeddings, coded, None, stored, how, cell, affine)]

    def parameter_count(self) -> int:
        """Count code vectors and composer, K D d' + |f|; codes are bits (``code_bits``)."""
        cell = [] if self.cell is None else self.cell.parameters()
        composer = [self.atoms, self.projection, self.bias, *cell]
        return sum(part.numel() for part in composer if part is not None)

    def code_parameters(self) -> list[nn.Parameter]:
        """Return the code logits."""
        return [cast(nn.Parameter, self._parameters["code_logits"])]

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Code the rows by the kd codec, then fit code vectors and composer."""
        job = codec_job(matrix, weights, "KDTable.from_dense")
        fit = KDFit(
            job,
            parts=self.parts,
            choices=self.choices,
            composer=self.composer.kind,
            width=self.code_dim,
            shared=self.shared,
        )
        if fit.refinable:
            fit.refine(ROUNDS)
        codes = torch.from_numpy(fit.all_codes().astype(np.int64)).to(self.device)
        self.assign(self.all_ids(), codes)
        if self.last is not None:
            self.last.reset()
        if self.cell is None:
            self._set_linear(fit)
        else:
            initial = {name: to_numpy(value) for name, value in self._composer_state().items()}
            found = fit.fit_composer(initial | {"shift": fit.mean})
            for name, value in self._composer_state().items():
                value.copy_(torch.from_numpy(found[name]).reshape(value.shape))

    def _composer_state(self) -> dict[str, Tensor]:
        """Return code vectors and cell parameters under the names of the kd codec."""
        assert self.cell is not None
        assert self.projection is not None
        assert self.bias is not None
        atoms = self.atoms.detach().reshape(-1, self.choices, self.code_dim)
        found = {"atoms": atoms, **{n: p.detach() for n, p in self.cell.named_parameters()}}
        return found | {"projection": self.projection.detach(), "shift": self.bias.detach()}

    def _set_linear(self, fit: KDFit) -> None:
        """Copy the code vectors and the basis of additive codes."""
        scale = self.parts if self.composer.pool == "mean" else 1
        atoms = np.zeros((self.atoms.shape[0], self.code_dim), dtype=np.float32)
        atoms[:, : fit.atoms.shape[2]] = scale * fit.atoms.reshape(-1, fit.atoms.shape[2])
        if self.projection is None or self.bias is None:
            atoms += scale * fit.mean / self.parts
        else:
            basis = np.eye(len(fit.mean), dtype=np.float32) if fit.basis is None else fit.basis
            self.projection.zero_()
            self.projection[: len(basis)] = torch.from_numpy(basis).to(self.projection)
            self.bias.copy_(torch.from_numpy(fit.mean))
        self.atoms.copy_(torch.from_numpy(atoms))
