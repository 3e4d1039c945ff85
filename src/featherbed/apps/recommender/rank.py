"""From a file of events (clicks, plays, purchases) to a folder that ranks items for every user.

Settings are tuned on validation events; then the rows are fitted again to training and validation
events together, and measured once on the test events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.apps.pipeline import Application, Checkpoints, Outcome, RunOptions
from featherbed.apps.recommender.als import (
    MAX_FITS,
    AlsSearch,
    CountedEvents,
    fit_als,
    refit_users,
    some_users,
)
from featherbed.apps.recommender.bits import BitPlan, choose_plan, pack_by_spec, round_rows
from featherbed.apps.recommender.closed import Confidence, Doubles
from featherbed.apps.recommender.data import (
    PARTS,
    TRAIN,
    RecommenderData,
    Split,
    apply_parts,
    keep_known,
    look_like_counts,
    make_split,
    ratings_checksum,
    save_split,
    sort_by_frequency,
)
from featherbed.apps.recommender.ranking import (
    TOP,
    BprFactors,
    Interactions,
    held_out_ranks,
    ranking_metrics,
    train_bpr,
    user_metrics,
)
from featherbed.apps.recommender.serve import (
    APART,
    JSON,
    TITLES,
    collect_rated,
    write_recommender,
)
from featherbed.apps.recommender.settings import RankingSettings
from featherbed.apps.recommender.train import (
    SPLIT,
    FittedRecommender,
    PackedFactors,
    changed_settings,
    defer_interrupt,
    measure_sizes,
    size_lines,
    table_budget,
)
from featherbed.checks import TRAINING, Packages, require
from featherbed.errors import ArgumentError, DataError
from featherbed.io.records import Ratings, RatingsReading, count_ids, read_ratings, read_titles
from featherbed.packed import PackedTable, compact_keys
from featherbed.progress import show_progress
from featherbed.report import describe_cost, ranking_bands, ranking_page

RANKING: Packages = {"ranking": ("implicit", "threadpoolctl")}
SCORES = 2_000_000_000  # maximum number of scores of one measurement on the test events
FOLDED, LEAST = 0.1, 20  # users that are folded in to measure it: a part, and the minimum number
MAX_FOLDED = 1_000
BPR_DIM = 64
PLANS = 16  # maximum number of divisions of bits that are measured
Factors = tuple[NDArray[np.float32], NDArray[np.float32]]  # [users, d], [items, d]
Rows = tuple[Doubles, Doubles]
Metrics = dict[str, float]
ALS = ("alpha", "regularization", "counts", "sharpness")
GRID = [(alpha, penalty) for alpha in (1.0, 4.0, 16.0) for penalty in (0.1, 1.0, 10.0, 100.0)]


@dataclass(frozen=True)
class RankingMethod:
    """The factorization that is fitted, with all of its settings.

    ``plain`` are the best settings of ALS without weights of columns, for the comparison.
    """

    name: str  # als, bpr or popularity
    implicit: Confidence
    dim: int
    plain: Confidence
    epochs: int = 0  # of BPR

    def describe(self) -> str:
        """Return a line for the user."""
        if self.name == "popularity":
            return (
                "no settings of ALS ranked the validation events better than popularity: all users "
                "get the order of popularity"
            )
        if self.name == "bpr":
            return f"BPR with shared embeddings: width {self.dim}, {self.epochs} epochs"
        one = self.implicit
        kind = {"linear": "n", "log": "log2(1 + n)", "binary": "1"}[one.counts]
        return (
            f"ALS: width {self.dim}, confidence {one.alpha:g} x {kind}, regularization "
            f"{one.regularization:g}, sharpness {one.sharpness:g}"
        )


@dataclass(frozen=True)
class FittedRanking(FittedRecommender):
    """A fitted ranking: its method, how bits are divided, and float32 ALS for the comparison."""

    method: RankingMethod | None = None
    plan: BitPlan = field(default_factory=BitPlan)
    validation: dict[str, float] = field(default_factory=dict)  # before the last fit
    float32: Factors | None = None


def train_ranking(
    source: str | Path,
    out: str | Path,
    settings: RankingSettings | Mapping[str, Any] | None = None,
    **options: Any,
) -> Outcome[RecommenderData, FittedRanking]:
    """Train a ranking on a file of events and write it to a folder.

    Args:
        source: the file: pairs of user and item, with counts and times if it has such columns, in
            any format of ``read_ratings``.
        out: the folder to write.
        settings: settings, or their values by dotted name; the default is ALS with settings chosen
            on validation events, stored 8 times smaller than float32 rows.
        options: ``seed``, ``overwrite``, ``progress``, ``log``, ``command`` (see ``RunOptions``).

    >>> folder, rng = getfixture("tmp_path"), np.random.default_rng(0)
    >>> pairs = {(int(u), int(i) * 3 + int(u) % 3) for u, i in rng.integers(30, size=(900, 2))}
    >>> lines = ["user,item", *(f"{u},{i}" for u, i in sorted(pairs))]
    >>> _ = (folder / "clicks.csv").write_text("\\n".join(lines))
    >>> values = {"table.dim": 4, "als.alpha": 4.0, "als.regularization": 1.0}
    >>> outcome = train_ranking(folder / "clicks.csv", folder / "out", values, progress=False)
    >>> outcome.metrics["test"]["ndcg@10"] > outcome.metrics["popularity"]["ndcg@10"]
    True
    """
    return RankingRun(source, settings, out, RunOptions(**options)).run()


class RankingRun(Application[RankingSettings, RecommenderData, FittedRanking]):
    """One run of ``train_ranking``."""

    kind, marker, files = "recommender", JSON, (TITLES, APART)
    settings_type = RankingSettings
    irrelevant = ("titles", "columns.", "reading.", "split.")

    def __init__(
        self,
        source: str | Path,
        settings: RankingSettings | Mapping[str, Any] | None,
        out: str | Path,
        options: RunOptions,
    ) -> None:
        super().__init__(settings, out, options)
        self.source = Path(source)
        self.bands: dict[str, Any] = {}

    def check(self) -> None:
        """Refuse missing packages and a missing file of titles."""
        titles = self.settings.titles
        require("training a ranking", TRAINING, RANKING)
        if titles is not None and not titles.is_file():
            raise ArgumentError(f"{titles}: no such file, give one of item keys and titles")

    def read(self, workplace: Path) -> RecommenderData:
        """Read and split the events."""
        options, settings = self.options, self.settings
        given, columns = settings.reading, settings.columns.values()
        with show_progress(
            "reading", percent=True, shown=options.progress, transient=True
        ) as shown:
            reading = read_ratings(
                self.source,
                rating=columns.pop("count"),
                **columns,
                encoding=given.encoding,
                strict=given.strict,
                low=0.0 if given.minimum is None else None,
                workplace=workplace,
                progress=lambda done, size: shown.update(done, total=size),
                implicit=True,
            )
        lines = [*reading.notes]
        ratings = _events_of(reading, given.minimum, self.source, lines)
        split = _split_events(ratings, settings, options.seed, lines)
        split = sort_by_frequency(split, workplace)
        shown_columns = ", ".join(f"{role} = {name}" for role, name in reading.columns.items())
        first = (
            f"{len(ratings):,} pairs of {ratings.num_users:,} users and {ratings.num_items:,} "
            f"items ({shown_columns})"
        )
        keys = split.train.item_keys
        titles = None if settings.titles is None else read_titles(settings.titles, keys)
        return RecommenderData(reading, split, titles, [first, *lines])

    def checksums(self, data: RecommenderData) -> dict[str, str]:
        """Return the checksums of the events and of their split."""
        parts = b"" if data.split.parts is None else data.split.parts.tobytes()
        return {"ratings": data.split.checksum, "split": sha256(parts).hexdigest()}

    def fit(self, data: RecommenderData, checkpoints: Checkpoints) -> FittedRanking:  # noqa: ARG002
        """Tune the settings and the bits on validation events, then fit to both parts."""
        split, history = data.split, list[dict[str, Any]]()
        train, held = CountedEvents.of(split.train), CountedEvents.of(split.validation)
        display = show_progress("fits", MAX_FITS + PLANS, shown=self.options.progress)
        with display as shown, defer_interrupt() as interrupted:

            def record(row: dict[str, Any]) -> None:
                history.append({"epoch": len(history), **row})
                shown.update(advance=1, note=f"NDCG@10 {row['validation']:.4f}")

            search = AlsSearch(
                train, held, seed=self.options.seed, progress=record, stopped=interrupted
            )
            tune = self._tune_bpr if self.settings.method == "bpr" else self._tune_als
            method = tune(train, held, search)
            rows = self._rows(train, method)
            plan = self._plan(train, held, rows, record)
            validation = self._measure_rows(self._pack(train, rows, plan), train, held)
            whole = train.union(held)
            rows = self._rows(whole, method)
            tables = self._pack(whole, rows, plan)
            float32 = self._als(whole, method.plain, method.dim)
        keyed = [
            table.replace(keys=compact_keys(keys))
            for table, keys in zip(
                tables, (split.train.user_keys, split.train.item_keys), strict=True
            )
        ]
        return FittedRanking(
            PackedFactors(keyed[0], keyed[1], 0.0, "none"),
            history=history,
            parameters=(rows[0].size, rows[1].size),
            interrupted=interrupted(),
            notes=(method.describe(),),
            method=method,
            plan=plan,
            validation=validation,
            float32=float32,
        )

    def _als(self, events: CountedEvents, implicit: Confidence, dim: int) -> Factors:
        iterations = self.settings.als.iterations
        return fit_als(events, implicit, dim, iterations=iterations, seed=self.options.seed)

    def _tune_als(
        self,
        train: CountedEvents,
        held: CountedEvents,  # noqa: ARG002 - one signature for both methods
        search: AlsSearch,
    ) -> RankingMethod:
        implicit, dim = search.run(self._fixed(), self.settings.table.dim)
        implicit = replace(implicit, typical=float(implicit.values(train.counts).mean()))
        best = search.measure(implicit, dim)
        name = "popularity" if search.popularity() > best else "als"
        return RankingMethod(name, implicit, dim, search.plain(dim))

    def _fixed(self) -> dict[str, Any]:
        """Return the given settings of ALS."""
        values = self.settings.als.values()
        return {name: values[name] for name in ALS if values[name] is not None}

    def _tune_bpr(
        self, train: CountedEvents, held: CountedEvents, search: AlsSearch
    ) -> RankingMethod:
        """Choose the epochs, and the settings of folding in that suit the rows of items."""
        dim = self.settings.table.dim or BPR_DIM
        fitted = self._bpr(train, dim, self.settings.bpr.epochs, held)
        items = fitted.items.astype(np.float64)
        users = some_users(held.lists, MAX_FOLDED, np.random.default_rng(self.options.seed))
        found = {}
        for alpha, penalty in GRID:
            one = Confidence(alpha, penalty, "binary")
            rows = refit_users(train, items, one, users)
            measured = ranking_metrics(rows, items, train.lists, held.lists, users=users)
            found[one] = measured["ndcg@10"]
        search.run({"counts": "binary"} | self._fixed(), dim)
        best = max(found, key=lambda one: found[one])
        return RankingMethod("bpr", best, dim, search.plain(dim), fitted.epoch + 1)

    def _bpr(
        self, train: CountedEvents, dim: int, epochs: int, held: CountedEvents | None = None
    ) -> BprFactors:
        values = self.settings.bpr.values() | {"epochs": epochs}
        return train_bpr(
            train.lists,
            None if held is None else held.lists,
            dim=dim,
            **values,
            seed=self.options.seed,
            progress=self.options.progress,
        )

    def _rows(self, events: CountedEvents, method: RankingMethod) -> Rows:
        """Return rows of users as they are stored, and rows of items."""
        if method.name == "popularity":
            return _popular_rows(events, method.dim)
        if method.name == "bpr":
            fitted = self._bpr(events, method.dim, method.epochs)
            left, right = fitted.users, fitted.items
        else:
            left, right = self._als(events, method.implicit, method.dim)
        items = right.astype(np.float64)
        return method.implicit.finish(left.astype(np.float64), items.T @ items), items

    def _plan(self, train: CountedEvents, held: CountedEvents, rows: Rows, record: Any) -> BitPlan:
        if self.settings.table.users is not None:
            return BitPlan()

        def measure(*tables: PackedTable) -> float:
            return self._measure_rows(tables, train, held)["ndcg@10"]

        counts = train.activity, train.popularity
        return choose_plan(*rows, counts, self._budget(rows), measure, record)

    def _budget(self, rows: Rows) -> int:
        table = self.settings.table
        return table_budget(table.budget, table.ratio, rows[0].size + rows[1].size)

    def _pack(
        self, events: CountedEvents, rows: Rows, plan: BitPlan
    ) -> tuple[PackedTable, PackedTable]:
        table = self.settings.table
        if table.users is not None and table.items is not None:
            return pack_by_spec(rows[0], table.users), pack_by_spec(rows[1], table.items)
        return round_rows(*rows, (events.activity, events.popularity), self._budget(rows), plan)

    def _measured_users(self, known: CountedEvents, held: Interactions) -> NDArray[np.int64]:
        """Return the users with held-out events, a sample if there are very many."""
        most = max(LEAST, SCORES // known.lists.num_items)
        return some_users(held, most, np.random.default_rng(self.options.seed))

    def _measure_rows(
        self, tables: Sequence[PackedTable], known: CountedEvents, held: CountedEvents
    ) -> Metrics:
        users = self._measured_users(known, held.lists)
        rows, columns = tables[0][users], tables[1][:]
        return ranking_metrics(rows, columns, known.lists, held.lists, users=users)

    def store(self, folder: Path, data: RecommenderData, fitted: FittedRanking) -> None:
        """Write the files that ``Recommender.open`` reads, and the split."""
        model, split = fitted.model, data.split
        assert fitted.method is not None
        parts = (split.train, split.validation)
        users, items = (
            np.concatenate([getattr(part, side) for part in parts]) for side in ("users", "items")
        )
        write_recommender(
            folder,
            model.users,
            model.items,
            mean=0.0,
            biases="none",
            seen=collect_rated(users, items, split.train.num_users, split.train.num_items),
            titles=None if data.titles is None else data.titles.names,
            about={"events": len(users), "settings": changed_settings(self.settings)},
            implicit=fitted.method.implicit,
        )
        save_split(split, folder / SPLIT)

    def measure(self, folder: Path, data: RecommenderData, fitted: FittedRanking) -> dict[str, Any]:
        """Return metrics of the stored rows and of the baselines, and sizes."""
        split, model = data.split, fitted.model
        known = CountedEvents.of(split.train, split.validation)
        held = CountedEvents.of(split.test).lists
        users = self._measured_users(known, held)
        popularity = known.popularity.astype(np.float32)[:, None]
        assert fitted.method is not None and fitted.float32 is not None
        models = {
            "test": (model.users[users], model.items[:]),
            "popularity": (np.ones((len(users), 1), np.float32), popularity),
            "als": (fitted.float32[0][users], fitted.float32[1]),
        }
        ranks, found = {}, {}
        for name, (rows, columns) in models.items():
            ranks[name], counts = held_out_ranks(rows, columns, known.lists, held, users=users)
            found[name] = user_metrics(ranks[name], counts)
        pairs = np.concatenate([held[user] for user in users.tolist()])
        self.bands = {
            "users": ranking_bands(known.activity[users], known.activity, found),
            "items": ranking_bands(
                known.popularity[pairs],
                known.popularity,
                {name: {"recall@10": one < TOP} for name, one in ranks.items()},
            ),
        }
        means = {
            name: {metric: float(values.mean()) for metric, values in one.items()}
            for name, one in found.items()
        }
        return {
            **means,
            "validation": fitted.validation,
            "measured_users": len(users),
            "test_users": int(np.count_nonzero(np.diff(held.starts))),
            "fold_in": self._measure_fold_in(known, held, fitted, users, found["test"]["ndcg@10"]),
            "method": fitted.method.name,
            "implicit": fitted.method.implicit.values_by_name(),
            "als_settings": fitted.method.plain.values_by_name(),
            "dim": model.users.dim,
            "events": {part: len(getattr(split, part)) for part in PARTS},
            "nonzeros": None,
            "sizes": measure_sizes(folder, fitted),
            "split": split.method,
        }

    def _measure_fold_in(
        self,
        known: CountedEvents,
        held: Interactions,
        fitted: FittedRanking,
        users: NDArray[np.int64],
        trained: NDArray[np.float64],
    ) -> dict[str, Any]:
        """Return the NDCG@10 of users left out of a training and folded in, and of the same
        trained."""
        rng = np.random.default_rng(self.options.seed)
        count = min(MAX_FOLDED, max(LEAST, int(FOLDED * len(users))), len(users) // 2)
        if not count or fitted.method is None:
            return {}
        places = np.sort(rng.choice(len(users), count, replace=False))
        own, method = users[places], fitted.method
        others = known.without(own)
        tables = self._pack(others, self._rows(others, method), fitted.plan)
        stored = tables[1][:].astype(np.float64)
        rows = refit_users(known, stored, method.implicit, own)
        folded = ranking_metrics(rows, stored, known.lists, held, users=own)["ndcg@10"]
        return {"users": count, "ndcg@10": folded, "trained": float(trained[places].mean())}

    def report(self, data: RecommenderData, fitted: FittedRanking, metrics: dict[str, Any]) -> str:
        """Return the HTML page of the run."""
        model, reading, split = fitted.model, data.reading, data.split
        train = split.train
        report = {
            "name": self.source.name,
            "rows": {"users": model.users.rows, "items": model.items.rows},
            "metrics": metrics,
            "sizes": metrics["sizes"],
            "insight": {
                "sides": {
                    "users": describe_cost(model.users, count_ids(train.users, train.num_users)),
                    "items": describe_cost(model.items, count_ids(train.items, train.num_items)),
                }
            },
            "bands": self.bands,
            "model": {"dim": model.users.dim},
            "input": {
                "columns": reading.columns,
                "counts": reading.counts,
                "notes": data.lines[1:],
            },
            "split": {"how": split.method, **metrics["events"]},
            "warnings": warn(metrics),
            "notes": [f"{note[:1].upper()}{note[1:]}." for note in fitted.notes],
        }
        return ranking_page(report | self.report_footer(fitted, metrics))

    def summarize(self, metrics: dict[str, Any]) -> list[str]:
        """Return the lines that end a run: metrics beside the baselines, sizes, warnings."""
        return summarize_ranking(metrics, self.out)


def _events_of(
    reading: RatingsReading, minimum: float | None, source: Path, lines: list[str]
) -> Ratings:
    """Return the events among the lines of a file, with counts, and users and items that have
    any."""
    ratings, name = reading.ratings, reading.columns.get("count") or reading.columns.get("rating")
    values = ratings.values
    if minimum is not None:
        if name is None:
            raise ArgumentError(f"{source} has no column of ratings that --minimum could be about")
        ratings = ratings.select(values >= np.float32(minimum))
        lines.append(
            f"{len(ratings):,} of {len(values):,} pairs have a rating of {minimum:g} or more"
        )
        values = np.ones(len(ratings), np.float32)
    elif "rating" in reading.columns and not look_like_counts(ratings):
        lines.append(
            f"column {name!r} was read as ratings, and every rated pair is one event: --minimum "
            "NUMBER leaves out low ratings, --set columns.count=NAME uses the numbers as counts"
        )
        values = np.ones(len(ratings), np.float32)
    elif name is not None and not values.all():
        ratings = ratings.select(values > 0)
        lines.append(f"{len(values) - len(ratings):,} pairs have the count 0 and are left out")
        values = ratings.values
    if not len(ratings):
        advice = "give a lower --minimum" if minimum is not None else "every count is 0"
        raise DataError(f"{source}: no events are left: {advice}")
    return _without_empty(replace(ratings, values=values), source)


def _without_empty(ratings: Ratings, source: Path) -> Ratings:
    """Drop the ids of users and items without events."""
    ids, keys = [], []
    for old, names, side in (
        (ratings.users, ratings.user_keys, "user"),
        (ratings.items, ratings.item_keys, "item"),
    ):
        present = count_ids(old, len(names)) > 0
        kept = np.flatnonzero(present)
        if len(kept) < 2:
            raise DataError(f"{source} has events of one {side} only: there is nothing to learn")
        take = getattr(names, "take", None)
        keys.append(take(kept) if take else tuple(names[at] for at in kept.tolist()))
        ids.append((np.cumsum(present) - 1)[old].astype(np.int32))
    return replace(ratings, users=ids[0], items=ids[1], user_keys=keys[0], item_keys=keys[1])


def _split_events(
    ratings: Ratings, settings: RankingSettings, seed: int, lines: list[str]
) -> Split:
    """Split events; users with one event are in training, held-out users and items are known
    there."""
    given = settings.split
    split = make_split(ratings, given.method, seed=seed, **_fractions(given.values()))
    assert split.parts is not None
    single = count_ids(ratings.users, ratings.num_users) == 1
    if single.any():
        parts = np.where(single[ratings.users], TRAIN, split.parts).astype(np.uint8)
        split = apply_parts(ratings, parts, split.method, seed, ratings_checksum(ratings))
        lines.append(
            f"{int(single.sum()):,} users with a single event are trained and not evaluated"
        )
    before = len(split.validation) + len(split.test)
    for part in ("validation", "test"):
        if not len(getattr(split, part)):
            raise DataError(
                f"the {part} part of the {split.method} split is empty: give more events, or "
                "another --split"
            )
    split = keep_known(split)
    if left := before - len(split.validation) - len(split.test):
        lines.append(f"{left:,} held-out events of users or items without training are left out")
    counts = ", ".join(f"{len(getattr(split, name)):,} {name}" for name in PARTS)
    lines.append(f"{split.method} split: {counts}")
    return split


def _fractions(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in ("validation", "test", "leave")}


def _popular_rows(events: CountedEvents, dim: int) -> Rows:
    """Return rows whose order is that of popularity: one column falls with the rank of an item.

    It falls fast at first, so that rounding keeps the items apart that lists begin with; ties are
    broken by id, which also falls with popularity.
    """
    users, items = np.zeros((events.lists.num_users, dim)), np.zeros((events.lists.num_items, dim))
    order = np.argsort(-events.popularity, kind="stable")
    # positive, so that rows folded in are positive too
    users[:, 0], items[order, 0] = 1.0, 0.5 + 20 / (20 + np.arange(len(items)))
    return users, items


def summarize_ranking(metrics: dict[str, Any], out: Path) -> list[str]:
    """Return the last lines of a run: metrics beside the baselines, sizes, warnings."""
    heads = ("NDCG@10", "Recall@10", "P@1", "P@5", "P@10")
    lines = [f"{'test':<14}" + "".join(f"{head:>11}" for head in heads)]
    for label, name in (("stored", "test"), ("float32 ALS", "als"), ("popularity", "popularity")):
        values = metrics[name].values()
        lines.append(f"{label:<14}" + "".join(f"{value:>11.4f}" for value in values))
    lines += [_fold_in_line(metrics["fold_in"])] if metrics["fold_in"] else []
    lines += size_lines(metrics["sizes"])
    lines.append(
        f"{out}: users.safetensors, items.safetensors, metrics.json, history.parquet, report.html"
    )
    if metrics["interrupted"]:
        lines.append("interrupted: the search of settings ended early, the best so far are used")
    return [*lines, *warn(metrics)]


def _fold_in_line(found: dict[str, Any]) -> str:
    return (
        f"new users: NDCG@10 {found['ndcg@10']:.4f} for {found['users']:,} users left out of "
        f"training and folded in, {found['trained']:.4f} for the same users trained"
    )


def warn(metrics: dict[str, Any]) -> list[str]:
    """Return a warning for each baseline that ranks better than the stored model.

    >>> warn({"test": {"ndcg@10": 0.1}, "popularity": {"ndcg@10": 0.2}, "als": {"ndcg@10": 0.1}})
    ... # doctest: +ELLIPSIS
    ['worse than popularity: NDCG@10 0.1000, where ... 0.2000 (50.0 % less): ...']
    """
    own, lines = metrics["test"]["ndcg@10"], []
    advice = {
        "popularity": "recommend what is popular, or train on more events",
        "als": "a smaller --ratio stores more bits",
    }
    for name, label in (("popularity", "popularity"), ("als", "float32 ALS of the same width")):
        other = metrics[name]["ndcg@10"]
        if own < other:
            lines.append(
                f"worse than {label}: NDCG@10 {own:.4f}, where {label} has {other:.4f} "
                f"({100 * (1 - own / other):.1f} % less): {advice[name]}"
            )
    return lines
