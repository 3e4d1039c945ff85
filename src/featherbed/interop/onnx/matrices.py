"""Stored matrices as ONNX operators: rows, or the whole matrix.

x = scale * (level - (2^bits - 1) / 2), with one scale per row or column
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.interop.onnx.fields import planes, read_planes
from featherbed.interop.onnx.graph import MICROSOFT, OnnxGraph
from featherbed.packed.matrix import Matrix, level_bits, unpack_levels

MIN_BLOCK = 16  # smallest block of GatherBlockQuantized, a power of two


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
