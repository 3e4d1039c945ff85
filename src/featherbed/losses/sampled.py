"""Sampled softmax: the cross-entropy over the true id and a few sampled ones."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.losses.candidates import CandidateLoss, Candidates
from featherbed.losses.samplers import Sampler
from featherbed.tables.table import Table


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
                "draws, and removing some makes "
                "frequent ids too likely; pass remove_accidental=False, or a sampler with "
                "replace=False"
            )
        self.remove_accidental = remove_accidental

    def position_losses(self, scores: Candidates) -> Tensor:  # -> [n]
        """Cross-entropy with the true id in the first column."""
        noise = (
            scores.noise.masked_fill(scores.hits, -torch.inf)
            if self.remove_accidental
            else scores.noise
        )
        columns = torch.cat([scores.true[:, None], noise], dim=1)
        return F.cross_entropy(columns, torch.zeros_like(scores.targets), reduction="none")

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"{super().extra_repr()}, remove_accidental={self.remove_accidental}"
