"""Commands of applications: ``demo``, ``train ...``, ``recommend``, ``classify``, ``continue``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from json import dumps
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
    log_line,
    run_options,
)
from featherbed.errors import ArgumentError, DataError

if TYPE_CHECKING:
    from featherbed.apps.classifier import Classifier, ClassProbability
    from featherbed.apps.recommender import ScoredItem

DEFAULT_CLASSES = 5  # printed for a single text
MAX_LINE = 1 << 24  # bytes

Table = Annotated[
    str | None,
    typer.Option(help="Word table, such as anchor:anchors=10, dense, kd:choices=32,parts=32."),
]
Dim = Annotated[int | None, typer.Option(help="Row width.", min=1, max=4096)]
RatingsFile = Annotated[
    Path,
    typer.Argument(
        help="Ratings or events: CSV, TSV, JSON lines, Parquet or ::, may be compressed.",
        metavar="FILE",
    ),
]
Ratio = Annotated[
    float | None, typer.Option(help="Compression ratio against float32 rows (default 8).")
]
Titles = Annotated[Path | None, typer.Option(help="File of item keys and titles.")]
Split = Annotated[str | None, typer.Option(help="random (default), time or leave-out.")]
Epochs = Annotated[int | None, typer.Option(help="Maximum number of epochs.", min=1)]


def demo(
    seed: Seed = 0,
    folder: Annotated[Path, typer.Option(help="Folder of the files and reports to write.")] = Path(
        "featherbed-demo"
    ),
    quiet: Quiet = False,
) -> None:
    """Run three tasks on generated data, compared with alternatives of the same size (a minute)."""
    require("featherbed demo", TRAINING, {"compress": ("faiss", "threadpoolctl")})
    from featherbed.apps import run_demo

    run_demo(seed, folder, progress=not quiet)


def train_ratings(
    file: RatingsFile,
    out: Out,
    budget: Annotated[
        str | None,
        typer.Option(help="Maximum size of both tables without keys, such as 40KB."),
    ] = None,
    ratio: Ratio = None,
    users: Annotated[
        str | None, typer.Option(help="Table of the users, such as anchor:anchors=16 or dense.")
    ] = None,
    items: Annotated[str | None, typer.Option(help="Table of the items.")] = None,
    dim: Annotated[int | None, typer.Option(help="Width of the rows (default 16).")] = None,
    titles: Titles = None,
    split: Split = None,
    seed: Seed = 0,
    assignments: Assignments = None,
    recipe: Recipe = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Factorize ratings into two compact tables, by default 8 times smaller than float32."""
    require("featherbed train ratings", TRAINING)
    from featherbed.apps.recommender import RecommenderSettings, train_recommender

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
    outcome = train_recommender(file, out, settings, **run_options(seed, resume, overwrite, quiet))
    if outcome.summary:  # the first of several processes has it
        typer.echo("\n".join(outcome.summary))


