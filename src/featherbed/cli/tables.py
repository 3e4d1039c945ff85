"""Commands on packed tables: ``featherbed inspect | lookup | search | check``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from featherbed.cli.options import Json
from featherbed.errors import ArgumentError

if TYPE_CHECKING:
    from featherbed.packed import PackedTable

File = Annotated[Path, typer.Argument(help="A packed table (.safetensors).", metavar="FILE")]


def inspect(
    file: File,
    anchors: Annotated[
        bool, typer.Option("--anchors", help="Also show what each anchor represents.")
    ] = False,
    counts: Annotated[
        Path | None,
        typer.Option(help="With --anchors: occurrences of each row, .npy or one number per line."),
    ] = None,
    groups: Annotated[
        Path | None,
        typer.Option(help="With --anchors: one line per row, its groups separated by |."),
    ] = None,
    loss: Annotated[
        float | None, typer.Option(help="With --anchors: a loss, to compute the NBANT objective.")
    ] = None,
    lambda1: Annotated[float | None, typer.Option(help="With --loss: cost of an anchor.")] = None,
    lambda2: Annotated[
        float | None, typer.Option(help="With --loss: cost of a nonzero weight.")
    ] = None,
    json: Json = False,
) -> None:
    """Describe a packed file: rows, codes, bytes by part, codes per row."""
    from featherbed.packed.inspect import as_text, report

    found = report(file)
    text = as_text(found)
    if anchors:
        from featherbed.io.vectors import read_weights
        from featherbed.packed import load
        from featherbed.report import inspect_anchors

        numbers = None if counts is None else read_weights(counts)
        lines = None if groups is None else groups.read_text(encoding="utf-8").splitlines()
        names = None if lines is None else [line.split("|") if line else [] for line in lines]
        found["inside"], more = inspect_anchors(load(file), numbers, names, loss, lambda1, lambda2)
        text += f"\n{more}"
    elif any(value is not None for value in (counts, groups, loss, lambda1, lambda2)):
        raise ArgumentError(
            "--counts, --groups, --loss, --lambda1 and --lambda2 require --anchors: add it"
        )
    typer.echo(dump_json(found) if json else text)


def lookup(
    file: File,
    names: Annotated[list[str], typer.Argument(help="Ids or keys.", metavar="IDS|KEYS")],
    json: Json = False,
    digits: Annotated[int, typer.Option(help="Significant digits.", min=1, max=9)] = 4,
) -> None:
    """Print rows by id or key. Write a key that is a number as key:7."""
    from featherbed.packed import load

    packed = load(file)
    rows = packed[[find_id(packed, name) for name in names]]
    if json:
        typer.echo(dump_json({name: row.tolist() for name, row in zip(names, rows, strict=True)}))
        return
    for name, row in zip(names, rows, strict=True):
        typer.echo(f"{name}\t{' '.join(f'{x:.{digits}g}' for x in row.tolist())}")


def search(
    file: File,
    name: Annotated[str, typer.Argument(help="Id or key of the query row.", metavar="ID|KEY")],
    k: Annotated[int, typer.Option("-k", help="Number of rows.", min=1)] = 10,
    metric: Annotated[str, typer.Option(help="cosine or dot.")] = "cosine",
    json: Json = False,
) -> None:
    """Print the rows nearest to a row, nearest first."""
    from featherbed.packed import load

    packed = load(file)
    query = find_id(packed, name)
    ids, scores = packed.search(packed[query], k + 1, metric=metric)
    pairs = zip(ids.tolist(), scores.tolist(), strict=True)
    best = [(i, packed.name_of(i), score) for i, score in pairs if i != query]
    if json:
        typer.echo(dump_json([{"id": i, "key": key, "score": score} for i, key, score in best[:k]]))
        return
    for i, key, score in best[:k]:
        typer.echo(f"{score:.4f}\t{i}" + ("" if key is None else f"\t{key}"))


def check(file: File) -> None:
    """Read every byte of a packed file and verify it."""
    from featherbed.packed import check as check_file

    typer.echo(f"{file}: sound. {check_file(file)!r}")


def find_id(packed: PackedTable, name: str) -> int:
    """Return the id of a row named on the command line; a number is an id unless written key:7."""
    key = name.removeprefix("key:")
    digits = name.removeprefix("-")
    if key == name and digits.isascii() and digits.isdecimal():
        return int(name)
    return int(packed.ids_of(key))


def dump_json(value: object) -> str:
    """Return a value as indented JSON."""
    from json import dumps

    return dumps(value, ensure_ascii=False, indent=1)
