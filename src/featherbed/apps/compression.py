"""From a matrix in a file to a packed table in a file: read → compress → store → report."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from featherbed import compress
from featherbed.checks import COMPRESSING, require
from featherbed.codecs import Target
from featherbed.errors import ArgumentError
from featherbed.io import read_matrix, read_weights
from featherbed.packed import PackedTable
from featherbed.progress import show_share
from featherbed.report import report_kind


def compress_file(
    source: str | Path,
    out: str | Path,
    *,
    array: str | None = None,
    weights: str | Path | None = None,
    report: str | Path | None = None,
    progress: bool = True,
    working: AbstractContextManager[None] | None = None,
    **options: Any,
) -> PackedTable:
    """Compress a matrix stored in a file; if there is an error, no partial file is left.

    Args:
        source: ``.npy``, ``.npz``, ``.safetensors``, torch, word2vec, GloVe, ``.parquet``.
        out: the packed table to write.
        array: name of the array, if the file contains more than one.
        weights: file of row frequencies (``.npy`` or one number per line), or "zipf".
        report: ``.html``, ``.json`` or ``.txt`` file to write.
        progress: show progress on standard error.
        working: a context for reading and compressing, but not for writing.
        options: keywords of ``fb.compress``: ``ratio``, ``budget`` or ``quality``, ``method``, ...

    >>> import numpy as np
    >>> folder = getfixture("tmp_path")
    >>> np.save(folder / "rows.npy", np.random.default_rng(0).normal(size=(2000, 8)))
    >>> files = folder / "rows.npy", folder / "rows.safetensors"
    >>> compress_file(*files, ratio=2, method="int8", progress=False).rows
    2000
    """
    source, out = Path(source), Path(out)
    method = str(options.get("method", "auto"))
    trained = "kd" in method.partition(":")[0].split("+")
    page = report is not None and report_kind(report) == "html"
    optional = {"train": ["torch"] if trained else [], "view": ["plotly"] if page else []}
    require("featherbed compress", COMPRESSING, optional)
    for path in (out, *([] if report is None else [Path(report)])):
        if path.is_dir() or not path.parent.is_dir():
            raise ArgumentError(f"{path} cannot be written: name a file in an existing folder")
    if out.exists() and out.samefile(source):
        raise ArgumentError(f"{out} is the input matrix: write the table to another file")
    if report is not None and Path(report).resolve() in (out.resolve(), source.resolve()):
        raise ArgumentError(f"{report} is the matrix or the table: write the report elsewhere")
    given: Any = [options.get(name) for name in ("budget", "ratio", "quality")]
    Target.of(given[0], given[1], given[2], 4)  # a wrong target is refused before reading
    frequencies = None if weights is None else read_weights(Path(weights))
    with working or nullcontext(), show_share("reading", shown=progress) as tell:
        found = read_matrix(source, array=array)
        options = {"keys": found.keys, "name": found.name, **options}
        table = compress(found.matrix, weights=frequencies, tell=tell, **options)
        tell("done", 1.0)
    table.save(out)
    if report is not None:
        table.report.save(report)
    return table
