"""Rows as ONNX operators: bands, codes in any layout, cells, layers and the affine stage.

row = norms * affine(cell(combine(dictionary[indices], values)) + plus)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError
from featherbed.hashing import hash_codes
from featherbed.interop.onnx.graph import (
    Fetch,
    OnnxGraph,
    graded_rows,
    matrix_rows,
    matrix_whole,
    plane_bytes,
    planes,
    read_planes,
    read_stream,
    to_stream,
)
from featherbed.packed import bits as stream_bits
from featherbed.packed.band import (
    BLOCK_BITS,
    DIRECTORY_STEP,
    Band,
    Every,
    Fixed,
    Hash,
    Identity,
    Members,
    Ragged,
    Remainder,
    keeps_decoded,
)
from featherbed.packed.cells import Cell
from featherbed.packed.levels import ValueLevels
from featherbed.packed.matrix import Graded, Matrix, level_bits
from featherbed.packed.table import PackedTable

BLOCK_BYTES = BLOCK_BITS // 8
NARROW = 2  # width of atoms up to which gathering by column is faster (by a third at 2; not at 4)
# our gates in ONNX's order: input, output, forget, cell
CELL_GATES = {"recurrent": (1, 2, 0, 3), "lstm": (0, 3, 1, 2)}
WASTE = 1.05  # planes are used up to this multiple of the size of a stream


@dataclass(frozen=True)
class GraphInteger:
    """An int64 value of a graph with Python's operators, so that ``hash_codes`` applies to it.

    A right shift fills with zeros, not with the sign as numpy does; the hash masks those bits.
    """

    graph: OnnxGraph
    name: str

    def _apply(self, kind: str, other: GraphInteger | int) -> GraphInteger:
        second = other.name if isinstance(other, GraphInteger) else self.graph.constant(other)
        return GraphInteger(self.graph, self.graph.op(kind, self.name, second))

    def __add__(self, other: GraphInteger | int) -> GraphInteger:
        return self._apply("Add", other)

    def __mul__(self, other: GraphInteger | int) -> GraphInteger:
        return self._apply("Mul", other)

    def __mod__(self, other: GraphInteger | int) -> GraphInteger:
        return self._apply("Mod", other)

    def __xor__(self, other: GraphInteger | int) -> GraphInteger:
        return self._apply("BitwiseXor", other)

    def __and__(self, other: GraphInteger | int) -> GraphInteger:
        return self._apply("BitwiseAnd", other)

    def __rshift__(self, places: int) -> GraphInteger:
        shifted = self.graph.shift(self.graph.cast(self.name, np.uint64), places, np.uint64)
        return GraphInteger(self.graph, self.graph.cast(shifted, np.int64))


def hash_indices(graph: OnnxGraph, ids: str, codes: Hash, atoms: int) -> str:  # [B] -> [B, k]
    """Return the buckets of ids."""
    if atoms == 1:
        return zeros(graph, ids, codes.hashes)
    found = hash_codes(
        GraphInteger(graph, ids), seed=codes.seed, hashes=codes.hashes, buckets=atoms
    )
    columns = [graph.reshape(bucket.name, -1, 1) for bucket in found]
    return columns[0] if len(columns) == 1 else graph.op("Concat", *columns, axis=1)


def remainder_indices(graph: OnnxGraph, ids: str, divisor: int, atoms: int) -> str:  # [B] -> [B, 2]
    """Return id // divisor and quotients + id mod divisor."""
    column = graph.reshape(ids, -1, 1)
    rest = graph.op("Mod", column, graph.constant(divisor))
    moved = graph.op("Add", rest, graph.constant(atoms - divisor))
    return graph.op("Concat", graph.op("Div", column, graph.constant(divisor)), moved, axis=1)


def zeros(graph: OnnxGraph, positions: str, count: int) -> str:  # [B] -> [B, s]
    """Return ``count`` zeros per row."""
    return graph.op("Mul", graph.reshape(positions, -1, 1), graph.constant([0] * count))


def fixed_codes(
    graph: OnnxGraph, name: str, codes: Fixed, atoms: int, positions: str
) -> tuple[str, str | None]:
    """Return indices [B, s] and values [B, s] of rows; None if all values are 1."""

    def indices(start: int, stop: int) -> NDArray[np.unsignedinteger]:
        return codes.field(np.arange(start, stop), 0, codes.count)

    if codes.index_bits == 0:
        found = zeros(graph, positions, codes.count)
    else:
        found = _fields(graph, f"{name}.stream", codes, codes.index_bits, indices, positions)
    if codes.parts:
        found = graph.op("Add", found, graph.constant(np.arange(codes.count) * codes.stride(atoms)))
    return found, None if codes.levels is None else _fixed_values(
        graph, name, codes, codes.levels, positions
    )


