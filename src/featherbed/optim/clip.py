"""clip_grad_norm_ for dense and row-sparse gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from featherbed.errors import ArgumentError
from featherbed.optim.processes import group_of, is_divided


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients in place to a total norm of at most ``max_norm``; return the norm.

    Like torch.nn.utils.clip_grad_norm_, but also for sparse gradients, whose repeated rows are
    summed first. Of a model whose tables ``fb.distributed.shard`` has divided, the norm is that of
    all processes.

    >>> import torch, featherbed as fb
    >>> table = fb.DenseTable(10, 4, sparse=True)
    >>> table(torch.tensor([3, 3])).sum().backward()
    >>> float(clip_grad_norm_(table.parameters(), 1.0))
    4.0
    >>> float(table.weight.grad.to_dense().norm().round(decimals=4))
    1.0
    """
    if not max_norm >= 0:
        raise ArgumentError(f"max_norm={max_norm!r}: give a number of at least 0")
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    held = [p for p in given if p.grad is not None]
    for parameter in held:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    grads = [p.grad.values() if p.grad.is_sparse else p.grad for p in held if p.grad is not None]
    divided = torch.distributed.is_available() and torch.distributed.is_initialized()
    group = group_of(given) if divided else None
    if not grads and group is None:
        return torch.tensor(0.0)
    home = given[0].device
    norms = [torch.linalg.vector_norm(g, norm_type).to(home) for g in grads]
    if group is not None:
        norms = _of_all(norms, held, norm_type, group)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise ArgumentError(
            f"the norm of the gradients is {float(total)}: nothing was changed; lower the learning "
            "rate"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.device))
    return total


def _of_all(
    norms: list[Tensor], parameters: list[Tensor], norm_type: float, group: Any
) -> list[Tensor]:
    """Return the norms of whole parameters, and one of the divided ones over all processes."""
    own = [norm for norm, p in zip(norms, parameters, strict=True) if is_divided(p)]
    joined = torch.linalg.vector_norm(torch.stack([torch.zeros(()), *own]), norm_type)
    parts = [joined.new_zeros(()) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, joined, group=group)
    whole = [norm for norm, p in zip(norms, parameters, strict=True) if not is_divided(p)]
    return [*whole, *parts]
