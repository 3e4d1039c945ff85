"""From a file of ratings to a folder that recommends: graded rows, tables, or streamed plain
rows."""

from __future__ import annotations

import contextlib
import math
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.apps.pipeline import (
    CHECKPOINTS,
    Application,
    Checkpoints,
    Log,
    Outcome,
    RunOptions,
    ignore,
    rank,
    world_size,
)
from featherbed.apps.recommender import processes
from featherbed.apps.recommender.data import PARTS, RecommenderData, Split, read_data, save_split
from featherbed.apps.recommender.graded import (
    MAX_BYTES,
    Biases,
    fit_graded,
    fit_validated_biases,
    required_bytes,
)
from featherbed.apps.recommender.model import check_tables
from featherbed.apps.recommender.serve import (
    APART,
    ITEMS,
    JSON,
    SEEN,
    TITLES,
    USERS,
    collect_rated,
    write_recommender,
)
from featherbed.apps.recommender.settings import RecommenderSettings
from featherbed.apps.recommender.stream import MAX_DIM, StreamedFactorization, StreamSettings
from featherbed.checks import TRAINING, read_bytes, require
from featherbed.errors import ArgumentError
from featherbed.files import temporary_folder
from featherbed.io.records import ItemTitles, Ratings, count_ids
from featherbed.packed import (
    Band,
    Identity,
    Matrix,
    PackedTable,
    compact_keys,
    compare_sizes,
    file_size,
)
from featherbed.progress import show_progress
from featherbed.report import describe_anchors, describe_cost, error_by_popularity, ratings_page
from featherbed.settings import Settings
from featherbed.tables import parse_spec

NO_FACTORS = (
    "stored no factors: the ratings do not support any within this budget; every user gets the "
    "same list, less the items rated in training (biases only)"
)
Floats = NDArray[np.float32]
Errors = NDArray[np.float64]
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
    """Fit a recommender; settings and data size select graded rows, tables or streamed rows.

    Ids of ``split`` are in falling order of training counts.
    """
    settings, train = settings.resolve(), split.train
    table, rows = settings.table, train.num_users + train.num_items
    sized = table.budget is not None or table.ratio is not None
    if settings.graded and not sized and required_bytes(train, table.dim) > MAX_BYTES:
        log(f"{rows:,} rows and {len(train):,} ratings are many: plain rows, stored as int4")
        large = {"table.users": "dense", "training.epochs": 5, "storage.dictionary": "int4"}
        settings = type(settings).from_values(settings.values() | large).resolve()
    if settings.graded and world_size() > 1:
        raise ArgumentError(
            "graded rows are fitted in one process: name tables such as --users anchor:anchors=16 "
            "--items anchor:anchors=16, or start one process"
        )
    if settings.graded:
        budget = table_budget(table.budget, table.ratio, rows * table.dim)
        log(f"graded rows, at most {budget:,} bytes")
        return _fit_graded(budget, split, dim=table.dim, seed=seed, progress=progress)
    if len(train) >= STREAM and _can_stream(settings) and world_size() == 1:
        log("trained on a stream, one rating at a time: batch and patience do not apply")
        return _fit_stream(settings, split, seed=seed, progress=progress)
    return _fit_tables(settings, split, seed=seed, checkpoints=checkpoints, progress=progress)


def table_budget(budget: str | None, ratio: float | None, elements: int) -> int:
    """Return the bytes of both tables; by default small tables also get room for their headers."""
    if budget is not None:
        return read_bytes(budget)
    size = int(4 * elements / (RATIO if ratio is None else ratio))
    return size + HEADERS if ratio is None and size < 4 * HEADERS else size


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
    with display as shown, defer_interrupt() as interrupted:

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
def defer_interrupt() -> Iterator[Callable[[], bool]]:
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
    from featherbed.apps.recommender.model import fit_tables

    fitted = fit_tables(settings, split, seed=seed, checkpoints=checkpoints, progress=progress)
    model, result = fitted.model, fitted.result
    storage = settings.storage
    kinds = {"values": storage.weights or "float32", "dictionary": storage.dictionary or "float32"}
    users, items = (table.pack(**kinds) for table in model.tables)  # None but in the first process
    user_bias, item_bias = (
        None if bias is None else bias.detach().numpy().copy()
        for bias in (model.user_bias, model.item_bias)
    )
    left, right = (table.parameter_count() for table in model.tables)
    sizes: Any = tuple(
        int(processes.everywhere(result.sizes[side]["training"] or 0)) or None
        for side in ("users", "items")
    )
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


