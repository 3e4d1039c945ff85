"""Lazily updated rows: row-sparse gradients and the missed updates of other rows."""

from featherbed.optim.lazy.rows import LazyRows, RowParameter, lazy_rows, settle_parameter, track

__all__ = ["LazyRows", "RowParameter", "lazy_rows", "settle_parameter", "track"]
