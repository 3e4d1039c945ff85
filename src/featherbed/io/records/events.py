"""Events (user, item, time) from files of any common format, for models of sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import DataError
from featherbed.io.opening import Progress
from featherbed.io.records.columns import find_columns, open_columns
from featherbed.io.records.ratings import (
    REASONS,
    KeyColumn,
    Spool,
    no_usable_line,
    parse_blocks,
)

ROLES = ("user", "item", "time")
UNNAMED = {"user": 0, "item": 1, "time": 3}  # places of the columns of MovieLens, without header


@dataclass(frozen=True)
class Events:
    """Events in the order of time (ties: of lines), with ids from 0 and the keys of the ids."""

    users: NDArray[np.integer]
    items: NDArray[np.integer]
    user_keys: Sequence[str]
    item_keys: Sequence[str]

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class EventsReading:
    """Events read from a file: role -> column, number of lines by fate, and notes for the user."""

    events: Events
    columns: dict[str, str]
    counts: dict[str, int]
    notes: list[str] = field(default_factory=list)


def read_events(
    path: str | Path,
    *,
    user: str | int | None = None,
    item: str | int | None = None,
    time: str | int | None = None,
    strict: bool = False,
    encoding: str | None = None,
    workplace: str | Path | None = None,
    progress: Progress | None = None,
) -> EventsReading:
    """Read events from the file formats of ``read_ratings``; other columns are ignored.

    Args:
        path: the file; its format, delimiter and header are detected.
        user: the column of the user keys, by name or by number from 1; guessed if None.
        item: the column of the item keys, likewise.
        time: the column of the times, likewise: numbers or ISO dates.
        strict: refuse the first line with a missing or unparsable value instead of skipping it.
        encoding: of a text file; default UTF-8, or ISO-8859-1 for ``::`` files that are not UTF-8.
        workplace: folder for the columns of long files, by default the system's temporary folder.
        progress: called with the number of bytes read and the size of the file.

    >>> path = getfixture("tmp_path") / "plays.csv"
    >>> _ = path.write_text("user,song,time\\nann,a,3\\nbob,b,1\\nann,b,2\\nann,c,?\\n")
    >>> reading = read_events(path)
    >>> reading.events.items.tolist(), reading.counts
    ([1, 1, 0], {'lines': 4, 'kept': 3, 'skipped': 1})
    """
    file = open_columns(path, encoding=encoding, progress=progress)
    given: dict[str, str | int | None] = {"user": user, "item": item, "time": time}
    if not file.header and len(file.names) > max(UNNAMED.values()):
        names = {role: file.names[place] for role, place in UNNAMED.items()}
        given = {role: names[role] if value is None else value for role, value in given.items()}
    if not file.header and given["time"] is None:
        raise DataError(
            f"{file.path}: no header and {len(file.names)} columns, so it is not known which one "
            "is the time: name it with time=NUMBER (command line: --set columns.time=NUMBER)"
        )
    roles = find_columns(file.names, given, ROLES, str(file.path), header=file.header)
    file.refuse_odd(roles)
    sides = {"user": KeyColumn(workplace), "item": KeyColumn(workplace)}
    times, counts = Spool(np.int64, workplace), Counter[str]()
    for _, parsed in parse_blocks(file, roles, counts, strict):
        assert parsed.times is not None
        sides["user"].append(parsed.users)
        sides["item"].append(parsed.items)
        times.append(parsed.times)
    if not len(times):
        raise no_usable_line(file, counts)
    (users, user_keys), (items, item_keys) = (side.finish() for side in sides.values())
    if len(item_keys) < 2:
        raise DataError(
            f"{file.path} has events of one item only, {item_keys[0]!r}: there is nothing to learn"
        )
    order = np.argsort(times.array(), kind="stable")
    counts["kept"] = len(order)
    counts["skipped"] = sum(counts[name] for name in REASONS.values())
    notes = [] if file.header else ["no header: columns are counted from 1"]
    if counts["skipped"]:
        notes.append(f"lines skipped for a missing or unparsable value: {counts['skipped']:,}")
    if times.array().min() == times.array().max():
        notes.append("all times are equal: events are taken in the order of their lines")
    return EventsReading(
        Events(users[order], items[order], user_keys, item_keys),
        {role: file.names[place] for role, place in roles.items()},
        {name: counts[name] for name in ("lines", "kept", "skipped")},
        notes,
    )
