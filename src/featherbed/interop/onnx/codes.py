"""Codes as ONNX operators: the indices and values of rows in any layout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featherbed.hashing import hash_codes
from featherbed.interop.onnx.fields import (
    Fetch,
    plane_bytes,
    planes,
    read_planes,
    read_stream,
    to_stream,
)
from featherbed.interop.onnx.graph import OnnxGraph
from featherbed.interop.onnx.matrices import matrix_rows
from featherbed.packed import bits as stream_bits
from featherbed.packed.codes import DIRECTORY_STEP, Fixed, Hash, Ragged
from featherbed.packed.levels import ValueLevels
from featherbed.packed.matrix import Matrix, level_bits

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
