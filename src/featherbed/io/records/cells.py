"""Parsing of cells: keys, ratings and times, and the fate of lines without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from featherbed.io.records.columns import BROKEN

if TYPE_CHECKING:
    import polars as pl

GOOD, BLANK, MISSING, UNPARSABLE, ABSURD = range(5)  # fates of a line
REASONS = {MISSING: "missing", UNPARSABLE: "unparsable"}  # for skipping a line
MAX_RATING = 1e6  # magnitude: NaN, infinity and larger ratings are refused
NULLS = ("", "na", "n/a", "null", "none", "\\n", "-")  # spellings of a missing rating
MAX_EXACT = 2.0**53  # integers below are exact in float64
TIMES = ("%Y-%m-%dT%H:%M:%S%.f%z", "%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%dT%H:%M", "%Y-%m-%d")


@dataclass(frozen=True)
class ParsedLines:
    """The good lines of a block, and the fate of every line."""

    users: pl.Series
    items: pl.Series
    values: NDArray[np.float32]
    times: NDArray[np.int64] | None
    fates: NDArray[np.uint8]


def parse_lines(
    frame: pl.DataFrame, *, decimal_comma: bool = False, strip: bool = True
) -> ParsedLines:
    """Parse a frame with the columns user, item, rating and, if there is a fourth one, time.

    ``strip`` removes blanks around keys.

    >>> import polars as pl
    >>> cells = {"0": ["a", "b", ""], "1": ["7", "x", "7"], "2": ["3.5", "good", "4"]}
    >>> parsed = parse_lines(pl.DataFrame(cells | {"broken": [None] * 3}))
    >>> parsed.users.to_list(), parsed.values.tolist(), parsed.fates.tolist()
    (['a'], [3.5], [0, 3, 2])
    """
    import polars as pl

    users, items = (parse_keys(frame[place], strip=strip) for place in ("0", "1"))
    values, fates = parse_ratings(frame["2"], decimal_comma=decimal_comma)
    times = None
    if "3" in frame.columns:
        times, wrong = parse_times(frame["3"])
        fates = np.where(wrong == MISSING, wrong, np.where(fates == GOOD, wrong, fates))
    for column in (users, items):
        if column.null_count():
            fates[column.is_null().to_numpy()] = MISSING
    if frame[BROKEN].null_count() < len(frame):
        broken = frame[BROKEN].str.strip_chars().fill_null("") != ""
        fates[broken.to_numpy()] = UNPARSABLE
    fates = fates.astype(np.uint8)
    if not fates.any():
        return ParsedLines(users, items, values, times, fates)
    fates[np.logical_and.reduce([_is_empty(frame[name]) for name in frame.columns])] = BLANK
    good = fates == GOOD
    mask = pl.Series(good)
    users, items = (parse_keys(column.filter(mask), strip=strip) for column in (users, items))
    return ParsedLines(users, items, values[good], None if times is None else times[good], fates)


def _is_empty(column: pl.Series) -> NDArray[np.bool_]:
    import polars as pl

    if column.dtype != pl.String:
        return column.is_null().to_numpy()
    return (column.str.strip_chars().fill_null("") == "").to_numpy()


def parse_keys(column: pl.Series, *, strip: bool = True) -> pl.Series:
    """Return keys as Int64 if all are integers in plain notation, else as String.

    The same key has the same text in both: ``007`` is not 7, but 7.0 in a column of floats is.
    ``strip`` removes blanks around a key.
    """
    import polars as pl

    kind = column.dtype
    if kind.is_integer():
        high = column.max()
        return column.cast(pl.String if isinstance(high, int) and high >= 2**63 else pl.Int64)
    if kind.is_float():
        whole = (column.floor() == column) & (column.abs() < MAX_EXACT)
        texts = pl.DataFrame({"x": column, "whole": whole}).select(
            pl.when(pl.col("x").is_finite() & pl.col("whole"))
            .then(pl.col("x").cast(pl.Int64, strict=False).cast(pl.String))
            .when(pl.col("x").is_finite())
            .then(pl.col("x").cast(pl.String))
        )
        return parse_keys(texts.to_series(), strip=strip)
    if kind != pl.String:
        column = column.cast(pl.String, strict=False)
    numbers = _parse_integers(column)
    if numbers is not None:
        return numbers
    stripped = column.str.strip_chars()
    column = (stripped if strip else column).set(stripped == "", None)
    numbers = _parse_integers(column)
    return column if numbers is None else numbers


def _parse_integers(column: pl.Series) -> pl.Series | None:
    """Return integers if all texts are integers in plain notation."""
    import polars as pl

    if len(column) and column.null_count() == len(column):
        return None
    for part in (column[:1000], column):
        numbers = part.cast(pl.Int64, strict=False)
        if numbers.null_count() > part.null_count():
            return None
    odd = column.str.starts_with("0") & (column.str.len_bytes() > 1)
    odd = odd | column.str.starts_with("+") | column.str.starts_with("-0")
    return None if odd.any() else numbers


def parse_ratings(
    column: pl.Series, *, decimal_comma: bool = False
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return ratings, 0 for lines without one, and the fate of each line."""
    import polars as pl

    numbers, missing = column.cast(pl.Float64, strict=False), column.is_null()
    if column.dtype == pl.Boolean or column.dtype.is_temporal():
        numbers = pl.Series([None] * len(column), dtype=pl.Float64)
    if column.dtype == pl.String and numbers.null_count():
        texts = column.str.strip_chars()
        if decimal_comma:
            texts = texts.str.replace(",", ".", literal=True)
        numbers = texts.cast(pl.Float64, strict=False)
        missing = texts.is_null() | texts.str.to_lowercase().is_in(NULLS)
    fates = np.full(len(column), GOOD, dtype=np.uint8)
    fates[numbers.is_null().to_numpy()] = UNPARSABLE
    fates[missing.to_numpy()] = MISSING
    with np.errstate(over="ignore"):
        values = numbers.fill_null(0.0).to_numpy().astype(np.float32)
    fates[~(np.abs(values) <= MAX_RATING)] = ABSURD
    return values, fates


