"""Packed tables in other systems: transformers and torch models, ONNX, rows read from disk."""
