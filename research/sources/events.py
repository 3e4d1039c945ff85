"""Sequences of items: MovieLens-1M, Amazon Beauty, or generated ones for a quick look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from featherbed.apps.sequences.data import Sequences
from featherbed.errors import ArgumentError, DataError
from featherbed.graphs import Graph
from featherbed.io.opening import DATA_VARIABLE, find_data, read_lines
from featherbed.io.records import Events, read_events
from research.sources.ratings import actor_graph


@dataclass
class EventSource:
    """The sequences of an experiment, and which items are related."""

    sequences: Sequences
    relate: Callable[[], Graph | None]

    @cached_property
    def graph(self) -> Graph | None:
        """Which items are related, None if nothing is known."""
        return self.relate()


def open_events(name: str, data: str | Path | None = None, quick: bool = False) -> EventSource:
    """Return the sequences called ``name``, from below ``data`` or $FEATHERBED_DATA; ``quick``: generated ones."""
    if name not in SOURCES:
        raise ArgumentError(f"data={name!r}: sequences are read from {', '.join(SOURCES)}")
    if quick:
        return generated()

    def find(folder: str) -> Path:
        if data is None:
            return find_data(folder)
        if not (Path(data) / folder).is_dir():
            raise DataError(f"{data} holds no folder {folder}: give --data, or {DATA_VARIABLE}")
        return Path(data) / folder

    return SOURCES[name](find)


def generated(users: int = 40, items: int = 30) -> EventSource:
    """Return sequences in which each item has three likely followers; followers are related."""
    rng = np.random.default_rng(0)
    followers = np.stack([rng.choice(items, 3, replace=False) for _ in range(items)])
    owners, chosen = [], []
    for user in range(users):
        item = int(rng.integers(items))
        for _ in range(int(rng.integers(4, 16))):
            owners.append(user)
            chosen.append(item)
            follows = rng.random() < 0.9
            item = int(followers[item, rng.integers(3)] if follows else rng.integers(items))
    names = [*map(str, range(users))], [*map(str, range(items))]
    sequences = Sequences.of(Events(np.array(owners), np.array(chosen), *names))
    place = {key: at for at, key in enumerate(sequences.item_keys)}
    pairs = [(place[str(i)], place[str(j)]) for i in range(items) for j in followers[i] if i != j]
    return EventSource(sequences, lambda: Graph.from_edges(items, np.array(pairs)))


def movielens(find: Callable[[str], Path]) -> EventSource:
    """Return all ratings of MovieLens-1M in the order of time; films that share an actor are related."""
    sequences = Sequences.of(read_events(find("ml-1m") / "ratings.dat").events)
    return EventSource(sequences, lambda: actor_graph(sequences.item_keys, find))


def beauty(find: Callable[[str], Path]) -> EventSource:
    """Return Amazon Beauty, lines of ``user:item item ...`` whose test file holds one item more."""
    rows: dict[str, list[str]] = {}
    for part in ("train", "test"):
        for line in read_lines(find("amazon") / f"beauty_{part}.txt"):
            user, _, items = line.partition(":")
            rows.setdefault(user, []).extend(items.split())
    users = np.repeat(np.arange(len(rows)), [len(items) for items in rows.values()])
    keys, chosen = np.unique(
        [item for items in rows.values() for item in items], return_inverse=True
    )
    events = Events(users, chosen, [*rows], [str(key) for key in keys])
    return EventSource(Sequences.of(events), lambda: None)


SOURCES = {"ml-1m": movielens, "amazon": beauty}
