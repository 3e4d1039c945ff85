"""The NBANT objective of a run: its cost in loss, weights and anchors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.checks import check_integer, is_number
from featherbed.errors import ArgumentError


def check_lambdas(lambda1: float, lambda2: float) -> None:
    """Raise an error unless lambda1 > lambda2 > 0: otherwise anchors would cost nothing."""
    if not (is_number(lambda1) and is_number(lambda2) and lambda1 > lambda2 > 0):
        raise ArgumentError(
            f"lambda1={lambda1!r}, lambda2={lambda2!r}: give finite numbers with lambda1 > lambda2 "
            "> 0; lambda2 is the price of a weight, lambda1 that of an anchor and its first weight"
        )


def nbant_objective(
    loss: float, nonzeros: int, anchors: int, lambda1: float, lambda2: float
) -> float:
    """Return loss + lambda2 ||T||_0 + (lambda1 - lambda2) K, lambda1 > lambda2 > 0.

    Liang et al. 2021, equations 5, 21, 34 and 36. Their equations sum the loss over the data; their
    numbers (table 15) use its **mean**, for a language model ln(perplexity).

    Args:
        loss: mean validation loss.
        nonzeros: ||T||_0, the nonzero weights of all transforms.
        anchors: K, the anchors of all tables.

    >>> import math
    >>> round(nbant_objective(math.log(79.4), 214_000, 1000, lambda1=2e-5, lambda2=1e-6), 2)
    4.61
    """
    check_lambdas(lambda1, lambda2)
    if not is_number(loss):
        raise ArgumentError(
            f"loss={loss!r}: give a finite number; a run that diverged has no objective"
        )
    for name, count in (("nonzeros", nonzeros), ("anchors", anchors)):
        check_integer(name, count, 0)
    return float(loss + lambda2 * nonzeros + (lambda1 - lambda2) * anchors)


@dataclass(frozen=True)
class Run:
    """The mean validation loss, ||T||_0 and K of a run.

    >>> Run("small", loss=4.67, nonzeros=25_000, anchors=100)
    Run(name='small', loss=4.67, nonzeros=25000, anchors=100)
    """

    name: str
    loss: float
    nonzeros: int
    anchors: int


@dataclass(frozen=True, eq=False)
class ObjectiveTable:
    """The objective of runs (rows) for several lambda1 (columns): ``print(table)``, or its
    ``data``.

    ``values`` [runs, lambda1s]; ``best``: the row of the smallest value, for each lambda1.
    """

    runs: tuple[Run, ...]
    lambda1: tuple[float, ...]
    lambda2: tuple[float, ...]  # of each run
    values: NDArray[np.float64]

    @property
    def best(self) -> tuple[int, ...]:
        """The row of the smallest value in each column (the first if tied)."""
        return tuple(int(row) for row in self.values.argmin(axis=0))

    @property
    def data(self) -> dict[str, Any]:
        """The table as plain lists and numbers, ready for JSON."""
        rows = zip(self.runs, self.lambda2, self.values.tolist(), strict=True)
        runs = [{**vars(run), "lambda2": own, "objective": values} for run, own, values in rows]
        best = [self.runs[row].name for row in self.best]
        return {"lambda1": list(self.lambda1), "runs": runs, "best": best}

    def __str__(self) -> str:
        heads = ["run", "anchors", "nnz(T)", "loss", "lambda2"]
        lines = [[*heads, *(f"lambda1={value:g} " for value in self.lambda1)]]
        for row, (run, lambda2) in enumerate(zip(self.runs, self.lambda2, strict=True)):
            counts = [f"{run.anchors:,}", f"{run.nonzeros:,}", f"{run.loss:.5g}", f"{lambda2:g}"]
            cells = zip(self.values[row], self.best, strict=True)
            marked = [f"{value:.5g}" + ("*" if row == best else " ") for value, best in cells]
            lines.append([run.name, *counts, *marked])
        first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
        return "\n".join(
            "  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]).rstrip()
            for line in lines
        )


def objective_table(
    runs: Iterable[Run], lambda1: float | Sequence[float], lambda2: float | Sequence[float]
) -> ObjectiveTable:
    """Return the objective loss + lambda2 ||T||_0 + (lambda1 - lambda2) K of every run and lambda1.

    Model selection by price: Liang et al. 2021, appendix L, equation 36 and table 15.

    Args:
        lambda1: one number, or several (one column each).
        lambda2: one number for all runs, or one per run (as in the paper's table, the one it was
            trained with). Runs with different lambda2 have different objectives: use one for all to
            choose among them.

    >>> runs = [Run("many", 4.37, 214_000, 1000), Run("few", 4.67, 25_000, 100)]
    >>> print(objective_table(runs, lambda1=[2e-5, 1e-1], lambda2=1e-6))
    run   anchors   nnz(T)  loss  lambda2  lambda1=2e-05   lambda1=0.1
    many    1,000  214,000  4.37    1e-06          4.603*       104.58
    few       100   25,000  4.67    1e-06         4.6969        14.695*
    """
    found = tuple(runs)
    prices = tuple(lambda1) if isinstance(lambda1, Sequence | np.ndarray) else (lambda1,)
    own = tuple(lambda2) if isinstance(lambda2, Sequence | np.ndarray) else (lambda2,) * len(found)
    if not found or not prices:
        raise ArgumentError(
            f"{len(found)} runs and {len(prices)} lambda1: a table needs at least one of each"
        )
    if not all(isinstance(run, Run) for run in found):
        raise ArgumentError("runs are made as featherbed.theory.Run(name, loss, nonzeros, anchors)")
    if len(own) != len(found):
        raise ArgumentError(
            f"{len(own)} lambda2 for {len(found)} runs: give one for all or one for each run"
        )
    values = [
        [nbant_objective(run.loss, run.nonzeros, run.anchors, price, weight) for price in prices]
        for run, weight in zip(found, own, strict=True)
    ]
    columns = tuple(map(float, prices)), tuple(map(float, own))
    return ObjectiveTable(found, *columns, np.array(values))
