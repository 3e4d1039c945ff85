"""``featherbed train text`` and ``featherbed train lm``: from texts to a folder that classifies, or that continues texts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from featherbed.errors import ArgumentError
from featherbed.extras import TRAINING, require

if TYPE_CHECKING:
    from featherbed.tasks.word_tables import WordTable

Table = Annotated[
    str,
    typer.Option(
        help="The table of words, such as anchor:anchors=10, dense, kd:choices=32,parts=32."
    ),
]
By = Annotated[
    str | None,
    typer.Option(
        help="Which words are anchors or are kept: random, frequency, tfidf, kmeans-glove, kmeans-cooccurrence, "
        "frequency-clusters, lasso, vvd."
    ),
]
Domain = Annotated[
    str | None,
    typer.Option(
        help="What relates words to anchor words: wordnet, cooccurrence, or both with a comma."
    ),
]
Least = Annotated[int, typer.Option(help="How often words must meet to count as related.", min=1)]
Lam = Annotated[
    float,
    typer.Option(
        "--lambda", help="The penalty on the weights of anchors (rows, with --by lasso).", min=0
    ),
]
Nonzeros = Annotated[int | None, typer.Option(help="Weights of anchors left in the end.", min=1)]
Sse = Annotated[
    float,
    typer.Option(help="Replace a word by another with this probability in training.", min=0, max=1),
]
Start = Annotated[
    float | None, typer.Option(help="The spread of first rows, with anchors of first weights.")
]
Epochs = Annotated[int | None, typer.Option(help="At most so many passes.", min=1)]
Batch = Annotated[int | None, typer.Option(help="Texts (lm: columns) a step.", min=1)]
Rate = Annotated[float | None, typer.Option(help="The learning rate.")]
WeightsRate = Annotated[
    float | None,
    typer.Option(help="Learning rate of the weights of anchors; without it that of all."),
]
DenseEpochs = Annotated[
    int | None,
    typer.Option(
        help="The first epochs train plain rows, to which the table is then fitted.", min=0
    ),
]
Patience = Annotated[int | None, typer.Option(help="Epochs without gain before it ends.", min=0)]
Spread = Annotated[float | None, typer.Option(help="With anchors: the spread of first rows.")]
Values = Annotated[
    str, typer.Option(help="How weights of codes are stored: float32, float16, int8, int4 ...")
]
Dictionary = Annotated[str, typer.Option(help="How anchors, atoms or plain rows are stored.")]
Weights = Annotated[
    str, typer.Option(help="How the other weights of the model are stored: float32, float16, int8.")
]
MinCount = Annotated[int, typer.Option(help="Rarer words are unknown.", min=1)]
MaxWords = Annotated[
    int | None, typer.Option(help="At most so many words; the most frequent stay.", min=4)
]
Encoding = Annotated[
    str | None, typer.Option(help="Of a text file that is not UTF-8, such as latin-1.")
]
Cache = Annotated[
    Path | None, typer.Option(help="Keep encoded texts and co-occurrence here for the next run.")
]
Out = Annotated[Path, typer.Option(help="The folder to write.")]
Seed = Annotated[int, typer.Option(help="Seed of the split and of training.", min=0)]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the last checkpoint in the folder.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the model in the folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


def text(
    file: Annotated[
        Path, typer.Argument(help="CSV, TSV or JSON lines of labels and texts.", metavar="FILE")
    ],
    out: Out,
    test: Annotated[
        Path | None, typer.Option(help="A file to test on; without it a tenth of FILE is held out.")
    ] = None,
    model: Annotated[str, typer.Option(help="cnn or bag.")] = "cnn",
    table: Table = "anchor:anchors=10",
    by: By = None,
    domain: Domain = None,
    least: Least = 5,
    lam: Lam = 0.0,
    nonzeros: Nonzeros = None,
    sse: Sse = 0.0,
    start: Start = None,
    spread: Spread = None,
    dim: Annotated[int, typer.Option(help="The width of rows.", min=1, max=4096)] = 256,
    epochs: Epochs = None,
    batch: Batch = None,
    lr: Rate = None,
    patience: Patience = None,
    dropout: Annotated[
        float | None, typer.Option(help="Of the features before the last layer.", min=0, max=0.95)
    ] = None,
    channels: Annotated[
        int | None, typer.Option(help="With --model cnn: filters of each width.", min=1)
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help="With --model bag: a layer between, of this width.", min=1)
    ] = None,
    length: Annotated[int, typer.Option(help="Texts are cut after so many words.", min=1)] = 100,
    long: Annotated[str, typer.Option(help="What becomes of longer texts: cut or error.")] = "cut",
    min_count: MinCount = 1,
    max_words: MaxWords = None,
    subwords: Annotated[
        int | None,
        typer.Option(help="Learn so many pieces of words in the place of words.", min=300),
    ] = None,
    validation: Annotated[
        float, typer.Option(help="The share of training texts held out.", min=0.001, max=0.9)
    ] = 0.15,
    values: Values = "float16",
    dictionary: Dictionary = "float16",
    weights: Weights = "float16",
    label: Annotated[
        str | None, typer.Option(help="The column of labels, by name or number.")
    ] = None,
    content: Annotated[
        str | None,
        typer.Option("--text", help="The column of texts; several with commas are joined."),
    ] = None,
    skip_empty: Annotated[
        bool,
        typer.Option("--skip-empty", help="Leave out texts without a word; otherwise an error."),
    ] = False,
    encoding: Encoding = None,
    cache: Cache = None,
    seed: Seed = 0,
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Train a text classifier on a compact table of words; answers come from the packed files, without torch."""
    given = dict(locals())
    require("featherbed train text", TRAINING)
    from featherbed.tasks.text import TextRecipe
    from featherbed.tasks.text_job import TextJob, train_text

    chosen = {
        name: given[name]
        for name in ("epochs", "batch", "lr", "patience", "dropout", "channels", "hidden")
    }
    recipe = TextRecipe(
        model=model,
        words=word_table(given),
        **{key: value for key, value in chosen.items() if value is not None},
    )
    job = TextJob(
        file,
        out,
        recipe,
        test=test,
        reading={"label": label, "text": content, "strict": not skip_empty, "encoding": encoding},
        preparing={
            "length": length,
            "long": long,
            "min_count": min_count,
            "most": max_words,
            "subwords": subwords,
            "validation": validation,
            "cache": cache,
        },
        **running(given),
    )
    outcome = train_text(job, lambda line: typer.echo(line, err=True))
    typer.echo("\n".join(outcome.lines(out)))


