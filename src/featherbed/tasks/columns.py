"""Cells judged: keys, ratings and times out of texts and numbers, and what is wrong with the lines that have none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import DataError
from featherbed.tasks.delimited import delimited
from featherbed.tasks.frames import BROKEN, Columns, json_lines, looks_like_json, parquet_file
from featherbed.tasks.lines import Lines, Progress, found_file, whole_lines

if TYPE_CHECKING:
    import polars as pl

GOOD, BLANK, MISSING, UNPARSABLE, ABSURD = range(5)
REASONS = {MISSING: "missing", UNPARSABLE: "unparsable"}  # why a line is skipped
LARGEST = 1e6  # magnitude of a rating: NaN, infinity and larger ones are refused
NOTHING = ("", "na", "n/a", "null", "none", "\\n", "-")  # how files write that there is no rating
WHOLE = 2.0**53  # below this every whole number is a float64
TIMES = ("%Y-%m-%dT%H:%M:%S%.f%z", "%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%dT%H:%M", "%Y-%m-%d")


def refuse_odd(file: Columns, roles: dict[str, int]) -> None:
    """Refuse columns that hold lists, objects and the like where numbers or texts are wanted."""
    for role, place in roles.items():
        if place in file.odd:
            kind = f"column {file.names[place]!r} for the {role} is of the type {file.odd[place]}"
            raise DataError(f"{file.path}: {kind}: name one of numbers or texts")


def open_columns(
    path: str | Path,
    *,
    encoding: str | None = None,
    progress: Progress | None = None,
    least: int = 3,
    lenient: bool = False,
) -> Columns:
    """Look at a file and return its columns: delimited text, JSON lines or Parquet, plain or packed.

    ``least`` is how many columns there must be; ``lenient`` reads text that is not UTF-8 as ISO-8859-1, and
    wanted cells of delimited text that go over several lines.
    """
    found = found_file(path)
    try:
        with found.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise DataError(f"{found} cannot be read: {error.strerror}") from None
    if start == b"PAR1":
        return parquet_file(found, progress)
    if start == b"PK\x03\x04":
        raise DataError(f"{found} is a zip archive: unpack it first")
    lines = Lines(found, encoding, progress)
    lines.lenient = lenient
    text = lines.head if lines.whole else lines.head[: whole_lines(lines.head)]
    if not text.strip():
        lines.close()
        raise DataError(
            f"{found} is empty: give a file with ratings"
            if lines.whole
            else f"{found} has no line in its first megabyte: it is no text"
        )
    if looks_like_json(text):
        return json_lines(lines, text)
    return delimited(lines, text, least)


@dataclass(frozen=True)
class Judged:
    """The good lines of a block, and a verdict on each line (GOOD, MISSING, UNPARSABLE, ABSURD)."""

    users: pl.Series
    items: pl.Series
    values: NDArray[np.float32]
    times: NDArray[np.int64] | None
    verdict: NDArray[np.uint8]


def judge(frame: pl.DataFrame, *, decimal_comma: bool = False, strip: bool = True) -> Judged:
    """Judge the lines of a frame whose columns are user, item, rating and, if there are four, time; ``strip`` blanks of keys.

    >>> import polars as pl
    >>> frame = pl.DataFrame({"0": ["a", "b", ""], "1": ["7", "x", "7"], "2": ["3.5", "good", "4"], "broken": [None] * 3})
    >>> judged = judge(frame)
    >>> judged.users.to_list(), judged.values.tolist(), judged.verdict.tolist()
    (['a'], [3.5], [0, 3, 2])
    """
    import polars as pl

    users, items = (keys(frame[place], strip=strip) for place in ("0", "1"))
    values, verdict = ratings(frame["2"], decimal_comma=decimal_comma)
    times = None
    if "3" in frame.columns:
        times, wrong = seconds(frame["3"])
        verdict = np.where(wrong == MISSING, wrong, np.where(verdict == GOOD, wrong, verdict))
    for column in (users, items):
        if column.null_count():
            verdict[column.is_null().to_numpy()] = MISSING
    if frame[BROKEN].null_count() < len(frame):
        broken = frame[BROKEN].str.strip_chars().fill_null("") != ""
        verdict[broken.to_numpy()] = UNPARSABLE
    verdict = verdict.astype(np.uint8)
    if verdict.any():
        blank = np.logical_and.reduce([_empty(frame[name]) for name in frame.columns])
        verdict[blank] = BLANK
        good = verdict == GOOD
        chosen = pl.Series(good)
        times = None if times is None else times[good]
        users, items = (keys(column.filter(chosen), strip=strip) for column in (users, items))
        return Judged(users, items, values[good], times, verdict)
    return Judged(users, items, values, times, verdict)


def _empty(column: pl.Series) -> NDArray[np.bool_]:
    import polars as pl

    empty = (
        column.is_null()
        if column.dtype != pl.String
        else column.str.strip_chars().fill_null("") == ""
    )
    return empty.to_numpy()


def keys(column: pl.Series, *, strip: bool = True) -> pl.Series:
    """Return keys as Int64 if all are plain whole numbers, else as String; the same key is the same text in both.

    ``007`` is not 7, 7.0 in a column of floats is. Blanks around a key belong to it unless ``strip``.
    """
    import polars as pl

    kind = column.dtype
    if kind.is_integer():
        high = column.max()
        return column.cast(pl.String if isinstance(high, int) and high >= 2**63 else pl.Int64)
    if kind.is_float():
        whole = (column.floor() == column) & (column.abs() < WHOLE)
        texts = pl.DataFrame({"x": column, "whole": whole}).select(
            pl.when(pl.col("x").is_finite() & pl.col("whole"))
            .then(pl.col("x").cast(pl.Int64, strict=False).cast(pl.String))
            .when(pl.col("x").is_finite())
            .then(pl.col("x").cast(pl.String))
        )
        return keys(texts.to_series(), strip=strip)
    if kind != pl.String:
        column = column.cast(pl.String, strict=False)
    numbers = _plain_numbers(column)
    if numbers is not None:
        return numbers
    stripped = column.str.strip_chars()
    column = (stripped if strip else column).set(stripped == "", None)
    numbers = _plain_numbers(column)
    return column if numbers is None else numbers


def _plain_numbers(column: pl.Series) -> pl.Series | None:
    """Return whole numbers if all texts are such and are written in the one plain way."""
    import polars as pl

    if len(column) and column.null_count() == len(column):
        return None
    head = column[:1000].cast(pl.Int64, strict=False)
    if head.null_count() > column[:1000].null_count():
        return None
    numbers = column.cast(pl.Int64, strict=False)
    if numbers.null_count() > column.null_count():
        return None
    odd = column.str.starts_with("0") & (column.str.len_bytes() > 1)
    odd = odd | column.str.starts_with("+") | column.str.starts_with("-0")
    return None if odd.any() else numbers


def ratings(
    column: pl.Series, *, decimal_comma: bool = False
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return ratings, 0 where there is none, and the verdict on each."""
    import polars as pl

    verdict = np.full(len(column), GOOD, dtype=np.uint8)
    numbers = column.cast(pl.Float64, strict=False)
    if column.dtype == pl.Boolean or column.dtype.is_temporal():
        numbers = pl.Series([None] * len(column), dtype=pl.Float64)
    if column.dtype == pl.String and numbers.null_count():
        texts = column.str.strip_chars()
        if decimal_comma:
            texts = texts.str.replace(",", ".", literal=True)
        numbers = texts.cast(pl.Float64, strict=False)
        nothing = (texts.is_null() | texts.str.to_lowercase().is_in(NOTHING)).to_numpy()
    else:
        nothing = column.is_null().to_numpy()
    verdict[numbers.is_null().to_numpy()] = UNPARSABLE
    verdict[nothing] = MISSING
    with np.errstate(over="ignore"):
        values = numbers.fill_null(0.0).to_numpy().astype(np.float32)
    verdict[~(np.abs(values) <= LARGEST)] = ABSURD
    return values, verdict


