"""Calls of the compiled training loops (numba): float32, partly float64, on the CPU."""

from __future__ import annotations

import importlib
import os
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featherbed.errors import ArgumentError, IdError
from featherbed.packed.engine import VARIABLE

if TYPE_CHECKING:
    from featherbed.optim.lazy.rows import LazyRows
    from featherbed.optim.row_optimizer import Coefficients

VECTORS = (4, 8, 16, 32)  # widths that have loops of their own
SCORES = 1 << 19  # scores held at once
# sums of the atoms' gradient: taken apart, so that threads add nothing to the same, then together
PIECES = 12
GRAIN = 512  # rows a thread takes at a time
KINDS = {"none": 0, "nonnegative": 1, "l1": 2}
RULES = {"yogi": 0, "sgd": 1, "adam": 2, "adagrad": 3}
_NOTHING: dict[int, NDArray[np.float32]] = {n: np.empty((0,) * n, dtype=np.float32) for n in (1, 2)}
_own = threading.local()
_REALS = {torch.float32: np.float32, torch.float64: np.float64}


train: Any = None  # the compiled loops, imported when they are first asked for
slots: Any = None
pool: Any = None


@cache
def _load() -> bool:
    """Import the compiled loops; return whether numba is installed."""
    global train, slots, pool
    try:
        slots = importlib.import_module("featherbed.kernels.slots")
        train = importlib.import_module("featherbed.kernels.train")
        pool = importlib.import_module("featherbed.kernels.threads")
    except ImportError:
        return False
    return True


def serves(*tensors: Tensor, wide: bool = False) -> bool:
    """Return whether the compiled loops accept these tensors: one dtype, contiguous, on the CPU.

    The dtype is float32, or float64 if the loop is ``wide``. ``FEATHERBED_KERNELS=numpy`` disables
    the loops.

    ``FEATHERBED_KERNELS=numpy`` says they never do.
    """
    kind = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype != kind or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return False
    known = kind in (_REALS if wide else (torch.float32,))
    return known and os.environ.get(VARIABLE) != "numpy" and _load()


def _run(job: int, count: int, *arguments: NDArray[Any] | int, grain: int = GRAIN) -> bool:
    """Run a job; arrays are passed by address and shape, strided rows by their distance."""
    words, at = np.zeros(64, dtype=np.int64), 0
    for argument in arguments:
        entry: tuple[int, ...]
        if isinstance(argument, int):
            entry = (argument,)
        elif argument.ndim == 2 and len(argument) and not argument.flags.c_contiguous:
            apart = argument.strides[0] // argument.itemsize
            entry = (argument.ctypes.data, len(argument), apart)
        else:
            entry = (argument.ctypes.data, *argument.shape)
        words[at : at + len(entry)] = entry
        at += len(entry)
    return bool(pool.run(job, words, count, grain, arguments))


def distinct(ids: Tensor) -> tuple[Tensor, Tensor, int]:  # int64 [n] -> int64 [n], int32 [n]
    """Return the distinct ids in order of appearance, the index of each id, and their number."""
    given = ids.numpy()
    room = np.full(1 << max(4, (2 * len(given) - 1).bit_length()), -1, dtype=np.int32)
    found, index = np.empty(len(given), dtype=np.int64), np.empty(len(given), dtype=np.int32)
    count = train.find_distinct(given, room, found, index)
    return torch.from_numpy(found), torch.from_numpy(index), count


