"""Parameters of a model whose tables are divided among processes: sums and errors of all processes.

``fb.distributed.shard`` marks every parameter of a model with its process group. Optimizers,
budgets, growth and clipping then count over all processes, and raise an error in all of them.
Without a mark every function here is that of one process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from featherbed.errors import FeatherbedError

_marks = WeakIdKeyDictionary()  # parameter -> (process group, whether its rows are divided)


def mark(parameter: Tensor, group: Any, divided: bool) -> None:
    """Record the process group of a parameter, and whether each process has other rows of it."""
    _marks[parameter] = (group, divided)


def group_of(parameters: Iterable[Tensor]) -> Any:
    """Return the process group of the first marked parameter, None for a model of one process.

    >>> group_of([torch.zeros(1)]) is None
    True
    """
    return next((_marks[one][0] for one in parameters if one in _marks), None)


def is_divided(parameter: Tensor) -> bool:
    """Return whether other processes hold other rows of a parameter."""
    return bool(_marks.get(parameter, (None, False))[1])  # type: ignore[no-untyped-call]


def total(tensor: Tensor, group: Any) -> Tensor:
    """Return the sum of a tensor over all processes.

    >>> total(torch.tensor([1, 2]), None)
    tensor([1, 2])
    """
    if group is None:
        return tensor
    found = tensor.detach().contiguous().clone()
    torch.distributed.all_reduce(found, group=group)
    return found


def largest(number: int, group: Any) -> int:
    """Return the largest number of any process."""
    found = torch.tensor(number)
    if group is not None:
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=group)
    return int(found)


def of_first(tensor: Tensor, group: Any) -> Tensor:
    """Return the tensor of the first process."""
    if group is None:
        return tensor
    found = tensor.detach().contiguous().clone()
    torch.distributed.broadcast(found, group=group, group_src=0)
    return found


def raise_together(error: FeatherbedError | None, group: Any) -> None:
    """Raise the error of any process in all of them: else the others would wait for it."""
    if group is None:
        if error is not None:
            raise error
        return
    if not int(total(torch.tensor(int(error is not None)), group)):
        return
    found: list[tuple[type[FeatherbedError], str] | None]
    found = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(
        found, None if error is None else (type(error), str(error)), group=group
    )
    kind, text = next(one for one in found if one is not None)
    raise kind(text) from error


def share_of_largest(sizes: Tensor, count: int, group: Any) -> int:
    """Return how many of the ``count`` largest numbers of all processes are among ``sizes``.

    Found by bisection of the smallest of them, in one message of a number per step; among equal
    numbers those of the first processes come first.

    >>> share_of_largest(torch.tensor([3.0, 1.0, 2.0]), 2, None)
    2
    """
    if group is None:
        return count
    ranked = sizes.sort().values

    def at_least(bits: int) -> int:
        border = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
        return len(ranked) - int(torch.searchsorted(ranked, border.to(ranked)))

    low, high = 0, 0x7F800000  # bits of floats from 0 to infinity, in their order
    while high - low > 1:  # at least `count` numbers are >= low, fewer are >= high
        middle = (low + high) // 2
        enough = int(total(torch.tensor(at_least(middle)), group)) >= count
        low, high = (middle, high) if enough else (low, middle)
    world = torch.distributed.get_world_size(group)
    mine = torch.tensor([at_least(high), at_least(low) - at_least(high)])
    found = [torch.zeros_like(mine) for _ in range(world)]
    torch.distributed.all_gather(found, mine, group=group)
    left = count - sum(int(larger) for larger, _ in found)
    rank = torch.distributed.get_rank(group)
    left -= sum(int(equal) for _, equal in found[:rank])
    return int(mine[0]) + max(0, min(int(mine[1]), left))
