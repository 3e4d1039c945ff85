"""Keys without text: 2.5 bytes of fingerprint and ceil(log2 V) bits of row number a key.

Sorted fingerprints after Elias (1974, "Efficient storage and retrieval by content and address of
static files") and Fano (1971): each of N keys falls into one of N buckets, which take two bits a
key as unary counts, and is told apart in its bucket by 16 more bits of its hash. An unknown key is
taken for a known one with probability 2^-16.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, FormatError
from featherbed.hashing import hash_key, hash_keys
from featherbed.packed import bits
from featherbed.packed.band import Ids
from featherbed.packed.keys import (
    Arrays,
    Keys,
    Take,
    TextKeys,
    check_count,
    check_order,
    encoded,
    join_bytes,
    read_field,
    read_order,
    read_row,
    scale_hashes,
)

GROUP = 16  # buckets between two stored totals
MOST_IN_GROUP = 48  # keys in a group: with the ends of its buckets they take 64 bits
SEEDS = 64  # tried until no two hashes are equal and no group is too full


class HashedKeys(Keys):
    """Keys stored as fingerprints of ``bits`` bits.

    Args:
        order: whether rows keep the order of the keys. If not, the row of key i is
            ``find(keys)[i]``, and ceil(log2 V) bits a key are saved.

    >>> keys = HashedKeys.build(["the", "cat", "sat"])
    >>> keys.find(["sat", "the"]).tolist(), keys.false_positive_rate == 2**-16
    ([2, 0], True)
    """

    form = "hashed"

    def __init__(
        self,
        count: int,
        bits_: int,
        seed: int,
        buckets: bits.Words,
        totals: NDArray[np.uint32],
        fingerprints: bits.Words,
        exceptions: NDArray[np.uint64],
        order: bits.Words | None,
    ) -> None:
        self.count, self.bits, self.seed = count, bits_, seed
        self.buckets, self.totals, self.fingerprints = buckets, totals, fingerprints
        self.exceptions, self.order = exceptions, order
        self.slots = count - len(exceptions)

    @classmethod
    def build(cls, keys: Iterable[str], *, bits: int = 16, order: bool = True) -> HashedKeys:
        """Index keys in this form."""
        if isinstance(bits, bool) or not 16 <= bits <= 31:
            raise ArgumentError(f"bits={bits!r}: fingerprints have 16 to 31 bits")
        text = encoded(keys)
        check_count(len(text[1]))
        for seed in range(SEEDS):
            hashes = hash_keys(*text, seed)
            index = cls._sorted(hashes, bits, seed, order)
            if index is not None:
                return index
            if seed == 0:
                _refuse_duplicates(TextKeys(*text), hashes)
        raise ArgumentError(f"no seed below {SEEDS} tells these keys apart: store them as text")

    @classmethod
    def _sorted(
        cls, hashes: NDArray[np.int64], width: int, seed: int, ordered: bool
    ) -> HashedKeys | None:
        """Sort hashes into buckets; return None if this seed does not serve."""
        count = len(hashes)
        places = scale_hashes(hashes, count) << width | hashes & ((1 << width) - 1)
        rows = np.argsort(places, kind="stable")
        places = places[rows]
        same = np.zeros(count + 1, dtype=bool)
        same[1:-1] = places[1:] == places[:-1]
        alike = same[1:] | same[:-1]
        others, places = rows[alike], places[~alike]
        others = others[np.argsort(hashes[others], kind="stable")]
        exceptions, bucket = hashes[others].astype(np.uint64), places >> width
        totals = np.searchsorted(bucket, np.arange(0, count, GROUP))
        if (
            np.any(exceptions[1:] == exceptions[:-1])
            or _fullest(totals, len(places)) > MOST_IN_GROUP
        ):
            return None
        unary = np.zeros(bits.word_count(count + len(places), 1) * 32, dtype=bool)
        unary[bucket + np.arange(len(places))] = True
        stored = np.concatenate([rows[~alike], others]).astype(np.uint32)
        return cls(
            count,
            width,
            seed,
            np.packbits(unary, bitorder="little").view("<u4"),
            totals.astype(np.uint32),
            bits.pack((places & ((1 << width) - 1)).astype(np.uint32)[:, None], [width]),
            exceptions,
            bits.pack(stored[:, None], [bits.width(count)]) if ordered else None,
        )

    @classmethod
    def read(cls, fields: Any, take: Take, count: int) -> HashedKeys:
        """Return the keys a file holds."""
        width, seed = fields.integer("bits", 16, 31), fields.integer("seed", 0, 2**32 - 1)
        others = 0 if fields.raw("exceptions") is None else fields.integer("exceptions", 1, count)
        order, slots = fields.flag("order"), count - others
        return cls(
            count,
            width,
            seed,
            take("keys.buckets", ("U32",), bits.word_count(slots + count, 1)),
            take("keys.totals", ("U32",), -(-count // GROUP)),
            take("keys.fingerprints", ("U32",), bits.word_count(slots, width)),
            take("keys.exceptions", ("U64",), others),
            take("keys.order", ("U32",), bits.word_count(count, bits.width(count)))
            if order
            else None,
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The metadata of this form."""
        others = self.count - self.slots
        return {
            "bits": self.bits,
            "seed": self.seed,
            "exceptions": others or None,
            "order": self.order is not None,
        }

    @property
    def own_arrays(self) -> Arrays:
        """The stored arrays of this form by name."""
        names = ("buckets", "totals", "fingerprints", "exceptions", "order")
        found = {f"keys.{name}": getattr(self, name) for name in names}
        return {name: array for name, array in found.items() if array is not None}

    @property
    def false_positive_rate(self) -> float:
        """The probability that an unknown key is taken for a known one."""
        return 2.0**-self.bits

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id_: int) -> str:
        raise ArgumentError(
            f"the key of row {id_} is not stored: hashed keys have no text; "
            "save the table with another form of keys to list them"
        )

    def search(self, keys: list[bytes]) -> Ids:  # [n] -> [n]
        """Return the ids of keys given in UTF-8, -1 for those without a row of their own."""
        hashes = hash_keys(*join_bytes(keys), self.seed)
        first, count = self._spans(scale_hashes(hashes, self.count))
        of = np.repeat(np.arange(len(keys)), count)
        slot = np.arange(len(of)) + np.repeat(first - (np.cumsum(count) - count), count)
        if len(slot) and int(slot.max()) >= self.slots:
            raise _wrong_buckets()
        stored = bits.unpack(self.fingerprints, slot * self.bits, self.bits)
        same = stored == hashes[of] & ((1 << self.bits) - 1)
        found = np.full(len(keys), -1, dtype=np.int64)
        found[of[same]] = slot[same]
        if len(self.exceptions):
            wanted = hashes.astype(np.uint64)
            at = np.minimum(np.searchsorted(self.exceptions, wanted), len(self.exceptions) - 1)
            found = np.where(self.exceptions[at] == wanted, self.slots + at, found)
        if self.order is not None:
            known = np.flatnonzero(found >= 0)
            found[known] = read_order(self.order, found[known], self.count)
        return found

    def _spans(self, bucket: Ids) -> tuple[Ids, Ids]:
        """Return the first slot of buckets, and the number of their keys."""
        before = self.totals[bucket // GROUP].astype(np.int64)
        begin = bucket // GROUP * GROUP + before
        if len(begin) and int(before.max()) > self.slots:
            raise _wrong_buckets()
        low, high = (bits.unpack(self.buckets, begin + at, 32).astype(np.uint64) for at in (0, 32))
        zeros = ~(low | high << np.uint64(32))  # the ends of buckets, lowest first
        place, left = bucket % GROUP, zeros
        for number in range(GROUP - 1):
            left = np.where(place > number, left & (left - np.uint64(1)), left)
        if not left.all():
            raise _wrong_buckets()
        passed: NDArray[np.uint64] = np.bitwise_xor(zeros, left)
        start = _length(passed)
        return before + start - place, _lowest(left) - start

    def search_one(self, key: bytes) -> int:
        """Return the id of a key given in UTF-8, or -1."""
        found = self._slot(hash_key(key, self.seed))
        if found < 0 or self.order is None:
            return found
        return read_row(self.order, found, self.count)

    def _slot(self, hash_: int) -> int:
        bucket = self.count * (hash_ >> 31) >> 32
        group, place = bucket // GROUP, bucket % GROUP
        before = self.totals.item(group)
        if before > self.slots:
            raise _wrong_buckets()
        ones = read_field(self.buckets, group * GROUP + before, 64)
        zeros, start = ones ^ ((1 << 64) - 1), 0
        for _ in range(place):
            start = zeros & -zeros
            zeros ^= start
        if not zeros:
            raise _wrong_buckets()
        start = start.bit_length()
        slot = before + start - place
        last = slot + (zeros & -zeros).bit_length() - 1 - start
        if last > self.slots:
            raise _wrong_buckets()
        wanted = hash_ & ((1 << self.bits) - 1)
        for at in range(last - 1, slot - 1, -1):
            if read_field(self.fingerprints, at * self.bits, self.bits) == wanted:
                return at
        at = int(np.searchsorted(self.exceptions, np.uint64(hash_)))
        return self.slots + at if hash_ in self.exceptions[at : at + 1] else -1

    def check(self) -> None:
        """Check all buckets: every key counted, fingerprints and exceptions rising, rows named
        once."""
        size = self.slots + self.count
        unary = np.unpackbits(self.buckets.view(np.uint8), count=size, bitorder="little")
        ones = np.flatnonzero(unary)
        bucket = ones - np.arange(len(ones))
        totals = np.searchsorted(bucket, np.arange(0, self.count, GROUP))
        fits = len(ones) == self.slots and not unary[-1:].any()
        if not fits or not np.array_equal(totals, self.totals):
            raise _wrong_buckets()
        if _fullest(totals, self.slots) > MOST_IN_GROUP:
            raise _wrong_buckets()
        prints = bits.unpack(self.fingerprints, np.arange(self.slots) * self.bits, self.bits)
        places = bucket << self.bits | prints.astype(np.int64)
        if np.any(places[1:] <= places[:-1]):
            raise FormatError("the fingerprints of keys must rise in every bucket")
        wide = self.exceptions
        if np.any(wide[1:] <= wide[:-1]) or (len(wide) and int(wide[-1]) >= 1 << 63):
            raise FormatError("the hashes of exceptional keys must rise and have 63 bits")
        if self.order is not None:
            check_order(self.order, self.count)


def _lowest(words: NDArray[np.uint64]) -> Ids:
    """Return the place of the lowest bit of every word, 64 if there is none."""
    return np.bitwise_count(~words & (words - np.uint64(1))).astype(np.int64)


def _length(words: NDArray[np.uint64]) -> Ids:
    """Return the number of bits up to the highest one of every word."""
    for shift in (1, 2, 4, 8, 16, 32):
        words = words | words >> np.uint64(shift)
    return np.bitwise_count(words).astype(np.int64)


def _fullest(totals: NDArray[np.integer], slots: int) -> int:
    return int(np.diff(totals.astype(np.int64), append=slots).max())


def _wrong_buckets() -> FormatError:
    return FormatError("the buckets of hashed keys do not match their totals")


def _refuse_duplicates(keys: TextKeys, hashes: NDArray[np.int64]) -> None:
    """Refuse duplicate keys; only keys of equal hashes are compared."""
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    for one, other in zip(order[same].tolist(), order[same + 1].tolist(), strict=True):
        if keys[one] == keys[other]:
            raise ArgumentError(
                f"key {keys[one]!r} is given to more than one row: keys must differ"
            )
