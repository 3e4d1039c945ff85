"""Rows that learn by themselves: row-sparse gradients, and what rows without a gradient have missed."""

from featherbed.rows.parameter import HeldRows, RowParameter, new_rows, row_parameter

__all__ = ["HeldRows", "RowParameter", "new_rows", "row_parameter"]
