"""The metadata of a packed file: what a table is, as JSON, and back. ``docs/format.md`` specifies every field."""

from __future__ import annotations

import json
from typing import Any

from featherbed.compose import COMBINES
from featherbed.errors import FormatError
from featherbed.packed.band import BLOCK_BITS, Affine, Band, Members
from featherbed.packed.cells import Cell
from featherbed.packed.codes import Codes, Every, Fixed, Hash, Identity, Ragged, Remainder
from featherbed.packed.graded import Graded
from featherbed.packed.matrix import Matrix
from featherbed.packed.parts import (
    IMPLICIT_ROWS,
    MOST_DIM,
    MOST_GATHERED,
    MOST_ROWS,
    Reader,
    Take,
    code_count,
    read_cell,
    read_codes,
    read_matrix,
    read_values,
)
from featherbed.packed.table import PackedTable

VERSION = (
    2  # the newest; a change of the format is a new version, and all from 1 on are read for ever
)
MOST_BANDS = 64
MOST_LAYERS = 8
MOST_NESTED = 32  # levels of the settings in made_by
MOST_MEMBERS = (1 << 32) - 1  # what the running totals of a bitmap can count


def describe(table: PackedTable) -> dict[str, Any]:
    """Return the metadata of a table."""
    return {
        "version": version_of(table.bands),
        "rows": table.rows,
        "dim": table.dim,
        "padding_idx": table.padding_idx,
        "keys": table.keys is not None,
        "bands": [_describe_band(band) for band in table.bands],
        "made_by": json.loads(
            json.dumps(table.made_by), parse_constant=str
        ),  # JSON has no infinity: a word will do for people
    }


def stored(table: PackedTable) -> dict[str, Any]:
    """Return the metadata of a table as it is written: from version 2 on without the fields that are null or false."""
    fields = describe(table)
    return fields if fields["version"] == 1 else _short(fields) | {"made_by": fields["made_by"]}


def _short(fields: Any) -> Any:
    if isinstance(fields, dict):
        return {
            name: _short(value)
            for name, value in fields.items()
            if value is not None and value is not False
        }
    return [_short(value) for value in fields] if isinstance(fields, list) else fields


def version_of(bands: list[Band]) -> int:
    """Return the first version of the format that holds these bands: graded rows came with version 2."""
    graded = any(isinstance(layer.values, Graded) for band in bands for layer in band.layers)
    return 2 if graded else 1


def _describe_band(band: Band) -> dict[str, Any]:
    affine = band.affine
    return {
        "rows": band.rows,
        "members": band.members is not None,
        "codes": _describe_codes(band.codes),
        "values": _describe_values(band.values),
        "dictionary": _describe_matrix(band.dictionary),
        "combine": band.combine,
        "cell": _describe_cell(band.cell),
        "affine": None
        if affine is None
        else {"weight": _describe_matrix(affine.weight), "bias": affine.bias is not None},
        "norms": _describe_matrix(band.norms),
        "plus": None if band.plus is None else _describe_band(band.plus),
    }


def _describe_cell(cell: Cell | None) -> dict[str, Any] | None:
    if cell is None:
        return None
    return {
        "kind": cell.kind,
        "weight": _describe_matrix(cell.weight),
        "input": _describe_matrix(cell.input),
    }


def _describe_values(values: Matrix | Graded | None) -> dict[str, Any] | None:
    if not isinstance(values, Graded):
        return _describe_matrix(values)
    shape = {"rows": values.shape[0], "columns": values.shape[1]}
    return {
        "kind": "graded",
        **shape,
        "scale": {"kind": str(values.scale.dtype)},
        "grades": [list(g) for g in values.grades],
    }


def _describe_matrix(matrix: Matrix | None) -> dict[str, Any] | None:
    if matrix is None:
        return None
    scale = None if matrix.scale is None else {"axis": matrix.axis, "kind": str(matrix.scale.dtype)}
    return {
        "kind": matrix.kind,
        "rows": matrix.shape[0],
        "columns": matrix.shape[1],
        "scale": scale,
    }


def _describe_codes(codes: Codes) -> dict[str, Any]:
    match codes:
        case Identity():
            return {"layout": "identity"}
        case Hash():
            return {"layout": "hash", "seed": codes.seed, "hashes": codes.hashes}
        case Remainder():
            return {"layout": "remainder", "divisor": codes.divisor}
        case Every():
            return {"layout": "every"}
        case Fixed():
            value = None if codes.levels is None else codes.levels.kind
            fields = {
                "count": codes.count,
                "index_bits": codes.index_bits,
                "value": value,
                "parts": codes.parts,
            }
            return {"layout": "fixed", **fields}
        case Ragged():
            fields = {
                "entries": codes.entries,
                "index_bits": codes.index_bits,
                "count_bits": codes.count_bits,
            }
            return {
                "layout": "ragged",
                **fields,
                "value": codes.levels.kind,
                "wide": codes.directory.itemsize == 8,
            }