def _fields(
    graph: OnnxGraph, name: str, codes: Fixed, bits: int, fetch: Fetch, positions: str
) -> str:  # -> [B, s] int64
    """Store ``count`` integers per row, as planes or as a stream, and read those of rows."""
    rows, count = codes.rows, codes.count
    if plane_bytes(bits, count) * 8 <= WASTE * bits * count:
        data = graph.stored(name, planes(rows, count, bits, fetch))
        found = read_planes(graph, graph.op("Gather", data, positions), bits, count)
        return found if bits > 8 else graph.cast(found, np.int64)
    words = graph.stored(name, to_stream(rows, count, bits, fetch))
    first = graph.op("Mul", graph.reshape(positions, -1, 1), graph.constant(count))
    return read_stream(graph, words, graph.op("Add", first, graph.constant(np.arange(count))), bits)


def _fixed_values(
    graph: OnnxGraph, name: str, codes: Fixed, levels: ValueLevels, positions: str
) -> str:  # [B] -> [B, s]
    def raw(start: int, stop: int) -> NDArray[np.uint32]:
        begin = np.arange(start, stop)[:, None] * codes.record_bits + codes.count * codes.index_bits
        return stream_bits.unpack(
            codes.stream, begin + np.arange(codes.count) * levels.bits, levels.bits
        )

    if levels.table is None:
        floats = Matrix(levels.kind, (codes.rows, codes.count), _floats(raw(0, codes.rows), levels))
        return matrix_rows(graph, f"{name}.values", floats, positions)
    number = _fields(graph, f"{name}.values", codes, levels.bits, raw, positions)
    return graph.pick(graph.stored(f"{name}.levels", levels.table), number, number)


def _floats(raw: NDArray[np.uint32], levels: ValueLevels) -> NDArray[np.floating]:
    """Reinterpret bits as floats, for which older versions of ONNX have no operator."""
    return (
        raw.view(np.float32)
        if level_bits(levels.kind) == 32
        else raw.astype(np.uint16).view(np.float16)
    )


def ragged_codes(graph: OnnxGraph, name: str, codes: Ragged, positions: str) -> tuple[str, str]:
    """Return indices and values of rows [B, max codes], with value 0 for missing codes."""
    first, count = _spans(graph, name, codes, positions)
    most = graph.op("ReduceMax", graph.op("Concat", count, graph.constant([1]), axis=0), keepdims=0)
    slot = graph.op("Range", graph.constant(0), most, graph.constant(1))
    used = graph.op("Less", slot, graph.reshape(count, -1, 1))
    entry = graph.op(
        "Where", used, graph.op("Add", graph.reshape(first, -1, 1), slot), graph.constant(0)
    )
    width, entries = codes.index_bits + codes.levels.bits, max(codes.entries, 1)

    def field(shift: int, bits: int) -> Fetch:
        def fetch(start: int, stop: int) -> NDArray[np.uint32]:
            if codes.entries == 0:
                return np.zeros((stop - start, 1), dtype=np.uint32)
            return stream_bits.unpack(
                codes.stream, np.arange(start, stop)[:, None] * width + shift, bits
            )

        return fetch

    if codes.index_bits:
        stream = to_stream(entries, 1, codes.index_bits, field(0, codes.index_bits))
        indices = read_stream(
            graph, graph.stored(f"{name}.stream", stream), entry, codes.index_bits
        )
    else:
        indices = graph.op("Mul", entry, graph.constant(0))
    levels, raw = codes.levels, field(codes.index_bits, codes.levels.bits)
    if levels.table is None:
        stored = graph.stored(f"{name}.values", _floats(raw(0, entries), levels).reshape(-1))
        values = graph.cast(graph.pick(stored, entry, entry), np.float32)
    else:
        words = graph.stored(f"{name}.values", to_stream(entries, 1, levels.bits, raw))
        number = read_stream(graph, words, entry, levels.bits)
        values = graph.pick(graph.stored(f"{name}.levels", levels.table), number, number)
    return indices, graph.op("Where", used, values, graph.constant(0.0, np.float32))


