"""Rows of a ranking within a byte budget, divided by the loss in the order of items.

Rounding adds e_u . v + u . e_v to a score. With rows of users at length 1, every user counts as
much as every other, as in NDCG; the expected square of the error is

    Σ_k (E_u[e_uk²] M_v[v_k²] + M_u[u_k²] E_v[e_vk²])

where means over items are weighted by popularity to a power, because the items that could enter a
list are popular ones. Bits go to grades of rows and to columns by falling gain per bit. The power,
the number of grades and the part of the users are chosen by the NDCG@10 of the validation events,
not by this error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.apps.recommender.graded import Bits, GradedRows, file_bytes, fits_float16
from featherbed.codecs import allocate_bits
from featherbed.errors import ArgumentError
from featherbed.packed import PackedTable
from featherbed.tables import parse_spec

Doubles = NDArray[np.float64]
POWERS, GRADES, PARTS = (0.5, 1.0), (1, 4, 8, 12), (0.5, 1.0, 2.0)
CLOSE = 1.3  # of the lowest expected error: plans with a higher one are not measured
GRADE_POWER = 0.5  # grades have equal sums of popularity to this power


@dataclass(frozen=True)
class BitPlan:
    """How bits are divided: the power of popularity, the number of grades, the weight of users.

    >>> BitPlan().grades
    8
    """

    power: float = 1.0
    grades: int = 8
    users: float = 1.0

    def variants(self) -> Iterator[BitPlan]:
        """Yield the plans that are compared: powers and grades, then weights of users."""
        for power, grades in product(POWERS, GRADES):
            yield replace(self, power=power, grades=grades)


def round_rows(
    users: Doubles,  # [users, d]
    items: Doubles,  # [items, d]
    counts: tuple[NDArray[Any], NDArray[Any]],  # [users], [items]: events of each row, falling
    budget: int,
    plan: BitPlan,
) -> tuple[PackedTable, PackedTable]:
    """Round both sides to graded rows whose files have at most ``budget`` bytes.

    >>> rows = np.random.default_rng(0).normal(size=(60, 4))
    >>> counts = np.arange(60, 0, -1)
    >>> tables = round_rows(rows, rows[:40], (counts, counts[:40]), 1000, BitPlan(grades=2))
    >>> from featherbed.packed import file_size
    >>> sum(map(file_size, tables)) <= 1000
    True
    """
    sides = (users, items)
    sizes = [_grade_sizes(count, plan.grades) for count in counts]
    weights = [np.ones(len(users)), (counts[1] + 1.0) ** plan.power]
    moments = [
        np.add.reduceat(rows**2 * weight[:, None], np.cumsum([0, *size[:-1]]))
        for rows, weight, size in zip(sides, weights, sizes, strict=True)
    ]
    moments = [part / weight.sum() for part, weight in zip(moments, weights, strict=True)]
    costs = [
        moments[0] * moments[1].sum(axis=0) * plan.users,
        moments[1] * moments[0].sum(axis=0),
    ]
    flat, cut = np.concatenate([part.reshape(-1) for part in costs]), costs[0].size
    lengths = np.concatenate([np.repeat(size, users.shape[1]) for size in sizes])

    half = [fits_float16(rows) for rows in sides]

    def divide(room: int) -> tuple[list[Bits], int]:
        """Return the bits of both sides, and the bytes of their files."""
        bits = allocate_bits(flat, lengths, room, scale_bits=16) if room > 0 else 0 * lengths
        parts = [
            part.reshape(cost.shape).astype(np.uint8)
            for part, cost in zip(np.split(bits, [cut]), costs, strict=True)
        ]
        zeros = [GradedRows.zeros(*side) for side in zip(parts, sizes, half, strict=True)]
        return parts, file_bytes(zeros)

    least = divide(0)[1]
    if least >= budget:
        if plan.grades == 1:
            raise ArgumentError(
                f"budget={budget:,}: the headers of the two files alone take {least:,} bytes, "
                "give more than that"
            )
        return round_rows(users, items, counts, budget, replace(plan, grades=plan.grades // 2))
    room = 8 * (budget - least)
    while (over := (found := divide(room))[1] - budget) > 0:
        room = max(0, room - 8 * over)
    left, right = (
        GradedRows.round(rows, part, size).pack()
        for rows, part, size in zip(sides, found[0], sizes, strict=True)
    )
    return left, right


def _grade_sizes(counts: NDArray[Any], grades: int) -> list[int]:  # [V] -> [G]
    """Divide rows, the most popular first, into at most ``grades`` grades."""
    total = np.cumsum((counts + 1.0) ** GRADE_POWER)
    cuts = np.searchsorted(total, total[-1] * np.arange(1, grades) / grades)
    return [int(n) for n in np.diff(np.unique([0, *cuts, len(counts)]))]


def choose_plan(
    users: Doubles,
    items: Doubles,
    counts: tuple[NDArray[Any], NDArray[Any]],
    budget: int,
    measure: Callable[[PackedTable, PackedTable], float],
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> BitPlan:
    """Return the plan of the highest ``measure`` of the rounded rows, such as a validation NDCG.

    Plans whose scores have a much larger squared error than others are not measured: with few
    validation events they might be the best by luck.
    """
    weights = (counts[1] + 1.0) / (counts[1] + 1.0).sum()
    moments = users.T @ users / len(users), (items.T * weights) @ items

    def error(tables: tuple[PackedTable, PackedTable]) -> float:
        left, right = tables[0][:] - users, tables[1][:] - items
        rounded = left.T @ left / len(left), (right.T * weights) @ right
        return float((rounded[0] * moments[1]).sum() + (moments[0] * rounded[1]).sum())

    found: dict[BitPlan, float] = {}

    def best(plans: Iterator[BitPlan]) -> BitPlan:
        new = [plan for plan in plans if plan not in found]
        rounded = {plan: round_rows(users, items, counts, budget, plan) for plan in new}
        errors = {plan: error(tables) for plan, tables in rounded.items()}
        highest = CLOSE * min(errors.values(), default=0.0)
        for plan, tables in rounded.items():
            if errors[plan] <= highest:
                found[plan] = measure(*tables)
                if progress is not None:
                    progress({"grades": plan.grades, "validation": found[plan]})
        return max(found, key=lambda plan: found[plan])

    chosen = best(BitPlan().variants())
    return best(replace(chosen, users=part) for part in PARTS)


def pack_by_spec(matrix: Doubles, spec: str) -> PackedTable:  # [V, d]
    """Pack rows by the spec of a table, such as ``product:parts=8``.

    >>> len(pack_by_spec(np.eye(4), "quantized:bits=8"))
    4
    """
    import torch

    kind, settings = parse_spec(spec)
    rows = torch.from_numpy(matrix.astype(np.float32))
    return kind.from_dense(rows, **settings).pack()
