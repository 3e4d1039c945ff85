"""Codecs: methods that compress a matrix to packed bands, and the search for the best of them."""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
