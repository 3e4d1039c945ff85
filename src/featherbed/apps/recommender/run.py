"""From a file of ratings to a folder that recommends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from featherbed.apps.checkpoints import Checkpoints
from featherbed.apps.pipeline import Application, Log, Outcome, RunOptions, ignore
from featherbed.apps.recommender.baselines import Biases, fit_validated_biases
from featherbed.apps.recommender.data import PARTS, RecommenderData, read_data, save_split
from featherbed.apps.recommender.fit import FittedRecommender, fit_recommender
from featherbed.apps.recommender.insight import describe_recommender, warn
from featherbed.apps.recommender.settings import RecommenderSettings
from featherbed.apps.recommender.store import (
    APART,
    ITEMS,
    JSON,
    SEEN,
    TITLES,
    USERS,
    collect_rated,
    write_recommender,
)
from featherbed.apps.recommender.tables import check_tables
from featherbed.errors import ArgumentError
from featherbed.extras import TRAINING, require
from featherbed.packed.columns import nonzero_columns
from featherbed.packed.keys import Keys
from featherbed.packed.report import file_size
from featherbed.packed.table import PackedTable
from featherbed.report.ratings import ratings_page
from featherbed.version import __version__

SAMPLE = 10_000_000  # maximum number of ratings for the training error
SPLIT = "split.safetensors"
FILES = (USERS, ITEMS, SEEN, TITLES, APART, JSON)  # needed for recommending


def train_recommender(
    source: str | Path,
    out: str | Path,
    settings: RecommenderSettings | Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    log: Log = ignore,
    command: str = "",
) -> Outcome[RecommenderData, FittedRecommender]:
    """Train a recommender on a file of ratings and write it to a folder.

    Args:
        source: the file of ratings, in any format of ``read_ratings``.
        out: the folder to write.
        settings: settings, or their values by dotted name; the default are graded rows, 8 times
            smaller than float32 rows.
        seed: random seed of the split, of initialization and of training.
        resume: continue from the last checkpoint in the folder.
        overwrite: replace the recommender in the folder.
        progress: show progress on standard error.
        log: called with each line for the user.
        command: the command line of the run, for the report.

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
    if not isinstance(settings, RecommenderSettings):
        settings = RecommenderSettings.from_values(settings or {})
    options = RunOptions(
        seed=seed,
        resume=resume,
        overwrite=overwrite,
        progress=progress,
        log=log,
        command=command,
    )
    return RecommenderRun(Path(source), settings, out, options).run()


class RecommenderRun(Application[RecommenderSettings, RecommenderData, FittedRecommender]):
    """One run of ``train_recommender``."""

    kind = "recommender"
    marker = JSON
    files = (TITLES, APART)

    def __init__(
        self, source: Path, settings: RecommenderSettings, out: str | Path, options: RunOptions
    ) -> None:
        super().__init__(settings.resolve(), out, options)
        self.source = source

    def check(self) -> None:
        """Refuse missing packages, tables that do not fit, and a missing file of titles."""
        titles = self.settings.titles
        require("training a recommender", TRAINING, self.settings.required_packages())
        if not self.settings.graded:
            check_tables(self.settings)
        if titles is not None and not titles.is_file():
            raise ArgumentError(f"{titles}: no such file, give one of item keys and titles")

    def read(self, workplace: Path) -> RecommenderData:
        """Read and split the ratings."""
        options = self.options
        return read_data(
            self.source, self.settings, options.seed, workplace, progress=options.progress
        )

    def fingerprint(self, data: RecommenderData) -> dict[str, Any]:
        """Return the checksum of the ratings and of their split, and the settings of the fit."""
        split, settings = data.split, self.settings.values()
        parts = b"" if split.parts is None else split.parts.tobytes()
        fit = {k: v for k, v in settings.items() if k.startswith(("table", "anchors", "training"))}
        return {
            "ratings": split.checksum,
            "seed": self.options.seed,
            "split": sha256(parts).hexdigest(),
            **fit,
        }

    def fit(self, data: RecommenderData, checkpoints: Checkpoints) -> FittedRecommender:
        """Fit the model and name its rows by the keys."""
        options, train = self.options, data.split.train
        fitted = fit_recommender(
            self.settings,
            data.split,
            seed=options.seed,
            checkpoints=checkpoints,
            progress=options.progress,
            log=options.log,
        )
        model = fitted.model
        users, items = (
            PackedTable(
                table.bands,
                table.dim,
                padding_idx=table.padding_idx,
                keys=Keys.of(keys),
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
                "settings": self._changed_settings(),
            },
        )
        save_split(data.split, folder / SPLIT)

    def _changed_settings(self) -> dict[str, Any]:
        """Return the settings that are not the default, as plain JSON."""
        values = self.settings.values() | {"titles": None}  # a path says nothing about the model
        lines = self.settings.describe()
        return {one.name: values[one.name] for one in lines if values[one.name] != one.default}

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
        columns = nonzero_columns(model.users) & nonzero_columns(model.items)
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
            "sizes": _measure_sizes(folder, fitted),
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
            "history": fitted.history,
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
            "settings": {k: v for k, v in self.settings.values().items() if v is not None},
            "warnings": warn(metrics),
            "notes": [f"{note[:1].upper()}{note[1:]}." for note in fitted.notes],
            "command": self.options.command,
            "seconds": metrics["seconds"],
            "version": __version__,
            "interrupted": fitted.interrupted,
        }
        return ratings_page(report)


def _measure_sizes(folder: Path, fitted: FittedRecommender) -> dict[str, Any]:
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
