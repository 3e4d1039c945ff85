"""Calls of the compiled training loops (numba): float32, partly float64, on the CPU."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
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

VECTORS, WIDTHS = (4, 8, 16, 32), (16, 32, 64, 128)  # slots and widths with loops of their own
SCORES = 1 << 19  # scores held at once
PIECES = 4  # of a thread: sums of the atoms' gradient, so that no two threads add to the same
GRAIN = 512  # rows a thread takes at a time
PAGE, LARGE = 1 << 12, 1 << 22  # bytes of a page, and of a tensor that huge pages pay for
KINDS = {"none": 0, "nonnegative": 1, "l1": 2}
RULES = {"yogi": 0, "sgd": 1, "adam": 2, "adagrad": 3, "plain": 4}
NO_VECTOR, NO_MATRIX = torch.empty(0), torch.empty(0, 0)
_own = threading.local()
_REALS = {torch.float32: np.float32, torch.float64: np.float64}

train: Any = None  # the compiled loops, imported on first use
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


def serves(*tensors: Tensor | None, wide: bool = False) -> bool:
    """Return whether the compiled loops accept these tensors: one dtype, contiguous, on the CPU.

    The dtype is float32, or float64 if the loop is ``wide``. ``FEATHERBED_KERNELS=numpy`` disables
    the loops.
    """
    kind = None
    for tensor in tensors:
        if tensor is not None:
            kind = kind or tensor.dtype
            if tensor.dtype != kind or tensor.device.type != "cpu" or not tensor.is_contiguous():
                return False
    return (
        kind in (_REALS if wide else (torch.float32,))
        and os.environ.get(VARIABLE) != "numpy"
        and _load()
    )


def _run(job: Any, count: int, *arguments: Tensor | NDArray[Any] | int, grain: int = GRAIN) -> bool:
    """Run a job; arrays are passed by address and shape, strided rows by their distance."""
    words: list[int] = []
    for argument in arguments:
        if isinstance(argument, int):
            words.append(argument)
        elif isinstance(argument, Tensor):
            words += (argument.data_ptr(), *argument.shape)
            if not argument.is_contiguous():
                words[-1] = argument.stride(0)
        else:
            words += (argument.ctypes.data, *argument.shape)
    block = np.array(words, dtype=np.int64)
    return bool(pool.run(job, block, count, grain, arguments))


def use_huge_pages(tensor: Tensor) -> None:
    """Ask Linux to back a large tensor by pages of 2 MB: random rows then miss the TLB less
    often."""
    held = tensor.untyped_storage()
    if sys.platform != "linux" or tensor.device.type != "cpu" or held.nbytes() < LARGE:
        return
    first, last = -(-held.data_ptr() // PAGE), (held.data_ptr() + held.nbytes()) // PAGE
    address, size = ctypes.c_void_p(first * PAGE), ctypes.c_size_t((last - first) * PAGE)
    for advice in (14, 25):  # MADV_HUGEPAGE and, now, MADV_COLLAPSE; kernels without it refuse
        ctypes.CDLL(None).madvise(address, size, advice)


def _buffer(name: str, size: int, dtype: torch.dtype) -> Tensor:
    """Return memory of this thread, kept for the next step: fresh memory costs as much as its
    use."""
    room: Tensor | None = getattr(_own, name, None)
    if room is None or len(room) < size:
        room = torch.empty(size + size // 4, dtype=dtype)
        use_huge_pages(room)
        setattr(_own, name, room)
    return room[:size]


def distinct(ids: Tensor) -> tuple[Tensor, Tensor, int]:  # int64 [n] -> int64 [n], int32 [n]
    """Return the distinct ids in order of appearance, the index of each id, and their number."""
    room = _buffer("hashes", 1 << max(4, (2 * len(ids) - 1).bit_length()), torch.int32)
    found, index = torch.empty_like(ids), torch.empty_like(ids, dtype=torch.int32)
    arrays = (ids.numpy(), room.numpy(), found.numpy(), index.numpy())
    return found, index, train.find_distinct(*arrays)


def _sum_rows(
    index: Tensor,  # int32 [n]
    rows: Tensor,  # [n or bags, s]
    out: Tensor,  # [U, s]
    owner: Tensor | None = None,  # int64 [n]
    weights: Tensor | None = None,  # [n]
) -> None:
    """Fill ``out`` by the sums of the rows of each number; see ``kernels.train.sum_rows``."""
    places = (NO_VECTOR if owner is None else owner, NO_VECTOR if weights is None else weights)
    strips = -(-rows.shape[1] // train.STRIP)
    grain = -(-strips // pool.thread_count())
    _run(train.sum_rows, strips, rows, index, *places, out, grain=grain)


def summed(
    ids: Tensor, rows: Tensor, known: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # [n], [n, s] -> [U], [U, s]
    """Return distinct ids and the sums of their rows, in order of appearance.

    ``known``: a tensor of distinct ids; if ``ids`` are this memory nothing is to be summed.
    """
    if known is not None and (known.data_ptr(), len(known)) == (ids.data_ptr(), len(ids)):
        return ids, rows
    if rows.dim() != 2 or not serves(rows):
        found, index = torch.unique(ids, return_inverse=True)
        return found, rows.new_zeros(len(found), *rows.shape[1:]).index_add_(0, index, rows)
    found, index, count = distinct(ids.contiguous())
    if count == len(ids):
        return found, rows
    out = rows.new_empty(count, rows.shape[1])
    _sum_rows(index, rows, out)
    return found[:count], out


def settle_rows(
    lazy: LazyRows, ids: Tensor, *, write: bool = False, into: Tensor | None = None
) -> Tensor:  # [n] -> [n, s]
    """Apply missed updates in place (``write``) or return settled rows; see ``LazyRows.replay``."""
    ids, rows = ids.to(torch.int64).contiguous(), len(lazy.weight)
    known = ids.numpy()
    if len(known) and not 0 <= known.min() <= known.max() < rows:
        raise IdError(f"ids go from 0 to {rows - 1}: got {known.min()} to {known.max()}")
    if into is None:
        into = lazy.weight.new_empty(0 if write else len(ids), lazy.weight.shape[1])
    numbers = np.zeros(9)
    numbers[5] = lazy.state.eps
    _update(lazy, None, ids, into, numbers, lazy.history.now)
    return into


def update_rows(
    lazy: LazyRows,
    ids: Tensor,  # [n], distinct
    gradient: Tensor,  # [n, s]
    c: Coefficients,
    threshold: float,
    stamp: int,
) -> None:
    """Settle rows, step them, apply the prox and stamp them; see ``RowOptimizer._update_rows``."""
    moments = (c.keep, c.add, c.second, c.eps, c.correction)
    numbers = np.array([c.decay, c.rate, *moments, threshold, c.coupled])
    rule = "plain" if lazy.state.rule == "sgd" and not lazy.state.beta else lazy.state.rule
    _update(lazy, RULES[rule], ids, gradient, numbers, stamp)


def _update(
    lazy: LazyRows, rule: int | None, ids: Tensor, given: Tensor, numbers: NDArray[Any], stamp: int
) -> None:
    """Run ``kernels.train.update``; ``given`` are gradients or, without a rule, rows to fill."""
    state, history, weight, penalty = lazy.state, lazy.history, lazy.weight, lazy.state.penalty
    kept, exempt = (None, None) if penalty is None else (penalty.kept, penalty.exempt)
    support = None if exempt is None else exempt.table.support
    marks: Any = None
    if kept is not None or exempt is not None:
        marks = np.int32 if support is None else support.numpy().dtype.type
    width = weight.shape[1]
    variant = train.Variant(
        _REALS[weight.dtype],
        width if width in VECTORS else 0,
        rule,
        KINDS[str(state.kind)],
        state.beta > 0,
        state.preconditioned,
        state.metric,
        marks,
    )
    moments = state.tensors.get("m", NO_MATRIX), state.tensors.get("v", NO_MATRIX)
    past = (history.table, history.powers, numbers, history.begin, history.now, stamp)
    spared = (NO_VECTOR, NO_VECTOR) if exempt is None else (exempt.starts, exempt.columns)
    flags = (
        NO_MATRIX if kept is None else kept,
        *spared,
        NO_MATRIX if support is None else support,
    )
    _run(train.update(variant), len(ids), weight, ids, lazy.stamps, *moments, given, *past, *flags)


def _check_support(support: Tensor, atoms: int) -> None:
    """Raise an error if slots contain invalid anchors, as after loading a damaged state dict."""
    low, high = map(int, torch.aminmax(support)) if support.numel() else (0, 0)
    if low < 0 or high >= atoms:
        raise ArgumentError(
            f"support names anchor {low if low < 0 else high}, anchors go from 0 to {atoms - 1}: "
            "load another state dict"
        )


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
    """Compose the rows of distinct ids; return rows[index], or their weighted sums between
    bounds."""
    width, compose = (
        atoms.shape[1],
        slots.compose(
            support.numpy().dtype.type, atoms.shape[1] if atoms.shape[1] in WIDTHS else 0
        ),
    )
    out = torch.empty(len(index) if bounds is None else len(bounds) - 1, width)
    rows = _buffer("rows", len(ids) * width, out.dtype).view(-1, width)
    if not _run(compose, len(ids), support, ids, parts, values, atoms, rows):
        _check_support(support, len(atoms))
    if bounds is None:
        _run(slots.copy_rows, len(index), rows, index, out)
    else:
        shares = NO_VECTOR if weights is None else weights
        _run(slots.pool, len(out), rows, index, out, bounds, shares)
    return out


def slot_gradients(
    support: Tensor,  # int32 [U, s]
    values: Tensor,  # [U, s]
    atoms: Tensor,  # [K, d]
    gradient: Tensor,  # [n or bags, d]
    index: Tensor,  # int32 [n]
    owner: Tensor | None,  # int64 [n]
    weights: Tensor | None,  # [n]
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # [U, s], [K, d], [U, d]
    """Return the gradients of values and atoms and, if ``keep``, those of the distinct rows."""
    count, threads = len(values), pool.thread_count()
    pieces, width = PIECES * threads if threads > 1 else 1, atoms.shape[1]
    size = count * width
    total = (torch.empty(size) if keep else _buffer("rows", size, values.dtype)).view(-1, width)
    _sum_rows(index, gradient, total, owner, weights)
    to_values = torch.empty(values.shape)
    to_atoms = _buffer("atoms", pieces * len(atoms) * width, values.dtype).view(-1, width)
    to_atoms.numpy().fill(0)  # torch's threads would wait where ours work
    _run(slots.gradients, pieces, support, values, atoms, total, to_values, to_atoms, grain=1)
    sums = to_atoms.numpy().reshape(pieces, *atoms.shape).sum(0)
    return to_values, torch.from_numpy(sums), total


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
    _check_support(support, len(atoms))
    count, parts, step = len(total), support.to(torch.int32), max(1, SCORES // len(atoms))
    found, gradients = torch.empty(count, dtype=torch.int64), torch.empty(count)
    room, flipped = torch.empty(min(step, count), len(atoms)), atoms.T.contiguous()
    for start in range(0, count, step):
        some = slice(start, min(start + step, count))
        scores = torch.mm(total[some], flipped, out=room[: some.stop - some.start])
        arrays = (scores, parts[some], found[some], gradients[some], np.array([factor]))
        _run(slots.best_atoms, len(scores), *arrays, int(signed))
    return found, gradients


def weight_gradients(
    rows: Tensor, index: Tensor, gradient: Tensor, owner: Tensor
) -> Tensor:  # -> [n]
    """Return the gradients of the weights in bags: row . gradient of the bag."""
    out = torch.empty(len(index))
    _run(slots.weight_gradients, len(index), rows, index, gradient, owner, out)
    return out
