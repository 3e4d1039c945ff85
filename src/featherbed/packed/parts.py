"""The parts of a band as a file describes them: matrices, codes and cells, read field by field and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import FormatError
from featherbed.packed import bits
from featherbed.packed.band import Band
from featherbed.packed.cells import KINDS as CELLS
from featherbed.packed.cells import Cell
from featherbed.packed.codes import (
    DIRECTORY_STEP,
    MOST_CODES,
    Codes,
    Every,
    Fixed,
    Hash,
    Identity,
    Ragged,
    Remainder,
)
from featherbed.packed.graded import MOST_BITS, MOST_GRADES, Graded, Grades, stream_bytes
from featherbed.packed.levels import Levels
from featherbed.packed.matrix import KINDS, Matrix, row_bytes

MOST_ROWS = 1 << 40
MOST_DIM = 1 << 16
MOST_GATHERED = 1 << 20  # numbers in the atoms of one row where they are held side by side
IMPLICIT_ROWS = 1 << 20  # rows that may share one atom, or byte, where nothing is stored for a row

Take = Callable[[str, str, tuple[int, ...]], NDArray[Any]]  # name, dtype, shape -> array
_FLOATS = {"float32": "F32", "float16": "F16"}


class Reader:
    """Reads one JSON object field by field; anything of the wrong type or out of range is a FormatError.

    ``sparse``: a field that is null or false may have been left out.
    """

    def __init__(self, fields: Any, where: str, sparse: bool = False) -> None:
        if not isinstance(fields, dict):
            raise FormatError(f"{where} must be an object, got {type(fields).__name__}")
        self.fields, self.where, self.sparse = fields, where, sparse
        self.read: set[str] = set()

    def raw(self, name: str) -> Any:
        """Return a field as it is."""
        if name not in self.fields and self.sparse:
            return None
        if name not in self.fields:
            raise FormatError(f"{self.where} lacks the field {name!r}")
        self.read.add(name)
        return self.fields[name]

    def whole(self, name: str, low: int, high: int) -> int:
        """Return a whole number within bounds."""
        value = self.raw(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise FormatError(
                f"{self.where}.{name} must be a whole number from {low} to {high}, got {str(value)[:40]}"
            )
        return value

    def flag(self, name: str) -> bool:
        """Return a truth value."""
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

    def sub(self, name: str) -> Reader | None:
        """Return a nested object, or None."""
        value = self.raw(name)
        return None if value is None else Reader(value, f"{self.where}.{name}", self.sparse)

    def done(self) -> None:
        """Refuse fields nobody asked for: what they mean would be lost, and a new meaning takes a new version."""
        extra = sorted(set(self.fields) - self.read)
        if extra:
            raise FormatError(
                f"{self.where} has fields this version does not know: {', '.join(extra)[:100]}"
            )


def read_matrix(reader: Reader | None, name: str, take: Take) -> Matrix | None:
    """Return a matrix, or None where the file says null."""
    if reader is None:
        return None
    kind = reader.choice("kind", tuple(KINDS))
    rows, columns = reader.whole("rows", 0, MOST_ROWS), reader.whole("columns", 1, MOST_DIM)
    scaled = reader.sub("scale")
    reader.done()
    if (kind in _FLOATS) != (scaled is None):
        raise FormatError(f"{reader.where}: levels have a scale, floats have none")
    if scaled is None:
        return Matrix(kind, (rows, columns), take(name, _FLOATS[kind], (rows, columns)))
    axis = scaled.whole("axis", 0, 1)
    scale = take(
        f"{name}.scale",
        _FLOATS[scaled.choice("kind", tuple(_FLOATS))],
        (rows if axis == 0 else columns,),
    )
    scaled.done()
    return Matrix(
        kind, (rows, columns), take(name, "U8", (rows, row_bytes(kind, columns))), scale, axis
    )


def read_values(reader: Reader | None, name: str, take: Take) -> Matrix | Graded | None:
    """Return the values of a band: a matrix like any other, or graded rows."""
    if reader is None or reader.raw("kind") != "graded":
        return read_matrix(reader, name, take)
    rows, columns = reader.whole("rows", 0, MOST_ROWS), reader.whole("columns", 1, MOST_DIM)
    grades, scaled = _grades(reader, rows, columns), reader.sub("scale")
    if scaled is None:
        raise FormatError(f"{reader.where}: levels have a scale, floats have none")
    size, used = stream_bytes(grades), sum(columns - text.count("0") for _, text in grades)
    scale = take(f"{name}.scale", _FLOATS[scaled.choice("kind", tuple(_FLOATS))], (used,))
    scaled.done()
    reader.done()
    if rows > IMPLICIT_ROWS * (1 + size):
        raise FormatError(
            f"{reader.where}: {rows} rows in {size} bytes: no more than {IMPLICIT_ROWS} rows may share one"
        )
    return Graded((rows, columns), grades, take(name, "U8", (size,)), scale)


def _grades(reader: Reader, rows: int, columns: int) -> Grades:
    """Return the runs of graded rows: how many rows each has, and the bits of every column as digits."""
    listed = reader.raw("grades")
    if not isinstance(listed, list) or len(listed) > MOST_GRADES:
        raise FormatError(f"{reader.where}.grades must be a list of at most {MOST_GRADES} grades")
    digits = set("0123456789"[: MOST_BITS + 1])
    for grade in listed:
        pair = grade if isinstance(grade, list) and len(grade) == 2 else (None, None)
        whole = isinstance(pair[0], int) and not isinstance(pair[0], bool) and 1 <= pair[0] <= rows
        if (
            not whole
            or not isinstance(pair[1], str)
            or len(pair[1]) != columns
            or not set(pair[1]) <= digits
        ):
            wanted = f"[rows, {columns} digits from 0 to {MOST_BITS}]"
            raise FormatError(f"{reader.where}.grades: a grade is {wanted}, got {str(grade)[:60]}")
    if sum(count for count, _ in listed) != rows:
        raise FormatError(
            f"{reader.where}.grades hold {sum(count for count, _ in listed)} rows, the matrix has {rows}"
        )
    return tuple((count, text) for count, text in listed)


def _levels(kind: str, name: str, take: Take) -> Levels:
    return Levels(
        kind, None if kind in _FLOATS else take(f"{name}.levels", "F32", (2 ** KINDS[kind],))
    )


def read_codes(reader: Reader, name: str, take: Take, rows: int, atoms: int) -> Codes:
    """Return the codes of ``rows`` rows over ``atoms`` atoms."""
    layout = reader.choice("layout", ("identity", "hash", "remainder", "every", "fixed", "ragged"))
    codes: Codes
    match layout:
        case "identity":
            codes = Identity()
        case "hash":
            codes = Hash(reader.whole("seed", 0, 2**32 - 1), reader.whole("hashes", 1, 256))
        case "remainder":
            codes = Remainder(reader.whole("divisor", 1, MOST_ROWS))
        case "every":
            codes = Every()
        case "fixed":
            codes = _fixed(reader, name, take, rows, atoms)
        case _:
            codes = _ragged(reader, name, take, rows, atoms)
    reader.done()
    return codes


def _index_bits(reader: Reader, choices: int) -> int:
    found = reader.whole("index_bits", 0, 32)
    if found != bits.width(choices):
        raise FormatError(
            f"{reader.where}.index_bits is {found}: a choice among {choices} atoms takes {bits.width(choices)}"
        )
    return found


def _fixed(reader: Reader, name: str, take: Take, rows: int, atoms: int) -> Fixed:
    count, parts = reader.whole("count", 1, MOST_CODES), reader.flag("parts")
    index_bits = _index_bits(reader, atoms // count if parts else atoms)
    kind = None if reader.raw("value") is None else reader.choice("value", tuple(KINDS))
    if parts and atoms % count:
        raise FormatError(f"{reader.where}: {atoms} atoms do not divide into {count} parts")
    codes = Fixed(rows, count, index_bits, np.empty(0, np.uint32), None, parts)
    codes.levels = None if kind is None else _levels(kind, name, take)
    codes.stream = take(f"{name}.stream", "U32", (bits.word_count(rows, codes.record_bits),))
    return codes


def _ragged(reader: Reader, name: str, take: Take, rows: int, atoms: int) -> Ragged:
    index_bits = _index_bits(reader, atoms)
    entries, count_bits = reader.whole("entries", 0, MOST_ROWS), reader.whole("count_bits", 0, 32)
    levels = _levels(reader.choice("value", tuple(KINDS)), name, take)
    directory = take(
        f"{name}.directory", "U64" if reader.flag("wide") else "U32", (-(-rows // DIRECTORY_STEP),)
    )
    counts = take(f"{name}.counts", "U32", (bits.word_count(rows, count_bits),))
    stream = take(f"{name}.stream", "U32", (bits.word_count(entries, index_bits + levels.bits),))
    return Ragged(rows, entries, index_bits, count_bits, counts, directory, stream, levels)


def code_count(codes: Codes) -> int | None:
    """How many codes every row has; None where rows differ, or use every atom."""
    match codes:
        case Identity():
            return 1
        case Hash():
            return codes.hashes
        case Remainder():
            return 2
        case Fixed():
            return codes.count
    return None


def read_cell(reader: Reader | None, name: str, take: Take, band: Band, width: int) -> Cell | None:
    """Return the cell of a band whose combined atoms are ``width`` numbers, or None where the file says null."""
    if reader is None:
        return None
    kind, count = reader.choice("kind", CELLS), code_count(band.codes)
    if kind != "mlp" and (band.combine != "concat" or count is None):
        found = f"{type(band.codes).__name__.lower()} codes combined by {band.combine}"
        raise FormatError(
            f"{reader.where}: a cell of kind {kind} takes the atoms of fixed codes by concat, found {found}"
        )
    weighed, given = reader.sub("weight"), reader.sub("input")
    reader.done()
    if weighed is None or (kind == "lstm") != (given is not None):
        found = ", ".join(
            f"{field} {'null' if part is None else 'given'}"
            for field, part in (("weight", weighed), ("input", given))
        )
        raise FormatError(
            f"{reader.where}: every cell has a weight, an lstm alone an input; found {kind} with {found}"
        )
    weight, seen = (
        read_matrix(weighed, f"{name}.weight", take),
        read_matrix(given, f"{name}.input", take),
    )
    assert weight is not None
    atom = width if kind == "mlp" else width // (count or 1)
    out = {"mlp": weight.shape[1], "recurrent": atom}.get(kind, weight.shape[0])
    wanted = (atom, out) if kind == "mlp" else (out, 4 * out)
    if weight.shape != wanted or (seen is not None and seen.shape != (atom, 4 * out)):
        found = f"{list(weight.shape)}" + (
            "" if seen is None else f" and an input {list(seen.shape)}"
        )
        takes = f"{list(wanted)}" + ("" if seen is None else f" and {[atom, 4 * out]}")
        raise FormatError(
            f"{reader.where}: on {atom} numbers at a time {kind} takes a weight {takes}, found {found}"
        )
    return Cell(kind, weight, take(f"{name}.bias", "F32", (wanted[1],)), seen)
