"""Differentiable product quantization (DPQ): codes select values that are concatenated to rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.checks import check_integer, is_number
from featherbed.codecs.kd import KDFit
from featherbed.codecs.product import ProductFit
from featherbed.errors import ArgumentError
from featherbed.optim.lazy import RowParameter
from featherbed.packed.band import Band, Fixed
from featherbed.tables.coded import CodedTable
from featherbed.tables.codes import Codes
from featherbed.tables.fitting import codec_job
from featherbed.tables.parts.norms import Normalize
from featherbed.tables.parts.relaxations import harden, short_repr
from featherbed.tables.rows import empty_parameter, encode
from featherbed.tables.table import SCALE_SAMPLE

VARIANTS = ("softmax", "centroid")
RESTARTS = 3  # of k-means, the best is kept
ROUNDS = 8  # of refinement of a fit: dictionaries and codes in turns


@dataclass(frozen=True)
class Matching:
    """How queries are matched with keys, which selects the codes of an ``fb.ProductTable``.

    Args:
        kind: "softmax" (DPQ-SX) or "centroid" (DPQ-VQ).
        query_dim: width of queries and keys of a part (softmax only); that of the values by
            default.
        temperature: temperature τ of the softmax.
        commitment: weight of the commitment loss (centroid only).
        normalize: batch normalization of the responses; by default for softmax only.

    >>> Matching("centroid", commitment=0.25)
    Matching('centroid', commitment=0.25)
    """

    kind: str = "softmax"
    query_dim: int | None = None
    temperature: float = 1.0
    commitment: float = 0.0
    normalize: bool | None = None

    def __post_init__(self) -> None:
        if self.kind not in VARIANTS:
            raise ArgumentError(f"variant={self.kind!r}: use one of {', '.join(VARIANTS)}")
        if not is_number(self.temperature) or self.temperature <= 0:
            raise ArgumentError(
                f"temperature={self.temperature!r}: give a number above 0 (at 0 the softmax is not "
                "defined)"
            )
        if not is_number(self.commitment, 0) or (self.commitment and self.kind != "centroid"):
            given = f"commitment={self.commitment!r}: a number of at least 0"
            raise ArgumentError(f"{given}, and with variant='centroid' only")
        if self.query_dim is not None:
            check_integer("query_dim", self.query_dim)

    def __repr__(self) -> str:
        return short_repr(self)


class ProductTable(CodedTable):
    """row = [V_1[c_1], ..., V_D[c_D]], c_j = argmax_k response(q_j, K_jk).

    Queries and keys exist in training only. ``softmax`` (DPQ-SX): response q . k, normalized over
    the batch for each k; one-hot in the forward pass, softmax(response / τ) in the backward pass,
    with separate keys and values. ``centroid`` (DPQ-VQ): response -||q - k||², keys are the values;
    the gradient of the row goes to the query, and loss += mean (value - sg(q))² + commitment * mean
    (q - sg(value))² (``fb.auxiliary_loss``). Chen, Li and Sun 2020, "Differentiable Product
    Quantization for End-to-End Embedding Compression".

    Args:
        choices, parts: K and D; d must be a multiple of D unless ``additive``.
        variant: "softmax", "centroid", or an ``fb.Matching`` with further settings.
        shared: one set of keys and values for all parts.
        additive: values have the width of the row and are averaged instead of concatenated.
        sparse: row-sparse gradients of the queries, for optimizers of this library.

    >>> table = ProductTable(1000, 16, choices=8, parts=4)
    >>> table(torch.tensor([3, 17])).shape, round(table.code_bits() / 8)
    (torch.Size([2, 16]), 1500)
    """

    example: ClassVar[dict[str, Any]] = {"choices": 4, "parts": 4}
    old_names: ClassVar[dict[str, str]] = {"values": "atoms", "keys": "key_vectors"}
    groups: ClassVar[dict[str, Any]] = {"variant": Matching()}
    queries = RowParameter()  # [V, D query_dim]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        choices: int,
        parts: int,
        variant: Matching | str = "softmax",
        shared: bool = False,
        additive: bool = False,
        sparse: bool = False,
        padding_idx: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, parts, choices, padding_idx, sparse)
        if not isinstance(variant, Matching | str):
            raise ArgumentError(f"variant={variant!r}: give softmax, centroid or fb.Matching(...)")
        self.variant = Matching(variant) if isinstance(variant, str) else variant
        if not additive and self.embedding_dim % self.parts:
            fitting = [n for n in range(1, self.embedding_dim + 1) if self.embedding_dim % n == 0]
            raise ArgumentError(
                f"parts={parts} do not divide {embedding_dim} columns: use one of {fitting}, or "
                "additive=True"
            )
        self.shared, self.additive = bool(shared), bool(additive)
        softmax = self.variant.kind == "softmax"
        normalize = softmax if self.variant.normalize is None else self.variant.normalize
        self.width = self.embedding_dim if additive else self.embedding_dim // self.parts
        self.query_dim = (self.variant.query_dim if softmax else None) or self.width
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        sets, query = 1 if self.shared else self.parts, self.query_dim
        self.add_rows("queries", self.parts * query, **where)
        self.atoms = empty_parameter((sets * self.choices, self.width), **where)
        keys = empty_parameter((sets * self.choices, query), **where)
        self.key_vectors = keys if softmax else None
        self.norm = Normalize(self.choices, learned=False, **where) if normalize else None
        self.initialize(generator)

    @property
    def row_tensors(self) -> tuple[str, ...]:  # type: ignore[override]
        """The queries; a loss term of centroids is a mean over the rows of the batch."""
        return () if self.key_vectors is None else ("queries",)

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

    @torch.no_grad()
    def scale_initial_rows(self, std: float) -> None:
        """Scale values and queries alike: codes stay, and centroids start where queries are."""
        count = min(SCALE_SAMPLE, self.num_embeddings)
        ids = torch.linspace(0, self.num_embeddings - 1, count, device=self.device).long()
        before = float(self.lookup(ids).std())
        if before > 0:
            self.atoms.mul_(std / before)
            self.queries.mul_(std / before)

    def _sets(self, flat: Tensor) -> Tensor:  # [sets * K, n] -> [D, K, n]
        return flat.reshape(-1, self.choices, flat.shape[1]).expand(self.parts, -1, -1)

    def _keys(self) -> Tensor:  # [D, K, query_dim]
        return self._sets(self.atoms if self.key_vectors is None else self.key_vectors)

    def _queries_of(self, ids: Tensor) -> Tensor:  # [...] -> [..., D, query_dim], float32 at least
        found: Tensor = self.row_values("queries", ids)
        wide = torch.promote_types(found.dtype, torch.float32)
        return found.to(wide).reshape(*ids.shape, self.parts, self.query_dim)

    def _responses(self, queries: Tensor) -> Tensor:  # [..., D, query_dim] -> [..., D, K]
        keys = self._keys().to(queries.dtype)
        match = torch.einsum("...jq,jkq->...jk", queries, keys)
        if self.key_vectors is not None:
            return match
        return 2 * match - keys.square().sum(-1)  # -||q - k||², but for ||q||²

    def responses(self, ids: Tensor) -> Tensor:  # [n] -> [n, D, K]
        """Return the responses of the keys to the queries of rows."""
        with torch.autocast(ids.device.type, enabled=False):
            found = self._responses(self._queries_of(ids))
        return found if self.norm is None else self.norm.settled(found)

    def codes(self, ids: Tensor) -> Codes:
        """The values of the codes, concatenated (or averaged)."""
        codes = self.codes_of(ids)
        offset = 0 if self.shared else self.choices * torch.arange(self.parts, device=codes.device)
        values = self.atoms / self.parts if self.additive else self.atoms
        return Codes(codes + offset, None, values, "sum" if self.additive else "concat")

    def training_rows(self, ids: Tensor) -> Tensor:  # int64 [...] -> [..., d]
        """Return rows; in training with gradients to queries and keys."""
        if not self.training:
            return self.lookup(ids)
        with torch.autocast(ids.device.type, enabled=False):
            queries = self._queries_of(ids)
            found = self._responses(queries)
            found = found if self.norm is None else self.norm(found)
            if self.key_vectors is not None:
                weights = harden((found / self.variant.temperature).softmax(-1)).to(self.dtype)
                chosen = torch.einsum("...jk,jkw->...jw", weights, self._sets(self.atoms))
            else:
                chosen = self._centroids(queries.to(self.dtype), found.argmax(-1))
        rows = chosen.mean(-2) if self.additive else chosen.reshape(*ids.shape, self.embedding_dim)
        return self.mask_padding(ids, rows)

    def _centroids(self, queries: Tensor, codes: Tensor) -> Tensor:  # [..., D, w] and [..., D]
        values = self._sets(self.atoms)[torch.arange(self.parts, device=codes.device), codes]
        loss = F.mse_loss(values, queries.detach())
        if self.variant.commitment:
            loss = loss + self.variant.commitment * F.mse_loss(queries, values.detach())
        self.add_loss(loss)
        return queries + (values - queries).detach()

    def assign(self, ids: Tensor, codes: Tensor) -> None:  # [n], [n, D]
        """Assign codes to rows: set queries to unit-length keys, and reset running statistics."""
        with torch.no_grad():
            if self.key_vectors is not None:  # or a longer key would answer louder
                self.key_vectors.div_(self.key_vectors.norm(dim=1, keepdim=True).clamp(min=1e-6))
            chosen = self._keys()[torch.arange(self.parts, device=codes.device), codes]
            self.queries[ids] = chosen.reshape(len(ids), -1).to(self.queries.dtype)
            if self.norm is not None:
                self.norm.reset()

    def choice_parameters(self) -> list[nn.Parameter]:
        """Return the values, and the keys if separate."""
        return [self.atoms] if self.key_vectors is None else [self.atoms, self.key_vectors]

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """Store bit-packed codes and values, without queries and keys."""
        coded = Fixed.encode(
            self.codes_of().cpu().numpy(), None, self.choices, parts=not self.shared
        )
        stored = encode(self.atoms / self.parts if self.additive else self.atoms, dictionary)
        how = "sum" if self.additive else "concat"
        return [Band(self.num_embeddings, coded, None, stored, how)]

    def parameter_count(self) -> int:
        """Count the values, K d (K d / D when shared); the codes are bits (``code_bits``)."""
        return self.atoms.numel()

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Fit centroids and codes of each part by k-means (additive: by additive quantization)."""
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
            # a little apart even where directions are the same
            self.key_vectors.copy_(around + 0.01 * around.std() * self.key_vectors)
        self.assign(self.all_ids(), torch.from_numpy(codes.astype(np.int64)).to(self.device))