SAMPLE = 10_000_000  # maximum number of ratings for the training error
SPLIT = "split.safetensors"
FILES = (USERS, ITEMS, SEEN, TITLES, APART, JSON)  # needed for recommending


def train_recommender(
    source: str | Path,
    out: str | Path,
    settings: RecommenderSettings | Mapping[str, Any] | None = None,
    **options: Any,
) -> Outcome[RecommenderData, FittedRecommender]:
    """Train a recommender on a file of ratings and write it to a folder.

    Args:
        source: the file of ratings, in any format of ``read_ratings``.
        out: the folder to write.
        settings: settings, or their values by dotted name; the default are graded rows, 8 times
            smaller than float32 rows.
        options: ``seed``, ``resume``, ``overwrite``, ``progress``, ``log``, ``command``
            (see ``RunOptions``).

    >>> from featherbed.io.records import make_ratings
    >>> folder, ratings = getfixture("tmp_path"), make_ratings(80, 60, 2000)
    >>> triples = zip(ratings.users, ratings.items, ratings.values)
    >>> lines = ["user,item,rating", *(f"{u},{i},{r:.1f}" for u, i, r in triples)]
    >>> _ = (folder / "ratings.csv").write_text("\\n".join(lines))
    >>> values = {"table.dim": 4}
    >>> outcome = train_recommender(folder / "ratings.csv", folder / "out", values, progress=False)
    >>> outcome.metrics["sizes"]["file"] <= 80 * 4 * 4 + 60 * 4 * 4
    True
    """
    return RecommenderRun(source, settings, out, RunOptions(**options)).run()


