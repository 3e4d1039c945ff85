"""The page to explore a table: a projection of its rows, their codes, atoms and neighbors.

The same page runs online (data from the endpoints of the server) and offline (data within the file
that ``featherbed view`` writes).
"""

from __future__ import annotations

import base64
import csv
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import orjson
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, DataError, FeatherbedError, MissingExtra
from featherbed.packed import (
    Band,
    Every,
    Matrix,
    PackedTable,
    anchor_count,
    row_cost,
    strongest,
    weighted_band,
)

TEMPLATE = Path(__file__).with_name("explore.html")
POINTS = 100_000  # rows drawn at most
OFFLINE_POINTS = 30_000
NEIGHBORS = 8
ATOMS = 10  # shown of a row
ANCHORS = 200  # shown at most
BLOCK = 1 << 14

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def sample_rows(rows: int, most: int, seed: int = 0) -> Ids:
    """Return all ids, or a random sample of ``most``, ascending.

    >>> sample_rows(5, 10).tolist(), len(sample_rows(1000, 10))
    ([0, 1, 2, 3, 4], 10)
    """
    if rows <= most:
        return np.arange(rows)
    chosen = np.random.default_rng(seed).choice(rows, most, replace=False)
    return np.sort(chosen).astype(np.int64)


def project_rows(table: PackedTable, ids: Ids) -> Floats:  # [n] -> [n, 2]
    """Return the two leading principal components of rows, scaled to at most 1.

    >>> import featherbed as fb
    >>> project_rows(fb.DenseTable(50, 8).pack(), np.arange(50)).shape
    (50, 2)
    """
    total, second = np.zeros(table.dim), np.zeros((table.dim, table.dim))
    for start in range(0, len(ids), BLOCK):
        rows = np.nan_to_num(table[ids[start : start + BLOCK]]).astype(np.float64)
        total += rows.sum(0)
        second += rows.T @ rows
    mean = total / len(ids)
    axes = np.linalg.eigh(second / len(ids) - np.outer(mean, mean))[1][:, ::-1][:, :2]
    axes *= np.sign(axes[np.abs(axes).argmax(0), np.arange(axes.shape[1])])
    if table.dim == 1:
        axes = np.pad(axes, ((0, 0), (0, 1)))
    places = np.concatenate(
        [
            (np.nan_to_num(table[ids[start : start + BLOCK]]) - mean) @ axes
            for start in range(0, len(ids), BLOCK)
        ]
    )
    scaled: Floats = (places / max(1e-30, np.abs(places).max())).astype(np.float32)
    return scaled


