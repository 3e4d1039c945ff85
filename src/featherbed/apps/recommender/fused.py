"""Epochs of matrix factorization in compiled loops: the steps of ``model.plain_epoch``.

For two tables of dense rows or anchors, and Yogi or AdamW. A step composes the rows of the batch,
predicts, computes the gradients and updates every parameter with its penalty, in place: parameters,
optimizer state, penalties and schedules are those of the reference loop, which may continue after
any step. Results do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.apps.recommender.stream import MAX_DIM
from featherbed.errors import ArgumentError, IdError
from featherbed.optim import AdamW, RowOptimizer, Yogi
from featherbed.optim.lazy import KINDS, RULES, serves
from featherbed.sharing import SSE, bare

if TYPE_CHECKING:
    from featherbed.apps.recommender.model import MatrixFactorization

Triples = tuple[Tensor, Tensor, Tensor]
Integers = NDArray[np.int32]
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
)
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def supports(model: MatrixFactorization, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the compiled loops can train this model with this optimizer.

    >>> import featherbed as fb
    >>> from featherbed.apps.recommender.model import MatrixFactorization
    >>> model = MatrixFactorization(fb.AnchorTable(9, 4, anchors=2), fb.DenseTable(7, 4))
    >>> supports(model, fb.Yogi(model.parameters()))
    True
    >>> supports(model, torch.optim.SGD(model.parameters()))
    False
    """
    if not isinstance(optimizer, RowOptimizer) or type(optimizer) not in (Yogi, AdamW):
        return False
    tables = model.tables
    if any(
        table.factors is None
        or table.sparse
        or table.padding_idx is not None
        or table.embedding_dim > MAX_DIM
        for table in tables
    ):
        return False
    if model.biases == "apart" and (isinstance(model.users, SSE) or isinstance(model.items, SSE)):
        return False
    row_factors = {id(_row_factor(table)) for table in tables}
    optimized = [p for group in optimizer.param_groups for p in group["params"]]
    return (
        len(row_factors) == 2
        and {id(p) for p in model.parameters()} == {id(p) for p in optimized}
        and all(p.requires_grad for p in optimized)
        and all(
            id(p) in row_factors and penalty.kind in KINDS
            for p, penalty in optimizer.penalties.items()
        )
        and all(optimizer.coefficients(group, 1).decay > 0 for group in optimizer.param_groups)
        and not _has_hooks(model, optimizer)
        and serves(*(p.detach() for p in optimized))
    )


