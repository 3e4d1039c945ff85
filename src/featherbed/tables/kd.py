"""KD codes: a row is composed from D learned choices among K code vectors."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.codecs.kd import KDFit
from featherbed.errors import ArgumentError
from featherbed.optim.lazy import RowParameter
from featherbed.tables.composed import ComposedTable, Composer
from featherbed.tables.fitting import codec_job
from featherbed.tables.guide import Guidance, Guide, Online, Pretrained
from featherbed.tables.norm import Normalise
from featherbed.tables.relax import Softmax, StraightThrough
from featherbed.tables.table import to_numpy

ROUNDS = 8  # of refinement of a fit: least squares and codes in turns
MARGIN = 4.0  # by which the logit of an assigned choice stands above the others


class KDTable(ComposedTable):
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
        super().__init__(
            num_embeddings,
            embedding_dim,
            parts=parts,
            choices=choices,
            unique=unique,
            padding_idx=padding_idx,
            sparse=sparse,
        )
        self.relax: Softmax = StraightThrough() if relax is None else relax
        if not isinstance(self.relax, Softmax):
            raise ArgumentError(f"relax={relax!r}: give fb.StraightThrough(...) or fb.Softmax(...)")
        if not isinstance(guide, Online | Pretrained | None):
            shown = repr(guide) if isinstance(guide, str) else type(guide).__name__
            raise ArgumentError(f"guide={shown}: give fb.Online(...) or fb.Pretrained(matrix, ...)")
        self.guide = guide
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        self.add_rows("code_logits", self.parts * self.choices, **where)
        self.add_composer(composer, **where)
        learnt = not self.relax.schedule.falls
        self.norm = (
            Normalise(self.choices, learnt=learnt, **where) if self.relax.logit_norm else None
        )
        self.guidance: Guidance | None = None
        if guide is not None:
            self.guidance = guide.module(
                num_embeddings, embedding_dim, self.parts, self.choices, **where
            )
        self.register_buffer("steps", torch.empty((), dtype=torch.int64, device=device))
        self.steps: Tensor
        self.initialize(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw code logits from N(0, 1), and the composer for rows of about unit variance."""
        self.code_logits.normal_(0.0, 1.0, generator=generator)
        self.reset_composer(generator)
        if self.norm is not None:
            self.norm.reset_parameters()
        if self.guidance is not None:
            self.guidance.reset_parameters(generator)
        self.steps.zero_()
        if self.unique:
            self.make_unique()

    def _logits(self, ids: Tensor) -> Tensor:  # [...] -> [..., D, K], float32 at least
        found: Tensor = self.row_values("code_logits", ids)
        wide = torch.promote_types(found.dtype, torch.float32)
        return found.to(wide).reshape(*ids.shape, self.parts, self.choices)

    def responses(self, ids: Tensor) -> Tensor:  # [n] -> [n, D, K]
        """Return the code logits, normalized by running statistics."""
        logits = self._logits(ids)
        return logits if self.norm is None else self.norm.settled(logits)

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
                self.pending.add(self.relax.entropy * entropy)
            if self.guidance is not None:
                self.pending.add(
                    self.guidance.loss(ids, rows, logits, lambda own: self._relaxed(own)[0])
                )
                rows = self.guidance.mix(ids, rows)
        return self.mask_padding(ids, rows)

    def _relaxed(
        self, logits: Tensor
    ) -> tuple[Tensor, Tensor]:  # [..., D, K] -> rows [..., d], entropy
        weights, entropy = self.relax(logits, self.steps)
        vectors = torch.einsum("...jk,jkd->...jd", weights.to(self.dtype), self.dictionary)
        rows = self.compose(vectors)
        return (rows if self.last is None else self.last(rows)), entropy

    def assign(self, ids: Tensor, codes: Tensor) -> None:  # [n], [n, D]
        """Assign codes to rows: their logits exceed the others by a margin, also after
        normalization.
        """
        with torch.no_grad():
            hot = MARGIN * F.one_hot(codes, self.choices).to(self.code_logits.dtype)
            whole = len(ids) == self.num_embeddings
            if self.norm is not None and whole:
                self.norm.settle(hot.reshape(-1, self.choices))
            elif self.norm is not None:
                hot = self.norm.undo(hot)
            self.code_logits[ids] = hot.reshape(len(ids), -1).to(self.code_logits.dtype)

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
        ids = torch.arange(self.num_embeddings, device=self.device)
        self.assign(ids, torch.from_numpy(fit.all_codes().astype(np.int64)).to(self.device))
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
