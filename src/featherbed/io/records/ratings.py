"""Ratings from a file of any common format, streamed in blocks; every line is checked.

Skipped lines are counted and reported. Memory is needed for the keys and for one block; the columns
of a long file are kept in unnamed files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, DataError, MissingExtra
from featherbed.io.opening import Progress
from featherbed.io.records.cells import (
    ABSURD,
    BLANK,
    GOOD,
    MAX_RATING,
    MISSING,
    REASONS,
    ParsedLines,
    parse_lines,
    parse_times,
)
from featherbed.io.records.columns import (
    BROKEN,
    FAULTS,
    Block,
    Columns,
    find_columns,
    guess_column,
)
from featherbed.io.records.files import open_columns
from featherbed.io.records.spool import (
    MAX_ROWS,
    KeyColumn,
    Spool,
    block_slices,
    group_by_user,
    prefetch,
    select_rows,
)

POLICIES = ("last", "first", "mean", "refuse", "keep")  # for pairs rated more than once
COUNTS = ("lines", "kept", *REASONS.values(), "duplicates")


@dataclass(frozen=True)
class Ratings:
    """(user, item, rating) triples with ids from 0, the keys of the ids, and times if known.

    >>> values, keys = np.array([4.0, 3.0], np.float32), ("u1", "u2")
    >>> ratings = Ratings(np.array([0, 1]), np.array([0, 0]), values, keys, ("film",))
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
        """Number of users."""
        return len(self.user_keys)

    @property
    def num_items(self) -> int:
        """Number of items."""
        return len(self.item_keys)

    def take(self, index: NDArray[np.int64]) -> Ratings:
        """Return the triples at ``index``; users and items keep their ids."""
        columns = (self.users[index], self.items[index], self.values[index])
        times = None if self.times is None else self.times[index]
        return Ratings(*columns, self.user_keys, self.item_keys, times)

    def select(self, mask: NDArray[np.bool_], folder: str | Path | None = None) -> Ratings:
        """Return the triples where ``mask`` is true, in files of ``folder`` if these are in files.

        Users and items keep their ids.
        """
        users, items, values = (
            select_rows(column, mask, folder) for column in (self.users, self.items, self.values)
        )
        times = None if self.times is None else select_rows(self.times, mask, folder)
        return Ratings(users, items, values, self.user_keys, self.item_keys, times)

    def split(
        self, seed: int, validation: float = 0.1, test: float = 0.1
    ) -> tuple[Ratings, Ratings, Ratings]:
        """Return random training, validation and test triples."""
        order = np.random.default_rng(seed).permutation(len(self))
        cuts = [int(len(self) * (1 - validation - test)), int(len(self) * (1 - test))]
        train, middle, last = (self.take(np.sort(part)) for part in np.split(order, cuts))
        return train, middle, last


@dataclass(frozen=True)
class RatingsReading:
    """Ratings read from a file: role -> column, number of lines by fate, and notes for the user."""

    ratings: Ratings
    columns: dict[str, str]
    counts: dict[str, int]
    notes: list[str] = field(default_factory=list)


