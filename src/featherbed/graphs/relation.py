"""The part of a graph that tables, shared embeddings and the theory need."""

from __future__ import annotations

from typing import Any, Protocol


class Relation(Protocol):
    """A relation: ``featherbed.graphs.Graph``, or an object with the same properties."""

    @property
    def objects(self) -> int:
        """Number of objects V."""

    @property
    def matrix(self) -> Any:
        """scipy.sparse CSR [V, V], sorted, without the diagonal."""
