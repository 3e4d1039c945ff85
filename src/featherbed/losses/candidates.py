"""Base of sampled losses: corrected scores of true ids and sampled ids."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.losses.samplers import LogUniform, Sampler
from featherbed.ops import check_ids
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
        self, table: Table, samples: int, sampler: Sampler | None, bias: nn.Parameter | None
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
        if bias is not None and (not isinstance(bias, nn.Parameter) or bias.shape != (rows,)):
            given = (
                f"shape {tuple(bias.shape)}"
                if isinstance(bias, nn.Parameter)
                else type(bias).__name__
            )
            raise ArgumentError(
                f"bias is one number for each id, nn.Parameter(torch.zeros({rows})), got {given}"
            )
        self.table = table
        self.samples = sampler.check(samples)
        self.sampler = sampler
        self.register_parameter("bias", bias)

    @abstractmethod
    def position_losses(self, scores: Candidates) -> Tensor:  # -> [n]
        """Return the loss of each position."""

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # [..., d], integer [...] -> []
        """Return the mean loss over all positions."""
        check_hidden(hidden, targets, self.table.embedding_dim)
        flat = hidden.reshape(-1, self.table.embedding_dim)
        wanted = check_ids(targets.reshape(-1), self.table.num_embeddings)
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
        wide = torch.promote_types(
            hidden.dtype, torch.float32
        )  # half precision would round the correction
        shift = -self.sampler.log_expected(ids, tries).to(wide)
        if self.bias is not None:
            shift = shift + self.bias[ids]
        true = (hidden.to(wide) * own.to(wide)).sum(-1) + shift[: len(targets)]
        noise = (hidden @ other.to(hidden.dtype).T).to(wide) + shift[len(targets) :]
        return Candidates(true, noise, targets, negatives)

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"samples={self.samples}, sampler={self.sampler!r}"


def check_hidden(hidden: Tensor, targets: Tensor, width: int) -> None:
    """Raise an error if hidden vectors and targets do not match."""
    if not hidden.is_floating_point():
        raise ArgumentError(
            f"hidden has dtype {hidden.dtype}: give floating-point vectors [..., {width}]"
        )
    if hidden.dim() == 0 or hidden.shape[-1] != width:
        raise ArgumentError(
            f"hidden has shape {tuple(hidden.shape)}, the rows have width {width}: give [..., "
            f"{width}]"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ArgumentError(
            f"targets have shape {tuple(targets.shape)}, hidden has {tuple(hidden.shape)}: "
            f"give one target for each hidden vector, shape {tuple(hidden.shape[:-1])}"
        )
    if not targets.numel():
        raise ArgumentError(
            f"targets of shape {tuple(targets.shape)} are empty: no mean is taken of nothing, skip "
            "the batch"
        )
