"""The training of a sequence model, and its evaluation in torch."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from featherbed.apps.pipeline import Checkpoints, Result, Training, warmup_cosine
from featherbed.apps.sequences.data import Sequences, batches, windows
from featherbed.apps.sequences.model import SequenceModel, build_model, build_users
from featherbed.apps.sequences.ranking import metrics_of, rank_targets
from featherbed.apps.sequences.settings import MAX_FULL, SequenceSettings
from featherbed.apps.words import (
    FittedText,
    Lexicon,
    WordTable,
    build_word_table,
    table_schedulers,
)
from featherbed.graphs import Graph
from featherbed.optim import AdamW, Budget, Several, clip_grad_norm_
from featherbed.progress import show_progress
from featherbed.sharing import SSE
from featherbed.tables import auxiliary_loss, split_codes

EVALUATED = 10_000  # users of an evaluation, drawn if there are more
WARMUP = 0.05  # of all steps
CODE_LR = 3e-3  # of code logits, in an optimizer of their own


class FittedSequenceModel(FittedText[SequenceModel]):
    """A trained sequence model, its table of items (``words``), and the record of its training."""


def fit_sequences(
    settings: SequenceSettings,
    sequences: Sequences,
    *,
    graph: Graph | None = None,
    repeats: bool = False,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
    progress: bool = True,
    name: str = "sequences",
) -> FittedSequenceModel:
    """Train a sequence model; the epoch with the best NDCG@10 of the validation items is kept.

    With ``checkpoints`` every epoch is saved, and a stopped run continues from the last; Ctrl-C
    ends training early with the best model so far. ``graph`` relates items (SSE-Graph).

    >>> from featherbed.io.records import Events
    >>> ids = np.arange(200)
    >>> events = Events(ids // 10, ids % 7, [*map(str, range(20))], [*map(str, range(7))])
    >>> values = {"table.dim": 8, "model.length": 6, "training.epochs": 2}
    >>> settings = SequenceSettings.from_values(values)
    >>> fitted = fit_sequences(settings, Sequences.of(events), progress=False)
    >>> [row["epoch"] for row in fitted.history]
    [0, 1]
    """
    sequences.check()
    torch.manual_seed(seed)  # dropout uses torch's global generator
    items, model = prepare_model(settings, sequences, graph, seed)
    optimizer = build_optimizer(settings, model, items)
    loop, length = settings.training, settings.model.length
    counts = [
        -(-len(windows(sequences, length + 1, (seed, epoch))) // loop.batch)
        for epoch in range(loop.epochs)
    ]
    ends = np.cumsum([0, *counts]).tolist()
    schedulers = table_schedulers(settings.table.word_table, items, ends[-1])
    result = Result(name, settings.values(), seed)
    training = Training(
        result,
        model,
        optimizer,
        metric="validation_miss",
        patience=loop.epochs if schedulers else loop.patience,
        checkpoints=checkpoints,
        schedulers=schedulers,
    )
    completed = ends[min(training.start_epoch, loop.epochs)]
    display = show_progress(name, ends[-1], completed=completed, shown=progress)
    with training, display as shown:
        for epoch in training.epochs(loop.epochs):
            begin, total, positions = time.perf_counter(), 0.0, 0
            parts = windows(sequences, length + 1, (seed, epoch))
            model.train()
            drawn = batches(sequences, parts, loop.batch, (seed, epoch))
            for step, batch in enumerate(drawn, ends[epoch]):
                for group in optimizer.param_groups:
                    initial = group.setdefault("initial_lr", group["lr"])
                    group["lr"] = initial * warmup_cosine(step, ends[-1], WARMUP)
                users, targets, lengths = map(torch.from_numpy, batch)
                optimizer.zero_grad()
                loss = model.loss(targets, lengths, users)
                (loss + auxiliary_loss(model)).backward()  # type: ignore[no-untyped-call]
                clip_grad_norm_(split_codes(model)[1], loop.clip)
                optimizer.step()
                for scheduler in schedulers:
                    scheduler.step()
                count = int(batch.lengths.sum())
                total, positions = total + float(loss.detach()) * count, positions + count
                speed = positions / (time.perf_counter() - begin)
                note = f"epoch {epoch}, loss {total / positions:.3f}, {speed:,.0f} items/s"
                shown.update(advance=1, note=note)
            seconds = time.perf_counter() - begin
            found = evaluate(model, sequences, "validation", length, repeats, seed)
            row = {"epoch": epoch, "train_loss": total / positions, "seconds": seconds}
            row["items_per_second"] = positions / seconds
            row |= {f"validation_{metric}": value for metric, value in found.items()}
            row["validation_miss"] = 1 - found["ndcg@10"]  # the lowest is the best
            row["parameters"] = model.table.parameter_count()
            training.record(row)
    for budget in [one for one in schedulers if isinstance(one, Budget)]:
        budget.finish()
    return FittedSequenceModel(model, items, result)


def prepare_model(
    settings: SequenceSettings, sequences: Sequences, graph: Graph | None, seed: int
) -> tuple[WordTable, SequenceModel]:
    """Return the item table and the model with initial weights."""
    given, sse, generator = settings.model, settings.sse, torch.Generator().manual_seed(seed)
    lexicon = Lexicon([*sequences.item_keys], sequences.counts, samples=len(sequences.items))
    items = build_word_table(settings.table.word_table, lexicon, seed)
    inputs, targets = (
        SSE(items.table, p, graph=graph, rho=sse.rho, generator=generator)
        for p in (sse.inputs, sse.targets)
    )
    users = build_users(len(sequences), given.users, sse.users, generator) if given.users else None
    is_sampled = given.softmax == "sampled" or (
        given.softmax is None and len(sequences.counts) > MAX_FULL
    )
    samples = min(given.samples, len(sequences.counts)) if is_sampled else None
    return items, build_model(given, inputs, targets, users, samples, generator)


def build_optimizer(
    settings: SequenceSettings, model: SequenceModel, items: WordTable
) -> torch.optim.Optimizer:
    """Return AdamW with the table's penalties; code logits have an optimizer of their own."""
    codes, others = split_codes(model)
    loop = settings.training
    optimizer: torch.optim.Optimizer = AdamW(
        others,
        loop.lr,
        betas=(0.9, 0.98),
        weight_decay=loop.weight_decay,
        penalties=items.penalties,
    )
    if codes:
        optimizer = Several(optimizer, AdamW(codes, CODE_LR, weight_decay=0.0))
    return optimizer


@torch.no_grad()
def evaluate(
    model: SequenceModel,
    sequences: Sequences,
    part: str,
    length: int,
    repeats: bool = False,
    seed: int = 0,
) -> dict[str, float]:
    """Return the metrics of a model in torch on the validation or test items."""
    model.eval()
    rows = model.table.weight

    def score(ids: Any, lengths: Any, users: Any) -> Any:
        given = [torch.from_numpy(part) for part in (ids, lengths, users)]
        return model.scores(given[0], given[1], given[2], rows).numpy()

    task = sequences.task(part, EVALUATED, seed)
    return metrics_of(*rank_targets(score, sequences, task, length, repeats=repeats, seed=seed))
