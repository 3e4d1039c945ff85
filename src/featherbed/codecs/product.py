"""Product codes: row ≈ [C_1[b_1], ..., C_D[b_D]], the columns as they are or turned first (Jégou 2011, Ge 2013)."""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.codecs.additive import Basis
from featherbed.codecs.codec import Codec, CodecJob, Fit, Settings, matrix_size, stream_size
from featherbed.codecs.kmeans import Codes, enough, kmeans, nearest, sums_by_code
from featherbed.codecs.rows import Floats
from featherbed.errors import ArgumentError
from featherbed.packed.band import Band
from featherbed.packed.codes import Fixed
from featherbed.packed.matrix import Matrix

ITERATIONS = 25


class ProductCodec(Codec):
    """``parts`` codes of ``bits`` bits, one for each stretch of columns; "opq" turns the columns first."""

    def __init__(self, name: str) -> None:
        self.name = name

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays these settings make."""
        parts, bits, width = settings["parts"], settings["bits"], settings["width"]
        total = stream_size(rows, parts * bits) + matrix_size(
            settings["kind"], parts << bits, width // parts
        )
        return total + (matrix_size("float16", width, dim) + 4 * dim if self.name == "opq" else 0)

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:
        """Return the most parts that fit, for each number of bits; the most bits of code first."""
        found = []
        for bits in (8, 7, 6, 5, 4):
            shapes: list[Settings] = []
            for parts, width in self._widths(dim, rank).items():
                shapes += [
                    {"parts": parts, "bits": bits, "width": width, "kind": kind}
                    for kind in ("float16", "int8")
                ]
            fitting = [
                s for s in shapes if self.size(rows, dim, **s) <= budget and rows >= 2 << bits
            ]
            found += fitting[-1:]
        return sorted(found, key=lambda s: -s["parts"] * s["bits"])

    def work(self, dim: int, **settings: Any) -> float:
        """Return how long a fit takes for each row: "opq" learns the dictionaries anew for every rotation."""
        return float((28 if self.name == "opq" else 4) * dim << settings["bits"])

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:
        """Return settings with the width that belongs to the parts."""
        parts, fitting = settings["parts"], self._widths(dim, rank)
        if parts not in fitting:
            near = min(fitting, key=lambda n: abs(n - parts))
            raise ArgumentError(
                f"{self.name}: {parts} parts do not fit {dim} columns: take {near}, say"
            )
        return settings | {"width": fitting[parts]}

    def _widths(self, dim: int, rank: int) -> dict[int, int]:
        """Return the numbers of parts that fit the columns, and the width all parts have together."""
        across = {n: -(-rank // n) if self.name == "opq" else dim // n for n in range(1, dim + 1)}
        return {
            n: n * w
            for n, w in across.items()
            if (n * w <= dim if self.name == "opq" else n * w == dim)
        }

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the matrix."""
        rest = {name: value for name, value in settings.items() if name != "bits"}
        return ProductFit(job, choices=1 << settings["bits"], turned=self.name == "opq", **rest)


