"""``fb.to_onnx``: a packed table as an ONNX model that maps ids to rows."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from featherbed.checks import check_integer
from featherbed.errors import ArgumentError, MissingExtra
from featherbed.files import replacing
from featherbed.interop.onnx.graph import MICROSOFT, OnnxGraph
from featherbed.interop.onnx.rows import RowBuilder
from featherbed.packed.file import Packable, load
from featherbed.packed.table import PackedTable
from featherbed.packed.validate import validate
from featherbed.version import __version__

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

MIN_OPSET = 18  # the first with bitwise operators
MAX_INLINE = 2**31 - 2**24  # bytes of arrays in the model file: protobuf's limit less the graph
SMALL = 1024  # bytes of an array that always stays in the model file
ALIGNMENT = 4096  # of arrays in a separate file, so that they can be mapped


def to_onnx(
    table: PackedTable | Packable | str | Path,
    path: str | Path | None = None,
    *,
    rank: int | None = 1,
    blocks: bool = False,
    opset: int = MIN_OPSET,
) -> ModelProto:
    """Return an ONNX model with input ``ids`` (int64 [...]) and output ``rows`` (float32 [..., d]).

    Arrays keep their stored sizes: integer operators unpack levels and codes after the gather.

    Args:
        table: a packed table, the path of a packed file, or a training table; keys are not
            exported.
        path: file to write atomically; more than 2 GB of arrays go to a second file beside it.
        rank: number of dimensions of ids; None for any, which onnxruntime accepts but ONNX's
            checker does not.
        blocks: decode rows of 4 and 8 bits by GatherBlockQuantized of onnxruntime.
        opset: version of the operator set, at least 18.

    >>> import onnxruntime
    >>> from featherbed.packed.band import Band
    >>> from featherbed.packed.band import Identity
    >>> from featherbed.packed.matrix import Matrix
    >>> atoms = Matrix.encode(np.eye(2), "float32")
    >>> packed = PackedTable([Band(2, Identity(), dictionary=atoms)], 2)
    >>> model = to_onnx(packed)
    >>> session = onnxruntime.InferenceSession(model.SerializeToString())
    >>> session.run(["rows"], {"ids": np.array([1, 0])})[0].tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    _check_settings(rank, opset)
    packed = _packed(table)
    validate(packed)
    graph = OnnxGraph()
    flat = "ids" if rank == 1 else graph.reshape("ids", -1)
    rows = RowBuilder(graph, blocks).table(packed, flat)
    if rank == 1:
        graph.op("Identity", rows, name="rows")
    else:
        wanted = graph.op("Concat", graph.op("Shape", "ids"), graph.constant([packed.dim]), axis=0)
        graph.op("Reshape", rows, wanted, name="rows", allowzero=1)
    return _model(graph, packed, rank, opset, None if path is None else Path(path))


def _check_settings(rank: int | None, opset: int) -> None:
    try:
        import onnx
    except ImportError:
        raise MissingExtra("onnx", "onnx", "exporting to ONNX") from None
    newest = onnx.defs.onnx_opset_version()
    check_integer("opset", opset, MIN_OPSET, newest)
    if rank is not None:
        check_integer("rank", rank, 0, 8)


def _packed(table: PackedTable | Packable | str | Path) -> PackedTable:
    if isinstance(table, PackedTable):
        return table
    if isinstance(table, str | Path):
        return load(table)
    if isinstance(table, Packable):
        return table.pack()
    raise ArgumentError(
        f"{type(table).__name__} has no packed form: export a table, a packed table, "
        "or the path of a packed file"
    )


def _model(
    graph: OnnxGraph, packed: PackedTable, rank: int | None, opset: int, path: Path | None
) -> ModelProto:
    """Return the model of a graph, and write it to its file."""
    from onnx import TensorProto, helper

    inside = None if rank is None else [f"n{i}" for i in range(rank)]
    given = helper.make_tensor_value_info("ids", TensorProto.INT64, inside)
    found = helper.make_tensor_value_info(
        "rows", TensorProto.FLOAT, None if inside is None else [*inside, packed.dim]
    )
    imports = [helper.make_opsetid("", opset)] + [helper.make_opsetid(MICROSOFT, 1)] * (
        MICROSOFT in graph.domains
    )
    body = helper.make_graph(graph.nodes, "table", [given], [found])
    model = helper.make_model(
        body, opset_imports=imports, producer_name="featherbed", producer_version=__version__
    )
    model.ir_version = helper.find_min_ir_version_for(imports, ignore_unknown=True)
    helper.set_model_props(model, {"rows": str(packed.rows), "dim": str(packed.dim)})
    total = sum(array.nbytes for array in graph.arrays.values())
    if total <= MAX_INLINE:
        model.graph.initializer.extend(_tensor(name, array) for name, array in graph.arrays.items())
    elif path is None:
        raise ArgumentError(
            f"the arrays take {total:,} bytes, a model in memory holds at most {MAX_INLINE:,}: "
            "give a path to write to"
        )
    else:
        _write_arrays(model, graph.arrays, path)
    if path is not None:
        with replacing(path) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(model.SerializeToString())
    return model


def _as_stored(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return a contiguous, little-endian array, as ONNX stores it."""
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _tensor(name: str, array: NDArray[np.generic]) -> TensorProto:
    from onnx import helper

    kind = helper.np_dtype_to_tensor_dtype(array.dtype.newbyteorder("="))
    return helper.make_tensor(name, kind, array.shape, _as_stored(array).tobytes(), raw=True)


def _write_arrays(model: ModelProto, arrays: dict[str, NDArray[np.generic]], path: Path) -> None:
    """Write the arrays to a file beside the model, named after its checksum."""
    from onnx import TensorProto, helper

    large = {name: _as_stored(array) for name, array in arrays.items() if array.nbytes > SMALL}
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
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
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
