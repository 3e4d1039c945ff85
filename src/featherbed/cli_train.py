"""``featherbed train ratings``: from a file of ratings to a folder that recommends."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from featherbed import cli_text
from featherbed.errors import ArgumentError
from featherbed.extras import TRAINING, require

if TYPE_CHECKING:
    from featherbed.tasks.recipe import Recipe

MEAN = (
    "Add a constant to every score: with --users or --items the mean of the training ratings, "
    "for rows in levels a number fitted with the biases."
)
app = typer.Typer(
    name="train",
    help="Train compact tables on your data.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
ANCHORS = "anchor:anchors=16"
GROWING = "growinganchor:anchors=8"
TRAINED = (
    "nonzeros",
    "lam",
    "sse_users",
    "sse_items",
    "biases",
    "epochs",
    "batch",
    "lr",
    "patience",
)  # settings of a recipe
AUTO = {
    "lambda1": 2e-3,
    "lambda2": 1e-6,
    "lam": 7e-5,
    "epochs": 10,
    "refit": 6,
    "cosine": False,
}  # chosen on MovieLens-1M
REFUSED = (
    "users",
    "items",
    *TRAINED,
    "lambda1",
    "lambda2",
    "values",
    "dictionary",
)  # by rows in levels

Column = Annotated[
    str | None, typer.Option(help="A column by name or number, where it is not guessed.")
]


@app.callback()
def root() -> None:
    """Train compact tables on your data."""


@app.command()
def ratings(
    file: Annotated[
        Path,
        typer.Argument(
            help="CSV, TSV, JSON lines, Parquet or ::, compressed or not.", metavar="FILE"
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    users: Annotated[
        str | None, typer.Option(help=f"The table of users, such as {ANCHORS} or dense.")
    ] = None,
    items: Annotated[str | None, typer.Option(help="The table of items.")] = None,
    dim: Annotated[int, typer.Option(help="The width of rows.", min=1, max=1024)] = 16,
    budget: Annotated[
        str | None,
        typer.Option(help="Bytes of both files without keys, such as 40KB: rows in levels."),
    ] = None,
    ratio: Annotated[
        float | None, typer.Option(help="The same, so many times smaller than float32 rows.")
    ] = None,
    nonzeros: Annotated[
        int | None, typer.Option(help="Weights of anchors left in the end, both sides.", min=1)
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Find the number of anchors (NBANT).")
    ] = False,
    lambda1: Annotated[
        float | None, typer.Option(help="With --auto: the price of an anchor.")
    ] = None,
    lambda2: Annotated[
        float | None, typer.Option(help="With --auto: the price of a weight.")
    ] = None,
    lam: Annotated[
        float | None, typer.Option("--lambda", help="The penalty on the weights of anchors.", min=0)
    ] = None,
    sse_users: Annotated[
        float | None, typer.Option(help="Share users' rows with this probability.", min=0, max=1)
    ] = None,
    sse_items: Annotated[
        float | None, typer.Option(help="Share items' rows with this probability.", min=0, max=1)
    ] = None,
    biases: Annotated[str | None, typer.Option(help="column (in the rows), apart or none.")] = None,
    mean: Annotated[bool, typer.Option(help=MEAN)] = True,
    epochs: Annotated[int | None, typer.Option(help="At most so many passes.", min=1)] = None,
    batch: Annotated[int | None, typer.Option(help="Ratings a step.", min=1)] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate.")] = None,
    patience: Annotated[
        int | None, typer.Option(help="Epochs without gain before it ends.", min=0)
    ] = None,
    values: Annotated[
        str | None, typer.Option(help="How weights are stored: float32, float16, int8, int4 ...")
    ] = None,
    dictionary: Annotated[
        str | None, typer.Option(help="How anchors or plain rows are stored.")
    ] = None,
    titles: Annotated[Path | None, typer.Option(help="A file of item keys and titles.")] = None,
    split: Annotated[str, typer.Option(help="random, time or leave-out.")] = "random",
    leave: Annotated[
        int, typer.Option(help="With --split leave-out: ratings of each user held out.", min=1)
    ] = 1,
    seen_only: Annotated[
        bool, typer.Option("--seen-only", help="Test on users and items seen in training.")
    ] = False,
    user: Column = None,
    item: Column = None,
    rating: Column = None,
    time: Column = None,
    low: Annotated[
        float | None, typer.Option("--low", help="The lowest rating there can be.")
    ] = None,
    high: Annotated[
        float | None, typer.Option("--high", help="The highest rating there can be.")
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Of a text file that is not UTF-8, such as latin-1.")
    ] = None,
    duplicates: Annotated[
        str, typer.Option(help="Pairs rated twice: last, first, mean, keep or refuse.")
    ] = "last",
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse the first line that cannot be read.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the split and of training.", min=0)] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in the folder.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the recommender in the folder.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Factorise ratings into two compact tables; without further options rows in levels, 8 times smaller than float32."""
    given = dict(locals())
    require("featherbed train ratings", TRAINING)
    from featherbed.codecs.target import read_bytes
    from featherbed.tasks.recommender import Job, train_recommender
    from featherbed.tasks.summary import summary_lines

    job = Job(
        file,
        out,
        recipe=_recipe(given),
        budget=None if budget is None else read_bytes(budget),
        ratio=_ratio(ratio),
        dim=dim,
        values=values or "float32",
        dictionary=dictionary or "float32",
        reading={
            name: given[name]
            for name in (
                "user",
                "item",
                "rating",
                "time",
                "low",
                "high",
                "strict",
                "duplicates",
                "encoding",
            )
        },
        splitting={"how": split, "leave": leave},
        seen=seen_only,
        titles=titles,
        seed=seed,
        resume=resume,
        overwrite=overwrite,
        progress=not quiet,
        command=shlex.join(["featherbed", *sys.argv[1:]]),
    )
    outcome = train_recommender(job, lambda line: typer.echo(line, err=True))
    typer.echo("\n".join(summary_lines(outcome.metrics, out)))


