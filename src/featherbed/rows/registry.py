"""Row parameters by number: operators know a parameter by a number, which stays the same in compiled graphs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from featherbed.rows.parameter import RowParameter

_numbers = itertools.count(1)
_open: WeakValueDictionary[int, RowParameter] = WeakValueDictionary()
_of_weight = WeakIdKeyDictionary()


def enter(holder: RowParameter) -> int:
    """Give a row parameter a number."""
    number = next(_numbers)
    _open[number] = holder
    _of_weight[holder.weight] = number
    return number


def numbered(number: int) -> RowParameter | None:
    """Return the row parameter of a number, if it still lives."""
    return _open.get(number)


def holder_of(weight: Tensor) -> RowParameter | None:
    """Return the row parameter that holds this weight."""
    holder = _open.get(_of_weight.get(weight, 0))  # type: ignore[no-untyped-call]
    if holder is not None and holder.weight is weight:
        return holder
    return next(iter(holders_of(weight)), None)


def holders_of(weight: Tensor) -> list[RowParameter]:
    """Return every row parameter that holds this weight: more than one where tables are tied."""
    return [held for held in _open.values() if held.weight is weight]
