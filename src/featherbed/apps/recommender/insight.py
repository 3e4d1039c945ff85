"""Insights of the report beyond the error: a baseline, popularity, the cost of rows, anchors.

Everything is counted in bins of popularity (training ratings), so that the size of a report does
not depend on the number of rows. Computed with numpy from the packed tables, as they are served.
The baseline of every recommender is mean + bias of the user + bias of the item,

    b_u = Σ (r(u, i) - mean - b_i) / (n_u + shrinkage_u),   b_i alike

alternating (Koren 2008, "Factorization meets the neighborhood", section 2.1). The two shrinkages
are chosen on the validation ratings: with fixed ones the baseline is weak on sparse data, and a
model looks better than it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.apps.recommender.data import Split
from featherbed.errors import ArgumentError
from featherbed.io.records import ItemTitles, Ratings, block_slices, count_ids
from featherbed.packed import (
    PackedTable,
    anchor_count,
    clusters_of,
    compare_sizes,
    has_weighted_atoms,
    purity,
    row_cost,
    strongest,
)
from featherbed.report import FINE, bin_edges, bin_name

BLOCK = 1 << 22  # ratings processed at once
SEARCHED = 4_000_000  # maximum number of ratings for the search, those of every n-th user
GRID = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # shrinkages of both sides
FACTORS = (0.25, 0.5, 2.0, 4.0)  # of one side's shrinkage, tried after the grid
DEFAULT = 5.0  # shrinkage without validation ratings
SEARCH_SWEEPS, SWEEPS = 4, 20
TOLERANCE = 1e-4  # of the ratings' standard deviation: sweeps end when no bias changes by more

Doubles = NDArray[np.float64]
Shrinkage = tuple[float, float]  # of users, of items


@dataclass(frozen=True)
class Biases:
    """A fitted baseline.

    >>> biases = Biases(3.0, np.array([0.5]), np.array([-1.0, 0.25]), shrinkage=(5.0, 5.0))
    >>> biases.predict(np.array([0, 0]), np.array([0, 1]))
    array([2.5 , 3.75])
    """

    mean: float
    users: Doubles  # [num_users]
    items: Doubles  # [num_items]
    shrinkage: Shrinkage

    def predict(self, users: NDArray[Any], items: NDArray[Any]) -> Doubles:  # [B], [B] -> [B]
        """Return the predicted ratings."""
        found: Doubles = self.mean + self.users[users] + self.items[items]
        return found

    def error(self, ratings: Ratings) -> float:
        """Return the mean squared error."""
        total = sum(
            float(np.square(self.predict(ratings.users[here], ratings.items[here]) - values).sum())
            for here, values in _blocks(ratings)
        )
        return total / max(1, len(ratings))


def fit_validated_biases(train: Ratings, validation: Ratings) -> Biases:
    """Fit biases to the training ratings, with the shrinkages of the lowest validation error.

    Without validation ratings both shrinkages are 5.

    >>> from featherbed.io.records import make_ratings
    >>> train, validation, test = make_ratings(200, 100, 4000).split(0)
    >>> fitted = fit_validated_biases(train, validation)
    >>> fitted.error(validation) <= fit_biases(train, (5.0, 5.0)).error(validation)
    True
    """
    if not len(validation):
        return fit_biases(train, (DEFAULT, DEFAULT))
    every = -(-len(train) // SEARCHED)
    parts = [part if every == 1 else _some_users(part, every) for part in (train, validation)]
    if not all(len(part) for part in parts):
        parts = [train, validation]
    return fit_biases(train, _best_shrinkage(*parts))


def _some_users(ratings: Ratings, every: int) -> Ratings:
    return ratings.take(np.flatnonzero(np.asarray(ratings.users) % every == 0))


def _best_shrinkage(train: Ratings, validation: Ratings) -> Shrinkage:
    """Search a grid shared by both sides, then each side around its best value."""
    known: dict[Shrinkage, float] = {}
    start: Biases | None = None

    def try_all(candidates: list[Shrinkage]) -> Shrinkage:
        nonlocal start
        for shrinkage in candidates:
            if shrinkage not in known:
                start = fit_biases(train, shrinkage, sweeps=SEARCH_SWEEPS, start=start)
                known[shrinkage] = start.error(validation)
        return min(known, key=lambda shrinkage: known[shrinkage])

    users, items = try_all([(value, value) for value in GRID])
    users, items = try_all([(users * factor, items) for factor in FACTORS])
    return try_all([(users, items * factor) for factor in FACTORS])


def fit_biases(
    train: Ratings,
    shrinkage: Shrinkage,
    *,
    sweeps: int = SWEEPS,
    start: Biases | None = None,
) -> Biases:
    """Fit biases by alternating updates, items first, until they converge.

    >>> values = np.array([1, 3], np.float32)
    >>> ratings = Ratings(np.array([0, 1]), np.array([0, 0]), values, ("a", "b"), ("film",))
    >>> fit_biases(ratings, (1.0, 0.0)).users.tolist()
    [-0.5, 0.5]
    """
    if not len(train):
        raise ArgumentError("there are no ratings to fit biases to")
    mean = float(np.mean(train.values, dtype=np.float64))
    tolerance = TOLERANCE * max(float(np.std(train.values, dtype=np.float64)), 1e-12)
    sizes = train.num_users, train.num_items
    biases = (
        [np.zeros(size) for size in sizes]
        if start is None
        else [start.users.copy(), start.items.copy()]
    )
    ids = train.users, train.items
    weights = [
        np.maximum(count_ids(ids[side], sizes[side]) + shrinkage[side], 1e-12) for side in (0, 1)
    ]
    for _ in range(sweeps):
        change = 0.0
        for side in (1, 0):
            total = np.zeros(sizes[side])
            for here, values in _blocks(train):
                residual = values - mean - biases[1 - side][ids[1 - side][here]]
                total += np.bincount(ids[side][here], residual, minlength=sizes[side])
            new = total / weights[side]
            change = max(change, float(np.abs(new - biases[side]).max()))
            biases[side] = new
        if change <= tolerance:
            break
    return Biases(mean, biases[0], biases[1], shrinkage)


def _blocks(ratings: Ratings) -> Iterator[tuple[slice, Doubles]]:
    """Yield slices of the ratings and their values."""
    for block in block_slices(len(ratings), BLOCK):
        yield block, np.asarray(ratings.values[block], dtype=np.float64)


ROWS = 1 << 18  # rows measured at once
POINTS = 1200  # rows drawn as points
MAX_ANCHORS, MAX_ITEMS = 24, 8  # anchors shown, and items of each
MAX_GROUPED = 200_000  # items whose groups are compared with their anchors
NO_FACTORS = (
    "stored no factors: the ratings do not support any within this budget; every user gets the "
    "same list, less the items rated in training (biases only)"
)
Counts = NDArray[np.int64]
Errors = NDArray[np.float64]


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
            **_describe_cost(table, count),
            "bands": _error_by_popularity(count, np.asarray(ids), errors, baseline_errors),
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
        "anchors": _describe_anchors(items, titles),
    }


def _mean(values: Errors) -> float | None:
    return float(values.mean()) if len(values) else None


def _squared_errors(predictions: Any, ratings: Ratings) -> Errors:
    errors: Errors = np.square(np.asarray(ratings.values, dtype=np.float64) - predictions)
    return errors


def _error_by_popularity(
    counts: Counts, ids: NDArray[np.integer], errors: Errors, baseline_errors: Errors
) -> list[dict[str, Any]]:
    """Return the test error by training count of the rated object, for bins with test ratings."""
    edges = bin_edges(int(counts.max(initial=0)))
    bins = np.searchsorted(edges, counts, side="right") - 1
    objects = np.bincount(bins, minlength=len(edges))
    rated = bins[ids]
    ratings = np.bincount(rated, minlength=len(edges))
    sums, baseline_sums = (
        np.bincount(rated, values, minlength=len(edges)) for values in (errors, baseline_errors)
    )
    return [
        {
            "name": bin_name(low, high),
            "objects": int(objects[n]),
            "ratings": int(ratings[n]),
            "share": float(ratings[n] / len(ids)),
            "mse": float(sums[n] / ratings[n]),
            "biases": float(baseline_sums[n] / ratings[n]),
        }
        for n, (low, high) in enumerate(zip(edges, [*edges[1:], None], strict=True))
        if ratings[n]
    ]


def _describe_cost(table: PackedTable, counts: Counts) -> dict[str, Any]:
    """Return the codes (of weighted atoms) or bits of rows by popularity, and of some as points."""
    coded = all(has_weighted_atoms(band) for band in table.bands)
    edges = np.array(bin_edges(int(counts.max(initial=0)), FINE))
    number, total, least, most = (np.zeros(len(edges), dtype=np.int64) for _ in range(4))
    least += np.iinfo(np.int64).max
    for block in block_slices(table.rows, ROWS):
        cost = row_cost(table, np.arange(block.start, block.stop), coded)
        bins = np.searchsorted(edges, counts[block], side="right") - 1
        number += np.bincount(bins, minlength=len(edges))
        total += np.bincount(bins, cost, minlength=len(edges)).astype(np.int64)
        np.minimum.at(least, bins, cost)
        np.maximum.at(most, bins, cost)
    shown = np.unique(np.linspace(0, table.rows - 1, min(table.rows, POINTS)).astype(np.int64))
    return {
        "unit": "codes" if coded else "bits",
        "mean": float(total.sum() / table.rows),
        "bins": [
            {
                "low": int(edges[n]),
                "rows": int(number[n]),
                "mean": float(total[n] / number[n]),
                "least": int(least[n]),
                "most": int(most[n]),
            }
            for n in np.flatnonzero(number)
        ],
        "points": {
            "ratings": counts[shown].tolist(),
            "cost": row_cost(table, shown, coded).tolist(),
        },
    }


def _describe_anchors(items: PackedTable, titles: ItemTitles | None) -> dict[str, Any] | None:
    """Return the anchors of the most items, with the items of the largest weights.

    None for tables without anchors.
    """
    if "Anchor" not in str(items.made_by.get("table", "")) or not all(
        has_weighted_atoms(band) or band.values is not None for band in items.bands
    ):
        return None
    try:
        total = anchor_count(items)
    except ArgumentError:
        return None
    clusters = clusters_of(items)
    sizes = np.bincount(clusters[clusters >= 0], minlength=total)
    shown = np.argsort(-sizes, kind="stable")[:MAX_ANCHORS]
    classes = np.full(total, -1)
    classes[shown] = np.arange(len(shown))
    tops: dict[int, list[dict[str, Any]]] = {int(k): [] for k in shown}
    for entry in strongest(items, MAX_ITEMS, classes):
        title = titles.names[entry.id] if titles is not None else None
        name = title or entry.key or str(entry.id)
        tops[entry.anchor].append({"name": name, "weight": entry.weight})
    groups = None if titles is None else titles.groups
    pure = None
    if groups is not None and items.rows <= MAX_GROUPED and any(groups):
        share = purity(clusters, groups)
        pure = {"share": share.share, "baseline": share.baseline}
    return {
        "total": total,
        "empty": int(np.count_nonzero(clusters < 0)),
        "purity": pure,
        "shown": [
            {"anchor": k, "leads": int(sizes[k]), "top": top} for k, top in tops.items() if top
        ],
    }


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
    parts = {"tables": "file", "keys": "keys", "rated items": "seen", "titles": "titles"}
    shown = {name: sizes[key] for name, key in parts.items() if sizes.get(key)}
    if other := sizes["whole"] - sum(shown.values()):
        shown["other"] = other
    listed = ", ".join(f"{name} {size:,}" for name, size in shown.items())
    weights = "" if metrics["nonzeros"] is None else f"; {metrics['nonzeros']:,} weights"
    lines = [
        f"test MSE {test:.4f} (RMSE {math.sqrt(test):.4f}), "
        f"validation {metrics['validation']['mse']:.4f}, train {metrics['train']['mse']:.4f}; "
        f"biases alone have {metrics['baselines']['biases']:.4f} on test",
        f"{sizes['whole']:,} bytes in all, "
        f"{compare_sizes(sizes['whole'], sizes['float32_whole'])} with float32 rows: {listed}",
        f"tables alone: {sizes['file']:,} bytes, "
        f"{compare_sizes(sizes['file'], sizes['float32'])} as float32 rows{weights}",
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
