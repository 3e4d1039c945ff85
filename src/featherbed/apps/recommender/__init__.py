"""Recommenders from files of ratings: train, store, serve.

Read in this order: train (the whole run), settings, data, graded, model or stream (the fit), serve.
"""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
