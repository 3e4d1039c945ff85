"""Keys (words, item names): a memory-mapped index from text to id.

``Keys`` is what all forms of stored keys have in common. ``PlainKeys`` are four arrays: the UTF-8
text of all keys in the order of ids, the end of each, the CRC-32 of every key in rising order, and
the ids they belong to; a look-up is a binary search among the checksums and a comparison of text.
The other forms take fewer bytes: ``hashed_keys`` and ``coded_keys``.

Millions of keys never become millions of Python strings: ``Keys.of`` takes the text of a sequence
with a ``utf8`` method as it is.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from itertools import chain
from typing import Any, ClassVar, Protocol, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from featherbed.checks import check_choice, check_integer
from featherbed.errors import ArgumentError, FormatError, UnknownKeyError
from featherbed.hashing import hash_key, hash_keys
from featherbed.packed import bits
from featherbed.packed.band import Ids

MOST_KEYS = (1 << 32) - 1  # in all forms but the plain one
MOST_NAMED = 10  # unknown keys that an error names
FEW_KEYS = 1000  # that are not worth compressing
Arrays = dict[str, NDArray[Any]]
Take = Callable[[str, tuple[str, ...], int | None], NDArray[Any]]  # name, dtypes, length -> array
_FORMS = {
    "plain": ("featherbed.packed.keys", "PlainKeys"),
    "text": ("featherbed.packed.coded_keys", "FrontCodedKeys"),
    "integer": ("featherbed.packed.coded_keys", "NumberKeys"),
    "hashed": ("featherbed.packed.hashed_keys", "HashedKeys"),
}
FORMS = tuple(_FORMS)


class Keys(ABC):
    """The keys of the first ``len(keys)`` rows; ``shared`` more rows are for all other keys.

    >>> keys = Keys.of(["the", "cat"])
    >>> keys.find(["cat"]).tolist(), keys.ids(["dog", "the"]).tolist(), keys[0], len(keys)
    ([1], [-1, 0], 'the', 2)
    """

    form: ClassVar[str]
    shared: int = 0
    counts: NDArray[np.unsignedinteger] | None = None  # [rows], of a vocabulary

    @staticmethod
    def of(keys: Iterable[str], form: str | None = None, *, shared: int | None = None) -> Keys:
        """Index ``keys``, one for each row, all different.

        Args:
            form: "plain" (the default), "text" (compressed), "hashed" (no text) or "integer".
            shared: rows after those of ``keys`` that all other keys share; by default as many as
                ``keys`` has if it is a vocabulary or the keys of a table, otherwise none.

        >>> keys = Keys.of(["the", "cat"], "hashed", shared=3)
        >>> keys.ids(["cat", "dog"]).tolist()
        [1, 4]
        """
        own = getattr(keys, "shared", 0)
        shared = check_integer("shared", own if shared is None else shared, 0)
        if isinstance(keys, Keys) and form in (None, keys.form) and shared == own:
            return keys
        index = form_class(check_choice("form", form or "plain", FORMS)).build(keys)
        counts = getattr(keys, "counts", None)
        if counts is not None and len(counts) == len(index) + shared:
            index.counts = counts.astype(np.uint32 if counts.max() < 2**32 else np.uint64)
        index.shared = shared
        return index

    @classmethod
    @abstractmethod
    def build(cls, keys: Iterable[str]) -> Keys:
        """Index keys in this form."""

    @classmethod
    @abstractmethod
    def read(cls, fields: Any, take: Take, count: int) -> Keys:
        """Return the ``count`` keys a file holds: ``fields`` reads the metadata, ``take``
        arrays."""

    @property
    @abstractmethod
    def own_arrays(self) -> Arrays:
        """The stored arrays of this form by name."""

    @property
    def arrays(self) -> Arrays:
        """The stored arrays by name."""
        counts = {} if self.counts is None else {"keys.counts": self.counts}
        return self.own_arrays | counts

    @property
    def fields(self) -> dict[str, Any]:
        """The metadata of this form."""
        return {}

    def describe(self) -> Any:
        """Return the metadata of the keys; True for the form that versions 1 and 2 have."""
        if self.form == "plain" and not self.shared and self.counts is None:
            return True
        own = {"form": self.form, "shared": self.shared or None, "counts": self.counts is not None}
        return own | self.fields

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, id_: int) -> str:
        """Return the key of a row."""

    @abstractmethod
    def check(self) -> None:
        """Check every stored byte; raise FormatError at the first fault."""

    @abstractmethod
    def search_one(self, key: bytes) -> int:
        """Return the id of a key given in UTF-8, or -1."""

    def search(self, keys: list[bytes]) -> Ids:  # [n] -> [n]
        """Return the ids of keys given in UTF-8, -1 for those without a row of their own."""
        return np.fromiter(map(self.search_one, keys), dtype=np.int64, count=len(keys))

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def utf8(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the text of all keys and the end of each."""
        return _joined(self)

    def name(self, id_: int) -> str | None:
        """Return the key of a row; None if no text is stored, or other keys share the row."""
        return self[id_] if self.form != "hashed" and id_ < len(self) else None

    def has(self, key: str) -> bool:
        """Return whether a key has a row of its own."""
        return self.search_one(encode_key(key)) >= 0

    def id_of(self, key: str) -> int:
        """Return the id of a key, that of a shared row for others; -1 if there is none."""
        raw = encode_key(key)
        found = self.search_one(raw)
        if found < 0 and self.shared:
            return len(self) + (self.shared * (hash_key(raw, 0) >> 31) >> 32)
        return found

    def ids(self, keys: Sequence[str]) -> Ids:  # [n] -> [n]
        """Return the ids of keys, those of shared rows for others; -1 if there are none."""
        raw = encode_all(keys)
        found = self.search(raw)
        return share_rows(found, raw, len(self), self.shared)

    def find(self, keys: Sequence[str]) -> Ids:  # [n] -> [n]
        """Return the ids of keys; raise one UnknownKeyError that names all unknown ones."""
        found = self.ids(keys)
        if len(found) and int(found.min()) < 0:
            raise unknown_keys([keys[i] for i in np.flatnonzero(found < 0).tolist()], len(keys))
        return found


