"""The metadata of a packed file: what a table is, as JSON, and back. ``docs/format.md`` specifies every field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.compose import COMBINES
from featherbed.errors import FormatError
from featherbed.packed import bits
from featherbed.packed.band import BLOCK_BITS, Affine, Band, Members
from featherbed.packed.codes import DIRECTORY_STEP, MOST_CODES, Codes, Every, Fixed, Hash, Identity, Ragged, Remainder
from featherbed.packed.levels import Levels
from featherbed.packed.matrix import KINDS, Matrix, row_bytes
from featherbed.packed.table import PackedTable

VERSION = 0
MOST_ROWS = 1 << 40
MOST_DIM = 1 << 16
MOST_BANDS = 64
MOST_LAYERS = 8
IMPLICIT_ROWS = 1 << 20  # rows that may share one atom where nothing is stored for a row

Take = Callable[[str, str, tuple[int, ...]], NDArray[Any]]  # name, dtype, shape -> array
_FLOATS = {"float32": "F32", "float16": "F16"}


def describe(table: PackedTable) -> dict[str, Any]:
    """Return the metadata of a table."""
    return {
        "version": VERSION,
        "rows": table.rows,
        "dim": table.dim,
        "padding_idx": table.padding_idx,
        "keys": table.keys is not None,
        "bands": [_describe_band(band) for band in table.bands],
        "made_by": table.made_by,
    }


def _describe_band(band: Band) -> dict[str, Any]:
    affine = band.affine
    return {
        "rows": band.rows,
        "members": band.members is not None,
        "codes": _describe_codes(band.codes),
        "values": _describe_matrix(band.values),
        "dictionary": _describe_matrix(band.dictionary),
        "combine": band.combine,
        "cell": "none",
        "affine": None if affine is None else {"weight": _describe_matrix(affine.weight), "bias": affine.bias is not None},
        "norms": _describe_matrix(band.norms),
        "plus": None if band.plus is None else _describe_band(band.plus),
    }


def _describe_matrix(matrix: Matrix | None) -> dict[str, Any] | None:
    if matrix is None:
        return None
    scale = None if matrix.scale is None else {"axis": matrix.axis, "kind": str(matrix.scale.dtype)}
    return {"kind": matrix.kind, "rows": matrix.shape[0], "columns": matrix.shape[1], "scale": scale}


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
            fields = {"count": codes.count, "index_bits": codes.index_bits, "value": value, "parts": codes.parts}
            return {"layout": "fixed", **fields}
        case Ragged():
            fields = {"entries": codes.entries, "index_bits": codes.index_bits, "count_bits": codes.count_bits}
            return {"layout": "ragged", **fields, "value": codes.levels.kind, "wide": codes.directory.itemsize == 8}


class Reader:
    """Reads one JSON object field by field; anything of the wrong type or out of range is a FormatError."""

    def __init__(self, fields: Any, where: str) -> None:
        if not isinstance(fields, dict):
            raise FormatError(f"{where} must be an object, got {type(fields).__name__}")
        self.fields, self.where = fields, where

    def raw(self, name: str) -> Any:
        """Return a field as it is."""
        if name not in self.fields:
            raise FormatError(f"{self.where} lacks the field {name!r}")
        return self.fields[name]

    def whole(self, name: str, low: int, high: int) -> int:
        """Return a whole number within bounds."""
        value = self.raw(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise FormatError(f"{self.where}.{name} must be a whole number from {low} to {high}, got {str(value)[:40]}")
        return value

    def flag(self, name: str) -> bool:
        """Return a truth value."""
        value = self.raw(name)
        if not isinstance(value, bool):
            raise FormatError(f"{self.where}.{name} must be true or false, got {str(value)[:40]}")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of the accepted words."""
        value = self.raw(name)
        if value not in choices:
            raise FormatError(f"{self.where}.{name} must be one of {', '.join(choices)}, got {str(value)[:40]!r}")
        return str(value)

    def sub(self, name: str) -> Reader | None:
        """Return a nested object, or None."""
        value = self.fields.get(name) if name in ("norms", "plus") else self.raw(name)  # files of early versions lack the two
        return None if value is None else Reader(value, f"{self.where}.{name}")


