"""Losses over the true id and a few sampled ones: sampled softmax, noise-contrastive estimation."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.losses.full import check_bias, check_hidden
from featherbed.losses.samplers import LogUniform, Sampler
from featherbed.tables.table import Table


class Candidates(NamedTuple):
    """Corrected scores s(w) - log E(w) of n positions: the true ids, and m negatives for all
    positions.
    """

    true: Tensor  # [n]
    noise: Tensor  # [n, m]
    targets: Tensor  # int64 [n]
    negatives: Tensor  # int64 [m]

    @property
    def hits(self) -> Tensor:  # bool [n, m]
        """Positions whose target is among the negatives, [n, m]."""
        return self.targets[:, None] == self.negatives


class CandidateLoss(nn.Module):
    """Mean loss of predicting ids by hidden . row(id) + bias(id), with sampled ids in training.

    A loss defines ``position_losses`` of the corrected scores. In evaluation it is the full
    cross-entropy.
    """

    bias: nn.Parameter | None
    repeats: ClassVar[bool]  # whether the sampler it makes for itself draws with replacement

    def __init__(
        self,
        table: Table,
        samples: int,
        sampler: Sampler | None = None,
        bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(table, Table):
            raise ArgumentError(
                f"table is of type {type(table).__name__}: give a table (of a matrix, "
                "fb.DenseTable.from_dense(matrix))"
            )
        rows = table.num_embeddings
        if sampler is None:
            sampler = LogUniform(rows, replace=self.repeats)
        if not isinstance(sampler, Sampler):
            raise ArgumentError(
                f"sampler={sampler!r}: give an object such as fb.LogUniform({rows}) or "
                f"fb.Uniform({rows})"
            )
        if sampler.rows != rows:
            raise ArgumentError(
                f"{sampler!r} draws from {sampler.rows} ids, the table has {rows} rows: make it "
                f"with rows={rows}"
            )
        self.table, self.samples, self.sampler = table, sampler.check(samples), sampler
        self.register_parameter("bias", check_bias(bias, rows))

    @abstractmethod
    def position_losses(self, scores: Candidates) -> Tensor:  # -> [n]
        """Return the loss of each position."""

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # [..., d], integer [...] -> []
        """Return the mean loss over all positions."""
        flat, wanted = check_hidden(hidden, targets, self.table)
        if self.training:
            return self.position_losses(self.candidates(flat, wanted)).mean()
        logits = self.table.logits(flat)
        return F.cross_entropy(logits if self.bias is None else logits + self.bias, wanted)

    def candidates(
        self, hidden: Tensor, targets: Tensor
    ) -> Candidates:  # [n, d], int64 [n], checked
        """Draw negatives; score them and the targets with one look-up, in float32 or wider."""
        drawn, tries = self.sampler.draw(self.samples)
        negatives = drawn.to(targets.device)
        ids = torch.cat([targets, negatives])
        own, other = self.table(ids).split([len(targets), len(negatives)])
        # half precision would round the correction
        wide = torch.promote_types(hidden.dtype, torch.float32)
        shift = -self.sampler.log_expected(ids, tries).to(wide)
        if self.bias is not None:
            shift = shift + self.bias[ids]
        true = (hidden.to(wide) * own.to(wide)).sum(-1) + shift[: len(targets)]
        noise = (hidden @ other.to(hidden.dtype).T).to(wide) + shift[len(targets) :]
        return Candidates(true, noise, targets, negatives)

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"samples={self.samples}, sampler={self.sampler!r}"


class SampledSoftmax(CandidateLoss):
    """Cross-entropy over the true id t and m sampled ids S shared by all positions.

        loss = -log( exp(c_t) / (exp(c_t) + Σ_{w in S, w ≠ t} exp(c_w)) ),
        c_w = h . row(w) + bias_w - log E_w

    with E_w the expected count of w among the samples. Bengio and Senécal (2008); Jean et al.
    (2015), section 3. The cost of a step depends on the rows of targets and samples, not on V (the
    gradient of a bias is dense). The gradient is a biased estimate of the full softmax's, more
    accurate for larger m and exact for m = V distinct samples. In evaluation (``.eval()``) the loss
    is the full cross-entropy, by ``table.logits``.

    Args:
        table: the rows of the output ids, possibly tied to the model's input table.
        samples: number of negatives m: hundreds to thousands, more for more rows.
        sampler: ``fb.LogUniform(V)`` by default, which expects ids sorted by decreasing frequency.
        remove_accidental: ignore samples equal to the position's target. Correct for distinct
            samples; with replacement such hits belong to the estimate, so a sampler with
            ``replace=True`` needs False.
        bias: [V], added to the scores.

    >>> import featherbed as fb
    >>> words = fb.DenseTable(50_000, 32)
    >>> loss = SampledSoftmax(words, samples=500)
    >>> loss(torch.randn(8, 20, 32), torch.randint(50_000, (8, 20))).shape
    torch.Size([])
    """

    repeats: ClassVar[bool] = False

    def __init__(
        self,
        table: Table,
        samples: int,
        sampler: Sampler | None = None,
        remove_accidental: bool = True,
        bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__(table, samples, sampler, bias)
        if remove_accidental and self.sampler.replace:
            raise ArgumentError(
                f"remove_accidental=True with {self.sampler!r}: expected counts belong to all "
                "draws, and removing some makes frequent ids too likely; pass "
                "remove_accidental=False, or a sampler with replace=False"
            )
        self.remove_accidental = remove_accidental

    def position_losses(self, scores: Candidates) -> Tensor:  # -> [n]
        """Cross-entropy with the true id in the first column."""
        noise = scores.noise
        if self.remove_accidental:
            noise = noise.masked_fill(scores.hits, -torch.inf)
        columns = torch.cat([scores.true[:, None], noise], dim=1)
        return F.cross_entropy(columns, torch.zeros_like(scores.targets), reduction="none")

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"{super().extra_repr()}, remove_accidental={self.remove_accidental}"


class NCE(CandidateLoss):
    """Noise-contrastive estimation: logistic regression of the true id t against k sampled ids.

        loss = -log σ(c_t) - Σ_{w in S} log σ(-c_w),   c_w = h . row(w) + bias_w - log(k p(w))

    Gutmann and Hyvärinen (2010); Mnih and Teh (2012), who fix the normalizer at 1: at the optimum
    the score h . row(w) + bias_w is the log-probability. Samples are shared by all positions, and
    the cost of a step depends on the rows of targets and samples, not on V (the gradient of a bias
    is dense). Samples equal to the target are kept, in agreement with the theory: the noise covers
    all ids. In evaluation (``.eval()``) the loss is the full cross-entropy, by ``table.logits``, so
    that losses are comparable.

    Args:
        table: the rows of the output ids, possibly tied to the model's input table.
        samples: number of negatives k; more are closer to maximum likelihood.
        sampler: ``fb.LogUniform(V, replace=True)`` by default, which expects ids sorted by
            decreasing frequency. With distinct samples the expected count 1 - (1 - p)^tries
            replaces k p.
        bias: [V], added to the scores. Initialized at -log V, initial scores are near
            log-probabilities.

    >>> import torch
    >>> import featherbed as fb
    >>> words = fb.DenseTable(50_000, 32)
    >>> loss = NCE(words, samples=100, bias=nn.Parameter(torch.full((50_000,), -10.8)))
    >>> loss(torch.randn(8, 20, 32), torch.randint(50_000, (8, 20))).shape
    torch.Size([])
    """

    repeats: ClassVar[bool] = True

    def position_losses(self, scores: Candidates) -> Tensor:  # -> [n]
        """Logistic loss of the true id and of every sample."""
        return -F.logsigmoid(scores.true) - F.logsigmoid(-scores.noise).sum(1)
