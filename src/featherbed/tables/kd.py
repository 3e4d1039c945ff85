"""K-way D-dimensional codes (KD encoding): a row is composed from D learnt choices of one in K code vectors."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.packed.band import Affine, Band
from featherbed.packed.codes import Fixed
from featherbed.packed.matrix import Matrix
from featherbed.tables.autoencode import autoencode
from featherbed.tables.cells import CELLS, CodeCell
from featherbed.tables.coded import CodedTable
from featherbed.tables.codes import Codes
from featherbed.tables.guide import Guidance, Guide, Online, Pretrained
from featherbed.tables.norm import Normalise
from featherbed.tables.relax import Softmax, StraightThrough
from featherbed.tables.table import new_parameter, normal, positive, to_numpy

COMPOSERS = ("linear", *CELLS)
MARGIN = 4.0  # by which the logit of an assigned choice stands above the others


class KDTable(CodedTable):
    """row = f(W^1[c_1], ..., W^D[c_D]),  c_j = argmax_k π_jk: the code c is learnt with the task, f is the composer.

    ``linear``: pool_j W^j[c_j] H (H only where code_dim differs from d); ``mlp``: relu(mean W U + b) H; ``recurrent``: the cell
    of the supplement's section 2, then H; ``lstm``: an ordinary LSTM, then H. While training, the one-hot codes are relaxed
    (``relax``) and a ``guide`` may teach them; what both add to the loss is ``fb.auxiliary_loss(model)``. In evaluation, in
    ``weight`` and in ``logits`` codes are hard. Chen, Min and Sun 2018, "Learning K-way D-dimensional Discrete Codes for
    Compact Embedding Representations".

    Args:
        choices, parts: K and D. N D log2 K bits are all that is stored for the rows.
        code_dim: d', width of the code vectors; d by default.
        composer, pool: as above; linear pools by "mean" or "sum".
        shared: one set of K code vectors for all parts.
        relax: ``fb.StraightThrough()`` or ``fb.Softmax()``, with temperature, entropy weight and Gumbel noise.
        guide: ``fb.Online()`` or ``fb.Pretrained(matrix)``; dropped by ``pack``.
        logit_norm, output_norm: batch normalisation of the code logits (over k; scale and shift only while the temperature
            stands still) and of the rows.
        unique: no two rows may share a code; ``pack`` sees to it.
        sparse: row-sparse gradients of the code logits, for optimizers such as ``torch.optim.SparseAdam``.

    >>> table = KDTable(1000, 16, choices=8, parts=6)
    >>> table(torch.tensor([3, 17])).shape, round(table.code_bits() / 8)
    (torch.Size([2, 16]), 2250)
    """

    example: ClassVar[dict[str, Any]] = {"choices": 4, "parts": 5}

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        choices: int,
        parts: int,
        code_dim: int | None = None,
        composer: str = "linear",
        pool: str = "mean",
        shared: bool = False,
        relax: Softmax | None = None,
        guide: Guide | None = None,
        logit_norm: bool = True,
        output_norm: bool = False,
        unique: bool = False,
        sparse: bool = False,
        padding_idx: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, parts=parts, choices=choices, unique=unique, padding_idx=padding_idx)
        if composer not in COMPOSERS or pool not in ("mean", "sum"):
            raise ArgumentError(f"composer={composer!r}, pool={pool!r}: use one of {', '.join(COMPOSERS)}, and mean or sum")
        self.code_dim = self.embedding_dim if code_dim is None else positive("code_dim", code_dim)
        self.composer, self.pool, self.shared, self.sparse = composer, pool, bool(shared), bool(sparse)
        self.relax: Softmax = StraightThrough() if relax is None else relax
        if not isinstance(self.relax, Softmax):
            raise ArgumentError(f"relax={relax!r}: give fb.StraightThrough(...) or fb.Softmax(...)")
        if not isinstance(guide, Online | Pretrained | None):
            raise ArgumentError(f"guide={guide!r}: give fb.Online(...) or fb.Pretrained(matrix, ...)")
        self.guide, self.logit_norm, self.output_norm = guide, bool(logit_norm), bool(output_norm)
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        flat = (self.num_embeddings, self.parts * self.choices)
        self.code_logits = new_parameter(flat, normal(1.0, generator), **where)
        spread = 1.0 if composer in ("recurrent", "lstm") else math.sqrt(self.parts) ** (1 if pool == "mean" else -1)
        sets = 1 if self.shared else self.parts
        self.atoms = new_parameter((sets * self.choices, self.code_dim), normal(spread, generator), **where)
        self.cell: CodeCell | None = None
        if composer != "linear":
            self.cell = CELLS[composer](self.code_dim, self.code_dim, generator, **where)
        self.projection: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if self.cell is not None or self.code_dim != self.embedding_dim:
            shape = (self.code_dim, self.embedding_dim)
            self.projection = new_parameter(shape, normal(1 / math.sqrt(self.code_dim), generator), **where)
            self.bias = new_parameter((self.embedding_dim,), nn.init.zeros_, **where)
        self.norm = Normalise(self.choices, learnt=not self.relax.schedule.falls, **where) if self.logit_norm else None
        self.last = Normalise(self.embedding_dim, learnt=True, **where) if self.output_norm else None
        self.guidance: Guidance | None = None
        if guide is not None:
            self.guidance = guide.module(num_embeddings, embedding_dim, self.parts, self.choices, generator, **where)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))
        self.steps: Tensor
        if self.unique and self.code_logits.device.type != "meta":
            self.make_unique()

    def _logits(self, ids: Tensor) -> Tensor:  # [...] -> [..., D, K], float32 at least
        found = F.embedding(ids, self.code_logits, sparse=self.sparse)
        wide = torch.promote_types(found.dtype, torch.float32)
        return found.to(wide).reshape(*ids.shape, self.parts, self.choices)

    def responses(self, ids: Tensor) -> Tensor:  # [n] -> [n, D, K]
        """Return the code logits, normalised by the running statistics."""
        logits = self._logits(ids)
        return logits if self.norm is None else self.norm.settled(logits)

    @property
    def dictionary(self) -> Tensor:  # [D, K, d']
        """The code vectors of every part."""
        return self.atoms.reshape(-1, self.choices, self.code_dim).expand(self.parts, -1, -1)

    def compose(self, vectors: Tensor) -> Tensor:  # [..., D, d'] -> [..., d], before the last normalisation
        """Turn the chosen code vectors into rows."""
        if self.cell is not None and self.cell.in_order:
            rows: Tensor = self.cell(vectors)
        else:
            rows = vectors.sum(-2) if self.cell is None and self.pool == "sum" else vectors.mean(-2)
            rows = rows if self.cell is None else self.cell(rows)
        if self.projection is None or self.bias is None:
            return rows
        return rows @ self.projection + self.bias

    def codes(self, ids: Tensor) -> Codes:
        """Say what rows are made of: hard codes over the code vectors, then the composer."""
        codes = self.codes_of(ids)
        if self.cell is None:
            return self._linear_codes(codes)
        offset = 0 if self.shared else self.choices * torch.arange(self.parts, device=codes.device)

        def then(joined: Tensor) -> Tensor:
            rows = self.compose(joined.reshape(*joined.shape[:-1], self.parts, self.code_dim))
            return rows if self.last is None else self.last.settled(rows)

        return Codes(codes + offset, None, self.atoms, "concat", then)

    def _linear_codes(self, codes: Tensor) -> Codes:
        """Fold everything after the code vectors into them: row = Σ_j A_j[c_j] + shift, the shift one atom more."""
        folded, shift = self._folded()
        count = self.parts * self.choices
        offset = self.choices * torch.arange(self.parts, device=codes.device)
        indices = torch.cat([codes + offset, torch.full_like(codes[..., :1], count)], dim=-1)
        return Codes(indices, None, torch.cat([folded, shift[None]]))

    def _folded(self) -> tuple[Tensor, Tensor]:  # [D * K, d], [d]
        atoms = self.dictionary.reshape(-1, self.code_dim)
        atoms = atoms / self.parts if self.pool == "mean" else atoms
        shift = atoms.new_zeros(self.embedding_dim) if self.bias is None else self.bias
        atoms = atoms if self.projection is None else atoms @ self.projection
        if self.last is not None:
            scale, move = (part.to(atoms.dtype) for part in self.last.line())
            atoms, shift = atoms * scale, shift * scale + move
        return atoms, shift

    def seen(self, ids: Tensor) -> Tensor:  # int64 [...] -> [..., d]
        """Return the rows; in training with relaxed codes, mixed with the guide's, losses kept for ``auxiliary``."""
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
                self.pending.add(self.guidance.loss(ids, rows, logits, lambda own: self._relaxed(own)[0]))
                rows = self.guidance.mix(ids, rows)
        return self.mask_padding(ids, rows)

    def _relaxed(self, logits: Tensor) -> tuple[Tensor, Tensor]:  # [..., D, K] -> rows [..., d], entropy
        weights, entropy = self.relax(logits, self.steps)
        vectors = torch.einsum("...jk,jkd->...jd", weights.to(self.dtype), self.dictionary)
        rows = self.compose(vectors)
        return (rows if self.last is None else self.last(rows)), entropy

    def assign(self, ids: Tensor, codes: Tensor) -> None:  # [n], [n, D]
        """Give rows codes: one logit stands above all others, also after normalisation."""
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

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:  # noqa: ARG002 - codes have no values
        """Store bit-packed codes and code vectors; logits, normalisations and the guide stay behind."""
        if self.unique:
            self.make_unique()
        coded = Fixed.encode(to_numpy(self.codes_of()).astype("int64"), None, self.choices, parts=not self.shared)
        kind = dictionary if dictionary in ("float32", "float16") else "float16"
        if self.cell is None:
            folded, shift = self._folded()
            if self.projection is None or self.atoms.shape[0] * (self.embedding_dim - self.code_dim) <= self.code_dim**2:
                atoms = folded[: len(self.atoms)]
                bias = Affine(None, to_numpy(shift).copy()) if bool(shift.any()) else None
                return [Band(self.num_embeddings, coded, None, Matrix.encode(to_numpy(atoms), dictionary), affine=bias)]
        scale, move = (1.0, 0.0) if self.last is None else self.last.line()
        assert self.projection is not None
        assert self.bias is not None
        affine = Affine(Matrix.encode(to_numpy(self.projection * scale), kind), to_numpy(self.bias * scale + move).copy())
        mean = self.pool == "mean" if self.cell is None else not self.cell.in_order
        atoms = self.atoms / self.parts if mean else self.atoms
        stored = Matrix.encode(to_numpy(atoms), dictionary)
        cell = None if self.cell is None else self.cell.packed(kind)
        how = "concat" if self.cell is not None and self.cell.in_order else "sum"
        return [Band(self.num_embeddings, coded, None, stored, how, cell, affine)]

    def code_parameters(self) -> list[nn.Parameter]:
        """Return the code logits."""
        return [self.code_logits]

    def parameter_count(self) -> int:
        """Count code vectors and composer, K D d' + |f|; the codes are bits (``code_bits``)."""
        composer = [self.projection, self.bias, *([] if self.cell is None else self.cell.parameters())]
        return self.atoms.numel() + sum(part.numel() for part in composer if part is not None)

    def fit_dense(self, matrix: Tensor) -> None:  # [V, d]
        """Code the rows of ``matrix`` by additive quantisation, then fit code vectors and composer to them."""
        autoencode(self, matrix)
