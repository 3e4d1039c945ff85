"""The contents of a packed table: rows, codes, bytes by part, and the weights of its anchors.

For tables whose rows are weighted sums of atoms: an anchor is an atom, an object is a row.
"Largest" is by magnitude; of equal weights the lower id comes first. The padding row is not an
object. Rows are read in blocks: V x K weights are never in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.checks import check_integer
from featherbed.errors import ArgumentError
from featherbed.packed.band import Band, Every, Fixed, Identity, Ids, Ragged
from featherbed.packed.file import header_of, load
from featherbed.packed.matrix import Floats, Graded, Matrix, level_bits
from featherbed.packed.schema import describe
from featherbed.packed.table import PackedTable

HELD = 1 << 18  # weights held at once
NOTHING = 1e-20  # a quantized row of zeros has the smallest scale, 1e-30, not 0


class AnchorWeight(NamedTuple):
    """The weight of object ``id`` (and its key, if the table has keys) for ``anchor``."""

    id: int
    key: str | None
    anchor: int
    weight: float


class ZeroRows(NamedTuple):
    """Objects without a nonzero weight; their counts, and the share that occurs once, if known."""

    ids: Ids
    objects: int
    counts: NDArray[np.generic] | None
    once: float | None


class Purity(NamedTuple):
    """The ``share`` of ``objects`` that are in the majority group of their cluster.

    ``baseline`` is the share with a single cluster, that of the most frequent group: no clustering
    has less. ``majority`` maps each cluster to its group, the number of its objects in that group,
    and the number of its objects.
    """

    share: float
    baseline: float
    objects: int
    majority: dict[int, tuple[Hashable, int, int]]


def weighted_band(packed: PackedTable) -> Band:
    """Return the one band of a table of weights over atoms; refuse other tables."""
    if not isinstance(packed, PackedTable):
        raise ArgumentError(
            f"give a packed table, table.pack() or fb.load(path), got {type(packed).__name__}"
        )
    band = packed.bands[0]
    summed = band.combine == "sum" and band.cell is None and band.plus is None
    if len(packed.bands) > 1 or not summed or not has_weighted_atoms(band):
        name = packed.made_by.get("table", "table")
        found = ", ".join(
            f"{type(band.codes).__name__.lower()} codes combined by {band.combine}"
            for band in packed.bands
        )
        raise ArgumentError(
            f"{name} ({found}) has no weights over anchors to look at: give a packed AnchorTable, "
            "MixtureTable or LowRankTable, or a matrix compressed by ksvd, anchors or lowrank"
        )
    return band


def anchor_count(packed: PackedTable) -> int:
    """Return the number of anchors: all atoms but the last of each set of a softmax mixture."""
    atoms, made = weighted_band(packed).atoms, packed.made_by
    mixture = (made.get("table"), made.get("combine")) == ("MixtureTable", "softmax")
    sets = made.get("sets") if mixture else 0
    return atoms - sets if isinstance(sets, int) and 0 <= sets < atoms else atoms


def blocks(packed: PackedTable) -> Iterator[tuple[Ids, Ids, Floats]]:
    """Yield ids [B], anchors [B, s] and weights [B, s] (0 for padding) of all objects, in
    blocks."""
    band, anchors = weighted_band(packed), anchor_count(packed)
    step = max(1, HELD // band.gathered)
    for start in range(0, packed.rows, step):
        ids = np.arange(start, min(start + step, packed.rows))
        ids = ids[ids != packed.padding_idx]
        if band.values is not None:
            weights = band.values.rows(ids)[:, :anchors]
            yield ids, np.broadcast_to(np.arange(anchors), weights.shape), weights
            continue
        indices, values = band.fetch(ids, ids)
        assert values is not None
        inside = indices < anchors
        yield ids, np.where(inside, indices, 0), np.where(inside, values, np.float32(0))


def strongest(
    packed: PackedTable, count: int, classes: Ids, own: Ids | None = None
) -> list[AnchorWeight]:
    """Return the ``count`` largest weights of each class of anchors, by class, largest first.

    ``classes`` [K] holds the class of each anchor, -1 to leave it out; ``own`` [K] the object whose
    weight for the anchor is left out.
    """
    ids, anchors, weights = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32)
    floor = np.zeros(int(classes.max()) + 1, dtype=np.float32)  # smallest weight kept, by class
    for rows, indices, values in blocks(packed):
        better = (np.abs(values) > floor[classes[indices]]) & (classes[indices] >= 0)
        if own is not None:
            better &= own[indices] != rows[:, None]
        at, slot = np.nonzero(better)
        ids, anchors = np.append(ids, rows[at]), np.append(anchors, indices[at, slot])
        weights = np.append(weights, values[at, slot])
        order = np.lexsort((anchors, ids, -np.abs(weights), classes[anchors]))
        sorted_classes = classes[anchors[order]]
        rank = np.arange(len(order)) - np.searchsorted(sorted_classes, sorted_classes)
        order = order[rank < count]
        ids, anchors, weights = ids[order], anchors[order], weights[order]
        kept = np.bincount(classes[anchors], minlength=len(floor))
        floor[kept == count] = np.abs(weights)[np.cumsum(kept)[kept == count] - 1]
    found = zip(ids.tolist(), anchors.tolist(), weights.tolist(), strict=True)
    return [AnchorWeight(id_, packed.name_of(id_), anchor, weight) for id_, anchor, weight in found]


def objects_of(packed: PackedTable, anchor: int, count: int = 10) -> list[AnchorWeight]:
    """Return the objects with the ``count`` largest weights |T[i, anchor]|, largest first.

    Liang et al. (2021, table 5) show them as the objects an anchor induces.

    >>> from featherbed.packed.band import Entries
    >>> from featherbed.packed.matrix import Matrix
    >>> transform = np.array([[0.0, 2.0], [3.0, 1.0], [0.0, 0.0]])
    >>> codes, atoms = Entries.of(transform).layout("ragged", "float32")[0], np.eye(2)
    >>> packed = PackedTable([Band(3, codes, dictionary=Matrix.encode(atoms, "float32"))], 2)
    >>> [(entry.id, entry.weight) for entry in objects_of(packed, 1)]
    [(0, 2.0), (1, 1.0)]
    """
    anchors = anchor_count(packed)
    wanted = np.full(anchors, -1)
    wanted[check_integer("anchor", anchor, 0, anchors - 1)] = 0
    return strongest(packed, check_integer("count", count, 1), wanted)


def largest_pairs(
    packed: PackedTable, count: int = 20, *, anchor_ids: ArrayLike | None = None
) -> list[AnchorWeight]:
    """Return the ``count`` largest (object, anchor) weights |T[i, k]| (Liang et al. 2021, table 5).

    ``anchor_ids`` [K]: the object each anchor is, -1 if none; weights for itself are left out.

    >>> from featherbed.packed.band import Entries
    >>> from featherbed.packed.matrix import Matrix
    >>> transform = np.array([[0.0, 2.0], [3.0, 1.0], [0.0, 0.0]])
    >>> codes, atoms = Entries.of(transform).layout("ragged", "float32")[0], np.eye(2)
    >>> packed = PackedTable([Band(3, codes, dictionary=Matrix.encode(atoms, "float32"))], 2)
    >>> [(entry.id, entry.anchor) for entry in largest_pairs(packed, 2)]
    [(1, 0), (0, 1)]
    >>> found = largest_pairs(packed, 2, anchor_ids=[1, 2])  # object 1 is anchor 0
    >>> [(entry.id, entry.anchor) for entry in found]
    [(0, 1), (1, 1)]
    """
    anchors = anchor_count(packed)
    own = None if anchor_ids is None else objects_as_anchors(anchor_ids, anchors)
    return strongest(
        packed, check_integer("count", count, 1), np.zeros(anchors, dtype=np.int64), own
    )


def objects_as_anchors(anchor_ids: ArrayLike, anchors: int) -> Ids:  # -> [K]
    """Return the object of each anchor, checked."""
    found = np.asarray(anchor_ids)
    if found.shape != (anchors,) or found.dtype.kind not in "iu":
        raise ArgumentError(
            f"anchor_ids have shape {found.shape} and dtype {found.dtype}: give one id for each "
            f"of the {anchors} anchors, -1 for an anchor that is not an object"
        )
    return found.astype(np.int64)


def zero_rows(packed: PackedTable, counts: ArrayLike | None = None) -> ZeroRows:
    """Return the objects whose weights are all zero, T[i] = 0, and their counts.

    See Liang et al. (2021, section 4.4). In a softmax mixture such a row is the mean of the
    anchors.

    >>> from featherbed.packed.band import Entries
    >>> from featherbed.packed.matrix import Matrix
    >>> transform = np.array([[0.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    >>> codes, atoms = Entries.of(transform).layout("ragged", "float32")[0], np.eye(2)
    >>> packed = PackedTable([Band(3, codes, dictionary=Matrix.encode(atoms, "float32"))], 2)
    >>> found = zero_rows(packed, counts=[90, 1, 7])
    >>> found.ids.tolist(), found.counts.tolist(), found.once
    ([1, 2], [1, 7], 0.5)
    """
    occurs = None if counts is None else np.asarray(counts)
    if occurs is not None and (occurs.shape != (packed.rows,) or occurs.dtype.kind not in "iuf"):
        raise ArgumentError(
            f"counts have shape {occurs.shape}: give one for each of the {packed.rows} objects"
        )
    objects, empty = 0, [np.empty(0, dtype=np.int64)]
    for ids, _, weights in blocks(packed):
        objects += len(ids)
        empty.append(ids[np.abs(weights).max(1, initial=0) < NOTHING])
    found = np.concatenate(empty)
    if occurs is None:
        return ZeroRows(found, objects, None, None)
    once = float(np.mean(occurs[found] == 1)) if len(found) else None
    return ZeroRows(found, objects, occurs[found], once)


def clusters_of(packed: PackedTable) -> Ids:  # [V]
    """Return the anchor of each object's largest weight, argmax_k |T[i, k]|; -1 for a zero row."""
    found = np.full(packed.rows, -1, dtype=np.int64)
    for ids, indices, weights in blocks(packed):
        if weights.shape[1]:
            size = np.abs(weights)
            best = size.argmax(1)[:, None]
            nonzero = np.take_along_axis(size, best, 1)[:, 0] >= NOTHING
            found[ids] = np.where(nonzero, np.take_along_axis(indices, best, 1)[:, 0], -1)
    return found


def purity(clusters: PackedTable | ArrayLike, groups: Sequence[Any]) -> Purity:
    """Return the purity of clusters of objects: 1/N Σ_c max_g |{i in c : g in groups(i)}|.

    The cluster of an object is the anchor of its largest weight (of a packed table), or given [V],
    -1 for none. ``groups`` [V] holds one group per object, or several: such an object counts for
    each of them when the majority group of its cluster is found, and is in the majority if one of
    them is that group. Objects without a cluster or a group are left out of N. Liang et al. (2021,
    section 4.4) report 61.7 % for genres of films, and do not say how they count several genres.

    >>> found = purity([0, 0, 0, 1, -1], [["crime", "drama"], "drama", "crime", "comedy", "drama"])
    >>> found.share, found.baseline, found.majority
    (0.75, 0.5, {0: ('crime', 2, 3), 1: ('comedy', 1, 1)})
    """
    owner = clusters_of(clusters) if isinstance(clusters, PackedTable) else np.asarray(clusters)
    if owner.ndim != 1 or owner.dtype.kind not in "iu" or len(owner) != len(groups):
        raise ArgumentError(
            f"clusters have shape {owner.shape}, {len(groups)} groups are given: "
            "give one of both for each object"
        )
    objects, overall = Counter[int](), Counter[Hashable]()
    having: dict[int, Counter[Hashable]] = {}
    for cluster, given in zip(owner.tolist(), groups, strict=True):
        mine = groups_of(given)
        if cluster >= 0 and mine:
            objects[cluster] += 1
            having.setdefault(cluster, Counter()).update(mine)
            overall.update(mine)
    if not objects:
        raise ArgumentError("no object has both a cluster and a group: purity needs one at least")
    majority = {c: (*majority_group(having[c]), objects[c]) for c in sorted(objects)}
    total = sum(objects.values())
    share = sum(count for _, count, _ in majority.values()) / total
    return Purity(share, majority_group(overall)[1] / total, total, majority)


def groups_of(given: Any) -> set[Hashable]:
    """Return the groups of one object: none, one, or several."""
    if given is None:
        return set()
    return set(given) if isinstance(given, Iterable) and not isinstance(given, str) else {given}


def majority_group(counts: Counter[Hashable]) -> tuple[Hashable, int]:
    """Return the group with the highest count; of equal ones the first by name."""
    return min(counts.items(), key=lambda item: (-item[1], str(item[0])))


def anchors_report(
    packed: PackedTable,
    *,
    anchors: int = 10,
    count: int = 10,
    pairs: int = 20,
    counts: ArrayLike | None = None,
    anchor_ids: ArrayLike | None = None,
) -> dict[str, Any]:
    """Return the report of ``featherbed inspect --anchors``.

    It holds the largest weights of the first anchors, the largest pairs and the zero rows.
    """
    total = anchor_count(packed)
    shown = min(check_integer("anchors", anchors, 1), total)
    classes = np.where(np.arange(total) < shown, np.arange(total), -1)
    best = strongest(packed, check_integer("count", count, 1), classes)
    empty = zero_rows(packed, counts)
    occurs = empty.counts
    return {
        "anchors": total,
        "objects": [
            {"anchor": k, "induces": [e._asdict() for e in best if e.anchor == k]}
            for k in range(shown)
        ],
        "pairs": [entry._asdict() for entry in largest_pairs(packed, pairs, anchor_ids=anchor_ids)],
        "zero_rows": {
            "rows": len(empty.ids),
            "objects": empty.objects,
            "once": empty.once,
            "first": [
                {
                    "id": id_,
                    "key": packed.name_of(id_),
                    "count": None if occurs is None else occurs[at].item(),
                }
                for at, id_ in enumerate(empty.ids[:count].tolist())
            ],
        },
    }


def anchors_text(found: dict[str, Any]) -> str:
    """Return the report as text."""
    lines = [f"anchors     {found['anchors']:,}; the objects each induces most (weight)"]
    for one in found["objects"]:
        named = ", ".join(f"{_name(entry)} ({entry['weight']:.3g})" for entry in one["induces"])
        lines.append(f"  {one['anchor']:>8}  {named or 'none'}")
    lines.append("largest pairs: weight, object, anchor")
    lines += [
        f"  {entry['weight']:>8.3g}  {_name(entry)}, {entry['anchor']}" for entry in found["pairs"]
    ]
    empty = found["zero_rows"]
    share = empty["once"]
    once = "" if share is None else f", {share:.0%} of them of objects that occur once"
    lines.append(f"zero rows   {empty['rows']:,} of {empty['objects']:,}{once}")
    if empty["first"]:
        named = ", ".join(
            _name(row) + ("" if row["count"] is None else f" ({row['count']:,})")
            for row in empty["first"]
        )
        lines.append(f"  {named}{', ...' if empty['rows'] > len(empty['first']) else ''}")
    return "\n".join(lines)


def _name(entry: dict[str, Any]) -> str:
    return str(entry["id"] if entry["key"] is None else entry["key"])


SAMPLE = 100_000  # rows counted for the histogram
FETCHED = 1 << 22  # codes fetched for it


def report(path: str | Path) -> dict[str, Any]:
    """Return the report of ``featherbed inspect``."""
    table = load(path)
    meta = describe(table)
    parts = table.sizes_by_part()
    dense = table.rows * table.dim * 4
    size = Path(path).stat().st_size
    columns = table.columns_with_bits()
    vocabulary = sum(n for name, n in parts.items() if name.startswith("keys."))
    return {
        "file": str(path),
        "rows": table.rows,
        "dim": table.dim,
        "version": meta["version"],
        "made_by": table.made_by,
        "padding_idx": table.padding_idx,
        "stored_columns": table.dim if columns is None else int(np.count_nonzero(columns)),
        "bytes": {
            "file": size,
            "without_keys": size - vocabulary,
            "keys": vocabulary,
            "dense_float32": dense,
        },
        "smaller": {  # the file against float32 rows with the same keys; then without keys
            "file": (dense + vocabulary) / size,
            "float32": dense / (size - vocabulary),
            "float16": dense / 2 / (size - vocabulary),
        },
        "parts": parts,
        "bands": [
            _band(band, fields) for band, fields in zip(table.bands, meta["bands"], strict=True)
        ],
    }


def file_size(packed: PackedTable, keys: bool = False) -> int:
    """Return the bytes of the file of a table, header included, with its keys or without.

    >>> import featherbed as fb
    >>> packed = fb.DenseTable(5, 4).pack()
    >>> path = getfixture("tmp_path") / "items.safetensors"
    >>> packed.save(path)
    >>> file_size(packed) == path.stat().st_size
    True
    """
    table = packed if keys else packed.replace(keys=None)
    return len(header_of(table)) + sum(array.nbytes for array in table.arrays.values())


def _band(band: Band, fields: dict[str, Any]) -> dict[str, Any]:
    counts = codes_per_row(band)
    known = np.empty(0, dtype=np.int64) if counts is None else counts
    found, sizes = np.unique(known, return_counts=True)
    return {
        "rows": band.rows,
        "codes": fields["codes"],
        "combine": band.combine,
        "cell": None if band.cell is None else {**fields["cell"], "width": band.cell.width},
        "dictionary": fields["dictionary"],
        "values": fields["values"],
        "plus": None if band.plus is None else _band(band.plus, fields["plus"]),
        "codes_per_row": {str(n): int(c) for n, c in zip(found, sizes, strict=True)},
    }


def codes_per_row(band: Band) -> NDArray[np.int64] | None:
    """Return the number of nonzero codes of each row; None if no codes are stored.

    Of a large band, evenly spaced rows are counted.
    """
    if not isinstance(band.codes, Fixed | Ragged):
        return None
    each = band.codes.count if isinstance(band.codes, Fixed) else 1
    rows = evenly_spaced(band.rows, max(1000, min(SAMPLE, FETCHED // each)))
    counts, step = np.empty(len(rows), dtype=np.int64), max(1, SAMPLE // each)
    for start in range(0, len(rows), step):
        counts[start : start + step] = _count_codes(band, rows[start : start + step])
    return counts


def evenly_spaced(rows: int, most: int) -> NDArray[np.int64]:
    """Return the numbers of all rows, or of ``most`` of them, evenly spaced.

    >>> evenly_spaced(9, 3).tolist()
    [0, 4, 8]
    """
    return np.unique(np.linspace(0, max(0, rows - 1), min(rows, most)).astype(np.int64))


def as_text(found: dict[str, Any]) -> str:
    """Return the report as text."""
    sizes, made = found["bytes"], found["made_by"]
    name = made.get("table", "table")
    settings = ", ".join(
        f"{key}={value}" for key, value in made.items() if key != "table" and value is not None
    )
    width = f"rows of width {found['dim']}"
    if found["stored_columns"] < found["dim"]:
        stored = f"{found['stored_columns']} of {found['dim']} columns stored"
        width += f" ({stored}, the others have zero bits)"
    lines = [
        f"{found['file']}: {found['rows']:,} {width}, format version {found['version']}",
        f"made by     {name}({settings})",
        *_sizes_text(sizes),
        "parts",
        *(
            f"  {part:<24}{size:>14,}"
            for part, size in sorted(found["parts"].items(), key=lambda item: -item[1])
        ),
    ]
    for number, band in enumerate(found["bands"]):
        lines += _layer_text(f"band {number}: {band['rows']:,} rows,", band)
    return "\n".join(lines)


def _sizes_text(sizes: dict[str, int]) -> list[str]:
    """Return the sizes of the file and of its rows, each beside its float32 size."""
    rows, keys, dense = sizes["without_keys"], sizes["keys"], sizes["dense_float32"]
    alone = f"{compare_sizes(rows, dense)} as float32, {compare_sizes(rows, dense // 2)} as float16"
    if not keys:
        return [f"file        {sizes['file']:,} bytes, {alone}"]
    whole = compare_sizes(sizes["file"], dense + keys)
    return [
        f"file        {sizes['file']:,} bytes, {whole} as float32 with the same keys",
        f"  rows      {rows:,} bytes, {alone}",
        f"  keys      {keys:,} bytes",
    ]


def compare_sizes(size: int, other: int) -> str:
    """Return a comparison of two numbers of bytes in words.

    >>> compare_sizes(1_000, 4_000), compare_sizes(1_000, 990), compare_sizes(3_000, 2_000)
    ('4.0 times smaller than 4,000', 'about as large as 990', '1.5 times larger than 2,000')
    """
    ratio = other / max(1, size)
    if 1 / 1.05 < ratio < 1.05:
        return f"about as large as {other:,}"
    if ratio > 1:
        return f"{ratio:,.1f} times smaller than {other:,}"
    return f"{1 / ratio:,.1f} times larger than {other:,}"


def _codes(codes: dict[str, Any]) -> str:
    rest = ", ".join(
        f"{key} {value}"
        for key, value in codes.items()
        if key != "layout" and value not in (None, False)
    )
    return f"{codes['layout']} codes" + (f" ({rest})" if rest else "")


def _cell(cell: dict[str, Any]) -> str:
    weight = cell["weight"]
    shape = f"{weight['rows']:,} x {weight['columns']}"
    return f"{cell['kind']} to width {cell['width']}, weight {shape} in {weight['kind']}"


def _layer_text(start: str, band: dict[str, Any]) -> list[str]:
    lines = [f"{start} {_codes(band['codes'])}, combined by {band['combine']}"]
    if band["dictionary"]:
        shape = band["dictionary"]
        lines += [f"  dictionary {shape['rows']:,} x {shape['columns']} in {shape['kind']}"]
    if band["values"] and band["values"]["kind"] == "graded":
        lines += [
            f"  {rows:>10,} rows of {sum(map(int, text)):>3} bits: {text[:64]}"
            for rows, text in band["values"]["grades"]
        ]
    if band["cell"]:
        lines += [f"  cell {_cell(band['cell'])}"]
    lines += _histogram(band["codes_per_row"])
    return lines + ([] if band["plus"] is None else _layer_text("  plus", band["plus"]))


def _histogram(counts: dict[str, int]) -> list[str]:
    if not counts:
        return []
    most = max(counts.values())
    bars = (f"  {n:>4} {c:>10,} {'█' * max(1, round(30 * c / most))}" for n, c in counts.items())
    return ["  codes per row", *bars]


def has_weighted_atoms(band: Band) -> bool:
    """Whether rows are sums of stored atoms with weights of their own."""
    dense = isinstance(band.codes, Every) and band.dictionary is not None
    fixed = isinstance(band.codes, Fixed) and band.codes.levels is not None
    return dense or fixed or isinstance(band.codes, Ragged)


def row_cost(table: PackedTable, ids: Ids, coded: bool) -> NDArray[np.int64]:  # [B] -> [B]
    """Return the nonzero codes (``coded``) or the bits of each row, without shared parts.

    >>> rows = Matrix.encode(np.ones((3, 8), np.float32), "float16")
    >>> table = PackedTable([Band(3, Every(), values=rows)], 8)
    >>> row_cost(table, np.array([0, 2]), coded=False).tolist()
    [128, 128]
    """
    out = np.zeros(len(ids), dtype=np.int64)
    for band, batch, positions in table.places(ids):
        for layer in band.layers:
            out[batch] += _count_codes(layer, positions) if coded else _count_bits(layer, positions)
    return out


def _count_codes(band: Band, positions: Ids) -> Any:
    codes = band.codes
    if isinstance(codes, Ragged):
        return codes.read_counts(positions)
    if isinstance(codes, Fixed):
        values = codes.fetch(positions, band.atoms)[1]
        return codes.count if values is None else np.count_nonzero(values, axis=1)
    if band.values is None:
        return 1
    return np.count_nonzero(np.abs(band.values.rows(positions)) >= NOTHING, axis=1)


def _count_bits(band: Band, positions: Ids) -> Any:
    codes = band.codes
    own: Any = 0
    if isinstance(codes, Ragged):
        own = _count_codes(band, positions) * (codes.index_bits + codes.levels.bits)
        own += codes.count_bits
    elif isinstance(codes, Fixed):
        own = codes.record_bits
    rows = band.dictionary if isinstance(codes, Identity) else None
    matrices = [matrix for matrix in (band.values, band.norms, rows) if matrix is not None]
    return own + sum(_matrix_bits(matrix, positions) for matrix in matrices)


def _matrix_bits(matrix: Matrix | Graded, positions: Ids) -> Any:
    """Return the bits of rows of a stored matrix, with a scale per row if there is one."""
    if isinstance(matrix, Graded):
        ends = np.cumsum([rows for rows, _ in matrix.grades])
        record = np.array([sum(map(int, text)) for _, text in matrix.grades], dtype=np.int64)
        return record[np.searchsorted(ends, positions, side="right")]
    scale = 8 * matrix.scale.itemsize if matrix.scale is not None and matrix.axis == 0 else 0
    return level_bits(matrix.kind) * matrix.shape[1] + scale
