"""Commands on dense matrices and models: ``featherbed compress | gate``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

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
        typer.Option(help="Similarity or analogy file, for a model sentences, to evaluate by."),
    ] = None,
    rest: Annotated[
        str, typer.Option(help="Type of a model's other weights: float32, float16 or int8.")
    ] = "float32",
    folder_budget: Annotated[
        str | None, typer.Option(help="Maximum size of a model's whole folder, such as 18MB.")
    ] = None,
    array: Array = None,
    padding: Annotated[int | None, typer.Option(help="Id of the padding row.", min=0)] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Compress a matrix or a model's token table. Give one of --ratio, --budget and --quality."""
    check_packages(matrix, method, report)
    options: dict[str, Any] = {"ratio": ratio, "budget": budget, "quality": quality}
    options |= {"method": method, "weights": weights, "generator": seed}
    if not matrix.is_dir() and (rest != "float32" or folder_budget is not None):
        raise ArgumentError(
            f"{matrix} is a matrix: --rest and --folder-budget apply to models only"
        )
    if not matrix.is_dir():
        details = {"padding_idx": padding, "words": words or []}
        compress_file(matrix, out, options | details, array, report, quiet)
    elif report is None and array is None and padding is None and is_static_encoder(matrix):
        compress_static(matrix, out, options, quiet)
    elif report is None and array is None and padding is None:
        options |= {"rest": rest, "folder_budget": folder_budget}
        compress_model_folder(matrix, out, options, words or [], quiet)
    else:
        raise ArgumentError(
            f"{matrix} is the folder of a model: --report, --array and --padding "
            "apply to matrices only"
        )


def compress_file(
    matrix: Path,
    out: Path,
    options: dict[str, Any],
    array: str | None,
    report: Path | None,
    quiet: bool,
) -> None:
    """Compress a matrix; on any error, no partial file is left."""
    from featherbed.codecs.compress import compress as compress_matrix
    from featherbed.codecs.target import Target
    from featherbed.io.vectors import read_matrix
    from featherbed.progress import show_share

    check_outputs(matrix, out, report)
    Target.of(options["budget"], options["ratio"], options["quality"], 4)  # before reading
    options |= {"weights": read_frequencies(options["weights"])}
    with show_share("reading", shown=not quiet) as tell, interrupting_at_once():
        source = read_matrix(matrix, array=array)
        options |= {"keys": source.keys, "name": source.name, "command": command_line()}
        table = compress_matrix(source.matrix, **options, tell=tell)
        tell("done", 1.0)
    table.save(out)
    if report is not None:
        table.report.save(report)
    typer.echo(f"{table.report}\nwritten     {out}")


def compress_model_folder(
    folder: Path, out: Path, options: dict[str, Any], words: list[Path], quiet: bool
) -> None:
    """Compress a saved model into a new folder; print its bytes and what was lost."""
    from featherbed.interop.folder import compress_folder, describe_sizes
    from featherbed.interop.loss import measure_loss
    from featherbed.io import read_lines
    from featherbed.progress import show_share

    sentences = [line.strip() for file in words for line in read_lines(file) if line.strip()]
    options |= {"weights": read_frequencies(options["weights"])}
    with show_share("reading", shown=not quiet) as tell:
        (result,) = compress_folder(folder, out, **options, tell=tell)
        tell("measuring what was lost", 1.0)
        loss = measure_loss(folder, out, sentences)
    typer.echo(f"{result.table.report}\n{result}\n{describe_sizes(folder, out, result)}")
    typer.echo(f"lost        {loss}\nwritten     {out}")


def is_static_encoder(folder: Path) -> bool:
    """Whether a folder holds a static encoder."""
    from featherbed.interop.encoder import is_static

    return is_static(folder)


def compress_static(folder: Path, out: Path, options: dict[str, Any], quiet: bool) -> None:
    """Compress a static encoder, such as a model2vec folder, into a new folder."""
    from featherbed.interop.encoder import compress_encoder
    from featherbed.progress import show_share

    options |= {"weights": read_frequencies(options["weights"])}
    with show_share("reading", shown=not quiet) as tell:
        table = compress_encoder(folder, out, **options, tell=tell)
    total = sum(path.stat().st_size for path in out.iterdir())
    typer.echo(f"{table.report}\nwritten     {out}, {total:,} bytes with its tokenizer")


def read_frequencies(path: Path | None) -> Any:
    """Return the row frequencies of a file, or None."""
    from featherbed.io.vectors import read_weights

    return None if path is None else read_weights(path)


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
    from featherbed.codecs.gate import check_quality
    from featherbed.io.vectors import read_matrix
    from featherbed.packed.file import load

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


def check_packages(matrix: Path, method: str, report: Path | None) -> None:
    """Raise ``MissingExtra`` if a package needed by the command is not installed."""
    from featherbed.extras import COMPRESSING, require

    if matrix.is_dir():
        packages = ("transformers", "torch", "faiss", "numba", "scipy")
        require("compressing a model's folder", {"hf": packages})
        return
    trained = "kd" in method.partition(":")[0].split("+")
    page = report is not None and report.suffix in (".html", ".htm")
    optional = {"train": ["torch"] if trained else [], "view": ["plotly"] if page else []}
    require("featherbed compress", COMPRESSING, optional)


def check_outputs(matrix: Path, out: Path, report: Path | None) -> None:
    """Refuse output paths that cannot be written, or that would overwrite the input."""
    for path in (out, report):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ArgumentError(f"{path} cannot be written: name a file in an existing folder")
    if out.exists() and out.samefile(matrix):
        raise ArgumentError(f"{out} is the input matrix: write the table to another file")


@contextmanager
def interrupting_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process immediately, even while a library does not return to Python.

    Nothing is written within the block, so no partial file is left.
    """
    import signal

    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
