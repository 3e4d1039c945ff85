"""The metadata of a packed file: each part of a table as JSON, and read back from JSON and arrays.

``docs/format.md`` specifies every field. The ``_describe_*`` and ``_read_*`` function of a part
stand next to each other. Readers check each field before they use it: anything of the wrong type,
out of range or inconsistent is a FormatError.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featherbed.compose import COMBINES
from featherbed.errors import FormatError
from featherbed.packed import bits
from featherbed.packed.band import (
    BLOCK_BITS,
    DIRECTORY_STEP,
    MOST_CODES,
    Affine,
    Band,
    Codes,
    Every,
    Fixed,
    Hash,
    Identity,
    Members,
    Ragged,
    Remainder,
    code_count,
)
from featherbed.packed.cells import KINDS as CELLS
from featherbed.packed.cells import Cell
from featherbed.packed.levels import ValueLevels
from featherbed.packed.matrix import (
    KINDS,
    MOST_BITS,
    MOST_GRADES,
    Graded,
    Grades,
    Matrix,
    row_bytes,
    stream_bytes,
)
from featherbed.packed.table import PackedTable

VERSION = 3  # the newest version of the format; every version from 1 on stays readable
MOST_ROWS = 1 << 40
MOST_DIM = 1 << 16
MOST_BANDS = 64
MOST_LAYERS = 8
MOST_NESTED = 32  # depth of the settings in made_by
MOST_MEMBERS = (1 << 32) - 1  # limit of the running totals of a bitmap
MOST_GATHERED = 1 << 20  # numbers in the atoms of one row where they are held side by side
IMPLICIT_ROWS = 1 << 20  # rows that may share one atom, or byte, where nothing is stored per row

Fields = dict[str, Any]
Take = Callable[[str, str, tuple[int, ...]], NDArray[Any]]  # name, dtype, shape -> array
_FLOATS = {"float32": "F32", "float16": "F16"}
_LAYOUTS = {
    "identity": Identity,
    "hash": Hash,
    "remainder": Remainder,
    "every": Every,
    "fixed": Fixed,
    "ragged": Ragged,
}


class FieldReader:
    """Reads one JSON object field by field; a wrong type or a value out of range is a FormatError.

    ``sparse``: a field that is null or false may have been left out.
    """

    def __init__(self, fields: Any, where: str, sparse: bool = False) -> None:
        if not isinstance(fields, dict):
            raise FormatError(f"{where} must be an object, got {type(fields).__name__}")
        self.fields, self.where, self.sparse = fields, where, sparse
        self.known: set[str] = set()

    def raw(self, name: str) -> Any:
        """Return the value of a field, unchecked."""
        if name not in self.fields and self.sparse:
            return None
        if name not in self.fields:
            raise FormatError(f"{self.where} lacks the field {name!r}")
        self.known.add(name)
        return self.fields[name]

    def integer(self, name: str, low: int, high: int) -> int:
        """Return an integer within bounds."""
        value = self.raw(name)
        if type(value) is not int or not low <= value <= high:
            raise FormatError(
                f"{self.where}.{name} must be an integer from {low} to {high}, "
                f"got {str(value)[:40]}"
            )
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean."""
        value = False if self.sparse and name not in self.fields else self.raw(name)
        if not isinstance(value, bool):
            raise FormatError(f"{self.where}.{name} must be true or false, got {str(value)[:40]}")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of the accepted words."""
        value = self.raw(name)
        if value not in choices:
            raise FormatError(
                f"{self.where}.{name} must be one of {', '.join(choices)}, got {str(value)[:40]!r}"
            )
        return str(value)

    def nested(self, name: str) -> FieldReader | None:
        """Return a reader of a nested object, or None if the field is null."""
        value = self.raw(name)
        return None if value is None else FieldReader(value, f"{self.where}.{name}", self.sparse)

    def finish(self) -> None:
        """Refuse unknown fields: ignoring them would change what the file means."""
        extra = sorted(set(self.fields) - self.known)
        if extra:
            raise FormatError(
                f"{self.where} has fields this version does not know: {', '.join(extra)[:100]}"
            )


class TableFields(NamedTuple):
    """The parts of a table as its metadata describes them."""

    bands: list[Band]
    rows: int
    dim: int
    padding_idx: int | None
    keys: FieldReader | bool
    made_by: dict[str, Any]


# --- the table -----------------------------------------------------------------------------------


def describe(table: PackedTable) -> Fields:
    """Return the metadata of a table."""
    keys = table.keys is not None and table.keys.describe()
    return {
        "version": version_of(table.bands, keys),
        "rows": table.rows,
        "dim": table.dim,
        "padding_idx": table.padding_idx,
        "keys": keys,
        "bands": [_describe_band(band) for band in table.bands],
        # JSON has no infinity: made_by holds it as a word
        "made_by": json.loads(json.dumps(table.made_by), parse_constant=str),
    }


def stored_metadata(table: PackedTable) -> Fields:
    """Return the metadata as written: from version 2 on, null and false fields are left out."""
    fields = describe(table)
    if fields["version"] == 1:
        return fields
    short: Fields = _without_defaults(fields)
    return short | {"made_by": fields["made_by"]}


def _without_defaults(fields: Any) -> Any:
    if isinstance(fields, dict):
        kept = (name for name, value in fields.items() if value is not None and value is not False)
        return {name: _without_defaults(fields[name]) for name in kept}
    return [_without_defaults(value) for value in fields] if isinstance(fields, list) else fields


def version_of(bands: list[Band], keys: Any) -> int:
    """Return the first version that has these parts: 2 added graded rows, 3 forms of keys."""
    if not isinstance(keys, bool):
        return 3
    graded = any(isinstance(layer.values, Graded) for band in bands for layer in band.layers)
    return 2 if graded else 1


def rebuild(metadata: Any, take: Take) -> TableFields:
    """Return the parts of a table from its metadata and its arrays."""
    top = FieldReader(metadata, "metadata")
    version = _read_version(top.raw("version"))
    top.sparse = version > 1
    rows, dim = top.integer("rows", 1, MOST_ROWS), top.integer("dim", 1, MOST_DIM)
    padding = None if top.raw("padding_idx") is None else top.integer("padding_idx", 0, rows - 1)
    bands = _read_bands(top, take, rows, dim)
    _check_implicit(bands, rows)
    if version < version_of(bands, True):
        raise FormatError(f"metadata.version is {version}: graded rows came with version 2")
    keyed = version > 2 and isinstance(top.raw("keys"), dict)
    keys = (keyed and top.nested("keys")) or top.flag("keys")
    made_by = top.raw("made_by")
    if not isinstance(made_by, dict):
        raise FormatError(f"metadata.made_by must be an object, got {type(made_by).__name__}")
    if _nests(made_by, MOST_NESTED):
        raise FormatError(f"metadata.made_by nests more than {MOST_NESTED} levels deep")
    top.finish()
    return TableFields(bands, rows, dim, padding, keys, made_by)


def _nests(value: Any, depth: int) -> bool:
    """Return whether a JSON value nests deeper than ``depth``."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_nests(part, depth - 1) for part in inner)


