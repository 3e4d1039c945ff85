"""Bit fields in little-endian streams of 32-bit words: codes stored without padding.

Field f of record r starts at bit ``r * record_bits + sum(widths[:f])``; bit b of the stream is bit
``b % 32`` of word ``b // 32``. Streams end with two spare words, so that the eight bytes around any
field may be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError

Words = NDArray[np.uint32]

_CHUNK = 1 << 24  # bits unpacked at once, a byte each


def width(choices: int) -> int:
    """Return the bits of an index below ``choices``: ceil(log2(choices)).

    >>> [width(n) for n in (1, 2, 3, 256, 257)]
    [0, 1, 2, 8, 9]
    """
    return max(0, int(choices) - 1).bit_length()


def word_count(records: int, record_bits: int) -> int:
    """Return the number of words of a stream of ``records``, the spare ones included."""
    return -(-records * record_bits // 32) + 2


def pack(fields: NDArray[np.uint32], widths: list[int]) -> Words:  # [n, f] -> words
    """Pack records of bit fields, row by row.

    >>> pack(np.array([[1, 2], [3, 0]], dtype=np.uint32), [2, 3])
    array([105,   0,   0], dtype=uint32)
    """
    record_bits = sum(widths)
    stream = np.zeros(word_count(len(fields), record_bits), dtype="<u4")
    as_bytes = stream.view(np.uint8)
    # a multiple of 32 keeps every chunk on a word boundary
    step = max(32, _CHUNK // max(1, record_bits) // 32 * 32)
    for start in range(0, len(fields), step):
        chunk = fields[start : start + step]
        bits = np.empty((len(chunk), record_bits), dtype=np.uint8)
        column = 0
        for field, bit_count in enumerate(widths):
            if bit_count < 32 and len(chunk) and int(chunk[:, field].max()) >> bit_count:
                raise ArgumentError(
                    f"value {int(chunk[:, field].max())} does not fit into {bit_count} bits"
                )
            for b in range(bit_count):
                bits[:, column] = (chunk[:, field] >> np.uint32(b)) & 1
                column += 1
        packed = np.packbits(bits.reshape(-1), bitorder="little")
        begin = start * record_bits // 8
        as_bytes[begin : begin + len(packed)] = packed
    return stream


def unpack(stream: Words, start: NDArray[np.int64], bit_count: int) -> NDArray[np.uint32]:
    """Read the fields of ``bit_count`` bits (at most 32) that start at bit positions [...].

    >>> unpack(np.array([105, 0], dtype=np.uint32), np.array([0, 2, 5, 7]), 2).tolist()
    [1, 2, 3, 0]
    """
    if bit_count == 0:
        return np.zeros(start.shape, dtype=np.uint32)
    word = start >> 5
    pair = stream[word].astype(np.uint64) | (stream[word + 1].astype(np.uint64) << np.uint64(32))
    mask = np.uint64((1 << bit_count) - 1)
    fields: NDArray[np.uint32] = ((pair >> (start & 31).astype(np.uint64)) & mask).astype(np.uint32)
    return fields


def field_reader(stream: Words) -> Callable[[int, int], int]:
    """Return a function that reads ``count`` bits from bit ``start`` on as one integer.

    It is for records read one by one: no arrays are made.

    >>> read = field_reader(np.array([105, 0, 0], dtype=np.uint32))
    >>> read(2, 3), fields(read(0, 5), 2, (0, 2))
    (2, [1, 2])
    """
    data = np.ascontiguousarray(stream).view(np.uint8).data

    def read(start: int, count: int) -> int:
        taken = int.from_bytes(data[start >> 3 : (start + count + 7) >> 3], "little")
        return (taken >> (start & 7)) & ((1 << count) - 1)

    return read


def fields(record: int, bit_count: int, starts: Iterable[int]) -> list[int]:
    """Return the fields of ``bit_count`` bits that start at the given bits of a record."""
    mask = (1 << bit_count) - 1
    return [(record >> start) & mask for start in starts]
