"""The command line: ``featherbed demo | inspect | lookup | search | check``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from featherbed.errors import FeatherbedError
from featherbed.version import __version__

app = typer.Typer(
    name="featherbed",
    help="Compact embedding tables: train, compress, store in one small file, serve without torch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"featherbed {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Compact embedding tables: train, compress, store in one small file, serve without torch."""


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seed of the generated ratings and of training.", min=0)] = 0,
    folder: Annotated[Path | None, typer.Option(help="Keep the packed files here (a new temporary folder otherwise).")] = None,
) -> None:
    """Train four tables on generated ratings, store each in a file, and compare error, sizes and speed (about a minute)."""
    from featherbed.tasks.demo import run

    run(seed, folder)


def main() -> None:
    """Run the command line; bad input ends with one line and exit code 2, Ctrl-C with 130."""
    try:
        app(standalone_mode=True)
    except FeatherbedError as error:
        _fail(str(error))
    except OSError as error:
        _fail(str(error) if error.filename is None else f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)


def _fail(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
