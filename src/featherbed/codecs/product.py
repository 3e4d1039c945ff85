"""Product codes: row ≈ [C_1[b_1], ..., C_D[b_D]], plain or rotated (Jégou 2011, Ge 2013)."""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.codecs.additive import Basis
from featherbed.codecs.codec import Codec, CodecJob, Fit, Settings, matrix_size, stream_size
from featherbed.codecs.coding import Codes, enough, kmeans, move_centroids, nearest
from featherbed.codecs.rows import Floats
from featherbed.errors import ArgumentError
from featherbed.packed.band import Band, Fixed
from featherbed.packed.matrix import Matrix

ITERATIONS = 10  # of the initial fit, before any refinement


class ProductCodec(Codec):
    """``parts`` codes of ``bits`` bits, one for each range of columns; "opq" rotates them first."""

    def __init__(self, name: str) -> None:
        self.name = name

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays with these settings."""
        parts, bits, width = settings["parts"], settings["bits"], settings["width"]
        total = stream_size(rows, parts * bits)
        total += matrix_size(settings["kind"], parts << bits, width // parts)
        return total + (matrix_size("float16", width, dim) + 4 * dim if self.name == "opq" else 0)

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:
        """Return the most parts that fit for each number of bits, the most bits of code first."""
        found = []
        for bits in (8, 7, 6, 5, 4):
            shapes: list[Settings] = [
                {"parts": parts, "bits": bits, "width": width, "kind": kind}
                for parts, width in self._widths(dim, rank).items()
                for kind in ("float16", "int8")
            ]
            fitting = [s for s in shapes if self.size(rows, dim, **s) <= budget]
            found += fitting[-1:] if rows >= 2 << bits else []
        return sorted(found, key=lambda s: -s["parts"] * s["bits"])

    def work(self, dim: int, **settings: Any) -> float:
        """Return the work of a fit per row: "opq" fits dictionaries again for every rotation."""
        return float((200 if self.name == "opq" else 25) * dim << settings["bits"])

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:
        """Return settings with the total width of the parts."""
        parts, fitting = settings["parts"], self._widths(dim, rank)
        if parts not in fitting:
            near = min(fitting, key=lambda n: abs(n - parts))
            raise ArgumentError(
                f"{self.name}: {parts} parts do not fit {dim} columns: take {near}, for example"
            )
        return settings | {"width": fitting[parts]}

    def _widths(self, dim: int, rank: int) -> dict[int, int]:
        """Return the total width for each number of parts that fits the columns."""
        if self.name == "opq":
            widths = {parts: parts * -(-rank // parts) for parts in range(1, dim + 1)}
            return {parts: width for parts, width in widths.items() if width <= dim}
        return {parts: dim for parts in range(1, dim + 1) if dim % parts == 0}

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the matrix."""
        rest = {name: value for name, value in settings.items() if name != "bits"}
        return ProductFit(job, choices=1 << settings["bits"], rotated=self.name == "opq", **rest)


class ProductFit(Fit):
    """The state of a product fit: rotation, a dictionary for each part, codes of training rows.

    ``shared``: one dictionary for all parts. ``restarts``: runs of k-means, of which the best
    counts.
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
        rotated: bool = False,
        shared: bool = False,
        restarts: int = 1,
    ) -> None:
        self.job, self.parts, self.choices, self.kind = job, parts, choices, kind
        self.rotated, self.shared = rotated, shared
        self.ids = job.training
        self.rows, self.weights = job.rows.take(self.ids), job.importance[self.ids]
        job.progress("dictionaries", 0.0)
        self.basis = self._fit_rotation(width) if rotated else Basis()
        self._fit_dictionaries(self.basis.down(self.rows), restarts)

    def _fit_rotation(self, width: int) -> Basis:
        """Return the rotation of centered rows for these parts, fitted by faiss."""
        import faiss

        mean = np.average(self.rows, axis=0, weights=self.weights).astype(np.float32)
        rotation = faiss.OPQMatrix(self.rows.shape[1], self.parts, width)
        rotation.niter, rotation.niter_pq = ITERATIONS, 4
        rows = enough(self.rows - mean, max(self.choices, len(mean)))
        rotation.max_train_points = len(rows)
        rotation.pq = faiss.ProductQuantizer(width, self.parts, self.choices.bit_length() - 1)
        rotation.pq.cp.min_points_per_centroid = 1
        rotation.train(np.ascontiguousarray(rows))
        weight = faiss.vector_to_array(rotation.A).reshape(width, -1)
        return Basis(weight.astype(np.float16).astype(np.float32), mean)

    def _fit_dictionaries(self, inside: Floats, restarts: int) -> None:
        """Fit the dictionaries by k-means and find the codes."""
        seed = self.job.seed()
        groups = [enough(group, self.choices) for group in self._groups(inside)]
        atoms = [kmeans(g, self.choices, seed, ITERATIONS, restarts=restarts) for g in groups]
        self.atoms: Floats = np.stack(atoms)
        self.store_atoms()
        self.codes = self._encode(inside)

    def _groups(self, inside: Floats) -> list[Floats]:  # [n, width] -> [rows, width / D] each
        """Return the columns of each part; those of all parts as rows if the dictionary is
        shared."""
        across = inside.shape[1] // self.parts
        if self.shared:
            return [np.ascontiguousarray(inside).reshape(-1, across)]
        return [np.ascontiguousarray(piece) for piece in np.split(inside, self.parts, axis=1)]

    def store_atoms(self) -> None:
        """Round the atoms as stored."""
        flat = self.atoms.reshape(-1, self.atoms.shape[2])
        self.dictionary = Matrix.encode(flat, self.kind, scale_kind="float16")
        self.atoms = self.dictionary.dense().reshape(self.atoms.shape)

    def _encode(self, inside: Floats) -> Codes:
        found = [
            nearest(g, atoms) for g, atoms in zip(self._groups(inside), self.atoms, strict=True)
        ]
        return found[0].reshape(-1, self.parts) if self.shared else np.stack(found, axis=1)

    def refine(self, rounds: int) -> None:
        """Alternate: the best rotation (Procrustes), the weighted means of each code, new codes."""
        for done in range(rounds):
            self.job.progress("refining", done / rounds)
            if self.rotated and self.basis.mean is not None:
                parts = [self.atoms[p][self.codes[:, p]] for p in range(self.parts)]
                found, centered = np.concatenate(parts, axis=1), self.rows - self.basis.mean
                cross = (found * self.weights[:, None]).T @ centered  # [width, d]
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
            self.atoms[p] = move_centroids(self.atoms[p], codes[:, p], piece, weights)

    def all_codes(self) -> Codes:  # [V, D]
        """Return the codes of every row of the matrix."""
        rows, codes = self.job.rows, self.codes
        if len(self.ids) < rows.count:
            codes = np.empty((rows.count, self.parts), dtype=np.int32)
            for place, block in self.job.blocks():
                codes[place] = self._encode(self.basis.down(block))
        return codes

    def bands(self) -> list[Band]:
        """Return the packed form."""
        coded = Fixed.encode(self.all_codes(), None, self.choices, parts=not self.shared)
        rows, affine = self.job.rows.count, self.basis.affine
        return [Band(rows, coded, None, self.dictionary, "concat", affine=affine)]
