"""Rows as ONNX operators: bands, codes, cells, layers and the affine stage.

row = norms * affine(cell(combine(dictionary[indices], values)) + plus)
"""

from __future__ import annotations

import numpy as np

from featherbed.errors import ArgumentError
from featherbed.interop.onnx.codes import fixed_codes, hash_indices, ragged_codes, remainder_indices
from featherbed.interop.onnx.fields import graded_rows
from featherbed.interop.onnx.graph import OnnxGraph
from featherbed.interop.onnx.matrices import matrix_rows, matrix_whole
from featherbed.packed.band import BLOCK_BITS, Band, Members, keeps_decoded
from featherbed.packed.cells import Cell
from featherbed.packed.codes import Every, Fixed, Hash, Identity, Ragged, Remainder
from featherbed.packed.graded import Graded
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable

BLOCK_BYTES = BLOCK_BITS // 8
NARROW = 2  # width of atoms up to which gathering by column is faster (by a third at 2; not at 4)
# our gates in ONNX's order: input, output, forget, cell
CELL_GATES = {"recurrent": (1, 2, 0, 3), "lstm": (0, 3, 1, 2)}


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
