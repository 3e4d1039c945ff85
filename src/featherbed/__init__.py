"""featherbed: compact embedding tables for PyTorch.

Train them, compress existing ones, store each in one file, serve it without torch. Public names
are listed in ``__init__.pyi`` and loaded on first use, so ``import featherbed`` and
``featherbed.load`` never import torch.
"""

from featherbed.lazy import attach
from featherbed.version import __version__ as __version__

__getattr__, __dir__, __all__ = attach(__name__)
