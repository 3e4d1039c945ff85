"""The header of a safetensors file: strict JSON, every entry checked before it is used."""

from __future__ import annotations

import json
from itertools import pairwise
from math import prod
from typing import Any

from featherbed.errors import FormatError

BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8"), 8),
}


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, or raise ValueError.

    Texts that JSON readers treat differently are refused: a name that occurs twice in an object,
    NaN and Infinity, half of a surrogate pair, bytes in another encoding than UTF-8.

    >>> parse_json(b'{"rows": 3}')
    {'rows': 3}
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise ValueError("a name occurs twice in one object")
        return fields

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not JSON")

    text = text.decode() if isinstance(text, bytes) else text
    value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    if "\\ud" in text or "\\uD" in text:  # an escape may stand for half of a surrogate pair
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_header(text: bytes, size: int, name: str) -> dict[str, Any]:
    """Return the header of a file with ``size`` bytes of data; ``name`` is the name of the file.

    Every entry has a known dtype, a shape of integers and two offsets that its bytes fill, and
    the arrays cover the data exactly, each byte once. Anything else is a FormatError.
    """
    if not text.startswith(b"{"):
        raise FormatError(
            f"{name} is not a valid safetensors file: its header begins with no brace"
        )
    try:
        header: dict[str, Any] = parse_json(text)
        _check(header, size)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name} is not a valid safetensors file: {str(error)[:300]}") from None
    return header


def _check(header: Any, size: int) -> None:
    if not isinstance(header, dict):
        raise ValueError(f"its header must be an object, got {type(header).__name__}")
    texts = header.get("__metadata__") or {}
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("the __metadata__ of its header must be an object of strings")
    ranges = sorted(_range(name, entry) for name, entry in header.items() if name != "__metadata__")
    for (_, before), (begin, _) in pairwise([(0, 0), *ranges, (size, size)]):
        if begin != before:
            raise ValueError(
                f"its arrays must follow one another up to the end of the file, {size:,} bytes: "
                f"one ends at byte {str(before)[:40]}, the next begins at {str(begin)[:40]}"
            )


def _range(name: str, entry: Any) -> tuple[int, int]:
    """Return the offsets of one entry of the header."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the array {name[:80]!r} needs dtype, shape and data_offsets, no more")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"the array {name[:80]!r} has an unknown dtype, {str(dtype)[:40]}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        found = f"shape {str(shape)[:60]}, data_offsets {str(offsets)[:60]}"
        raise ValueError(f"the array {name[:80]!r} needs integers of at least 0, got {found}")
    if offsets[1] - offsets[0] != prod(shape) * BITS[dtype] // 8:
        found = f"{dtype} {str(shape)[:60]} from byte {offsets[0]} to {offsets[1]}"
        raise ValueError(f"the array {name[:80]!r} does not fill its bytes: {found[:160]}")
    return offsets[0], offsets[1]


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 1 << 64 for n in numbers)