def train_sequence_model(
    file: Annotated[
        Path,
        typer.Argument(
            help="Events with times: CSV, TSV, JSON lines, Parquet or ::.", metavar="FILE"
        ),
    ],
    out: Out,
    table: Annotated[
        str | None, typer.Option(help="Item table, such as dense, anchor:anchors=50, graded.")
    ] = None,
    dim: Dim = None,
    length: Annotated[
        int | None, typer.Option(help="Number of last items the model reads.")
    ] = None,
    users: Annotated[
        int | None, typer.Option(help="Width of user rows (SSE-PT); default 0, none.")
    ] = None,
    titles: Titles = None,
    epochs: Epochs = None,
    seed: Seed = 0,
    assignments: Assignments = None,
    recipe: Recipe = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Train a transformer that predicts the next item of a user (SASRec), over a compact table."""
    require("featherbed train sequences", TRAINING)
    from featherbed.apps.sequences import SequenceSettings, train_sequences

    settings = SequenceSettings.read(
        recipe,
        assignments or (),
        titles=titles,
        table__spec=table,
        table__dim=dim,
        model__length=length,
        model__users=users,
        training__epochs=epochs,
    )
    outcome = train_sequences(file, out, settings, **run_options(seed, resume, overwrite, quiet))
    typer.echo("\n".join(outcome.summary))


def train_ranking(
    file: RatingsFile,
    out: Out,
    budget: Annotated[
        str | None, typer.Option(help="Maximum size of both tables without keys, such as 300KB.")
    ] = None,
    ratio: Ratio = None,
    dim: Annotated[
        int | None, typer.Option(help="Width of the rows (default: chosen by validation).")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Factorization: als or bpr.")] = None,
    minimum: Annotated[
        float | None, typer.Option(help="Minimum rating that counts as an event.")
    ] = None,
    titles: Titles = None,
    split: Split = None,
    seed: Seed = 0,
    assignments: Assignments = None,
    recipe: Recipe = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Rank items from clicks, plays or purchases; rows are 8 times smaller than float32."""
    require("featherbed train ranking", TRAINING, {"ranking": ["implicit", "threadpoolctl"]})
    from featherbed.apps.recommender import RankingSettings
    from featherbed.apps.recommender import train_ranking as train

    settings = RankingSettings.read(
        recipe,
        assignments or (),
        method=method,
        titles=titles,
        reading__minimum=minimum,
        table__budget=budget,
        table__ratio=ratio,
        table__dim=dim,
        split__method=split,
    )
    outcome = train(file, out, settings, **run_options(seed, False, overwrite, quiet))
    typer.echo("\n".join(outcome.summary))


def update(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of `featherbed train ratings` or `ranking`.", metavar="DIR"),
    ],
    file: Annotated[Path, typer.Argument(help="New ratings or events.", metavar="FILE")],
    assignments: Assignments = None,
) -> None:
    """Add users and items to a recommender and update known users, without training."""
    require("featherbed update", {"train": ["polars", "pyarrow"]})
    from featherbed.apps.recommender import UpdateSettings, update_recommender

    settings = UpdateSettings.read(None, assignments or ())
    typer.echo("\n".join(update_recommender(folder, file, settings).lines))


