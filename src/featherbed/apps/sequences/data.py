"""The events of users in the order of time: numbered items, held-out items, windows, batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import DataError
from featherbed.io.records import Events, ItemTitles, count_ids

HELD_OUT = 2  # last events of a user: one for validation, one for test
REPEATS = 0.1  # share of repeated events from which items are recommended again
POOL = 32  # batches among which windows are sorted by length: random batches with little padding

Ids = NDArray[np.int64]


class Task(NamedTuple):
    """Users to be evaluated: the item [n] that follows the first ``ends`` [n] events of each."""

    users: Ids
    ends: Ids
    targets: Ids


@dataclass(frozen=True)
class Sequences:
    """The items of all users one after the other, each user's in the order of time.

    Items are numbered by falling number of training events. The last event of every user with at
    least three is for test, the one before for validation; all others are for training.

    >>> events = Events(np.array([1, 0, 0, 0]), np.array([0, 2, 1, 2]), ["u", "v"], ["a", "b", "c"])
    >>> sequences = Sequences.of(events)
    >>> sequences[0].tolist(), sequences.train(0).tolist(), sequences.task("test").targets.tolist()
    ([1, 2, 1], [1], [1])
    >>> sequences.item_keys, sequences.counts.tolist()
    (('a', 'c', 'b'), [1, 1, 0])
    """

    starts: Ids  # [U + 1]
    items: Ids  # [events]
    counts: Ids  # [V], in training
    user_keys: Sequence[str]
    item_keys: Sequence[str]
    checksum: str = field(default="", compare=False)

    @classmethod
    def of(cls, events: Events) -> Sequences:
        """Group events, which are in the order of time, by user."""
        order = np.argsort(events.users, kind="stable")
        items = events.items[order].astype(np.int64)
        lengths = count_ids(events.users, len(events.user_keys))
        starts = np.concatenate([[0], np.cumsum(lengths)])
        held = np.where(lengths > HELD_OUT, HELD_OUT, 0)
        place = np.arange(len(items)) - np.repeat(starts[:-1], lengths)
        is_train = place < np.repeat(lengths - held, lengths)
        counts = count_ids(items[is_train], len(events.item_keys))
        by_count = np.argsort(-counts, kind="stable")
        new = np.empty_like(by_count)
        new[by_count] = np.arange(len(new))
        take = getattr(events.item_keys, "take", None)
        keys = take(by_count) if take else tuple(events.item_keys[i] for i in by_count.tolist())
        digest = sha256("\n".join(keys[i] for i in range(len(keys))).encode())
        numbered = new[items]
        for part in (starts, numbered):
            digest.update(part.tobytes())
        return cls(starts, numbered, counts[by_count], events.user_keys, keys, digest.hexdigest())

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, user: int) -> Ids:
        return self.items[self.starts[user] : self.starts[user + 1]]

    @property
    def lengths(self) -> Ids:  # [U]
        """Number of events of each user."""
        return np.diff(self.starts)

    @property
    def train_lengths(self) -> Ids:  # [U]
        """Number of training events of each user."""
        return self.lengths - np.where(self.lengths > HELD_OUT, HELD_OUT, 0)

    def train(self, user: int) -> Ids:
        """Return the training events of a user."""
        return self[user][: self.train_lengths[user]]

    def task(self, part: str, most: int | None = None, seed: int = 0) -> Task:
        """Return the validation or test items, of at most ``most`` users drawn by ``seed``."""
        users = np.flatnonzero(self.lengths > HELD_OUT)
        if most is not None and len(users) > most:
            users = np.sort(np.random.default_rng(seed).choice(users, most, replace=False))
        ends = self.lengths[users] - {"validation": 2, "test": 1}[part]
        return Task(users, ends, self.items[self.starts[users] + ends])

    def repeated(self) -> float:
        """Return the share of events whose item the user had before."""
        owner = np.repeat(np.arange(len(self)), self.lengths)
        pairs = owner * len(self.counts) + self.items
        return 1 - len(np.unique(pairs)) / max(1, len(pairs))

    def check(self) -> None:
        """Raise ``DataError`` if there is nobody to evaluate."""
        if not (self.lengths > HELD_OUT).any():
            raise DataError(
                f"no user has {HELD_OUT + 1} events, one each for training, validation and test: "
                "give longer histories"
            )

    def describe(self) -> list[str]:
        """Return lines for the user: the amount of data, users and items that are not evaluated."""
        lengths = self.lengths
        lines = [
            f"{len(self.items):,} events of {len(self.counts):,} items by {len(self):,} users, "
            f"{np.median(lengths):,.0f} events in the median; the last of each user is for test, "
            "the one before for validation"
        ]
        few = int((lengths <= HELD_OUT).sum())
        if few:
            single = int((lengths == 1).sum())
            lines.append(
                f"{few:,} users with fewer than {HELD_OUT + 1} events ({single:,} with a single "
                "one) are used for training and not for evaluation"
            )
        if unseen := int((self.counts == 0).sum()):
            lines.append(f"{unseen:,} items occur in held-out events only: they are not learned")
        return lines


@dataclass(frozen=True)
class SequenceData:
    """Sequences, titles of items, whether items may be recommended again, lines for the user."""

    sequences: Sequences
    titles: ItemTitles | None
    repeats: bool
    lines: list[str]
    input: dict[str, str] = field(default_factory=dict)


def windows(
    sequences: Sequences, length: int, seed: Sequence[int]
) -> Ids:  # -> [n, 3]: user, first and last event + 1
    """Cut the training events of every user into windows of ``length``, at a random offset.

    >>> events = Events(np.zeros(9, int), np.arange(9) % 3, ["u"], ["a", "b", "c"])
    >>> windows(Sequences.of(events), 4, seed=(0, 1)).tolist()
    [[0, 0, 2], [0, 2, 6], [0, 6, 7]]
    """
    counts = sequences.train_lengths
    offsets = np.random.default_rng(seed).integers(length, size=len(counts))
    offsets[counts <= length] = 0
    starts = np.where(offsets > 0, offsets - length, 0)
    number = -(-(counts - starts) // length)
    users = np.repeat(np.arange(len(counts)), number)
    place = np.arange(len(users)) - np.repeat(np.cumsum(number) - number, number)
    begin = starts[users] + place * length
    stop = np.minimum(begin + length, counts[users])
    found: Ids = np.stack([users, np.maximum(begin, 0), stop], axis=1)
    return found


class Batch(NamedTuple):
    """Windows side by side: users [B], targets [B, L] padded with 0, and their lengths [B]."""

    users: Ids
    targets: Ids
    lengths: Ids


def batches(
    sequences: Sequences, parts: Ids, size: int, seed: Sequence[int]
) -> Iterator[Batch]:  # [n, 3]
    """Yield random batches of windows of similar length."""
    rng = np.random.default_rng([*seed, 1])
    order = rng.permutation(len(parts))
    lengths = parts[:, 2] - parts[:, 1]
    for begin in range(0, len(order), POOL * size):
        pool = order[begin : begin + POOL * size]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        starts = np.arange(0, len(pool), size)
        for start in rng.permutation(starts).tolist():
            chosen = parts[pool[start : start + size]]
            rows = [sequences[user][begin:end] for user, begin, end in chosen.tolist()]
            yield Batch(chosen[:, 0], *pad(rows))


def pad(rows: Sequence[Ids]) -> tuple[Ids, Ids]:  # -> [B, L], [B]
    """Return rows side by side, padded with 0 at their ends, and their lengths.

    >>> pad([np.array([1]), np.array([2, 3])])[0].tolist()
    [[1, 0], [2, 3]]
    """
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    padded = np.zeros((len(rows), int(lengths.max(initial=1))), dtype=np.int64)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return padded, lengths
