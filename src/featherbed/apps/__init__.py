"""Applications on top of the public library: recommenders, text classifiers, language models."""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
