"""Epochs of matrix factorisation in compiled loops: the steps of ``ratings.train_epoch``, without its tensors in between.

For two tables that hold dense rows or anchors, and Yogi or AdamW. A step composes the rows of the batch, predicts, finds
the gradients and steps every parameter with its penalty, in place: parameters, the optimizer's state, penalties and
schedules are those of the reference loop, which may go on at any step. Results do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.errors import ArgumentError, IdError
from featherbed.optim.adamw import AdamW
from featherbed.optim.lazy.native import KINDS, RULES, serves
from featherbed.optim.row_optimizer import RowOptimizer
from featherbed.optim.yogi import Yogi
from featherbed.sharing.sse import SSE, bare
from featherbed.tables.anchor import AnchorTable
from featherbed.tables.dense import DenseTable
from featherbed.tables.growing import GrowingAnchorTable
from featherbed.tasks.passes import WIDEST

if TYPE_CHECKING:
    from featherbed.tasks.ratings import MatrixFactorization

Triples = tuple[Tensor, Tensor, Tensor]
Integers = NDArray[np.int32]
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
)


def fits(model: MatrixFactorization, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the compiled loops take this model and this optimizer.

    >>> import featherbed as fb
    >>> from featherbed.tasks.ratings import MatrixFactorization
    >>> model = MatrixFactorization(fb.AnchorTable(9, 4, anchors=2), fb.DenseTable(7, 4))
    >>> fits(model, fb.Yogi(model.parameters())), fits(model, torch.optim.SGD(model.parameters()))
    (True, False)
    """
    if not isinstance(optimizer, RowOptimizer) or type(optimizer) not in (Yogi, AdamW):
        return False
    tables = [bare(model.users), bare(model.items)]
    if any(type(table) not in (AnchorTable, GrowingAnchorTable, DenseTable) for table in tables):
        return False
    if any(
        table.sparse or table.padding_idx is not None or table.embedding_dim > WIDEST
        for table in tables
    ):
        return False
    if model.biases == "apart" and (isinstance(model.users, SSE) or isinstance(model.items, SSE)):
        return False
    parameters, stored = list(model.parameters()), {id(_stored(table)) for table in tables}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if (
        len(stored) < 2
        or {id(p) for p in parameters} != {id(p) for p in held}
        or not all(p.requires_grad for p in held)
    ):
        return False
    known = all(
        id(p) in stored and penalty.kind in KINDS for p, penalty in optimizer.penalties.items()
    )
    sound = all(optimizer.coefficients(group, 1).decay > 0 for group in optimizer.param_groups)
    return (
        known and sound and not _watched(model, optimizer) and serves(*(p.detach() for p in held))
    )


