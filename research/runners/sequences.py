"""Rows that are sequence models, trained as ``featherbed train sequences`` trains them.

Settings are those of ``SequenceSettings`` with their dotted names; ``graph = true`` relates items by
the graph of the data (SSE-Graph).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from featherbed.apps.sequences.data import SequenceData
from featherbed.apps.sequences.fit import evaluate, fit_sequences
from featherbed.apps.sequences.ranking import metrics_of
from featherbed.apps.sequences.settings import SequenceSettings
from featherbed.apps.sequences.train import evaluate_stored, write_model
from featherbed.errors import ArgumentError
from featherbed.packed import file_size
from research.harness.records import Outcome, Run
from research.sources.events import EventSource


def run_sequences(settings: Mapping[str, Any], seed: int, source: EventSource, run: Run) -> Outcome:
    """Train a model and rank all items for the test items once, by the model and as it is stored."""
    values = {name: value for name, value in settings.items() if name != "graph"}
    chosen, sequences = SequenceSettings.from_values(values), source.sequences
    graph = source.graph if settings.get("graph") else None
    if settings.get("graph") and graph is None:
        raise ArgumentError("graph: nothing is known of how these items are related")
    fitted = fit_sequences(
        chosen,
        sequences,
        graph=graph,
        seed=seed,
        checkpoints=run.checkpoints(settings, seed),
        progress=run.shown,
        name=run.title,
    )
    if fitted.interrupted:
        raise KeyboardInterrupt
    length = chosen.model.length
    measures = evaluate(fitted.model, sequences, "test", length, seed=seed)
    data = SequenceData(sequences, None, False, [])
    with TemporaryDirectory() as folder:
        served = write_model(Path(folder), fitted, chosen, data)
        stored = metrics_of(*evaluate_stored(served, sequences, "test", seed)[1:])
        bytes_ = file_size(served.items, keys=False)
    best = min(fitted.history, key=lambda row: row["validation_miss"])
    dense = 4 * len(sequences.counts) * chosen.table.dim
    measures |= {f"stored_{name}": value for name, value in stored.items()}
    measures |= {"validation": best["validation_ndcg@10"], "epochs": best["epoch"] + 1.0}
    measures |= {"bytes": float(bytes_), "ratio": dense / bytes_}
    return Outcome(measures, [dict(row) for row in fitted.history])
