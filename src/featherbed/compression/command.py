"""``featherbed compress``: read, compress with a progress bar, write the table and its report."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from featherbed.codecs.target import Target
from featherbed.compression.run import compress
from featherbed.errors import ArgumentError
from featherbed.extras import COMPRESSING, Packages, require
from featherbed.io.vectors import read_matrix, read_weights
from featherbed.progress import show_share


def run(
    matrix: Path,
    out: Path,
    ratio: float | None,
    budget: str | None,
    quality: str | None,
    method: str,
    weights: Path | None,
    report: Path | None,
    words: list[Path],
    array: str | None,
    padding: int | None,
    seed: int,
    quiet: bool,
) -> None:
    """Compress a file; whatever goes wrong, no half-written file is left."""
    require("featherbed compress", COMPRESSING, _extras(method, report))
    Target.of(budget, ratio, quality, 4)  # before anything is read
    for path in (out, report):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ArgumentError(f"{path} cannot be written: name a file in a folder that exists")
    if out.exists() and out.samefile(matrix):
        raise ArgumentError(f"{out} is the matrix itself: write the table to another file")
    counted = None if weights is None else read_weights(weights)
    with show_share("reading", shown=not quiet) as tell, ending_at_once():
        source = read_matrix(matrix, array=array)
        table = compress(
            source.matrix,
            budget=budget,
            ratio=ratio,
            quality=quality,
            method=method,
            weights=counted,
            keys=source.keys,
            generator=seed,
            padding_idx=padding,
            words=words,
            name=source.name,
            command=shlex.join(["featherbed", *sys.argv[1:]]),
            tell=tell,
        )
        tell("done", 1.0)
    table.save(out)
    if report is not None:
        table.report.save(report)
    sys.stdout.write(f"{table.report}\nwritten     {out}\n")


def _extras(method: str, report: Path | None) -> Packages:
    """Return the optional packages that a method and a report need besides."""
    pages = report is not None and report.suffix in (".html", ".htm")
    learnt = "kd" in method.partition(":")[0].split("+")
    return {"train": ["torch"] if learnt else [], "view": ["plotly"] if pages else []}


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process where it stands: libraries at work for a minute would hold Python's own handler up that long.

    Nothing is written meanwhile, so nothing half-written is left.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
