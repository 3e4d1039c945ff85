"""``featherbed compress DIR``: the folder of a model in, a folder with a compact token table out."""

from __future__ import annotations

import sys
from pathlib import Path

from featherbed.compression.command import read_weights, told_bar
from featherbed.errors import MissingExtra


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
    try:
        from featherbed.models.folder import compress_folder
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "hf", "compressing a model's folder") from None
    counted = None if weights is None else read_weights(weights)
    with told_bar(quiet) as tell:
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
