"""An anchor table with a changing number of anchors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featherbed.anchors.random import AnchorInit
from featherbed.checks import check_integer
from featherbed.errors import ArgumentError
from featherbed.optim.processes import group_of, of_first, total
from featherbed.optim.row_optimizer import RowOptimizer, kept_for, owners, resize
from featherbed.tables.anchor import AnchorTable

FORGET = 0.8  # how much of the gradients' second moment stays from one batch to the next


@dataclass(frozen=True)
class Anchors:
    """Removed anchors: atoms [n, d], columns of the transform [V, n], optimizer state of both."""

    atoms: Tensor
    columns: Tensor
    atom_state: dict[str, Tensor]
    column_state: dict[str, Tensor]


@dataclass(frozen=True)
class AnchorSnapshot:
    """A snapshot of a table: transform, atoms and the state of both in each optimizer."""

    values: list[Tensor]
    states: list[list[dict[str, Any] | None]]


class GrowingAnchorTable(AnchorTable):
    """E = T A with a number of anchors that ``fb.Growth`` changes in training (NBANT).

    Liang et al. 2021, section 2.3. The table holds the active anchors only; ``fb.Growth`` keeps the
    removed ones.

    Args:
        anchors: initial number of anchors.
        max_anchors: maximum number of anchors.

    >>> import torch
    >>> table = GrowingAnchorTable(1000, 16, anchors=4)
    >>> table.add_anchors(torch.ones(1, 16))
    >>> table.anchor_count, table.transform.shape
    (5, torch.Size([1000, 5]))
    """

    example: ClassVar[dict[str, Any]] = {"anchors": 5}
    grows: ClassVar[bool] = True
    factors = AnchorTable.factors

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        anchors: int = 10,
        max_anchors: int = 100,
        nonnegative: bool = True,
        sparse: bool = False,
        padding_idx: int | None = None,
        init: AnchorInit | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if check_integer("anchors", anchors) > check_integer("max_anchors", max_anchors):
            raise ArgumentError(
                f"anchors={anchors}: there may be at most max_anchors={max_anchors}"
            )
        settings: dict[str, Any] = {"anchors": anchors, "nonnegative": nonnegative, "init": init}
        settings |= {"sparse": sparse, "padding_idx": padding_idx, "generator": generator}
        super().__init__(num_embeddings, embedding_dim, dtype=dtype, device=device, **settings)
        self.max_anchors = int(max_anchors)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialize the active anchors and their weights; they represent no objects."""
        super().reset_parameters(generator)
        self.anchor_ids = None

    def related(self, graph: Any) -> Any:
        """Raise an error: the anchors of this table change, so they represent no objects."""
        raise ArgumentError(
            "the anchors of a growing table change, so they represent no objects: use "
            "fb.AnchorTable"
        )

    def training_rows(self, ids: Tensor) -> Tensor:  # int64 [...], checked -> [..., d]
        """Return rows; in training, apply a pending change first and report row gradients."""
        if not self.training:
            return self.lookup(ids)
        if self.on_training is not None:
            self.on_training()
        rows = self.lookup(ids)
        if self.on_gradient is not None and rows.requires_grad:
            rows.register_hook(self.on_gradient)  # type: ignore[no-untyped-call]
        return rows

    def add_anchors(
        self,
        atoms: Tensor,  # [n, d]
        columns: Tensor | None = None,  # [V, n]
        optimizer: Optimizer | None = None,
    ) -> None:
        """Add anchors, with weights of zero unless ``columns`` are given.

        A fresh preconditioner in the middle of training would cause far larger steps, so the
        optimizer's nonnegative state tensors (such as second moments) start at the mean over the
        other anchors.
        """
        if columns is None:
            columns = self.transform.new_zeros(self.num_embeddings, len(atoms))
        group = group_of([self.transform])
        states = [
            {
                name: kept.mean(axis, keepdim=True)
                for name, kept in kept_for(parameter, optimizer).items()
                if not int(total((kept < 0).sum(), group))
            }
            for parameter, axis in ((self.atoms, 0), (self.transform, 1))
        ]
        self.put_anchors(Anchors(atoms.to(self.atoms), columns, *states), optimizer)

    def put_anchors(
        self, anchors: Anchors, optimizer: Optimizer | None = None, place: int | None = None
    ) -> None:
        """Insert anchors with their optimizer state, at the end or from ``place`` on.

        Rows added since the anchors were removed have weights of zero for them.
        """
        place = self.anchor_count if place is None else place
        count, rows = len(anchors.atoms), len(anchors.columns)
        fit = anchors.columns.shape == (rows, count) and rows <= self.num_embeddings
        if anchors.atoms.shape != (count, self.embedding_dim) or not fit:
            raise ArgumentError(
                f"anchors of shape {tuple(anchors.atoms.shape)} with weights of shape "
                f"{tuple(anchors.columns.shape)}: give [n, {self.embedding_dim}] and "
                f"[{self.num_embeddings}, n]"
            )
        if self.anchor_count + count > self.max_anchors:
            raise ArgumentError(
                f"{self.anchor_count} + {count} anchors: there may be at most "
                f"max_anchors={self.max_anchors}"
            )
        for parameter, axis, values, state in self._sides(anchors):

            def longer(tensor: Tensor, fill: float, axis: int = axis) -> Tensor:
                before, after = tensor.tensor_split([place], axis)
                shape = (count, tensor.shape[1]) if axis == 0 else (len(tensor), count)
                return torch.cat([before, tensor.new_full(shape, fill), after], axis)

            resize(parameter, longer, optimizer)
            kept = kept_for(parameter, optimizer)
            with torch.no_grad():
                stored = [(kept[name], value) for name, value in state.items()]
                for tensor, part in [(parameter, values), *stored]:
                    there = tensor.narrow(axis, place, count)
                    (there[:rows] if axis else there).copy_(part)
        self.anchors = self.anchor_count

    def take_anchors(self, places: list[int], optimizer: Optimizer | None = None) -> Anchors:
        """Remove anchors and return them with their optimizer state; at least one remains."""
        gone = sorted(set(places))
        count = self.anchor_count
        if not gone or gone[0] < 0 or gone[-1] >= count or len(gone) >= count:
            raise ArgumentError(
                f"places={places}: of the {self.anchor_count} anchors some are taken out and at "
                "least one stays"
            )
        out = torch.tensor(gone, device=self.device)
        stay = torch.tensor([k for k in range(count) if k not in gone], device=self.device)
        taken, states = [], []
        for parameter, axis in ((self.atoms, 0), (self.transform, 1)):
            kept = kept_for(parameter, optimizer)
            taken.append(parameter.detach().index_select(axis, out))
            states.append({name: value.index_select(axis, out) for name, value in kept.items()})
            resize(parameter, lambda t, _, axis=axis: t.index_select(axis, stay), optimizer)  # type: ignore[misc]
        self.anchors = self.anchor_count
        return Anchors(taken[0], taken[1], *states)

    @torch.no_grad()
    def start_over(
        self, optimizer: Optimizer | None = None, generator: torch.Generator | None = None
    ) -> AnchorSnapshot:
        """Reset weights and optimizer state, keep the anchors' directions; return a snapshot."""
        sides = (self.transform, self.atoms)
        states = [
            [owner.state.pop(side, None) for side in sides] for owner in self._forgetting(optimizer)
        ]
        before = AnchorSnapshot([side.detach().clone() for side in sides], states)
        atoms = torch.empty_like(self.atoms)
        self.init.fill(atoms, self.transform, self.nonnegative, generator)
        atoms = of_first(atoms, group_of([self.transform]))
        lengths = self.atoms.norm(dim=1, keepdim=True).clamp(min=1e-12)
        self.atoms.mul_(atoms.norm(dim=1, keepdim=True) / lengths)
        return before

    def _forgetting(self, optimizer: Optimizer | None) -> list[Optimizer]:
        """Return the optimizers of the table, without their records of lazily updated rows."""
        for owner in owners(optimizer):
            if isinstance(owner, RowOptimizer):
                owner.forget(self.transform)
        return owners(optimizer)

    def take_back(self, before: AnchorSnapshot, optimizer: Optimizer | None = None) -> None:
        """Restore a snapshot; rows added since keep their values."""
        sides, all_owners = (self.transform, self.atoms), self._forgetting(optimizer)
        now = [kept_for(side, optimizer) for side in sides]
        for side, value in zip(sides, before.values, strict=True):
            resize(side, lambda tensor, _, value=value: torch.cat([value, tensor[len(value) :]]))  # type: ignore[misc]
        for owner, states in zip(all_owners, before.states, strict=True):
            for side, state, new in zip(sides, states, now, strict=True):
                if state is not None:
                    longer = {
                        k: torch.cat([v, new[k][len(v) :]]) if k in new else v
                        for k, v in state.items()
                    }
                    owner.state[side] = longer
        self.anchors = self.anchor_count

    def _sides(self, anchors: Anchors) -> list[tuple[nn.Parameter, int, Tensor, dict[str, Tensor]]]:
        columns = (self.transform, 1, anchors.columns, anchors.column_state)
        return [columns, (self.atoms, 0, anchors.atoms, anchors.atom_state)]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a state with any number of anchors."""
        atoms = state_dict.get(prefix + "atoms")
        if isinstance(atoms, Tensor) and atoms.dim() == 2 and len(atoms) != self.anchor_count:
            if len(atoms) > self.max_anchors:
                raise ArgumentError(
                    f"the state has {len(atoms)} anchors: there may be at most "
                    f"max_anchors={self.max_anchors}"
                )
            resize(self.atoms, lambda tensor, _: tensor.new_zeros(len(atoms), tensor.shape[1]))
            resize(self.transform, lambda tensor, _: tensor.new_zeros(len(tensor), len(atoms)))
            self.anchors = self.anchor_count
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        """Return a state without the hooks of a running training."""
        return {**super().__getstate__(), "on_training": None, "on_gradient": None}


@dataclass
class Departure:
    """The removal of an anchor; the most similar anchor inherits ``share`` times its weights."""

    table: GrowingAnchorTable
    place: int
    heir: int
    share: float
    anchors: Anchors | None = None  # it, once it has left
    handed: tuple[Tensor, Tensor] | None = None  # the heir's weights before and after, [V] each

    @torch.no_grad()
    def hand_over(self) -> None:
        """Add the anchor's weights to its heir's."""
        transform = self.table.transform
        transform[:, self.heir] += self.share * transform[:, self.place]
        transform[:, self.place] = 0.0

    @torch.no_grad()
    def leave(self, optimizer: Optimizer | None) -> None:
        """Hand the weights over and remove the anchor."""
        transform = self.table.transform
        column, before = transform[:, [self.place]].clone(), transform[:, self.heir].clone()
        self.hand_over()
        self.handed = before, transform[:, self.heir].clone()
        self.anchors = replace(self.table.take_anchors([self.place], optimizer), columns=column)

    @torch.no_grad()
    def come_back(self, optimizer: Optimizer | None) -> None:
        """Restore the anchor, its weights and state; subtract its share from the heir's weights."""
        assert self.anchors is not None
        assert self.handed is not None
        before, after = self.handed
        heir = self.table.transform[: len(before), self.heir - (self.heir > self.place)]
        less = heir - self.share * self.anchors.columns[:, 0]
        less = less.clamp(min=0) if self.table.nonnegative else less
        heir.copy_(torch.where(heir == after, before, less))
        self.table.put_anchors(self.anchors, optimizer, self.place)

    def state(self) -> dict[str, Any]:
        """Return tensors and numbers for a checkpoint."""
        anchors = None if self.anchors is None else vars(self.anchors)
        return {name: value for name, value in vars(self).items() if name != "table"} | {
            "anchors": anchors
        }

    @classmethod
    def of_state(cls, table: GrowingAnchorTable, state: dict[str, Any]) -> Departure:
        """Restore from a checkpoint."""
        anchors = None if state["anchors"] is None else Anchors(**state["anchors"])
        return cls(table, **state | {"anchors": anchors})


