"""Click models (DLRM, DeepFM) over a collection of compact tables, at equal bytes.

Every method gets the same budget: the bytes of float32 rows divided by ``ratio``. Rows are trained
in one pass over the log in order of time and, after a table was compressed or with ``again_all``,
over the last part ``again`` of it. The last tenth of the log is the test; with ``validation`` the
scores are those of the tenth before it, which settings may be chosen by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import featherbed as fb
from research.harness.records import Outcome, Run
from research.sources.clicks import NUMBERS, ClickRows

DIM = 16
BLOCKS = 100  # of the test rows: the standard error of a difference follows from their losses
HEADER = 3000  # bytes that the header of a file takes at most


class Interactions(nn.Module):
    """DLRM (Naumov et al. 2019): dot products of all pairs of rows and the projected numbers."""

    def __init__(self, columns: int, dim: int = DIM, width: int = 64) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(NUMBERS, width), nn.ReLU(), nn.Linear(width, dim), nn.ReLU()
        )
        first, second = torch.tril_indices(columns + 1, columns + 1, -1)
        width_in = len(first) + dim
        self.top = nn.Sequential(nn.Linear(width_in, width), nn.ReLU(), nn.Linear(width, 1))
        self.register_buffer("pairs", first * (columns + 1) + second)
        self.pairs: Tensor

    def forward(self, rows: Tensor, numbers: Tensor) -> Tensor:  # [B, C, d], [B, 13] -> [B]
        """Return the log-odds of a click."""
        dense = self.bottom(numbers)
        every = torch.cat([dense[:, None], rows], dim=1)
        dots = (every @ every.mT).flatten(1).index_select(1, self.pairs)
        score: Tensor = self.top(torch.cat([dense, dots], dim=1))[:, 0]
        return score


class FactorizationNetwork(nn.Module):
    """DeepFM (Guo et al. 2017): a factorization machine and a network over the same rows.

    The first order weight of an id is a projection of its row.
    """

    def __init__(self, columns: int, dim: int = DIM, width: int = 64) -> None:
        super().__init__()
        self.numbers = nn.Linear(NUMBERS, dim)
        self.first = nn.Parameter(torch.randn(columns, dim) * 0.01)
        self.deep = nn.Sequential(
            nn.Linear((columns + 1) * dim, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, rows: Tensor, numbers: Tensor) -> Tensor:  # [B, C, d], [B, 13] -> [B]
        """Return the log-odds of a click."""
        every = torch.cat([self.numbers(numbers)[:, None], rows], dim=1)
        second = 0.5 * (every.sum(1).square() - every.square().sum(1)).sum(1)
        first = torch.einsum("bcd,cd->b", rows, self.first)
        score: Tensor = first + second + self.deep(every.flatten(1))[:, 0]
        return score


MODELS: dict[str, type[nn.Module]] = {"dlrm": Interactions, "deepfm": FactorizationNetwork}


class ClickModel(nn.Module):
    """A collection of tables and a model over its rows."""

    def __init__(self, kind: str, tables: fb.Collection) -> None:
        super().__init__()
        self.tables, self.model = tables, MODELS[kind](len(tables.names))

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Return the log-odds of clicks."""
        rows = self.tables(ids)
        score: Tensor = self.model(rows.reshape(len(ids), -1, DIM), numbers)
        return score

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the mean log loss of a batch."""
        return F.binary_cross_entropy_with_logits(self(*batch[:2]), batch[2])


def batches(rows: ClickRows, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield ids, numbers and labels, in order of time."""
    for start in range(0, len(rows.labels), size):
        part = slice(start, start + size)
        ids = torch.from_numpy(rows.ids[part].astype(np.int64))
        numbers = torch.from_numpy(rows.numbers[part])
        yield ids, numbers, torch.from_numpy(rows.labels[part])


def train(model: ClickModel, rows: ClickRows, settings: Mapping[str, Any], run: Run) -> None:
    """Train in order of time: tables by AdamW or, with a penalty, by Yogi; the model by Adam."""
    model.train()
    tables = list(model.tables.parameters())
    lam = settings.get("lam", 0.0)
    if lam:
        penalties = {parameter: fb.NonNegativeL1(lam) for parameter in model.tables.penalized}
        rowwise: Any = fb.Yogi(tables, lr=settings["table_lr"], penalties=penalties)
    else:
        rowwise = fb.AdamW(tables, lr=settings["table_lr"], weight_decay=0.0)
    dense = torch.optim.Adam(model.model.parameters(), lr=settings["lr"])
    epochs, total = settings.get("epochs", 1), 0.0
    steps = epochs * math.ceil(len(rows.labels) / settings["batch"])
    passes = (batch for _ in range(epochs) for batch in batches(rows, settings["batch"]))
    for number, batch in enumerate(passes):
        factor = min(1.0, (steps - number) / (0.3 * steps))  # constant, then down to 0
        for optimizer, lr in ((rowwise, settings["table_lr"]), (dense, settings["lr"])):
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            optimizer.zero_grad()
        loss = model.loss(batch) + fb.auxiliary_loss(model)
        torch.autograd.backward(loss)
        rowwise.step()
        dense.step()
        total += float(loss.detach())
        if number % 50 == 49:
            run.say(f"  step {number + 1} of {steps}: loss {total / 50:.4f}")
            total = 0.0
    fb.settle(model)


