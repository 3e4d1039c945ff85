"""Compiled loops (numba) for look-ups, scores and training.

They are optional: without numba, or for a few rows, numpy and torch give the same results.
"""

# Importing this package imports nothing: names are imported from their modules, and these may be
# used by other packages.
__all__ = [
    "choose_levels",
    "compiled",
    "cores",
    "draw_negatives",
    "ranking_pass",
    "run",
    "set_threads",
    "solve_rows",
    "threads",
]
