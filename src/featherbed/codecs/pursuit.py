"""Sparse codes: row ≈ Σ_j v_j A[i_j], a few of many atoms, found by matching pursuit; atoms by least squares, in turns."""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.codecs.kmeans import Codes, Floats
from featherbed.packed.levels import Levels

HELD = (
    1 << 23
)  # floats held of a block of rows, of each kind: small products of matrices keep threads waiting
RIDGE = (
    1e-5  # of an atom's square: atoms that are nearly alike do not get huge values of opposite sign
)
SWEEPS = 2  # of coordinate descent after each new atom, and over rounded values
LAST_SWEEPS = 30
NOTHING = 1e-3  # share of an atom below which the atoms chosen before it say it all


class Coder:
    """Finds atoms and values of rows: "ksvd" by matching pursuit, "hash" by cosine, "anchors" with values of at least 0.

    >>> atoms = np.array([[2, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=np.float32)
    >>> chosen, values = Coder(atoms, 2, "ksvd")(np.array([[4, 0, -3]], dtype=np.float32))
    >>> chosen.tolist(), values.round(3).tolist()
    ([[0, 2]], [[2.0, -3.0]])
    """

    def __init__(self, atoms: Floats, codes: int, how: str) -> None:
        self.atoms, self.codes, self.how = atoms, min(codes, len(atoms)), how
        wide = atoms.astype(np.float64)
        self.gram = wide @ wide.T  # [K, K]
        self.unit = (wide / np.sqrt(np.maximum(self.gram.diagonal(), 1e-30))[:, None]).astype(
            np.float32
        )
        self.step = max(
            32, HELD // max(len(atoms), 2 * self.codes * self.codes, self.codes * atoms.shape[1])
        )

    def __call__(self, rows: Floats) -> tuple[Codes, Floats]:  # [n, d] -> [n, s], [n, s]
        """Return the atoms of rows, none twice, and their values."""
        chosen = np.empty((len(rows), self.codes), dtype=np.int32)
        values = np.empty((len(rows), self.codes), dtype=np.float32)
        find = {"hash": self._near, "anchors": self._positive}.get(self.how, self._pursue)
        for start in range(0, len(rows), self.step):
            part = slice(start, start + self.step)
            chosen[part], values[part] = find(rows[part])
        return chosen, values

    def _near(self, rows: Floats) -> tuple[Codes, Floats]:
        match = rows @ self.unit.T
        chosen = np.argpartition(-match, self.codes - 1, axis=1)[:, : self.codes].astype(np.int32)
        return chosen, self._solve(rows, chosen)

    def _pursue(self, rows: Floats) -> tuple[Codes, Floats]:
        """Orthogonal matching pursuit: the best atom for what is left, which is then left orthogonal to all atoms chosen."""
        left, each = rows.copy(), np.arange(len(rows))[:, None]
        chosen = np.empty((len(rows), self.codes), dtype=np.int32)
        basis = np.empty((len(rows), self.codes, rows.shape[1]), dtype=np.float32)
        for t in range(self.codes):
            match = np.abs(left @ self.unit.T)
            match[each, chosen[:, :t]] = -1
            chosen[:, t] = match.argmax(axis=1)
            fresh, known = self.unit[chosen[:, t]], basis[:, :t]
            fresh -= (np.matmul(known, fresh[:, :, None]).transpose(0, 2, 1) @ known)[:, 0]
            length = np.sqrt(np.einsum("nd,nd->n", fresh, fresh))
            fresh *= np.where(length > NOTHING, 1 / np.maximum(length, NOTHING), 0)[:, None]
            left -= np.einsum("nd,nd->n", fresh, left)[:, None] * fresh
            basis[:, t] = fresh
        return chosen, self._solve(rows, chosen)

    def _solve(self, rows: Floats, chosen: Codes) -> Floats:  # [n, d], [n, s] -> [n, s]
        """Return the values that come nearest to rows with given atoms."""
        gram = self.gram[chosen[:, :, None], chosen[:, None, :]]
        slot = np.arange(chosen.shape[1])
        gram[:, slot, slot] *= 1 + RIDGE
        values: Floats = np.linalg.solve(gram, self._right(rows, chosen)[:, :, None])[
            :, :, 0
        ].astype(np.float32)
        return values

    def _right(self, rows: Floats, chosen: Codes) -> Any:  # [n, s]: row . atom
        return np.matmul(self.atoms[chosen], rows[:, :, None])[:, :, 0]

    def _positive(self, rows: Floats) -> tuple[Codes, Floats]:
        """Matching pursuit with atoms that point along what is left, values of at least 0 by coordinate descent."""
        left, each = rows.copy(), np.arange(len(rows))[:, None]
        chosen = np.empty((len(rows), self.codes), dtype=np.int32)
        descent = Descent(self.codes, len(rows))
        for t in range(self.codes):
            match = left @ self.unit.T
            match[each, chosen[:, :t]] = -np.inf
            chosen[:, t] = match.argmax(axis=1)
            descent.add(
                self.gram, chosen[:, : t + 1], self._right(rows, chosen[:, t : t + 1])[:, 0]
            )
            descent.sweep(
                SWEEPS if t + 1 < self.codes else LAST_SWEEPS, lambda want: np.maximum(want, 0)
            )
            left = (
                rows
                - np.matmul(descent.values[: t + 1].T[:, None], self.atoms[chosen[:, : t + 1]])[
                    :, 0
                ]
            )
        return chosen, descent.values.T

    def rounded(
        self, rows: Floats, chosen: Codes, values: Floats, levels: Levels
    ) -> Floats:  # -> [n, s]
        """Return values that are levels: each in turn the level that is best with the others as they are."""
        if levels.table is None:
            return values
        table = np.unique(levels.table)
        cuts, found = (table[1:] + table[:-1]) / 2, np.empty_like(values)

        def snap(want: Floats) -> Floats:
            nearest: Floats = table[np.searchsorted(cuts, want)]
            return nearest

        for start in range(0, len(rows), self.step):
            part = slice(start, start + self.step)
            descent, right = (
                Descent(self.codes, len(rows[part])),
                self._right(rows[part], chosen[part]),
            )
            for t in range(self.codes):
                descent.add(self.gram, chosen[part, : t + 1], right[:, t], snap(values[part, t]))
            descent.sweep(SWEEPS, snap)
            found[part] = descent.values.T
        return found


