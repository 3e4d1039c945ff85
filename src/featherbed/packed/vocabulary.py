"""The vocabulary of a training run: which keys have a row of their own, and which share one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.checks import check_integer
from featherbed.errors import ArgumentError
from featherbed.packed.band import Ids
from featherbed.packed.keys import Keys, encode_key, join_bytes, share_rows


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
            self.keys = tuple(keys)
            self._row_of: dict[Any, int] = {key: row for row, key in enumerate(self.keys)}
            if len(self._row_of) < len(self.keys):
                raise ArgumentError("a key is given to more than one row: keys must differ")
            for key in self.keys:
                encode_key(key)
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
        for key, number in Counter(chain.from_iterable(map(_batch, stream))).items():
            counts[str(key) if isinstance(key, int) else key] += number
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
            raw = [encode_key(names[i]) for i in others.tolist()]
            found[others] = share_rows(found[others], raw, len(self.keys), self.shared)
        found[found < 0] = default
        return found.reshape(array.shape)

    def utf8(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the text of all keys and the end of each."""
        if isinstance(self.keys, Keys):
            return self.keys.utf8()
        return join_bytes([encode_key(key) for key in self.keys])


def _batch(keys: Any) -> Iterable[Any]:
    """Return one key, or the keys of a batch, one by one."""
    if isinstance(keys, str | int | np.integer):
        return (int(keys) if isinstance(keys, np.integer) else keys,)
    if hasattr(keys, "tolist"):  # an array or a tensor
        found = np.asarray(keys).reshape(-1).tolist()
        return [int(key) if isinstance(key, np.integer) else key for key in found]
    return keys if isinstance(keys, Iterable) else (keys,)