class RecommenderRun(Application[RecommenderSettings, RecommenderData, FittedRecommender]):
    """One run of ``train_recommender``."""

    kind, marker, files = "recommender", JSON, (TITLES, APART)
    settings_type = RecommenderSettings
    irrelevant = ("titles", "columns.", "reading.", "split.", "storage.")

    def __init__(
        self,
        source: str | Path,
        settings: RecommenderSettings | Mapping[str, Any] | None,
        out: str | Path,
        options: RunOptions,
    ) -> None:
        super().__init__(settings, out, options)
        self.source, self.settings = Path(source), self.settings.resolve()

    def check(self) -> None:
        """Refuse missing packages, tables that do not fit, and a missing file of titles."""
        titles = self.settings.titles
        require("training a recommender", TRAINING, self.settings.required_packages())
        if not self.settings.graded:
            check_tables(self.settings)
        if titles is not None and not titles.is_file():
            raise ArgumentError(f"{titles}: no such file, give one of item keys and titles")

    def run(self) -> Outcome[RecommenderData, FittedRecommender]:
        """Run the pipeline; the first of several processes writes, the others help to train."""
        if world_size() == 1:
            return super().run()
        with processes.joined():
            return super().run() if rank() == 0 else self._help()

    def _help(self) -> Outcome[RecommenderData, FittedRecommender]:
        """Train with the first process; return an outcome without files and lines."""
        self.options = replace(self.options, progress=False)
        self.check()
        with temporary_folder(Path(tempfile.gettempdir())) as workplace:
            data = self.read(workplace)
            folder = self.out / CHECKPOINTS
            fitted = self.fit(data, Checkpoints(folder))
        return Outcome({}, data, fitted, [])

    def read(self, workplace: Path) -> RecommenderData:
        """Read and split the ratings."""
        options = self.options
        return read_data(
            self.source, self.settings, options.seed, workplace, progress=options.progress
        )

    def checksums(self, data: RecommenderData) -> dict[str, str]:
        """Return the checksums of the ratings and of their split."""
        parts = b"" if data.split.parts is None else data.split.parts.tobytes()
        return {
            "processes": str(world_size()),
            "ratings": data.split.checksum,
            "split": sha256(parts).hexdigest(),
        }

    def fit(self, data: RecommenderData, checkpoints: Checkpoints) -> FittedRecommender:
        """Fit the model and name its rows by the keys."""
        options, train = self.options, data.split.train
        if world_size() > 1:
            checkpoints = checkpoints.stage(f"process-{rank()}")
        fitted = fit_recommender(
            self.settings,
            data.split,
            seed=options.seed,
            checkpoints=checkpoints,
            progress=options.progress,
            log=options.log,
        )
        if rank():
            return fitted
        model = fitted.model
        users, items = (
            PackedTable(
                table.bands,
                table.dim,
                padding_idx=table.padding_idx,
                keys=compact_keys(keys),
                made_by=table.made_by,
            )
            for table, keys in ((model.users, train.user_keys), (model.items, train.item_keys))
        )
        return replace(fitted, model=replace(model, users=users, items=items))

    def store(self, folder: Path, data: RecommenderData, fitted: FittedRecommender) -> None:
        """Write the files that ``Recommender.open`` reads, and the split."""
        model, train = fitted.model, data.split.train
        write_recommender(
            folder,
            model.users,
            model.items,
            mean=model.mean,
            biases=model.biases,
            seen=collect_rated(train.users, train.items, train.num_users, train.num_items),
            user_bias=model.user_bias,
            item_bias=model.item_bias,
            titles=None if data.titles is None else data.titles.names,
            about={
                "ratings": len(train),
                "test_mse": model.error(data.split.test),
                "settings": changed_settings(self.settings),
            },
        )
        save_split(data.split, folder / SPLIT)

    def measure(
        self, folder: Path, data: RecommenderData, fitted: FittedRecommender
    ) -> dict[str, Any]:
        """Return errors of the stored rows, baselines and sizes."""
        split, model = data.split, fitted.model
        train = split.train
        if len(train) > SAMPLE:
            rng = np.random.default_rng(self.options.seed)
            train = train.take(np.sort(rng.choice(len(train), SAMPLE, replace=False)))
        measured = {"train": train, "validation": split.validation, "test": split.test}
        self.biases: Biases = fit_validated_biases(split.train, split.validation)
        test = split.test.values.astype(np.float64)
        columns = model.users.nonzero_columns() & model.items.nonzero_columns()
        return {
            **{
                part: {"mse": model.error(ratings), "ratings": len(getattr(split, part))}
                for part, ratings in measured.items()
            },
            "baselines": {
                "mean": float(np.mean(np.square(test - self.biases.mean))),
                "biases": self.biases.error(split.test),
                "shrinkage": list(self.biases.shrinkage),
            },
            "factors": int(np.count_nonzero(columns[int(model.biases == "column") :])),
            "nonzeros": fitted.nonzeros,
            "sizes": measure_sizes(folder, fitted),
            "split": split.method,
        }

    def report(
        self, data: RecommenderData, fitted: FittedRecommender, metrics: dict[str, Any]
    ) -> str:
        """Return the HTML page of the run."""
        model, reading, split = fitted.model, data.reading, data.split
        sides = {"users": model.users, "items": model.items}
        predictions = np.concatenate(list(model.predict(split.test)))
        kinds = {side: str(table.made_by.get("table", "rows")) for side, table in sides.items()}
        report = {
            "name": self.source.name,
            "rows": {side: table.rows for side, table in sides.items()},
            "metrics": {part: metrics[part] for part in PARTS},
            "sizes": metrics["sizes"],
            "insight": describe_recommender(
                model.users, model.items, split, predictions, data.titles, self.biases
            ),
            "model": {"dim": model.users.dim, "factors": metrics["factors"], **kinds},
            "input": {"columns": reading.columns, "counts": reading.counts, "notes": reading.notes},
            "split": {
                "how": split.method,
                "seed": split.seed,
                **{part: metrics[part]["ratings"] for part in PARTS},
            },
            "warnings": warn(metrics),
            "notes": [f"{note[:1].upper()}{note[1:]}." for note in fitted.notes],
        }
        return ratings_page(report | self.report_footer(fitted, metrics))

    def summarize(self, metrics: dict[str, Any]) -> list[str]:
        """Return the lines that end a run: errors, sizes, warnings."""
        return summarize(metrics, self.out)


