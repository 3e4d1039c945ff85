"""Rows of new users and items in closed form, with numpy alone: ratings and implicit feedback.

Implicit feedback (Hu, Koren and Volinsky 2008): every pair has the preference p = 1 if the user
chose the item, otherwise 0, and counts with the confidence c, 1 where p = 0. The row x of a user
follows from the rows y of all items,

    x = (Y'Y + Σ_chosen (c - 1) y y' + λ I)^-1 Σ_chosen c y

and that of an item from the rows of all users alike. Y'Y is computed once.

Ratings: with rows x ~ N(m, diag(s)) as prior, ratings r with the rows y of the other side and the
noise of the model's error,

    x = m + (Y'Y / noise + diag(1 / s))^-1 Y' (r - Y m) / noise
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Doubles = NDArray[np.float64]
COUNTS = ("linear", "log", "binary")  # confidence by count
LN2 = float(np.log(2.0))


@dataclass(frozen=True)
class Confidence:
    """Settings of implicit feedback: confidence alpha f(n) of n events, λ, and column weights.

        f(n) = n, log2(1 + n) or 1  for counts "linear", "log" and "binary"

    Rows of users are stored at length 1, since the order of items does not depend on it, after
    column k was weighted by (Y'Y)_kk^sharpness: that favors the columns of the most variance.
    ``typical`` is the mean f(n) in training, for events whose counts are not stored.

    >>> Confidence(alpha=4.0, regularization=10.0, counts="log").weights([1, 3]).tolist()
    [4.0, 8.0]
    """

    alpha: float
    regularization: float
    counts: str = "linear"
    sharpness: float = 0.0
    typical: float = 1.0

    def values(self, counts: ArrayLike) -> Doubles:  # [n]
        """Return f(n)."""
        given = np.asarray(counts, dtype=np.float64)
        if self.counts == "linear":
            return given
        return np.log1p(given) / LN2 if self.counts == "log" else np.ones_like(given)

    def weights(self, counts: ArrayLike) -> Doubles:  # [n]
        """Return the confidence of pairs."""
        return self.alpha * self.values(counts)

    def column_weights(self, gram: Doubles) -> Doubles:  # [d, d] -> [d]
        """Return the weights of columns, at most 1."""
        share = np.diag(gram) / max(float(np.diag(gram).max(initial=0.0)), 1e-30)
        return np.maximum(share, 1e-12) ** self.sharpness

    def finish(self, rows: Doubles, gram: Doubles) -> Doubles:  # [..., d], [d, d]
        """Return rows of users as they are stored: columns weighted, length 1."""
        weighted = rows * self.column_weights(gram)
        length = np.linalg.norm(weighted, axis=-1, keepdims=True)
        return np.asarray(weighted / np.where(length > 0, length, 1.0), dtype=np.float64)

    def values_by_name(self) -> dict[str, Any]:
        """Return the settings as plain JSON."""
        return asdict(self)


def solve_implicit(
    gram: Doubles, rows: Doubles, weights: Doubles, regularization: float
) -> Doubles:  # [d, d], [n, d], [n] -> [d]
    """Return the row of a user (or item) from rows with confidence ``weights``, the Gram matrix of
    all.

    >>> rows = np.array([[1.0, 0.0]])
    >>> solve_implicit(rows.T @ rows, rows, np.array([3.0]), 1.0).tolist()
    [0.75, 0.0]
    """
    system = gram + (rows.T * (weights - 1)) @ rows
    system[np.diag_indices_from(system)] += regularization
    return np.asarray(np.linalg.solve(system, weights @ rows), dtype=np.float64)


def solve_ratings(
    rows: Doubles,
    residuals: Doubles,
    center: Doubles,
    variance: Doubles,
    noise: float,
    earlier: tuple[Doubles, Doubles] | None = None,
) -> Doubles:  # [n, d], [n], [d], [d] -> [d]
    """Return the row of a user (or item) from ratings less all that does not depend on it.

    ``earlier`` are a row and the rows [m, d] of the ratings that it was computed from: the result
    is that of the earlier ratings and the new ones together.

    >>> solve_ratings(np.ones((1, 1)), np.array([3.0]), np.zeros(1), np.ones(1), 0.5).tolist()
    [2.0]
    """
    # a column of no variance has no weight: scaling by its root keeps the system regular
    root = np.sqrt(variance)
    scaled = rows * root
    right = scaled.T @ (residuals - rows @ center) / noise
    system = scaled.T @ scaled / noise + np.eye(len(root))
    if earlier is not None:
        old, before = earlier
        before = before * root
        past = before.T @ before / noise + np.eye(len(root))
        right += past @ np.where(root > 0, (old - center) / np.where(root > 0, root, 1), 0)
        system += before.T @ before / noise
    row: Doubles = center + root * np.linalg.solve(system, right)
    return row
