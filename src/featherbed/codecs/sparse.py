"""Sparse codes: a row is a weighted sum of a few atoms, row ≈ Σ_j v_j A[i_j] (+ mean).

All atoms have norm sqrt(d), so that their values share one table of levels, and the scales of int8
atoms fit float16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.codecs.clusters import by_importance
from featherbed.codecs.codec import Codec, CodecJob, Fit, Settings, matrix_size, stream_size
from featherbed.codecs.coding import Codes, kmeans
from featherbed.codecs.pursuit import SparseCoder, decode, nearest_atoms
from featherbed.codecs.rows import Floats
from featherbed.packed.band import Affine, Band, Fixed
from featherbed.packed.bits import width
from featherbed.packed.levels import ValueLevels
from featherbed.packed.matrix import Matrix, level_bits

TRAINING_ROWS = 1 << 15  # rows to which the dictionary is fitted, at most
LEVEL_VALUES = 1 << 20  # values to which the levels are fitted
ROUNDS = 8
MOST = 64  # codes per row
ANCHORS = (256, 500, 512, 1000, 1024, 2048)


class SparseCodec(Codec):
    """``codes`` of ``anchors`` atoms per row, with values.

    "ksvd": orthogonal matching pursuit over a fitted dictionary (k-SVD: Aharon et al. 2006,
    Rubinstein et al. 2008); "hash": the nearest centroids by cosine, values by least squares (Guo
    et al. 2017); "hash+ksvd": that, then k-SVD; "anchors": nonnegative values, as in Anchor &
    Transform (Liang et al. 2021).
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays with these settings."""
        anchors, bits = settings["anchors"], level_bits(settings["values"])
        total = stream_size(rows, settings["codes"] * (width(anchors) + bits))
        total += matrix_size(settings["kind"], anchors, dim)
        return total + (4 << bits if bits < 16 else 0) + (4 * dim if self.name == "ksvd" else 0)

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:  # noqa: ARG002
        """Return the most codes that fit for each number of anchors and kind of values."""
        found = []
        for anchors in (k for k in ANCHORS if k <= rows // 2):
            for values in ("int8", "int4"):
                shapes: list[Settings] = [
                    {"anchors": anchors, "values": values, "codes": codes, "kind": kind}
                    for codes in range(1, min(MOST, dim) + 1)
                    for kind in ("int8", "float16")
                ]
                found += [s for s in shapes if self.size(rows, dim, **s) <= budget][-1:]
        # in the order of errors on GloVe
        return sorted(found, key=lambda s: -s["codes"] * width(s["anchors"]) ** 1.5)

    def work(self, dim: int, **settings: Any) -> float:
        """Return the work of a fit for each row: all atoms are compared for every code."""
        return float(30 * dim * settings["anchors"] * settings["codes"])

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:  # noqa: ARG002
        """Return settings with no more codes than there are anchors."""
        return settings | {"codes": min(settings["codes"], settings["anchors"])}

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the matrix."""
        return SparseFit(job, self.name, centered=self.name == "ksvd", **settings)


