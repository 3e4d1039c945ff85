"""Differentiable product quantisation (DPQ): keys answer queries with codes, rows are the values of the codes side by side."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.codecs.kd import KDFit
from featherbed.codecs.product import ProductFit
from featherbed.errors import ArgumentError
from featherbed.optim.lazy import RowParameter
from featherbed.packed.band import Band
from featherbed.packed.codes import Fixed
from featherbed.packed.matrix import Matrix
from featherbed.tables.coded import CodedTable
from featherbed.tables.codes import Codes
from featherbed.tables.fitting import codec_job
from featherbed.tables.norm import Normalise
from featherbed.tables.relax import harden, is_number
from featherbed.tables.table import empty_parameter, positive, to_numpy

VARIANTS = ("softmax", "centroid")
RESTARTS = 3  # of k-means, the best is kept
ROUNDS = 8  # of refinement of a fit: dictionaries and codes in turns


class ProductTable(CodedTable):
    """row = [V_1[c_1], ..., V_D[c_D]],  c_j = argmax_k response(q_j, K_jk): queries and keys serve training, values are kept.

    ``softmax`` (DPQ-SX): response q . k, normalised over the batch for each k; one-hot going forward, softmax(response / τ)
    going back; keys and values are apart. ``centroid`` (DPQ-VQ): response -||q - k||², keys are the values; going back the
    query stands for the row, and loss += mean (value - sg(q))² + commitment * mean (q - sg(value))² (``fb.auxiliary_loss``).
    Chen, Li and Sun 2020, "Differentiable Product Quantization for End-to-End Embedding Compression".

    Args:
        choices, parts: K and D; d must be a multiple of D unless ``additive``.
        variant: "softmax" or "centroid".
        shared: one set of keys and values for all parts.
        additive: values are as wide as the row and averaged, not set side by side.
        query_dim: width of queries and keys of a part (softmax only); as wide as the values by default.
        temperature: τ of the softmax.
        commitment: weight of the pull of queries to their centroids (centroid only).
        normalise: batch normalisation of the responses; by default for softmax only.
        sparse: row-sparse gradients of the queries, for optimizers of this library.

    >>> table = ProductTable(1000, 16, choices=8, parts=4)
    >>> table(torch.tensor([3, 17])).shape, round(table.code_bits() / 8)
    (torch.Size([2, 16]), 1500)
    """

    example: ClassVar[dict[str, Any]] = {"choices": 4, "parts": 4}
    old_names: ClassVar[dict[str, str]] = {"values": "atoms", "keys": "key_vectors"}
    queries = RowParameter()  # [V, D query_dim]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        choices: int,
        parts: int,
        variant: str = "softmax",
        shared: bool = False,
        additive: bool = False,
        query_dim: int | None = None,
        temperature: float = 1.0,
        commitment: float = 0.0,
        normalise: bool | None = None,
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
            unique=False,
            padding_idx=padding_idx,
            sparse=sparse,
        )
        if variant not in VARIANTS:
            raise ArgumentError(f"variant={variant!r}: use one of {', '.join(VARIANTS)}")
        if not additive and self.embedding_dim % self.parts:
            fitting = [n for n in range(1, self.embedding_dim + 1) if self.embedding_dim % n == 0]
            raise ArgumentError(
                f"parts={parts} do not divide {embedding_dim} columns: use one of {fitting}, or additive=True"
            )
        if not is_number(temperature) or temperature <= 0:
            raise ArgumentError(
                f"temperature={temperature!r}: give a number above 0 (at 0 the softmax is not defined)"
            )
        if not is_number(commitment, 0) or (commitment and variant != "centroid"):
            raise ArgumentError(
                f"commitment={commitment!r}: a number of at least 0, and with variant='centroid' only"
            )
        self.variant, self.shared, self.additive = variant, bool(shared), bool(additive)
        self.temperature, self.commitment = float(temperature), float(commitment)
        self.normalise = variant == "softmax" if normalise is None else bool(normalise)
        self.width = self.embedding_dim if additive else self.embedding_dim // self.parts
        self.query_dim = (
            self.width
            if query_dim is None or variant == "centroid"
            else positive("query_dim", query_dim)
        )
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        sets, query = 1 if self.shared else self.parts, self.query_dim
        self.add_rows("queries", self.parts * query, **where)
        self.atoms = empty_parameter((sets * self.choices, self.width), **where)
        keys = empty_parameter((sets * self.choices, query), **where)
        self.key_vectors = keys if variant == "softmax" else None
        self.norm = Normalise(self.choices, learnt=False, **where) if self.normalise else None
        self.initialize(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw queries and keys from N(0, 1), and values for rows of unit variance."""
        self.queries.normal_(0.0, 1.0, generator=generator)
        std = math.sqrt(self.parts) if self.additive else 1.0
        self.atoms.normal_(0.0, std, generator=generator)
        if self.key_vectors is not None:
            self.key_vectors.normal_(0.0, 1.0, generator=generator)
        if self.norm is not None:
            self.norm.reset_parameters()

    def _sets(self, flat: Tensor) -> Tensor:  # [sets * K, n] -> [D, K, n]
        return flat.reshape(-1, self.choices, flat.shape[1]).expand(self.parts, -1, -1)

    def _asked(self, ids: Tensor) -> Tensor:  # [...] -> [..., D, query_dim], float32 at least
        found: Tensor = self.row_values("queries", ids)
        wide = torch.promote_types(found.dtype, torch.float32)
        return found.to(wide).reshape(*ids.shape, self.parts, self.query_dim)

    def _responses(self, asked: Tensor) -> Tensor:  # [..., D, query_dim] -> [..., D, K]
        keys = self._sets(self.atoms if self.key_vectors is None else self.key_vectors).to(
            asked.dtype
        )
        match = torch.einsum("...jq,jkq->...jk", asked, keys)
        return (
            match if self.key_vectors is not None else 2 * match - keys.square().sum(-1)
        )  # -||q - k||², but for ||q||²

    def responses(self, ids: Tensor) -> Tensor:  # [n] -> [n, D, K]
        """Return how well each key answers the queries of rows."""
        with torch.autocast(ids.device.type, enabled=False):
            found = self._responses(self._asked(ids))
        return found if self.norm is None else self.norm.settled(found)

    def codes(self, ids: Tensor) -> Codes:
        """Say what rows are made of: the values of their codes, side by side (or their mean)."""
        codes = self.codes_of(ids)
        offset = 0 if self.shared else self.choices * torch.arange(self.parts, device=codes.device)
        values = self.atoms / self.parts if self.additive else self.atoms
        return Codes(codes + offset, None, values, "sum" if self.additive else "concat")

    def seen(self, ids: Tensor) -> Tensor:  # int64 [...] -> [..., d]
        """Return the rows; in training with gradients to queries and keys, losses kept for ``auxiliary``."""
        if not self.training:
            return self.lookup(ids)
        with torch.autocast(ids.device.type, enabled=False):
            asked = self._asked(ids)
            found = self._responses(asked)
            found = found if self.norm is None else self.norm(found)
            if self.key_vectors is not None:
                weights = harden((found / self.temperature).softmax(-1))
                chosen = torch.einsum(
                    "...jk,jkw->...jw", weights.to(self.dtype), self._sets(self.atoms)
                )
            else:
                chosen = self._centroids(asked.to(self.dtype), found.argmax(-1))
        rows = chosen.mean(-2) if self.additive else chosen.reshape(*ids.shape, self.embedding_dim)
        return self.mask_padding(ids, rows)

    def _centroids(
        self, asked: Tensor, codes: Tensor
    ) -> Tensor:  # [..., D, w], [..., D] -> [..., D, w]
        values = self._sets(self.atoms)[torch.arange(self.parts, device=codes.device), codes]
        loss = F.mse_loss(values, asked.detach())
        if self.commitment:
            loss = loss + self.commitment * F.mse_loss(asked, values.detach())
        self.pending.add(loss)
        return asked + (values - asked).detach()

    def assign(self, ids: Tensor, codes: Tensor) -> None:  # [n], [n, D]
        """Give rows codes: their queries become the keys of these, all keys of one length; running means begin anew."""
        with torch.no_grad():
            if (
                self.key_vectors is not None
            ):  # or a longer key would answer louder than the one that is asked
                self.key_vectors.div_(self.key_vectors.norm(dim=1, keepdim=True).clamp(min=1e-6))
            keys = self._sets(self.atoms if self.key_vectors is None else self.key_vectors)
            chosen = keys[torch.arange(self.parts, device=codes.device), codes]
            self.queries[ids] = chosen.reshape(len(ids), -1).to(self.queries.dtype)
            if self.norm is not None:
                self.norm.reset()

    def choice_parameters(self) -> list[nn.Parameter]:
        """Return the values, and the keys where they are apart."""
        return [self.atoms] if self.key_vectors is None else [self.atoms, self.key_vectors]

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:  # noqa: ARG002 - codes have no values
        """Store bit-packed codes and values; queries and keys stay behind."""
        coded = Fixed.encode(
            to_numpy(self.codes_of()).astype(np.int64), None, self.choices, parts=not self.shared
        )
        stored = self.atoms / self.parts if self.additive else self.atoms
        how = "sum" if self.additive else "concat"
        return [
            Band(self.num_embeddings, coded, None, Matrix.encode(to_numpy(stored), dictionary), how)
        ]

    def parameter_count(self) -> int:
        """Count the values, K d (K d / D when shared); the codes are bits (``code_bits``)."""
        return self.atoms.numel()

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Find centroids and codes of the columns of each part by k-means (additive: by additive quantisation)."""
        job = codec_job(matrix, weights, "ProductTable.from_dense")
        shape: dict[str, Any] = {"parts": self.parts, "choices": self.choices}
        fit: KDFit | ProductFit
        if self.additive:
            fit = KDFit(job, **shape, shared=self.shared)
        else:
            shape |= {"width": self.embedding_dim, "restarts": RESTARTS}
            fit = ProductFit(job, **shape, shared=self.shared)
        if fit.refinable:
            fit.refine(ROUNDS)
        centroids = self.parts * fit.atoms + fit.mean if isinstance(fit, KDFit) else fit.atoms
        codes = fit.all_codes()
        self.atoms.copy_(torch.from_numpy(centroids.reshape(-1, self.width)))
        if self.key_vectors is not None and self.query_dim == self.width:
            around = self.atoms - self.atoms.mean(0)
            self.key_vectors.copy_(
                around + 0.01 * around.std() * self.key_vectors
            )  # a little apart even where directions are the same
        ids = torch.arange(self.num_embeddings, device=self.device)
        self.assign(ids, torch.from_numpy(codes.astype(np.int64)).to(self.device))
