"""Custom operators for look-ups with row-sparse gradients; repeated ids are looked up once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import featherbed.optim.lazy.native as native
from featherbed.errors import ArgumentError
from featherbed.optim.lazy.rows import RECORDS, UNBOUND


def _settled(weight: Tensor, ids: Tensor, number: int) -> Tensor:
    """Return settled rows of ids."""
    lazy = RECORDS.get(number)
    if lazy is None or not lazy.lags(weight):
        return weight.detach()[ids]
    return lazy.read(ids)


def _refuse_second_derivative(*_: object) -> None:
    raise ArgumentError(
        "row-sparse gradients have no second derivative (nor have those of "
        "nn.Embedding(sparse=True)): "
        "make the table with sparse=False and without slots"
    )


def _row_sparse(ids: Tensor, rows: Tensor, count: int) -> Tensor:
    return torch.sparse_coo_tensor(ids[None], rows, (count, rows.shape[1]), check_invariants=False)


@torch.library.custom_op("featherbed::gather_rows", mutates_args=())
def gather_rows(
    weight: Tensor, ids: Tensor, number: int
) -> Tensor:  # [V, s], int64 [...] -> [..., s]
    """Return settled rows of row parameter ``number``; the gradient of ``weight`` is row-sparse.

    >>> gather_rows(torch.eye(3), torch.tensor([2, 0]), 0)
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    """
    return _settled(weight, ids.reshape(-1), number).reshape(*ids.shape, weight.shape[1])


@gather_rows.register_fake
def _(weight: Tensor, ids: Tensor, number: int) -> Tensor:  # noqa: ARG001
    return weight.new_empty(*ids.shape, weight.shape[1])


@torch.library.custom_op("featherbed::row_gradient", mutates_args=())
def row_gradient(
    gradient: Tensor, ids: Tensor, count: int
) -> Tensor:  # [..., s], int64 [...] -> sparse [V, s]
    """Return the row-sparse gradient of a look-up."""
    rows = gradient.reshape(ids.numel(), gradient.shape[-1])
    return _row_sparse(ids.reshape(-1).clone(), rows.clone(), count)


@row_gradient.register_fake
def _(gradient: Tensor, ids: Tensor, count: int) -> Tensor:
    return _row_sparse(ids.reshape(-1), gradient.reshape(ids.numel(), gradient.shape[-1]), count)


def _keep_ids(ctx: object, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[1])  # type: ignore[attr-defined]
    ctx.count = len(inputs[0])  # type: ignore[attr-defined]


def _gather_backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None, None]:
    return row_gradient(gradient, ctx.saved_tensors[0], ctx.count), None, None  # type: ignore[attr-defined]


gather_rows.register_autograd(_gather_backward, setup_context=_keep_ids)
row_gradient.register_autograd(_refuse_second_derivative)


def _padded(rows: Tensor, length: int) -> Tensor:
    """Return rows padded to ``length``: the number of distinct ids must not determine a shape."""
    out = rows.new_empty(length, *rows.shape[1:])
    out[: len(rows)] = rows
    return out


@torch.library.custom_op("featherbed::slot_rows", mutates_args=())
def slot_rows(
    weight: Tensor,  # [V, s]
    support: Tensor,  # int [V, s]
    atoms: Tensor,  # [K, d]
    ids: Tensor,  # int64 [n]
    owner: Tensor | None,  # int64 [n], ascending: the bag of each id
    weights: Tensor | None,  # [n], with owner
    bags: int,
    padding: int,  # id of the row that is zero, or -1
    number: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return Σ_j weight[i, j] atoms[support[i, j]] for ids i, or sums in bags, and tensors for
    backward.

    Every distinct id is settled and composed once: ``found`` [n] (``count`` [1] of them), their
    values and support [n, s], and ``index`` [n] of each id among them.
    """
    n, slots = len(ids), weight.shape[1]
    if native.serves(weight, atoms, weights):
        found, index, some = native.distinct(ids.contiguous())
        values, parts = weight.new_empty(n, slots), ids.new_empty(n, slots, dtype=torch.int32)
        lazy, own, settled = RECORDS.get(number), found[:some], values[:some]
        if lazy is not None and lazy.lags(weight) and lazy.compiled():
            native.settle_rows(lazy, own, into=settled)
        else:
            settled.copy_(_settled(weight, own, number))
        if padding >= 0:
            settled[own == padding] = 0.0
        bounds = None if owner is None else torch.searchsorted(owner, torch.arange(bags + 1))
        out = native.slot_rows(support, own, settled, atoms, parts[:some], index, bounds, weights)
        return out, found, torch.tensor([some]), index, values, parts
    own, index = torch.unique(ids, return_inverse=True)
    settled = _settled(weight, own, number).masked_fill((own == padding)[:, None], 0.0)
    named = support[own].int()
    out = _pooled(_composed(named, settled, atoms), index, owner, weights, bags)
    found, values, parts = (_padded(rows, n) for rows in (own, settled, named))
    return out, found, torch.tensor([len(own)]), index.int(), values, parts


