"""Keys (words, item names): a memory-mapped index from text to id, no dictionary in memory.

Four arrays: the UTF-8 text of all keys in id order, where each ends, the CRC-32 of every key in rising order, and the id
each of those belongs to. A look-up is a binary search among the checksums and a comparison of text.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, FormatError, UnknownKeyError
from featherbed.packed.codes import Ids


@dataclass(eq=False)
class Keys:
    """The key of every row.

    >>> keys = Keys.of(["the", "cat"])
    >>> keys.find(["cat"]).tolist(), keys[0], len(keys)
    ([1], 'the', 2)
    """

    text: NDArray[np.uint8]
    ends: NDArray[np.unsignedinteger]
    checksums: NDArray[np.uint32]
    order: NDArray[np.unsignedinteger]

    @classmethod
    def of(cls, keys: Iterable[str]) -> Keys:
        """Index ``keys``, one for each row, all different."""
        raw = [_encode(key) for key in keys]
        if len(set(raw)) != len(raw):
            seen: set[bytes] = set()
            double = next(key for key in raw if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ArgumentError(f"key {double.decode()!r} stands for more than one row: keys must differ")
        checksums = np.fromiter((zlib.crc32(key) for key in raw), dtype=np.uint32, count=len(raw))
        order = np.argsort(checksums, kind="stable")
        ends = np.cumsum(np.fromiter(map(len, raw), dtype=np.int64, count=len(raw)))
        size = int(ends[-1]) if len(ends) else 0
        return cls(
            np.frombuffer(b"".join(raw), dtype=np.uint8),
            ends.astype(np.uint32 if size < 2**32 else np.uint64),
            checksums[order],
            order.astype(np.uint32 if len(raw) < 2**32 else np.uint64),
        )

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The stored arrays by name."""
        return {
            "keys.text": self.text,
            "keys.ends": self.ends,
            "keys.checksums": self.checksums,
            "keys.order": self.order,
        }

    def __len__(self) -> int:
        return len(self.ends)

    def raw(self, id_: int) -> bytes:
        """Return the UTF-8 bytes of a row's key."""
        start, end = (int(self.ends[id_ - 1]) if id_ else 0), int(self.ends[id_])
        if not start <= end <= len(self.text):
            raise FormatError(f"the key of row {id_} lies outside the stored text")
        return self.text[start:end].tobytes()

    def __getitem__(self, id_: int) -> str:
        try:
            return self.raw(int(id_)).decode()
        except UnicodeDecodeError:
            raise FormatError(f"the key of row {id_} is not UTF-8") from None

    def find(self, keys: Sequence[str]) -> Ids:  # [n] -> [n]
        """Return the ids of keys; the first unknown one is named."""
        raw = [_encode(key) for key in keys]
        wanted = np.fromiter((zlib.crc32(key) for key in raw), dtype=np.uint32, count=len(raw))
        first = np.searchsorted(self.checksums, wanted, side="left")
        found = np.empty(len(raw), dtype=np.int64)
        for i, (key, at) in enumerate(zip(raw, first.tolist(), strict=True)):
            found[i] = self._match(key, int(wanted[i]), at)
        return found

    def has(self, key: str) -> bool:
        """Whether some row has the key."""
        try:
            self.find([key])
        except UnknownKeyError:
            return False
        return True

    def _match(self, key: bytes, checksum: int, at: int) -> int:
        while at < len(self.checksums) and int(self.checksums[at]) == checksum:
            id_ = int(self.order[at])
            if id_ >= len(self.ends):
                raise FormatError(f"the key index names row {id_}; there are {len(self.ends)} rows")
            if self.raw(id_) == key:
                return id_
            at += 1
        raise UnknownKeyError(f"no row has the key {key.decode()!r}")

    def check(self) -> None:
        """Read everything: text in order, every row indexed once under its own checksum, no key twice."""
        if len(self.ends) and (np.any(self.ends[1:] < self.ends[:-1]) or int(self.ends[-1]) != len(self.text)):
            raise FormatError("key ends must rise and finish at the end of the text")
        starts = np.zeros(len(self.ends), dtype=np.int64)
        starts[1:] = self.ends[:-1]
        if np.any(self.checksums[1:] < self.checksums[:-1]):
            raise FormatError("key checksums must rise")
        if not np.array_equal(np.sort(self.order), np.arange(len(self.ends))):
            raise FormatError("the key index must name every row once")
        blob, bounds = self.text.tobytes(), self.ends.tolist()
        before, run = -1, set[bytes]()
        for checksum, id_ in zip(self.checksums.tolist(), self.order.tolist(), strict=True):
            key = blob[int(starts[id_]) : bounds[id_]]
            if zlib.crc32(key) != checksum:
                raise FormatError(f"the key of row {id_} does not match its checksum")
            run = run if checksum == before else set()
            if key in run:
                raise FormatError(f"key {key!r} stands for more than one row")
            run.add(key)
            before = checksum
        heads = self.text[starts[starts < self.ends.astype(np.int64)]]
        if np.any((heads & 0xC0) == 0x80):
            raise FormatError("a key begins inside a character")
        try:
            blob.decode()
        except UnicodeDecodeError:
            raise FormatError("the text of the keys is not UTF-8") from None


def _encode(key: str) -> bytes:
    if not isinstance(key, str):
        raise ArgumentError(f"keys are strings, got {type(key).__name__} {key!r}: convert with str()")
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"key {key!r} cannot be written as UTF-8: it holds half a surrogate pair") from None
