"""Commands that take models to other systems: ``featherbed export | distill | encode``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from featherbed.checks import require
from featherbed.cli.models import read_texts
from featherbed.cli.options import Quiet, Seed
from featherbed.errors import ArgumentError

Ratio = Annotated[float | None, typer.Option(help="Compression ratio of the table.")]
Budget = Annotated[str | None, typer.Option(help="Maximum size of the table, such as 6MB.")]
Method = Annotated[str, typer.Option(help="auto, or a method such as int4 or layered.")]


def export(
    source: Annotated[
        Path,
        typer.Argument(
            help="A packed table (.safetensors), or the folder of a model.", metavar="FILE|DIR"
        ),
    ],
    out: Annotated[Path, typer.Option(help="ONNX file to write; for a model, a folder.")],
    to: Annotated[str, typer.Option("--to", help="Format: onnx.")] = "onnx",
    rank: Annotated[int, typer.Option(help="Number of dimensions of ids.", min=0, max=8)] = 1,
    blocks: Annotated[
        bool,
        typer.Option("--blocks", help="Use GatherBlockQuantized of onnxruntime (4 and 8 bits)."),
    ] = False,
    rest: Annotated[
        str, typer.Option(help="A model's other weights: float32, float16, int8 or dynamic.")
    ] = "int8",
    ratio: Ratio = None,
    budget: Budget = None,
    method: Method = "auto",
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Write a packed table, or a model with its table, as an ONNX model."""
    from featherbed.interop import to_onnx
    from featherbed.progress import show_share

    if to != "onnx":
        raise ArgumentError(f"--to {to}: the format is onnx")
    if not source.is_dir():
        to_onnx(source, out, rank=rank, blocks=blocks)
        sizes = f"{out.stat().st_size:,} bytes, the packed file has {source.stat().st_size:,}"
        typer.echo(f"{out}: {sizes}")
        return
    require_models("exporting a model", "onnx", "onnxruntime", "onnxscript")
    from featherbed.interop import model_to_onnx

    options: dict[str, Any] = {"ratio": ratio, "budget": budget, "method": method}
    with show_share("reading", shown=not quiet) as tell:
        path = model_to_onnx(source, out, **options, rest=rest, generator=seed, tell=tell)
    typer.echo(f"{path}: {path.stat().st_size:,} bytes; {out / 'example.py'} uses it")


def distill(
    model: Annotated[
        Path, typer.Argument(help="The folder of a sentence encoder.", metavar="MODEL_DIR")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    dim: Annotated[int, typer.Option(help="Width of the vectors.", min=1)] = 256,
    ratio: Ratio = None,
    budget: Budget = None,
    method: Annotated[
        str, typer.Option(help="blocks, auto, or a method such as int4 or layered.")
    ] = "blocks",
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Make a static encoder of a sentence encoder: one row per token, stored compactly."""
    require_models("distilling a model", "tokenizers")
    from featherbed.interop import distill_model
    from featherbed.progress import show_share

    options: dict[str, Any] = {"dim": dim, "ratio": ratio, "budget": budget, "method": method}
    with show_share("reading", shown=not quiet) as tell:
        table = distill_model(model, out, **options, generator=seed, tell=tell)
    total = sum(path.stat().st_size for path in out.iterdir())
    typer.echo(f"{table!r}\nwritten     {out}, {total:,} bytes with its tokenizer")


def encode(
    folder: Annotated[
        Path, typer.Argument(help="A static encoder, written by distill, compress or model2vec.")
    ],
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts; by default the lines of standard input.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Array to write (.npy) instead of printing numbers.")
    ] = None,
) -> None:
    """Print or write the vectors of texts; numpy and tokenizers are enough."""
    import numpy as np

    from featherbed.interop import Encoder

    vectors = Encoder(folder).encode(texts or [*read_texts(Path("-"))])
    if out is None:
        for row in vectors:
            typer.echo("\t".join(f"{number:.6g}" for number in row))
        return
    with out.open("wb") as file:
        np.save(file, vectors)
    typer.echo(f"{out}: {vectors.shape[0]:,} x {vectors.shape[1]}")


def require_models(purpose: str, *packages: str) -> None:
    """Raise ``MissingExtra`` if a package needed for models is not installed."""
    others = {"onnx": [name for name in packages if name.startswith("onnx")]}
    others |= {"text": [name for name in packages if name == "tokenizers"]}
    require(purpose, {"hf": ("transformers", "torch", "faiss", "numba", "scipy")}, others)
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # "Loading weights"