def keys_for(rows: int, keys: Iterable[str]) -> Keys:
    """Return the index of the keys of ``rows`` rows."""
    index = Keys.of(keys)
    if len(index) + index.shared != rows:
        shared = f" and {index.shared} shared rows" * (index.shared > 0)
        raise ArgumentError(
            f"{len(index)} keys{shared} were given for {rows} rows: give one for each"
        )
    return index


def compact_keys(keys: Sequence[str]) -> Keys:
    """Index keys in the smallest form that can give them back: as integers, or as text.

    Fewer than 1,000 keys stay plain: there is little to save, and look-ups are faster.

    >>> compact_keys(["tea", "7"]).form, compact_keys([f"tea {i}" for i in range(2000)]).form
    ('plain', 'text')
    >>> compact_keys([str(i) for i in range(2000)]).form
    'integer'
    """
    if len(keys) < FEW_KEYS and not isinstance(keys, IntegerKeys):
        return Keys.of(keys, "plain")
    try:
        return Keys.of(keys, "integer")
    except ArgumentError:
        return Keys.of(keys, "text")


def unknown_keys(unknown: Sequence[str], count: int) -> UnknownKeyError:
    """Return the error for the unknown ones among ``count`` keys; it names a few of them.

    >>> print(unknown_keys(["a", "b"], 5))
    2 of 5 keys have no row: 'a', 'b'; packed.get(keys, default="zeros") gives rows to all
    """
    different = list(dict.fromkeys(unknown))
    names = ", ".join(f"{key[:80]!r}" for key in different[:MOST_NAMED])
    more = len(different) - MOST_NAMED
    if count == 1:
        return UnknownKeyError(f"no row has the key {names}", different)
    return UnknownKeyError(
        f"{len(unknown)} of {count} keys have no row: {names}{f' and {more} more' * (more > 0)}; "
        'packed.get(keys, default="zeros") gives rows to all',
        different,
    )


def share_rows(ids: Ids, keys: list[bytes], known: int, shared: int) -> Ids:  # [n]
    """Give the keys without a row of their own, -1 in ``ids``, a shared row each if there are
    any."""
    others = np.flatnonzero(ids < 0)
    if shared and len(others):
        hashes = hash_keys(*join_bytes([keys[i] for i in others.tolist()]), 0)
        ids[others] = known + scale_hashes(hashes, shared)
    return ids


def scale_hashes(hashes: NDArray[np.int64], count: int) -> Ids:
    """Map hashes to 0 .. count - 1 by their upper 32 of 63 bits."""
    upper = (hashes >> 31).astype(np.uint64)
    return (upper * np.uint64(count) >> np.uint64(32)).astype(np.int64)


