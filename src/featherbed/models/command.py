"""``featherbed compress DIR``: the folder of a model in, a folder with a compact token table out."""

from __future__ import annotations

import sys
from pathlib import Path

from featherbed.extras import require
from featherbed.io.vectors import read_weights
from featherbed.progress import show_share


def run_folder(
    folder: Path,
    out: Path,
    ratio: float | None,
    budget: str | None,
    quality: str | None,
    method: str,
    weights: Path | None,
    seed: int,
    quiet: bool,
) -> None:
    """Compress a folder; whatever goes wrong, no half-written folder is left."""
    modules = ("transformers", "torch", "faiss", "numba", "scipy")
    require("compressing a model's folder", {"hf": modules})
    from featherbed.models.folder import compress_folder

    counted = None if weights is None else read_weights(weights)
    with show_share("reading", shown=not quiet) as tell:
        (done,) = compress_folder(
            folder,
            out,
            ratio=ratio,
            budget=budget,
            quality=quality,
            method=method,
            weights=counted,
            generator=seed,
            tell=tell,
        )
    sys.stdout.write(f"{done.table.report}\n{done}\nwritten     {out}\n")
