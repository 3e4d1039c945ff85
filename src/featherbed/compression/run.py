"""``fb.compress``: a matrix in, a packed table with a report out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from featherbed.codecs.auto import Trial
from featherbed.codecs.budget import best_within, make_job, smallest_reaching, table_of
from featherbed.codecs.codec import Tell, quiet
from featherbed.codecs.registry import codec_of
from featherbed.codecs.rows import Rows
from featherbed.codecs.target import Target
from featherbed.compression.given import matrix_of
from featherbed.compression.report import Report
from featherbed.errors import ArgumentError, DataError, MissingExtra
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
    tell: Tell = quiet,
) -> PackedTable:
    """Make a matrix smaller: to ``budget`` bytes, ``ratio`` times smaller than float32, or just good enough for ``quality``.

    The file, without its keys, takes no more than the bytes asked for. ``method="auto"`` compares the methods on a sample, fits
    the best in full and refines the winner by turns of new codes and least-squares dictionaries; the result's ``report``
    says what was lost, and keeps the whole curve. Methods are compared by neighbour recall@10, or by the error
    Σ ||x - y||² / Σ ||x||² where ``measure`` or ``quality`` asks for it; ``weights`` (how often each row is used) make both
    weighted means, and keep the rows used most better than the others.

    Args:
        matrix: [V, d] of floats; read in blocks, so that a memory map may be larger than the memory. Of a module such as
            nn.Embedding, its weight (and the padding row, if it is zero).
        budget: bytes of the file, such as 600_000 or "600KB".
        ratio: how many times smaller than V x d float32.
        quality: "recall:0.9" (at least) or "error:0.1" (at most), with as few bytes as do.
        method: "auto", or one by name: int8, int4, int3, int2, lowrank, pq, opq, rq, lsq, layered, kd, ksvd, hash, hash+ksvd,
            anchors, clusters; with lengths apart "rq+norms"; after hot rows "hot+layered"; with settings "rq:codes=8,bits=8".
        measure: "recall" or "error": what methods are compared by, where no quality says it.
        weights: how often each row is used, such as word counts; "zipf" where rows are sorted by use.
        keys: a name for every row.
        generator: a numpy generator or a seed; 0 by default, so that results repeat.
        padding_idx: this row is zero and stays so.
        words: similarity or analogy files to score before and after (needs keys).
        name, command: what the report calls the matrix and the way to repeat it.
        tell: is told what is being done and which share of the whole, by the time it should take, is done (0: not known yet).

    >>> matrix = np.random.default_rng(0).standard_normal((400, 16)).astype(np.float32)
    >>> small = compress(matrix, ratio=4, method="int4")
    >>> small.nbytes <= matrix.nbytes / 4, small.report.quality["recall"] > 0.7
    (True, True)
    """
    started = time.perf_counter()
    _need_faiss()
    matrix, own_padding = matrix_of(matrix)
    padding_idx = own_padding if padding_idx is None else padding_idx
    rows = Rows(matrix, weights)
    target = Target.of(budget, ratio, quality, rows.count * rows.dim * 4, measure)
    found_keys = None if keys is None else Keys.of(keys)
    if found_keys is not None and len(found_keys) != rows.count:
        raise ArgumentError(
            f"{len(found_keys)} keys were given for {rows.count} rows: give one for each"
        )
    if padding_idx is not None and not 0 <= padding_idx < rows.count:
        raise ArgumentError(f"padding_idx={padding_idx}: rows go from 0 to {rows.count - 1}")
    files = [Path(path) for path in words]
    if files and found_keys is None:
        raise ArgumentError("word files can be scored only when rows have keys: give keys as well")
    for path in files:
        if not path.is_file():
            raise DataError(f"{path}: there is no such file of words")
    chosen, settings = (None, {}) if method == "auto" else codec_of(method)
    job = make_job(rows, target, generator, padding_idx, tell)
    trial = Trial(job, target.measure, started)
    named = None if chosen is None else (chosen, settings)
    choice = (
        best_within(trial, named, target.budget)
        if target.budget is not None
        else smallest_reaching(trial, named, target)
    )
    table = table_of(trial, choice, padding_idx, found_keys)
    if command is None:
        asked: dict[str, Any] = {"budget": budget, "ratio": ratio, "quality": quality}
        asked["method"] = method
        asked |= {"measure": measure, "weights": weights, "keys": keys, "generator": generator}
        command = _call(asked | {"padding_idx": padding_idx})
    with trial.meter.step("measuring", "measuring", trial.judge.work):
        table.report = Report.of(table, trial, choice, target, name, command, files)
    table.report.data["seconds"] = time.perf_counter() - started
    return table


def _call(settings: dict[str, Any]) -> str:
    """Return the call that repeats a compression; arrays and the like are named after their arguments.

    >>> _call({"ratio": 8, "method": "opq", "measure": "recall", "weights": np.ones(3), "keys": None})
    "featherbed.compress(matrix, ratio=8, method='opq', weights=weights)"
    """
    defaults = {"method": "auto", "measure": "recall"}
    shown = [
        f"{name}={value!r}" if isinstance(value, str | int | float) else f"{name}={name}"
        for name, value in settings.items()
        if value is not None and not (isinstance(value, str) and value == defaults.get(name))
    ]
    return f"featherbed.compress({', '.join(['matrix', *shown])})"


def _need_faiss() -> None:
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # threads that wait must not take the core another one works on
    for package in ("faiss", "numba", "scipy"):
        try:
            __import__(package)
        except ModuleNotFoundError:
            raise MissingExtra(package, "compress", "compressing a matrix") from None
