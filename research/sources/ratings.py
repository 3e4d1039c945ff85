"""Where the ratings of a paper come from: MovieLens-1M and parts of it, Douban, or generated ratings for a quick look."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from featherbed.errors import ArgumentError, DataError, MissingExtra
from featherbed.graphs import Graph
from featherbed.io.opening import DATA_VARIABLE, find_data, read_lines
from featherbed.io.records import Ratings, make_ratings, read_movielens
from research.harness.settings import WORK

GENRES = ("Drama", "Comedy", "Action")  # of generated films, in turn
Halves = tuple[Ratings, Ratings, Ratings]


@dataclass
class Source:
    """The ratings of one paper, how a seed splits them, and what else is known of users and items.

    >>> source = open_source("ml-1m", quick=True)
    >>> [len(part) > 0 for part in source.split(0)], source.genres[0]
    ([True, True, True], ['Drama'])
    """

    ratings: Ratings
    split: Callable[[int], Halves]
    graphs: Callable[[], tuple[Graph | None, Graph | None]] = field(default=lambda: (None, None))
    films: Callable[[], dict[str, tuple[str, list[str]]]] = field(default=dict)

    @cached_property
    def relations(self) -> tuple[Graph | None, Graph | None]:
        """Which users are related, and which items."""
        return self.graphs()

    @cached_property
    def _films(self) -> dict[str, tuple[str, list[str]]]:
        return self.films()

    @property
    def titles(self) -> list[str]:
        """The title of each item; its key where it has none."""
        return [self._films.get(key, (key, []))[0] for key in self.ratings.item_keys]

    @property
    def genres(self) -> list[list[str]]:
        """The genres of each item."""
        return [self._films.get(key, (key, []))[1] for key in self.ratings.item_keys]


def open_source(name: str, data: str | Path | None = None, quick: bool = False) -> Source:
    """Return the ratings called ``name``, from below ``data`` or $FEATHERBED_DATA; ``quick``: generated ones."""
    if name not in SOURCES:
        raise ArgumentError(f"data={name!r}: papers are run on {', '.join(SOURCES)}")
    if quick:
        return generated()
    return SOURCES[name](lambda folder: find_folder(folder, data))


def find_folder(name: str, data: str | Path | None) -> Path:
    """Return the folder of a data set, below ``data`` or $FEATHERBED_DATA."""
    if data is None:
        return find_data(name)
    if not (Path(data) / name).is_dir():
        raise DataError(
            f"{data} holds no folder {name}: give --data, or {DATA_VARIABLE}, the folder that holds it"
        )
    return Path(data) / name


def open_lines(name: str, data: str | Path | None = None, quick: bool = False) -> Path:
    """Return the file of the ratings called ``name``, or a file of generated ones."""
    if name != "ml-1m":
        raise ArgumentError(f"data={name!r}: files of ratings are those of ml-1m")
    if not quick:
        return find_folder(name, data) / "ratings.dat"
    ratings, path = generated().ratings, WORK / "generated.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = zip(ratings.users, ratings.items, ratings.values, strict=True)
    lines = (f"{user},{item},{value:.2f},{n}" for n, (user, item, value) in enumerate(rows))
    path.write_text("\n".join(["user,item,rating,time", *lines]) + "\n")
    return path


def generated() -> Source:
    """Return a few thousand generated ratings, users related by their number, and films of three genres in turn."""
    ratings = make_ratings(90, 70, 2500, groups=4, dim=4)

    def graphs() -> tuple[Graph, Graph]:
        users, items = (
            Graph.from_attributes(n, [i // 10 for i in range(n)])
            for n in (ratings.num_users, ratings.num_items)
        )
        return users, items

    films = {
        key: (f"film {key}", [GENRES[i % len(GENRES)]]) for i, key in enumerate(ratings.item_keys)
    }
    return Source(ratings, ratings.split, graphs, lambda: films)


def movielens(find: Callable[[str], Path]) -> Source:
    """Return MovieLens-1M, random 80/10/10."""
    ratings = read_movielens(find("ml-1m"))
    return Source(
        ratings,
        ratings.split,
        lambda: movielens_graphs(ratings, find),
        lambda: read_films(find("ml-1m")),
    )


def few_ratings(find: Callable[[str], Path], fewer_than: int = 60) -> Source:
    """Return MovieLens-1M of users with fewer than 60 ratings, users and items numbered anew, random 80/10/10."""
    data = read_movielens(find("ml-1m"))
    few = np.bincount(data.users)[data.users] < fewer_than
    users, user_of = np.unique(data.users[few], return_inverse=True)
    items, item_of = np.unique(data.items[few], return_inverse=True)
    names = tuple(data.user_keys[i] for i in users), tuple(data.item_keys[i] for i in items)
    ratings = Ratings(user_of, item_of, data.values[few], *names)
    return Source(
        ratings,
        ratings.split,
        lambda: movielens_graphs(ratings, find),
        lambda: read_films(find("ml-1m")),
    )


def authors_split(find: Callable[[str], Path]) -> Source:
    """Return the split that the authors of SSE published; a tenth of its training part validates."""
    folder = find("ml-1m") / "sse-split"
    parts = [
        np.loadtxt(read_lines(folder / f"ml1m_{part}_ratings.csv"), delimiter=",")
        for part in ("train", "test")
    ]
    users, user_of = np.unique(np.concatenate([part[:, 0] for part in parts]), return_inverse=True)
    items, item_of = np.unique(np.concatenate([part[:, 1] for part in parts]), return_inverse=True)
    values = np.concatenate([part[:, 2] for part in parts]).astype(np.float32)
    names = tuple(str(int(u)) for u in users), tuple(str(int(i)) for i in items)
    ratings = Ratings(user_of, item_of, values, *names)
    return Source(ratings, split_train(ratings, len(parts[0])))


def douban(find: Callable[[str], Path]) -> Source:
    """Return Douban as split by Monti et al. 2017, and the graph of its users; a tenth of the training part validates."""
    folder = find("monti-graph-ratings")
    try:
        h5py = import_module("h5py")
    except ImportError:
        raise MissingExtra("h5py", "dev", "reading Douban") from None
    with h5py.File(folder / "douban.mat") as file:
        matrix, train, test, graph = (
            np.array(file[name]).T for name in ("M", "Otraining", "Otest", "W_users")
        )
    rows, columns = (
        np.concatenate(both) for both in zip(np.nonzero(train), np.nonzero(test), strict=True)
    )
    values = matrix[rows, columns].astype(np.float32)
    names = tuple(map(str, range(len(matrix)))), tuple(map(str, range(matrix.shape[1])))
    ratings = Ratings(rows, columns, values, *names)
    related = np.stack(np.nonzero(graph), axis=1)
    return Source(
        ratings,
        split_train(ratings, int(train.sum())),
        lambda: (Graph.from_edges(len(ratings.user_keys), related), None),
    )


def split_train(ratings: Ratings, count: int) -> Callable[[int], Halves]:
    """Return how to split: the first ``count`` ratings train, but for a tenth of them that validates; the others test."""

    def split(seed: int) -> Halves:
        order = np.random.default_rng(seed).permutation(count)
        parts = (
            np.sort(order[count // 10 :]),
            np.sort(order[: count // 10]),
            np.arange(count, len(ratings)),
        )
        train, validation, test = (ratings.take(part) for part in parts)
        return train, validation, test

    return split


def movielens_graphs(ratings: Ratings, find: Callable[[str], Path]) -> tuple[Graph, Graph]:
    """Return which users are of one age group, and which films share an actor."""
    return age_graph(ratings.user_keys, find), actor_graph(ratings.item_keys, find)


def actor_graph(item_keys: Sequence[str], find: Callable[[str], Path] = find_data) -> Graph:
    """Relate films that share an actor; actors of more than a hundred films are left out."""
    place = {key: i for i, key in enumerate(item_keys)}
    lines = itertools.islice(read_lines(find("kg-ml-1m") / "movie_actor.tsv"), 1, None)
    pairs = [line.rstrip("\n").split("\t") for line in lines]
    known = [(place[movie], actor) for movie, actor in pairs if movie in place]
    return Graph.from_attributes(
        len(item_keys), ([i for i, _ in known], [actor for _, actor in known]), largest=100
    )


def age_graph(user_keys: Sequence[str], find: Callable[[str], Path] = find_data) -> Graph:
    """Relate users of one age group."""
    age = {
        fields[0]: fields[2]
        for fields in (line.split("::") for line in read_lines(find("ml-1m") / "users.dat"))
    }
    return Graph.from_attributes(len(user_keys), [age[key] for key in user_keys])


def read_films(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Return the title and the genres of each film of ``movies.dat``: ``MovieID::Title::Genre|Genre``."""
    lines: Any = (
        line.rstrip("\n").split("::") for line in read_lines(folder / "movies.dat", "latin-1")
    )
    return {key: (title, genres.split("|")) for key, title, genres in lines}


def long_stream(_: Callable[[str], Path]) -> Source:
    """Return generated ratings as many as MovieLens-25M has: 162,000 users, 59,000 items."""
    ratings = make_ratings(162_000, 59_000, 25_000_000, groups=20)
    return Source(ratings, ratings.split)


SOURCES: dict[str, Callable[[Callable[[str], Path]], Source]] = {
    "ml-1m": movielens,
    "ml-1m-few": few_ratings,
    "ml-1m-sse": authors_split,
    "douban": douban,
    "generated-25m": long_stream,
}
