"""Compiled loops (numba) for look-ups, scores and training.

They are optional: without numba, or for a few rows, numpy and torch give the same results.
"""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
