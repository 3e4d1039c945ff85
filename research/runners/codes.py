"""KD codes in a language model: relaxations, entropy, and a guide trained before.

``loss = "sum"`` sums the cross-entropy over the time steps of a segment, as the authors' code does:
``lr``, ``clip`` and the weights of the entropy and the guide are then those of the summed loss. It
is trained as n (mean loss + terms / n) for segments of n steps: the same gradients, so SGD has the
learning rate n lr and the clipping norm clip / n.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import featherbed as fb
from featherbed.apps.language.model import LSTMModel
from featherbed.apps.language.train import perplexity
from featherbed.errors import ArgumentError
from featherbed.io.texts import Corpus
from featherbed.tables.spec import parse_spec
from research.harness.records import Outcome, Run, outcome_of
from research.runners.language import shortened
from research.runners.tables import train_lstm

GUIDE_TERMS = ("weight", "reconstruct", "agree")


def run_codes(settings: Mapping[str, Any], seed: int, source: Corpus, run: Run) -> Outcome:
    """Train a language model on a dense or coded table, and keep the table as a guide for others.

    ``words`` cuts every part of the corpus, ``cut`` the training text only. Trained tables are not
    part of the repository: a guide that is absent is trained again, without a second record.
    """
    words, parts = settings.get("words"), ("train", "validation", "test")
    corpus = dataclasses.replace(source, **{part: getattr(source, part)[:words] for part in parts})
    corpus = shortened(corpus, settings["cut"]) if "cut" in settings else corpus
    torch.set_num_threads(1)
    guide = settings.get("guide")
    if guide is not None and not table_path(run.work, guide, seed).exists():
        run.say(f"the table of row {guide} is not kept here: it is trained again first")
        dense = {key: settings[key] for key in settings if key not in ("guide", "autoencode")}
        run_codes(dense | {"table": "dense"}, seed, source, dataclasses.replace(run, row=guide))
    generator = torch.Generator().manual_seed(seed)
    table = make_coded(settings, len(corpus.words), generator, run.work, seed)
    torch.manual_seed(seed)
    model = LSTMModel(
        table, hidden=settings["dim"], tied=settings["tied"], dropout=settings["dropout"]
    )
    model.precision = torch.bfloat16 if settings.get("precision") == "bfloat16" else None
    steps = summed_steps(settings)
    optimizer = make_optimizer(model, {**settings, "lr": settings["lr"] * steps})
    if "clip" in settings:
        settings = {**settings, "clip": settings["clip"] / steps}
    schedule = falling_rate(settings) if "lr_decay" in settings else None
    result = train_lstm(model, optimizer, corpus, settings, seed, run, schedule)
    result.metrics["test"] = {"perplexity": perplexity(model, corpus.test)}
    health = table.health()
    if health is not None:
        result.metrics["codes"] = {
            "utilisation": health.utilization,
            "duplicates": health.duplicates,
            "entropy": sum(health.entropy) / len(health.entropy),
        }
    outcome = outcome_of(result)
    run.work.mkdir(parents=True, exist_ok=True)
    fb.save(table.eval(), table_path(run.work, run.row, seed))
    return outcome


def summed_steps(settings: Mapping[str, Any]) -> int:
    """Return the number of time steps that the loss is summed over, 1 for the mean.

    >>> summed_steps({"length": 35}), summed_steps({"length": 35, "loss": "sum"})
    (1, 35)
    """
    kind = settings.get("loss", "mean")
    if kind not in ("mean", "sum"):
        raise ArgumentError(f"loss={kind!r}: over the time steps of a segment, use mean or sum")
    return int(settings["length"]) if kind == "sum" else 1


def falling_rate(settings: Mapping[str, Any]) -> Callable[[float], float]:
    """Return the factor of the learning rate: ``lr_decay`` for each epoch after ``full_epochs``.

    >>> factor = falling_rate({"epochs": 4, "full_epochs": 2, "lr_decay": 0.5})
    >>> [factor(fraction) for fraction in (0.0, 0.49, 0.5, 0.75)]
    [1.0, 1.0, 0.5, 0.25]
    """
    epochs, full, decay = (settings[key] for key in ("epochs", "full_epochs", "lr_decay"))

    def factor(fraction: float) -> float:
        epoch = int(fraction * epochs + 1e-6)
        return float(decay ** max(0, epoch + 1 - full))

    return factor


def table_path(work: Path, row: str, seed: int) -> Path:
    """Return where the trained table of a row is kept."""
    return work / f"{row}-seed-{seed}.safetensors"


def make_coded(
    settings: Mapping[str, Any], rows: int, generator: torch.Generator, work: Path, seed: int
) -> Any:
    """Return the table of a row; its guide is the trained dense table of another row.

    ``guide_weights`` are those of the row, its reconstruction and the agreement of codes;
    ``guide_weight`` is the first of them, with a tenth and a hundredth of it for the others.
    """
    method: Any
    method, given = parse_spec(settings["table"])
    steps = summed_steps(settings)
    if "relax" in given:
        entropy = given["relax"].entropy / steps
        given["relax"] = dataclasses.replace(given["relax"], entropy=entropy)
    if "guide" in settings:
        matrix = torch.from_numpy(fb.load(table_path(work, settings["guide"], seed))[range(rows)])
        first = settings.get("guide_weight", 0.0)
        weights = settings.get("guide_weights", (first, first / 10, first / 100))
        given["guide"] = fb.Pretrained(
            matrix,
            autoencode=settings["autoencode"],
            normalize=settings.get("encoder_norm", False),
            **{name: weight / steps for name, weight in zip(GUIDE_TERMS, weights, strict=True)},
        )
    table: Any = method(rows, settings["dim"], generator=generator, **given)
    table.scale_initial_rows(settings["init_std"])
    return table


def make_optimizer(model: torch.nn.Module, settings: Mapping[str, Any]) -> Any:
    """Return SGD, with SparseAdam for the logits of codes."""
    codes, others = fb.split_codes(model)
    step = torch.optim.SGD(others, lr=settings["lr"])
    if not codes:
        return step
    return fb.Several(step, torch.optim.SparseAdam(codes, lr=settings["code_lr"]))