class Descent:
    """Coordinate descent on ||row - Σ_j v_j a_j||² for many rows at once; rows stand last: every step is one stretch."""

    def __init__(self, codes: int, rows: int) -> None:
        self.count = 0
        self.gram = np.zeros((codes, codes, rows), dtype=np.float32)
        self.right = np.zeros((codes, rows), dtype=np.float32)
        self.values = np.zeros((codes, rows), dtype=np.float32)

    def add(
        self, gram: Any, chosen: Codes, right: Floats, values: Floats | float = 0.0
    ) -> None:  # chosen [n, t], the new one last
        """Take one more atom of each row in."""
        t = self.count
        self.gram[t, : t + 1] = self.gram[: t + 1, t] = gram[chosen[:, t], chosen.T]
        self.right[t], self.values[t], self.count = right, values, t + 1

    def sweep(self, sweeps: int, allowed: Any) -> None:
        """Set every value in turn to what ``allowed`` makes of the best one."""
        t = self.count
        for j in [*range(t - 1, -1, -1), *list(range(t)) * (sweeps - 1)]:
            slope = np.einsum("tn,tn->n", self.gram[j, :t], self.values[:t]) - self.right[j]
            self.values[j] = allowed(self.values[j] - slope / np.maximum(self.gram[j, j], 1e-30))


def decode(
    chosen: Codes, values: Floats, atoms: Floats
) -> Floats:  # [n, s], [n, s], [K, d] -> [n, d]
    """Add up the atoms of rows, each times its value."""
    rows = values[:, :1] * atoms[chosen[:, 0]]
    for j in range(1, chosen.shape[1]):
        rows += values[:, j : j + 1] * atoms[chosen[:, j]]
    return rows


def nearest_atoms(
    rows: Floats,  # [n, d]
    atoms: Floats,  # [K, d]
    chosen: Codes,  # [n, s]
    values: Floats,  # [n, s]
    weights: Any = None,  # [n]
) -> Floats:  # -> [K, d]
    """Return the atoms that come nearest to rows with given codes and values; those nobody uses stay.

    >>> rows, codes = np.array([[2.0, 0.0], [4.0, 0.0]], dtype=np.float32), np.zeros((2, 1), dtype=np.int32)
    >>> nearest_atoms(rows, np.ones((1, 2), dtype=np.float32), codes, np.ones((2, 1), dtype=np.float32)).round(3)
    array([[3., 0.]], dtype=float32)
    """
    from scipy.linalg import solve
    from scipy.sparse import csr_array

    count, codes = chosen.shape
    entries = values.reshape(-1).astype(np.float64)
    used = csr_array(
        (entries, chosen.reshape(-1), np.arange(count + 1) * codes), shape=(count, len(atoms))
    )
    weighted = used if weights is None else used * weights[:, None]
    gram = (used.T @ weighted).toarray()
    gram[np.diag_indices_from(gram)] += 1e-6 * (float(gram.diagonal().mean()) or 1.0)
    left = rows - decode(chosen, values, atoms)
    moved: Floats = solve(gram, weighted.T @ left, assume_a="pos").astype(np.float32)
    return atoms + moved
