"""Ratings and titles of items from files, generated ratings, and streams of ratings."""

from featherbed.io.records.datasets import make_ratings, read_movielens, stream_ratings
from featherbed.io.records.ratings import (
    POLICIES,
    Ratings,
    RatingsReading,
    is_constant,
    read_ratings,
    resolve_duplicates,
)
from featherbed.io.records.spool import (
    block_slices,
    count_ids,
    group_by_user,
    is_stored,
    new_array,
    select_rows,
)
from featherbed.io.records.titles import ItemTitles, read_titles

__all__ = [
    "POLICIES",
    "ItemTitles",
    "Ratings",
    "RatingsReading",
    "block_slices",
    "count_ids",
    "group_by_user",
    "is_constant",
    "is_stored",
    "make_ratings",
    "new_array",
    "read_movielens",
    "read_ratings",
    "read_titles",
    "resolve_duplicates",
    "select_rows",
    "stream_ratings",
]
