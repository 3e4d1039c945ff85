"""The description of a packed file: rows, codes, bytes by part, codes per row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.packed import bits
from featherbed.packed.anchor_weights import NOTHING
from featherbed.packed.band import Band
from featherbed.packed.codes import Every, Fixed, Identity, Ids, Ragged
from featherbed.packed.columns import columns_with_bits
from featherbed.packed.file import header_of, load
from featherbed.packed.graded import Graded
from featherbed.packed.matrix import Matrix, level_bits
from featherbed.packed.schema import describe
from featherbed.packed.table import PackedTable

SAMPLE = 100_000  # rows counted for the histogram
FETCHED = 1 << 22  # codes fetched for it


def report(path: str | Path) -> dict[str, Any]:
    """Return the report of ``featherbed inspect``."""
    table = load(path)
    meta = describe(table)
    parts = table.sizes_by_part()
    dense = table.rows * table.dim * 4
    size = Path(path).stat().st_size
    columns = columns_with_bits(table)
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
    if isinstance(band.codes, Ragged):
        return band.codes.read_counts(_spaced(band.rows, SAMPLE))
    if not isinstance(band.codes, Fixed):
        return None
    codes = band.codes
    rows = _spaced(band.rows, max(1000, min(SAMPLE, FETCHED // codes.count)))
    counts = np.full(len(rows), codes.count, dtype=np.int64)
    if codes.levels is not None:
        step = max(1, SAMPLE // codes.count)
        for start in range(0, len(rows), step):
            values = codes.fetch(rows[start : start + step], band.atoms)[1]
            assert values is not None
            counts[start : start + step] = np.count_nonzero(values, axis=1)
    return counts


def _spaced(rows: int, most: int) -> NDArray[np.int64]:
    """Return all rows, or ``most`` of them, evenly spaced."""
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
    return f"{cell['kind']} to width {cell['width']}, weight {weight['rows']:,} x {weight['columns']} in {weight['kind']}"


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
        counts = bits.unpack(codes.counts, positions * codes.count_bits, codes.count_bits)
        return counts.astype(np.int64)
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
