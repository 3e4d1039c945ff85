"""Recommenders from files of ratings or of events: train, store, serve, update.

Read in this order: train (the whole run), settings, data, graded, model or stream (the fit), serve.
Rankings of implicit feedback: rank (the whole run), als (the fit), bits (the bytes).
"""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