def _read_version(version: Any) -> int:
    integer = type(version) is int
    if integer and 1 <= version <= VERSION:
        return int(version)
    found = (
        f"format version {str(version)[:40]} is not known here, "
        f"this featherbed reads versions 1 to {VERSION}"
    )
    if integer and version == 0:
        raise FormatError(f"{found}: version 0 was a draft, export the table again")
    newer = integer and version > VERSION
    raise FormatError(f"{found}: a newer featherbed may read it" if newer else found)


# --- bands and their layers ----------------------------------------------------------------------


def _describe_band(band: Band) -> Fields:
    affine = band.affine
    if affine is not None and affine.norms is not None and affine.is_identity:
        affine = None
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


def _read_bands(top: FieldReader, take: Take, rows: int, dim: int) -> list[Band]:
    listed = top.raw("bands")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MOST_BANDS:
        raise FormatError(f"metadata.bands must be a list of 1 to {MOST_BANDS} bands")
    bands, left = list[Band](), rows
    for number, fields in enumerate(listed):
        reader = FieldReader(fields, f"bands[{number}]", top.sparse)
        last = number == len(listed) - 1
        bands.append(_read_band(reader, f"b{number}", take, left, dim, last))
        left -= bands[-1].rows
    if left:
        raise FormatError(f"the bands hold {rows - left} rows, the table says {rows}")
    return bands


