"""A graph of ONNX operators; bit-packed integers and stored matrices in it.

Integers have two layouts. *Planes*, to read whole records: an integer is split into bytes and parts
of 4, 2 and 1 bits; with n = ceil(p s / 8) bytes for the p-bit parts of s integers, byte k holds
those of the integers k, n + k, 2 n + k, ..., lowest bits first. One shift of all bytes then yields
n consecutive integers, several times faster than splitting every byte. *Streams* of 32-bit words,
as in the packed file, to read single integers.

A quantized matrix is x = scale * (level - (2^bits - 1) / 2), with one scale per row or column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from featherbed.packed import bits as stream_bits
from featherbed.packed.matrix import MOST_BITS, Graded, Matrix, level_bits, unpack_levels

if TYPE_CHECKING:
    from onnx import NodeProto

CHUNK = 1 << 22  # integers converted at once
MIN_BLOCK = 16  # smallest block of GatherBlockQuantized, a power of two
Fetch = Callable[[int, int], NDArray[np.unsignedinteger]]  # start, stop -> [stop - start, s]
MICROSOFT = "com.microsoft"  # the domain of onnxruntime's own operators


class OnnxGraph:
    """Operators in execution order and their arrays; values are referred to by name.

    >>> graph = OnnxGraph()
    >>> norms = graph.stored("b0.norms", np.zeros(3, np.float32))
    >>> total = graph.op("Add", norms, graph.constant(1.0, np.float32))
    >>> [node.op_type for node in graph.nodes], list(graph.arrays), total
    (['Add'], ['b0.norms', 'c1'], 't0')
    """

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.arrays: dict[str, NDArray[np.generic]] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    @property
    def domains(self) -> set[str]:
        """Domains of the operators; "" is ONNX itself."""
        return {node.domain for node in self.nodes}

    def op(
        self, kind: str, *inputs: str, domain: str = "", name: str | None = None, **attributes: Any
    ) -> str:
        """Add an operator with one output and return the name of the output."""
        from onnx import helper

        output = name or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], domain=domain, **attributes))
        return output

    def stored(self, name: str, array: NDArray[np.generic]) -> str:
        """Add an array of the table under its name in the packed file."""
        self.arrays[name] = array
        return name

    def constant(self, value: ArrayLike, dtype: DTypeLike = np.int64) -> str:
        """Return the name of a constant; equal constants are stored once."""
        array = np.asarray(value, dtype=dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = f"c{len(self.arrays)}"
            self.arrays[self._constants[key]] = array
        return self._constants[key]

    def cast(self, value: str, dtype: DTypeLike) -> str:
        """Convert to another type; integers that do not fit keep their lowest bits."""
        from onnx import helper

        return self.op("Cast", value, to=int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype))))

    def reshape(self, value: str, *shape: int) -> str:
        """Reshape: 0 keeps a dimension, -1 is inferred."""
        return self.op("Reshape", value, self.constant(shape))

    def columns(self, value: str, first: int, last: int) -> str:  # [N, m] -> [N, last - first]
        """Return columns ``first`` to ``last - 1``."""
        return self.op(
            "Slice", value, self.constant([first]), self.constant([last]), self.constant([1])
        )

    def pick(self, table: str, indices: str, like: str) -> str:  # [n], [...], [...] -> [...]
        """Return single elements in the shape of ``like``.

        GatherElements is much faster than Gather here, but takes flat arrays only.
        """
        found = self.op("GatherElements", table, self.reshape(indices, -1))
        return self.op("Reshape", found, self.op("Shape", like))

    def shift(self, value: str, bits: int | str, dtype: DTypeLike, direction: str = "RIGHT") -> str:
        """Shift unsigned integers by ``bits``, a number or a value of the same type."""
        by = self.constant(bits, dtype) if isinstance(bits, int) else bits
        return self.op("BitShift", value, by, direction=direction)


def parts_of(bits: int) -> list[tuple[int, int]]:
    """Return the parts of an integer: the bits of each and its first bit.

    >>> parts_of(3), parts_of(12)
    ([(2, 0), (1, 2)], [(8, 0), (4, 8)])
    """
    found, start = [], 0
    for part in (8, 8, 8, 8, 4, 2, 1):
        if bits - start >= part:
            found.append((part, start))
            start += part
    return found


def plane_bytes(bits: int, count: int) -> int:
    """Return the bytes of a record of ``count`` integers in planes."""
    return sum(-(-part * count // 8) for part, _ in parts_of(bits))


def to_planes(
    levels: NDArray[np.unsignedinteger], bits: int
) -> NDArray[np.uint8]:  # [n, s] -> [n, plane_bytes]
    """Convert integers to planes.

    >>> to_planes(np.array([[1, 2, 3]], dtype=np.uint8), 4)
    array([[49,  2]], dtype=uint8)
    """
    rows, count = levels.shape
    planes = []
    for part, start in parts_of(bits):
        length = -(-part * count // 8)
        wide = np.zeros((rows, length * (8 // part)), dtype=np.uint8)
        wide[:, :count] = (levels >> levels.dtype.type(start)) & levels.dtype.type((1 << part) - 1)
        shifts = (np.arange(8 // part, dtype=np.uint8) * part)[None, :, None]
        planes.append(np.bitwise_or.reduce(wide.reshape(rows, 8 // part, length) << shifts, axis=1))
    return np.concatenate(planes, axis=1)


def planes(
    rows: int, count: int, bits: int, fetch: Fetch
) -> NDArray[np.uint8]:  # -> [rows, plane_bytes]
    """Convert the integers that ``fetch`` returns to planes, in chunks of rows."""
    out = np.empty((rows, plane_bytes(bits, count)), dtype=np.uint8)
    step = max(1, CHUNK // max(1, count))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        out[start:stop] = to_planes(fetch(start, stop), bits)
    return out


def read_planes(
    graph: OnnxGraph, record: str, bits: int, count: int
) -> str:  # [N, plane_bytes] -> [N, s]
    """Return integers from their planes: uint8, or int64 above 8 bits."""
    found, first = [], 0
    alone = len(parts_of(bits)) == 1
    for part, start in parts_of(bits):
        length = -(-part * count // 8)
        plane = record if alone else graph.columns(record, first, first + length)
        found.append((_plane(graph, plane, part, length, count), part, start))
        first += length
    low = [entry for entry in found if entry[1] == 8]
    rest = [(value, start % 8) for value, part, start in found if part < 8]
    if rest:
        joined = rest[0][0]
        for value, start in rest[1:]:
            joined = graph.op("BitwiseOr", joined, graph.shift(value, start, np.uint8, "LEFT"))
        low.append((joined, 8, bits // 8 * 8))
    if len(low) == 1:
        return low[0][0]
    total = graph.cast(low[0][0], np.int64)
    for value, _, start in low[1:]:
        total = graph.op(
            "Add", total, graph.op("Mul", graph.cast(value, np.int64), graph.constant(1 << start))
        )
    return total


def _plane(
    graph: OnnxGraph, plane: str, part: int, length: int, count: int
) -> str:  # [N, length] -> [N, count]
    if part == 8:
        return plane
    shifts = [t for t in range(8 // part) if t * length < count]
    pieces = []
    for t in shifts:
        piece = plane if t == 0 else graph.shift(plane, t * part, np.uint8)
        last = t == 8 // part - 1
        pieces.append(
            piece
            if last
            else graph.op("BitwiseAnd", piece, graph.constant((1 << part) - 1, np.uint8))
        )
    whole = pieces[0] if len(pieces) == 1 else graph.op("Concat", *pieces, axis=1)
    return whole if length * len(shifts) == count else graph.columns(whole, 0, count)


def to_stream(rows: int, count: int, bits: int, fetch: Fetch) -> NDArray[np.uint32]:
    """Pack the integers that ``fetch`` returns into a stream of words, in chunks of rows."""
    out = np.zeros(stream_bits.word_count(rows * count, bits), dtype=np.uint32)
    step = max(1, CHUNK // max(1, count) // 32) * 32  # whole words
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        numbers = fetch(start, stop).astype(np.uint32, copy=False).reshape(-1, 1)
        words, begin = stream_bits.pack(numbers, [bits]), start * count * bits // 32
        out[begin : begin + len(words) - 2] = words[:-2]
    return out


def read_stream(graph: OnnxGraph, words: str, index: str, bits: int) -> str:  # [...] -> [...]
    """Return the integers (int64) at the given indices of a stream of ``bits``-bit integers."""
    start = graph.op("Mul", graph.reshape(index, -1), graph.constant(bits))
    word = graph.cast(graph.shift(graph.cast(start, np.uint64), 5, np.uint64), np.int64)
    low = graph.op("GatherElements", words, word)
    within = graph.op("BitwiseAnd", start, graph.constant(31))
    if 32 % bits == 0:  # no integer crosses a word boundary
        found = graph.shift(low, graph.cast(within, np.uint32), np.uint32)
        found = graph.op("BitwiseAnd", found, graph.constant((1 << bits) - 1, np.uint32))
    else:
        high = graph.op("GatherElements", words, graph.op("Add", word, graph.constant(1)))
        wide = graph.shift(graph.cast(high, np.uint64), 32, np.uint64, "LEFT")
        pair = graph.op("BitwiseOr", graph.cast(low, np.uint64), wide)
        found = graph.shift(pair, graph.cast(within, np.uint64), np.uint64)
        found = graph.op("BitwiseAnd", found, graph.constant((1 << bits) - 1, np.uint64))
    return graph.op("Reshape", graph.cast(found, np.int64), graph.op("Shape", index))


def graded_rows(
    graph: OnnxGraph, name: str, graded: Graded, positions: str
) -> str:  # [B] -> [B, m]
    """Return graded rows: the bits of an element, within two bytes, depend on the row's grade.

    x = s_g[k] (q - (2^b - 1) / 2)  with b = b_g[k]
    """
    rows = np.array([count for count, _ in graded.grades], dtype=np.int64)
    bits = graded.bits
    record = bits.sum(axis=1, dtype=np.int64)
    base = np.cumsum(rows * record) - rows * record - (np.cumsum(rows) - rows) * record
    scales = np.zeros(bits.shape, dtype=graded.scale.dtype)
    scales[bits > 0] = graded.scale
    widths, scale = graph.stored(f"{name}.bits", bits), graph.stored(f"{name}.scale", scales)
    spare = np.zeros(2, dtype=np.uint8)  # two bytes are read for every element, even of 0 bits
    data = graph.stored(name, np.concatenate([graded.data, spare]))

    beyond = graph.op(
        "GreaterOrEqual", graph.reshape(positions, -1, 1), graph.constant(np.cumsum(rows))
    )
    grade = graph.op("ReduceSum", graph.cast(beyond, np.int64), graph.constant([1]), keepdims=0)
    offset = graph.op("CumSum", graph.cast(widths, np.int64), graph.constant(1), exclusive=1)
    of_row = graph.op("Mul", positions, graph.op("Gather", graph.constant(record), grade))
    begin = graph.op("Add", of_row, graph.op("Gather", graph.constant(base), grade))
    start = graph.op("Add", graph.reshape(begin, -1, 1), graph.op("Gather", offset, grade))
    byte = graph.cast(graph.shift(graph.cast(start, np.uint64), 3, np.uint64), np.int64)
    low = graph.cast(graph.pick(data, byte, byte), np.uint32)
    high = graph.cast(graph.pick(data, graph.op("Add", byte, graph.constant(1)), byte), np.uint32)
    pair = graph.op("BitwiseOr", low, graph.shift(high, 8, np.uint32, "LEFT"))
    shifted = graph.shift(
        pair, graph.cast(graph.op("BitwiseAnd", start, graph.constant(7)), np.uint32), np.uint32
    )

    masks = (1 << np.arange(MOST_BITS + 1)) - 1
    wide = graph.cast(widths, np.int64)
    mask = graph.op("Gather", graph.op("Gather", graph.constant(masks, np.uint32), wide), grade)
    middle = graph.op(
        "Gather", graph.op("Gather", graph.constant(masks / 2, np.float32), wide), grade
    )
    levels = graph.cast(graph.op("BitwiseAnd", shifted, mask), np.float32)
    factor = graph.op("Gather", graph.cast(scale, np.float32), grade)
    return graph.op("Mul", graph.op("Sub", levels, middle), factor)


def matrix_rows(
    graph: OnnxGraph, name: str, matrix: Matrix, index: str, *, blocks: bool = False
) -> str:  # [N] -> [N, m]
    """Return the rows at ``index``; with ``blocks`` by GatherBlockQuantized if possible."""
    bits = level_bits(matrix.kind)
    if bits >= 16:
        return _float(graph, graph.op("Gather", graph.stored(name, matrix.data), index), bits)
    if blocks and matrix.axis == 0 and (bits == 8 or (bits == 4 and matrix.shape[1] % 2 == 0)):
        return _block_rows(graph, name, matrix, index)
    record = graph.op("Gather", graph.stored(name, _planes(matrix)), index)
    scale = _scale(graph, name, matrix)
    if matrix.axis == 0:
        scale = graph.op("Gather", scale, index)
    return _decode(graph, record, scale, matrix)


def matrix_whole(graph: OnnxGraph, name: str, matrix: Matrix) -> str:  # -> [n, m]
    """Return the whole matrix, which onnxruntime decodes once when it opens the model."""
    bits = level_bits(matrix.kind)
    if bits >= 16:
        return _float(graph, graph.stored(name, matrix.data), bits)
    return _decode(graph, graph.stored(name, _planes(matrix)), _scale(graph, name, matrix), matrix)


def _float(graph: OnnxGraph, value: str, bits: int) -> str:
    return value if bits == 32 else graph.cast(value, np.float32)


def _planes(matrix: Matrix) -> NDArray[np.uint8]:
    bits = level_bits(matrix.kind)
    if bits == 8:
        return matrix.data.astype(np.uint8, copy=False)
    stored = matrix.data.astype(np.uint8, copy=False)
    return planes(
        *matrix.shape,
        bits,
        lambda start, stop: unpack_levels(stored[start:stop], bits, matrix.shape[1]),
    )


def _scale(graph: OnnxGraph, name: str, matrix: Matrix) -> str:  # [n, 1] or [1, m]
    assert matrix.scale is not None
    return graph.stored(
        f"{name}.scale", matrix.scale[:, None] if matrix.axis == 0 else matrix.scale[None, :]
    )


def _decode(
    graph: OnnxGraph, record: str, scale: str, matrix: Matrix
) -> str:  # [N, bytes] -> [N, m]
    bits = level_bits(matrix.kind)
    levels = graph.cast(read_planes(graph, record, bits, matrix.shape[1]), np.float32)
    centered = graph.op("Sub", levels, graph.constant((2**bits - 1) / 2, np.float32))
    assert matrix.scale is not None
    return graph.op(
        "Mul",
        centered,
        scale if matrix.scale.dtype == np.float32 else graph.cast(scale, np.float32),
    )


def _block_rows(graph: OnnxGraph, name: str, matrix: Matrix, index: str) -> str:  # [N] -> [N, m]
    """Decode by one operator; its zero point is half a level higher: add half a scale."""
    bits = level_bits(matrix.kind)
    scale = graph.cast(_scale(graph, name, matrix), np.float32)
    block = max(MIN_BLOCK, 1 << (matrix.shape[1] - 1).bit_length())
    data = graph.stored(name, matrix.data)
    settings: dict[str, Any] = {
        "gather_axis": 0,
        "quantize_axis": 1,
        "block_size": block,
        "bits": bits,
    }
    rows = graph.op("GatherBlockQuantized", data, index, scale, domain=MICROSOFT, **settings)
    half = graph.op("Mul", graph.op("Gather", scale, index), graph.constant(0.5, np.float32))
    return graph.op("Add", rows, half)
