"""What ``featherbed inspect --anchors`` tells of a file: its anchors, and with what else is known of the objects, more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from featherbed.errors import ArgumentError, DataError
from featherbed.packed.file import load
from featherbed.packed.inside import anchor_count, anchors_report, anchors_text, blocks, purity
from featherbed.theory.objective import nbant_objective


def inspect_anchors(
    path: Path,
    counts: Path | None = None,
    groups: Path | None = None,
    loss: float | None = None,
    lambda1: float | None = None,
    lambda2: float | None = None,
) -> tuple[dict[str, Any], str]:
    """Return what is inside a packed file, as data and as text.

    ``counts``: how often each object occurs (.npy, or a number a line). ``groups``: a line for each object, its groups between
    bars. ``loss`` with ``lambda1`` and ``lambda2``: the objective of NBANT, equation 36.
    """
    packed = load(path)
    found = anchors_report(packed, counts=None if counts is None else _counts(counts, packed.rows))
    text = anchors_text(found)
    if groups is not None:
        own = [
            line.split("|") if line else []
            for line in groups.read_text(encoding="utf-8").splitlines()
        ]
        if len(own) != packed.rows:
            raise DataError(
                f"{groups.name} holds {len(own)} lines: give one for each of the {packed.rows} objects"
            )
        pure = purity(packed, own)
        found["purity"] = {"share": pure.share, "baseline": pure.baseline}
        text += f"\npurity      {pure.share:.1%} of objects are of their anchor's main group (all in one: {pure.baseline:.1%})"
    given = [value is not None for value in (loss, lambda1, lambda2)]
    if any(given):
        if loss is None or lambda1 is None or lambda2 is None:
            raise ArgumentError("the objective takes all three: --loss, --lambda1 and --lambda2")
        nonzeros, anchors = (
            sum(int(np.count_nonzero(weights)) for _, _, weights in blocks(packed)),
            anchor_count(packed),
        )
        value = float(nbant_objective(loss, nonzeros, anchors, lambda1, lambda2))
        found["objective"] = {
            "value": value,
            "loss": loss,
            "nonzeros": nonzeros,
            "anchors": anchors,
        }
        text += f"\nobjective   {value:.6g} = {loss:g} + {lambda2:g} x {nonzeros:,} + ({lambda1:g} - {lambda2:g}) x {anchors}"
    return found, text


def _counts(path: Path, rows: int) -> Any:
    try:
        found = np.load(path) if path.suffix == ".npy" else np.loadtxt(path, ndmin=1)
    except ValueError as error:
        raise DataError(
            f"{path.name}: counts are a .npy array or a number a line ({str(error)[:80]})"
        ) from None
    if found.shape != (rows,):
        raise DataError(
            f"{path.name} holds counts of shape {found.shape}: give one for each of the {rows} objects"
        )
    return found.astype(np.int64) if np.array_equal(found, np.rint(found)) else found
