"""Readers of texts: labeled texts for classifiers, plain text for language models; tokenizers."""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
