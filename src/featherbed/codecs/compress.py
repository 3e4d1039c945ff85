"""``fb.compress``: from a matrix to a packed table with a report."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from featherbed.checks import COMPRESSING, require
from featherbed.codecs.auto import find_best
from featherbed.codecs.codec import ProgressCallback, no_progress
from featherbed.codecs.inputs import as_matrix
from featherbed.codecs.registry import codec_of
from featherbed.codecs.report import CompressionReport
from featherbed.codecs.rows import WeightedRows
from featherbed.codecs.target import Target
from featherbed.codecs.trial import Trial, prepare_job
from featherbed.errors import ArgumentError, DataError
from featherbed.packed.keys import Keys
from featherbed.packed.table import PackedTable


def compress(
    matrix: Any,  # [V, d]: an array, a memory map, a tensor, a module
    *,
    budget: int | str | None = None,
    ratio: float | None = None,
    quality: str | None = None,
    method: str = "auto",
    measure: str = "recall",
    weights: ArrayLike | str | None = None,
    keys: Iterable[str] | None = None,
    generator: np.random.Generator | int | None = None,
    padding_idx: int | None = None,
    words: Iterable[str | Path] = (),
    name: str = "matrix",
    command: str | None = None,
    tell: ProgressCallback = no_progress,
) -> PackedTable:
    """Compress a matrix to a size in bytes, by a ratio, or to a quality.

    The size of the file without its keys never exceeds the budget. ``method="auto"`` compares the
    methods on a sample, fits the best ones on the whole matrix and refines the best of these by
    alternating between new codes and least-squares dictionaries. The ``report`` of the result
    holds its quality and all the candidates. Methods are compared by neighbor recall@10, or by the
    relative error Σ ||x - y||² / Σ ||x||² if ``measure`` or ``quality`` says so; with ``weights``
    both are weighted means, and frequent rows are stored more precisely.

    Args:
        matrix: [V, d] of floats, read in blocks, so that a memory map may exceed the memory. A
            module such as nn.Embedding stands for its weight (and its padding row, if zero).
        budget: size of the file in bytes, such as 600_000 or "600KB".
        ratio: compression ratio against V x d float32.
        quality: "recall:0.9" (minimum) or "error:0.1" (maximum), reached with the fewest bytes.
        method: "auto", or int8, int4, int3, int2, lowrank, pq, opq, rq, lsq, layered, kd, ksvd,
            hash, hash+ksvd, anchors, clusters; with separate norms "rq+norms"; with frequent rows
            stored more precisely "hot+layered"; with settings "rq:codes=8,bits=8".
        measure: "recall" or "error", by which methods are compared if ``quality`` is not given.
        weights: frequency of each row, such as word counts; "zipf" if rows are sorted by frequency.
        keys: a name for each row.
        generator: a numpy generator or a seed (default 0).
        padding_idx: id of the row of zeros.
        words: similarity or analogy files to evaluate before and after (requires keys).
        name: name of the matrix in the report.
        command: command shown in the report (default: this call).
        tell: called with the current step and the completed share of the time (0 if unknown).

    >>> matrix = np.random.default_rng(0).standard_normal((400, 16)).astype(np.float32)
    >>> small = compress(matrix, ratio=4, method="int4")
    >>> small.nbytes <= matrix.nbytes / 4, small.report.quality["recall"] > 0.7
    (True, True)
    """
    started = time.perf_counter()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads must not occupy a core
    require("compressing a matrix", COMPRESSING)
    matrix, own_padding = as_matrix(matrix)
    padding_idx = own_padding if padding_idx is None else padding_idx
    rows = WeightedRows(matrix, weights)
    target = Target.of(budget, ratio, quality, rows.count * rows.dim * 4, measure)
    key_index = None if keys is None else Keys.of(keys)
    files = [Path(path) for path in words]
    _check_details(rows, key_index, padding_idx, files)
    codec = None if method == "auto" else codec_of(method)
    job = prepare_job(rows, target.measure, generator, padding_idx, tell)
    trial = Trial(job, target.measure, started)
    choice = find_best(trial, codec, target)
    table = trial.table(choice, padding_idx, key_index)
    if command is None:
        arguments: dict[str, Any] = {"budget": budget, "ratio": ratio, "quality": quality}
        arguments |= {"method": method, "measure": measure, "weights": weights, "keys": keys}
        command = _call(arguments | {"generator": generator, "padding_idx": padding_idx})
    with trial.meter.step("measuring", "measuring", trial.evaluator.work):
        report = CompressionReport.of(table, trial, choice, target, name, command, files)
    report.data["seconds"] = time.perf_counter() - started
    table.report = report
    return table


def _check_details(
    rows: WeightedRows, keys: Keys | None, padding_idx: int | None, files: list[Path]
) -> None:
    """Check keys, the padding id and word files against the matrix."""
    if keys is not None and len(keys) != rows.count:
        raise ArgumentError(f"{len(keys)} keys were given for {rows.count} rows: give one for each")
    if padding_idx is not None and not 0 <= padding_idx < rows.count:
        raise ArgumentError(f"padding_idx={padding_idx}: rows go from 0 to {rows.count - 1}")
    if files and keys is None:
        raise ArgumentError("word files can be evaluated only if rows have keys: give keys as well")
    for path in files:
        if not path.is_file():
            raise DataError(f"{path}: there is no such file of words")


def _call(arguments: dict[str, Any]) -> str:
    """Return the Python call of a compression; arrays are written as the name of their argument.

    >>> _call({"ratio": 8, "method": "opq", "measure": "recall", "weights": np.ones(3)})
    "featherbed.compress(matrix, ratio=8, method='opq', weights=weights)"
    """
    defaults = {"method": "auto", "measure": "recall"}
    shown = [
        f"{name}={value!r}" if isinstance(value, str | int | float) else f"{name}={name}"
        for name, value in arguments.items()
        if value is not None and not (isinstance(value, str) and value == defaults.get(name))
    ]
    return f"featherbed.compress({', '.join(['matrix', *shown])})"
