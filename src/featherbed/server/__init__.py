"""The HTTP server: rows, search, recommendations, classes and texts from stored files, no torch.

Read in this order: catalog (the served files), requests (reading and limits), guard (token, size,
time and metrics of every request), app (endpoints), process (workers, reloading, shutdown).
"""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
