"""The packed form: stored tables that numpy alone can look up, score and search."""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