def _has_hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook observes the inside of a step."""
    observed = [*model.modules(), *model.parameters()]
    return any(getattr(one, name, None) for one in observed for name in HOOKS) or any(
        getattr(optimizer, name, None) for name in STEP_HOOKS
    )


def _row_factor(table: Any) -> nn.Parameter:
    """Return the parameter with one row per id: weights of anchors [V, K], or rows [V, d]."""
    factor: nn.Parameter = table.factors[0]
    return factor


class ParameterStep:
    """A parameter as the loops update it: its moments, and the nine coefficients of a step."""

    def __init__(self, parameter: nn.Parameter, optimizer: RowOptimizer) -> None:
        self.parameter, self.optimizer = parameter, optimizer
        self.group = next(
            g for g in optimizer.param_groups if any(p is parameter for p in g["params"])
        )
        self.state = optimizer._state_of(parameter, self.group)
        self.penalty = optimizer.penalties.get(parameter)
        self.mask: NDArray[np.uint8] | None = None
        self._mask_source: Tensor | None = None

    @property
    def kind(self) -> int:
        """The number of the penalty in the compiled loops."""
        return KINDS["none" if self.penalty is None else str(self.penalty.kind)]

    def moments(self) -> list[int]:
        """Return the addresses of m and v, each followed by the bytes from row to row."""
        moments = (self.state["m"], self.state["v"])
        return [word for m in moments for word in (m.data_ptr(), 4 * m.stride(0))]

    def next_coefficients(self) -> list[float]:
        """Count a step and return its coefficients (see ``kernels.arithmetic.step``)."""
        self.state["step"] += 1
        c = self.optimizer.coefficients(self.group, self.state["step"])
        threshold = 0.0 if self.penalty is None else self.penalty.lam * c.prox
        coupled = self.group["weight_decay"] if self.optimizer.coupled else 0.0
        return [c.decay, c.rate, c.keep, c.add, c.second, c.eps, c.correction, threshold, coupled]

    def mask_address(self) -> int:
        """Return the address of the flags of entries (see ``kernels.arithmetic.step``), or 0."""
        if self.penalty is None or (self.penalty.kept is None and self.penalty.exempt is None):
            return 0
        if self.mask is None or self.penalty.kept is not self._mask_source:
            self._mask_source = kept = self.penalty.kept
            flags = (
                torch.ones_like(self.parameter, dtype=torch.uint8)
                if kept is None
                else kept.to(torch.uint8)
            )
            if self.penalty.exempt is not None:
                places = self.penalty.exempt.places(None)
                flags[places] *= 2
            self.mask = flags.numpy()
        return self.mask.ctypes.data


class Side:
    """One of the two tables, its bias, and its buffers, as a block of words for the loops."""

    def __init__(
        self, table: Any, bias: nn.Parameter | None, optimizer: RowOptimizer, batch: int, loops: Any
    ) -> None:
        self.table, self.loops = table, loops
        atoms = table.factors[1]
        self.rows = ParameterStep(_row_factor(table), optimizer)
        self.atoms = None if atoms is None else ParameterStep(atoms, optimizer)
        self.bias = None if bias is None else ParameterStep(bias, optimizer)
        length, width = self.rows.parameter.shape
        dim, pieces = table.embedding_dim, -(-length // loops.ROWS)
        padded = 0 if self.atoms is None else -(-width // loops.LANES) * loops.LANES
        self.pieces, self.steps = pieces, np.zeros((3, 9), dtype=np.float32)
        self.composed = np.zeros((length, dim), dtype=np.float32)
        self.buffers: dict[str, NDArray[Any]] = {
            "STARTS": np.zeros(length + 2, dtype=np.int32),
            "ORDER": np.zeros(batch, dtype=np.int32),
            "COMPOSED": self.composed,
            "TRANSPOSED": np.zeros((dim, padded), dtype=np.float32),
            "PARTS": np.zeros(pieces * width * dim if padded else 0, dtype=np.float32),
            "ROOM": np.zeros(pieces * (dim + padded), dtype=np.float32),
            "BIAS_GRADIENT": np.zeros(0 if bias is None else length, dtype=np.float32),
            "STEPS": self.steps,
        }
        self.block = np.zeros(loops.WORDS, dtype=np.int64)
        for name, buffer in self.buffers.items():
            self.block[getattr(loops, name)] = buffer.ctypes.data
        self.block[[loops.LENGTH, loops.WIDTH, loops.PADDED]] = length, width, padded
        self._point("STORED", "FIRST", self.rows)
        if self.atoms is not None:
            self._point("ATOMS", "ATOM_FIRST", self.atoms)
            loops.transpose_anchors(self.block, dim)
        if self.bias is not None:
            m, _, v, _ = self.bias.moments()
            words = [loops.BIAS, loops.BIAS_FIRST, loops.BIAS_SECOND]
            self.block[words] = self.bias.parameter.data_ptr(), m, v

    def _point(self, values: str, moments: str, step: ParameterStep) -> None:
        at = getattr(self.loops, moments)
        self.block[getattr(self.loops, values)] = step.parameter.data_ptr()
        self.block[at : at + 4] = step.moments()

    def is_current(self) -> bool:
        """Whether the parameters are still at the addresses of the block."""
        steps = [(self.rows, "STORED"), (self.atoms, "ATOMS"), (self.bias, "BIAS")]
        return all(
            step is None or int(self.block[getattr(self.loops, name)]) == step.parameter.data_ptr()
            for step, name in steps
        )

    def begin_step(self) -> None:
        """Set the coefficients of the next step."""
        for at, step in enumerate((self.rows, self.atoms, self.bias)):
            if step is not None:
                self.steps[at] = step.next_coefficients()
        self.block[self.loops.KEPT] = self.rows.mask_address()


class FusedSteps:
    """The steps of one epoch; ``step`` returns the sum of squared errors before the step."""

    def __init__(self, model: MatrixFactorization, optimizer: RowOptimizer, batch: int) -> None:
        from featherbed.kernels import factors as loops
        from featherbed.kernels import run

        self.model, self.optimizer, self.batch = model, optimizer, batch
        self.loops, self.run = loops, run
        self.numbers = np.array([float(model.get_buffer("mean")), 0.0], dtype=np.float32)
        self.errors = np.zeros(batch, dtype=np.float32)
        self.sums = np.zeros(-(-batch // loops.PLACES), dtype=np.float64)
        self.column = int(model.biases == "column")
        self.growing = [table for table in model.tables if table.grows]
        self._bind()

    def _bind(self) -> None:
        model, loops = self.model, self.loops
        biases = (model.user_bias, model.item_bias)
        self.sides = [
            Side(table, bias, self.optimizer, self.batch, loops)
            for table, bias in zip(model.tables, biases, strict=True)
        ]
        # one block for a batch, one with its sides swapped
        self.blocks = np.zeros((2, loops.WORDS), dtype=np.int64)
        for block, pair in zip(self.blocks, (self.sides, self.sides[::-1]), strict=True):
            block[:2] = [side.block.ctypes.data for side in pair]
            buffers = (self.errors, self.sums, self.numbers)
            words = [loops.ERRORS, loops.SUMS, loops.NUMBERS]
            block[words] = [buffer.ctypes.data for buffer in buffers]
        dim, metric = model.users.embedding_dim, int(self.optimizer.metric)
        rule = RULES[self.optimizer.rule]
        self.compose, self.find = loops.compose_rows(dim), loops.find_errors(dim, self.column)
        self.step_atoms, self.step_biases = loops.step_atoms(dim, rule), loops.step_biases(rule)
        self.step_rows = [
            loops.step_side(dim, self.column, rule, side.rows.kind, metric) for side in self.sides
        ]

    def step(
        self, users: Integers, items: Integers, values: NDArray[np.float32]
    ) -> float:  # [n] each
        """Predict, compute gradients, and update every parameter."""
        self._prepare(users, items, values)
        loops, run, alive = self.loops, self.run, (users, items, values, self)
        run(loops.group_sides, self.blocks[0], 2, 1, alive)
        for side in self.sides:
            run(self.compose, side.block, side.pieces, 4, alive)
        pieces = -(-len(values) // loops.PLACES)
        run(self.find, self.blocks[0], pieces, 1, alive)
        total = float(self.sums[:pieces].sum())
        if not math.isfinite(total):
            raise ArgumentError(
                "the predictions of a batch hold NaN or infinity; nothing was changed: "
                "lower the learning rate"
            )
        if self.growing:
            self._report_gradients(users, items)
        for side in self.sides:
            side.begin_step()
        for side, block, job in zip(self.sides, self.blocks, self.step_rows, strict=True):
            run(job, block, side.pieces, 4, alive)
        for side in self.sides:
            if side.atoms is not None:
                run(self.step_atoms, side.block, 1, 1, alive)
            if side.bias is not None:
                run(self.step_biases, side.block, side.pieces, 16, alive)
        return total

    def _prepare(self, users: Integers, items: Integers, values: NDArray[np.float32]) -> None:
        """Let growing tables change, and point the blocks to the batch."""
        changed = False
        for table in self.growing:
            if table.on_training is not None:
                table.on_training()
                changed = True
        if changed or not all(side.is_current() for side in self.sides):
            self._bind()
        self.numbers[1] = 2 / len(values)
        for side, ids in zip(self.sides, (users, items), strict=True):
            side.block[self.loops.IDS] = ids.ctypes.data
        self.blocks[:, self.loops.COUNT] = len(values)
        self.blocks[:, self.loops.VALUES] = values.ctypes.data

    def _report_gradients(self, users: Integers, items: Integers) -> None:
        """Report the gradients of the rows in the batch to growing tables."""
        for at, (side, others) in enumerate(zip(self.sides, (items, users), strict=True)):
            if side.table.grows and side.table.on_gradient is not None:
                rows = self.sides[1 - at].composed[others]
                if self.column:
                    rows[:, 0] = 1.0
                rows *= self.errors[: len(others), None]
                side.table.on_gradient(torch.from_numpy(rows))


def epoch(
    model: MatrixFactorization,
    optimizer: torch.optim.Optimizer,
    triples: Triples,
    batch: int,
    generator: torch.Generator,
    schedulers: Sequence[Any] = (),
) -> float:
    """Train one epoch as ``model.plain_epoch`` does; return its mean squared error."""
    assert isinstance(optimizer, RowOptimizer)
    model.train()
    optimizer.zero_grad()
    steps = FusedSteps(model, optimizer, batch)
    order = torch.randperm(len(triples[2]), generator=generator).numpy()
    users = _shuffled_ids(model.users, triples[0], order)
    items = _shuffled_ids(model.items, triples[1], order)
    values = triples[2].numpy()[order]
    # learning rate schedulers expect it
    optimizer._opt_called = True  # type: ignore[attr-defined]
    total = 0.0
    for begin in range(0, len(values), batch):
        part = slice(begin, begin + batch)
        total += steps.step(users(part), items(part), values[part])
        for scheduler in schedulers:
            scheduler.step()
    return total / len(values)


def _shuffled_ids(
    module: nn.Module, ids: Tensor, order: NDArray[np.int64]
) -> Callable[[slice], Integers]:
    """Return a function from a batch to its ids, shared at random by SSE."""
    rows, given = bare(module).num_embeddings, ids.numpy()
    if given.min() < 0 or given.max() >= rows:
        bad = int(given.min() if given.min() < 0 else given.max())
        raise IdError(f"id {bad} is not in this table: ids go from 0 to {rows - 1}")
    if isinstance(module, SSE):
        ordered = torch.from_numpy(given[order])
        return lambda part: module.share(ordered[part]).numpy().astype(np.int32)
    found: Integers = given.astype(np.int32)[order]
    return lambda part: found[part]
