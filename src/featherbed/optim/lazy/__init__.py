"""Lazily updated rows: row-sparse gradients and the missed updates of other rows."""

from featherbed.optim.lazy.native import KINDS, RULES, serves
from featherbed.optim.lazy.rows import (
    LazyRows,
    RowParameter,
    lazy_rows,
    settle,
    settle_parameter,
    track,
)

__all__ = [
    "KINDS",
    "RULES",
    "LazyRows",
    "RowParameter",
    "lazy_rows",
    "serves",
    "settle",
    "settle_parameter",
    "track",
]
