"""Models of sequences of items, SASRec and SSE-PT: train, store, serve.

Read in this order: train (the whole run), settings, data, model, fit, ranking (the metrics), serve
(the stored files).
"""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
