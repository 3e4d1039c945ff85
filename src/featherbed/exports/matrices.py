"""Stored matrices as ONNX operators: whole ones, and rows of them.

x = scale * (level - (2^bits - 1) / 2), from levels in planes of bits, by row or column
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.exports.fields import planes, read_planes
from featherbed.exports.graph import MICROSOFT, Graph
from featherbed.packed.matrix import Matrix, level_bits, unpack_levels

SMALLEST_BLOCK = 16  # columns that share a scale, of which GatherBlockQuantized takes powers of two


def matrix_rows(
    graph: Graph, name: str, matrix: Matrix, index: str, *, blocks: bool = False
) -> str:  # [N] -> [N, m]
    """Fetch and decode the rows at ``index``; with ``blocks`` by GatherBlockQuantized where it applies."""
    bits = level_bits(matrix.kind)
    if bits >= 16:
        return _float(graph, graph.op("Gather", graph.stored(name, matrix.data), index), bits)
    if blocks and matrix.axis == 0 and (bits == 8 or (bits == 4 and matrix.shape[1] % 2 == 0)):
        return _block_rows(graph, name, matrix, index)
    record = graph.op("Gather", graph.stored(name, _planes(matrix)), index)
    scale = _scale(graph, name, matrix)
    if matrix.axis == 0:
        scale = graph.op("Gather", scale, index)
    return _decoded(graph, record, scale, matrix)


def matrix_whole(graph: Graph, name: str, matrix: Matrix) -> str:  # -> [n, m]
    """Decode a whole matrix; onnxruntime does that once, when it opens the model, and keeps the result."""
    bits = level_bits(matrix.kind)
    if bits >= 16:
        return _float(graph, graph.stored(name, matrix.data), bits)
    return _decoded(graph, graph.stored(name, _planes(matrix)), _scale(graph, name, matrix), matrix)


def _float(graph: Graph, value: str, bits: int) -> str:
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


def _scale(graph: Graph, name: str, matrix: Matrix) -> str:  # [n, 1] or [1, m]
    assert matrix.scale is not None
    return graph.stored(
        f"{name}.scale", matrix.scale[:, None] if matrix.axis == 0 else matrix.scale[None, :]
    )


def _decoded(graph: Graph, record: str, scale: str, matrix: Matrix) -> str:  # [N, bytes] -> [N, m]
    bits = level_bits(matrix.kind)
    levels = graph.cast(read_planes(graph, record, bits, matrix.shape[1]), np.float32)
    centred = graph.op("Sub", levels, graph.constant((2**bits - 1) / 2, np.float32))
    assert matrix.scale is not None
    return graph.op(
        "Mul", centred, scale if matrix.scale.dtype == np.float32 else graph.cast(scale, np.float32)
    )


def _block_rows(graph: Graph, name: str, matrix: Matrix, index: str) -> str:  # [N] -> [N, m]
    """Decode in one operator: its zero is 2^(bits - 1), ours half a level lower, so half a scale is added."""
    bits = level_bits(matrix.kind)
    scale = graph.cast(_scale(graph, name, matrix), np.float32)
    block = max(SMALLEST_BLOCK, 1 << (matrix.shape[1] - 1).bit_length())
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
