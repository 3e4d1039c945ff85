"""Three ways from ratings to packed rows: graded rows, tables by spec, and streamed plain rows."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.apps.checkpoints import Checkpoints
from featherbed.apps.pipeline import Log, ignore
from featherbed.apps.recommender.bayes import MAX_BYTES, required_bytes
from featherbed.apps.recommender.data import Split
from featherbed.apps.recommender.graded import fit_graded
from featherbed.apps.recommender.settings import RecommenderSettings
from featherbed.apps.recommender.stream import MAX_DIM, StreamedFactorization, StreamSettings
from featherbed.codecs.target import read_bytes
from featherbed.io.records import Ratings
from featherbed.packed.band import Band
from featherbed.packed.codes import Identity
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable
from featherbed.progress import show_progress
from featherbed.tables.spec import parse_spec

Floats = NDArray[np.float32]
BLOCK = 1 << 18  # ratings predicted at once
RATIO = 8  # default ratio of graded rows to float32 rows
HEADERS = 1_200  # approximate bytes of the headers of two files
STREAM = 5_000_000  # ratings from which plain rows are streamed
ROUNDS = 26  # maximum number of rounds of fitting graded rows
STREAM_STD = 1.1  # of the ratings that the step sizes of streams were chosen for (MovieLens-1M)


@dataclass(frozen=True)
class PackedFactors:
    """A ratings model as it is stored: packed rows, mean and biases."""

    users: PackedTable
    items: PackedTable
    mean: float
    biases: str = "column"
    user_bias: Floats | None = None
    item_bias: Floats | None = None

    def predict(self, ratings: Ratings) -> Iterator[Floats]:
        """Yield predicted ratings in blocks."""
        for begin in range(0, len(ratings), BLOCK):
            users, items = (
                np.asarray(ids[begin : begin + BLOCK], dtype=np.int64)
                for ids in (ratings.users, ratings.items)
            )
            left, right = self.users[users], self.items[items]
            if self.biases == "column":
                scores = np.einsum("nd,nd->n", left[:, 1:], right[:, 1:]) + left[:, 0] + right[:, 0]
            else:
                scores = np.einsum("nd,nd->n", left, right)
            if self.user_bias is not None and self.item_bias is not None:
                scores += self.user_bias[users] + self.item_bias[items]
            yield (scores + np.float32(self.mean)).astype(np.float32, copy=False)

    def error(self, ratings: Ratings) -> float:
        """Return the mean squared error of the stored rows."""
        total, begin = 0.0, 0
        for scores in self.predict(ratings):
            difference = scores - ratings.values[begin : begin + len(scores)]
            total += float(np.einsum("n,n->", difference, difference, dtype=np.float64))
            begin += len(scores)
        return total / len(ratings)


@dataclass(frozen=True)
class FittedRecommender:
    """A fitted model and the record of its fit; pairs are of users and items."""

    model: PackedFactors
    history: list[dict[str, Any]] = field(default_factory=list)
    nonzeros: int | None = None
    parameters: tuple[int, int] = (0, 0)  # as the method's paper counts
    training_bytes: tuple[int, int] | None = None  # including the optimizer state
    interrupted: bool = False
    notes: tuple[str, ...] = ()


def fit_recommender(
    settings: RecommenderSettings,
    split: Split,
    *,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
    progress: bool = True,
    log: Log = ignore,
) -> FittedRecommender:
    """Fit a recommender in the way that the settings and the amount of data ask for.

    Ids of ``split`` are in falling order of training counts.
    """
    settings, train = settings.resolve(), split.train
    table, rows = settings.table, train.num_users + train.num_items
    sized = table.budget is not None or table.ratio is not None
    if settings.graded and not sized and required_bytes(train, table.dim) > MAX_BYTES:
        log(f"{rows:,} rows and {len(train):,} ratings are many: plain rows, stored as int4")
        large = {"table.users": "dense", "training.epochs": 5, "storage.dictionary": "int4"}
        settings = type(settings).from_values(settings.values() | large).resolve()
    if settings.graded:
        budget = _budget(settings, rows)
        log(f"graded rows, at most {budget:,} bytes")
        return _fit_graded(budget, split, dim=table.dim, seed=seed, progress=progress)
    if len(train) >= STREAM and _can_stream(settings):
        log("trained on a stream, one rating at a time: batch and patience do not apply")
        return _fit_stream(settings, split, seed=seed, progress=progress)
    return _fit_tables(settings, split, seed=seed, checkpoints=checkpoints, progress=progress)


def _budget(settings: RecommenderSettings, rows: int) -> int:
    """Return the bytes of both tables; by default small tables also get room for their headers."""
    table = settings.table
    if table.budget is not None:
        return read_bytes(table.budget)
    budget = int(rows * table.dim * 4 / (RATIO if table.ratio is None else table.ratio))
    return budget + HEADERS if table.ratio is None and budget < 4 * HEADERS else budget


def _can_stream(settings: RecommenderSettings) -> bool:
    """Whether the settings are of plain rows that a stream can train."""
    table, training = settings.table, settings.training
    return (
        all(parse_spec(spec or "dense")[0].is_dense for spec in (table.users, table.items))
        and table.dim <= MAX_DIM
        and table.biases != "apart"
        and not (training.sse_users or training.sse_items)
    )


def _fit_graded(
    budget: int, split: Split, *, dim: int, seed: int, progress: bool
) -> FittedRecommender:
    """Fit graded rows within ``budget`` bytes.

    Ctrl-C ends each stage after its round: a round takes about a second, and its rows are usable.
    """
    history: list[dict[str, Any]] = []
    display = show_progress("rows", ROUNDS, shown=progress)
    with display as shown, _defer_interrupt() as interrupted:

        def record(stage: str, error: float) -> bool:
            history.append({"epoch": len(history), "stage": stage, "validation_mse": error})
            shown.update(advance=1, description=stage, note=f"validation {error:.4f}")
            return interrupted()

        users, items, mean, notes = fit_graded(
            split.train, split.validation, dim=dim, budget=budget, seed=seed, progress=record
        )
    dense = notes["dense"]
    note = (
        f"the float32 rows that were rounded have a validation MSE of {dense:.4f}" if dense else ""
    )
    return FittedRecommender(
        PackedFactors(users, items, mean),
        history=history,
        parameters=(dim * split.train.num_users, dim * split.train.num_items),
        interrupted=interrupted(),
        notes=(note,) if note else (),
    )


@contextlib.contextmanager
def _defer_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed; a second Ctrl-C raises at once."""
    request = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield request.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: Any) -> None:
        if request.is_set() and callable(before):
            before(number, frame)
        request.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield request.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _fit_tables(
    settings: RecommenderSettings,
    split: Split,
    *,
    seed: int,
    checkpoints: Checkpoints | None,
    progress: bool,
) -> FittedRecommender:
    """Train the tables of the settings and pack them."""
    from featherbed.apps.recommender.tables import fit_tables

    fitted = fit_tables(settings, split, seed=seed, checkpoints=checkpoints, progress=progress)
    model, result = fitted.model, fitted.result
    storage = settings.storage
    kinds = {"values": storage.weights or "float32", "dictionary": storage.dictionary or "float32"}
    users, items = (table.pack(**kinds) for table in model.tables)
    user_bias, item_bias = (
        None if bias is None else bias.detach().numpy().copy()
        for bias in (model.user_bias, model.item_bias)
    )
    left, right = (table.parameter_count() for table in model.tables)
    sizes: Any = tuple(result.sizes[side]["training"] for side in ("users", "items"))
    mean = float(model.get_buffer("mean"))
    return FittedRecommender(
        PackedFactors(users, items, mean, model.biases, user_bias, item_bias),
        history=result.history,
        nonzeros=fitted.nonzeros,
        parameters=(left, right),
        training_bytes=None if None in sizes else sizes,
        interrupted=result.interrupted,
    )


