"""Ratings and titles of items from files, generated ratings, and streams of ratings."""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
