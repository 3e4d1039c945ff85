"""Click logs: Criteo's rows from a file, and generated ones of any number with a known truth.

A generated row has 26 ids and 13 numbers. Its click probability is σ(main effects of the ids +
planted interactions of pairs of columns + effects of the numbers). Ids follow Zipf's law, new ids
are born all the time and are popular while they are young (so later rows hold ids that earlier ones
never had), effects of ids drift, and a quarter of the columns has no effect at all.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.hashing import mixed
from featherbed.io.opening import find_data
from featherbed.packed.collection import Column

# ids of the categorical columns of Criteo's Kaggle data, as facebookresearch/dlrm counts them
CRITEO = "1460 583 10131227 2202608 305 24 12517 633 3 93145 5683 8351593 3194 27 14992 5461306 10"
CRITEO += " 5652 2173 4 7046547 18 15 286181 105 142572"
CARDINALITIES = tuple(int(count) for count in CRITEO.split())
NUMBERS = 13  # numerical columns
CHUNK = 1 << 16  # rows drawn at once, each chunk from a seed of its own
LATENT = 4  # width of the planted vectors
GROUPS = 24  # groups of similar ids in a column
KEPT = 1500  # ids up to which a column keeps its number when all are scaled down
BORN = 0.4  # share of the ids that are born after the first row
YOUNG = 0.2  # share of the draws among the youngest ids
Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


def scaled_cardinalities(total: int, counts: Sequence[int] = CARDINALITIES) -> tuple[int, ...]:
    """Return numbers of ids with about the given total; small columns keep theirs.

    >>> sizes = scaled_cardinalities(1_000_000)
    >>> sum(sizes), sizes[:3], min(sizes)
    (1000000, (1460, 583, 294488), 3)
    """
    small = [min(count, KEPT) for count in counts]
    share = max(0.0, (total - sum(small)) / max(1, sum(counts) - sum(small)))
    found = [low + int(share * (count - low)) for low, count in zip(small, counts, strict=True)]
    found[int(np.argmax(found))] += max(0, total - sum(found)) if share else 0
    return tuple(found)


@dataclass
class ClickRows:
    """Rows of a click log: ids [n, columns], numbers [n, 13] and labels [n]."""

    ids: Ids
    numbers: NDArray[np.float32]
    labels: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice) -> ClickRows:
        return ClickRows(self.ids[rows], self.numbers[rows], self.labels[rows])


class GeneratedClicks:
    """A log of ``rows`` rows in order of time, drawn chunk by chunk from ``seed``.

    >>> log = GeneratedClicks(200_000, scaled_cardinalities(10_000), seed=0)
    >>> first, last = log.read(0, 1000), log.read(199_000, 200_000)
    >>> first.ids.shape, first.numbers.shape, bool(0.1 < first.labels.mean() < 0.5)
    ((1000, 26), (1000, 13), True)
    >>> bool((log.read(500, 600).ids == first.ids[500:600]).all())
    True
    """

    def __init__(self, rows: int, cardinalities: Sequence[int], seed: int = 0) -> None:
        self.rows, self.cardinalities, self.seed = rows, tuple(cardinalities), seed
        rng = np.random.default_rng([seed, 1])
        columns = len(self.cardinalities)
        self.exponents = rng.uniform(0.8, 1.3, columns)
        self.strengths = rng.lognormal(0.0, 0.7, columns)
        self.strengths[rng.permutation(columns)[: columns // 4]] = 0.0
        pairs = rng.permutation([(a, b) for b in range(columns) for a in range(b)])
        self.pairs = pairs[: columns // 2]
        self.pair_strengths = rng.lognormal(0.0, 0.5, len(self.pairs))
        self.slopes = rng.normal(size=NUMBERS)
        centres = rng.normal(size=(columns, GROUPS, LATENT))
        self.effects: list[Floats] = []  # of the ids of each column, [n, 2]
        self.vectors: list[Floats] = []  # [n, LATENT]
        for column, count in enumerate(self.cardinalities):
            own = np.arange(count) * 64 + column
            drawn = np.stack([normals(own, seed, k) for k in range(1, 3 + LATENT)], axis=1)
            group = mixed(own + 7919 * (seed + 1)) % GROUPS
            self.effects.append(drawn[:, :2])
            self.vectors.append(centres[column, group] + 0.5 * drawn[:, 2:])
        self.shift, self.scale = 0.0, 1.0
        sample = self._scores(
            *self._draw(np.random.default_rng([seed, 2]), np.linspace(0, 1, 20_000))
        )
        self.scale = 2.0 / float(sample.std())
        self.shift = -1.6 - float(sample.mean()) * self.scale

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[ClickRows]:
        """Yield the rows from ``start`` to ``stop``, in blocks."""
        stop = self.rows if stop is None else stop
        for number in range(start // CHUNK, -(-stop // CHUNK)):
            rng = np.random.default_rng([self.seed, 3, number])
            first = number * CHUNK
            ids, numbers, times = self._draw(rng, (first + np.arange(CHUNK)) / self.rows)
            chance = 1 / (1 + np.exp(-self._scores(ids, numbers, times)))
            labels = (rng.random(CHUNK) < chance).astype(np.float32)
            inside = slice(max(0, start - first), min(CHUNK, stop - first))
            yield ClickRows(ids, numbers.astype(np.float32), labels)[inside]

    def read(self, start: int, stop: int) -> ClickRows:
        """Return the rows from ``start`` to ``stop``."""
        count, columns, at = stop - start, len(self.cardinalities), 0
        found = ClickRows(
            np.empty((count, columns), dtype=np.int64),
            np.empty((count, NUMBERS), dtype=np.float32),
            np.empty(count, dtype=np.float32),
        )
        for part in self.chunks(start, stop):
            own = slice(at, at + len(part))
            found.ids[own], found.numbers[own] = part.ids, part.numbers
            found.labels[own] = part.labels
            at += len(part)
        return found

    def chances(self, start: int, stop: int) -> Floats:
        """Return the click probabilities of rows: no model can know more."""
        found = []
        for number in range(start // CHUNK, -(-stop // CHUNK)):
            rng = np.random.default_rng([self.seed, 3, number])
            drawn = self._draw(rng, (number * CHUNK + np.arange(CHUNK)) / self.rows)
            inside = slice(max(0, start - number * CHUNK), min(CHUNK, stop - number * CHUNK))
            found.append((1 / (1 + np.exp(-self._scores(*drawn))))[inside])
        return np.concatenate(found)

    def _draw(self, rng: np.random.Generator, times: Floats) -> tuple[Ids, Floats, Floats]:
        """Draw ids and numbers of rows at ``times`` from 0 (the first row) to 1."""
        ids = np.empty((len(times), len(self.cardinalities)), dtype=np.int64)
        for column, count in enumerate(self.cardinalities):
            born = np.maximum(
                1, (count * (1 - BORN + BORN * np.minimum(times, 1))).astype(np.int64)
            )
            rank = zipf_ranks(rng.random(len(times)), born, self.exponents[column])
            young = rng.random(len(times)) < (YOUNG if count > 100 else 0.0)
            ids[:, column] = np.where(young, born - 1 - rank, rank)
        return ids, rng.lognormal(0.0, 1.0, (len(times), NUMBERS)), times

    def _scores(self, ids: Ids, numbers: Floats, times: Floats) -> Floats:
        """Return the log-odds of clicks."""
        total = np.log1p(numbers) @ self.slopes * 0.3
        vectors = []
        for column in range(ids.shape[1]):
            effect = self.effects[column][ids[:, column]]
            total += 0.6 * self.strengths[column] * (effect[:, 0] + 0.5 * times * effect[:, 1])
            vectors.append(self.vectors[column][ids[:, column]])
        for (a, b), strength in zip(self.pairs, self.pair_strengths, strict=True):
            total += 0.5 * strength * (vectors[a] * vectors[b]).sum(1)
        return self.shift + self.scale * total


def zipf_ranks(uniform: Floats, counts: Ids, exponent: float) -> Ids:
    """Return ranks below ``counts`` with probability about (rank + 1)^-exponent.

    >>> zipf_ranks(np.array([0.0, 0.5, 0.999]), np.array([100, 100, 100]), 1.1).tolist()
    [0, 6, 99]
    """
    if abs(exponent - 1) < 1e-3:
        ranks = np.exp(uniform * np.log(counts + 1.0))
    else:
        power = 1 - exponent
        ranks = (1 + uniform * ((counts + 1.0) ** power - 1)) ** (1 / power)
    found: Ids = np.clip(ranks.astype(np.int64) - 1, 0, counts - 1)
    return found


def normals(ids: Ids, seed: int, stream: int) -> Floats:
    """Return a normal number for each id, always the same (Box and Muller 1958)."""
    first = (mixed(ids + mixed(np.array([seed * 64 + 2 * stream]))) >> 10) * 2.0**-53
    second = (mixed(ids + mixed(np.array([seed * 64 + 2 * stream + 1]))) >> 10) * 2.0**-53
    found: Floats = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)
    return found


class ClickData:
    """Rows of a log with the ids of a vocabulary: frequent ids first, all others share a few rows.

    The vocabulary is that of the training rows: ids that occur ``minimum`` times or more, by
    falling count, then ``shared`` rows for ids that are rarer or unseen, by hash.
    """

    def __init__(
        self, train: ClickRows, test: ClickRows, minimum: int = 2, shared: float = 0.01
    ) -> None:
        self.counts: list[NDArray[np.int64]] = []
        columns: list[list[NDArray[np.int32]]] = [[], []]
        for column in range(train.ids.shape[1]):
            ids, counts = np.unique(train.ids[:, column], return_counts=True)
            order = np.argsort(-counts, kind="stable")
            kept = order[counts[order] >= minimum]
            few = max(1, int(shared * len(kept)))
            place = np.full(len(ids), -1)
            place[kept] = np.arange(len(kept))
            others = [np.zeros(few, dtype=np.int64)]
            for number, rows in enumerate((train, test)):
                at = np.searchsorted(ids, rows.ids[:, column]).clip(max=len(ids) - 1)
                known = ids[at] == rows.ids[:, column]
                found = np.where(known, place[at], -1)
                rest = len(kept) + mixed(rows.ids[:, column]) % few
                columns[number].append(np.where(found < 0, rest, found).astype(np.int32))
                if number == 0:
                    others = [np.bincount(rest[found < 0] - len(kept), minlength=few)]
            self.counts.append(np.concatenate([counts[kept], *others]))
        self.sizes = [len(counts) for counts in self.counts]
        self.train, self.test = (
            ClickRows(np.stack(own, axis=1), rows.numbers, rows.labels)
            for own, rows in zip(columns, (train, test), strict=True)
        )

    def all_counts(self) -> NDArray[np.int64]:
        """Return the counts of the rows of all columns."""
        return np.concatenate(self.counts)

    def columns(self) -> list[Column]:
        """Return the places of the columns in one table of all rows."""
        starts = np.cumsum([0, *self.sizes[:-1]]).tolist()
        places = enumerate(zip(starts, self.sizes, strict=True))
        return [Column(str(number), 0, start, size) for number, (start, size) in places]


class ClickSource:
    """Opens generated clicks by the settings of a run, or the sample of Criteo's."""

    def __init__(self, data: str | Path | None, quick: bool = False) -> None:
        self.data, self.quick = data, quick
        self._opened: tuple[Any, ClickData] | None = None

    def open(self, settings: Mapping[str, Any], seed: int) -> ClickData:
        """Return the data of a run: 80 % of the log for training, the last tenth for the test."""
        real = bool(settings.get("criteo")) and not self.quick
        rows, ids = settings.get("rows", 8000), settings.get("ids", 3000)
        validation = bool(settings.get("validation"))
        key = (real, rows, ids, seed, validation)
        if self._opened is None or self._opened[0] != key:
            self._opened = None  # two logs may not fit into memory
            data = (
                self.open_criteo(validation)
                if real
                else self._generated(rows, ids, seed, validation)
            )
            self._opened = key, data
        return self._opened[1]

    def _generated(self, rows: int, ids: int, seed: int, validation: bool) -> ClickData:
        log = GeneratedClicks(rows, scaled_cardinalities(ids), seed)
        ends = (int(0.8 * rows), int(0.9 * rows)) if validation else (int(0.9 * rows), rows)
        return ClickData(log.read(0, int(0.8 * rows)), log.read(*ends))

    def open_criteo(self, validation: bool = False) -> ClickData:
        """Return the sample of Criteo's rows: train and dev for training, test; or train, dev."""
        folder = find_data("ctr-samples") if self.data is None else Path(self.data) / "ctr-samples"
        parts = [read_criteo(folder / f"criteo_{n}.csv.gz") for n in ("train", "dev", "test")]
        words = {word for part in parts for row in part[0] for word in row}
        number = {word: place for place, word in enumerate(sorted(words))}
        found = [
            ClickRows(np.array([[number[w] for w in row] for row in texts]), numbers, labels)
            for texts, numbers, labels in parts
        ]
        if validation:
            return ClickData(found[0], found[1])
        joined = ClickRows(
            *(
                np.concatenate([getattr(part, n) for part in found[:2]])
                for n in ("ids", "numbers", "labels")
            )
        )
        return ClickData(joined, found[2])


def open_clicks(name: str, data: str | Path | None = None, quick: bool = False) -> ClickSource:  # noqa: ARG001
    """Return the source of click logs; ``quick``: generated ones only.

    >>> settings = {"rows": 2000, "ids": 500}
    >>> open_clicks("clicks", quick=True).open(settings, 0).train.ids.shape
    (1600, 26)
    """
    return ClickSource(data, quick)


def read_criteo(path: Path) -> tuple[list[list[str]], NDArray[np.float32], NDArray[np.float32]]:
    """Return the categories of each row, the numbers log(1 + max(x, 0)) (0 if absent), the labels."""
    with gzip.open(path, "rt") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    numbers = [[float(cell or 0) for cell in row[1 : 1 + NUMBERS]] for row in rows]
    labels = np.array([float(row[0]) for row in rows], dtype=np.float32)
    logs = np.log1p(np.maximum(np.array(numbers), 0)).astype(np.float32)
    return [row[1 + NUMBERS :] for row in rows], logs, labels
