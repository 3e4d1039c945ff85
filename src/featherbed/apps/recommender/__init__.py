"""Recommenders from files of ratings: train, store, serve.

Read in this order: settings, data, model, fit (graded, tables or stream), store, serve, insight,
run.
"""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