def rebuild(metadata: Any, take: Take) -> tuple[list[Band], int, int, int | None, bool, dict[str, Any]]:
    """Return bands, rows, dim, padding_idx, whether there are keys, and made_by, from metadata and arrays."""
    top = Reader(metadata, "metadata")
    version = top.raw("version")
    if version != VERSION or not isinstance(version, int) or isinstance(version, bool):
        raise FormatError(f"format version {str(version)[:40]} is not known here: this featherbed reads version {VERSION}")
    rows, dim = top.whole("rows", 1, MOST_ROWS), top.whole("dim", 1, MOST_DIM)
    padding = None if top.raw("padding_idx") is None else top.whole("padding_idx", 0, rows - 1)
    listed = top.raw("bands")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MOST_BANDS:
        raise FormatError(f"metadata.bands must be a list of 1 to {MOST_BANDS} bands")
    bands, left = [], rows
    for number, fields in enumerate(listed):
        band = _band(Reader(fields, f"bands[{number}]"), f"b{number}", take, left, dim, number == len(listed) - 1)
        left -= band.rows
        bands.append(band)
    _check_implicit(bands, rows)
    if left:
        raise FormatError(f"the bands hold {rows - left} rows, the table says {rows}")
    made_by = top.raw("made_by")
    return bands, rows, dim, padding, top.flag("keys"), made_by if isinstance(made_by, dict) else {}


def _band(reader: Reader, name: str, take: Take, left: int, dim: int, last: bool) -> Band:
    rows = reader.whole("rows", 0, left)
    members = _members(name, take, left) if reader.flag("members") else None
    if last == (members is not None):
        raise FormatError(f"{reader.where}: every band but the last has members, the last has none")
    band, width = _layer(reader, name, take, rows, MOST_LAYERS)
    band.members = members
    if width != dim:
        raise FormatError(f"{reader.where} makes rows of width {width}, the table says {dim}")
    return band


def _layer(reader: Reader, name: str, take: Take, rows: int, deep: int) -> tuple[Band, int]:
    """Return a layer (with those that are added to it) and the width of its rows."""
    dictionary = _matrix(reader.sub("dictionary"), f"{name}.dictionary", take)
    values = _matrix(reader.sub("values"), f"{name}.values", take)
    coded = reader.sub("codes")
    if coded is None:
        raise FormatError(f"{reader.where}.codes is missing")
    codes = _codes(coded, f"{name}.codes", take, rows, 0 if dictionary is None else dictionary.shape[0])
    reader.choice("cell", ("none",))
    band = Band(rows, codes, values, dictionary, reader.choice("combine", COMBINES))
    width = _check_shapes(band, reader.where)
    added = reader.sub("plus")
    if added is not None:
        if deep <= 1 or added.raw("members") or added.whole("rows", 0, MOST_ROWS) != rows:
            raise FormatError(f"{added.where}: at most {MOST_LAYERS} layers add up, of equal rows, without members")
        band.plus, other = _layer(added, f"{name}.plus", take, rows, deep - 1)
        if other != width:
            raise FormatError(f"{added.where} makes rows of width {other}, they are added to rows of width {width}")
    affine = reader.sub("affine")
    if affine is not None:
        weight = _matrix(affine.sub("weight"), f"{name}.affine.weight", take)
        if weight is not None:
            if weight.shape[0] != width:
                raise FormatError(f"{affine.where}.weight takes {weight.shape[0]} columns, rows have {width}")
            width = weight.shape[1]
        bias = take(f"{name}.affine.bias", "F32", (width,)) if affine.flag("bias") else None
        band.affine = Affine(weight, bias)
    band.norms = _matrix(reader.sub("norms"), f"{name}.norms", take)
    if band.norms is not None and band.norms.shape != (rows, 1):
        raise FormatError(f"{reader.where}.norms of shape {band.norms.shape} do not fit {rows} rows")
    return band, width


