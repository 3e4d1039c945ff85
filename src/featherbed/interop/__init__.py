"""Other people's systems: transformers models, ONNX, rows read from disk."""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
