"""Rows that classify texts, trained as ``featherbed train text`` trains them.

Settings have the short names of ``SHORT_NAMES``, with a table ``words`` of those of ``WORD_NAMES``;
``PARTS`` are settings of ``prepare``; ``times`` is the ratio of dense parameters to those of the
table: it sets the number of words that a selection keeps, the rank, or the nonzero weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from featherbed.apps.classifier.data import ClassifierSettings
from featherbed.apps.classifier.train import accuracy, fit_classifier, train_classifier
from featherbed.errors import ArgumentError, DataError, NotPackable
from featherbed.tables import Table
from featherbed.tables.spec import parse_spec
from research.harness.measures import flattened
from research.harness.records import Outcome, Run
from research.runners.terms import known_to_specs
from research.sources.texts import TextFiles, TextSource

PARTS = ("length", "validation", "min_count", "most", "subwords")  # settings of ``prepare``
WORD_NAMES = {
    "by": "table.selection",
    "start": "table.init_std",
    "spread": "table.row_std",
    **{name: f"table.{name}" for name in ("spec", "dim", "domain", "lam", "nonzeros", "sse")},
}
SHORT_NAMES = {
    **{name: f"model.{name}" for name in ("channels", "widths", "hidden", "dropout")},
    **{
        name: f"training.{name}"
        for name in (
            *("epochs", "batch", "lr", "code_lr", "optimizer", "decay", "cosine", "patience"),
        )
    },
    "model": "model.kind",
}


def run_text(settings: Mapping[str, Any], seed: int, source: TextSource, run: Run) -> Outcome:
    """Train a classifier, measure its accuracy on the test part once, and the size of its table."""
    data = source.prepared(seed, **{key: settings[key] for key in PARTS if key in settings})
    if data.test is None:
        raise DataError("there is no test part to measure: give the source a test file")
    size = len(data.vocabulary.words)
    with known_to_specs():
        chosen = text_settings(settings, size)
        fitted = fit_classifier(chosen, data, seed=seed, progress=run.shown, name=run.title)
    if fitted.interrupted:
        raise KeyboardInterrupt
    measures = {
        "accuracy": accuracy(fitted.model, data.test, data.vocabulary.length),
        "validation_accuracy": fitted.result.metrics["validation"]["accuracy"],
    }
    rows = {name: len(part) for name, part in data.parts.items()}
    details = {"words": size, "texts": rows, "notes": [*fitted.notes]}
    history = [dict(row) for row in fitted.history]
    return Outcome(measures | table_sizes(fitted.words.table), history, details)


def run_stored_text(settings: Mapping[str, Any], seed: int, source: TextFiles, run: Run) -> Outcome:
    """Train and store a classifier as ``featherbed train text`` does; measure the stored files."""
    flat = {"words": settings["words"], **settings["recipe"]}
    values = named_values(flat, 0, SHORT_NAMES, "vocabulary.min_cooccurrence")
    values |= {f"vocabulary.{name}": value for name, value in settings["preparing"].items()}
    storage = {"values": "storage.code_weights"}
    for name, value in settings["stored"].items():
        values[storage.get(name, f"storage.{name}")] = value
    with TemporaryDirectory() as place:
        outcome = train_classifier(
            source.train,
            Path(place) / "out",
            values,
            test=source.test,
            seed=seed,
            progress=run.shown,
            log=run.say,
        )
    if outcome.fitted.interrupted:
        raise KeyboardInterrupt
    metrics = {name: value for name, value in outcome.metrics.items() if name != "settings"}
    measures, details = flattened(metrics)
    return Outcome(measures, [dict(row) for row in outcome.fitted.history], details)


def text_settings(settings: Mapping[str, Any], rows: int) -> ClassifierSettings:
    """Return the settings of a row, for a table of ``rows`` rows."""
    least = "vocabulary.min_cooccurrence"
    return ClassifierSettings.from_values(named_values(settings, rows, SHORT_NAMES, least, PARTS))


def named_values(
    settings: Mapping[str, Any],
    rows: int,
    names: Mapping[str, str],
    min_cooccurrence: str,
    own: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the dotted names and values of a row's settings, for a table of ``rows`` rows.

    >>> row = {"times": 4, "words": {"spec": "selected", "dim": 16}}
    >>> named_values(row, 1000, SHORT_NAMES, "vocabulary.min_cooccurrence")["table.spec"]
    'selected:keep=249'
    """
    words = {"spec": "dense", **settings.get("words", {})}
    word_names = {**WORD_NAMES, "least": min_cooccurrence}
    for what, given, known in (
        ("a row", settings, [*names, "words", "times", *own]),
        ("words", words, [*word_names]),
    ):
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ArgumentError(
                f"{', '.join(unknown)}: no setting of {what}, which takes {', '.join(known)}"
            )
    if "times" in settings:
        words = sized(words, settings["times"], rows)
    values = {word_names[key]: value for key, value in words.items()}
    return values | {names[key]: value for key, value in settings.items() if key in names}


def sized(words: Mapping[str, Any], times: float, rows: int) -> dict[str, Any]:
    """Return the settings of a table that has ``times`` fewer parameters than ``rows`` plain rows.

    >>> sized({"spec": "anchor:anchors=5", "dim": 8}, times=4, rows=100)["nonzeros"]
    160
    """
    method, settings = parse_spec(words["spec"])
    dim, goal = words["dim"], rows * words["dim"] / times
    joined = words["spec"] + ("," if settings else ":")
    keyword = method.settings_for(goal, rows, dim, settings)
    if keyword is not None:
        return {**words, "spec": joined + ",".join(f"{k}={v}" for k, v in keyword.items())}
    if not method.has_anchors:
        raise ArgumentError(
            f"times={times}: the size of {words['spec']!r} follows from its own settings; leave times out"
        )
    atoms = sum(method.anchor_sizes(settings))
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
    count = table.pruned_parameter_count()
    found = {"parameters": float(count), "times": dense / max(1, count)}
    try:
        packed = sum(table.pack().sizes_by_part().values())
    except NotPackable:
        return found
    return found | {"bytes": float(packed), "ratio": 4 * dense / packed}