def lm(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="One text, of which parts are held out, or three: train, valid, test.",
            metavar="FILES",
        ),
    ],
    out: Out,
    model: Annotated[str, typer.Option(help="lstm or awd.")] = "lstm",
    table: Table = "anchor:anchors=500,slots=16",
    by: By = None,
    domain: Domain = None,
    least: Least = 5,
    lam: Lam = 0.0,
    nonzeros: Nonzeros = None,
    sse: Sse = 0.0,
    start: Start = None,
    spread: Spread = None,
    dim: Annotated[int, typer.Option(help="The width of rows.", min=1, max=4096)] = 200,
    hidden: Annotated[
        int | None, typer.Option(help="The width of the LSTM; without it that of rows.", min=1)
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the LSTM.", min=1, max=16)] = None,
    tied: Annotated[
        bool, typer.Option(help="Score words by the same table that reads them.")
    ] = True,
    softmax: Annotated[str, typer.Option(help="full, or sampled in training.")] = "full",
    samples: Annotated[
        int | None, typer.Option(help="With --softmax sampled: words a step.", min=1)
    ] = None,
    epochs: Epochs = None,
    batch: Batch = None,
    length: Annotated[
        int | None, typer.Option(help="Words that gradients run through.", min=1)
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, yogi, sgd or ntasgd.")] = "adamw",
    lr: Rate = None,
    weights_lr: WeightsRate = None,
    dense_epochs: DenseEpochs = None,
    patience: Patience = None,
    dropout: Annotated[float | None, typer.Option(help="Between layers.", min=0, max=0.95)] = None,
    precision: Annotated[
        str, typer.Option(help="Of the softmax in training: float32 or bfloat16.")
    ] = "float32",
    cut: Annotated[
        str, typer.Option(help="Words stand between blanks, or are cut as in texts: words.")
    ] = "blanks",
    min_count: MinCount = 1,
    max_words: MaxWords = None,
    values: Values = "float16",
    dictionary: Dictionary = "float16",
    weights: Weights = "float16",
    begin: Annotated[
        list[str] | None,
        typer.Option("--continue", help="A beginning the report goes on from; repeat."),
    ] = None,
    encoding: Encoding = None,
    seed: Seed = 0,
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Train a language model whose words are read and scored through one compact table."""
    given = dict(locals())
    require("featherbed train lm", TRAINING)
    from featherbed.tasks.language_job import LanguageJob, train_language
    from featherbed.tasks.language_recipe import LanguageRecipe

    named = (
        "layers",
        "samples",
        "epochs",
        "batch",
        "length",
        "lr",
        "weights_lr",
        "dense_epochs",
        "patience",
        "dropout",
    )
    settings = {key: given[key] for key in named if given[key] is not None}
    width = hidden if hidden is not None else dim
    recipe = LanguageRecipe(
        model=model,
        words=word_table(given),
        hidden=width,
        tied=tied,
        softmax=softmax,
        optimizer=optimizer,
        precision=precision,
        **settings,
    )
    job = LanguageJob(
        files,
        out,
        recipe,
        cut=cut,
        reading={"min_count": min_count, "most": max_words, "encoding": encoding},
        starts=begin or (),
        **running(given),
    )
    outcome = train_language(job, lambda line: typer.echo(line, err=True))
    typer.echo("\n".join(outcome.lines(out)))


def word_table(given: dict[str, Any]) -> WordTable:
    """Return the table of words that options ask for."""
    from featherbed.tasks.word_tables import WordTable

    parts = tuple(part.strip() for part in (given["domain"] or "").split(",") if part.strip())
    if given["domain"] is not None and not parts:
        raise ArgumentError("--domain is empty: give wordnet, cooccurrence, or both with a comma")
    named = ("dim", "by", "least", "lam", "nonzeros", "sse", "start", "spread")
    same = {name: given[name] for name in named if given[name] is not None}
    return WordTable(given["table"], domain=parts, **same)


def running(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings all jobs share: how to store and run them, progress, the command."""
    stored = {name: given[name] for name in ("values", "dictionary", "weights")}
    typed = shlex.join(["featherbed", *sys.argv[1:]])
    same = {name: given[name] for name in ("seed", "resume", "overwrite")}
    return {**same, "stored": stored, "progress": not given["quiet"], "command": typed}


COMMANDS: dict[str, Callable[..., None]] = {"text": text, "lm": lm}
