"""Hash functions of ids, identical for numpy and torch, so that packed files hash as in training.

The mixer is splitmix64's finalizer (Steele, Lea and Flood 2014, "Fast splittable pseudorandom
number generators") in two's-complement int64, which wraps alike in numpy, torch and inductor. torch
shifts int64 arithmetically, hence the masks.
"""

from __future__ import annotations

from typing import Any

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
