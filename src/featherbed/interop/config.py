"""Checks of config.json before a model is created from it: packed tables and sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from featherbed.errors import DataError, FeatherbedError, FormatError
from featherbed.packed.schema import MOST_DIM, MOST_ROWS, FieldReader

MAX_CONFIG = 1 << 24  # bytes of config.json
MAX_BYTES = 1 << 44  # bytes of a packed table
MAX_LABELS = 1 << 20
MAX_LAYERS = 1000  # unless the checkpoint has more tensors


def first_line(error: BaseException) -> str:
    """Return type and message of another library's exception in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or ['no message'])[0][:300]}"


def check_config(path: Path) -> None:
    """Refuse a config.json that is no object, or whose model would exceed memory or time."""
    file = path / "config.json"
    for member in path.iterdir():
        if member.exists() and not (member.is_file() or member.is_dir()):
            raise DataError(f"{member} is a pipe or a device: remove it, or fetch the folder again")
    try:
        size = file.stat().st_size
        if size > MAX_CONFIG:
            raise DataError(f"{file} has {size:,} bytes, the maximum is {MAX_CONFIG:,}")
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): fetch it again") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, FeatherbedError):
            raise
        raise DataError(f"{file} is not JSON: {first_line(error)[:100]}") from None
    if not isinstance(config, dict):
        raise DataError(f"{file} must hold an object, it holds {type(config).__name__}")
    most = max(MAX_LAYERS, sum(1 for _ in stored_names(path)))
    for name, value in numbers_in(config):
        bound = MAX_LABELS if name == "num_labels" else most if "layer" in name else math.inf
        if value > bound:
            raise DataError(f"{file}: {name}={str(value)[:40]}: at most {bound:,} here")


def numbers_in(config: dict[str, Any]) -> Iterable[tuple[str, float]]:
    """Yield names and values of the numbers in a config, including nested ones."""
    remaining: list[Any] = [config]
    while remaining:
        for name, value in remaining.pop().items():
            if isinstance(value, dict):
                remaining.append(value)
            elif isinstance(value, int | float):
                yield name, value


def stored_names(path: Path) -> Iterable[str]:
    """Yield the names of the tensors in a checkpoint, after checking its files."""
    for file in sorted(path.glob("model*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as opened:
                yield from opened.keys()
        except (SafetensorError, OSError) as error:
            raise DataError(
                f"{file} is no safetensors file, or was cut short ({first_line(error)[:100]}): "
                "fetch it again"
            ) from None


def check_tables(given: Any) -> dict[str, dict[str, Any]]:
    """Return the packed tables described in config.json after checking every field.

    >>> check_tables({"wte": {"rows": 9}})
    Traceback (most recent call last):
    featherbed.errors.FormatError: quantization_config.tables.wte lacks the field 'dim'
    """
    if not isinstance(given, dict):
        raise FormatError(f"quantization_config.tables must be an object, got {str(given)[:40]}")
    found: dict[str, dict[str, Any]] = {}
    for name, fields in given.items():
        reader = FieldReader(fields, f"quantization_config.tables.{str(name)[:100]}")
        rows = reader.integer("rows", 1, MOST_ROWS)
        found[name] = {
            "rows": rows,
            "dim": reader.integer("dim", 1, MOST_DIM),
            "padding": None
            if reader.raw("padding") is None
            else reader.integer("padding", 0, rows - 1),
            "scale": _check_scale(reader.where, reader.raw("scale")),
            "bytes": reader.integer("bytes", 8, MAX_BYTES),
            "twins": _check_twins(reader),
            "heads": _check_heads(reader),
        }
    return found


def _check_twins(reader: FieldReader) -> dict[str, float]:
    """Return names and scales of the embeddings that share a table."""
    twins = reader.raw("twins")
    if not isinstance(twins, dict):
        raise FormatError(f"{reader.where}.twins must be an object, got {str(twins)[:40]}")
    return {name: _check_scale(f"{reader.where}.twins", one) for name, one in twins.items()}


def _check_heads(reader: FieldReader) -> list[str]:
    """Return the names of the heads tied to a table."""
    heads = reader.raw("heads")
    if not isinstance(heads, list) or not all(isinstance(one, str) for one in heads):
        raise FormatError(f"{reader.where}.heads must be a list of names, got {str(heads)[:40]}")
    return heads


def _check_scale(where: str, value: Any) -> float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise FormatError(f"{where}.scale must be a finite number, got {str(value)[:40]}")
    return float(value)


def check_stored(tables: dict[str, dict[str, Any]], files: Any) -> None:
    """Refuse tables whose bytes are not in the checkpoint, before memory is allocated."""
    if not isinstance(files, list | tuple):
        return
    sizes: dict[str, list[int]] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                names = [name for name in opened.keys() if name.endswith("packed")]  # noqa: SIM118
                parts = {name: opened.get_slice(name) for name in names}
                sizes |= {n: list(p.get_shape()) for n, p in parts.items() if p.get_dtype() == "U8"}
        except (SafetensorError, OSError) as error:
            raise FormatError(f"{Path(file).name}: {first_line(error)}") from None
    for name, table in tables.items():
        found = [size for key, size in sizes.items() if f"{name}.packed".endswith(key)]
        found += [size for key, size in sizes.items() if key.endswith(f"{name}.packed")]
        if [table["bytes"]] not in found:
            raise FormatError(
                f"the checkpoint has no tensor {name}.packed of {table['bytes']:,} bytes, "
                "which config.json describes"
            )
