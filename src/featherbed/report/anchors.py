"""The report of ``featherbed inspect --anchors``: the anchors of a packed file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, DataError
from featherbed.packed.inspect import anchor_count, anchors_report, anchors_text, blocks, purity
from featherbed.packed.table import PackedTable
from featherbed.theory.objective import nbant_objective


def inspect_anchors(
    packed: PackedTable,
    counts: NDArray[Any] | None = None,  # [V]
    groups: Sequence[Sequence[str]] | None = None,  # [V]
    loss: float | None = None,
    lambda1: float | None = None,
    lambda2: float | None = None,
) -> tuple[dict[str, Any], str]:
    """Return the report on the anchors of a packed table, as data and as text.

    Args:
        packed: the table.
        counts: number of occurrences of each row.
        groups: the groups of each row; adds the purity of the anchors.
        loss: with ``lambda1`` and ``lambda2``, adds the NBANT objective (equation 36).
        lambda1: cost of an anchor.
        lambda2: cost of a nonzero weight.
    """
    for name, given in (("counts", counts), ("groups", groups)):
        if given is not None and len(given) != packed.rows:
            raise DataError(
                f"{len(given)} {name} for {packed.rows} rows: give one line for each row"
            )
    if counts is not None and np.array_equal(counts, np.rint(counts)):
        counts = counts.astype(np.int64)
    report = anchors_report(packed, counts=counts)
    text = anchors_text(report)
    if groups is not None:
        pure = purity(packed, groups)
        report["purity"] = {"share": pure.share, "baseline": pure.baseline}
        text += (
            f"\npurity      {pure.share:.1%} of rows are of the main group of their anchor "
            f"(with a single cluster: {pure.baseline:.1%})"
        )
    if loss is not None and lambda1 is not None and lambda2 is not None:
        anchors = anchor_count(packed)
        nonzeros = sum(int(np.count_nonzero(weights)) for _, _, weights in blocks(packed))
        value = float(nbant_objective(loss, nonzeros, anchors, lambda1, lambda2))
        report["objective"] = {"value": value, "loss": loss}
        report["objective"] |= {"nonzeros": nonzeros, "anchors": anchors}
        text += (
            f"\nobjective   {value:.6g} = {loss:g} + {lambda2:g} x {nonzeros:,} + "
            f"({lambda1:g} - {lambda2:g}) x {anchors}"
        )
    elif any(value is not None for value in (loss, lambda1, lambda2)):
        raise ArgumentError(
            "the objective requires --loss, --lambda1 and --lambda2: give all three"
        )
    return report, text
