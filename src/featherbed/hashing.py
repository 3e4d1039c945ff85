"""Hash functions of ids, identical for numpy and torch, so that packed files hash as in training.

Keys are hashed eight bytes at a time by the same mixer.

The mixer is splitmix64's finalizer (Steele, Lea and Flood 2014, "Fast splittable pseudorandom
number generators") in two's-complement int64, which wraps alike in numpy, torch and inductor. torch
shifts int64 arithmetically, hence the masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

LONGEST = 64  # bytes; a longer key is hashed by its digest
_KEYS = 1 << 16  # keys hashed at once
_ALL = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


def _signed(x: int) -> int:
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >= 1 << 63 else x


def hash_ids(
    ids: Any, seed: int, buckets: int
) -> Any:  # int64 [...] -> int64 [...] in [0, buckets)
    """Map ids to ``buckets`` with the hash function number ``seed``.

    >>> import numpy as np
    >>> hash_ids(np.arange(4), seed=0, buckets=10).tolist()
    [7, 7, 2, 3]
    """
    return mixed(ids + _signed((seed + 1) * _GOLDEN)) % buckets


def mixed(x: Any) -> Any:  # int64 [...] -> int64 [...] from 0
    """Return 63-bit pseudorandom numbers, a function of ``x``.

    >>> import numpy as np
    >>> mixed(np.array([1, 2])).tolist()
    [6238072747940578789, 6616413024727798922]
    """
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX2
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return x & ((1 << 63) - 1)


def hash_codes(
    ids: Any, *, seed: int, hashes: int, buckets: int
) -> list[Any]:  # int64 [...] -> hashes x int64 [...]
    """Return the ``hashes`` bucket numbers of every id, one array for each hash function.

    >>> import numpy as np
    >>> [codes.tolist() for codes in hash_codes(np.array([7, 8]), seed=0, hashes=2, buckets=100)]
    [[87, 14], [4, 9]]
    """
    return [hash_ids(ids, seed * 1_000_003 + j, buckets) for j in range(hashes)]


def hash_key(key: bytes, seed: int) -> int:
    """Return the hash of one key, 63 bits.

    x = (seed + 1 + 2^32 n) golden, then x = mix(x ^ word) for every eight of the n bytes.

    >>> hash_key(b"cat", 0)
    995110643789793906
    """
    if len(key) > LONGEST:
        key = blake2b(key).digest()
    x = (seed + 1 + (len(key) << 32)) * _GOLDEN & _ALL
    for at in range(0, len(key) or 1, 8):
        x ^= int.from_bytes(key[at : at + 8], "little")
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _ALL
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _ALL
        x = (x ^ x >> 31) & _ALL >> 1
    return x


def hash_keys(
    text: NDArray[np.uint8], ends: NDArray[np.integer], seed: int
) -> NDArray[np.int64]:  # [N]
    """Return the hash of every key, given as concatenated text and the end of each.

    >>> found = hash_keys(np.frombuffer(b"thecat", np.uint8), np.array([3, 6]), 0)
    >>> found.tolist() == [hash_key(b"the", 0), hash_key(b"cat", 0)]
    True
    """
    found = np.empty(len(ends), dtype=np.int64)
    for begin, words, lengths in _key_words(text, ends):
        salt = (seed + 1 + (lengths << 32)) * np.int64(_signed(_GOLDEN))
        state = mixed(salt ^ words[:, 0])
        for place in range(1, words.shape[1]):
            longer = np.flatnonzero(lengths > 8 * place)
            state[longer] = mixed(state[longer] ^ words[longer, place])
        found[begin : begin + len(words)] = state
    return found


def _key_words(
    text: NDArray[np.uint8], ends: NDArray[np.integer]
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield blocks of keys: the number of the first, their bytes as words [n, m], their lengths."""
    for begin in range(0, len(ends), _KEYS):
        stops = ends[begin : begin + _KEYS].astype(np.int64)
        start = int(ends[begin - 1]) if begin else 0
        lengths, part = np.diff(stops, prepend=start), text[start : int(stops[-1])]
        if int(lengths.max()) > LONGEST:
            keys = [key.tobytes() for key in np.split(part, stops[:-1] - start)]
            short = [key if len(key) <= LONGEST else blake2b(key).digest() for key in keys]
            part = np.frombuffer(b"".join(short), dtype=np.uint8)
            lengths = np.minimum(lengths, LONGEST)
        width = max(8, -(-int(lengths.max()) // 8) * 8)
        padded = np.zeros((len(lengths), width), dtype=np.uint8)
        padded[np.arange(width) < lengths[:, None]] = part
        yield begin, padded.view("<i8"), lengths
