"""Export of packed tables to ONNX."""