def _fit_stream(
    settings: RecommenderSettings, split: Split, *, seed: int, progress: bool
) -> FittedRecommender:
    """Train plain rows on ratings that may be larger than memory, one rating at a time.

    The learning rate falls to zero, so the rows of the last epoch are kept; Ctrl-C keeps them as
    they are.
    """
    table, train = settings.table, split.train
    mean = float(train.values.mean(dtype=np.float64)) if table.mean else 0.0
    lr, epochs = settings.training.lr, settings.training.epochs or 1
    model = StreamedFactorization(
        train.num_users,
        train.num_items,
        table.dim,
        mean=mean,
        biases=table.biases or "column",
        settings=StreamSettings() if lr is None else StreamSettings(lr=lr),
        unit=float(train.values.std(dtype=np.float64)) / STREAM_STD or 1.0,
        seed=seed,
    )
    history: list[dict[str, Any]] = []
    interrupted = False
    with show_progress("ratings", epochs, shown=progress) as shown:
        try:
            for epoch in range(epochs):
                error = model.train_epoch(train, 1 - epoch / epochs)
                validation = model.error(split.validation)
                history.append({"epoch": epoch, "train_mse": error, "validation_mse": validation})
                shown.update(advance=1, note=f"validation {validation:.4f}")
        except KeyboardInterrupt:
            interrupted = True
    model.fold()
    kind = settings.storage.dictionary or "float32"
    users, items = pack_rows(model.users, kind), pack_rows(model.items, kind)
    counts = model.users.size, model.items.size
    return FittedRecommender(
        PackedFactors(users, items, mean, model.biases),
        history=history,
        parameters=counts,
        training_bytes=(4 * (counts[0] + train.num_users), 4 * (counts[1] + train.num_items)),
        interrupted=interrupted,
    )


def pack_rows(rows: Floats, kind: str = "float32") -> PackedTable:  # [V, d]
    """Pack plain rows; float32 rows are not copied.

    >>> pack_rows(np.ones((3, 2), np.float32)).dim
    2
    """
    matrix = (
        Matrix(kind, rows.shape, rows) if kind == "float32" else Matrix.encode(rows, kind, "column")
    )
    band = Band(len(rows), Identity(), dictionary=matrix)
    return PackedTable([band], rows.shape[1], made_by={"table": "DenseTable"})