def _members(name: str, take: Take, left: int) -> Members:
    blocks = -(-left // BLOCK_BITS)
    bitmap = take(f"{name}.members.bitmap", "U32", (blocks * (BLOCK_BITS // 32),))
    return Members(bitmap, take(f"{name}.members.totals", "U32", (blocks,)))


def _matrix(reader: Reader | None, name: str, take: Take) -> Matrix | None:
    if reader is None:
        return None
    kind = reader.choice("kind", tuple(KINDS))
    rows, columns = reader.whole("rows", 0, MOST_ROWS), reader.whole("columns", 1, MOST_DIM)
    scaled = reader.sub("scale")
    if (kind in _FLOATS) != (scaled is None):
        raise FormatError(f"{reader.where}: levels have a scale, floats have none")
    if scaled is None:
        return Matrix(kind, (rows, columns), take(name, _FLOATS[kind], (rows, columns)))
    axis = scaled.whole("axis", 0, 1)
    scale = take(f"{name}.scale", _FLOATS[scaled.choice("kind", tuple(_FLOATS))], (rows if axis == 0 else columns,))
    return Matrix(kind, (rows, columns), take(name, "U8", (rows, row_bytes(kind, columns))), scale, axis)


def _levels(kind: str, name: str, take: Take) -> Levels:
    return Levels(kind, None if kind in _FLOATS else take(f"{name}.levels", "F32", (2 ** KINDS[kind],)))


def _codes(reader: Reader, name: str, take: Take, rows: int, atoms: int) -> Codes:
    layout = reader.choice("layout", ("identity", "hash", "remainder", "every", "fixed", "ragged"))
    if layout == "identity":
        return Identity()
    if layout == "hash":
        return Hash(reader.whole("seed", 0, 2**32 - 1), reader.whole("hashes", 1, 256))
    if layout == "remainder":
        return Remainder(reader.whole("divisor", 1, MOST_ROWS))
    if layout == "every":
        return Every()
    index_bits = reader.whole("index_bits", 0, 32)
    count = reader.whole("count", 1, MOST_CODES) if layout == "fixed" else 1
    parts = layout == "fixed" and reader.flag("parts")
    if index_bits != bits.width(atoms // count if parts else atoms):
        raise FormatError(f"{reader.where}.index_bits is {index_bits}: {atoms} atoms need another number")
    if layout == "fixed":
        kind = None if reader.raw("value") is None else reader.choice("value", tuple(KINDS))
        if parts and atoms % count:
            raise FormatError(f"{reader.where}: {atoms} atoms do not divide into {count} parts")
        codes = Fixed(rows, count, index_bits, np.empty(0, np.uint32), None, parts)
        codes.levels = None if kind is None else _levels(kind, name, take)
        codes.stream = take(f"{name}.stream", "U32", (bits.word_count(rows, codes.record_bits),))
        return codes
    entries, count_bits = reader.whole("entries", 0, MOST_ROWS), reader.whole("count_bits", 0, 32)
    levels = _levels(reader.choice("value", tuple(KINDS)), name, take)
    directory = take(f"{name}.directory", "U64" if reader.flag("wide") else "U32", (-(-rows // DIRECTORY_STEP),))
    counts = take(f"{name}.counts", "U32", (bits.word_count(rows, count_bits),))
    stream = take(f"{name}.stream", "U32", (bits.word_count(entries, index_bits + levels.bits),))
    return Ragged(rows, entries, index_bits, count_bits, counts, directory, stream, levels)


def _check_shapes(band: Band, where: str) -> int:
    """Return the width of a band's rows before the affine stage; refuse parts that do not fit each other."""
    codes, dictionary, values = band.codes, band.dictionary, band.values
    count = _code_count(band)
    stored = isinstance(codes, Fixed | Ragged)
    if values is not None and (stored or values.shape != (band.rows, count or values.shape[1])):
        raise FormatError(f"{where}.values of shape {values.shape} do not fit {band.rows} rows of {count} codes")
    if isinstance(codes, Every):
        if values is None or (dictionary is not None and values.shape[1] != dictionary.shape[0]) or band.combine != "sum":
            raise FormatError(f"{where}: layout 'every' sums one value for each atom")
        return values.shape[1] if dictionary is None else dictionary.shape[1]
    if dictionary is None or (dictionary.shape[0] == 0 and band.rows):
        raise FormatError(f"{where} has codes but no atoms")
    if isinstance(codes, Ragged) and band.combine != "sum":
        raise FormatError(f"{where}: ragged codes are combined by sum")
    if isinstance(codes, Identity) and dictionary.shape[0] != band.rows:
        raise FormatError(f"{where}: {band.rows} rows stand on {dictionary.shape[0]} stored ones")
    return dictionary.shape[1] * (count if band.combine == "concat" and count else 1)


def _check_implicit(bands: list[Band], rows: int) -> None:
    """Refuse rows that nothing stands behind, and remainders of ids that have no quotient."""
    for number, band in enumerate(bands):
        for codes, atoms in ((layer.codes, layer.atoms) for layer in band.layers):
            if isinstance(codes, Remainder) and (rows - 1) // codes.divisor >= atoms - codes.divisor:
                raise FormatError(f"bands[{number}]: {atoms} atoms cannot hold the quotients and remainders of {rows} ids")
    alone = bands[0]
    nothing = all(
        layer.values is None
        and (isinstance(layer.codes, Hash | Remainder) or (isinstance(layer.codes, Fixed) and layer.codes.record_bits == 0))
        for layer in alone.layers
    )
    if len(bands) == 1 and nothing and alone.norms is None and rows > alone.atoms * IMPLICIT_ROWS:
        raise FormatError(f"{rows} rows on {alone.atoms} atoms: no more than {IMPLICIT_ROWS} rows for each atom may share them")


def _code_count(band: Band) -> int | None:
    match band.codes:
        case Identity():
            return 1
        case Hash():
            return band.codes.hashes
        case Remainder():
            return 2
        case Fixed():
            return band.codes.count
    return None
