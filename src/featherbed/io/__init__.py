"""Readers: ratings (``records``), texts, matrices and checkpoints (``vectors``), opening of
files."""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
