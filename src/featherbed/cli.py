"""The command line: ``featherbed demo | train | recommend | classify | continue | compress | gate | inspect ...``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from featherbed import cli_train
from featherbed.errors import ArgumentError, FeatherbedError, TrainingError
from featherbed.extras import require
from featherbed.version import __version__

if TYPE_CHECKING:
    from featherbed.packed.table import PackedTable

app = typer.Typer(
    name="featherbed",
    help="Compact embedding tables: train, compress, store in one small file, serve without torch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help and errors: rich would cost a look-up a fifth of its time
)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"featherbed {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compact embedding tables: train, compress, store in one small file, serve without torch."""


@app.command()
def demo(
    seed: Annotated[
        int, typer.Option(help="Seed of the generated ratings and of training.", min=0)
    ] = 0,
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep the packed files here (a new temporary folder otherwise)."),
    ] = None,
) -> None:
    """Train four tables on generated ratings, store each in a file, and compare error, sizes and speed (about a minute)."""
    require("featherbed demo", {"train": ["torch", "numba", "scipy"]})
    from featherbed.tasks.demo import run

    run(seed, folder)


app.add_typer(cli_train.app, name="train")


@app.command()
def recommend(
    folder: Annotated[
        Path, typer.Argument(help="What `featherbed train ratings` wrote.", metavar="DIR")
    ],
    user: Annotated[str, typer.Option(help="The user's key.")],
    k: Annotated[int, typer.Option("-k", help="How many items.")] = 10,
    every: Annotated[
        bool, typer.Option("--all", help="Also items the user rated in training.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Print the best items for a user that the user has not rated yet, with their scores. torch is not needed."""
    from featherbed.serve.command import run

    run(folder, user, k, json, every)


@app.command()
def classify(
    folder: Annotated[
        Path, typer.Argument(help="What `featherbed train text` wrote.", metavar="DIR")
    ],
    text: Annotated[
        str | None, typer.Argument(help="The text, between quotes.", metavar="TEXT")
    ] = None,
    k: Annotated[int | None, typer.Option("-k", help="How many classes.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="A text on every line; - reads the input.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Print the classes of a text with their probabilities. torch is not needed."""
    from featherbed.serve.text_command import run_classify

    run_classify(folder, text, k, json, file)


@app.command(name="continue")
def go_on(
    folder: Annotated[
        Path, typer.Argument(help="What `featherbed train lm` wrote.", metavar="DIR")
    ],
    text: Annotated[str, typer.Argument(help="The beginning, between quotes.", metavar="TEXT")],
    words: Annotated[int, typer.Option(help="How many words more.", min=0)] = 30,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest word, 1 draws as the model says.", min=0)
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Seed of the draws.", min=0)] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Print a text and how a language model goes on with it. torch is not needed."""
    from featherbed.serve.text_command import run_continue

    run_continue(folder, text, words, seed, temperature, json)


File = Annotated[Path, typer.Argument(help="A packed table (.safetensors).", metavar="FILE")]
Wanted = Annotated[list[str], typer.Argument(help="Ids or keys.", metavar="IDS|KEYS")]
_NUMBERS = {"ignore_unknown_options": True}  # so that -1 is an id, if not one of this table
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command()
def inspect(
    file: File,
    anchors: Annotated[
        bool, typer.Option("--anchors", help="Show what the anchors have learnt, too.")
    ] = False,
    counts: Annotated[
        Path | None,
        typer.Option(help="With --anchors: how often objects occur, .npy or a number a line."),
    ] = None,
    groups: Annotated[
        Path | None,
        typer.Option(help="With --anchors: a line for each object, its groups between bars."),
    ] = None,
    loss: Annotated[
        float | None, typer.Option(help="With --anchors: a loss, for the objective of NBANT.")
    ] = None,
    lambda1: Annotated[float | None, typer.Option(help="The price of an anchor.")] = None,
    lambda2: Annotated[float | None, typer.Option(help="The price of a weight.")] = None,
    json: Json = False,
) -> None:
    """Tell what a packed file is: rows, how they are coded, bytes by part, codes per row."""
    from featherbed.packed.report import as_text, report

    found = report(file)
    text = as_text(found)
    if anchors:
        from featherbed.view.anchors import inspect_anchors

        found["inside"], more = inspect_anchors(file, counts, groups, loss, lambda1, lambda2)
        text += f"\n{more}"
    elif any(value is not None for value in (counts, groups, loss, lambda1, lambda2)):
        raise ArgumentError("--counts, --groups, --loss, --lambda1 and --lambda2 go with --anchors")
    typer.echo(_dump(found) if json else text)


@app.command(context_settings=_NUMBERS)
def lookup(
    file: File,
    wanted: Wanted,
    json: Json = False,
    digits: Annotated[int, typer.Option(min=1, max=9)] = 4,
) -> None:
    """Print rows by id or key. A key that is a number is asked for as key:7."""
    from featherbed.packed.file import load

    packed = load(file)
    rows = packed[[_id_of(packed, word) for word in wanted]]
    if json:
        typer.echo(_dump({word: row.tolist() for word, row in zip(wanted, rows, strict=True)}))
        return
    for word, row in zip(wanted, rows, strict=True):
        typer.echo(f"{word}\t{' '.join(f'{x:.{digits}g}' for x in row.tolist())}")


@app.command(context_settings=_NUMBERS)
def search(
    file: File,
    wanted: Annotated[
        str, typer.Argument(help="The id or key whose neighbours are wanted.", metavar="ID|KEY")
    ],
    k: Annotated[int, typer.Option("-k", help="How many rows.", min=1)] = 10,
    metric: Annotated[str, typer.Option(help="cosine or dot.")] = "cosine",
    json: Json = False,
) -> None:
    """Print the rows nearest to a row, best first."""
    from featherbed.packed.file import load

    packed = load(file)
    own = _id_of(packed, wanted)
    ids, scores = packed.search(packed[own], k + 1, metric=metric)
    best = [(int(i), float(score)) for i, score in zip(ids, scores, strict=True) if i != own][:k]
    named = [(i, packed.keys[i] if packed.keys else None, score) for i, score in best]
    if json:
        typer.echo(_dump([{"id": i, "key": key, "score": score} for i, key, score in named]))
        return
    for i, key, score in named:
        typer.echo(f"{score:.4f}\t{i}" + ("" if key is None else f"\t{key}"))


@app.command()
def check(file: File) -> None:
    """Read every byte of a packed file and say whether it is sound."""
    from featherbed.packed.file import check as check_file

    typer.echo(f"{file}: sound. {check_file(file)!r}")


Matrix = Annotated[
    Path,
    typer.Argument(
        help="A matrix: .npy, .npz, .safetensors, a torch checkpoint, word2vec or GloVe, .parquet.",
        metavar="IN",
    ),
]
Array = Annotated[str | None, typer.Option(help="Which array of the file, where it has several.")]


@app.command()
def compress(
    matrix: Matrix,
    out: Annotated[
        Path,
        typer.Option(help="The packed table to write (.safetensors), or the folder of the model."),
    ],
    ratio: Annotated[
        float | None, typer.Option(help="How many times smaller than float32.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Bytes of the file without keys, such as 600KB.")
    ] = None,
    quality: Annotated[
        str | None, typer.Option(help='Just good enough: "recall:0.9" or "error:0.1".')
    ] = None,
    method: Annotated[
        str, typer.Option(help="auto, or a method by name, such as int4, opq or rq:codes=8.")
    ] = "auto",
    weights: Annotated[
        Path | None, typer.Option(help="How often rows are used: .npy, a number a line, or 'zipf'.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write what was lost: .html, .json or .txt.")
    ] = None,
    words: Annotated[
        list[Path] | None,
        typer.Option(help="A similarity or analogy file to score before and after."),
    ] = None,
    array: Array = None,
    padding: Annotated[
        int | None, typer.Option(help="The row of zeros that stays zero.", min=0)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of samples and starts.", min=0)] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Make a matrix, or a model's token table, smaller and say what is lost. Give one of --ratio, --budget and --quality."""
    if matrix.is_dir():
        from featherbed.models.command import run_folder

        if report is not None or words or array is not None or padding is not None:
            raise ArgumentError(
                f"{matrix} is a folder of a model: --report, --words, --array and --padding are for matrices"
            )
        run_folder(matrix, out, ratio, budget, quality, method, weights, seed, quiet)
        return
    from featherbed.compression.command import run

    run(
        matrix,
        out,
        ratio,
        budget,
        quality,
        method,
        weights,
        report,
        words or [],
        array,
        padding,
        seed,
        quiet,
    )


@app.command()
def export(
    file: File,
    out: Annotated[Path, typer.Option(help="The ONNX model to write.")],
    rank: Annotated[int, typer.Option(help="How many dimensions ids have.", min=0, max=8)] = 1,
    blocks: Annotated[
        bool,
        typer.Option("--blocks", help="Use onnxruntime's GatherBlockQuantized for 4 and 8 bits."),
    ] = False,
) -> None:
    """Write a packed table as an ONNX model: ids in, rows out."""
    from featherbed.exports.onnx import to_onnx

    to_onnx(file, out, rank=rank, blocks=blocks)
    typer.echo(f"{out}: {out.stat().st_size:,} bytes, the packed file has {file.stat().st_size:,}")


@app.command()
def gate(
    file: File,
    against: Annotated[Path, typer.Option(help="The matrix the table was made from.")],
    recall: Annotated[
        float | None, typer.Option(help="The least neighbour recall@10 allowed.", min=0, max=1)
    ] = None,
    error: Annotated[
        float | None, typer.Option(help="The greatest relative error allowed.", min=0)
    ] = None,
    array: Array = None,
    json: Json = False,
) -> None:
    """Check a table's quality against the matrix it was made from: exit code 1 when it falls below the floor."""
    from featherbed.compression.gate import judge

    found, failures = judge(file, against, recall, error, array)
    typer.echo(
        _dump(found | {"failures": failures})
        if json
        else f"recall {found['recall']:.4f}, error {found['error']:.4f}"
    )
    for failure in failures:
        typer.echo(f"too low: {failure}", err=True)
    if failures:
        raise typer.Exit(1)


def _id_of(packed: PackedTable, word: str) -> int:
    """Read a word of the command line as id, or as key: a number is an id unless written key:7."""
    key = word.removeprefix("key:")
    digits = word.removeprefix("-")
    if key == word and digits.isascii() and digits.isdecimal():
        return int(word)
    return int(packed.ids_of(key))


def _dump(value: object) -> str:
    from json import dumps

    return dumps(value, ensure_ascii=False, indent=1)


def main() -> None:
    """Run the command line.

    Bad input ends with one line and exit code 2, failed training with 1, Ctrl-C with 130.
    """
    try:
        app(standalone_mode=True)
    except TrainingError as error:
        _fail(str(error), 1)
    except FeatherbedError as error:
        _fail(str(error))
    except OSError as error:
        _fail(str(error) if error.filename is None else f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)


def _fail(message: str, code: int = 2) -> None:
    typer.echo(f"error: {message}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