def rebuild(
    metadata: Any, take: Take
) -> tuple[list[Band], int, int, int | None, bool, dict[str, Any]]:
    """Return bands, rows, dim, padding_idx, whether there are keys, and made_by, from metadata and arrays."""
    top = Reader(metadata, "metadata")
    version = _version(top.raw("version"))
    top.sparse = version > 1
    rows, dim = top.whole("rows", 1, MOST_ROWS), top.whole("dim", 1, MOST_DIM)
    padding = None if top.raw("padding_idx") is None else top.whole("padding_idx", 0, rows - 1)
    listed = top.raw("bands")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MOST_BANDS:
        raise FormatError(f"metadata.bands must be a list of 1 to {MOST_BANDS} bands")
    bands, left = [], rows
    for number, fields in enumerate(listed):
        band = _band(
            Reader(fields, f"bands[{number}]", top.sparse),
            f"b{number}",
            take,
            left,
            dim,
            number == len(listed) - 1,
        )
        left -= band.rows
        bands.append(band)
    _check_implicit(bands, rows)
    if version < version_of(bands):
        raise FormatError(
            f"metadata.version is {version}: graded rows came with version {version_of(bands)}"
        )
    if left:
        raise FormatError(f"the bands hold {rows - left} rows, the table says {rows}")
    made_by, has_keys = top.raw("made_by"), top.flag("keys")
    if not isinstance(made_by, dict):
        raise FormatError(f"metadata.made_by must be an object, got {type(made_by).__name__}")
    if _nests(made_by, MOST_NESTED):
        raise FormatError(f"metadata.made_by nests more than {MOST_NESTED} levels deep")
    top.done()
    return bands, rows, dim, padding, has_keys, made_by


def _nests(value: Any, levels: int) -> bool:
    """Whether a JSON value nests deeper than this."""
    inner = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(_nests(part, levels - 1) for part in inner)


def _version(version: Any) -> int:
    whole = isinstance(version, int) and not isinstance(version, bool)
    if whole and 1 <= version <= VERSION:
        return int(version)
    found = f"format version {str(version)[:40]} is not known here, this featherbed reads versions 1 to {VERSION}"
    if whole and version == 0:
        raise FormatError(f"{found}: version 0 was a draft, export the table again")
    raise FormatError(
        f"{found}: a newer featherbed may read it" if whole and version > VERSION else found
    )


def _band(reader: Reader, name: str, take: Take, left: int, dim: int, last: bool) -> Band:
    rows = reader.whole("rows", 0, left)
    members = _members(name, take, left) if reader.flag("members") else None
    if last == (members is not None):
        raise FormatError(f"{reader.where}: every band but the last has members, the last has none")
    if members is not None and rows > MOST_MEMBERS:
        raise FormatError(f"{reader.where} has {rows} members: {MOST_MEMBERS} is the most")
    band, width = _layer(reader, name, take, rows, MOST_LAYERS)
    band.members = members
    if width != dim:
        raise FormatError(f"{reader.where} makes rows of width {width}, the table says {dim}")
    return band


def _layer(reader: Reader, name: str, take: Take, rows: int, deep: int) -> tuple[Band, int]:
    """Return a layer (with those that are added to it) and the width of its rows."""
    dictionary = read_matrix(reader.sub("dictionary"), f"{name}.dictionary", take)
    values = read_values(reader.sub("values"), f"{name}.values", take)
    coded = reader.sub("codes")
    if coded is None:
        raise FormatError(f"{reader.where}.codes is missing")
    codes = read_codes(
        coded, f"{name}.codes", take, rows, 0 if dictionary is None else dictionary.shape[0]
    )
    band = Band(rows, codes, values, dictionary, reader.choice("combine", COMBINES))
    width = _check_shapes(band, reader.where)
    band.cell = read_cell(reader.sub("cell"), f"{name}.cell", take, band, width)
    width = width if band.cell is None else band.cell.width
    added = reader.sub("plus")
    if added is not None:
        if deep <= 1 or added.flag("members") or added.whole("rows", 0, MOST_ROWS) != rows:
            raise FormatError(
                f"{added.where}: at most {MOST_LAYERS} layers add up, of equal rows, without members"
            )
        band.plus, other = _layer(added, f"{name}.plus", take, rows, deep - 1)
        if other != width:
            raise FormatError(
                f"{added.where} makes rows of width {other}, they are added to rows of width {width}"
            )
    band.affine, width = _affine(reader.sub("affine"), f"{name}.affine", take, width)
    band.norms = read_matrix(reader.sub("norms"), f"{name}.norms", take)
    if band.norms is not None and band.norms.shape != (rows, 1):
        raise FormatError(
            f"{reader.where}.norms of shape {band.norms.shape} do not fit {rows} rows"
        )
    reader.done()
    return band, width


