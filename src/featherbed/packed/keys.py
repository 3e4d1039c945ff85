"""Keys (words, item names): a memory-mapped index from text to id.

Four arrays: the UTF-8 text of all keys in the order of ids, the end of each, the CRC-32 of every
key in rising order, and the ids they belong to. A look-up is a binary search among the checksums
and a comparison of text.

Millions of keys never become millions of Python strings: ``Keys.of`` takes the text of a sequence
with a ``utf8`` method as it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, FormatError, UnknownKeyError
from featherbed.packed.band import Ids


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
        text, ends = keys.utf8() if isinstance(keys, EncodedKeys) else _joined(keys)
        checksums = crc32(text, ends)
        order = np.argsort(checksums, kind="stable")
        size = int(ends[-1]) if len(ends) else 0
        index = cls(
            text,
            ends.astype(np.uint32 if size < 2**32 else np.uint64),
            checksums[order],
            order.astype(np.uint32 if len(ends) < 2**32 else np.uint64),
        )
        index._refuse_duplicates()
        return index

    def utf8(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the text of all keys and the end of each."""
        return self.text, self.ends.astype(np.int64)

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
        """Return the ids of keys; raise UnknownKeyError for the first unknown one."""
        raw = [_encode(key) for key in keys]
        wanted = np.fromiter((zlib.crc32(key) for key in raw), dtype=np.uint32, count=len(raw))
        first = np.searchsorted(self.checksums, wanted, side="left")
        found = np.empty(len(raw), dtype=np.int64)
        for i, (key, at) in enumerate(zip(raw, first.tolist(), strict=True)):
            found[i] = self._match(key, int(wanted[i]), at)
        return found

    def has(self, key: str) -> bool:
        """Return whether a row has the key."""
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

    def _refuse_duplicates(self) -> None:
        """Refuse duplicate keys; only keys of equal checksums are compared."""
        same = np.flatnonzero(self.checksums[1:] == self.checksums[:-1])
        duplicates, before, run = list[int](), -1, set[bytes]()
        for at in same.tolist():
            run = run if int(self.checksums[at]) == before else {self.raw(int(self.order[at]))}
            before, id_ = int(self.checksums[at]), int(self.order[at + 1])
            key = self.raw(id_)
            if key in run:
                duplicates.append(id_)
            run.add(key)
        if duplicates:
            raise ArgumentError(
                f"key {self[min(duplicates)]!r} is given to more than one row: keys must differ"
            )

    def check(self) -> None:
        """Check all keys: text in order, every row indexed once by its own checksum, no duplicates."""
        rising = bool(np.all(self.ends[1:] >= self.ends[:-1]))
        if len(self.ends) and (not rising or int(self.ends[-1]) != len(self.text)):
            raise FormatError("key ends must rise and finish at the end of the text")
        starts = _starts(self.ends)
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
                raise FormatError(f"key {key!r} is given to more than one row")
            run.add(key)
            before = checksum
        heads = self.text[starts[starts < self.ends.astype(np.int64)]]
        if np.any((heads & 0xC0) == 0x80):
            raise FormatError("a key begins inside a character")
        try:
            blob.decode()
        except UnicodeDecodeError:
            raise FormatError("the text of the keys is not UTF-8") from None