def read_ratings(
    path: str | Path,
    *,
    user: str | int | None = None,
    item: str | int | None = None,
    rating: str | int | None = None,
    time: str | int | None = None,
    strict: bool = False,
    duplicates: str = "last",
    low: float | None = None,
    high: float | None = None,
    workplace: str | Path | None = None,
    progress: Progress | None = None,
    encoding: str | None = None,
    max_rows: int = MAX_ROWS,
) -> RatingsReading:
    """Read (user, item, rating, time) from delimited text, JSON lines or Parquet.

    Text may be compressed by gzip, zstd, bzip2 or xz.

    Args:
        path: the file; its format, delimiter and header are detected.
        user: the column of the user keys, by name or by number from 1; guessed if None.
        item: the column of the item keys, likewise.
        rating: the column of the ratings, likewise.
        time: the column of the times, likewise; optional in the file.
        strict: refuse the first line with a missing or unparsable value instead of skipping and
            counting it; a rating that is NaN, infinite or beyond ±1,000,000 is always refused.
        duplicates: policy for a pair rated more than once: keep the "last" or "first" rating (by
            time, else by line), their "mean", "refuse" the file, or "keep" all.
        low: minimum rating; a lower one is an error.
        high: maximum rating; a higher one is an error.
        workplace: folder for the columns of long files, by default the system's temporary folder.
        progress: called with the number of bytes read and the size of the file.
        encoding: of a text file; default UTF-8, or ISO-8859-1 for ``::`` files that are not UTF-8.
        max_rows: number of rows beyond which columns are kept in files.

    >>> path = getfixture("tmp_path") / "ratings.csv"
    >>> _ = path.write_text("userId,movieId,rating\\nann,7,4.5\\nbob,7,good\\nbob,12,3\\n")
    >>> reading = read_ratings(path)
    >>> reading.columns, list(reading.ratings.item_keys)
    ({'user': 'userId', 'item': 'movieId', 'rating': 'rating'}, ['7', '12'])
    >>> reading.counts["kept"], reading.counts["unparsable"]
    (2, 1)
    """
    _check_arguments(duplicates, low, high, workplace)
    file = open_columns(path, encoding=encoding, progress=progress)
    given = {"user": user, "item": item, "rating": rating, "time": time}
    required = ("user", "item", "rating")
    roles = find_columns(file.names, given, required, str(file.path), header=file.header)
    notes = [] if file.header else ["no header: columns are counted from 1"]
    if time is None and "time" in roles and (doubt := _doubt_time(file, roles["time"])):
        notes.append(f"column {file.names[roles.pop('time')]!r} was not used as the time: {doubt}")
    file.refuse_odd(roles)
    counts: Counter[str] = Counter()
    collected = _CollectedColumns(workplace, max_rows, "time" in roles)
    for block, parsed in _parse_blocks(file, roles, counts, strict):
        _check_range(file, block, parsed, low, high)
        collected.append(parsed)
    ratings = resolve_duplicates(
        collected.finish(file, counts), duplicates, counts, notes, workplace
    )
    notes += _note_late_time(file, roles)
    counts["kept"] = len(ratings)
    return RatingsReading(
        ratings,
        {role: file.names[place] for role, place in roles.items()},
        {name: counts[name] for name in COUNTS},
        [*notes, *_final_notes(ratings, counts)],
    )


def _check_arguments(
    duplicates: str, low: float | None, high: float | None, workplace: str | Path | None
) -> None:
    if duplicates not in POLICIES:
        raise ArgumentError(f"duplicates={duplicates!r}: use one of {', '.join(POLICIES)}")
    if low is not None and high is not None and not low <= high:
        raise ArgumentError(f"low={low}, high={high}: low must not be above high")
    for package in ("polars", "pyarrow"):
        if find_spec(package) is None:
            raise MissingExtra(package, "train", "reading ratings")
    if workplace is not None:
        try:
            Path(workplace).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(
                f"workplace={str(workplace)!r}: not a folder that can be made: {error.strerror}"
            ) from None


def _doubt_time(file: Columns, place: int) -> str:
    """Return why a guessed column is hardly the time, "" if it may be."""
    import polars as pl

    cells = [row[place] for row in file.sample if (row[place] or "").strip()]
    _, fates = parse_times(pl.Series(cells, dtype=pl.String))
    if not cells or float(np.mean(fates == GOOD)) <= 0.5:
        return "no numbers or ISO dates"
    if 2 * len(cells) < len(file.sample):
        return (
            "few of the first lines have it; time=NAME "
            f"(command line: --set columns.time={file.names[place]}) uses it"
        )
    return ""


def _note_late_time(file: Columns, roles: dict[str, int]) -> list[str]:
    """Return a note on a time column that was found too late to be read."""
    for name in sorted(file.later) if "time" not in roles else ():
        if guess_column("time", [name], str(file.path)) is not None:
            return [
                f"column {name!r} was not read: no line of the first megabyte has it "
                "(null in the first line is enough)"
            ]
    return []


