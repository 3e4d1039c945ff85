"""Looking inside and serving: ``featherbed view | serve``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from featherbed.checks import SERVING, require
from featherbed.errors import ArgumentError


def serve(
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Packed tables and model folders; NAME=PATH gives a name.", metavar="PATH..."
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    workers: Annotated[int, typer.Option(help="Number of processes.", min=1, max=256)] = 1,
    watch: Annotated[
        bool, typer.Option("--watch", help="Reload files that are replaced while serving.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with a bearer token that requests must send [FEATHERBED_TOKEN]."),
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help="Origin of web pages that may read responses.")
    ] = None,
    max_body: Annotated[int, typer.Option(help="Maximum bytes of a request.", min=1_000)] = 8 << 20,
    max_batch: Annotated[
        int, typer.Option(help="Maximum number of ids, keys or texts in a request.", min=1)
    ] = 65_536,
    max_k: Annotated[int, typer.Option(help="Maximum number of results.", min=1)] = 1_000,
    timeout: Annotated[
        float, typer.Option(help="Seconds within which a request must arrive.", min=0.1)
    ] = 30.0,
) -> None:
    """Serve packed tables, recommenders, classifiers and language models over HTTP."""
    require("serving", SERVING)
    from featherbed.server.process import ServerSettings, run_server

    token = os.environ.get("FEATHERBED_TOKEN") or None
    if token_file is not None:
        token = token_file.read_text(encoding="latin-1").strip()
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise ArgumentError(
            f"{token_file or 'FEATHERBED_TOKEN'} holds no token: write one line of letters, "
            "digits and signs of ASCII, without spaces"
        )
    run_server(
        ServerSettings(
            tuple(paths),
            host,
            port,
            workers,
            watch,
            token,
            tuple(cors or ()),
            max_body,
            max_batch,
            max_k,
            timeout,
        )
    )


def view(
    file: Annotated[Path, typer.Argument(help="A packed table (.safetensors).", metavar="FILE")],
    out: Annotated[Path, typer.Option(help="HTML page to write.")],
    original: Annotated[
        Path | None, typer.Option(help="The matrix before compression, to compare neighbors.")
    ] = None,
    columns: Annotated[
        Path | None,
        typer.Option(help="A .csv, .tsv or .npz file with columns to color by, one entry per row."),
    ] = None,
) -> None:
    """Write a page to explore a packed table: one HTML file that needs no network."""
    require("viewing", {"view": ("plotly",), "serve": ("orjson",)})
    from featherbed.files import write_file
    from featherbed.packed.file import load
    from featherbed.server.explore import offline_page, read_columns

    matrix = None
    if original is not None:
        from featherbed.io.vectors import read_matrix

        found = read_matrix(original).matrix
        matrix = found[0 : len(found)]
    shown = offline_page(
        file.stem,
        load(file),
        columns=None if columns is None else read_columns(columns),
        original=matrix,
    )
    write_file(out, shown)
    typer.echo(f"{out}: {out.stat().st_size:,} bytes, open it in a browser")