def _spans(
    graph: OnnxGraph, name: str, codes: Ragged, positions: str
) -> tuple[str, str]:  # [B] -> first entry [B], count [B]
    """Return offset and number of the entries of rows: the directory plus up to 15 counts."""
    if codes.count_bits == 0:
        nothing = graph.op("Mul", positions, graph.constant(0))
        return nothing, nothing
    counts = graph.stored(f"{name}.counts", codes.counts)
    column = graph.reshape(positions, -1, 1)
    block = graph.op("Div", column, graph.constant(DIRECTORY_STEP))
    start = graph.op("Mul", block, graph.constant(DIRECTORY_STEP))
    members = graph.op("Add", start, graph.constant(np.arange(DIRECTORY_STEP)))
    sizes = read_stream(
        graph, counts, graph.op("Min", members, graph.constant(codes.rows - 1)), codes.count_bits
    )

    def total(which: str) -> str:
        chosen = graph.op("Where", graph.op(which, members, column), sizes, graph.constant(0))
        return graph.op("ReduceSum", chosen, graph.constant([1]), keepdims=0)

    directory = graph.stored(f"{name}.directory", codes.directory)
    before = graph.cast(graph.op("GatherElements", directory, graph.reshape(block, -1)), np.int64)
    return graph.op("Add", before, total("Less")), total("Equal")