def form_class(form: str) -> type[Keys]:
    """Return the class of a form of keys."""
    home, name = _FORMS[form]
    found: type[Keys] = getattr(import_module(home), name)
    return found


def read_keys(fields: Any, header: dict[str, Any], take: Any, rows: int) -> Keys | None:
    """Return the keys of a file; ``fields`` is the field of its metadata, True or a reader."""
    if not fields:
        return None

    def take_flat(name: str, kinds: tuple[str, ...], length: int | None) -> NDArray[Any]:
        entry = header.get(name) or {"dtype": kinds[0], "shape": [length]}
        if length is None and (len(entry["shape"]) != 1 or name not in header):
            raise FormatError(f"the array {name!r} is missing or not flat")
        kind = entry["dtype"] if entry["dtype"] in kinds else kinds[0]
        found: NDArray[Any] = take(name, kind, (entry["shape"][0] if length is None else length,))
        return found

    if fields is True:
        return PlainKeys.read(None, take_flat, rows)
    form = form_class(fields.choice("form", FORMS))
    shared = 0 if fields.raw("shared") is None else fields.integer("shared", 1, rows - 1)
    if rows - shared > MOST_KEYS and form is not PlainKeys:
        raise FormatError(f"{rows - shared} {form.form} keys: {MOST_KEYS} is the most")
    index = form.read(fields, take_flat, rows - shared)
    if fields.flag("counts"):
        index.counts = take_flat("keys.counts", ("U32", "U64"), rows)
    fields.finish()
    index.shared = shared
    return index


