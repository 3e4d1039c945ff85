"""Ratings out of a file of any usual form: streamed in blocks, every line judged, ids numbered once.

What is skipped is counted and said. A file of any length needs memory for its keys and a block; the columns of a long one
lie in nameless files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, DataError, MissingExtra
from featherbed.tasks.columns import (
    ABSURD,
    BLANK,
    GOOD,
    LARGEST,
    MISSING,
    REASONS,
    Judged,
    judge,
    open_columns,
    refuse_odd,
    seconds,
)
from featherbed.tasks.data import Ratings
from featherbed.tasks.frames import BROKEN, FAULTS, Block, Columns
from featherbed.tasks.roles import find_columns, guessed_column
from featherbed.tasks.splits import chosen_ratings
from featherbed.tasks.spool import LONG, KeyColumn, Spool, ahead, by_user, cuts

POLICIES = ("last", "first", "mean", "refuse", "keep")


@dataclass(frozen=True)
class Reading:
    """What was read: the ratings, role -> column, how many lines met which fate, and remarks for the reader."""

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
    progress: Callable[[int, int], None] | None = None,
    encoding: str | None = None,
    long: int = LONG,
) -> Reading:
    """Read (user, item, rating, time) from delimited text, JSON lines or Parquet, packed by gzip, zstd, bzip2, xz or not.

    Args:
        path: the file; its form, delimiter and header are found by looking at it.
        user: the column of the users' keys, by name or by number from 1; guessed if None, and so are the others.
        item: the column of the items' keys.
        rating: the column of the ratings.
        time: the column of the times; a file need not have one.
        strict: refuse the first line with a missing or unparsable value instead of counting and
            skipping it; a rating that is NaN, infinite or beyond ±1,000,000 is always refused.
        duplicates: what becomes of a pair rated again: the "last" or "first" rating (by time, else by line), their "mean",
            "refuse", or "keep" all.
        low: the least rating there may be; one below is an error.
        high: the greatest rating there may be.
        workplace: the folder where the columns of long files lie; None means the system's temporary folder.
        progress: called with how much of the file has been read and its size.
        encoding: of a text file; None means UTF-8, or ISO-8859-1 in ``::`` files that are not UTF-8.
        long: rows beyond which columns lie in files.

    >>> path = getfixture("tmp_path") / "ratings.csv"
    >>> _ = path.write_text("userId,movieId,rating\\nann,7,4.5\\nbob,7,good\\nbob,12,3\\n")
    >>> reading = read_ratings(path)
    >>> reading.columns, list(reading.ratings.item_keys)
    ({'user': 'userId', 'item': 'movieId', 'rating': 'rating'}, ['7', '12'])
    >>> reading.counts["kept"], reading.counts["unparsable"]
    (2, 1)
    """
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
    file = open_columns(path, encoding=encoding, progress=progress)
    given = {"user": user, "item": item, "rating": rating, "time": time}
    roles = find_columns(
        file.names, given, ("user", "item", "rating"), str(file.path), header=file.header
    )
    notes = [] if file.header else ["no header: columns are counted from 1"]
    if time is None and "time" in roles and (against := _against_time(file, roles["time"])):
        notes.append(
            f"column {file.names[roles.pop('time')]!r} was not taken for the time: {against}"
        )
    refuse_odd(file, roles)
    counts: Counter[str] = Counter()
    gathered = _Gathered(workplace, long, "time" in roles)
    for block, judged in _judged(file, roles, counts, strict):
        _refuse_outside(file, block, judged, low, high)
        gathered.append(judged)
    ratings = gathered.finish(file, counts, duplicates, notes)
    notes += _late_time(file, roles)
    columns = {role: file.names[place] for role, place in roles.items()}
    counts["kept"] = len(ratings)
    return Reading(
        ratings,
        columns,
        {name: counts[name] for name in _COUNTED},
        [*notes, *_remarks(ratings, counts)],
    )


_COUNTED = ("lines", "kept", *REASONS.values(), "duplicates")


def _against_time(file: Columns, place: int) -> str:
    """Return why a column is hardly that of the times, nothing if it may be."""
    import polars as pl

    cells = [row[place] for row in file.sample if (row[place] or "").strip()]
    _, verdict = seconds(pl.Series(cells, dtype=pl.String))
    if not cells or float(np.mean(verdict == GOOD)) <= 0.5:
        return "no numbers or ISO dates"
    return (
        f"few of the first lines have it; --time {file.names[place]} takes it"
        if 2 * len(cells) < len(file.sample)
        else ""
    )


def _late_time(file: Columns, roles: dict[str, int]) -> list[str]:
    """Return a remark on a column of times that was met too late to be read."""
    names = sorted(file.later)
    for name in names if "time" not in roles else ():
        if guessed_column("time", [name], str(file.path)) is not None:
            return [
                f"column {name!r} was not read: no line of the first megabyte has it (null in the first line is enough)"
            ]
    return []


def _judged(
    file: Columns, roles: dict[str, int], counts: Counter[str], strict: bool
) -> Iterator[tuple[Block, Judged]]:
    for block in ahead(file.blocks(list(roles.values()))):
        judged = judge(block.frame, decimal_comma=file.delimiter == ";", strip=file.kind == "text")
        verdict = judged.verdict
        empty = np.flatnonzero(verdict == BLANK)
        if len(empty):
            verdict[np.setdiff1d(empty, block.blanks())] = MISSING
        fates = np.bincount(verdict, minlength=ABSURD + 1)
        counts["lines"] += len(verdict) - int(fates[BLANK])
        for fate, name in REASONS.items():
            counts[name] += int(fates[fate])
        refused = MISSING if strict else ABSURD
        if fates[refused:].any():
            row = int(np.flatnonzero(verdict >= refused)[0])
            raise DataError(
                f"{file.path}, {file.unit} {block.line(row)}: {_complaint(block, row, int(verdict[row]), list(roles))}"
            )
        yield block, judged


def _complaint(block: Block, row: int, fate: int, roles: list[str]) -> str:
    """Say what is wrong with a line."""
    cells = dict(zip([*roles, BROKEN], block.frame.row(row), strict=True))
    if cells[BROKEN] in FAULTS:
        return str(cells[BROKEN])
    if (cells[BROKEN] or "").strip():
        return "it cannot be cut into the columns of the first lines"
    if fate == MISSING:
        return f"no {next((role for role in roles if not str(cells[role] or '').strip()), 'value')}"
    if fate == ABSURD:
        return (
            f"rating {cells['rating']!r} is not a number from {-LARGEST:,.0f} to {LARGEST:,.0f}: "
            "correct or remove the line (an empty rating is skipped), or rescale the ratings"
        )
    _, verdict = (
        seconds(block.frame[str(roles.index("time"))][row : row + 1])
        if "time" in roles
        else (None, np.zeros(1))
    )
    role = "time" if verdict[0] != GOOD else "rating"
    wanted = "a number or an ISO date" if role == "time" else "a number"
    return f"{role} {str(cells[role])[:60]!r} is not {wanted}"


def _refuse_outside(
    file: Columns, block: Block, judged: Judged, low: float | None, high: float | None
) -> None:
    values = judged.values
    wrong = np.zeros(len(values), dtype=bool)
    if low is not None:
        wrong |= values < np.float32(low)
    if high is not None:
        wrong |= values > np.float32(high)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        row = int(np.flatnonzero(judged.verdict == GOOD)[at])
        span = f"{'any' if low is None else f'{low:g}'} to {'any' if high is None else f'{high:g}'}"
        raise DataError(
            f"{file.path}, {file.unit} {block.line(row)}: rating {values[at]:g} is outside the range {span}"
        )


class _Gathered:
    """The columns as they come together."""

    def __init__(self, folder: str | Path | None, long: int, timed: bool) -> None:
        self.folder = folder
        self.users, self.items = KeyColumn(folder, long=long), KeyColumn(folder, long=long)
        self.values: Spool[np.float32] = Spool(np.float32, folder, long=long)
        self.times: Spool[np.int64] | None = Spool(np.int64, folder, long=long) if timed else None

    def append(self, judged: Judged) -> None:
        self.users.append(judged.users)
        self.items.append(judged.items)
        self.values.append(judged.values)
        if self.times is not None and judged.times is not None:
            self.times.append(judged.times)

    def finish(self, file: Columns, counts: Counter[str], policy: str, notes: list[str]) -> Ratings:
        if len(self.values) == 0:
            said = ", ".join(
                f"{counts[name]:,} {name}" for name in REASONS.values() if counts[name]
            )
            raise DataError(
                f"{file.path}: no usable line among {counts['lines']:,}"
                + (f" ({said})" if said else "")
            )
        with ThreadPoolExecutor(2, "featherbed-keys") as both:
            (users, user_keys), (items, item_keys) = both.map(
                KeyColumn.finish, (self.users, self.items)
            )
        for side, keys in (("user", user_keys), ("item", item_keys)):
            if len(keys) < 2:
                raise DataError(
                    f"{file.path} has ratings of one {side} only, {keys[0]!r}: there is nothing to learn"
                )
        times = None if self.times is None else self.times.array()
        ratings = Ratings(users, items, self.values.array(), user_keys, item_keys, times)
        return settle_duplicates(ratings, policy, counts, notes, self.folder)


def settle_duplicates(
    ratings: Ratings,
    policy: str,
    counts: Counter[str],
    notes: list[str],
    folder: str | Path | None = None,
) -> Ratings:
    """Apply a policy to pairs rated more than once; count them, and say so in ``notes``.

    >>> one = Ratings(np.array([0, 0]), np.array([0, 0]), np.array([1, 3], np.float32), ["u"], ["i"])
    >>> settle_duplicates(one, "mean", Counter(), []).values.tolist()
    [2.0]
    """
    keep = np.ones(len(ratings), dtype=bool)
    for places in by_user(ratings.users, ratings.num_users):
        pairs = ratings.users[places].astype(np.int64) * ratings.num_items + ratings.items[places]
        ordered = np.sort(pairs)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        counts["duplicates"] += len(twice)
        if len(twice) and policy == "refuse":
            user, item = divmod(int(twice[0]), ratings.num_items)
            names = f"user {ratings.user_keys[user]!r} and item {ratings.item_keys[item]!r}"
            raise DataError(
                f"{names} are rated more than once: choose what counts: {', '.join(POLICIES)}"
            )
        if len(twice) and policy != "keep":
            marked = np.zeros(ratings.num_users, dtype=bool)
            marked[twice // ratings.num_items] = True
            among = np.flatnonzero(
                marked[ratings.users[places]]
            )  # few as a rule: only these are looked at one by one
            among = among[np.isin(pairs[among], twice)]
            _settle(ratings, policy, pairs[among], places[among], keep)
    again = counts["duplicates"]
    if not again:
        return ratings
    by = "line" if ratings.times is None else "time"
    done = {
        "last": f"the last by {by} counts",
        "first": f"the first by {by} counts",
        "mean": "their mean counts",
    }
    notes.append(
        f"{again:,} ratings of pairs that were rated before: {done.get(policy, 'all are kept')}"
    )
    if policy == "keep":
        return ratings
    return chosen_ratings(ratings, keep, folder)


def _settle(
    ratings: Ratings,
    policy: str,
    pairs: NDArray[np.int64],
    places: NDArray[np.int64],
    keep: NDArray[np.bool_],
) -> None:
    """Mark what is dropped of pairs that all stand more than once; for the mean, write it where it is kept."""
    order = np.lexsort(
        (pairs,) if ratings.times is None else (ratings.times[places], pairs)
    )  # stable: else lines decide
    same = pairs[order][1:] == pairs[order][:-1]
    kept = np.append(True, ~same) if policy == "first" else np.append(~same, True)
    keep[places[order[~kept]]] = False
    if policy == "mean":
        values = ratings.values[places[order]].astype(np.float64)
        begins = np.flatnonzero(np.append(True, ~same))
        sizes = np.diff(np.append(begins, len(values)))
        ratings.values[places[order[kept]]] = np.add.reduceat(values, begins) / sizes


def _remarks(ratings: Ratings, counts: Counter[str]) -> list[str]:
    skipped = [f"{counts[name]:,} {name}" for name in REASONS.values() if counts[name]]
    remarks = [f"lines skipped: {', '.join(skipped)}"] if skipped else []
    if 2 * sum(counts[name] for name in REASONS.values()) > counts["lines"]:
        remarks.append("more than half of the lines were skipped: are these the right columns?")
    if all(
        float(ratings.values[cut].min()) == float(ratings.values[cut].max()) == ratings.values[0]
        for cut in cuts(len(ratings))
    ):
        remarks.append(f"every rating is {ratings.values[0]:g}: there is nothing to tell apart")
    return remarks