def _parse_blocks(
    file: Columns, roles: dict[str, int], counts: Counter[str], strict: bool
) -> Iterator[tuple[Block, ParsedLines]]:
    """Yield parsed blocks; count the fates of their lines, raise an error for refused ones."""
    for block in prefetch(file.blocks(list(roles.values()))):
        parsed = parse_lines(
            block.frame, decimal_comma=file.delimiter == ";", strip=file.kind == "text"
        )
        fates = parsed.fates
        empty = np.flatnonzero(fates == BLANK)
        if len(empty):
            fates[np.setdiff1d(empty, block.blanks())] = MISSING
        totals = np.bincount(fates, minlength=ABSURD + 1)
        counts["lines"] += len(fates) - int(totals[BLANK])
        for fate, name in REASONS.items():
            counts[name] += int(totals[fate])
        refused = MISSING if strict else ABSURD
        if totals[refused:].any():
            row = int(np.flatnonzero(fates >= refused)[0])
            problem = _describe_problem(block, row, int(fates[row]), list(roles))
            raise DataError(f"{file.path}, {file.unit} {block.line(row)}: {problem}")
        yield block, parsed


def _describe_problem(block: Block, row: int, fate: int, roles: list[str]) -> str:
    cells = dict(zip([*roles, BROKEN], block.frame.row(row), strict=True))
    if cells[BROKEN] in FAULTS:
        return str(cells[BROKEN])
    if (cells[BROKEN] or "").strip():
        return "it cannot be cut into the columns of the first lines"
    if fate == MISSING:
        return f"no {next((role for role in roles if not str(cells[role] or '').strip()), 'value')}"
    if fate == ABSURD:
        return (
            f"rating {cells['rating']!r} is not a number from {-MAX_RATING:,.0f} to "
            f"{MAX_RATING:,.0f}: correct or remove the line (an empty rating is skipped), or "
            "rescale the ratings"
        )
    if "time" in roles:
        _, fates = parse_times(block.frame[str(roles.index("time"))][row : row + 1])
        if fates[0] != GOOD:
            return f"time {str(cells['time'])[:60]!r} is not a number or an ISO date"
    return f"rating {str(cells['rating'])[:60]!r} is not a number"


def _check_range(
    file: Columns, block: Block, parsed: ParsedLines, low: float | None, high: float | None
) -> None:
    values = parsed.values
    wrong = np.zeros(len(values), dtype=bool)
    if low is not None:
        wrong |= values < np.float32(low)
    if high is not None:
        wrong |= values > np.float32(high)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        row = int(np.flatnonzero(parsed.fates == GOOD)[at])
        span = " to ".join("any" if limit is None else f"{limit:g}" for limit in (low, high))
        raise DataError(
            f"{file.path}, {file.unit} {block.line(row)}: "
            f"rating {values[at]:g} is outside the range {span}"
        )


class _CollectedColumns:
    """The columns of the ratings as they are read."""

    def __init__(self, folder: str | Path | None, max_rows: int, timed: bool) -> None:
        options: dict[str, Any] = {"folder": folder, "max_rows": max_rows}
        self.users, self.items = KeyColumn(**options), KeyColumn(**options)
        self.values: Spool[np.float32] = Spool(np.float32, **options)
        self.times: Spool[np.int64] | None = Spool(np.int64, **options) if timed else None

    def append(self, parsed: ParsedLines) -> None:
        self.users.append(parsed.users)
        self.items.append(parsed.items)
        self.values.append(parsed.values)
        if self.times is not None and parsed.times is not None:
            self.times.append(parsed.times)

    def finish(self, file: Columns, counts: Counter[str]) -> Ratings:
        if len(self.values) == 0:
            skipped = _list_skipped(counts)
            raise DataError(
                f"{file.path}: no usable line among {counts['lines']:,}"
                + (f" ({skipped})" if skipped else "")
            )
        with ThreadPoolExecutor(2, "featherbed-keys") as pool:
            (users, user_keys), (items, item_keys) = pool.map(
                KeyColumn.finish, (self.users, self.items)
            )
        for side, keys in (("user", user_keys), ("item", item_keys)):
            if len(keys) < 2:
                raise DataError(
                    f"{file.path} has ratings of one {side} only, {keys[0]!r}: "
                    "there is nothing to learn"
                )
        times = None if self.times is None else self.times.array()
        return Ratings(users, items, self.values.array(), user_keys, item_keys, times)


