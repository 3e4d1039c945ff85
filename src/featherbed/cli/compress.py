"""Commands on dense matrices and models: ``featherbed compress | gate``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from featherbed.checks import require
from featherbed.cli.options import Json, Quiet, Seed, command_line
from featherbed.cli.tables import File, dump_json
from featherbed.errors import ArgumentError

Array = Annotated[
    str | None, typer.Option(help="Name of the array, if the file contains more than one.")
]


def compress(
    matrix: Annotated[
        Path,
        typer.Argument(
            help="A matrix (.npy, .npz, .safetensors, torch checkpoint, word2vec, GloVe, .parquet) "
            "or the folder of a transformers model.",
            metavar="IN",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Packed table (.safetensors) or folder to write.")],
    ratio: Annotated[float | None, typer.Option(help="Compression ratio against float32.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Maximum size of the file without keys, such as 600KB.")
    ] = None,
    quality: Annotated[
        str | None, typer.Option(help='Quality to reach: "recall:0.9" or "error:0.1".')
    ] = None,
    method: Annotated[
        str, typer.Option(help="auto, or a method such as int4, opq or rq:codes=8.")
    ] = "auto",
    weights: Annotated[
        Path | None, typer.Option(help="Row frequencies: .npy, one number per line, or 'zipf'.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Report to write: .html, .json or .txt.")
    ] = None,
    words: Annotated[
        list[Path] | None,
        typer.Option(help="Similarity or analogy file to evaluate before and after."),
    ] = None,
    array: Array = None,
    padding: Annotated[int | None, typer.Option(help="Id of the padding row.", min=0)] = None,
    effort: Annotated[
        str, typer.Option(help="quick, normal, or best: how many candidates and rounds.")
    ] = "normal",
    minutes: Annotated[
        float | None, typer.Option(help="Upper limit of the time, about.", min=0)
    ] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Compress a matrix or a model's token table. Give one of --ratio, --budget and --quality."""
    options: dict[str, Any] = {"ratio": ratio, "budget": budget, "quality": quality}
    options |= {"method": method, "generator": seed, "effort": effort, "minutes": minutes}
    if not matrix.is_dir():
        from featherbed.apps import compress_file

        options |= {"padding_idx": padding, "words": words or [], "command": command_line()}
        options |= {"array": array, "weights": weights, "report": report}
        with interrupting_at_once():
            table = compress_file(matrix, out, progress=not quiet, **options)
        typer.echo(f"{table.report}\nwritten     {out}")
        return
    if report is not None or words or array is not None or padding is not None:
        raise ArgumentError(
            f"{matrix} is the folder of a model: --report, --words, --array and --padding "
            "apply to matrices only"
        )
    packages = ("transformers", "torch", "faiss", "numba", "scipy")
    require("compressing a model's folder", {"hf": packages})
    from featherbed.interop import compress_folder
    from featherbed.io.vectors import read_weights
    from featherbed.progress import show_share

    frequencies = None if weights is None else read_weights(weights)
    with show_share("reading", shown=not quiet) as tell:
        (result,) = compress_folder(matrix, out, weights=frequencies, **options, tell=tell)
    typer.echo(f"{result.table.report}\n{result}\nwritten     {out}")


def gate(
    file: File,
    against: Annotated[Path, typer.Option(help="Matrix the table was compressed from.")],
    recall: Annotated[
        float | None, typer.Option(help="Minimum neighbor recall@10.", min=0, max=1)
    ] = None,
    error: Annotated[float | None, typer.Option(help="Maximum relative error.", min=0)] = None,
    array: Array = None,
    json: Json = False,
) -> None:
    """Check a table's quality against its original matrix; exit code 1 if it is too low."""
    from featherbed.codecs import check_quality
    from featherbed.io.vectors import read_matrix
    from featherbed.packed import load

    if recall is None and error is None:
        raise ArgumentError("a gate needs a limit: give --recall 0.9, --error 0.1, or both")
    original = read_matrix(against, array=array).matrix
    found, failures = check_quality(load(file), original, recall, error)
    text = f"recall {found['recall']:.4f}, error {found['error']:.4f}"
    typer.echo(dump_json(found | {"failures": failures}) if json else text)
    for failure in failures:
        typer.echo(f"quality too low: {failure}", err=True)
    if failures:
        raise typer.Exit(1)


@contextmanager
def interrupting_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process immediately, even while a library does not return to Python.

    Files are written atomically, so no partial file is left.
    """
    import signal

    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
