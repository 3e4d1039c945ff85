"""A packed table as an ONNX model: ids in, rows out, for every runtime that reads ONNX."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, MissingExtra
from featherbed.exports.graph import MICROSOFT, Graph
from featherbed.exports.rows import Rows
from featherbed.packed.band import check_values
from featherbed.packed.file import Packable, load
from featherbed.packed.table import PackedTable
from featherbed.packed.validate import validate
from featherbed.packed.writing import replacing
from featherbed.version import __version__

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

OLDEST = 18  # the first operator set with bitwise operators
MOST_INLINE = (
    2**31 - 2**24
)  # bytes of arrays in the model's own file: what protobuf can write, less room for the graph
SMALL = 1024  # bytes of an array that stays in the model's own file in any case
ALIGNED = 4096  # where arrays start in a file of their own, so that they can be mapped


def to_onnx(
    table: PackedTable | Packable | str | Path,
    path: str | Path | None = None,
    *,
    rank: int | None = 1,
    blocks: bool = False,
    opset: int = OLDEST,
) -> ModelProto:
    """Turn a table into an ONNX model with the input ``ids`` (int64) and the output ``rows`` (float32, ids' shape and d).

    The arrays keep their stored sizes: levels and codes are unpacked after the gather, by plain integer operators.

    ``table`` is a packed table, the path of a packed file, or a training table; keys are left behind. ``path`` is where to
    write the model, in one step; more than 2 GB of arrays go to a second file beside it. ``rank`` is how many dimensions ids
    have, None for any, which onnxruntime takes and ONNX's own checker does not. ``blocks`` decodes rows in 4 and 8 bits by
    onnxruntime's operator GatherBlockQuantized. ``opset`` is the operator set, from 18 on.

    >>> import onnxruntime
    >>> from featherbed.packed.band import Band
    >>> from featherbed.packed.codes import Identity
    >>> from featherbed.packed.matrix import Matrix
    >>> packed = PackedTable([Band(2, Identity(), dictionary=Matrix.encode(np.eye(2), "float32"))], 2)
    >>> model = to_onnx(packed)
    >>> session = onnxruntime.InferenceSession(model.SerializeToString())
    >>> session.run(["rows"], {"ids": np.array([1, 0])})[0].tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    _checked_settings(rank, opset)
    packed = _packed(table)
    validate(packed)
    check_values(packed.bands)
    graph = Graph()
    flat = "ids" if rank == 1 else graph.reshape("ids", -1)
    rows = Rows(graph, blocks).table(packed, flat)
    if rank == 1:
        graph.op("Identity", rows, name="rows")
    else:
        wanted = graph.op("Concat", graph.op("Shape", "ids"), graph.constant([packed.dim]), axis=0)
        graph.op("Reshape", rows, wanted, name="rows", allowzero=1)
    return _model(graph, packed, rank, opset, None if path is None else Path(path))


def _checked_settings(rank: int | None, opset: int) -> None:
    try:
        import onnx
    except ImportError:
        raise MissingExtra("onnx", "onnx", "exporting to ONNX") from None
    newest = onnx.defs.onnx_opset_version()
    if isinstance(opset, bool) or not isinstance(opset, int) or not OLDEST <= opset <= newest:
        raise ArgumentError(f"opset={opset!r}: use a whole number from {OLDEST} to {newest}")
    if rank is not None and (
        isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= 8
    ):
        raise ArgumentError(
            f"rank={rank!r}: ids have 0 to 8 dimensions, or None for any number of them"
        )


def _packed(table: PackedTable | Packable | str | Path) -> PackedTable:
    if isinstance(table, PackedTable):
        return table
    if isinstance(table, str | Path):
        return load(table)
    if isinstance(table, Packable):
        return table.pack()
    raise ArgumentError(
        f"{type(table).__name__} has no packed form: export a table, a packed one, or the path of a packed file"
    )


def _model(
    graph: Graph, packed: PackedTable, rank: int | None, opset: int, path: Path | None
) -> ModelProto:
    """Put the graph into a model, and the model into its file."""
    from onnx import TensorProto, helper

    inside = None if rank is None else [f"n{i}" for i in range(rank)]
    given = helper.make_tensor_value_info("ids", TensorProto.INT64, inside)
    found = helper.make_tensor_value_info(
        "rows", TensorProto.FLOAT, None if inside is None else [*inside, packed.dim]
    )
    imports = [helper.make_opsetid("", opset)] + [helper.make_opsetid(MICROSOFT, 1)] * (
        MICROSOFT in graph.domains
    )
    made = helper.make_graph(graph.nodes, "table", [given], [found])
    model = helper.make_model(
        made, opset_imports=imports, producer_name="featherbed", producer_version=__version__
    )
    model.ir_version = helper.find_min_ir_version_for(imports, ignore_unknown=True)
    helper.set_model_props(model, {"rows": str(packed.rows), "dim": str(packed.dim)})
    total = sum(array.nbytes for array in graph.arrays.values())
    if total <= MOST_INLINE:
        model.graph.initializer.extend(_tensor(name, array) for name, array in graph.arrays.items())
    elif path is None:
        raise ArgumentError(
            f"the arrays take {total:,} bytes, a model in memory holds {MOST_INLINE:,}: give a path to write to"
        )
    else:
        _beside(model, graph.arrays, path)
    if path is not None:
        with replacing(path) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(model.SerializeToString())
    return model


def _little(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return the array as ONNX stores it: contiguous, little-endian."""
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _tensor(name: str, array: NDArray[np.generic]) -> TensorProto:
    from onnx import helper

    kind = helper.np_dtype_to_tensor_dtype(array.dtype.newbyteorder("="))
    return helper.make_tensor(name, kind, array.shape, _little(array).tobytes(), raw=True)


def _beside(model: ModelProto, arrays: dict[str, NDArray[np.generic]], path: Path) -> None:
    """Write the arrays to a file beside the model, named after what is in it, so that an old model keeps its own."""
    from onnx import TensorProto, helper

    large = {name: _little(array) for name, array in arrays.items() if array.nbytes > SMALL}
    checksum = 0
    for array in large.values():
        checksum = zlib.crc32(array.reshape(-1).view(np.uint8).data, checksum)
    location = f"{path.name}.{checksum:08x}.data"
    with (
        replacing(path.with_name(location)) as descriptor,
        os.fdopen(os.dup(descriptor), "wb") as file,
    ):
        for name, array in arrays.items():
            if name not in large:
                model.graph.initializer.append(_tensor(name, array))
                continue
            file.write(b"\0" * (-file.tell() % ALIGNED))
            kind = helper.np_dtype_to_tensor_dtype(array.dtype.newbyteorder("="))
            tensor = TensorProto(
                name=name, data_type=kind, dims=array.shape, data_location=TensorProto.EXTERNAL
            )
            for key, value in (
                ("location", location),
                ("offset", file.tell()),
                ("length", array.nbytes),
            ):
                tensor.external_data.add(key=key, value=str(value))
            model.graph.initializer.append(tensor)
            file.write(large[name].reshape(-1).view(np.uint8).data)
