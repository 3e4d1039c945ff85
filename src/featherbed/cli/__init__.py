"""The command line: one module per group of commands, without policy of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import featherbed.cli.compress as compression
import featherbed.cli.export as portable
import featherbed.cli.models as models
import featherbed.cli.serve as server
import featherbed.cli.tables as tables
from featherbed.cli.options import Json, show_settings
from featherbed.errors import FeatherbedError, TrainingError
from featherbed.version import __version__

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


train = typer.Typer(
    name="train",
    help="Train compact tables on your data.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.command()(models.demo)
app.add_typer(train, name="train")
train.command(name="ratings")(models.train_ratings)
train.command(name="sequences")(models.train_sequence_model)
train.command(name="ranking")(models.train_ranking)
train.command(name="text")(models.train_text)
train.command(name="lm")(models.train_lm)
app.command()(models.recommend)
app.command()(models.update)
app.command()(models.classify)
app.command(name="continue")(models.continue_text)
_SIGNED = {"ignore_unknown_options": True}  # -1 is an id, not an option
app.command()(tables.inspect)
app.command(context_settings=_SIGNED)(tables.lookup)
app.command(context_settings=_SIGNED)(tables.search)
app.command()(tables.check)
app.command(cls=compression.CompressCommand)(compression.compress)
app.command()(portable.export)
app.command()(portable.distill)
app.command()(portable.encode)
app.command()(compression.gate)
app.command()(server.serve)
app.command()(server.view)


@app.command()
def settings(
    command: Annotated[
        list[str], typer.Argument(help="A training command, such as train text.", metavar="COMMAND")
    ],
    json: Json = False,
) -> None:
    """List all settings of a training command with their defaults."""
    typer.echo(show_settings(" ".join(command), as_json=json))


def main() -> None:
    """Run the command line.

    Bad input ends with one line and exit code 2, failed training with 1, Ctrl-C with 130.
    """
    command, *words = sys.argv[1:] or [""]
    plain = command == "lookup" and len(words) > 1 and not any(w.startswith("-") for w in words)
    try:
        if plain:  # without options there is nothing to parse, which would take half of the time
            tables.lookup(Path(words[0]), words[1:])
        else:
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