def color_columns(
    table: PackedTable,
    ids: Ids,
    given: Mapping[str, NDArray[Any]] | None = None,
    counts: NDArray[Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the columns that points may be colored by: ``kind`` and base64 ``values`` of each.

    They are the ``given`` columns, each with one entry per row of the table, the strongest anchor,
    the first code, the band, the popularity (``counts``, or those stored with the keys) and the
    norm.
    """
    columns: dict[str, dict[str, Any]] = {}
    for name, values in (given or {}).items():
        if len(values) != table.rows:
            raise ArgumentError(
                f"{name} has {len(values):,} entries, the table {table.rows:,} rows: give one each"
            )
        chosen = np.asarray(values)[ids]
        if chosen.dtype.kind in "iuf":
            with np.errstate(over="ignore"):
                numbers = chosen.astype(np.float32)
            numbers[~np.isfinite(numbers)] = np.nan  # drawn without a color
            if np.isnan(numbers).all():
                raise ArgumentError(f"{name} holds no finite number: leave it out")
            columns[name] = as_numbers(numbers)
        else:
            names, codes = np.unique(chosen.astype(str), return_inverse=True)
            columns[name] = as_categories(codes) | {"names": names.tolist()}
    with suppress(FeatherbedError):  # no weights over anchors
        parts = range(0, len(ids), BLOCK)
        anchors = [strongest_anchors(table, ids[start : start + BLOCK]) for start in parts]
        columns["anchor"] = as_categories(np.concatenate(anchors))
    with suppress(FeatherbedError):  # no fixed codes
        columns["first code"] = as_categories(table.codes_of(ids)[:, 0])
    if len(table.bands) > 1:
        bands = np.empty(len(ids), dtype=np.int64)
        for number, (_, batch, _) in enumerate(table.places(ids)):
            bands[batch] = number
        columns["band"] = as_categories(bands)
    counts = getattr(table.keys, "counts", None) if counts is None else counts
    if counts is not None:
        columns["popularity (log10)"] = as_numbers(np.log10(1.0 + counts[ids]))
    norms = [
        np.linalg.norm(table[ids[start : start + BLOCK]], axis=1)
        for start in range(0, len(ids), BLOCK)
    ]
    return columns | {"norm": as_numbers(np.concatenate(norms))}


def read_columns(path: Path) -> dict[str, NDArray[Any]]:
    """Return the columns of a .csv or .tsv file with a header, or the arrays of an .npz file."""
    try:
        if path.suffix == ".npz":
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
            if any(values.ndim != 1 for values in found.values()):
                raise ValueError
            return found
        with path.open(encoding="utf-8-sig", newline="") as lines:
            rows = list(csv.reader(lines, delimiter="\t" if path.suffix == ".tsv" else ","))
    except (ValueError, TypeError, EOFError, csv.Error, BadZipFile):
        raise DataError(
            f"{path.name} holds no columns: give a .csv or .tsv file in UTF-8, or an .npz file of "
            "arrays [rows] of numbers or text"
        ) from None
    if len(rows) < 2 or len({len(row) for row in rows}) > 1 or len({*rows[0]}) < len(rows[0]):
        raise DataError(
            f"{path.name} needs a header of different names and the same number of cells in every "
            "line"
        )
    columns = {}
    for name, *cells in zip(*rows, strict=True):
        try:
            columns[name] = np.array([float(cell) for cell in cells])
        except ValueError:
            columns[name] = np.array(cells)
    return columns


def atom_weights(table: PackedTable, ids: Ids) -> tuple[Ids, Floats]:  # [n] -> [n, a], [n, a]
    """Return the atoms that rows use and their weights; refuse tables without weights."""
    band = weighted_band(table)
    if band.values is not None:
        weights = band.values.rows(ids)
        return np.broadcast_to(np.arange(weights.shape[1]), weights.shape), weights
    indices, values = band.fetch(ids, ids)
    assert values is not None
    return indices, values


def strongest_anchors(table: PackedTable, ids: Ids) -> Ids:
    """Return the anchor with the largest weight of each row, -1 for rows without weights."""
    indices, values = atom_weights(table, ids)
    weights = np.where(indices < anchor_count(table), np.abs(values), 0)
    best = weights.argmax(1)
    found: Ids = np.where(weights.max(1) > 0, indices[np.arange(len(ids)), best], -1)
    return found


def largest_atoms(table: PackedTable, ids: Ids) -> tuple[Ids, Floats]:  # [n] -> [n, a], [n, a]
    """Return the atoms with the largest weights of each row, largest first; refuse as above."""
    parts = []
    for start in range(0, len(ids), BLOCK):
        indices, weights = atom_weights(table, ids[start : start + BLOCK])
        order = np.argsort(-np.abs(weights), axis=1, kind="stable")[:, :ATOMS]
        parts.append([np.take_along_axis(values, order, 1) for values in (indices, weights)])
    most = max(indices.shape[1] for indices, _ in parts)  # ragged rows differ from block to block
    padded = [[np.pad(v, ((0, 0), (0, most - v.shape[1]))) for v in part] for part in parts]
    return np.concatenate([i for i, _ in padded]), np.concatenate([w for _, w in padded])


def describe_row(
    table: PackedTable, id_: int, original: PackedTable | None = None
) -> dict[str, Any]:
    """Return key, codes, atoms with weights, bits and nearest rows of one row.

    With ``original``, the rows before compression, also the nearest rows there.
    """
    at = np.array([id_])
    row = table[at]
    band = next(n for n, (_, batch, _) in enumerate(table.places(at)) if len(batch))
    ids, scores = table.search(row[0], min(NEIGHBORS + 1, table.rows), metric="cosine")
    details: dict[str, Any] = {
        "id": id_,
        "key": table.name_of(id_),
        "band": band if len(table.bands) > 1 else None,
        "bits": int(row_cost(table, at, coded=False)[0]),
        "norm": float(np.linalg.norm(row)),
        "neighbors": name_rows(table, ids, scores, id_),
        "codes": None,
        "atoms": None,
    }
    with suppress(FeatherbedError):  # no fixed codes
        details["codes"] = table.codes_of(at)[0].tolist()
    with suppress(FeatherbedError):  # no weights over atoms
        pairs = zip(*(values[0].tolist() for values in largest_atoms(table, at)), strict=True)
        details["atoms"] = [{"atom": atom, "weight": weight} for atom, weight in pairs if weight]
    if original is not None:
        most = min(NEIGHBORS + 1, table.rows)
        before, similar = original.search(original[id_], most, metric="cosine")
        details["neighbors_before"] = name_rows(table, before, similar, id_)
    return details


def original_table(original: NDArray[Any], table: PackedTable) -> PackedTable:
    """Return the matrix before compression as a table, whose search finds its nearest rows."""
    if original.ndim != 2 or len(original) != table.rows:
        raise ArgumentError(
            f"the original is {original.shape}, the table {(table.rows, table.dim)}: give a matrix "
            "of as many rows"
        )
    if not np.isfinite(original).all():
        raise ArgumentError("the original holds NaN or infinity: give the matrix without them")
    values = Matrix.encode(np.asarray(original, dtype=np.float32), "float32")
    return PackedTable([Band(table.rows, Every(), values=values)], original.shape[1])


def name_rows(table: PackedTable, ids: Ids, scores: Floats, own: int) -> list[dict[str, Any]]:
    """Return id, key and score of rows, without row ``own``."""
    pairs = zip(ids.tolist(), scores.tolist(), strict=True)
    found = [
        {"id": id_, "key": table.name_of(id_), "score": round(score, 4)}
        for id_, score in pairs
        if id_ != own
    ]
    return found[:NEIGHBORS]


def list_anchors(table: PackedTable, count: int = 8) -> list[dict[str, Any]]:
    """Return, for each anchor, the objects with its largest weights; empty without anchors.

    These are the induced objects of Liang et al. (2021), Table 5.
    """
    try:
        anchors = min(ANCHORS, anchor_count(table))
    except FeatherbedError:
        return []
    classes = np.full(anchor_count(table), -1)
    classes[:anchors] = np.arange(anchors)
    found: list[dict[str, Any]] = [{"anchor": number, "objects": []} for number in range(anchors)]
    for weight in strongest(table, count, classes):
        entry = {"id": weight.id, "key": weight.key, "weight": round(weight.weight, 4)}
        found[weight.anchor]["objects"].append(entry)
    return found


def explore_data(
    table: PackedTable,
    most: int = POINTS,
    columns: Mapping[str, NDArray[Any]] | None = None,
    *,
    counts: NDArray[Any] | None = None,
    titles: Any = None,  # by id
) -> dict[str, Any]:
    """Return the content of the page: places, keys and columns of points, and the anchors."""
    ids = sample_rows(table.rows, most)
    places = project_rows(table, ids)
    return {
        "rows": table.rows,
        "dim": table.dim,
        "bytes": table.nbytes,
        "method": table.made_by.get("method") or table.made_by.get("table"),
        "ids": as_base64(ids.astype("<u4")),
        "x": as_base64(places[:, 0].astype("<f4")),
        "y": as_base64(places[:, 1].astype("<f4")),
        "keys": None if table.keys is None else [table.name_of(int(id_)) for id_ in ids],
        "titles": None if titles is None else [titles[int(id_)] for id_ in ids],
        "columns": color_columns(table, ids, columns, counts),
        "anchors": list_anchors(table),
    }


def offline_page(
    name: str,
    table: PackedTable,
    *,
    columns: Mapping[str, NDArray[Any]] | None = None,
    original: NDArray[Any] | None = None,
) -> str:
    """Return the page of one table as a file of its own, neighbors included; no network is needed.

    >>> import featherbed as fb
    >>> "Plotly" in offline_page("items", fb.DenseTable(50, 8).pack())
    True
    """
    data = explore_data(table, OFFLINE_POINTS, columns)
    ids = sample_rows(table.rows, OFFLINE_POINTS)
    whole = "<u2" if table.rows <= 1 << 16 else "<u4"
    data["neighbors"] = as_base64(nearest_rows(table, ids).astype(whole))
    data["bits"] = as_base64(row_cost(table, ids, coded=False).astype("<u4"))
    with suppress(FeatherbedError):  # no fixed codes
        data["codes"] = as_base64(table.codes_of(ids).astype("<u2"))
    with suppress(FeatherbedError):  # no weights over atoms
        atoms, weights = largest_atoms(table, ids)
        largest = max(1e-30, float(np.abs(weights).max()))
        data["atoms"] = as_base64(atoms.astype("<u2"))
        data["weights"] = as_base64(np.rint(weights * (32767 / largest)).astype("<i2"))
        data["largest"] = largest
    if original is not None:
        before = nearest_rows(original_table(original, table), ids)
        data["neighbors_before"] = as_base64(before.astype(whole))
    script = f"<script>{plotly_script()}</script>"
    return render(script, {"name": name, "kind": "table", "data": data})


def nearest_rows(table: PackedTable, ids: Ids) -> Ids:  # [n] -> [n, NEIGHBORS]
    """Return the nearest rows of each row by cosine, itself left out."""
    found = np.empty((len(ids), NEIGHBORS), dtype=np.int64)
    most = min(NEIGHBORS + 1, table.rows)
    for start in range(0, len(ids), 1024):
        part = ids[start : start + 1024]
        near = table.search(table[part], most, metric="cosine")[0]
        found[start : start + 1024] = without_own(near, part)
    return found


def without_own(near: Ids, own: Ids) -> Ids:  # [n, k + 1], [n] -> [n, NEIGHBORS]
    """Leave out each row's own id, or else the last of its neighbors; repeat the last if few."""
    keep = near != own[:, None]
    keep[keep.all(1), -1] = False
    few = near[keep].reshape(len(near), -1) if near.shape[1] > 1 else near
    return np.pad(few, ((0, 0), (0, NEIGHBORS - few.shape[1])), mode="edge")


def online_page(script: str = "static/plotly.js") -> str:
    """Return the page whose data comes from the server."""
    return render(f'<script src="{script}"></script>', None)


def render(script: str, data: Mapping[str, Any] | None) -> str:
    """Fill the template with plotly's script and the data, None online."""
    text = orjson.dumps(data).decode().replace("<", "\\u003c")
    template = TEMPLATE.read_text(encoding="utf-8")
    return template.replace("<!--plotly-->", script, 1).replace('"{{data}}"', text, 1)


def plotly_script() -> str:
    """Return plotly's library as one script."""
    try:
        return str(import_module("plotly.offline").get_plotlyjs())
    except ModuleNotFoundError:
        raise MissingExtra("plotly", "view", "exploring a table") from None


def as_categories(values: NDArray[Any]) -> dict[str, Any]:
    """Return a column of whole numbers that name groups."""
    return {"kind": "category", "values": as_base64(values.astype("<i4"))}


def as_numbers(values: NDArray[Any]) -> dict[str, Any]:
    """Return a column of numbers."""
    return {"kind": "number", "values": as_base64(values.astype("<f4"))}


def as_base64(array: NDArray[Any]) -> str:
    """Return the bytes of an array as base64, which the page reads as typed arrays."""
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
