"""Files of arrays: .npy, .npz, safetensors and torch checkpoints, memory-mapped."""

from __future__ import annotations

import json
import math
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from featherbed.errors import DataError, MissingExtra
from featherbed.io.vectors.reading import (
    BLOCK,
    BFloat16Matrix,
    Parts,
    StoredArray,
    choose,
    row_names,
    spooled,
)

KEY_NAMES = ("words", "keys", "vocab", "tokens")  # members of a .npz that name the rows


def _npy(path: Path, stream: Callable[[], IO[bytes]], start: int | None, size: int) -> StoredArray:
    """Return the .npy array of ``size`` bytes at ``start`` of a file (None: compressed in it)."""
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    with stream() as file:
        try:
            shape, fortran, dtype = readers[np.lib.format.read_magic(file)](file)
        except (ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
            raise DataError(
                f"{path.name} does not hold a valid .npy array: {str(error)[:200]}"
            ) from None
        begin, order = file.tell(), "F" if fortran else "C"
    if begin + (needed := math.prod(shape) * dtype.itemsize) > size:
        raise DataError(
            f"{path.name} is truncated: {needed:,} bytes of numbers expected, "
            f"{size - begin:,} found; download it again"
        )

    def map_array() -> NDArray[Any]:
        """Map the array in the file, or in a temporary file if it is compressed."""
        if start is not None:
            offset = start + begin
            return np.memmap(path, dtype, "r", offset, shape, order)  # type: ignore[call-overload, no-any-return]
        with stream() as file:
            file.read(begin)
            return spooled(iter(partial(file.read, BLOCK), b""), dtype, shape, order)

    return StoredArray(shape, dtype.name, map_array)


def read_npy(path: Path, _: str | None) -> Parts:
    """Map a .npy file."""
    array = _npy(path, lambda: path.open("rb"), 0, path.stat().st_size)
    found, name = choose(path, {"": array}, None)
    return found.open(), None, name


def read_npz(path: Path, array: str | None) -> Parts:
    """Map a member of a .npz archive, in place if it is uncompressed; one of strings gives keys."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            arrays = {}
            for info in (info for info in archive.infolist() if info.filename.endswith(".npy")):
                file.seek(info.header_offset + 26)  # after it, the lengths of name and extra field
                start = info.header_offset + 30 + sum(np.frombuffer(file.read(4), "<u2").tolist())
                stored = info.compress_type == zipfile.ZIP_STORED
                left = path.stat().st_size - start
                size = min(info.file_size, left) if stored else info.file_size
                found = _npy(path, partial(archive.open, info), start if stored else None, size)
                arrays[info.filename.removesuffix(".npy")] = found
            named = [name for name in KEY_NAMES if name in arrays and arrays[name].names_rows()]
            texts = [arrays.pop(name) for name in named]
            found, name = choose(path, arrays, array)
            matrix, keys = found.open(), texts[0].open().tolist() if texts else None
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as error:
        raise DataError(
            f"{path.name} is not a complete .npz archive: {str(error)[:200]}; "
            "download or save it again"
        ) from None
    if isinstance(keys, str | bytes):
        keys = (keys if isinstance(keys, bytes) else keys.encode()).removesuffix(b"\n").split(b"\n")
    return matrix, None if keys is None else row_names(path, keys, len(matrix)), name


def read_safetensors(path: Path, array: str | None) -> Parts:
    """Map an array of a safetensors file; the safetensors library checks the header."""
    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path.name} is not a valid safetensors file: {str(error)[:200]}"
        ) from None
    if "featherbed" in (header.pop("__metadata__", None) or {}):
        raise DataError(
            f"{path.name} is a featherbed file, which is compressed already: "
            "open it with fb.load, or give the original matrix"
        )
    kinds = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}
    arrays = {}
    for name, entry in header.items():
        kind = re.sub(r"^(F|BF|I|U)(?=\d+$)", lambda m: kinds[m[0]], entry["dtype"])
        dtype, shape = kind.replace("bfloat", "uint"), tuple(entry["shape"])
        offset = start + entry["data_offsets"][0]
        arrays[name] = StoredArray(shape, kind, partial(np.memmap, path, dtype, "r", offset, shape))
    found, name = choose(path, arrays, array)
    matrix = found.open()
    return BFloat16Matrix(matrix) if found.dtype == "bfloat16" else matrix, None, name


def read_torch(path: Path, array: str | None) -> Parts:
    """Map a tensor of a torch checkpoint without running code; one that is not a zip file is read."""
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", "train", f"reading {path.name}") from None
    try:
        loaded = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path.name} holds more than weights, or is damaged; "
            f"torch.save(model.state_dict(), path) saves only those: {str(error)[:200]}"
        ) from None
    except Exception as error:  # a damaged file makes torch raise nearly anything
        raise DataError(
            f"{path.name} is not a complete torch checkpoint, download or save it again: "
            f"{str(error)[:200]}"
        ) from None
    arrays = _tensors(torch, loaded)
    found, name = choose(path, arrays, array)
    matrix = found.open()
    bits = found.dtype == "bfloat16"
    return BFloat16Matrix(matrix.view(np.uint16)) if bits else matrix, None, name


def _tensors(torch: Any, loaded: Any) -> dict[str, StoredArray]:
    """Return all tensors in nested dictionaries by their names, joined by dots."""
    arrays: dict[str, StoredArray] = {}
    waiting, visited = [("", loaded)], set()
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, torch.Tensor):
            plain = value.layout == torch.strided and value.device.type == "cpu"
            kind = str(value.dtype).removeprefix("torch.")
            kind = kind if plain else f"{value.layout} on {value.device}"
            bits = value.detach().view(torch.int16) if kind == "bfloat16" else value.detach()
            arrays[name] = StoredArray(tuple(value.shape), kind, bits.numpy)
        elif isinstance(value, dict) and id(value) not in visited:
            visited.add(id(value))
            items = reversed(value.items())
            waiting += [(f"{name}.{key}".removeprefix("."), inner) for key, inner in items]
    return arrays