def resolve_duplicates(
    ratings: Ratings,
    policy: str,
    counts: Counter[str],
    notes: list[str],
    folder: str | Path | None = None,
) -> Ratings:
    """Apply a policy to pairs rated more than once; count them and add a note.

    >>> values = np.array([1, 3], np.float32)
    >>> ratings = Ratings(np.array([0, 0]), np.array([0, 0]), values, ["u"], ["i"])
    >>> resolve_duplicates(ratings, "mean", Counter(), []).values.tolist()
    [2.0]
    """
    keep = np.ones(len(ratings), dtype=bool)
    for places in group_by_user(ratings.users, ratings.num_users):
        pairs = ratings.users[places].astype(np.int64) * ratings.num_items + ratings.items[places]
        ordered = np.sort(pairs)
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        counts["duplicates"] += len(repeated)
        if len(repeated) and policy == "refuse":
            user, item = divmod(int(repeated[0]), ratings.num_items)
            names = f"user {ratings.user_keys[user]!r} and item {ratings.item_keys[item]!r}"
            raise DataError(
                f"{names} are rated more than once: choose a policy: {', '.join(POLICIES)}"
            )
        if len(repeated) and policy != "keep":
            marked = np.zeros(ratings.num_users, dtype=bool)
            marked[repeated // ratings.num_items] = True
            among = np.flatnonzero(marked[ratings.users[places]])  # few: compared one by one
            among = among[np.isin(pairs[among], repeated)]
            _drop_duplicates(ratings, policy, pairs[among], places[among], keep)
    again = counts["duplicates"]
    if not again:
        return ratings
    by = "line" if ratings.times is None else "time"
    effects = {
        "last": f"the last by {by} counts",
        "first": f"the first by {by} counts",
        "mean": "their mean counts",
        "keep": "all are kept",
    }
    notes.append(f"{again:,} ratings of pairs that were rated before: {effects[policy]}")
    return ratings if policy == "keep" else ratings.select(keep, folder)


def _drop_duplicates(
    ratings: Ratings,
    policy: str,
    pairs: NDArray[np.int64],
    places: NDArray[np.int64],
    keep: NDArray[np.bool_],
) -> None:
    """Unmark the dropped ratings of repeated pairs; for the mean, write it to the kept one."""
    # stable: without times the order of lines decides
    order = np.lexsort((pairs,) if ratings.times is None else (ratings.times[places], pairs))
    same = pairs[order][1:] == pairs[order][:-1]
    kept = np.append(True, ~same) if policy == "first" else np.append(~same, True)
    keep[places[order[~kept]]] = False
    if policy == "mean":
        values = ratings.values[places[order]].astype(np.float64)
        begins = np.flatnonzero(np.append(True, ~same))
        sizes = np.diff(np.append(begins, len(values)))
        ratings.values[places[order[kept]]] = np.add.reduceat(values, begins) / sizes


def _list_skipped(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[name]:,} {name}" for name in REASONS.values() if counts[name])


def _final_notes(ratings: Ratings, counts: Counter[str]) -> list[str]:
    skipped = _list_skipped(counts)
    notes = [f"lines skipped: {skipped}"] if skipped else []
    if 2 * sum(counts[name] for name in REASONS.values()) > counts["lines"]:
        notes.append("more than half of the lines were skipped: are these the right columns?")
    if is_constant(ratings):
        notes.append(f"every rating is {ratings.values[0]:g}: there is nothing to tell apart")
    return notes


def is_constant(ratings: Ratings) -> bool:
    """Whether all ratings are equal."""
    first = ratings.values[0]
    return all(bool((ratings.values[block] == first).all()) for block in block_slices(len(ratings)))
