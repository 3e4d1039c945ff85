"""Construction of a graph of ONNX operators, stored arrays and constants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

if TYPE_CHECKING:
    from onnx import NodeProto

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
