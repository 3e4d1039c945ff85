"""Compiled loops (numba) for look-ups and scores. Optional: without numba, or for a few rows, numpy gives the same results."""
