"""Variational dropout: rows or entries learn their noise level, and pure noise is pruned."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.anchors.selection import kl as divergence
from featherbed.checks import check_choice, check_integer, is_number
from featherbed.errors import ArgumentError
from featherbed.optim.schedules import Schedule
from featherbed.packed.band import MOST_CODES, Band, Entries, Hash, Identity, Members
from featherbed.packed.matrix import Matrix
from featherbed.tables.codes import Codes
from featherbed.tables.fitting import row_weights
from featherbed.tables.rows import empty_parameter, to_numpy
from featherbed.tables.table import Table

# initial log alpha: Chen et al. draw it from 0 to 3; log sigma is -3 elsewhere
STARTS = {"row": 1.5, "weight": -6.0, "both": -6.0}
LOUDEST = 8.0  # log alpha of the noise that is drawn, at most
FLOOR = 1e-8  # added to squared means, so that an entry at 0 has a log alpha


class VariationalTable(Table):
    """Rows with multiplicative noise of learned strength; log alpha above ``threshold`` is pruned.

        "row":     row = θ_w ε,              ε ~ N(1, α_w)               one α per row (VVD)
        "weight":  row = θ_w + σ_w ε,        ε ~ N(0, 1), α = σ² / θ²    one α per entry (SparseVD)
        "both":    row = z_w (θ_w + σ_w ε),  z_w ~ N(μ_w, τ_w²)          and one α for z

        loss = task loss + kl Σ KL(α) / samples

    Chen et al. 2019, Molchanov et al. 2017 and Chirkova et al. 2018. KL is the approximate
    divergence from the log-uniform prior (Molchanov et al.), added through
    ``fb.auxiliary_loss(model)``. In training every look-up draws new noise (from torch's default
    generator, like dropout), and so do ``weight`` and ``logits``, once per row. In evaluation rows
    are the means, zero where pruned; pruned rows share the zero row, instead of the "unknown" row
    of Chen et al. ``from_dense`` starts from a matrix.

    Args:
        noise: row, weight or both, as above.
        kl: weight of the divergence; 1 is the evidence lower bound, more prunes more.
        samples: number of training examples, the divisor of the divergence since the task loss is a
            mean; V by default.
        threshold: log alpha from which rows or entries are pruned; 3 is a dropout rate of 95 %.
        start: initial log alpha; by default 1.5 for rows, -6 for weights (relative to the row's
            mean square).

    >>> import torch
    >>> table = VariationalTable(1000, 16, samples=5000)
    >>> table(torch.tensor([3, 17])).shape, len(table.kept())
    (torch.Size([2, 16]), 1000)
    >>> _ = table.log_alpha.data[100:].fill_(5.0)  # as training does with words it can do without
    >>> len(table.kept()), table.parameter_count()
    (100, 1600)
    """

    scheduled: ClassVar[str] = "share"  # the attribute that fb.Schedule sets
    log_alpha: nn.Parameter  # "row": [V, 1]
    log_variance: nn.Parameter  # "weight", "both": log σ², [V, d]
    gates: nn.Parameter  # "both": μ, [V, 1]
    gate_log_variance: nn.Parameter  # "both": log τ², [V, 1]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        noise: str = "row",
        kl: float = 1.0,
        samples: int | None = None,
        threshold: float = 3.0,
        start: float | None = None,
        padding_idx: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        check_choice("noise", noise, tuple(STARTS))
        if not is_number(kl, 0):
            raise ArgumentError(
                f"kl={kl!r}: the weight of the divergence is a number of at least 0"
            )
        self.noise, self.kl, self.share = noise, float(kl), 1.0
        self.samples = self.num_embeddings if samples is None else check_integer("samples", samples)
        self.threshold, self.start = threshold, STARTS[noise] if start is None else start
        for name in ("threshold", "start"):
            if not is_number(getattr(self, name)):
                raise ArgumentError(
                    f"{name}={getattr(self, name)!r}: log alpha is a number, from about -8 to 8"
                )
        whole, column = (self.num_embeddings, self.embedding_dim), (self.num_embeddings, 1)
        self.rows = empty_parameter(whole, dtype, device)  # θ, [V, d]
        if noise == "row":
            self.log_alpha = empty_parameter(column, dtype, device)
        else:
            self.log_variance = empty_parameter(whole, dtype, device)
        if noise == "both":
            self.gates = empty_parameter(column, dtype, device)
            self.gate_log_variance = empty_parameter(column, dtype, device)
        self.initialize(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw means from N(0, 1) and set the initial noise."""
        self.rows.normal_(0.0, 1.0, generator=generator)
        self.fit_dense(self.rows.detach().clone())

    def warm(self, share: float) -> None:
        """Set the weight ``share`` (0 to 1) of the divergence, for a warm-up."""
        if not is_number(share, 0):
            raise ArgumentError(
                f"share={share!r}: give a number of at least 0; 1 is the whole divergence"
            )
        self.share = float(share)

    def schedulers(self, steps: int) -> list[Any]:
        """Return the warm-up of the divergence, over the first half of the steps."""
        return [Schedule(self, {0: 0.0, max(1, round(0.5 * steps)): 1.0})]

    def auxiliary(self) -> Tensor | None:
        """Return kl share Σ KL(α) / samples over all rows in training, None if it has no weight."""
        weight = self.kl * self.share / self.samples
        if not self.training or weight == 0:
            return None
        with torch.autocast(self.device.type, enabled=False):
            parts = [divergence(part).sum() for part in self._log_alphas(slice(None))]
            return weight * torch.stack(parts).sum()

    def _log_alphas(self, ids: Tensor | slice) -> list[Tensor]:  # [..., d] or [..., 1]
        """Return log α of entries and of rows, as far as the noise has them."""
        if self.noise == "row":
            return [self.log_alpha[ids]]
        entries = _relative(self.log_variance[ids], self.rows[ids])
        if self.noise == "weight":
            return [entries]
        return [entries, _relative(self.gate_log_variance[ids], self.gates[ids])]

    def codes(self, ids: Tensor) -> Codes:
        """The values are the mean of the row, zero where pruned."""
        rows = F.embedding(ids, self.rows)
        if self.noise == "both":
            rows = rows * F.embedding(ids, self.gates)
        with torch.no_grad():
            cuts = [_wide(part) >= self.threshold for part in self._log_alphas(ids)]
        for cut in cuts:
            rows = rows.masked_fill(cut, 0.0)
        return Codes(None, rows, None)

    def training_rows(self, ids: Tensor) -> Tensor:  # int64 [...] -> [..., d]
        """Return rows; in training with new noise for each occurrence of an id."""
        if not self.training:
            return self.lookup(ids)
        rows = F.embedding(ids, self.rows)
        if self.noise == "row":
            log_alpha = F.embedding(ids, self.log_alpha)
            excess = (log_alpha.detach() - LOUDEST).clamp(min=0)
            log_alpha = log_alpha - excess  # its gradient stays
            rows = rows * (1 + _noise(log_alpha))
        else:
            rows = rows + _noise(F.embedding(ids, self.log_variance))
        if self.noise == "both":
            gate = _noise(F.embedding(ids, self.gate_log_variance))
            rows = rows * (F.embedding(ids, self.gates) + gate)
        return self.mask_padding(ids, rows)

    def dense_rows(self) -> Tensor:  # [V, d]
        """Compute all rows, pruned; in training with noise."""
        return self.training_rows(self.all_ids())

    def logits(self, hidden: Tensor) -> Tensor:  # [..., d] -> [..., V]
        """Return hidden . row(i) for every id; in training with one draw of noise per row."""
        if not self.training or hidden.shape[-1] != self.embedding_dim:
            return super().logits(hidden)
        return F.linear(hidden, self.dense_rows().to(hidden.dtype))

    def kept(self) -> Tensor:  # int64 [kept]
        """Return the ids whose rows are not all zero."""
        with torch.no_grad():
            return self._means().any(1).nonzero()[:, 0]

    def keep(self, count: int) -> None:
        """Set the threshold that keeps the ``count`` rows of smallest log alpha (and ties)."""
        if self.noise != "row":
            raise ArgumentError(
                "keep goes with noise='row', where a row has one log alpha; set threshold with "
                f"{self.noise!r}"
            )
        with torch.no_grad():
            order = self.log_alpha[:, 0].double()
            if self.padding_idx is not None:
                order = torch.cat([order[: self.padding_idx], order[self.padding_idx + 1 :]])
            if check_integer("count", count) > len(order):
                raise ArgumentError(f"count={count}: there are only {len(order)} rows to keep")
            last = float(order.sort().values[count - 1])
        self.threshold = float(np.nextafter(np.float32(last), np.float32(np.inf)))

    def _means(self) -> Tensor:  # [V, d]
        return self.lookup(self.all_ids())

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """Two bands: kept rows (dense or sparse entries, the smaller) and a zero row."""
        rows = to_numpy(self._means())
        kept = np.flatnonzero(rows.any(axis=1))
        nothing = Matrix.encode(np.zeros((1, self.embedding_dim), dtype=np.float32), "float16")
        rest = Band(self.num_embeddings - len(kept), Hash(0, 1), None, nothing)
        if not len(kept):
            return [rest]
        members = Members.of(kept, self.num_embeddings)
        stored = Matrix.encode(rows[kept], dictionary)
        whole = Band(len(kept), Identity(), dictionary=stored, members=members)
        if layout == "all" or self.embedding_dim > MOST_CODES:
            return [whole, rest]
        how = "ragged" if layout == "auto" else layout
        codes, _ = Entries.of(rows[kept]).layout(how, values)
        units = Matrix.encode(np.eye(self.embedding_dim, dtype=np.float32), "float16")
        sparse = Band(len(kept), codes, None, units, members=members)
        return [sparse if layout != "auto" or _bytes(sparse) < _bytes(whole) else whole, rest]

    def parameter_count(self) -> int:
        """Kept rows times d; with noise on weights, the number of kept entries."""
        with torch.no_grad():
            if self.noise == "row":
                return len(self.kept()) * self.embedding_dim
            return int(torch.count_nonzero(self._means()))

    @torch.no_grad()
    def scale_initial_rows(self, std: float) -> None:
        """Scale the rows to the standard deviation ``std``; their noise levels follow."""
        self.fit_dense(self.rows.detach() * (std / float(self.rows.std())))

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Set the means to the matrix and the noise to its initial level."""
        row_weights(weights, matrix)  # only checked: every row is kept as it is
        self.rows.copy_(matrix)
        if self.padding_idx is not None:
            self.rows[self.padding_idx] = 0
        if self.noise == "row":
            self.log_alpha.fill_(self.start)
            return
        size = matrix.square().mean(1, keepdim=True).clamp(min=FLOOR).log()
        self.log_variance.copy_((self.start + size).expand_as(matrix))
        if self.noise == "both":
            self.gates.fill_(1.0)
            self.gate_log_variance.fill_(self.start)

    def get_extra_state(self) -> dict[str, float]:
        """Return the threshold: another one would give other rows."""
        return {"threshold": float(self.threshold)}

    def set_extra_state(self, state: dict[str, float]) -> None:
        """Restore the threshold."""
        self.threshold = state["threshold"]


def _relative(log_variance: Tensor, mean: Tensor) -> Tensor:
    """Return log α = log σ² - log θ²."""
    return log_variance - torch.log(mean.square() + FLOOR)


def _wide(tensor: Tensor) -> Tensor:
    """Return float32 or wider, so that comparisons with the threshold are exact."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _noise(log_variance: Tensor) -> Tensor:
    """Draw from N(0, σ²)."""
    return torch.exp(0.5 * log_variance) * torch.randn_like(log_variance)


def _bytes(band: Band) -> int:
    return sum(array.nbytes for _, array in band.arrays())
