"""Noise-contrastive estimation: distinguishing true ids from sampled ones."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.losses.candidates import CandidateLoss, Candidates
from featherbed.losses.samplers import Sampler
from featherbed.tables.table import Table


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

    def __init__(
        self,
        table: Table,
        samples: int,
        sampler: Sampler | None = None,
        bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__(table, samples, sampler, bias)

    def position_losses(self, scores: Candidates) -> Tensor:  # -> [n]
        """Logistic loss of the true id and of every sample."""
        return -F.logsigmoid(scores.true) - F.logsigmoid(-scores.noise).sum(1)
