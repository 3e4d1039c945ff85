"""One byte budget for all columns of a collection, divided by the sensitivity of the task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featherbed.checks import read_bytes
from featherbed.codecs.graded import LEFT, allocate_bits, grade_ends
from featherbed.errors import ArgumentError
from featherbed.packed.collection import Column, PackedCollection
from featherbed.packed.file import header_for
from featherbed.packed.matrix import MOST_GRADES
from featherbed.tables.graded import GradedTable
from featherbed.tables.rows import to_numpy

if TYPE_CHECKING:
    from featherbed.tables.collection import Collection

Floats = NDArray[np.float64]
STEEPEST = 12  # grades of a large column
FEWEST = 64  # rows of the first grade of a column
ROUNDS = 6  # of allocation, until the file is as large as the budget allows
CURVE = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # budgets of the report, times the given one


@dataclass(frozen=True)
class Division:
    """How a budget was divided: bits of each column, and what other budgets are expected to cost.

    ``bits``: mean bits of an element of each column; ``curve``: (bytes, expected increase of the
    loss) for several budgets, by the second-order estimate ½ Σ importance · error².
    """

    budget: int
    file: int
    bits: dict[str, float]
    curve: tuple[tuple[int, float], ...]

    def __str__(self) -> str:
        most = sorted(self.bits.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {bits:.2f}" for name, bits in most[:6])
        return f"{self.file:,} of {self.budget:,} bytes; bits an element: {shown} ..."


@dataclass
class Group:
    """Columns of one width that become one graded table."""

    columns: list[Column]
    rows: NDArray[np.float32]  # [n, d]
    lengths: list[int]  # rows of each grade
    costs: Floats  # [grades, d]

    @classmethod
    def of(cls, columns: list[Column], rows: list[Any], weights: list[Floats]) -> Group:
        """Cut each column into grades and sum up the importance of their elements."""
        counts = [max(1, min(STEEPEST, int(math.log2(max(1, c.rows / FEWEST))))) for c in columns]
        while sum(counts) > MOST_GRADES:
            counts[counts.index(max(counts))] -= 1
        lengths: list[int] = []
        for column, count in zip(columns, counts, strict=True):
            lengths += np.diff(grade_ends(column.rows, count), prepend=0).tolist()
        matrix, share = np.concatenate(rows), np.concatenate(weights)
        starts = np.cumsum([0, *lengths[:-1]])
        costs = np.add.reduceat(
            share[:, None] * np.square(matrix, dtype=np.float64), starts, axis=0
        )
        return cls(columns, matrix, lengths, costs)


def measure_importance(
    collection: Collection, batches: Iterable[Any], loss: Callable[[Any], Tensor]
) -> dict[str, Tensor]:  # name -> float64 [rows]
    """Return the mean squared gradient of the loss of a sample, for each row of each column.

    ``loss(batch)`` is the mean loss of a batch, and looks the collection up once. To second order a
    change e of row i adds ½ importance_i |e|² to the mean loss (the empirical Fisher information).
    """
    tables = [torch.zeros(t.num_embeddings, dtype=torch.float64) for t in collection.all_tables()]
    seen = 0

    def see(rows: Tensor, gradient: Tensor) -> None:  # [B, columns], [B, Σ d]
        nonlocal seen
        seen += len(rows)
        parts = torch.split(gradient.detach().double(), collection.dims, dim=1)
        for number, column in enumerate(collection.layout.columns):
            squares = (len(rows) * parts[number]).square().mean(1)
            tables[column.table].index_add_(0, rows[:, number].cpu(), squares.cpu())

    collection.on_gradient = see
    try:
        for batch in batches:
            torch.autograd.backward(loss(batch))
    finally:
        collection.on_gradient = None
    if not seen:
        raise ArgumentError("no batch was looked up: give batches of training rows")
    for parameter in collection.parameters():
        parameter.grad = None
    return {
        column.name: tables[column.table][column.start : column.start + column.rows] / seen
        for column in collection.layout.columns
    }


@torch.no_grad()
def divide_budget(
    collection: Collection, budget: int | str, importance: dict[str, Tensor]
) -> tuple[list[GradedTable], list[Column], Division]:
    """Return graded tables of all columns within ``budget`` bytes, their columns and a report."""
    most = read_bytes(budget)
    groups = _groups(collection, importance)
    sizes = [(group.lengths, group.rows.shape[1]) for group in groups]
    costs = np.concatenate([group.costs.reshape(-1) for group in groups])
    cells = np.concatenate([np.repeat(lengths, dim) for lengths, dim in sizes])
    tables = [
        GradedTable(len(group.rows), group.rows.shape[1], bits=1, grades=group.lengths)
        for group in groups
    ]
    columns = _places(collection, groups)
    unnamed = [replace(column, keys=None) for column in columns]  # keys are counted apart
    left, best = 8 * most, None
    for _ in range(ROUNDS):
        widths = allocate_bits(costs, cells, max(0, left), scale_bits=32)
        _set_bits(tables, groups, widths)
        packed = PackedCollection([table.pack() for table in tables], unnamed)
        file = len(header_for(packed.metadata(), packed.arrays)) + packed.nbytes
        if file <= most and (best is None or file > best[0]):
            best = file, widths
        if not widths.any() and file > most:
            raise ArgumentError(
                f"budget={budget!r}: the smallest file of these {len(columns)} columns has "
                f"{file:,} bytes"
            )
        used = int(widths.astype(np.int64) @ cells) + 32 * int(np.count_nonzero(widths))
        if left - used > 8 * most // 500 and file <= most:  # more bits would save nothing
            break
        left = used + 8 * (most - file)
    if best is None:
        raise ArgumentError(f"budget={budget!r}: no division fits, give a few more bytes")
    _set_bits(tables, groups, best[1])
    curve = [(int(most * part), _expected(costs, cells, 8 * most * part)) for part in CURVE]
    bits = {column.name: _mean_bits(tables[column.table], column) for column in columns}
    return tables, columns, Division(most, best[0], bits, tuple(curve))


def _groups(collection: Collection, importance: dict[str, Tensor]) -> list[Group]:
    """Return the different columns of a collection by width, as many together as grades allow."""
    own = {(c.table, c.start, c.rows): c for c in reversed(collection.layout.columns)}
    dims = dict(zip(collection.names, collection.dims, strict=True))
    groups = []
    for dim in sorted(set(collection.dims)):
        alike = [column for column in reversed(own.values()) if dims[column.name] == dim]
        for first in range(0, len(alike), MOST_GRADES):
            columns = alike[first : first + MOST_GRADES]
            rows, weights = [], []
            for column in columns:
                table = collection.all_tables()[column.table]
                ids = torch.arange(column.start, column.start + column.rows, device=table.device)
                rows.append(to_numpy(table.lookup(ids)))
                weights.append(_checked(collection, column, importance))
            groups.append(Group.of(columns, rows, weights))
    return groups


def _checked(collection: Collection, column: Column, importance: dict[str, Tensor]) -> Floats:
    """Return the importance of a column and of those that share its rows."""
    total = np.zeros(column.rows)
    for other in collection.layout.columns:
        if (other.table, other.start) == (column.table, column.start):
            if other.name not in importance:
                raise ArgumentError(f"importance lacks the column {other.name!r}")
            given = np.asarray(importance[other.name], dtype=np.float64)
            finite = given.shape == (column.rows,) and bool(np.isfinite(given).all())
            if not finite or bool((given < 0).any()):
                raise ArgumentError(
                    f"importance of {other.name!r} has the shape {given.shape}: give {column.rows} "
                    "finite numbers of at least 0, one for each row"
                )
            total += given
    return total


def _places(collection: Collection, groups: Sequence[Group]) -> list[Column]:
    """Return the places of all columns in the tables of ``groups``."""
    places: dict[tuple[int, int], tuple[int, int]] = {}
    for table, group in enumerate(groups):
        start = 0
        for column in group.columns:
            places[column.table, column.start] = table, start
            start += column.rows
    return [
        Column(column.name, *places[column.table, column.start], column.rows, column.keys)
        for column in collection.layout.columns
    ]


def _set_bits(
    tables: Sequence[GradedTable], groups: Sequence[Group], widths: NDArray[np.uint8]
) -> None:
    for table, group in zip(tables, groups, strict=True):
        own, widths = np.split(widths, [group.costs.size])
        table.set_bits(torch.from_numpy(group.rows), own.reshape(group.costs.shape))


def _expected(costs: Floats, cells: NDArray[np.int64], bits: float) -> float:
    """Return the expected increase of the loss with ``bits`` bits."""
    widths = allocate_bits(costs, cells, int(bits), scale_bits=32)
    return float(0.5 * (costs * LEFT[widths]).sum())


def _mean_bits(table: GradedTable, column: Column) -> float:
    """Return the mean bits of an element of a column."""
    ends = np.array(table.ends)
    inside = (ends > column.start) & (ends <= column.start + column.rows)
    lengths = np.array(table.grade_rows)[inside]
    return float(lengths @ table.widths[inside].mean(1) / column.rows)
