"""Slots: rows keep a few of many atoms, which better ones may replace in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import featherbed.optim.lazy.native as native
from featherbed.errors import ArgumentError

BLOCK = 1 << 14  # rows scored at once


class Slotted(Protocol):
    """A table with slots."""

    atoms: Any  # [K, d]
    support: Any  # int [V, s]
    nonnegative: bool


@dataclass(frozen=True)
class Proposal:
    """The best missing ``atoms`` [n] of rows ``ids`` [n], and the ``gradients`` [n] of their
    weights.
    """

    table: Slotted
    ids: Tensor
    atoms: Tensor
    gradients: Tensor


class Slots:
    """Selects atoms that enter rows of a table: those whose weights would have the largest
    gradients.

    Every ``every`` steps (``collects``) the backward pass appends to ``collected`` ids [n], the
    gradients of their rows [n, d] and of their weights [n, s] before scaling; the optimizer's step
    scores the missing atoms of these rows (``propose``) with the gradients after unscaling and
    clipping. With DistributedDataParallel set ``group`` to the process group, so that all processes
    see all rows.
    """

    def __init__(self, table: Slotted, every: int) -> None:
        self.table, self.every = table, every
        self.group: Any = None
        self.collected: list[tuple[Tensor, Tensor, Tensor]] = []
        self.backward = -1  # number of the backward pass that collected last

    def __getstate__(self) -> dict[str, Any]:
        """Return a state without collected gradients and process group."""
        return {**self.__dict__, "collected": [], "group": None}

    def collects(self, parameter: Tensor, steps: int) -> bool:
        """Return whether a backward pass collects gradients for a scan in the next step."""
        # the sum over all look-ups of a backward pass reaches ``grad`` after the last of them
        now: int = torch._C._current_graph_task_id()
        if parameter.requires_grad and parameter.grad is None and now != self.backward:
            # a new step begins: these gradients are of one that was not taken
            self.collected.clear()
        self.backward = now
        return parameter.requires_grad and (steps + 1) % self.every == 0

    def propose(self, gradient: Tensor, steps: int) -> Proposal | None:  # sparse [V, s]
        """Return the best missing atoms of the rows of this step, None if no scan is due.

        ``gradient`` tells by which factor gradients were scaled since the backward pass.
        """
        if (steps + 1) % self.every:
            return None
        rows = gradient._values()
        empty = gradient._indices()[0, :0], rows.new_empty(0, self.table.atoms.shape[1]), rows[:0]
        ids, total, values = map(torch.cat, zip(empty, *self.collected, strict=True))
        self.collected.clear()
        if self.group is not None:  # also with nothing of its own: the others wait
            ids, total, values = (_from_all(part, self.group) for part in (ids, total, values))
        factor = _scaled_by(ids, values, gradient) if len(ids) else None
        if factor is None:
            return None
        ids, total = native.summed(ids, total)
        atoms, support = self.table.atoms.detach(), self.table.support[ids]
        best = native.best_atoms if native.serves(total, atoms) else best_atoms
        return Proposal(
            self.table, ids, *best(total, support, atoms, factor, self.table.nonnegative)
        )


def best_atoms(
    total: Tensor, support: Tensor, atoms: Tensor, factor: float, signed: bool
) -> tuple[Tensor, Tensor]:
    """Return the missing atom of largest gradient for each row: ``native.best_atoms`` in torch."""
    found = []
    for rows, own in zip(torch.split(total, BLOCK), torch.split(support, BLOCK), strict=True):
        scores = factor * (rows @ atoms.T)
        wanted = (-scores if signed else scores.abs()).scatter_(1, own.long(), -torch.inf)
        highest, index = wanted.max(dim=1)
        gradients = scores.gather(1, index[:, None])[:, 0]
        found.append((index, gradients.masked_fill(highest == -torch.inf, 0.0)))
    atom_ids, gradients = map(torch.cat, zip(*found, strict=True))
    return atom_ids, gradients


def _scaled_by(ids: Tensor, values: Tensor, gradient: Tensor) -> float | None:
    """Return the factor by which the gradient was scaled since the backward pass.

    Gradients may be unscaled, clipped or averaged over processes. None if the gradient belongs to
    another backward pass, for example one without a step.
    """
    before, now = values, gradient._values()
    if not torch.equal(gradient._indices()[0], ids):  # not as it came from one backward pass
        left = torch.sparse_coo_tensor(ids[None], values, gradient.shape, check_invariants=False)
        left, gradient = left.coalesce(), gradient.coalesce()
        if not torch.equal(left.indices(), gradient.indices()):
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                raise ArgumentError(
                    "the gradient of a table with slots holds other rows than its backward pass "
                    "saw: with DistributedDataParallel set table.slot_group = "
                    "torch.distributed.group.WORLD"
                )
            return None
        before, now = left.values(), gradient.values()
    a, b = before.double().flatten(), now.double().flatten()
    size = float(a @ a)
    return float(a @ b) / size if size > 0 else 1.0


def _from_all(part: Tensor, group: Any) -> Tensor:
    """Return the concatenated rows of all processes."""
    count = torch.tensor([len(part)])
    counts = [torch.zeros_like(count) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(counts, count, group=group)
    most = int(max(int(c) for c in counts))
    padded = part.new_zeros(most, *part.shape[1:])
    padded[: len(part)] = part
    gathered = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(gathered, padded, group=group)
    return torch.cat([rows[: int(c)] for rows, c in zip(gathered, counts, strict=True)])