@torch.no_grad()
def departures(table: GrowingAnchorTable) -> list[Departure]:
    """Return the possible removals of anchors, by increasing expected cost.

    With heir j and share c the rows change by T[:, k] (a_k - c a_j), so the cost is ||T[:, k]||²
    min_j,c ||a_k - c a_j||².
    """
    atoms = table.atoms.double()
    gram = atoms @ atoms.T
    squares = gram.diagonal()
    shares = gram / squares.clamp(min=torch.finfo(torch.float64).tiny)  # [k, j]: of a_j in a_k
    if table.nonnegative:
        shares = shares.clamp(min=0)
    left = squares[:, None] - 2 * shares * gram + shares.square() * squares
    left.fill_diagonal_(torch.inf)
    least, heirs = left.min(dim=1)
    squares = total(table.transform.double().square().sum(0), group_of([table.transform]))
    cost = squares * least.clamp(min=0)
    order = torch.argsort(cost, stable=True).tolist() if len(atoms) > 1 else []
    return [Departure(table, k, int(heirs[k]), float(shares[k, heirs[k]])) for k in order]


class GradientMoment:
    """Running second moment of row gradients, over the last batches."""

    def __init__(self, table: GrowingAnchorTable) -> None:
        self.table = table
        self.moment = table.atoms.detach().new_zeros(table.embedding_dim, table.embedding_dim)
        self.mean = self.moment.new_zeros(table.embedding_dim)
        table.on_gradient = self.accumulate

    def accumulate(self, gradient: Tensor) -> None:  # [..., d]
        """Accumulate the gradients of rows."""
        rows = gradient.detach().reshape(-1, self.table.embedding_dim).to(self.moment)
        if not bool(rows.isfinite().all()):
            return  # a step that is skipped, as gradient scalers do
        self.moment.mul_(FORGET).addmm_(rows.T, rows)
        self.mean.mul_(FORGET).add_(rows.sum(0))

    def directions(self, count: int) -> Tensor:  # [count, d]
        """Return the directions of largest gradients, with the median length of the anchors."""
        group = group_of([self.table.transform])
        moment, mean = total(self.moment, group), total(self.mean, group)
        vectors = torch.linalg.eigh(moment.double()).eigenvectors  # the top one is last
        found = vectors.flip(1).T.to(mean)[torch.arange(count) % len(vectors)]
        # rows move against their gradients
        sign = torch.where(found @ mean > 0, -1.0, 1.0).to(found)
        length = self.table.atoms.detach().norm(dim=1).median()
        scaled: Tensor = found * (sign * length)[:, None]
        return scaled
