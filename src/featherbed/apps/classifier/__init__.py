"""Text classifiers: train, store, serve.

Read in this order: train (the whole run), data (with the settings), model, serve (stored files).
"""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
