"""Custom torch operators: id checks that also hold in ``torch.compile(fullgraph=True)``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from featherbed.errors import ArgumentError, IdError

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@torch.library.custom_op("featherbed::check_ids", mutates_args=())
def check_ids(ids: Tensor, rows: int) -> Tensor:  # integer [...] -> int64 [...]
    """Return ids as int64, or raise an error that names the bad id and the accepted range.

    >>> check_ids(torch.tensor([0, 9]), 10)
    tensor([0, 9])
    """
    if ids.dtype not in _INTEGERS:
        raise IdError(
            f"ids have dtype {ids.dtype}; a table takes integer ids from 0 to {rows - 1}: convert "
            "with ids.long()"
        )
    on_cpu = ids.device.type == "cpu"  # by numpy: woken threads of torch spin where ours work
    found: Any = ids.numpy().astype(np.int64) if on_cpu else ids.to(torch.int64, copy=True)
    if ids.numel():
        low, high = int(found.min()), int(found.max())
        if low < 0 or high >= rows:
            bad = low if low < 0 else high
            raise IdError(f"id {bad} is not in this table: ids go from 0 to {rows - 1}")
    return torch.as_tensor(found)


@check_ids.register_fake
def _(ids: Tensor, rows: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(ids, dtype=torch.int64)


@check_ids.register_vmap
def _(
    _info: object, in_dims: tuple[int | None, ...], ids: Tensor, rows: int
) -> tuple[Tensor, int | None]:
    return check_ids(ids, rows), in_dims[0]


@torch.library.custom_op("featherbed::bag_of", mutates_args=())
def bag_of(
    offsets: Tensor, count: int, include_last: bool
) -> Tensor:  # int [bags (+1)] -> int64 [count]
    """Return the bag of each of ``count`` ids, given the starts of bags as for nn.EmbeddingBag.

    >>> bag_of(torch.tensor([0, 2, 2]), 4, False)
    tensor([0, 0, 2, 2])
    """
    if offsets.dim() != 1 or offsets.dtype not in _INTEGERS:
        raise ArgumentError(
            f"offsets must be a 1-D integer tensor, got {offsets.dtype} of shape "
            f"{tuple(offsets.shape)}"
        )
    if include_last and not len(offsets):
        raise ArgumentError("include_last_offset=True needs at least one offset: the number of ids")
    starts = offsets.to(torch.int64)
    if len(starts):
        ordered = bool((starts.diff() >= 0).all())
        if int(starts[0]) != 0 or not ordered or int(starts[-1]) > count:
            raise ArgumentError(
                f"offsets must start at 0, never fall and end at most at {count} (the ids given): "
                f"{offsets}"
            )
        if include_last and int(starts[-1]) != count:
            raise ArgumentError(
                f"with include_last_offset=True the last offset is the number of ids, {count}: got "
                f"{offsets[-1]}"
            )
    elif count:
        raise ArgumentError(
            f"{count} ids were given, but offsets is empty: pass where each bag starts"
        )
    if include_last:
        starts = starts[:-1]
    return torch.bucketize(torch.arange(count, device=offsets.device), starts, right=True) - 1


@bag_of.register_fake
def _(offsets: Tensor, count: int, include_last: bool) -> Tensor:  # noqa: ARG001
    return offsets.new_empty(count, dtype=torch.int64)


@bag_of.register_vmap
def _(
    _info: object, in_dims: tuple[int | None, ...], offsets: Tensor, count: int, include_last: bool
) -> tuple[Tensor, int | None]:
    if in_dims[0] is None:
        return bag_of(offsets, count, include_last), None
    parts = offsets.unbind(in_dims[0])
    return torch.stack([bag_of(part, count, include_last) for part in parts]), 0