def changed_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that are not the default, as plain JSON."""
    values = settings.values() | {"titles": None}  # a path says nothing about the model
    lines = settings.describe()
    return {one.name: values[one.name] for one in lines if values[one.name] != one.default}


def measure_sizes(folder: Path, fitted: FittedRecommender) -> dict[str, Any]:
    """Return bytes by side and in all.

    ``file`` is without keys, ``whole`` are all files needed for recommending, ``float32_whole`` the
    same with float32 rows.
    """
    model, training = fitted.model, fitted.training_bytes
    sides = {
        side: {
            **_table_sizes(table),
            "parameters": fitted.parameters[number],
            "training": None if training is None else training[number],
        }
        for number, (side, table) in enumerate((("users", model.users), ("items", model.items)))
    }
    names = [name for name in sides["users"] if name != "training" or training is not None]
    total: dict[str, Any] = {name: sum(size[name] for size in sides.values()) for name in names}
    ratio = total["float32"] / total["file"]
    files = {name: (folder / name).stat().st_size for name in FILES if (folder / name).is_file()}
    whole = sum(files.values())
    return {
        **sides,
        **total,
        "ratio": ratio,
        "ratio_float16": ratio / 2,
        "whole": whole,
        "seen": files.get(SEEN, 0),
        "titles": files.get(TITLES, 0),
        "float32_whole": whole - total["file"] + total["float32"],
    }


def _table_sizes(table: PackedTable) -> dict[str, Any]:
    file = file_size(table, keys=False)
    return {
        "file": file,
        "keys": file_size(table, keys=True) - file,
        "resident": table.nbytes,
        "float32": 4 * table.rows * table.dim,
    }


def describe_recommender(
    users: PackedTable,
    items: PackedTable,
    split: Split,
    predictions: NDArray[np.floating],  # [test ratings]
    titles: ItemTitles | None = None,
    biases: Biases | None = None,
) -> dict[str, Any]:
    """Return baselines, error by popularity, the cost of rows and anchors, for the report.

    ``biases`` is the fitted baseline, by default with shrinkages chosen on the validation part.

    >>> import featherbed as fb
    >>> from featherbed.apps.recommender.data import make_split
    >>> from featherbed.io.records import make_ratings
    >>> split = make_split(make_ratings(60, 40, 900))
    >>> users, items = fb.AnchorTable(60, 4, anchors=3).pack(), fb.DenseTable(40, 4).pack()
    >>> predictions = np.full(len(split.test), split.train.values.mean())
    >>> found = describe_recommender(users, items, split, predictions)
    >>> found["sides"]["users"]["unit"], found["sides"]["items"]["unit"]
    ('codes', 'bits')
    >>> abs(found["test"] - found["baselines"]["mean"]) < 1e-5
    True
    """
    train, test = split.train, split.test
    predictions = np.asarray(predictions)
    if predictions.shape != (len(test),):
        raise ArgumentError(
            f"predictions have shape {predictions.shape}: "
            f"give one for each of the {len(test)} test ratings"
        )
    baseline = fit_validated_biases(train, split.validation) if biases is None else biases
    errors = _squared_errors(predictions, test)
    baseline_errors = _squared_errors(baseline.predict(test.users, test.items), test)
    counts = count_ids(train.users, users.rows), count_ids(train.items, items.rows)
    sides = {
        side: {
            **describe_cost(table, count),
            "bands": error_by_popularity(count, np.asarray(ids), errors, baseline_errors),
        }
        for side, table, count, ids in (
            ("users", users, counts[0], test.users),
            ("items", items, counts[1], test.items),
        )
    }
    return {
        "test": _mean(errors),
        "baselines": {
            "mean": _mean(_squared_errors(np.float64(baseline.mean), test)),
            "biases": _mean(baseline_errors),
            "shrinkage": list(baseline.shrinkage),
        },
        "sides": sides,
        "anchors": describe_anchors(items, titles),
    }


def _mean(values: Errors) -> float | None:
    return float(values.mean()) if len(values) else None


def _squared_errors(predictions: Any, ratings: Ratings) -> Errors:
    errors: Errors = np.square(np.asarray(ratings.values, dtype=np.float64) - predictions)
    return errors


def summarize(metrics: dict[str, Any], out: Path) -> list[str]:
    """Return the last lines of a run: errors, sizes, warnings.

    >>> metrics = {part: {"mse": 1.21} for part in ("test", "validation", "train")}
    >>> metrics |= {"baselines": {"biases": 1.1}, "factors": 3, "nonzeros": None}
    >>> metrics["sizes"] = {"file": 500, "keys": 300, "whole": 800}
    >>> metrics["sizes"] |= {"float32": 4000, "float32_whole": 4300}
    >>> print("\\n".join(summarize(metrics | {"interrupted": False}, Path("out"))))
    ... # doctest: +ELLIPSIS
    test MSE 1.2100 (RMSE 1.1000), validation 1.2100, train 1.2100; biases alone have 1.1000 on test
    800 bytes in all, 5.4 times smaller than 4,300 with float32 rows: tables 500, keys 300
    tables alone: 500 bytes, 8.0 times smaller than 4,000 as float32 rows
    out: ...
    worse than biases alone: test MSE 1.2100, where mean + bias of user + bias of item has 1.1000...
    """
    test, sizes = metrics["test"]["mse"], metrics["sizes"]
    weights = "" if metrics["nonzeros"] is None else f"; {metrics['nonzeros']:,} weights"
    lines = [
        f"test MSE {test:.4f} (RMSE {math.sqrt(test):.4f}), "
        f"validation {metrics['validation']['mse']:.4f}, train {metrics['train']['mse']:.4f}; "
        f"biases alone have {metrics['baselines']['biases']:.4f} on test",
        *size_lines(sizes, weights),
        f"{out}: users.safetensors, items.safetensors, metrics.json, history.parquet, report.html",
        *warn(metrics),
    ]
    if metrics["interrupted"]:
        more = "; --resume continues" if (out / "checkpoints").is_dir() else ""
        state = (
            "this is the best epoch so far"
            if metrics["epochs"]
            else "not one epoch was finished, the rows are in their current state"
        )
        lines.append(f"interrupted: {state}{more}")
    return lines


def size_lines(sizes: dict[str, Any], weights: str = "") -> list[str]:
    """Return the bytes of all files, and of the tables alone, beside those of float32 rows."""
    parts = {"tables": "file", "keys": "keys", "rated items": "seen", "titles": "titles"}
    shown = {name: sizes[key] for name, key in parts.items() if sizes.get(key)}
    if other := sizes["whole"] - sum(shown.values()):
        shown["other"] = other
    listed = ", ".join(f"{name} {size:,}" for name, size in shown.items())
    return [
        f"{sizes['whole']:,} bytes in all, "
        f"{compare_sizes(sizes['whole'], sizes['float32_whole'])} with float32 rows: {listed}",
        f"tables alone: {sizes['file']:,} bytes, "
        f"{compare_sizes(sizes['file'], sizes['float32'])} as float32 rows{weights}",
    ]


def warn(metrics: dict[str, Any]) -> list[str]:
    """Return warnings: a recommender without factors, or worse than biases alone."""
    lines = [] if metrics["factors"] else [NO_FACTORS]
    error, baseline = metrics["test"]["mse"], metrics["baselines"]["biases"]
    if error > baseline:
        more = 100 * (error / baseline - 1) if baseline > 0 else math.inf
        advice = (
            "try more ratings, a smaller --dim, or graded rows (no --users, --items, --set "
            "anchors.nonzeros, --set table.auto)"
            if metrics["factors"]
            else "more ratings or a larger budget may help"
        )
        lines.append(
            f"worse than biases alone: test MSE {error:.4f}, where mean + bias of user + bias of "
            f"item has {baseline:.4f} ({more:.1f} % more): {advice}"
        )
    return lines
