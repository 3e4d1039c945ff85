"""Commands on dense matrices and models: ``featherbed compress | gate``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from featherbed.cli.export import require_models
from featherbed.cli.options import Json, Quiet, Seed, command_line
from featherbed.cli.tables import File, dump_json
from featherbed.errors import ArgumentError, FeatherbedError

Array = Annotated[
    str | None, typer.Option(help="Name of the array, if the file contains more than one.")
]


class CompressCommand(TyperCommand):
    """Reads ``--folder-budget 18MB`` as ``--budget folder:18MB``, one option in two spellings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the arguments that remain."""
        words = [part for word in args for part in word.split("=", word.startswith("--"))]
        if {"--budget", "--folder-budget"} <= {*words}:
            raise ArgumentError("--budget and --folder-budget were given: give one of them")
        if "--folder-budget" in words[:-1]:
            at = words.index("--folder-budget")
            words[at : at + 2] = ["--budget", f"folder:{words[at + 1]}"]
        return super().parse_args(ctx, words)


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
        str | None,
        typer.Option(
            "--budget",
            "--folder-budget",
            help="Maximum size without keys, such as 600KB; --folder-budget: of all files of a "
            "model's folder.",
        ),
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
        typer.Option(
            help="Similarity or analogy file to evaluate; for a model, a file of sentences."
        ),
    ] = None,
    rest: Annotated[
        str, typer.Option(help="Type of a model's other weights: float32, float16 or int8.")
    ] = "float32",
    array: Array = None,
    padding: Annotated[int | None, typer.Option(help="Id of the padding row.", min=0)] = None,
    effort: Annotated[
        str,
        typer.Option(
            help="Number of candidates: quick, normal or best; best:2 stops after 2 minutes."
        ),
    ] = "normal",
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Compress a matrix or a model. Give one of --ratio, --budget and --quality."""
    options: dict[str, Any] = {"ratio": ratio, "budget": budget, "quality": quality}
    options |= {"method": method, "generator": seed, **read_effort(effort)}
    given = budget or ""
    whole = given.removeprefix("folder:") if given.startswith("folder:") else None
    if not matrix.is_dir() and (rest != "float32" or whole is not None):
        raise ArgumentError(
            f"{matrix} is a matrix: --rest and --folder-budget apply to models only"
        )
    if not matrix.is_dir():
        from featherbed.apps import compress_file

        options |= {"padding_idx": padding, "words": words or [], "command": command_line()}
        options |= {"array": array, "weights": weights, "report": report}
        working = interrupting_at_once()
        table = compress_file(matrix, out, progress=not quiet, working=working, **options)
        written = out if report is None else f"{out}, {report}"
        typer.echo(f"{table.report}\nwritten     {written}")
        return
    if report is not None or array is not None or padding is not None:
        raise ArgumentError(
            f"{matrix} is the folder of a model: --report, --array and --padding "
            "apply to matrices only"
        )
    require_models("compressing a model's folder")
    from featherbed.interop import (
        compress_encoder,
        compress_folder,
        describe_sizes,
        is_static,
        measure_loss,
    )
    from featherbed.io import read_lines, read_weights
    from featherbed.progress import show_share

    options |= {"weights": None if weights is None else read_weights(weights)}
    sentences = [line.strip() for file in words or [] for line in read_lines(file) if line.strip()]
    if words and not sentences:
        raise ArgumentError(f"--words {words[0]}: holds no sentence: give one per line")
    with show_share("reading", shown=not quiet) as tell:
        if is_static(matrix):
            if rest != "float32" or whole is not None:
                raise ArgumentError(
                    f"{matrix} is a static encoder, a table alone: --rest and --folder-budget "
                    "apply to other models"
                )
            table = compress_encoder(matrix, out, **options, tell=tell)
            files = sum(file.stat().st_size for file in out.iterdir())
            lines = [table.report or table, f"files       {files:,}"]
        else:
            options |= {"rest": rest, "folder_budget": whole}
            options |= {"budget": None} if whole is not None else {}
            (result,) = compress_folder(matrix, out, **options, tell=tell)
            tell("measuring the loss of quality", 1.0)
            lines = [result.table.report, result, describe_sizes(matrix, out, result)]
            try:
                lines.append(f"lost        {measure_loss(matrix, out, sentences)}")
            except FeatherbedError as error:  # the folder is complete nevertheless
                lines.append(f"lost        not measured: {error}")
    typer.echo("\n".join(map(str, [*lines, f"written     {out}"])))


def read_effort(text: str) -> dict[str, Any]:
    """Return the settings of an effort such as normal, or best:2 with its limit in minutes."""
    effort, _, minutes = text.partition(":")
    try:
        return {"effort": effort, "minutes": float(minutes) if minutes else None}
    except ValueError:
        raise ArgumentError(f"--effort {text}: give quick, normal or best, or best:2") from None


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

    Not for writing: files are written under other names, which must be removed.
    """
    import signal

    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
