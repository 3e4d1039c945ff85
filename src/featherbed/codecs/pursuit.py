"""Sparse coding: row ≈ Σ_j v_j A[i_j] by matching pursuit, and atoms by least squares."""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.codecs.coding import Codes, Floats
from featherbed.packed.levels import ValueLevels

HELD = 1 << 23  # floats of each array for a block of rows
RIDGE = 1e-5  # of an atom's square: similar atoms do not get huge values of opposite sign
SWEEPS = 2  # of coordinate descent after each new atom, and over rounded values
LAST_SWEEPS = 30
NOTHING = 1e-3  # norm of the orthogonal part of an atom below which it adds nothing


class SparseCoder:
    """Finds atoms and values of rows.

    Searches: "ksvd", orthogonal matching pursuit; "hash", by cosine; "anchors", nonnegative values.

    >>> atoms = np.array([[2, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=np.float32)
    >>> coder = SparseCoder(atoms, 2, "ksvd")
    >>> indices, values = coder(np.array([[4, 0, -3]], dtype=np.float32))
    >>> indices.tolist(), values.round(3).tolist()
    ([[0, 2]], [[2.0, -3.0]])
    """

    def __init__(self, atoms: Floats, codes: int, search: str) -> None:
        self.atoms, self.codes, self.search = atoms, min(codes, len(atoms)), search
        wide = atoms.astype(np.float64)
        self.gram = wide @ wide.T  # [K, K]
        norms = np.sqrt(np.maximum(self.gram.diagonal(), 1e-30))
        self.unit = (wide / norms[:, None]).astype(np.float32)
        widest = max(len(atoms), 2 * self.codes * self.codes, self.codes * atoms.shape[1])
        self.step = max(32, HELD // widest)

    def __call__(self, rows: Floats) -> tuple[Codes, Floats]:  # [n, d] -> [n, s], [n, s]
        """Return the distinct atoms of rows and their values."""
        indices = np.empty((len(rows), self.codes), dtype=np.int32)
        values = np.empty((len(rows), self.codes), dtype=np.float32)
        find = {"hash": self._near, "anchors": self._positive}.get(self.search, self._pursue)
        for start in range(0, len(rows), self.step):
            part = slice(start, start + self.step)
            indices[part], values[part] = find(rows[part])
        return indices, values

    def _near(self, rows: Floats) -> tuple[Codes, Floats]:
        match = rows @ self.unit.T
        indices = np.argpartition(-match, self.codes - 1, axis=1)[:, : self.codes].astype(np.int32)
        return indices, self._solve(rows, indices)

    def _pursue(self, rows: Floats) -> tuple[Codes, Floats]:
        """Orthogonal matching pursuit: the best atom for the residual, which is then projected."""
        left, each = rows.copy(), np.arange(len(rows))[:, None]
        indices = np.empty((len(rows), self.codes), dtype=np.int32)
        basis = np.empty((len(rows), self.codes, rows.shape[1]), dtype=np.float32)
        for t in range(self.codes):
            match = np.abs(left @ self.unit.T)
            match[each, indices[:, :t]] = -1
            indices[:, t] = match.argmax(axis=1)
            fresh, known = self.unit[indices[:, t]], basis[:, :t]
            fresh -= (np.matmul(known, fresh[:, :, None]).transpose(0, 2, 1) @ known)[:, 0]
            length = np.sqrt(np.einsum("nd,nd->n", fresh, fresh))
            fresh *= np.where(length > NOTHING, 1 / np.maximum(length, NOTHING), 0)[:, None]
            left -= np.einsum("nd,nd->n", fresh, left)[:, None] * fresh
            basis[:, t] = fresh
        return indices, self._solve(rows, indices)

    def _solve(self, rows: Floats, indices: Codes) -> Floats:  # [n, d], [n, s] -> [n, s]
        """Return the least-squares values of given atoms."""
        gram = self.gram[indices[:, :, None], indices[:, None, :]]
        slot = np.arange(indices.shape[1])
        gram[:, slot, slot] *= 1 + RIDGE
        solved = np.linalg.solve(gram, self._right(rows, indices)[:, :, None])[:, :, 0]
        values: Floats = solved.astype(np.float32)
        return values

    def _right(self, rows: Floats, indices: Codes) -> Any:  # [n, s]: row . atom
        return np.matmul(self.atoms[indices], rows[:, :, None])[:, :, 0]

    def _positive(self, rows: Floats) -> tuple[Codes, Floats]:
        """Matching pursuit with nonnegative values, which coordinate descent finds."""
        left, each = rows.copy(), np.arange(len(rows))[:, None]
        indices = np.empty((len(rows), self.codes), dtype=np.int32)
        descent = CoordinateDescent(self.codes, len(rows))
        for t in range(self.codes):
            match = left @ self.unit.T
            match[each, indices[:, :t]] = -np.inf
            indices[:, t] = match.argmax(axis=1)
            known = indices[:, : t + 1]
            descent.add(self.gram, known, self._right(rows, indices[:, t : t + 1])[:, 0])
            sweeps = SWEEPS if t + 1 < self.codes else LAST_SWEEPS
            descent.sweep(sweeps, lambda best: np.maximum(best, 0))
            left = rows - np.matmul(descent.values[: t + 1].T[:, None], self.atoms[known])[:, 0]
        return indices, descent.values.T

    def round(self, rows: Floats, indices: Codes, values: Floats, levels: ValueLevels) -> Floats:
        """Return values [n, s] rounded to levels by coordinate descent."""
        if levels.table is None:
            return values
        table = np.unique(levels.table)
        cuts, found = (table[1:] + table[:-1]) / 2, np.empty_like(values)

        def to_level(best: Floats) -> Floats:
            nearest: Floats = table[np.searchsorted(cuts, best)]
            return nearest

        for start in range(0, len(rows), self.step):
            part = slice(start, start + self.step)
            descent = CoordinateDescent(self.codes, len(rows[part]))
            right = self._right(rows[part], indices[part])
            for t in range(self.codes):
                initial = to_level(values[part, t])
                descent.add(self.gram, indices[part, : t + 1], right[:, t], initial)
            descent.sweep(SWEEPS, to_level)
            found[part] = descent.values.T
        return found


class CoordinateDescent:
    """Coordinate descent on ||row - Σ_j v_j a_j||² for many rows at once, the last axis."""

    def __init__(self, codes: int, rows: int) -> None:
        self.count = 0
        self.gram = np.zeros((codes, codes, rows), dtype=np.float32)
        self.right = np.zeros((codes, rows), dtype=np.float32)
        self.values = np.zeros((codes, rows), dtype=np.float32)

    def add(self, gram: Any, indices: Codes, right: Floats, values: Floats | float = 0.0) -> None:
        """Add one atom of each row, the last of ``indices`` [n, t]."""
        t = self.count
        self.gram[t, : t + 1] = self.gram[: t + 1, t] = gram[indices[:, t], indices.T]
        self.right[t], self.values[t], self.count = right, values, t + 1

    def sweep(self, sweeps: int, allowed: Any) -> None:
        """Set every value in turn to ``allowed`` of its optimum."""
        t = self.count
        for j in [*range(t - 1, -1, -1), *list(range(t)) * (sweeps - 1)]:
            slope = np.einsum("tn,tn->n", self.gram[j, :t], self.values[:t]) - self.right[j]
            self.values[j] = allowed(self.values[j] - slope / np.maximum(self.gram[j, j], 1e-30))


def decode(indices: Codes, values: Floats, atoms: Floats) -> Floats:
    """Return the rows [n, d] of atoms [K, d] with indices [n, s] and values [n, s]."""
    rows = values[:, :1] * atoms[indices[:, 0]]
    for j in range(1, indices.shape[1]):
        rows += values[:, j : j + 1] * atoms[indices[:, j]]
    return rows


def nearest_atoms(
    rows: Floats,  # [n, d]
    atoms: Floats,  # [K, d]
    indices: Codes,  # [n, s]
    values: Floats,  # [n, s]
    weights: Any = None,  # [n]
) -> Floats:
    """Return the least-squares atoms [K, d] of given codes and values; unused ones stay.

    >>> rows, one = np.array([[2, 0], [4, 0]], dtype=np.float32), np.ones((1, 2), dtype=np.float32)
    >>> nearest_atoms(rows, one, np.zeros((2, 1), dtype=np.int32), one.T).round(3)
    array([[3., 0.]], dtype=float32)
    """
    from scipy.linalg import solve
    from scipy.sparse import csr_array

    count, codes = indices.shape
    entries = values.reshape(-1).astype(np.float64)
    starts = np.arange(count + 1) * codes
    used = csr_array((entries, indices.reshape(-1), starts), shape=(count, len(atoms)))
    weighted = used if weights is None else used * weights[:, None]
    gram = (used.T @ weighted).toarray()
    gram[np.diag_indices_from(gram)] += 1e-6 * (float(gram.diagonal().mean()) or 1.0)
    left = rows - decode(indices, values, atoms)
    moved: Floats = solve(gram, weighted.T @ left, assume_a="pos").astype(np.float32)
    return atoms + moved