def _affine(reader: Reader | None, name: str, take: Take, width: int) -> tuple[Affine | None, int]:
    """Return the affine stage of rows of ``width``, and the width it makes of them."""
    if reader is None:
        return None, width
    weight = read_matrix(reader.sub("weight"), f"{name}.weight", take)
    if weight is not None:
        if weight.shape[0] != width:
            raise FormatError(
                f"{reader.where}.weight takes {weight.shape[0]} columns, rows have {width}"
            )
        width = weight.shape[1]
    bias = take(f"{name}.bias", "F32", (width,)) if reader.flag("bias") else None
    reader.done()
    return Affine(weight, bias), width


def _members(name: str, take: Take, left: int) -> Members:
    blocks = -(-left // BLOCK_BITS)
    bitmap = take(f"{name}.members.bitmap", "U32", (blocks * (BLOCK_BITS // 32),))
    return Members(bitmap, take(f"{name}.members.totals", "U32", (blocks,)))


def _check_shapes(band: Band, where: str) -> int:
    """Return the width of a band's rows before the affine stage; refuse parts that do not fit each other."""
    codes, dictionary, values = band.codes, band.dictionary, band.values
    count = code_count(codes)
    stored = isinstance(codes, Fixed | Ragged)
    if values is not None and (stored or values.shape != (band.rows, count or values.shape[1])):
        raise FormatError(
            f"{where}.values of shape {values.shape} do not fit {band.rows} rows of {count} codes"
        )
    if isinstance(codes, Every):
        if (
            values is None
            or (dictionary is not None and values.shape[1] != dictionary.shape[0])
            or band.combine != "sum"
        ):
            raise FormatError(f"{where}: layout 'every' sums one value for each atom")
        return values.shape[1] if dictionary is None else dictionary.shape[1]
    if dictionary is None or (dictionary.shape[0] == 0 and band.rows):
        raise FormatError(f"{where} has codes but no atoms")
    if isinstance(codes, Ragged) and band.combine != "sum":
        raise FormatError(f"{where}: ragged codes are combined by sum")
    if isinstance(codes, Identity) and dictionary.shape[0] != band.rows:
        raise FormatError(f"{where}: {band.rows} rows stand on {dictionary.shape[0]} stored ones")
    if band.combine == "sum" or count is None:
        return dictionary.shape[1]
    if dictionary.shape[1] * count > MOST_GATHERED:
        held = f"{count} atoms of width {dictionary.shape[1]}"
        raise FormatError(
            f"{where}: {band.combine} of {held}: no more than {MOST_GATHERED} numbers stand side by side"
        )
    return dictionary.shape[1] * (count if band.combine == "concat" else 1)


def _check_implicit(bands: list[Band], rows: int) -> None:
    """Refuse rows that nothing stands behind, and remainders of ids that have no quotient."""
    for number, band in enumerate(bands):
        for codes, atoms in ((layer.codes, layer.atoms) for layer in band.layers):
            if (
                isinstance(codes, Remainder)
                and (rows - 1) // codes.divisor >= atoms - codes.divisor
            ):
                raise FormatError(
                    f"bands[{number}]: {atoms} atoms cannot hold the quotients and remainders of {rows} ids"
                )
    alone = bands[0]
    nothing = all(map(_stores_nothing, alone.layers))
    if len(bands) == 1 and nothing and alone.norms is None and rows > alone.atoms * IMPLICIT_ROWS:
        raise FormatError(
            f"{rows} rows on {alone.atoms} atoms: no more than {IMPLICIT_ROWS} rows for each atom may share them"
        )
    _check_work(bands)


def _stores_nothing(layer: Band) -> bool:
    """Whether a layer stores no bit for a row: all rows are made of the dictionary alone."""
    empty = isinstance(layer.codes, Fixed) and layer.codes.record_bits == 0
    return layer.values is None and (isinstance(layer.codes, Hash | Remainder) or empty)


def _check_work(bands: list[Band]) -> None:
    """Refuse layers that store nothing for a row and take far more work than the file has bytes."""
    size = sum(array.nbytes for band in bands for _, array in band.arrays())
    for number, band in enumerate(bands):
        for layer in filter(_stores_nothing, band.layers):
            numbers = layer.rows * row_work(layer)
            if numbers > size * IMPLICIT_ROWS:
                raise FormatError(
                    f"bands[{number}]: {layer.rows} rows that store nothing take {numbers} products "
                    f"in all, a table of {size} bytes may take {size * IMPLICIT_ROWS}"
                )


def row_work(layer: Band) -> int:
    """Return the products that a row takes: codes x (width of an atom + weights of a step)."""
    count = code_count(layer.codes) or 1
    width = 0 if layer.dictionary is None else layer.dictionary.shape[1]
    steps = layer.cell is not None and layer.cell.step_width is not None
    weights = (layer.cell.weight, layer.cell.input) if layer.cell is not None and steps else ()
    return count * (width + sum(m.shape[0] * m.shape[1] for m in weights if m is not None))