def parse_times(column: pl.Series) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return times, 0 for lines without one, and the fate of each line.

    Numbers are kept (rounded down), dates become seconds since 1970.
    """
    import polars as pl

    missing = column.is_null()
    if column.dtype in (pl.Date, pl.Datetime):
        numbers = column.cast(pl.Datetime("us")).dt.epoch("s")
    elif column.dtype == pl.String:
        numbers = column.cast(pl.Int64, strict=False)
        if numbers.null_count():
            texts = column.str.strip_chars()
            missing = missing | (texts == "").fill_null(True)
            numbers = _coalesce(
                texts.cast(pl.Int64, strict=False), _floor(texts.cast(pl.Float64, strict=False))
            )
            if numbers.null_count():
                numbers = _coalesce(numbers, _parse_dates(texts))
    else:
        is_float = column.dtype.is_float()
        numbers = _floor(column) if is_float else column.cast(pl.Int64, strict=False)
    fates = np.full(len(column), GOOD, dtype=np.uint8)
    fates[numbers.is_null().to_numpy()] = UNPARSABLE
    fates[missing.to_numpy()] = MISSING
    return numbers.fill_null(0).to_numpy(), fates


def _coalesce(first: pl.Series, second: pl.Series) -> pl.Series:
    import polars as pl

    return pl.select(pl.coalesce(first, second)).to_series()


def _floor(column: pl.Series) -> pl.Series:
    import polars as pl

    return column.fill_nan(None).floor().cast(pl.Int64, strict=False)


def _parse_dates(texts: pl.Series) -> pl.Series:
    """Return ISO 8601 dates, with or without time of day and offset (default UTC), in seconds."""
    import polars as pl

    texts = (
        texts.str.replace_all("/", "-", literal=True)
        .str.replace(" UTC", "Z")
        .str.replace(r"(\d) (\d)", "${1}T${2}")
        .str.replace(r"[zZ]$", "+0000")
        .str.replace(r"([+-]\d\d):?(\d\d)$", "${1}${2}")
    )
    found = pl.Series([None] * len(texts), dtype=pl.Int64)
    for form in TIMES:
        if found.null_count() == 0:
            break
        parse = texts.str.to_date if form == "%Y-%m-%d" else texts.str.to_datetime
        found = _coalesce(found, parse(form, strict=False).cast(pl.Datetime("us")).dt.epoch("s"))
    return found
