"""Commands of recommenders: ``featherbed demo | train ratings | recommend``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from featherbed.checks import TRAINING, require
from featherbed.cli.options import (
    Assignments,
    Json,
    Out,
    Overwrite,
    Quiet,
    Recipe,
    Resume,
    Seed,
    command_line,
    log_line,
)

if TYPE_CHECKING:
    from featherbed.apps.recommender.serve import ScoredItem


def demo(
    seed: Seed = 0,
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep the packed files here (default: a temporary folder)."),
    ] = None,
) -> None:
    """Train four tables on generated ratings and compare error, sizes and speed (a minute)."""
    require("featherbed demo", {"train": ["torch", "numba", "scipy"]})
    from featherbed.apps.recommender.demo import run_demo

    run_demo(seed, folder)


def ratings(
    file: Annotated[
        Path,
        typer.Argument(
            help="CSV, TSV, JSON lines, Parquet or ::, compressed or not.", metavar="FILE"
        ),
    ],
    out: Out,
    budget: Annotated[
        str | None,
        typer.Option(help="Bytes of both tables without keys, such as 40KB: graded rows."),
    ] = None,
    ratio: Annotated[
        float | None, typer.Option(help="The same, as a ratio to float32 rows (default 8).")
    ] = None,
    users: Annotated[
        str | None, typer.Option(help="Table of the users, such as anchor:anchors=16 or dense.")
    ] = None,
    items: Annotated[str | None, typer.Option(help="Table of the items.")] = None,
    dim: Annotated[int | None, typer.Option(help="Width of the rows (default 16).")] = None,
    titles: Annotated[Path | None, typer.Option(help="File of item keys and titles.")] = None,
    split: Annotated[str | None, typer.Option(help="random (default), time or leave-out.")] = None,
    seed: Seed = 0,
    assignments: Assignments = None,
    recipe: Recipe = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Factorize ratings into two compact tables, by default graded rows 8 times below float32."""
    require("featherbed train ratings", TRAINING)
    from featherbed.apps.recommender.insight import summarize
    from featherbed.apps.recommender.settings import RecommenderSettings
    from featherbed.apps.recommender.train import train_recommender

    settings = RecommenderSettings.read(
        recipe,
        assignments or (),
        titles=titles,
        table__budget=budget,
        table__ratio=ratio,
        table__users=users,
        table__items=items,
        table__dim=dim,
        split__method=split,
    )
    outcome = train_recommender(
        file,
        out,
        settings,
        seed=seed,
        resume=resume,
        overwrite=overwrite,
        progress=not quiet,
        log=log_line,
        command=command_line(),
    )
    typer.echo("\n".join(summarize(outcome.metrics, out)))


def recommend(
    folder: Annotated[
        Path, typer.Argument(help="Folder written by `featherbed train ratings`.", metavar="DIR")
    ],
    user: Annotated[str, typer.Option(help="Key of the user.")],
    k: Annotated[int, typer.Option("-k", help="Number of items.")] = 10,
    all_items: Annotated[
        bool, typer.Option("--all", help="Include items the user rated in training.")
    ] = False,
    json: Json = False,
) -> None:
    """Print the best items for a user, without those already rated. torch is not needed."""
    from featherbed.apps.recommender.serve import Recommender

    recommender = Recommender.open(folder)
    found = recommender.recommend(user, k, include_rated=all_items)
    typer.echo(_to_json(found) if json else format_items(found))
    if not recommender.factors:
        log_line(
            "note: this recommender stores no factors, only biases: every user gets the same order"
        )
    if len(found) < k:
        kind = "items in all" if all_items else "items this user has not rated"
        log_line(f"note: there are only {len(found)} {kind}, {k} were asked for")


def format_items(items: list[ScoredItem]) -> str:
    """Return recommendations in columns; unprintable characters become question marks.

    >>> from featherbed.apps.recommender.serve import ScoredItem
    >>> first = ScoredItem("318", 4.71, "The Shawshank Redemption")
    >>> print(format_items([first, ScoredItem("50", 4.6, None)]))
    rank   score  key  title
       1   4.710  318  The Shawshank Redemption
       2   4.600  50
    """
    keys = [_printable(item.key) for item in items]
    width = max([3, *map(len, keys)])
    titled = any(item.title for item in items)
    lines = [f"rank {'score':>7}  {'key':<{width}}  {'title' if titled else ''}".rstrip()]
    for rank, (key, item) in enumerate(zip(keys, items, strict=True), 1):
        title = _printable(item.title or "")
        lines.append(f"{rank:>4} {item.score:>7.3f}  {key:<{width}}  {title}".rstrip())
    return "\n".join(lines)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _to_json(items: list[ScoredItem]) -> str:
    from json import dumps

    rows = [{"rank": rank, **item._asdict()} for rank, item in enumerate(items, 1)]
    return dumps(rows, ensure_ascii=False, indent=1)
