"""Quality limits for continuous integration: a table measured against its original matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.codecs.quality import QualityEvaluator
from featherbed.codecs.rows import WeightedRows
from featherbed.errors import ArgumentError
from featherbed.packed.table import PackedTable


def check_quality(
    table: PackedTable,
    matrix: Any,  # [V, d]
    recall: float | None = None,
    error: float | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Return the quality of a table and a message for each limit it misses.

    Args:
        table: the compressed table.
        matrix: the matrix it was compressed from.
        recall: minimum neighbor recall@10.
        error: maximum relative error.
    """
    shape = tuple(matrix.shape)
    if shape != (table.rows, table.dim):
        raise ArgumentError(
            f"the matrix is {' x '.join(f'{n:,}' for n in shape)}, the table {table.rows:,} x "
            f"{table.dim:,}: give the matrix the table was compressed from"
        )
    rows = WeightedRows(matrix)
    rows.lengths()
    found = QualityEvaluator(rows, np.random.default_rng(0))(lambda ids: table[ids])
    failures = []
    if recall is not None and found["recall"] < recall:
        failures.append(f"recall {found['recall']:.4f} is below {recall}")
    if error is not None and found["error"] > error:
        failures.append(f"error {found['error']:.4f} is above {error}")
    return found, failures
