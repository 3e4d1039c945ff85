"""Rows that are updated lazily: row-sparse gradients, and the updates that other rows have missed."""

from featherbed.optim.lazy.rows import LazyRows, RowParameter, lazy_rows, settle_parameter, track

__all__ = ["LazyRows", "RowParameter", "lazy_rows", "settle_parameter", "track"]