class RowBuilder:
    """Builds the operators that map ids [B] to rows [B, d]."""

    def __init__(self, graph: OnnxGraph, blocks: bool) -> None:
        self.graph, self.blocks = graph, blocks

    def table(self, packed: PackedTable, ids: str) -> str:  # [B] -> [B, d]
        """Return rows; the padding row is zero."""
        graph = self.graph
        ids = self._check(packed, ids)
        bands = [(f"b{i}", band) for i, band in enumerate(packed.bands) if band.rows > 0]
        rows = (
            self.band(*bands[0], ids, ids)
            if len(bands) == 1
            else self._by_band(bands, packed.dim, ids)
        )
        if packed.padding_idx is None:
            return rows
        padding = graph.op("Equal", graph.reshape(ids, -1, 1), graph.constant(packed.padding_idx))
        return graph.op("Where", padding, graph.constant(0.0, np.float32), rows)

    def _check(self, packed: PackedTable, ids: str) -> str:
        """Map ids out of range to ids that fail in Gather, which would accept negative ones."""
        graph = self.graph
        negative = graph.op("Less", ids, graph.constant(0))
        checked = graph.op("Where", negative, graph.constant(packed.rows), ids)
        if len(packed.bands) == 1 and gathers_rows(packed.bands[0]):
            return checked
        beyond = graph.op("Div", checked, graph.constant(packed.rows))
        return graph.op("Add", checked, graph.op("Gather", graph.constant([0]), beyond))

    def _by_band(self, bands: list[tuple[str, Band]], dim: int, ids: str) -> str:
        """Compute the rows of each band and scatter them to the positions of their ids."""
        graph = self.graph
        length = graph.op("Shape", ids)
        rows = graph.op(
            "ConstantOfShape", graph.op("Concat", length, graph.constant([dim]), axis=0)
        )
        batch = graph.op("Range", graph.constant(0), graph.reshape(length), graph.constant(1))
        positions = ids
        for name, band in bands:
            mine, here = positions, batch
            if band.members is not None:
                inside, rank = self._split(name, band.members, positions)
                outside = graph.op("Not", inside)
                mine, here = (
                    graph.op("Compress", value, inside, axis=0) for value in (rank, batch)
                )
                positions = graph.op("Compress", graph.op("Sub", positions, rank), outside, axis=0)
                batch = graph.op("Compress", batch, outside, axis=0)
            found = self.band(name, band, graph.op("Gather", ids, here), mine)
            rows = graph.op("ScatterND", rows, graph.reshape(here, -1, 1), found)
        return rows

    def _split(self, name: str, members: Members, positions: str) -> tuple[str, str]:
        """Return membership [B] and rank [B] of positions: members before each, by its block."""
        graph = self.graph
        flags = np.ascontiguousarray(members.bitmap).view(np.uint8)
        bitmap = graph.stored(f"{name}.members.bitmap", flags.reshape(-1, BLOCK_BYTES))
        totals = graph.stored(f"{name}.members.totals", members.totals)
        block = graph.op("Div", positions, graph.constant(BLOCK_BITS))
        within = graph.op("BitwiseAnd", positions, graph.constant(BLOCK_BITS - 1))
        words = graph.op("Gather", bitmap, block)  # [B, 64]
        place = graph.op("Range", graph.constant(0), graph.constant(BLOCK_BITS), graph.constant(1))
        bits = graph.op(
            "Sub", graph.reshape(place, -1, 1), graph.constant(np.arange(BLOCK_BYTES) * 8)
        )
        # bits of each byte that are below the position
        bits = graph.op("Clip", bits, graph.constant(0), graph.constant(8))
        masks = graph.constant((1 << np.arange(9)) - 1, np.uint8)
        below = graph.pick(masks, bits, bits)  # [512, 64], computed once
        masked = graph.op("BitwiseAnd", words, graph.op("Gather", below, within))
        ones = graph.pick(
            graph.constant(np.bitwise_count(np.arange(256)), np.int64),
            graph.cast(masked, np.int64),
            masked,
        )
        before = graph.cast(graph.op("GatherElements", totals, block), np.int64)
        rank = graph.op("Add", before, graph.op("ReduceSum", ones, graph.constant([1]), keepdims=0))
        byte = graph.reshape(graph.op("Div", within, graph.constant(8)), -1, 1)
        here = graph.reshape(graph.op("GatherElements", words, byte, axis=1), -1)
        bit = graph.cast(graph.op("BitwiseAnd", within, graph.constant(7)), np.uint8)
        inside = graph.op(
            "BitwiseAnd", graph.shift(here, bit, np.uint8), graph.constant(1, np.uint8)
        )
        return graph.cast(inside, np.bool_), rank

    def band(self, name: str, band: Band, ids: str, positions: str) -> str:  # [B], [B] -> [B, d]
        """Return the rows of ids at ``positions`` of a band or layer."""
        graph = self.graph
        rows = self._combine(name, band, ids, positions)
        if band.cell is not None:
            rows = self._cell(f"{name}.cell", band.cell, rows, code_count(band))
        if band.plus is not None:
            rows = graph.op("Add", rows, self.band(f"{name}.plus", band.plus, ids, positions))
        if band.affine is not None and band.affine.weight is not None:
            rows = graph.op(
                "MatMul", rows, matrix_whole(graph, f"{name}.affine.weight", band.affine.weight)
            )
        if band.affine is not None and band.affine.bias is not None:
            rows = graph.op("Add", rows, graph.stored(f"{name}.affine.bias", band.affine.bias))
        if band.norms is not None:
            rows = graph.op("Mul", rows, self._rows(f"{name}.norms", band.norms, positions))
        return rows

    def _rows(self, name: str, matrix: Matrix | Graded, positions: str) -> str:
        if isinstance(matrix, Graded):
            return graded_rows(self.graph, name, matrix, positions)
        return matrix_rows(self.graph, name, matrix, positions, blocks=self.blocks)

    def _combine(self, name: str, band: Band, ids: str, positions: str) -> str:  # [B] -> [B, d']
        graph = self.graph
        if isinstance(band.codes, Every):
            assert band.values is not None
            rows = self._rows(f"{name}.values", band.values, positions)
            if band.dictionary is None:
                return rows
            return graph.op(
                "MatMul", rows, matrix_whole(graph, f"{name}.dictionary", band.dictionary)
            )
        assert band.dictionary is not None
        if isinstance(band.codes, Identity) and band.values is None:
            return self._rows(f"{name}.dictionary", band.dictionary, positions)
        indices, values = self._codes(name, band, ids, positions)
        atoms = self._atoms(f"{name}.dictionary", band.dictionary, indices)  # [B, s, d']
        return self._combine_atoms(band, atoms, values)

    def _codes(
        self, name: str, band: Band, ids: str, positions: str
    ) -> tuple[str, str | None]:  # [B] -> [B, s], [B, s]
        graph = self.graph
        match band.codes:
            case Fixed():
                return fixed_codes(graph, f"{name}.codes", band.codes, band.atoms, positions)
            case Ragged():
                return ragged_codes(graph, f"{name}.codes", band.codes, positions)
            case Hash():
                indices = hash_indices(graph, ids, band.codes, band.atoms)
            case Remainder():
                indices = remainder_indices(graph, ids, band.codes.divisor, band.atoms)
            case Identity():
                indices = graph.reshape(positions, -1, 1)
            case _:
                raise ArgumentError(
                    f"codes of layout {type(band.codes).__name__} cannot be exported to ONNX"
                )
        return indices, None if band.values is None else self._rows(
            f"{name}.values", band.values, positions
        )

    def _atoms(self, name: str, dictionary: Matrix, indices: str) -> str:  # [B, s] -> [B, s, d']
        """Return atoms; dictionaries that the packed form keeps decoded are decoded once."""
        graph = self.graph
        if keeps_decoded(dictionary) and dictionary.shape[1] <= NARROW:
            return self._narrow(name, dictionary, indices)
        if keeps_decoded(dictionary):
            return graph.op("Gather", matrix_whole(graph, name, dictionary), indices)
        rows = matrix_rows(graph, name, dictionary, graph.reshape(indices, -1), blocks=self.blocks)
        shape = graph.op(
            "Concat", graph.op("Shape", indices), graph.constant([dictionary.shape[1]]), axis=0
        )
        return graph.op("Reshape", rows, shape, allowzero=1)

    def _narrow(self, name: str, dictionary: Matrix, indices: str) -> str:  # [B, s] -> [B, s, d']
        """Return narrow atoms column by column, since Gather is slow at copying few bytes."""
        graph = self.graph
        atoms, width = dictionary.shape
        turned = graph.reshape(
            graph.op("Transpose", matrix_whole(graph, name, dictionary), perm=[1, 0]), -1
        )
        columns = graph.constant(np.arange(width)[:, None] * atoms)
        at = graph.op(
            "Add", graph.op("Unsqueeze", indices, graph.constant([1])), columns
        )  # [B, d', s]
        return graph.op("Transpose", graph.pick(turned, at, at), perm=[0, 2, 1])

    def _combine_atoms(
        self, band: Band, atoms: str, values: str | None
    ) -> str:  # [B, s, d'], [B, s] -> [B, d']
        graph = self.graph
        if values is not None:
            atoms = graph.op("Mul", atoms, graph.op("Unsqueeze", values, graph.constant([2])))
        if band.combine == "concat":
            assert band.dictionary is not None
            return graph.reshape(atoms, 0, band.dictionary.shape[1] * code_count(band))
        reduce = {"sum": "ReduceSum", "product": "ReduceProd"}[band.combine]
        return graph.op(reduce, atoms, graph.constant([1]), keepdims=0)

    def _cell(self, name: str, cell: Cell, rows: str, steps: int) -> str:  # [B, n] -> [B, w]
        """Apply the cell: a ReLU layer, or ONNX's LSTM, which includes the recurrent cell."""
        graph = self.graph
        weight, bias = (
            matrix_whole(graph, f"{name}.weight", cell.weight),
            graph.stored(f"{name}.bias", cell.bias),
        )
        if cell.kind == "mlp":
            return graph.op("Relu", graph.op("Add", graph.op("MatMul", rows, weight), bias))
        if cell.kind not in CELL_GATES:
            raise ArgumentError(
                f"a cell of kind {cell.kind!r} cannot be exported to ONNX: "
                f"use {', '.join(CELL_GATES)} or mlp"
            )
        step, width = cell.step_width, cell.width
        assert step is not None
        if cell.input is None:  # every gate reads the atom itself
            unit = graph.op("EyeLike", graph.op("ConstantOfShape", graph.constant([step, step])))
            given = graph.op("Tile", unit, graph.constant([1, 4]))
        else:
            given = matrix_whole(graph, f"{name}.input", cell.input)
        order = np.concatenate([np.arange(width) + gate * width for gate in CELL_GATES[cell.kind]])

        def gates(value: str) -> str:  # [n, 4 w] -> [1, 4 w, n]
            turned = graph.op(
                "Gather", graph.op("Transpose", value, perm=[1, 0]), graph.constant(order)
            )
            return graph.op("Unsqueeze", turned, graph.constant([0]))

        own = graph.op("Gather", bias, graph.constant(order))
        # ONNX has two biases, of which the second is 0
        both = graph.op("Concat", own, graph.op("Sub", own, own), axis=0)
        # onnxruntime's LSTM aborts on an empty batch
        spare = graph.op("ConstantOfShape", graph.constant([1, steps * step]))
        atoms = graph.reshape(graph.op("Concat", rows, spare, axis=0), -1, steps, step)
        atoms = graph.op("Transpose", atoms, perm=[1, 0, 2])  # [s, B + 1, a]
        states = graph.op(
            "LSTM",
            atoms,
            gates(given),
            gates(weight),
            graph.reshape(both, 1, -1),
            hidden_size=width,
        )
        mean = graph.op("ReduceMean", states, graph.constant([0, 1]), keepdims=0)
        return graph.op(
            "Slice", mean, graph.constant([0]), graph.constant([-1]), graph.constant([0])
        )


def gathers_rows(band: Band) -> bool:
    """Whether rows are gathered from a matrix by position, so that Gather checks the range."""
    return isinstance(band.values, Matrix) or (
        isinstance(band.codes, Identity) and band.values is None
    )


def code_count(band: Band) -> int:
    """Return the number of codes per row."""
    match band.codes:
        case Fixed():
            return band.codes.count
        case Hash():
            return band.codes.hashes
        case Remainder():
            return 2
    return 1
