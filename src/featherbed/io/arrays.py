"""Files of named arrays: safetensors containers, written atomically and memory-mapped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import FormatError
from featherbed.packed.file import DTYPES, ENTRY, NAMES, array_of, metadata_of, open_file
from featherbed.packed.writing import replacing

VERSION = 1
BLOCK = 1 << 22  # elements written at once


def write_arrays(path: Path, kind: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays to a file, atomically; ``kind`` names the content.

    >>> path = getfixture("tmp_path") / "seen.safetensors"
    >>> write_arrays(path, "seen", {"items": np.array([4, 7], dtype=np.uint32)})
    >>> read_arrays(path, "seen", {"items": ("U32",)})["items"].tolist()
    [4, 7]
    """
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    entries: dict[str, Any] = {
        "__metadata__": {"format": "featherbed", ENTRY: json.dumps({kind: VERSION})}
    }
    offset = 0
    for name, array in ordered:
        end = offset + array.nbytes
        entries[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            flat = np.ascontiguousarray(array).reshape(-1)
            for begin in range(0, len(flat), BLOCK):
                part = flat[begin : begin + BLOCK]
                file.write(part.astype(part.dtype.newbyteorder("<"), copy=False).tobytes())


def read_arrays(
    path: Path, kind: str, wanted: Mapping[str, tuple[str, ...]]
) -> dict[str, NDArray[Any]]:
    """Return the flat arrays of a file, memory-mapped; ``wanted``: name -> accepted types."""
    header, start, mapped = open_file(path)
    if metadata_of(header) != {kind: VERSION}:
        raise FormatError(
            f"{path.name} is not what this featherbed reads as {kind!r}, version {VERSION}"
        )
    if set(header) - {"__metadata__"} != set(wanted):
        raise FormatError(
            f"{path.name} must hold the arrays {' and '.join(wanted)}, and nothing else"
        )
    found = {}
    for name, kinds in wanted.items():
        stored, shape = header[name]["dtype"], header[name]["shape"]
        if stored not in kinds or stored not in DTYPES or len(shape) != 1:
            actual = f"{stored} {shape}"[:100]
            raise FormatError(
                f"{path.name}: the array {name!r} must be flat, of {' or '.join(kinds)}; "
                f"it is {actual}"
            )
        found[name] = array_of(mapped, header, start, name, stored, (int(shape[0]),))
    return found
