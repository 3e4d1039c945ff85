"""Noise-contrastive estimation: telling true ids from sampled ones."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.losses.candidates import CandidateLoss, Candidates
from featherbed.losses.samplers import Sampler
from featherbed.tables.table import Table


class NCE(CandidateLoss):
    """Noise-contrastive estimation: a logistic regression that tells the true id t from k sampled ids, shared by all positions.

        loss = -log σ(c_t) - Σ_{w in S} log σ(-c_w),   c_w = h . row(w) + bias_w - log(k p(w))

    Gutmann and Hyvärinen (2010); Mnih and Teh (2012), who fix the normaliser at 1: at the optimum the score itself,
    h . row(w) + bias_w, is the log-probability. A step costs in the rows of targets and samples, never in V (a bias's gradient
    is dense). Samples that are the position's own target are kept, as the theory has it: the noise draws from all ids, the true
    one included. In evaluation (``.eval()``) the loss is the full cross-entropy, by ``table.logits``, so that losses compare.

    Args:
        table: the rows of the output ids; the model's input table too where the two are tied.
        samples: how many negatives, k; the more, the nearer to maximum likelihood.
        sampler: ``fb.LogUniform(V, replace=True)`` if None, which wants ids sorted by falling frequency. With distinct samples
            the expected count 1 - (1 - p)^tries stands for k p.
        bias: one number for each id, [V], that is added to the scores. Started at -log V, scores begin as log-probabilities do.

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
