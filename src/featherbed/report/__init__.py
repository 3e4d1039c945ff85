"""Report pages: the only HTML of the package. Pages are single files that load nothing else."""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