def _watched(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody wants to see what happens inside a step."""
    seen = [*model.modules(), *model.parameters()]
    steps = (
        getattr(optimizer, name, None)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    )
    return any(getattr(one, name, None) for one in seen for name in _HOOKS) or any(steps)


def _stored(table: Any) -> nn.Parameter:
    """Return what a table holds for each row: weights over its anchors [V, K], or the row [V, d]."""
    held: nn.Parameter = table.weight if isinstance(table, DenseTable) else table.transform
    return held


class Stepped:
    """A parameter as the loops step it: its moments, and the nine numbers of its step."""

    def __init__(self, parameter: nn.Parameter, optimizer: RowOptimizer) -> None:
        self.parameter, self.optimizer = parameter, optimizer
        self.group = next(
            g for g in optimizer.param_groups if any(p is parameter for p in g["params"])
        )
        self.state = optimizer._state_of(parameter, self.group)
        self.penalty = optimizer.penalties.get(parameter)
        self.kept: NDArray[np.uint8] | None = None
        self._kept_from: Tensor | None = None

    @property
    def kind(self) -> int:
        """The number by which loops know the penalty."""
        return KINDS["none" if self.penalty is None else str(self.penalty.kind)]

    def moments(self) -> list[int]:
        """Return the addresses of m and v, each followed by the bytes from row to row."""
        return [
            word
            for name in ("m", "v")
            for word in (self.state[name].data_ptr(), 4 * self.state[name].stride(0))
        ]

    def next_numbers(self) -> list[float]:
        """Count a step and return its numbers (see ``kernels.arithmetic.step``)."""
        self.state["step"] += 1
        c = self.optimizer.coefficients(self.group, self.state["step"])
        threshold = 0.0 if self.penalty is None else self.penalty.lam * c.prox
        coupled = self.group["weight_decay"] if self.optimizer.coupled else 0.0
        return [c.decay, c.rate, c.keep, c.add, c.second, c.eps, c.correction, threshold, coupled]

    def kept_at(self) -> int:
        """Return the address of the entries that may be other than zero, 0 if all may."""
        kept = None if self.penalty is None else self.penalty.kept
        if kept is not self._kept_from:
            self._kept_from = kept
            self.kept = None if kept is None else np.ascontiguousarray(kept.numpy()).view(np.uint8)
        return 0 if self.kept is None else self.kept.ctypes.data


class Side:
    """One table of the two, its bias, and the memory the loops need for it, as a block of words."""

    def __init__(
        self, table: Any, bias: nn.Parameter | None, optimizer: RowOptimizer, batch: int, loops: Any
    ) -> None:
        self.table, self.loops = table, loops
        self.stored = Stepped(_stored(table), optimizer)
        self.atoms = None if isinstance(table, DenseTable) else Stepped(table.atoms, optimizer)
        self.bias = None if bias is None else Stepped(bias, optimizer)
        length, width = self.stored.parameter.shape
        dim, pieces = table.embedding_dim, -(-length // loops.ROWS)
        padded = 0 if self.atoms is None else -(-width // loops.LANES) * loops.LANES
        self.pieces, self.steps = pieces, np.zeros((3, 9), dtype=np.float32)
        self.composed = np.zeros((length, dim), dtype=np.float32)
        rooms: dict[str, NDArray[Any]] = {
            "STARTS": np.zeros(length + 2, dtype=np.int32),
            "ORDER": np.zeros(batch, dtype=np.int32),
            "COMPOSED": self.composed,
            "TURNED": np.zeros((dim, padded), dtype=np.float32),
            "PARTS": np.zeros(pieces * width * dim if padded else 0, dtype=np.float32),
            "ROOM": np.zeros(pieces * (dim + padded), dtype=np.float32),
            "BIAS_GRADIENT": np.zeros(0 if bias is None else length, dtype=np.float32),
            "STEPS": self.steps,
        }
        self.rooms, self.block = rooms, np.zeros(loops.WORDS, dtype=np.int64)
        for name, room in rooms.items():
            self.block[getattr(loops, name)] = room.ctypes.data
        self.block[[loops.LENGTH, loops.WIDTH, loops.PADDED]] = length, width, padded
        self._lay("STORED", "FIRST", self.stored)
        if self.atoms is not None:
            self._lay("ATOMS", "ATOM_FIRST", self.atoms)
            loops.turn(self.block, dim)
        if self.bias is not None:
            m, _, v, _ = self.bias.moments()
            self.block[[loops.BIAS, loops.BIAS_FIRST, loops.BIAS_SECOND]] = (
                self.bias.parameter.data_ptr(),
                m,
                v,
            )

    def _lay(self, values: str, moments: str, one: Stepped) -> None:
        at = getattr(self.loops, moments)
        self.block[getattr(self.loops, values)] = one.parameter.data_ptr()
        self.block[at : at + 4] = one.moments()

    def stands(self) -> bool:
        """Whether the parameters are still where they were."""
        held = [(self.stored, "STORED"), (self.atoms, "ATOMS"), (self.bias, "BIAS")]
        return all(
            one is None or int(self.block[getattr(self.loops, name)]) == one.parameter.data_ptr()
            for one, name in held
        )

    def count_step(self) -> None:
        """Take in the numbers of the next step."""
        for at, one in enumerate((self.stored, self.atoms, self.bias)):
            if one is not None:
                self.steps[at] = one.next_numbers()
        self.block[self.loops.KEPT] = self.stored.kept_at()


class Steps:
    """The steps of one epoch on one model; ``step(users, items, values)`` returns the sum of squared errors before it."""

    def __init__(self, model: MatrixFactorization, optimizer: RowOptimizer, batch: int) -> None:
        import featherbed.kernels.factors as loops
        from featherbed.kernels.pool import run

        self.model, self.optimizer, self.batch, self.loops, self.run = (
            model,
            optimizer,
            batch,
            loops,
            run,
        )
        self.numbers = np.array([float(model.mean), 0.0], dtype=np.float32)  # type: ignore[arg-type]
        self.errors = np.zeros(batch, dtype=np.float32)
        self.sums = np.zeros(-(-batch // loops.PLACES), dtype=np.float64)
        self.column = int(model.biases == "column")
        self.growing = [
            t for t in map(bare, (model.users, model.items)) if isinstance(t, GrowingAnchorTable)
        ]
        self._bind()

    def _bind(self) -> None:
        model, loops = self.model, self.loops
        halves = ((model.users, model.user_bias), (model.items, model.item_bias))
        self.sides = [
            Side(bare(module), bias, self.optimizer, self.batch, loops) for module, bias in halves
        ]
        self.blocks = np.zeros(
            (2, loops.WORDS), dtype=np.int64
        )  # of a batch; with its sides turned
        for block, pair in zip(self.blocks, (self.sides, self.sides[::-1]), strict=True):
            block[:2] = [side.block.ctypes.data for side in pair]
            block[[loops.ERRORS, loops.SUMS, loops.NUMBERS]] = [
                room.ctypes.data for room in (self.errors, self.sums, self.numbers)
            ]
        dim, rule, metric = (
            model.users.embedding_dim,
            RULES[self.optimizer.rule],
            int(self.optimizer.metric),
        )
        self.compose, self.find = loops.compose_rows(dim), loops.find_errors(dim, self.column)
        self.step_atoms, self.step_biases = loops.step_atoms(dim, rule), loops.step_biases(rule)
        self.step_rows = [
            loops.step_side(dim, self.column, rule, side.stored.kind, metric) for side in self.sides
        ]

    def step(
        self, users: Integers, items: Integers, values: NDArray[np.float32]
    ) -> float:  # [n] each
        """Predict, find gradients, and step every parameter."""
        self._ready(users, items, values)
        loops, run, count, held = self.loops, self.run, len(values), (users, items, values, self)
        run(loops.group_sides, self.blocks[0], 2, 1, held)
        for side in self.sides:
            run(self.compose, side.block, side.pieces, 4, held)
        pieces = -(-count // loops.PLACES)
        run(self.find, self.blocks[0], pieces, 1, held)
        total = float(self.sums[:pieces].sum())
        if not math.isfinite(total):
            raise ArgumentError(
                "the predictions of a batch hold NaN or infinity; nothing was changed: lower the learning rate"
            )
        if self.growing:
            self._tell(users, items)
        for side in self.sides:
            side.count_step()
        for side, block, job in zip(self.sides, self.blocks, self.step_rows, strict=True):
            run(job, block, side.pieces, 4, held)
        for side in self.sides:
            if side.atoms is not None:
                run(self.step_atoms, side.block, 1, 1, held)
            if side.bias is not None:
                run(self.step_biases, side.block, side.pieces, 16, held)
        return total

    def _ready(self, users: Integers, items: Integers, values: NDArray[np.float32]) -> None:
        """Let growing tables change, and lay out the batch."""
        changed = False
        for table in self.growing:
            if table.on_training is not None:
                table.on_training()
                changed = True
        if changed or not all(side.stands() for side in self.sides):
            self._bind()
        self.numbers[1] = 2 / len(values)
        for side, ids in zip(self.sides, (users, items), strict=True):
            side.block[self.loops.IDS] = ids.ctypes.data
        self.blocks[:, self.loops.COUNT], self.blocks[:, self.loops.VALUES] = (
            len(values),
            values.ctypes.data,
        )

    def _tell(self, users: Integers, items: Integers) -> None:
        """Tell growing tables the gradients of the rows in the batch."""
        for at, (table, others) in enumerate(
            zip((s.table for s in self.sides), (items, users), strict=True)
        ):
            if isinstance(table, GrowingAnchorTable) and table.on_gradient is not None:
                rows = self.sides[1 - at].composed[others]
                if self.column:
                    rows[:, 0] = 1.0
                rows *= self.errors[: len(others), None]
                table.on_gradient(torch.from_numpy(rows))


def epoch(
    model: MatrixFactorization,
    optimizer: torch.optim.Optimizer,
    triples: Triples,
    batch: int,
    generator: torch.Generator,
    schedulers: Sequence[Any] = (),
) -> float:
    """Pass over all triples once, as ``ratings.train_epoch`` does; return the mean squared error on the way."""
    assert isinstance(optimizer, RowOptimizer)
    model.train()
    optimizer.zero_grad()
    steps = Steps(model, optimizer, batch)
    order = torch.randperm(len(triples[2]), generator=generator).numpy()
    halves = (model.users, model.items)
    users, items = (
        _ordered(module, ids, order) for module, ids in zip(halves, triples, strict=False)
    )
    values = triples[2].numpy()[order]
    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers of learning rates ask for it
    total = 0.0
    for begin in range(0, len(values), batch):
        some = slice(begin, begin + batch)
        total += steps.step(users(some), items(some), values[some])
        for scheduler in schedulers:
            scheduler.step()
    return total / len(values)


def _ordered(
    module: nn.Module, ids: Tensor, order: NDArray[np.int64]
) -> Callable[[slice], Integers]:
    """Return a function that gives the ids of a batch as the table sees them."""
    rows, given = bare(module).num_embeddings, ids.numpy()
    if given.min() < 0 or given.max() >= rows:
        bad = int(given.min() if given.min() < 0 else given.max())
        raise IdError(f"id {bad} is not in this table: ids go from 0 to {rows - 1}")
    if isinstance(module, SSE):
        ordered = torch.from_numpy(given[order])
        return lambda some: module.share(ordered[some]).numpy().astype(np.int32)
    found: Integers = given.astype(np.int32)[order]
    return lambda some: found[some]