class SparseFit(Fit):
    """The state of a sparse fit: the best dictionary, codes and values of the training rows.

    ``start``: the initial atoms are "centroids" of rows (faiss), or "rows".
    """

    refinable = True

    def __init__(
        self,
        job: CodecJob,
        name: str,
        *,
        anchors: int,
        codes: int,
        kind: str = "float32",
        values: str = "float32",
        centered: bool = False,
        start: str = "centroids",
    ) -> None:
        self.job, self.name, self.anchors, self.per_row = job, name, anchors, codes
        self.kind, self.value_kind = kind, values
        few = job.training_rows <= TRAINING_ROWS
        self.ids = job.training if few else job.rows.draw(TRAINING_ROWS, job.generator)
        self.mean: Floats | None = job.moments[0].astype(np.float32) if centered else None
        self.sample, self.weights = self._center(job.rows.take(self.ids)), job.importance[self.ids]
        job.progress("initial dictionary", 0.0)
        initial = self._centroids() if start == "centroids" else self._drawn_rows()
        self._code(initial, name.partition("+")[0])
        self.refine(0 if name == "hash" else ROUNDS)

    def _center(self, rows: Floats) -> Floats:
        return rows if self.mean is None else rows - self.mean

    def _centroids(self) -> Floats:
        """Return centroids of rows drawn by importance."""
        drawn = by_importance(self.sample, self.weights, self.job.generator)
        return kmeans(drawn, self.anchors, self.job.seed())

    def _drawn_rows(self) -> Floats:
        """Return distinct rows drawn by weighted squares; noise if there are too few."""
        rows, generator = self.sample, self.job.generator
        squares = self.weights * np.einsum("nd,nd->n", rows, rows, dtype=np.float64)
        nonzero = np.flatnonzero(squares)
        noise = generator.standard_normal((self.anchors, rows.shape[1])).astype(np.float32)
        if len(nonzero):
            share = squares[nonzero] / squares[nonzero].sum()
            count = min(self.anchors, len(nonzero))
            noise[:count] = rows[generator.choice(nonzero, count, replace=False, p=share)]
        return noise

    def _code(self, atoms: Floats, search: str) -> None:
        """Round atoms as stored, find codes for the rounded ones, and their residual."""
        lengths = np.sqrt(np.einsum("kd,kd->k", atoms, atoms))
        zero = np.flatnonzero(lengths < 1e-30)
        atoms[zero] = self.job.generator.standard_normal((len(zero), atoms.shape[1]))
        lengths[zero] = np.sqrt(np.einsum("kd,kd->k", atoms[zero], atoms[zero]))
        atoms = atoms * (np.sqrt(atoms.shape[1]) / lengths)[:, None].astype(np.float32)
        self.dictionary = Matrix.encode(atoms, self.kind, scale_kind="float16")
        self.coder = SparseCoder(self.dictionary.dense(), self.per_row, search)
        self.indices, self.values = self.coder(self.sample)
        self.left = self.sample - decode(self.indices, self.values, self.coder.atoms)
        self.error = float(self.weights @ np.einsum("nd,nd->n", self.left, self.left))

    def refine(self, rounds: int) -> None:
        """Alternate atoms (k-SVD or least squares) and codes; keep the best of all rounds."""
        kept = dict(self.__dict__)
        for done in range(rounds):
            self.job.progress("refining", done / rounds)
            if self.name.endswith("ksvd"):
                self._code(self._rotate_atoms(), "ksvd")
            else:
                codes = (self.indices, self.values, self.weights)
                self._code(nearest_atoms(self.sample, self.coder.atoms, *codes), self.name)
            if self.error < kept["error"]:
                kept = dict(self.__dict__)
        self.__dict__.update(kept)

    def _rotate_atoms(self) -> Floats:  # -> [K, d]
        """Return atoms after one power iteration each on the residual of their rows (k-SVD)."""
        atoms, left = self.coder.atoms.copy(), self.left.copy()
        values = self.values.reshape(-1).copy()
        order = np.argsort(self.indices, axis=None, kind="stable")
        ends = np.cumsum(np.bincount(self.indices.reshape(-1), minlength=len(atoms)))
        errors = self.weights * np.einsum("nd,nd->n", left, left)
        worst = iter(np.argsort(-errors)[: len(atoms)].tolist())
        for k, at in enumerate(np.split(order, ends[:-1])):
            if not len(at):
                atoms[k] = left[next(worst, 0)]  # an unused atom becomes the worst residual
                continue
            rows, known = at // self.indices.shape[1], values[at]
            whole = left[rows] + known[:, None] * atoms[k]
            atom = (self.weights[rows] * known) @ whole
            square = float(atom @ atom)
            if square > 0:
                values[at] = whole @ atom / square
                left[rows] = whole - values[at][:, None] * atom
                atoms[k] = atom
        return atoms

    def all_codes(self) -> tuple[Codes, Floats]:  # [V, s], [V, s]
        """Return the atoms of every row of the matrix and their values."""
        rows, indices, values = self.job.rows, self.indices, self.values
        if len(self.ids) < rows.count:
            indices = np.empty((rows.count, indices.shape[1]), dtype=np.int32)
            values = np.empty(indices.shape, dtype=np.float32)
            for place, block in self.job.blocks():
                indices[place], values[place] = self.coder(self._center(block))
        return indices, values

    def bands(self) -> list[Band]:
        """Return the packed form."""
        rows, (indices, values) = self.job.rows, self.all_codes()
        kind, stored = self.value_kind, np.empty_like(values)
        levels = ValueLevels.fit(values.reshape(-1)[:: -(-values.size // LEVEL_VALUES)], kind)
        for start, block in rows.blocks():
            at = slice(start, start + len(block))
            stored[at] = self.coder.round(self._center(block), indices[at], values[at], levels)
        coded = Fixed.encode(indices.astype(np.int64), stored, len(self.coder.atoms), kind)
        affine = None if self.mean is None else Affine(None, self.mean)
        return [Band(rows.count, coded, dictionary=self.dictionary, affine=affine)]
