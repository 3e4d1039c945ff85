"""Embedding matrices and row weights from files."""

from featherbed.io.vectors.sources import Source, read_matrix
from featherbed.io.vectors.weights import read_weights

__all__ = ["Source", "read_matrix", "read_weights"]
