"""From a file of events to a stored sequence model: training, measuring, the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from featherbed.apps.pipeline import Checkpoints, Result, Training, warmup_cosine
from featherbed.apps.sequences.data import Ids, SequenceData, Sequences, Task, batches, windows
from featherbed.apps.sequences.model import SequenceModel, build_model, build_users
from featherbed.apps.sequences.ranking import metrics_of, rank_targets
from featherbed.apps.sequences.serve import SequenceRecommender, SequenceShape, write_sequences
from featherbed.apps.sequences.settings import MAX_FULL, SequenceSettings, SequenceStorage
from featherbed.apps.words import Lexicon, WordTable, build_word_table, table_schedulers
from featherbed.graphs import Graph
from featherbed.optim import AdamW, Budget, Several, clip_grad_norm_
from featherbed.packed import IntegerKeys, Keys, PackedTable, file_size
from featherbed.progress import show_progress
from featherbed.sharing import SSE, bare
from featherbed.tables import GradedTable, Table, auxiliary_loss, split_codes

EVALUATED = 10_000  # users of an evaluation, drawn if there are more
WARMUP = 0.05  # of all steps
CODE_LR = 3e-3  # of code logits, in an optimizer of their own
COUNT_POWER, GRADES = 0.5, 4  # row weights are counts to this power when bits are divided
ATTEMPTS, MIN_BITS = 8, 0.5  # until the file of graded rows is small enough


@dataclass(frozen=True)
class FittedSequenceModel:
    """A trained sequence model, its item table, and the record of its training."""

    model: SequenceModel
    items: WordTable
    result: Result

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row of numbers per epoch."""
        return self.result.history

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended training early."""
        return self.result.interrupted

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the item table."""
        return self.items.notes


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
        given = map(torch.from_numpy, (ids, lengths, users))
        return model.scores(*given, rows=rows).numpy()

    task = sequences.task(part, EVALUATED, seed)
    return metrics_of(*rank_targets(score, sequences, task, length, repeats=repeats, seed=seed))


def evaluate_stored(
    served: SequenceRecommender,
    sequences: Sequences,
    part: str,
    seed: int = 0,
    after: Callable[[int], None] = lambda _: None,
) -> tuple[Task, Ids, Ids]:
    """Return the evaluated users of a stored model, and the ranks of their items.

    The first ranks are among all items, the others among 100 sampled ones.
    """

    def score(ids: Ids, lengths: Ids, users: Ids) -> Any:
        return served.batch_scores(ids, lengths, served.user_rows(users))

    task, length = sequences.task(part, EVALUATED, seed), served.shape.length
    options: dict[str, Any] = {"repeats": served.repeats, "seed": seed, "after": after}
    return task, *rank_targets(score, sequences, task, length, **options)


@torch.no_grad()
def pack_rows(
    table: Table, keys: Sequence[str], storage: SequenceStorage, counts: Ids | None = None
) -> PackedTable:
    """Return the packed form of a table with keys; dense rows become graded rows of ``ratio``.

    >>> import featherbed as fb
    >>> table = fb.DenseTable(2000, 32)
    >>> packed = pack_rows(table, [*map(str, range(2000))], SequenceStorage(ratio=8))
    >>> 8 <= 4 * 2000 * 32 / file_size(packed, keys=False) < 8.2
    True
    """
    if not table.is_dense:
        kinds = {"values": storage.code_weights, "dictionary": storage.dictionary}
        packed = table.pruned().pack(**kinds)
    else:
        elements = table.num_embeddings * table.embedding_dim
        weights = None if counts is None else torch.from_numpy((counts + 1.0) ** COUNT_POWER)
        bits, target = min(8.0, 32 / storage.ratio), 4 * elements / storage.ratio
        for _ in range(ATTEMPTS):
            graded = GradedTable.from_dense(
                table.weight.detach(), bits=bits, grades=GRADES, counts=weights
            )
            packed = graded.pack(values="float16")
            over = file_size(packed, keys=False) - target
            if over <= 0:
                break
            bits = max(MIN_BITS, bits - 8 * (over + 1) / elements)
    form = "integer" if isinstance(keys, IntegerKeys) else "plain"
    return packed.replace(keys=Keys.of(keys, form))


@torch.no_grad()
def write_model(
    folder: Path,
    fitted: FittedSequenceModel,
    settings: SequenceSettings,
    data: SequenceData,
    about: dict[str, Any] | None = None,
) -> SequenceRecommender:
    """Write a trained model, and open it."""
    model, storage, sequences = fitted.model.eval(), settings.storage, data.sequences
    keys, given = sequences.item_keys, settings.model
    users = None if model.users is None else bare(model.users)
    shape = SequenceShape(
        items=len(keys),
        dim=settings.table.dim,
        users=given.users,
        length=given.length,
        layers=given.layers,
        heads=given.heads,
        inner=given.inner * settings.width,
    )
    write_sequences(
        folder,
        pack_rows(model.table, keys, storage, sequences.counts),
        served_weights(model),
        shape,
        repeats=data.repeats,
        users=None if users is None else pack_rows(users, sequences.user_keys, storage),
        titles=None if data.titles is None else data.titles.names,
        precision=storage.weights,
        about=about,
    )
    return SequenceRecommender.open(folder)


@torch.no_grad()
def served_weights(model: SequenceModel) -> dict[str, Any]:
    """Return the weights that serving reads, by name."""
    found = {"positions": model.positions, "norm.weight": model.norm.weight}
    found["norm.bias"] = model.norm.bias
    for number, block in enumerate(model.blocks):
        state = block.state_dict()
        found |= {f"layer{number}.{name}": value for name, value in state.items()}
    if model.users is not None:
        found["user_mean"] = bare(model.users).weight.mean(0)
    return {name: value.detach().numpy() for name, value in found.items()}