class ProductFit(Fit):
    """The state of a product fit: turned columns, a dictionary for each part, codes of the sample.

    ``shared``: one dictionary for all parts. ``restarts``: runs of k-means, the best of which is kept.
    """

    refinable = True

    def __init__(
        self,
        job: CodecJob,
        *,
        parts: int,
        choices: int,
        width: int,
        kind: str = "float32",
        turned: bool = False,
        shared: bool = False,
        restarts: int = 1,
    ) -> None:
        self.job, self.parts, self.choices, self.kind = job, parts, choices, kind
        self.turned, self.shared = turned, shared
        self.ids = job.rows.draw(job.learn, job.generator)
        self.rows, self.weights = job.rows.take(self.ids), job.importance[self.ids]
        job.tell("dictionaries", 0.0)
        self.basis = self._turn(width) if turned else Basis()
        self._learn(self.basis.down(self.rows), restarts)

    def _turn(self, width: int) -> Basis:
        """Return the rotation faiss learns for these parts, applied to centred rows."""
        import faiss

        mean = np.average(self.rows, axis=0, weights=self.weights).astype(np.float32)
        rotation = faiss.OPQMatrix(self.rows.shape[1], self.parts, width)
        rotation.niter, rotation.niter_pq = 6 if self.job.quick else ITERATIONS, 4
        rows = enough(self.rows - mean, max(self.choices, len(mean)))
        rotation.max_train_points = len(rows)
        rotation.pq = faiss.ProductQuantizer(width, self.parts, self.choices.bit_length() - 1)
        rotation.pq.cp.min_points_per_centroid = 1
        rotation.train(np.ascontiguousarray(rows))
        weight = faiss.vector_to_array(rotation.A).reshape(width, -1)
        return Basis(weight.astype(np.float16).astype(np.float32), mean)

    def _learn(self, inside: Floats, restarts: int) -> None:
        """Learn the dictionaries by k-means and find the codes."""
        seed = self.job.seed()
        groups = [enough(group, self.choices) for group in self._groups(inside)]
        self.atoms: Floats = np.stack(
            [
                kmeans(group, self.choices, seed, rounds=ITERATIONS, restarts=restarts)
                for group in groups
            ]
        )
        self.store_atoms()
        self.codes = self._encode(inside)

    def _groups(self, inside: Floats) -> list[Floats]:  # [n, width] -> [rows, width / D] each
        """Return the columns of each part, all below each other where the dictionary is shared."""
        across = inside.shape[1] // self.parts
        if self.shared:
            return [np.ascontiguousarray(inside).reshape(-1, across)]
        return [np.ascontiguousarray(piece) for piece in np.split(inside, self.parts, axis=1)]

    def store_atoms(self) -> None:
        """Round the atoms to what is stored."""
        flat = self.atoms.reshape(-1, self.atoms.shape[2])
        self.dictionary = Matrix.encode(flat, self.kind, scale_kind="float16")
        self.atoms = self.dictionary.dense().reshape(self.atoms.shape)

    def _encode(self, inside: Floats) -> Codes:
        found = [
            nearest(group, atoms)
            for group, atoms in zip(self._groups(inside), self.atoms, strict=True)
        ]
        return found[0].reshape(-1, self.parts) if self.shared else np.stack(found, axis=1)

    def refine(self, rounds: int) -> None:
        """Alternate: the rotation that fits best (Procrustes), weighted means of each code, codes anew."""
        for done in range(rounds):
            self.job.tell("refining", done / rounds)
            if self.turned and self.basis.mean is not None:
                found = np.concatenate(
                    [self.atoms[p][self.codes[:, p]] for p in range(self.parts)], axis=1
                )
                cross = (found * self.weights[:, None]).T @ (
                    self.rows - self.basis.mean
                )  # [width, d]
                left, _, right = np.linalg.svd(cross.astype(np.float64), full_matrices=False)
                self.basis.weight = (left @ right).astype(np.float16).astype(np.float32)
            inside = self.basis.down(self.rows)
            self._move_atoms(inside)
            self.store_atoms()
            self.codes = self._encode(inside)

    def _move_atoms(self, inside: Floats) -> None:
        """Move each atom that is used to the weighted mean of its rows."""
        repeats = self.parts if self.shared else 1
        weights = np.repeat(self.weights, repeats)
        codes = self.codes.reshape(-1, 1) if self.shared else self.codes
        for p, piece in enumerate(self._groups(inside)):
            totals = np.bincount(codes[:, p], weights, self.choices)
            known, sums = totals > 0, sums_by_code(codes[:, p], piece, weights, self.choices)
            self.atoms[p, known] = sums[known] / totals[known, None]

    def all_codes(self) -> Codes:  # [V, D]
        """Return the codes of every row of the matrix."""
        rows, codes = self.job.rows, self.codes
        if len(self.ids) < rows.count:
            codes = np.empty((rows.count, self.parts), dtype=np.int32)
            for start, block in rows.blocks():
                self.job.tell("coding", start / rows.count)
                codes[start : start + len(block)] = self._encode(self.basis.down(block))
        return codes

    def bands(self) -> list[Band]:
        """Return the packed form."""
        coded = Fixed.encode(self.all_codes(), None, self.choices, parts=not self.shared)
        return [
            Band(
                self.job.rows.count,
                coded,
                dictionary=self.dictionary,
                combine="concat",
                affine=self.basis.affine,
            )
        ]
