"""``fb.compress``: from a matrix to a packed table with a report."""

from __future__ import annotations

import math
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
from featherbed.codecs.trial import Trial, effort_of, prepare_job
from featherbed.errors import ArgumentError, DataError
from featherbed.packed.engine import generic_loops
from featherbed.packed.keys import Keys, keys_for
from featherbed.packed.table import PackedTable

REFINING = 0.6  # of the time that may be used: coding and measuring all rows come after it


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
    effort: str = "normal",
    minutes: float | None = None,
    words: Iterable[str | Path] = (),
    name: str = "matrix",
    command: str | None = None,
    tell: ProgressCallback = no_progress,
) -> PackedTable:
    """Compress a matrix to a size in bytes, by a ratio, or to a quality.

    The size of the file without its keys never exceeds the budget. ``method="auto"`` predicts the
    error of many candidates, fits the most promising ones quickly, and refines the best of them by
    alternating between new codes and least-squares dictionaries. The ``report`` of the result
    holds its quality and all the candidates. Methods are compared by the error of rows relative to
    their norm, which decides the neighbor recall@10, or by Σ ||x - y||² / Σ ||x||² if ``measure``
    or ``quality`` says so; with ``weights`` both are weighted means, and frequent rows are stored
    more precisely.

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
        effort: "quick" (the most promising candidates, few rounds), "normal", or "best" (more
            candidates, several of them refined, more rounds).
        minutes: upper limit of the time: comparisons and rounds end early where it comes near.
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
    key_index = None if keys is None else keys_for(rows.count, keys)
    files = [Path(path) for path in words]
    seconds = math.inf if minutes is None else REFINING * 60 * _positive(minutes)
    _check_details(rows, key_index, padding_idx, files)
    codec = None if method == "auto" else codec_of(method)
    job = prepare_job(rows, target.measure, generator, padding_idx, tell)
    trial = Trial(job, target.measure, effort_of(effort), seconds, started)
    if command is None:
        arguments: dict[str, Any] = {"budget": budget, "ratio": ratio, "quality": quality}
        arguments |= {"method": method, "measure": measure, "weights": weights, "keys": keys}
        arguments |= {"generator": generator, "padding_idx": padding_idx}
        command = _call(arguments | {"effort": effort, "minutes": minutes})
    with generic_loops():  # codes of a candidate are read a few times
        choice = find_best(trial, codec, target)
        table = trial.table(choice, padding_idx, key_index)
        report = CompressionReport.of(table, trial, choice, target, name, command, files)
    report.data["seconds"] = time.perf_counter() - started
    table.report = report
    return table


def _check_details(
    rows: WeightedRows, keys: Keys | None, padding_idx: int | None, files: list[Path]
) -> None:
    """Check keys, the padding id and word files against the matrix."""
    if padding_idx is not None and not 0 <= padding_idx < rows.count:
        raise ArgumentError(f"padding_idx={padding_idx}: rows go from 0 to {rows.count - 1}")
    if files and keys is None:
        raise ArgumentError("word files can be evaluated only if rows have keys: give keys as well")
    for path in files:
        if not path.is_file():
            raise DataError(f"{path}: there is no such file of words")


def _positive(minutes: float) -> float:
    number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
    if not number or not minutes > 0:
        raise ArgumentError(f"minutes={minutes!r}: give a number above 0")
    return minutes


def _call(arguments: dict[str, Any]) -> str:
    """Return the Python call of a compression; arrays are written as the name of their argument.

    >>> _call({"ratio": 8, "method": "opq", "measure": "recall", "weights": np.ones(3)})
    "featherbed.compress(matrix, ratio=8, method='opq', weights=weights)"
    """
    defaults = {"method": "auto", "measure": "recall", "effort": "normal"}
    shown = [
        f"{name}={value!r}" if isinstance(value, str | int | float) else f"{name}={name}"
        for name, value in arguments.items()
        if value is not None and not (isinstance(value, str) and value == defaults.get(name))
    ]
    return f"featherbed.compress({', '.join(['matrix', *shown])})"
