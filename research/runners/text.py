"""Rows that classify texts, trained as ``featherbed train text`` does it.

Settings are those of a ``TextRecipe``, with ``words`` a table of those of a ``WordTable``; those of ``prepare``; and ``times``:
how many times fewer parameters than plain rows the table has. It sets the words a selection keeps, the rank, or the weights
that stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from featherbed.errors import ArgumentError, DataError, NotPackable
from featherbed.tables import AnchorTable, LowRankTable, MixtureTable, SelectedTable, Table
from featherbed.tables.mixture import sizes_of
from featherbed.tables.spec import parse_spec
from featherbed.tasks.text import TextRecipe, accuracy, fit_text, parameter_count
from featherbed.tasks.text_job import TextJob, train_text
from featherbed.tasks.word_tables import WordTable
from research.harness.measures import flattened
from research.harness.records import Outcome, Run
from research.sources.texts import TextFiles, TextSource

PARTS = (
    "length",
    "validation",
    "min_count",
    "most",
    "subwords",
)  # settings of how texts become ids


def run_text(settings: Mapping[str, Any], seed: int, source: TextSource, run: Run) -> Outcome:
    """Train a classifier, measure its accuracy on the test part once, and the size of its table."""
    prepared = source.prepared(seed, **{key: settings[key] for key in PARTS if key in settings})
    if prepared.test is None:
        raise DataError("there is no test part to measure: give the source a test file")
    recipe = recipe_of(TextRecipe, settings, len(prepared.words), PARTS)
    fitted = fit_text(recipe, prepared, seed=seed, progress=run.shown, name=run.title)
    if fitted.result.interrupted:
        raise KeyboardInterrupt
    measures = {
        "accuracy": accuracy(fitted.model, prepared.test, prepared.length),
        "validation_accuracy": fitted.result.metrics["validation"]["accuracy"],
    }
    rows = {name: len(getattr(prepared, name)) for name in ("train", "validation", "test")}
    details = {"words": len(prepared.words), "texts": rows, "notes": [*fitted.made.notes]}
    return Outcome(
        measures | table_sizes(fitted.made.table),
        [dict(row) for row in fitted.result.history],
        details,
    )


def run_stored_text(settings: Mapping[str, Any], seed: int, source: TextFiles, run: Run) -> Outcome:
    """Train and store a classifier as ``featherbed train text`` does; measure the stored files."""
    recipe = TextRecipe(words=WordTable(**settings["words"]), **settings["recipe"])
    with TemporaryDirectory() as place:
        job = TextJob(
            source.train,
            Path(place) / "out",
            recipe,
            test=source.test,
            stored=settings["stored"],
            preparing=settings["preparing"],
            seed=seed,
            progress=run.shown,
        )
        outcome = train_text(job, run.say)
    if outcome.fitted.result.interrupted:
        raise KeyboardInterrupt
    measures, details = flattened(outcome.metrics)
    return Outcome(measures, [dict(row) for row in outcome.fitted.result.history], details)


def recipe_of(kind: Any, settings: Mapping[str, Any], rows: int, own: tuple[str, ...] = ()) -> Any:
    """Return the recipe of a row's settings for a table of so many ``rows``, or say which setting is unknown.

    >>> recipe_of(TextRecipe, {"times": 4, "words": {"spec": "selected", "dim": 16}}, rows=1000).words.spec
    'selected:keep=249'
    """
    words = dict(settings.get("words", {}))
    for what, given, known in (
        ("a recipe", settings, [*(one.name for one in fields(kind)), "times", *own]),
        ("words", words, [one.name for one in fields(WordTable)]),
    ):
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ArgumentError(
                f"{', '.join(unknown)}: no setting of {what}, which takes {', '.join(known)}"
            )
    if "times" in settings:
        words = sized(words, settings["times"], rows)
    rest = {key: value for key, value in settings.items() if key not in (*own, "times", "words")}
    return kind(**rest, words=WordTable(**words))


def sized(words: Mapping[str, Any], times: float, rows: int) -> dict[str, Any]:
    """Return the settings of a table that has ``times`` fewer parameters than ``rows`` plain rows.

    >>> sized({"spec": "anchor:anchors=5", "dim": 8}, times=4, rows=100)["nonzeros"]
    160
    """
    method, settings = parse_spec(words["spec"])
    dim, goal = words["dim"], rows * words["dim"] / times
    joined = words["spec"] + ("," if settings else ":")
    if issubclass(method, SelectedTable):
        return {
            **words,
            "spec": f"{joined}keep={max(1, round(goal / dim) - settings.get('rest', 1))}",
        }
    if issubclass(method, LowRankTable):
        return {**words, "spec": f"{joined}rank={max(1, round(goal / (rows + dim)))}"}
    if not issubclass(method, AnchorTable | MixtureTable):
        raise ArgumentError(
            f"times={times}: the size of {words['spec']!r} follows from its own settings; leave times out"
        )
    mixed = issubclass(method, MixtureTable)
    atoms = (
        sum(sizes_of(settings["anchors"], settings.get("sets"))) if mixed else settings["anchors"]
    )
    left = round(goal) - atoms * dim
    if left < 1:
        raise ArgumentError(
            f"times={times}: {atoms} anchors alone have {atoms * dim:,} parameters, more than {goal:,.0f}"
        )
    return {**words, "nonzeros": left}


def table_sizes(table: Table) -> dict[str, float]:
    """Return parameters as the paper counts them, how many times fewer than those of plain rows, and packed bytes.

    >>> from featherbed.tables import LowRankTable
    >>> sizes = table_sizes(LowRankTable(100, 8, rank=2))
    >>> sizes["parameters"], round(sizes["times"], 1)
    (216.0, 3.7)
    """
    dense = table.num_embeddings * table.embedding_dim
    count = parameter_count(table)
    found = {"parameters": float(count), "times": dense / max(1, count)}
    try:
        packed = sum(table.pack().sizes_by_part().values())
    except NotPackable:
        return found
    return found | {"bytes": float(packed), "ratio": 4 * dense / packed}
