"""From a file of events to a stored sequence model: reading, storing, measuring, the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from featherbed.apps.bundle import MODEL, SEQUENCES
from featherbed.apps.pipeline import Application, Checkpoints, Outcome, RunOptions
from featherbed.apps.recommender.serve import ITEMS, TITLES, USERS
from featherbed.apps.sequences.data import REPEATS, Ids, SequenceData, Sequences, Task
from featherbed.apps.sequences.fit import EVALUATED, FittedSequenceModel, evaluate, fit_sequences
from featherbed.apps.sequences.model import SequenceModel
from featherbed.apps.sequences.ranking import gains, metrics_of, rank_targets
from featherbed.apps.sequences.serve import (
    FILES,
    SequenceRecommender,
    SequenceShape,
    write_sequences,
)
from featherbed.apps.sequences.settings import SequenceSettings, SequenceStorage
from featherbed.checks import TRAINING, require
from featherbed.errors import ArgumentError, DataError
from featherbed.graphs import Graph, edge_file
from featherbed.io.records import read_events, read_titles
from featherbed.packed import PackedTable, compact_keys, compare_sizes, file_size
from featherbed.progress import show_progress
from featherbed.report import bands_by_popularity, sequences_page
from featherbed.sharing import bare
from featherbed.tables import GradedTable, Table

COUNT_POWER, GRADES = 1.0, 4  # row weights are counts to this power when bits are divided
ROWS_PER_GRADE = 100  # the least of a table of several grades
ATTEMPTS, MIN_BITS = 8, 0.9  # until the file of graded rows is small enough
EXAMPLES, SHOWN = 6, 5  # histories in the report, items of each


def train_sequences(
    source: str | Path,
    out: str | Path,
    settings: SequenceSettings | Mapping[str, Any] | None = None,
    **options: Any,
) -> Outcome[SequenceData, FittedSequenceModel]:
    """Train a sequence model and write it to a folder; nothing is written before it is complete.

    Args:
        source: a file of events with columns for user, item and time.
        out: the folder to write.
        settings: the settings, or dotted names and values.
        options: ``seed``, ``resume``, ``overwrite``, ``progress``, ``log``, ``command``
            (see ``RunOptions``).

    >>> folder = getfixture("tmp_path")
    >>> lines = [f"{n // 10},{'abcdefg'[n % 7]},{n}" for n in range(300)]
    >>> _ = (folder / "plays.csv").write_text("\\n".join(["user,song,time", *lines]))
    >>> values = {"table.dim": 8, "model.length": 6, "training.epochs": 3}
    >>> outcome = train_sequences(folder / "plays.csv", folder / "out", values, progress=False)
    >>> sorted(outcome.metrics["test"])[:2], (folder / "out" / "report.html").exists()
    (['hit@10', 'hit@10_of_100_sampled'], True)
    """
    return SequenceRun(source, settings, out, RunOptions(**options)).run()


class SequenceRun(Application[SequenceSettings, SequenceData, FittedSequenceModel]):
    """One run of ``train_sequences``."""

    kind, marker, settings_type = "sequence model", SEQUENCES, SequenceSettings
    files = (ITEMS, USERS, MODEL, TITLES)
    irrelevant = ("titles", "columns.", "reading.", "storage.")
    served: SequenceRecommender

    def __init__(
        self,
        source: str | Path,
        settings: SequenceSettings | Mapping[str, Any] | None,
        out: str | Path,
        options: RunOptions,
    ) -> None:
        super().__init__(settings, out, options)
        self.source = Path(source)
        self.bands: list[dict[str, Any]] = []
        self.examples: list[dict[str, str]] = []

    def check(self) -> None:
        """Refuse missing packages and missing files."""
        require("training a sequence model", TRAINING)
        for name, path in (("titles", self.settings.titles), ("graph", self.settings.sse.graph)):
            if path is not None and not path.is_file():
                raise ArgumentError(f"{path}: no such file, give one for the {name}")

    def read(self, workplace: Path) -> SequenceData:
        """Read the events."""
        given = self.settings.reading
        with show_progress(
            "reading", percent=True, shown=self.options.progress, transient=True
        ) as shown:
            reading = read_events(
                self.source,
                **self.settings.columns.values(),
                strict=given.strict,
                encoding=given.encoding,
                workplace=workplace,
                progress=lambda done, size: shown.update(done, total=size),
            )
            sequences = Sequences.of(reading.events)
        sequences.check()
        share = sequences.repeated()
        repeats = share >= REPEATS if given.repeats is None else given.repeats
        columns = ", ".join(f"{role} = {column}" for role, column in reading.columns.items())
        lines = [f"columns: {columns}", *reading.notes, *sequences.describe()]
        if share > 0:
            effect = "are recommended again" if repeats else "are not recommended again"
            lines.append(
                f"{100 * share:.1f} % of the events repeat an item of the user: items of a history "
                f"{effect} (reading.repeats)"
            )
        titles = self.settings.titles
        return SequenceData(
            sequences,
            None if titles is None else read_titles(titles, sequences.item_keys),
            repeats,
            lines,
            {"columns": columns, **{name: f"{n:,}" for name, n in reading.counts.items()}},
        )

    def checksums(self, data: SequenceData) -> dict[str, str]:
        """Return the checksum of the sequences."""
        return {"events": data.sequences.checksum, "repeats": str(data.repeats)}

    def fit(self, data: SequenceData, checkpoints: Checkpoints) -> FittedSequenceModel:
        """Train the model."""
        return fit_sequences(
            self.settings,
            data.sequences,
            graph=self._graph(data.sequences),
            repeats=data.repeats,
            seed=self.options.seed,
            checkpoints=checkpoints,
            progress=self.options.progress,
        )

    def _graph(self, sequences: Sequences) -> Graph | None:
        """Read the relations between items, if a file of them is given."""
        path = self.settings.sse.graph
        if path is None:
            return None
        graph = edge_file(path, [*sequences.item_keys])
        if not len(graph.pairs()):
            raise DataError(
                f"{path} relates no two items of {self.source}: give two item keys per line"
            )
        return graph

    def store(self, folder: Path, data: SequenceData, fitted: FittedSequenceModel) -> None:
        """Write the files that ``SequenceRecommender.open`` reads, and open them."""
        about = {"source": self.source.name, "seed": self.options.seed}
        self.served = write_model(folder, fitted, self.settings, data, about)

    def measure(
        self, folder: Path, data: SequenceData, fitted: FittedSequenceModel
    ) -> dict[str, Any]:
        """Return metrics of the stored model, of its float32 state and of popularity, and sizes."""
        sequences, seed, length = data.sequences, self.options.seed, self.settings.model.length
        task, full, sampled = evaluate_stored(self.served, sequences, "test", seed)
        popularity = rank_popular(sequences, task, repeats=data.repeats, seed=seed)
        self.bands = bands_by_popularity(
            sequences.counts, task.targets, gains(full), gains(popularity[0])
        )
        self.examples = self._examples(data, task)
        found = {"test": metrics_of(full, sampled), "popularity": metrics_of(*popularity)}
        found["float32"] = evaluate(fitted.model, sequences, "test", length, data.repeats, seed)
        _, *ranks = evaluate_stored(self.served, sequences, "validation", seed)
        found["validation"] = metrics_of(*ranks)
        return found | {"users": len(task.users), "sizes": measure_sizes(folder, self.served)}

    def _examples(self, data: SequenceData, task: Task) -> list[dict[str, str]]:
        """Return the last items of some test histories, and the recommended next items."""
        keys = data.sequences.item_keys
        titles = None if data.titles is None else data.titles.names

        def show(ids: Sequence[int]) -> str:
            names = (keys[i] if titles is None else titles[i] or keys[i] for i in ids)
            return "; ".join(names)

        examples = []
        for at in np.unique(np.linspace(0, len(task.users) - 1, EXAMPLES).astype(int)).tolist():
            history = data.sequences[int(task.users[at])][: task.ends[at]]
            found = self.served.recommend_history([keys[i] for i in history.tolist()], SHOWN)
            ids = [int(self.served.items.ids_of(item.key)) for item in found]
            last = history[-SHOWN:].tolist()
            shown = {"history": show(last), "items": show(ids)}
            examples.append(shown | {"last": show([int(task.targets[at])])})
        return examples

    def report(
        self, data: SequenceData, fitted: FittedSequenceModel, metrics: dict[str, Any]
    ) -> str:
        """Return the HTML page of the run."""
        shape, table = self.served.shape, fitted.model.table
        users = f", rows of users of width {shape.users}" if shape.users else ""
        report = {
            "name": self.source.name,
            "metrics": {
                "this model, as stored": metrics["test"],
                "before it was stored, float32": metrics["float32"],
                "popularity": metrics["popularity"],
                "this model, validation items": metrics["validation"],
            },
            "sizes": metrics["sizes"],
            "bands": self.bands,
            "examples": self.examples,
            "model": [
                f"The table of {shape.items:,} items, width {shape.dim}, is "
                f"{type(table).__name__}{users}; {shape.layers} blocks read the last "
                f"{shape.length} items.",
                f"{metrics['users']:,} users are evaluated.",
            ],
            "notes": [*data.lines[1:], *fitted.notes, *warn(metrics)],
            "input": data.input,
        }
        return sequences_page(report | self.report_footer(fitted, metrics))

    def summarize(self, metrics: dict[str, Any]) -> list[str]:
        """Return the lines that end a run: quality, sizes, files, warnings."""
        sizes = metrics["sizes"]
        parts = ", ".join(f"{name} {size:,}" for name, size in sizes["parts"].items() if size)
        whole, dense = sizes["whole"], sizes["float32_whole"]
        lines = [
            _quality_line("full rankings", metrics, ""),
            _quality_line("against 100 sampled items", metrics, "_of_100_sampled"),
            f"{whole:,} bytes in all, {compare_sizes(whole, dense)} with float32 rows and weights: "
            f"{parts}",
        ]
        files, *interrupted = self.closing_lines(metrics)
        return [*lines, files, *warn(metrics), *interrupted]


def _quality_line(how: str, metrics: dict[str, Any], ending: str) -> str:
    test, plain, popular = (metrics[name] for name in ("test", "float32", "popularity"))
    ndcg, hit = f"ndcg@10{ending}", f"hit@10{ending}"
    return (
        f"{how}: test NDCG@10 {test[ndcg]:.4f}, Hit@10 {test[hit]:.4f} (float32 {plain[ndcg]:.4f}, "
        f"popularity {popular[ndcg]:.4f})"
    )


def warn(metrics: dict[str, Any]) -> list[str]:
    """Return a warning if the model is worse than popularity.

    >>> one, other = {"ndcg@10": 0.1}, {"ndcg@10": 0.2}
    >>> warn({"test": other, "popularity": one}), len(warn({"test": one, "popularity": other}))
    ([], 1)
    """
    own, popular = (metrics[name]["ndcg@10"] for name in ("test", "popularity"))
    if own > popular:
        return []
    return [
        f"not better than popularity: NDCG@10 {own:.4f}, where the most popular items have "
        f"{popular:.4f}: try more epochs (--epochs), or the order of time tells little here"
    ]


def rank_popular(
    sequences: Sequences, task: Task, *, repeats: bool, seed: int
) -> tuple[Ids, Ids]:  # -> [n], [n]
    """Return the ranks of held-out items by the number of training events."""

    def score(ids: Ids, lengths: Ids, users: Ids) -> Any:  # noqa: ARG001 - the same for all users
        return np.tile(sequences.counts.astype(np.float64), (len(ids), 1))

    return rank_targets(score, sequences, task, 1, repeats=repeats, seed=seed)


def measure_sizes(folder: Path, served: SequenceRecommender) -> dict[str, Any]:
    """Return bytes by part, of all files, and of the same model with float32 rows and weights."""
    files = {name: (folder / name).stat().st_size for name in FILES if (folder / name).is_file()}
    tables = {"items": served.items, "users": served.users}
    parts: dict[str, int] = {}
    for name, table in tables.items():
        if table is not None:
            parts[name] = file_size(table, keys=False)
            parts[f"keys of {name}"] = file_size(table, keys=True) - parts[name]
    whole = sum(files.values())
    parts |= {"transformer": files[MODEL], "titles": files.get(TITLES, 0)}
    parts["other"] = whole - sum(parts.values())
    plain = {n: 4 * t.rows * t.dim for n, t in tables.items() if t is not None}
    network = 4 * sum(weight.size for weight in served.weights.values())
    dense = whole - files[MODEL] + network - sum(parts[name] - size for name, size in plain.items())
    return {
        "parts": parts,
        "whole": whole,
        "float32_whole": dense,
        "ratio": plain["items"] / parts["items"],
    }


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
        weights = None if counts is None else torch.from_numpy((counts + 1.0) ** COUNT_POWER)
        packed = _grade_rows(table.weight.detach(), storage.ratio, weights)
    return packed.replace(keys=compact_keys(keys))


def _grade_rows(rows: Tensor, ratio: float, counts: Tensor | None) -> PackedTable:  # [V, d]
    """Return graded rows whose file is 1 / ``ratio`` of float32, or nearly so for a few rows.

    The header of a file is not made up for by rows of less than ``MIN_BITS`` of their share.
    """
    elements, share = rows.numel(), min(8.0, 32 / ratio)
    grades = int(np.clip(np.log2(len(rows) / ROWS_PER_GRADE), 1, GRADES))
    bits = share
    for _ in range(ATTEMPTS):
        table = GradedTable.from_dense(rows, bits=bits, grades=grades, counts=counts)
        packed = table.pack(values="float16")
        over = file_size(packed, keys=False) - 4 * elements / ratio
        if over <= 0 or bits == MIN_BITS * share:
            break
        bits = max(MIN_BITS * share, bits - 8 * (over + 1) / elements)
    return packed


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