@torch.no_grad()
def evaluate(
    model: ClickModel, look_up: Callable[[NDArray[Any]], Any], rows: ClickRows, size: int = 8192
) -> tuple[dict[str, float], list[float]]:
    """Return AUC and log loss of a model whose rows come from ``look_up`` (the packed file).

    Also returned is the mean loss of each of 100 blocks of consecutive test rows.
    """
    from sklearn.metrics import roc_auc_score

    model.eval()
    scores = []
    for ids, numbers, _ in batches(rows, size):
        found = torch.from_numpy(look_up(ids.numpy())).reshape(len(ids), -1, DIM)
        scores.append(torch.sigmoid(model.model(found, numbers)))
    chance = torch.cat(scores).double().clamp(1e-7, 1 - 1e-7).numpy()
    losses = -np.log(np.where(rows.labels > 0, chance, 1 - chance))
    measures = {"auc": float(roc_auc_score(rows.labels, chance)), "log_loss": float(losses.mean())}
    return measures, [round(float(part.mean()), 6) for part in np.array_split(losses, BLOCKS)]


def run_clicks(settings: Mapping[str, Any], seed: int, source: Any, run: Run) -> Outcome:
    """Train a click model with tables of one method at a budget, store it, measure the file."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = source.open(settings, seed)
    budget = int(4 * DIM * sum(data.sizes) / settings["ratio"])
    method = settings["method"]
    if method in ("dense", "int4 rows", "graded by counts", "budget"):
        model = dense_model(settings, seed, data, run)
        model, how, report = AFTER[method](model, data, budget, settings, run)
    else:
        spec, how = SPECS[method](data, budget)
        if method in BY_COUNTS:
            rows = {"counts": data.all_counts(), **spec}
            whole = BY_COUNTS[method](sum(data.sizes), DIM, **rows)
            tables = fb.Collection([whole], data.columns())
        else:
            columns = {str(c): (size, DIM, spec) for c, size in enumerate(data.sizes)}
            tables = fb.Collection.from_spec(columns)
        for table in tables.all_tables():
            table.scale_initial_rows(settings["init_std"])
        model, report = ClickModel(settings["model"], tables), None
        train(model, data.train, settings, run)
        if settings.get("again_all"):
            train_again(model, data, settings, run)
    run.work.mkdir(parents=True, exist_ok=True)
    path = Path(run.work) / f"{run.row or method}.safetensors"
    model.tables.pack(**how).save(path)
    packed = fb.PackedCollection.load(path)
    measures, losses = evaluate(model, packed.__getitem__, data.test)
    size = path.stat().st_size
    measures |= {"bytes": float(size), "ratio": 4 * DIM * sum(data.sizes) / size}
    details: dict[str, Any] = {"losses": losses}
    if report is not None:
        details |= {"bits": report.bits, "curve": report.curve}
    return Outcome(measures, [], details)


def dense_model(settings: Mapping[str, Any], seed: int, data: Any, run: Run) -> ClickModel:
    """Return the model over plain rows, trained once for all methods that start from it."""
    sizes = {str(c): (size, DIM, "dense:sparse=true") for c, size in enumerate(data.sizes)}
    tables = fb.Collection.from_spec(sizes)
    with torch.no_grad():
        for table in tables.all_tables():
            table.scale_initial_rows(settings["init_std"])
    model = ClickModel(settings["model"], tables)
    size = f"{len(data.train.labels)}-{sum(data.sizes)}"
    path = Path(run.work) / f"dense-{settings['model']}-{size}-{seed}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path))
        return model
    train(model, data.train, settings, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def as_it_is(
    model: ClickModel, data: Any, budget: int, settings: Mapping[str, Any], run: Run
) -> Any:
    """Keep the float32 rows."""
    return model, {}, None


def low_bits(
    model: ClickModel, data: Any, budget: int, settings: Mapping[str, Any], run: Run
) -> Any:
    """Fit rows of a few numbers and a projection, stored in int4: as wide as the budget allows."""
    width = max(1, int((budget - HEADER) / sum(data.sizes) * 2))
    table = fb.MixedTable.from_dense(
        model.tables.all_tables()[0].weight.detach(), dims=[min(width, DIM - 1)]
    )
    model.tables = fb.Collection([table], data.columns())
    if settings.get("again_all"):
        train_again(model, data, settings, run)
    return model, {"values": "int4", "dictionary": "float16"}, None


def train_again(model: ClickModel, data: Any, settings: Mapping[str, Any], run: Run) -> None:
    """Train on the last part of the log once more, at lower learning rates."""
    again = int(settings["again"] * len(data.train.labels))
    if again:
        softly = {**settings, "table_lr": 0.3 * settings["table_lr"], "lr": 0.3 * settings["lr"]}
        train(model, data.train[slice(len(data.train.labels) - again, None)], softly, run)


def graded(
    model: ClickModel,
    data: Any,
    budget: int,
    settings: Mapping[str, Any],
    run: Run,
    importance: dict[str, Tensor] | None = None,
) -> Any:
    """Divide the budget by the counts of ids, or by ``importance``; then train a part again."""
    by_counts = {str(c): torch.from_numpy(n).double() for c, n in enumerate(data.counts)}
    model.tables = model.tables.compress(budget, importance or by_counts)
    report = model.tables.report
    train_again(model, data, settings, run)
    return model, {}, report


def divided(
    model: ClickModel, data: Any, budget: int, settings: Mapping[str, Any], run: Run
) -> Any:
    """Divide the budget by the sensitivity measured in a pass over a part of the log."""
    part = data.train[slice(len(data.train.labels) - settings["measured"], None)]
    importance = model.tables.importance(batches(part, settings["batch"]), model.loss)
    model.zero_grad()
    return graded(model, data, budget, settings, run, importance)


AFTER = {
    "dense": as_it_is,
    "int4 rows": low_bits,
    "graded by counts": graded,
    "budget": divided,
}


def hashing(data: Any, budget: int) -> Any:
    """Return shared rows in float16."""
    buckets = (budget - HEADER) // (2 * DIM)
    return f"hashed:buckets={buckets},hashes=1", {"dictionary": "float16"}


def quotient_remainder(data: Any, budget: int) -> Any:
    """Return quotient-remainder rows in float16."""
    divisor = max(1, math.ceil(sum(data.sizes) / ((budget - HEADER) / (2 * DIM))))
    return f"remainder:divisor={divisor}", {"dictionary": "float16"}


def anchors(data: Any, budget: int) -> Any:
    """Return one weighted anchor a row, or two: as many as the budget allows, weights in int4."""
    bits = 8 * (budget - HEADER - 2**8 * DIM * 4) / sum(data.sizes)
    index = max(2, min(8, int(bits) - 4))
    slots = max(1, int(bits / (index + 4)))
    start = "init=halfnormal(transform_std=0.5)"
    return f"anchor:anchors={2**index},slots={slots},{start}", {"values": "int4", "layout": "fixed"}


def product_codes(data: Any, budget: int) -> Any:
    """Return DPQ codes of as many bits as the budget allows."""
    bits = 8 * (budget - HEADER - 2**8 * DIM * 2) / sum(data.sizes)
    parts = 4 if bits >= 16 else 2
    choices = 2 ** max(1, min(8, int(bits / parts)))
    return f"product:choices={choices},parts={parts},sparse=true", {"dictionary": "float16"}


def hot_and_tail(data: Any, budget: int) -> Any:
    """Return plain rows for the most frequent ids and shared rows for the others, in float16."""
    rows = (budget - HEADER - sum(data.sizes) // 6) // (2 * DIM)  # a bit an id says which are hot
    spec = {"hot": int(0.6 * rows), "tail": f"hashed:buckets={int(0.4 * rows)},hashes=1"}
    return spec | {"head": "dense:sparse=true"}, {"dictionary": "float16"}


def mixed_dimensions(data: Any, budget: int) -> Any:
    """Return 16 numbers of int8 for popular ids and 2 numbers of int4 for all others."""
    total = sum(data.sizes)
    left = budget - HEADER - total - total // 7  # a byte for every id, and which are popular
    if left < 1000:
        raise fb.ArgumentError("the budget holds no number for every id: mixed dimensions cannot")
    wide = min(total // 3, left // (DIM - 1))
    spec = {"dims": [DIM, 2], "blocks": [wide, total - wide], "sparse": True}
    return spec, {"values": "int4", "dictionary": "int8"}


BY_COUNTS: dict[str, Any] = {"hot and tail": fb.BandedTable, "mixed dimensions": fb.MixedTable}
SPECS = {
    "hashing": hashing,
    "quotient-remainder": quotient_remainder,
    "anchors": anchors,
    "product codes": product_codes,
    "hot and tail": hot_and_tail,
    "mixed dimensions": mixed_dimensions,
}