@runtime_checkable
class EncodedKeys(Protocol):
    """Keys that are stored in arrays."""

    def utf8(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the concatenated UTF-8 text of all keys and the end of each."""
        ...


class IntegerKeys(Sequence[str]):
    """Integers as keys, in decimal: eight bytes a key.

    >>> keys = IntegerKeys(np.array([7, -12, 0]))
    >>> keys[1], list(keys), Keys.of(keys).find(["0"]).tolist()
    ('-12', ['7', '-12', '0'], [2])
    """

    def __init__(self, numbers: NDArray[np.integer]) -> None:
        given = np.asarray(numbers)
        large = given.dtype == np.uint64 and given.size > 0 and int(given.max()) >= 2**63
        if large or (given.size and given.dtype.kind not in "iu"):
            kind = "numbers of 2^63 and more" if large else f"{given.dtype} values"
            raise ArgumentError(f"{kind} cannot be integer keys: use TextKeys.of(map(str, keys))")
        self.numbers = given.astype(np.int64, copy=False)

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> IntegerKeys: ...
    def __getitem__(self, at: int | slice) -> str | IntegerKeys:
        found = self.numbers[at]
        return IntegerKeys(found) if isinstance(found, np.ndarray) else str(int(found))

    def __iter__(self) -> Iterator[str]:
        for begin in range(0, len(self), _BLOCK):
            yield from map(str, self.numbers[begin : begin + _BLOCK].tolist())

    def take(self, index: NDArray[np.integer]) -> IntegerKeys:
        """Return the keys at ``index``."""
        return IntegerKeys(self.numbers[index])

    def utf8(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the text of all keys and the end of each."""
        texts, lengths = [np.zeros(0, dtype=np.uint8)], [np.zeros(0, dtype=np.int64)]
        for begin in range(0, len(self), _BLOCK):
            part = self.numbers[begin : begin + _BLOCK].astype("S20")
            digits = part.view(np.uint8).reshape(len(part), 20)
            texts.append(digits[digits != 0])
            lengths.append(np.count_nonzero(digits, axis=1))
        return np.concatenate(texts), np.cumsum(np.concatenate(lengths))


class TextKeys(Sequence[str]):
    """Strings as keys: their UTF-8 bytes in one array, and the end of each.

    >>> keys = TextKeys.of(["b", "à"])
    >>> keys[1], list(keys), list(keys.take(np.array([1, 0])))
    ('à', ['b', 'à'], ['à', 'b'])
    """

    def __init__(self, text: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.text, self.ends = text, ends

    @classmethod
    def of(cls, keys: Iterable[str]) -> TextKeys:
        """Store strings."""
        return cls(*_joined(keys))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> TextKeys: ...
    def __getitem__(self, at: int | slice) -> str | TextKeys:
        if isinstance(at, slice):
            return self.take(np.arange(len(self))[at])
        at = range(len(self))[at]
        start = int(self.ends[at - 1]) if at else 0
        return self.text[start : int(self.ends[at])].tobytes().decode()

    def take(self, index: NDArray[np.integer]) -> TextKeys:
        """Return the keys at ``index``."""
        mask = index.dtype == np.bool_
        index = np.flatnonzero(index) if mask else np.where(index < 0, index + len(self), index)
        ends = self.ends[index].astype(np.int64) - self._starts_at(index)
        np.cumsum(ends, out=ends)
        text = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
        done = 0
        for begin in range(0, len(index), _TAKEN):
            here = ends[begin : begin + _TAKEN]
            lengths = np.diff(here, prepend=done)
            shift = self._starts_at(index[begin : begin + _TAKEN]) - (here - lengths)
            end = int(here[-1])
            np.take(self.text, np.repeat(shift, lengths) + np.arange(done, end), out=text[done:end])
            done = end
        return TextKeys(text, ends)

    def _starts_at(self, index: NDArray[np.integer]) -> NDArray[np.int64]:
        starts: NDArray[np.int64] = self.ends[index - 1]
        starts[index == 0] = 0
        return starts

    def utf8(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the text of all keys and the end of each."""
        return self.text, self.ends


_BLOCK = 1 << 18
_TAKEN = 1 << 15  # keys copied at a time
_LONG = 64  # bytes; the checksums of longer keys, which are rare, are computed one by one


def crc32(text: NDArray[np.uint8], ends: NDArray[np.integer]) -> NDArray[np.uint32]:
    """Return the CRC-32 of every key: byte by byte, all keys of one length at once.

    >>> found = crc32(np.frombuffer(b"thecat", np.uint8), np.array([3, 6]))
    >>> found.tolist() == [zlib.crc32(b"the"), zlib.crc32(b"cat")]
    True
    """
    single = np.array([zlib.crc32(bytes([byte])) for byte in range(256)], dtype=np.uint32)
    table = single ^ single[0]  # CRC-32 is affine over GF(2): this is its table of remainders
    found = np.empty(len(ends), dtype=np.uint32)
    starts = _starts(ends)
    for begin in range(0, len(ends), _BLOCK):
        first = starts[begin : begin + _BLOCK]
        lengths = ends[begin : begin + _BLOCK].astype(np.int64) - first
        for length in np.unique(lengths).tolist():
            rows = np.flatnonzero(lengths == length)
            if length > _LONG:
                found[begin + rows] = [
                    zlib.crc32(text[at : at + length].tobytes()) for at in first[rows].tolist()
                ]
                continue
            state = np.full(len(rows), 0xFFFFFFFF, dtype=np.uint32)
            for place in range(length):
                state = table[(state ^ text[first[rows] + place]) & 0xFF] ^ (state >> 8)
            found[begin + rows] = ~state
    return found


def _starts(ends: NDArray[np.integer]) -> NDArray[np.int64]:
    starts = np.zeros(len(ends), dtype=np.int64)
    starts[1:] = ends[:-1]
    return starts


def _joined(keys: Iterable[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    raw = [_encode(key) for key in keys]
    ends = np.cumsum(np.fromiter(map(len, raw), dtype=np.int64, count=len(raw)))
    return np.frombuffer(b"".join(raw), dtype=np.uint8), ends


def _encode(key: str) -> bytes:
    if not isinstance(key, str):
        raise ArgumentError(
            f"keys are strings, got {type(key).__name__} {key!r}: convert with str()"
        )
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise ArgumentError(
            f"key {key!r} cannot be written as UTF-8: it holds half a surrogate pair"
        ) from None
