"""Readers: ratings (``records``), texts, matrices and checkpoints (``vectors``), opening of files."""

__all__ = ["find_data", "find_file", "open_compressed", "read_arrays", "read_lines", "write_arrays"]
