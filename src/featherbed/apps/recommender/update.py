"""New users and items of a stored recommender, in closed form, without training and without torch.

Rows of new users follow from the stored rows of items (``Recommender.fold_in``), rows of new items
in the same way from those of their users. Users who are known are estimated again from the items
they are stored with and the new ones: for ratings, the old row stands for the old ratings; in a
ranking, counts of old events are their mean in training.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.apps.bundle import SEQUENCES
from featherbed.apps.recommender.closed import Doubles, solve_implicit
from featherbed.apps.recommender.serve import (
    ITEMS,
    JSON,
    SEEN,
    TITLES,
    USERS,
    Recommender,
    collect_rated,
    write_recommender,
)
from featherbed.apps.recommender.settings import UpdateSettings
from featherbed.errors import ArgumentError, DataError
from featherbed.files import replace_folder, temporary_folder
from featherbed.io.records import Ratings, RatingsReading, read_ratings
from featherbed.packed import Keys, PackedTable, compact_keys, edit_rows

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Update:
    """The result of an update: numbers of users and items, and lines for the user."""

    users_added: int
    items_added: int
    users_estimated: int
    events: int
    lines: list[str]


def update_recommender(
    folder: str | Path,
    source: str | Path,
    settings: UpdateSettings | Mapping[str, Any] | None = None,
) -> Update:
    """Add the users and items of a file to a recommender, and estimate the users it names again.

    All other rows keep their bits. The folder is replaced in one step, or left as it was.

    Args:
        folder: a folder of ``train_ratings`` or ``train_ranking``.
        source: new ratings or events, in any format of ``read_ratings``.
        settings: settings, or their values by dotted name.

    >>> from featherbed.apps.recommender import train_ranking
    >>> place, rng = getfixture("tmp_path"), np.random.default_rng(0)
    >>> pairs = sorted({(int(u), int(i) // 2) for u, i in rng.integers(40, size=(900, 2))})
    >>> lines = ["user,item", *(f"{u},{i}" for u, i in pairs)]
    >>> _ = (place / "clicks.csv").write_text("\\n".join(lines))
    >>> values = {"table.dim": 4, "als.alpha": 4.0, "als.regularization": 1.0}
    >>> _ = train_ranking(place / "clicks.csv", place / "out", values, progress=False)
    >>> _ = (place / "new.csv").write_text("user,item\\nann,3\\nann,5\\nbob,4\\nbob,tea\\n7,3\\n")
    >>> update_recommender(place / "out", place / "new.csv").lines
    ['2 users and 1 items added, 1 users estimated again, from 5 events']
    """
    folder = Path(folder)
    if not isinstance(settings, UpdateSettings):
        settings = UpdateSettings.from_values(settings or {})
    if (folder / SEQUENCES).is_file():
        raise ArgumentError(
            f"{folder} holds a sequence model, which needs no update for new users: give "
            "recommend their --history; new items need featherbed train sequences"
        )
    model = Recommender.open(folder)
    if model.about.biases == "apart":
        raise ArgumentError(f"{folder} has biases apart from the rows, to which none can be added")
    reading = _read(model, Path(source), settings)
    if model.about.implicit is not None:
        reading = _related(model, reading, source)
    change = _Change(model, reading.ratings)
    tables = change.tables()
    with _beside(folder) as place:
        for path in folder.iterdir():  # what is not written again: metrics, report, split
            if path.is_dir():
                shutil.copytree(path, place / path.name)
            elif path.name not in (JSON, USERS, ITEMS, SEEN, TITLES):
                shutil.copy2(path, place / path.name)
        change.write(place, *tables)
        place.chmod(folder.stat().st_mode & 0o7777)
        replace_folder(place, folder)
    return Update(
        len(change.new_users),
        len(change.new_items),
        len(change.users) - len(change.new_users),
        len(reading.ratings),
        [*reading.notes, *change.lines()],
    )


@contextlib.contextmanager
def _beside(folder: Path) -> Any:
    """Yield a temporary folder on the same file system, which may be moved away."""
    parent = folder.resolve().parent
    if not os.access(parent, os.W_OK):
        raise ArgumentError(f"{parent} cannot be written into, where the new folder is prepared")
    with temporary_folder(parent) as workplace:
        place = workplace / "model"
        place.mkdir()
        yield place


def _read(model: Recommender, source: Path, settings: UpdateSettings) -> RatingsReading:
    """Read new ratings or events as the first ones were read."""
    implicit, columns = model.about.implicit is not None, settings.columns.values()
    trained = model.about.about.get("settings") or {}
    minimum = settings.reading.minimum
    if minimum is None and isinstance(trained, dict):
        minimum = trained.get("reading.minimum")
    reading = read_ratings(
        source,
        **columns,
        encoding=settings.reading.encoding,
        strict=settings.reading.strict,
        low=0.0 if implicit and minimum is None else None,
        implicit=implicit,
        min_keys=1,
    )
    if not implicit:
        return reading
    ratings, values = reading.ratings, reading.ratings.values
    if minimum is not None and {"count", "rating"} & set(reading.columns):
        ratings = ratings.select(values >= np.float32(minimum))
        ratings = replace(ratings, values=np.ones(len(ratings), np.float32))
    elif "rating" in reading.columns:
        ratings = replace(ratings, values=np.ones(len(values), np.float32))
    elif not values.all():
        ratings = ratings.select(values > 0)
    if not len(ratings):
        raise DataError(f"{source}: no events are left: all are below the minimum, or counts of 0")
    return replace(reading, ratings=ratings)


def _related(model: Recommender, reading: RatingsReading, source: str | Path) -> RatingsReading:
    """Leave out events of new users and items that nothing known leads to: no row follows."""
    ratings, (users, items) = reading.ratings, (reading.ratings.users, reading.ratings.items)
    has_user, has_item = (
        np.asarray(table.ids([keys[i] for i in range(len(keys))])) >= 0
        for table, keys in ((model.users, ratings.user_keys), (model.items, ratings.item_keys))
    )
    # rows are computed in this order
    has_user[users[has_item[items]]] = True
    has_item[items[has_user[users]]] = True
    has_user[users[has_item[items]]] = True
    kept = has_user[users] & has_item[items]
    if kept.all():
        return reading
    left = sorted({ratings.user_keys[int(user)] for user in users[~kept]})
    names = ", ".join(repr(key[:40]) for key in left[:3]) + (", ..." if len(left) > 3 else "")
    line = (
        f"{int((~kept).sum()):,} events of new users with new items alone are left out ({names}): "
        "no row follows from them"
    )
    if not kept.any():
        raise DataError(f"{source}: {line}; give an event of a known user or item")
    return replace(reading, ratings=ratings.select(kept), notes=[*reading.notes, line])


class _Change:
    """New rows, computed in this order: users from known items, new items, users from all items."""

    def __init__(self, model: Recommender, ratings: Ratings) -> None:
        self.model, self.values = model, ratings.values.astype(np.float64)
        self.user_ids, self.new_users = _number(model.users, ratings.user_keys, ratings.users)
        self.item_ids, self.new_items = _number(model.items, ratings.item_keys, ratings.items)
        self.users: Ids = np.unique(self.user_ids)
        self.order = np.argsort(self.user_ids, kind="stable")
        self.item_rows = np.zeros((len(self.new_items), model.about.dim))

    def tables(self) -> tuple[PackedTable, PackedTable]:
        """Return the tables of users and items, with all keys."""
        users = self._user_rows()
        self.item_rows = self._new_item_rows(users)
        if len(self.new_items):
            users = self._user_rows()
        if self.model.about.implicit is not None:
            users = self.model.about.implicit.finish(users, self.model.item_gram)
        known = self.users < self.model.about.users
        return (
            _extend(
                self.model.users, self.users[known], users[known], users[~known], self.new_users
            ),
            _extend(
                self.model.items,
                np.empty(0, np.int64),
                np.empty((0, self.model.about.dim)),
                self.item_rows,
                self.new_items,
            ),
        )

    def _events(self, user: int) -> tuple[Ids, Doubles]:
        """Return items and values of the new events of a user."""
        begin, end = np.searchsorted(self.user_ids[self.order], [user, user + 1])
        own = self.order[begin:end]
        return self.item_ids[own], self.values[own]

    def _user_rows(self) -> Doubles:  # [users, d]
        estimate = self._rated if self.model.about.implicit is None else self._chosen
        return np.stack([estimate(int(user)) for user in self.users])

    def _rows_of(self, ids: Ids) -> Doubles:  # [n] -> [n, d]
        known = ids < self.model.about.items
        rows = np.empty((len(ids), self.model.about.dim))
        rows[known] = self.model.items[ids[known]]
        rows[~known] = self.item_rows[ids[~known] - self.model.about.items]
        return rows

    def _rated(self, user: int) -> Doubles:  # -> [d]
        """Return the row of a user from new ratings, and from the old row if there is one."""
        model, (ids, ratings) = self.model, self._events(user)
        rows = self._rows_of(ids)
        usable = (ids < model.about.items) | rows.any(axis=1)
        rows, ratings = rows[usable], ratings[usable]
        earlier = None
        if user < model.about.users:
            earlier = (model.users[user].astype(np.float64), model.rated_items(user))
        return model.row_of_ratings(rows, ratings, earlier)

    def _chosen(self, user: int) -> Doubles:  # -> [d]
        """Return the row of a user from old and new events, before columns are weighted."""
        model, (ids, counts) = self.model, self._events(user)
        implicit = model.about.implicit
        assert implicit is not None
        weights = implicit.weights(counts)
        if user < model.about.users:
            before = np.setdiff1d(model.rated_items(user), ids)
            ids = np.concatenate([ids, before])
            weights = np.append(weights, np.full(len(before), implicit.alpha * implicit.typical))
        rows = self._rows_of(ids)
        gram = model.item_gram + self.item_rows.T @ self.item_rows
        return solve_implicit(gram, rows, weights, implicit.regularization)

    def _new_item_rows(self, users: Doubles) -> Doubles:  # -> [items, d]
        """Return rows of new items from those of the users who rated or chose them."""
        model, rows = self.model, np.zeros_like(self.item_rows)
        for place in range(len(rows)):
            here = np.flatnonzero(self.item_ids == model.about.items + place)
            own = users[np.searchsorted(self.users, self.user_ids[here])]
            if model.about.implicit is None:
                rows[place] = model.row_of_item(own, self.values[here])
            elif own.any():
                weights = model.about.implicit.weights(self.values[here])
                # ALS ends with U'U = V'V, since both sides have the same regularization; new users
                # are added, and others whose confidence below 1 could leave no positive matrix
                added = own[(self.user_ids[here] >= model.about.users) | (weights < 1)]
                gram, penalty = added.T @ added, model.about.implicit.regularization
                gram += model.item_gram
                rows[place] = solve_implicit(gram, own, weights, penalty)
        return rows

    def write(self, place: Path, users: PackedTable, items: PackedTable) -> None:
        """Write the folder."""
        model, about = self.model, self.model.about
        offsets, pairs = model._seen
        each = np.asarray(offsets[1:], dtype=np.int64) - np.asarray(offsets[:-1], dtype=np.int64)
        before = np.repeat(np.arange(about.users), each)
        seen = collect_rated(
            np.concatenate([before, self.user_ids]),
            np.concatenate([np.asarray(pairs, dtype=np.int64), self.item_ids]),
            users.rows,
            items.rows,
        )
        titles = model.titles
        named = (
            None
            if titles is None
            else [*(titles[i] for i in range(about.items)), *([None] * len(self.new_items))]
        )
        write_recommender(
            place,
            users,
            items,
            mean=about.mean,
            biases=about.biases,
            seen=seen,
            titles=named,
            about=about.about,
            implicit=about.implicit,
        )

    def lines(self) -> list[str]:
        """Return lines for the user."""
        estimated = len(self.users) - len(self.new_users)
        return [
            f"{len(self.new_users):,} users and {len(self.new_items):,} items added, "
            f"{estimated:,} users estimated again, from {len(self.values):,} events"
        ]


def _number(
    table: PackedTable, keys: Any, ids: NDArray[np.integer]
) -> tuple[Ids, list[str]]:  # -> [n]
    """Return the ids in a table of ids in a file, and the keys that are new, which come last."""
    used = np.unique(ids)
    names = [keys[int(at)] for at in used]
    found = np.asarray(table.ids(names), dtype=np.int64)
    new = np.flatnonzero(found < 0)
    found[new] = table.rows + np.arange(len(new))
    return found[np.searchsorted(used, ids)], [names[int(at)] for at in new]


def _extend(
    table: PackedTable, ids: Ids, rows: Doubles, added: Doubles, keys: list[str]
) -> PackedTable:
    """Return the table with rows replaced and added, and with the keys of the added ones."""
    old = table.keys
    assert old is not None
    if keys and old.form == "hashed":
        raise ArgumentError("keys are stored without text, so that none can be added: train again")
    edited = edit_rows(table, ids, rows.astype(np.float32), added.astype(np.float32))
    if not keys:
        return edited
    both = [*old, *keys]
    return edited.replace(keys=Keys.of(both) if old.form == "plain" else compact_keys(both))
