"""Readers of the data sets the tasks are shown on. Files may be gzipped."""

from __future__ import annotations

import gzip
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import DataError

VARIABLE = "FEATHERBED_DATA"


def find_data(name: str) -> Path:
    """Return the folder of a data set: ``$FEATHERBED_DATA/name``, else ``data/name`` or ``../shared/data/name`` from here."""
    given = os.environ.get(VARIABLE)
    bases = [Path(given)] if given else [Path("data"), Path("../shared/data")]
    for base in bases:
        if (base / name).is_dir():
            return base / name
    looked = ", ".join(str(base / name) for base in bases)
    raise DataError(
        f"data set {name!r} was not found (looked in {looked}): set {VARIABLE} to the folder that holds it"
    )


def open_text(path: Path, encoding: str = "utf-8") -> Iterator[str]:
    """Yield the lines of a text file, plain or gzipped (``path`` or ``path`` + ".gz")."""
    found = next((p for p in (path, path.with_name(path.name + ".gz")) if p.is_file()), None)
    if found is None:
        raise DataError(f"{path}: no such file, plain or gzipped")
    try:
        with (
            gzip.open(found, "rt", encoding=encoding)
            if found.suffix == ".gz"
            else found.open(encoding=encoding) as file
        ):
            yield from file
    except UnicodeDecodeError as error:
        raise DataError(f"{found} is not {encoding} text: {error}") from None
    except (gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{found} is not a complete gzip file: {error}") from None


@dataclass(frozen=True)
class Ratings:
    """(user, item, rating) triples; ids count from 0, ``user_keys`` and ``item_keys`` name them;
    ``times`` say when, where that is known.

    >>> ratings = Ratings(np.array([0, 1]), np.array([0, 0]), np.array([4.0, 3.0], np.float32), ("u1", "u2"), ("film",))
    >>> len(ratings), ratings.num_users
    (2, 2)
    """

    users: NDArray[np.integer]
    items: NDArray[np.integer]
    values: NDArray[np.float32]
    user_keys: Sequence[str]
    item_keys: Sequence[str]
    times: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def num_users(self) -> int:
        """How many users there are."""
        return len(self.user_keys)

    @property
    def num_items(self) -> int:
        """How many items there are."""
        return len(self.item_keys)

    def take(self, index: NDArray[np.int64]) -> Ratings:
        """Return the triples at ``index``; users and items keep their ids."""
        times = None if self.times is None else self.times[index]
        return Ratings(
            self.users[index],
            self.items[index],
            self.values[index],
            self.user_keys,
            self.item_keys,
            times,
        )

    def split(
        self, seed: int, validation: float = 0.1, test: float = 0.1
    ) -> tuple[Ratings, Ratings, Ratings]:
        """Return train, validation and test triples, drawn at random by ``seed``."""
        order = np.random.default_rng(seed).permutation(len(self))
        cuts = [int(len(self) * (1 - validation - test)), int(len(self) * (1 - test))]
        train, middle, last = (self.take(np.sort(part)) for part in np.split(order, cuts))
        return train, middle, last


def read_movielens(folder: str | Path) -> Ratings:
    """Read MovieLens' ``ratings.dat``: ``UserID::MovieID::Rating::Timestamp``."""
    path = Path(folder) / "ratings.dat"
    columns: tuple[list[str], list[str], list[float]] = ([], [], [])
    for number, line in enumerate(open_text(path, "latin-1"), 1):
        fields = line.rstrip("\n").split("::")
        try:
            user, item, value = fields[0], fields[1], float(fields[2])
        except (IndexError, ValueError):
            raise DataError(
                f"{path}, line {number}: expected User::Item::Rating::Time, found {line.strip()[:60]!r}"
            ) from None
        columns[0].append(user)
        columns[1].append(item)
        columns[2].append(value)
    if not columns[0]:
        raise DataError(f"{path} holds no ratings")
    user_keys, users = np.unique(np.array(columns[0], dtype=np.int64), return_inverse=True)
    item_keys, items = np.unique(np.array(columns[1], dtype=np.int64), return_inverse=True)
    names = (tuple(map(str, user_keys)), tuple(map(str, item_keys)))
    return Ratings(users, items, np.array(columns[2], dtype=np.float32), *names)


@dataclass(frozen=True)
class Corpus:
    """A text as word ids: training, validation and test parts over one vocabulary, most frequent word first."""

    words: tuple[str, ...]
    counts: NDArray[np.int64]
    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


def read_corpus(train: str | Path, validation: str | Path, test: str | Path) -> Corpus:
    """Read three plain texts, one sentence a line, words between blanks; ``<eos>`` ends a line, ``<unk>`` is unknown."""
    counts: Counter[str] = Counter({"<unk>": 0})
    for line in open_text(Path(train)):
        counts.update([*line.split(), "<eos>"])
    if len(counts) < 3:
        raise DataError(f"{train} holds fewer than two different words")
    words = tuple(word for word, _ in counts.most_common())
    id_of = {word: number for number, word in enumerate(words)}
    unknown = id_of["<unk>"]

    def encode(path: str | Path) -> NDArray[np.int64]:
        found = [
            id_of.get(word, unknown)
            for line in open_text(Path(path))
            for word in [*line.split(), "<eos>"]
        ]
        if not found:
            raise DataError(f"{path} holds no words")
        return np.array(found, dtype=np.int64)

    return Corpus(
        words,
        np.array([counts[word] for word in words]),
        encode(train),
        encode(validation),
        encode(test),
    )


def read_ptb(folder: str | Path) -> Corpus:
    """Read the Penn Treebank in Mikolov's preparation: ``ptb.train.txt``, ``ptb.valid.txt``, ``ptb.test.txt``."""
    base = Path(folder)
    return read_corpus(base / "ptb.train.txt", base / "ptb.valid.txt", base / "ptb.test.txt")


def planted_ratings(
    num_users: int = 2000,
    num_items: int = 1000,
    count: int = 260_000,
    groups: int = 12,
    dim: int = 12,
    seed: int = 0,
) -> Ratings:
    """Generate ratings with planted structure: users and items belong to groups with a taste each, popularity is Zipf's.

    rating = 3.5 + taste . style + noise, clipped to 1..5; a user's taste is a mixture of two groups' tastes.
    """
    rng = np.random.default_rng(seed)

    def vectors(rows: int) -> NDArray[np.float64]:
        centres = rng.normal(size=(groups, dim)) / dim**0.25
        share = rng.beta(0.4, 0.4, size=(rows, 1))
        first, second = rng.integers(groups, size=(2, rows))
        mixed: NDArray[np.float64] = share * centres[first] + (1 - share) * centres[second]
        return mixed

    tastes, styles = vectors(num_users), vectors(num_items)
    popularity = 1.0 / np.arange(1, num_items + 1) ** 0.8
    users = rng.integers(num_users, size=count)
    items = rng.choice(num_items, size=count, p=popularity / popularity.sum())
    pairs = np.unique(users * num_items + items)
    users, items = pairs // num_items, pairs % num_items
    scores = (
        3.5
        + 1.2 * np.einsum("nd,nd->n", tastes[users], styles[items])
        + rng.normal(0, 0.4, len(users))
    )
    values = np.clip(scores, 1, 5).astype(np.float32)
    return Ratings(
        users, items, values, tuple(map(str, range(num_users))), tuple(map(str, range(num_items)))
    )
