"""The file of a graph: a safetensors container of two memory-mapped arrays, checked on opening."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import FormatError
from featherbed.files import replacing
from featherbed.graphs.checks import MOST_OBJECTS
from featherbed.graphs.lists import Lists, blocks, slices
from featherbed.packed.file import ENTRY, array_of, metadata_of, open_file

ABOUT = {"graph": 1}  # what the file is, and the version of its form
KINDS = {4: "U32", 8: "U64"}
NAMES = ("starts", "neighbours")


def write(lists: Lists, path: Path) -> None:
    """Write neighbor lists to a temporary file, then rename it to ``path``."""
    entries: dict[str, Any] = {"__metadata__": {"format": "featherbed", ENTRY: json.dumps(ABOUT)}}
    offset = 0
    for name, array in zip(NAMES, lists, strict=True):
        end = offset + array.nbytes
        entries[name] = {
            "dtype": KINDS[array.itemsize],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in lists:
            for here in slices(len(array)):
                file.write(array[here].astype(array.dtype.newbyteorder("<")).tobytes())


def read(path: Path) -> Lists:
    """Return the neighbour lists of a file, memory-mapped; raise FormatError where they are none."""
    header, start, mapped = open_file(path)
    if metadata_of(header) != ABOUT:
        raise FormatError(
            f"{path.name} holds no graph that this featherbed reads: graphs are written by "
            "graph.save(path)"
        )
    if set(header) - {"__metadata__"} != set(NAMES):
        raise FormatError(
            f"{path.name} must hold the arrays starts and neighbours, and nothing else"
        )
    kind, shapes = header["starts"]["dtype"], [header[name]["shape"] for name in NAMES]
    if (
        kind not in KINDS.values()
        or any(len(shape) != 1 for shape in shapes)
        or not 2 <= shapes[0][0] <= MOST_OBJECTS + 1
    ):
        found = f"{kind} of shapes {shapes}"[:100]
        raise FormatError(
            f"{path.name}: starts [V + 1] and neighbours [arcs] must be U32 or U64 with V from 1; "
            f"found {found}"
        )
    arrays = (
        array_of(mapped, header, start, name, kind, tuple(shape))
        for name, shape in zip(NAMES, shapes, strict=True)
    )
    starts, neighbours = (array.view(array.dtype.str.replace("u", "i")) for array in arrays)
    problem = _problem(starts, neighbours)
    if problem:
        raise FormatError(f"{path.name} is broken: {problem}")
    return starts, neighbours


def _problem(starts: NDArray[Any], neighbours: NDArray[Any]) -> str | None:
    """Return why two arrays are no neighbor lists, or None."""
    objects = len(starts) - 1
    if starts[0] != 0 or starts[-1] != len(neighbours):
        span = f"starts go from {starts[0]} to {starts[-1]}"
        return f"{span}, not from 0 to the number of neighbours, {len(neighbours)}"
    falling = np.flatnonzero(starts[1:] < starts[:-1])
    if len(falling):
        return f"object {falling[0]} has a negative number of neighbours, starts must not fall"
    last = -1
    for i, j in blocks((starts, neighbours)):
        wrong = (j < 0) | (j >= objects) | (i == j)
        if wrong.any():
            at = int(wrong.argmax())
            wrong = f"object {i[at]} has the neighbour {j[at]}"
            return f"{wrong}: neighbours are others of the {objects} objects"
        keys = i * objects + j
        wrong = np.diff(keys, prepend=last) <= 0
        if wrong.any():
            return f"the neighbours of object {i[wrong.argmax()]} are not sorted, each once"
        last = int(keys[-1])
    return None