def train_text(
    file: Annotated[
        Path, typer.Argument(help="CSV, TSV or JSON lines of labels and texts.", metavar="FILE")
    ],
    out: Out,
    test: Annotated[
        Path | None, typer.Option(help="Test file; by default a tenth of FILE is held out.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Network: cnn or bag.")] = None,
    table: Table = None,
    dim: Dim = None,
    epochs: Epochs = None,
    label: Annotated[str | None, typer.Option(help="Column of labels, by name or number.")] = None,
    text: Annotated[
        str | None, typer.Option(help="Column of texts; several with commas are joined.")
    ] = None,
    assignments: Assignments = None,
    recipe: Recipe = None,
    seed: Seed = 0,
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Train a text classifier with a compact word table; it is served without torch."""
    require("featherbed train text", TRAINING)
    from featherbed.apps.classifier import ClassifierSettings, train_classifier

    settings = ClassifierSettings.read(
        recipe,
        assignments or (),
        model__kind=model,
        table__spec=table,
        table__dim=dim,
        training__epochs=epochs,
        data__label=label,
        data__text=text,
    )
    outcome = train_classifier(
        file, out, settings, test=test, **run_options(seed, resume, overwrite, quiet)
    )
    typer.echo("\n".join(outcome.summary))


def train_lm(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="One text (parts of it are held out) or three: train, valid, test.",
            metavar="FILES",
        ),
    ],
    out: Out,
    model: Annotated[str | None, typer.Option(help="Network: lstm or awd.")] = None,
    table: Table = None,
    dim: Dim = None,
    epochs: Epochs = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="Text to continue in the report; repeat for more."),
    ] = None,
    assignments: Assignments = None,
    recipe: Recipe = None,
    seed: Seed = 0,
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Train a language model with one compact table for its input and its softmax."""
    require("featherbed train lm", TRAINING)
    from featherbed.apps.language import LanguageSettings, train_language

    settings = LanguageSettings.read(
        recipe,
        assignments or (),
        model__kind=model,
        table__spec=table,
        table__dim=dim,
        training__epochs=epochs,
        optimizer__lr=lr,
        corpus__prompts=prompts or None,
    )
    outcome = train_language(files, out, settings, **run_options(seed, resume, overwrite, quiet))
    typer.echo("\n".join(outcome.summary))


def recommend(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder of `featherbed train ratings`, `ranking` or `sequences`.", metavar="DIR"
        ),
    ],
    user: Annotated[str | None, typer.Option(help="Key of a user of the training data.")] = None,
    k: Annotated[int, typer.Option("-k", help="Number of items.")] = 10,
    all_items: Annotated[
        bool, typer.Option("--all", help="Include items the user rated in training.")
    ] = False,
    history: Annotated[
        str | None,
        typer.Option(
            help="Items of a new user: '12:5,57:3' or '12,57' (for sequences oldest first), or a "
            "file of such lines."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Print the top items for a user, excluding rated items. torch is not needed."""
    from featherbed.apps.bundle import SEQUENCES
    from featherbed.apps.recommender import Recommender, parse_history

    if (folder / SEQUENCES).is_file():
        _recommend_next(folder, user, k, all_items, history, json)
        return
    if (user is None) == (history is None):
        raise ArgumentError("give either --user or --history")
    recommender = Recommender.open(folder)
    if user is not None:
        found = recommender.recommend(user, k, include_rated=all_items)
    else:
        pairs = parse_history(str(history), recommender.items)
        found = recommender.recommend_history(pairs, k, include_history=all_items)
        if unknown := recommender.unknown_items(pairs):
            log_line(f"note: unknown items are skipped: {', '.join(unknown[:20])}")
    typer.echo(_to_json(found) if json else format_items(found))
    if not recommender.factors:
        log_line(
            "note: this recommender stores no factors, only biases: every user gets the same order"
        )
    if len(found) < k:
        kind = "items in all" if all_items else "items this user has not rated"
        log_line(f"note: there are only {len(found)} {kind}, {k} were requested")


def _recommend_next(
    folder: Path, user: str | None, k: int, all_items: bool, history: str | None, json: bool
) -> None:
    """Print the items most likely to follow a history, by a sequence model."""
    from featherbed.apps.sequences import SequenceRecommender, parse_items

    if history is None:
        raise ArgumentError(
            f"{folder} holds a sequence model: give --history, the items a user had, oldest first"
        )
    model = SequenceRecommender.open(folder)
    items = parse_items(history, model.items)
    found = model.recommend_history(items, k, user=user, include_history=all_items or None)
    if unknown := model.unknown_items(items):
        log_line(f"note: unknown items are skipped: {', '.join(unknown[:20])}")
    typer.echo(_to_json(found) if json else format_items(found))
    if len(found) < k:
        log_line(f"note: there are only {len(found)} items left, {k} were requested")


def format_items(items: list[ScoredItem]) -> str:
    """Return recommendations in columns; unprintable characters become question marks.

    >>> from featherbed.apps.recommender import ScoredItem
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


def _to_json(items: list[ScoredItem]) -> str:
    rows = [{"rank": rank, **item._asdict()} for rank, item in enumerate(items, 1)]
    return dumps(rows, ensure_ascii=False, indent=1)


def classify(
    folder: Annotated[
        Path, typer.Argument(help="Folder written by `featherbed train text`.", metavar="DIR")
    ],
    text: Annotated[
        str | None, typer.Argument(help="The text, between quotes.", metavar="TEXT")
    ] = None,
    k: Annotated[int | None, typer.Option("-k", help="Number of classes.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="File with one text per line; - reads standard input.")
    ] = None,
    json: Json = False,
) -> None:
    """Print the classes of a text with their probabilities; torch is not needed."""
    if (text is None) == (file is None):
        raise ArgumentError(
            "give one text between quotes, or --file with one text per line (--file - reads "
            "standard input)"
        )
    if k is not None and k < 1:
        raise ArgumentError(f"-k {k}: give at least 1")
    from featherbed.apps.classifier import Classifier

    classifier = Classifier.open(folder)
    if file is not None:
        _classify_lines(classifier, file, k or 1, json)
        return
    assert text is not None
    if not len(classifier.encoder.ids(text)):
        raise ArgumentError(f"the text {text[:40]!r} holds no word: give some text between quotes")
    found, unknown = classifier.classify(text, k or DEFAULT_CLASSES), classifier.unknown(text)
    typer.echo(_class_json(text, found, unknown) if json else format_classes(found))
    if not json:
        _note_unknown(unknown)


def continue_text(
    folder: Annotated[
        Path, typer.Argument(help="Folder written by `featherbed train lm`.", metavar="DIR")
    ],
    text: Annotated[str, typer.Argument(help="Start of the text, between quotes.", metavar="TEXT")],
    words: Annotated[int, typer.Option(help="Number of words to add.", min=0)] = 30,
    temperature: Annotated[
        float, typer.Option(help="0: the most likely word; 1: the model's distribution.", min=0)
    ] = 0.8,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Print a text continued by a language model; torch is not needed."""
    from featherbed.apps.language import LanguageModel

    model = LanguageModel.open(folder)
    found, unknown = model.continue_text(text, words, seed, temperature), model.unknown(text)
    if json:
        settings = {"words": words, "seed": seed, "temperature": temperature}
        answer = {"text": text, "continued": found, **settings, "unknown": unknown}
        typer.echo(dumps(answer, ensure_ascii=False))
        return
    typer.echo("\n".join(_printable(line) for line in found.split("\n")))
    _note_unknown(unknown)


def format_classes(found: list[ClassProbability]) -> str:
    """Return classes in columns; characters that could act on a terminal become question marks.

    >>> from featherbed.apps.classifier import ClassProbability
    >>> print(format_classes([ClassProbability("Sports", 0.9312), ClassProbability("World", 0.07)]))
    0.9312  Sports
    0.0700  World
    """
    return "\n".join(f"{item.probability:.4f}  {_printable(item.label)}" for item in found)


def _classify_lines(classifier: Classifier, file: Path, k: int, json: bool) -> None:
    """Classify line by line; lines without a word have no class and raise an error at the end."""
    count, empty = 0, list[int]()
    for count, text in enumerate(read_texts(file), 1):
        found = classifier.classify(text, k) if len(classifier.encoder.ids(text)) else []
        if not found:
            empty.append(count)
        cells = [f"{_printable(item.label)}\t{item.probability:.4f}" for item in found]
        unknown = classifier.unknown(text) if json else []
        typer.echo(_class_json(text, found, unknown) if json else "\t".join(cells))
    if not count:
        raise DataError(f"{file}: holds no text")
    if empty:
        raise DataError(
            f"{file}, line {empty[0]}: the text holds no word; {len(empty):,} of {count:,} lines "
            "have no class"
        )


def read_texts(file: Path) -> Iterator[str]:
    """Yield the lines of a file, or for - of standard input."""
    stream = sys.stdin.buffer if str(file) == "-" else file.open("rb")
    with stream:
        number = 0
        while line := stream.readline(MAX_LINE):
            number += 1
            if len(line) == MAX_LINE:
                raise DataError(
                    f"{file}, line {number}: longer than {MAX_LINE:,} bytes: give one text per line"
                )
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file}, line {number}: byte {error.start + 1} is not UTF-8: convert the file "
                    "first"
                ) from None


def _class_json(text: str, found: list[ClassProbability], unknown: list[str]) -> str:
    classes = [item._asdict() for item in found]
    return dumps({"text": text, "classes": classes, "unknown": unknown}, ensure_ascii=False)


def _note_unknown(unknown: list[str]) -> None:
    if unknown:
        named = ", ".join(_printable(word) for word in unknown[:10])
        more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
        typer.echo(f"note: not known to the model: {named}{more}", err=True)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
