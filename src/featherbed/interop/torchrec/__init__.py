"""Tables divided among processes, with TorchRec for plans, exchange of ids and of rows.

Public names are listed in ``__init__.pyi``; ``fb.distributed`` is this package. Nothing here is
imported before it is used, and TorchRec only then.
"""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