def _recipe(given: dict[str, Any]) -> Recipe | None:
    """Return the recipe of tables that options ask for; None for rows in levels, which take fewer options."""
    from featherbed.tasks.recipe import Recipe

    by_bytes = [name for name in ("budget", "ratio") if given[name] is not None]
    if len(by_bytes) == 2:
        raise ArgumentError("give --budget or --ratio, not both")
    by_tables = given["auto"] or any(
        given[name] is not None for name in ("users", "items", "nonzeros")
    )
    if by_bytes or not by_tables:
        unused = [name for name in REFUSED if given[name] is not None]
        if given["auto"]:
            unused.insert(0, "auto")
        if unused or not given["mean"]:
            named = f"--{(unused or ['no-mean'])[0].replace('_', '-')}"
            raise ArgumentError(
                f"{named} is for tables given by --users and --items; rows in levels"
                f"{f' (--{by_bytes[0]})' if by_bytes else ''} have nothing to set but --dim: leave one of them out"
            )
        return None
    anchored = given["nonzeros"] is not None or given["auto"]
    default = GROWING if given["auto"] else ANCHORS if anchored else "dense"
    settings = {name: given[name] for name in TRAINED}
    settings |= {"users": given["users"] or default, "items": given["items"] or default}
    if given["auto"]:
        chosen = {name: value for name, value in settings.items() if value is not None}
        settings = (
            AUTO
            | chosen
            | {"patience": chosen.get("patience", chosen.get("epochs", AUTO["epochs"]))}
        )
        settings |= {
            name: given[name] for name in ("lambda1", "lambda2") if given[name] is not None
        }
    elif given["lambda1"] is not None or given["lambda2"] is not None:
        raise ArgumentError("--lambda1 and --lambda2 are prices of NBANT: they go with --auto")
    kept = {name: value for name, value in settings.items() if value is not None}
    return Recipe(dim=given["dim"], mean=given["mean"], **kept)


def _ratio(ratio: float | None) -> float | None:
    if ratio is not None and not (math.isfinite(ratio) and ratio > 0):
        raise ArgumentError(f"--ratio {ratio}: give a number above 0, such as 8")
    return ratio


for _name, _command in cli_text.COMMANDS.items():
    app.command(name=_name)(_command)
