"""What a trained recommender's report tells beyond its error: who pays for it, what rows cost, what anchors stand for.

Everything is counted in bins of popularity (ratings in the training part), so that ten million rows make no longer a report
than ten thousand. numpy alone, from the packed tables: of what will be served, not of what was trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError
from featherbed.packed import bits
from featherbed.packed.band import Band
from featherbed.packed.codes import Every, Fixed, Identity, Ids, Ragged
from featherbed.packed.graded import Graded
from featherbed.packed.inside import NOTHING, anchor_count, clusters_of, purity, strongest
from featherbed.packed.matrix import Matrix, level_bits
from featherbed.packed.table import PackedTable
from featherbed.tasks.baselines import Biases, validated_biases
from featherbed.tasks.data import Ratings

if TYPE_CHECKING:
    from featherbed.tasks.splits import Split

HELD, ROWS = 1 << 22, 1 << 18  # ratings and rows looked at at once
POINTS = 1200  # rows drawn as points
ANCHORS, TOP = 24, 8  # anchors shown, and items of each
GROUPED = 200_000  # items whose groups are compared with their anchors
COARSE, FINE = (1, 3), (1, 2, 5)
Counts = NDArray[np.int64]


def insight(
    users: PackedTable,
    items: PackedTable,
    split: Split,
    predictions: NDArray[np.floating],  # [test ratings]
    titles: Sequence[str | None] | None = None,  # [items]
    groups: Sequence[Any] | None = None,  # [items]: the groups (genres) of each
    biases: Biases | None = None,
) -> dict[str, Any]:
    """Return what ``ratings_page`` shows of a recommender: baselines, error by popularity, the cost of rows, anchors.

    ``biases`` is the baseline; None fits it, with shrinkages chosen on the validation part.

    >>> import featherbed as fb
    >>> from featherbed.tasks.data import planted_ratings
    >>> from featherbed.tasks.splits import make_split
    >>> split = make_split(planted_ratings(60, 40, 900))
    >>> users, items = fb.AnchorTable(60, 4, anchors=3).pack(), fb.DenseTable(40, 4).pack()
    >>> found = insight(users, items, split, np.full(len(split.test), split.train.values.mean()))
    >>> found["sides"]["users"]["unit"], found["sides"]["items"]["unit"]
    ('codes', 'bits')
    >>> abs(found["test"] - found["baselines"]["mean"]) < 1e-5
    True
    """
    test = split.test
    guess = np.asarray(predictions)
    if guess.shape != (len(test),):
        raise ArgumentError(
            f"predictions have shape {guess.shape}: give one for each of the {len(test)} test ratings"
        )
    baseline = validated_biases(split.train, split.validation) if biases is None else biases
    plain = baseline.predict(test.users, test.items)
    ours, theirs = _squared(guess, test), _squared(plain, test)
    sides = {}
    for side, table, ids, rated in (
        ("users", users, "users", test.users),
        ("items", items, "items", test.items),
    ):
        counts = _counts(getattr(split.train, ids), table.rows)
        sides[side] = {
            **_cost(table, counts),
            "bands": _bands(counts, np.asarray(rated), ours, theirs),
        }
    return {
        "test": _mean(ours),
        "baselines": {
            "mean": _mean(_squared(np.float64(baseline.mean), test)),
            "biases": _mean(theirs),
            "shrinkage": list(baseline.shrinkage),
        },
        "sides": sides,
        "anchors": _anchors(items, titles, groups),
    }


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None


def _squared(guess: Any, ratings: Ratings) -> NDArray[np.float64]:
    off: NDArray[np.float64] = np.square(np.asarray(ratings.values, dtype=np.float64) - guess)
    return off


def _blocks(count: int, step: int = HELD) -> Iterator[slice]:
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def _counts(ids: NDArray[np.integer], rows: int) -> Counts:
    """Return how often each of ``rows`` ids occurs."""
    total = np.zeros(rows, dtype=np.int64)
    for here in _blocks(len(ids)):
        total += np.bincount(ids[here], minlength=rows)
    return total


def edges_of(most: int, steps: tuple[int, ...] = COARSE) -> list[int]:
    """Return where bins of popularity begin: 0, then ``steps`` of every decade up to ``most``.

    >>> edges_of(120)
    [0, 1, 3, 10, 30, 100]
    """
    decades = (10**power for power in range(19))
    return [0, *(step * ten for ten in decades for step in steps if step * ten <= most)]


def _named(low: int, high: int | None) -> str:
    if high is None:
        return f"{low:,} and more"
    return f"{low:,}" if high == low + 1 else f"{low:,} to {high - 1:,}"


def _bands(
    counts: Counts,
    rated: NDArray[np.integer],
    ours: NDArray[np.float64],
    theirs: NDArray[np.float64],
) -> list[dict[str, Any]]:
    """Return the test error by how often the rated object occurs in training; bands without test ratings are left out."""
    edges = edges_of(int(counts.max(initial=0)))
    owner = np.searchsorted(edges, counts, side="right") - 1
    objects = np.bincount(owner, minlength=len(edges))
    band = owner[rated]
    ratings = np.bincount(band, minlength=len(edges))
    sums = [np.bincount(band, errors, minlength=len(edges)) for errors in (ours, theirs)]
    return [
        {
            "name": _named(low, edges[n + 1] if n + 1 < len(edges) else None),
            "objects": int(objects[n]),
            "ratings": int(ratings[n]),
            "share": float(ratings[n] / len(rated)),
            "mse": float(sums[0][n] / ratings[n]),
            "biases": float(sums[1][n] / ratings[n]),
        }
        for n, low in enumerate(edges)
        if ratings[n]
    ]


def _cost(table: PackedTable, counts: Counts) -> dict[str, Any]:
    """Return codes (of tables of weighted atoms) or bits of rows: by bins of popularity, and of some rows as points."""
    coded = all(_weighted(band) for band in table.bands)
    edges = np.array(edges_of(int(counts.max(initial=0)), FINE))
    number, total, least, most = (np.zeros(len(edges), dtype=np.int64) for _ in range(4))
    least += np.iinfo(np.int64).max
    for here in _blocks(table.rows, ROWS):
        cost = row_cost(table, np.arange(here.start, here.stop), coded)
        owner = np.searchsorted(edges, counts[here], side="right") - 1
        number += np.bincount(owner, minlength=len(edges))
        total += np.bincount(owner, cost, minlength=len(edges)).astype(np.int64)
        np.minimum.at(least, owner, cost)
        np.maximum.at(most, owner, cost)
    shown = np.unique(np.linspace(0, table.rows - 1, min(table.rows, POINTS)).astype(np.int64))
    return {
        "unit": "codes" if coded else "bits",
        "mean": float(total.sum() / table.rows),
        "bins": [
            {"low": int(edges[n]), "rows": int(number[n]), "mean": float(total[n] / number[n])}
            | {"least": int(least[n]), "most": int(most[n])}
            for n in np.flatnonzero(number)
        ],
        "points": {
            "ratings": counts[shown].tolist(),
            "cost": row_cost(table, shown, coded).tolist(),
        },
    }


def _weighted(band: Band) -> bool:
    """Whether rows are sums of stored atoms with weights of their own."""
    dense = isinstance(band.codes, Every) and band.dictionary is not None
    return (
        dense
        or isinstance(band.codes, Ragged)
        or (isinstance(band.codes, Fixed) and band.codes.levels is not None)
    )


def row_cost(table: PackedTable, ids: Ids, coded: bool) -> Counts:  # [B] -> [B]
    """Return what is stored for each row: codes with a weight other than 0, or bits; what all rows share costs nothing.

    >>> from featherbed.packed.matrix import Matrix
    >>> rows = Matrix.encode(np.ones((3, 8), np.float32), "float16")
    >>> row_cost(PackedTable([Band(3, Every(), values=rows)], 8), np.array([0, 2]), coded=False).tolist()
    [128, 128]
    """
    out = np.zeros(len(ids), dtype=np.int64)
    for band, batch, positions in table.places(ids):
        for layer in band.layers:
            out[batch] += _codes(layer, positions) if coded else _bits(layer, positions)
    return out


def _codes(band: Band, positions: Ids) -> Any:
    if isinstance(band.codes, Ragged):
        return bits.unpack(
            band.codes.counts, positions * band.codes.count_bits, band.codes.count_bits
        ).astype(np.int64)
    if isinstance(band.codes, Fixed):
        values = band.codes.fetch(positions, band.atoms)[1]
        return band.codes.count if values is None else np.count_nonzero(values, axis=1)
    return (
        1
        if band.values is None
        else np.count_nonzero(np.abs(band.values.rows(positions)) >= NOTHING, axis=1)
    )


def _bits(band: Band, positions: Ids) -> Any:
    own: Any = 0
    if isinstance(band.codes, Ragged):
        own = (
            _codes(band, positions) * (band.codes.index_bits + band.codes.levels.bits)
            + band.codes.count_bits
        )
    elif isinstance(band.codes, Fixed):
        own = band.codes.record_bits
    matrices = [
        band.values,
        band.norms,
        band.dictionary if isinstance(band.codes, Identity) else None,
    ]
    return own + sum(_matrix_bits(matrix, positions) for matrix in matrices if matrix is not None)


def _matrix_bits(matrix: Matrix | Graded, positions: Ids) -> Any:
    """Return the bits of rows of a stored matrix, a scale of their own included."""
    if isinstance(matrix, Graded):
        ends = np.cumsum([rows for rows, _ in matrix.grades])
        record = np.array([sum(map(int, text)) for _, text in matrix.grades], dtype=np.int64)
        return record[np.searchsorted(ends, positions, side="right")]
    scale = 8 * matrix.scale.itemsize if matrix.scale is not None and matrix.axis == 0 else 0
    return level_bits(matrix.kind) * matrix.shape[1] + scale


def _anchors(
    items: PackedTable, titles: Sequence[str | None] | None, groups: Sequence[Any] | None
) -> dict[str, Any] | None:
    """Return the anchors that most items lean on, each with the items it induces most; None for tables without anchors."""
    if "Anchor" not in str(items.made_by.get("table", "")) or not all(
        _weighted(b) or b.values is not None for b in items.bands
    ):
        return None
    try:
        total = anchor_count(items)
    except ArgumentError:
        return None
    owner = clusters_of(items)
    leads = np.bincount(owner[owner >= 0], minlength=total)
    shown = np.argsort(-leads, kind="stable")[:ANCHORS]
    classes = np.full(total, -1)
    classes[shown] = np.arange(len(shown))
    found = strongest(items, TOP, classes)

    def name(id_: int, key: str | None) -> str:
        return (titles[id_] if titles is not None else None) or key or str(id_)

    tops: dict[int, list[dict[str, Any]]] = {int(k): [] for k in shown}
    for entry in found:
        tops[entry.anchor].append({"name": name(entry.id, entry.key), "weight": entry.weight})
    pure = None
    if groups is not None and items.rows <= GROUPED and any(groups):
        share = purity(owner, groups)
        pure = {"share": share.share, "baseline": share.baseline}
    return {
        "total": total,
        "empty": int(np.count_nonzero(owner < 0)),
        "purity": pure,
        "shown": [
            {"anchor": int(k), "leads": int(leads[k]), "top": tops[int(k)]}
            for k in shown
            if tops[int(k)]
        ],
    }