def _read_band(reader: FieldReader, name: str, take: Take, left: int, dim: int, last: bool) -> Band:
    rows = reader.integer("rows", 0, left)
    members = _read_members(name, take, left) if reader.flag("members") else None
    if last == (members is not None):
        raise FormatError(f"{reader.where}: every band but the last has members, the last has none")
    if members is not None and rows > MOST_MEMBERS:
        raise FormatError(f"{reader.where} has {rows} members: {MOST_MEMBERS} is the most")
    band, width = _read_layer(reader, name, take, rows, MOST_LAYERS)
    band.members = members
    if width != dim:
        raise FormatError(f"{reader.where} makes rows of width {width}, the table says {dim}")
    return band


def _read_members(name: str, take: Take, left: int) -> Members:
    blocks = -(-left // BLOCK_BITS)
    bitmap = take(f"{name}.members.bitmap", "U32", (blocks * (BLOCK_BITS // 32),))
    return Members(bitmap, take(f"{name}.members.totals", "U32", (blocks,)))


def _read_layer(
    reader: FieldReader, name: str, take: Take, rows: int, depth: int
) -> tuple[Band, int]:
    """Return a layer, with the layers added to it, and the width of its rows."""
    dictionary = _read_matrix(reader.nested("dictionary"), f"{name}.dictionary", take)
    values = _read_values(reader.nested("values"), f"{name}.values", take)
    coded = reader.nested("codes")
    if coded is None:
        raise FormatError(f"{reader.where}.codes is missing")
    atoms = 0 if dictionary is None else dictionary.shape[0]
    codes = _read_codes(coded, f"{name}.codes", take, rows, atoms)
    band = Band(rows, codes, values, dictionary, reader.choice("combine", COMBINES))
    width = _check_shapes(band, reader.where)
    band.cell = _read_cell(reader.nested("cell"), f"{name}.cell", take, band, width)
    width = width if band.cell is None else band.cell.width
    added = reader.nested("plus")
    if added is not None:
        if depth <= 1 or added.flag("members") or added.integer("rows", 0, MOST_ROWS) != rows:
            raise FormatError(
                f"{added.where}: at most {MOST_LAYERS} layers are added up, "
                "of equal rows, without members"
            )
        band.plus, other = _read_layer(added, f"{name}.plus", take, rows, depth - 1)
        if other != width:
            raise FormatError(
                f"{added.where} makes rows of width {other}, "
                f"they are added to rows of width {width}"
            )
    band.affine, width = _read_affine(reader, name, take, rows, width)
    reader.finish()
    return band, width


def _read_affine(
    layer: FieldReader, name: str, take: Take, rows: int, width: int
) -> tuple[Affine | None, int]:
    """Return the last stage of a layer's rows of ``width`` columns, and the width after it."""
    reader, weight, bias = layer.nested("affine"), None, None
    if reader is not None:
        weight = _read_matrix(reader.nested("weight"), f"{name}.affine.weight", take)
        if weight is not None:
            if weight.shape[0] != width:
                raise FormatError(
                    f"{reader.where}.weight takes {weight.shape[0]} columns, rows have {width}"
                )
            width = weight.shape[1]
        bias = take(f"{name}.affine.bias", "F32", (width,)) if reader.flag("bias") else None
        reader.finish()
    norms = _read_matrix(layer.nested("norms"), f"{name}.norms", take)
    if norms is not None and norms.shape != (rows, 1):
        raise FormatError(f"{layer.where}.norms of shape {norms.shape} do not fit {rows} rows")
    empty = reader is None and norms is None
    return None if empty else Affine(weight, bias, norms), width


def _check_shapes(band: Band, where: str) -> int:
    """Return the width of a layer's combined atoms; refuse parts that do not fit each other."""
    codes, dictionary, values = band.codes, band.dictionary, band.values
    count = code_count(codes)
    coded = isinstance(codes, Fixed | Ragged)
    if values is not None and (coded or values.shape != (band.rows, count or values.shape[1])):
        raise FormatError(
            f"{where}.values of shape {values.shape} do not fit {band.rows} rows of {count} codes"
        )
    if isinstance(codes, Every):
        width = None if values is None else values.shape[1]
        fits = dictionary is None or width == dictionary.shape[0]
        if values is None or not fits or band.combine != "sum":
            raise FormatError(f"{where}: layout 'every' sums one value for each atom")
        return values.shape[1] if dictionary is None else dictionary.shape[1]
    if dictionary is None or (dictionary.shape[0] == 0 and band.rows):
        raise FormatError(f"{where} has codes but no atoms")
    if isinstance(codes, Ragged) and band.combine != "sum":
        raise FormatError(f"{where}: ragged codes are combined by sum")
    if isinstance(codes, Identity) and dictionary.shape[0] != band.rows:
        raise FormatError(
            f"{where}: {band.rows} rows need as many atoms, {dictionary.shape[0]} given"
        )
    if band.combine == "sum" or count is None:
        return dictionary.shape[1]
    if dictionary.shape[1] * count > MOST_GATHERED:
        raise FormatError(
            f"{where}: {band.combine} of {count} atoms of width {dictionary.shape[1]}: "
            f"no more than {MOST_GATHERED} numbers stand side by side"
        )
    return dictionary.shape[1] * (count if band.combine == "concat" else 1)


def _check_implicit(bands: list[Band], rows: int) -> None:
    """Refuse far more rows, or work, than the file has bytes, and ids without a quotient."""
    for number, band in enumerate(bands):
        for codes, atoms in ((layer.codes, layer.atoms) for layer in band.layers):
            quotients = atoms - codes.divisor if isinstance(codes, Remainder) else 0
            if isinstance(codes, Remainder) and (rows - 1) // codes.divisor >= quotients:
                raise FormatError(
                    f"bands[{number}]: {atoms} atoms cannot hold the quotients and remainders "
                    f"of {rows} ids"
                )
    alone = bands[0]
    nothing = len(bands) == 1 and alone.norms is None and all(map(_is_implicit, alone.layers))
    if nothing and rows > alone.atoms * IMPLICIT_ROWS:
        raise FormatError(
            f"{rows} rows on {alone.atoms} atoms: no more than {IMPLICIT_ROWS} rows "
            "for each atom may share them"
        )
    size = sum(array.nbytes for band in bands for _, array in band.arrays())
    for number, band in enumerate(bands):
        for layer in filter(_is_implicit, band.layers):
            products = layer.rows * row_work(layer)
            if products > size * IMPLICIT_ROWS:
                raise FormatError(
                    f"bands[{number}]: {layer.rows} rows that store nothing take {products} "
                    f"products, a table of {size} bytes may take {size * IMPLICIT_ROWS}"
                )


def _is_implicit(layer: Band) -> bool:
    """Return whether a layer stores nothing per row: rows are made of the dictionary alone."""
    empty = isinstance(layer.codes, Fixed) and layer.codes.record_bits == 0
    return layer.values is None and (isinstance(layer.codes, Hash | Remainder) or empty)


def row_work(layer: Band) -> int:
    """Return the products of one row: codes x (width of an atom + weights of a cell's step)."""
    count = code_count(layer.codes) or 1
    width = 0 if layer.dictionary is None else layer.dictionary.shape[1]
    steps = layer.cell is not None and layer.cell.step_width is not None
    weights = (layer.cell.weight, layer.cell.input) if layer.cell is not None and steps else ()
    return count * (width + sum(m.shape[0] * m.shape[1] for m in weights if m is not None))


# --- matrices and graded rows --------------------------------------------------------------------


def _describe_matrix(matrix: Matrix | None) -> Fields | None:
    if matrix is None:
        return None
    scale = None if matrix.scale is None else {"axis": matrix.axis, "kind": str(matrix.scale.dtype)}
    rows, columns = matrix.shape
    return {"kind": matrix.kind, "rows": rows, "columns": columns, "scale": scale}


def _read_matrix(reader: FieldReader | None, name: str, take: Take) -> Matrix | None:
    if reader is None:
        return None
    kind = reader.choice("kind", tuple(KINDS))
    shape = rows, columns = _read_shape(reader)
    scaled = reader.nested("scale")
    reader.finish()
    if (kind in _FLOATS) != (scaled is None):
        raise FormatError(f"{reader.where}: quantized numbers have a scale, floats have none")
    if scaled is None:
        return Matrix(kind, shape, take(name, _FLOATS[kind], shape))
    axis = scaled.integer("axis", 0, 1)
    scale = _read_scale(scaled, name, take, shape[axis])
    return Matrix(kind, shape, take(name, "U8", (rows, row_bytes(kind, columns))), scale, axis)


def _read_shape(reader: FieldReader) -> tuple[int, int]:
    return reader.integer("rows", 0, MOST_ROWS), reader.integer("columns", 1, MOST_DIM)


def _read_scale(reader: FieldReader, name: str, take: Take, count: int) -> NDArray[Any]:
    kind = _FLOATS[reader.choice("kind", tuple(_FLOATS))]
    reader.finish()
    return take(f"{name}.scale", kind, (count,))


def _describe_values(values: Matrix | Graded | None) -> Fields | None:
    if not isinstance(values, Graded):
        return _describe_matrix(values)
    return {
        "kind": "graded",
        "rows": values.shape[0],
        "columns": values.shape[1],
        "scale": {"kind": str(values.scale.dtype)},
        "grades": [list(grade) for grade in values.grades],
    }


def _read_values(reader: FieldReader | None, name: str, take: Take) -> Matrix | Graded | None:
    """Return the values of a band: a matrix like any other, or graded rows."""
    if reader is None or reader.raw("kind") != "graded":
        return _read_matrix(reader, name, take)
    shape = rows, columns = _read_shape(reader)
    grades, scaled = _read_grades(reader, rows, columns), reader.nested("scale")
    if scaled is None:
        raise FormatError(f"{reader.where}: quantized numbers have a scale, floats have none")
    size, used = stream_bytes(grades), sum(columns - text.count("0") for _, text in grades)
    scale = _read_scale(scaled, name, take, used)
    reader.finish()
    if rows > IMPLICIT_ROWS * (1 + size):
        raise FormatError(
            f"{reader.where}: {rows} rows in {size} bytes: no more than {IMPLICIT_ROWS} rows "
            "may share one"
        )
    return Graded(shape, grades, take(name, "U8", (size,)), scale)


def _read_grades(reader: FieldReader, rows: int, columns: int) -> Grades:
    """Return the grades: the number of rows of each, and the bits of every column as digits."""
    listed = reader.raw("grades")
    if not isinstance(listed, list) or len(listed) > MOST_GRADES:
        raise FormatError(f"{reader.where}.grades must be a list of at most {MOST_GRADES} grades")
    digits = set("0123456789"[: MOST_BITS + 1])
    for grade in listed:
        count, text = grade if isinstance(grade, list) and len(grade) == 2 else (None, None)
        counted = type(count) is int and 1 <= count <= rows
        if not counted or not isinstance(text, str) or len(text) != columns or set(text) - digits:
            raise FormatError(
                f"{reader.where}.grades: a grade is [rows, {columns} digits from 0 to "
                f"{MOST_BITS}], got {str(grade)[:60]}"
            )
    total = sum(count for count, _ in listed)
    if total != rows:
        raise FormatError(f"{reader.where}.grades hold {total} rows, the matrix has {rows}")
    return tuple((count, text) for count, text in listed)


# --- codes ---------------------------------------------------------------------------------------


def _describe_codes(codes: Codes) -> Fields:
    layout = {kind: name for name, kind in _LAYOUTS.items()}[type(codes)]
    fields: Fields = {"layout": layout}
    match codes:
        case Hash():
            fields |= {"seed": codes.seed, "hashes": codes.hashes}
        case Remainder():
            fields |= {"divisor": codes.divisor}
        case Fixed():
            value = None if codes.levels is None else codes.levels.kind
            fields |= {"count": codes.count, "index_bits": codes.index_bits}
            fields |= {"value": value, "parts": codes.parts}
        case Ragged():
            fields |= {"entries": codes.entries, "index_bits": codes.index_bits}
            fields |= {"count_bits": codes.count_bits, "value": codes.levels.kind}
            fields |= {"wide": codes.directory.itemsize == 8}
    return fields


def _read_codes(reader: FieldReader, name: str, take: Take, rows: int, atoms: int) -> Codes:
    """Return the codes of ``rows`` rows over ``atoms`` atoms."""
    codes: Codes
    match reader.choice("layout", tuple(_LAYOUTS)):
        case "identity":
            codes = Identity()
        case "hash":
            codes = Hash(reader.integer("seed", 0, 2**32 - 1), reader.integer("hashes", 1, 256))
        case "remainder":
            codes = Remainder(reader.integer("divisor", 1, MOST_ROWS))
        case "every":
            codes = Every()
        case "fixed":
            codes = _read_fixed(reader, name, take, rows, atoms)
        case _:
            codes = _read_ragged(reader, name, take, rows, atoms)
    reader.finish()
    return codes


def _read_fixed(reader: FieldReader, name: str, take: Take, rows: int, atoms: int) -> Fixed:
    count, parts = reader.integer("count", 1, MOST_CODES), reader.flag("parts")
    index_bits = _read_index_bits(reader, atoms // count if parts else atoms)
    kind = None if reader.raw("value") is None else reader.choice("value", tuple(KINDS))
    if parts and atoms % count:
        raise FormatError(f"{reader.where}: {atoms} atoms do not divide into {count} parts")
    codes = Fixed(rows, count, index_bits, np.empty(0, np.uint32), None, parts)
    codes.levels = None if kind is None else _read_levels(kind, name, take)
    codes.stream = take(f"{name}.stream", "U32", (bits.word_count(rows, codes.record_bits),))
    return codes


def _read_ragged(reader: FieldReader, name: str, take: Take, rows: int, atoms: int) -> Ragged:
    index_bits = _read_index_bits(reader, atoms)
    entries, count_bits = (
        reader.integer("entries", 0, MOST_ROWS),
        reader.integer("count_bits", 0, 32),
    )
    levels = _read_levels(reader.choice("value", tuple(KINDS)), name, take)
    wide = "U64" if reader.flag("wide") else "U32"
    directory = take(f"{name}.directory", wide, (-(-rows // DIRECTORY_STEP),))
    counts = take(f"{name}.counts", "U32", (bits.word_count(rows, count_bits),))
    stream = take(f"{name}.stream", "U32", (bits.word_count(entries, index_bits + levels.bits),))
    return Ragged(rows, entries, index_bits, count_bits, counts, directory, stream, levels)


def _read_index_bits(reader: FieldReader, choices: int) -> int:
    found, needed = reader.integer("index_bits", 0, 32), bits.width(choices)
    if found != needed:
        raise FormatError(
            f"{reader.where}.index_bits is {found}: a choice among {choices} atoms takes {needed}"
        )
    return found


def _read_levels(kind: str, name: str, take: Take) -> ValueLevels:
    table = None if kind in _FLOATS else take(f"{name}.levels", "F32", (2 ** KINDS[kind],))
    return ValueLevels(kind, table)


# --- cells ---------------------------------------------------------------------------------------


def _describe_cell(cell: Cell | None) -> Fields | None:
    if cell is None:
        return None
    matrices = {"weight": cell.weight, "input": cell.input}
    return {"kind": cell.kind} | {name: _describe_matrix(m) for name, m in matrices.items()}


def _read_cell(
    reader: FieldReader | None, name: str, take: Take, band: Band, width: int
) -> Cell | None:
    """Return the cell of a band whose combined atoms are ``width`` numbers."""
    if reader is None:
        return None
    kind, count = reader.choice("kind", CELLS), code_count(band.codes)
    if kind != "mlp" and (band.combine != "concat" or count is None):
        raise FormatError(
            f"{reader.where}: a cell of kind {kind} takes the atoms of fixed codes by concat, "
            f"found {type(band.codes).__name__.lower()} codes combined by {band.combine}"
        )
    fields = {field: reader.nested(field) for field in ("weight", "input")}
    reader.finish()
    if fields["weight"] is None or (kind == "lstm") != (fields["input"] is not None):
        found = ", ".join(f"{f} {'null' if r is None else 'given'}" for f, r in fields.items())
        raise FormatError(
            f"{reader.where}: every cell has a weight, only an lstm has an input; "
            f"found {kind} with {found}"
        )
    weight, given = (_read_matrix(r, f"{name}.{field}", take) for field, r in fields.items())
    assert weight is not None
    atom = width if kind == "mlp" else width // (count or 1)
    out = {"mlp": weight.shape[1], "recurrent": atom}.get(kind, weight.shape[0])
    expected = (atom, out) if kind == "mlp" else (out, 4 * out)
    if weight.shape != expected or (given is not None and given.shape != (atom, 4 * out)):
        inputs = (
            ("", "")
            if given is None
            else (f" and {[atom, 4 * out]}", f" and an input {list(given.shape)}")
        )
        raise FormatError(
            f"{reader.where}: on {atom} numbers at a time {kind} takes a weight {list(expected)}"
            f"{inputs[0]}, found {list(weight.shape)}{inputs[1]}"
        )
    return Cell(kind, weight, take(f"{name}.bias", "F32", (expected[1],)), given)
