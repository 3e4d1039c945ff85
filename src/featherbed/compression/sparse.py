"""Sparse codes: a row is a few atoms, each times a value, row ≈ Σ_j v_j A[i_j] (+ mean).

Atoms all have length sqrt(d), so that the values of all of them share one table of levels and scales of int8 atoms fit float16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.coding import Codes, kmeans
from featherbed.compression.clusters import by_importance
from featherbed.compression.method import Fit, Job, Method, Settings, matrix_size, stream_size
from featherbed.compression.plain import moments
from featherbed.compression.rows import Floats
from featherbed.packed.band import Affine, Band
from featherbed.packed.bits import width
from featherbed.packed.codes import Fixed
from featherbed.packed.levels import Levels
from featherbed.packed.matrix import Matrix, level_bits

LEARN = 1 << 15  # rows the dictionary is learnt from, at most
HELD = 1 << 23  # floats held of a block of rows, of each kind: small products of matrices keep threads waiting
LEVELLED = 1 << 20  # values the levels are chosen on
ROUNDS = 8
MOST = 64  # codes a row
ANCHORS = (256, 500, 512, 1000, 1024, 2048)
RIDGE = 1e-5  # of an atom's square: atoms that are nearly alike do not get huge values of opposite sign
SWEEPS = 2  # of coordinate descent after each new atom, and over rounded values
LAST_SWEEPS = 30
NOTHING = 1e-3  # share of an atom below which the atoms chosen before it say it all


class Sparse(Method):
    """``codes`` of ``anchors`` atoms a row, with values.

    "ksvd": orthogonal matching pursuit over a learnt dictionary (k-SVD: Aharon et al. 2006, Rubinstein et al. 2008);
    "hash": the nearest centroids by cosine, values by least squares (Guo et al. 2017); "hash+ksvd": that, then k-SVD;
    "anchors": values that are not negative, as Anchor & Transform keeps them (Liang et al. 2021).
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays these settings make."""
        anchors, bits = settings["anchors"], level_bits(settings["values"])
        total = stream_size(rows, settings["codes"] * (width(anchors) + bits)) + matrix_size(settings["kind"], anchors, dim)
        return total + (4 << bits if bits < 16 else 0) + (4 * dim if self.name == "ksvd" else 0)

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:  # noqa: ARG002 - one signature
        """Return the most codes that fit, for each number of anchors and kind of values, the best promise first."""
        found = []
        for anchors in (k for k in ANCHORS if k <= rows // 2):
            for values in ("int8", "int4"):
                fixed: Settings = {"anchors": anchors, "values": values}
                counts = range(1, min(MOST, dim) + 1)
                shapes = [fixed | {"codes": s, "kind": kind} for s in counts for kind in ("int8", "float16")]
                found += [s for s in shapes if self.size(rows, dim, **s) <= budget][-1:]
        return sorted(found, key=lambda s: -s["codes"] * width(s["anchors"]) ** 1.5)  # as errors on GloVe go

    def work(self, dim: int, **settings: Any) -> float:
        """Return how long a fit takes for each row: all atoms are tried for every code."""
        return float(dim * settings["anchors"] * settings["codes"])

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:  # noqa: ARG002 - one signature
        """Return settings with no more codes than there are anchors."""
        return settings | {"codes": min(settings["codes"], settings["anchors"])}

    def fit(self, job: Job, **settings: Any) -> Fit:
        """Compress the matrix."""
        return SparseFit(job, settings, self.name)


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
        self.unit = (wide / np.sqrt(np.maximum(self.gram.diagonal(), 1e-30))[:, None]).astype(np.float32)
        self.step = max(32, HELD // max(len(atoms), 2 * self.codes * self.codes, self.codes * atoms.shape[1]))

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
        values: Floats = np.linalg.solve(gram, self._right(rows, chosen)[:, :, None])[:, :, 0].astype(np.float32)
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
            descent.add(self.gram, chosen[:, : t + 1], self._right(rows, chosen[:, t : t + 1])[:, 0])
            descent.sweep(SWEEPS if t + 1 < self.codes else LAST_SWEEPS, lambda want: np.maximum(want, 0))
            left = rows - np.matmul(descent.values[: t + 1].T[:, None], self.atoms[chosen[:, : t + 1]])[:, 0]
        return chosen, descent.values.T

    def rounded(self, rows: Floats, chosen: Codes, values: Floats, levels: Levels) -> Floats:  # -> [n, s]
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
            descent, right = Descent(self.codes, len(rows[part])), self._right(rows[part], chosen[part])
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


class SparseFit(Fit):
    """The state of a sparse fit: the best dictionary so far, codes and values of the sample."""

    refinable = True

    def __init__(self, job: Job, settings: Settings, name: str) -> None:
        self.job, self.settings, self.name = job, settings, name
        self.ids = job.rows.draw(min(LEARN, job.learn), job.generator)
        self.mean: Floats | None = moments(job)[0].astype(np.float32) if name == "ksvd" else None
        self.sample, self.weights = self._centred(job.rows.take(self.ids)), job.importance[self.ids]
        job.tell("first dictionary", 0.0)
        self._code(self._first(), name.partition("+")[0])
        self.refine(0 if name == "hash" else ROUNDS)

    def _centred(self, rows: Floats) -> Floats:
        return rows if self.mean is None else rows - self.mean

    def _first(self) -> Floats:
        """Return centroids of rows drawn by importance."""
        drawn = by_importance(self.sample, self.weights, self.job.generator)
        return kmeans(drawn, self.settings["anchors"], self.job.seed())

    def _code(self, atoms: Floats, how: str) -> None:
        """Round atoms to what is stored, find codes for the rounded ones, and what they leave."""
        lengths = np.sqrt(np.einsum("kd,kd->k", atoms, atoms))
        none = np.flatnonzero(lengths < 1e-30)
        atoms[none] = self.job.generator.standard_normal((len(none), atoms.shape[1]))
        lengths[none] = np.sqrt(np.einsum("kd,kd->k", atoms[none], atoms[none]))
        atoms = atoms * (np.sqrt(atoms.shape[1]) / lengths)[:, None].astype(np.float32)
        self.dictionary = Matrix.encode(atoms, self.settings["kind"], scale_kind="float16")
        self.coder = Coder(self.dictionary.dense(), self.settings["codes"], how)
        self.chosen, self.values = self.coder(self.sample)
        self.left = self.sample - decode(self.chosen, self.values, self.coder.atoms)
        self.error = float(self.weights @ np.einsum("nd,nd->n", self.left, self.left))

    def refine(self, rounds: int) -> None:
        """Alternate: atoms for the codes (k-SVD or least squares), codes for the atoms; the best of all rounds is kept."""
        kept = dict(self.__dict__)
        for done in range(rounds):
            self.job.tell("refining", done / rounds)
            if self.name.endswith("ksvd"):
                self._code(self._turn_atoms(), "ksvd")
            else:
                self._code(self._solve_atoms(), self.name)
            if self.error < kept["error"]:
                kept = dict(self.__dict__)
        self.__dict__.update(kept)

    def _turn_atoms(self) -> Floats:  # -> [K, d]
        """Turn each atom towards what its rows leave without it: one step of the power method, values along (k-SVD)."""
        atoms, left, values = self.coder.atoms.copy(), self.left.copy(), self.values.reshape(-1).copy()
        order = np.argsort(self.chosen, axis=None, kind="stable")
        ends = np.cumsum(np.bincount(self.chosen.reshape(-1), minlength=len(atoms)))
        worst = iter(np.argsort(-self.weights * np.einsum("nd,nd->n", left, left))[: len(atoms)].tolist())
        for k, at in enumerate(np.split(order, ends[:-1])):
            if not len(at):
                atoms[k] = left[next(worst, 0)]  # nobody uses it: it becomes what the worst row lacks
                continue
            rows, known = at // self.chosen.shape[1], values[at]
            whole = left[rows] + known[:, None] * atoms[k]
            atom = (self.weights[rows] * known) @ whole
            square = float(atom @ atom)
            if square > 0:
                values[at] = whole @ atom / square
                left[rows] = whole - values[at][:, None] * atom
                atoms[k] = atom
        return atoms

    def _solve_atoms(self) -> Floats:  # -> [K, d]
        """Return the atoms that come nearest to rows with given codes and values; those nobody uses stay."""
        from scipy.linalg import solve
        from scipy.sparse import csr_array

        count, codes = self.chosen.shape
        shape = (count, len(self.coder.atoms))
        values = self.values.reshape(-1).astype(np.float64)
        used = csr_array((values, self.chosen.reshape(-1), np.arange(count + 1) * codes), shape=shape)
        weighted = used * self.weights[:, None]
        gram = (used.T @ weighted).toarray()
        gram[np.diag_indices_from(gram)] += 1e-6 * (float(gram.diagonal().mean()) or 1.0)
        moved: Floats = solve(gram, weighted.T @ self.left, assume_a="pos").astype(np.float32)
        return self.coder.atoms + moved

    def bands(self) -> list[Band]:
        """Return the packed form."""
        rows, chosen, values = self.job.rows, self.chosen, self.values
        if len(self.ids) < rows.count:
            chosen = np.empty((rows.count, chosen.shape[1]), dtype=np.int32)
            values = np.empty(chosen.shape, dtype=np.float32)
            for start, block in rows.blocks():
                self.job.tell("coding", start / rows.count)
                part = slice(start, start + len(block))
                chosen[part], values[part] = self.coder(self._centred(block))
        kind = self.settings["values"]
        levels, stored = Levels.fit(values.reshape(-1)[:: -(-values.size // LEVELLED)], kind), np.empty_like(values)
        for start, block in rows.blocks():
            part = slice(start, start + len(block))
            stored[part] = self.coder.rounded(self._centred(block), chosen[part], values[part], levels)
        coded = Fixed.encode(chosen.astype(np.int64), stored, len(self.coder.atoms), kind)
        affine = None if self.mean is None else Affine(None, self.mean)
        return [Band(rows.count, coded, dictionary=self.dictionary, affine=affine)]


def decode(chosen: Codes, values: Floats, atoms: Floats) -> Floats:  # [n, s], [n, s], [K, d] -> [n, d]
    """Add up the atoms of rows, each times its value."""
    rows = values[:, :1] * atoms[chosen[:, 0]]
    for j in range(1, chosen.shape[1]):
        rows += values[:, j : j + 1] * atoms[chosen[:, j]]
    return rows
