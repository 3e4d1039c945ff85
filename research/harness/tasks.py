"""The registry of tasks: which function runs a row, which one opens its data, which one plans rows."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Task:
    """A kind of experiment; functions are written as ``module:name``, relative to ``research``.

    ``run`` takes (settings, seed, source, run) and returns an Outcome. ``open`` takes (name, data,
    quick) and returns the source. ``plan``, where rows follow from results of another experiment,
    takes (experiment, folder of results) and returns the rows.
    """

    run: str
    open: str = "sources.ratings:open_source"
    plan: str = ""


TEXTS, CORPUS, NO_DATA = (f"sources.texts:open_{kind}" for kind in ("texts", "corpus", "nothing"))
TASKS = {
    "ratings": Task("runners.ratings:run_recipe"),
    "online": Task("runners.online:run_online"),
    "factors": Task("runners.factors:run_factors"),
    "ranking": Task("runners.ranking:run_ranking"),
    "stored-ranking": Task("runners.ranking:run_stored", "sources.ratings:open_lines"),
    "counted-ranking": Task("runners.ranking:run_defaults", "sources.counts:open_counts"),
    "folded-ratings": Task("runners.folding:run_folded", "sources.ratings:open_lines"),
    "text": Task("runners.text:run_text", TEXTS),
    "language": Task("runners.language:run_language", CORPUS),
    "literal": Task("runners.literal:run_literal"),
    "softmax": Task("runners.softmax:run_softmax", CORPUS),
    "planted": Task("runners.planted:run_planted", NO_DATA),
    "anchors": Task("runners.anchors:run_anchors"),
    "tables": Task("runners.tables:run_ratings"),
    "tables-language": Task("runners.tables:run_language", CORPUS),
    "codes": Task("runners.codes:run_codes", CORPUS),
    "sweep": Task("runners.sweep:run_sweep"),
    "rademacher": Task("runners.rademacher:run_rademacher"),
    "clouds": Task("runners.clouds:run_clouds"),
    "stored-text": Task("runners.text:run_stored_text", "sources.texts:open_files"),
    "fasttext": Task("runners.fasttext:run_fasttext", "sources.texts:open_files"),
    "gpt": Task("runners.models:run_gpt", CORPUS),
    "minilm": Task("runners.models:run_minilm", "sources.texts:open_sentences"),
    "onnx": Task("runners.whole:run_onnx", "sources.texts:open_sentences"),
    "whole": Task("runners.whole:run_whole", CORPUS),
    "static": Task("runners.whole:run_static", "sources.texts:open_static"),
    "translation": Task("models.translation:run_translation", "models.translation:open_pairs"),
    "bert": Task("models.bert:run_bert", "models.bert:open_reviews"),
    "search": Task("runners.recommenders:run_trial"),
    "clicks": Task("runners.clicks:run_clicks", "sources.clicks:open_clicks"),
    "sequences": Task("runners.sequences:run_sequences", "sources.events:open_events"),
    "gcn": Task("models.gcn:run_gcn", "sources.citations:open_planetoid"),
    "hashes": Task("models.hashes:run_hashes", "sources.neighbors:open_rows"),
    "tagging": Task("models.tagging:run_tagging", "sources.tagging:open_tagged"),
    "final": Task("runners.recommenders:run_final", plan="runners.recommenders:plan_final"),
}


def function(name: str) -> Any:
    """Return a function of the registry by its ``module:name``."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"research.{module}"), attribute)
