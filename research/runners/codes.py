"""KD codes in a language model: relaxations, entropy, and a guide trained before."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import featherbed as fb
from featherbed.apps.language.model import LSTMModel
from featherbed.apps.language.train import perplexity
from featherbed.errors import DataError
from featherbed.io.texts import Corpus
from featherbed.tables.spec import parse_spec
from research.harness.records import Outcome, Run, outcome_of
from research.runners.tables import train_lstm


def run_codes(settings: Mapping[str, Any], seed: int, source: Corpus, run: Run) -> Outcome:
    """Train a language model on a dense or coded table, and keep the table as a guide for others."""
    words = settings.get("words")
    parts = ("train", "validation", "test")
    corpus = dataclasses.replace(source, **{part: getattr(source, part)[:words] for part in parts})
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    table = make_coded(settings, len(corpus.words), generator, run.work, seed)
    torch.manual_seed(seed)
    model = LSTMModel(
        table, hidden=settings["dim"], tied=settings["tied"], dropout=settings["dropout"]
    )
    optimizer = make_optimizer(model, settings)
    result = train_lstm(model, optimizer, corpus, settings, seed, run)
    result.metrics["test"] = {"perplexity": perplexity(model, corpus.test)}
    health = table.health()
    if health is not None:
        result.metrics["codes"] = {
            "utilisation": health.utilisation,
            "duplicates": health.duplicates,
            "entropy": sum(health.entropy) / len(health.entropy),
        }
    outcome = outcome_of(result)
    run.work.mkdir(parents=True, exist_ok=True)
    fb.save(table.eval(), table_path(run.work, run.row, seed))
    return outcome


def table_path(work: Path, row: str, seed: int) -> Path:
    """Return where the trained table of a row is kept."""
    return work / f"{row}-seed-{seed}.safetensors"


def make_coded(
    settings: Mapping[str, Any], rows: int, generator: torch.Generator, work: Path, seed: int
) -> Any:
    """Return the table of a row; its guide is the trained dense table of another row."""
    method: Any
    method, given = parse_spec(settings["table"])
    if "guide" in settings:
        path = table_path(work, settings["guide"], seed)
        if not path.exists():
            raise DataError(f"no table {path}: run row {settings['guide']} first, it is the guide")
        matrix = torch.from_numpy(fb.load(path)[range(rows)])
        weights = {
            name: settings["guide_weight"] / ratio
            for name, ratio in (("weight", 1), ("reconstruct", 10), ("agree", 100))
        }
        given["guide"] = fb.Pretrained(matrix, autoencode=settings["autoencode"], **weights)
    table: Any = method(rows, settings["dim"], generator=generator, **given)
    with torch.no_grad():
        (table.weight if method is fb.DenseTable else table.atoms).mul_(settings["init_std"])
    return table


def make_optimizer(model: torch.nn.Module, settings: Mapping[str, Any]) -> Any:
    """Return SGD, with SparseAdam for the logits of codes."""
    codes, others = fb.split_codes(model)
    step = torch.optim.SGD(others, lr=settings["lr"])
    if not codes:
        return step
    return fb.Several(step, torch.optim.SparseAdam(codes, lr=settings["code_lr"]))
