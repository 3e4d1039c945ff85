"""The combine stage of the composer, for numpy and torch arrays.

row(id) = combine(dictionary[codes(id).indices], codes(id).values)
"""

from __future__ import annotations

from typing import Any

from featherbed.errors import ArgumentError

COMBINES = ("sum", "product", "concat")


def combine(
    atoms: Any, values: Any | None, how: str
) -> Any:  # atoms [..., s, d], values [..., s] -> [..., d]
    """Turn the gathered atoms of each row into the row.

    ``sum``: r = Σ_j v_j a_j;  ``product``: r = Π_j v_j a_j (elementwise);  ``concat``: r = [v_1
    a_1, ..., v_s a_s].

    >>> import numpy as np
    >>> atoms = np.array([[[1.0, 2.0], [3.0, 4.0]]])
    >>> combine(atoms, None, "sum"), combine(atoms, np.array([[1.0, 0.5]]), "product")
    (array([[4., 6.]]), array([[1.5, 4. ]]))
    >>> combine(atoms, None, "concat").shape
    (1, 4)
    """
    if values is not None:
        atoms = atoms * values[..., None]
    if how == "sum":
        return atoms.sum(-2)
    if how == "product":
        return atoms.prod(-2)
    if how == "concat":
        return atoms.reshape((*atoms.shape[:-2], atoms.shape[-2] * atoms.shape[-1]))
    raise ArgumentError(f"combine={how!r}: use one of {', '.join(COMBINES)}")