def seconds(column: pl.Series) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return times, 0 where there is none, and the verdict on each: whole numbers as they are, dates in seconds since 1970."""
    import polars as pl

    missing = column.is_null()
    if column.dtype in (pl.Date, pl.Datetime):
        numbers = column.cast(pl.Datetime("us")).dt.epoch("s")
    elif column.dtype == pl.String:
        numbers = column.cast(pl.Int64, strict=False)
        if numbers.null_count():
            texts = column.str.strip_chars()
            missing = missing | (texts == "").fill_null(True)
            numbers = _coalesced(
                texts.cast(pl.Int64, strict=False), _floored(texts.cast(pl.Float64, strict=False))
            )
            if numbers.null_count():
                numbers = _coalesced(numbers, _dates(texts))
    else:
        numbers = (
            _floored(column) if column.dtype.is_float() else column.cast(pl.Int64, strict=False)
        )
    verdict = np.full(len(column), GOOD, dtype=np.uint8)
    verdict[numbers.is_null().to_numpy()] = UNPARSABLE
    verdict[missing.to_numpy()] = MISSING
    return numbers.fill_null(0).to_numpy(), verdict


def _coalesced(first: pl.Series, second: pl.Series) -> pl.Series:
    import polars as pl

    return pl.select(pl.coalesce(first, second)).to_series()


def _floored(column: pl.Series) -> pl.Series:
    import polars as pl

    return column.fill_nan(None).floor().cast(pl.Int64, strict=False)


def _dates(texts: pl.Series) -> pl.Series:
    """Return dates as ISO 8601 writes them, with or without a time of day and an offset, in seconds; UTC where none is said."""
    import polars as pl

    texts = (
        texts.str.replace_all("/", "-", literal=True)
        .str.replace(" UTC", "Z")
        .str.replace(r"(\d) (\d)", "${1}T${2}")
    )
    texts = texts.str.replace(r"[zZ]$", "+0000").str.replace(r"([+-]\d\d):?(\d\d)$", "${1}${2}")
    found = pl.Series([None] * len(texts), dtype=pl.Int64)
    for form in TIMES:
        if found.null_count() == 0:
            break
        read = (
            texts.str.to_date(form, strict=False)
            if form == "%Y-%m-%d"
            else texts.str.to_datetime(form, strict=False)
        )
        found = _coalesced(found, read.cast(pl.Datetime("us")).dt.epoch("s"))
    return found
