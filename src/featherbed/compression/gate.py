"""A floor under quality, for continuous integration: a table measured against the matrix it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from featherbed.codecs.quality import Judge
from featherbed.codecs.rows import Rows
from featherbed.errors import ArgumentError
from featherbed.io.vectors.sources import read_matrix
from featherbed.packed.file import load


def judge(
    file: str | Path,
    against: str | Path,
    recall: float | None = None,
    error: float | None = None,
    array: str | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Return a table's quality, and the floors it falls below, in words."""
    if recall is None and error is None:
        raise ArgumentError("a gate needs a floor: give --recall 0.9, --error 0.1, or both")
    table, source = load(file), read_matrix(against, array=array)
    if source.matrix.shape != (table.rows, table.dim):
        raise ArgumentError(
            f"{Path(against).name} is {source.matrix.shape[0]:,} x {source.matrix.shape[1]}, "
            f"{Path(file).name} {table.rows:,} x {table.dim}: give the matrix the table was made from"
        )
    rows = Rows(source.matrix)
    rows.lengths()
    found = Judge(rows, np.random.default_rng(0))(lambda ids: table[ids])
    failures = []
    if recall is not None and found["recall"] < recall:
        failures.append(f"recall {found['recall']:.4f} is below {recall}")
    if error is not None and found["error"] > error:
        failures.append(f"error {found['error']:.4f} is above {error}")
    return found, failures
