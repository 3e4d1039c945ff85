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
from featherbed.packed.codes import DIRECTORY_STEP, MOST_CODES, Codes, Every, Fixed, Hash, Identity, Ragged, Remainder
from featherbed.packed.levels import Levels
from featherbed.packed.matrix import KINDS, Matrix, row_bytes

MOST_ROWS = 1 << 40
MOST_DIM = 1 << 16
MOST_GATHERED = 1 << 20  # numbers in the atoms of one row where they are held side by side

Take = Callable[[str, str, tuple[int, ...]], NDArray[Any]]  # name, dtype, shape -> array
_FLOATS = {"float32": "F32", "float16": "F16"}


class Reader:
    """Reads one JSON object field by field; anything of the wrong type or out of range is a FormatError."""

    def __init__(self, fields: Any, where: str) -> None:
        if not isinstance(fields, dict):
            raise FormatError(f"{where} must be an object, got {type(fields).__name__}")
        self.fields, self.where = fields, where
        self.read: set[str] = set()

    def raw(self, name: str) -> Any:
        """Return a field as it is."""
        if name not in self.fields:
            raise FormatError(f"{self.where} lacks the field {name!r}")
        self.read.add(name)
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
        value = self.raw(name)
        return None if value is None else Reader(value, f"{self.where}.{name}")

    def done(self) -> None:
        """Refuse fields nobody asked for: what they mean would be lost, and a new meaning takes a new version."""
        extra = sorted(set(self.fields) - self.read)
        if extra:
            raise FormatError(f"{self.where} has fields this version does not know: {', '.join(extra)[:100]}")


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
    scale = take(f"{name}.scale", _FLOATS[scaled.choice("kind", tuple(_FLOATS))], (rows if axis == 0 else columns,))
    scaled.done()
    return Matrix(kind, (rows, columns), take(name, "U8", (rows, row_bytes(kind, columns))), scale, axis)


def _levels(kind: str, name: str, take: Take) -> Levels:
    return Levels(kind, None if kind in _FLOATS else take(f"{name}.levels", "F32", (2 ** KINDS[kind],)))


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
        raise FormatError(f"{reader.where}.index_bits is {found}: a choice among {choices} atoms takes {bits.width(choices)}")
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
    directory = take(f"{name}.directory", "U64" if reader.flag("wide") else "U32", (-(-rows // DIRECTORY_STEP),))
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
        raise FormatError(f"{reader.where}: a cell of kind {kind} takes the atoms of fixed codes by concat, found {found}")
    weighed, given = reader.sub("weight"), reader.sub("input")
    reader.done()
    if weighed is None or (kind == "lstm") != (given is not None):
        found = ", ".join(
            f"{field} {'null' if part is None else 'given'}" for field, part in (("weight", weighed), ("input", given))
        )
        raise FormatError(f"{reader.where}: every cell has a weight, an lstm alone an input; found {kind} with {found}")
    weight, seen = read_matrix(weighed, f"{name}.weight", take), read_matrix(given, f"{name}.input", take)
    assert weight is not None
    atom = width if kind == "mlp" else width // (count or 1)
    out = {"mlp": weight.shape[1], "recurrent": atom}.get(kind, weight.shape[0])
    wanted = (atom, out) if kind == "mlp" else (out, 4 * out)
    if weight.shape != wanted or (seen is not None and seen.shape != (atom, 4 * out)):
        found = f"{list(weight.shape)}" + ("" if seen is None else f" and an input {list(seen.shape)}")
        takes = f"{list(wanted)}" + ("" if seen is None else f" and {[atom, 4 * out]}")
        raise FormatError(f"{reader.where}: on {atom} numbers at a time {kind} takes a weight {takes}, found {found}")
    return Cell(kind, weight, take(f"{name}.bias", "F32", (wanted[1],)), seen)