class PlainKeys(Keys):
    """Keys as versions 1 and 2 store them: text as it is, and about twelve bytes a key."""

    form = "plain"

    def __init__(
        self,
        text: NDArray[np.uint8],
        ends: NDArray[np.unsignedinteger],
        checksums: NDArray[np.uint32],
        order: NDArray[np.unsignedinteger],
    ) -> None:
        self.text, self.ends, self.checksums, self.order = text, ends, checksums, order

    @classmethod
    def build(cls, keys: Iterable[str]) -> PlainKeys:
        """Index keys in this form."""
        text, ends = encoded(keys)
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

    @classmethod
    def read(cls, _fields: Any, take: Take, count: int) -> PlainKeys:
        """Return the keys a file holds."""
        return cls(
            take("keys.text", ("U8",), None),
            take("keys.ends", ("U32", "U64"), count),
            take("keys.checksums", ("U32",), count),
            take("keys.order", ("U32", "U64"), count),
        )

    def utf8(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the text of all keys and the end of each."""
        return self.text, self.ends.astype(np.int64)

    @property
    def own_arrays(self) -> Arrays:
        """The stored arrays of this form by name."""
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
        return decode_key(self.raw(int(id_)), id_)

    def search_one(self, key: bytes) -> int:
        """Return the id of a key given in UTF-8, or -1."""
        checksum = zlib.crc32(key)
        at = int(np.searchsorted(self.checksums, np.uint32(checksum)))
        while at < len(self.checksums) and self.checksums.item(at) == checksum:
            id_ = int(self.order[at])
            if id_ >= len(self.ends):
                raise FormatError(f"the key index names row {id_}; there are {len(self.ends)} rows")
            if self.raw(id_) == key:
                return id_
            at += 1
        return -1

    def search(self, keys: list[bytes]) -> Ids:  # [n] -> [n]
        """Return the ids of keys given in UTF-8, -1 for those without a row of their own."""
        found = np.full(len(keys), -1, dtype=np.int64)
        wanted = np.fromiter(map(zlib.crc32, keys), dtype=np.uint32, count=len(keys))
        at = np.minimum(np.searchsorted(self.checksums, wanted), len(self) - 1)
        like = np.flatnonzero(self.checksums[at] == wanted)
        ids, text = self.order[at[like]].astype(np.int64), self.text.data
        inside = np.minimum(ids, len(self) - 1)
        starts, ends = np.where(inside > 0, self.ends[inside - 1], 0), self.ends[inside]
        rows = zip(like.tolist(), ids.tolist(), starts.tolist(), ends.tolist(), strict=True)
        for i, id_, start, end in rows:
            same = id_ < len(self) and text[start:end] == keys[i]
            found[i] = id_ if same else self.search_one(keys[i])  # as another has its checksum
        return found

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
        """Check all keys: text in order, every row indexed once by its own checksum, no
        duplicates."""
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


def encoded(keys: Iterable[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the UTF-8 text of all keys and the end of each."""
    return keys.utf8() if isinstance(keys, EncodedKeys) else _joined(keys)


def _joined(keys: Iterable[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    return join_bytes(encode_all(keys))


def join_bytes(raw: list[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return keys as one array, and the end of each."""
    ends = np.cumsum(np.fromiter(map(len, raw), dtype=np.int64, count=len(raw)))
    return np.frombuffer(b"".join(raw), dtype=np.uint8), ends


def read_order(stream: bits.Words, at: Ids, count: int) -> Ids:
    """Return the rows at places of a stored order of ``count`` rows."""
    width = bits.width(count)
    found = bits.unpack(stream, at * width, width).astype(np.int64)
    if len(found) and int(found.max()) >= count:
        raise FormatError(f"the key index names row {int(found.max())}; there are {count} rows")
    return found


def read_field(stream: bits.Words, start: int, width: int) -> int:
    """Return the one number of at most 64 bits that starts at a bit of a stream."""
    at = start >> 5
    found: int = stream.item(at) | stream.item(at + 1) << 32
    if (start & 31) + width > 64:
        found |= stream.item(at + 2) << 64
    return found >> (start & 31) & ((1 << width) - 1)


def read_row(stream: bits.Words, place: int, count: int) -> int:
    """Return the row at a place of a stored order of ``count`` rows."""
    width = bits.width(count)
    row = read_field(stream, place * width, width)
    if row >= count:
        raise FormatError(f"the key index names row {row}; there are {count} rows")
    return row


def check_count(count: int) -> int:
    """Refuse more keys than a compact form can hold, and none."""
    if not 1 <= count <= MOST_KEYS:
        raise ArgumentError(f'{count} keys: give 1 to {MOST_KEYS}, or use the form "plain"')
    return count


def check_order(stream: bits.Words, count: int) -> None:
    """Refuse a stored order that does not name every row once."""
    named = np.zeros(count, dtype=bool)
    for begin in range(0, count, _BLOCK):
        named[read_order(stream, np.arange(begin, min(begin + _BLOCK, count)), count)] = True
    if not named.all():
        raise FormatError("the key index must name every row once")


def decode_key(raw: bytes, id_: int) -> str:
    """Return the text of a row's key."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise FormatError(f"the key of row {id_} is not UTF-8") from None


def encode_key(key: str) -> bytes:
    """Return the UTF-8 bytes of a key."""
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


def encode_all(keys: Iterable[str]) -> list[bytes]:
    """Return the UTF-8 bytes of keys.

    >>> encode_all(["a", "\u00e0"])
    [b'a', b'\\xc3\\xa0']
    """
    keys = [*keys]
    try:
        return [*map(str.encode, keys)]
    except (TypeError, UnicodeEncodeError):
        return [encode_key(key) for key in keys]  # whose errors name the key


class Vocabulary:
    """Keys with a row each, in the order of rows, then ``shared`` rows for all other keys.

    ``fb.save(table, path, keys=vocabulary)`` stores it inside the table's file, counts included;
    ``fb.Vocabulary(fb.load(path).keys)`` reads it again.

    Args:
        keys: strings, all different, or the keys of a packed table, which stay memory-mapped and
            have their own shared rows and counts.
        shared: number of rows into which all other keys are hashed (Weinberger et al. 2009,
            "Feature hashing for large scale multitask learning").
        counts: [rows], how often the key of each row occurred.

    >>> import featherbed as fb
    >>> clicks = [["tea", "rum", "tea"], ["ale", "tea", "rum"], ["gin"]]
    >>> vocabulary = fb.Vocabulary.count(clicks, min_count=2, shared=3)
    >>> vocabulary.keys, len(vocabulary), vocabulary.ids(["rum", "ale", "sake"]).tolist()
    (('tea', 'rum'), 5, [1, 3, 3])
    >>> path = getfixture("tmp_path") / "drinks.safetensors"
    >>> table = fb.save(fb.DenseTable(len(vocabulary), 4), path, keys=vocabulary)
    >>> fb.load(path).ids("ale"), fb.Vocabulary(fb.load(path).keys).counts.tolist()
    (3, [3, 2, 0, 2, 0])
    """

    def __init__(
        self,
        keys: Iterable[str] | Keys,
        *,
        shared: int = 0,
        counts: NDArray[np.integer] | None = None,
    ) -> None:
        if isinstance(keys, Keys):
            self.keys: Keys | tuple[str, ...] = keys
            shared, counts = keys.shared, keys.counts
        else:
            self.keys = tuple(_refuse_text(keys))
            self._row_of: dict[Any, int] = {key: row for row, key in enumerate(self.keys)}
            if len(self._row_of) < len(self.keys):
                raise ArgumentError("a key is given to more than one row: keys must differ")
            encode_all(self.keys)
        self.shared, self.counts = check_integer("shared", shared, 0), counts
        if counts is not None and np.shape(counts) != (len(self),):
            raise ArgumentError(
                f"counts have shape {np.shape(counts)}: give one for each of {len(self)} rows"
            )

    @classmethod
    def count(
        cls,
        stream: Iterable[Any],
        *,
        min_count: int = 1,
        most: int | None = None,
        special: Iterable[str] = (),
        shared: int = 0,
    ) -> Vocabulary:
        """Count the keys of a stream, and give the frequent ones a row each, most frequent first.

        Equally frequent keys are in the order of their text.

        Args:
            stream: keys (strings or integers), or batches of them: lists, arrays, tensors.
            min_count: keys that occur less often share rows.
            most: maximum number of rows with a key of their own, special ones included.
            special: keys of the first rows, whatever their counts, such as "<pad>".
            shared: number of rows that all other keys share.
        """
        check_integer("min_count", min_count)
        counts = Counter[Any]()
        batches = map(_batch, _refuse_text(stream))
        for key, number in Counter(chain.from_iterable(batches)).items():
            counts[str(key) if isinstance(key, int) else key] += number
        for key in counts:
            if not isinstance(key, str):
                encode_key(key)  # whose error names the key
        first = tuple(special)
        others = sorted(counts.keys() - set(first), key=lambda key: (-counts[key], key))
        limit = None if most is None else max(0, check_integer("most", most) - len(first))
        keys = [*first, *[key for key in others if counts[key] >= min_count][:limit]]
        found = cls(keys, shared=shared)
        totals = np.zeros(len(found), dtype=np.int64)
        rows = found.ids(list(counts))
        np.add.at(totals, rows[rows >= 0], np.array(list(counts.values()))[rows >= 0])
        found.counts = totals
        return found

    def __len__(self) -> int:
        """Return the number of rows that a table of this vocabulary has."""
        return len(self.keys) + self.shared

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)

    def __contains__(self, key: object) -> bool:
        """Return whether a key has a row of its own."""
        if isinstance(self.keys, Keys):
            return isinstance(key, str) and self.keys.has(key)
        return key in self._row_of

    def __repr__(self) -> str:
        return f"Vocabulary({len(self.keys):,} keys, {self.shared} shared rows)"

    def find(self, key: str) -> int | None:
        """Return the row of a key, None if it has none of its own."""
        row = int(self.ids(key))
        return row if 0 <= row < len(self.keys) else None

    def ids(self, keys: Any, default: int = -1) -> Any:
        """Return the row of a key, or the rows [...] of several keys.

        Args:
            keys: a string or integer, or any list or array of them.
            default: the row of other keys if the vocabulary has no shared rows.
        """
        if isinstance(keys, str | int | np.integer):
            return int(self.ids([keys], default)[0])
        array = np.asarray(keys, dtype=object)
        names = [str(key) if isinstance(key, int) else key for key in _batch(array)]
        if isinstance(self.keys, Keys):
            found: Ids = self.keys.ids(names)
        else:
            found = np.array([self._row_of.get(name, -1) for name in names], dtype=np.int64)
            others = np.flatnonzero(found < 0)
            raw = encode_all(names[i] for i in others.tolist())
            found[others] = share_rows(found[others], raw, len(self.keys), self.shared)
        found[found < 0] = default
        return found.reshape(array.shape)

    def utf8(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the text of all keys and the end of each."""
        if isinstance(self.keys, Keys):
            return self.keys.utf8()
        return join_bytes(encode_all(self.keys))


def _refuse_text(keys: Iterable[Any]) -> Iterable[Any]:
    if isinstance(keys, str | bytes):  # whose letters would be keys
        raise ArgumentError(f"keys={keys[:40]!r}: give a list of keys")
    return keys


def _batch(keys: Any) -> Iterable[Any]:
    """Return one key, or the keys of a batch, one by one."""
    if isinstance(keys, str | bytes | int | np.integer):
        return (int(keys) if isinstance(keys, np.integer) else keys,)
    if hasattr(keys, "tolist"):  # an array or a tensor
        found = np.asarray(keys).reshape(-1).tolist()
        return [int(key) if isinstance(key, np.integer) else key for key in found]
    return keys if isinstance(keys, Iterable) else (keys,)