def summed(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:  # [n], [n, s] -> [U], [U, s]
    """Return distinct ids and the sums of their rows, in order of appearance."""
    if rows.dim() != 2 or not serves(rows):
        found, index = torch.unique(ids, return_inverse=True)
        return found, rows.new_zeros(len(found), *rows.shape[1:]).index_add_(0, index, rows)
    found, index, count = distinct(ids.contiguous())
    if count == len(ids):
        return found, rows
    order, starts = np.empty(len(index), dtype=np.int32), np.empty(count + 1, dtype=np.int32)
    train.group(index.numpy(), starts, order)
    out = np.empty((count, rows.shape[1]), dtype=np.float32)
    _run(train.sum_groups, count, rows.numpy(), order, starts, out)
    return found[:count], torch.from_numpy(out)


def settle_rows(
    lazy: LazyRows, ids: Tensor, *, write: bool, into: Tensor | None = None
) -> Tensor:  # [n] -> [n, s]
    """Apply missed updates in place (``write``) or return settled rows; see ``LazyRows.replay``."""
    state, history, parameter = lazy.state, lazy.history, lazy.weight
    assert state is not None
    assert state.kind is not None
    ids = ids.to(torch.int64).contiguous()
    if len(ids) and not 0 <= ids.numpy().min() <= ids.numpy().max() < len(parameter):
        raise IdError(f"ids go from 0 to {len(parameter) - 1}: got {ids.min()} to {ids.max()}")
    job = train.settle(
        _REALS[parameter.dtype],
        parameter.shape[1] if parameter.shape[1] in VECTORS else 0,
        KINDS[state.kind],
        state.momentum is not None,
        state.second is not None,
        state.metric,
    )
    weight = parameter.detach().numpy()
    shape = (0 if write else len(ids), weight.shape[1])
    out: NDArray[Any] = np.empty(shape, dtype=weight.dtype) if into is None else into.numpy()
    numbers = np.array([state.eps], dtype=np.float64)
    nothing = _NOTHING[2]
    momentum = nothing if state.momentum is None else state.momentum.detach().numpy()
    second = nothing if state.second is None else state.second.detach().numpy()
    arrays = (weight, ids.numpy(), lazy.stamps.numpy(), momentum, second)
    places = (int(write), history.begin, history.now)
    _run(job, len(ids), *arrays, out, history.table, history.powers, numbers, *places)
    if state.penalty is not None and state.penalty.kept is not None:
        kept = state.penalty.kept[ids]  # entries that the penalty holds at zero
        if write:
            parameter.data[ids] *= kept
        else:
            out *= kept.numpy()
    return torch.from_numpy(out)


def _check_support(support: NDArray[np.integer], atoms: int) -> None:
    """Raise an error if slots contain invalid anchors, as after loading a damaged state dict."""
    if support.size and (support.min() < 0 or support.max() >= atoms):
        wrong = int(support.min() if support.min() < 0 else support.max())
        raise ArgumentError(
            f"support names anchor {wrong}, anchors go from 0 to {atoms - 1}: load another state "
            "dict"
        )


def update_rows(
    lazy: LazyRows,
    rule: str,
    ids: Tensor,  # [n], distinct
    gradient: Tensor,  # [n, s]
    c: Coefficients,
    threshold: float,
    tensors: dict[str, Tensor],  # "m", "v": [V, s] each
    stamp: int,
) -> None:
    """Settle rows, step them, apply the prox and stamp them; see ``RowOptimizer._update_rows``."""
    state, history, parameter = lazy.state, lazy.history, lazy.weight
    assert state is not None
    assert state.kind is not None
    job = train.update(
        _REALS[parameter.dtype],
        parameter.shape[1] if parameter.shape[1] in VECTORS else 0,
        RULES[rule],
        KINDS[state.kind],
        state.momentum is not None,
        state.metric,
    )
    nothing = _NOTHING[2]
    first = tensors["m"].detach().numpy() if "m" in tensors else nothing
    second = tensors["v"].detach().numpy() if "v" in tensors else nothing
    arrays = (parameter.detach().numpy(), ids.numpy(), lazy.stamps.numpy(), first, second)
    numbers = [c.decay, c.rate, c.keep, c.add, c.second, c.eps, c.correction, threshold]
    values = np.array(numbers, dtype=np.float64)
    past = (history.table, history.powers, values, history.begin, history.now, stamp)
    _run(job, len(ids), *arrays, gradient.numpy(), *past)
    if state.penalty is not None and state.penalty.kept is not None:
        parameter.data[ids] *= state.penalty.kept[ids]


def slot_rows(
    support: Tensor,  # int [V, s]
    ids: Tensor,  # int64 [U]
    values: Tensor,  # [U, s]
    atoms: Tensor,  # [K, d]
    parts: Tensor,  # int32 [U, s], filled
    index: Tensor,  # int32 [n]
    bounds: Tensor | None,  # int64 [bags + 1]
    weights: Tensor | None,  # [n]
) -> Tensor:  # [n or bags, d]
    """Compose the rows of distinct ids; return rows[index], or their weighted sums between bounds.

    The composed rows are in a buffer of this thread, since fresh memory costs as much as the rows.
    """
    held, size = support.numpy(), len(ids) * atoms.shape[1]
    room: NDArray[np.float32] | None = getattr(_own, "room", None)
    if room is None or room.size < size:
        _own.room = room = np.empty(size + size // 4, dtype=np.float32)
    rows = room[:size].reshape(len(ids), atoms.shape[1])
    arrays = (ids.numpy(), parts.numpy(), values.detach().numpy(), atoms.detach().numpy(), rows)
    if not _run(slots.compose(held.dtype.type), len(ids), held, *arrays):
        _check_support(held, len(atoms))
    if bounds is None:
        out = torch.empty(len(index), rows.shape[1])
        _run(slots.spread, len(index), rows, index.numpy(), out.numpy())
        return out
    out = torch.empty(len(bounds) - 1, rows.shape[1])
    shares = _NOTHING[1] if weights is None else weights.detach().numpy()
    _run(slots.pool, len(out), rows, index.numpy(), out.numpy(), bounds.numpy(), shares)
    return out


def usable(gradient: Tensor) -> bool:
    """Check the row ids of a gradient; return whether all its values are finite."""
    values = gradient
    if gradient.is_sparse:
        ids, rows, values = gradient._indices()[0], len(gradient), gradient._values()
        low, high = map(int, torch.aminmax(ids)) if len(ids) else (0, 0)
        if low < 0 or high >= rows:
            raise IdError(f"ids go from 0 to {rows - 1}: got {low} to {high}")
    if values.device.type == "cpu" and values.dtype in _REALS:
        held = values.detach().numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            return bool(np.isfinite(held.sum())) or bool(np.isfinite(held).all())
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def slot_gradients(
    support: Tensor,  # int32 [U, s]
    values: Tensor,  # [U, s]
    atoms: Tensor,  # [K, d]
    gradient: Tensor,  # [n or bags, d]
    index: Tensor,  # int32 [n]
    owner: Tensor | None,  # int64 [n]
    weights: Tensor | None,  # [n]
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # [U, s], [K, d], [U, d]
    """Return the gradients of values and atoms and, if ``keep``, those of the distinct rows."""
    count, width = len(values), atoms.shape[1]
    order, starts = np.empty(len(index), dtype=np.int32), np.empty(count + 1, dtype=np.int32)
    train.group(index.numpy(), starts, order)
    borders = np.searchsorted(starts, np.linspace(0, len(order), PIECES + 1)).astype(np.int64)
    borders[0], borders[-1] = 0, count
    to_values = torch.empty(values.shape)  # of torch's own, which it may resize
    to_atoms = np.zeros((PIECES * len(atoms), width), dtype=np.float32)
    total = np.empty((count if keep else 0, width), dtype=np.float32)
    owners = np.empty(0, dtype=np.int64) if owner is None else owner.numpy()
    held = _NOTHING[1] if weights is None else weights.detach().numpy()
    inputs = (
        support.numpy(),
        values.detach().numpy(),
        atoms.detach().numpy(),
        gradient.numpy(),
        order,
        starts,
        owners,
        held,
    )
    _run(slots.gradients, PIECES, *inputs, to_values.numpy(), to_atoms, total, borders, grain=1)
    summed_atoms = to_atoms.reshape(PIECES, len(atoms), width).sum(0)
    return to_values, torch.from_numpy(summed_atoms), torch.from_numpy(total) if keep else None


def best_atoms(
    total: Tensor,  # [n, d]
    support: Tensor,  # int [n, s]
    atoms: Tensor,  # [K, d]
    factor: float,
    signed: bool,
) -> tuple[Tensor, Tensor]:  # int64 [n], [n]
    """Return the missing atom of largest gradient factor * total . atom for each row, and the
    gradient.
    """
    count, parts = len(total), support.to(torch.int32).numpy()
    if parts.size and not 0 <= parts.min() <= parts.max() < len(atoms):
        _check_support(parts, len(atoms))
    found, gradients = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.float32)
    step = max(1, SCORES // len(atoms))
    scores, flipped = torch.empty(min(step, count), len(atoms)), atoms.T.contiguous()
    for start in range(0, count, step):
        some = slice(start, min(start + step, count))
        held = scores[: some.stop - some.start]
        torch.mm(total[some], flipped, out=held)
        arrays = (
            held.numpy(),
            parts[some],
            found[some],
            gradients[some],
            np.array([factor], dtype=np.float64),
        )
        _run(slots.best_atoms, len(held), *arrays, int(signed))
    return torch.from_numpy(found), torch.from_numpy(gradients)


def weight_gradients(
    rows: Tensor, index: Tensor, gradient: Tensor, owner: Tensor
) -> Tensor:  # -> [n]
    """Return the gradients of the weights in bags: row . gradient of the bag."""
    out = torch.empty(len(index))
    _run(
        slots.weight_gradients,
        len(index),
        rows.numpy(),
        index.numpy(),
        gradient.numpy(),
        owner.numpy(),
        out.numpy(),
    )
    return out
