"""Keys as compressed text, and keys that are integers."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, FormatError
from featherbed.packed import bits
from featherbed.packed.band import Ids
from featherbed.packed.keys import (
    Arrays,
    IntegerKeys,
    Keys,
    Take,
    check_count,
    check_order,
    decode_key,
    encoded,
    read_field,
    read_order,
    read_row,
)

BLOCK = 64  # keys compressed together
MOST_BYTES = 1000  # of a key stored as compressed text
MOST_PREFIX = 255  # bytes a key takes over from the one before it
DICTIONARY = 1 << 15  # bytes that deflate can look back
CACHED = 512  # blocks kept in memory
END = b"\xff"  # no byte of UTF-8
STRIDE = 16  # keys between two that are kept in memory
STEP = 1 << 18


class FrontCodedKeys(Keys):
    """Keys sorted, cut into blocks, each stored as what differs from the key before, deflated.

    A look-up finds the block by its first key and inflates it; blocks in use stay in memory.

    >>> keys = FrontCodedKeys.build(["the", "cat", "then"])
    >>> keys.find(["then", "the"]).tolist(), keys[1]
    ([2, 0], 'cat')
    """

    form = "text"

    def __init__(
        self,
        count: int,
        heads: NDArray[np.uint8],
        text: NDArray[np.uint8],
        ends: NDArray[np.unsignedinteger],
        dictionary: NDArray[np.uint8],
        order: bits.Words | None,
        blocks: bits.Words | None,
    ) -> None:
        self.count, self.heads, self.text, self.ends = count, heads, text, ends
        self.dictionary, self.order, self.blocks = dictionary, order, blocks
        self._inflated: dict[int, dict[bytes, int]] = {}

    @classmethod
    def build(cls, keys: Iterable[str]) -> FrontCodedKeys:
        """Index keys in this form."""
        text, ends = encoded(keys)
        blob, count = text.tobytes(), check_count(len(ends))
        starts = [0, *ends[:-1].tolist()]
        raw = [blob[start:end] for start, end in zip(starts, ends.tolist(), strict=False)]
        rows = sorted(range(count), key=raw.__getitem__)
        raw = [raw[row] for row in rows]
        _refuse_unfit(raw)
        coded = [_front_code(raw[at : at + BLOCK]) for at in range(0, count, BLOCK)]
        size = min(DICTIONARY, sum(map(len, coded)) // 32)  # a share of what it helps to compress
        sample = coded[:: 1 + sum(map(len, coded)) // (size + 1)]
        dictionary = b"".join(sample)[:size]
        deflated = [_deflate(block, dictionary) for block in coded]
        stops = np.cumsum([len(block) for block in deflated], dtype=np.int64)
        order, home = np.array(rows), np.empty(count, dtype=np.uint32)
        home[order] = np.arange(count) // BLOCK
        moved = bool(np.any(order[1:] < order[:-1]))
        return cls(
            count,
            np.frombuffer(END.join(raw[::BLOCK]), dtype=np.uint8),
            np.frombuffer(b"".join(deflated), dtype=np.uint8),
            stops.astype(np.uint32 if not count or stops[-1] < 2**32 else np.uint64),
            np.frombuffer(dictionary, dtype=np.uint8),
            bits.pack(order.astype(np.uint32)[:, None], [bits.width(count)]) if moved else None,
            bits.pack(home[:, None], [bits.width(len(stops))]) if moved else None,
        )

    @classmethod
    def read(cls, fields: Any, take: Take, count: int) -> FrontCodedKeys:
        """Return the keys a file holds."""
        ordered, blocks = fields.flag("order"), -(-count // BLOCK)
        dictionary = take("keys.dictionary", ("U8",), None)
        if len(dictionary) > DICTIONARY:
            raise FormatError(f"keys.dictionary has {len(dictionary)} bytes, not {DICTIONARY}")
        return cls(
            count,
            take("keys.heads", ("U8",), None),
            take("keys.text", ("U8",), None),
            take("keys.ends", ("U32", "U64"), blocks),
            dictionary,
            *(
                take(name, ("U32",), bits.word_count(count, bits.width(choices)))
                if ordered
                else None
                for name, choices in (("keys.order", count), ("keys.blocks", blocks))
            ),
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The metadata of this form."""
        return {"order": self.order is not None}

    @property
    def own_arrays(self) -> Arrays:
        """The stored arrays of this form by name."""
        names = ("heads", "text", "ends", "dictionary", "order", "blocks")
        found = {f"keys.{name}": getattr(self, name) for name in names}
        return {name: array for name, array in found.items() if array is not None}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id_: int) -> str:
        at, block = range(self.count)[int(id_)], 0
        if self.order is None or self.blocks is None:
            return decode_key(self._inflate(at // BLOCK)[at % BLOCK], id_)
        width = bits.width(len(self.ends))
        block = int(bits.unpack(self.blocks, np.array([at * width]), width)[0])
        if block < len(self.ends):
            own = np.flatnonzero(self._rows_of(block) == at)
            if len(own):
                return decode_key(self._inflate(block)[int(own[0])], id_)
        raise FormatError(f"block {block} does not hold the key of row {id_}")

    def __iter__(self) -> Iterator[str]:
        raw = [b""] * self.count
        for block in range(len(self.ends)):
            for row, key in zip(self._rows_of(block).tolist(), self._inflate(block), strict=True):
                raw[row] = key
        return (decode_key(key, id_) for id_, key in enumerate(raw))

    def _rows_of(self, block: int) -> Ids:
        """Return the rows of the keys of a block."""
        places = np.arange(block * BLOCK, min(block * BLOCK + BLOCK, self.count))
        return places if self.order is None else read_order(self.order, places, self.count)

    @cached_property
    def _dictionary(self) -> bytes:
        return self.dictionary.tobytes()

    @cached_property
    def _heads(self) -> list[bytes]:
        count = 1 + int(np.count_nonzero(self.heads == END[0]))
        if count != len(self.ends):
            raise FormatError(f"there are {count} first keys for {len(self.ends)} blocks")
        return self.heads.tobytes().split(END)

    def _block(self, block: int) -> dict[bytes, int]:
        """Return the keys of a block and their places in rising order, which stay in memory."""
        found = self._inflated.get(block)
        if found is None:
            found = {key: place for place, key in enumerate(self._inflate(block), block * BLOCK)}
            if len(self._inflated) >= CACHED:
                self._inflated = {}
            self._inflated[block] = found
        return found

    def _inflate(self, block: int) -> list[bytes]:
        """Return the keys of a block, as stored."""
        start, end = int(self.ends[block - 1]) if block else 0, int(self.ends[block])
        count = min(BLOCK, self.count - block * BLOCK)
        most = count * (MOST_BYTES + 2)
        inflater = zlib.decompressobj(-15, zdict=self._dictionary)
        try:
            data = inflater.decompress(self.text[start:end].tobytes(), most)
        except zlib.error as error:
            raise FormatError(f"block {block} of the keys cannot be inflated: {error}") from None
        parts, key, found = data[count:].split(END), self._heads[block], list[bytes]()
        if not inflater.eof or inflater.unused_data or len(parts) != count or len(data) < count:
            raise FormatError(f"block {block} of the keys is not {count} keys")
        for prefix, part in zip(data, parts, strict=False):
            key = key[:prefix] + part
            found.append(key)
        return found

    def search_one(self, key: bytes) -> int:
        """Return the id of a key given in UTF-8, or -1."""
        place = self._place(key)
        if place < 0 or self.order is None:
            return place
        return read_row(self.order, place, self.count)

    def search(self, keys: list[bytes]) -> Ids:  # [n] -> [n]
        """Return the ids of keys given in UTF-8, -1 for those without a row of their own."""
        found = np.fromiter(map(self._place, keys), dtype=np.int64, count=len(keys))
        if self.order is not None:
            known = np.flatnonzero(found >= 0)
            found[known] = read_order(self.order, found[known], self.count)
        return found

    def _place(self, key: bytes) -> int:
        """Return the place of a key in rising order, or -1."""
        block = bisect_right(self._heads, key) - 1
        return -1 if block < 0 else self._block(block).get(key, -1)

    def check(self) -> None:
        """Check all keys: every block sound, keys rising, rows named once and in their blocks."""
        if np.any(self.ends[1:] < self.ends[:-1]) or int(self.ends[-1]) != len(self.text):
            raise FormatError("the ends of key blocks must rise and finish at the end of the text")
        before: bytes | None = None
        for block, head in enumerate(self._heads):
            keys = self._inflate(block)
            if keys[0] != head:
                raise FormatError(f"the first key of block {block} is not {head!r}")
            for key in keys:
                if before is not None and key <= before:
                    raise FormatError(f"key {key!r} does not come after {before!r}")
                if len(key) > MOST_BYTES:
                    raise FormatError(f"a key has {len(key)} bytes, {MOST_BYTES} is the most")
                decode_key(key, block * BLOCK)
                before = key
        if self.order is not None and self.blocks is not None:
            check_order(self.order, self.count)
            width = bits.width(len(self.ends))
            for begin in range(0, self.count, STEP):
                places = np.arange(begin, min(begin + STEP, self.count))
                rows = read_order(self.order, places, self.count)
                if np.any(bits.unpack(self.blocks, rows * width, width) != places // BLOCK):
                    raise FormatError("a row names another block than the one with its key")


def _refuse_unfit(raw: list[bytes]) -> None:
    """Refuse sorted keys that are equal or too long."""
    same = next((one for one, other in pairwise(raw) if one == other), None)
    if same is not None:
        raise ArgumentError(
            f"key {same.decode()!r} is given to more than one row: keys must differ"
        )
    longest = max(raw, key=len)
    if len(longest) > MOST_BYTES:
        raise ArgumentError(
            f"a key of {len(longest)} bytes cannot be compressed, {MOST_BYTES} is the most: "
            'use the form "plain"'
        )


def _front_code(keys: list[bytes]) -> bytes:
    """Return the bytes each sorted key shares with the one before, then the rest of each."""
    lengths = np.fromiter(map(len, keys), dtype=np.int64, count=len(keys))
    width = int(lengths.max()) + 1
    letters = np.array(keys, dtype=f"S{width}").view(np.uint8).reshape(len(keys), width)
    same = np.minimum((letters[1:] != letters[:-1]).argmax(1), lengths[:-1])
    same = np.minimum(np.append(lengths[0], same), MOST_PREFIX)
    rest = END.join(key[at:] for key, at in zip(keys, same.tolist(), strict=True))
    return bytes(same.tolist()) + rest


def _deflate(block: bytes, dictionary: bytes) -> bytes:
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zdict=dictionary)
    return deflater.compress(block) + deflater.flush()


class NumberKeys(Keys):
    """Integers as keys: what they exceed the lowest by, in as few bits as the largest takes.

    >>> keys = NumberKeys.build(["7", "-12", "0"])
    >>> keys.find(["0", "7"]).tolist(), keys.ids(["07"]).tolist(), keys[1]
    ([2, 0], [-1], '-12')
    """

    form = "integer"

    def __init__(
        self, count: int, low: int, width: int, numbers: bits.Words, order: bits.Words | None
    ) -> None:
        self.count, self.low, self.width = count, low, width
        self.numbers, self.order = numbers, order

    @classmethod
    def build(cls, keys: Iterable[str]) -> NumberKeys:
        """Index keys in this form."""
        numbers = keys.numbers if isinstance(keys, IntegerKeys) else _parse(keys)
        count = check_count(len(numbers))
        rows = np.argsort(numbers, kind="stable")
        rising, moved = numbers[rows], bool(np.any(rows[1:] < rows[:-1]))
        same = np.flatnonzero(rising[1:] == rising[:-1])
        if len(same):
            raise ArgumentError(
                f"key '{rising[same[0]]}' is given to more than one row: keys must differ"
            )
        low = int(rising[0])
        # modulo 2^64, as the difference of two keys may take 64 bits
        above = numbers.astype(np.uint64) - np.array([low]).astype(np.uint64)
        if not moved:
            above -= np.arange(count, dtype=np.uint64)
        width = int(above.max()).bit_length()
        halves = np.stack([above & np.uint64(0xFFFFFFFF), above >> np.uint64(32)], 1)
        parts = [min(width, 32), max(width - 32, 0)]
        order = bits.pack(rows.astype(np.uint32)[:, None], [bits.width(count)]) if moved else None
        return cls(count, low, width, bits.pack(halves.astype(np.uint32), parts), order)

    @classmethod
    def read(cls, fields: Any, take: Take, count: int) -> NumberKeys:
        """Return the keys a file holds."""
        low, width = fields.integer("low", -(2**63), 2**63 - 1), fields.integer("bits", 0, 64)
        order = bits.word_count(count, bits.width(count)) if fields.flag("order") else None
        return cls(
            count,
            low,
            width,
            take("keys.numbers", ("U32",), bits.word_count(count, width)),
            None if order is None else take("keys.order", ("U32",), order),
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The metadata of this form."""
        return {"low": self.low, "bits": self.width, "order": self.order is not None}

    @property
    def own_arrays(self) -> Arrays:
        """The stored arrays of this form by name."""
        order = {} if self.order is None else {"keys.order": self.order}
        return {"keys.numbers": self.numbers, **order}

    def __len__(self) -> int:
        return self.count

    def _above(self, rows: Ids) -> NDArray[np.uint64]:
        """Return what the keys of rows exceed the lowest by."""
        at = rows * self.width
        found = bits.unpack(self.numbers, at, min(self.width, 32)).astype(np.uint64)
        if self.width > 32:
            high = bits.unpack(self.numbers, at + 32, self.width - 32).astype(np.uint64)
            found |= high << np.uint64(32)
        return found if self.order is not None else found + rows.astype(np.uint64)

    def _ranked(self, places: Ids) -> NDArray[np.uint64]:
        """Return what the keys at places in rising order exceed the lowest by."""
        if self.order is None:
            return self._above(places)
        return self._above(read_order(self.order, places, self.count))

    def __getitem__(self, id_: int) -> str:
        number = self.low + int(self._above(np.array([range(self.count)[int(id_)]]))[0])
        if number >= 2**63:
            raise FormatError(f"the key of row {id_} is {number}, which takes more than 64 bits")
        return str(number)

    def search_one(self, key: bytes) -> int:
        """Return the id of a key given in UTF-8, or -1."""
        above = _integer(key, self.low)
        if above is None:
            return -1
        begin = (
            max(int(np.searchsorted(self._sample, np.uint64(above), side="right")) - 1, 0) * STRIDE
        )
        end = min(begin + STRIDE, self.count) - 1
        while begin < end:
            middle = (begin + end) >> 1
            if self._one(middle)[1] < above:
                begin = middle + 1
            else:
                end = middle
        row, found = self._one(begin)
        return row if found == above else -1

    @cached_property
    def _sample(self) -> NDArray[np.uint64]:
        """What every ``STRIDE``-th key in rising order exceeds the lowest by; stays in memory."""
        return self._ranked(np.arange(0, self.count, STRIDE))

    def _one(self, place: int) -> tuple[int, int]:
        """Return the row at a place in rising order, and what its key exceeds the lowest by."""
        row = place if self.order is None else read_row(self.order, place, self.count)
        above = read_field(self.numbers, row * self.width, self.width)
        return row, above if self.order is not None else above + row

    def search(self, keys: list[bytes]) -> Ids:  # [n] -> [n]
        """Return the ids of keys given in UTF-8, -1 for those without a row of their own."""
        above = [_integer(key, self.low) for key in keys]
        known = np.array([number is not None for number in above], dtype=bool)
        wanted = np.array([number or 0 for number in above], dtype=np.uint64)
        begin = np.maximum(np.searchsorted(self._sample, wanted, side="right") - 1, 0) * STRIDE
        end = np.minimum(begin + STRIDE, self.count) - 1
        for _ in range(STRIDE.bit_length()):
            middle = (begin + end) >> 1
            less = self._ranked(middle) < wanted
            begin = np.where(less, np.minimum(middle + 1, end), begin)
            end = np.where(less, end, middle)
        known &= self._ranked(begin) == wanted
        rows = begin if self.order is None else read_order(self.order, begin, self.count)
        return np.where(known, rows, -1)

    def check(self) -> None:
        """Check all keys: rising in their order, within 64 bits, rows named once."""
        if self.order is not None:
            check_order(self.order, self.count)
        last = -1
        for start in range(0, self.count, STEP):
            found = self._ranked(np.arange(start, min(start + STEP, self.count)))
            if int(found[0]) <= last or np.any(found[1:] <= found[:-1]):
                raise FormatError("integer keys must rise in their order")
            last = int(found[-1])
        if self.low + last >= 2**63:
            raise FormatError(f"an integer key is {self.low + last}, which takes more than 64 bits")


def _integer(key: bytes, low: int) -> int | None:
    """Return how far a key in decimal is above ``low``; None if it is not such a key."""
    digits = key[1:] if key[:1] == b"-" else key
    plain = len(digits) < 20 and digits.isdigit() and digits[:1] != b"0"
    if not plain and key != b"0":
        return None
    above = int(key) - low
    return above if 0 <= above < 1 << 64 else None


def _parse(keys: Iterable[str]) -> NDArray[np.int64]:
    """Return keys in decimal as numbers."""
    text, ends = encoded(keys)
    found, blob, start = np.empty(len(ends), dtype=np.int64), text.tobytes(), 0
    for i, end in enumerate(ends.tolist()):
        above = _integer(blob[start:end], -(2**63))
        if above is None:
            raise ArgumentError(
                f"key {blob[start:end].decode()!r} is not an integer of 64 bits in decimal: "
                "store these keys in another form"
            )
        found[i], start = above - 2**63, end
    return found
