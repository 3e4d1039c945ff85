"""Sparse codes: a row is a few atoms, each times a value, row ≈ Σ_j v_j A[i_j] (+ mean).

Atoms all have length sqrt(d), so that the values of all of them share one table of levels and scales of int8 atoms fit float16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.codecs.clusters import by_importance
from featherbed.codecs.codec import Codec, CodecJob, Fit, Settings, matrix_size, stream_size
from featherbed.codecs.kmeans import Codes, kmeans
from featherbed.codecs.principal import moments
from featherbed.codecs.pursuit import Coder, decode, nearest_atoms
from featherbed.codecs.rows import Floats
from featherbed.packed.band import Affine, Band
from featherbed.packed.bits import width
from featherbed.packed.codes import Fixed
from featherbed.packed.levels import Levels
from featherbed.packed.matrix import Matrix, level_bits

LEARN = 1 << 15  # rows the dictionary is learnt from, at most
LEVELLED = 1 << 20  # values the levels are chosen on
ROUNDS = 8
MOST = 64  # codes a row
ANCHORS = (256, 500, 512, 1000, 1024, 2048)


class SparseCodec(Codec):
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
        total = stream_size(rows, settings["codes"] * (width(anchors) + bits)) + matrix_size(
            settings["kind"], anchors, dim
        )
        return total + (4 << bits if bits < 16 else 0) + (4 * dim if self.name == "ksvd" else 0)

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:  # noqa: ARG002 - one signature
        """Return the most codes that fit, for each number of anchors and kind of values, the best promise first."""
        found = []
        for anchors in (k for k in ANCHORS if k <= rows // 2):
            for values in ("int8", "int4"):
                fixed: Settings = {"anchors": anchors, "values": values}
                counts = range(1, min(MOST, dim) + 1)
                shapes = [
                    fixed | {"codes": s, "kind": kind}
                    for s in counts
                    for kind in ("int8", "float16")
                ]
                found += [s for s in shapes if self.size(rows, dim, **s) <= budget][-1:]
        return sorted(
            found, key=lambda s: -s["codes"] * width(s["anchors"]) ** 1.5
        )  # as errors on GloVe go

    def work(self, dim: int, **settings: Any) -> float:
        """Return how long a fit takes for each row: all atoms are tried for every code."""
        return float(dim * settings["anchors"] * settings["codes"])

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:  # noqa: ARG002 - one signature
        """Return settings with no more codes than there are anchors."""
        return settings | {"codes": min(settings["codes"], settings["anchors"])}

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the matrix."""
        return SparseFit(job, self.name, centred=self.name == "ksvd", **settings)


class SparseFit(Fit):
    """The state of a sparse fit: the best dictionary so far, codes and values of the sample.

    ``start``: the first atoms are "centroids" of rows (faiss), or "rows" themselves.
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
        centred: bool = False,
        start: str = "centroids",
    ) -> None:
        self.job, self.name, self.anchors, self.per_row = job, name, anchors, codes
        self.kind, self.value_kind = kind, values
        self.ids = job.rows.draw(min(LEARN, job.learn), job.generator)
        self.mean: Floats | None = moments(job)[0].astype(np.float32) if centred else None
        self.sample, self.weights = self._centred(job.rows.take(self.ids)), job.importance[self.ids]
        job.tell("first dictionary", 0.0)
        first = self._centroids if start == "centroids" else self._drawn_rows
        self._code(first(), name.partition("+")[0])
        self.refine(0 if name == "hash" else ROUNDS)

    def _centred(self, rows: Floats) -> Floats:
        return rows if self.mean is None else rows - self.mean

    def _centroids(self) -> Floats:
        """Return centroids of rows drawn by importance."""
        drawn = by_importance(self.sample, self.weights, self.job.generator)
        return kmeans(drawn, self.anchors, self.job.seed())

    def _drawn_rows(self) -> Floats:
        """Return rows drawn by weighted squares, none twice; noise where there are too few."""
        rows, generator = self.sample, self.job.generator
        squares = self.weights * np.einsum("nd,nd->n", rows, rows, dtype=np.float64)
        there = np.flatnonzero(squares)
        noise = generator.standard_normal((self.anchors, rows.shape[1])).astype(np.float32)
        if len(there):
            share, count = squares[there] / squares[there].sum(), min(self.anchors, len(there))
            noise[:count] = rows[generator.choice(there, count, replace=False, p=share)]
        return noise

    def _code(self, atoms: Floats, how: str) -> None:
        """Round atoms to what is stored, find codes for the rounded ones, and what they leave."""
        lengths = np.sqrt(np.einsum("kd,kd->k", atoms, atoms))
        none = np.flatnonzero(lengths < 1e-30)
        atoms[none] = self.job.generator.standard_normal((len(none), atoms.shape[1]))
        lengths[none] = np.sqrt(np.einsum("kd,kd->k", atoms[none], atoms[none]))
        atoms = atoms * (np.sqrt(atoms.shape[1]) / lengths)[:, None].astype(np.float32)
        self.dictionary = Matrix.encode(atoms, self.kind, scale_kind="float16")
        self.coder = Coder(self.dictionary.dense(), self.per_row, how)
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
                moved = nearest_atoms(
                    self.sample, self.coder.atoms, self.chosen, self.values, self.weights
                )
                self._code(moved, self.name)
            if self.error < kept["error"]:
                kept = dict(self.__dict__)
        self.__dict__.update(kept)

    def _turn_atoms(self) -> Floats:  # -> [K, d]
        """Turn each atom towards what its rows leave without it: one step of the power method, values along (k-SVD)."""
        atoms, left, values = (
            self.coder.atoms.copy(),
            self.left.copy(),
            self.values.reshape(-1).copy(),
        )
        order = np.argsort(self.chosen, axis=None, kind="stable")
        ends = np.cumsum(np.bincount(self.chosen.reshape(-1), minlength=len(atoms)))
        worst = iter(
            np.argsort(-self.weights * np.einsum("nd,nd->n", left, left))[: len(atoms)].tolist()
        )
        for k, at in enumerate(np.split(order, ends[:-1])):
            if not len(at):
                atoms[k] = left[
                    next(worst, 0)
                ]  # nobody uses it: it becomes what the worst row lacks
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

    def all_codes(self) -> tuple[Codes, Floats]:  # [V, s], [V, s]
        """Return the atoms of every row of the matrix and their values."""
        rows, chosen, values = self.job.rows, self.chosen, self.values
        if len(self.ids) < rows.count:
            chosen = np.empty((rows.count, chosen.shape[1]), dtype=np.int32)
            values = np.empty(chosen.shape, dtype=np.float32)
            for start, block in rows.blocks():
                self.job.tell("coding", start / rows.count)
                part = slice(start, start + len(block))
                chosen[part], values[part] = self.coder(self._centred(block))
        return chosen, values

    def bands(self) -> list[Band]:
        """Return the packed form."""
        rows, (chosen, values) = self.job.rows, self.all_codes()
        kind = self.value_kind
        levels, stored = (
            Levels.fit(values.reshape(-1)[:: -(-values.size // LEVELLED)], kind),
            np.empty_like(values),
        )
        for start, block in rows.blocks():
            part = slice(start, start + len(block))
            stored[part] = self.coder.rounded(
                self._centred(block), chosen[part], values[part], levels
            )
        coded = Fixed.encode(chosen.astype(np.int64), stored, len(self.coder.atoms), kind)
        affine = None if self.mean is None else Affine(None, self.mean)
        return [Band(rows.count, coded, dictionary=self.dictionary, affine=affine)]
