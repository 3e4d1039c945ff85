"""One byte budget for all columns of a collection, divided by the sensitivity of the task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featherbed.checks import read_bytes
from featherbed.codecs.graded import LEFT, allocate_bits, grade_ends
from featherbed.errors import ArgumentError
from featherbed.packed.collection import Column, PackedCollection, as_array
from featherbed.packed.file import header_for
from featherbed.packed.matrix import MOST_GRADES
from featherbed.report.budget import budget_page, budget_text
from featherbed.report.page import write_report
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

    ``bits``: mean bits of an element of each column; ``shapes``: its rows and width; ``curve``:
    (bytes, expected increase of the loss) for several budgets, by the second-order estimate
    ½ Σ importance · error²; ``dense``: bytes of float32 rows.
    """

    budget: int
    file: int
    dense: int
    bits: dict[str, float]
    shapes: dict[str, tuple[int, int]]
    curve: tuple[tuple[int, float], ...]

    def save(self, path: str | Path) -> None:
        """Write the report atomically: a page for .html, JSON for .json, text for .txt."""
        columns = [
            {"name": name, "rows": rows, "dim": dim, "bits": self.bits[name]}
            for name, (rows, dim) in self.shapes.items()
        ]
        report = {"budget": self.budget, "file": self.file, "dense": self.dense}
        write_report(
            path, report | {"columns": columns, "curve": self.curve}, budget_page, budget_text
        )

    def __str__(self) -> str:
        most = sorted(self.bits.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {bits:.2f}" for name, bits in most[:6])
        more = ", ..." * (len(most) > 6)
        return f"{self.file:,} of {self.budget:,} bytes; bits an element: {shown}{more}"


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


@dataclass(frozen=True)
class Looked:
    """Elements of a look-up: element i is row ``rows[i]`` of the table of column ``number``.

    Its gradient is ``shares[i]`` times row ``samples[i]`` of those of the look-up, columns ``part``
    (without shares: row i). Without ``samples`` element i is of sample i.
    """

    number: int
    rows: Tensor  # int64 [n]
    part: slice
    samples: Tensor | None = None  # int64 [n]
    shares: Tensor | None = None  # float64 [n]

    def gradients(self, gradient: Tensor) -> Tensor:  # [samples or n, Σ d] -> [n, d]
        """Return the gradients of the elements."""
        own = gradient[:, self.part]
        return own if self.shares is None else own[self.samples] * self.shares[:, None]


class Sensitivity:
    """Mean squared gradients of the rows of a collection, from its look-ups in some batches.

    To second order a change e of row i adds ½ importance_i |e|² to the mean loss (the empirical
    Fisher information).
    """

    def __init__(self, collection: Collection) -> None:
        self.collection = collection
        self.columns = collection.layout.columns
        self.sums = [torch.zeros(column.rows, dtype=torch.float64) for column in self.columns]
        self.found: list[tuple[Tensor, int, list[Looked]]] = []  # of this batch, with samples

    def of_batch(self, found: Tensor, rows: Tensor) -> Tensor:  # [B, Σ d], [B, columns] -> [B, Σ d]
        """See the look-up of a batch, one id of each column in a sample."""
        looked = [
            Looked(number, rows[:, number].cpu(), part) for number, part in enumerate(self._parts())
        ]
        return self._see(found, len(rows), looked)

    def of_column(
        self, found: Tensor, number: int, rows: Tensor
    ) -> Tensor:  # [B, ..., d] -> same shape
        """See the look-up of one column; the first dimension is that of samples."""
        count = found.shape[0] if found.dim() > 1 else 1
        samples = torch.arange(count).repeat_interleave(len(rows) // max(1, count))
        looked = Looked(number, rows.cpu(), slice(None), samples)
        return self._see(found, count, [looked])

    def of_bags(
        self,
        found: Tensor,  # [B, Σ d]
        rows: Tensor,  # int64 [N]
        counts: NDArray[np.int64],  # [columns, B]
        weights: Tensor | None,  # [N]
        mode: str,
    ) -> Tensor:  # [B, Σ d]
        """See the look-up of bags: a sample is a bag of each column."""
        bags, ends = counts.shape[1], np.cumsum(counts.sum(1))
        looked = []
        for number, (part, inside, end) in enumerate(zip(self._parts(), counts, ends, strict=True)):
            own = slice(int(end - inside.sum()), int(end))
            samples = torch.arange(bags).repeat_interleave(torch.from_numpy(inside))
            shares = torch.ones(len(samples), dtype=torch.float64)
            if weights is not None:
                shares = weights[own].detach().double().cpu()
            table = self.collection.all_tables()[self.columns[number].table]
            some, padding = rows[own].cpu(), table.padding_idx
            if mode == "mean":
                counted = (some != (-1 if padding is None else padding)).double()
                sizes = torch.zeros(bags, dtype=torch.float64).index_add_(0, samples, counted)
                shares = shares / sizes.clamp(min=1)[samples]
            looked.append(Looked(number, some, part, samples, shares))
        return self._see(found, bags, looked)

    def _parts(self) -> list[slice]:
        """Return where the rows of each column are among those side by side."""
        dims = self.collection.dims
        ends = np.cumsum(dims).tolist()
        return [slice(end - dim, end) for end, dim in zip(ends, dims, strict=True)]

    def _see(self, found: Tensor, samples: int, looked: list[Looked]) -> Tensor:
        if not found.requires_grad:  # frozen rows
            found = found.detach().requires_grad_()
        self.found.append((found, samples, looked))
        return found

    def measure(
        self, batches: Iterable[Any], loss: Callable[[Any], Tensor]
    ) -> dict[str, Tensor]:  # name -> float64 [rows]
        """Return the importance of the rows of each column, by its name."""
        seen = 0
        for batch in batches:
            with torch.enable_grad():
                seen += self._add(loss(batch))
        if not seen:
            raise ArgumentError("no batch was looked up: give batches of training rows")
        columns = zip(self.columns, self.sums, strict=True)
        return {column.name: sums / seen for column, sums in columns}

    def _add(self, value: Any) -> int:
        """Add the squared gradients of the loss of a batch; return its number of samples."""
        found, self.found = self.found, []
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.isfinite().all():
            shown = f"{value!r:.60}".replace("\n", " ")
            raise ArgumentError(
                f"the loss of a batch is {shown}: return its mean, a tensor of one finite number"
            )
        if not found:
            return 0
        samples = max(count for _, count, _ in found)
        if not value.requires_grad:
            raise ArgumentError(
                "the loss does not depend on the rows that were looked up: compute it from them, "
                "without detach() or torch.no_grad()"
            )
        outputs = [rows for rows, _, _ in found]
        gradients = torch.autograd.grad(value, outputs, allow_unused=True)
        for gradient, (_, _, looked) in zip(gradients, found, strict=True):
            for one in looked if gradient is not None else ():
                assert gradient is not None
                flat = gradient.reshape(-1, gradient.shape[-1]).double().cpu()
                self._add_squares(one, samples * one.gradients(flat))
        return samples

    def _add_squares(self, looked: Looked, gradients: Tensor) -> None:  # [n, d]
        """Add squares; a row that is there several times in a sample has the sum of gradients."""
        rows, sums = looked.rows - self.columns[looked.number].start, self.sums[looked.number]
        if looked.samples is not None:
            count = len(sums)
            pairs, index = torch.unique(looked.samples * count + rows, return_inverse=True)
            whole = gradients.new_zeros(len(pairs), gradients.shape[1])
            rows, gradients = pairs % count, whole.index_add_(0, index, gradients)
        sums.index_add_(0, rows, gradients.square().mean(1))


@torch.no_grad()
def divide_budget(
    collection: Collection, budget: int | str, importance: dict[str, Tensor]
) -> tuple[list[GradedTable], list[Column], Division]:
    """Return graded tables of all columns within ``budget`` bytes, their columns and a report."""
    most = read_bytes(budget)
    collection.layout.check_names(importance, "importance")
    groups = _groups(collection, importance)
    sizes = [(group.lengths, group.rows.shape[1]) for group in groups]
    costs = np.concatenate([group.costs.reshape(-1) for group in groups])
    if not costs.any():
        raise ArgumentError(
            "importance is 0 in all rows but empty ones, so that no row would get bytes: measure "
            "it with importance(batches, loss), or give counts"
        )
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
    shapes = {column.name: (column.rows, tables[column.table].embedding_dim) for column in columns}
    dense = sum(group.rows.nbytes for group in groups)
    return tables, columns, Division(most, best[0], dense, bits, shapes, tuple(curve))


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
            given = as_array(importance[other.name], f"importance of {other.name!r}", np.float64)
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