@slot_rows.register_fake
def _(
    weight: Tensor, support: Tensor, atoms: Tensor, ids: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    owner, _, bags, *_ = rest
    n, slots = len(ids), support.shape[1]
    out = atoms.new_empty(n if owner is None else bags, atoms.shape[1])
    index, parts = (ids.new_empty(shape, dtype=torch.int32) for shape in ((n,), (n, slots)))
    return out, ids.new_empty(n), ids.new_empty(1), index, weight.new_empty(n, slots), parts


def _composed(parts: Tensor, values: Tensor, atoms: Tensor) -> Tensor:
    return (values[:, None, :] @ atoms.detach()[parts.long()])[:, 0]


def _pooled(
    rows: Tensor, index: Tensor, owner: Tensor | None, weights: Tensor | None, bags: int
) -> Tensor:
    each = rows[index]
    if owner is None:
        return each
    if weights is not None:
        each = each * weights.detach()[:, None].to(each.dtype)
    return rows.new_zeros(bags, rows.shape[1]).index_add_(0, owner, each)


@torch.library.custom_op("featherbed::slot_gradients", mutates_args=())
def slot_gradients(
    gradient: Tensor,  # [n or bags, d]
    atoms: Tensor,
    found: Tensor,
    count: Tensor,
    index: Tensor,
    values: Tensor,
    parts: Tensor,
    owner: Tensor | None,
    weights: Tensor | None,
    of_weights: bool,
    padding: int,
    total_rows: int,
    number: int,
) -> tuple[Tensor, Tensor, Tensor]:  # sparse [V, s], [K, d], [n] or empty
    """Return the gradients of weight, atoms and the weights of a bag."""
    some, lazy = int(count), RECORDS.get(number)
    found, values, parts = found[:some], values[:some], parts[:some]
    gradient, slots = gradient.contiguous(), None if lazy is None else lazy.slots
    keep = lazy is not None and slots is not None and lazy.state is not UNBOUND
    keep = keep and slots.collects(lazy.weight, lazy.steps)  # type: ignore[union-attr]
    inputs = (parts, values, atoms, gradient, index, owner, weights)
    quick = native.serves(gradient, atoms, values, weights)
    to_values, to_atoms, total = (
        native.slot_gradients(*inputs, keep) if quick else _gradients(*inputs)
    )
    if padding >= 0:
        there = (found == padding).nonzero()[:, 0]
        to_values[there] = 0.0
        if keep:
            total[there] = 0.0
    if keep and slots is not None:
        slots.collected.append((found, total, to_values.clone()))
    to_weights = gradient.new_empty(0)
    if of_weights and owner is not None:
        rows = _composed(parts, values, atoms)
        if quick:
            to_weights = native.weight_gradients(rows, index, gradient, owner)
        else:
            to_weights = (rows[index.long()] * gradient[owner]).sum(-1)
    ids = found.clone()
    if lazy is not None:
        lazy.distinct = ids
    return _row_sparse(ids, to_values, total_rows), to_atoms, to_weights


@slot_gradients.register_fake
def _(gradient: Tensor, atoms: Tensor, found: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, index, values, *_, of_weights, _, total_rows, _ = rest
    to_weights = gradient.new_empty(len(index) if of_weights else 0)
    return _row_sparse(found, values, total_rows), torch.empty_like(atoms), to_weights


def _gradients(
    parts: Tensor,
    values: Tensor,
    atoms: Tensor,
    gradient: Tensor,
    index: Tensor,
    owner: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    spread = gradient if owner is None else gradient[owner]
    if weights is not None:
        spread = spread * weights.detach()[:, None].to(spread.dtype)
    wide = parts.long()
    total = gradient.new_zeros(len(values), gradient.shape[1]).index_add_(0, index.long(), spread)
    to_values = (atoms.detach()[wide] @ total[:, :, None])[:, :, 0]
    each = (values[:, :, None] * total[:, None, :]).reshape(-1, total.shape[1])
    return to_values, torch.zeros_like(atoms).index_add_(0, wide.reshape(-1), each), total


def _keep_slots(ctx: object, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
    weight, _, atoms, _, owner, weights, _, padding, number = inputs
    ctx.save_for_backward(atoms, *output[1:], owner, weights)  # type: ignore[attr-defined]
    ctx.mark_non_differentiable(*output[1:])  # type: ignore[attr-defined]
    ctx.set_materialize_grads(False)  # type: ignore[attr-defined]  # or it fills zeros for these
    ctx.rest = (padding, len(weight), number)  # type: ignore[attr-defined,arg-type]


def _slot_backward(ctx: object, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *saved, owner, weights = ctx.saved_tensors  # type: ignore[attr-defined]
    of_weights = weights is not None and weights.requires_grad
    padding, rows, number = ctx.rest  # type: ignore[attr-defined]
    found = slot_gradients(gradient, *saved, owner, weights, of_weights, padding, rows, number)
    to_weights = found[2] if of_weights else None
    return found[0], None, found[1], None, None, to_weights, None, None, None


slot_rows.register_autograd(_slot_backward, setup_context=_keep_slots)
slot_gradients.register_autograd(_refuse_second_derivative)
